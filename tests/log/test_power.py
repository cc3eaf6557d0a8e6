"""Power cuts at every acknowledgement and every call of the system: what was acknowledged is found again."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.limits import Retention
from seqdedupe.log.embedded import writer
from seqdedupe.log.embedded.log import EmbeddedLog
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.log.embedded.writer import Writer
from tests.log.batches import SECRET, TOPIC
from tests.log.conformance import Owner
from tests.log.power import Disk
from tests.log.rounds import ids_in

INCARNATION = 77
MakeLogs = Callable[[Path], EmbeddedLogs]


@pytest.fixture
async def make_logs() -> AsyncIterator[MakeLogs]:
    made: list[EmbeddedLogs] = []

    def fatal(reason: str) -> None:
        raise AssertionError(reason)

    def make(folder: Path) -> EmbeddedLogs:
        made.append(EmbeddedLogs(folder, clock_ms=lambda: 1_000, fatal=fatal, segment_bytes=2_000))
        return made[-1]

    yield make
    for logs in made:
        await logs.close()


async def what_survives(make_logs: MakeLogs, disk: Disk, to: Path, covered_index: int) -> list[int]:
    found = make_logs(disk.after_a_power_cut(to) / "logs")
    log = await found.open(INCARNATION, covered_index)
    ids = await ids_in(log)
    await log.close()
    return ids


async def cut_at_every_acknowledgement(make_logs: MakeLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path / "data", monkeypatch)
    logs = make_logs(tmp_path / "data" / "logs")
    await logs.create(INCARNATION, TOPIC, SECRET)
    log = await logs.open(INCARNATION, 0)
    owner = await Owner(log, 1).open()
    for i in range(12):
        owner.append(i, 1, 700)
        await owner.until_stored(i + 1)
        assert await what_survives(make_logs, disk, tmp_path / f"cut-{i}", i + 1) == list(range(i + 1))
    await log.close()


async def test_what_was_acknowledged_survives(
    make_logs: MakeLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cut_at_every_acknowledgement(make_logs, tmp_path, monkeypatch)


def forget_to_sync_the_rolled_segment(patch: pytest.MonkeyPatch) -> None:
    really = Writer._roll

    def roll(self: Writer, file: int) -> int:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Writer, "sync_file", lambda self: None)
            return really(self, file)

    patch.setattr(Writer, "_roll", roll)


def forget_to_sync_the_folder(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(writer, "sync_folder", lambda folder: None)


async def test_control_a_folder_that_is_not_synced(
    make_logs: MakeLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_to_sync_the_folder(monkeypatch)
    with pytest.raises(Exception, match="LOG_DAMAGED"):
        await cut_at_every_acknowledgement(make_logs, tmp_path, monkeypatch)


async def a_roll_with_something_unsynced(make_logs: MakeLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer goes on in a new segment while the last group of the one before is written and not synced."""
    disk = Disk(tmp_path / "data", monkeypatch)
    logs = make_logs(tmp_path / "data" / "logs")
    await logs.create(INCARNATION, TOPIC, SECRET)
    log = await logs.open(INCARNATION, 0)
    owner = await Owner(log, 1).open()
    # The thread's own parts, called in its stead: two groups of one topic, and one sync after both.
    end, opening = log._writer, log._opening
    assert opening is not None
    for i in range(3):
        opening._queued = True
        owner.append(i, 1, 2_500)
        assert end.write(opening, 1_000) is not None
    end.sync()
    assert await what_survives(make_logs, disk, tmp_path / "cut", 3) == [0, 1, 2]
    await log.close()


async def test_a_segment_is_synced_before_the_next_one_is_begun(
    make_logs: MakeLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await a_roll_with_something_unsynced(make_logs, tmp_path, monkeypatch)


async def test_control_a_rolled_segment_that_is_not_synced(
    make_logs: MakeLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_to_sync_the_rolled_segment(monkeypatch)
    with pytest.raises(Exception, match="LOG_DAMAGED"):
        await a_roll_with_something_unsynced(make_logs, tmp_path, monkeypatch)


async def test_what_opening_for_writing_syncs(
    make_logs: MakeLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that was copied there, and never synced by anyone who did it, survives once it has been opened for
    writing."""
    logs = make_logs(tmp_path / "data" / "logs")
    await logs.create(INCARNATION, TOPIC, SECRET)
    log = await logs.open(INCARNATION, 0)
    owner = await Owner(log, 1).open()
    owner.append(0, 1, 100)
    await owner.until_stored(1)
    await log.close()
    disk = Disk(tmp_path / "data", monkeypatch)
    log = await logs.open(INCARNATION, 0)
    await Owner(log, 2).open()
    found = disk.after_a_power_cut(tmp_path / "cut")
    assert (found / "logs" / str(INCARNATION) / f"{0:020d}.log").read_bytes() == (
        tmp_path / "data" / "logs" / str(INCARNATION) / f"{0:020d}.log"
    ).read_bytes()
    await log.close()


async def grown(logs: EmbeddedLogs) -> EmbeddedLog:
    await logs.create(INCARNATION, TOPIC, SECRET)
    log = await logs.open(INCARNATION, 0)
    owner = await Owner(log, 1).open()
    for i in range(12):
        owner.append(i, 1, 1_000)
        await owner.until_stored(i + 1)
    return log


class Failing:
    """A system call that fails from one call on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, good: int, *, after: bool = False) -> None:
        self._really: Any = getattr(os, name)
        self.good = good
        self._after = after
        monkeypatch.setattr(os, name, self)

    def __call__(self, *arguments: Any, **keys: Any) -> Any:
        self.good -= 1
        if self.good < 0:
            if self._after:
                self._really(*arguments, **keys)
            raise OSError(errno.EIO, "the disk failed")
        return self._really(*arguments, **keys)


@pytest.mark.parametrize("call", ["unlink", "fsync"])
@pytest.mark.parametrize("good", range(5))
async def test_retention_that_fails_leaves_no_hole(
    make_logs: MakeLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, good: int
) -> None:
    logs = make_logs(tmp_path / "data" / "logs")
    log = await grown(logs)
    to = await log.may_trim_to(12, Retention(0))
    assert to > 8
    with monkeypatch.context() as failing:
        disk = Disk(tmp_path / "data", failing)
        # All that is there was synced before.
        for path in [*sorted((tmp_path / "data").rglob("*")), tmp_path / "data"]:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        Failing(failing, call, good)
        await log.trim(to)
        assert log.first_index < to
        # Anyone who reads now, and anyone who reads after a power cut, finds no hole.
        assert await ids_in(log) == list(range(log.first_index, 12))
    survived = await what_survives(make_logs, disk, tmp_path / "cut", 12)
    assert survived == list(range(12 - len(survived), 12))
    assert len(survived) >= 12 - log.first_index
    # It goes on when it is asked again.
    await log.trim(to)
    assert (log.first_index, await ids_in(log)) == (to, list(range(to, 12)))
    await log.close()


async def test_a_trim_that_is_cancelled_goes_on(make_logs: MakeLogs, tmp_path: Path) -> None:
    for turns in range(8):
        logs = make_logs(tmp_path / str(turns) / "logs")
        log = await grown(logs)
        to = await log.may_trim_to(12, Retention(0))
        trimming = asyncio.ensure_future(log.trim(to))
        for _ in range(turns):
            await asyncio.sleep(0)
        trimming.cancel()
        await asyncio.gather(trimming, return_exceptions=True)
        await log.trim(to)
        assert await ids_in(log) == list(range(to, 12))
        await log.close()
