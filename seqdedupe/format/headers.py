"""A record's header, which has a fixed width: the places of the values, and the function that writes a header.

`docs/internals/formats.md` shows the layout. In protobuf's encoding, header and body together are one element of the
field `records` of an answer. So a slice of a segment file is a valid answer. Offsets below are from the start of the
record.
"""

import struct

import google_crc32c
import numpy as np

from seqdedupe.format.jit import Bytes, Int64s, Uint8s, add64, for_kernels, kernel, load64, rotl64, shl64

# -- SipHash-2-4 (Aumasson and Bernstein) as a kernel. It shows that a header is one of ours.
#
# Only an owner of the key can compute the tag of given bytes. Words are signed numbers here, but only their bits
# matter.

SECRET_BYTES = 16

NO_KEY: Int64s = np.zeros(0, np.int64)
"""No key: tags are neither made nor checked. For records that were checked before."""

_V0, _V1, _V2, _V3 = 0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573


def key_of(secret: bytes) -> Int64s:
    """Return the key in the form that kernels take. The secret has SECRET_BYTES bytes."""
    return np.frombuffer(secret, "<i8").astype(np.int64)


@for_kernels
def _round(v0: int, v1: int, v2: int, v3: int) -> tuple[int, int, int, int]:
    v0 = add64(v0, v1)
    v1 = rotl64(v1, 13) ^ v0
    v0 = rotl64(v0, 32)
    v2 = add64(v2, v3)
    v3 = rotl64(v3, 16) ^ v2
    v0 = add64(v0, v3)
    v3 = rotl64(v3, 21) ^ v0
    v2 = add64(v2, v1)
    v1 = rotl64(v1, 17) ^ v2
    v2 = rotl64(v2, 32)
    return v0, v1, v2, v3


@for_kernels
def _take(v0: int, v1: int, v2: int, v3: int, word: int) -> tuple[int, int, int, int]:
    v0, v1, v2, v3 = _round(v0, v1, v2, v3 ^ word)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ word, v1, v2, v3


@kernel(bare=True, at_once=True)
def siphash(raw: Bytes, begin: int, end: int, key: Int64s) -> int:
    """Return the SipHash-2-4 of `raw[begin:end]`."""
    k0, k1 = int(key[0]), int(key[1])
    v0, v1, v2, v3 = _V0 ^ k0, _V1 ^ k1, _V2 ^ k0, _V3 ^ k1
    at = begin
    while at + 8 <= end:
        v0, v1, v2, v3 = _take(v0, v1, v2, v3, load64(raw, at))
        at += 8
    word = shl64((end - begin) & 0xFF, 56)
    for i in range(end - at):
        word |= shl64(int(raw[at + i]), 8 * i)
    v0, v1, v2, v3 = _take(v0, v1, v2, v3, word)
    v2 ^= 0xFF
    for _ in range(4):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3


FORMAT_VERSION = 2
TOKEN_BYTES = 16

# Tag of `records`, length in five bytes; then tag and value of fields 1 to 9, of 10 and 11, and the tag of field 12;
# its value; tag and length of the body.
CHECKED = struct.Struct("<B5sBIBqBqBqBqBqBIBIBQ")
CHECKSUMS = struct.Struct("<BIBIB")
TAG = struct.Struct("<q")
BODY = struct.Struct("<B5s")
HEADER_BYTES = CHECKED.size + CHECKSUMS.size + TAG.size + BODY.size

# The places of the values (their tags are one byte before them).
LENGTH_AT = 1
LENGTH_END = 6
VERSION_AT = 7
INCARNATION_AT = 12
FILE_OFFSET_AT = 21
BASE_INDEX_AT = 30
PUBLISH_TIME_AT = 39
SYNCED_AT = 48
ROWS_AT = 57
COLUMN_BYTES_AT = 62
OWNERSHIP_AT = 67
CHECKED_END = CHECKED.size
COLUMN_CRC_AT = CHECKED_END + 1
PAYLOAD_CRC_AT = COLUMN_CRC_AT + 5
TAG_AT = CHECKED_END + CHECKSUMS.size
BODY_AT = TAG_AT + TAG.size

