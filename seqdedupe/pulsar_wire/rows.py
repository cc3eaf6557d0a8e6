"""Kernels that find, copy and write the rows of a batch as bytes.

A row is `metadata size (4) | metadata | payload`. The metadata is a serialised `SingleMessageMetadata`. Each kernel
makes one pass over the bytes. A protobuf decoder would need some microseconds for each row, and would limit the rate of
a writer.

This module has kernels, so import it only after `kernels.prepare()`.
"""

from seqdedupe.format.jit import Bytes, Int64s, Uint8s, copy, for_kernels, kernel, shl64

# The places of a row's parts, and flags for the row's contents.
BEGIN = 0
METADATA = 1
PAYLOAD = 2
"""The place where the row's payload begins and its metadata ends."""
END = 3
KEY = 4
KEY_END = 5
ORDERING_KEY = 6
ORDERING_KEY_END = 7
SEQUENCE_ID = 8
EVENT_TIME = 9
FLAGS = 10
PROPERTIES = 11
"""The number of its properties."""
PLACES = 12

# Flags of a row.
HAS_KEY = 1
KEY_IS_BASE64 = 2
HAS_ORDERING_KEY = 4
NULL_VALUE = 8
COMPACTED_OUT = 16
NULL_KEY = 32
HAS_SEQUENCE_ID = 64
"""The client has set the row's sequence ID. Otherwise the ID follows from the first ID of the entry."""

# The tags of fields of `SingleMessageMetadata`: number and wire type.
_PROPERTY = 1 << 3 | 2
_PARTITION_KEY = 2 << 3 | 2
_PAYLOAD_SIZE = 3 << 3
_COMPACTED_OUT = 4 << 3
_EVENT_TIME = 5 << 3
_KEY_IS_BASE64 = 6 << 3
_ORDERING_KEY = 7 << 3 | 2
_SEQUENCE_ID = 8 << 3
_NULL_VALUE = 9 << 3
_NULL_KEY = 10 << 3
_NAME = 1 << 3 | 2
_VALUE = 2 << 3 | 2

_MAX_INT32 = 2**31 - 1
_MAX_TAG = 2**32 - 1
ROW_BYTES = 72
"""The maximum size of a row in bytes, without its properties, keys and payload."""
PROPERTY_BYTES = 24
"""The maximum size of a property in bytes, without its name and value."""
SEQUENCE_ID_BYTES = 11


@for_kernels
def _varint(raw: Bytes, at: int, end: int) -> tuple[int, int]:
    """Return a number of at most 64 bits, and the place after the number. The place is -1 if the number is cut off or
    too long."""
    value = 0
    shift = 0
    while at < end and shift < 70:
        byte = int(raw[at])
        at += 1
        value |= shl64(byte & 0x7F, shift) if shift < 64 else 0
        if byte < 0x80:
            return value, at
        shift += 7
    return 0, -1


@for_kernels
def _skipped(raw: Bytes, tag: int, at: int, end: int) -> int:
    """Return the place after an unused field; -1 if the field is malformed."""
    kind = tag & 7
    if kind == 0:
        return _varint(raw, at, end)[1]
    if kind == 1:
        return at + 8 if at + 8 <= end else -1
    if kind == 5:
        return at + 4 if at + 4 <= end else -1
    if kind != 2:
        return -1
    size, at = _varint(raw, at, end)
    return at + size if at >= 0 and 0 <= size <= end - at else -1


@for_kernels
def _number32(raw: Bytes, at: int) -> int:
    return int(raw[at]) << 24 | int(raw[at + 1]) << 16 | int(raw[at + 2]) << 8 | int(raw[at + 3])


@for_kernels
def _flag(flags: int, flag: int, is_set: bool) -> int:
    return flags | flag if is_set else flags & ~flag


