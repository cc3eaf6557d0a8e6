"""Finds the columns of a canonical batch, and checks that the columns follow `batch.proto`.

A *place row* describes one batch in a buffer: an array of int64 with PLACES elements, filled by `layout` and `scan`.
Only `start` and `size` read the place of a column. Each other element has a name.

`layout` checks all batches that a client sends, and all batches that are read from a log. Two checks are in other
places: the look-up of names checks that names are UTF-8 and occur only once, and `decide` checks sessions and links.
"""

import numpy as np

from seqdedupe.format.jit import (
    Bytes,
    Int32Column,
    Int64Column,
    Int64s,
    Uint8s,
    copy,
    for_kernels,
    kernel,
    load32,
    load64,
    view32,
    view64,
)
from seqdedupe.limits import MAX_BATCH_ROWS, MAX_NAME_BYTES, MAX_PAYLOAD_BYTES

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
"""The row or producer at which a batch was found to be invalid, and the invalid value."""
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
    """Return the place in the buffer where the column begins; 0 if the column is omitted."""
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
    """Return the values of a column of 32-bit numbers. In a kernel, the values are valid only while the kernel still
    uses `raw`."""
    return view32(raw, start(places, column), size(places, column) // 4)


@for_kernels
def int64_column(raw: Bytes, places: Int64s, column: int) -> Int64Column:
    """Return the values of a column of 64-bit numbers, as `int32_column` does."""
    return view64(raw, start(places, column), size(places, column) // 8)


def _columns_of_fields() -> Int64s:
    columns = np.full(max(FIELD_NUMBERS) + 1, -1, np.int64)
    columns[list(FIELD_NUMBERS)] = range(COLUMNS)
    return columns


COLUMN_OF_FIELD = _columns_of_fields()
"""The column of each field number, -1 if there is none."""

# -- The check of a batch.

# The reasons why a batch is invalid.
CANONICAL = 0
NOT_CANONICAL = 1
"""The batch does not have the canonical form. It may be a legal but unusual encoding."""
NO_ROWS = 2
TOO_MANY_ROWS = 3
BAD_NAMES = 4
BAD_NAME_LENGTH = 5
BAD_PRODUCER_COLUMN = 6
BAD_PRODUCER_INDEX = 7
UNUSED_PRODUCER = 8
BAD_SEQUENCE_ID = 9
NOT_ASCENDING = 10
BAD_EVENT_TIMES = 11
BAD_KEYS = 12
BAD_PROPERTIES = 13
BAD_PAYLOADS = 14
PAYLOAD_TOO_LARGE = 15
BAD_COMPLETE_UP_TO = 16
BAD_DEDUPLICATION_IDS = 17

_ONE_BYTE_VARINT = 0x80


@kernel()
def offsets_fit(raw: Bytes, places: Int64s, offsets: int, values: int, blob_bytes: int) -> bool:
    """Return whether this column has `values + 1` offsets that begin with 0, never decrease, and end with the blob's
    size."""
    at = start(places, offsets)
    if size(places, offsets) != 4 * (values + 1) or load32(raw, at) != 0:
        return False
    before = 0
    for i in range(1, values + 1):
        here = load32(raw, at + 4 * i)
        if here < before:
            return False
        before = here
    return before == blob_bytes


@kernel()
def walk(raw: Bytes, begin: int, end: int, places: Int64s) -> int:
    """Find the fields of a canonically encoded batch in `raw[begin:end]`."""
    for column in range(COLUMNS):
        put(places, column, 0, 0)
    places[COLUMNS_END] = end
    at = begin
    last = -1
    while at < end:
        tag_at = at
        tag = int(raw[at])
        at += 1
        if tag >= _ONE_BYTE_VARINT:
            if at >= end or int(raw[at]) == 0 or int(raw[at]) >= _ONE_BYTE_VARINT:
                return NOT_CANONICAL
            tag = tag & 0x7F | int(raw[at]) << 7
            at += 1
        field = tag >> 3
        if tag & 7 != 2 or field >= COLUMN_OF_FIELD.shape[0]:
            return NOT_CANONICAL
        column = COLUMN_OF_FIELD[field]
        if column <= last:
            return NOT_CANONICAL
        if column >= PAYLOAD_OFFSETS and last < PAYLOAD_OFFSETS:
            places[COLUMNS_END] = tag_at
        last = column
        bytes_long = 0
        shift = 0
        while True:
            if at >= end or shift > 28:
                return NOT_CANONICAL
            byte = int(raw[at])
            at += 1
            bytes_long |= (byte & 0x7F) << shift
            if byte < _ONE_BYTE_VARINT:
                if byte == 0:
                    return NOT_CANONICAL
                break
            shift += 7
        if bytes_long > end - at:
            return NOT_CANONICAL
        put(places, column, at, bytes_long)
        at += bytes_long
    return CANONICAL


@kernel()
def check_producers(raw: Bytes, places: Int64s) -> int:
    """Check the columns of producers, and of each row's producer."""
    producers = size(places, EPOCHS) // 8
    places[PRODUCERS] = producers
    if producers < 1 or producers > places[ROWS]:
        return BAD_NAMES
    if size(places, EPOCHS) != 8 * producers or size(places, LINKS) != 8 * producers:
        return BAD_NAMES
    offsets = start(places, NAME_OFFSETS)
    if not offsets_fit(raw, places, NAME_OFFSETS, producers, size(places, NAMES)):
        return BAD_NAMES
    for p in range(producers):
        name_bytes = load32(raw, offsets + 4 * p + 4) - load32(raw, offsets + 4 * p)
        if name_bytes < 1 or name_bytes > MAX_NAME_BYTES:
            places[BAD] = p
            return BAD_NAME_LENGTH
    if producers == 1:
        if size(places, PRODUCER_INDEXES) != 0:
            return NOT_CANONICAL
    elif size(places, PRODUCER_INDEXES) != 4 * places[ROWS]:
        return BAD_PRODUCER_COLUMN
    if size(places, COMPLETE_UP_TO) != 0 and size(places, COMPLETE_UP_TO) != 8 * producers:
        return BAD_COMPLETE_UP_TO
    return CANONICAL


@kernel()
def check_order(raw: Bytes, places: Int64s) -> int:
    """Check that each producer's sequence IDs are in range and strictly ascending."""
    rows = places[ROWS]
    producers = places[PRODUCERS]
    ids = start(places, SEQUENCE_IDS)
    if producers == 1:
        before = -1
        for row in range(rows):
            here = load64(raw, ids + 8 * row)
            if here <= before:
                places[BAD] = row
                return BAD_SEQUENCE_ID if here < 0 else NOT_ASCENDING
            before = here
        return CANONICAL
    indexes = start(places, PRODUCER_INDEXES)
    highest = np.full(producers, -1, np.int64)
    for row in range(rows):
        p = load32(raw, indexes + 4 * row)
        if p < 0 or p >= producers:
            places[BAD] = row
            return BAD_PRODUCER_INDEX
        here = load64(raw, ids + 8 * row)
        if here <= highest[p]:
            places[BAD] = row
            return BAD_SEQUENCE_ID if here < 0 else NOT_ASCENDING
        highest[p] = here
    for p in range(producers):
        if highest[p] < 0:
            places[BAD] = p
            return UNUSED_PRODUCER
    return CANONICAL


@kernel()
def check_values(raw: Bytes, places: Int64s) -> int:
    """Check event times, keys, properties and payloads."""
    rows = places[ROWS]
    if size(places, EVENT_TIMES) != 0 and size(places, EVENT_TIMES) != 8 * rows:
        return BAD_EVENT_TIMES
    bitmap = (rows + 7) // 8
    validity = size(places, KEY_VALIDITY)
    if size(places, KEY_OFFSETS) == 0:
        if size(places, KEYS) != 0 or validity != 0:
            return BAD_KEYS
    elif (validity != 0 and validity != bitmap) or not offsets_fit(raw, places, KEY_OFFSETS, rows, size(places, KEYS)):
        return BAD_KEYS
    names = size(places, PROPERTY_NAME_OFFSETS)
    values = size(places, PROPERTY_VALUE_OFFSETS)
    if size(places, PROPERTY_OFFSETS) == 0:
        if names != 0 or values != 0 or size(places, PROPERTY_NAMES) != 0 or size(places, PROPERTY_VALUES) != 0:
            return BAD_PROPERTIES
    else:
        properties = names // 4 - 1
        if (
            properties < 0
            or not offsets_fit(raw, places, PROPERTY_OFFSETS, rows, properties)
            or not offsets_fit(raw, places, PROPERTY_NAME_OFFSETS, properties, size(places, PROPERTY_NAMES))
            or not offsets_fit(raw, places, PROPERTY_VALUE_OFFSETS, properties, size(places, PROPERTY_VALUES))
        ):
            return BAD_PROPERTIES
    validity = size(places, PAYLOAD_VALIDITY)
    offsets = start(places, PAYLOAD_OFFSETS)
    if (validity != 0 and validity != bitmap) or not offsets_fit(
        raw, places, PAYLOAD_OFFSETS, rows, size(places, PAYLOADS)
    ):
        return BAD_PAYLOADS
    if size(places, PAYLOADS) > MAX_PAYLOAD_BYTES:
        for row in range(rows):
            if load32(raw, offsets + 4 * row + 4) - load32(raw, offsets + 4 * row) > MAX_PAYLOAD_BYTES:
                places[BAD] = row
                return PAYLOAD_TOO_LARGE
    return CANONICAL


@kernel()
def layout_columns(raw: Bytes, begin: int, end: int, places: Int64s) -> int:
    """Do the same as `layout`, without the payload columns and values. Recovery needs only this part of a batch whose
    checksum is correct."""
    wrong = walk(raw, begin, end, places)
    if wrong != CANONICAL:
        return wrong
    has_producers = False
    for column in range(SEQUENCE_IDS + 1):
        has_producers = has_producers or size(places, column) != 0
    rows = size(places, SEQUENCE_IDS) // 8
    if not has_producers:
        rows = size(places, DEDUPLICATION_ID_OFFSETS) // 4 - 1
    places[ROWS] = rows
    if rows < 1 or (has_producers and size(places, SEQUENCE_IDS) != 8 * rows):
        return NO_ROWS
    if rows > MAX_BATCH_ROWS:
        return TOO_MANY_ROWS
    if size(places, DEDUPLICATION_ID_OFFSETS) == 0:
        if size(places, DEDUPLICATION_IDS) != 0:
            return BAD_DEDUPLICATION_IDS
    elif not offsets_fit(raw, places, DEDUPLICATION_ID_OFFSETS, rows, size(places, DEDUPLICATION_IDS)):
        return BAD_DEDUPLICATION_IDS
    if not has_producers:
        places[PRODUCERS] = 0
        return BAD_COMPLETE_UP_TO if size(places, COMPLETE_UP_TO) != 0 else CANONICAL
    wrong = check_producers(raw, places)
    if wrong != CANONICAL:
        return wrong
    return check_order(raw, places)


@kernel()
def layout(raw: Bytes, begin: int, end: int, places: Int64s) -> int:
    """Fill `places` (a place row) for the batch in `raw[begin:end]`. Return CANONICAL, or the reason why the batch is
    invalid."""
    wrong = layout_columns(raw, begin, end, places)
    if wrong != CANONICAL:
        return wrong
    return check_values(raw, places)


# -- The rows of a batch that are kept, as a separate batch, without decoding it.
#
# Consecutive rows are a *run*, whose bytes are copied unchanged.

_WHOLE, _NUMBERS, _OFFSETS, _VALUES, _VALIDITY = range(5)


def _kinds() -> Int64s:
    """Return the kind of content of each column. With these kinds, `take` cuts columns into rows. `take` copies columns
    of the kind `_WHOLE` unchanged."""
    kinds = np.full(COLUMNS, _WHOLE, np.int64)
    kinds[[SEQUENCE_IDS, EVENT_TIMES]] = _NUMBERS
    kinds[[KEY_OFFSETS, DEDUPLICATION_ID_OFFSETS, PAYLOAD_OFFSETS]] = _OFFSETS
    kinds[[PROPERTY_OFFSETS, PROPERTY_NAME_OFFSETS, PROPERTY_VALUE_OFFSETS]] = _OFFSETS
    kinds[[KEYS, DEDUPLICATION_IDS, PAYLOADS, PROPERTY_NAMES, PROPERTY_VALUES]] = _VALUES
    kinds[[KEY_VALIDITY, PAYLOAD_VALIDITY]] = _VALIDITY
    return kinds


def _offsets_of() -> Int64s:
    """Return, for each column of values, the column of its offsets."""
    columns = np.full(COLUMNS, -1, np.int64)
    columns[[KEYS, DEDUPLICATION_IDS, PAYLOADS]] = [KEY_OFFSETS, DEDUPLICATION_ID_OFFSETS, PAYLOAD_OFFSETS]
    columns[[PROPERTY_NAMES, PROPERTY_VALUES]] = [PROPERTY_NAME_OFFSETS, PROPERTY_VALUE_OFFSETS]
    return columns


_KIND = _kinds()
_OFFSETS_OF = _offsets_of()
_NUMBER = np.array(FIELD_NUMBERS, np.int64)


@for_kernels
def _put_varint(out: Uint8s, at: int, value: int) -> int:
    while value >= 0x80:
        out[at] = value & 0x7F | 0x80
        value >>= 7
        at += 1
    out[at] = value
    return at + 1


@for_kernels
def _put_field(out: Uint8s, at: int, column: int, bytes_long: int) -> int:
    """Write the tag and the length of a column. Return the place where the column's bytes begin."""
    return _put_varint(out, _put_varint(out, at, int(_NUMBER[column]) << 3 | 2), bytes_long)


@for_kernels
def _copy(out: Uint8s, at: int, raw: Bytes, begin: int, end: int) -> int:
    copy(out, at, raw, begin, end - begin)
    return at + end - begin


@for_kernels
def _offset(raw: Bytes, places: Int64s, column: int, row: int) -> int:
    return load32(raw, start(places, column) + 4 * row)


@kernel()
def _put_offsets(
    raw: Bytes, places: Int64s, column: int, runs: Int64s, count: int, kept: int, out: Uint8s, at: int
) -> int:
    """Write a column of offsets, cut to `count` runs of `kept` values together."""
    at = _put_field(out, at, column, 4 * (kept + 1))
    value = 0
    for k in range(4):
        out[at + k] = 0
    at += 4
    for run in range(count):
        shift = value - _offset(raw, places, column, int(runs[2 * run]))
        for row in range(int(runs[2 * run]), int(runs[2 * run + 1])):
            value = _offset(raw, places, column, row + 1) + shift
            for k in range(4):
                out[at + k] = (value >> (8 * k)) & 0xFF
            at += 4
    return at


@kernel()
def _put_values(raw: Bytes, places: Int64s, column: int, runs: Int64s, count: int, out: Uint8s, at: int) -> int:
    """Write the bytes that belong to the offsets."""
    offsets, begin = int(_OFFSETS_OF[column]), start(places, column)
    bytes_long = 0
    for run in range(count):
        bytes_long += _offset(raw, places, offsets, int(runs[2 * run + 1]))
        bytes_long -= _offset(raw, places, offsets, int(runs[2 * run]))
    if bytes_long == 0:
        return at
    at = _put_field(out, at, column, bytes_long)
    for run in range(count):
        first = begin + _offset(raw, places, offsets, int(runs[2 * run]))
        at = _copy(out, at, raw, first, begin + _offset(raw, places, offsets, int(runs[2 * run + 1])))
    return at


@kernel()
def _put_validity(
    raw: Bytes, places: Int64s, column: int, runs: Int64s, count: int, kept: int, out: Uint8s, at: int
) -> int:
    """Write a bitmap of rows."""
    bytes_long, begin = (kept + 7) // 8, start(places, column)
    at = _put_field(out, at, column, bytes_long)
    for k in range(bytes_long):
        out[at + k] = 0
    bit = 0
    for run in range(count):
        for row in range(int(runs[2 * run]), int(runs[2 * run + 1])):
            is_there = int(raw[begin + (row >> 3)]) >> (row & 7) & 1
            out[at + (bit >> 3)] |= is_there << (bit & 7)
            bit += 1
    return at + bytes_long


@kernel()
def take(raw: Bytes, places: Int64s, marks: Uint8s, mark: int, out: Uint8s) -> int:
    """Write the canonical encoding of the rows whose mark is `mark`. Return its number of bytes.

    At least one row must have the mark, and the batch at most one producer. The producer's link becomes the last row
    before the first row kept. `out` must have room for the whole encoding. The result is the same as the result of
    `Batch.take` followed by `Batch.encode`.
    """
    rows = int(places[ROWS])
    runs = np.empty(rows + 2, np.int64)
    count = kept = 0
    row = 0
    while row < rows:
        if int(marks[row]) != mark:
            row += 1
            continue
        runs[2 * count] = row
        while row < rows and int(marks[row]) == mark:
            row += 1
        runs[2 * count + 1] = row
        kept += row - int(runs[2 * count])
        count += 1
    first = int(runs[0])
    # The runs of the properties.
    has_properties = size(places, PROPERTY_OFFSETS) != 0
    of_properties = np.empty(2 * count if has_properties else 0, np.int64)
    properties = 0
    for k in range(len(of_properties)):
        of_properties[k] = _offset(raw, places, PROPERTY_OFFSETS, int(runs[k]))
        properties += int(of_properties[k]) if k & 1 else -int(of_properties[k])
    at = 0
    for column in range(COLUMNS):
        bytes_long, begin, kind = size(places, column), start(places, column), int(_KIND[column])
        is_of_properties = column >= PROPERTY_NAME_OFFSETS and column <= PROPERTY_VALUES
        if bytes_long == 0 or (properties == 0 and (is_of_properties or column == PROPERTY_OFFSETS)):
            continue
        if kind == _NUMBERS:
            at = _put_field(out, at, column, 8 * kept)
            for run in range(count):
                at = _copy(out, at, raw, begin + 8 * int(runs[2 * run]), begin + 8 * int(runs[2 * run + 1]))
        elif kind == _OFFSETS:
            if is_of_properties:
                at = _put_offsets(raw, places, column, of_properties, count, properties, out, at)
            else:
                at = _put_offsets(raw, places, column, runs, count, kept, out, at)
        elif kind == _VALUES:
            at = _put_values(raw, places, column, of_properties if is_of_properties else runs, count, out, at)
        elif kind == _VALIDITY:
            at = _put_validity(raw, places, column, runs, count, kept, out, at)
        else:
            if column == LINKS and first > 0:
                begin = start(places, SEQUENCE_IDS) + 8 * (first - 1)
            at = _put_field(out, at, column, bytes_long)
            at = _copy(out, at, raw, begin, begin + bytes_long)
    return at
