"""A log that has refused a write is opened again when its disk has room: how that is found out, and what it leaves."""

import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seqdedupe.errors import UnavailableError
from seqdedupe.log.contract import Failure
from seqdedupe.log.embedded import writer
from seqdedupe.log.embedded.log import EmbeddedLog
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.log.embedded.writer import Room
from tests.log.batches import SECRET, TOPIC
from tests.log.conformance import Owner
from tests.log.conftest import MakeLogs
from tests.log.rounds import ids_in

INCARNATION = 1_700_000_000_000_000
BATCH_BYTES = 50_000
TRIES = 20

LimitFiles = Callable[[int | None], None]


@pytest.fixture
def limit_files() -> Iterator[LimitFiles]:
    """Sets how large the kernel lets a file of this process become, as a quota does; None: as large as ever."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size_bytes: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before if size_bytes is None else (size_bytes, before[1]))

    yield limit
    limit(None)


async def new_log(logs: EmbeddedLogs, incarnation: int = INCARNATION) -> EmbeddedLog:
    await logs.create(incarnation, f"{TOPIC}-{incarnation}", SECRET)
    return await logs.open(incarnation, 0)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


async def refused(log: EmbeddedLog, term: int) -> str:
    """Opens the log, and has it refuse a batch; returns why it was refused, empty if it was not."""
    owner = await Owner(log, term).open()
    owner.append(1_000 * term, 1, BATCH_BYTES)
    await owner.until_settled(1)
    assert owner.failure in (None, Failure.REFUSED)
    return owner.why


async def refused_by_the_disk(log: EmbeddedLog, term: int, limit_files: LimitFiles) -> None:
    """Has the log refuse a batch for which there is no room. Afterwards there is room again."""
    limit_files(BATCH_BYTES // 2)
    assert "too large" in await refused(log, term)
    limit_files(None)


async def log_with_a_refusal(make_logs: MakeLogs, limit_files: LimitFiles) -> EmbeddedLog:
    """A new log that was opened with term 1, and has refused a batch with term 2."""
    log = await new_log(make_logs())
    await Owner(log, 1).open()
    await refused_by_the_disk(log, 2, limit_files)
    return log


async def opened(log: EmbeddedLog, term: int) -> str:
    """Why it cannot be opened; empty if it was."""
    try:
        await Owner(log, term).open()
    except UnavailableError as e:
        return e.message
    return ""


@pytest.mark.parametrize("tries", [True, False], ids=["as it is", "planted: no trial"])
async def test_where_a_marker_fits_and_no_batch(
    make_logs: MakeLogs, limit_files: LimitFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tries: bool
) -> None:
    """The disk says that it has room, as with a quota: the trial alone tells. It leaves nothing."""
    if not tries:
        monkeypatch.setattr(Room, "why_not", lambda self, *, was_refused: "")
    log = await new_log(make_logs())
    assert await refused(log, 1) == ""
    limit_files(log.size_bytes + BATCH_BYTES // 2)
    assert "too large" in await refused(log, 2)
    before = contents(tmp_path / "logs")
    whys = {await opened(log, 3 + i) for i in range(TRIES)}
    assert (contents(tmp_path / "logs") == before) is tries
    if not tries:
        assert whys == {""}
        await log.close()
        return
    assert whys == {f"a trial write of 8.0 MiB in {tmp_path / 'logs'} failed: File too large"}
    limit_files(None)
    assert await refused(log, 100) == ""
    assert await ids_in(log) == [1_000, 100_000]
    assert contents(tmp_path / "logs").keys() == before.keys()
    await log.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
async def test_whatever_the_system_says(
    make_logs: MakeLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fatal: list[str], code: int
) -> None:
    """A full quota and a file system that has become read-only, which takes no cut either, are a full disk."""

    def fail(file: int, *arguments: Any) -> Any:
        raise OSError(code, os.strerror(code))

    log = await new_log(make_logs())
    assert await refused(log, 1) == ""
    owner = await Owner(log, 2).open()
    before = contents(tmp_path / "logs")
    with monkeypatch.context() as patch:
        for name in ("pwrite", "pwritev", "ftruncate"):
            patch.setattr(os, name, fail)
        owner.append(2_000, 1, BATCH_BYTES)
        assert await owner.until_failed() is Failure.REFUSED
        for i in range(TRIES):
            assert os.strerror(code) in await opened(log, 3 + i)
    assert contents(tmp_path / "logs") == before
    assert await refused(log, 100) == ""
    assert await ids_in(log) == [1_000, 100_000]
    await log.close()
    assert fatal == []


async def test_logs_of_one_disk_share_its_room(
    make_logs: MakeLogs, limit_files: LimitFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for three of seven, and one trial an interval: the others wait for the next one."""
    trials = 0
    trial = Room._why_trial_fails

    def counted(self: Room) -> str:
        nonlocal trials
        trials += 1
        return trial(self)

    logs = make_logs()
    all_of_them = [await new_log(logs, INCARNATION + i) for i in range(7)]
    for log in all_of_them:
        await Owner(log, 1).open()
    for log in all_of_them:
        await refused_by_the_disk(log, 2, limit_files)
    monkeypatch.setattr(Room, "_why_trial_fails", counted)
    monkeypatch.setattr(Room, "_free_bytes", lambda self: 4 * writer.SHARE_BYTES - 1)
    monkeypatch.setattr(writer, "TRIAL_SECONDS", 3600.0)
    whys = [await opened(log, 3 + i) for i, log in enumerate(all_of_them)]
    assert [bool(why) for why in whys] == [False] * 3 + [True] * 4
    assert {why for why in whys if why} == {f"the disk of {logs.folder_of(0).parent} was full: other topics go first"}
    assert trials == 1
    monkeypatch.setattr(logs._shared.room, "_next_trial", 0.0)
    whys = [await opened(log, 20 + i) for i, log in enumerate(all_of_them[3:])]
    assert [bool(why) for why in whys] == [False] * 3 + [True]
    assert trials == 2
    for log in all_of_them:
        await log.close()


