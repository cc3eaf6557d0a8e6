"""The door, command by command: what each kind of client gets, and what a client that lies gets."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from seqdedupe.pulsar_wire.frames import WireEntry, command_frame
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    LZ4,
    ZLIB,
    BaseCommand,
    CommandPing,
    CommandPong,
    EncryptionKeys,
    Exclusive,
    ExclusiveWithFencing,
    Property,
    Schema,
    ServerError,
    WaitForExclusive,
)
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar import calls
from tests.broker_sidecar.calls import Client
from tests.broker_sidecar.door.wire import CPP, GO, JAVA, Wire, batch, door_of, ids_of, single

NO_ENTRY = 2**64 - 1


@pytest.fixture
def connect(shared: Sidecar, open_wire: Callable[..., Wire]) -> Callable[..., Wire]:
    def connected(client: str = JAVA, *, connects: bool = True) -> Wire:
        return open_wire(door_of(shared), client, connects=connects)

    return connected


@pytest.fixture
def wire(connect: Callable[..., Wire]) -> Wire:
    return connect()


# -- finding the topic, and opening a producer ------------------------------------------------------------------------


def test_it_says_what_it_is(wire: Wire) -> None:
    connected = wire.connected.connected
    assert wire.connected.type == BaseCommand.CONNECTED
    assert connected.server_version.startswith("seqdedupe ")
    assert (connected.protocol_version, connected.max_message_size) == (20, 5 * 1024 * 1024)


def test_every_topic_is_here(wire: Wire, client: Client, topic: str) -> None:
    answer = wire.partitions(topic).partitionMetadataResponse
    assert (answer.response, answer.partitions) == (0, 0)
    assert answer.HasField("response")
    assert answer.HasField("partitions")
    client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=topic, partitions=3))
    assert wire.partitions(topic).partitionMetadataResponse.partitions == 3
    found = wire.look_up(f"{topic}-partition-1").lookupTopicResponse
    # The Java client takes no URL without a port.
    assert urlsplit(found.brokerServiceUrl).port
    assert urlsplit(found.brokerServiceUrlTls).port
    assert (found.response, found.proxy_through_service_url) == (found.Connect, True)


@pytest.mark.parametrize("name", ["non-persistent://public/default/t", "persistent://a", "a b\n"])
def test_a_topic_that_cannot_be_here(wire: Wire, name: str) -> None:
    assert wire.look_up(name).lookupTopicResponse.error == ServerError.InvalidTopicName
    assert wire.partitions(name).partitionMetadataResponse.error == ServerError.InvalidTopicName
    assert wire.refused(name).error == ServerError.InvalidTopicName


def test_a_producer_learns_what_the_topic_has(wire: Wire, topic: str) -> None:
    success = wire.produce(topic)
    assert (success.producer_name, success.last_sequence_id, success.producer_ready) == ("p", -1, True)
    wire.send(0, batch(0, 1, 7), highest=7)
    wire.receipts(1)
    assert wire.close_producer().type == BaseCommand.SUCCESS
    assert wire.produce(topic).last_sequence_id == 7


def test_who_has_no_name_gets_a_new_one(wire: Wire, topic: str) -> None:
    names = [wire.produce(topic, None, k).producer_name for k in range(3)]
    assert len(set(names)) == 3
    assert all(names)


def test_a_name_is_its_owners_as_long_as_that_is_there(
    connect: Callable[..., Wire], wire: Wire, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire.produce(topic)
    assert wire.refused(topic, producer_id=2).error == ServerError.ProducerBusy
    other = connect()
    other.ask_for_producer(topic)
    # The owner's client answers the ping, and keeps the name.
    wire.send(0, batch(0))
    wire.receipts(1)
    assert other.next().error.error == ServerError.ProducerBusy
    wire.close_producer()
    assert other.produce(topic).last_sequence_id == 0


def test_a_connection_that_is_silent_loses_its_names(connect: Callable[..., Wire], topic: str) -> None:
    """As after a client's machine has lost its power: the new connection need not wait for TCP."""
    silent, other = connect(), connect()
    silent.produce(topic)
    other.produce(topic)
    silent.send(0, batch(0))
    with pytest.raises((EOFError, ConnectionError)):
        silent.next()


