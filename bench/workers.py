"""Eight topics on two workers, against the same load on one process: processor time a message, of all processes.

As fast as they can, and at a rate that all keep up with: there beside one process with four of the topics too, which
then has as much to do as each of the two.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import grpc.aio

from bench import setup
from bench.compare.usage import cpu_seconds_of
from bench.figure import Arm, Figure, Ratio, over
from bench.publish import IN_FLIGHT, ROWS, rising
from seqdedupe.names import shard_of, shards_of_worker
from seqdedupe.testing import Sidecar

WORKERS = 2
TOPICS_EACH = 4
BATCHES = 800
"""To each topic, as fast as they can."""
BATCHES_A_SECOND = 50
"""To each topic, at a rate."""
PACED_BATCHES = 150

ONE = "one process"
TWO = "two workers"
HALF = "one process with half of it"
PACED = f"at {BATCHES_A_SECOND * ROWS * WORKERS * TOPICS_EACH:,} a second"
CPU = "CPU seconds a million"
RATE = "messages a second"

Publish = Callable[[setup.Stream, setup.MakeBatch], Coroutine[None, None, object]]

_names = itertools.count()
_turns = itertools.count()


def topics_of(worker: int) -> list[str]:
    """Those of a worker."""
    names = (f"persistent://public/default/t{number}" for number in itertools.count())
    mine = (name for name in names if shard_of(name) in shards_of_worker(worker, WORKERS))
    return list(itertools.islice(mine, TOPICS_EACH))


async def flat_out(stream: setup.Stream, make: setup.MakeBatch) -> None:
    await stream.publish(make, BATCHES, IN_FLIGHT)


async def paced(stream: setup.Stream, make: setup.MakeBatch) -> None:
    """A batch whenever it is time for one, and the one before has its receipt."""
    clock = asyncio.get_running_loop().time
    # Not all topics at the same moment, which would be one round of them all.
    began = clock() + next(_turns) % (WORKERS * TOPICS_EACH) / (WORKERS * TOPICS_EACH * BATCHES_A_SECOND)
    for k in range(PACED_BATCHES):
        await asyncio.sleep(max(0.0, began + k / BATCHES_A_SECOND - clock()))
        await stream.publish(lambda _, epochs, k=k: make(k, epochs), 1, 1)  # type: ignore[misc]


async def seconds_of(places: Sequence[tuple[str, str]], publish: Publish) -> float:
    """What publishing takes to topics, each at its address, all at once; what is opened before is not timed."""
    name = f"p{next(_names)}"
    make = rising(name, ROWS)
    async with AsyncExitStack() as stack:
        streams = []
        for topic, address in places:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=setup.APART))
            streams.append(await setup.opened(channel, [name], topic))
        began = time.perf_counter()
        await asyncio.gather(*(publish(stream, make) for stream in streams))
        return time.perf_counter() - began


def measure(sidecar: Sidecar, publish: Publish, batches: int, of_workers: int = WORKERS) -> dict[str, float]:
    """One run, of so many batches to each topic that so many workers have."""
    addresses = sidecar.address.split(",")
    places = [(topic, addresses[k % len(addresses)]) for k in range(of_workers) for topic in topics_of(k)]
    processes = [sidecar.pid, *sidecar.worker_pids.values()]
    before = sum(map(cpu_seconds_of, processes))
    seconds = setup.run(seconds_of(places, publish))
    messages = len(places) * batches * ROWS
    return {CPU: (sum(map(cpu_seconds_of, processes)) - before) / messages * 1e6, RATE: messages / seconds}


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with Sidecar(folder / "one") as one, Sidecar(folder / "two", workers=WORKERS) as two:
        arms: dict[str, Arm] = {
            f"{HALF}, {PACED}": lambda: measure(one, paced, PACED_BATCHES, 1),
            f"{ONE}, {PACED}": lambda: measure(one, paced, PACED_BATCHES),
            f"{TWO}, {PACED}": lambda: measure(two, paced, PACED_BATCHES),
            ONE: lambda: measure(one, flat_out, BATCHES),
            TWO: lambda: measure(two, flat_out, BATCHES),
        }

        def ratio(one: str, what: str, how: str = "", at_most: float | None = None) -> Ratio:
            value = over(f"{TWO}{how}, {what}", f"{one}{how}, {what}")
            return Ratio(f"{TWO} ÷ {one}{how}, {what}", value, at_most=at_most)

        yield Figure(
            arms=arms,
            ratios=[
                ratio(ONE, CPU, f", {PACED}", at_most=1.1),
                ratio(HALF, CPU, f", {PACED}"),
                ratio(ONE, CPU),
                ratio(ONE, RATE),
            ],
            rounds=5,
            notes=[
                "the time is that of all processes of the sidecar, with the parent",
                "on two cores the client and the disk take their part of them: the rate says what this machine has",
                "left; where each worker has a core the time a message is the bound, so twice the rate at a ratio of 1",
            ],
        )
