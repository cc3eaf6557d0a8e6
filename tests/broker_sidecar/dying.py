"""A sidecar that ends, as by kill -9, at a step of its disks that a file names; with small segments, and a planted bug.

Its steps, each counted from when the file is there: "store write" and "store sync", before they are made, "log write",
when half of it is on the disk, and "log sync", when all of it is written.
"""

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from broker_sidecar import kernels
from seqdedupe.testing import Sidecar

MODULE = __name__ if __name__ != "__main__" else "tests.broker_sidecar.dying"
FILE, SEVERAL_STEPS = "DIES_AT_FILE", "SEVERAL_STEPS"
"""In the environment: the file, and whether what is one step is several."""

SEGMENT_BYTES = 8192


def environment(folder: Path, *, in_several_steps: bool) -> dict[str, str]:
    """For `Sidecar(module=MODULE, environment=...)`."""
    return {FILE: str(folder / "dies-at"), SEVERAL_STEPS: "yes" if in_several_steps else ""}


def died_in(sidecar: Sidecar, folder: Path, step: str, count: int, call: Callable[[], Any]) -> bool:
    """Makes a call; whether the sidecar died in it, at the step of this count: then it is started again."""
    file = folder / "dies-at"
    file.with_suffix(".new").write_text(json.dumps([step, count]))
    file.with_suffix(".new").rename(file)
    try:
        call()
    except grpc.RpcError:
        file.unlink()
        sidecar.wait()
        sidecar.start()
        return True
    file.unlink()
    return False


_passed: Counter[str] = Counter()


def _is_the_end(step: str) -> bool:
    try:
        wanted, count = json.loads(Path(os.environ[FILE]).read_text())
    except FileNotFoundError:
        _passed.clear()
        return False
    _passed[step] += 1
    return bool((wanted, count) == (step, _passed[step]))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _before(step: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def dies(*arguments: Any) -> Any:
        if _is_the_end(step):
            _die()
        return function(*arguments)

    return dies


def _half_written(write: Callable[..., int]) -> Callable[..., int]:
    def dies(file: int, buffers: list[bytes], offset: int) -> int:
        if _is_the_end("log write"):
            whole = b"".join(buffers)
            write(file, [whole[: len(whole) // 2]], offset)
            _die()
        return write(file, buffers, offset)

    return dies


def _plant_several_steps() -> None:
    """Each part of an import counts by itself, and a snapshot is removed before another one is written."""
    from seqdedupe.core.name_table import Names
    from seqdedupe.store.snapshots import Delta, Snapshots
    from seqdedupe.topic.control import Imported, ImportParts

    write_anew = Snapshots.write_anew

    async def in_two_steps(self: Snapshots, delta: Delta) -> int:
        await self._store.flush(self.remove())
        return await write_anew(self, delta)

    ImportParts.add = lambda self, part: Imported(  # type: ignore[method-assign]
        Names.of(part.names), np.arange(len(part.names)), part.persisted
    )
    Snapshots.write_anew = in_two_steps  # type: ignore[method-assign]


if __name__ == "__main__":
    kernels.prepare()

    from broker_sidecar.__main__ import main
    from seqdedupe.log.embedded.logs import EmbeddedLogs
    from seqdedupe.store import rocksdb

    EmbeddedLogs.__init__ = partialmethod(EmbeddedLogs.__init__, segment_bytes=SEGMENT_BYTES)  # type: ignore[assignment]
    rocksdb.write = _before("store write", rocksdb.write)
    rocksdb.sync = _before("store sync", rocksdb.sync)
    os.pwritev = _half_written(os.pwritev)
    os.fdatasync = _before("log sync", os.fdatasync)
    if os.environ[SEVERAL_STEPS]:
        _plant_several_steps()
    sys.exit(main())
