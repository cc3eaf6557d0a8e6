"""The places of a batch's columns, and little-endian numbers in raw bytes. Nothing here is compiled.

A *place row* describes one batch in a buffer: an array of int64 with PLACES elements, filled by `layout` and `scan`.
Only `start` and `size` read the place of a column. Each other element has a name.
"""

import numpy as np

from seqdedupe.format.jit import (
    Bytes,
    Int32Column,
    Int64Column,
    Int64s,
    for_kernels,
    load32,
    load64,
    view32,
    view64,
)

__all__ = ["load32", "load64"]

# The columns of a batch, in the order in which they are encoded.
NAME_OFFSETS = 0
NAMES = 1
EPOCHS = 2
LINKS = 3
PRODUCER_INDEXES = 4
SEQUENCE_IDS = 5
EVENT_TIMES = 6
KEY_OFFSETS = 7
KEY_VALIDITY = 8
KEYS = 9
PROPERTY_OFFSETS = 10
PROPERTY_NAME_OFFSETS = 11
PROPERTY_NAMES = 12
PROPERTY_VALUE_OFFSETS = 13
PROPERTY_VALUES = 14
COMPLETE_UP_TO = 15
DEDUPLICATION_ID_OFFSETS = 16
DEDUPLICATION_IDS = 17
PAYLOAD_OFFSETS = 18
PAYLOAD_VALIDITY = 19
PAYLOADS = 20
COLUMNS = 21

FIELD_NUMBERS = (*range(1, 19), 31, 32, 33)
"""For each column, its field number in `Batch` (batch.proto)."""

# The other elements of a place row.
ROWS = 2 * COLUMNS
PRODUCERS = ROWS + 1
"""The number of producers; 0 in a batch of deduplication IDs without producers."""
COLUMNS_END = ROWS + 2
"""The place where the payload fields begin: recovery does not read beyond it."""
BAD = ROWS + 3
"""The row or producer at which a batch was found invalid, and the value that it has there instead."""
BASE_INDEX = ROWS + 4
PUBLISH_TIME_MS = ROWS + 5
RECORD_START = ROWS + 6
RECORD_END = ROWS + 7
TERM = ROWS + 8
"""The term of a marker; 0 in a batch and in a control record."""
SYNCED_OFFSET = ROWS + 9
OWNERSHIP = ROWS + 10
"""The ownership as a signed number: see `records.ownership`."""
PLACES = ROWS + 11


@for_kernels
def start(places: Int64s | list[int], column: int) -> int:
    """Return the place in the buffer where the column begins; 0 if it is omitted."""
    return places[2 * column]


@for_kernels
def size(places: Int64s | list[int], column: int) -> int:
    """Return the number of bytes of the column; 0 if it is omitted."""
    return places[2 * column + 1]


@for_kernels
def put(places: Int64s, column: int, start: int, size: int) -> None:
    """Set the place of the column."""
    places[2 * column] = start
    places[2 * column + 1] = size


@for_kernels
def int32_column(raw: Bytes, places: Int64s, column: int) -> Int32Column:
    """Return the values of a column of 32-bit numbers. In a kernel they are valid only while `raw` is in use there."""
    return view32(raw, start(places, column), size(places, column) // 4)


@for_kernels
def int64_column(raw: Bytes, places: Int64s, column: int) -> Int64Column:
    """Return the values of a column of 64-bit numbers, in the same way."""
    return view64(raw, start(places, column), size(places, column) // 8)


def _columns_of_fields() -> Int64s:
    columns = np.full(max(FIELD_NUMBERS) + 1, -1, np.int64)
    columns[list(FIELD_NUMBERS)] = range(COLUMNS)
    return columns


COLUMN_OF_FIELD = _columns_of_fields()
"""The column of each field number, -1 if there is none."""
