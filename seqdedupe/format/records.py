"""Reading stored records: the functions convert a buffer of records to a table of place rows. They check everything
except the payloads."""

import numpy as np

from seqdedupe.format.headers import (
    BASE_INDEX_AT,
    BATCH_TAG,
    BODY_AT,
    CHECKED_END,
    COLUMN_BYTES_AT,
    COLUMN_CRC_AT,
    COLUMN_CRC_TAG,
    CONTROL_TAG,
    FILE_OFFSET_AT,
    FORMAT_VERSION,
    HEADER_BYTES,
    INCARNATION_AT,
    LENGTH_AT,
    LENGTH_END,
    MARKER_BYTES,
    MARKER_TAG,
    OWNERSHIP_AT,
    PAYLOAD_CRC_AT,
    PAYLOAD_CRC_TAG,
    PUBLISH_TIME_AT,
    RECORDS_TAG,
    ROWS_AT,
    SYNCED_AT,
    TAG_AT,
    TAG_TAG,
    TOKEN_AT,
    TOKEN_BYTES,
    VERSION_AT,
    VERSION_TAG,
    siphash,
)
from seqdedupe.format.jit import Bytes, Int64s, Int64s2, crc_step, kernel, load32, load64
from seqdedupe.format.layout import (
    BASE_INDEX,
    CANONICAL,
    COLUMNS_END,
    OWNERSHIP,
    PLACES,
    PRODUCERS,
    PUBLISH_TIME_MS,
    RECORD_END,
    RECORD_START,
    ROWS,
    SYNCED_OFFSET,
    TERM,
    layout_columns,
)

# -- CRC32C (Castagnoli) as a kernel, eight bytes per step, for scanning many small records without leaving the loop.

_POLYNOMIAL = 0x82F63B78


def _tables() -> np.ndarray:
    """Return eight tables of 256 CRC remainders each. Table k has the remainder of each byte followed by k zero
    bytes."""
    tables = np.zeros((8, 256), np.int64)
    for byte in range(256):
        remainder = byte
        for _ in range(8):
            remainder = (remainder >> 1) ^ (_POLYNOMIAL if remainder & 1 else 0)
        tables[0, byte] = remainder
    for k in range(1, 8):
        tables[k] = (tables[k - 1] >> 8) ^ tables[0, tables[k - 1] & 0xFF]
    return tables


TABLES = _tables()

if crc_step is None:

    @kernel(at_once=True)
    def crc32c(before: int, raw: Bytes, start: int, end: int) -> int:
        """Return the checksum of the bytes with the checksum `before` (0: no bytes) followed by `raw[start:end]`."""
        crc = before ^ 0xFFFFFFFF
        at = start
        while at + 8 <= end:
            low = (load32(raw, at) & 0xFFFFFFFF) ^ crc
            high = load32(raw, at + 4) & 0xFFFFFFFF
            crc = (
                TABLES[7, low & 0xFF]
                ^ TABLES[6, (low >> 8) & 0xFF]
                ^ TABLES[5, (low >> 16) & 0xFF]
                ^ TABLES[4, low >> 24]
                ^ TABLES[3, high & 0xFF]
                ^ TABLES[2, (high >> 8) & 0xFF]
                ^ TABLES[1, (high >> 16) & 0xFF]
                ^ TABLES[0, high >> 24]
            )
            at += 8
        while at < end:
            crc = (crc >> 8) ^ TABLES[0, (crc ^ int(raw[at])) & 0xFF]
            at += 1
        return crc ^ 0xFFFFFFFF

