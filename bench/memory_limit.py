"""What a sidecar takes where its memory is limited, by a control group: while it compiles, idle, with streams.

Needs root and control groups, version 1 or 2. What the system keeps of files (programs, too) counts only where nobody
has read them before, and can be taken back: look at `peak` for whether there was room, at `resident` for what it has.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc.aio
import psutil

from bench import setup
from bench.figure import Figure, shown
from bench.many_topics import make
from bench.publish import rising
from seqdedupe.testing import Patience, Sidecar

LIMITS_MB = (256, 512)
STREAMS = 100
TOPICS = 500
_MB = 1024 * 1024


class ControlGroup:
    """What is started within a block may take so much memory, and no swap."""

    def __init__(self, limit_mb: int) -> None:
        root = Path("/sys/fs/cgroup")
        self._is_second = (root / "cgroup.controllers").exists()
        self._all = root if self._is_second else root / "memory"
        before = {line.split(":")[1]: line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
        self._before = self._all / before["" if self._is_second else "memory"].lstrip("/")
        self._folder = self._all / f"seqdedupe-bench-{os.getpid()}-{limit_mb}"
        self._folder.mkdir()
        limit = "memory.max" if self._is_second else "memory.limit_in_bytes"
        (self._folder / limit).write_text(str(limit_mb * _MB))
        if self._is_second and (self._folder / "memory.swap.max").exists():
            (self._folder / "memory.swap.max").write_text("0")

    @contextmanager
    def entered(self) -> Iterator[None]:
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            (self._before / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def peak_mb(self) -> float:
        name = "memory.peak" if self._is_second else "memory.max_usage_in_bytes"
        return int((self._folder / name).read_text()) / _MB

    @property
    def kills(self) -> int:
        name = "memory.events" if self._is_second else "memory.oom_control"
        counts = dict(line.split() for line in (self._folder / name).read_text().splitlines())
        return int(counts["oom_kill"])

    def close(self) -> None:
        """To be called when all has ended that was started within it."""
        patience = Patience("the end of a control group")
        while self._folder.exists():
            try:
                self._folder.rmdir()
            except OSError:
                patience.check()
                time.sleep(0.01)


def _resident_mb(sidecar: Sidecar) -> float:
    return psutil.Process(sidecar.pid).memory_info().rss / _MB


def _until_compiled(sidecar: Sidecar) -> bool:
    """Whether it is done; else it has failed."""
    patience = Patience("a first start that compiles")
    while True:
        for line in sidecar.log:
            if (event := str(line["event"])).startswith("compil"):
                return "has failed" not in event
        sidecar.check_running()
        patience.check()
        time.sleep(0.1)


def first_start(limit_mb: int) -> dict[str, float]:
    """Where nothing is compiled yet; and the start after it."""
    group = ControlGroup(limit_mb)
    with TemporaryDirectory(prefix="seqdedupe-") as folder:
        sidecar = Sidecar(Path(folder), environment={"XDG_CACHE_HOME": folder})
        began = time.monotonic()
        with group.entered():
            sidecar.start()
        serving_seconds = time.monotonic() - began
        is_compiled = _until_compiled(sidecar)
        measured = {
            "peak": group.peak_mb,
            "resident": _resident_mb(sidecar),
            "kills": float(group.kills),
            "compiled": float(is_compiled),
            "s until serving": serving_seconds,
            "s until compiled": time.monotonic() - began,
        }
        sidecar.kill()
        group.close()
        # Where compiling has failed, this one compiles before it serves.
        group = ControlGroup(limit_mb)
        began = time.monotonic()
        with group.entered():
            sidecar.start()
        measured |= {
            "next start, peak": group.peak_mb,
            "next start, kills": float(group.kills),
            "next start, s until serving": time.monotonic() - began,
        }
        sidecar.close()
    group.close()
    return measured


def with_kernels(limit_mb: int) -> dict[str, float]:
    """Idle, with topics, and with streams of which each has sent a frame over a connection of its own."""
    group = ControlGroup(limit_mb)
    with TemporaryDirectory(prefix="seqdedupe-") as folder:
        sidecar = Sidecar(Path(folder))
        with group.entered():
            sidecar.start()
        idle = _resident_mb(sidecar)
        of_files = psutil.Process(sidecar.pid).memory_info().shared / _MB
        asyncio.run(make(sidecar.address, [f"t{topic}" for topic in range(TOPICS)], at_once=8))
        topics = _resident_mb(sidecar)
        streams = asyncio.run(_with_streams(sidecar))
        measured = {
            "idle": idle,
            "idle, of files": of_files,
            "KiB a topic": (topics - idle) * 1024 / TOPICS,
            "KiB a connection with a stream": (streams - topics) * 1024 / STREAMS,
            "peak": group.peak_mb,
            "kills": float(group.kills),
        }
        sidecar.close()
    group.close()
    return measured


async def _with_streams(sidecar: Sidecar) -> float:
    """What it takes while they are open."""
    async with AsyncExitStack() as stack:
        for number in range(STREAMS):
            channel = grpc.aio.insecure_channel(sidecar.address, options=setup.APART)
            await stack.enter_async_context(channel)
            name = f"p{number}"
            stream = await setup.opened(channel, [name])
            await stream.publish(rising(name, 1000), 2, in_flight=1)
        return _resident_mb(sidecar)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    yield Figure(
        arms={
            **{f"first start in {mb} MiB": partial(first_start, mb) for mb in LIMITS_MB},
            **{f"{mb} MiB": partial(with_kernels, mb) for mb in LIMITS_MB},
        },
        ratios=[
            shown("first start in 512 MiB, peak", "MiB"),
            shown("first start in 256 MiB, next start, peak", "MiB"),
            shown("256 MiB, idle", "MiB"),
            shown("256 MiB, KiB a topic", "KiB"),
            shown("256 MiB, KiB a connection with a stream", "KiB"),
        ],
        rounds=1,
        notes=["idle, peak and resident in MiB; compiled: 1 if it was, 0 if it was killed"],
    )
