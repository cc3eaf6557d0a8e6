"""What a flush policy lets wait for its sync: told as written, read by nobody, durable in order, and lost at most."""

import asyncio
import errno
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest

from seqdedupe.limits import FlushInterval
from seqdedupe.log.contract import Failure, Outcome
from seqdedupe.log.embedded import commit, writer
from seqdedupe.log.embedded.log import EmbeddedLog
from seqdedupe.log.embedded.logs import EmbeddedLogs
from tests.log.batches import SECRET, TOPIC
from tests.log.conformance import LIMIT_SECONDS, Owner
from tests.log.conftest import MakeLogs
from tests.log.rounds import LosingDisk, failing_syncs, found_in, ids_in, naming_as_synced, put

INCARNATION = 77
NEVER_BY_ITSELF = FlushInterval(2**31 - 1, 2**31 - 1)


class Early(Owner):
    """Hears too what is only written."""

    def __init__(self, log: EmbeddedLog, term: int = 1) -> None:
        super().__init__(log, term)
        self.written = 0
        self._waiting = 0

    def _settle(self, outcome: Outcome) -> None:
        assert not (outcome.runs and outcome.written)
        super()._settle(outcome)
        self.written += len(outcome.written)
        self._waiting = max(0, self._waiting - outcome.stored) + len(outcome.written)

    @property
    def told(self) -> int:
        """For this many it is known that they are written, or more."""
        return self.stored + self._waiting

    async def until_told(self, count: int) -> None:
        async with asyncio.timeout(LIMIT_SECONDS):
            while self.told < count:
                self._heard.clear()
                await self._heard.wait()


async def opened(
    logs: EmbeddedLogs, interval: FlushInterval = NEVER_BY_ITSELF, incarnation: int = INCARNATION
) -> tuple[EmbeddedLog, Early]:
    await logs.create(incarnation, TOPIC + str(incarnation), SECRET)
    log = await logs.open(incarnation, 0)
    log.flush_every(interval)
    owner = Early(log)
    await owner.open()
    return log, owner


async def append(owner: Early, first: int, count: int, rows: int = 1) -> None:
    for i in range(first, first + count):
        owner.append(i * rows, rows)
        await owner.until_told(i + 1)


