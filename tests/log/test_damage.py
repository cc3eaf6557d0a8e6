"""Logs that were damaged, byte by byte: a torn tail is cut and counted, everything else is an error."""

import errno
import logging
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from seqdedupe.batch import Int64s
from seqdedupe.errors import DamagedError, UnavailableError
from seqdedupe.format import headers
from seqdedupe.format.headers import key_of
from seqdedupe.format.journal import SECTOR_BYTES
from seqdedupe.log.embedded.log import EmbeddedLog
from seqdedupe.log.embedded.logs import EmbeddedLogs
from tests.log.batches import SECRET, encoded_batch
from tests.log.conformance import Owner, parsed, replayed, what

INCARNATION = 77
PARTS = 4
"""Every byte is damaged in one of this number of tests."""
MARKER_BYTES = 127
TOKEN = b"t" * 16
KEY = key_of(SECRET)

PAYLOAD_CHECKSUM = range(81, 85)
"""Where it stands in a record. Opening does not look at a batch's below the synced offset."""


class Stored(NamedTuple):
    """A record in a file that a test made."""

    start: int
    payload_start: int
    end: int
    synced: int
    base_index: int
    rows: int

    def is_seen_at_start(self, at: int) -> bool:
        """Whether opening looks at this byte of the file wherever it stands."""
        return at < self.payload_start and not (self.rows and at - self.start in PAYLOAD_CHECKSUM)


@dataclass
class File:
    """A segment file in the making."""

    base_index: int
    raw: bytes = b""
    stored: tuple[Stored, ...] = ()
    key: Int64s = field(default_factory=lambda: KEY)
    token: bytes = TOKEN

    @property
    def next_index(self) -> int:
        return self.stored[-1].base_index + self.stored[-1].rows if self.stored else self.base_index

    def _place(self, synced: int) -> dict[str, Any]:
        return {
            "incarnation": INCARNATION,
            "file_offset": len(self.raw),
            "publish_time_ms": 1000 + len(self.stored),
            "synced_offset": synced,
            "key": self.key,
        }

    def add(self, synced: int, rows: int, payload_bytes: int = 5) -> None:
        batch, rows, column_bytes = encoded_batch(self.next_index, rows, payload_bytes)
        header = headers.header(
            batch,
            headers.BATCH_TAG,
            rows=rows,
            column_bytes=column_bytes,
            base_index=self.next_index,
            ownership=headers.ownership_of(self.token),
            **self._place(synced),
        )
        self._add(header + batch, synced, rows, len(header) + column_bytes)

    def add_marker(self, synced: int, term: int) -> None:
        record = headers.marker_record(term, self.token, next_index=self.next_index, **self._place(synced))
        self._add(record, synced, 0, len(record))

    def _add(self, record: bytes, synced: int, rows: int, payload_at: int) -> None:
        start = len(self.raw)
        added = Stored(start, start + payload_at, start + len(record), synced, self.next_index, rows)
        self.raw += record
        self.stored += (added,)


def small_file(base_index: int = 0) -> File:
    """A marker and six batches: a group of one, one of two, one of one, one of two. The last one may be torn."""
    file = File(base_index)
    file.add_marker(0, 1)
    for group in ((3,), (1, 2), (2,), (1, 4)):
        synced = len(file.raw)
        for rows in group:
            file.add(synced, rows)
    return file


@pytest.fixture
async def logs(tmp_path: Path) -> AsyncIterator[EmbeddedLogs]:
    def fatal(reason: str) -> None:
        raise AssertionError(reason)

    made = EmbeddedLogs(tmp_path / "logs", clock_ms=lambda: 5_000, fatal=fatal)
    yield made
    await made.close()


def put(tmp_path: Path, *files: tuple[int, bytes]) -> None:
    """Writes the segment files of the log again."""
    folder = tmp_path / "logs" / str(INCARNATION)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "secret").write_bytes(SECRET)
    for base_index, raw in files:
        (folder / f"{base_index:020d}.log").write_bytes(raw)


def on_disk(tmp_path: Path, base_index: int = 0) -> bytes:
    return (tmp_path / "logs" / str(INCARNATION) / f"{base_index:020d}.log").read_bytes()


def is_cut_and_marked(tmp_path: Path, kept: bytes) -> bool:
    """Whether the file is what was kept, and after it the marker of who has opened the log for writing."""
    raw = on_disk(tmp_path)
    return raw.startswith(kept) and len(raw) == len(kept) + MARKER_BYTES