@kernel(bare=True)
def scan(raw: Bytes, rows: int, places: Int64s) -> int:
    """Find the rows of a batch. Return the total number of properties, or a negative number.

    `-1 - N` means that row N is malformed. N is `rows` if bytes follow the last row. `places` has PLACES numbers for
    each row.
    """
    at = 0
    end = len(raw)
    properties = 0
    for row in range(rows):
        base = row * PLACES
        if at + 4 > end:
            return -1 - row
        places[base + BEGIN] = at
        metadata_end = at + 4 + _number32(raw, at)
        at += 4
        places[base + METADATA] = at
        if metadata_end > end:
            return -1 - row
        payload_size = -1
        flags = 0
        own = 0
        for k in range(KEY, PLACES):
            places[base + k] = 0
        while at < metadata_end:
            tag, at = _varint(raw, at, metadata_end)
            if at < 0 or tag < 8 or tag > _MAX_TAG:
                return -1 - row
            if tag & 7 == 2:
                size, at = _varint(raw, at, metadata_end)
                if at < 0 or size < 0 or size > metadata_end - at:
                    return -1 - row
                if tag == _PARTITION_KEY:
                    flags |= HAS_KEY
                    places[base + KEY] = at
                    places[base + KEY_END] = at + size
                elif tag == _ORDERING_KEY:
                    flags |= HAS_ORDERING_KEY
                    places[base + ORDERING_KEY] = at
                    places[base + ORDERING_KEY_END] = at + size
                elif tag == _PROPERTY:
                    own += 1
                at += size
            elif tag & 7 == 0:
                value, at = _varint(raw, at, metadata_end)
                if at < 0:
                    return -1 - row
                if tag == _PAYLOAD_SIZE:
                    payload_size = value
                elif tag == _SEQUENCE_ID:
                    places[base + SEQUENCE_ID] = value
                    flags |= HAS_SEQUENCE_ID
                elif tag == _EVENT_TIME:
                    places[base + EVENT_TIME] = value
                elif tag == _KEY_IS_BASE64:
                    flags = _flag(flags, KEY_IS_BASE64, value != 0)
                elif tag == _NULL_VALUE:
                    flags = _flag(flags, NULL_VALUE, value != 0)
                elif tag == _COMPACTED_OUT:
                    flags = _flag(flags, COMPACTED_OUT, value != 0)
                elif tag == _NULL_KEY:
                    flags = _flag(flags, NULL_KEY, value != 0)
            else:
                at = _skipped(raw, tag, at, metadata_end)
                if at < 0:
                    return -1 - row
        if payload_size < 0 or payload_size > _MAX_INT32 or payload_size > end - at:
            return -1 - row
        places[base + PAYLOAD] = at
        at += payload_size
        places[base + END] = at
        places[base + FLAGS] = flags
        places[base + PROPERTIES] = own
        properties += own
    return properties if at == end else -1 - rows


@kernel(bare=True)
def find_properties(raw: Bytes, rows: int, places: Int64s, spans: Int64s) -> bool:
    """Find the properties of rows that `scan` has found: the begin and end of each name and each value. Return whether
    the properties are well formed."""
    out = 0
    for row in range(rows):
        base = row * PLACES
        if places[base + PROPERTIES] == 0:
            continue
        at = int(places[base + METADATA])
        metadata_end = int(places[base + PAYLOAD])
        while at < metadata_end:
            tag, at = _varint(raw, at, metadata_end)
            if tag != _PROPERTY:
                at = _skipped(raw, tag, at, metadata_end)
                continue
            size, at = _varint(raw, at, metadata_end)
            end = at + size
            for k in range(4):
                spans[out + k] = 0
            while at < end:
                tag, at = _varint(raw, at, end)
                if at < 0 or tag < 8 or tag > _MAX_TAG:
                    return False
                after = _skipped(raw, tag, at, end)
                if after < 0:
                    return False
                if tag in (_NAME, _VALUE):
                    size, at = _varint(raw, at, end)
                    to = out if tag == _NAME else out + 2
                    spans[to] = at
                    spans[to + 1] = after
                at = after
            out += 4
    return True


@kernel(bare=True)
def gather(raw: Bytes, begins: Int64s, offsets: Int64s, out: Uint8s) -> int:
    """Copy the values that begin at these places, one after the other, to their offsets in the output. Return the
    number of bytes."""
    for k in range(len(begins)):
        copy(out, int(offsets[k]), raw, int(begins[k]), int(offsets[k + 1] - offsets[k]))
    return int(offsets[len(begins)])


@for_kernels
def _put_varint(out: Uint8s, at: int, value: int) -> int:
    """Write a number as a protobuf varint. A negative number needs ten bytes."""
    rest = value
    if rest < 0:
        # The upper bits are moved down without the sign.
        out[at] = rest & 0x7F | 0x80
        rest = (rest >> 7) & (2**57 - 1)
        at += 1
    while rest >= 0x80:
        out[at] = rest & 0x7F | 0x80
        rest >>= 7
        at += 1
    out[at] = rest
    return at + 1


