"""How long nobody has a topic that goes from one sidecar to another, by how much its snapshot holds.

From the last message that the old one takes to the first that the new one does, of one client that publishes one
message after the other; there, and back again. SEQDEDUPE_BENCH_MOVE_BESIDE is the folder of another checkout, which is
measured beside this one.
"""

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
import numpy as np

from bench import setup, start
from bench.figure import Arm, Figure, Ratio, over, shown
from bench.window import ids_from
from broker_sidecar.config import Config
from broker_sidecar.data import Data
from seqdedupe import wire
from seqdedupe.batch import Batch, Binary, single_producer, without_producers
from seqdedupe.client.blocking import Client
from seqdedupe.testing import Sidecar
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.policy import Policy
from seqdedupe.v1 import publish_pb2

IDS_A_FRAME = 10_000
ID_BYTES = 16
WINDOW = 10_000_000
ON_DISK_MEMORY_MB = 32
PAUSE_SECONDS = 0.001
AROUND_SECONDS = 0.5
"""So long is published before the topic is moved."""
LIMIT_SECONDS = 300

# What begins so is a key of the configuration to a sidecar.
BESIDE = os.environ.pop("SEQDEDUPE_BENCH_MOVE_BESIDE", "")


class Case(NamedTuple):
    """What a topic has."""

    name: str
    producers: int = 0
    ids: int = 0
    memory_mb: int = 1024


CASES = (
    Case("1,000 producers", producers=1_000),
    Case("1M producers", producers=1_000_000),
    Case("1M IDs", ids=1_000_000),
    Case("5M IDs", ids=5_000_000),
    Case("5M IDs, most on disk", ids=5_000_000, memory_mb=ON_DISK_MEMORY_MB),
)


async def _fill_with_ids(data: Path, case: Case) -> None:
    """A data directory with a topic of so many deduplication IDs, and a snapshot of them."""
    config = Config(
        data_directory=str(data),
        deduplication_entries_interval=2**62,
        deduplication_window_memory_in_mb=case.memory_mb,
    )
    opened = Data(config, lambda name, state: None)
    topic = await opened.all_topics.create(
        setup.TOPIC, policy=Policy(deduplication_window_max_messages=WINDOW, by_deduplication_id=True)
    )
    offsets = np.arange(0, ID_BYTES * IDS_A_FRAME + 1, ID_BYTES, dtype=np.int32)
    nothing = Binary.of_all([b""] * IDS_A_FRAME)
    cache = NumbersCache()

    def reply(answer: FrameReceipt | Refusal) -> None:
        if isinstance(answer, Refusal):
            raise answer.error

    for first in range(0, case.ids, IDS_A_FRAME):
        encoded = without_producers(Binary(offsets, ids_from(first, IDS_A_FRAME)), nothing).encode()
        looked_up = await topic.ids.look_up(encoded)
        topic.admit(encoded, first, reply, cache, looked_up=looked_up)
        await topic.flight.all_of_now()
    await topic.keeper.snapshotter.take()
    await topic.close("done")
    await opened.close()


async def _fill(data: Path, case: Case) -> None:
    if case.ids:
        await _fill_with_ids(data, case)
    else:
        await start.fill(data, 1, producers=case.producers, tail=1)


