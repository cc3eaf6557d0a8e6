"""Open the last segment of a log, and distinguish a torn tail, which a crash leaves, from damage.

Each record states the offset up to which its file was synced when the record was written. Opening takes the highest
such offset of all headers, including the headers after damage.

- Below this offset, all data was stored and perhaps confirmed. An unreadable record below this offset is damage.
- At or above this offset, an unreadable record is a torn tail only if a crash can have left the record in this state:
  the file ends within the record, or a sector of the record has only zeros (`can_be_torn`). Every other unreadable
  record is damage: the record may have been confirmed by a sync that no later record states.

A header is accepted only if its tag is valid. So bytes in a payload are never treated as a record.
"""

import errno
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from seqdedupe.errors import error
from seqdedupe.files import sync_folder, write_synced
from seqdedupe.format import records
from seqdedupe.format.headers import HEADER_BYTES
from seqdedupe.format.journal import SECTOR_BYTES, is_written
from seqdedupe.log.embedded.segment import (
    BASE,
    CHUNK_BYTES,
    OWNER,
    SCAN_BYTES,
    SUFFIX,
    SYNCED,
    TIME_MS,
    WHAT_STANDS_THERE,
    LogIdentity,
    Read,
    Segment,
    SegmentPiece,
    damaged,
    read_piece,
)

# -- The place where the records of a segment file continue after damage. It is the next header that this log wrote for
# its own place in the file.


class Onward(NamedTuple):
    """The offset where reading continues, and the index there."""

    offset: int
    next_index: int


def past_damage(
    file: int, identity: LogIdentity, at: int, end: int, index: int, base_index: int, read: Read
) -> Onward | None:
    """Return where reading continues after an unreadable record at the offset `at`, which should have the index
    `index`.

    Return None if no header of this log follows before `end`. If the unreadable record's own header is intact, the
    header shows the end of the record and the number of messages.
    """
    least = max(index, base_index)
    own = next(headers_from(file, identity, at, min(at + HEADER_BYTES, end), least, read), None)
    if own is not None and records.base_index_of(own[1]) == index:
        size_bytes, next_index = records.end_of(own[1])
        return Onward(at + size_bytes, next_index)
    following = own or next(headers_from(file, identity, at + 1, end, least, read), None)
    return None if following is None else Onward(following[0], records.base_index_of(following[1]))


def look_past(
    segment: Segment, offset: int, end: int, index: int, payloads_from: int | None, following_index: int
) -> Onward | None:
    """Return where reading continues after an unreadable record of an open segment, as `past_damage` does. Return None
    if the record has become readable. Any thread may call this function.

    `following_index` is the index after the segment. If no header follows, reading continues there. Data that the disk
    cannot return is treated as damage. Raises LOG_UNREADABLE.
    """
    try:
        with segment.opened() as file:
            piece = read_piece(
                file, segment.identity, offset, end, index, payloads_from=payloads_from, read=read_what_can_be
            )
            if piece.size:
                return None
            found = past_damage(file, segment.identity, offset, end, index, segment.base_index, read_what_can_be)
    except FileNotFoundError:
        found = None
    return found or Onward(end, following_index)