@for_kernels
def _put_bytes(out: Uint8s, at: int, tag: int, raw: Bytes, begin: int, end: int) -> int:
    out[at] = tag
    at = _put_varint(out, at + 1, end - begin)
    copy(out, at, raw, begin, end - begin)
    return at + end - begin


@for_kernels
def _put_number32(out: Uint8s, at: int, value: int) -> None:
    for k in range(4):
        out[at + k] = (value >> (24 - 8 * k)) & 0xFF


@for_kernels
def _varint_bytes(value: int) -> int:
    count = 1
    while value >= 0x80:
        value >>= 7
        count += 1
    return count


@kernel(bare=True)
def put_rows(
    sequence_ids: Int64s,
    event_times: Int64s,
    flags: Int64s,
    key_offsets: Int64s,
    keys: Bytes,
    ordering_offsets: Int64s,
    ordering_keys: Bytes,
    property_offsets: Int64s,
    name_offsets: Int64s,
    names: Bytes,
    value_offsets: Int64s,
    values: Bytes,
    payload_offsets: Int64s,
    payloads: Bytes,
    out: Uint8s,
) -> int:
    """Write rows. Return the number of bytes. `out` has room for ROW_BYTES per row, PROPERTY_BYTES per property, and
    all values."""
    at = 0
    for row in range(len(sequence_ids)):
        begin = at
        at += 4
        flag = int(flags[row])
        for k in range(int(property_offsets[row]), int(property_offsets[row + 1])):
            name = int(name_offsets[k + 1] - name_offsets[k])
            value = int(value_offsets[k + 1] - value_offsets[k])
            out[at] = _PROPERTY
            at = _put_varint(out, at + 1, 2 + _varint_bytes(name) + name + _varint_bytes(value) + value)
            at = _put_bytes(out, at, _NAME, names, int(name_offsets[k]), int(name_offsets[k + 1]))
            at = _put_bytes(out, at, _VALUE, values, int(value_offsets[k]), int(value_offsets[k + 1]))
        if flag & HAS_KEY:
            at = _put_bytes(out, at, _PARTITION_KEY, keys, int(key_offsets[row]), int(key_offsets[row + 1]))
        payload = int(payload_offsets[row])
        payload_size = int(payload_offsets[row + 1]) - payload
        out[at] = _PAYLOAD_SIZE
        at = _put_varint(out, at + 1, payload_size)
        if flag & COMPACTED_OUT:
            out[at] = _COMPACTED_OUT
            out[at + 1] = 1
            at += 2
        if event_times[row] != 0:
            out[at] = _EVENT_TIME
            at = _put_varint(out, at + 1, int(event_times[row]))
        if flag & KEY_IS_BASE64:
            out[at] = _KEY_IS_BASE64
            out[at + 1] = 1
            at += 2
        if flag & HAS_ORDERING_KEY:
            at = _put_bytes(
                out, at, _ORDERING_KEY, ordering_keys, int(ordering_offsets[row]), int(ordering_offsets[row + 1])
            )
        out[at] = _SEQUENCE_ID
        at = _put_varint(out, at + 1, int(sequence_ids[row]))
        if flag & NULL_VALUE:
            out[at] = _NULL_VALUE
            out[at + 1] = 1
            at += 2
        if flag & NULL_KEY:
            out[at] = _NULL_KEY
            out[at + 1] = 1
            at += 2
        _put_number32(out, begin, at - begin - 4)
        copy(out, at, payloads, payload, payload_size)
        at += payload_size
    return at


@kernel(bare=True)
def take(raw: Bytes, rows: int, places: Int64s, sequence_ids: Int64s, marks: Uint8s, out: Uint8s) -> int:
    """Copy the marked rows of a batch. Return the number of bytes.

    The rows keep their bytes. Only a row without a sequence ID gets a sequence ID, because the ID can no longer be
    computed from the entry's ID.
    """
    at = 0
    for row in range(rows):
        if marks[row] == 0:
            continue
        base = row * PLACES
        begin = int(places[base + BEGIN])
        payload = int(places[base + PAYLOAD])
        end = int(places[base + END])
        copy(out, at, raw, begin, payload - begin)
        metadata = at
        at += payload - begin
        if int(places[base + FLAGS]) & HAS_SEQUENCE_ID == 0:
            out[at] = _SEQUENCE_ID
            at = _put_varint(out, at + 1, int(sequence_ids[row]))
            _put_number32(out, metadata, at - metadata - 4)
        copy(out, at, raw, payload, end - payload)
        at += end - payload
    return at
