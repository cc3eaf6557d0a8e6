"""Readers of partitioned topics against a real sidecar: each message once, in the order of its partition."""

import asyncio
import random
from collections.abc import Callable

import pytest

from seqdedupe.client import (
    Client,
    InvalidRequestError,
    Message,
    PartitionedPosition,
    Position,
    PositionError,
    SeqdedupeError,
    blocking,
)
from seqdedupe.client.reader import PartitionedStart
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar

PARTITIONS = 3


async def publish(client: Client, topic: str, first: int, count: int, batch_rows: int = 7) -> None:
    """With keys: into all partitions, in batches of some."""
    async with client.producer(topic, f"p{first}") as producer:
        for start in range(first, first + count, batch_rows):
            ids = list(range(start, min(start + batch_rows, first + count)))
            await (await producer.send_batch([b"%d" % i for i in ids], ids, keys=[b"%d" % (i % 20) for i in ids]))


@pytest.fixture
async def made(shared_sidecar: Sidecar, topic: str) -> str:
    """A topic of three partitions with 200 messages."""
    async with Client(shared_sidecar.address) as client:
        await client.admin.create_topic(topic, partitions=PARTITIONS)
        await publish(client, topic, 0, 200)
    return topic


def check(messages: list[Message], count: int) -> None:
    """All are there, once, and each partition's in order without a gap."""
    assert sorted(int(m.payload or b"") for m in messages) == list(range(count))
    for k in range(PARTITIONS):
        indexes = [m.index for m in messages if m.partition == k]
        assert indexes == list(range(len(indexes)))


async def test_all_messages_in_turn_and_an_end(shared_sidecar: Sidecar, made: str) -> None:
    async with Client(shared_sidecar.address) as client:
        async with client.partitioned_reader(made) as reader:
            messages = [message async for message in reader]
            end = reader.position
        check(messages, 200)
        async with client.partitioned_reader(made) as reader:
            await reader.fetch()
            await asyncio.wait(reader._fetching.values()) if reader._fetching else None
            batches = [stored async for stored in reader.batches()]
        assert sum(map(len, batches)) == 200
        # Each of those that have something is in turn.
        turns = [stored.partition for stored in batches[: 3 * 8]]
        assert all(len(set(turns[i : i + 3])) == 3 for i in range(len(turns) - 2))
        assert end is not None
        for k in range(PARTITIONS):
            assert (await client.ends(f"{made}-partition-{k}")).last.is_same(end.partitions[k])
        async with client.partitioned_reader(made, end) as reader:
            assert [message async for message in reader] == []
            assert reader.position == end


@pytest.mark.parametrize("seed", range(3))
async def test_it_is_read_on_from_any_position(shared_sidecar: Sidecar, made: str, seed: int) -> None:
    """Left at any place, by message or by batch, and read on by another one that learned the text."""
    rng = random.Random(seed)
    messages: list[Message] = []
    text: str | None = None
    async with Client(shared_sidecar.address) as client:
        while True:
            start: PartitionedStart = "earliest" if text is None else PartitionedPosition.parse(text)
            before = len(messages)
            async with client.partitioned_reader(made, start) as reader:
                for _ in range(rng.randrange(1, 12)):
                    if rng.random() < 0.3:
                        stored = await reader.next_batch()
                        messages += [] if stored is None else [Message(stored, row) for row in range(len(stored))]
                    else:
                        messages += [message] if (message := await anext(reader, None)) else []
                    # What is fetched meanwhile, and not handed out, is not counted.
                    await asyncio.sleep(0.002 * rng.randrange(2))
                    text = str(reader.position)
            if len(messages) == before:
                break
    check(messages, 200)


async def test_it_follows(start_sidecar: Callable[..., Sidecar], topic: str) -> None:
    """Also over a restart of the sidecar."""
    sidecar = start_sidecar()
    async with Client(sidecar.address) as client:
        await client.admin.create_topic(topic, partitions=PARTITIONS)
        messages: list[Message] = []

        async def read(count: int) -> None:
            while len(messages) < count:
                messages.append(await anext(reader))

        async with client.partitioned_reader(topic, follow=True) as reader:
            reading = asyncio.ensure_future(read(60))
            await publish(client, topic, 0, 60)
            await asyncio.wait_for(reading, LAST_RESORT_SECONDS)
            await asyncio.to_thread(sidecar.restart)
            reading = asyncio.ensure_future(read(100))
            await publish(client, topic, 60, 40)
            await asyncio.wait_for(reading, LAST_RESORT_SECONDS)
            position = reader.position
        check(messages, 100)
        # What was published before is not the latest.
        async with client.partitioned_reader(topic, "latest", follow=True) as reader:
            waiting = asyncio.ensure_future(anext(reader))
            while reader.position != position:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await publish(client, topic, 1000, 1)
            assert (await waiting).sequence_id == 1000


async def test_a_reader_that_is_closed_ends(shared_sidecar: Sidecar, made: str) -> None:
    async with Client(shared_sidecar.address) as client:
        reader = client.partitioned_reader(made, follow=True)
        for _ in range(200):
            await anext(reader)
        waiting = asyncio.ensure_future(anext(reader, None))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await reader.close()
        assert await waiting is None
        assert await reader.next_batch() is None


async def test_what_cannot_be_read(shared_sidecar: Sidecar, made: str, topic: str) -> None:
    async with Client(shared_sidecar.address) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await anext(client.reader(made))
        assert caught.value.reason == "TOPIC_IS_PARTITIONED"
        plain = f"{topic}-plain"
        await client.admin.create_topic(plain)
        with pytest.raises(InvalidRequestError, match="has no partitions"):
            await anext(client.partitioned_reader(plain))
        async with client.partitioned_reader(made) as reader:
            await anext(reader)
            position = reader.position
        assert position is not None
        with pytest.raises(SeqdedupeError, match=r"has 2 partitions, and .* has 3"):
            await anext(client.partitioned_reader(made, PartitionedPosition(position.partitions[:2])))
        # For another topic, or in another order.
        async with client.partitioned_reader(made, PartitionedPosition(position.partitions[::-1])) as reader:
            with pytest.raises(PositionError) as of_another:
                await anext(reader)
        assert of_another.value.reason == "POSITION_OF_ANOTHER_INCARNATION"


def test_a_position_is_a_text() -> None:
    position = PartitionedPosition(
        (Position.start(5), Position.before(6, 3), Position.parse("7/7:41@41#00000000000000aa"))
    )
    assert str(position) == "partitions-1:5/start@-1,6@2,7/7:41@41#00000000000000aa"
    assert PartitionedPosition.parse(str(position)) == position
    for text in ("", "5@2", "partitions-2:5@2", "partitions-1:", "partitions-1:5@2,", "partitions-1:5@2 ,6@2"):
        with pytest.raises(SeqdedupeError) as caught:
            PartitionedPosition.parse(text)
        assert caught.value.reason == "INVALID_POSITION"


def test_for_threads(shared_sidecar: Sidecar, made: str) -> None:
    with blocking.Client(shared_sidecar.address) as client:
        with client.partitioned_reader(made) as reader:
            messages = [next(reader) for _ in range(50)]
            position = reader.position
        assert position is not None
        with client.partitioned_reader(made, position) as reader:
            for stored in reader.batches():
                messages += [Message(stored, row) for row in range(len(stored))]
            assert reader.skipped == {0: [], 1: [], 2: []}
    check(messages, 200)
