"""Process start → SERVING with a tail of 1M messages: 1M producers, also in batches of one row, and 10M producers."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench import setup
from bench.figure import Figure, Ratio
from broker_sidecar.config import Config
from broker_sidecar.data import Data
from seqdedupe.batch import Binary, single_producer
from seqdedupe.testing import Sidecar
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.operations import open_sessions

PRODUCERS = 1_000_000
MANY_PRODUCERS = 10_000_000
PRODUCERS_A_SNAPSHOT = 500_000
TAIL = 1_000_000
IN_FLIGHT = 256


async def fill(data: Path, rows: int, *, producers: int = PRODUCERS, tail: int = TAIL) -> None:
    """A data directory with a snapshot of so many producers, and so many messages after it."""
    config = Config(data_directory=str(data), deduplication_entries_interval=2**62)
    opened_data = Data(config, lambda name, state: None)
    topic = await opened_data.all_topics.create(setup.TOPIC)
    opened = await open_sessions(topic, ["p"], None)
    for first in range(0, producers, PRODUCERS_A_SNAPSHOT):
        end = min(first + PRODUCERS_A_SNAPSHOT, producers)
        numbers = topic.producers.add_all([b"producer-%07d" % i for i in range(first, end)])
        epochs = np.full(len(numbers), opened.epochs[0])
        topic.producers.confirm_sessions(numbers, epochs, np.arange(first, end), 0)
        await topic.keeper.snapshotter.take()
    # Compacted as far as it goes, as it is where names come over time.
    async with topic.keeper.snapshotter.stands_still():
        pass
    await topic.keeper.snapshotter.take()
    cache = NumbersCache()
    payloads = Binary.of_all([b"x" * 100] * rows)
    base = np.arange(rows, dtype=np.int64)
    answered = 0

    def reply(answer: FrameReceipt | Refusal) -> None:
        nonlocal answered
        if isinstance(answer, Refusal):
            raise answer.error
        answered += 1

    for k in range(tail // rows):
        batch = single_producer(b"p", opened.epochs[0], k * rows - 1, base + k * rows, payloads)
        topic.admit(batch.encode(), k, reply, cache)
        while k - answered > IN_FLIGHT:
            await topic.flight.all_of_now()
    await topic.flight.all_of_now()
    # No last snapshot: the process is killed, as far as its data are concerned.
    await topic.close("done")
    await opened_data.close()


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    async def make() -> None:
        await fill(folder / "rows-256" / "data", 256)
        await fill(folder / "rows-1" / "data", 1)
        await fill(folder / "many" / "data", 256, producers=MANY_PRODUCERS)

    asyncio.run(make())

    def start(name: str) -> float:
        sidecar = Sidecar(folder / name)
        began = time.perf_counter()
        sidecar.start()
        seconds = time.perf_counter() - began
        sidecar.kill()
        return seconds

    (folder / "empty").mkdir()
    yield Figure(
        arms={
            "nothing to recover": lambda: start("empty"),
            "batches of 256 rows": lambda: start("rows-256"),
            "batches of one row": lambda: start("rows-1"),
            "10M producers": lambda: start("many"),
        },
        ratios=[
            Ratio("start, tail in batches of 256 rows", lambda m: m["batches of 256 rows"], at_most=3, unit="s"),
            Ratio("start, tail in batches of one row", lambda m: m["batches of one row"], at_most=3, unit="s"),
            Ratio("start, 10M producers", lambda m: m["10M producers"], at_most=6, unit="s"),
        ],
        rounds=3,
        notes=["arms in seconds"],
    )