else:
    _LANE_BYTES = 512
    """The instruction takes three cycles and one can be begun in each: three stretches side by side."""

    def _lane_tables() -> np.ndarray:
        """Return four tables: the value of each byte of a remainder after `_LANE_BYTES` zero bytes."""
        tables = np.zeros((4, 256), np.int64)
        for place in range(4):
            remainders = np.arange(256, dtype=np.int64) << (8 * place)
            for _ in range(_LANE_BYTES):
                remainders = (remainders >> 8) ^ TABLES[0, remainders & 0xFF]
            tables[place] = remainders
        return tables

    LANES = _lane_tables()

    @kernel(at_once=True)
    def crc32c(before: int, raw: Bytes, start: int, end: int) -> int:
        """Return the same checksum, computed by the processor's CRC instruction, which is many times as fast."""
        crc = before ^ 0xFFFFFFFF
        at = start
        while at + 3 * _LANE_BYTES <= end:
            second = third = 0
            for here in range(at, at + _LANE_BYTES, 8):
                crc = crc_step(crc, load64(raw, here))
                second = crc_step(second, load64(raw, here + _LANE_BYTES))
                third = crc_step(third, load64(raw, here + 2 * _LANE_BYTES))
            for lane in (second, third):
                crc = (
                    LANES[0, crc & 0xFF]
                    ^ LANES[1, (crc >> 8) & 0xFF]
                    ^ LANES[2, (crc >> 16) & 0xFF]
                    ^ LANES[3, crc >> 24]
                    ^ lane
                )
            at += 3 * _LANE_BYTES
        while at + 8 <= end:
            crc = crc_step(crc, load64(raw, at))
            at += 8
        while at < end:
            crc = (crc >> 8) ^ TABLES[0, (crc ^ int(raw[at])) & 0xFF]
            at += 1
        return crc ^ 0xFFFFFFFF


# The reasons why a scan stopped.
END = 0
"""The buffer ends with a whole record."""
INCOMPLETE = 1
"""The buffer ends within a record, if its length is right."""
DAMAGED = 2
"""There is no record of this topic for this place, or its checksum is wrong."""
NEWER = 3
"""An intact record of a newer format version."""
NOT_CONTIGUOUS = 4
"""An intact record, but its index is not the next one."""
FULL = 5
"""The table is full before the end of the buffer."""
OLDER = 6
"""A record of an earlier format version."""
OTHER_OWNER = 7
"""An intact record, but not written under the marker before it."""


def ownership(places: np.ndarray) -> int:
    """Return the ownership of a scanned record, as an unsigned number."""
    return int(places[OWNERSHIP]) % 2**64


def body_of(raw: bytes | memoryview, places: np.ndarray) -> bytes:
    """Return the encoded batch, marker or control of a scanned record."""
    return bytes(raw[places[RECORD_START] + HEADER_BYTES : places[RECORD_END]])


def marker_token(raw: bytes, places: np.ndarray) -> bytes:
    """Return the token of a scanned marker."""
    end = int(places[RECORD_END])
    return bytes(raw[end - TOKEN_BYTES : end])


def new_table(records: int) -> np.ndarray:
    """Return a table of place rows for `scan`."""
    return np.zeros((records, PLACES), np.int64)


@kernel()
def padded_length(raw: Bytes, at: int) -> int:
    """Return the value of a five-byte varint; -1 if the bytes are not a five-byte varint."""
    size = 0
    for i in range(5):
        byte = int(raw[at + i])
        if (byte >= 0x80) != (i < 4):
            return -1
        size |= (byte & 0x7F) << (7 * i)
    return size


