"""One segment file: reading and checking its records, and a sparse index of where they stand."""

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
from seqdedupe.format.columns import (
    BASE_INDEX,
    OWNERSHIP,
    PUBLISH_TIME_MS,
    RECORD_END,
    RECORD_START,
    ROWS,
    SYNCED_OFFSET,
)
from seqdedupe.format.headers import HEADER_BYTES, RECORDS_TAG, VERSION_AT, VERSION_TAG
from seqdedupe.limits import MAX_BATCH_BYTES
from seqdedupe.log.contract import ANY_BYTES, REPLAY_STEP_ENTRIES, LargerRecordError

SUFFIX = ".log"
MAX_RECORD_BYTES = HEADER_BYTES + MAX_BATCH_BYTES

CHUNK_BYTES = MAX_RECORD_BYTES
"""What is read at once where it must hold a whole record, however large."""

SCAN_BYTES = 2 * 1024 * 1024
"""What a scan of whole segments reads at once, where a record fits: little enough to stay in the processor's cache."""

POINT_INTERVAL_BYTES = 64 * 1024
"""How far apart the points of the sparse index are, at least."""

INLINE_BYTES = 1024 * 1024
"""What the event loop itself reads and checks at once, if the system has it in memory: a quarter of a millisecond."""

_TABLE_RECORDS = 2048
_COLUMNS = [RECORD_START, RECORD_END, BASE_INDEX, ROWS, PUBLISH_TIME_MS, SYNCED_OFFSET, OWNERSHIP]
# The columns of a piece's table.
START, END, BASE, COUNT, TIME_MS, SYNCED, OWNER = range(len(_COLUMNS))

_scratch = threading.local()

Read = Callable[[int, int, int], "bytes | memoryview"]
"""`os.pread`, or like it: file, size, offset."""


class LogIdentity(NamedTuple):
    """Whose records are believed."""

    incarnation: int
    key: Int64s
    """Of the tags of its headers."""


class SegmentPoint(NamedTuple):
    """Where a record begins."""

    base_index: int
    offset: int
    publish_time_ms: int


@dataclass(slots=True)
class SegmentPiece:
    """Whole intact records that stand one after the other in a file, and why there are no more of them."""

    offset: int
    """Where `raw` begins in the file."""

    raw: bytes | memoryview
    table: np.ndarray
    """A row for each record: START and END within `raw`, BASE (index), COUNT (rows), TIME_MS, SYNCED, OWNER."""

    size: int
    """How many bytes of `raw` the records take."""

    why: int
    """`records.END` where the file or what was read ends, else what stopped the scan."""

    @property
    def end(self) -> int:
        """Where the records end in the file."""
        return self.offset + self.size

    def next_index(self, before: int) -> int:
        """The index after the records, if the one before them is `before`."""
        return int(self.table[-1, BASE] + self.table[-1, COUNT]) if len(self.table) else before


def scan_bytes(
    raw: bytes | memoryview,
    identity: LogIdentity,
    offset: int,
    next_index: int,
    payloads_from: int | None,
    ownership: int = 0,
) -> tuple[np.ndarray, int, int]:
    """The records of a buffer as a piece's table, how many bytes they take, and why there are no more."""
    if not hasattr(_scratch, "table"):
        # Kept for each thread: fresh memory of this size costs more than the scan.
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
    """The records from an offset of an open file on: about `size` bytes of them, at least one, none beyond `end`.

    `next_index` is the index that the first one must have, -1 to believe it; `ownership` that of the record before it,
    0 to believe that it is the same. Payloads are checked where they are
    those of this index and later ones. Raises `LargerRecordError` if the first record has more than `most_bytes`.
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
    """What was asked for has to come from the disk."""


class SegmentStep(NamedTuple):
    """Entries for a replay, found with one read."""

    parts: list[tuple[bytes, Int64s]]
    """Buffers, each with the place rows of whole records in it: REPLAY_STEP_ENTRIES at most."""

    end: int
    """Where the records end in the file."""

    next_index: int
    """The index after them."""

    ownership: int
    """That of the last one."""

    why: int
    """`records.END` where the file or what was read ends, else what stopped the scan."""


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
    """The entries from an offset of an open file on: about `size` bytes of them, at least one, none beyond `end`."""
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
    """Like `os.pread`, but only what the system holds in memory, so that it never waits for the disk.

    Raises NotInMemoryError, also for more than INLINE_BYTES, and where the system or the file system cannot tell.
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
    """The error for a file that cannot be read now."""
    return error("LOG_UNREADABLE", f"{path} cannot be read: {e}", file=path)


