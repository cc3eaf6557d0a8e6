"""Opening the last segment of a log: telling a torn tail, which a crash leaves, from damage.

A record says up to where its file was synced when it was written. Below the highest such offset that any
header names, also one after the damage, everything had been stored and perhaps confirmed: what is wrong there
is damage. At and above it a crash may have left anything. A header counts only if its tag is right: what a payload
says is no record.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from seqdedupe.errors import error
from seqdedupe.files import sync_folder, write_synced
from seqdedupe.format import records
from seqdedupe.log.embedded.past_damage import headers_from
from seqdedupe.log.embedded.segment import (
    BASE,
    CHUNK_BYTES,
    OWNER,
    SCAN_BYTES,
    SUFFIX,
    SYNCED,
    TIME_MS,
    WHAT_STANDS_THERE,
    Identity,
    Piece,
    Segment,
    damaged,
    read_piece,
)

_log = logging.getLogger("seqdedupe.log")


@dataclass(slots=True)
class Tail:
    """What opening a segment found out."""

    segment: Segment
    next_index: int
    publish_time_ms: int
    """The last record's; 0 if there is none."""

    synced_offset: int
    """The highest that an intact record names."""

    certain_index: int
    """Messages below this index were synced, as far as that tells."""

    why: int
    """What stands after the last record kept: `records.END` for nothing."""

    ownership: int = 0
    """The last record's; 0 if there is none."""

    cut_bytes: int = 0
    cut_records: int = 0

    missing: tuple[Path, bytes] | None = None
    """A file that the log's folder lacks, and what is in it."""

    is_new: bool = False
    """This process has made the log, durably, and nothing has been done to it since."""


def base_indexes(folder: Path) -> list[int]:
    """Those of the segment files in a folder, in order. Raises OSError."""
    return sorted(
        int(entry.name.removesuffix(SUFFIX))
        for entry in os.scandir(folder)
        if entry.name.endswith(SUFFIX) and entry.name.removesuffix(SUFFIX).isdecimal()
    )


def open_segments(folder: Path, identity: Identity, covered_index: int) -> tuple[list[Segment], Tail]:
    """A log's segments, and what its end is. Writes nothing.

    Before the last file is written to it must be mended. Raises LOG_DAMAGED, NEWER_FORMAT; OSError.
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
    segments = [Segment(folder, identity, base, 0) for base in bases]
    for segment in segments:
        segment.end = segment.path.stat().st_size
    with open(segments[-1].path, "rb") as file:
        tail = recover(folder, identity, bases[-1], file.fileno())
    segments[-1] = tail.segment
    if len(segments) > 1 and not tail.segment.end:
        # Nothing is in the last segment: the log's end is in the one before, which was synced whole.
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


def survey(folder: Path, identity: Identity, base_index: int, file: int, end: int) -> Tail:
    """The intact records from the beginning of a segment on, up to an offset. Payloads are not looked at."""
    segment = Segment(folder, identity, base_index, 0)
    tail = Tail(segment, base_index, 0, 0, base_index, records.END)
    while segment.end < end and tail.why == records.END:
        piece = read_piece(file, identity, segment.end, end, tail.next_index, ownership=tail.ownership, size=SCAN_BYTES)
        _add(tail, piece)
    return tail


def _add(tail: Tail, piece: Piece) -> None:
    tail.why = piece.why
    tail.segment.learn(piece)
    tail.segment.end = piece.end
    if len(piece.table):
        tail.next_index = piece.next_index(tail.next_index)
        tail.publish_time_ms = int(piece.table[-1, TIME_MS])
        tail.ownership = int(piece.table[-1, OWNER])
        tail.synced_offset = max(tail.synced_offset, int(piece.table[:, SYNCED].max()))


def recover(folder: Path, identity: Identity, base_index: int, file: int) -> Tail:
    """The last segment up to its last intact record. Changes nothing: see `mend`.

    Raises LOG_DAMAGED if something is wrong below the synced offset, NEWER_FORMAT.
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
    """Cuts the torn tail off, writes again what is kept above the synced offset, and syncs.

    After a failed sync the kernel takes pages for written that the disk does not have: writing them again is what
    brings them there. The entries of the folders are synced too, for a copied or restored log, and a file that is
    missing is written. Of a log that is new all that is done already. Raises OSError, and can be tried again.
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
    """The highest synced offset that a header after the first damage names; 0 if there is none."""
    highest = 0
    for _, header in _headers(tail, file, tail.segment.end + 1, size):
        if records.is_newer(header):
            raise damaged(tail.segment.path, tail.segment.end, WHAT_STANDS_THERE[records.NEWER], records.NEWER)
        highest = max(highest, records.synced_offset_of(header))
    return highest


def _intact_end(tail: Tail, file: int, at: int) -> int:
    """Up to where the records from an offset on have intact payloads."""
    while at < tail.segment.end:
        piece = read_piece(file, tail.segment.identity, at, tail.segment.end, -1, payloads_from=-1)
        at = piece.end
        if piece.why != records.END:
            break
    return at


def _headers(tail: Tail, file: int, at: int, size: int) -> Iterator[tuple[int, bytes]]:
    return headers_from(file, tail.segment.identity, at, size, tail.segment.base_index)
