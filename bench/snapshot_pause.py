"""Pause of the serving loop while a snapshot of 1M producers, 1 % of them changed, is taken."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench import setup
from bench.figure import Figure, Ratio
from seqdedupe.core.names import Names
from seqdedupe.core.producers import Producers
from seqdedupe.message_id import MessageId, Position
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic.policy import Applied
from seqdedupe.topic.snapshotter import Snapshotter

PRODUCERS = 1_000_000
CHANGED = 10_000
SNAPSHOTS = 40
BEAT_SECONDS = 0.0005


async def _pauses(folder: Path) -> tuple[float, float]:
    """p99 in milliseconds of what a beat of the loop came late, while snapshots are taken and without them."""
    store = Store.open(folder)
    producers = Producers()
    names = [b"producer-%07d" % i for i in range(PRODUCERS)]
    producers.load(Names.of(names), *[np.ones(PRODUCERS, np.int64)] * 3)
    late: list[float] = []
    going = True

    async def beat() -> None:
        while going:
            expected = time.perf_counter() + BEAT_SECONDS
            await asyncio.sleep(BEAT_SECONDS)
            late.append(time.perf_counter() - expected)

    index = 0

    def describe() -> tuple[int, Position, bytes, bytes]:
        return 1, Position(1, MessageId(1, index), index), b"", b""

    incarnation = store.next_incarnation(1)
    snapshotter = Snapshotter(
        store,
        Snapshots(store, incarnation),
        producers,
        describe,
        next_index=0,
        applied=Applied(deduplication_entries_interval=2**62),
        on_durable=lambda: None,
    )
    snapshotter._names_stored = 0
    await snapshotter.take()
    rng = np.random.default_rng(1)
    heart = asyncio.ensure_future(beat())
    await asyncio.sleep(0.2)
    calm, late = late, []
    for _ in range(SNAPSHOTS):
        changed = rng.choice(PRODUCERS, CHANGED, replace=False)
        producers.numbers[changed, 1] += 1
        producers.mark_dirty(changed)
        index += CHANGED
        # The beat that the changes themselves kept waiting is none of the snapshot's.
        await asyncio.sleep(2 * BEAT_SECONDS)
        # A pause counts whole: the beats that come between snapshots would hide it.
        before = len(late)
        await snapshotter.take()
        await asyncio.sleep(2 * BEAT_SECONDS)
        late[before:] = [max(late[before:])]
    going = False
    await heart
    await snapshotter.close()
    await asyncio.to_thread(store.close)
    return float(np.percentile(late, 99)) * 1000, float(np.percentile(calm, 99)) * 1000


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    runs = iter(range(1_000))
    yield Figure(
        arms={"pause": lambda: setup.run(_pauses(folder / str(next(runs))))[0]},
        ratios=[Ratio("p99 of the longest pause in each snapshot", lambda m: m["pause"], at_most=3, unit="ms")],
        rounds=3,
    )