def damaged(path: Path, offset: int, what: str, why: int = records.DAMAGED) -> SeqdedupeError:
    """The error for a file in which something else stands than should."""
    if why == records.NEWER:
        return error(
            "NEWER_FORMAT", f"{path} is of a newer format version from byte {offset} on", file=path, offset=offset
        )
    if why == records.OLDER:
        return older(path, offset)
    return error("LOG_DAMAGED", f"{path} is damaged at byte {offset}: {what}", file=path, offset=offset)


def older(path: Path, offset: int) -> SeqdedupeError:
    """The error for a file of an earlier format version."""
    return error(
        "OLDER_FORMAT", f"{path} is of an earlier format version from byte {offset} on", file=path, offset=offset
    )


def begins_with_an_older_record(path: Path) -> bool:
    """Whether a segment file is of format version 1, as far as its first bytes say. Raises OSError."""
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
    """The file of the segment that begins with the message of this index."""
    return folder / f"{base_index:020d}{SUFFIX}"


class Segment:
    """A segment file as readers see it: up to `end`, which is what is durable.

    Belongs to the event loop: only `read` and `read_step` are called in other threads.
    """

    def __init__(self, folder: Path, identity: LogIdentity, base_index: int, end: int) -> None:
        self.path = segment_path(folder, base_index)
        self.identity = identity
        self.base_index = base_index
        self.end = end
        self.points: list[SegmentPoint] = []
        self.indexed_end = 0
        """Up to here the file was scanned and `points` are complete."""
        self.control_bytes = 0
        """So much of that is control records and markers."""
        self.made_ms: int | None = None
        """When this process made it, or opened it without a message, by the steady clock."""

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
        """`read_piece` of this file, for use in any thread. It ends before damage.

        Raises LOG_DAMAGED or NEWER_FORMAT if the first record is not intact, LOG_UNREADABLE, FileNotFoundError if
        retention was faster, NotInMemoryError if `read` does; and as `read_piece`.
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
        """`read_step` of this file. It ends before damage. Raises as `read`."""
        with self.opened() as file:
            step = read_step(file, self.identity, offset, end, next_index, ownership)
        if not step.parts:
            raise self._damaged(step.end, step.why)
        return step

    def _damaged(self, offset: int, why: int) -> SeqdedupeError:
        # A log that was opened is of this version: what looks like an earlier one is a byte that has changed.
        return damaged(self.path, offset, WHAT_STANDS_THERE[why], records.DAMAGED if why == records.OLDER else why)

    def forget_pages(self) -> None:
        """Has the system read the file from the disk the next time, where it can."""
        with self.opened() as file:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """The file, for reading. Raises FileNotFoundError, NotInMemoryError from within; LOG_UNREADABLE."""
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
        """Adds what a piece shows to the sparse index, if it goes on where that ends."""
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
        """Between these offsets stands damage: the sparse index goes on after it."""
        if offset <= self.indexed_end < end:
            self.indexed_end = end

    def grow(self, end: int, points: list[SegmentPoint], control_bytes: int) -> None:
        """What was appended is durable up to `end`; so much of it is no messages."""
        self.points += points
        self.control_bytes += control_bytes
        self.end = self.indexed_end = end

    def before_index(self, index: int) -> tuple[int, int]:
        """An offset, and the index there, before the record that holds the index and the markers before it."""
        return self._before(bisect_left(self.points, index, key=lambda point: point.base_index))

    def before_time(self, publish_time_ms: int) -> tuple[int, int]:
        """An offset, and the index there, at or before the first record published at or after that time."""
        return self._before(bisect_left(self.points, publish_time_ms, key=lambda point: point.publish_time_ms))

    def before_offset(self, offset: int) -> tuple[int, int]:
        """An offset, and the index there, at or before the record that holds this offset."""
        return self._before(bisect_left(self.points, offset, key=lambda point: point.offset))

    def _before(self, i: int) -> tuple[int, int]:
        return (self.points[i - 1].offset, self.points[i - 1].base_index) if i else (0, self.base_index)