def test_access_modes(connect: Callable[..., Wire], wire: Wire, topic: str) -> None:
    wire.produce(topic, "alone", 1, producer_access_mode=Exclusive)
    assert wire.refused(topic, "other", 2).error == ServerError.ProducerBusy
    assert wire.refused(topic, "other", 2, producer_access_mode=Exclusive).error == ServerError.ProducerFenced
    wire.close_producer(1)
    wire.produce(topic, "other", 2)
    assert wire.refused(topic, "alone", 1, producer_access_mode=Exclusive).error == ServerError.ProducerFenced
    fencing = connect()
    fencing.produce(topic, "new", producer_access_mode=ExclusiveWithFencing)
    assert wire.next().close_producer.producer_id == 2
    assert wire.refused(topic, "other", 2).error == ServerError.ProducerFenced


def test_a_topic_has_three_names(wire: Wire, client: Client, topic: str) -> None:
    local = topic.rpartition("/")[2]
    for number, name in enumerate((local, f"public/default/{local}", f"persistent://public/default/{local}")):
        assert not wire.partitions(name).partitionMetadataResponse.HasField("error")
        wire.produce(name, f"p{number}", number + 1)
        wire.send(0, single(0, calls.payload_of(f"p{number}", 0)), producer_id=number + 1)
        assert ids_of(wire.receipts(1)) == [0]
    assert len(client.rows(topic)) == 3


def wait_for_turn(wire: Wire, topic: str, name: str, producer_id: int = 1) -> int:
    """Ask for a producer that has to wait. Returns the ID of the request that is answered later."""
    told = wire.produce(topic, name, producer_id, producer_access_mode=WaitForExclusive)
    assert not told.producer_ready
    assert told.producer_name == name
    return int(told.request_id)


def test_producers_wait_for_their_turn(connect: Callable[..., Wire], wire: Wire, topic: str) -> None:
    owner, third = connect(), connect()
    owner.produce(topic, "owner")
    request = wait_for_turn(wire, topic, "second")
    later = wait_for_turn(third, topic, "third")
    # A waiting producer has no session yet, and others are kept out meanwhile, as by a broker.
    owner.send(0, single(0))
    assert ids_of(owner.receipts(1)) == [0]
    assert owner.refused(topic, "fourth", 2).error == ServerError.ProducerBusy
    assert owner.refused(topic, "fourth", 2, producer_access_mode=Exclusive).error == ServerError.ProducerFenced
    owner.close_producer()
    ready = wire.next().producer_success
    assert (ready.request_id, ready.producer_ready) == (request, True)
    wire.send(0, single(0))
    assert ids_of(wire.receipts(1)) == [0]
    # The end of a connection is as good as a closing.
    wire.close()
    ready = third.next().producer_success
    assert (ready.request_id, ready.producer_ready) == (later, True)


def test_a_producer_that_waits_can_be_closed(connect: Callable[..., Wire], wire: Wire, topic: str) -> None:
    owner, third = connect(), connect()
    owner.produce(topic, "owner")
    wait_for_turn(wire, topic, "second")
    later = wait_for_turn(third, topic, "third")
    assert wire.close_producer().type == BaseCommand.SUCCESS
    gone = connect()
    wait_for_turn(gone, topic, "gone")
    gone.close()
    owner.close_producer()
    assert third.next().producer_success.request_id == later
    third.close_producer()
    # Nobody waits any more.
    owner.produce(topic, "owner")


def schema_of(kind: str, definition: bytes = b"") -> Schema:
    return Schema(name=kind, type=Schema.Type.Value(kind), schema_data=definition)


@pytest.mark.parametrize("kind", ["String", "Json", "Int64", "Double"])
def test_a_schema_without_which_messages_can_be_read(wire: Wire, client: Client, topic: str, kind: str) -> None:
    """The sidecar's own log keeps no schemas."""
    schema = schema_of(kind, b"{}")
    success = wire.produce(topic, schema=schema)
    assert success.schema_version
    told = wire.get_or_create_schema(topic, schema).getOrCreateSchemaResponse
    assert (told.schema_version, told.HasField("error_code")) == (success.schema_version, False)
    wire.send(0, single(0, schema_version=success.schema_version))
    assert ids_of(wire.receipts(1)) == [0]
    assert [i for _, i in client.rows(topic)] == [0]
    # A version that only another topic's schema can have.
    wire.send(1, single(1, schema_version=b"\0" * 7 + b"\1"))
    assert "another schema" in wire.next().send_error.message