class Syncs:
    """Counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        really = os.fdatasync

        def sync(fd: int) -> None:
            self.calls += 1
            really(fd)

        monkeypatch.setattr(os, "fdatasync", sync)


# -- what waits, and until when ----------------------------------------------------------------------------------------


async def test_what_is_only_written_is_told_and_is_there_for_nobody(
    make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, owner = await opened(make_logs())
    syncs, bytes_before = Syncs(monkeypatch), log.size_bytes
    await append(owner, 0, 20)
    assert (owner.written, owner.stored, syncs.calls) == (20, 0, 0)
    assert (log.certain_index, log.size_bytes, await ids_in(log)) == (0, bytes_before, [])
    log.flush()
    await owner.until_stored(20)
    assert (log.certain_index, syncs.calls, await ids_in(log)) == (20, 1, list(range(20)))
    await log.close()


async def test_control_every_commit_is_synced_by_default(make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    log, owner = await opened(make_logs(), FlushInterval())
    syncs = Syncs(monkeypatch)
    await append(owner, 0, 20)
    assert (owner.written, owner.stored, syncs.calls) == (0, 20, 20)
    await log.close()


@pytest.mark.parametrize("interval", [FlushInterval(10**6, 0), FlushInterval(1, 10**6), FlushInterval(2, 10**6)])
async def test_one_of_the_two_is_enough(make_logs: MakeLogs, interval: FlushInterval) -> None:
    log, owner = await opened(make_logs(), interval)
    await append(owner, 0, 5, rows=2)
    assert (owner.written, owner.stored) == (0, 5)
    await log.close()


async def test_never_so_many_messages_are_told_early(make_logs: MakeLogs) -> None:
    log, owner = await opened(make_logs(), FlushInterval(10, 2**31 - 1))
    for i in range(40):
        await append(owner, i, 1, rows=3)
        assert (i + 1 - owner.stored) * 3 < 10
    assert owner.stored == 40
    await log.close()


async def test_after_the_time_what_waits_is_synced(make_logs: MakeLogs) -> None:
    log, owner = await opened(make_logs(), FlushInterval(2**31 - 1, 20))
    for i in range(3):
        await append(owner, i, 1)
        await owner.until_stored(i + 1)
    assert owner.written == 3
    await log.close()


async def test_no_more_waits_than_is_settled_at_once(make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_LATE_APPENDS", 7)
    log, owner = await opened(make_logs())
    for i in range(30):
        await append(owner, i, 1)
        assert i + 1 - owner.stored < 7
    await log.close()


async def test_memory_is_bounded_over_all_topics(make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "MAX_LATE_BYTES", 4_000)
    logs = make_logs()
    both = [await opened(logs, incarnation=INCARNATION + k) for k in range(2)]
    for i in range(20):
        for _, owner in both:
            owner.append(i, 1, 300)
            await owner.until_told(i + 1)
        assert sum((i + 1 - owner.stored) * 300 for _, owner in both) < 5_000
    assert all(owner.stored for _, owner in both)
    for log, _ in both:
        await log.close()


async def test_a_control_record_never_waits(make_logs: MakeLogs) -> None:
    log, owner = await opened(make_logs())
    await append(owner, 0, 5)
    owner.append_control(9)
    await owner.until_stored(6)
    await log.close()


async def test_a_marker_syncs_what_stands_before_it(make_logs: MakeLogs, tmp_path: Path, fatal: list[str]) -> None:
    log, owner = await opened(make_logs())
    await append(owner, 0, 5)
    await Early(log, 2).open()
    assert log.certain_index == 5
    assert await ids_in(log) == list(range(5))
    await log.close()


async def test_back_to_every_commit_syncs_what_waits(make_logs: MakeLogs) -> None:
    log, owner = await opened(make_logs())
    await append(owner, 0, 5)
    log.flush_every(FlushInterval())
    await owner.until_stored(5)
    await append(owner, 5, 1)
    assert (owner.written, owner.stored) == (5, 6)
    await log.close()


async def test_a_backlog_is_flushed_as_a_whole(make_logs: MakeLogs) -> None:
    """More than a group was handed over before it was asked for."""
    log, owner = await opened(make_logs())
    for i in range(3 * writer.GROUP_APPENDS):
        owner.append(i, 1)
    log.flush()
    await owner.until_stored(3 * writer.GROUP_APPENDS)
    await log.close()


async def test_closing_syncs(make_logs: MakeLogs) -> None:
    log, owner = await opened(make_logs())
    await append(owner, 0, 5)
    await log.close()
    assert owner.stored == 5


async def test_a_new_segment_is_begun_when_the_old_one_is_synced(make_logs: MakeLogs) -> None:
    log, owner = await opened(make_logs(segment_bytes=1_000))
    await append(owner, 0, 30)
    assert len(log.base_indexes) > 1
    assert log.certain_index == owner.stored >= log.base_indexes[-1]
    log.flush()
    await owner.until_stored(30)
    assert await ids_in(log) == list(range(30))
    await log.close()


# -- failures ------------------------------------------------------------------------------------------------------


async def test_a_refused_write_leaves_what_was_written_before_it_durable(
    make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, owner = await opened(make_logs())
    await append(owner, 0, 5)

    def full(*_args: Any) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        owner.append(5, 1)
        assert await owner.until_failed() is Failure.REFUSED
    assert (owner.stored, log.certain_index) == (5, 5)
    await Early(log, 2).open()
    assert await ids_in(log) == list(range(5))
    await log.close()


async def test_a_sync_that_fails_later_is_fatal_and_confirms_nothing(
    make_logs: MakeLogs, monkeypatch: pytest.MonkeyPatch, fatal: list[str]
) -> None:
    log, owner = await opened(make_logs())
    await append(owner, 0, 5)

    with monkeypatch.context() as patch:
        failing_syncs(patch, lambda path: True)
        log.flush()
        async with asyncio.timeout(LIMIT_SECONDS):
            while not fatal:  # noqa: ASYNC110 (the thread tells nobody else)
                await asyncio.sleep(0.001)
    assert "cannot be synced" in fatal[0]
    owner.append(5, 1)
    await log.close()
    assert (owner.stored, owner.written, log.certain_index) == (0, 5, 0)


# -- power cuts ----------------------------------------------------------------------------------------------------


async def cut_at_random(make_logs: MakeLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> int:
    """Two topics, of which one or both wait for syncs, in rounds of one and of both; and power cuts, of which each
    loses any part of what was not synced. How many messages the cuts took that were reported as written."""
    random = Random(seed)
    disk = LosingDisk(tmp_path / "data", monkeypatch)
    logs = make_logs(disk.folder / "logs", segment_bytes=3_000)
    both = [await opened(logs, incarnation=INCARNATION + k) for k in range(2)]
    both[1][0].flush_every(random.choice((NEVER_BY_ITSELF, FlushInterval(), FlushInterval(4, 2**31 - 1))))
    sent = [0, 0]
    taken = 0
    for step in range(40):
        for k in random.choice(((0,), (1,), (0, 1), (0, 1))):
            both[k][1].append(sent[k], 1, random.choice((10, 200)))
            sent[k] += 1
        for k in range(2):
            await both[k][1].until_told(sent[k])
            if random.random() < 0.1:
                both[k][0].flush()
        if random.random() < 0.2:
            stored = [owner.stored for _, owner in both]
            with disk._lock:
                image = disk.image(random)
            left = await found_in(put(image, tmp_path / f"cut-{step}") / "logs", [INCARNATION, INCARNATION + 1])
            for k in range(2):
                ids = left[INCARNATION + k]
                assert ids == list(range(len(ids))), f"seed {seed}: a hole"
                assert stored[k] <= len(ids) <= sent[k], f"seed {seed}: what was durable is gone"
                taken += sent[k] - len(ids)
    for log, _ in both:
        await log.close()
    return taken


@pytest.mark.parametrize("part", range(4))
async def test_a_power_cut_takes_nothing_that_was_told_as_durable(
    make_logs: MakeLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config, part: int
) -> None:
    seed = pytestconfig.getoption("randomly_seed", 1) * 4 + part
    await cut_at_random(make_logs, tmp_path, monkeypatch, seed)


async def test_control_a_power_cut_takes_what_was_only_written(
    make_logs: MakeLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anyone who takes what is written for durable loses it: all of it, here, and no more than it."""
    disk = LosingDisk(tmp_path / "data", monkeypatch)
    log, owner = await opened(make_logs(disk.folder / "logs"))
    await append(owner, 0, 5)
    log.flush()
    await owner.until_stored(5)
    await append(owner, 5, 5)
    found = await found_in(put(disk.image(None), tmp_path / "cut") / "logs", [INCARNATION])
    assert found[INCARNATION] == list(range(5))
    await log.close()


