"""The embedded log itself: group commit, segments, retention, and disks that fill up or fail."""

import asyncio
import errno
import os
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.errors import DamagedError, PositionError, SeqdedupeError, UnavailableError
from seqdedupe.limits import MAX_BATCH_BYTES, Retention
from seqdedupe.log.contract import Failure, LogName
from seqdedupe.log.embedded import log as embedded
from seqdedupe.log.embedded import reader, writer
from seqdedupe.log.embedded.log import EmbeddedLog
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.log.embedded.segment import SCAN_BYTES, Segment
from seqdedupe.log.embedded.tail import look_past
from seqdedupe.log.embedded.writer import GROUP_APPENDS
from tests.log.batches import SECRET, TOPIC
from tests.log.conformance import LIMIT_SECONDS, Owner, parsed, replayed, what
from tests.log.conftest import MakeLogs
from tests.log.rounds import ids_in, path_of

INCARNATION = 1_700_000_000_000_000


class Gate:
    """Takes the place of a system call: counts, holds calls back while it is shut, and fails on command."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self._really = getattr(os, name)
        self.calls = 0
        self.arrived = threading.Semaphore(0)
        self.open = threading.Event()
        self.open.set()
        self.fails: Callable[[int], bool] = lambda fd: False
        monkeypatch.setattr(os, name, self)

    def __call__(self, fd: int, *arguments: Any) -> Any:
        self.calls += 1
        self.arrived.release()
        assert self.open.wait(LIMIT_SECONDS)
        if self.fails(fd):
            raise OSError(errno.EIO, "the disk failed")
        return self._really(fd, *arguments)

    async def arrival(self) -> None:
        """Until a call has come in that nobody has waited for."""
        assert await asyncio.to_thread(self.arrived.acquire, True, LIMIT_SECONDS)


async def new_log(logs: EmbeddedLogs, incarnation: int = INCARNATION) -> EmbeddedLog:
    await logs.create(incarnation, TOPIC, SECRET)
    return await logs.open(incarnation, 0)


def files(folder: Path, incarnation: int = INCARNATION) -> dict[int, int]:
    """The sizes of the segment files, by base index."""
    return {int(f.name[:-4]): f.stat().st_size for f in sorted((folder / str(incarnation)).glob("*.log"))}


async def test_what_arrives_during_a_sync_is_one_group(make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    log = await new_log(make_logs())
    owner = await Owner(log, 1).open()
    syncs, writes = Gate(monkeypatch, "fdatasync"), Gate(monkeypatch, "pwritev")
    syncs.open.clear()
    owner.append(0, 1)
    await syncs.arrival()
    for i in range(1, 101):
        owner.append(i, 1)
    assert owner.stored == 0
    syncs.open.set()
    await owner.until_stored(101)
    assert (syncs.calls, writes.calls, owner.calls) == (2, 2, 2)
    await log.close()


async def test_a_backlog_is_written_in_groups(make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the event loop is reported at once is bounded, and fits into one write."""
    logs = make_logs()
    log = await new_log(logs)
    owner = await Owner(log, 1).open()
    syncs, writes = Gate(monkeypatch, "fdatasync"), Gate(monkeypatch, "pwritev")
    syncs.open.clear()
    owner.append(0, 1)
    await syncs.arrival()
    for i in range(1, 3_000):
        owner.append(i, 1)
    syncs.open.set()
    await owner.until_stored(3_000)
    groups = 1 + -(-2_999 // GROUP_APPENDS)
    assert (syncs.calls, writes.calls, owner.calls) == (groups, groups, groups)
    assert await ids_in(log) == list(range(3_000))
    await log.close()
    log = await logs.open(INCARNATION, 3_000)
    assert log.cut_bytes == 0
    assert await ids_in(log) == list(range(3_000))
    await log.close()


async def test_a_backlog_that_is_left_when_its_log_is_closed(
    make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch, fatal: list[str]
) -> None:
    """It is dropped, but for a group, and never gets into the file that has the number of the closed one."""
    logs = make_logs()
    log = await new_log(logs)
    owner = await Owner(log, 1).open()
    syncs = Gate(monkeypatch, "fdatasync")
    syncs.open.clear()
    owner.append(0, 1)
    await syncs.arrival()
    for i in range(1, 3_000):
        owner.append(i, 1)
    closing = asyncio.create_task(log.close())
    await asyncio.sleep(0)
    assert logs.committer.queue.qsize() == 2
    syncs.open.set()
    await closing
    other = await new_log(logs, INCARNATION + 1)
    owner = await Owner(other, 1).open()
    owner.append(7, 1)
    await owner.until_stored(1)
    assert await ids_in(other) == [7]
    await other.close()
    log = await logs.open(INCARNATION, 0)
    assert await ids_in(log) == list(range(1 + GROUP_APPENDS))
    assert (log.cut_bytes, fatal) == (0, [])
    await log.close()


async def test_short_writes_are_completed(make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = make_logs()
    log = await new_log(logs)
    really = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, group, at: really(fd, [b"".join(group)[:7]], at))
    owner = await Owner(log, 1).open()
    for i in range(20):
        owner.append(i, 1)
    await owner.until_stored(20)
    await log.close()
    log = await logs.open(INCARNATION, 20)
    assert (await ids_in(log), log.cut_bytes) == (list(range(20)), 0)
    await log.close()


@pytest.mark.parametrize("is_short", [False, True])
async def test_a_large_group_is_written_in_pieces(
    make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch, is_short: bool
) -> None:
    """For batches that are larger than a piece, as large, and so small that several are in one."""
    monkeypatch.setattr(writer, "WRITE_BYTES", 1000)
    logs = make_logs()
    log = await new_log(logs)
    owner = await Owner(log, 1).open()
    syncs = Gate(monkeypatch, "fdatasync")
    syncs.open.clear()
    owner.append(0, 1)
    await syncs.arrival()
    really = os.pwritev
    sizes: list[int] = []

    def write(fd: int, some: list[bytes], at: int) -> int:
        data = b"".join(some)
        sizes.append(len(data))
        return really(fd, [data[:333] if is_short else data], at)

    monkeypatch.setattr(os, "pwritev", write)
    payloads = [1, 5000, *range(600, 800), 10, 10, 10, 3500]
    for i, size in enumerate(payloads):
        owner.append(1 + i, 1, size)
    syncs.open.set()
    await owner.until_stored(1 + len(payloads))
    # It was one group, and each write a piece of it.
    assert syncs.calls == 2
    assert max(sizes) == 1000
    assert sum(sizes) > sum(payloads)
    assert sum(sizes) / len(sizes) > 500
    await log.close()
    log = await logs.open(INCARNATION, 1 + len(payloads))
    assert (await ids_in(log), log.cut_bytes) == (list(range(1 + len(payloads))), 0)
    await log.close()


async def test_a_group_whose_second_piece_cannot_be_written_is_undone(
    make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fatal: list[str]
) -> None:
    monkeypatch.setattr(writer, "WRITE_BYTES", 1000)
    log = await new_log(make_logs())
    owner = await Owner(log, 1).open()
    owner.append(0, 1)
    await owner.until_stored(1)
    size = files(tmp_path / "logs")[0]
    writes = Gate(monkeypatch, "pwritev")
    writes.fails = lambda fd: writes.calls == 2
    owner.append(1, 1, 3000)
    assert await owner.until_failed() is Failure.REFUSED
    assert (writes.calls, files(tmp_path / "logs")[0], fatal) == (2, size, [])
    owner = await Owner(log, 2).open()
    owner.append(1, 1, 3000)
    await owner.until_stored(1)
    assert await ids_in(log) == [0, 1]
    await log.close()


async def test_each_topic_is_confirmed_whatever_becomes_of_others(
    make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch, fatal: list[str]
) -> None:
    logs = make_logs()
    good_log, bad_log = await new_log(logs, 1), await new_log(logs, 2)
    good, bad = await Owner(good_log, 1).open(), await Owner(bad_log, 1).open()
    syncs = Gate(monkeypatch, "fdatasync")
    syncs.fails = lambda fd: "/2/" in path_of(fd) or "/journal/" in path_of(fd)
    syncs.open.clear()
    good.append(0, 1)
    await syncs.arrival()
    bad.append(0, 1)
    good.append(1, 1)
    syncs.open.set()
    await good.until_stored(2)
    good.append(2, 1)
    await good.until_stored(3)
    assert len(fatal) == 1
    assert "synced" in fatal[0]
    # Nothing is said of what the failed sync leaves open, and a later sync that succeeds proves nothing.
    syncs.fails = lambda fd: False
    bad.append(1, 1)
    good.append(3, 1)
    await good.until_stored(4)
    assert (bad.calls, await ids_in(bad_log)) == (0, [])
    await good_log.close()
    await bad_log.close()


def half_of_it(file: int, group: list[bytes], at: int) -> int:
    """In the place of `os.pwritev`: the disk becomes full meanwhile."""
    os.pwrite(file, b"".join(group)[:50], at)
    raise OSError(errno.ENOSPC, "no room")


async def test_a_cut_that_fails_is_fatal(
    make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch, fatal: list[str]
) -> None:
    log = await new_log(make_logs())
    owner = await Owner(log, 1).open()
    cuts = Gate(monkeypatch, "ftruncate")
    cuts.fails = lambda fd: True
    monkeypatch.setattr(os, "pwritev", half_of_it)
    owner.append(0, 1)
    await cuts.arrival()
    await log.close()
    assert len(fatal) == 1
    assert "cut" in fatal[0]
    assert owner.calls == 0


async def test_a_refusal_is_told_only_when_the_cut_is_synced(
    make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = await new_log(make_logs())
    owner = await Owner(log, 1).open()
    owner.append(0, 1)
    await owner.until_stored(1)
    size = files(tmp_path / "logs")[0]
    monkeypatch.setattr(os, "pwritev", half_of_it)
    syncs = Gate(monkeypatch, "fsync")
    syncs.open.clear()
    owner.append(1, 1)
    await syncs.arrival()
    assert files(tmp_path / "logs")[0] == size
    assert owner.failure is None
    syncs.open.set()
    assert await owner.until_failed() is Failure.REFUSED
    await log.close()


class Disk:
    """A place that can be filled up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self) -> None:
        with (self.folder / "filler").open("ab", buffering=0) as filler:
            for size in (65_536, 4_096, 512, 1):
                while True:
                    try:
                        filler.write(bytes(size))
                    except OSError:
                        break

    def empty(self) -> None:
        (self.folder / "filler").unlink()


class SizeLimit(Disk):
    """Where nothing can be mounted: the kernel's limit of a file's size."""

    def fill(self) -> None:
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, self._limits[1]))

    def empty(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        yield SizeLimit(folder)
        return
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


async def open_until_refused(log: EmbeddedLog, term: int) -> None:
    """The last page of a file on a full disk may have room for some markers."""
    for i in range(98):
        try:
            await Owner(log, term + i).open()
        except UnavailableError:
            return
    pytest.fail("the disk is full, and the log was opened for writing")


async def test_a_full_disk(make_logs: MakeLogs, disk: Disk, fatal: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "LARGEST_BYTES", 20_000)
    monkeypatch.setattr(writer, "SHARE_BYTES", 40_000)
    logs = make_logs(disk.folder / "logs")
    log = await new_log(logs)
    owner = await Owner(log, 1).open()
    owner.append(0, 3)
    await owner.until_stored(1)
    disk.fill()
    try:
        for i in range(1, 40):
            owner.append(10 * i, 1, 10_000)
        assert await owner.until_failed() is Failure.REFUSED
        assert owner.stored < 40
        stored = owner.stored
        await open_until_refused(log, 2)
        size = sum(files(disk.folder / "logs").values())
        assert size == log.size_bytes
        assert parsed(await log.read(0, 3, 1))[0].rows == 3
        await log.close()
        # Full when it is opened: it reads, and cannot be written.
        log = await logs.open(INCARNATION, 3)
        assert log.cut_bytes == 0
        assert len(await ids_in(log)) == 2 + stored
        await open_until_refused(log, 100)
        assert parsed(await log.read(0, 3, 1))[0].rows == 3
    finally:
        disk.empty()
    again = await Owner(log, 1_000).open()
    again.append(1_000, 2)
    await again.until_stored(1)
    assert (await ids_in(log))[-2:] == [1_000, 1_001]
    assert what((await replayed(log, log.first_index))[-2]) == ("marker", 1_000, 0)
    await log.close()
    assert fatal == []


async def test_an_append_before_the_marker_is_a_defect_of_the_caller(make_logs: MakeLogs) -> None:
    log = await new_log(make_logs())
    with pytest.raises(SeqdedupeError, match="INTERNAL"):
        Owner(log, 1).append(0, 1)
    opening = asyncio.create_task(Owner(log, 2).open())
    await asyncio.sleep(0)
    with pytest.raises(SeqdedupeError, match="INTERNAL"):
        Owner(log, 2).append(0, 1)
    owner = await opening
    owner.append(0, 1)
    await owner.until_stored(1)
    assert await ids_in(log) == [0]
    await log.close()


async def test_segments_follow_on(make_logs: MakeLogs, tmp_path: Path) -> None:
    logs = make_logs(segment_bytes=10_000)
    log = await new_log(logs)
    owner = await Owner(log, 1).open()
    for i in range(100):
        owner.append(i, 1, 1_000)
        await owner.until_stored(i + 1)
    sizes = files(tmp_path / "logs")
    assert 8 <= len(sizes) <= 13
    assert next(iter(sizes)) == 0
    assert all(10_000 <= size < 12_500 for size in list(sizes.values())[:-1])
    assert sum(sizes.values()) == log.size_bytes
    for base in sizes:
        assert parsed(await log.read(base, 100, 1))[0].base_index == base
    await log.close()
    log = await logs.open(INCARNATION, 100)
    assert await ids_in(log) == list(range(100))
    assert log.size_bytes == sum(sizes.values())
    await log.close()


async def test_a_crash_right_after_a_new_segment_was_made(make_logs: MakeLogs, tmp_path: Path) -> None:
    logs = make_logs()
    log = await new_log(logs)
    owner = await Owner(log, 1).open()
    owner.append(0, 5)
    await owner.until_stored(1)
    await log.close()
    (tmp_path / "logs" / str(INCARNATION) / f"{5:020d}.log").touch()
    log = await logs.open(INCARNATION, 5)
    assert [what(r) for r in await replayed(log, 5)] == []
    owner = await Owner(log, 2).open()
    owner.append(5, 5)
    await owner.until_stored(1)
    assert await ids_in(log) == list(range(10))
    assert len(files(tmp_path / "logs")) == 2
    await log.close()


async def test_any_index_of_many_large_segments_is_found(make_logs: MakeLogs) -> None:
    logs = make_logs(segment_bytes=1_000_000)
    log = await new_log(logs)
    owner = await Owner(log, 1).open()
    for i in range(300):
        owner.append(10 * i, 10, 1_000)
        if i % 20 == 19:
            await owner.until_stored(i + 1)
    for _ in range(2):
        for index in [*range(0, 3_000, 113), 2_999, 0, 1_500]:
            first = parsed(await log.read(index, 3_000, 1))[0]
            assert first.base_index == index // 10 * 10
            assert (await replayed(log, index))[-1].base_index == 2_990
        await log.close()
        log = await logs.open(INCARNATION, 3_000)
    await log.close()


async def test_records_larger_than_what_a_scan_reads_at_once(make_logs: MakeLogs) -> None:
    logs = make_logs()
    log = await new_log(logs)
    owner = await Owner(log, 1).open()
    largest = MAX_BATCH_BYTES // 8 - 100
    shapes = [(1, 10), (1, SCAN_BYTES), (3, 10), (8, largest), (8, largest), (1, 10)]
    index = 0
    for i, (rows, payload_bytes) in enumerate(shapes):
        owner.append(index, rows, payload_bytes)
        await owner.until_stored(i + 1)
        index += rows
    for _ in range(2):
        # The marker, then the batches.
        assert [entry.base_index for entry in (await replayed(log, 0))[-len(shapes) :]] == [0, 1, 2, 5, 13, 21]
        await log.close()
        log = await logs.open(INCARNATION, index)
    await log.close()


async def test_retention_by_size(make_logs: MakeLogs, tmp_path: Path) -> None:
    logs = make_logs(segment_bytes=10_000)
    log = await new_log(logs)
    owner = await Owner(log, 1).open()
    for i in range(100):
        owner.append(i, 1, 1_000)
        await owner.until_stored(i + 1)
    await log.trim(await log.may_trim_to(100, Retention(35_000)))
    await log.close()
    sizes = files(tmp_path / "logs")
    assert 35_000 <= sum(sizes.values()) < 35_000 + 12_500
    log = await logs.open(INCARNATION, 100)
    assert log.first_index == min(sizes) > 0
    await log.close()


async def test_retention_by_size_drops_no_message_for_control_records(make_logs: MakeLogs) -> None:
    """However many somebody has written: before the log is opened again and after, when it has to look."""
    logs = make_logs(segment_bytes=10_000)
    log = await new_log(logs)
    owner = await Owner(log, 1).open()
    for i in range(40):
        owner.append(i, 1, 1_000)
        for k in range(30):
            owner.append_control(1 + k, 50)
        await owner.until_stored(31 * (i + 1))
    assert log.size_bytes > 20 * 40_000
    messages = 40 * 1_300
    assert await log.may_trim_to(40, Retention(messages)) == 0
    few = await log.may_trim_to(40, Retention(10_000))
    assert 40 - 14 <= few <= 40 - 9
    await log.close()
    log = await logs.open(INCARNATION, 40)
    assert await log.may_trim_to(40, Retention(messages)) == 0
    assert await log.may_trim_to(40, Retention(10_000)) == few
    await log.trim(few)
    assert await ids_in(log) == list(range(few, 40))
    assert await log.may_trim_to(40, Retention(10_000)) == few
    await log.close()


async def test_retention_by_age(make_logs: MakeLogs) -> None:
    now_ms = 1_000_000
    logs = make_logs(segment_bytes=10_000, clock_ms=lambda: now_ms)
    log = await new_log(logs)
    owner = await Owner(log, 1).open()
    for i in range(100):
        now_ms += 1_000
        owner.append(i, 1, 1_000)
        await owner.until_stored(i + 1)
    await log.close()
    log = await logs.open(INCARNATION, 100)
    await log.trim(await log.may_trim_to(100, Retention(age_ms=50_000)))
    await log.close()
    log = await logs.open(INCARNATION, 100)
    # Message i is 99 - i seconds old; whole segments of about ten.
    assert 38 <= log.first_index <= 50
    now_ms += 10_000_000
    await log.trim(await log.may_trim_to(100, Retention(age_ms=50_000)))
    await log.close()
    log = await logs.open(INCARNATION, 100)
    assert await ids_in(log) == list(range(log.first_index, 100))
    assert 88 <= log.first_index <= 99
    await log.close()


@pytest.mark.parametrize(("earliest_ms", "may_go"), [(0, False), (2_000_000, False), (1_000_000_000, True)])
async def test_retention_by_age_goes_by_the_believed_time(
    make_logs: MakeLogs,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    earliest_ms: int,
    may_go: bool,
) -> None:
    """The clock jumps ahead by eight days. In the control arm they pass, and are believed."""
    now_ms, steady_ms = 1_000_000, 77
    for module in (reader, embedded):
        monkeypatch.setattr(module, "steady_ms", lambda: steady_ms)
    logs = make_logs(segment_bytes=10_000, clock_ms=lambda: now_ms, earliest_ms=lambda: earliest_ms)
    log = await new_log(logs)
    owner = await Owner(log, 1).open()
    for i in range(30):
        owner.append(i, 1, 1_000)
        await owner.until_stored(i + 1)
    now_ms += 8 * 24 * 3600 * 1000
    steady_ms += may_go * 1_000_000_000
    caplog.set_level("INFO", "seqdedupe.log")
    await log.trim(await log.may_trim_to(30, Retention(age_ms=3600 * 1000)))
    assert (log.first_index > 0) == may_go
    assert ("retention has dropped the messages from index 0 to" in caplog.text) == may_go
    await log.close()


@pytest.mark.parametrize("zeroed", [0, 1, 2])
async def test_retention_by_age_passes_segments_that_cannot_be_read(
    make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch, zeroed: int
) -> None:
    """They are as old as what stands after them, and are looked at once. The control arm has none."""
    now_ms = 1_000_000
    logs = make_logs(segment_bytes=10_000, clock_ms=lambda: now_ms)
    log = await new_log(logs)
    owner = await Owner(log, 1).open()
    for i in range(50):
        now_ms += 1_000
        owner.append(i, 1, 1_000)
        await owner.until_stored(i + 1)
    bases = log.base_indexes
    await log.close()
    for base in bases[2 : 2 + zeroed]:
        path = Path(log.place) / f"{base:020d}.log"
        path.write_bytes(bytes(path.stat().st_size))
    looked_past = list[Path]()

    def look(segment: Segment, *rest: Any) -> Any:
        looked_past.append(segment.path)
        return look_past(segment, *rest)

    monkeypatch.setattr("seqdedupe.log.embedded.reader.look_past", look)
    log = await logs.open(INCARNATION, 50)
    young = 1_000_000 + 1_000 * (bases[4] + 1)
    # The fifth segment begins too young, then it does not.
    assert await log.may_trim_to(50, Retention(age_ms=now_ms - young)) == bases[3 if zeroed < 2 else 1]
    assert await log.may_trim_to(50, Retention(age_ms=now_ms - young - 1)) == bases[4]
    assert len(looked_past) == len(set(looked_past)) == zeroed
    assert await log.locate_time(young, 50) == bases[4 if zeroed < 2 else 2]
    await log.close()


async def test_nothing_is_dropped_without_limits_or_without_leave(make_logs: MakeLogs) -> None:
    for retention in (Retention(), Retention(10_000_000), Retention(age_ms=10_000)):
        logs = make_logs(segment_bytes=1_000)
        log = await new_log(logs)
        owner = await Owner(log, 1).open()
        for i in range(10):
            owner.append(i, 1, 1_000)
        await owner.until_stored(10)
        await log.trim(await log.may_trim_to(10, retention))
        await log.close()
        log = await logs.open(INCARNATION, 10)
        assert log.first_index == 0
        await log.close()
        await logs.delete(INCARNATION)


async def test_what_a_reader_had_before_retention_took_it(make_logs: MakeLogs) -> None:
    logs = make_logs(segment_bytes=5_000)
    log = await new_log(logs)
    owner = await Owner(log, 1).open()
    for i in range(50):
        owner.append(i, 1, 1_000)
        await owner.until_stored(i + 1)
    chunks = log.replay(0)
    assert (await anext(chunks)).table.size
    await log.trim(await log.may_trim_to(50, Retention(0)))
    assert log.first_index > 40
    with pytest.raises(PositionError, match="POSITION_TRIMMED"):
        async for _ in chunks:
            pass
    await log.close()


async def test_creating_and_deleting_can_be_done_again(make_logs: MakeLogs, tmp_path: Path) -> None:
    logs = make_logs()
    assert await logs.list() == []
    await logs.create(5, TOPIC, SECRET)
    await logs.create(5, TOPIC, SECRET)
    await logs.create(3, TOPIC, SECRET)
    (tmp_path / "logs" / "9").mkdir()
    assert await logs.list() == [LogName(3, TOPIC), LogName(5, TOPIC), LogName(9, None)]
    with pytest.raises(DamagedError):
        await logs.open(9, 0)
    await logs.create(9, TOPIC, SECRET)
    log = await logs.open(9, 0)
    owner = await Owner(log, 1).open()
    owner.append(0, 1)
    await owner.until_stored(1)
    await log.close()
    await logs.create(9, TOPIC, SECRET)
    log = await logs.open(9, 1)
    assert await ids_in(log) == [0]
    await log.close()
    for _ in range(2):
        await logs.delete(9)
        await logs.delete(3)
        assert await logs.list() == [LogName(5, TOPIC)]


@pytest.mark.parametrize(
    ("in_memory", "on_the_loop"), [("all", True), ("a part", False), ("nothing", False), ("unknown", False)]
)
async def test_only_what_is_in_memory_is_read_on_the_event_loop(
    make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch, in_memory: str, on_the_loop: bool
) -> None:
    logs = make_logs()
    await logs.create(INCARNATION, TOPIC, SECRET)
    log = await logs.open(INCARNATION, 0)
    owner = await Owner(log, 1).open()
    for i in range(5):
        owner.append(i, 3, 100)
    await owner.until_stored(5)
    readers: list[threading.Thread] = []
    really = os.pread

    def preadv(file: int, buffers: list[memoryview], offset: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        if in_memory == "nothing":
            raise BlockingIOError(errno.EAGAIN, "it would have to wait for the disk")
        if in_memory == "unknown":
            raise OSError(errno.EOPNOTSUPP, "this file system cannot tell")
        size = len(buffers[0]) if in_memory == "all" else len(buffers[0]) // 2
        buffers[0][:size] = really(file, size, offset)
        readers.append(threading.current_thread())
        return size

    def pread(file: int, size: int, offset: int) -> bytes:
        readers.append(threading.current_thread())
        return really(file, size, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr("seqdedupe.log.embedded.segment.Segment.read.__defaults__", (pread,))
    at = 0
    while at < 15:
        for record in parsed(await log.read(at, 15, 1)):
            assert record.base_index == at
            at += record.rows
    assert (readers[-1] is threading.current_thread()) == on_the_loop
    await log.close()