def test_bytes_are_no_schema(wire: Wire, topic: str) -> None:
    """Go asks for the version of its schema of bytes, whose type has no name in the protocol."""
    success = wire.produce(topic, schema=Schema())
    assert not success.schema_version
    told = wire.get_or_create_schema(topic, Schema()).getOrCreateSchemaResponse
    assert (told.schema_version, told.HasField("error_code")) == (b"", False)
    told = wire.get_or_create_schema(topic, schema_of("Avro", b'"string"')).getOrCreateSchemaResponse
    assert told.error_code == ServerError.IncompatibleSchema
    told = wire.get_or_create_schema(f"{topic}-other", Schema()).getOrCreateSchemaResponse
    assert "no producer of topic" in told.error_message


@pytest.mark.parametrize(
    ("what", "fields"),
    [
        ("without which nobody can read", {"schema": schema_of("Avro", b'"string"')}),
        ("does not support", {"schema": schema_of("KeyValue")}),
        ("takes part in transactions", {"txn_enabled": True}),
        ("encrypts its messages", {"encrypted": True}),
        ("creates a subscription", {"initial_subscription_name": "s"}),
    ],
)
def test_what_cannot_be_kept_to_is_refused_at_once(wire: Wire, topic: str, what: str, fields: dict[str, Any]) -> None:
    refused = wire.refused(topic, **fields)
    assert refused.error == ServerError.NotAllowedError
    assert what in refused.message


# -- publishing -------------------------------------------------------------------------------------------------------


def test_what_is_stored(wire: Wire, client: Client, topic: str) -> None:
    wire.produce(topic)
    properties = ((b"a", b"1"), (b"b", "ü".encode()))
    wire.send(0, batch(0, 1, key=b"k", ordering_key=b"o", event_time=12, properties=properties), highest=1)
    wire.send(2, single(2, b"payload", partition_key=b"/wA=", partition_key_b64_encoded=True, event_time=7))
    wire.send(3, single(3, null_value=True, properties=[Property(key=b"n", value=b"")]))
    assert ids_of(wire.receipts(3)) == [0, 2, 3]
    first, second, third = (record.batch for record in client.records(topic))
    assert calls.names_of(first) == ["p"]
    assert (list(first.sequence_ids), first.payloads, list(first.event_times_ms)) == ([0, 1], b"p/0p/1", [12, 12])
    assert first.keys == b"kk"
    assert first.property_names == b"abpulsar.ordering_key" * 2
    assert first.property_values == "1übw==".encode() * 2
    assert (second.keys, second.payloads, list(second.event_times_ms)) == (b"\xff\x00", b"payload", [7])
    assert (third.payload_validity, third.property_names, third.property_values) == (b"\0", b"n", b"")


def test_each_message_of_a_batch_is_judged(wire: Wire, client: Client, topic: str) -> None:
    wire.produce(topic)
    wire.send(3, batch(3, 4, 5), highest=5)
    wire.send(4, batch(4, 5, 6, 6, 2, 7), highest=7)
    wire.send(1, batch(1, 2), highest=2)
    # The log gives each message an ID of its own, and not one to the batch.
    assert wire.receipts(3) == [(3, NO_ENTRY), (4, NO_ENTRY), (1, NO_ENTRY)]
    assert [i for _, i in client.rows(topic)] == [3, 4, 5, 6, 7]


def test_a_topic_that_does_not_deduplicate_stores_each_message(wire: Wire, client: Client, topic: str) -> None:
    """Also those of one batch whose IDs fall or repeat."""
    client.admin.CreateTopic(
        admin_pb2.CreateTopicRequest(topic=topic, policy=admin_pb2.TopicPolicy(deduplication_enabled=False))
    )
    wire.produce(topic)
    wire.send(3, batch(3, 4, 5), highest=5)
    wire.send(4, batch(4, 5, 6, 6, 2, 7, 1, 9), highest=9)
    wire.send(9, batch(9), highest=9)
    assert [first for first, _ in wire.receipts(3)] == [3, 4, 9]
    assert [i for _, i in client.rows(topic)] == [3, 4, 5, 4, 5, 6, 6, 2, 7, 1, 9, 9]


