"""Consumers and readers at the door, command by command."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker_sidecar.door.subscriptions import MAX_RANGES
from seqdedupe.client.blocking import Client
from seqdedupe.pulsar_wire.frames import command_frame, command_of
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    BaseCommand,
    CommandGetLastMessageId,
    CommandRedeliverUnacknowledgedMessages,
    CommandSeek,
    CommandSubscribe,
    CommandUnsubscribe,
    MessageIdData,
    Schema,
    ServerError,
)
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import read_pb2
from tests.broker_sidecar import calls
from tests.broker_sidecar.door.wire import Wire, batch, door_of, ids_of, single
from tests.broker_sidecar.pausing import wait_for
from tests.broker_sidecar.security.signing import AUDIENCE, Issuer, write_keys

Connect = Callable[..., Wire]

NO_ENTRY = 2**64 - 1
EXCLUSIVE, SHARED, FAILOVER = CommandSubscribe.Exclusive, CommandSubscribe.Shared, CommandSubscribe.Failover
MEBIBYTE = 1 << 20


@pytest.fixture
def connect(shared: Sidecar, open_wire: Connect) -> Connect:
    return lambda **how: open_wire(door_of(shared), **how)


@pytest.fixture
def wire(connect: Connect) -> Wire:
    return connect()


def publish(wire: Wire, topic: str, count: int, size: int = 0) -> None:
    """Publishes messages whose index is their sequence ID, one in a batch."""
    wire.produce(topic, "publisher", 99)
    for i in range(count):
        wire.send(i, single(i, bytes(size) if size else None), producer_id=99)
    assert ids_of(wire.receipts(count)) == list(range(count))
    wire.close_producer(99)


def incarnation_of(wire: Wire, topic: str) -> int:
    """Of a topic with messages."""
    wire.subscribe(topic, "finder", 77, durable=False)
    wire.tell("getLastMessageId", CommandGetLastMessageId(consumer_id=77, request_id=1))
    found = wire.next().getLastMessageIdResponse.last_message_id.ledgerId
    wire.close_consumer(77)
    return found


def cursor_index(sidecar: Sidecar, topic: str, name: str = "s") -> int | None:
    """The index of the message at which a cursor stands. None: there is no cursor."""
    with Client(sidecar.address) as client:
        return next((one.position.index for one in client.admin.cursors(topic) if one.name == name), None)


def wait_for_cursor(sidecar: Sidecar, topic: str, index: int) -> None:
    wait_for(lambda: cursor_index(sidecar, topic) == index)


def error_of(command: BaseCommand) -> tuple[int, str]:
    assert command.type == BaseCommand.ERROR, command
    return command.error.error, command.error.message


# -- what a consumer gets ---------------------------------------------------------------------------------------------


def test_nothing_comes_without_a_permit(wire: Wire, topic: str) -> None:
    publish(wire, topic, 10)
    assert wire.subscribe(topic).type == BaseCommand.SUCCESS
    assert wire.is_silent()
    assert wire.messages(3) == [0, 1, 2]
    assert wire.is_silent()
    assert wire.messages(7) == [3, 4, 5, 6, 7, 8, 9]
    wire.flow(5)
    assert wire.is_silent()
    publish(wire, topic, 0)


def test_messages_come_as_they_are_published(wire: Wire, connect: Connect, topic: str) -> None:
    wire.subscribe(topic)
    wire.flow(2)
    other = connect()
    other.produce(topic)
    for i in range(2):
        other.send(i, single(i))
        [(_, entry)] = other.receipts(1)
        assert wire.message().command.message_id.entryId == entry
    other.send(2, single(2))
    other.receipts(1)
    assert wire.is_silent()


def test_a_message_is_what_its_producer_gave(wire: Wire, topic: str) -> None:
    wire.produce(topic)
    properties = ((b"a", b"1"), (b"b", "ü".encode()))
    wire.send(3, batch(3, 7, key=b"k", ordering_key=b"\xff", event_time=12, properties=properties), highest=7)
    wire.send(8, single(8, b"payload", partition_key=b"/wA=", partition_key_b64_encoded=True, null_value=True))
    wire.send(9, single(9, partition_key=b""))
    receipts = wire.receipts(3)
    wire.subscribe(topic)
    wire.flow(4)
    first, second, third, fourth = (wire.message() for _ in range(4))
    assert (first.payload, second.payload) == (b"p/3", b"p/7")
    assert [one.metadata.sequence_id for one in (first, second, third, fourth)] == [3, 7, 8, 9]
    assert first.metadata.producer_name == b"p"
    assert first.metadata.partition_key == b"k"
    assert first.metadata.ordering_key == b"\xff"
    assert first.metadata.event_time == 12
    assert [(pair.key, pair.value) for pair in first.metadata.properties] == list(properties)
    assert first.metadata.publish_time > 1_700_000_000_000
    assert (third.payload, third.metadata.null_value) == (b"", True)
    assert (third.metadata.partition_key, third.metadata.partition_key_b64_encoded) == (b"/wA=", True)
    assert fourth.metadata.HasField("partition_key")
    assert not fourth.metadata.HasField("event_time")
    # The ID is that of the receipt.
    assert [one.command.message_id.entryId for one in (third, fourth)] == [entry for _, entry in receipts[1:]]
    assert not fourth.command.message_id.HasField("batch_index")


def test_a_topic_of_deduplication_ids(wire: Wire, shared: Sidecar, topic: str) -> None:
    with Client(shared.address) as client:
        client.admin.create_topic(topic, deduplication_mode="deduplication-id")
        with client.publisher(topic) as publisher:
            publisher.send(b"m", deduplication_id="1")
    wire.subscribe(topic)
    wire.flow(1)
    message = wire.message()
    assert (message.payload, message.metadata.producer_name) == (b"m", b"")
    assert message.metadata.sequence_id == NO_ENTRY


def test_where_a_subscription_begins(wire: Wire, shared: Sidecar, topic: str) -> None:
    publish(wire, topic, 3)
    wire.subscribe(topic, "first", 1)
    wire.subscribe(topic, "last", 2, initialPosition=CommandSubscribe.Latest)
    assert cursor_index(shared, topic, "first") == -1
    assert cursor_index(shared, topic, "last") == 2
    wire.flow(10, 2)
    assert wire.is_silent()
    assert wire.messages(3, 1) == [0, 1, 2]


def test_large_messages_wait_for_the_client(shared: Sidecar, connect: Connect, topic: str) -> None:
    """The control: with permits for all, the sidecar would hold all that a client does not read."""
    connected = connect()
    publish(connected, topic, 100, MEBIBYTE)
    wires = [connect() for _ in range(4)]
    for k, wire in enumerate(wires):
        wire.subscribe(topic, f"s{k}")
    before = memory_of(shared)
    for wire in wires:
        wire.flow(1_000)
    # Each has received something, and no one reads on.
    assert [wire.message().command.message_id.entryId for wire in wires] == [0] * 4
    # Time enough for everything, if the sidecar would send it.
    assert all(connected.is_silent() for _ in range(2_000))
    assert memory_of(shared) - before < 60 * MEBIBYTE
    assert [wires[0].message().command.message_id.entryId for _ in range(99)] == list(range(1, 100))


def memory_of(sidecar: Sidecar) -> int:
    """The bytes that its process has."""
    lines = Path(f"/proc/{sidecar.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def test_a_client_that_reads_nothing_loses_its_connection(tmp_path: Path, open_wire: Connect) -> None:
    """When others wait for the memory. The control: each consumer wrote a message that nobody read, one after another,
    also those that came after others had been ended."""
    with Sidecar(tmp_path, pulsar_listen="127.0.0.1:0") as sidecar:
        publish(open_wire(door_of(sidecar)), "t", 2, 4 * MEBIBYTE)
        wire = open_wire(door_of(sidecar))
        for k in range(12):
            wire.ask_to_subscribe("t", consumer_id=k, durable=False)
            wire.flow(2, k)
        wait_for(lambda: any("client reads nothing" in entry["event"] for entry in sidecar.log))
        size = 0
        while data := wire.socket.recv(MEBIBYTE):
            size += len(data)
        assert size < 6 * MEBIBYTE


def test_too_many_consumers_of_a_connection(tmp_path: Path, open_wire: Connect) -> None:
    """One that has nothing to do gives way. The control: the connection with all of them did, since it sends nothing
    but commands of consumers."""
    with Sidecar(tmp_path, pulsar_listen="127.0.0.1:0", max_streams=8) as sidecar:
        wire = open_wire(door_of(sidecar))
        for k in range(3):
            assert wire.subscribe("t", consumer_id=k, durable=False).type == BaseCommand.SUCCESS
        answers = []

        def ended_one() -> bool:
            answers.append(wire.subscribe("t", consumer_id=9, durable=False))
            return answers[-1].type != BaseCommand.ERROR

        wait_for(ended_one)
        assert {answers[-1].type, wire.next().type} == {BaseCommand.SUCCESS, BaseCommand.CLOSE_CONSUMER}


# -- acknowledgements -------------------------------------------------------------------------------------------------


def test_the_cursor_stands_before_the_first_hole(wire: Wire, shared: Sidecar, topic: str) -> None:
    publish(wire, topic, 10)
    incarnation = incarnation_of(wire, topic)
    wire.subscribe(topic)
    assert wire.messages(10) == list(range(10))
    for index in (1, 2, 5, 0, 9):
        answer = wire.acknowledge(incarnation, index)
        assert answer.type == BaseCommand.ACK_RESPONSE
        assert not answer.ackResponse.HasField("error")
    wire.close_consumer()
    assert cursor_index(shared, topic) == 2
    # What lies behind the hole comes again.
    wire.subscribe(topic)
    assert wire.messages(7) == [3, 4, 5, 6, 7, 8, 9]


def test_the_cursor_moves_while_the_consumer_works(wire: Wire, shared: Sidecar, topic: str) -> None:
    publish(wire, topic, 10)
    incarnation = incarnation_of(wire, topic)
    wire.subscribe(topic)
    wire.messages(10)
    for index in (4, 6, 8):
        wire.acknowledge_up_to(incarnation, index)
        wait_for_cursor(shared, topic, index)


def test_a_consumer_closes_while_its_cursor_moves(wire: Wire, shared: Sidecar, topic: str) -> None:
    """The control: the move was cancelled, and the last move did not know whether it had taken place."""
    publish(wire, topic, 30)
    incarnation = incarnation_of(wire, topic)
    for index in range(30):
        assert wire.subscribe(topic).type == BaseCommand.SUCCESS
        assert wire.messages(1) == [index]
        wire.acknowledge(incarnation, index)
        wire.close_consumer()
        assert cursor_index(shared, topic) == index


def test_redelivery_omits_what_is_acknowledged(wire: Wire, topic: str) -> None:
    publish(wire, topic, 6)
    incarnation = incarnation_of(wire, topic)
    wire.subscribe(topic, consumer_epoch=0)
    wire.messages(6)
    wire.acknowledge(incarnation, 0, 3)
    wire.tell(
        "redeliverUnacknowledgedMessages", CommandRedeliverUnacknowledgedMessages(consumer_id=1, consumer_epoch=4)
    )
    wire.flow(4)
    again = [wire.message() for _ in range(4)]
    assert [one.command.message_id.entryId for one in again] == [1, 2, 4, 5]
    # By its epoch a client knows what was sent before.
    assert {one.command.consumer_epoch for one in again} == {4}
    assert wire.is_silent()


def test_acknowledgements_that_are_none(wire: Wire, shared: Sidecar, topic: str) -> None:
    publish(wire, topic, 3)
    incarnation = incarnation_of(wire, topic)
    wire.subscribe(topic)
    wire.messages(3)
    for answer in (
        wire.acknowledge_up_to(incarnation, 3),
        wire.acknowledge_up_to(incarnation + 1, 1),
        wire.acknowledge_up_to(NO_ENTRY, NO_ENTRY),
        wire.acknowledge(incarnation, 1, consumer_id=5),
        wire.acknowledge(incarnation, 1, txnid_most_bits=1),
    ):
        assert answer.ackResponse.error == ServerError.NotAllowedError
    wire.close_consumer()
    assert cursor_index(shared, topic) == -1


def test_a_topic_that_is_deleted_while_its_consumer_has_no_permits(wire: Wire, shared: Sidecar, topic: str) -> None:
    """The control: the consumer read on in the deleted log, and its client was told for good that it is damaged."""
    publish(wire, topic, 3)
    wire.subscribe(topic)
    assert wire.messages(1) == [0]
    with Client(shared.address) as client:
        client.admin.delete_topic(topic)
    publish(wire, topic, 2)
    wire.flow(1)
    assert wire.next().type == BaseCommand.CLOSE_CONSUMER
    assert wire.subscribe(topic).type == BaseCommand.SUCCESS
    assert wire.messages(2) == [0, 1]


def test_who_moves_the_cursor_otherwise_ends_the_consumer(
    wire: Wire, shared: Sidecar, client: calls.Client, topic: str
) -> None:
    """It begins again where the cursor stands now. Moved past a hole, it skips it: nobody else may do this."""
    publish(wire, topic, 10)
    incarnation = incarnation_of(wire, topic)
    wire.subscribe(topic)
    wire.messages(10)
    kept = client.reading.GetCursor(read_pb2.GetCursorRequest(topic=topic, name="s")).kept
    moved = read_pb2.CursorValue(position=kept.position)
    moved.position.index = 6
    request = read_pb2.MoveCursorRequest(topic=topic, name="s", expected=kept, new=moved)
    client.reading.MoveCursor(request)
    wire.acknowledge_up_to(incarnation, 3)
    assert wire.next().type == BaseCommand.CLOSE_CONSUMER
    assert cursor_index(shared, topic) == 6
    assert wire.subscribe(topic).type == BaseCommand.SUCCESS
    assert wire.messages(3) == [7, 8, 9]


def test_a_kill_repeats_only_what_the_cursor_has_not_passed(tmp_path: Path) -> None:
    """Nothing is skipped, and nothing comes again that the cursor has passed."""
    with Sidecar(tmp_path, pulsar_listen="127.0.0.1:0") as sidecar:
        wire = Wire(door_of(sidecar))
        publish(wire, "t", 60)
        incarnation = incarnation_of(wire, "t")
        first = 0
        for last in (10, 25, 40):
            assert wire.subscribe("t").type == BaseCommand.SUCCESS
            assert wire.messages(60 - first) == list(range(first, 60))
            wire.acknowledge(incarnation, last + 5)
            wire.acknowledge_up_to(incarnation, last)
            wait_for_cursor(sidecar, "t", last)
            wire.close()
            sidecar.restart()
            wire = Wire(door_of(sidecar))
            first = last + 1
        # A stop moves the cursor, also right after an acknowledgement.
        wire.subscribe("t")
        wire.messages(1)
        wire.acknowledge_up_to(incarnation, 50)
        wire.acknowledge_up_to(incarnation, 52)
        sidecar.stop()
        sidecar.start()
        assert cursor_index(sidecar, "t") == 52
        wire.close()


def test_acknowledgements_that_were_forgotten(wire: Wire, shared: Sidecar, topic: str) -> None:
    """Their messages come again when the cursor reaches them. The control: the cursor stayed there for ever."""
    count = 2 * MAX_RANGES + 100
    publish(wire, topic, count)
    incarnation = incarnation_of(wire, topic)
    wire.subscribe(topic)
    wire.messages(count)
    wire.acknowledge(incarnation, *range(1, count, 2))
    wire.acknowledge(incarnation, *range(0, count, 2))
    again = wire.messages(50)
    assert again == list(range(2 * MAX_RANGES + 1, count, 2))
    wire.acknowledge(incarnation, *again)
    wait_for_cursor(shared, topic, count - 1)


# -- several consumers ------------------------------------------------------------------------------------------------


def test_a_second_exclusive_consumer(wire: Wire, connect: Connect, topic: str) -> None:
    publish(wire, topic, 1)
    wire.subscribe(topic)
    other = connect()
    other.ask_to_subscribe(topic)
    # The first client must show that it is there.
    wire.answer_ping()
    code, message = error_of(other.next())
    assert code == ServerError.ConsumerBusy
    assert "[CONSUMER_BUSY]" in message
    other.ask_to_subscribe(topic, subType=FAILOVER)
    wire.answer_ping()
    assert error_of(other.next())[0] == ServerError.ConsumerBusy
    wire.close_consumer()
    assert other.subscribe(topic).type == BaseCommand.SUCCESS
    assert other.messages(1) == [0]


def test_a_client_that_is_gone_makes_room(connect: Connect, topic: str) -> None:
    gone, other = connect(), connect()
    publish(gone, topic, 4)
    incarnation = incarnation_of(gone, topic)
    gone.subscribe(topic)
    gone.messages(4)
    gone.acknowledge(incarnation, 0)
    # It does not answer the question whether it is there.
    assert other.subscribe(topic).type == BaseCommand.SUCCESS
    assert other.messages(3) == [1, 2, 3]
    gone.answer_ping()
    with pytest.raises((EOFError, ConnectionError)):
        gone.next()


def test_the_next_consumer_takes_over(connect: Connect, topic: str) -> None:
    wires = [connect() for _ in range(3)]
    publish(wires[0], topic, 6)
    incarnation = incarnation_of(wires[0], topic)
    for k, wire in enumerate(wires):
        wire.ask_to_subscribe(topic, subType=FAILOVER, priority_level=(0, 2, 1)[k])
        if k:
            wires[0].answer_ping()
        assert wire.next().type == BaseCommand.SUCCESS
        change = wire.next()
        assert change.type == BaseCommand.ACTIVE_CONSUMER_CHANGE
        assert change.active_consumer_change.is_active == (k == 0)
    for wire in wires:
        wire.flow(10)
    assert [wires[0].message().command.message_id.entryId for _ in range(6)] == list(range(6))
    assert wires[1].is_silent()
    assert wires[1].acknowledge(incarnation, 0).ackResponse.error == ServerError.NotAllowedError
    wires[1].tell("unsubscribe", CommandUnsubscribe(consumer_id=1, request_id=4))
    assert error_of(wires[1].next())[0] == ServerError.NotAllowedError
    wires[0].acknowledge(incarnation, 0, 1)
    wires[0].close()
    # The lower level comes first.
    assert wires[2].next().active_consumer_change.is_active
    assert [wires[2].message().command.message_id.entryId for _ in range(4)] == [2, 3, 4, 5]
    wires[2].close_consumer()
    assert wires[1].next().active_consumer_change.is_active
    assert wires[1].message().command.message_id.entryId == 2


def test_a_consumer_of_the_same_id_replaces_the_first(wire: Wire, topic: str) -> None:
    publish(wire, topic, 2)
    wire.subscribe(topic)
    assert wire.messages(2) == [0, 1]
    assert wire.subscribe(topic).type == BaseCommand.SUCCESS
    assert wire.messages(2) == [0, 1]


def test_a_connection_that_ends_while_a_consumer_is_replaced(connect: Connect, topic: str) -> None:
    """All in one step: the second one has not begun. The control: the first one had the subscription for ever."""
    wire = connect()
    publish(wire, topic, 1)
    gone = connect()
    commands = [
        CommandSubscribe(
            topic=topic,
            subscription="s",
            consumer_id=1,
            request_id=k,
            subType=EXCLUSIVE,
            initialPosition=CommandSubscribe.Earliest,
        )
        for k in range(2)
    ]
    gone.socket.sendall(b"".join(command_frame(command_of("subscribe", one)) for one in commands))
    gone.close()
    assert wire.subscribe(topic).type == BaseCommand.SUCCESS
    assert wire.messages(1) == [0]


# -- readers ----------------------------------------------------------------------------------------------------------


def test_where_a_reader_begins(wire: Wire, shared: Sidecar, topic: str) -> None:
    """With the message of its start ID: the client omits it, unless it wants it."""
    publish(wire, topic, 5)
    incarnation = incarnation_of(wire, topic)
    starts = {
        (incarnation, 3): [3, 4],
        (NO_ENTRY, NO_ENTRY): [0, 1, 2, 3, 4],
        (2**63 - 1, 2**63 - 1): [],
        (incarnation, 99): [],
        (incarnation, NO_ENTRY): [0, 1, 2, 3, 4],
    }
    for k, ((ledger, entry), found) in enumerate(starts.items()):
        start = MessageIdData(ledgerId=ledger, entryId=entry)
        wire.subscribe(topic, "r", k, durable=False, start_message_id=start)
        assert wire.messages(len(found), k) == found
        wire.flow(1, k)
        assert wire.is_silent()
    assert cursor_index(shared, topic, "r") is None
    other = MessageIdData(ledgerId=incarnation + 1, entryId=0)
    code, message = error_of(wire.subscribe(topic, "r", 50, durable=False, start_message_id=other))
    assert code == ServerError.NotAllowedError
    assert "POSITION_OF_ANOTHER_INCARNATION" in message


def test_the_last_message(wire: Wire, topic: str) -> None:
    def last() -> tuple[int, int]:
        wire.tell("getLastMessageId", CommandGetLastMessageId(consumer_id=1, request_id=5))
        answer = wire.next().getLastMessageIdResponse
        assert answer.request_id == 5
        return answer.last_message_id.entryId, answer.consumer_mark_delete_position.entryId

    wire.subscribe(topic)
    assert last() == (NO_ENTRY, NO_ENTRY)
    publish(wire, topic, 3)
    assert last() == (2, NO_ENTRY)
    incarnation = incarnation_of(wire, topic)
    wire.acknowledge_up_to(incarnation, 1)
    assert last() == (2, 1)


@pytest.mark.parametrize("is_durable", [True, False])
def test_a_consumer_seeks(wire: Wire, topic: str, is_durable: bool) -> None:
    publish(wire, topic, 5)
    incarnation = incarnation_of(wire, topic)
    wire.subscribe(topic, durable=is_durable)
    wire.flow(5)
    messages = [wire.message() for _ in range(5)]
    wire.acknowledge(incarnation, 0, 1, 2)
    time = messages[0].metadata.publish_time
    for where, found in (
        ({"message_id": MessageIdData(ledgerId=incarnation, entryId=2)}, [2, 3, 4]),
        ({"message_publish_time": time}, [0, 1, 2, 3, 4]),
        ({"message_id": MessageIdData(ledgerId=2**63 - 1, entryId=2**63 - 1)}, []),
        ({"message_id": MessageIdData(ledgerId=NO_ENTRY, entryId=NO_ENTRY)}, [0, 1, 2, 3, 4]),
        ({"message_publish_time": 2**64 - 1}, []),
    ):
        fields: Any = where
        wire.tell("seek", CommandSeek(consumer_id=1, request_id=9, **fields))
        # The consumer subscribes again. Nothing of before the seek can follow.
        assert wire.next().type == BaseCommand.CLOSE_CONSUMER
        answer = wire.next()
        assert (answer.type, answer.success.request_id) == (BaseCommand.SUCCESS, 9), answer
        wire.subscribe(topic, durable=is_durable)
        assert wire.messages(len(found)) == found
        wire.flow(1)
        assert wire.is_silent()


def test_a_reader_that_has_sought_must_subscribe_twice(tmp_path: Path, open_wire: Connect) -> None:
    """The control: it began where the client had begun, and omitted what it had sought."""
    with Sidecar(tmp_path, pulsar_listen="127.0.0.1:0", max_streams=4) as sidecar:
        wire = open_wire(door_of(sidecar))
        publish(wire, "t", 3)
        last = MessageIdData(ledgerId=2**63 - 1, entryId=2**63 - 1)
        wire.subscribe("t", durable=False, start_message_id=last)
        wire.tell("seek", CommandSeek(consumer_id=1, request_id=9, message_publish_time=0))
        assert wire.next().type == BaseCommand.CLOSE_CONSUMER
        assert wire.next().success.request_id == 9
        # There is no place, for less than the time after which another stream gives way.
        assert wire.subscribe("t", "other", 2, durable=False).type == BaseCommand.SUCCESS
        assert error_of(wire.subscribe("t", durable=False, start_message_id=last))[1].count("TOO_MANY_STREAMS")
        wire.close_consumer(2)
        assert wire.subscribe("t", durable=False, start_message_id=last).type == BaseCommand.SUCCESS
        assert wire.messages(3) == [0, 1, 2]


def test_a_subscription_is_removed(wire: Wire, shared: Sidecar, topic: str) -> None:
    publish(wire, topic, 2)
    wire.subscribe(topic)
    assert cursor_index(shared, topic) == -1
    wire.tell("unsubscribe", CommandUnsubscribe(consumer_id=1, request_id=4))
    assert wire.next().success.request_id == 4
    assert cursor_index(shared, topic) is None


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code", "what"),
    [
        ({"subType": SHARED}, ServerError.NotAllowedError, "has the type Shared"),
        ({"subType": CommandSubscribe.Key_Shared}, ServerError.NotAllowedError, "has the type Key_Shared"),
        ({"read_compacted": True}, ServerError.NotAllowedError, "reads the compacted view"),
        ({"schema": Schema(type=Schema.Json)}, ServerError.NotAllowedError, "has a schema"),
        ({"name": ""}, ServerError.NotAllowedError, "INVALID_NAME"),
        ({"topic": "non-persistent://public/default/t"}, ServerError.InvalidTopicName, "INVALID_TOPIC_NAME"),
        ({"topic": "unknown", "force_topic_creation": False}, ServerError.TopicNotFound, "TOPIC_NOT_FOUND"),
    ],
)
def test_what_is_refused(wire: Wire, fields: dict[str, Any], code: int, what: str) -> None:
    found, message = error_of(wire.subscribe(**{"topic": "t", **fields}))
    assert found == code
    assert what in message
    # The connection goes on.
    assert wire.subscribe("t").type == BaseCommand.SUCCESS


RULES = """
[[allow]]
subjects = ["shop"]
actions = ["read"]
topics = ["persistent://public/default/orders"]
cursors = ["shop-*"]
"""


def test_the_rules_are_those_of_grpc(tmp_path: Path, open_wire: Connect) -> None:
    issuer = Issuer("door")
    (tmp_path / "rules.toml").write_text(RULES)
    keys: dict[str, Any] = {
        "authentication": "token",
        "token_keys_file": write_keys(tmp_path / "keys.json", [issuer.jwk()]),
        "token_audience": AUDIENCE,
        "rules_file": tmp_path / "rules.toml",
    }
    with Sidecar(tmp_path / "sidecar", pulsar_listen="127.0.0.1:0", **keys) as sidecar:
        owner = open_wire(door_of(sidecar), token=sidecar.token_file.read_bytes().strip())
        publish(owner, "orders", 3)
        owner.subscribe("bills")
        wire = open_wire(door_of(sidecar), token=issuer.token().encode())
        for topic, name in (("bills", "shop-1"), ("orders", "other"), ("unknown", "shop-1")):
            assert error_of(wire.subscribe(topic, name))[0] == ServerError.AuthorizationError
        assert wire.subscribe("orders", "shop-1").type == BaseCommand.SUCCESS
        assert wire.subscribe("orders", "any", 2, durable=False).type == BaseCommand.SUCCESS
        assert wire.messages(3) == [0, 1, 2]
        # A removed subscription is an operator's change.
        wire.tell("unsubscribe", CommandUnsubscribe(consumer_id=1, request_id=4))
        assert error_of(wire.next())[0] == ServerError.AuthorizationError
        wire.flow(1)
        (tmp_path / "rules.toml").write_text(RULES.replace("orders", "others"))
        sidecar.signal(1)
        assert {wire.next().type, wire.next().type} == {BaseCommand.CLOSE_CONSUMER}
        for consumer_id, name in ((1, "shop-1"), (2, "any")):
            refused = wire.subscribe("orders", name, consumer_id, durable=consumer_id == 1)
            assert error_of(refused)[0] == ServerError.AuthorizationError
