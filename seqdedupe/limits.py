"""The limits that apply to all parts of the project, the configurable limits of a log or a window, and the numbers that
mean *none*."""

from typing import NamedTuple

MAX_NAME_BYTES = 255
"""The maximum size of a topic's or producer's name, in bytes of UTF-8."""

MAX_TOKEN_BYTES = 6 * 1024
"""The maximum size of a caller's token in bytes. gRPC accepts 8 KiB for all metadata of a call."""

MIN_RSA_BITS = 2048
"""The minimum size in bits of an RSA key that signs tokens, or belongs to a certificate."""

MAX_SEQUENCE_ID = 2**63 - 1
NO_SEQUENCE_ID = -1
"""The value for *none*: no message yet, no predecessor."""

MIN_EVENT_TIME_MS = -(2**63)
MAX_EVENT_TIME_MS = 2**63 - 1
"""An event time is any signed 64-bit number; 0 is none."""

NO_EPOCH = 0
"""The epoch of a producer that no client has opened, or has opened since the producer was forgotten."""

MAX_INDEX = 2**63 - 1
"""The highest index of a message, and of the begin or end of a read."""

LINK_LEFT_OUT = -2
"""In `Batch.previous_sequence_ids`: the producer omits the ID of its previous message."""

MAX_BATCH_BYTES = 8 * 1024 * 1024
"""The maximum size of an encoded batch in bytes. A batch with the largest payload still has room for keys and
properties."""

MAX_BATCH_ROWS = 65_536
MAX_DEDUPLICATION_ID_BYTES = 255
MIN_WINDOW_MEMORY_IN_MB = 4
"""The minimum of `deduplication_window_memory_in_mb`. With less memory there would be no room for a chunk, which is the
unit that is moved to a run or dropped."""
MAX_PAYLOAD_BYTES = 5 * 1024 * 1024
"""Pulsar's `maxMessageSize`."""
MAX_PARTITIONS = 1024
"""The most partitions of a partitioned topic."""
MAX_OPEN_NAMES = 10_000
"""The most names in one `Open`."""
MAX_NAMES_AT_ONCE = 65_536
"""The maximum number of names in one `Register`, or in one part of an import."""
MAX_POSITION_BYTES = 255
"""The maximum size in bytes of a position in a broker's own log. The broker defines the contents of positions."""
MAX_PLACE_BYTES = 8192
"""The maximum size in bytes of the data that a snapshot stores about its topic's log."""

NO_LIMIT = -1


class WindowLimits(NamedTuple):
    """The limits of a window. A window contains an ID at least until later messages reach one of these limits. With
    NO_LIMIT, messages never reach this limit."""

    messages: int
    id_bytes: int = NO_LIMIT
    milliseconds: int = NO_LIMIT


class FlushInterval(NamedTuple):
    """Defines when a log that does its own syncs must sync: as soon as one of the two limits is reached. By default the
    log syncs every commit."""

    messages: int = 1
    """The number of messages written and not synced."""
    ms: int = 0
    """The maximum time since the oldest unsynced message was written, in milliseconds."""

    @property
    def is_every_commit(self) -> bool:
        """Return whether every append is synced before it is acknowledged. This is called for each frame."""
        return self.messages <= 1 or self.ms <= 0


class Retention(NamedTuple):
    """The amount of messages that a log keeps at least. None: no limit."""

    size_bytes: int | None = None
    """The oldest messages may be dropped as long as the remaining messages have at least this size."""
    age_ms: int | None = None
    """Messages published longer ago may be dropped."""