RECORDS_TAG = 0x0A
VERSION_TAG = 1 << 3 | 5
COLUMN_CRC_TAG = 10 << 3 | 5
PAYLOAD_CRC_TAG = 11 << 3 | 5
TAG_TAG = 12 << 3 | 1
CONTROL_TAG = 13 << 3 | 2
MARKER_TAG = 14 << 3 | 2
BATCH_TAG = 15 << 3 | 2
MARKER = struct.Struct("<BqBB16s")
"""An encoded Marker: term and token."""
MARKER_BYTES = MARKER.size
TOKEN_AT = MARKER_BYTES - TOKEN_BYTES


def padded_varint(value: int) -> bytes:
    """Return a protobuf varint of five bytes for any value below 2^35."""
    return bytes(
        (
            value & 0x7F | 0x80,
            value >> 7 & 0x7F | 0x80,
            value >> 14 & 0x7F | 0x80,
            value >> 21 & 0x7F | 0x80,
            value >> 28 & 0x7F,
        )
    )


def header(
    body: bytes | memoryview,
    body_tag: int,
    *,
    rows: int,
    column_bytes: int,
    incarnation: int,
    file_offset: int,
    base_index: int,
    publish_time_ms: int,
    synced_offset: int,
    ownership: int,
    key: Int64s,
    after_body_bytes: int = 0,
) -> bytes:
    """Return the header of an encoded body. The record is the header followed by the body. With NO_KEY the tag is 0.

    `body_tag` is BATCH_TAG, CONTROL_TAG or MARKER_TAG. Only a batch has rows; other bodies consist only of columns. In
    a log a record ends with the body. In a record made for readers, `after_body_bytes` of other fields may follow the
    body.
    """
    tag_and_length = BODY.pack(body_tag, padded_varint(len(body)))
    checked = CHECKED.pack(
        RECORDS_TAG,
        padded_varint(HEADER_BYTES - LENGTH_END + len(body) + after_body_bytes),
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
        9 << 3 | 1,
        ownership,
    )
    view = np.frombuffer(body, np.uint8)  # it takes no memoryview, and a slice of bytes is a copy
    column_crc = google_crc32c.extend(google_crc32c.value(checked + tag_and_length), view[:column_bytes])
    payload_crc = google_crc32c.value(view[column_bytes:])
    tagged = checked + CHECKSUMS.pack(COLUMN_CRC_TAG, column_crc, PAYLOAD_CRC_TAG, payload_crc, TAG_TAG)
    tag = siphash(np.frombuffer(tagged, np.uint8), 0, TAG_AT, key) if len(key) else 0
    return tagged + TAG.pack(tag) + tag_and_length


def marker_record(
    term: int,
    token: bytes,
    *,
    incarnation: int,
    file_offset: int,
    next_index: int,
    publish_time_ms: int,
    synced_offset: int,
    key: Int64s,
) -> bytes:
    """Return a whole record: the start of an ownership."""
    body = marker_body(term, token)
    made = header(
        body,
        MARKER_TAG,
        rows=0,
        column_bytes=len(body),
        incarnation=incarnation,
        file_offset=file_offset,
        base_index=next_index,
        publish_time_ms=publish_time_ms,
        synced_offset=synced_offset,
        ownership=ownership_of(token),
        key=key,
    )
    return made + body


def marker_body(term: int, token: bytes) -> bytes:
    """Return an encoded Marker."""
    return MARKER.pack(1 << 3 | 1, term, 2 << 3 | 2, TOKEN_BYTES, token)


def with_tags(made: list[bytes], key: Int64s) -> list[memoryview]:
    """Return headers that were made with NO_KEY, with their tags. One call of a kernel computes all tags."""
    raw = np.frombuffer(b"".join(made), np.uint8).copy()
    put_tags(raw, len(made), key)
    view = memoryview(raw)  # type: ignore[arg-type]  # an array is a buffer
    return [view[at : at + HEADER_BYTES] for at in range(0, len(view), HEADER_BYTES)]


@kernel()
def put_tags(raw: Uint8s, count: int, key: Int64s) -> int:
    """Write the tags of `count` consecutive headers. Return `count`."""
    for k in range(count):
        at = k * HEADER_BYTES
        tag = siphash(raw, at, at + TAG_AT, key)
        for i in range(8):
            raw[at + TAG_AT + i] = tag >> (8 * i) & 0xFF
    return count


def ownership_of(token: bytes) -> int:
    """Return the ownership, as an unsigned number, in records that follow the marker with this token."""
    return int.from_bytes(token[:8], "little")
