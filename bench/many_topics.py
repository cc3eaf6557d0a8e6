"""10,000 topics on 1,024 descriptors: made, started again after kill -9, and what they take.

The first arm makes them, and those after it measure what it made; a folder that is started again is what the last
process left, without its having been drained.
"""

import asyncio
import itertools
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc.aio
import psutil

from bench import setup
from bench.figure import Figure, Ratio, over
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from seqdedupe.v1.admin_pb2_grpc import AdminServiceStub

TOPICS = 10_000
ONE_BY_ONE = 300
AT_ONCE = 64
DESCRIPTORS = 1_024

_MB = 1 << 20


def start(sidecar: Sidecar) -> float:
    """Starts it with few descriptors; the seconds until it serves."""
    began = time.perf_counter()
    process = sidecar.spawn()
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    sidecar.wait_until_serving()
    return time.perf_counter() - began


async def make(address: str, names: list[str], at_once: int) -> float:
    """Makes topics; how many a second."""
    left = iter(names)
    async with grpc.aio.insecure_channel(address) as channel:
        admin = AdminServiceStub(channel)

        async def some() -> None:
            for name in left:
                await admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=name))

        began = time.perf_counter()
        await asyncio.gather(*(some() for _ in range(at_once)))
        return len(names) / (time.perf_counter() - began)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    rounds = itertools.count()
    made: list[Sidecar] = []

    def some_made(at_once: int) -> float:
        with Sidecar(folder / f"some-{next(rounds)}") as sidecar:
            names = [f"topic-{i:05d}" for i in range(ONE_BY_ONE)]
            return setup.run(make(sidecar.address, names, at_once))

    def all_made() -> float:
        sidecar = Sidecar(folder / f"all-{next(rounds)}")
        made.append(sidecar)
        start(sidecar)
        rate = setup.run(make(sidecar.address, [f"topic-{i:05d}" for i in range(TOPICS)], AT_ONCE))
        return TOPICS / rate

    def resident() -> float:
        return float(psutil.Process(made[-1].pid).memory_info().rss)

    def descriptors() -> float:
        return float(psutil.Process(made[-1].pid).num_fds())

    def started_again() -> float:
        made[-1].kill()
        return start(made[-1])

    def stopped() -> float:
        began = time.perf_counter()
        if made[-1].stop():
            raise RuntimeError(f"the sidecar did not end as it should: {made[-1].errors}")
        return time.perf_counter() - began

    yield Figure(
        arms={
            "made one by one": lambda: some_made(1),
            "made 64 at once": lambda: some_made(AT_ONCE),
            "all made": all_made,
            "resident when made": resident,
            "descriptors when made": descriptors,
            "started again": started_again,
            "resident when started": resident,
            "descriptors when started": descriptors,
            "drained": stopped,
        },
        ratios=[
            Ratio("made 64 at once ÷ one by one", over("made 64 at once", "made one by one"), at_least=2),
            Ratio("10,000 topics made", lambda m: m["all made"], unit="s"),
            Ratio("resident then", lambda m: m["resident when made"] / _MB, at_most=1_000, unit="MB"),
            Ratio("start", lambda m: m["started again"], at_most=10, unit="s"),
            Ratio("resident then", lambda m: m["resident when started"] / _MB, at_most=1_000, unit="MB"),
            Ratio("descriptors in use then", lambda m: m["descriptors when started"], at_most=DESCRIPTORS, unit=""),
            Ratio("end", lambda m: m["drained"], at_most=30, unit="s"),
        ],
        rounds=1,
        notes=["arms in topics a second, seconds, bytes resident, and descriptors"],
    )
