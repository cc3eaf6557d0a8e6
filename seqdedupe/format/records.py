"""The stored form of a batch or marker: a header of fixed width, then the batch. `docs/formats.md` draws it.

Header and batch together are one element of the answer's `records` in protobuf's encoding, so a slice of a segment
file is a valid answer. Offsets below are from the start of the record.
"""

import struct

import google_crc32c
import numpy as np

from seqdedupe.format.columns import (
    BASE_INDEX,
    COLUMNS_END,
    PLACES,
    PUBLISH_TIME_MS,
    RECORD_END,
    RECORD_START,
    ROWS,
    SYNCED_OFFSET,
    TERM,
)
from seqdedupe.format.crc import crc32c
from seqdedupe.format.jit import Bytes, Int64s, Int64s2, kernel, load32, load64
from seqdedupe.format.layout import CANONICAL, layout_columns

FORMAT_VERSION = 1
TOKEN_BYTES = 16
SECRET_BYTES = 16

# tag of `records`, length in five bytes; then tag and value of fields 1 to 8, 9 and 10; tag and length of the body.
_CHECKED = struct.Struct("<B5sBIBqBqBqBqBqBIBI")
_CHECKSUMS = struct.Struct("<BIBI")
_BODY = struct.Struct("<B5s")
HEADER_BYTES = _CHECKED.size + _CHECKSUMS.size + _BODY.size

# Where the values stand (their tags are a byte before them).
_LENGTH_AT = 1
_LENGTH_END = 6
_VERSION_AT = 7
_INCARNATION_AT = 12
_FILE_OFFSET_AT = 21
_BASE_INDEX_AT = 30
_PUBLISH_TIME_AT = 39
_SYNCED_AT = 48
_ROWS_AT = 57
_COLUMN_BYTES_AT = 62
_CHECKED_END = _CHECKED.size
_COLUMN_CRC_AT = _CHECKED_END + 1
_PAYLOAD_CRC_AT = _COLUMN_CRC_AT + 5
_BODY_AT = _CHECKED_END + _CHECKSUMS.size

_RECORDS_TAG = 0x0A
_COLUMN_CRC_TAG = 9 << 3 | 5
_PAYLOAD_CRC_TAG = 10 << 3 | 5
_MARKER_TAG = 14 << 3 | 2
_BATCH_TAG = 15 << 3 | 2
_MARKER = struct.Struct("<BqBB16s")
"""An encoded Marker: term and token."""

# What stopped a scan.
END = 0
"""The buffer ends with a whole record."""
INCOMPLETE = 1
"""The buffer ends within a record, as far as its length can be believed."""
DAMAGED = 2
"""What stands there is not a record of this topic at this place, or its checksum is wrong."""
NEWER = 3
"""An intact record of a newer format version."""
NOT_CONTIGUOUS = 4
"""An intact record, but its index is not the next one."""
FULL = 5
"""The table is full, the buffer is not at its end."""


def padded_varint(value: int) -> bytes:
    """A protobuf varint in five bytes whatever its value (below 2^35)."""
    return bytes(
        (
            value & 0x7F | 0x80,
            value >> 7 & 0x7F | 0x80,
            value >> 14 & 0x7F | 0x80,
            value >> 21 & 0x7F | 0x80,
            value >> 28 & 0x7F,
        )
    )


def batch_header(
    body: bytes | memoryview,
    *,
    rows: int,
    column_bytes: int,
    incarnation: int,
    file_offset: int,
    base_index: int,
    publish_time_ms: int,
    synced_offset: int,
    body_tag: int = _BATCH_TAG,
) -> bytes:
    """The header of an encoded batch; the record is this followed by the batch. A marker's has another tag."""
    tag_and_length = _BODY.pack(body_tag, padded_varint(len(body)))
    checked = _CHECKED.pack(
        _RECORDS_TAG,
        padded_varint(HEADER_BYTES - _LENGTH_END + len(body)),
        1 << 3 | 5,
        FORMAT_VERSION,
        2 << 3 | 1,
        incarnation,
        3 << 3 | 1,
        file_offset,
        4 << 3 | 1,
        base_index,
        5 << 3 | 1,
        publish_time_ms,
        6 << 3 | 1,
        synced_offset,
        7 << 3 | 5,
        rows,
        8 << 3 | 5,
        column_bytes,
    )
    view = np.frombuffer(body, np.uint8)  # it takes no memoryview, and a slice of bytes is a copy
    column_crc = google_crc32c.extend(google_crc32c.value(checked + tag_and_length), view[:column_bytes])
    payload_crc = google_crc32c.value(view[column_bytes:])
    return checked + _CHECKSUMS.pack(_COLUMN_CRC_TAG, column_crc, _PAYLOAD_CRC_TAG, payload_crc) + tag_and_length


