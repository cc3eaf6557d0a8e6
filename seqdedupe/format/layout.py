"""Where a canonical batch's columns stand, and whether they are what `batch.proto` says.

The one check of everything that a client sends and of everything that is read back from a log. What it does not
look at: the names' UTF-8 and that none comes twice (their look-up does), and the sessions and links (`decide` does).
"""

import numpy as np

from seqdedupe.format.columns import (
    BAD,
    COLUMNS_END,
    EPOCHS,
    EVENT_TIMES,
    FIELDS,
    KEY_OFFSETS,
    KEY_VALIDITY,
    KEYS,
    LINKS,
    NAME_OFFSETS,
    NAMES,
    PAYLOAD_OFFSETS,
    PAYLOAD_VALIDITY,
    PAYLOADS,
    PRODUCER_INDEXES,
    PRODUCERS,
    PROPERTY_NAME_OFFSETS,
    PROPERTY_NAMES,
    PROPERTY_OFFSETS,
    PROPERTY_VALUE_OFFSETS,
    PROPERTY_VALUES,
    ROWS,
    SEQUENCE_IDS,
    load32,
    load64,
)
from seqdedupe.format.jit import kernel
from seqdedupe.limits import MAX_BATCH_ROWS, MAX_NAME_BYTES, MAX_PAYLOAD_BYTES

# What is wrong with a batch.
CANONICAL = 0
NOT_CANONICAL = 1
"""Not the form that is stored; a legal but unusual encoding may be behind it."""
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

_ONE_BYTE_VARINT = 0x80


@kernel("bool", "bytes", "int", "int", "int", "int")
def offsets_fit(raw, start, size, values, blob_size):  # type: ignore[no-untyped-def]
    """Whether these are `values + 1` offsets from 0 that never fall and end at the blob's size."""
    if size != 4 * (values + 1) or load32(raw, start) != 0:
        return False
    before = 0
    for i in range(1, values + 1):
        here = load32(raw, start + 4 * i)
        if here < before:
            return False
        before = here
    return before == blob_size


@kernel("int", "bytes", "int", "int", "int64s")
def walk(raw, start, end, places):  # type: ignore[no-untyped-def]
    """Finds the fields of a canonically encoded batch in `raw[start:end]`."""
    for i in range(2 * FIELDS + 2):
        places[i] = 0
    places[COLUMNS_END] = end
    at = start
    last = 0
    while at < end:
        tag = int(raw[at])
        at += 1
        if tag >= _ONE_BYTE_VARINT:
            if at >= end or int(raw[at]) != 1:
                return NOT_CANONICAL
            tag = tag - _ONE_BYTE_VARINT + (1 << 7)
            at += 1
        field = tag >> 3
        if tag & 7 != 2 or field <= last or field > FIELDS:
            return NOT_CANONICAL
        if field >= PAYLOAD_OFFSETS and last < PAYLOAD_OFFSETS:
            places[COLUMNS_END] = at - 2
        last = field
        size = 0
        shift = 0
        while True:
            if at >= end or shift > 28:
                return NOT_CANONICAL
            byte = int(raw[at])
            at += 1
            size |= (byte & 0x7F) << shift
            if byte < _ONE_BYTE_VARINT:
                if byte == 0:
                    return NOT_CANONICAL
                break
            shift += 7
        if size > end - at:
            return NOT_CANONICAL
        places[2 * field] = at
        places[2 * field + 1] = size
        at += size
    return CANONICAL


@kernel("int", "bytes", "int64s")
def check_producers(raw, places):  # type: ignore[no-untyped-def]
    """The columns of producers, and which row is whose."""
    producers = places[2 * EPOCHS + 1] // 8
    places[PRODUCERS] = producers
    if producers < 1 or producers > places[ROWS]:
        return BAD_NAMES
    if places[2 * EPOCHS + 1] != 8 * producers or places[2 * LINKS + 1] != 8 * producers:
        return BAD_NAMES
    offsets = places[2 * NAME_OFFSETS]
    if not offsets_fit(raw, offsets, places[2 * NAME_OFFSETS + 1], producers, places[2 * NAMES + 1]):
        return BAD_NAMES
    for p in range(producers):
        size = load32(raw, offsets + 4 * p + 4) - load32(raw, offsets + 4 * p)
        if size < 1 or size > MAX_NAME_BYTES:
            places[BAD] = p
            return BAD_NAME_LENGTH
    if producers == 1:
        if places[2 * PRODUCER_INDEXES + 1] != 0:
            return NOT_CANONICAL
    elif places[2 * PRODUCER_INDEXES + 1] != 4 * places[ROWS]:
        return BAD_PRODUCER_COLUMN
    return CANONICAL


