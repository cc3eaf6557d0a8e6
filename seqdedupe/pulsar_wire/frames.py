"""Frames: the units that a connection of Pulsar's protocol carries in both directions. This module does no I/O.

    size (4) | command size (4) | command
    size (4) | command size (4) | command | entry

A producer sends entries, a broker stores entries, and a reader receives entries. An entry has this form:

    [0x0e02 | size (4) | broker's metadata] | [0x0e01 | CRC-32C (4)] | metadata size (4) | metadata | payload

Numbers are big-endian. A size does not include its own four bytes. The CRC covers all bytes after the CRC.

A payload may be compressed: `compress` and `decompress`, at the end. The codecs of other libraries are imported when
they are needed: the extra `pulsar` has them.
"""

import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from seqdedupe.errors import INSTALL_HINT, SeqdedupeError, error
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    LZ4,
    NONE,
    SNAPPY,
    ZLIB,
    ZSTD,
    BaseCommand,
    CompressionType,
    MessageMetadata,
)
from seqdedupe.wire import varint

Buffer = bytes | bytearray | memoryview

MAX_COMMAND_BYTES = 1024 * 1024
"""The maximum size of a command in bytes. Small fields need many times their size in memory when they are decoded."""
FRAME_OVERHEAD_BYTES = 10 * 1024
"""The number of bytes that a frame may have in addition to the broker's `max_message_size`, as Pulsar defines it."""
SEQDEDUPE_FIELD = MessageMetadata.SEQDEDUPE_FIELD_NUMBER
"""Our own field of an entry's metadata."""

_SIZE = struct.Struct(">I")
_TWO_SIZES = struct.Struct(">II")
_COPIED_BYTES = 4096
"""Up to this size a copy takes less time than an array that is a view."""
_CHECKSUM, _BROKER_METADATA = b"\x0e\x01", b"\x0e\x02"
_HEAD_BYTES = 10
"""The magic number, the CRC and the metadata's size."""
_BYTES_FIELD = 2

_TYPES = BaseCommand.Type.DESCRIPTOR.values_by_number
_FIELDS = {number: BaseCommand.DESCRIPTOR.fields_by_number[number].name for number in _TYPES if number}


class WireEntry(NamedTuple):
    """The two parts of an entry. Each part is a view of the frame that contained the entry."""

    metadata: Buffer
    """A serialised `MessageMetadata`."""
    payload: Buffer


class PulsarFrame(NamedTuple):
    """A frame that was received."""

    command: BaseCommand
    raw: memoryview
    """The whole frame as received, with its size. It can be passed on unchanged."""
    content: memoryview
    """The data after the command: empty, or an entry for `entry_of`."""

    @property
    def field(self) -> str:
        """The name of the command's field in `BaseCommand`; empty for a type that this implementation does not have."""
        return _FIELDS.get(self.command.type, "")


