"""Little-endian numbers in raw bytes, and the places where a batch's columns stand.

A *place row* describes one batch in a buffer: an array of int64 with PLACES elements, filled by `layout` and `scan`.
"""

from seqdedupe.format.jit import load32, load64

__all__ = ["load32", "load64"]

# Field numbers of Batch (batch.proto): field f starts at `places[2 * f]` and is `places[2 * f + 1]` bytes long.
NAME_OFFSETS = 1
NAMES = 2
EPOCHS = 3
LINKS = 4
PRODUCER_INDEXES = 5
SEQUENCE_IDS = 6
EVENT_TIMES = 7
KEY_OFFSETS = 8
KEY_VALIDITY = 9
KEYS = 10
PROPERTY_OFFSETS = 11
PROPERTY_NAME_OFFSETS = 12
PROPERTY_NAMES = 13
PROPERTY_VALUE_OFFSETS = 14
PROPERTY_VALUES = 15
PAYLOAD_OFFSETS = 16
PAYLOAD_VALIDITY = 17
PAYLOADS = 18
FIELDS = 18

# The other elements of a place row.
ROWS = 38
PRODUCERS = 39
COLUMNS_END = 40
"""Where the payload fields begin: recovery does not read on from here."""
BAD = 41
"""The row or producer at which a batch was found wrong, and what it has there instead."""
BASE_INDEX = 42
PUBLISH_TIME_MS = 43
RECORD_START = 44
RECORD_END = 45
TERM = 46
"""In a marker, its term; 0 in a batch."""
SYNCED_OFFSET = 47
PLACES = 48