def test_a_message_that_was_stored_has_its_true_id(wire: Wire, client: Client, topic: str) -> None:
    wire.produce(topic)
    for i in (0, 1, 2, 1, 0):
        wire.send(i, single(i))
    assert wire.receipts(5) == [(0, 0), (1, 1), (2, 2), (1, 1), (0, 0)]
    assert len(client.rows(topic)) == 3


def test_receipts_come_in_the_order_of_the_entries_and_repeat_their_numbers(wire: Wire, topic: str) -> None:
    """Old entries are judged at once, and new ones when they are on the disk."""
    wire.produce(topic)
    wire.send(0, batch(0))
    wire.receipts(1)
    for k in range(1, 200):
        wire.send(k, batch(k), highest=k)
        wire.send(0, batch(0), highest=k)
    found = [wire.next().send_receipt for _ in range(398)]
    assert [(one.sequence_id, one.highest_sequence_id) for one in found] == [
        pair for k in range(1, 200) for pair in ((k, k), (0, k))
    ]


def test_a_batch_too_large_for_one_of_ours_is_stored_in_several(wire: Wire, client: Client, topic: str) -> None:
    wire.produce(topic)
    entry = batch(*range(40_000), size=150, key=b"k", compression=ZLIB)
    wire.send(0, entry, highest=39_999)
    assert wire.receipts(1) == [(0, NO_ENTRY)]
    assert [i for record in client.records(topic) for i in record.batch.sequence_ids] == list(range(40_000))
    wire.send(0, entry, highest=39_999)
    wire.receipts(1)
    assert client.end_index(topic) == 40_000


def test_large_entries_of_many_clients_do_not_wait_for_each_other(
    connect: Callable[..., Wire], client: Client, topic: str
) -> None:
    """Together they are half received many times over, and more than the sidecar holds for all clients."""
    payload = bytes(5_000_000)

    def send_two(k: int) -> list[tuple[int, int]]:
        wire = connect()
        wire.produce(topic, f"p{k}")
        for i in range(2):
            wire.send(i, single(i, payload))
        return wire.receipts(2)

    with ThreadPoolExecutor(24) as threads:
        assert [ids_of(found) for found in threads.map(send_two, range(24))] == [[0, 1]] * 24
    assert client.end_index(topic) == 48


def test_a_resend_over_a_new_connection(connect: Callable[..., Wire], client: Client, topic: str) -> None:
    first = connect()
    first.produce(topic)
    for i in range(100):
        first.send(i, single(i))
    first.close()
    second = connect()
    opened = second.produce(topic)
    for i in range(100):
        second.send(i, single(i))
    assert second.receipts(100) == [(i, i) for i in range(100)]
    assert opened.last_sequence_id < 100
    assert [i for _, i in client.rows(topic)] == list(range(100))


def test_a_grpc_client_that_takes_the_name_ends_it_for_good(wire: Wire, client: Client, topic: str) -> None:
    wire.produce(topic)
    wire.send(0, single(0))
    wire.receipts(1)
    epochs = client.epochs(topic, "p")
    wire.send(1, single(1))
    assert wire.next().close_producer.producer_id == 1
    assert wire.refused(topic).error == ServerError.ProducerFenced
    client.publish_unary(topic, calls.batch([("p", 1)], epochs, {"p": 0}))
    assert [i for _, i in client.rows(topic)] == [0, 1]


def refused_entry(sequence_id: int) -> dict[str, WireEntry]:
    return {
        "chunk": single(sequence_id, b"c", uuid=b"u", chunk_id=1, num_chunks_from_msg=2, total_chunk_msg_size=2),
        "encrypted": single(sequence_id, b"c", encryption_keys=[EncryptionKeys(key=b"k", value=b"v")]),
        "later": single(sequence_id, b"c", deliver_at_time=2**50),
        "transaction": single(sequence_id, b"c", txnid_most_bits=1, txnid_least_bits=1),
        "properties that are no text": single(sequence_id, b"c", properties=[Property(key=b"\xff", value=b"")]),
        "compressed and not": single(sequence_id, b"c", compression=LZ4, uncompressed_size=100),
        "larger than it says": single(sequence_id, b"c", compression=LZ4, uncompressed_size=2**31),
    }


