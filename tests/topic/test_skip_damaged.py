"""Readers of a topic get past what is damaged if they say so, and learn what is missing."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from seqdedupe.core.recent import RECENT_MESSAGES
from seqdedupe.errors import DamagedError, PositionError
from seqdedupe.message_id import Position
from seqdedupe.topic.base import State
from seqdedupe.topic.operations import MessageState, message_state
from seqdedupe.topic.readers import index_after, read_on
from tests.log.conformance import parsed
from tests.topic.test_originals import INCARNATION, Process

BATCH = 10
COUNT = 100
HIT = range(40, 50)


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[Process]:
    process = Process(tmp_path)
    await process.start()
    await process.open("a")
    for first in range(0, COUNT, BATCH):
        await process.publish([("a", i) for i in range(first, first + BATCH)])
    yield process
    await process.stop()


def damage(folder: Path, base_index: int) -> None:
    """A byte in the columns of the record with that index."""
    path = folder / "logs" / str(INCARNATION) / f"{0:020d}.log"
    raw = bytearray(path.read_bytes())
    at = raw.index(base_index.to_bytes(8, "little") + (base_index + 1).to_bytes(8, "little"))
    raw[at] ^= 0x40
    # In its place: the topic has the file open.
    with path.open("r+b") as file:
        file.write(raw)


async def read(process: Process, start: int, stop: int, *, skip: bool = True) -> tuple[list[int], list[range]]:
    """The indexes of what is shown, and of what is skipped, each in its place."""
    shown, skipped, here = list[int](), list[range](), start
    async for page in read_on(process.topic, start, stop, skip_damaged=skip):
        if page.skipped:
            assert not page.records
            assert page.skipped == range(here, page.next_index)
            skipped.append(page.skipped)
        for record in parsed(page.records):
            shown += range(record.base_index, record.base_index + record.rows)
        here = page.next_index
    assert here == stop
    return shown, skipped


async def position(process: Process, index: int) -> Position:
    return await process.topic.position_before(index + 1)


async def test_with_the_option_all_others_are_shown_and_what_is_missing_is_told(
    process: Process, tmp_path: Path
) -> None:
    assert await read(process, 0, COUNT) == (list(range(COUNT)), [])
    damage(tmp_path, HIT.start)
    others = [i for i in range(COUNT) if i not in HIT]
    assert await read(process, 0, COUNT) == (others, [HIT])
    assert await read(process, 0, 45) == (list(range(40)), [range(40, 45)])
    assert await read(process, 43, 47) == ([], [range(43, 47)])
    assert await read(process, 47, 55) == ([50, 51, 52, 53, 54], [range(47, 50)])
    assert await read(process, 50, COUNT) == (list(range(50, COUNT)), [])
    assert process.topic.state is State.SERVING


async def test_without_it_the_error_names_the_place_and_the_option(process: Process, tmp_path: Path) -> None:
    damage(tmp_path, HIT.start)
    for start in (0, 45):
        with pytest.raises(DamagedError) as caught:
            await read(process, start, COUNT, skip=False)
        assert caught.value.reason == "LOG_DAMAGED"
        assert "skip_damaged" in caught.value.hint
        assert caught.value.numbers["file"].endswith(".log")
    assert (await read(process, 50, COUNT, skip=False)) == (list(range(50, COUNT)), [])


async def test_a_position_that_is_damaged(process: Process, tmp_path: Path) -> None:
    before, inside, last, after = [await position(process, index) for index in (39, 44, 49, 50)]
    damage(tmp_path, HIT.start)
    for skip in (False, True):
        assert await index_after(process.topic, before, skip_damaged=skip) == 40
        assert await index_after(process.topic, after, skip_damaged=skip) == 51
    for taken, index in ((inside, 45), (last, 50)):
        with pytest.raises(DamagedError):
            await index_after(process.topic, taken)
        assert await index_after(process.topic, taken, skip_damaged=True) == index
    other = Position(INCARNATION + 1, inside.message_id, inside.index)
    with pytest.raises(PositionError):
        await index_after(process.topic, other, skip_damaged=True)
    diverged = Position(INCARNATION, after.message_id, after.index, after.ownership + 1)
    with pytest.raises(PositionError):
        await index_after(process.topic, diverged, skip_damaged=True)


async def test_the_state_of_a_message(tmp_path: Path) -> None:
    process = Process(tmp_path)
    await process.start()
    await process.open("a", "b")
    for first in range(0, COUNT, BATCH):
        await process.publish([("a", i) for i in range(first, first + BATCH)])
    await process.stop()
    process = Process(tmp_path)
    await process.start()
    await process.open("b")
    await process.publish([("b", i) for i in range(COUNT, COUNT + BATCH)])
    # In the ring are those of b alone, those of a are looked for in the log.
    control = await message_state(process.topic, "a", 45)
    assert (control.state, control.publish_time_ms) == (MessageState.STORED, 1)
    damage(tmp_path, HIT.start)
    assert (await message_state(process.topic, "a", 45)).state is MessageState.BELOW_WATERMARK
    for other in (39, 50):
        found = await message_state(process.topic, "a", other)
        assert found == replace(control, position=await position(process, other))
    damage(tmp_path, COUNT)
    of_b = await message_state(process.topic, "b", COUNT + 3)
    assert (of_b.state, of_b.publish_time_ms) == (MessageState.STORED, 0)
    assert of_b.position == Position(INCARNATION, None, COUNT + 3)
    await process.stop()


async def test_open_answers_without_the_place_of_a_last_message_that_is_damaged(
    process: Process, tmp_path: Path
) -> None:
    await process.open("other")
    while process.last["other"] < RECENT_MESSAGES:
        first = process.last["other"] + 1
        await process.publish([("other", i) for i in range(first, first + 8192)])
    assert await process.open("a") == [COUNT - 1]
    damage(tmp_path, COUNT - BATCH)
    assert await process.open("a") == [-1]
    assert process.last["a"] == COUNT - 1
    await process.publish([("a", COUNT)])
