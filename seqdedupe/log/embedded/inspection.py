"""Read every byte of a log, from its first file to its last. Continue after damage, and change nothing.

Opening a log (`tail`) or reading it stops at the first damage. An inspection reports the damage and the indexes of the
affected messages. It then continues at the next valid header of this log.
"""

import os
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from seqdedupe.batch import Int64s
from seqdedupe.format import records
from seqdedupe.format.journal import Part
from seqdedupe.format.layout import BASE_INDEX, ROWS, SYNCED_OFFSET
from seqdedupe.log.embedded.journal_replay import JournalReplay, why_not
from seqdedupe.log.embedded.segment import WHAT_STANDS_THERE, LogIdentity, SegmentStep, damaged, read_step, segment_path
from seqdedupe.log.embedded.tail import base_indexes, can_be_torn, headers_from, past_damage, read_what_can_be

STEP_BYTES = 1024 * 1024
"""The number of bytes that are read and checked at once. This amount stays in the processor's cache between the read
and the check."""


@dataclass(frozen=True, slots=True)
class Intact:
    """Complete records, one after the other. `table` has a place row (`format.layout`) for each record in `raw`."""

    raw: bytes
    table: Int64s


@dataclass(frozen=True, slots=True)
class Damage:
    """A place whose content differs from what was written."""

    file: Path
    offset: int
    what: str
    first_index: int
    """The index of the first affected message. The damage may affect no message."""

    next_index: int | None
    """The index after the last affected message; None if it is unknown."""

    record: tuple[bytes, Int64s] | None = None
    """The buffer and the place row of the damaged record, if its columns are intact."""


@dataclass(frozen=True, slots=True)
class TornEnd:
    """Data that a crash has left half-written, and that was never reported as stored. The next opening for writing cuts
    this data off."""

    file: Path
    offset: int
    size_bytes: int
    records: int
    """The approximate number of records."""


@dataclass(frozen=True, slots=True)
class DurablePart:
    """The part of a segment file that was synced."""

    path: Path
    identity: LogIdentity
    base_index: int
    end: int
    """The offset in the file at which the records end."""
    next_index: int
    """The index after the last record."""


Read = Callable[[int, int, int], bytes]
"""`os.pread` or a function like it: file, size, offset."""

Found = Intact | Damage | TornEnd


def inspect(folder: Path, identity: LogIdentity, replay: JournalReplay | None = None) -> Iterator[Found]:
    """Yield the content of a log's files, in order, as if the log's records in the journal were already written back. A
    torn end comes last.

    `replay` is the journal of the logs' folder, if the caller has already read it.

    Raises NEWER_FORMAT, OLDER_FORMAT for a record of another version; LOG_DAMAGED if the log's part of the journal is
    damaged; OSError. Data that the disk cannot return raises no error, but is yielded as damage.
    """
    bases = base_indexes(folder) if folder.exists() else []
    if not bases:
        yield Damage(folder, 0, "it has no segment files", 0, None)
        return
    inspection = _Inspection(identity, bases[0], read_what_can_be, is_open=False)
    parts = (replay or JournalReplay(folder.parent)).parts_of(identity.incarnation)
    for base in bases:
        path = segment_path(folder, base)
        yield from inspection.begin(path, base)
        here = [part for part in parts if part.base_index == base]
        with path.open("rb") as file:
            if why := why_not(path, file.fileno(), identity, here):
                yield Damage(path, here[0].offset, why.message, inspection.next_index, inspection.next_index)
                here = []
            inspection.read, inspection.strict_read = _with_parts(read_what_can_be, here), _with_parts(os.pread, here)
            size = max([os.fstat(file.fileno()).st_size, *(part.end for part in here)])
            yield from _File(inspection, path, file.fileno(), base, size, is_last=base == bases[-1]).run()
    if inspection.unfinished is not None:
        yield Damage(*inspection.unfinished, inspection.next_index, None)


def inspect_part(part: DurablePart, read: Read) -> Generator[Found, None, None]:
    """Yield the content of the synced part of one segment file. Nothing in this part can be torn, so every error is
    damage.

    Raises NEWER_FORMAT; OSError, including FileNotFoundError; and the errors of `read`.
    """
    inspection = _Inspection(part.identity, part.base_index, read, is_open=True)
    with part.path.open("rb") as file:
        size = min(part.end, os.fstat(file.fileno()).st_size)
        yield from _File(inspection, part.path, file.fileno(), part.base_index, size, is_last=False).run()
    yield from inspection.begin(part.path, part.next_index)


def _with_parts(read: Read, parts: list[Part]) -> Read:
    """Return a function that reads as if these parts were already written to the file."""

    def patched(file: int, size: int, offset: int) -> bytes:
        raw = bytearray(read(file, size, offset))
        for part in parts:
            begin, end = max(part.offset, offset), min(part.end, offset + size)
            if begin < end:
                raw += bytes(max(0, end - offset - len(raw)))
                raw[begin - offset : end - offset] = part.body[begin - part.offset : end - part.offset]
        return bytes(raw)

    return patched if parts else read


