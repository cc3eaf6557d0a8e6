"""Pulsar's wire protocol, as far as a producer needs it: it says of a batch which IDs are in it, as Java's client does.

Python's own client cannot say so, and hides what the broker answers where it cannot decide.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from google.protobuf.message import Message

from seqdedupe.pulsar_wire.frames import WireEntry, command_frame, command_of, entry_frame
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    BaseCommand,
    CommandConnect,
    CommandLookupTopic,
    CommandPong,
    CommandProducer,
    CommandSend,
    MessageMetadata,
    SingleMessageMetadata,
)
from tests.pulsar.owners import LIMIT_SECONDS

_PROTOCOL_VERSION = 20
_NO_LEDGER = 2**64 - 1
_PRODUCER_ID = 1
_PAUSE_SECONDS = 0.05

STORED, DUP, UNKNOWN = "stored", "dup", "unknown"


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
    metadata: MessageMetadata = MessageMetadata()
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
        highest, chunk, payload = publish.highest_sequence_id, publish.chunk, publish.payload
        metadata = MessageMetadata(
            producer_name=self._name.encode(),
            sequence_id=publish.sequence_id,
            publish_time=1,
            highest_sequence_id=highest,
        )
        if publish.ids:
            payload = b"".join(map(_in_batch, publish.ids))
            metadata.num_messages_in_batch = len(publish.ids)
        if chunk is not None:
            metadata.uuid, metadata.chunk_id = chunk.uuid.encode(), chunk.number
            metadata.num_chunks_from_msg, metadata.total_chunk_msg_size = chunk.of, len(payload) * chunk.of
        metadata.MergeFrom(publish.metadata)
        command = CommandSend(
            producer_id=_PRODUCER_ID,
            sequence_id=publish.sequence_id,
            highest_sequence_id=highest,
            num_messages=len(publish.ids) or None,
            is_chunk=chunk is not None,
            marker=metadata.HasField("marker_type"),
        )
        return b"".join(entry_frame(command_of("send", command), WireEntry(metadata.SerializeToString(), payload)))

    async def answer(self) -> str:
        """The next answer: stored, dup, unknown, or what else the broker says."""
        answer = await self._next()
        if answer.type == BaseCommand.SEND_RECEIPT:
            return DUP if answer.send_receipt.message_id.ledgerId == _NO_LEDGER else STORED
        return UNKNOWN if "Cannot determine" in answer.send_error.message else str(answer)

    async def call(self, field: str, message: Message) -> BaseCommand:
        """Says a command, and what comes next."""
        self._writer.write(command_frame(command_of(field, message)))
        return await self._next()

    async def _next(self) -> BaseCommand:
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                frame = await self._reader.readexactly(int.from_bytes(await self._reader.readexactly(4)))
                command = BaseCommand.FromString(frame[4 : 4 + int.from_bytes(frame[:4])])
                if command.type != BaseCommand.PING:
                    return command
                self._writer.write(command_frame(command_of("pong", CommandPong())))

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
            await connection.call("connect", CommandConnect(client_version="tests", protocol_version=_PROTOCOL_VERSION))
            # A broker serves a topic only when it was asked who does.
            await connection.call("lookupTopic", CommandLookupTopic(topic=topic, request_id=1))
            request = CommandProducer(topic=topic, producer_id=_PRODUCER_ID, request_id=2, producer_name=name)
            answer = await connection.call("producer", request)
            if answer.type == BaseCommand.PRODUCER_SUCCESS:
                connection.last_sequence_id = answer.producer_success.last_sequence_id
                return connection
            await connection.close()
            await asyncio.sleep(_PAUSE_SECONDS)


def ids_in_batch(payload: bytes) -> Iterator[int]:
    """The sequence IDs of a batch's messages."""
    while payload:
        begin = 4 + int.from_bytes(payload[:4])
        message = SingleMessageMetadata.FromString(payload[4:begin])
        yield message.sequence_id
        payload = payload[begin + message.payload_size :]


def _in_batch(sequence_id: int) -> bytes:
    payload = b"%d" % sequence_id
    head = SingleMessageMetadata(payload_size=len(payload), sequence_id=sequence_id).SerializeToString()
    return len(head).to_bytes(4) + head + payload
