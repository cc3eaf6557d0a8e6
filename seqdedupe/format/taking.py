"""The rows of a batch that are kept, as a batch of their own, without taking it apart.

Rows that follow one another are a *run*, whose bytes are copied as they stand.
"""

import numpy as np

from seqdedupe.format.columns import (
    COLUMNS,
    DEDUPLICATION_ID_OFFSETS,
    DEDUPLICATION_IDS,
    EVENT_TIMES,
    FIELD_NUMBERS,
    KEY_OFFSETS,
    KEY_VALIDITY,
    KEYS,
    LINKS,
    PAYLOAD_OFFSETS,
    PAYLOAD_VALIDITY,
    PAYLOADS,
    PROPERTY_NAME_OFFSETS,
    PROPERTY_NAMES,
    PROPERTY_OFFSETS,
    PROPERTY_VALUE_OFFSETS,
    PROPERTY_VALUES,
    ROWS,
    SEQUENCE_IDS,
    load32,
    size,
    start,
)
from seqdedupe.format.jit import Bytes, Int64s, Uint8s, copy, for_kernels, kernel

_WHOLE, _NUMBERS, _OFFSETS, _VALUES, _VALIDITY = range(5)


def _kinds() -> Int64s:
    """What the columns hold that are cut; the others stay as they are."""
    kinds = np.full(COLUMNS, _WHOLE, np.int64)
    kinds[[SEQUENCE_IDS, EVENT_TIMES]] = _NUMBERS
    kinds[[KEY_OFFSETS, DEDUPLICATION_ID_OFFSETS, PAYLOAD_OFFSETS]] = _OFFSETS
    kinds[[PROPERTY_OFFSETS, PROPERTY_NAME_OFFSETS, PROPERTY_VALUE_OFFSETS]] = _OFFSETS
    kinds[[KEYS, DEDUPLICATION_IDS, PAYLOADS, PROPERTY_NAMES, PROPERTY_VALUES]] = _VALUES
    kinds[[KEY_VALIDITY, PAYLOAD_VALIDITY]] = _VALIDITY
    return kinds


def _offsets_of() -> Int64s:
    """Of each column of values, which one has its offsets."""
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
    """What stands before the bytes of a column. Returns where they go."""
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
    """A column of offsets, cut to `count` runs of `kept` values together."""
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
    """The bytes that belong to the offsets."""
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
    """A bitmap of rows."""
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
    """Writes the canonical encoding of the rows with this mark, of which there is one at least; how many bytes it has.

    The batch has one producer, whose link becomes its row before the first one kept, or none. `out` has room for all
    of it. As `Batch.take` and `Batch.encode`.
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
    # Those of the properties.
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