@kernel()
def scan_record(raw: Bytes, at: int, incarnation: int, file_offset: int, key: Int64s, places: Int64s) -> int:
    """Read the record at `at` into a place row. Return END if it is intact, else INCOMPLETE, DAMAGED, NEWER or OLDER.

    Header and columns are checked; payloads are not checked. `file_offset` is the offset that the record must contain;
    -1 accepts any offset. With NO_KEY the record's tag is not checked.
    """
    left = raw.shape[0] - at
    if left < HEADER_BYTES:
        return INCOMPLETE
    if (
        int(raw[at]) != RECORDS_TAG
        or load64(raw, at + INCARNATION_AT) != incarnation
        or (file_offset >= 0 and load64(raw, at + FILE_OFFSET_AT) != file_offset)
    ):
        return DAMAGED
    if int(raw[at + VERSION_AT - 1]) == VERSION_TAG and load32(raw, at + VERSION_AT) == 1:
        return OLDER
    record_bytes = padded_length(raw, at + LENGTH_AT)
    body_bytes = padded_length(raw, at + BODY_AT + 1)
    column_bytes = load32(raw, at + COLUMN_BYTES_AT)
    if (
        # The checksum of the columns does not cover these.
        int(raw[at + COLUMN_CRC_AT - 1]) != COLUMN_CRC_TAG
        or int(raw[at + PAYLOAD_CRC_AT - 1]) != PAYLOAD_CRC_TAG
        or int(raw[at + TAG_AT - 1]) != TAG_TAG
        or body_bytes < 0
        or record_bytes != HEADER_BYTES - LENGTH_END + body_bytes
        or column_bytes < 0
        or column_bytes > body_bytes
        or load64(raw, at + SYNCED_AT) > load64(raw, at + FILE_OFFSET_AT)
        or (key.shape[0] > 0 and load64(raw, at + TAG_AT) != siphash(raw, at, at + TAG_AT, key))
    ):
        return DAMAGED
    if left < HEADER_BYTES + column_bytes:
        return INCOMPLETE
    crc = crc32c(0, raw, at, at + CHECKED_END)
    crc = crc32c(crc, raw, at + BODY_AT, at + HEADER_BYTES + column_bytes)
    if crc != load32(raw, at + COLUMN_CRC_AT) & 0xFFFFFFFF:
        return DAMAGED
    if load32(raw, at + VERSION_AT) != FORMAT_VERSION:
        return NEWER
    end = at + HEADER_BYTES + body_bytes
    places[RECORD_START] = at
    places[RECORD_END] = end
    places[BASE_INDEX] = load64(raw, at + BASE_INDEX_AT)
    places[PUBLISH_TIME_MS] = load64(raw, at + PUBLISH_TIME_AT)
    places[SYNCED_OFFSET] = load64(raw, at + SYNCED_AT)
    places[OWNERSHIP] = load64(raw, at + OWNERSHIP_AT)
    places[TERM] = 0
    if left < HEADER_BYTES + body_bytes:
        return INCOMPLETE
    if int(raw[at + BODY_AT]) == BATCH_TAG:
        if layout_columns(raw, at + HEADER_BYTES, end, places) != CANONICAL:
            return DAMAGED
        if places[ROWS] != load32(raw, at + ROWS_AT) or places[COLUMNS_END] != at + HEADER_BYTES + column_bytes:
            return DAMAGED
        return END
    # Other bodies have no rows and no payload: the checksum of nothing.
    places[ROWS] = 0
    places[PRODUCERS] = 0
    places[COLUMNS_END] = end
    if load32(raw, at + ROWS_AT) != 0 or column_bytes != body_bytes or load32(raw, at + PAYLOAD_CRC_AT) != 0:
        return DAMAGED
    if int(raw[at + BODY_AT]) == CONTROL_TAG:
        return END
    if int(raw[at + BODY_AT]) != MARKER_TAG or body_bytes != MARKER_BYTES:
        return DAMAGED
    places[TERM] = load64(raw, at + HEADER_BYTES + 1)
    if places[TERM] < 1 or load64(raw, at + HEADER_BYTES + TOKEN_AT) != places[OWNERSHIP]:
        return DAMAGED
    return END


@kernel(nogil=True)
def scan(
    raw: Bytes, incarnation: int, file_offset: int, next_index: int, key: Int64s, table: Int64s2, result: Int64s
) -> int:
    """Read the records of a buffer into `table`, one place row for each record, up to the first unreadable record.

    `file_offset` is the place of the buffer in its file, or -1 for no check. `next_index` is the index that the first
    record must have; -1 accepts any index. Each later record must continue the previous record. `result` receives three
    values: the number of records read, the place of the first record not read, and the ownership of the last record
    read. The third value is also an input: the ownership of the record before the first record; 0 accepts any
    ownership. Return the reason why the scan stopped: END, INCOMPLETE, DAMAGED, NEWER, OLDER, NOT_CONTIGUOUS,
    OTHER_OWNER or FULL.
    """
    at = 0
    count = 0
    why = END
    owner = result[2]
    while at < raw.shape[0]:
        if count >= table.shape[0]:
            why = FULL
            break
        places = table[count]
        why = scan_record(raw, at, incarnation, file_offset + at if file_offset >= 0 else -1, key, places)
        if why != END:
            break
        if next_index >= 0 and places[BASE_INDEX] != next_index:
            why = NOT_CONTIGUOUS
            break
        if owner != 0 and places[OWNERSHIP] != owner and places[TERM] == 0:
            why = OTHER_OWNER
            break
        owner = places[OWNERSHIP]
        next_index = places[BASE_INDEX] + places[ROWS]
        at = places[RECORD_END]
        count += 1
    result[0] = count
    result[1] = at
    result[2] = owner
    return why


