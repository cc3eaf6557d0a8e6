"""Positions in topics that no sidecar writes, and the batches that are made of their messages."""

import base64
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from seqdedupe.errors import InvalidRequestError
from seqdedupe.log.pulsar.admin_url import AdminAnswer
from seqdedupe.log.pulsar.entries import PulsarEntry, PulsarMessage
from seqdedupe.log.pulsar.ledgers import Ledger, Ledgers
from seqdedupe.message_id import MessageId, Position
from seqdedupe.pulsar_wire.pulsar_api_pb2 import Property, SingleMessageMetadata
from seqdedupe.v1.admin_pb2 import StockEntry, StockTopic
from seqdedupe_spark import stock
from seqdedupe_spark.cluster.stock_reader import (
    RangeMarks,
    TopicRanges,
    exact_keys,
    keys_in,
    stock_topic,
    stored,
)
from seqdedupe_spark.dedupe import Deduplicator
from seqdedupe_spark.message_columns import SCHEMA, columns_of, to_arrow
from seqdedupe_spark.planning import find_loss
from seqdedupe_spark.stock import STOCK, StockEnds

TOPIC = "persistent://public/default/t"
LEDGERS = Ledgers([Ledger(5, 10, 1000), Ledger(8, 20, 4000)])


def ends(readable: int = 30, let_go: MessageId | None = None) -> StockEnds:
    return StockEnds(LEDGERS, 5, let_go, readable)


def empty(first_ledger: int, let_go: MessageId | None) -> StockEnds:
    return StockEnds(Ledgers([]), first_ledger, let_go, 0)


def at(text: str) -> Position:
    return stock.given(stock.parse(text))


def test_after_a_range_that_is_not_whole_the_rest_is_the_sidecar_s() -> None:
    """Its rest may be of an open transaction: a later range proves nothing then."""
    places = [StockEntry(ledger_id=5, entry_id=0), StockEntry(ledger_id=5, entry_id=9), StockEntry(ledger_id=8)]
    whole, half, later = (
        RangeMarks({"p": 3, "q": 1}, places[0], places[0], True),
        RangeMarks({"p": 2}, places[1], places[1], False),
        RangeMarks({"p": 9, "r": 1}, places[2], places[2], True),
    )
    topic, empty = TopicRanges(TOPIC, LEDGERS, []), RangeMarks({}, None, None, True)
    for marks, last, numbers in (
        ([whole, half, later], 1, {"p": 3, "q": 1}),
        ([empty, whole, empty, later], 2, {"p": 9, "q": 1, "r": 1}),
    ):
        read = stock_topic(topic, marks)
        assert (read.first, read.last) == (places[0], places[last])
        assert list(zip(read.ledger_ids, read.ledger_entries, strict=True)) == [(5, 10), (8, 1)][:last]
        assert dict(zip(read.producer_names, read.persisted, strict=True)) == numbers
    assert stock_topic(topic, [empty]) == stock_topic(topic, []) == StockTopic(topic=TOPIC)


@pytest.mark.parametrize("text", ["5:0", "5:9", "8:3:0", "8:0:7", "0:0"])
def test_a_position_is_a_place_in_the_log(text: str) -> None:
    message_id, position = MessageId.parse(text), at(text)
    assert (position.incarnation, position.message_id) == (STOCK, message_id)
    assert Position.parse(str(position)) == position == stock.given(Position.parse(str(position)))
    assert Position.from_bytes(position.to_bytes()) == position
    entry = message_id._replace(batch_index=-1)
    if message_id.batch_index < 0:
        assert stock.entry_before(position) == entry
        assert stock.rows_read(position) == 0
    else:
        assert stock.before(entry).index == position.index
        assert stock.rows_read(position) == message_id.batch_index + 1


def test_the_beginning_of_a_ledger_is_no_entry() -> None:
    assert stock.entry_before(stock.before(MessageId(8, 0))) == MessageId(8, -1)
    assert stock.entry_before(stock.before(MessageId(8, 1))) == MessageId(8, 0)
    assert at("5:9").index < stock.before(MessageId(8, 0)).index < at("8:0").index


