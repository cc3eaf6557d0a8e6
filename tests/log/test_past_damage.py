"""Reading past damage: every other record is read, and the indexes of what is missing are exact."""

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from seqdedupe.errors import DamagedError, PositionError, UnavailableError
from seqdedupe.format import headers
from seqdedupe.format.layout import BASE_INDEX
from seqdedupe.log.embedded.inspection import Damage, Intact, inspect
from seqdedupe.log.embedded.log import EmbeddedLog
from seqdedupe.log.embedded.logs import EmbeddedLogs, Scrub
from seqdedupe.log.embedded.segment import LogIdentity, SegmentPoint
from tests.log.conformance import Owner, parsed
from tests.log.test_damage import INCARNATION, KEY, File, Stored, put, small_file

END = 39
HEADER_FIELDS = {
    "tag of the record": 0,
    "length": headers.LENGTH_AT,
    "version": headers.VERSION_AT,
    "incarnation": headers.INCARNATION_AT,
    "file offset": headers.FILE_OFFSET_AT,
    "base index": headers.BASE_INDEX_AT,
    "publish time": headers.PUBLISH_TIME_AT,
    "synced offset": headers.SYNCED_AT,
    "rows": headers.ROWS_AT,
    "column bytes": headers.COLUMN_BYTES_AT,
    "ownership": headers.OWNERSHIP_AT,
    "checksum of the columns": headers.COLUMN_CRC_AT,
    "checksum of the payloads": headers.PAYLOAD_CRC_AT,
    "tag": headers.TAG_AT,
    "tag of the body": headers.BODY_AT,
    "length of the body": headers.BODY_AT + 1,
}
FIELDS = len(HEADER_FIELDS) + 4
FLIP = 0x10


@pytest.fixture
async def logs(tmp_path: Path) -> AsyncIterator[EmbeddedLogs]:
    made = EmbeddedLogs(tmp_path / "logs", clock_ms=lambda: 5_000, fatal=pytest.fail)
    yield made
    await made.close()


def flipped(raw: bytes, *places: int) -> bytes:
    changed = bytearray(raw)
    for at in places:
        changed[at] ^= FLIP
    return bytes(changed)


def fields_of(record: Stored) -> dict[str, int]:
    """A byte of each part of a record, as places in its file."""
    found = {name: record.start + at for name, at in HEADER_FIELDS.items()}
    found["columns, first byte"] = record.start + headers.HEADER_BYTES
    found["columns, last byte"] = record.payload_start - 1
    found["payload offsets"] = record.payload_start
    found["payload"] = record.end - 1
    return found


async def read_past(log: EmbeddedLog, start: int, end: int) -> tuple[list[int], list[range]]:
    """The sequence IDs that can be read, and the indexes that cannot. In these logs an ID is its message's index."""
    at, ids, skipped = start, list[int](), list[range]()
    while at < end:
        try:
            found = parsed(await log.read(at, end, 1))
        except (DamagedError, UnavailableError):
            next_index = await log.next_readable(at)
            assert next_index > at
            skipped.append(range(at, next_index))
            at = next_index
            continue
        for record in found:
            assert record.base_index <= at
            ids += [i for i in record.batch.sequence_ids if i >= at]
            at = record.base_index + record.rows
    return ids, skipped


def others(missing: range, end: int = END) -> list[int]:
    return [i for i in range(end) if i not in missing]


async def test_control_in_a_log_that_is_whole_nothing_is_passed_over(logs: EmbeddedLogs, tmp_path: Path) -> None:
    put(tmp_path, *((base, small_file(base).raw) for base in (0, 13, 26)))
    log = await logs.open(INCARNATION, END)
    assert await read_past(log, 0, END) == (list(range(END)), [])
    assert [await log.next_readable(i) for i in range(END + 1)] == list(range(END + 1))
    with pytest.raises(PositionError):
        await log.next_readable(END + 1)
    await log.close()


async def test_any_field_of_a_record_damaged(logs: EmbeddedLogs, tmp_path: Path) -> None:
    """With its control: who does not ask to get past it does not."""
    files = [small_file(base) for base in (0, 13, 26)]
    hit = files[1].stored[3]
    missing = range(hit.base_index, hit.base_index + hit.rows)
    assert len(missing) == 2
    for name, at in fields_of(hit).items():
        raw = [file.raw for file in files]
        raw[1] = flipped(raw[1], at)
        put(tmp_path, *zip((0, 13, 26), raw, strict=True))
        log = await logs.open(INCARNATION, END)
        with pytest.raises(DamagedError):
            await log.read(missing[0], END, 1)
        assert await read_past(log, 0, END) == (others(missing), [missing]), name
        # A start within and after it, and an end within it.
        assert await read_past(log, missing[1], END) == (list(range(missing.stop, END)), [missing[1:]])
        assert await read_past(log, missing.stop, END) == (list(range(missing.stop, END)), [])
        assert (await log.locate(missing.stop)).message_id.entry_id == missing.stop
        await log.close()