@pytest.mark.parametrize("what", refused_entry(0))
@pytest.mark.parametrize("kind", [JAVA, CPP, GO])
def test_one_entry_that_is_refused(
    connect: Callable[..., Wire], client: Client, topic: str, what: str, kind: str
) -> None:
    """Java and C++ drop the entry and go on. Others know no such answer: their producer ends, and opens no more."""
    wire = connect(kind)
    wire.produce(topic)
    wire.send(0, single(0))
    wire.send(1, refused_entry(1)[what], highest=4)
    wire.send(5, single(5))
    assert wire.receipts(1) == [(0, 0)]
    answer = wire.next()
    if kind == GO:
        assert answer.close_producer.producer_id == 1
        # After any other code the client tries again, and sends the entry again, for ever.
        assert wire.refused(topic).error == ServerError.ProducerFenced
        assert [i for _, i in client.rows(topic)] == [0]
        return
    expected = (4, ServerError.NotAllowedError) if kind == JAVA else (1, ServerError.ChecksumError)
    assert (answer.send_error.sequence_id, answer.send_error.error) == expected
    assert wire.receipts(1) == [(5, 1)]
    assert [i for _, i in client.rows(topic)] == [0, 5]


@pytest.mark.parametrize("last", ["chunk", "message"])
def test_gos_client_hears_of_a_refused_chunk_after_the_last_one(
    connect: Callable[..., Wire], client: Client, topic: str, last: str
) -> None:
    """The client's user would wait for ever if the producer ended before."""
    wire = connect(GO)
    wire.produce(topic)
    wire.send(0, single(0))
    for number in (0, 1):
        wire.send(1, single(1, uuid=b"u", chunk_id=number, num_chunks_from_msg=3, total_chunk_msg_size=9))
    assert wire.receipts(1) == [(0, 0)]
    # An answer to the chunks would come before the answer to this request.
    assert wire.partitions(topic).type == BaseCommand.PARTITIONED_METADATA_RESPONSE
    end = single(1, uuid=b"u", chunk_id=2, num_chunks_from_msg=3, total_chunk_msg_size=9)
    wire.send(1 if last == "chunk" else 2, end if last == "chunk" else single(2))
    assert wire.next().close_producer.producer_id == 1
    assert [i for _, i in client.rows(topic)] == [0]


def test_a_topic_that_takes_nothing_now(connect: Callable[..., Wire], client: Client, topic: str) -> None:
    wire = connect()
    wire.produce(topic)
    client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(topic=topic))
    wire.send(0, single(0))
    assert wire.next().type == BaseCommand.CLOSE_PRODUCER


# -- clients that lie -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff" + bytes(100),
        b"\x00\x01\x00\x01" + bytes(100),
        b"\x00\x00\x00\x00",
        b"\x00\x00\x00\x06\x00\x00\x00\x02\x08\x12",
        b"",
    ],
)
def test_what_is_no_client(connect: Callable[..., Wire], data: bytes) -> None:
    wire = connect(connects=False)
    wire.socket.sendall(data)
    wire.socket.shutdown(socket.SHUT_WR)
    with pytest.raises((EOFError, ConnectionError)):
        wire.next()


@pytest.mark.parametrize("harm", ["checksum", "cut metadata", "no name", "a row too many"])
def test_an_entry_that_is_damaged_ends_the_connection_or_is_refused(
    connect: Callable[..., Wire], client: Client, topic: str, harm: str
) -> None:
    wire = connect()
    wire.produce(topic)
    entry = batch(0, 1)
    match harm:
        case "checksum":
            honest = wire.socket.sendall
            wire.socket = _Changing(wire.socket)  # type: ignore[assignment]
            wire.send(0, entry)
            assert honest is not None
        case "cut metadata":
            wire.send(0, WireEntry(bytes(entry.metadata)[:-1], entry.payload))
        case "no name":
            wire.send(0, WireEntry(b"", entry.payload))
        case "a row too many":
            wire.send(0, WireEntry(entry.metadata, bytes(entry.payload)[:-1]))
    try:
        answer = wire.next()
        assert (harm, answer.type) == ("a row too many", BaseCommand.SEND_ERROR)
    except (EOFError, ConnectionError):
        assert harm != "a row too many"
    assert client.rows(topic) == []


class _Changing:
    """A socket that changes a bit of the last byte that is sent."""

    def __init__(self, there: socket.socket) -> None:
        self._there = there

    def sendall(self, data: bytes) -> None:
        self._there.sendall(data[:-1] + bytes((data[-1] ^ 1,)))

    def __getattr__(self, name: str) -> object:
        return getattr(self._there, name)