@pytest.mark.parametrize("text", ["0/5:7@3", f"0/5:7:1@{5 << 31 | 7}", "4294967296:1", f"5:{2**31}"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="INVALID_POSITION"):
        at(text)


def test_entries_are_counted_over_ledgers() -> None:
    found = ends()
    assert found.last == at("8:19")
    assert ends(10).last == at("5:9")
    assert found.count(at("5:3"), found.last) == 26
    assert found.count(at("5:3:4"), at("5:4")) == 2
    assert found.count(stock.before(MessageId(5, 0)), at("5:0")) == 1
    assert found.advanced(at("5:3"), 26) == at("8:19")
    assert found.advanced(at("5:8:0"), 1) == at("5:8")
    assert found.entries_in(at("5:4"), 500 + 1000) == 10
    assert found.entries_in(at("8:18"), 10**9) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("5:0", None),
        ("8:19", None),
        ("4:7", "POSITION_TRIMMED"),
        ("5:10", "POSITION_TRIMMED"),
        ("6:0", "POSITION_TRIMMED"),
        ("8:20", "POSITION_AFTER_END"),
        ("9:0", "POSITION_AFTER_END"),
        ("123/7:2@5", "POSITION_OF_ANOTHER_INCARNATION"),
    ],
)
def test_a_loss_is_seen_by_the_entry_that_is_not_there(text: str, reason: str | None) -> None:
    loss = find_loss(TOPIC, at(text), ends())
    assert (loss and loss.reason) == reason
    if loss and loss.may_be_accepted:
        assert loss.next == stock.before(MessageId(5, 0))
        assert find_loss(TOPIC, loss.next, ends()) is None


def test_a_topic_that_was_made_anew_is_no_end_that_moved() -> None:
    loss = find_loss(TOPIC, at("8:19"), empty(12, MessageId(12, -1)))
    assert loss
    assert loss.reason == "POSITION_TRIMMED"
    assert loss.next == stock.before(MessageId(12, 0))


def test_a_ledger_without_entries_may_go() -> None:
    """It does when its topic is loaded again. A subscription that has released nothing tells it from a loss."""
    start = stock.before(MessageId(3, 0))
    for let_go in (None, MessageId(5, 3), MessageId(4, 0)):
        loss = find_loss(TOPIC, start, ends(let_go=let_go))
        assert loss
        assert loss.reason == "POSITION_TRIMMED"
    for let_go in (MessageId(3, -1), MessageId(5, -1)):
        assert find_loss(TOPIC, start, ends(let_go=let_go)) is None
        assert ends(let_go=let_go).count(start, at("5:9")) == 10
        assert find_loss(TOPIC, start, empty(5, let_go)) is None
    assert empty(5, MessageId(5, -1)).count(start, stock.before(MessageId(5, 0))) == 0


def entry(place: MessageId, name: str, sequence_id: int, time_ms: int = 1, of_batch: int = 0) -> PulsarEntry:
    message = PulsarMessage(b"%d" % sequence_id, {"a": name}, "", 0)
    return PulsarEntry(message, place, time_ms, name, sequence_id, of_batch)


def test_batches_are_of_one_time_and_rise() -> None:
    rows = [
        entry(MessageId(5, 0, 0), "p", 3, of_batch=3),
        entry(MessageId(5, 0, 1), "q", 1, of_batch=3),
        entry(MessageId(5, 0, 2), "p", 3, of_batch=3),  # a duplicate, within Pulsar's batch
        entry(MessageId(5, 1), "p", 2),
        entry(MessageId(5, 2), "p", 4, time_ms=2),
        entry(MessageId(5, 3), "p", 5, time_ms=2),
    ]
    batches = list(stored(rows))
    assert [(one.batch.sequence_ids.tolist(), one.publish_time_ms) for one in batches] == [
        ([3, 1], 1),
        ([3], 1),
        ([2], 1),
        ([4, 5], 2),
    ]
    ends = [one.position(len(one) - 1) for one in batches]
    assert ends == [at("5:0:1"), at("5:0"), at("5:1"), at("5:3")]
    assert batches[0].position(0) == at("5:0:0")
    deduplicator = Deduplicator({})
    kept = [
        one.batch.sequence_ids[rows] if rows is not None else one.batch.sequence_ids
        for one, rows in ((one, deduplicator.keep(one)) for one in batches)
    ]
    assert [ids.tolist() for ids in kept] == [[3, 1], [], [], [4, 5]]
    assert deduplicator.changed() == {"p": 5, "q": 1}
    arrow = to_arrow(batches, TOPIC)
    assert arrow.schema == SCHEMA
    assert arrow.column("__index").null_count == arrow.column("__incarnation").null_count == 6
    assert [MessageId.from_bytes(one) for one in arrow.column("__messageId").to_pylist()] == [
        r.message_id for r in rows
    ]
    assert arrow.column("__producerName").to_pylist() == ["p", "q", "p", "p", "p", "p"]
    assert arrow.column("value").to_pylist() == [b"3", b"1", b"3", b"2", b"4", b"5"]


def test_no_value_and_no_key_are_null() -> None:
    told = PulsarEntry(PulsarMessage(None, {}, "", 0), MessageId(5, 0), 1, "p", 0)
    given = PulsarEntry(PulsarMessage(b"", {}, "k", 7), MessageId(5, 1), 1, "p", 1)
    arrow = to_arrow(list(stored([told, given])), TOPIC)
    assert arrow.column("value").to_pylist() == [None, b""]
    assert arrow.column("__key").to_pylist() == [None, b"k"]
    assert arrow.column("__eventTime").null_count == 1
    assert arrow.column("__publishTime").null_count == 0


