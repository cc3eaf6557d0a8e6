"""What is read ahead next to publishers: each message once, in order, no matter what becomes of the thread's read."""

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.errors import DamagedError, PositionError
from seqdedupe.log.embedded import reader, writer
from seqdedupe.log.embedded.log import EmbeddedLog
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.log.embedded.segment import Segment, SegmentPiece, segment_path, unreadable
from tests.log.batches import SECRET, TOPIC
from tests.log.conformance import LIMIT_SECONDS, Owner, parsed

INCARNATION = 77
BATCHES = 60
PAYLOAD_BYTES = 1_000
PAGE_BYTES = 4_000
SEGMENT_BYTES = 40_000
"""So there are two."""

FOR_EVER_SECONDS = 1e9


class Reads:
    """`Segment.read`: says in which threads it was called, is held back from one call on, and fails on command."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[threading.Thread] = []
        self.offsets: list[int] = []
        self.held_from = 2**63
        self.is_held = threading.Event()
        self.may_go_on = threading.Event()
        self.fails_at = 0
        really = Segment.read

        def read(segment: Segment, offset: int, *arguments: Any) -> SegmentPiece:
            self.threads.append(threading.current_thread())
            self.offsets.append(offset)
            number = len(self.offsets)
            if number >= self.held_from:
                self.is_held.set()
                assert self.may_go_on.wait(LIMIT_SECONDS)
            if number == self.fails_at:
                raise unreadable(segment.path, OSError("for a moment"))
            return really(segment, offset, *arguments)

        monkeypatch.setattr(Segment, "read", read)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of some batches, read next to publishers who never rest."""
    monkeypatch.setattr(reader, "WINDOW_BYTES", PAGE_BYTES)
    for module in (reader, writer):
        monkeypatch.setattr(module, "POINT_INTERVAL_BYTES", 0)
    monkeypatch.setattr(reader, "INLINE_BESIDE_PUBLISHERS_BYTES", 0)
    monkeypatch.setattr(reader, "PUBLISHING_SECONDS", FOR_EVER_SECONDS)


@pytest.fixture
def unheard() -> Iterator[list[Any]]:
    """What nobody has asked for of what failed."""
    found: list[Any] = []
    yield found
    gc.collect()
    assert found == []


@pytest.fixture
async def logs(tmp_path: Path, unheard: list[Any]) -> AsyncIterator[EmbeddedLogs]:
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))

    def fatal(reason: str) -> None:
        raise AssertionError(reason)

    made = EmbeddedLogs(tmp_path / "logs", clock_ms=lambda: 1_000, fatal=fatal, segment_bytes=SEGMENT_BYTES)
    yield made
    await made.close()
    gc.collect()


@pytest.fixture
async def log(logs: EmbeddedLogs) -> EmbeddedLog:
    await logs.create(INCARNATION, TOPIC, SECRET)
    log = await logs.open(INCARNATION, 0)
    owner = await Owner(log, 1).open()
    for i in range(BATCHES):
        owner.append(i, 1, PAYLOAD_BYTES)
        await owner.until_stored(i + 1)
    assert len(log.base_indexes) == 2
    return log


async def page(log: EmbeddedLog, index: int) -> int:
    """Reads a page; the index after it."""
    records = parsed(await log.read(index, BATCHES, PAGE_BYTES))
    assert [record.base_index for record in records] == list(range(index, index + len(records)))
    assert all(list(record.batch.sequence_ids) == [record.base_index] for record in records)
    return index + len(records)


async def read_until(log: EmbeddedLog, end: int, start: int = 0) -> int:
    while start < end:
        start = await page(log, start)
    return start


AHEAD = 3
"""The number of the first read that nobody has asked for: the second page shows that its reader goes on."""


async def held_ahead(log: EmbeddedLog, reads: Reads) -> int:
    """Reads two pages, and holds back what is read ahead; the index after them."""
    reads.held_from = AHEAD
    index = await page(log, await page(log, 0))
    assert await asyncio.to_thread(reads.is_held.wait, LIMIT_SECONDS)
    return index