async def test_a_share_is_enough_for_a_higher_term(
    make_logs: MakeLogs, limit_files: LimitFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anyone who finds a marker of a higher term opens the log again. It would take the shares of others, or have
    none."""
    log = await log_with_a_refusal(make_logs, limit_files)
    monkeypatch.setattr(Room, "_free_bytes", lambda self: writer.SHARE_BYTES)
    monkeypatch.setattr(writer, "TRIAL_SECONDS", 3600.0)
    assert [await opened(log, term) for term in (3, 4)] == ["", ""]
    await log.close()


async def test_what_is_refused_takes_back_what_the_trial_found(
    make_logs: MakeLogs, limit_files: LimitFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await log_with_a_refusal(make_logs, limit_files)
    monkeypatch.setattr(writer, "TRIAL_SECONDS", 3600.0)
    assert await opened(log, 3) == ""
    await refused_by_the_disk(log, 4, limit_files)
    assert "other topics go first" in await opened(log, 5)
    await log.close()


async def test_shares_that_nobody_took_do_not_last(
    make_logs: MakeLogs, limit_files: LimitFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else may have filled the disk since."""
    log = await log_with_a_refusal(make_logs, limit_files)
    assert await opened(log, 3) == ""
    with monkeypatch.context() as patch:
        patch.setattr(Room, "_free_bytes", lambda self: writer.SHARE_BYTES - 1)
        assert "16.0 MiB free" in await opened(log, 4)
        limit_files(BATCH_BYTES // 2)
    assert "a trial write" in await opened(log, 5)
    await log.close()


async def test_the_first_opening_needs_the_room_too(
    make_logs: MakeLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar that starts on a full disk writes no marker. There was no refusal, so nothing is tried out."""
    log = await new_log(make_logs())
    monkeypatch.setattr(Room, "_why_trial_fails", lambda self: "a trial")
    before = contents(tmp_path / "logs")
    really = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=60, f_frsize=4096))
    why = f"the disk of {tmp_path / 'logs'} has 0.2 MiB free: a topic needs 16.0 MiB to be written"
    assert await opened(log, 1) == why
    assert contents(tmp_path / "logs") == before
    monkeypatch.setattr(os, "statvfs", really)
    await log.close()
    log = await make_logs().open(INCARNATION, 0)
    assert await opened(log, 2) == ""
    await log.close()


@pytest.mark.parametrize("was_refused", [True, False])
async def test_after_a_refusal_no_group_is_larger_than_the_trial(
    make_logs: MakeLogs, limit_files: LimitFiles, monkeypatch: pytest.MonkeyPatch, was_refused: bool
) -> None:
    """Else what is in flight at once might never fit, and the topic would be opened and refuse again and again."""
    monkeypatch.setattr(writer, "LARGEST_BYTES", 3 * BATCH_BYTES)
    log = await new_log(make_logs())
    await Owner(log, 1).open()
    if was_refused:
        await refused_by_the_disk(log, 2, limit_files)
    sizes: list[int] = []
    really, may_write = os.pwritev, threading.Event()

    def seen(file: int, buffers: list[bytes], offset: int) -> int:
        may_write.wait()
        sizes.append(sum(map(len, buffers)))
        return really(file, buffers, offset)

    owner = await Owner(log, 3).open()
    monkeypatch.setattr(os, "pwritev", seen)
    for i in range(9):
        owner.append(i, 1, BATCH_BYTES * (4 if i == 8 else 1))
    may_write.set()
    await owner.until_stored(9)
    if was_refused:
        assert all(size <= 3 * BATCH_BYTES for size in sizes[:-1])
        assert sizes[-1] // BATCH_BYTES == 4
    else:
        assert len(sizes) <= 2
    await log.close()