BYTES = b"\xff\x00key"
IN_BASE64 = base64.b64encode(BYTES).decode()


def keyed(key: str, **more: Any) -> PulsarEntry:
    place = more.pop("place", MessageId(5, 0))
    return PulsarEntry(PulsarMessage(b"", {}, key, 0), place, 1, "p", place.entry_id, **more)


def test_columns_that_pulsar_alone_has() -> None:
    """A key of bytes, one that only looks so, an empty one and none, each as it was set. The other columns stay."""
    rows = [
        keyed(IN_BASE64, ordering_key=b"\xffo", schema_version=2**40),
        keyed("abcd", place=MessageId(5, 1), schema_version=0),
        keyed("", place=MessageId(5, 2)),
        keyed("", place=MessageId(5, 3), ordering_key=b"o"),
    ]
    batches = list(stored(rows, [BYTES, b"abcd", b"", None]))
    arrow = to_arrow(batches, TOPIC, columns_of(True, False))
    assert arrow.select(SCHEMA.names) == to_arrow(list(stored(rows)), TOPIC)
    assert arrow.column("__key").to_pylist() == [IN_BASE64.encode(), b"abcd", None, None]
    assert arrow.column("__keyBytes").to_pylist() == [BYTES, b"abcd", b"", None]
    assert arrow.column("__orderingKey").to_pylist() == [b"\xffo", None, None, b"o"]
    assert arrow.column("__schemaVersion").to_pylist() == [2**40, 0, None, None]


def of_message(payload: bytes, key: bytes | None = None, **fields: Any) -> bytes:
    """A message of a batch."""
    metadata = SingleMessageMetadata(payload_size=len(payload), partition_key=key, **fields).SerializeToString()
    return len(metadata).to_bytes(4) + metadata + payload


BATCH = {"x-pulsar-num-batch-message": "5"}


@pytest.mark.parametrize(
    ("said", "raw", "keys"),
    [
        ({}, b"x", [None]),
        ({"x-pulsar-partition-key": ""}, b"x", [b""]),
        ({"x-pulsar-partition-key": "", "x-pulsar-null-partition-key": "true"}, b"x", [None]),
        ({"x-pulsar-partition-key": IN_BASE64}, b"x", [IN_BASE64.encode()]),
        ({"x-pulsar-partition-key": IN_BASE64, "x-pulsar-partition-key-b64-encoded": "true"}, b"x", [BYTES]),
        (
            BATCH,
            of_message(b"x" * 100)
            + of_message(b"", b"")
            + of_message(b"y", b"", null_partition_key=True)
            + of_message(b"z", IN_BASE64.encode())
            + of_message(b"z", IN_BASE64.encode(), properties=[Property()], partition_key_b64_encoded=True),
            [None, b"", None, IN_BASE64.encode(), BYTES],
        ),
    ],
)
def test_keys_are_read_from_what_a_broker_says(said: dict[str, str], raw: bytes, keys: list[bytes | None]) -> None:
    assert keys_in(AdminAnswer(200, raw, said)) == keys


def test_what_is_no_batch_is_no_key() -> None:
    whole = of_message(b"z", b"key") + of_message(b"z", b"key")
    ends = [end for end in range(1, len(whole)) if end != len(whole) // 2]
    negative = SingleMessageMetadata(payload_size=-15).SerializeToString()
    for raw in [*(whole[:end] for end in ends), len(negative).to_bytes(4) + negative, b"\0\0\0\1\x0b"]:
        with pytest.raises((ValueError, DecodeError)):
            keys_in(AdminAnswer(200, raw, BATCH))


class Admin:
    """What `exact_keys` asks for."""

    def __init__(self, answers: dict[MessageId, AdminAnswer]) -> None:
        self.admin = self
        self.asked: list[MessageId] = []
        self._answers = answers

    async def entry(self, topic: str, entry: MessageId) -> AdminAnswer:
        self.asked.append(entry)
        return self._answers[entry]


async def test_a_broker_is_asked_once_for_an_entry_whose_keys_are_not_clear() -> None:
    rows = [
        keyed("a key", place=MessageId(5, 0)),
        keyed("a key", place=MessageId(5, 1, 0), of_batch=2),
        keyed("", place=MessageId(5, 1, 1), of_batch=2),
        keyed("", place=MessageId(5, 1, 2), of_batch=2),
        keyed("abcd", place=MessageId(5, 2)),
    ]
    batch = of_message(b"", b"a key") + of_message(b"", b"") + of_message(b"")
    connection: Any = Admin(
        {
            MessageId(5, 1): AdminAnswer(200, batch, BATCH),
            MessageId(5, 2): AdminAnswer(200, b"", {"x-pulsar-partition-key": "abcd"}),
        }
    )
    assert await exact_keys(connection, TOPIC, rows) == [b"a key", b"a key", b"", None, b"abcd"]
    assert connection.asked == [MessageId(5, 1), MessageId(5, 2)]