def new_result(ownership: int = 0) -> Int64s:
    """Return the `result` array for `scan`, with the (signed) ownership of the record before."""
    return np.array([0, 0, ownership], np.int64)


@kernel()
def span(raw: Bytes, result: Int64s) -> int:
    """Find the range of a slice of whole, checked records without markers.

    `result` receives five values: the index of the slice's first message, the index after the first record, the place
    of the last record, the index of the last record's first message, and the index after the last record. Return the
    number of records.
    """
    at = 0
    count = 0
    while at < raw.shape[0]:
        base = load64(raw, at + BASE_INDEX_AT)
        after = base + load32(raw, at + ROWS_AT)
        if count == 0:
            result[0] = base
            result[1] = after
        result[2] = at
        result[3] = base
        result[4] = after
        at += LENGTH_END + padded_length(raw, at + LENGTH_AT)
        count += 1
    return count


@kernel(nogil=True)
def first_bad_payload(raw: Bytes, table: Int64s2, records: int) -> int:
    """Return the first of `records` scanned records whose payload does not match its checksum; -1 if all match."""
    for i in range(records):
        start = table[i, RECORD_START]
        crc = crc32c(0, raw, table[i, COLUMNS_END], table[i, RECORD_END])
        if crc != load32(raw, start + PAYLOAD_CRC_AT) & 0xFFFFFFFF:
            return i
    return -1


@kernel(nogil=True)
def find_header(raw: Bytes, incarnation: int, file_offset: int, base_index: int, key: Int64s) -> int:
    """Return the place of the first header in a buffer that this log wrote at the same place of the file. Return -1 if
    there is no such header.

    The buffer begins at `file_offset`. The tag proves the header. But bytes that readers received from an earlier
    segment may have been published again, at the same offset of this segment. Such a header contains an index below
    `base_index`, this segment's first index.
    """
    for at in range(raw.shape[0] - HEADER_BYTES + 1):
        if (
            int(raw[at]) == RECORDS_TAG
            and load64(raw, at + INCARNATION_AT) == incarnation
            and load64(raw, at + FILE_OFFSET_AT) == file_offset + at
            and load64(raw, at + BASE_INDEX_AT) >= base_index
            and load64(raw, at + TAG_AT) == siphash(raw, at, at + TAG_AT, key)
        ):
            return at
    return -1


def synced_offset_of(header: bytes) -> int:
    """Return the synced offset of a record with this header."""
    return int.from_bytes(header[SYNCED_AT : SYNCED_AT + 8], "little")


def end_of(header: bytes) -> tuple[int, int]:
    """Return the number of bytes of the record with this header, and the index after its last message."""
    body_bytes = padded_length(np.frombuffer(header, np.uint8), LENGTH_AT)
    rows = int.from_bytes(header[ROWS_AT : ROWS_AT + 4], "little")
    return LENGTH_END + body_bytes, base_index_of(header) + rows


def base_index_of(header: bytes) -> int:
    """Return the index of the first message of a record with this header."""
    return int.from_bytes(header[BASE_INDEX_AT : BASE_INDEX_AT + 8], "little")


def file_offset_of(raw: bytes, places: np.ndarray) -> int:
    """Return the file offset that a scanned record contains."""
    at = int(places[RECORD_START]) + FILE_OFFSET_AT
    return int.from_bytes(raw[at : at + 8], "little")


def is_newer(header: bytes) -> bool:
    """Return whether a record of this log (its tag is valid) with this header has another format version."""
    return int.from_bytes(header[VERSION_AT : VERSION_AT + 4], "little") != FORMAT_VERSION
