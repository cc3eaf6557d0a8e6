"""One segment file: read and check its records, and keep a sparse index of their offsets."""

import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from seqdedupe.batch import Int64s
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.format import records
from seqdedupe.format.headers import HEADER_BYTES, RECORDS_TAG, VERSION_AT, VERSION_TAG
from seqdedupe.format.layout import (
    BASE_INDEX,
    OWNERSHIP,
    PUBLISH_TIME_MS,
    RECORD_END,
    RECORD_START,
    ROWS,
    SYNCED_OFFSET,
)
from seqdedupe.limits import MAX_BATCH_BYTES
from seqdedupe.log.contract import ANY_BYTES, REPLAY_STEP_ENTRIES, LargerRecordError

SUFFIX = ".log"
MAX_RECORD_BYTES = HEADER_BYTES + MAX_BATCH_BYTES

CHUNK_BYTES = MAX_RECORD_BYTES
"""The size of a read that must contain a complete record, even a record of the largest size."""

SCAN_BYTES = 2 * 1024 * 1024
"""The size of one read in a scan of whole segments, unless a record is larger. The data of such a read stays in the
processor's cache."""

POINT_INTERVAL_BYTES = 64 * 1024
"""The least distance between two points of the sparse index."""

INLINE_BYTES = 1024 * 1024
"""The most bytes that the event loop itself reads and checks at once, if the system has them in memory. This takes a
quarter of a millisecond."""

_TABLE_RECORDS = 2048
_COLUMNS = [RECORD_START, RECORD_END, BASE_INDEX, ROWS, PUBLISH_TIME_MS, SYNCED_OFFSET, OWNERSHIP]
# The columns of a piece's table.
START, END, BASE, COUNT, TIME_MS, SYNCED, OWNER = range(len(_COLUMNS))

_scratch = threading.local()

Read = Callable[[int, int, int], "bytes | memoryview"]
"""`os.pread` or a function like it: file, size, offset."""


class LogIdentity(NamedTuple):
    """The log whose records are accepted."""

    incarnation: int
    key: Int64s
    """The key of the tags in the log's headers."""


class SegmentPoint(NamedTuple):
    """The index, offset and publish time of a record, as an entry of the sparse index."""

    base_index: int
    offset: int
    publish_time_ms: int


@dataclass(slots=True)
class SegmentPiece:
    """Complete intact records, one after the other in a file, and the reason why the piece ends after them."""

    offset: int
    """The offset in the file at which `raw` begins."""

    raw: bytes | memoryview
    table: np.ndarray
    """A row for each record, with the columns START and END (within `raw`), BASE (index), COUNT (rows), TIME_MS,
    SYNCED, OWNER."""

    size: int
    """The number of bytes of `raw` that belong to the records."""

    why: int
    """`records.END` if the file or the read ends there, else the reason that stopped the scan."""

    @property
    def end(self) -> int:
        """The offset in the file at which the records end."""
        return self.offset + self.size

    def next_index(self, before: int) -> int:
        """Return the index after the records; `before` if there are no records."""
        return int(self.table[-1, BASE] + self.table[-1, COUNT]) if len(self.table) else before


def scan_bytes(
    raw: bytes | memoryview,
    identity: LogIdentity,
    offset: int,
    next_index: int,
    payloads_from: int | None,
    ownership: int = 0,
) -> tuple[np.ndarray, int, int]:
    """Return the records of a buffer as the table of a piece, the number of bytes of these records, and the reason why
    the scan ended."""
    if not hasattr(_scratch, "table"):
        # The table is kept per thread, because allocating memory of this size costs more than the scan.
        _scratch.table = records.new_table(_TABLE_RECORDS)
    places, result = _scratch.table, records.new_result(ownership)
    whole = np.frombuffer(raw, np.uint8)
    tables = []
    at, why = 0, records.FULL
    while why == records.FULL:
        part = whole[at:]
        why = records.scan(part, identity.incarnation, offset + at, next_index, identity.key, places, result)
        count, size = int(result[0]), int(result[1])
        if payloads_from is not None:
            skipped = int(np.searchsorted(places[:count, BASE_INDEX] + places[:count, ROWS], payloads_from, "right"))
            bad = records.first_bad_payload(part, places[skipped:count], count - skipped)
            if bad >= 0:
                why, count = records.DAMAGED, skipped + bad
                size = int(places[count, RECORD_START])
        table = places[:count, _COLUMNS]
        table[:, (START, END)] += at
        tables.append(table)
        if count:
            next_index = int(table[-1, BASE] + table[-1, COUNT])
        at += size
    return np.concatenate(tables) if len(tables) > 1 else tables[0], at, why


