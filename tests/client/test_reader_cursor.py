"""Readers that begin at a cursor, and move it. A few seconds, the shared sidecar."""

import asyncio
from pathlib import Path

import pytest

from seqdedupe.client import Client, FencedError, FileCursor, InvalidRequestError, PositionError, blocking
from seqdedupe.testing import Sidecar


async def publish(sidecar: Sidecar, topic: str, count: int) -> None:
    async with Client(sidecar.address) as client, client.producer(topic, "p") as producer:
        await producer.send_batch([b"%d" % i for i in range(count)])


async def test_it_starts_where_the_cursor_is(shared_sidecar: Sidecar, topic: str, tmp_path: Path) -> None:
    cursor = FileCursor(tmp_path / "cursor")
    await publish(shared_sidecar, topic, 10)
    async with Client(shared_sidecar.address) as client:
        async with client.reader(topic, 3, cursor=cursor) as reader:
            await reader.save_position()
            assert await cursor.read() is None
            # Where nothing is kept the start counts.
            assert [(await anext(reader)).index for _ in range(2)] == [3, 4]
            await reader.save_position()
            await anext(reader)
        for _ in range(2):
            async with client.reader(topic, 3, cursor=cursor) as reader, client.reader(topic, cursor=cursor) as other:
                assert [m.index async for m in reader] == [5, 6, 7, 8, 9]
                assert (await anext(other)).index == 5
        await other.save_position()
        with pytest.raises(FencedError) as caught:
            await reader.save_position()
        assert caught.value.reason == "CURSOR_MOVED"
        kept = await cursor.read()
        assert kept is not None
        assert kept.position == await client.position_at(topic, 5)
        async with client.reader(topic) as without:
            with pytest.raises(InvalidRequestError):
                await without.save_position()
        # A cursor of what was there before is not taken for one of what is there now.
        await client.admin.delete_topic(topic)
        await publish(shared_sidecar, topic, 20)
        async with client.reader(topic, cursor=cursor) as reader:
            with pytest.raises(PositionError) as refused:
                await anext(reader)
        assert refused.value.reason == "POSITION_OF_ANOTHER_INCARNATION"


def test_with_threads(shared_sidecar: Sidecar, topic: str, tmp_path: Path) -> None:
    asyncio.run(publish(shared_sidecar, topic, 10))
    with blocking.Client(shared_sidecar.address) as client:
        in_a_file = blocking.FileCursor(tmp_path / "cursor")
        assert in_a_file.path == tmp_path / "cursor"
        for cursor in (in_a_file, client.cursor(topic, "c")):
            assert cursor.read() is None
            for first in (0, 5):
                with client.reader(topic, cursor=cursor) as reader:
                    assert [next(reader).index for _ in range(5)] == list(range(first, first + 5))
                    reader.save_position()
            # Also one for asyncio.
            assert [m.index for m in client.reader(topic, cursor=cursor.on_loop)] == []
            kept = cursor.read()
            assert kept is not None
            assert kept.position.index == 9
            with pytest.raises(FencedError):
                cursor.compare_and_set(None, kept)
            cursor.compare_and_set(kept, kept._replace(note="n"))
            assert cursor.read() == kept._replace(note="n")
