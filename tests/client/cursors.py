"""The suite that each kind of cursor has to pass: derive from it, and give `make`."""

import asyncio
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any

import pytest

from seqdedupe.client import FencedError, InvalidRequestError, MessageId, Position
from seqdedupe.client.cursor import MAX_NOTE_BYTES, Cursor, Kept

ONE = Kept(Position(7, MessageId(7, 3), 3, 0xFEDC_BA98_7654_3210), "")
POSITIONS = (
    ONE.position,
    Position.start(7),
    Position.before(7, 5),
    Position(7, MessageId(1, 2, 3), 9),
    Position((1 << 63) - 1, MessageId((1 << 63) - 1, 5), (1 << 62), (1 << 64) - 1),
)


class CursorSuite(ABC):
    """`make` gives cursors of one place, each as another process has it; all in one event loop."""

    @abstractmethod
    def make(self, place: Any) -> Cursor: ...

    async def test_what_is_kept_is_read_as_it_was(self, place: Any) -> None:
        cursor, other = self.make(place), self.make(place)
        assert await cursor.read() is None
        before: Kept | None = None
        for position in self.positions():
            for note in ("", "ü\n\x00'\"" if self.takes_any_text else "ü'\"", "x" * MAX_NOTE_BYTES):
                kept = Kept(position, note)
                await cursor.compare_and_set(before, kept)
                assert await other.read() == kept
                cursor, other, before = other, cursor, kept

    takes_any_text = True

    def positions(self) -> tuple[Position, ...]:
        return POSITIONS

    async def test_it_moves_only_from_what_is_kept(self, place: Any) -> None:
        cursor = self.make(place)
        two, three = (ONE._replace(position=ONE.position._replace(index=i, message_id=MessageId(7, i))) for i in (4, 5))
        await self._refused(cursor, two, ONE)
        assert await cursor.read() is None
        await cursor.compare_and_set(None, ONE)
        for expected in (None, two, ONE._replace(note="other"), Kept(ONE.position._replace(ownership=0))):
            await self._refused(cursor, expected, three)
            assert await cursor.read() == ONE
        await cursor.compare_and_set(ONE, two)
        await self._refused(cursor, ONE, three)
        # It may go back: what is kept is its owner's.
        await cursor.compare_and_set(two, ONE)
        await cursor.compare_and_set(ONE, ONE)
        assert await self.make(place).read() == ONE

    async def _refused(self, cursor: Cursor, expected: Kept | None, new: Kept) -> None:
        with pytest.raises(FencedError) as caught:
            await cursor.compare_and_set(expected, new)
        assert caught.value.reason == "CURSOR_MOVED"

    async def test_what_is_no_position_is_refused(self, place: Any) -> None:
        cursor = self.make(place)
        await cursor.compare_and_set(None, ONE)
        for bad in (
            Kept(Position(7, MessageId(7, 3), -1)),
            Kept(Position(7, None, -2)),
            Kept(Position(-1, None, 5)),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                await cursor.compare_and_set(ONE, bad)
            assert caught.value.reason == "INVALID_POSITION"
        for note in ("x" * (MAX_NOTE_BYTES + 1), "\ud800"):
            with pytest.raises(InvalidRequestError) as caught:
                await cursor.compare_and_set(ONE, Kept(ONE.position, note))
            assert caught.value.reason == "INVALID_REQUEST"
        assert await cursor.read() == ONE

    async def test_of_many_at_once_one_wins_each_time(self, place: Any) -> None:
        cursors = [self.make(place) for _ in range(5)]
        won = [0] * len(cursors)

        async def count(k: int, cursor: Cursor) -> None:
            while (kept := await cursor.read()) is None or kept.position.index < self.moves:
                index = 0 if kept is None else kept.position.index + 1
                with suppress(FencedError):
                    await cursor.compare_and_set(kept, Kept(Position(7, MessageId(7, index), index, 1), str(k)))
                    won[k] += 1

        await asyncio.gather(*(count(k, cursor) for k, cursor in enumerate(cursors)))
        assert sum(won) == self.moves + 1

    moves = 40

    async def test_cancelled_anywhere_it_keeps_the_one_or_the_other(self, place: Any) -> None:
        kept: Kept | None = None
        for turns in (*range(12), *(2**k for k in range(4, 16))):
            cursor = self.make(place)
            new = Kept(Position(7, MessageId(7, turns), turns, 1))
            moving = asyncio.ensure_future(cursor.compare_and_set(kept, new))
            for _ in range(turns):
                await asyncio.sleep(0)
            moving.cancel()
            await asyncio.wait({moving})
            # A move that was under way may still come; when one that follows has succeeded it will not.
            found = await cursor.read()
            assert found in (kept, new)
            while True:
                try:
                    await self.make(place).compare_and_set(found, new)
                    break
                except FencedError:
                    found = await cursor.read()
                    assert found in (kept, new)
            kept = new
            assert await cursor.read() == kept
