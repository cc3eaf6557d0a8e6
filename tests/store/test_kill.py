"""kill -9 of a process that writes snapshots: what it said was durable is there."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import running
from tests.store.model import load

# Numbers rise by one a delta, so the state tells which delta was the last.
WRITER = """# may start warm
import asyncio, sys
from pathlib import Path
from broker_sidecar import kernels
kernels.prepare()
from seqdedupe.store import snapshots as module
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from tests.store.model import INCARNATION, delta

module.MAX_DELTAS = 20

async def compact(snapshots):
    while True:
        await snapshots.compact_if_due()
        await asyncio.sleep(0)

async def main():
    store = Store.open(Path(sys.argv[1]))
    snapshots = Snapshots(store, INCARNATION)
    loaded = snapshots.load()
    step = loaded.next_index if loaded else 0
    compacting = asyncio.create_task(compact(snapshots))
    while True:
        change = delta(
            step + 1,
            {slot: (step, 1) for slot in {step, step // 2}},
            first_name=step,
            names=[b"name-%d" % step],
        )
        await store.flush(snapshots.write_delta(change))
        step += 1
        print(step, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("durable_deltas", [1, 60, 150])
def test_what_was_durable_is_there_after_kill_9(folder: Path, durable_deltas: int) -> None:
    reached = 0
    for _ in range(3):
        command = [sys.executable, "-c", WRITER, str(folder)]
        with running(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for line in writer.stdout:
                durable = int(line)
                if durable >= reached + durable_deltas:
                    break
            writer.kill()
            said = [int(line) for line in writer.stdout if line.endswith("\n")]
        reached = max([durable, *said])
        state = load(folder)
        assert reached <= state.next_index <= reached + 1
        expected = {b"name-%d" % step: step for step in range(state.next_index)}
        for step in range(state.next_index):
            expected[b"name-%d" % (step // 2)] = max(step, expected[b"name-%d" % (step // 2)])
        assert state.persisted == expected
        reached = state.next_index
