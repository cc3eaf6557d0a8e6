"""What may be told to a consumer."""

from dataclasses import dataclass
from typing import Literal

from seqdedupe.errors import error
from seqdedupe.names import topic_name

Poison = Literal["stop", "dead letter", "retry later"]

_HINT = "docs/consumer.md lists what a consumer takes."


@dataclass(frozen=True, slots=True)
class ConsumerConfig:
    """How much a transaction holds, and what becomes of a message that the handler cannot be brought to take."""

    max_batch_messages: int = 1000
    """A transaction has at most so many messages, and never waits for more than are there."""

    longest_transaction_ms: int = 5_000
    """A transaction that has taken so long takes no further message. A call of the handler is not cut short: with
    `in_batches` the next one gets fewer messages."""

    max_attempts: int = 5
    """So often a message is given to the handler before it is poison: in place, all others wait."""

    first_backoff_ms: int = 100
    """The pause before the second attempt; each one after that is twice as long, up to `longest_backoff_ms`."""

    longest_backoff_ms: int = 5_000

    poison: Poison = "stop"
    """What becomes of it then: the consumer stops; or the message goes to the dead letters; or it waits in a table, and
    what comes later with its key behind it, to be tried again."""

    dead_letter_topic: str = ""
    """Dead letters go on to this topic of deduplication IDs; without one they stay in the table, for people."""

    max_retries: int = 10
    """With "retry later": so often it is tried again, before it goes to the dead letters."""

    first_retry_delay_ms: int = 1_000
    """The time until the first of these; each one after that is twice as long, up to `longest_retry_delay_ms`."""

    longest_retry_delay_ms: int = 600_000

    def __post_init__(self) -> None:
        if self.poison not in ("stop", "dead letter", "retry later"):
            what = f"poison is {self.poison!r}: it should be 'stop', 'dead letter' or 'retry later'"
            raise error("INVALID_OPTION", what, hint=_HINT)
        if self.dead_letter_topic:
            topic_name(self.dead_letter_topic)
        for name in ("max_batch_messages", "longest_transaction_ms", "max_attempts", "max_retries"):
            if getattr(self, name) < 1:
                raise error("INVALID_OPTION", f"{name} is {getattr(self, name)}: it should be 1 or more", hint=_HINT)
        for name in ("first_backoff_ms", "longest_backoff_ms", "first_retry_delay_ms", "longest_retry_delay_ms"):
            if getattr(self, name) < 0:
                raise error("INVALID_OPTION", f"{name} is {getattr(self, name)}: it cannot be negative", hint=_HINT)

    def backoff_ms(self, failures: int) -> int:
        """The pause after so many failures in place."""
        return _doubled(self.first_backoff_ms, failures, self.longest_backoff_ms)

    def retry_delay_ms(self, retries: int) -> int:
        """The time until the next retry after so many."""
        return _doubled(self.first_retry_delay_ms, retries + 1, self.longest_retry_delay_ms)


def _doubled(first: int, times: int, most: int) -> int:
    # The power is bounded, or its digits would grow with the attempts of a year.
    return int(min(first << min(times - 1, 32), most))