async def read_until_error(log: EmbeddedLog, end: int) -> tuple[list[int], str]:
    """The sequence IDs that reading in small steps gives, and the reason why it stopped."""
    at, ids = log.first_index, list[int]()
    try:
        while at < end:
            for record in parsed(await log.read(at, end, 1)):
                assert record.base_index == at
                ids += record.batch.sequence_ids
                at += record.rows
    except DamagedError as e:
        return ids, e.reason
    return ids, ""


async def test_control_the_undamaged_log_opens_whole(logs: EmbeddedLogs, tmp_path: Path) -> None:
    file = small_file()
    put(tmp_path, (0, file.raw))
    log = await logs.open(INCARNATION, file.next_index)
    assert (log.cut_bytes, log.cut_records) == (0, 0)
    assert await read_until_error(log, file.next_index) == (list(range(13)), "")
    await log.close()
    assert on_disk(tmp_path) == file.raw


@pytest.mark.parametrize("part", range(PARTS))
async def test_truncated_at_every_byte(logs: EmbeddedLogs, tmp_path: Path, part: int) -> None:
    file = small_file()
    for size in range(part, len(file.raw), PARTS):
        put(tmp_path, (0, file.raw[:size]))
        whole = [r for r in file.stored if r.end <= size]
        kept = whole[-1].end if whole else 0
        end = whole[-1].base_index + whole[-1].rows if whole else 0
        with pytest.raises(DamagedError) as missing:
            await logs.open(INCARNATION, end + 1)
        assert missing.value.reason == "LOG_DAMAGED"
        assert on_disk(tmp_path) == file.raw[:size]
        log = await logs.open(INCARNATION, end)
        assert log.cut_bytes == size - kept
        assert log.cut_records == (1 if size - kept >= headers.HEADER_BYTES else 0), size
        assert [what(r)[1:] for r in await replayed(log) if r.rows] == [(r.base_index, r.rows) for r in whole if r.rows]
        assert await read_until_error(log, end) == (list(range(end)), "")
        await Owner(log, 2).open()
        await log.close()
        assert is_cut_and_marked(tmp_path, file.raw[:kept])


@pytest.mark.parametrize("flip", [0x01, 0xFF])
async def test_every_byte_flipped(logs: EmbeddedLogs, tmp_path: Path, flip: int) -> None:
    file = small_file()
    seen = set()
    for at in range(len(file.raw)):
        raw = bytearray(file.raw)
        raw[at] ^= flip
        put(tmp_path, (0, bytes(raw)))
        hit = next(r for r in file.stored if r.start <= at < r.end)
        synced = max(r.synced for r in file.stored if r is not hit)
        if hit.start >= synced or hit.is_seen_at_start(at):
            seen.add("refused")
            with pytest.raises(DamagedError) as refused:
                await logs.open(INCARNATION, 0)
            assert refused.value.reason == "LOG_DAMAGED"
            assert int(refused.value.numbers["offset"]) == hit.start
            assert on_disk(tmp_path) == raw
        else:
            try:
                log = await logs.open(INCARNATION, 0)
            except DamagedError:
                # The tags and lengths among the payloads are seen too.
                seen.add("refused payload")
                continue
            seen.add("read")
            assert log.cut_bytes == 0
            assert await read_until_error(log, 13) == (list(range(hit.base_index)), "LOG_DAMAGED")
            await log.close()
    assert seen == {"refused", "refused payload", "read"}


