"""Sidecars' own entries on one URL: consumers and readers do not receive them. Before a broker with the entries."""

import struct
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from broker_sidecar.door import own_entries
from broker_sidecar.door.broker_pass import SHOW_OWN, BrokerPass
from broker_sidecar.door.own_entries import NO_ENTRY, is_own
from seqdedupe.pulsar_wire.batches import EntryRow, EntryRows, batch_of
from seqdedupe.pulsar_wire.frames import PulsarFrame, WireEntry, metadata_of
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    ZLIB,
    CommandAck,
    CommandActiveConsumerChange,
    CommandCloseConsumer,
    CommandError,
    CommandGetLastMessageId,
    CommandGetLastMessageIdResponse,
    CommandMessage,
    CommandReachedEndOfTopic,
    CommandSubscribe,
    CommandSuccess,
    MessageIdData,
    Property,
    ServerError,
    SingleMessageMetadata,
)
from tests.broker_sidecar.door.own_entry_contents import (
    OTHERS,
    OWN,
    content_of,
    message_frame,
    native_control,
    native_marker,
    single,
)
from tests.broker_sidecar.door.test_broker_pass import TOPIC as ELSEWHERE
from tests.broker_sidecar.door.test_broker_pass import FakeBroker, FakeClient, frame
from tests.broker_sidecar.door.test_broker_pass import client as client
from tests.broker_sidecar.door.test_broker_pass import passing as passing
from tests.log.pulsar import topics

TOPIC = "persistent://public/default/t"
BATCH = batch_of(EntryRows.of([EntryRow(k, b"m") for k in range(3)]), b"p", 1)

Place = tuple[int, int]


class LogBroker(FakeBroker):
    """A broker with the entries of one topic. It serves the door's own readers; `tell` serves clients."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[Place, WireEntry] = {}
        self.error: ServerError.ValueType | None = None
        """The answer to the door's own readers."""
        self.closes = False
        """Whether it closes these readers when they want entries."""
        self.starts: dict[int, Place] = {}
        """Where each open reader has begun."""
        self.subscriptions: list[CommandSubscribe] = []
        self.mark: MessageIdData | None = None
        """The mark-delete position of clients' consumers."""
        self._next: dict[int, Place] = {}
        self._permits: dict[int, int] = {}

    def _take(self, frame: PulsarFrame) -> None:
        command = frame.command
        match frame.field:
            case "subscribe" if not command.subscribe.durable:
                self._open(command.subscribe)
            case "flow" if command.flow.consumer_id in self.starts:
                self._permits[command.flow.consumer_id] += command.flow.messagePermits
                self._send(command.flow.consumer_id)
            case "getLastMessageId":
                self._say_last(command.getLastMessageId)
            case "close_consumer":
                self.starts.pop(command.close_consumer.consumer_id, None)
            case _:
                pass
        super()._take(frame)

    def _open(self, command: CommandSubscribe) -> None:
        self.subscriptions.append(command)
        if self.error is not None:
            self.say("error", CommandError(request_id=command.request_id, error=self.error, message="no"))
            return
        number, start = command.consumer_id, command.start_message_id
        self.starts[number] = self._next[number] = start.ledgerId, start.entryId
        self._permits[number] = 0
        self.say("success", CommandSuccess(request_id=command.request_id))
        # The client knows nothing of this reader.
        self.say("active_consumer_change", CommandActiveConsumerChange(consumer_id=number, is_active=True))
        self.say("reachedEndOfTopic", CommandReachedEndOfTopic(consumer_id=number))

    def _send(self, number: int) -> None:
        if self.closes:
            self.say("close_consumer", CommandCloseConsumer(consumer_id=number, request_id=NO_ENTRY))
            return
        for place in sorted(self.entries):
            if place >= self._next[number] and self._permits[number] > 0:
                self.tell(place, number)
                self._next[number] = place[0], place[1] + 1
                self._permits[number] -= 3 if self.entries[place] is BATCH else 1

    def _say_last(self, command: CommandGetLastMessageId) -> None:
        place = max(self.entries, default=(1, NO_ENTRY))
        last = MessageIdData(
            ledgerId=place[0], entryId=place[1], partition=4, batch_index=2 if self.entries.get(place) is BATCH else -1
        )
        answer = CommandGetLastMessageIdResponse(request_id=command.request_id, last_message_id=last)
        if (start := self.starts.get(command.consumer_id)) is not None:
            before = max((one for one in self.entries if one < start), default=(start[0], NO_ENTRY))
            answer.consumer_mark_delete_position.CopyFrom(MessageIdData(ledgerId=before[0], entryId=before[1]))
        elif self.mark is not None:
            answer.consumer_mark_delete_position.CopyFrom(self.mark)
        self.say("getLastMessageIdResponse", answer)

    def tell(self, place: Place, consumer_id: int = 1) -> bytes:
        """Send an entry. Return its frame."""
        place_data = MessageIdData(ledgerId=place[0], entryId=place[1], partition=4)
        sent = message_frame(self.entries[place], CommandMessage(consumer_id=consumer_id, message_id=place_data))
        self.writers[-1].write(sent)
        return sent


