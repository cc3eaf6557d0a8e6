"""Frames: what a connection of Pulsar's protocol carries, in both directions. Pure.

    size (4) | command size (4) | command
    size (4) | command size (4) | command | entry

An entry is what a producer sends, a broker stores and a reader receives:

    [0x0e02 | size (4) | broker's metadata] | [0x0e01 | CRC-32C (4)] | metadata size (4) | metadata | payload

Numbers are big-endian. A size does not count its own four bytes. The CRC is over all that follows it.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.pulsar_wire.pulsar_api_pb2 import BaseCommand, MessageMetadata
from seqdedupe.wire import varint

Buffer = bytes | bytearray | memoryview

MAX_COMMAND_BYTES = 1024 * 1024
"""The most bytes of a command. Small fields take many times their size in memory once they are decoded."""
FRAME_OVERHEAD_BYTES = 10 * 1024
"""What a frame may have in addition to the broker's `max_message_size`, by Pulsar's definition."""
SEQDEDUPE_FIELD = MessageMetadata.SEQDEDUPE_FIELD_NUMBER
"""Our own field of an entry's metadata."""

_SIZE = struct.Struct(">I")
_TWO_SIZES = struct.Struct(">II")
_CHECKSUM, _BROKER_METADATA = b"\x0e\x01", b"\x0e\x02"
_HEAD_BYTES = 10
"""The magic number, the CRC and the metadata's size."""
_BYTES_FIELD = 2

_TYPES = BaseCommand.Type.DESCRIPTOR.values_by_number
_FIELDS = {number: BaseCommand.DESCRIPTOR.fields_by_number[number].name for number in _TYPES if number}


class WireEntry(NamedTuple):
    """An entry's two parts. They are views of the frame that they came in."""

    metadata: Buffer
    """A serialised `MessageMetadata`."""
    payload: Buffer


class PulsarFrame(NamedTuple):
    """A frame that was received."""

    command: BaseCommand
    raw: memoryview
    """The whole frame with its size, as it came: what is passed on unchanged."""
    content: memoryview
    """What follows the command: nothing, or an entry for `entry_of`."""

    @property
    def field(self) -> str:
        """The name of the command's field in `BaseCommand`, or an empty string for a type that is not in our part."""
        return _FIELDS.get(self.command.type, "")


class Splitter:
    """Divides the bytes of one connection into frames.

    Holds at most one incomplete frame. A frame that claims more than `max_frame_bytes` is refused when its size has
    come, before anything of it is kept. After an error the splitter must not be used again.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        """May be changed between two calls: a broker announces its limit when it has accepted a connection."""
        self._rest = bytearray()

    @property
    def held_bytes(self) -> int:
        """The bytes of the incomplete frame that have come."""
        return len(self._rest)

    def feed(self, data: bytes) -> Iterator[PulsarFrame]:
        """Yield the frames that are complete with these bytes. Views of them stay valid.

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
        """Return how many bytes the incomplete frame needs next: of its size, else of all of it."""
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
    """Return what these bytes of one whole frame are. Raises MALFORMED_MESSAGE."""
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
    """Return the entry that follows a SEND or MESSAGE command. The checksum is compared if there is one: clients of
    protocol version 6 and newer write it.

    Raises MALFORMED_MESSAGE.
    """
    at = 0
    if content[:2] == _BROKER_METADATA:
        at = 6 + _number_at(content, 2)
    if content[at : at + 2] == _CHECKSUM:
        said = _number_at(content, at + 2)
        at += 6
        found = checksum(content[at:])
        if said != found:
            raise malformed(f"an entry's checksum is {found:08x}, and it says {said:08x}")
    begin = at + _SIZE.size
    end = begin + _number_at(content, at)
    if end > len(content):
        raise malformed(f"an entry of {len(content)} bytes ends before its metadata, at {end}")
    return WireEntry(content[begin:end], content[end:])


def metadata_of(entry: WireEntry) -> MessageMetadata:
    """Return an entry's metadata. It has the three fields that Pulsar requires. Raises MALFORMED_MESSAGE."""
    try:
        metadata = MessageMetadata.FromString(bytes(entry.metadata))
    except DecodeError as e:
        raise malformed(f"metadata of {len(entry.metadata)} bytes are none of Pulsar's") from e
    for field in ("producer_name", "sequence_id", "publish_time"):
        if not metadata.HasField(field):
            raise malformed(f"an entry's metadata have no {field}")
    return metadata


def stamped(entry: WireEntry, value: bytes) -> WireEntry:
    """Return the entry with our own field. The payload is the same object, and the rest of the metadata the same bytes.

    A field of ours that the metadata already have does not count any more: of a field, the last one does.
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
    """Return the frame of a command with an entry, in two parts: the second is the entry's payload, not copied.

    The checksum is computed here.
    """
    raw = command.SerializeToString()
    metadata = _SIZE.pack(len(entry.metadata)) + entry.metadata
    crc = _SIZE.pack(google_crc32c.extend(google_crc32c.value(metadata), readable(entry.payload)))
    size = _SIZE.size + len(raw) + len(_CHECKSUM) + len(crc) + len(metadata) + len(entry.payload)
    return b"".join((_TWO_SIZES.pack(size, len(raw)), raw, _CHECKSUM, crc, metadata)), entry.payload


def entry_frame_bytes(entry: WireEntry) -> int:
    """Return the bytes of an entry as a broker counts them: all that follows the command."""
    return _HEAD_BYTES + len(entry.metadata) + len(entry.payload)


def checksum(data: Buffer) -> int:
    """Return the CRC-32C."""
    return int(google_crc32c.value(readable(data)))


def malformed(message: str) -> SeqdedupeError:
    """Return the error of what is not as Pulsar's protocol is."""
    return error("MALFORMED_MESSAGE", message, hint="Is the other side a Pulsar broker or client?")


def _number_at(content: memoryview, at: int) -> int:
    if at + _SIZE.size > len(content):
        raise malformed(f"an entry of {len(content)} bytes is cut off")
    return int(_SIZE.unpack_from(content, at)[0])


def readable(data: Buffer) -> npt.NDArray[np.uint8]:
    """Return the data as an array, not copied. The CRC's library refuses other views."""
    view = np.frombuffer(data, np.uint8)
    view.flags.writeable = False
    return view