def marker_record(
    term: int,
    token: bytes,
    *,
    incarnation: int,
    file_offset: int,
    next_index: int,
    publish_time_ms: int,
    synced_offset: int,
) -> bytes:
    """A whole record: the start of an ownership."""
    body = _MARKER.pack(1 << 3 | 1, term, 2 << 3 | 2, TOKEN_BYTES, token)
    return (
        batch_header(
            body,
            body_tag=_MARKER_TAG,
            rows=0,
            column_bytes=len(body),
            incarnation=incarnation,
            file_offset=file_offset,
            base_index=next_index,
            publish_time_ms=publish_time_ms,
            synced_offset=synced_offset,
        )
        + body
    )


def body_of(raw: bytes | memoryview, places: np.ndarray) -> bytes:
    """The encoded batch or marker of a scanned record."""
    return bytes(raw[places[RECORD_START] + HEADER_BYTES : places[RECORD_END]])


def marker_token(raw: bytes, places: np.ndarray) -> bytes:
    """The token of a scanned marker."""
    end = int(places[RECORD_END])
    return bytes(raw[end - TOKEN_BYTES : end])


def payload_is_intact(raw: bytes | memoryview, places: np.ndarray) -> bool:
    """Whether the payload part of a scanned record has its checksum. `scan` looks at header and columns only."""
    stored = int.from_bytes(raw[places[RECORD_START] + _PAYLOAD_CRC_AT :][:4], "little")
    return bool(google_crc32c.value(bytes(raw[places[COLUMNS_END] : places[RECORD_END]])) == stored)


def new_table(records: int) -> np.ndarray:
    """A table of place rows for `scan`."""
    return np.zeros((records, PLACES), np.int64)


@kernel()
def padded_length(raw: Bytes, at: int) -> int:
    """The value of a five-byte varint, or -1 if this is none."""
    size = 0
    for i in range(5):
        byte = int(raw[at + i])
        if (byte >= 0x80) != (i < 4):
            return -1
        size |= (byte & 0x7F) << (7 * i)
    return size


@kernel()
def scan_record(raw: Bytes, at: int, incarnation: int, file_offset: int, places: Int64s) -> int:
    """Reads the record at `at` into a place row: END if it is intact, else INCOMPLETE, DAMAGED or NEWER.

    Header and columns are checked, payloads are not. `file_offset` is where the record should say that it stands,
    or -1 to believe it.
    """
    left = raw.shape[0] - at
    if left < HEADER_BYTES:
        return INCOMPLETE
    size = padded_length(raw, at + _LENGTH_AT)
    body_size = padded_length(raw, at + _BODY_AT + 1)
    body_tag = int(raw[at + _BODY_AT])
    column_bytes = load32(raw, at + _COLUMN_BYTES_AT)
    if (
        int(raw[at]) != _RECORDS_TAG
        # The checksum does not cover its own tag and the next one's.
        or int(raw[at + _COLUMN_CRC_AT - 1]) != _COLUMN_CRC_TAG
        or int(raw[at + _PAYLOAD_CRC_AT - 1]) != _PAYLOAD_CRC_TAG
        or body_size < 0
        or size != HEADER_BYTES - _LENGTH_END + body_size
        or column_bytes < 0
        or column_bytes > body_size
        or load64(raw, at + _INCARNATION_AT) != incarnation
        or (file_offset >= 0 and load64(raw, at + _FILE_OFFSET_AT) != file_offset)
    ):
        return DAMAGED
    if left < HEADER_BYTES + column_bytes:
        return INCOMPLETE
    crc = crc32c(0, raw, at, at + _CHECKED_END)
    crc = crc32c(crc, raw, at + _BODY_AT, at + HEADER_BYTES + column_bytes)
    if crc != load32(raw, at + _COLUMN_CRC_AT) & 0xFFFFFFFF:
        return DAMAGED
    if load32(raw, at + _VERSION_AT) != FORMAT_VERSION:
        return NEWER
    end = at + HEADER_BYTES + body_size
    rows = load32(raw, at + _ROWS_AT)
    places[RECORD_START] = at
    places[RECORD_END] = end
    places[BASE_INDEX] = load64(raw, at + _BASE_INDEX_AT)
    places[PUBLISH_TIME_MS] = load64(raw, at + _PUBLISH_TIME_AT)
    places[SYNCED_OFFSET] = load64(raw, at + _SYNCED_AT)
    places[TERM] = 0
    if body_tag == _MARKER_TAG:
        # It has no payload: the checksum of nothing.
        if load32(raw, at + _PAYLOAD_CRC_AT) != 0:
            return DAMAGED
        places[ROWS] = 0
        places[COLUMNS_END] = end
        places[TERM] = load64(raw, at + HEADER_BYTES + 1)
        return END if left >= HEADER_BYTES + body_size else INCOMPLETE
    if left < HEADER_BYTES + body_size:
        return INCOMPLETE
    if body_tag != _BATCH_TAG or layout_columns(raw, at + HEADER_BYTES, end, places) != CANONICAL:
        return DAMAGED
    if places[ROWS] != rows or places[COLUMNS_END] != at + HEADER_BYTES + column_bytes:
        return DAMAGED
    return END


