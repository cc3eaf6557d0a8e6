"""The limits that everybody keeps to, those that are set for a log or a window, and the numbers that stand for
*none*."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

MAX_NAME_BYTES = 255
"""A topic's or producer's name, in UTF-8."""

MAX_TOKEN_BYTES = 6 * 1024
"""What a caller shows. gRPC takes 8 KiB for all that comes with a call."""

MIN_RSA_BITS = 2048
"""Of a key that signs tokens, or is a certificate's."""

MAX_SEQUENCE_ID = 2**63 - 1
NO_SEQUENCE_ID = -1
"""Stands for *none*: no message yet, no predecessor."""

MIN_EVENT_TIME_MS = -(2**63)
MAX_EVENT_TIME_MS = 2**63 - 1
"""An event time is any signed 64-bit number; 0 is none."""

NO_EPOCH = 0
"""That of a producer which nobody has opened, or nobody since it was forgotten."""

MAX_INDEX = 2**63 - 1
"""Of a message, and of where reading begins or ends."""

LINK_LEFT_OUT = -2
"""In `Batch.previous_sequence_ids`: the producer does not say what it sent before."""

MAX_BATCH_BYTES = 8 * 1024 * 1024
"""An encoded batch. One with the largest payload has room for keys and properties beside it."""

MAX_BATCH_ROWS = 65_536
MAX_DEDUPLICATION_ID_BYTES = 255
MIN_WINDOW_MEMORY_IN_MB = 4
"""Of `deduplication_window_memory_in_mb`. Less has no room for a chunk: what moves to a run, or goes, at once."""
MAX_PAYLOAD_BYTES = 5 * 1024 * 1024
"""Pulsar's `maxMessageSize`."""
MAX_PARTITIONS = 1024
"""Of a partitioned topic."""
MAX_OPEN_NAMES = 10_000
"""Names in one `Open`."""
MAX_NAMES_AT_ONCE = 65_536
"""Names in one `Register`, or in a part of what is imported."""
MAX_POSITION_BYTES = 255
"""A position in a broker's own log, which is the broker's own bytes."""
MAX_PLACE_BYTES = 8192
"""What a snapshot holds of its topic's log."""

NO_LIMIT = -1


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """How far back a window reaches at least: until one of these is reached by what came later. NO_LIMIT: never."""

    messages: int
    id_bytes: int = NO_LIMIT
    milliseconds: int = NO_LIMIT


@dataclass(frozen=True)
class FlushInterval:
    """When a log that syncs for itself has to: as soon as one of the two is reached. So it is by every commit, here."""

    messages: int = 1
    """So many are written, and not synced."""
    ms: int = 0
    """So long ago the first of them was written."""

    @cached_property
    def is_every_commit(self) -> bool:
        """Whether nothing is told before it is synced. Each frame asks."""
        return self.messages <= 1 or self.ms <= 0


class Retention(NamedTuple):
    """What is kept at least; None is no limit."""

    size_bytes: int | None = None
    """The oldest messages may go while those that are left take at least so much."""
    age_ms: int | None = None
    """Those may go that were published longer ago."""
