"""What the wrapped function gives: outputs, as they are published through the sidecar."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from seqdedupe.errors import error
from seqdedupe.limits import MAX_BATCH_BYTES, MAX_PAYLOAD_BYTES

MAX_OUTPUT_BYTES = MAX_PAYLOAD_BYTES - 4096
"""Of an output in all: what a Pulsar topic takes, with what sidecar and client add there, and any other one too."""
OVERHEAD_BYTES = 320
"""What an output takes at most beside its payload, key and properties: the producer's name, IDs, tags and lengths."""
PROPERTY_OVERHEAD_BYTES = 8

Callback = Callable[[Any, Any], object]


@dataclass(frozen=True, slots=True)
class Output:
    """A message for a topic, by its full name. `event_time_ms` is 0 where there is none."""

    topic: str
    payload: bytes
    key: bytes | None
    event_time_ms: int
    properties: Mapping[str, str]
    callback: Callback | None = None

    size_bytes: int = field(init=False)
    """What it takes in a batch, at most."""

    def __post_init__(self) -> None:
        # Once: it is asked for whenever a frame is made.
        size = OVERHEAD_BYTES + len(self.payload) + len(self.key or b"")
        for name, value in self.properties.items():
            size += (len(name) + len(value)) * 4 + PROPERTY_OVERHEAD_BYTES
        object.__setattr__(self, "size_bytes", size)


def check_fits(outputs: list[Output]) -> None:
    """Whether an input's outputs for a topic can be taken, all in one frame. Raises MESSAGE_TOO_LARGE."""
    for output in outputs:
        if output.size_bytes > MAX_OUTPUT_BYTES:
            raise error(
                "MESSAGE_TOO_LARGE",
                f"an output with a payload of {len(output.payload)} bytes takes {output.size_bytes} bytes with its key "
                f"and properties: at most {MAX_OUTPUT_BYTES} are taken",
            )
    if (size := sum(output.size_bytes for output in outputs)) > MAX_BATCH_BYTES:
        raise error(
            "MESSAGE_TOO_LARGE",
            f"the outputs of one input for {outputs[0].topic} take {size} bytes: at most {MAX_BATCH_BYTES} are taken",
        )