class Splitter:
    """Divides the bytes of one connection into frames.

    The splitter keeps at most one incomplete frame. A frame with a stated size above `max_frame_bytes` is refused as
    soon as the size has arrived, before any other part of the frame is kept. After an error the splitter must not be
    used again.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        """The maximum size of a frame. It may be changed between two calls, because a broker announces its limit when
        it has accepted a connection."""
        self._rest = bytearray()

    @property
    def held_bytes(self) -> int:
        """The bytes of the incomplete frame that have come."""
        return len(self._rest)

    def feed(self, data: bytes) -> Iterator[PulsarFrame]:
        """Add received bytes. Yield the frames that are now complete. Views of the frames stay valid.

        The caller must exhaust the iterator. Raises MALFORMED_MESSAGE, MESSAGE_TOO_LARGE.
        """
        at = 0
        while self._rest:
            missing = self._missing()
            if not missing:
                whole, self._rest = self._rest, bytearray()
                yield frame_of(memoryview(whole))
            elif at == len(data):
                return
            else:
                self._rest += data[at : at + missing]
                at = min(len(data), at + missing)
        view = memoryview(data)
        while len(data) - at >= _SIZE.size:
            end = at + self._size(_SIZE.unpack_from(data, at)[0])
            if end > len(data):
                break
            yield frame_of(view[at:end])
            at = end
        self._rest += view[at:]

    def _missing(self) -> int:
        """Return the number of bytes that the incomplete frame needs next: to complete its size field, or otherwise the
        whole frame."""
        have = len(self._rest)
        if have < _SIZE.size:
            return _SIZE.size - have
        return self._size(_SIZE.unpack_from(self._rest)[0]) - have

    def _size(self, claimed: int) -> int:
        """Return the bytes of a whole frame."""
        if claimed < _SIZE.size:
            raise malformed(f"a frame of {claimed} bytes has no command")
        if claimed > self.max_frame_bytes:
            raise error(
                "MESSAGE_TOO_LARGE", f"a frame of {claimed} bytes is larger than {self.max_frame_bytes}", size=claimed
            )
        return _SIZE.size + claimed


def frame_of(raw: memoryview) -> PulsarFrame:
    """Parse the bytes of one complete frame. Raises MALFORMED_MESSAGE."""
    if len(raw) < _TWO_SIZES.size:
        raise malformed(f"a frame of {len(raw)} bytes is cut off")
    size, command_bytes = _TWO_SIZES.unpack_from(raw)
    end = _TWO_SIZES.size + command_bytes
    if size + _SIZE.size != len(raw) or end > len(raw):
        raise malformed(f"a frame of {len(raw)} bytes claims {size} bytes and a command of {command_bytes}")
    if command_bytes > MAX_COMMAND_BYTES:
        raise malformed(f"a command of {command_bytes} bytes is larger than {MAX_COMMAND_BYTES}")
    try:
        command = BaseCommand.FromString(bytes(raw[_TWO_SIZES.size : end]))
    except DecodeError as e:
        raise malformed(f"a command of {command_bytes} bytes is none of Pulsar's") from e
    frame = PulsarFrame(command, raw, raw[end:])
    if frame.field and not command.HasField(frame.field):  # type: ignore[arg-type]
        raise malformed(f"a command of type {frame.field} has no such field")
    return frame


def entry_of(content: memoryview) -> WireEntry:
    """Return the entry that follows a SEND or MESSAGE command. If the entry has a checksum, the checksum is verified.
    Clients of protocol version 6 and newer write a checksum.

    Raises MALFORMED_MESSAGE.
    """
    at = _begin_of(content)
    if content[at : at + 2] == _CHECKSUM:
        said, found = _number_at(content, at + 2), checksum(content[at + 6 :])
        if said != found:
            raise malformed(f"an entry's checksum is {found:08x}, and it says {said:08x}")
    begin, end = metadata_range(content)
    return WireEntry(content[begin:end], content[end:])


def metadata_range(content: memoryview) -> tuple[int, int]:
    """Return where an entry's metadata begin and end, without verifying the checksum. Raises MALFORMED_MESSAGE."""
    at = _begin_of(content)
    if content[at : at + 2] == _CHECKSUM:
        at += 6
    begin = at + _SIZE.size
    end = begin + _number_at(content, at)
    if end > len(content):
        raise malformed(f"an entry of {len(content)} bytes ends before its metadata, at {end}")
    return begin, end


def _begin_of(content: memoryview) -> int:
    """Return the place after the broker's metadata. Raises MALFORMED_MESSAGE."""
    return 6 + _number_at(content, 2) if content[:2] == _BROKER_METADATA else 0


def metadata_of(entry: WireEntry) -> MessageMetadata:
    """Return an entry's metadata. The metadata have the three fields that Pulsar requires. Raises MALFORMED_MESSAGE."""
    try:
        metadata = MessageMetadata.FromString(bytes(entry.metadata))
    except DecodeError as e:
        raise malformed(f"metadata of {len(entry.metadata)} bytes are none of Pulsar's") from e
    for field in ("producer_name", "sequence_id", "publish_time"):
        if not metadata.HasField(field):
            raise malformed(f"an entry's metadata have no {field}")
    return metadata


def stamped(entry: WireEntry, value: bytes) -> WireEntry:
    """Return the entry with the sidecar's field. The payload is the same object. The rest of the metadata has the same
    bytes.

    If the metadata already have the sidecar's field, the earlier field has no effect: only the last occurrence counts.
    """
    key = varint(SEQDEDUPE_FIELD << 3 | _BYTES_FIELD)
    return WireEntry(bytes(entry.metadata) + key + varint(len(value)) + value, entry.payload)


def command_of(field: str, message: Message) -> BaseCommand:
    """Return a command with its type; `field` is its field in `BaseCommand`."""
    kind: Any = BaseCommand.DESCRIPTOR.fields_by_name[field].number
    fields: dict[str, Any] = {field: message}
    return BaseCommand(type=kind, **fields)


def command_frame(command: BaseCommand) -> bytes:
    """Return the frame of a command without an entry."""
    raw = command.SerializeToString()
    return _TWO_SIZES.pack(_SIZE.size + len(raw), len(raw)) + raw


def entry_frame(command: BaseCommand, entry: WireEntry) -> tuple[bytes, Buffer]:
    """Return the frame of a command with an entry, in two parts. The second part is the entry's payload, which is not
    copied.

    The checksum is computed here.
    """
    raw = command.SerializeToString()
    metadata = _SIZE.pack(len(entry.metadata)) + entry.metadata
    crc = _SIZE.pack(google_crc32c.extend(google_crc32c.value(metadata), readable(entry.payload)))
    size = _SIZE.size + len(raw) + len(_CHECKSUM) + len(crc) + len(metadata) + len(entry.payload)
    return b"".join((_TWO_SIZES.pack(size, len(raw)), raw, _CHECKSUM, crc, metadata)), entry.payload