@pytest.fixture
async def broker() -> AsyncIterator[LogBroker]:
    one = LogBroker()
    await one.start()
    yield one
    await one.listener.close()


@pytest.fixture
def brokers(broker: LogBroker) -> list[LogBroker]:
    return [broker]


async def subscribe(passing: BrokerPass, broker: LogBroker, topic: str = TOPIC, **more: Any) -> None:
    command = CommandSubscribe(
        topic=topic, subscription="s", consumer_id=1, request_id=7, force_topic_creation=False, **more
    )
    await passing.take(frame("subscribe", command))
    await broker.next_of("subscribe")


async def raw_frame(client: FakeClient) -> bytes:
    while not client.got:
        client.has_more.clear()
        await client.has_more.wait()
    return client.got.pop(0)


@pytest.mark.parametrize("own", OWN.values(), ids=list(OWN))
async def test_an_own_entry_is_acknowledged_for_the_consumer_and_its_permit_given_back(
    passing: BrokerPass, broker: LogBroker, client: FakeClient, own: WireEntry
) -> None:
    await subscribe(passing, broker)
    broker.entries = {(5, 0): own, (5, 1): BATCH}
    broker.tell((5, 0))
    ack, flow = [(await broker.next_of(field)).command for field in ("ack", "flow")]
    assert (ack.ack.consumer_id, ack.ack.ack_type) == (1, CommandAck.Individual)
    assert [(one.ledgerId, one.entryId, one.partition) for one in ack.ack.message_id] == [(5, 0, 4)]
    assert not ack.ack.request_id
    assert (flow.flow.consumer_id, flow.flow.messagePermits) == (1, 1)
    # The next message is the first that the client gets.
    sent = broker.tell((5, 1))
    assert await raw_frame(client) == sent
    assert not [one for one in broker.received if one.field in ("ack", "flow")]


async def test_own_entries_that_arrive_together_are_acknowledged_together(
    passing: BrokerPass, broker: LogBroker, client: FakeClient
) -> None:
    await subscribe(passing, broker)
    broker.entries = {(5, k): BATCH if k == 2 else native_control() for k in range(5)}
    sent = [broker.tell(place) for place in broker.entries]
    assert await raw_frame(client) == sent[2]
    acknowledged, permits = list[int](), 0
    while len(acknowledged) < 4:
        acknowledged += [one.entryId for one in (await broker.next_of("ack")).command.ack.message_id]
        permits += (await broker.next_of("flow")).command.flow.messagePermits
    assert acknowledged == [0, 1, 3, 4]
    assert permits == 4


@pytest.mark.parametrize(
    "other", [*OTHERS.values(), native_marker()._replace(metadata=b"\xff")], ids=[*OTHERS, "broken"]
)
async def test_what_is_not_own_passes_unchanged(
    passing: BrokerPass, broker: LogBroker, client: FakeClient, other: WireEntry
) -> None:
    await subscribe(passing, broker)
    broker.entries = {(5, 0): other}
    sent = broker.tell((5, 0))
    assert await raw_frame(client) == sent
    cut = message_frame(native_marker())
    cut = (len(cut) - 54).to_bytes(4, "big") + cut[4:-50]
    broker.writers[-1].write(cut)
    assert await raw_frame(client) == cut
    assert not [one for one in broker.received if one.field in ("ack", "flow")]


async def test_topics_outside_the_sidecars_namespaces_have_no_own_entries(
    passing: BrokerPass, broker: LogBroker, client: FakeClient
) -> None:
    await subscribe(passing, broker, ELSEWHERE)
    broker.entries = {(5, 0): native_marker()}
    sent = broker.tell((5, 0))
    assert await raw_frame(client) == sent
    assert await last(passing, client) == (5, 0, -1)
    assert not broker.subscriptions


