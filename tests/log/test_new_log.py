"""A log that this process has made is not synced once more before it is written to; any other one is."""

import os
import threading
from pathlib import Path

import pytest

from seqdedupe.format.headers import TOKEN_BYTES
from seqdedupe.log.embedded.logs import EmbeddedLogs, create_log
from seqdedupe.log.embedded.segment import segment_path
from seqdedupe.testing import LAST_RESORT_SECONDS

INCARNATION = 5
SECRET = bytes(16)
TOPIC = "persistent://public/default/t"


class Syncs:
    """Counts the syncs of the commit thread, but for those of what it writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._count)

    def _count(self, file: int) -> None:
        self.count += threading.current_thread().name == "seqdedupe-commit"
        self._fsync(file)


async def written_to(folder: Path, *, makes: bool, opens: int = 1) -> None:
    """One process: makes the log or finds it, opens it this many times, and takes it over."""
    logs = EmbeddedLogs(folder / "logs", clock_ms=lambda: 1, fatal=pytest.fail)
    if makes:
        await logs.create(INCARNATION, TOPIC, SECRET)
    for term in range(1, opens + 1):
        log = await logs.open(INCARNATION, 0, SECRET)
        await log.open_for_writing(term, bytes(TOKEN_BYTES), lambda outcome: None)
        await log.close()
    await logs.close()


async def test_a_new_log_is_durable_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = Syncs(monkeypatch)
    await written_to(tmp_path, makes=True)
    assert syncs.count == 0


async def test_a_log_that_is_found_is_synced_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a copy, of which nothing is on the disk yet."""
    create_log(tmp_path / "logs" / str(INCARNATION), TOPIC, SECRET)
    syncs = Syncs(monkeypatch)
    await written_to(tmp_path, makes=False)
    assert syncs.count > 0


async def test_a_log_that_is_opened_again_is_synced_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = Syncs(monkeypatch)
    await written_to(tmp_path, makes=True, opens=2)
    assert syncs.count > 0


async def test_what_stands_in_the_rest_of_a_log_is_synced_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A creation goes on from what one before has left, and that may have got as far as to write."""
    folder = tmp_path / "logs" / str(INCARNATION)
    create_log(folder, TOPIC, SECRET)
    segment_path(folder, 0).write_bytes(b"torn")
    syncs = Syncs(monkeypatch)
    await written_to(tmp_path, makes=True)
    assert syncs.count > 0
    assert not segment_path(folder, 0).read_bytes().startswith(b"torn")


def test_making_a_log_waits_for_two_syncs_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its files come at once, and those of the folders in which it stands: none ends before all have begun."""
    fsync, lock = os.fsync, threading.Lock()
    steps = [threading.Barrier(3), threading.Barrier(3)]
    come = [step for step in steps for _ in range(step.parties)]

    def sync(file: int) -> None:
        with lock:
            step = come.pop(0)
        step.wait(LAST_RESORT_SECONDS)
        fsync(file)

    monkeypatch.setattr(os, "fsync", sync)
    create_log(tmp_path / "logs" / str(INCARNATION), TOPIC, SECRET)
    assert come == []
