"""A broker's topic with 1M producers: resident memory per producer, and process start → checks are answered.

All names are registered, and 1M entries replayed, after a snapshot of all of them.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import psutil

from bench import setup
from bench.decisions import answer
from bench.figure import Figure, Ratio
from bench.start import PRODUCERS, TAIL
from broker_sidecar.config import Config
from broker_sidecar.data import Data
from seqdedupe.batch import Binary
from seqdedupe.client.broker import ATTACH, AttachRequest, AttachResponse, Begin, EndReplay, Register, ReplayStep
from seqdedupe.limits import MAX_NAMES_AT_ONCE
from seqdedupe.testing import Sidecar
from seqdedupe.topic.attached import Columns
from seqdedupe.topic.policy import LARGEST

REPLAY_ROWS = 10_000
SNAPSHOT = b"snapshot"
"""The position up to which the snapshot goes. All are of this length."""


def _names(producers: int) -> list[tuple[int, list[bytes]]]:
    """As they are registered: the first handle, and names."""
    return [
        (first, [b"producer-%07d" % i for i in range(first, min(first + MAX_NAMES_AT_ONCE, producers))])
        for first in range(0, producers, MAX_NAMES_AT_ONCE)
    ]


async def _fill(data: Path, producers: int) -> None:
    """A data directory with a snapshot of so many producers, each of which has an entry in the broker's log."""
    opened = Data(Config(data_directory=str(data), log="broker"), lambda name, state: None)
    topic: Any = await opened.all_topics.create(setup.TOPIC)
    attachment = topic.attach(lambda why: None, lambda: None)
    attachment.end_replay(b"")
    topic.ready()
    for first, names in _names(producers):
        attachment.register(first, names)
        handles = np.arange(first, first + len(names), dtype=np.int32)
        ids = np.zeros(len(names), np.int64)
        topic.check(attachment, Columns(handles, ids, ids))
        topic.report(attachment, first, len(names), SNAPSHOT, 0)
    await topic.keeper.snapshot()
    await opened.all_topics.drain()
    await opened.close()


def _tail() -> list[bytes]:
    """An entry of each producer after the snapshot, as messages without a token."""
    offsets = np.arange(0, len(SNAPSHOT) * (REPLAY_ROWS + 1), len(SNAPSHOT), dtype="<i4").tobytes()
    made = []
    before = SNAPSHOT
    for first in range(0, TAIL, REPLAY_ROWS):
        numbers = np.arange(first, first + REPLAY_ROWS)
        positions = numbers.astype(">u8").tobytes()
        replay = ReplayStep(
            handles=(numbers % PRODUCERS).astype("<i4").tobytes(),
            sequence_ids=numbers.astype("<i8").tobytes(),
            position_offsets=offsets,
            positions=positions,
            previous_position_offsets=offsets,
            previous_positions=before + positions[: -len(SNAPSHOT)],
        )
        made.append(AttachRequest(replay=replay).SerializeToString())
        before = positions[-len(SNAPSHOT) :]
    return made


def _registers() -> list[bytes]:
    """All names, as messages without a token."""
    made = []
    for first, names in _names(PRODUCERS):
        column = Binary.of_all(names)
        register = Register(
            first_handle=first, producer_name_offsets=column.offsets.tobytes(), producer_names=column.data
        )
        made.append(AttachRequest(register=register).SerializeToString())
    return made


async def _attach(address: str, messages: list[bytes]) -> None:
    """Attaches, registers and replays; returns when checks are answered."""
    async with grpc.aio.insecure_channel(address, options=setup.LARGE) as channel:
        method: Any = channel.stream_stream(ATTACH)
        call = method()
        await call.write(AttachRequest(begin=Begin(topic=setup.TOPIC)).SerializeToString())
        attached = AttachResponse.FromString(await call.read()).attached
        if attached.replay_after != (SNAPSHOT if messages else b""):
            raise RuntimeError(f"the snapshot is not there: {attached}")
        token = AttachRequest(token=attached.token).SerializeToString()
        for message in messages:
            await call.write(token + message)
        end = EndReplay(last_position=(TAIL - 1).to_bytes(len(SNAPSHOT), "big") if messages else b"")
        await call.write(AttachRequest(token=attached.token, end_replay=end).SerializeToString())
        await answer(call)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    async def make() -> None:
        await _fill(folder / "many" / "data", PRODUCERS)
        await _fill(folder / "none" / "data", 0)

    asyncio.run(make())
    messages = _registers() + _tail()

    def attached(name: str, messages: list[bytes]) -> tuple[float, float]:
        """Seconds from the start of the process until checks are answered, and bytes resident then."""
        # Without a snapshot on the way: every round finds what `_fill` has left.
        sidecar = Sidecar(folder / name, log="broker", deduplication_entries_interval=LARGEST)
        began = time.perf_counter()
        sidecar.start()
        setup.run(_attach(sidecar.address, messages))
        seconds = time.perf_counter() - began
        size = psutil.Process(sidecar.pid).memory_info().rss
        sidecar.kill()
        return seconds, float(size)

    yield Figure(
        arms={
            "bytes with 1M producers": lambda: attached("many", messages)[1],
            "bytes with none": lambda: attached("none", [])[1],
            "seconds with 1M producers": lambda: attached("many", messages)[0],
        },
        ratios=[
            Ratio(
                "bytes per producer",
                lambda m: (m["bytes with 1M producers"] - m["bytes with none"]) / PRODUCERS,
                at_most=200,
                unit="B",
            ),
            Ratio("start, with a replay of 1M entries", lambda m: m["seconds with 1M producers"], at_most=3, unit="s"),
        ],
        rounds=2,
    )
