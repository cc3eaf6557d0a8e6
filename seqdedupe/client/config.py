"""What may be told to a producer."""

from dataclasses import dataclass

from seqdedupe.errors import error
from seqdedupe.limits import MAX_BATCH_BYTES, MAX_BATCH_ROWS

DELIVERY_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class ProducerConfig:
    """How a producer gathers messages into batches and how much it has under way."""

    linger_ms: float = 1.0
    """A batch that is not full goes after so long, or after up to five times as long while 5,000 messages a second or
    more come; one that finds nothing in flight goes at once (as soon as the event loop gets its turn)."""

    max_batch_rows: int = 1000
    """A batch of so many messages is full; at most 65,536."""

    max_batch_bytes: int = 128 * 1024
    """A batch of about so many bytes is full; at most 8 MiB."""

    max_in_flight_batches: int = 32
    """`send` waits while so many batches have no receipt."""

    max_in_flight_bytes: int = 16 * 1024 * 1024
    """`send` waits while about so many bytes have no receipt, or are not known to be durable."""

    delivery_timeout_seconds: float | None = DELIVERY_TIMEOUT_SECONDS
    """The producer ends with OutcomeUnknownError if a batch has no receipt by then, with the reason of the last
    refusal. Two minutes, as in Kafka. None: it tries for ever, which is right for machinery that must not give up."""

    def __post_init__(self) -> None:
        most = {"max_batch_rows": MAX_BATCH_ROWS, "max_batch_bytes": MAX_BATCH_BYTES}
        for name in ("max_batch_rows", "max_batch_bytes", "max_in_flight_batches", "max_in_flight_bytes"):
            value = getattr(self, name)
            if not 1 <= value <= most.get(name, value):
                raise error("INVALID_REQUEST", f"{name} is {value}: it should be 1 to {most.get(name, 'any')}")
        for name in ("linger_ms", "delivery_timeout_seconds"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise error("INVALID_REQUEST", f"{name} is {value}: it should not be negative")