def read_piece(
    file: int,
    identity: LogIdentity,
    offset: int,
    end: int,
    next_index: int,
    *,
    ownership: int = 0,
    size: int = CHUNK_BYTES,
    payloads_from: int | None = None,
    most_bytes: int = ANY_BYTES,
    read: Read = os.pread,
) -> SegmentPiece:
    """Return the records of an open file that begin at an offset: about `size` bytes, and at least one record. No
    record ends after `end`. If the first record is not intact, the piece is empty.

    `next_index` is the index that the first record must have; -1 accepts every index. `ownership` is the ownership of
    the record before the first record; 0 accepts every ownership. Payloads are checked from the index `payloads_from`
    on; None checks no payloads. Raises `LargerRecordError` if the first record has more than `most_bytes`.
    """
    raw = read(file, min(size, end - offset), offset)
    table, taken, why = scan_bytes(raw, identity, offset, next_index, payloads_from, ownership)
    if why == records.INCOMPLETE and offset + len(raw) < end:
        if taken:
            why = records.END
        elif len(raw) >= MAX_RECORD_BYTES:
            why = records.DAMAGED
        elif size < CHUNK_BYTES:
            needed, _ = records.end_of(bytes(raw[:HEADER_BYTES])) if len(raw) >= HEADER_BYTES else (0, 0)
            if most_bytes < needed <= MAX_RECORD_BYTES:
                raise LargerRecordError(needed)
            size = needed if size < needed <= CHUNK_BYTES else CHUNK_BYTES
            return read_piece(
                file, identity, offset, end, next_index,
                ownership=ownership, size=size, payloads_from=payloads_from, read=read,
            )  # fmt: skip
    return SegmentPiece(offset, raw, table, taken, why)


class NotInMemoryError(OSError):
    """The requested data must come from the disk."""


class SegmentStep(NamedTuple):
    """The entries for a replay that one read has found."""

    parts: list[tuple[bytes, Int64s]]
    """Buffers, each with the place rows of the complete records in the buffer, at most REPLAY_STEP_ENTRIES rows per
    buffer."""

    end: int
    """The offset in the file at which the records end."""

    next_index: int
    """The index after the records."""

    ownership: int
    """The ownership of the last record."""

    why: int
    """`records.END` if the file or the read ends there, else the reason that stopped the scan."""


def read_step(
    file: int,
    identity: LogIdentity,
    offset: int,
    end: int,
    next_index: int,
    ownership: int,
    size: int = SCAN_BYTES,
    read: Callable[[int, int, int], bytes] | None = None,
) -> SegmentStep:
    """Return the entries of an open file that begin at an offset: about `size` bytes, and at least one entry. No entry
    ends after `end`. If the first entry is not intact, the step is empty."""
    raw = (read or os.pread)(file, min(size, end - offset), offset)
    if not hasattr(_scratch, "entries"):
        _scratch.entries = records.new_table(REPLAY_STEP_ENTRIES)
    places, parts, result = _scratch.entries, [], records.new_result(ownership)
    at, why = 0, records.FULL
    while why == records.FULL:
        part = raw[at:]
        view = np.frombuffer(part, np.uint8)
        why = records.scan(view, identity.incarnation, offset + at, next_index, identity.key, places, result)
        count, taken = int(result[0]), int(result[1])
        if count:
            table = places[:count].copy()
            parts.append((part, table))
            next_index = int(table[-1, BASE_INDEX] + table[-1, ROWS])
        at += taken
    if why == records.INCOMPLETE and offset + len(raw) < end:
        if not at and size < CHUNK_BYTES:
            return read_step(file, identity, offset, end, next_index, ownership, CHUNK_BYTES, read)
        why = records.END if at else records.DAMAGED
    return SegmentStep(parts, offset + at, next_index, int(result[2]), why)


