"""Reading ranges from a real sidecar."""

import asyncio
import random
from collections.abc import Generator, Iterator

import grpc
import pyarrow as pa
import pytest

from seqdedupe.client import Client, ProducerConfig, blocking
from seqdedupe.errors import NotFoundError, PositionError, UnavailableError
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe_spark import range_reader
from seqdedupe_spark.message_columns import SCHEMA
from seqdedupe_spark.ranges import TopicRange
from tests.client.foreign import answering
from tests.client.helpers import until
from tests.conftest import StartSidecar

MESSAGES = 3000
TOPIC = topic_name("many")
INDEX_ONLY = pa.schema([SCHEMA.field("__index")])


@pytest.fixture(scope="module")
def whole(shared_sidecar: Sidecar) -> TopicRange:
    """The range of a topic of batches of 1 to 50 messages."""
    chosen = random.Random(1)
    with blocking.Client(shared_sidecar.address) as client, client.producer(TOPIC, "p") as producer:
        sent = 0
        while sent < MESSAGES:
            count = min(chosen.choice([1, 2, 50]), MESSAGES - sent)
            producer.send_batch([b"%d" % i for i in range(sent, sent + count)])
            sent += count
        producer.flush()
        last = client.ends(TOPIC).last
    return TopicRange(TOPIC, Position.start(last.incarnation), last)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "MAX_ROWS", 100)


def part(whole: TopicRange, first: int, stop: int) -> TopicRange:
    before = [Position.before(whole.incarnation, index) for index in (first, stop)]
    return TopicRange(whole.topic, before[0], before[1])


def values(batches: Iterator[pa.RecordBatch]) -> list[bytes]:
    return [value for batch in batches for value in batch.column("value").to_pylist()]


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("seed", range(20))
def test_any_range_has_its_messages_in_order(shared_sidecar: Sidecar, whole: TopicRange, seed: int) -> None:
    chosen = random.Random(seed)
    first, stop = sorted(chosen.choices(range(MESSAGES + 1), k=2))
    if seed < 3:
        first, stop = [(0, MESSAGES), (0, 1), (MESSAGES - 1, MESSAGES)][seed]
    read = values(range_reader.read_range(shared_sidecar.address, part(whole, first, stop)))
    assert read == [b"%d" % i for i in range(first, stop)]


@pytest.mark.usefixtures("small_batches")
def test_small_batches_are_joined_to_good_sized_ones(shared_sidecar: Sidecar, whole: TopicRange) -> None:
    sizes = [len(batch) for batch in range_reader.read_range(shared_sidecar.address, whole, INDEX_ONLY)]
    assert sum(sizes) == MESSAGES
    assert all(100 <= size < 150 for size in sizes[:-1])


def test_batches_end_with_bytes_too(
    shared_sidecar: Sidecar, whole: TopicRange, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(list(range_reader.read_range(shared_sidecar.address, whole))) == 1
    monkeypatch.setattr(range_reader, "MAX_BYTES", 1000)
    batches = list(range_reader.read_range(shared_sidecar.address, whole))
    assert len(batches) > 5
    assert values(iter(batches)) == [b"%d" % i for i in range(MESSAGES)]


def test_an_empty_range_asks_nobody(whole: TopicRange) -> None:
    assert list(range_reader.read_range("127.0.0.1:1", part(whole, 5, 5))) == []


def test_a_reader_that_stops_early_ends(shared_sidecar: Sidecar, whole: TopicRange) -> None:
    batches = range_reader.read_range(shared_sidecar.address, whole)
    next(batches)
    assert isinstance(batches, Generator)
    batches.close()


def test_what_is_not_there_is_a_typed_error(client: blocking.Client, topic: str) -> None:
    missing = TopicRange(topic_name(topic), Position.start(1), Position.before(1, 5))
    with pytest.raises(NotFoundError):
        list(range_reader.read_range(client.address, missing))
    client.admin.create_topic(topic)
    with pytest.raises(PositionError, match="deleted and created again"):
        list(range_reader.read_range(client.address, missing))


def test_it_reads_on_over_kills_of_the_sidecar(start_sidecar: StartSidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar = start_sidecar()
    monkeypatch.setattr(range_reader, "MAX_ROWS", 1000)
    config = ProducerConfig(max_batch_rows=100)
    payloads = [b"%d" % i + bytes(2000) for i in range(8000)]
    with blocking.Client(sidecar.address) as client:
        with client.producer(TOPIC, "p", config) as producer:
            for first in range(0, len(payloads), 100):
                producer.send_batch(payloads[first : first + 100])
        last = client.ends(TOPIC).last
    batches = range_reader.read_range(sidecar.address, TopicRange(TOPIC, Position.start(last.incarnation), last))
    read = []
    for number, batch in enumerate(batches):
        read += batch.column("value").to_pylist()
        if number in (0, 3):
            sidecar.restart()
    # Far more than what a connection holds was still to come when it broke.
    assert number > 5
    assert read == payloads


@pytest.mark.parametrize("timeout_seconds", [None, 600.0])
async def test_it_begins_although_a_proxy_answers(
    start_sidecar: StartSidecar, topic: str, monkeypatch: pytest.MonkeyPatch, timeout_seconds: float | None
) -> None:
    """The driver has planned the range: the address is right."""
    sidecar = await asyncio.to_thread(start_sidecar)
    async with Client(sidecar.address) as client:
        async with client.producer(topic, "p") as producer:
            await producer.send_batch([b"%d" % i for i in range(10)])
        last = (await client.ends(topic)).last
    range_ = TopicRange(topic_name(topic), Position.start(last.incarnation), last)

    def read() -> list[bytes]:
        return values(range_reader.read_range(sidecar.address, range_, timeout_seconds=timeout_seconds))

    await asyncio.to_thread(sidecar.kill)
    async with answering(sidecar.address, grpc.StatusCode.UNIMPLEMENTED) as calls:
        with monkeypatch.context() as patch:
            patch.setattr(range_reader, "PATIENCE_SECONDS", 0.0)
            with pytest.raises(UnavailableError, match="a proxy on the way: not here") as caught:
                await asyncio.to_thread(read)
            assert caught.value.reason == "NOT_A_SIDECAR"
        monkeypatch.setattr(range_reader, "PATIENCE_SECONDS", LAST_RESORT_SECONDS)
        begun = calls["ReadStream"]
        reads = asyncio.create_task(asyncio.to_thread(read))
        await until(lambda: calls["ReadStream"] >= begun + 3)
    await asyncio.to_thread(sidecar.start)
    assert await reads == [b"%d" % i for i in range(10)]
