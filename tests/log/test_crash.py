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
StartWriters = Callable[[Path, list[int], bool], Writers]


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
def start_writers() -> Iterator[StartWriters]:
    """Starts the program that has its children write; it is gone when the test ends."""
    started: list[Writers] = []

    def start(folder: Path, incarnations: list[int], lie: bool) -> Writers:
        which = ",".join(map(str, incarnations))
        program = ["tests.kernels", "tests.log.crash_writer", str(folder), which, str(int(lie))]
        command = [sys.executable, "-m", *program]
        started.append(
            subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        )
        return started[-1]

    yield start
    for writers in started:
        writers.communicate()


async def kills(
    make_logs: Callable[[Path], EmbeddedLogs], folder: Path, incarnations: list[int], writers: Writers, times: int
) -> list[int]:
    """Kills writers of the logs, and compares each time: how many messages reported as stored were not there."""
    seed = random.randrange(1, 2**31)
    print(f"seed {seed}")
    randomly = random.Random(seed)
    assert writers.stdin
    assert writers.stdout
    missing, ends = [], dict.fromkeys(incarnations, 0)
    for _ in range(times):
        writers.stdin.write(f"{randomly.randrange(1, 2**31)} {randomly.randrange(1, 20_000)}\n")
        reported = [int(end) for end in writers.stdout.readline().split()]
        missing.append(0)
        # What each of them leaves in the journal is read again.
        logs = make_logs(folder)
        for incarnation, stored in zip(incarnations, reported, strict=True):
            log = await logs.open(incarnation, 0)
            ids = [i for r in await replayed(log) if r.rows for i in r.batch.sequence_ids]
            assert ids == list(range(len(ids)))
            assert len(ids) >= ends[incarnation], "what an earlier run had is gone"
            ends[incarnation] = len(ids)
            missing[-1] += max(0, stored - len(ids))
            await log.close()
    assert min(ends.values()) > 0
    return missing


LOGS = [[INCARNATION], [INCARNATION + k for k in range(5)]]
"""One, whose own sync confirms; and several, which the journal confirms."""


@pytest.mark.parametrize("incarnations", LOGS, ids=["one", "several"])
async def test_a_killed_writer_loses_nothing_that_it_reported(
    make_logs: Callable[[Path], EmbeddedLogs], start_writers: StartWriters, tmp_path: Path, incarnations: list[int]
) -> None:
    logs = make_logs(tmp_path)
    for incarnation in incarnations:
        await logs.create(incarnation, TOPIC, SECRET)
    assert (
        await kills(make_logs, tmp_path, incarnations, start_writers(tmp_path, incarnations, False), KILLS)
        == [0] * KILLS
    )
    assert (tmp_path / "journal").exists() == (len(incarnations) > 1)


@pytest.mark.parametrize("incarnations", LOGS, ids=["one", "several"])
async def test_control_a_writer_that_reports_too_early_is_caught(
    make_logs: Callable[[Path], EmbeddedLogs], start_writers: StartWriters, tmp_path: Path, incarnations: list[int]
) -> None:
    logs = make_logs(tmp_path)
    for incarnation in incarnations:
        await logs.create(incarnation, TOPIC, SECRET)
    assert any(
        await kills(make_logs, tmp_path, incarnations, start_writers(tmp_path, incarnations, True), CONTROL_KILLS)
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    """For the last group, which was not synced, any sectors are on the disk, at any length of the file."""
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