async def test_a_consumer_may_ask_for_own_entries(passing: BrokerPass, broker: LogBroker, client: FakeClient) -> None:
    await subscribe(passing, broker, metadata=[Property(key=b"x", value=b"y"), SHOW_OWN])
    broker.entries = {(5, 0): native_marker()}
    sent = broker.tell((5, 0))
    assert await raw_frame(client) == sent
    assert await last(passing, client) == (5, 0, -1)
    assert not [one for one in broker.received if one.field in ("ack", "flow")]


async def last(passing: BrokerPass, client: FakeClient, number: int = 8) -> tuple[int, int, int]:
    await passing.take(frame("getLastMessageId", CommandGetLastMessageId(consumer_id=1, request_id=number)))
    answer = (await client.next()).getLastMessageIdResponse
    found = answer.last_message_id
    assert answer.request_id == number
    assert found.partition == 4
    return found.ledgerId, found.entryId, found.batch_index


SINGLE = OTHERS["plain message"]
LASTS: dict[str, tuple[dict[Place, WireEntry], tuple[int, int, int]]] = {
    "no entry": ({}, (1, NO_ENTRY, -1)),
    "a batch": ({(5, 0): native_marker(), (5, 1): BATCH}, (5, 1, 2)),
    "a message": ({(5, 0): native_marker(), (5, 1): SINGLE}, (5, 1, -1)),
    "own after a batch": ({(5, 0): BATCH, (5, 1): native_control()}, (5, 0, 2)),
    "own after a message": ({(5, 0): BATCH, (5, 1): SINGLE, (5, 2): native_control()}, (5, 1, -1)),
    "many own": ({(5, 7): BATCH, (5, 8): BATCH} | {(5, 9 + k): native_control() for k in range(100)}, (5, 8, 2)),
    "own in the next ledger": ({(5, 0): BATCH, (7, 0): native_marker(), (7, 1): native_control()}, (5, 0, 2)),
    "own alone": ({(5, 0): native_marker(), (5, 1): native_control()}, (5, NO_ENTRY, -1)),
    "own alone in ledgers": (
        {(5, 3): native_marker(), (7, 0): native_marker(), (9, 0): native_marker()},
        (9, NO_ENTRY, -1),
    ),
}


@pytest.mark.parametrize(("entries", "expected"), LASTS.values(), ids=list(LASTS))
async def test_the_last_message_is_the_last_that_is_not_own(
    passing: BrokerPass,
    broker: LogBroker,
    client: FakeClient,
    entries: dict[Place, WireEntry],
    expected: tuple[int, int, int],
) -> None:
    await subscribe(passing, broker, read_compacted=True)
    broker.entries = entries
    assert await last(passing, client) == expected
    readers = len(broker.subscriptions)
    assert all(one.read_compacted and not one.force_topic_creation for one in broker.subscriptions)
    assert len({one.subscription for one in broker.subscriptions}) == readers
    # Nothing is read again until the topic has another last entry.
    assert await last(passing, client, 9) == expected
    assert len(broker.subscriptions) == readers
    broker.entries[9, 1000] = BATCH
    assert await last(passing, client, 10) == (9, 1000, 2)
    # The broker has received the end of every reader when it answers the next request.
    assert await last(passing, client, 11) == (9, 1000, 2)
    assert not broker.starts
    assert not client.got