def read_from_memory(file: int, size: int, offset: int) -> memoryview:
    """Read like `os.pread`, but only data that the system has in memory. So the read never waits for the disk.

    Raises NotInMemoryError if the data is not in memory, for more than INLINE_BYTES, and if the system or the file
    system does not support such reads.
    """
    if size > INLINE_BYTES:
        raise NotInMemoryError
    buffer = memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]  # bytearray would be filled with zeros
    try:
        if os.preadv(file, [buffer], offset, os.RWF_NOWAIT) == size:
            return buffer
    except (AttributeError, OSError) as e:
        raise NotInMemoryError from e
    raise NotInMemoryError


def unreadable(path: Path, e: OSError) -> SeqdedupeError:
    """Return the error LOG_UNREADABLE for a file that cannot be read at the moment."""
    return error("LOG_UNREADABLE", f"{path} cannot be read: {e}", file=path)


def damaged(path: Path, offset: int, what: str, why: int = records.DAMAGED) -> SeqdedupeError:
    """Return the error for a file whose content is wrong at an offset."""
    if why == records.NEWER:
        return error(
            "NEWER_FORMAT", f"{path} is of a newer format version from byte {offset} on", file=path, offset=offset
        )
    if why == records.OLDER:
        return older(path, offset)
    return error("LOG_DAMAGED", f"{path} is damaged at byte {offset}: {what}", file=path, offset=offset)


def older(path: Path, offset: int) -> SeqdedupeError:
    """Return the error for a file of an earlier format version."""
    return error(
        "OLDER_FORMAT", f"{path} is of an earlier format version from byte {offset} on", file=path, offset=offset
    )


def begins_with_an_older_record(path: Path) -> bool:
    """Return whether a segment file is of format version 1, judging by its first bytes. Raises OSError."""
    with path.open("rb") as file:
        start = file.read(VERSION_AT + 4)
    return start[:1] == bytes((RECORDS_TAG,)) and start[VERSION_AT - 1 :] == bytes((VERSION_TAG, 1, 0, 0, 0))


WHAT_STANDS_THERE = {
    records.INCOMPLETE: "the file ends within a record",
    records.DAMAGED: "there is no intact record",
    records.NEWER: "a record of a newer format version",
    records.OLDER: "a record of an earlier format version",
    records.NOT_CONTIGUOUS: "a record whose index is not the next one",
    records.OTHER_OWNER: "a record that was not written under the marker before it",
}


def segment_path(folder: Path, base_index: int) -> Path:
    """Return the path of the segment whose first message has this index."""
    return folder / f"{base_index:020d}{SUFFIX}"