class _Inspection:
    """The state that the inspection of one file passes to the inspection of the next file."""

    def __init__(self, identity: LogIdentity, next_index: int, read: Read, *, is_open: bool) -> None:
        self.is_open = is_open
        """Whether the log is open. An open log has this format version, so a record that seems to have an earlier
        version is damage."""
        self.identity = identity
        self.next_index = next_index
        self.read = read
        self.strict_read: Read = os.pread
        """Like `read`, but raises OSError for data that the disk cannot return."""
        self.ownership = 0
        self.unfinished: tuple[Path, int, str] | None = None
        """The file, offset and description of damage whose end is only known from the next file."""
        self.end: tuple[Path, int] | None = None
        """The previous file, and the offset at which its records end."""

    def begin(self, path: Path, base: int) -> Iterator[Damage]:
        """Begin the file at `path`, whose first record should have the index `base`. Yield damage between the previous
        file and this one."""
        before, self.next_index = self.next_index, max(base, self.next_index)
        if self.unfinished is not None:
            yield Damage(*self.unfinished, before, self.next_index)
            self.unfinished = None
        elif base > before and self.end is not None:
            what = f"records up to index {base - 1} should follow: the file was cut short, or the next one is missing"
            yield Damage(*self.end, what, before, base)
            self.ownership = 0
        elif base < before:
            yield Damage(path, 0, f"it begins with index {base}, which stands in the file before", before, before)


class _File:
    """One file of an inspection."""

    def __init__(self, log: _Inspection, path: Path, file: int, base_index: int, size: int, *, is_last: bool) -> None:
        self._log = log
        self._path = path
        self._file = file
        self._base_index = base_index
        self._is_last = is_last
        self._size = size
        self._named_synced = 0
        """The highest synced offset in a whole record."""
        self._synced: int | None = None

    def run(self) -> Iterator[Found]:
        log, at = self._log, 0
        with ThreadPoolExecutor(1, "seqdedupe-inspection") as thread:
            following = thread.submit(self._step, at, log.next_index, log.ownership)
            while at < self._size:
                step = following.result()
                at = step.end
                is_at_end = step.why == records.END
                if is_at_end:
                    # Check the payloads of these records while the thread reads the next records.
                    following = thread.submit(self._step, at, step.next_index, step.ownership)
                for raw, table in step.parts:
                    for found in self._with_payloads(raw, table):
                        yield found
                        if isinstance(found, TornEnd):
                            return
                log.ownership = step.ownership
                if not is_at_end:
                    at, stop = self._past(at, step.why)
                    if stop is not None:
                        yield stop
                    following = thread.submit(self._step, at, log.next_index, log.ownership)
        log.end = self._path, self._size

    def _step(self, at: int, next_index: int, ownership: int) -> SegmentStep:
        identity = self._log.identity
        return read_step(self._file, identity, at, self._size, next_index, ownership, STEP_BYTES, self._log.read)

    def _with_payloads(self, raw: bytes, table: Int64s) -> Iterator[Found]:
        """Yield the records, whose columns are intact. Yield each record with damaged payloads separately, as
        damage."""
        self._named_synced = max(self._named_synced, int(table[:, SYNCED_OFFSET].max()))
        view = np.frombuffer(raw, np.uint8)
        while len(table):
            bad = records.first_bad_payload(view, table, len(table))
            whole = table if bad < 0 else table[:bad]
            if len(whole):
                self._log.next_index = int(whole[-1, BASE_INDEX] + whole[-1, ROWS])
                yield Intact(raw, whole)
            if bad < 0:
                return
            places, table = table[bad], table[bad + 1 :]
            offset = records.file_offset_of(raw, places)
            if self._may_be_torn(offset):
                yield self._torn(offset)
                return
            first = int(places[BASE_INDEX])
            self._log.next_index = first + int(places[ROWS])
            what = "the payloads are not what was written"
            yield Damage(self._path, offset, what, first, self._log.next_index, (raw, places))

    def _past(self, at: int, why: int) -> tuple[int, Damage | TornEnd | None]:
        """Return the offset at which the inspection continues after the scan stopped at `at`, and the finding at `at`.
        The finding is None if only the next file shows where the damage ends."""
        log = self._log
        first = log.next_index
        what = WHAT_STANDS_THERE[why]
        if why == records.NEWER or (why == records.OLDER and at == 0 and not log.is_open):
            raise damaged(self._path, at, what, why)
        log.ownership = 0
        if why == records.OTHER_OWNER:
            return at, Damage(self._path, at, what, first, first)
        if why != records.NOT_CONTIGUOUS and self._may_be_torn(at):
            return self._size, self._torn(at)
        onward = past_damage(self._file, log.identity, at, self._size, first, self._base_index, log.read)
        if onward is None:
            log.unfinished = self._path, at, what
            return self._size, None
        offset, log.next_index = onward
        return offset, Damage(self._path, at, what, first, log.next_index)

    def _headers(self, at: int) -> Iterator[tuple[int, bytes]]:
        return headers_from(self._file, self._log.identity, at, self._size, self._base_index, self._log.read)

    def _may_be_torn(self, offset: int) -> bool:
        """Return whether a crash may have left the record in this state. This is possible only in the last file, at or
        after the highest synced offset in any of its headers. See `can_be_torn`."""
        if not self._is_last:
            return False
        if self._synced is None:
            after = (records.synced_offset_of(header) for _, header in self._headers(offset))
            self._synced = max(self._named_synced, *after, 0)
        if offset < self._synced:
            return False
        log = self._log
        try:
            return can_be_torn(self._file, log.identity, offset, self._size, self._base_index, log.strict_read)
        except OSError:
            return False

    def _torn(self, offset: int) -> TornEnd:
        count = sum(1 for _ in self._headers(offset))
        return TornEnd(self._path, offset, self._size - offset, count)
