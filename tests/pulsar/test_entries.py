"""Entries as a real broker keeps them: what was handed over comes back, in both formats and to any consumer."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pulsar
import pytest

from examples.pulsar import messages as example
from pulsar_broker.standalone import Broker
from seqdedupe.errors import InvalidRequestError, SeqdedupeError
from seqdedupe.log.pulsar import entries
from seqdedupe.log.pulsar.broker_wire import Brokers, open_producer
from seqdedupe.log.pulsar.entries import EntryFormat, PulsarEntry, PulsarMessage
from seqdedupe.message_id import MessageId
from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.batches import batch
from tests.log.pulsar.topics import all_rows, batches_in, collected, ids_in, marker, owner, packed, rows
from tests.pulsar.conftest import LIMIT_BYTES

READ_TIMEOUT_MILLIS = int(LAST_RESORT_SECONDS * 1000)

HISTORY = [
    batch(
        [("p", 1), ("q", 5), ("p", 4), ("ü", 0)],
        payloads=[b"one", None, b"", b"\0\xff"],
        keys=[b"key", None, b"\xff", b""],
        event_times_ms=np.array([5, 0, -7, 2**63 - 1], np.int64),
        row_properties=[{"colour": "blue", "seqdedupe.index": "mine"}, None, {"ü\0": "", "": "x"}, {}],
    ),
    batch([("q", i) for i in range(6, 40)], links={"q": 5}),
]


@pytest.fixture(scope="module")
def client(broker: Broker) -> Iterator[pulsar.Client]:
    connected = pulsar.Client(broker.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    yield connected
    connected.close()


async def send(broker: Broker, topic: str, messages: list[PulsarMessage]) -> list[MessageId]:
    answers: asyncio.Queue[tuple[SeqdedupeError | None, MessageId]] = asyncio.Queue()
    producer = await open_producer(Brokers(broker.service_url), topic, "seqdedupe-one-0", {}, EntryFormat.PLAIN)
    assert producer is not None
    receipts = []
    for number, message in enumerate(messages):
        producer.send(message, number, lambda _, *answer: answers.put_nowait(answer))
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            failure, place = await answers.get()
        assert failure is None
        receipts.append(place)
    await producer.close()
    return receipts


def read(client: pulsar.Client, topic: str, count: int) -> list[PulsarEntry]:
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    found = []
    for _ in range(count):
        got: Any = reader.read_next(READ_TIMEOUT_MILLIS)._message
        payload = None if got.has_null_value() else got.data()
        message = PulsarMessage(payload, got.properties(), got.partition_key(), got.event_timestamp())
        at = got.message_id()
        message_id = MessageId(at.ledger_id(), at.entry_id(), at.batch_index())
        found.append(PulsarEntry(message, message_id, got.publish_timestamp()))
    reader.close()
    return found


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "packed"])
async def test_what_was_handed_over_comes_back(
    broker: Broker, client: pulsar.Client, topic: str, is_packed: bool
) -> None:
    first, second = HISTORY
    sent = [marker(1), entries.control_message(owner(1), 1, 0, b"control")]
    sent += [packed(1, 2, 0, first)] if is_packed else rows(1, 2, 0, first)
    sent += [marker(2)]
    sent += [packed(2, 1, 4, second)] if is_packed else rows(2, 1, 4, second)
    receipts = await send(broker, topic, sent)
    there = await asyncio.to_thread(read, client, topic, len(sent))
    assert [entry.message for entry in there] == sent
    assert [entry.message_id for entry in there] == receipts
    found = collected(there)
    assert all_rows(batches_in(found)) == all_rows(HISTORY)
    places = [(receipts[2], 4), (receipts[-1], 34)] if is_packed else []
    expected = [at._replace(batch_index=row) for at, count in places for row in range(count)]
    assert ids_in(found) == (expected or [*receipts[2:6], *receipts[7:]])
    stock = example.Topic()
    received = [
        message
        for entry in there
        if stock.counts(entry.message.properties, *entry.message_id[:2])
        for message in example.messages(
            entry.message.payload, entry.message.properties, entry.message.key, entry.message.event_time_ms
        )
    ]
    assert [(m.producer, m.sequence_id, m.payload, m.key, m.event_time_ms, m.properties) for m in received] == [
        (r.producer, r.sequence_id, r.payload, r.key, r.event_time_ms, r.properties) for r in all_rows(HISTORY)
    ]


def most(make: Callable[[int], list[PulsarMessage]]) -> list[PulsarMessage]:
    """What is made with the largest payload that is not refused."""
    low, high = 0, LIMIT_BYTES
    while low + 1 < high:
        middle = (low + high) // 2
        try:
            make(middle)
            low = middle
        except InvalidRequestError:
            high = middle
    return make(low)


async def test_the_largest_entries_that_are_made_are_taken(broker: Broker, client: pulsar.Client, topic: str) -> None:
    many = {f"{i}": "ü" * 10 for i in range(10_000)}
    long_name = [("p" * 255, 1)]

    def plain(size: int) -> list[PulsarMessage]:
        return rows(1, 1, 0, batch(long_name, payloads=[bytes(size)], keys=[b"\xff" * 9999]), limit_bytes=LIMIT_BYTES)

    def with_properties(size: int) -> list[PulsarMessage]:
        several = batch([("p", 1)], payloads=[bytes(size)], row_properties=[many])
        return rows(1, 2, 1, several, limit_bytes=LIMIT_BYTES)

    def in_a_batch(size: int) -> list[PulsarMessage]:
        return [packed(1, 3, 2, batch(long_name, payloads=[bytes(size)]), limit_bytes=LIMIT_BYTES)]

    sent = [marker(1), *most(plain), *most(with_properties), *most(in_a_batch)]
    await send(broker, topic, sent)
    there = await asyncio.to_thread(read, client, topic, len(sent))
    assert [entry.message for entry in there] == sent