def headers_from(
    file: int, identity: LogIdentity, at: int, end: int, base_index: int, read: Read = os.pread
) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of each header between two offsets that this log wrote for that offset.

    Headers with an index below `base_index` are skipped. `base_index` is the first index of the segment or a higher
    index.
    """
    while at + HEADER_BYTES <= end:
        raw = read(file, min(CHUNK_BYTES, end - at), at)
        if len(raw) < HEADER_BYTES:
            break
        view = np.frombuffer(raw, np.uint8)
        found = records.find_header(view, identity.incarnation, at, base_index, identity.key)
        if found < 0:
            at += len(raw) - HEADER_BYTES + 1
        else:
            yield at + found, bytes(raw[found : found + HEADER_BYTES])
            at += found + HEADER_BYTES


def can_be_torn(file: int, identity: LogIdentity, at: int, size: int, base_index: int, read: Read = os.pread) -> bool:
    """Return whether a crash can have left the unreadable record at the offset `at` in this state. The file has `size`
    bytes.

    A log's files only grow. So the part of a record that a crash loses is either missing at the end of the file, or
    consists of sectors with only zeros. In the first sector, only the bytes of the record must be zeros. If the
    record's own header is unreadable, only the sectors of the header are checked. A payload of zeros cannot be
    distinguished from lost sectors.
    """
    own = next(headers_from(file, identity, at, min(at + HEADER_BYTES, size), base_index, read), None)
    stop = at + (HEADER_BYTES if own is None else records.end_of(own[1])[0])
    if stop > size:
        return True
    first = at // SECTOR_BYTES * SECTOR_BYTES
    raw = read(file, stop + SECTOR_BYTES - first, first)
    return not is_written(raw, at - first, at - first, stop - first)


def read_what_can_be(file: int, size: int, offset: int) -> bytes:
    """Read like `os.pread`, but continue until `size` bytes or the end of the file. Data that the disk cannot return is
    replaced by zeros."""
    parts, at_once = [], size
    while size:
        try:
            raw = os.pread(file, min(at_once, size), offset)
        except OSError as e:
            if e.errno != errno.EIO:
                raise
            if at_once > SECTOR_BYTES:
                at_once = max(at_once // 2, SECTOR_BYTES)
                continue
            raw = bytes(min(SECTOR_BYTES - offset % SECTOR_BYTES, size))
        if not raw:
            break
        parts.append(raw)
        offset, size, at_once = offset + len(raw), size - len(raw), 2 * at_once
    return b"".join(parts)


_log = logging.getLogger("seqdedupe.log")


@dataclass(slots=True)
class Tail:
    """The state of the end of a log, as found by opening its last segment."""

    segment: Segment
    next_index: int
    publish_time_ms: int
    """The publish time of the last record; 0 if there is no record."""

    synced_offset: int
    """The highest synced offset that an intact header states."""

    certain_index: int
    """Messages below this index were synced, according to the synced offset."""

    why: int
    """The reason why no record follows the last one; `records.END` if the data ends there."""

    ownership: int = 0
    """The ownership of the last record; 0 if there is no record."""

    cut_bytes: int = 0
    cut_records: int = 0

    missing: tuple[Path, bytes] | None = None
    """The path and content of a file that must be written because the log's folder lacks it; else None."""

    is_new: bool = False
    """Whether this process has created the log durably, and has not changed it since."""


def base_indexes(folder: Path) -> list[int]:
    """Return the first indexes of the segment files in a folder, in order. Raises OSError."""
    return sorted(
        int(entry.name.removesuffix(SUFFIX))
        for entry in os.scandir(folder)
        if entry.name.endswith(SUFFIX) and entry.name.removesuffix(SUFFIX).isdecimal()
    )


def open_segments(folder: Path, identity: LogIdentity, covered_index: int) -> tuple[list[Segment], Tail]:
    """Return a log's segments and the state of its end. Write nothing.

    Before the last file is written to, `mend` must be called. Raises LOG_DAMAGED, NEWER_FORMAT; OSError.
    """
    bases = base_indexes(folder) if folder.exists() else []
    if not bases:
        raise error("LOG_DAMAGED", f"{folder} has no segment files", file=folder)
    if 0 < covered_index <= bases[0]:
        raise error(
            "LOG_DAMAGED",
            f"{folder} begins with index {bases[0]}: messages from {covered_index - 1} on should be there",
            file=folder,
            first_index=bases[0],
            covered_index=covered_index,
        )
    segments = [Segment(folder, identity, base) for base in bases]
    for segment in segments:
        segment.end = segment.path.stat().st_size
    with open(segments[-1].path, "rb") as file:
        tail = recover(folder, identity, bases[-1], file.fileno())
    segments[-1] = tail.segment
    if len(segments) > 1 and not tail.segment.end:
        # The last segment is empty. So the last record is in the previous segment, which was synced as a whole.
        before = _survey_sealed(segments[-2], folder, bases[-1])
        segments[-2], tail.publish_time_ms = before.segment, before.publish_time_ms
    if tail.next_index < covered_index:
        raise error(
            "LOG_DAMAGED",
            f"{tail.segment.path} ends with index {tail.next_index - 1} at byte {tail.segment.end}: messages "
            f"up to {covered_index - 1} were stored",
            file=tail.segment.path,
            offset=tail.segment.end,
            next_index=tail.next_index,
            covered_index=covered_index,
        )
    tail.certain_index = max(tail.certain_index, covered_index)
    return segments, tail


def _survey_sealed(segment: Segment, folder: Path, next_base: int) -> Tail:
    with open(segment.path, "rb") as file:
        tail = survey(folder, segment.identity, segment.base_index, file.fileno(), segment.end)
    if tail.why != records.END or tail.next_index != next_base:
        raise damaged(segment.path, tail.segment.end, f"records up to index {next_base - 1} should be there", tail.why)
    return tail


