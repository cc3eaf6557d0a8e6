"""Where a producer's last message stands is known for as long as the log has it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from seqdedupe.core.recent import RECENT_MESSAGES
from seqdedupe.core.rule import STATED
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.operations import open_sessions
from seqdedupe.topic.policy import Applied
from seqdedupe.topic.topic import Topic
from tests.batches import batch

INCARNATION = 5
NAME = "persistent://public/default/t"
ROWS = 8192


class Process:
    """A topic on a real log and store, as one process has it."""

    def __init__(self, folder: Path) -> None:
        self.store = Store.open(folder / "store")
        self.logs = EmbeddedLogs(folder / "logs", clock_ms=lambda: 1, fatal=pytest.fail)
        self.snapshots = Snapshots(self.store, INCARNATION)
        self.epochs: dict[str, int] = {}
        self.last: dict[str, int] = {}

    async def start(self) -> None:
        await self.logs.create(INCARNATION, NAME, bytes(16))
        loaded = self.snapshots.load()
        log = await self.logs.open(INCARNATION, loaded.next_index if loaded else 0)
        self.topic = Topic(
            NAME,
            log,
            self.store,
            self.snapshots,
            loaded,
            applied=Applied(deduplication_entries_interval=10**9),
            random_bytes=lambda n: bytes(n),
        )
        await self.topic.recover()

    async def open(self, *names: str) -> list[int]:
        """Starts sessions; the indexes that Open answers."""
        opened = await open_sessions(self.topic, list(names), None)
        self.epochs.update(zip(names, opened.epochs, strict=True))
        self.last.update(zip(names, opened.persisted, strict=True))
        return opened.indexes

    async def publish(self, rows: list[tuple[str, int]]) -> None:
        answers: list[FrameReceipt | Refusal] = []
        encoded = batch(rows, epochs=self.epochs, links=self.last).encode()
        self.topic.admit(encoded, 1, answers.append, NumbersCache())
        await self.topic.flight.all_of_now()
        assert isinstance(answers[0], FrameReceipt)
        self.last.update(dict(rows))

    async def stop(self) -> None:
        await self.topic.drain()
        await self.logs.close()
        self.store.close()


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[Process]:
    process = Process(tmp_path)
    await process.start()
    yield process
    await process.stop()


async def push_out(process: Process) -> None:
    """Enough messages of another producer that the ring holds no others."""
    await process.open("other")
    while process.last["other"] < RECENT_MESSAGES:
        first = process.last["other"] + 1
        await process.publish([("other", i) for i in range(first, first + ROWS)])


async def test_open_finds_it_in_the_log_after_many_messages_of_others(process: Process) -> None:
    await process.open("a", "b")
    await process.publish([("b", 7), ("a", 3), ("b", 8), ("a", 5)])
    assert await process.open("a", "b", "c") == [3, 2, -1]
    await push_out(process)
    number = process.topic.producers.number(b"a")
    assert number is not None
    assert process.topic.producers.index_of(number, 5) == -1, "the ring has forgotten it"
    assert await process.open("a", "b", "c") == [3, 2, -1]
    assert await process.open("a") == [3], "a session that is started does not move it"


async def test_it_is_found_after_a_restart_from_a_snapshot(process: Process, tmp_path: Path) -> None:
    await process.open("a")
    await process.publish([("a", 1), ("a", 2)])
    await push_out(process)
    await process.stop()
    again = Process(tmp_path)
    await again.start()
    try:
        assert again.topic.keeper.snapshot_index > RECENT_MESSAGES
        assert await again.open("a") == [1]
        assert again.last["a"] == 2
    finally:
        await again.stop()
        # The fixture ends what it began.
        process.stop = _nothing  # type: ignore[method-assign]


async def _nothing() -> None:
    pass


async def test_another_producers_message_with_the_same_id_is_not_taken_for_it(process: Process) -> None:
    await process.open("a")
    await process.publish([("a", 3)])
    await process.open("b")
    await process.publish([("b", 3)])
    await push_out(process)
    number = process.topic.producers.number(b"a")
    assert number is not None
    # As after it was stated again, before its own message was dropped.
    process.topic.producers.numbers[number, STATED] = 1
    assert await process.open("a") == [-1]