async def test_beside_publishers_a_thread_reads_ahead(log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    index = await held_ahead(log, reads)
    reads.may_go_on.set()
    await read_until(log, BATCHES, index)
    assert threading.current_thread() not in reads.threads
    # Each window once. (There is a segment after the first, which begins again.)
    assert len(set(reads.offsets)) == len(reads.offsets) - 1
    await log.close()


@pytest.mark.parametrize("is_little", [False, True])
async def test_the_loop_reads_for_a_lone_reader_and_what_is_little(
    log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch, is_little: bool
) -> None:
    def in_memory(file: int, buffers: list[memoryview], offset: int, _: int) -> int:
        data = os.pread(file, len(buffers[0]), offset)
        buffers[0][: len(data)] = data
        return len(data)

    if is_little:
        monkeypatch.setattr(reader, "INLINE_BESIDE_PUBLISHERS_BYTES", PAGE_BYTES)
    else:
        monkeypatch.setattr(reader, "PUBLISHING_SECONDS", -1)
    monkeypatch.setattr(os, "preadv", in_memory)
    reads = Reads(monkeypatch)
    # From where it has read more than a page: then all of a page is left to be read.
    await page(log, await page(log, 0))
    # What is read ahead meanwhile is a thread's.
    assert reads.threads[: AHEAD - 1] == [threading.current_thread()] * (AHEAD - 1)
    await log.close()


async def test_a_read_ahead_that_fails_once_is_made_again(log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    reads.fails_at = AHEAD
    await read_until(log, BATCHES)
    assert reads.offsets[AHEAD - 1] == reads.offsets[AHEAD]
    await log.close()


async def test_damage_that_was_met_ahead_is_told_where_it_stands(
    log: EmbeddedLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    path = segment_path(tmp_path / "logs" / str(INCARNATION), 0)
    raw = bytearray(path.read_bytes())
    damaged = 15
    raw[raw.index(bytes([damaged]) * PAYLOAD_BYTES)] ^= 1
    with path.open("r+b") as file:
        file.write(raw)
    index = await read_until(log, damaged)
    assert index == damaged
    for _ in range(2):
        with pytest.raises(DamagedError):
            await page(log, damaged)
    assert threading.current_thread() not in reads.threads
    await log.close()


async def test_a_reader_that_goes_away_while_it_waits_leaves_nothing(
    logs: EmbeddedLogs, log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    index = await held_ahead(log, reads)
    waiting = asyncio.ensure_future(page(log, index))
    await asyncio.sleep(0)
    assert not windows(logs), "the reader has it"
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    reads.may_go_on.set()
    assert not windows(logs)
    await read_until(log, BATCHES, index)
    await log.close()


def windows(logs: EmbeddedLogs) -> list[reader.Window]:
    """What is kept for readers."""
    return list(logs._shared.read_ahead._windows.values())


@pytest.mark.parametrize("waits", [True, False])
async def test_retention_is_faster_than_what_is_read_ahead(
    log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    reads = Reads(monkeypatch)
    index = await held_ahead(log, reads)
    waiting = asyncio.ensure_future(page(log, index)) if waits else None
    await asyncio.sleep(0)
    await log.trim(log.base_indexes[1])
    assert len(log.base_indexes) == 1
    reads.may_go_on.set()
    with pytest.raises(PositionError) as refused:
        await (waiting or page(log, index))
    assert refused.value.reason == "POSITION_TRIMMED"
    assert await read_until(log, BATCHES, log.first_index) == BATCHES
    await log.close()


async def test_a_log_that_is_closed_gives_up_what_is_read_ahead(
    logs: EmbeddedLogs, log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    await held_ahead(log, reads)
    assert len(windows(logs)) == 1
    await log.close()
    assert not windows(logs)
    reads.may_go_on.set()


async def test_what_is_kept_for_readers_is_bounded(
    logs: EmbeddedLogs, log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with more readers than that, nothing is read that nobody gets."""
    monkeypatch.setattr(reader, "MAX_WINDOWS", 3)
    reads = Reads(monkeypatch)
    indexes = [0, 8, 16, 24]
    for _ in range(2):
        indexes = [await page(log, index) for index in indexes]
        assert len(windows(logs)) == 3
    assert len(reads.offsets) == 8
    await log.close()
