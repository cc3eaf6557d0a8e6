"""A broker's checks and replay over `Attach`, against an echo of the same bytes.

A frame is checked, answered and reported, several of them in flight; the replay waits at its end only. Its client has
encoded all messages beforehand, as that of the echo has.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from bench import setup
from bench.echo import ECHO
from bench.figure import Figure, Ratio, over
from seqdedupe.batch import Binary
from seqdedupe.client.broker import (
    ATTACH,
    AttachRequest,
    AttachResponse,
    Begin,
    Check,
    EndReplay,
    Register,
    ReplayStep,
    Report,
)
from seqdedupe.testing import Sidecar

NAMES = 100
IN_FLIGHT = 8
LARGE_ROWS, SMALL_ROWS = 10_000, 1_000
ROWS = 4_000_000
POSITION_BYTES = 8

_topics = itertools.count()


def _register() -> Any:
    names = Binary.of_all([b"producer-%d" % i for i in range(NAMES)])
    return Register(producer_name_offsets=names.offsets.tobytes(), producer_names=names.data)


def _columns(frame: int, rows: int) -> dict[str, bytes]:
    first = frame * rows
    return {
        "handles": np.tile(np.arange(NAMES, dtype="<i4"), rows // NAMES).tobytes(),
        "sequence_ids": np.arange(first, first + rows, dtype="<i8").tobytes(),
    }


def _checks(token: int, rows: int) -> list[bytes]:
    """Each also reports what was checked `IN_FLIGHT` messages before, which is answered when this one may be sent."""
    made = []
    for frame in range(ROWS // rows):
        request = AttachRequest(token=token, checks=[Check(frame=frame, **_columns(frame, rows))])
        if frame >= IN_FLIGHT:
            oldest = (frame - IN_FLIGHT) * rows
            request.report.MergeFrom(Report(first_admission=oldest, persisted=rows, position=b"%d" % frame))
        made.append(request.SerializeToString())
    return made


def _replays(token: int, rows: int) -> list[bytes]:
    offsets = np.arange(0, POSITION_BYTES * (rows + 1), POSITION_BYTES, dtype="<i4")
    made = []
    for frame in range(ROWS // rows):
        ids = np.arange(frame * rows, (frame + 1) * rows, dtype=">u8")
        previous_offsets, previous = offsets, (ids - 1).astype(">u8").tobytes()
        if frame == 0:
            previous_offsets, previous = np.maximum(offsets - POSITION_BYTES, 0), previous[POSITION_BYTES:]
        replay = ReplayStep(
            **_columns(frame, rows),
            position_offsets=offsets.tobytes(),
            positions=ids.tobytes(),
            previous_position_offsets=previous_offsets.tobytes(),
            previous_positions=previous,
        )
        made.append(AttachRequest(token=token, replay=replay).SerializeToString())
    return made


async def _begun(call: Any) -> int:
    """The token of a topic that is attached, its names registered."""
    await call.write(AttachRequest(begin=Begin(topic=f"t{next(_topics)}")).SerializeToString())
    token: int = AttachResponse.FromString(await call.read()).attached.token
    await call.write(AttachRequest(token=token, register=_register()).SerializeToString())
    return token


async def answer(call: Any) -> Any:
    """The next answer that is one; news of the trim position come whenever they come."""
    while True:
        data = await call.read()
        if data is grpc.aio.EOF:
            raise RuntimeError(f"the stream has ended: {await call.code()} {await call.details()}")
        answer = AttachResponse.FromString(data)
        if answer.checked or answer.HasField("ready"):
            return answer


async def _decisions(address: str, rows: int) -> float:
    async with grpc.aio.insecure_channel(address, options=setup.LARGE) as channel:
        method: Any = channel.stream_stream(ATTACH)
        call = method()
        token = await _begun(call)
        await call.write(AttachRequest(token=token, end_replay=EndReplay()).SerializeToString())
        await answer(call)
        checks = _checks(token, rows)
        room = asyncio.Semaphore(IN_FLIGHT)
        answered = 0

        async def read() -> None:
            nonlocal answered
            while answered < len(checks):
                for checked in (await answer(call)).checked:
                    if checked.first_admission != answered * rows:
                        raise RuntimeError("not all was new")
                    answered += 1
                    room.release()

        began = time.perf_counter()
        reader = asyncio.ensure_future(read())
        for check in checks:
            await room.acquire()
            await call.write(check)
        await reader
        return ROWS / (time.perf_counter() - began)


async def _replay(address: str, rows: int) -> float:
    async with grpc.aio.insecure_channel(address, options=setup.LARGE) as channel:
        method: Any = channel.stream_stream(ATTACH)
        call = method()
        token = await _begun(call)
        replays = _replays(token, rows)
        last = np.array([ROWS // rows * rows - 1], dtype=">u8").tobytes()
        began = time.perf_counter()
        for replay in replays:
            await call.write(replay)
        end = EndReplay(last_position=last)
        await call.write(AttachRequest(token=token, end_replay=end).SerializeToString())
        await answer(call)
        return ROWS / (time.perf_counter() - began)


async def _echoed(address: str, messages: list[bytes]) -> float:
    """The same bytes, echoed, as many in flight."""
    async with grpc.aio.insecure_channel(address, options=setup.LARGE) as channel:
        method: Any = channel.stream_stream(ECHO)
        call = method()
        room = asyncio.Semaphore(IN_FLIGHT)

        async def read() -> None:
            for _ in messages:
                await call.read()
                room.release()

        began = time.perf_counter()
        reader = asyncio.ensure_future(read())
        for message in messages:
            await room.acquire()
            await call.write(message)
        await reader
        return ROWS / (time.perf_counter() - began)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    large, small, replays = _checks(1, LARGE_ROWS), _checks(1, SMALL_ROWS), _replays(1, LARGE_ROWS)
    with Sidecar(folder / "sidecar", log="broker") as sidecar, setup.echo_server(folder) as echo:
        yield Figure(
            arms={
                "decisions, 10,000 rows": lambda: setup.run(_decisions(sidecar.address, LARGE_ROWS)),
                "echo of 10,000 rows": lambda: setup.run(_echoed(echo, large)),
                "decisions, 1,000 rows": lambda: setup.run(_decisions(sidecar.address, SMALL_ROWS)),
                "echo of 1,000 rows": lambda: setup.run(_echoed(echo, small)),
                "replay": lambda: setup.run(_replay(sidecar.address, LARGE_ROWS)),
                "echo of the replay": lambda: setup.run(_echoed(echo, replays)),
            },
            ratios=[
                Ratio("10,000 rows ÷ echo", over("decisions, 10,000 rows", "echo of 10,000 rows"), at_least=0.7),
                Ratio("1,000 rows ÷ echo", over("decisions, 1,000 rows", "echo of 1,000 rows"), at_least=0.75),
                Ratio("replay ÷ echo", over("replay", "echo of the replay"), at_least=0.5),
            ],
            notes=["arms in rows a second"],
        )