async def test_the_doctor_names_just_that_record(tmp_path: Path) -> None:
    file = small_file()
    hit = file.stored[3]
    for name, at in fields_of(hit).items():
        put(tmp_path, (0, flipped(file.raw, at)), (13, small_file(13).raw))
        found = list(inspect(tmp_path / "logs" / str(INCARNATION), LogIdentity(INCARNATION, KEY)))
        [damage] = [part for part in found if isinstance(part, Damage)]
        where = (hit.start, hit.base_index, hit.base_index + hit.rows)
        assert (damage.offset, damage.first_index, damage.next_index) == where, name
        whole = [base for part in found if isinstance(part, Intact) for base in part.table[:, BASE_INDEX]]
        others_of = [*file.stored[:3], *file.stored[4:], *small_file(13).stored]
        assert whole == [record.base_index for record in others_of], name


async def test_a_version_that_looks_like_an_earlier_one(logs: EmbeddedLogs, tmp_path: Path) -> None:
    """A log that was opened is of this version: it is damage, wherever it stands."""
    file = small_file(13)
    for hit, missing in ((file.stored[0], range(0)), (file.stored[3], range(17, 19))):
        raw = bytearray(file.raw)
        raw[hit.start + headers.VERSION_AT] = 1
        put(tmp_path, (0, small_file().raw), (13, bytes(raw)), (26, small_file(26).raw))
        log = await logs.open(INCARNATION, END)
        assert await read_past(log, 0, END) == (others(missing), [missing] if missing else [])
        scrub = Scrub({INCARNATION: log}, 10**9, lambda folder: None)
        await scrub.run_once()
        await scrub.close()
        assert log.damage_found == (1, len(missing))
        await log.close()


async def test_a_start_after_damage_needs_no_skipping(logs: EmbeddedLogs, tmp_path: Path) -> None:
    files = [small_file(base) for base in (0, 13, 26)]
    put(tmp_path, (0, files[0].raw), (13, flipped(files[1].raw, files[1].stored[3].start)), (26, files[2].raw))
    for index in range(files[1].stored[4].base_index, 26):
        log = await logs.open(INCARNATION, END)
        first = parsed(await log.read(index, END, 1))[0]
        assert first.base_index <= index < first.base_index + first.rows
        assert (await log.locate(index)).message_id.entry_id == index
        await log.close()


@pytest.mark.parametrize("apart", range(FIELDS))
async def test_records_damaged_one_after_the_other(logs: EmbeddedLogs, tmp_path: Path, apart: int) -> None:
    """Each case damages every field of each of the two, and all cases every pair."""
    file, last = small_file(), small_file(13)
    first, second = file.stored[2], file.stored[3]
    missing = range(first.base_index, second.base_index + second.rows)
    others_of_second = [*fields_of(second).items()]
    assert len(others_of_second) == FIELDS
    for place, (name, at) in enumerate(fields_of(first).items()):
        other, beside = others_of_second[(place + apart) % FIELDS]
        put(tmp_path, (0, flipped(file.raw, at, beside)), (13, last.raw))
        log = await logs.open(INCARNATION, 26)
        ids, skipped = await read_past(log, 0, 26)
        assert ids == others(missing, 26), (name, other)
        assert [i for part in skipped for i in part] == list(missing), (name, other)
        await log.close()


async def test_the_end_of_a_segment_and_a_missing_one(logs: EmbeddedLogs, tmp_path: Path) -> None:
    files = [small_file(base) for base in (0, 13, 26)]
    cut = files[1].stored[-2]
    for size in (cut.start, cut.start + 10, cut.start + headers.HEADER_BYTES, cut.end - 1):
        put(tmp_path, (0, files[0].raw), (13, files[1].raw[:size]), (26, files[2].raw))
        log = await logs.open(INCARNATION, END)
        missing = range(cut.base_index, 26)
        ids, skipped = await read_past(log, 0, END)
        assert ids == others(missing), size
        assert [i for part in skipped for i in part] == list(missing)
        assert await read_past(log, 24, END) == (list(range(26, END)), [range(24, 26)])
        await log.close()
    put(tmp_path, (0, files[0].raw), (26, files[2].raw))
    log = await logs.open(INCARNATION, END)
    assert await read_past(log, 0, END) == (others(range(13, 26)), [range(13, 26)])
    assert await read_past(log, 20, END) == (list(range(26, END)), [range(20, 26)])
    await log.close()
    # One that goes missing while the log is open.
    put(tmp_path, *((base, file.raw) for base, file in zip((0, 13, 26), files, strict=True)))
    log = await logs.open(INCARNATION, END)
    (tmp_path / "logs" / str(INCARNATION) / f"{13:020d}.log").unlink()
    assert await read_past(log, 0, END) == (others(range(13, 26)), [range(13, 26)])
    await log.close()


