"""Eight topics on two workers, against the same load on one process: processor time a message, of all processes."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import grpc.aio

from bench import setup
from bench.compare.usage import cpu_seconds_of
from bench.figure import Arm, Figure, Ratio, over
from bench.publish import IN_FLIGHT, ROWS, rising
from seqdedupe.shards import shard_of, shards_of_worker
from seqdedupe.testing import Sidecar

WORKERS = 2
TOPICS_EACH = 4
BATCHES = 800
"""To each topic."""

ONE = "one process"
TWO = "two workers"
CPU = "CPU seconds a million"
RATE = "messages a second"

_names = itertools.count()


def topics_of(worker: int) -> list[str]:
    """Those of a worker."""
    names = (f"persistent://public/default/t{number}" for number in itertools.count())
    mine = (name for name in names if shard_of(name) in shards_of_worker(worker, WORKERS))
    return list(itertools.islice(mine, TOPICS_EACH))


async def seconds_of(places: Sequence[tuple[str, str]]) -> float:
    """What publishing takes to topics, each at its address, all at once; what is opened before is not timed."""
    name = f"p{next(_names)}"
    make = rising(name, ROWS)
    async with AsyncExitStack() as stack:
        streams = []
        for topic, address in places:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=setup.APART))
            streams.append(await setup.opened(channel, [name], topic))
        began = time.perf_counter()
        await asyncio.gather(*(stream.publish(make, BATCHES, IN_FLIGHT) for stream in streams))
        return time.perf_counter() - began


def measure(sidecar: Sidecar) -> dict[str, float]:
    """One run."""
    addresses = sidecar.address.split(",")
    places = [(topic, addresses[k % len(addresses)]) for k in range(WORKERS) for topic in topics_of(k)]
    processes = [sidecar.pid, *sidecar.worker_pids.values()]
    before = sum(map(cpu_seconds_of, processes))
    seconds = setup.run(seconds_of(places))
    messages = len(places) * BATCHES * ROWS
    return {CPU: (sum(map(cpu_seconds_of, processes)) - before) / messages * 1e6, RATE: messages / seconds}


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with Sidecar(folder / "one") as one, Sidecar(folder / "two", workers=WORKERS) as two:

        def measured(sidecar: Sidecar) -> Arm:
            return lambda: measure(sidecar)

        yield Figure(
            arms={ONE: measured(one), TWO: measured(two)},
            ratios=[
                Ratio(f"{TWO} ÷ {ONE}, {CPU}", over(f"{TWO}, {CPU}", f"{ONE}, {CPU}"), at_most=1.1),
                Ratio(f"{TWO} ÷ {ONE}, {RATE}", over(f"{TWO}, {RATE}", f"{ONE}, {RATE}")),
            ],
            rounds=5,
            notes=[
                "the time is that of all processes of the sidecar, with the parent",
                "on two cores the client and the disk take their part of them: the rate says what this machine has",
                "left; where each worker has a core the time a message is the bound, so twice the rate at a ratio of 1",
            ],
        )
