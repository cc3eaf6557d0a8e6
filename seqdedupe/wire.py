"""Reads and writes the columns of messages faster than protobuf: as `bytes`, with the same wire encoding.

In the encoding of protobuf, a packed `repeated sfixed64` field and a `bytes` field look the same. So `alias` makes an
alias schema of the published schema. In it, every repeated number is `bytes`, and every `Batch` inside another
message is `bytes` too. So columns are converted to numpy and back without a Python object per value.

A legal encoder may split a repeated field, or not pack it. The alias schema then shows too few bytes. So a caller that
reads with the alias schema checks the lengths, and on a mismatch parses the message with the published schema.
"""

import struct
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.message import Message

from seqdedupe.v1 import batch_pb2, publish_pb2, read_pb2

GREETING = "seqdedupe-greeting"
"""With this metadata, a publish stream begins with an empty answer (`publish.proto`)."""

FRAMES_TAKEN = "frames_taken"
"""A key in the numbers of the error with which a publish stream ends: 0 if the sidecar has taken none of its frames
(`publish.proto`)."""

EMPTY = "seqdedupe-empty"
"""With this trailing metadata, a sidecar confirms that an empty message is its answer (`publish.proto`)."""

_PACKABLE = {
    descriptor_pb2.FieldDescriptorProto.TYPE_SFIXED32,
    descriptor_pb2.FieldDescriptorProto.TYPE_SFIXED64,
    descriptor_pb2.FieldDescriptorProto.TYPE_FIXED32,
    descriptor_pb2.FieldDescriptorProto.TYPE_ENUM,
}

_POOL = descriptor_pool.DescriptorPool()


@cache
def _add_alias(published: FileDescriptor) -> None:
    """Add the alias of a file of the schema to the pool, after the files that it imports."""
    for imported in published.dependencies:
        _add_alias(imported)
    file = descriptor_pb2.FileDescriptorProto()
    published.CopyToProto(file)
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
    _POOL.Add(file)


@cache
def _class_of(published: Descriptor) -> Any:
    _add_alias(published.file)
    name = published.full_name.replace("seqdedupe.v1.", "seqdedupe.alias.")
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(name))


def alias(published: type[Message]) -> Any:
    """Return the alias of a message of the schema."""
    return _class_of(published.DESCRIPTOR)


Batch = alias(batch_pb2.Batch)
Control = alias(batch_pb2.Control)
Record = alias(batch_pb2.Record)
PublishRequest = alias(publish_pb2.PublishRequest)
PublishStreamRequest = alias(publish_pb2.PublishStreamRequest)
PublishStreamResponse = alias(publish_pb2.PublishStreamResponse)
Receipt = alias(publish_pb2.Receipt)
ReadStreamResponse = alias(read_pb2.ReadStreamResponse)


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
    """Return the shortest protobuf varint of a number from 0 up. Results are cached, because most batches need the same
    varints."""
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
    """Return an element of `PublishStreamRequest.frames` with this batch, as parts to be joined. The batch is given as
    encoded parts."""
    batch_bytes = sum(map(len, batch))
    head = NUMBER_TAG + number.to_bytes(8, "little") + BATCH_TAG + varint(batch_bytes)
    return [FRAMES_TAG + varint(len(head) + batch_bytes), head, *batch]


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at this place, and the place after it; (-1, at) if there is no varint of at most five bytes."""
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
    """Return the end of the field that begins at this place, or the end of the tag if the field is a group. Return -1
    if there is no valid field."""
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
    """Return an encoded `bytes` or message field, as parts to be joined; no parts if the field is empty."""
    return [varint(field << 3 | 2) + varint(len(value)), value] if len(value) else []
