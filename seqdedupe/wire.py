"""The same wire bytes, read faster: columns as `bytes`.

In protobuf's encoding, a packed `repeated sfixed64` field and a `bytes` field look the same. So next to the published
schema there is an alias schema, made here on import. In it every repeated number is `bytes`, and every `Batch` inside
another message is `bytes` too. Columns then go to numpy and back without a Python object per value.

A legal encoder may split a repeated field or not pack it. Then the alias shows too few bytes. A caller that reads with
it checks the lengths, and on a mismatch parses with the published schema.
"""

import struct
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from seqdedupe.v1 import admin_pb2, batch_pb2, dedupe_pb2, publish_pb2, read_pb2

GREETING = "seqdedupe-greeting"
"""With this metadata, a publish stream begins with an empty answer (`publish.proto`)."""

EMPTY = "seqdedupe-empty"
"""With this trailing metadata, a sidecar confirms that an empty message is its answer (`publish.proto`)."""

_PACKABLE = {
    descriptor_pb2.FieldDescriptorProto.TYPE_SFIXED32,
    descriptor_pb2.FieldDescriptorProto.TYPE_SFIXED64,
    descriptor_pb2.FieldDescriptorProto.TYPE_FIXED32,
    descriptor_pb2.FieldDescriptorProto.TYPE_ENUM,
}


@cache
def _alias_pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for module in (batch_pb2, publish_pb2, read_pb2, admin_pb2, dedupe_pb2):
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        file.package = "seqdedupe.alias"
        file.name = file.name.replace("/v1/", "/alias/")
        file.dependency[:] = [name.replace("/v1/", "/alias/") for name in file.dependency]
        file.ClearField("service")
        for message in file.message_type:
            for field in message.field:
                repeated = field.label == field.LABEL_REPEATED
                if (repeated and field.type in _PACKABLE) or field.type_name == ".seqdedupe.v1.Batch":
                    field.label = field.LABEL_OPTIONAL
                    field.type = field.TYPE_BYTES
                    field.ClearField("type_name")
                    field.ClearField("options")
                if field.type_name:
                    field.type_name = field.type_name.replace(".seqdedupe.v1.", ".seqdedupe.alias.")
        pool.Add(file)
    return pool


def _alias(name: str) -> Any:
    return message_factory.GetMessageClass(_alias_pool().FindMessageTypeByName(f"seqdedupe.alias.{name}"))


AttachRequest = _alias("AttachRequest")
AttachResponse = _alias("AttachResponse")
Attached = _alias("Attached")
Batch = _alias("Batch")
Begin = _alias("Begin")
Check = _alias("Check")
CheckRefusal = _alias("CheckRefusal")
End = _alias("End")
ExportWatermarksResponse = _alias("ExportWatermarksResponse")
ExportSnapshotResponse = _alias("ExportSnapshotResponse")
ImportSnapshotRequest = _alias("ImportSnapshotRequest")
ImportWatermarksRequest = _alias("ImportWatermarksRequest")
Checked = _alias("Checked")
Control = _alias("Control")
EndReplay = _alias("EndReplay")
PublishRequest = _alias("PublishRequest")
PublishStreamRequest = _alias("PublishStreamRequest")
PublishStreamResponse = _alias("PublishStreamResponse")
ReadStreamResponse = _alias("ReadStreamResponse")
Ready = _alias("Ready")
Receipt = _alias("Receipt")
Record = _alias("Record")
Register = _alias("Register")
Release = _alias("Release")
Replay = _alias("Replay")
Report = _alias("Report")
Reset = _alias("Reset")


# The tags of `PublishStreamRequest.frames`, and within it of `Frame.number` and `Frame.batch`.
FRAMES_TAG = bytes((2 << 3 | 2,))
NUMBER_TAG = bytes((1 << 3 | 1,))
BATCH_TAG = bytes((15 << 3 | 2,))


# The usual answer of a publish stream, in fixed width: receipts of rows that are all new, and after them the state of
# the topic. Each value comes after its tag.
ALL_NEW = struct.Struct("<BBBQBqBBBqBqBB")
ALL_NEW_TAGS = (1 << 3 | 2, ALL_NEW.size - 2, 1 << 3 | 1, 3 << 3 | 1, 4 << 3 | 2, 20, 1 << 3 | 1, 2 << 3 | 1, 3 << 3, 1)
"""Tags and lengths. The last two values are the tag of `MessageId.batch_index` and the -1 in it."""
STATE = struct.Struct("<BqBqBq")
STATE_TAGS = (3 << 3 | 1, 4 << 3 | 1, 5 << 3 | 1)


@lru_cache(1024)
def varint(value: int) -> bytes:
    """Return a protobuf varint of a number from 0 up, in the fewest bytes. Cached: most batches need the same ones."""
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def frame_parts(number: int, batch: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return the parts of an element of `PublishStreamRequest.frames`, to be joined, for a batch's encoded parts."""
    batch_bytes = sum(map(len, batch))
    head = NUMBER_TAG + number.to_bytes(8, "little") + BATCH_TAG + varint(batch_bytes)
    return [FRAMES_TAG + varint(len(head) + batch_bytes), head, *batch]


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at this place, and its end; (-1, at) if there is none of at most five bytes."""
    value = 0
    for i, byte in enumerate(data[at : at + 5]):
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, at + i + 1
    return -1, at


_FIXED_BYTES = {1: 8, 5: 4}
"""The bytes of fixed-width values, by wire type."""

_LONGEST_VARINT = 10


def skip_field(data: bytes, at: int) -> int:
    """Return the end of the field that begins at this place, or of a group's tag; -1 if there is no valid field."""
    tag, at = read_varint(data, at)
    match tag & 7:
        case 1 | 5 as kind:
            at += _FIXED_BYTES[kind]
        case 2:
            size, at = read_varint(data, at)
            at = at + size if size >= 0 else len(data) + 1
        case 0:
            end = at + _LONGEST_VARINT
            while at < min(end, len(data)) and data[at] >= 0x80:
                at += 1
            at += 1
        case 3 | 4:
            pass
        case _:
            return -1
    return -1 if tag < 0 or at > len(data) else at


def length_delimited(field: int, value: bytes | memoryview) -> list[bytes | memoryview]:
    """Return the parts of an encoded `bytes` or message field, to be joined; none if it is empty."""
    return [varint(field << 3 | 2) + varint(len(value)), value] if len(value) else []
