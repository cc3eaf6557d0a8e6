"""Retention by time of what was written while the clock was ahead, and of quiet topics."""

import os
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from seqdedupe.limits import Retention
from seqdedupe.log.embedded import log as embedded
from seqdedupe.log.embedded import reader
from seqdedupe.log.embedded.log import EmbeddedLog
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.log.embedded.reader import AHEAD_FILE, Ahead
from tests.log.conformance import Owner
from tests.log.conftest import MakeLogs
from tests.log.test_embedded import INCARNATION, new_log

DAY_MS = 24 * 60 * 60 * 1000
BEGAN_MS = 1_700_000_000_000
WEEK = Retention(age_ms=7 * DAY_MS)


class Times:
    """What the clock and the steady one say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock_ms, self.steady_ms = BEGAN_MS, 12_345
        for module in (reader, embedded):
            monkeypatch.setattr(module, "steady_ms", lambda: self.steady_ms)

    def go_on(self, passed_ms: int) -> None:
        self.clock_ms += passed_ms
        self.steady_ms += passed_ms

    def logs(self, make_logs: MakeLogs, segment_bytes: int = 10_000) -> EmbeddedLogs:
        return make_logs(segment_bytes=segment_bytes, clock_ms=lambda: self.clock_ms)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    return Times(monkeypatch)


async def publish(owner: Owner, messages: int) -> None:
    for _ in range(messages):
        owner.append(owner.stored, 1, 1_000)
        await owner.until_stored(owner.stored + 1)


async def trim(log: EmbeddedLog, covered_index: int) -> int:
    await log.trim(await log.may_trim_to(covered_index, WEEK))
    return log.first_index


async def written_ahead(logs: EmbeddedLogs, times: Times) -> tuple[EmbeddedLog, Owner]:
    """A log whose first message was published while the clock was 400 days ahead, and then many more."""
    log = await new_log(logs)
    owner = await Owner(log, 1).open()
    times.clock_ms += 400 * DAY_MS
    await publish(owner, 1)
    times.clock_ms -= 400 * DAY_MS
    await publish(owner, 49)
    return log, owner


@pytest.mark.parametrize("is_seen", [True, False])
async def test_what_was_written_ahead_counts_from_the_look_that_saw_it(
    make_logs: MakeLogs,
    times: Times,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_seen: bool,
) -> None:
    """In the control arm nobody looks: all of it stays for 400 days."""
    if not is_seen:
        monkeypatch.setattr("seqdedupe.log.embedded.log.AHEAD_MS", 1000 * DAY_MS)
    log, _ = await written_ahead(times.logs(make_logs), times)
    bases = log.base_indexes
    assert await trim(log, 50) == 0
    assert caplog.text.count("begins in the future") == is_seen * len(bases[1:])
    times.go_on(7 * DAY_MS)
    assert await trim(log, 50) == 0, "no message is older than a week"
    times.go_on(1)
    assert await trim(log, 50) == (bases[-1] if is_seen else 0)
    assert caplog.text.count("begins in the future") == is_seen * len(bases[1:]), "said once"
    await log.close()


def of_another_version(raw: bytes) -> bytes:
    said = raw.rpartition(b"\n")[0].replace(b"1 ", b"9 ", 1)
    return b"%b\n%08x" % (said, zlib.crc32(said))


@pytest.mark.parametrize(
    "spoil", [None, lambda raw: b"", lambda raw: raw.replace(b" 0", b" 1", 1), lambda raw: raw[:-9], of_another_version]
)
async def test_what_has_been_counted_survives_the_process_and_its_file_may_be_lost(
    make_logs: MakeLogs,
    times: Times,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[bytes], bytes] | None,
) -> None:
    """The time between two processes does not count; and what is damaged or missing counts again."""
    logs = times.logs(make_logs)
    log, _ = await written_ahead(logs, times)
    await trim(log, 50)
    times.go_on(4 * DAY_MS)
    await trim(log, 50)
    file = Path(log.place) / AHEAD_FILE
    await log.close()
    if spoil is not None:
        file.write_bytes(spoil(file.read_bytes()))
    caplog.clear()
    times.clock_ms += 100 * DAY_MS
    times.steady_ms = 77
    log = await logs.open(INCARNATION, 50)
    assert await trim(log, 50) == 0
    assert ("begins in the future" in caplog.text) == (spoil is not None)
    times.go_on(3 * DAY_MS)
    assert await trim(log, 50) == 0
    times.go_on(1)
    assert (await trim(log, 50) > 0) == (spoil is None)
    times.go_on(4 * DAY_MS)
    assert await trim(log, 50) > 40
    await log.close()


@pytest.mark.parametrize("is_seen", [True, False], ids=["as it is", "control: nobody looks"])
async def test_what_was_written_behind_counts_from_the_look_that_saw_it(
    make_logs: MakeLogs,
    times: Times,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_seen: bool,
) -> None:
    """On a new topic, whose first messages have no earlier ones before them; and after a start by another process."""
    if not is_seen:
        monkeypatch.setattr("seqdedupe.log.embedded.log.AHEAD_MS", 1000 * DAY_MS)
    times.clock_ms -= 400 * DAY_MS
    log = await new_log(logs := times.logs(make_logs))
    owner = await Owner(log, 1).open()
    await publish(owner, 50)
    times.clock_ms += 400 * DAY_MS
    times.go_on(DAY_MS)
    last = log.base_indexes[-1]
    assert await trim(log, 50) == (0 if is_seen else last)
    assert caplog.text.count("begins before it was made") == is_seen * len(log.base_indexes)
    if is_seen:
        await publish(owner, 25)
        times.go_on(4 * DAY_MS)
        assert await trim(log, 75) == 0
        await log.close()
        times.clock_ms += 100 * DAY_MS
        times.steady_ms = 77
        log = await logs.open(INCARNATION, 75)
        assert await trim(log, 75) == 0
        times.go_on(3 * DAY_MS)
        assert await trim(log, 75) == 0
        times.go_on(1)
        # What came when the clock was right goes by the clock.
        assert await trim(log, 75) > last
    await log.close()


async def test_a_file_time_and_a_clock_that_is_behind_have_nothing_dropped(make_logs: MakeLogs, times: Times) -> None:
    """A clock that is believed, and says 1970, makes all segments lie ahead; and files written then have that time."""
    log = await new_log(logs := times.logs(make_logs))
    owner = await Owner(log, 1).open()
    await publish(owner, 25)
    times.clock_ms -= BEGAN_MS - 1
    await publish(owner, 25)
    for base_index in log.base_indexes:
        os.utime(f"{log.place}/{base_index:020d}.log", (1, 1))
    assert await trim(log, 50) == 0
    await log.close()
    times.clock_ms += BEGAN_MS - 1
    log = await logs.open(INCARNATION, 50)
    assert await trim(log, 50) == 0
    times.go_on(7 * DAY_MS)
    assert await trim(log, 50) == 0
    times.go_on(1)
    assert await trim(log, 50) > 40
    await log.close()


async def test_only_what_is_there_is_kept(tmp_path: Path, times: Times) -> None:
    seen = Ahead(tmp_path)
    assert seen.look([], {1}) == []
    assert not (tmp_path / AHEAD_FILE).exists()
    assert seen.look([5, 9], {1, 5, 9}) == [5, 9]
    times.go_on(100)
    assert seen.look([9, 12], {9, 12}) == [12]
    assert [seen.age_ms(base_index) for base_index in (5, 9, 12)] == [0, 100, 0]
    again = Ahead(tmp_path)
    times.go_on(1_000)
    assert again.look([9, 12], {9, 12}) == []
    assert [again.age_ms(base_index) for base_index in (5, 9, 12)] == [0, 100, 0]


async def test_a_file_that_cannot_be_written_is_tried_again(
    tmp_path: Path, times: Times, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "log"
    seen = Ahead(folder)
    assert seen.look([5], {5}) == [5]
    assert "cannot be written" in caplog.text
    folder.mkdir()
    times.go_on(100)
    assert seen.look([5], {5}) == []
    again = Ahead(folder)
    again.look([5], {5})
    assert again.age_ms(5) == 100


@pytest.mark.parametrize("is_bounded", [True, False])
async def test_the_last_segment_gives_way_by_time(
    make_logs: MakeLogs, times: Times, monkeypatch: pytest.MonkeyPatch, is_bounded: bool
) -> None:
    """A message a day, far from filling a segment, and a look a day. In the control arm segments have no bound by time:
    all of it stays."""
    if not is_bounded:
        monkeypatch.setattr("seqdedupe.log.embedded.log.LEAST_SEGMENT_MS", 1000 * DAY_MS)
    log = await new_log(times.logs(make_logs, segment_bytes=10**9))
    owner = await Owner(log, 1).open()
    for day in range(40):
        await publish(owner, 1)
        first = await trim(log, day + 1)
        if is_bounded:
            assert day - 9 <= first <= max(0, day - 7)
        else:
            assert first == 0
        times.go_on(DAY_MS)
    await log.close()


async def test_what_is_older_than_retention_goes_though_what_follows_is_new(make_logs: MakeLogs, times: Times) -> None:
    """Messages, a month in which there are none, and one more; also after a start, when the file has to be read."""
    logs = times.logs(make_logs, segment_bytes=10**9)
    log = await new_log(logs)
    owner = await Owner(log, 1).open()
    await publish(owner, 5)
    times.go_on(DAY_MS)
    assert await trim(log, 5) == 0
    times.go_on(29 * DAY_MS)
    assert await trim(log, 5) == 0, "the last message that is covered stays"
    await publish(owner, 1)
    assert log.base_indexes == [0, 5]
    assert await log.may_trim_to(5, WEEK) == 0, "the new message is not covered"
    assert await log.may_trim_to(6, WEEK) == 5
    await log.close()
    log = await logs.open(INCARNATION, 6)
    assert await trim(log, 6) == 5
    await log.close()


@pytest.mark.parametrize("is_young", [True, False])
async def test_a_segment_stays_as_long_as_one_message_of_it_may(
    make_logs: MakeLogs, times: Times, is_young: bool
) -> None:
    log = await new_log(times.logs(make_logs, segment_bytes=10**9))
    owner = await Owner(log, 1).open()
    await publish(owner, 5)
    times.go_on(4 * DAY_MS)
    await publish(owner, 1)
    assert await trim(log, 6) == 0
    times.go_on(6 * DAY_MS)
    await publish(owner, 1)
    assert log.base_indexes == [0, 6]
    times.go_on(DAY_MS + (0 if is_young else 1))
    assert await trim(log, 7) == (0 if is_young else 6)
    await log.close()


async def test_a_segment_with_no_message_is_not_left(make_logs: MakeLogs, times: Times) -> None:
    """However many control records come: retention itself writes them before it drops something."""
    log = await new_log(times.logs(make_logs, segment_bytes=10**9))
    owner = await Owner(log, 1).open()
    await publish(owner, 1)
    for i in range(5):
        times.go_on(30 * DAY_MS)
        assert await trim(log, 1) == 0
        owner.append_control(i + 1)
        await owner.until_stored(2 + i)
    assert log.base_indexes == [0, 1]
    await log.close()
