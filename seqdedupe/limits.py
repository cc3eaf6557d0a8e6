"""The limits that all parts of the project keep, the limits set for a log or a window, and the numbers that mean
*none*."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

MAX_NAME_BYTES = 255
"""The most bytes of a topic's or producer's name, in UTF-8."""

MAX_TOKEN_BYTES = 6 * 1024
"""The most bytes of a caller's token. gRPC takes 8 KiB for all metadata of a call."""

MIN_RSA_BITS = 2048
"""The fewest bits of an RSA key that signs tokens, or belongs to a certificate."""

MAX_SEQUENCE_ID = 2**63 - 1
NO_SEQUENCE_ID = -1
"""The value for *none*: no message yet, no predecessor."""

MIN_EVENT_TIME_MS = -(2**63)
MAX_EVENT_TIME_MS = 2**63 - 1
"""An event time is any signed 64-bit number; 0 is none."""

NO_EPOCH = 0
"""The epoch of a producer that nobody has opened, or not since it was forgotten."""

MAX_INDEX = 2**63 - 1
"""The highest index of a message, and of the begin or end of a read."""

LINK_LEFT_OUT = -2
"""In `Batch.previous_sequence_ids`: the producer does not state the ID of its previous message."""

MAX_BATCH_BYTES = 8 * 1024 * 1024
"""The most bytes of an encoded batch. With the largest payload, it still has room for keys and properties."""

MAX_BATCH_ROWS = 65_536
MAX_DEDUPLICATION_ID_BYTES = 255
MIN_WINDOW_MEMORY_IN_MB = 4
"""The least `deduplication_window_memory_in_mb`. Less has no room for a chunk, the unit moved to a run or dropped."""
MAX_PAYLOAD_BYTES = 5 * 1024 * 1024
"""Pulsar's `maxMessageSize`."""
MAX_PARTITIONS = 1024
"""The most partitions of a partitioned topic."""
MAX_OPEN_NAMES = 10_000
"""The most names in one `Open`."""
MAX_NAMES_AT_ONCE = 65_536
"""The most names in one `Register`, or in one part of an import."""
MAX_POSITION_BYTES = 255
"""The most bytes of a position in a broker's own log. The broker defines them."""
MAX_PLACE_BYTES = 8192
"""The most bytes that a snapshot holds about its topic's log."""

NO_LIMIT = -1


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """The limits of a window. A window contains an ID at least until later messages reach one of these limits.
    NO_LIMIT: never."""

    messages: int
    id_bytes: int = NO_LIMIT
    milliseconds: int = NO_LIMIT


@dataclass(frozen=True)
class FlushInterval:
    """When a log that syncs itself must sync: as soon as one of the two limits is reached. The default is every
    commit."""

    messages: int = 1
    """The number of messages written and not synced."""
    ms: int = 0
    """The time since the first of them was written."""

    @cached_property
    def is_every_commit(self) -> bool:
        """Whether nothing is acknowledged before it is synced. Each frame asks."""
        return self.messages <= 1 or self.ms <= 0


class Retention(NamedTuple):
    """The amount of messages that a log keeps at least. None: no limit."""

    size_bytes: int | None = None
    """The oldest messages may be dropped while the remaining ones take at least this size."""
    age_ms: int | None = None
    """Messages published longer ago may be dropped."""