class _Publishing:
    """One who publishes one message after the other, at whichever sidecar takes it."""

    def __init__(self, case: Case, addresses: list[str]) -> None:
        self._case = case
        self._addresses = addresses
        self._epoch = 0
        self._sent = 0
        self._stopping = False
        self.taken: list[tuple[str, float]] = []
        """Where each message was, and when."""

    def _batch(self) -> Batch:
        self._sent += 1
        payload = Binary.of_all([b"x" * 100])
        if self._case.ids:
            return without_producers(Binary.of_all([b"%016d" % self._sent]), payload)
        ids = np.array([self._sent], np.int64)
        return single_producer(b"beside", self._epoch, self._sent - 1 if self._sent > 1 else -1, ids, payload)

    async def run(self) -> None:
        channels = {address: grpc.aio.insecure_channel(address) for address in self._addresses}
        try:
            if not self._case.ids:
                opened = await setup.open_names(channels[self._addresses[0]], setup.TOPIC, ["beside"])
                self._epoch = opened.epochs[0]
            at = self._addresses[0]
            while not self._stopping:
                at = await self._publish(channels, at, self._batch().encode())
        finally:
            for channel in channels.values():
                await channel.close()

    async def _publish(self, channels: dict[str, grpc.aio.Channel], at: str, encoded: bytes) -> str:
        head = publish_pb2.PublishRequest(topic=setup.TOPIC).SerializeToString()
        data = b"".join([head, *wire.length_delimited(15, encoded)])
        while True:
            call: Any = channels[at].unary_unary("/seqdedupe.v1.PublishService/Publish")
            try:
                await call(data)
            except grpc.aio.AioRpcError:
                at = next(other for other in channels if other != at)
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                self.taken.append((at, time.perf_counter()))
                return at

    def stop(self) -> None:
        self._stopping = True

    def held_ms(self, old: str, new: str) -> float:
        """From the last at the old one to the first at the new one after it."""
        changes = [
            (after - before) * 1000
            for (here, before), (there, after) in zip(self.taken, self.taken[1:], strict=False)
            if (here, there) == (old, new)
        ]
        if len(changes) != 1:
            raise ValueError(f"it went {len(changes)} times from {old} to {new}")
        return changes[0]


async def _moved(case: Case, old: Sidecar, new: Sidecar) -> dict[str, float]:
    publishing = _Publishing(case, [old.address, new.address])
    running = asyncio.ensure_future(publishing.run())
    took: dict[str, float] = {}
    for what, here, there in (("there", old, new), ("back", new, old)):
        await asyncio.sleep(AROUND_SECONDS)
        began = time.perf_counter()
        await asyncio.to_thread(_move, here, there)
        took[f"{what}, all"] = (time.perf_counter() - began) * 1000
        await _until(lambda there=there: publishing.taken[-1][0] == there.address)  # type: ignore[misc]
        took[what] = publishing.held_ms(here.address, there.address)
    publishing.stop()
    await running
    return took


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while not condition():  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(PAUSE_SECONDS)


def _move(here: Sidecar, there: Sidecar) -> None:
    with Client(here.address) as client:
        client.admin.move_topic(setup.TOPIC, there.address)


def _measured(folder: Path, case: Case, checkout: str) -> dict[str, float]:
    """In a pair of sidecars of their own."""
    environment = {"PYTHONPATH": checkout, "PYTHONSAFEPATH": "1"} if checkout else {}
    keys: dict[str, Any] = {
        "environment": environment,
        "allow_auto_topic_creation": False,
        "deduplication_window_memory_in_mb": case.memory_mb,
    }
    old, new = Sidecar(folder / "old", **keys), Sidecar(folder / "new", **keys)
    old.keys["peers"], new.keys["peers"] = new.address, old.address
    shutil.copytree(folder / case.name / "data", old.data)
    try:
        with old, new:
            return setup.run(_moved(case, old, new))
    finally:
        for one in (old, new):
            shutil.rmtree(one.folder, ignore_errors=True)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    for case in CASES:
        asyncio.run(_fill(folder / case.name / "data", case))
    arms: dict[str, Arm] = {case.name: partial(_measured, folder, case, "") for case in CASES}
    if BESIDE:
        arms |= {f"{case.name}, beside": partial(_measured, folder, case, BESIDE) for case in CASES}
    yield Figure(
        arms=arms,
        ratios=[
            Ratio("1M producers ÷ 1,000", over("1M producers, there", "1,000 producers, there"), at_most=3),
            *(shown(f"{arm}, {way}") for arm in arms for way in ("there", "back")),
        ],
        rounds=3,
        notes=["all: of the whole move"],
    )
