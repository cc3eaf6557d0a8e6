"""Pause of the serving loop while a snapshot is taken: of 1M producers, 1 % of them changed; and of a window of 2M
deduplication IDs, half of which are new, as after a thousand frames of a thousand.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np

from bench import setup
from bench.figure import Figure, Ratio
from bench.window import KEY, frame, ids_from
from seqdedupe.core.id_window import IdWindow, Moment
from seqdedupe.core.name_table import Names
from seqdedupe.core.producers import Producers
from seqdedupe.limits import WindowLimits
from seqdedupe.message_id import MessageId, Position
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic.keeper import Snapshotter
from seqdedupe.topic.policy import Applied

PRODUCERS = 1_000_000
CHANGED = 10_000
SNAPSHOTS = 40
IDS = 1_000_000
IDS_AT_ONCE = 10_000
SNAPSHOTS_OF_IDS = 10
BEAT_SECONDS = 0.0005


class _Taking:
    """A topic's numbers, and how long taking snapshots of them kept the loop's beats waiting."""

    def __init__(self, store: Store, producers: Producers, window: IdWindow | None) -> None:
        self.index = 0
        self.pauses: list[float] = []
        """The longest in each snapshot: the beats that come between would hide it."""
        self._late: list[float] = []
        self.snapshotter = Snapshotter(
            "t",
            store,
            Snapshots(store, store.next_incarnation(1)),
            producers,
            lambda: (1, Position(1, MessageId(1, self.index), self.index), b"", b""),
            next_index=0,
            applied=Applied(deduplication_entries_interval=2**62),
            on_durable=lambda: None,
            window=lambda: window,
        )
        # All names and IDs are new to the store.
        self.snapshotter._names_stored = 0

    async def beats(self) -> None:
        while True:
            expected = time.perf_counter() + BEAT_SECONDS
            await asyncio.sleep(BEAT_SECONDS)
            self._late.append(time.perf_counter() - expected)

    async def take(self) -> None:
        # The beat that the changes themselves kept waiting is none of the snapshot's.
        await asyncio.sleep(2 * BEAT_SECONDS)
        self._late.clear()
        await self.snapshotter.take()
        await asyncio.sleep(2 * BEAT_SECONDS)
        self.pauses.append(max(self._late))


@asynccontextmanager
async def _taking(folder: Path, producers: Producers, window: IdWindow | None = None) -> AsyncIterator[_Taking]:
    store = Store.open(folder)
    taking = _Taking(store, producers, window)
    await taking.snapshotter.take()
    heart = asyncio.ensure_future(taking.beats())
    await asyncio.sleep(0.2)
    yield taking
    heart.cancel()
    await taking.snapshotter.close()
    await asyncio.to_thread(store.close)


def _p99_ms(taking: _Taking) -> float:
    return float(np.percentile(taking.pauses, 99)) * 1000


async def _of_producers(folder: Path) -> float:
    producers = Producers()
    names = [b"producer-%07d" % i for i in range(PRODUCERS)]
    producers.load(Names.of(names), *[np.ones(PRODUCERS, np.int64)] * 3)
    rng = np.random.default_rng(1)
    async with _taking(folder, producers) as taking:
        for _ in range(SNAPSHOTS):
            changed = rng.choice(PRODUCERS, CHANGED, replace=False)
            producers.numbers[changed, 1] += 1
            producers.mark_dirty(changed)
            taking.index += CHANGED
            await taking.take()
        return _p99_ms(taking)


async def _of_ids(folder: Path) -> float:
    window, limits = IdWindow(KEY, 1), WindowLimits(2 * IDS)
    async with _taking(folder, Producers(), window) as taking:
        for _ in range(SNAPSHOTS_OF_IDS):
            for _ in range(IDS // IDS_AT_ONCE):
                new, *_ = window.decide(*frame(ids_from(window.next_index, IDS_AT_ONCE)), True, limits, Moment(0, 0))
                window.confirm(new)
                taking.index += new
            await taking.take()
        return _p99_ms(taking)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    runs = iter(range(1_000))
    yield Figure(
        arms={
            "producers": lambda: setup.run(_of_producers(folder / str(next(runs)))),
            "IDs": lambda: setup.run(_of_ids(folder / str(next(runs)))),
        },
        ratios=[
            Ratio("p99 of the longest pause in each snapshot", lambda m: m["producers"], at_most=3, unit="ms"),
            Ratio("the same of a window of IDs", lambda m: m["IDs"], at_most=5, unit="ms"),
        ],
        rounds=3,
    )