def survey(folder: Path, identity: LogIdentity, base_index: int, file: int, end: int) -> Tail:
    """Read the intact records from the beginning of a segment to the offset `end`. Return the state after these
    records. Payloads are not checked."""
    segment = Segment(folder, identity, base_index)
    tail = Tail(segment, base_index, 0, 0, base_index, records.END)
    while segment.end < end and tail.why == records.END:
        piece = read_piece(file, identity, segment.end, end, tail.next_index, ownership=tail.ownership, size=SCAN_BYTES)
        _add(tail, piece)
    return tail


def _add(tail: Tail, piece: SegmentPiece) -> None:
    tail.why = piece.why
    tail.segment.learn(piece)
    tail.segment.end = piece.end
    if len(piece.table):
        tail.next_index = piece.next_index(tail.next_index)
        tail.publish_time_ms = int(piece.table[-1, TIME_MS])
        tail.ownership = int(piece.table[-1, OWNER])
        tail.synced_offset = max(tail.synced_offset, int(piece.table[:, SYNCED].max()))


def recover(folder: Path, identity: LogIdentity, base_index: int, file: int) -> Tail:
    """Return the state of the last segment up to its last intact record. Change nothing: `mend` makes the changes.

    Raises LOG_DAMAGED if a record below the synced offset is unreadable, or if no crash can have left an unreadable
    record in its state; NEWER_FORMAT.
    """
    size = os.fstat(file).st_size
    tail = survey(folder, identity, base_index, file, size)
    path, end, why = tail.segment.path, tail.segment.end, tail.why
    if why in (records.NEWER, records.OLDER, records.NOT_CONTIGUOUS, records.OTHER_OWNER):
        raise damaged(path, end, WHAT_STANDS_THERE[why], why)
    synced = max(tail.synced_offset, _synced_after(tail, file, size))
    if end < synced:
        raise damaged(path, end, f"{WHAT_STANDS_THERE[why]}, but the file was synced up to {synced}")
    kept = _intact_end(tail, file, synced)
    if kept < size and not can_be_torn(file, identity, kept, size, base_index):
        what = WHAT_STANDS_THERE[records.DAMAGED if kept < end else why]
        raise damaged(path, kept, f"{what}, and no crash leaves a record like this")
    if kept < end:
        tail = survey(folder, identity, base_index, file, kept)
    tail.synced_offset = synced
    if synced < kept:
        tail.certain_index = int(read_piece(file, identity, synced, kept, -1).table[0, BASE])
    else:
        tail.certain_index = tail.next_index
    tail.cut_bytes = size - kept
    tail.cut_records = len(list(_headers(tail, file, kept, size)))
    return tail


def mend(tail: Tail, file: int) -> None:
    """Cut off the torn tail, rewrite the remaining data above the synced offset, and sync the file.

    After a failed sync, the kernel may treat pages as written although the disk does not have them. Writing these pages
    again brings them to the disk. Also write the file `tail.missing`, and sync the folders, since the log may be copied
    or restored. For a new log, do nothing: it is durable already. Raises OSError; the call can be repeated.
    """
    if tail.is_new:
        return
    if tail.missing is not None:
        write_synced(*tail.missing)
    end = tail.segment.end
    if tail.cut_bytes:
        _log.warning(
            "%s: cut a torn tail of %d bytes (about %d records) at byte %d",
            tail.segment.path,
            tail.cut_bytes,
            tail.cut_records,
            end,
        )
        os.ftruncate(file, end)
        tail.cut_bytes = 0
    at = tail.synced_offset
    while at < end:
        at += os.pwrite(file, os.pread(file, min(CHUNK_BYTES, end - at), at), at)
    os.fsync(file)
    folder = tail.segment.path.parent
    for made in (folder, folder.parent, folder.parent.parent):
        sync_folder(made)


def _synced_after(tail: Tail, file: int, size: int) -> int:
    """Return the highest synced offset that a header after the first damage states; 0 if there is no such header."""
    highest = 0
    for _, header in _headers(tail, file, tail.segment.end + 1, size):
        if records.is_newer(header):
            raise damaged(tail.segment.path, tail.segment.end, WHAT_STANDS_THERE[records.NEWER], records.NEWER)
        highest = max(highest, records.synced_offset_of(header))
    return highest


def _intact_end(tail: Tail, file: int, at: int) -> int:
    """Return the offset up to which the records, beginning at an offset, have intact payloads."""
    while at < tail.segment.end:
        piece = read_piece(file, tail.segment.identity, at, tail.segment.end, -1, payloads_from=-1)
        at = piece.end
        if piece.why != records.END:
            break
    return at


def _headers(tail: Tail, file: int, at: int, size: int) -> Iterator[tuple[int, bytes]]:
    return headers_from(file, tail.segment.identity, at, size, tail.segment.base_index)