async def test_a_last_message_that_pulsar_has_removed_is_not_named_for_long(
    passing: BrokerPass, broker: LogBroker, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: as long as the consumer stayed, it was named, and a reader waited for it."""
    await subscribe(passing, broker)
    broker.entries = {(5, 0): BATCH, (7, 0): native_control()}
    assert await last(passing, client) == (5, 0, 2)
    del broker.entries[5, 0]
    monkeypatch.setattr(own_entries, "KNOWN_SECONDS", 0.0)
    assert await last(passing, client, 9) == (7, NO_ENTRY, -1)


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        ((4, 9), (4, 9)),
        ((5, NO_ENTRY), (5, NO_ENTRY)),
        ((5, 0), (5, 0)),
        ((5, 1), (5, 1)),
        ((5, 2), (5, 1)),
        ((7, NO_ENTRY), (5, 1)),
        ((7, 0), (5, 1)),
    ],
)
async def test_a_consumer_of_all_messages_has_none_left(
    passing: BrokerPass, broker: LogBroker, client: FakeClient, mark: Place, expected: Place
) -> None:
    """Whatever own entries follow: clients compare its position with the last message."""
    await subscribe(passing, broker)
    broker.entries = {(5, 0): BATCH, (5, 1): BATCH, (5, 2): native_control(), (7, 0): native_marker()}
    broker.mark = MessageIdData(ledgerId=mark[0], entryId=mark[1])
    await passing.take(frame("getLastMessageId", CommandGetLastMessageId(consumer_id=1, request_id=8)))
    answer = (await client.next()).getLastMessageIdResponse
    found = answer.consumer_mark_delete_position
    assert (found.ledgerId, found.entryId) == expected
    assert (answer.last_message_id.ledgerId, answer.last_message_id.entryId) == (5, 1)


async def test_a_broker_that_refuses_to_show_the_last_entry_refuses_the_client(
    passing: BrokerPass, broker: LogBroker, client: FakeClient
) -> None:
    await subscribe(passing, broker)
    broker.entries = {(5, 0): BATCH, (5, 1): native_control()}
    broker.error = ServerError.ConsumerBusy
    await passing.take(frame("getLastMessageId", CommandGetLastMessageId(consumer_id=1, request_id=8)))
    request_id, _, code = await client.error()
    assert (request_id, code) == (8, ServerError.ConsumerBusy)
    broker.error, broker.closes = None, True
    await passing.take(frame("getLastMessageId", CommandGetLastMessageId(consumer_id=1, request_id=9)))
    request_id, e, _ = await client.error()
    assert (request_id, e.reason) == (9, "LOG_REFUSED")
    broker.closes = False
    assert await last(passing, client, 10) == (5, 0, 2)
    assert not client.is_aborted.is_set()


async def test_a_last_entry_that_does_not_come_is_an_error(
    passing: BrokerPass, broker: LogBroker, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_entries, "TIMEOUT_SECONDS", 0.1)
    await subscribe(passing, broker)
    broker.entries = {(5, 0): native_control()}
    monkeypatch.setattr(broker, "_send", lambda number: None)
    await passing.take(frame("getLastMessageId", CommandGetLastMessageId(consumer_id=1, request_id=8)))
    request_id, e, _ = await client.error()
    assert (request_id, e.reason) == (8, "LOG_REFUSED")


async def test_questions_that_come_at_once_share_an_answer(
    passing: BrokerPass, broker: LogBroker, client: FakeClient
) -> None:
    """The control: each of them opened a reader at the broker, all at the same time."""
    await subscribe(passing, broker)
    broker.entries = {(5, 0): BATCH} | {(5, 1 + k): native_control() for k in range(20)}
    for k in range(1000):
        await passing.take(frame("getLastMessageId", CommandGetLastMessageId(consumer_id=1, request_id=100 + k)))
    answers = [(await client.next()).getLastMessageIdResponse for _ in range(1000)]
    assert sorted(answer.request_id for answer in answers) == list(range(100, 1100))
    assert {answer.last_message_id.entryId for answer in answers} == {0}
    assert len(broker.subscriptions) < 20


async def test_the_last_message_of_a_compacted_read_is_one_that_clients_do_not_skip(
    passing: BrokerPass, broker: LogBroker, client: FakeClient
) -> None:
    """The control: Java's client waited for the message that was compacted away."""
    await subscribe(passing, broker, read_compacted=True)
    payload = b""
    for k in range(3):
        row = SingleMessageMetadata(payload_size=0, partition_key=b"k%d" % k, compacted_out=True if k else None)
        payload += struct.pack(">I", row.ByteSize()) + row.SerializeToString()
    broker.entries = {(5, 0): BATCH._replace(payload=payload), (5, 1): native_marker()}
    assert await last(passing, client) == (5, 0, 0)


def test_a_compressed_entry_is_not_own() -> None:
    """It may be huge when decompressed."""
    metadata = metadata_of(single(topics.marker(1)))
    metadata.compression, metadata.uncompressed_size = ZLIB, 1 << 26
    entry = WireEntry(metadata.SerializeToString(), zlib.compress(bytes(1 << 26)))
    assert not is_own(content_of(entry))
