"""Pulsar's wire protocol, as far as a producer needs it: it says of a batch which IDs are in it, as Java's client does.

Python's own client cannot say so, and hides what the broker answers where it cannot decide.
"""

import asyncio
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import google_crc32c

from tests.pulsar.owners import LIMIT_SECONDS

# Types of commands: each is in the field of that number.
_CONNECT, _CONNECTED, _PRODUCER, _SEND, _RECEIPT, _SEND_ERROR = 2, 3, 5, 6, 7, 8
_ERROR, _CLOSE_PRODUCER, _PRODUCER_SUCCESS, _PING, _PONG, _LOOKUP, _LOOKED_UP = 14, 15, 17, 18, 19, 23, 24
_PROTOCOL_VERSION = 20
_CHECKSUMMED = b"\x0e\x01"
_NO_LEDGER = 2**64 - 1
_PRODUCER_ID = 1
_MARKER_TYPE = 20
_PAUSE_SECONDS = 0.05

STORED, DUP, UNKNOWN = "stored", "dup", "unknown"

Value = int | str | bytes


class Chunk(NamedTuple):
    """A part of a message that is larger than an entry."""

    uuid: str
    number: int
    of: int


class Publish(NamedTuple):
    """An entry for the broker: a message, a batch of messages with these IDs, or a chunk."""

    sequence_id: int
    highest_sequence_id: int | None = None
    ids: Sequence[int] = ()
    chunk: Chunk | None = None
    payload: bytes = b"x"
    metadata: Mapping[int, Value] = {}
    """More fields of the entry's metadata."""


class Connection:
    """A connection to a broker with one producer, whose answers are awaited one by one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        """For `open_producer`."""
        self._reader = reader
        self._writer = writer
        self._name = name
        self.last_sequence_id = -1
        """What the broker said when the producer was opened."""

    def send(self, several: Sequence[Publish]) -> None:
        """All of them at once."""
        self._writer.write(b"".join(self._frame(publish) for publish in several))

    def _frame(self, publish: Publish) -> bytes:
        highest, chunk = publish.highest_sequence_id, publish.chunk
        command = {1: _PRODUCER_ID, 2: publish.sequence_id}
        metadata: dict[int, Value] = {1: self._name, 2: publish.sequence_id, 3: 1}
        payload = publish.payload
        if highest is not None:
            command[6] = metadata[24] = highest
        if publish.ids:
            payload = b"".join(map(_in_batch, publish.ids))
            command[3] = metadata[11] = len(publish.ids)
        if chunk is not None:
            command[7] = 1
            metadata |= {26: chunk.uuid, 27: chunk.of, 28: len(payload) * chunk.of, 29: chunk.number}
        if _MARKER_TYPE in publish.metadata:
            command[8] = 1
        metadata |= publish.metadata
        head = encoded(metadata)
        content = struct.pack(">I", len(head)) + head + payload
        checksum = struct.pack(">I", google_crc32c.value(content))
        return _framed(_SEND, command, _CHECKSUMMED + checksum + content)

    async def answer(self) -> str:
        """The next answer: stored, dup, unknown, or what else the broker says."""
        kind, fields = await self._next()
        if kind == _RECEIPT:
            place = fields_of(fields[3]) if isinstance(fields[3], bytes) else {}
            return DUP if place[1] == _NO_LEDGER else STORED
        said = _text(fields.get(4, b""))
        return UNKNOWN if kind == _SEND_ERROR and "Cannot determine" in said else f"{kind}: {said}"

    async def call(self, kind: int, fields: Mapping[int, Value]) -> tuple[int, dict[int, int | bytes]]:
        """Says a command, and what comes next."""
        self._writer.write(_framed(kind, fields))
        return await self._next()

    async def _next(self) -> tuple[int, dict[int, int | bytes]]:
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                (size,) = struct.unpack(">I", await self._reader.readexactly(4))
                frame = await self._reader.readexactly(size)
                command = fields_of(frame[4 : 4 + struct.unpack(">I", frame[:4])[0]])
                kind = command[1]
                assert isinstance(kind, int)
                if kind != _PING:
                    fields = command[kind]
                    assert isinstance(fields, bytes)
                    return kind, fields_of(fields)
                self._writer.write(_framed(_PONG, {}))

    async def close(self) -> None:
        """Cuts the line."""
        self._writer.transport.abort()
        with suppress(OSError):
            await self._writer.wait_closed()


async def open_producer(service_url: str, topic: str, name: str) -> Connection:
    """A connection with a producer of this name, as soon as the broker lets it in."""
    host, _, port = service_url.removeprefix("pulsar://").partition(":")
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            connection = Connection(*await asyncio.open_connection(host, int(port)), name)
            await connection.call(_CONNECT, {1: "tests", 4: _PROTOCOL_VERSION})
            # A broker serves a topic only when it was asked who does.
            await connection.call(_LOOKUP, {1: topic, 2: 1})
            request: dict[int, Value] = {1: topic, 2: _PRODUCER_ID, 3: 2, 4: name, 9: 1}
            kind, fields = await connection.call(_PRODUCER, request)
            if kind == _PRODUCER_SUCCESS:
                last = fields.get(3, _NO_LEDGER)
                assert isinstance(last, int)
                connection.last_sequence_id = last if last < 2**63 else last - 2**64
                return connection
            await connection.close()
            await asyncio.sleep(_PAUSE_SECONDS)


def ids_in_batch(payload: bytes) -> Iterator[int]:
    """The sequence IDs of a batch's messages."""
    while payload:
        (size,) = struct.unpack(">I", payload[:4])
        of_message = fields_of(payload[4 : 4 + size])
        length, sequence_id = of_message[3], of_message[8]
        assert isinstance(length, int)
        assert isinstance(sequence_id, int)
        yield sequence_id
        payload = payload[4 + size + length :]


def _in_batch(sequence_id: int) -> bytes:
    payload = b"%d" % sequence_id
    head = encoded({3: len(payload), 8: sequence_id})
    return struct.pack(">I", len(head)) + head + payload


def _framed(kind: int, fields: Mapping[int, Value], content: bytes = b"") -> bytes:
    command = encoded({1: kind, kind: encoded(fields)})
    return struct.pack(">II", 4 + len(command) + len(content), len(command)) + command + content


def encoded(fields: Mapping[int, Value]) -> bytes:
    """A protobuf message with these fields."""
    parts = []
    for number, value in fields.items():
        if isinstance(value, int):
            parts += [_varint(number << 3), _varint(value % 2**64)]
        else:
            raw = value.encode() if isinstance(value, str) else value
            parts += [_varint(number << 3 | 2), _varint(len(raw)), raw]
    return b"".join(parts)


def fields_of(raw: bytes) -> dict[int, int | bytes]:
    """The fields of a protobuf message; of one that is repeated the last."""
    found: dict[int, int | bytes] = {}
    at = 0
    while at < len(raw):
        key, at = _read_varint(raw, at)
        value, at = _read_varint(raw, at)
        if key & 7:
            assert key & 7 == 2
            found[key >> 3], at = raw[at : at + value], at + value
        else:
            found[key >> 3] = value
    return found


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _text(raw: int | bytes) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)