class Segment:
    """A segment file up to `end`, the end of the durable data. Readers see no data after `end`.

    Only the event loop may use a segment, except that other threads may call `read`, `read_step`, `opened` and
    `forget_pages`.
    """

    def __init__(self, folder: Path, identity: LogIdentity, base_index: int) -> None:
        self.path = segment_path(folder, base_index)
        self.identity = identity
        self.base_index = base_index
        self.end = 0
        self.points: list[SegmentPoint] = []
        self.indexed_end = 0
        """The offset up to which the file was scanned and `points` is complete."""
        self.control_bytes = 0
        """The number of bytes of control records and markers before `indexed_end`."""
        self.made_ms: int | None = None
        """The time, on the steady clock, at which this process made the file or opened a log without messages; else
        None."""

    def read(
        self,
        offset: int,
        end: int,
        next_index: int,
        size: int,
        payloads_from: int | None,
        most_bytes: int = ANY_BYTES,
        read: Read = os.pread,
    ) -> SegmentPiece:
        """Call `read_piece` for this file. Any thread may call this method. The piece ends before damage.

        Raises LOG_DAMAGED or NEWER_FORMAT if the first record is not intact; LOG_UNREADABLE; FileNotFoundError if
        retention has removed the file; NotInMemoryError if `read` raises it; and the errors of `read_piece`.
        """
        with self.opened() as file:
            piece = read_piece(
                file, self.identity, offset, end, next_index,
                size=size, payloads_from=payloads_from, most_bytes=most_bytes, read=read,
            )  # fmt: skip
        if not piece.size:
            raise self._damaged(piece.end, piece.why)
        return piece

    def read_step(self, offset: int, end: int, next_index: int, ownership: int) -> SegmentStep:
        """Call `read_step` for this file. Any thread may call this method. The step ends before damage. Raises the
        errors of `read`."""
        with self.opened() as file:
            step = read_step(file, self.identity, offset, end, next_index, ownership)
        if not step.parts:
            raise self._damaged(step.end, step.why)
        return step

    def _damaged(self, offset: int, why: int) -> SeqdedupeError:
        # An open log has this format version. So a record that seems to have an earlier version has a changed byte.
        return damaged(self.path, offset, WHAT_STANDS_THERE[why], records.DAMAGED if why == records.OLDER else why)

    def forget_pages(self) -> None:
        """Ask the system to drop the file from its page cache, so that the next read comes from the disk."""
        with self.opened() as file:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Open the file for reading. Raises LOG_UNREADABLE. FileNotFoundError and NotInMemoryError pass through."""
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                yield file
            finally:
                os.close(file)
        except (NotInMemoryError, FileNotFoundError):
            raise
        except OSError as e:
            raise unreadable(self.path, e) from e

    def learn(self, piece: SegmentPiece) -> None:
        """Add the records of a piece to the sparse index, if the piece continues where the index ends."""
        if not len(piece.table) or not piece.offset <= self.indexed_end < piece.end:
            return
        starts = piece.table[:, START] + piece.offset
        is_control = (piece.table[:, COUNT] == 0) & (starts >= self.indexed_end)
        self.control_bytes += int((piece.table[is_control, END] - piece.table[is_control, START]).sum())
        while True:
            wanted = self.points[-1].offset + POINT_INTERVAL_BYTES if self.points else 0
            i = int(np.searchsorted(starts, wanted))
            if i == len(starts):
                break
            row = piece.table[i]
            self.points.append(SegmentPoint(int(row[BASE]), int(starts[i]), int(row[TIME_MS])))
        self.indexed_end = piece.end

    def pass_over(self, offset: int, end: int) -> None:
        """Continue the sparse index at `end`, after damaged data between these offsets."""
        if offset <= self.indexed_end < end:
            self.indexed_end = end

    def grow(self, end: int, points: list[SegmentPoint], control_bytes: int) -> None:
        """Extend the segment to `end`, because the appended data up to `end` is now durable. `control_bytes` bytes of
        the appended data are not messages."""
        self.points += points
        self.control_bytes += control_bytes
        self.end = self.indexed_end = end

    def before_index(self, index: int) -> tuple[int, int]:
        """Return an offset from which a scan finds the record that contains the index, and the markers before that
        record. Also return the index at that offset."""
        return self._before(bisect_left(self.points, index, key=lambda point: point.base_index))

    def before_time(self, publish_time_ms: int) -> tuple[int, int]:
        """Return an offset from which a scan finds the first record that was published at or after that time. Also
        return the index at that offset."""
        return self._before(bisect_left(self.points, publish_time_ms, key=lambda point: point.publish_time_ms))

    def before_offset(self, offset: int) -> tuple[int, int]:
        """Return an offset at or before the record that contains `offset`. Also return the index at the returned
        offset."""
        return self._before(bisect_left(self.points, offset, key=lambda point: point.offset))

    def _before(self, i: int) -> tuple[int, int]:
        return (self.points[i - 1].offset, self.points[i - 1].base_index) if i else (0, self.base_index)
