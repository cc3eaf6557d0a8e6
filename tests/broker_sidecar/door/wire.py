"""A client of Pulsar's protocol that does what a test wants, and not what a client should."""

import socket
from collections.abc import Sequence
from typing import Any

from seqdedupe.address import SidecarAddress
from seqdedupe.pulsar_wire.batches import EntryRow, EntryRows, batch_of
from seqdedupe.pulsar_wire.frames import Splitter, WireEntry, command_frame, entry_frame
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    NONE,
    BaseCommand,
    CommandCloseProducer,
    CommandConnect,
    CommandFlow,
    CommandGetOrCreateSchema,
    CommandLookupTopic,
    CommandPartitionedTopicMetadata,
    CommandProducer,
    CommandSend,
    CommandSubscribe,
    CompressionType,
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


class Wire:
    """A connection."""

    def __init__(
        self, address: SidecarAddress, client: str = JAVA, token: bytes | None = None, *, connects: bool = True
    ) -> None:
        self.socket = socket.create_connection((address.host, address.port), LAST_RESORT_SECONDS)
        self._splitter = Splitter(1 << 24)
        self._frames: list[BaseCommand] = []
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
        while True:
            while not self._frames:
                data = self.socket.recv(65536)
                if not data:
                    raise EOFError
                self._frames += [frame.command for frame in self._splitter.feed(data)]
            if (command := self._frames.pop(0)).type != BaseCommand.PING:
                return command
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

    def produce(self, topic: str, name: str | None = "p", producer_id: int = 1, **fields: Any) -> BaseCommand:
        """Opens a producer. The answer is PRODUCER_SUCCESS or ERROR."""
        self.ask_for_producer(topic, name, producer_id, **fields)
        return self.next()

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

    def subscribe(self, topic: str, subscription: str, consumer_id: int = 1, **fields: Any) -> BaseCommand:
        """Opens a consumer from the beginning of the topic. The answer is SUCCESS or ERROR."""
        command = CommandSubscribe(
            topic=topic,
            subscription=subscription,
            subType=CommandSubscribe.Exclusive,
            consumer_id=consumer_id,
            request_id=self.request(),
            initialPosition=CommandSubscribe.Earliest,
            **fields,
        )
        self.say(BaseCommand(type=BaseCommand.SUBSCRIBE, subscribe=command))
        return self.next()

    def flow(self, messages: int, consumer_id: int = 1) -> None:
        command = CommandFlow(consumer_id=consumer_id, messagePermits=messages)
        self.say(BaseCommand(type=BaseCommand.FLOW, flow=command))

    def close_producer(self, producer_id: int = 1) -> BaseCommand:
        command = CommandCloseProducer(producer_id=producer_id, request_id=self.request())
        self.say(BaseCommand(type=BaseCommand.CLOSE_PRODUCER, close_producer=command))
        return self.next()

    def close(self) -> None:
        self.socket.close()


def ids_of(entries: Sequence[tuple[int, int]]) -> list[int]:
    return [sequence_id for sequence_id, _ in entries]
