"""Decisions by deduplication IDs with a full window five times as large as the memory for it, beside RocksDB.

As in `window`, but copies are of any message in the window, and RocksDB has a cache as large as the window's memory.
Runs are built, merged and dropped meanwhile, and snapshots taken; how long that keeps the event loop is measured
beside. In one process. RocksDB is filled from sorted files (`Rocks.fill`), the window by frames of 50,000.
SEQDEDUPE_BENCH_WINDOW_ON_DISK is another number of IDs.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.figure import Figure, Ratio, over, percentiles_ms, shown
from bench.window import COPIES, FRAMES, KEY, ROWS, Rocks, frame, ids_from
from seqdedupe.core.id_window import IdWindow, Moment
from seqdedupe.core.producers import Producers
from seqdedupe.limits import WindowLimits
from seqdedupe.message_id import MessageId, Position
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic.frame import check_by_id
from seqdedupe.topic.keeper import Snapshotter
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.window_runs import WindowImported, WindowMemory, WindowRuns

IDS = int(os.environ.get("SEQDEDUPE_BENCH_WINDOW_ON_DISK", "50000000"))
MEMORY_BYTES = IDS // 5 * 45
FILLED_AT_ONCE = 50_000
PAUSE_SECONDS = 0.001
"""Between two looks at how long the event loop was kept."""

_INCARNATION = 5


def frames(first: int, seed: int) -> list[bytes]:
    """New IDs from this number on, and copies of any in the window."""
    rng = np.random.default_rng(seed)
    new = ROWS - COPIES
    made: list[bytes] = []
    for k in range(FRAMES):
        begin = first + k * new
        copies = rng.integers(begin - IDS + IDS // 10, begin, COPIES).tolist()
        made.append(ids_from(begin, new) + b"".join(ids_from(copy, 1) for copy in copies))
    return made


class _Window:
    """A window with what a topic has around it: its runs, snapshots, and their memory."""

    def __init__(self, folder: Path) -> None:
        self.window = IdWindow(KEY, 0)
        self.store = Store.open(folder)
        applied = Applied(deduplication_snapshot_interval_seconds=0)
        self.snapshotter = Snapshotter(
            "t",
            self.store,
            Snapshots(self.store, _INCARNATION),
            Producers(),
            lambda: (1, self._position(), b"", b""),
            next_index=0,
            applied=applied,
            on_durable=lambda: None,
            window=lambda: self.window,
        )
        nothing = WindowImported("", None, Policy, lambda: None)
        self.runs = WindowRuns(self.store, _INCARNATION, lambda: self.window, nothing, self.snapshotter.take)
        self.memory = WindowMemory(MEMORY_BYTES)
        self.snapshotter.on_stored = lambda: self.memory.measure(self.runs, self.window)
        self.limits = WindowLimits(IDS)
        self._opened = 0

    def _position(self) -> Position:
        last = self.window.confirmed_index - 1
        return Position(_INCARNATION, MessageId(_INCARNATION, last, -1) if last >= 0 else None, last)

    async def take(self, encoded: bytes) -> int:
        await self.memory.room()
        looked_up = await self.runs.look_up(encoded)
        checked = check_by_id(encoded)
        older = self.runs.older(checked, -1, looked_up)
        new, *_ = self.window.decide(checked.view, checked.places, True, self.limits, Moment(0, 0), older)
        self.window.confirm(new)
        if self.window.chunks_opened != self._opened:
            self._opened = self.window.chunks_opened
            self.memory.measure(self.runs, self.window)
        return new

    async def fill(self) -> None:
        for first in range(0, IDS, FILLED_AT_ONCE):
            await self.take(frame(ids_from(first, FILLED_AT_ONCE))[0].tobytes())
            self.snapshotter.stored(FILLED_AT_ONCE // ROWS)
            await asyncio.sleep(0)

    async def measured(self, made: list[bytes]) -> dict[str, float]:
        pauses: list[float] = []
        watching = asyncio.ensure_future(_watch(pauses))
        began = time.perf_counter()
        for one in made:
            if await self.take(one) != ROWS - COPIES:
                raise ValueError("a copy was not known, or something new was")
            self.snapshotter.stored(1)
            await asyncio.sleep(0)
        seconds = time.perf_counter() - began
        watching.cancel()
        older = self.window.older
        return {
            "IDs/s": FRAMES * ROWS / seconds,
            **percentiles_ms(pauses, "pause "),
            "filter": older.memory_bytes / sum(map(len, older.runs)),
            "on disk": self.window.on_disk / len(self.window),
            "memory": self.window.memory_bytes / MEMORY_BYTES,
        }


async def _watch(pauses: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(PAUSE_SECONDS)
        pauses.append(time.perf_counter() - began - PAUSE_SECONDS)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def made() -> _Window:
        return _Window(folder / "store")

    window = loop.run_until_complete(made())
    rocks = Rocks(folder / "rocks", IDS, MEMORY_BYTES)
    loop.run_until_complete(window.fill())
    rocks.fill()
    begins = [IDS, IDS]

    def ours() -> dict[str, float]:
        some = [frame(ids)[0].tobytes() for ids in frames(begins[0], begins[0])]
        begins[0] += FRAMES * (ROWS - COPIES)
        return loop.run_until_complete(window.measured(some))

    def rocksdb() -> dict[str, float]:
        some = frames(begins[1], begins[1])
        begins[1] += FRAMES * (ROWS - COPIES)
        began = time.perf_counter()
        for one in some:
            rocks.take(one)
        return {"IDs/s": FRAMES * ROWS / (time.perf_counter() - began)}

    try:
        yield Figure(
            {"window": ours, "RocksDB": rocksdb},
            ratios=[
                Ratio("decided ÷ the RocksDB way", over("window, IDs/s", "RocksDB, IDs/s"), at_least=3),
                Ratio("pause of the loop, p99", lambda m: m["window, pause p99"], at_most=5, unit="ms"),
                Ratio("filters, an ID on disk", lambda m: m["window, filter"], at_most=2, unit="B"),
                shown("window, on disk"),
                shown("window, memory"),
                shown("window, IDs/s", unit="IDs/s"),
                shown("RocksDB, IDs/s", unit="IDs/s"),
            ],
            rounds=3,
            notes=[f"a window of {IDS:,} IDs, memory for {IDS // 5:,}"],
        )
    finally:
        loop.run_until_complete(window.memory.forget(window.runs))
        loop.run_until_complete(window.snapshotter.close())
        window.store.close()
        rocks.db.close()
        loop.close()