async def test_a_payload_that_looks_like_the_next_record_is_not_taken_for_it(
    logs: EmbeddedLogs, tmp_path: Path
) -> None:
    """With its control: what the log itself wrote there is."""
    for is_ours in (False, True):
        file = small_file()
        start = len(file.raw)
        file.add(start, 1, 600)
        file.add(start, 2)
        posing = File(start // start * 20, bytes(start + 300), key=file.key if is_ours else small_file().key + 1)
        posing.add(start, 3)
        raw = bytearray(file.raw)
        raw[start] ^= FLIP
        raw[start + 300 : len(posing.raw)] = posing.raw[start + 300 :]
        put(tmp_path, (0, bytes(raw)), (file.next_index, small_file(file.next_index).raw))
        log = await logs.open(INCARNATION, file.next_index + 13)
        assert await log.next_readable(13) == (20 if is_ours else 14)
        await log.close()


async def test_the_middle_of_a_log_that_is_written_to(logs: EmbeddedLogs, tmp_path: Path) -> None:
    put(tmp_path, (0, b""))
    log = await logs.open(INCARNATION, 0)
    owner = await Owner(log, 1).open()
    for i in range(20):
        owner.append(i, 1, 100)
    await owner.until_stored(20)
    path = tmp_path / "logs" / str(INCARNATION) / f"{0:020d}.log"
    raw = path.read_bytes()
    at = raw.index(bytes([7]) * 100)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff")
    assert await read_past(log, 0, 20) == (others(range(7, 8), 20), [range(7, 8)])
    owner.append(20, 1, 100)
    await owner.until_stored(21)
    assert await read_past(log, 5, 21) == ([5, 6, *range(8, 21)], [range(7, 8)])
    # Up to the end.
    with path.open("r+b") as file:
        file.seek(len(raw) + 3)
        file.write(b"\xff\xff\xff")
    assert await read_past(log, 15, 21) == (list(range(15, 20)), [range(20, 21)])
    await log.close()


async def test_questions_where_things_are(logs: EmbeddedLogs, tmp_path: Path) -> None:
    """Record i of a file was published at 1000 + i; nobody is led past what is damaged without being told."""
    files = [small_file(base) for base in (0, 13, 26)]
    hit = files[1].stored[3]
    after = hit.base_index + hit.rows
    put(tmp_path, (0, files[0].raw), (13, flipped(files[1].raw, hit.start)), (26, files[2].raw))
    log = await logs.open(INCARNATION, END)
    whole = {i: 13 + sum(r.rows for r in files[1].stored[:i]) for i in range(7)}
    # The files were made at the same times: only those of the middle one are looked at.
    log._reader.segments[:] = log._reader.segments[1:2]
    log._reader.next_index = 26
    found = {i: await log.locate_time(1000 + i, END) for i in range(7)}
    assert found == whole | {4: hit.base_index}
    for size_bytes in (1, 100, 1000):
        for index in range(13, 26):
            stop = await log.locate_bytes(index, size_bytes, 26)
            assert index < stop <= 26
    assert await log.locate_bytes(hit.base_index, 1, 26) == after + files[1].stored[4].rows
    with pytest.raises(DamagedError):
        await log.locate(hit.base_index)
    await log.close()


async def test_a_sector_that_the_disk_cannot_read(
    logs: EmbeddedLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For who does not skip it is no damage: it can be tried again. One that fails once is not passed over."""
    file = small_file()
    for _ in range(8):
        file.add(len(file.raw), 1, 50)
    end = file.next_index
    put(tmp_path, (0, file.raw), (end, small_file(end).raw))
    log = await logs.open(INCARNATION, end)
    sector = range(1024, 1536)
    hit = next(record for record in file.stored if record.start in sector)
    really, failures = os.pread, [10_000]

    def pread(fd: int, size: int, offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(f"{0:020d}.log") and failures[0]:
            if offset in sector:
                failures[0] -= 1
                raise OSError(errno.EIO, "Input/output error")
            if offset < sector.start:
                # As the system does: what comes before is given.
                size = min(size, sector.start - offset)
        return really(fd, size, offset)

    def preadv(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "it would have to wait for the disk")

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr("seqdedupe.log.embedded.segment.Segment.read.__defaults__", (pread,))
    log._reader.segments[0].points.append(SegmentPoint(hit.base_index, hit.start, 0))
    with pytest.raises(UnavailableError):
        await log.read(hit.base_index + 1, end, 1)
    ids, skipped = await read_past(log, 0, end + 13)
    touched = [r for r in file.stored if r.start < sector.stop and sector.start < r.end]
    missing = [i for r in touched for i in range(r.base_index, r.base_index + r.rows)]
    assert [i for part in skipped for i in part] == missing
    assert ids == [i for i in range(end + 13) if i not in missing]
    failures[0] = 1
    with pytest.raises(UnavailableError):
        await log.next_readable(hit.base_index + 1)
    assert await log.next_readable(hit.base_index + 1) == hit.base_index + 1
    assert failures[0] == 0
    await log.close()
