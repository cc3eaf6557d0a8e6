"""The scrub finds each damaged place once, says so once, and disturbs nobody."""

import asyncio
import errno
import logging
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.limits import Retention
from seqdedupe.log.contract import DamageFound
from seqdedupe.log.embedded import inspection
from seqdedupe.log.embedded.inspection import Damage, inspect_part
from seqdedupe.log.embedded.log import EmbeddedLog
from seqdedupe.log.embedded.logs import FILE_BYTES, PASS_SECONDS, EmbeddedLogs, Scrub, topic_of
from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.log.batches import TOPIC
from tests.log.conformance import Owner
from tests.log.test_damage import INCARNATION, put, small_file
from tests.log.test_past_damage import FLIP, fields_of, flipped, read_past

FAST = 10**9
SEGMENT_BYTES = 2_000


@pytest.fixture
async def logs(tmp_path: Path) -> AsyncIterator[EmbeddedLogs]:
    made = EmbeddedLogs(tmp_path / "logs", clock_ms=lambda: 5_000, fatal=pytest.fail, segment_bytes=SEGMENT_BYTES)
    yield made
    await made.close()


class Sleeps:
    """What the scrub waits with: no time passes, but it is counted."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.seconds = 0.0
        self.calls: list[float] = []
        self._then = then

    async def __call__(self, seconds: float) -> None:
        self.seconds += seconds
        self.calls.append(seconds)
        self._then()
        await asyncio.sleep(0)


def make_scrub(*open_logs: EmbeddedLog, bytes_per_second: int = FAST, sleeps: Sleeps | None = None) -> Scrub:
    return Scrub({log.incarnation: log for log in open_logs}, bytes_per_second, topic_of, sleep=sleeps or Sleeps())


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


async def scrubbed(log: EmbeddedLog, passes: int = 1) -> DamageFound:
    scrub = make_scrub(log)
    for _ in range(passes):
        await scrub.run_once()
    await scrub.close()
    return log.damage_found


def put_three(tmp_path: Path, second: bytes | None = None) -> None:
    put(tmp_path, (0, small_file().raw), (13, second or small_file(13).raw), (26, small_file(26).raw))
    (tmp_path / "logs" / str(INCARNATION) / "topic").write_text(TOPIC)


async def test_control_in_logs_that_are_whole_nothing_is_found(
    logs: EmbeddedLogs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_three(tmp_path)
    log = await logs.open(INCARNATION, 39)
    assert await scrubbed(log, 3) == DamageFound(0, 0)
    assert said(caplog) == []
    await log.close()


async def test_a_byte_of_any_field_is_found_once_and_said_once(
    logs: EmbeddedLogs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = small_file(13)
    hit = file.stored[3]
    for name, at in fields_of(hit).items():
        caplog.clear()
        put_three(tmp_path, flipped(file.raw, at))
        log = await logs.open(INCARNATION, 39)
        assert await scrubbed(log, 2) == DamageFound(1, hit.rows), name
        [line] = said(caplog)
        for part in (
            TOPIC,
            f"byte {hit.start} of ",
            f"{13:020d}.log",
            f"indexes {hit.base_index} to {hit.base_index + hit.rows - 1} ",
            f"IDs {INCARNATION}:{hit.base_index} to {INCARNATION}:{hit.base_index + hit.rows - 1}",
            f"seqdedupe doctor {tmp_path}",
            "skip_damaged",
        ):
            assert part in line, name
        await log.close()


async def test_a_scrub_that_does_not_look_finds_nothing(
    logs: EmbeddedLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: with the check of payloads taken out, a payload's damage is not found."""
    file = small_file(13)
    put_three(tmp_path, flipped(file.raw, file.stored[3].end - 1))
    log = await logs.open(INCARNATION, 39)
    with monkeypatch.context() as patch:
        # The module that is in use: tests of the formats load another one next to it.
        patch.setattr(vars(inspection)["records"], "first_bad_payload", lambda *_: -1)
        assert await scrubbed(log) == DamageFound(0, 0)
    assert await scrubbed(log) == DamageFound(1, file.stored[3].rows)
    await log.close()


