"""A client of Pulsar's protocol that does what a test wants, and not what a client should."""

import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from google.protobuf.message import Message

from seqdedupe.address import SidecarAddress
from seqdedupe.pulsar_wire.batches import EntryRow, EntryRows, batch_of
from seqdedupe.pulsar_wire.frames import (
    PulsarFrame,
    Splitter,
    WireEntry,
    command_frame,
    command_of,
    entry_frame,
    entry_of,
    metadata_of,
)
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    NONE,
    BaseCommand,
    CommandAck,
    CommandCloseConsumer,
    CommandCloseProducer,
    CommandConnect,
    CommandError,
    CommandFlow,
    CommandGetOrCreateSchema,
    CommandLookupTopic,
    CommandMessage,
    CommandPartitionedTopicMetadata,
    CommandPing,
    CommandProducer,
    CommandProducerSuccess,
    CommandSend,
    CommandSubscribe,
    CompressionType,
    MessageIdData,
    MessageMetadata,
    Schema,
)
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar

JAVA, CPP, GO = "Pulsar-Java-v4.0.8", "Pulsar-CPP-v3.7.2", "Pulsar Go 0.19.0"


def door_of(sidecar: Sidecar) -> SidecarAddress:
    """The address of the door of a running sidecar, for `pulsar_listen` with port 0."""
    [*_, last] = (entry["address"] for entry in sidecar.log if entry["event"] == "door")
    return SidecarAddress.parse(last)


def single(sequence_id: int, payload: bytes | None = None, **fields: Any) -> WireEntry:
    """An entry of one message that is not in a batch; its payload is that of `calls.payload_of`."""
    payload = b"p/%d" % sequence_id if payload is None else payload
    metadata = MessageMetadata(producer_name=b"x", sequence_id=sequence_id, publish_time=1, **fields)
    return WireEntry(metadata.SerializeToString(), payload)


def batch(*ids: int, size: int = 0, compression: CompressionType.ValueType = NONE, **fields: Any) -> WireEntry:
    """A batch of messages with these sequence IDs, each with its own payload."""
    return batch_of(EntryRows.of([EntryRow(i, b"p/%d" % i + bytes(size), **fields) for i in ids]), b"x", 1, compression)


class Received(NamedTuple):
    """A message that a consumer got."""

    command: CommandMessage
    metadata: MessageMetadata
    payload: bytes


