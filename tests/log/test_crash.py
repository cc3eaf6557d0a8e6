"""Logs whose writer was killed, or whose machine lost its power."""

import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seqdedupe.log.embedded.logs import EmbeddedLogs
from tests.log.batches import SECRET, TOPIC
from tests.log.conformance import Owner, replayed, what

INCARNATION = 1_700_000_000_000_000
ROOT = Path(__file__).parents[2]
KILLS = 25
CONTROL_KILLS = 6
SECTOR_BYTES = 512
Writers = subprocess.Popen[str]


def fatal(reason: str) -> None:
    raise AssertionError(reason)


@pytest.fixture
async def make_logs() -> AsyncIterator[Callable[[Path], EmbeddedLogs]]:
    made: list[EmbeddedLogs] = []

    def make(folder: Path) -> EmbeddedLogs:
        made.append(EmbeddedLogs(folder, clock_ms=lambda: 1_000, fatal=fatal, segment_bytes=200_000))
        return made[-1]

    yield make
    for logs in made:
        await logs.close()


@pytest.fixture
def start_writers() -> Iterator[Callable[[Path, bool], Writers]]:
    """Starts the program that has its children write; it is gone when the test ends."""
    started: list[Writers] = []

    def start(folder: Path, lie: bool) -> Writers:
        program = ["tests.kernels", "tests.log.crash_writer", str(folder), str(INCARNATION), str(int(lie))]
        command = [sys.executable, "-m", *program]
        started.append(
            subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        )
        return started[-1]

    yield start
    for writers in started:
        writers.communicate()


async def kills(logs: EmbeddedLogs, writers: Writers, times: int) -> list[int]:
    """Kills writers of one log, and compares it each time: how many messages reported as stored were not there."""
    seed = random.randrange(1, 2**31)
    print(f"seed {seed}")
    randomly = random.Random(seed)
    assert writers.stdin
    assert writers.stdout
    missing, end = [], 0
    for _ in range(times):
        writers.stdin.write(f"{randomly.randrange(1, 2**31)} {randomly.randrange(1, 20_000)}\n")
        reported = int(writers.stdout.readline())
        log = await logs.open(INCARNATION, 0)
        ids = [i for r in await replayed(log) if r.rows for i in r.batch.sequence_ids]
        assert ids == list(range(len(ids)))
        assert len(ids) >= end, "what an earlier run had is gone"
        end = len(ids)
        missing.append(max(0, reported - end))
        await log.close()
    assert end > 0
    return missing


async def test_a_killed_writer_loses_nothing_that_it_reported(
    make_logs: Callable[[Path], EmbeddedLogs],
    start_writers: Callable[[Path, bool], Writers],
    tmp_path: Path,
) -> None:
    logs = make_logs(tmp_path)
    await logs.create(INCARNATION, TOPIC, SECRET)
    assert await kills(logs, start_writers(tmp_path, False), KILLS) == [0] * KILLS


async def test_control_a_writer_that_reports_too_early_is_caught(
    make_logs: Callable[[Path], EmbeddedLogs],
    start_writers: Callable[[Path, bool], Writers],
    tmp_path: Path,
) -> None:
    logs = make_logs(tmp_path)
    await logs.create(INCARNATION, TOPIC, SECRET)
    assert any(await kills(logs, start_writers(tmp_path, True), CONTROL_KILLS))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    groups=st.lists(st.lists(st.sampled_from([1, 3, 40]), min_size=1, max_size=4), min_size=1, max_size=4),
    survives=st.data(),
)
async def test_a_power_cut_leaves_a_prefix(
    make_logs: Callable[[Path], EmbeddedLogs],
    tmp_path_factory: pytest.TempPathFactory,
    groups: list[list[int]],
    survives: st.DataObject,
) -> None:
    """Of the last group, which was not synced, any sectors are on the disk, at any length of the file."""
    folder = tmp_path_factory.mktemp("power")
    logs = make_logs(folder)
    await logs.create(INCARNATION, TOPIC, SECRET)
    log = await logs.open(INCARNATION, 0)
    owner = await Owner(log, 1).open()
    path = folder / str(INCARNATION) / f"{0:020d}.log"
    everything: list[int] = []
    synced_size, synced_index = 0, 0
    for group in groups:
        synced_size, synced_index = path.stat().st_size, sum(everything)
        for rows in group:
            owner.append(sum(everything), rows, 100)
            everything.append(rows)
        await owner.until_stored(len(everything))
    await log.close()
    raw = bytearray(path.read_bytes())
    del raw[survives.draw(st.integers(synced_size, len(raw)), "size") :]
    sectors = range(synced_size // SECTOR_BYTES, len(raw) // SECTOR_BYTES + 1)
    for sector in survives.draw(st.lists(st.sampled_from(sectors), unique=True), "lost sectors"):
        start = max(synced_size, sector * SECTOR_BYTES)
        end = min(len(raw), (sector + 1) * SECTOR_BYTES)
        raw[start:end] = bytes(max(0, end - start))
    path.write_bytes(raw)
    log = await logs.open(INCARNATION, synced_index)
    left = [r.rows for r in await replayed(log) if r.rows]
    assert left == everything[: len(left)]
    assert sum(left) >= synced_index
    assert log.size_bytes + log.cut_bytes == len(raw)
    # What is left can be written on to, and opens again.
    owner = await Owner(log, 2).open()
    owner.append(5, 2)
    await owner.until_stored(1)
    await log.close()
    log = await logs.open(INCARNATION, sum(left) + 2)
    assert [what(r)[2] for r in await replayed(log) if r.rows] == [*left, 2]
    assert log.cut_bytes == 0
    await log.close()