async def test_a_lost_sector_is_torn_and_a_changed_bit_in_it_is_damage(logs: EmbeddedLogs, tmp_path: Path) -> None:
    """In the last group, which no later record calls synced. The rest of the group is cut off with the torn record."""
    file = small_file()
    synced = len(file.raw)
    for payload_bytes in (700, 5, 600, 700):
        file.add(synced, 1, payload_bytes)
    seen = set()
    for sector in range(synced // SECTOR_BYTES * SECTOR_BYTES, len(file.raw), SECTOR_BYTES):
        start, stop = max(sector, synced), min(sector + SECTOR_BYTES, len(file.raw))
        hit = next(r for r in file.stored if start < r.end)
        put(tmp_path, (0, file.raw[:start] + bytes(stop - start) + file.raw[stop:]))
        log = await logs.open(INCARNATION, hit.base_index)
        assert log.cut_bytes == len(file.raw) - hit.start
        assert await read_until_error(log, hit.base_index) == (list(range(hit.base_index)), "")
        await Owner(log, 2).open()
        await log.close()
        assert is_cut_and_marked(tmp_path, file.raw[: hit.start])
        for at in (start, stop - 1):
            raw = bytearray(file.raw)
            raw[at] ^= 0x10
            put(tmp_path, (0, bytes(raw)))
            with pytest.raises(DamagedError, match="no crash leaves"):
                await logs.open(INCARNATION, hit.base_index)
            assert on_disk(tmp_path) == raw
        seen.add(hit.start)
    assert len(seen) > 2


@pytest.mark.parametrize("part", range(PARTS))
async def test_every_byte_of_an_earlier_segment_flipped(logs: EmbeddedLogs, tmp_path: Path, part: int) -> None:
    first, second, third = small_file(), small_file(13), small_file(26)
    for at in range(part, len(second.raw), PARTS):
        raw = bytearray(second.raw)
        raw[at] ^= 0x10
        put(tmp_path, (0, first.raw), (13, bytes(raw)), (26, third.raw))
        log = await logs.open(INCARNATION, 39)
        hit = next(r for r in second.stored if r.start <= at < r.end)
        if hit.is_seen_at_start(at):
            with pytest.raises(DamagedError):
                await replayed(log, 20)
        # A marker has no messages, and the indexes prove that none is missing.
        expected = (list(range(hit.base_index)), "LOG_DAMAGED") if hit.rows else (list(range(39)), "")
        assert await read_until_error(log, 39) == expected
        assert [r.base_index for r in await replayed(log, 26) if r.rows] == [
            r.base_index for r in third.stored if r.rows
        ]
        await log.close()


@pytest.mark.parametrize("part", range(PARTS))
async def test_an_earlier_segment_truncated_at_every_byte(logs: EmbeddedLogs, tmp_path: Path, part: int) -> None:
    first, second = small_file(), small_file(13)
    for size in range(part, len(first.raw), PARTS):
        put(tmp_path, (0, first.raw[:size]), (13, second.raw))
        log = await logs.open(INCARNATION, 26)
        left = sum(r.rows for r in first.stored if r.end <= size)
        assert await read_until_error(log, 26) == (list(range(left)), "LOG_DAMAGED")
        with pytest.raises(DamagedError):
            await replayed(log, 0)
        assert len(await replayed(log, 14)) == 6
        await log.close()


async def test_a_missing_segment_is_an_error_for_who_reads_across(logs: EmbeddedLogs, tmp_path: Path) -> None:
    first, second, third = small_file(), small_file(13), small_file(26)
    put(tmp_path, (0, first.raw), (26, third.raw))
    log = await logs.open(INCARNATION, 39)
    assert await read_until_error(log, 39) == (list(range(13)), "LOG_DAMAGED")
    with pytest.raises(DamagedError):
        await log.read(15, 39, 1_000_000)
    with pytest.raises(DamagedError):
        await replayed(log, 0)
    await log.close()
    # The last and the first one missing is noticed when the log is opened.
    put(tmp_path, (0, first.raw), (13, second.raw))
    with pytest.raises(DamagedError, match=r"ends with index 25"):
        await logs.open(INCARNATION, 27)
    put(tmp_path, (26, third.raw))
    with pytest.raises(DamagedError, match=r"begins with index 26"):
        await logs.open(INCARNATION, 26)
    await (await logs.open(INCARNATION, 27)).close()
    put(tmp_path)
    with pytest.raises(DamagedError, match=r"no segment files"):
        await logs.open(INCARNATION, 0)


async def test_an_empty_last_segment_needs_the_whole_one_before(logs: EmbeddedLogs, tmp_path: Path) -> None:
    file = small_file()
    put(tmp_path, (0, file.raw), (13, b""))
    log = await logs.open(INCARNATION, 13)
    assert (await log.read(12, 13, 1)).raw
    owner = await Owner(log, 2).open()
    owner.append(13, 1)
    await owner.until_stored(1)
    assert [r.publish_time_ms for r in await replayed(log, 13)] == [5_000]
    await log.close()
    for size in (0, 1, len(file.raw) // 2, len(file.raw) - 1):
        put(tmp_path, (0, file.raw[:size]), (13, b""))
        with pytest.raises(DamagedError):
            await logs.open(INCARNATION, 0)
        put(tmp_path, (0, file.raw[:size]), (13, b"\x0a torn first record"))
        with pytest.raises(DamagedError):
            await logs.open(INCARNATION, 0)
    put(tmp_path, (0, file.raw), (13, b"\x0a torn first record"))
    log = await logs.open(INCARNATION, 13)
    assert log.cut_bytes == 19
    await log.close()


async def test_a_newer_format_is_refused(logs: EmbeddedLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = small_file()
    end = len(file.raw)
    with monkeypatch.context() as patched:
        patched.setattr(headers, "FORMAT_VERSION", 3)
        file.add(end, 3)
    torn = bytearray(file.raw)
    torn[file.stored[-2].start + 20] ^= 1
    for raw in (file.raw, bytes(torn)):
        put(tmp_path, (0, raw))
        with pytest.raises(DamagedError) as refused:
            await logs.open(INCARNATION, 0)
        assert refused.value.reason == "NEWER_FORMAT"
        assert on_disk(tmp_path) == raw


async def test_what_a_payload_says_is_no_header(logs: EmbeddedLogs, tmp_path: Path) -> None:
    """A copy of a record within the torn part names another place, so it does not say that anything was synced."""
    file = small_file()
    last = file.stored[-2]
    following = (last.end // SECTOR_BYTES + 1) * SECTOR_BYTES
    torn = file.raw[: last.start] + bytes(following - last.start)
    liar = File(0, bytes(200))
    liar.add(199, 1)
    put(tmp_path, (0, torn + liar.raw[200:]))
    log = await logs.open(INCARNATION, last.base_index)
    assert log.cut_bytes == following - last.start + len(liar.raw) - 200
    await log.close()
    # The control: naming the place where it stands, it does.
    honest = File(last.base_index, bytes(following))
    honest.add(last.end, 1)
    put(tmp_path, (0, torn + honest.raw[following:]))
    with pytest.raises(DamagedError, match="was synced up to"):
        await logs.open(INCARNATION, last.base_index)


async def test_a_record_out_of_sequence_is_damage(logs: EmbeddedLogs, tmp_path: Path) -> None:
    file = small_file()
    jumped = File(20, file.raw)
    jumped.add(0, 1)
    put(tmp_path, (0, jumped.raw))
    with pytest.raises(DamagedError, match="not the next one"):
        await logs.open(INCARNATION, 0)


async def test_a_cut_is_logged(logs: EmbeddedLogs, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = small_file()
    put(tmp_path, (0, file.raw[:-1]))
    with caplog.at_level(logging.WARNING, "seqdedupe.log"):
        for term, is_torn in ((2, True), (3, False)):
            log = await logs.open(INCARNATION, 0)
            await Owner(log, term).open()
            assert ("torn tail" in caplog.text) == is_torn
            await log.close()
            caplog.clear()


async def test_what_is_kept_is_written_again_before_it_is_served(
    logs: EmbeddedLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = small_file()
    put(tmp_path, (0, file.raw[:-1]))
    done = []
    really_write, really_sync, really_add = os.pwrite, os.fsync, os.pwritev

    def write(fd: int, data: bytes, offset: int) -> int:
        done.append(("write", offset, bytes(data)))
        return really_write(fd, data, offset)

    def sync(fd: int) -> None:
        done.append(("sync", 0, b""))
        really_sync(fd)

    def add(fd: int, group: list[bytes], offset: int) -> int:
        done.append(("marker", offset, b""))
        return really_add(fd, group, offset)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "pwritev", add)
    log = await logs.open(INCARNATION, 0)
    assert done == []
    await Owner(log, 2).open()
    kept, synced = file.stored[-2], file.stored[-2].synced
    # The file, then the entries of the folders above it.
    rewritten = [("write", synced, file.raw[synced : kept.end]), *[("sync", 0, b"")] * 4]
    assert done == [*rewritten, ("marker", kept.end, b"")]
    await log.close()


async def test_what_cannot_be_written_again_is_tried_again(
    logs: EmbeddedLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = small_file()
    put(tmp_path, (0, file.raw[:-1]))

    def fail(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "no room")

    log = await logs.open(INCARNATION, 9)
    for call in ("ftruncate", "pwrite", "fsync"):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, fail)
            with pytest.raises(UnavailableError, match="LOG_REFUSED"):
                await Owner(log, 2).open()
            assert await read_until_error(log, 9) == (list(range(9)), "")
            assert on_disk(tmp_path).startswith(file.raw[: file.stored[-2].end])
    await Owner(log, 3).open()
    await log.close()
    assert is_cut_and_marked(tmp_path, file.raw[: file.stored[-2].end])