@kernel("int", "bytes", "int64s")
def check_order(raw, places):  # type: ignore[no-untyped-def]
    """Each producer's sequence IDs: in range, and rising strictly."""
    rows = places[ROWS]
    producers = places[PRODUCERS]
    ids = places[2 * SEQUENCE_IDS]
    if producers == 1:
        before = -1
        for row in range(rows):
            here = load64(raw, ids + 8 * row)
            if here <= before:
                places[BAD] = row
                return BAD_SEQUENCE_ID if here < 0 else NOT_ASCENDING
            before = here
        return CANONICAL
    indexes = places[2 * PRODUCER_INDEXES]
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


@kernel("int", "bytes", "int64s")
def check_values(raw, places):  # type: ignore[no-untyped-def]
    """Event times, keys, properties and payloads."""
    rows = places[ROWS]
    if places[2 * EVENT_TIMES + 1] != 0 and places[2 * EVENT_TIMES + 1] != 8 * rows:
        return BAD_EVENT_TIMES
    bitmap = (rows + 7) // 8
    validity = places[2 * KEY_VALIDITY + 1]
    if places[2 * KEY_OFFSETS + 1] == 0:
        if places[2 * KEYS + 1] != 0 or validity != 0:
            return BAD_KEYS
    elif (validity != 0 and validity != bitmap) or not offsets_fit(
        raw, places[2 * KEY_OFFSETS], places[2 * KEY_OFFSETS + 1], rows, places[2 * KEYS + 1]
    ):
        return BAD_KEYS
    names = places[2 * PROPERTY_NAME_OFFSETS + 1]
    values = places[2 * PROPERTY_VALUE_OFFSETS + 1]
    if places[2 * PROPERTY_OFFSETS + 1] == 0:
        if names != 0 or values != 0 or places[2 * PROPERTY_NAMES + 1] != 0 or places[2 * PROPERTY_VALUES + 1] != 0:
            return BAD_PROPERTIES
    else:
        properties = names // 4 - 1
        if (
            properties < 0
            or not offsets_fit(raw, places[2 * PROPERTY_OFFSETS], places[2 * PROPERTY_OFFSETS + 1], rows, properties)
            or not offsets_fit(
                raw, places[2 * PROPERTY_NAME_OFFSETS], names, properties, places[2 * PROPERTY_NAMES + 1]
            )
            or not offsets_fit(
                raw, places[2 * PROPERTY_VALUE_OFFSETS], values, properties, places[2 * PROPERTY_VALUES + 1]
            )
        ):
            return BAD_PROPERTIES
    validity = places[2 * PAYLOAD_VALIDITY + 1]
    offsets = places[2 * PAYLOAD_OFFSETS]
    if (validity != 0 and validity != bitmap) or not offsets_fit(
        raw, offsets, places[2 * PAYLOAD_OFFSETS + 1], rows, places[2 * PAYLOADS + 1]
    ):
        return BAD_PAYLOADS
    if places[2 * PAYLOADS + 1] > MAX_PAYLOAD_BYTES:
        for row in range(rows):
            if load32(raw, offsets + 4 * row + 4) - load32(raw, offsets + 4 * row) > MAX_PAYLOAD_BYTES:
                places[BAD] = row
                return PAYLOAD_TOO_LARGE
    return CANONICAL


@kernel("int", "bytes", "int", "int", "int64s")
def layout_columns(raw, start, end, places):  # type: ignore[no-untyped-def]
    """`layout` without the payload columns and values: what recovery needs of a batch whose checksum is right."""
    wrong = walk(raw, start, end, places)
    if wrong != CANONICAL:
        return wrong
    rows = places[2 * SEQUENCE_IDS + 1] // 8
    places[ROWS] = rows
    if rows < 1 or places[2 * SEQUENCE_IDS + 1] != 8 * rows:
        return NO_ROWS
    if rows > MAX_BATCH_ROWS:
        return TOO_MANY_ROWS
    wrong = check_producers(raw, places)
    if wrong != CANONICAL:
        return wrong
    return check_order(raw, places)


@kernel("int", "bytes", "int", "int", "int64s")
def layout(raw, start, end, places):  # type: ignore[no-untyped-def]
    """Fills `places` (a place row) for the batch in `raw[start:end]`; CANONICAL, or what is wrong with it."""
    wrong = layout_columns(raw, start, end, places)
    if wrong != CANONICAL:
        return wrong
    return check_values(raw, places)