async def a_cut_among_what_waits(make_logs: MakeLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A power cut that leaves the last record of those that were only written, and not those before it."""
    disk = LosingDisk(tmp_path / "data", monkeypatch)
    log, owner = await opened(make_logs(disk.folder / "logs"))
    await append(owner, 0, 2)
    log.flush()
    await owner.until_stored(2)
    owner.append(2, 1, 5_000)
    await owner.until_told(3)
    owner.append(3, 1, 10)
    await owner.until_told(4)
    (path,) = (disk.folder / "logs" / str(INCARNATION)).glob("*.log")
    raw = path.read_bytes()
    image = disk.image(None)
    (segment,) = (at for at in image if at.suffix == ".log" and at.parent.name == str(INCARNATION))
    synced = len(image[segment])
    hole = bytes(5_000)
    image[segment] = raw[:synced] + hole + raw[synced + len(hole) :]
    await log.close()
    return (await found_in(put(image, tmp_path / "cut") / "logs", [INCARNATION]))[INCARNATION]


async def test_what_stands_above_the_last_sync_is_a_torn_tail(
    make_logs: MakeLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await a_cut_among_what_waits(make_logs, tmp_path, monkeypatch) == [0, 1]


async def test_control_a_record_that_names_more_than_is_synced_makes_it_damage(
    make_logs: MakeLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    naming_as_synced(monkeypatch, "_end")
    with pytest.raises(Exception, match="LOG_DAMAGED"):
        await a_cut_among_what_waits(make_logs, tmp_path, monkeypatch)


async def test_a_round_of_the_journal_leaves_out_what_waits(
    make_logs: MakeLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic of which something waits syncs its own file, in company too: a journal would have its last part alone."""
    disk = LosingDisk(tmp_path / "data", monkeypatch)
    logs = make_logs(disk.folder / "logs")
    both = [await opened(logs, incarnation=INCARNATION + k) for k in range(3)]
    for log, _ in both[1:]:
        log.flush_every(FlushInterval())
    await append(both[0][1], 0, 3)
    for _, owner in both:
        owner.append(owner.told, 1)
    both[0][0].flush()
    await both[0][1].until_stored(4)
    await both[1][1].until_stored(1)
    await both[2][1].until_stored(1)
    with disk._lock:
        image = disk.image(None)
    found = await found_in(put(image, tmp_path / "cut") / "logs", [INCARNATION + k for k in range(3)])
    assert found == {INCARNATION: [0, 1, 2, 3], INCARNATION + 1: [0], INCARNATION + 2: [0]}
    for log, _ in both:
        await log.close()