def entry_frame_bytes(entry: WireEntry) -> int:
    """Return the size of an entry in bytes as a broker counts it: everything after the command."""
    return _HEAD_BYTES + len(entry.metadata) + len(entry.payload)


def checksum(data: Buffer) -> int:
    """Return the CRC-32C."""
    return int(google_crc32c.value(bytes(data) if len(data) <= _COPIED_BYTES else readable(data)))


def malformed(message: str) -> SeqdedupeError:
    """Return the error for data that violates Pulsar's protocol."""
    return error("MALFORMED_MESSAGE", message, hint="Check whether the other side is a Pulsar broker or client.")


def _number_at(content: memoryview, at: int) -> int:
    if at + _SIZE.size > len(content):
        raise malformed(f"an entry of {len(content)} bytes is cut off")
    return int(_SIZE.unpack_from(content, at)[0])


def readable(data: Buffer) -> npt.NDArray[np.uint8]:
    """Return the data as an array, without copying it. The CRC library refuses other views."""
    view = np.frombuffer(data, np.uint8)
    view.flags.writeable = False
    return view


# -- The compression of payloads: Pulsar's five types, each bounded by the size that the entry states.

COMPRESSIONS = (NONE, LZ4, ZLIB, ZSTD, SNAPPY)
"""All of them: Pulsar has no other."""


def compress(kind: CompressionType.ValueType, data: Buffer) -> Buffer:
    """Return the compressed data, in the form that Pulsar's clients write. NONE returns the same object.

    Raises MALFORMED_MESSAGE for an unknown type, INVALID_CONFIGURATION if the codec is not installed.
    """
    if kind == NONE:
        return data
    if kind == ZLIB:
        return zlib.compress(data)
    codecs = _codecs()
    if kind == LZ4:
        return memoryview(codecs.lz4.compress_block(data, store_size=False))
    if kind == ZSTD:
        return memoryview(codecs.zstd.compress(data))
    if kind == SNAPPY:
        return memoryview(codecs.snappy.compress_raw(data))
    raise _unknown(kind)


def decompress(kind: CompressionType.ValueType, data: Buffer, size: int, max_bytes: int) -> Buffer:
    """Decompress the data to `size` bytes. NONE returns the same object.

    The function allocates `size` bytes only if `size` is at most `max_bytes`. A ZLIB stream without an end is accepted:
    brokers write one when they compact a topic. Raises MESSAGE_TOO_LARGE, MALFORMED_MESSAGE, INVALID_CONFIGURATION.
    """
    if kind == NONE:
        return data
    if size > max_bytes:
        raise error("MESSAGE_TOO_LARGE", f"a payload of {size} bytes is larger than {max_bytes}", size=size)
    if kind == ZLIB:
        result: Buffer = _inflated(data, size)
    elif kind in (LZ4, ZSTD, SNAPPY):
        result = _filled(_decoder(kind), data, size)
    else:
        raise _unknown(kind)
    return result


def _inflated(data: Buffer, size: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        # One more byte shows that a payload is larger than stated. 0 would mean no limit.
        result = stream.decompress(data, size + 1)
    except zlib.error as e:
        raise malformed(f"a payload is not compressed as it says: {e}") from e
    if len(result) != size:
        raise _size_differs(size)
    return result


def _filled(decode: Callable[[Buffer, bytearray], int], data: Buffer, size: int) -> Buffer:
    result = bytearray(size)
    try:
        filled = decode(data, result)
    except _codecs().DecompressionError as e:
        raise malformed(f"a payload of {size} bytes is not compressed as it says: {e}") from e
    if filled != size:
        raise _size_differs(size)
    return result


def _decoder(kind: CompressionType.ValueType) -> Callable[[Buffer, bytearray], int]:
    """Return a function that decodes data into a buffer, and fails if the decoded data is larger than the buffer."""
    codecs = _codecs()
    decoders: dict[int, Callable[[Buffer, bytearray], int]] = {
        LZ4: codecs.lz4.decompress_block_into,
        ZSTD: codecs.zstd.decompress_into,
        SNAPPY: codecs.snappy.decompress_raw_into,
    }
    return decoders[kind]


@cache
def _codecs() -> ModuleType:
    try:
        import cramjam
    except ImportError as e:
        raise error(
            "INVALID_CONFIGURATION",
            "LZ4, ZSTD and SNAPPY need the package cramjam, which is not installed",
            hint=INSTALL_HINT.format("pulsar"),
        ) from e
    return cramjam


def _size_differs(size: int) -> Exception:
    return malformed(f"a payload says {size} bytes, and has another size when decompressed")


def _unknown(kind: int) -> Exception:
    return malformed(f"compression {kind} is none that Pulsar 4 has")