def test_what_is_sent_to_nobody_is_ignored(wire: Wire, topic: str) -> None:
    wire.send(0, single(0), producer_id=5)
    assert wire.close_producer(5).type == BaseCommand.SUCCESS
    wire.produce(topic)


def test_a_client_that_asks_twice_for_a_producer(wire: Wire, client: Client, topic: str) -> None:
    """It has given up waiting for the first answer."""
    wire.ask_for_producer(topic)
    wire.ask_for_producer(topic)
    wire.send(0, single(0))
    kinds = [wire.next().type]
    while kinds[-1] != BaseCommand.SEND_RECEIPT:
        if kinds[-1] == BaseCommand.PRODUCER_SUCCESS:
            wire.send(0, single(0))
        kinds.append(wire.next().type)
    assert client.rows(topic) == [("p", 0)]


def test_receipts_that_are_not_read_stop_the_reading(
    connect: Callable[..., Wire], client: Client, topic: str, tmp_path: Path
) -> None:
    """A client that only sends is held up, and others are not."""
    wire, other = connect(), connect()
    wire.produce(topic)
    wire.send(0, single(0))
    wire.receipts(1)
    wire.socket.setblocking(False)
    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    entry = single(0)

    def send_for_ever() -> None:
        while True:
            wire.send(0, entry)

    with pytest.raises(BlockingIOError):
        send_for_ever()
    other.produce(topic, "other", 2)
    other.send(0, single(0), producer_id=2)
    assert ids_of(other.receipts(1)) == [0]
    assert "other" in {name for record in client.records(topic) for name in calls.names_of(record.batch)}


def test_many_small_frames_hold_up_nobody(connect: Callable[..., Wire]) -> None:
    """A client that asks one by one is served between the frames of another. The control: some 25,000 fit into one
    read, and were all answered before anybody else.
    """
    flooding, other = connect(), connect()
    count = 200_000
    ping = command_frame(BaseCommand(type=BaseCommand.PING, ping=CommandPing()))
    pong_bytes = len(command_frame(BaseCommand(type=BaseCommand.PONG, pong=CommandPong())))

    def read_all() -> None:
        left = count * pong_bytes
        while left:
            left -= len(flooding.socket.recv(1 << 20))

    sending = threading.Thread(target=flooding.socket.sendall, args=(ping * count,), daemon=True)
    reading = threading.Thread(target=read_all, daemon=True)
    sending.start()
    reading.start()
    answers = 0
    while reading.is_alive():
        other.say(BaseCommand(type=BaseCommand.PING, ping=CommandPing()))
        assert other.next().type == BaseCommand.PONG
        answers += 1
    assert answers > 40, answers


def test_a_batch_of_very_many_rows_holds_up_nobody(connect: Callable[..., Wire], topic: str) -> None:
    """The control: all of a second in which nobody was served, and much more for more rows."""
    wire, other = connect(), connect()
    wire.produce(topic)
    entry = batch(*range(60_000), compression=ZLIB, ordering_key=b"o")
    wire.send(0, entry)
    answers = 0
    receipts = threading.Thread(target=wire.receipts, args=(1,), daemon=True)
    receipts.start()
    while receipts.is_alive():
        other.say(BaseCommand(type=BaseCommand.PING, ping=CommandPing()))
        assert other.next().type == BaseCommand.PONG
        answers += 1
    assert answers > 20, answers
    wire.send(60_000, batch(*range(60_000, 130_000), compression=ZLIB))
    assert "has 70000 messages" in wire.next().send_error.message


def test_producers_that_are_refused_for_good_keep_nothing(
    connect: Callable[..., Wire], shared: Sidecar, topic: str
) -> None:
    """The control: each kept its entry."""
    wire = connect(GO)
    entry = single(0, bytes(2_000_000), deliver_at_time=2**50)

    def refuse(some: range) -> int:
        for k in some:
            wire.produce(topic, "p", k)
            wire.send(0, entry, producer_id=k)
            assert wire.next().type == BaseCommand.CLOSE_PRODUCER
        status = Path(f"/proc/{shared.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) // 1024

    before_mb = refuse(range(20))
    assert refuse(range(20, 120)) < before_mb + 100