class Wire:
    """A connection."""

    def __init__(
        self, address: SidecarAddress, client: str = JAVA, token: bytes | None = None, *, connects: bool = True
    ) -> None:
        self.socket = socket.create_connection((address.host, address.port), LAST_RESORT_SECONDS)
        self._splitter = Splitter(1 << 24)
        self._frames: list[PulsarFrame] = []
        self._requests = 0
        if connects:
            method = "none" if token is None else "token"
            command = CommandConnect(
                client_version=client, protocol_version=20, auth_method_name=method, auth_data=token or b""
            )
            self.say(BaseCommand(type=BaseCommand.CONNECT, connect=command))
            self.connected = self.next()

    def say(self, command: BaseCommand) -> None:
        self.socket.sendall(command_frame(command))

    def next(self) -> BaseCommand:
        """The next command, without pings. Raises EOFError at the end of the connection."""
        return self.next_frame().command

    def next_frame(self) -> PulsarFrame:
        """The same with what follows the command."""
        while (frame := self._any()).field == "ping":
            self._answer_ping()
        return frame

    def answer_ping(self) -> None:
        """Answers the next command, which must be the question whether it is there."""
        assert self._any().field == "ping"
        self._answer_ping()

    def _any(self) -> PulsarFrame:
        while not self._frames:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError
            self._frames += self._splitter.feed(data)
        return self._frames.pop(0)

    def _answer_ping(self) -> None:
        self.say(BaseCommand(type=BaseCommand.PONG, pong={}))  # type: ignore[arg-type]

    def request(self) -> int:
        self._requests += 1
        return self._requests

    def partitions(self, topic: str) -> BaseCommand:
        command = CommandPartitionedTopicMetadata(topic=topic, request_id=self.request())
        self.say(BaseCommand(type=BaseCommand.PARTITIONED_METADATA, partitionMetadata=command))
        return self.next()

    def look_up(self, topic: str, **fields: Any) -> BaseCommand:
        command = CommandLookupTopic(topic=topic, request_id=self.request(), **fields)
        self.say(BaseCommand(type=BaseCommand.LOOKUP, lookupTopic=command))
        return self.next()

    def ask_for_producer(self, topic: str, name: str | None = "p", producer_id: int = 1, **fields: Any) -> None:
        command = CommandProducer(topic=topic, producer_id=producer_id, request_id=self.request(), **fields)
        if name is not None:
            command.producer_name = name
        self.say(BaseCommand(type=BaseCommand.PRODUCER, producer=command))

    def produce(
        self, topic: str, name: str | None = "p", producer_id: int = 1, **fields: Any
    ) -> CommandProducerSuccess:
        """Opens a producer, which must not be refused."""
        self.ask_for_producer(topic, name, producer_id, **fields)
        answer = self.next()
        assert answer.type == BaseCommand.PRODUCER_SUCCESS, answer
        return answer.producer_success

    def refused(self, topic: str, name: str | None = "p", producer_id: int = 1, **fields: Any) -> CommandError:
        """Asks for a producer, which must be refused."""
        self.ask_for_producer(topic, name, producer_id, **fields)
        answer = self.next()
        assert answer.type == BaseCommand.ERROR, answer
        return answer.error

    def get_or_create_schema(self, topic: str, schema: Schema) -> BaseCommand:
        command = CommandGetOrCreateSchema(topic=topic, request_id=self.request(), schema=schema)
        self.say(BaseCommand(type=BaseCommand.GET_OR_CREATE_SCHEMA, getOrCreateSchema=command))
        return self.next()

    def send(self, first: int, entry: WireEntry, *, highest: int = 0, producer_id: int = 1, **fields: Any) -> None:
        command = CommandSend(producer_id=producer_id, sequence_id=first, **fields)
        if highest:
            command.highest_sequence_id = highest
        self.socket.sendall(b"".join(entry_frame(BaseCommand(type=BaseCommand.SEND, send=command), entry)))

    def receipts(self, count: int) -> list[tuple[int, int]]:
        """Sequence ID and entry ID of the next receipts."""
        found = []
        for _ in range(count):
            command = self.next()
            assert command.type == BaseCommand.SEND_RECEIPT, command
            found.append((command.send_receipt.sequence_id, command.send_receipt.message_id.entryId))
        return found

    def close_producer(self, producer_id: int = 1) -> BaseCommand:
        command = CommandCloseProducer(producer_id=producer_id, request_id=self.request())
        self.say(BaseCommand(type=BaseCommand.CLOSE_PRODUCER, close_producer=command))
        return self.next()

    # -- consuming -------------------------------------------------------------------------------------------------

    def tell(self, field: str, message: Message) -> None:
        self.say(command_of(field, message))

    def ask_to_subscribe(self, topic: str, name: str = "s", consumer_id: int = 1, **fields: Any) -> None:
        fields.setdefault("initialPosition", CommandSubscribe.Earliest)
        # A broker requires the type.
        fields.setdefault("subType", CommandSubscribe.Exclusive)
        request_id = self.request()
        command = CommandSubscribe(
            topic=topic, subscription=name, consumer_id=consumer_id, request_id=request_id, **fields
        )
        self.tell("subscribe", command)

    def subscribe(self, topic: str, name: str = "s", consumer_id: int = 1, **fields: Any) -> BaseCommand:
        """Subscribes, from the earliest message on. The answer is SUCCESS or ERROR."""
        self.ask_to_subscribe(topic, name, consumer_id, **fields)
        return self.next()

    def flow(self, permits: int, consumer_id: int = 1) -> None:
        self.tell("flow", CommandFlow(consumer_id=consumer_id, messagePermits=permits))

    def message(self, consumer_id: int = 1) -> Received:
        """The next message, which must be the next command."""
        frame = self.next_frame()
        assert frame.field == "message", frame.command
        assert frame.command.message.consumer_id == consumer_id
        entry = entry_of(frame.content)
        return Received(frame.command.message, metadata_of(entry), bytes(entry.payload))

    def messages(self, count: int, consumer_id: int = 1) -> list[int]:
        """The indexes of the next messages, for which it gives permits."""
        self.flow(count, consumer_id)
        return [self.message(consumer_id).command.message_id.entryId for _ in range(count)]

    def is_silent(self) -> bool:
        """Whether nothing else comes before the answer to a ping."""
        self.tell("ping", CommandPing())
        return self.next().type == BaseCommand.PONG

    def acknowledge(self, incarnation: int, *indexes: int, consumer_id: int = 1, **fields: Any) -> BaseCommand:
        """Acknowledges messages, and asks for an answer."""
        ids = [MessageIdData(ledgerId=incarnation, entryId=index) for index in indexes]
        command = CommandAck(consumer_id=consumer_id, message_id=ids, request_id=self.request(), **fields)
        self.tell("ack", command)
        return self.next()

    def acknowledge_up_to(self, incarnation: int, index: int, consumer_id: int = 1) -> BaseCommand:
        return self.acknowledge(incarnation, index, consumer_id=consumer_id, ack_type=CommandAck.Cumulative)

    def close_consumer(self, consumer_id: int = 1) -> BaseCommand:
        self.tell("close_consumer", CommandCloseConsumer(consumer_id=consumer_id, request_id=self.request()))
        return self.next()

    def close(self) -> None:
        self.socket.close()


def ids_of(entries: Sequence[tuple[int, int]]) -> list[int]:
    return [sequence_id for sequence_id, _ in entries]