async def test_several_places_a_cut_and_a_missing_segment(
    logs: EmbeddedLogs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = small_file(13)
    first, second = file.stored[2], file.stored[4]
    put_three(tmp_path, flipped(file.raw, first.start, second.end - 1))
    log = await logs.open(INCARNATION, 39)
    assert await scrubbed(log, 2) == DamageFound(2, first.rows + second.rows)
    assert len(said(caplog)) == 2
    await log.close()
    # A marker has no messages.
    put_three(tmp_path, flipped(file.raw, 3))
    log = await logs.open(INCARNATION, 39)
    assert await scrubbed(log) == DamageFound(1, 0)
    assert "No message is missing" in said(caplog)[-1]
    await log.close()
    for cut in (file.stored[-1].start, file.stored[-1].start + 10):
        put_three(tmp_path, file.raw[:cut])
        log = await logs.open(INCARNATION, 39)
        assert await scrubbed(log, 2) == DamageFound(1, file.stored[-1].rows)
        await log.close()
    put_three(tmp_path)
    log = await logs.open(INCARNATION, 39)
    path = tmp_path / "logs" / str(INCARNATION) / f"{13:020d}.log"
    path.rename(path.with_suffix(".away"))
    assert await scrubbed(log, 2) == DamageFound(1, 13)
    await log.close()


async def test_what_is_remembered_holds_no_records_and_is_bounded(
    logs: EmbeddedLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the inspection itself has the records, which hold all that was read with them."""
    file = small_file(13)
    hit = [file.stored[2], file.stored[4]]
    put_three(tmp_path, flipped(file.raw, *(record.end - 1 for record in hit)))
    log = await logs.open(INCARNATION, 39)
    part = log.durable_part(13)
    assert part is not None
    found = [item for item in inspect_part(part, os.pread) if isinstance(item, Damage)]
    assert [item.record is None for item in found] == [False, False]
    assert await scrubbed(log) == DamageFound(2, sum(record.rows for record in hit))
    assert [item.record for item in log._damage.values()] == [None, None]
    await log.close()
    monkeypatch.setattr("seqdedupe.log.embedded.log.MAX_PLACES", 1)
    log = await logs.open(INCARNATION, 39)
    assert (await scrubbed(log, 2)).places == 1
    # What retention drops makes room.
    await log.trim(26)
    assert log.damage_found == DamageFound(0, 0)
    assert log.add_damage(26, found[0])
    assert not log.add_damage(13, found[1])
    await log.close()


class Disk:
    """Reads of the scrub that fail, or see a flipped byte, this many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, error: int = 0) -> None:
        self.bad = 0
        self.reads = 0
        self._really = os.pread
        self._error = error
        monkeypatch.setattr(os, "pread", self)

    def __call__(self, file: int, size: int, offset: int) -> bytes:
        self.reads += 1
        raw = self._really(file, size, offset)
        if self.bad and offset == 0 and size > 1:
            self.bad -= 1
            if self._error:
                raise OSError(self._error, os.strerror(self._error))
            return raw[:40] + bytes([raw[40] ^ FLIP]) + raw[41:]
        return raw


@pytest.mark.parametrize("error", [0, errno.EIO])
async def test_what_is_wrong_once_is_no_damage(
    logs: EmbeddedLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """With its control: what is wrong each time is."""
    put_three(tmp_path)
    log = await logs.open(INCARNATION, 39)
    with monkeypatch.context() as patch:
        disk = Disk(patch, error=error)
        disk.bad = 1
        assert await scrubbed(log) == DamageFound(0, 0)
        assert disk.bad == 0
        disk.bad = 10**6
        assert (await scrubbed(log)).places == 2
    await log.close()


async def test_a_file_that_cannot_be_opened_now_is_no_damage(
    logs: EmbeddedLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put_three(tmp_path)
    log = await logs.open(INCARNATION, 39)
    with monkeypatch.context() as patch:
        disk = Disk(patch, error=errno.EMFILE)
        disk.bad = 1
        assert await scrubbed(log) == DamageFound(0, 0)
        assert disk.bad == 0
    assert "skipped a segment" in caplog.text
    assert said(caplog) == []
    await log.close()


async def test_the_end_is_left_alone_until_it_was_written_again(
    logs: EmbeddedLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_three(tmp_path)
    log = await logs.open(INCARNATION, 39)
    dropped = set[str]()
    really = os.posix_fadvise

    def posix_fadvise(file: int, offset: int, size: int, advice: int) -> None:
        dropped.add(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        really(file, offset, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", posix_fadvise)
    await scrubbed(log)
    assert dropped == {f"{base:020d}.log" for base in (0, 13)}
    await Owner(log, 2).open()
    await scrubbed(log)
    assert dropped == {f"{base:020d}.log" for base in (0, 13, 26)}
    await log.close()


async def written(logs: EmbeddedLogs, count: int, payload_bytes: int = 300) -> tuple[EmbeddedLog, Owner]:
    await logs.create(INCARNATION, TOPIC, bytes(range(16)))
    log = await logs.open(INCARNATION, 0)
    owner = await Owner(log, 1).open()
    for i in range(count):
        owner.append(i, 1, payload_bytes)
        await owner.until_stored(i + 1)
    return log, owner


async def scrub_and_append(log: EmbeddedLog, owner: Owner, appended: int, passes: int) -> int:
    """Appends whenever a scrub waits; returns how many messages there are then, all stored."""

    def append() -> None:
        nonlocal appended
        owner.append(appended, 1, 300)
        appended += 1

    scrub = make_scrub(log, sleeps=Sleeps(append))
    for _ in range(passes):
        await scrub.run_once()
    await scrub.close()
    await owner.until_stored(appended)
    return appended


async def test_appends_go_on_meanwhile(logs: EmbeddedLogs) -> None:
    log, owner = await written(logs, 20)
    assert await scrub_and_append(log, owner, 20, passes=5) > 50
    assert log.damage_found == DamageFound(0, 0)
    await log.close()


async def test_damage_in_a_log_that_is_written_to(logs: EmbeddedLogs, caplog: pytest.LogCaptureFixture) -> None:
    """In the file that is appended to, where the line says what the next start will do, and in one before."""
    log, owner = await written(logs, 20)
    paths = [Path(log.place) / f"{base:020d}.log" for base in log.base_indexes]
    places = {9: paths[1], 19: paths[-1]}
    for index, path in places.items():
        with path.open("r+b") as file:
            file.seek(path.read_bytes().index(bytes([index]) * 300))
            file.write(b"\xff")
    await scrub_and_append(log, owner, 20, passes=3)
    assert log.damage_found == DamageFound(2, 2)
    lines = said(caplog)
    assert len(lines) == 2
    assert sorted(index for index in places for line in lines if f"indexes {index} to {index} " in line) == [9, 19]
    await log.close()


async def test_the_last_file_is_said_to_be_that(logs: EmbeddedLogs, caplog: pytest.LogCaptureFixture) -> None:
    log, _ = await written(logs, 20)
    for base in (log.base_indexes[0], log.base_indexes[-1]):
        path = Path(log.place) / f"{base:020d}.log"
        path.write_bytes(flipped(path.read_bytes(), path.stat().st_size - 1))
        caplog.clear()
        await scrubbed(log)
        [line] = said(caplog)
        assert ("the next start" in line) == (base > 0)
    await log.close()


async def test_a_defect_in_one_segment_keeps_none_from_being_looked_at(
    logs: EmbeddedLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = small_file(13)
    put_three(tmp_path, flipped(file.raw, file.stored[3].start))
    log = await logs.open(INCARNATION, 39)
    really = log.durable_part

    def durable_part(base_index: int) -> Any:
        if base_index != 13:
            raise ValueError("a defect")
        return really(base_index)

    monkeypatch.setattr(log, "durable_part", durable_part)
    assert await scrubbed(log) == DamageFound(1, file.stored[3].rows)
    assert len([line for line in said(caplog) if "the scrub has failed" in line]) == 2
    await log.close()
    await log.close()


async def test_a_segment_that_retention_drops_meanwhile_is_no_damage(
    logs: EmbeddedLogs, caplog: pytest.LogCaptureFixture
) -> None:
    """While it is read, and between the two looks; what was found in one that is dropped later counts no more."""
    log, _ = await written(logs, 40)
    bases = log.base_indexes
    assert len(bases) > 5
    trimmed = asyncio.Event()

    def drop() -> None:
        if not trimmed.is_set():
            trimmed.set()
            (Path(log.place) / f"{bases[0]:020d}.log").unlink()
            log._reader.leaving = log._reader.segments[0]

    scrub = make_scrub(log, sleeps=Sleeps(drop))
    await scrub.run_once()
    assert log.damage_found == DamageFound(0, 0)
    # The control: it is missing, and nobody has dropped it.
    log._reader.leaving = None
    await scrub.run_once()
    assert log.damage_found == DamageFound(1, bases[1] - bases[0])
    assert len(said(caplog)) == 1
    first = await log.may_trim_to(bases[2] + 1, Retention(size_bytes=0))
    assert first == bases[2]
    await log.trim(first)
    assert log.damage_found == DamageFound(0, 0)
    await scrub.run_once()
    assert log.damage_found == DamageFound(0, 0)
    await scrub.close()
    await log.close()


async def test_a_log_that_is_closed_meanwhile_is_left_alone(logs: EmbeddedLogs, tmp_path: Path) -> None:
    log, _ = await written(logs, 20)
    closing: list[asyncio.Task[None]] = []

    def close() -> None:
        if not closing:
            closing.append(asyncio.ensure_future(_delete()))

    async def _delete() -> None:
        await log.close()
        await logs.delete(INCARNATION)

    scrub = make_scrub(log, sleeps=Sleeps(close))
    await scrub.run_once()
    await closing[0]
    await scrub.run_once()
    assert log.damage_found == DamageFound(0, 0)
    await scrub.close()


async def test_the_rate_is_kept(logs: EmbeddedLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock that it is given: each byte that was read has been waited for before the next are asked for."""
    log, _ = await written(logs, 40)
    rate, size = 1_000, log.size_bytes
    disk = Disk(monkeypatch)
    sleeps = Sleeps()
    scrub = make_scrub(log, bytes_per_second=rate, sleeps=sleeps)
    await scrub.run_once()
    assert disk.reads >= len(log.base_indexes)
    files = len(log.base_indexes)
    assert sleeps.seconds == pytest.approx((size + files * FILE_BYTES) / rate)
    # A segment at a time here, as they are small: never more at once than one of them.
    assert max(sleeps.calls) <= (1.2 * (SEGMENT_BYTES + 500) + FILE_BYTES) / rate
    await scrub.close()
    await log.close()


async def test_passes_are_a_day_apart_and_closing_ends_at_once(logs: EmbeddedLogs) -> None:
    log, _ = await written(logs, 5)
    slept = asyncio.Event()

    class Forever(Sleeps):
        async def __call__(self, seconds: float) -> None:
            await super().__call__(seconds)
            if seconds > PASS_SECONDS / 2:
                slept.set()
                await asyncio.Event().wait()

    sleeps = Forever()
    scrub = make_scrub(log, sleeps=sleeps)
    scrub.begin()
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        await slept.wait()
        assert sleeps.seconds == pytest.approx(PASS_SECONDS)
        await scrub.close()
    await log.close()


async def test_it_ends_at_once_in_the_midst_of_a_segment(logs: EmbeddedLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    log, _ = await written(logs, 20)
    logs.scrub(1)  # it would take hours
    disk = Disk(monkeypatch)
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while not disk.reads:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await log.close()
        await logs.close()
    assert not [thread for thread in threading.enumerate() if "scrub" in thread.name or "inspection" in thread.name]


async def test_it_reads_in_a_thread_and_leaves_nothing_in_memory(
    logs: EmbeddedLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _ = await written(logs, 40)
    path = Path(log.place) / f"{0:020d}.log"
    threads = set[str]()
    really = os.pread

    def pread(file: int, size: int, offset: int) -> bytes:
        threads.add(threading.current_thread().name)
        return really(file, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    await scrubbed(log)
    assert threads
    assert not [name for name in threads if not name.startswith(("seqdedupe-scrub", "seqdedupe-inspection"))]
    is_in_memory = first_page_is_in_memory(path)
    # The control: who reads it otherwise leaves it there.
    path.read_bytes()
    if not first_page_is_in_memory(path):
        pytest.skip("the file system cannot tell")
    assert not is_in_memory
    await log.close()


def first_page_is_in_memory(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1
        except OSError:
            return False


def harm(chance: random.Random, raw: bytes) -> bytes:
    """Some of a file's bytes are others, up to a sector of them, or it is cut."""
    changed = bytearray(raw)
    at, size = chance.randrange(len(raw)), chance.choice((1, 1, 8, 100, 512))
    match chance.choice(("noise", "zeros", "elsewhere", "cut")):
        case "noise":
            changed[at : at + size] = chance.randbytes(len(changed[at : at + size]))
        case "zeros":
            changed[at : at + size] = bytes(len(changed[at : at + size]))
        case "elsewhere":
            other = chance.randrange(len(raw))
            part = raw[other : other + size]
            changed[at : at + len(part)] = part[: len(changed) - at]
        case _:
            del changed[at:]
    return bytes(changed)


@pytest.mark.parametrize("seed", range(40))
async def test_scrub_and_readers_agree_whatever_is_damaged(logs: EmbeddedLogs, tmp_path: Path, seed: int) -> None:
    """Readers get each message whose record was not touched, and learn of just those that the scrub counts."""
    chance = random.Random(seed)
    files = [small_file(0), small_file(13)]
    for file in files:
        for _ in range(chance.randrange(5)):
            file.add(len(file.raw), chance.randint(1, 3), chance.randrange(300))
        files[1] = files[1] if file is files[1] else small_file(file.next_index)
    end = files[1].next_index
    harmed = []
    for file in files:
        raw = file.raw
        for _ in range(chance.randint(0, 3)):
            raw = harm(chance, raw)
        harmed.append(raw)
    last = small_file(end)
    put(tmp_path, (0, harmed[0]), (files[1].base_index, harmed[1]), (end, last.raw))
    log = await logs.open(INCARNATION, last.next_index)
    ids, skipped = await read_past(log, 0, last.next_index)
    missing = [i for part in skipped for i in part]
    assert sorted(ids + missing) == list(range(last.next_index))
    touched = [
        i
        for file, raw in zip(files, harmed, strict=True)
        for record in file.stored
        if raw[record.start : record.end] != file.raw[record.start : record.end]
        for i in range(record.base_index, record.base_index + record.rows)
    ]
    assert missing == touched
    found = await scrubbed(log)
    assert found.messages == len(missing)
    assert (found.places > 0) == any(raw != file.raw for file, raw in zip(files, harmed, strict=True))
    await log.close()
