"""Readers that begin at a cursor, and move it. A few seconds, the shared sidecar."""

import asyncio
from pathlib import Path

import pytest

from seqdedupe.client import (
    Client,
    Cursor,
    FencedError,
    FileCursor,
    InvalidRequestError,
    Kept,
    OutcomeUnknownError,
    PositionError,
    blocking,
)
from seqdedupe.client.cursor import CursorMoves
from seqdedupe.errors import error
from seqdedupe.message_id import MessageId, Position
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.client.proxy import Proxy


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


@pytest.mark.parametrize("is_moved_by_another", [False, True])
async def test_a_reader_knows_its_own_move_whose_answer_is_lost(
    shared_sidecar: Sidecar, topic: str, is_moved_by_another: bool
) -> None:
    await publish(shared_sidecar, topic, 10)
    async with (
        Client(shared_sidecar.address) as direct,
        Proxy(shared_sidecar.address) as proxy,
        Client(proxy.address) as client,
        direct.reader(topic, cursor=client.cursor(topic, "c")) as reader,
    ):
        cursor = direct.cursor(topic, "c")
        await anext(reader)
        await reader.save_position()
        await anext(reader)
        proxy.swallows_answers = True
        saving = asyncio.ensure_future(reader.save_position())
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            while (kept := await cursor.read()) is None or kept.position.index != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        proxy.swallows_answers = False
        proxy.cut()
        with pytest.raises(OutcomeUnknownError):
            await saving
        await anext(reader)
        if is_moved_by_another:
            await cursor.compare_and_set(await cursor.read(), Kept(await direct.position_at(topic, 7)))
            with pytest.raises(FencedError):
                await reader.save_position()
        else:
            await reader.save_position()
            await anext(reader)
            await reader.save_position()
        kept = await cursor.read()
        assert kept is not None
        assert kept.position.index == (7 if is_moved_by_another else 3)


class Late(Cursor):
    """One whose first move has no answer, and comes to be in force just before the next one."""

    def __init__(self, failure: Exception) -> None:
        self._kept: Kept | None = None
        self._late: list[Kept] = []
        self._failures = [failure]

    async def read(self) -> Kept | None:
        return self._kept

    async def compare_and_set(self, expected: Kept | None, new: Kept) -> None:
        if self._failures:
            self._late.append(new)
            raise self._failures.pop()
        if self._late:
            self._kept = self._late.pop()
        if self._kept != expected:
            raise error("CURSOR_MOVED", "it keeps something else")
        self._kept = new


@pytest.mark.parametrize("failure", [error("OUTCOME_UNKNOWN", "broke"), OSError("no sync"), error("LOG_REFUSED", "no")])
async def test_an_owner_knows_its_own_move_that_comes_late(failure: Exception) -> None:
    """As a pipe does, it reads its cursor again after a failure. What says that nothing has changed is believed."""
    first, second = (Kept(Position(7, MessageId(7, index), index)) for index in (1, 2))
    cursor = Late(failure)
    moves = CursorMoves(cursor)
    assert await moves.read() is None
    with pytest.raises(type(failure)):
        await moves.move(first)
    assert await moves.read() is None
    if "LOG_REFUSED" in str(failure):
        with pytest.raises(FencedError):
            await moves.move(second)
    else:
        await moves.move(second)
        assert await cursor.read() == moves.kept == second