@kernel(nogil=True)
def scan(raw: Bytes, incarnation: int, file_offset: int, next_index: int, table: Int64s2, result: Int64s) -> int:
    """Reads the records of a buffer into `table`, one place row each, up to the first that cannot be read.

    `file_offset`: where the buffer begins in its file, or -1 not to check that. `next_index`: the index that the
    first record must have, or -1 to believe it; every later one must follow on. `result` gets how many records were
    read and where the first unread one begins. Returns why it stopped: END, INCOMPLETE, DAMAGED, NEWER,
    NOT_CONTIGUOUS or FULL.
    """
    at = 0
    count = 0
    why = END
    while at < raw.shape[0]:
        if count >= table.shape[0]:
            why = FULL
            break
        places = table[count]
        why = scan_record(raw, at, incarnation, file_offset + at if file_offset >= 0 else -1, places)
        if why != END:
            break
        if next_index >= 0 and places[BASE_INDEX] != next_index:
            why = NOT_CONTIGUOUS
            break
        next_index = places[BASE_INDEX] + places[ROWS]
        at = places[RECORD_END]
        count += 1
    result[0] = count
    result[1] = at
    return why


@kernel()
def span(raw: Bytes, result: Int64s) -> int:
    """What a slice of whole, checked records without markers covers.

    Into `result`: the index of its first message, that behind the first record, where the last record begins, the
    index of that one's first message, and that behind the last one. Returns how many records there are.
    """
    at = 0
    count = 0
    while at < raw.shape[0]:
        base = load64(raw, at + _BASE_INDEX_AT)
        behind = base + load32(raw, at + _ROWS_AT)
        if count == 0:
            result[0] = base
            result[1] = behind
        result[2] = at
        result[3] = base
        result[4] = behind
        at += _LENGTH_END + padded_length(raw, at + _LENGTH_AT)
        count += 1
    return count


@kernel(nogil=True)
def first_bad_payload(raw: Bytes, table: Int64s2, records: int) -> int:
    """The first of so many scanned records whose payload has not its checksum; -1 if all have."""
    for i in range(records):
        start = table[i, RECORD_START]
        crc = crc32c(0, raw, table[i, COLUMNS_END], table[i, RECORD_END])
        if crc != load32(raw, start + _PAYLOAD_CRC_AT) & 0xFFFFFFFF:
            return i
    return -1


@kernel(nogil=True)
def find_record(raw: Bytes, incarnation: int, file_offset: int) -> int:
    """Where in a buffer, which begins at that offset of its file, a header stands that names this topic and place.

    -1 if there is none. Nothing but its tag, incarnation and file offset is looked at.
    """
    for at in range(raw.shape[0] - HEADER_BYTES + 1):
        if (
            int(raw[at]) == _RECORDS_TAG
            and load64(raw, at + _INCARNATION_AT) == incarnation
            and load64(raw, at + _FILE_OFFSET_AT) == file_offset + at
        ):
            return at
    return -1
