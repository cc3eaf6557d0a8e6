"""What the journal of an earlier process holds, and how each log takes its part of it back.

The segments were not synced when it was confirmed, so a power cut may have taken it from them. It is written at its
place again in any case: after a failed sync the system shows what the disk does not have.
"""

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import google_crc32c

from seqdedupe.batch import Int64s
from seqdedupe.errors import DamagedError, SeqdedupeError, error
from seqdedupe.files import sync_folder, write_all
from seqdedupe.format import journal, records
from seqdedupe.format.headers import NO_KEY, SECRET_BYTES, key_of
from seqdedupe.format.journal import JournalRound, Part
from seqdedupe.log.embedded.segment import (
    END,
    START,
    LogIdentity,
    damaged,
    read_piece,
    scan_bytes,
    segment_path,
    unreadable,
)
from seqdedupe.log.embedded.tail import base_indexes

logger = logging.getLogger("seqdedupe.log")

FOLDER = "journal"
"""In the folder of the logs."""
SUFFIX = ".journal"
KEPT_SUFFIX = ".kept"
SECRET_FILE = "secret"
FORGOTTEN_FILE = "forgotten"
BEGUN_FILE = "journal-begun"
"""In the folder of the logs: the number of the first confirmed round in the journal's newest file, which has to be
there. Later rounds tell of any other file that is lost."""
DAMAGED_READS = 2
"""So many in a row are believed."""
_NUMBER_BYTES, _CRC_BYTES = 8, 4
_HINT = (
    "Nothing was changed. Stop the sidecar and put logs and store back from one backup, the folder journal included; "
    "without one start once with --give-up-journal: each log goes on with what stands in its files."
)


def journal_path(folder: Path, number: int) -> Path:
    """The file whose first round has this number."""
    return folder / f"{number:020d}{SUFFIX}"


class JournalReplay:
    """What is left of earlier processes in the journal of a folder of logs. For any thread.

    Read when it is first asked for. While something of it is missing or damaged nothing of it is forgotten, unless
    that is given up: then all counts that is intact. `is_expected`: there must be one.
    """

    def __init__(self, logs_folder: Path, *, is_expected: bool = False, gives_up: bool = False) -> None:
        self._logs_folder = logs_folder
        self._is_expected = is_expected
        self._gives_up = gives_up
        self.given_up: list[str] = []
        """What was missing or damaged, and does not count."""
        self.folder = logs_folder / FOLDER
        self.key: Int64s = NO_KEY
        self.highest = 0
        """No round so far had a higher number."""
        self._lock = threading.Lock()
        self._begun = 0
        """What stands in BEGUN_FILE; 0 if no file needs to be there."""
        self._begun_lock = threading.Lock()
        self._is_read = False
        self._damaged_reads = 0
        """In a row."""
        self._parts: defaultdict[int, list[Part]] = defaultdict(list)
        """By incarnation, in the order in which they were written."""
        self._done: set[int] = set()
        """Logs that have taken their part back, or are deleted."""
        self._why: dict[int, SeqdedupeError] = {}
        """Logs whose part is damaged."""
        self._files: list[Path] = []

    @property
    def has_something(self) -> bool:
        """Whether there is anything to be forgotten, as far as it was read."""
        return bool(self._files)

    @property
    def is_empty(self) -> bool:
        """Whether it was read, and no log needs anything of it any more."""
        return self._is_read and not (self._files or self._parts or self._why)

    def look(self) -> list[str]:
        """Reads it; what is given up. Raises OSError."""
        with self._lock:
            self._read()
            return self.given_up

    def left(self) -> set[int]:
        """Logs that have something to take back. Raises OSError."""
        with self._lock:
            self._read()
            return set(self._parts)

    def parts_of(self, incarnation: int) -> list[Part]:
        """What a log would take back, in order; changes nothing. Raises LOG_DAMAGED, NEWER_FORMAT; OSError."""
        with self._lock:
            self._read()
            if why := self._why.get(incarnation):
                # Read again when it is asked for again: one bad read is no damage. But not once more for each log.
                self._is_read = isinstance(why, DamagedError) and self._damaged_reads >= DAMAGED_READS
                raise why
            return list(self._parts.get(incarnation, ()))

    def take_back(self, folder: Path, identity: LogIdentity) -> None:
        """Writes a log's part of the journal to its segments, durable on return.

        Raises LOG_DAMAGED, NEWER_FORMAT; OSError, and then it can be tried again: the journal keeps it.
        """
        parts = self.parts_of(identity.incarnation)
        if not parts:
            return
        with self._lock:
            if put_back(folder, identity, parts):
                self._forget_log(identity.incarnation)

    def drop(self, incarnation: int) -> None:
        """The log is deleted. Raises OSError."""
        with self._lock:
            self._read()
            self._forget_log(incarnation)

    def empty(self) -> bool:
        """Forgets all that was taken back; what a log has not taken back yet is kept in a file of its own.

        Durable on return. Afterwards the folder is there. Whether a new round may be written: not while something is
        damaged. Raises OSError: then neither.
        """
        with self._lock:
            self._read()
            if self._why:
                return False
            self._make()
            for incarnation, parts in list(self._parts.items()):
                if (self._logs_folder / str(incarnation)).exists():
                    self._keep(incarnation, parts)
                else:
                    # There is no such log any more.
                    self._forget_log(incarnation)
            # What is kept has its name before anything is forgotten.
            sync_folder(self.folder)
            # A round that a power cut has torn, or that was refused, has a number too.
            self.highest += 1
            self.forget(self.highest, self._files)
            self._files = []
            return True

    def begun(self, number: int) -> None:
        """The newest file has its first confirmed round, which is missed from now on if it is lost. Durable on return.
        Raises OSError."""
        with self._begun_lock:
            self._tell_begun(number)

    def forget(self, number: int, files: list[Path]) -> None:
        """Rounds up to this number count no more, durable before the files go. Raises OSError."""
        _write_in_place(self.folder / FORGOTTEN_FILE, _sealed(number))
        with self._begun_lock:
            if 0 < self._begun <= number:
                self._tell_begun(0)
        for path in files:
            path.unlink(missing_ok=True)

    def _tell_begun(self, number: int) -> None:
        path = self._logs_folder / BEGUN_FILE
        is_new = not path.exists()
        _write_in_place(path, _sealed(number))
        if is_new:
            sync_folder(self._logs_folder)
        self._begun = number

    def _forget_log(self, incarnation: int) -> None:
        self._done.add(incarnation)
        self._parts.pop(incarnation, None)
        self._why.pop(incarnation, None)
        _kept_path(self.folder, incarnation).unlink(missing_ok=True)

    def _make(self) -> None:
        """Makes the folder with its secret. What is there already may be of a process that was killed before its
        syncs."""
        path = self.folder / SECRET_FILE
        secret = path.read_bytes() if len(self.key) else os.urandom(SECRET_BYTES)
        self.folder.mkdir(parents=True, exist_ok=True)
        _write_in_place(path, secret)
        for folder in (self.folder, self._logs_folder):
            sync_folder(folder)
        self.key = key_of(secret)

    def _keep(self, incarnation: int, parts: list[Part]) -> None:
        path = _kept_path(self.folder, incarnation)
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)
        raw = journal.encoded(parts, number=0, previous=0, forgotten=0, file_offset=0, key=self.key)
        _write_in_place(new, raw)
        new.rename(path)

    def _read(self) -> None:
        if self._is_read:
            return
        self._parts.clear()
        self._why.clear()
        self.given_up.clear()
        self.highest = self._begun = self._read_begun()
        if self.folder.exists():
            self._read_all()
        elif self._is_expected or self._begun:
            self._damage_all(self.folder, "the journal is missing")
        for what in self.given_up:
            logger.error("%s: given up", what)
        self._damaged_reads = self._damaged_reads + 1 if self._why else 0
        self._is_read = True

    def _read_all(self) -> None:
        secret_path = self.folder / SECRET_FILE
        secret = secret_path.read_bytes() if secret_path.exists() else b""
        self._files = sorted(self.folder.glob(f"*{SUFFIX}"))
        kept = sorted(path for path in self.folder.glob(f"*{KEPT_SUFFIX}") if path.stem.isdecimal())
        if len(secret) == SECRET_BYTES:
            self.key = key_of(secret)
        elif self._files or kept or self._is_expected or self._begun:
            self._damage_all(secret_path, "without it nothing in the journal can be believed")
            self._files += kept
            return
        rounds: list[JournalRound] = []
        file_of_last = b""
        for path in self._files:
            raw = path.read_bytes()
            if in_file := list(journal.rounds_in(raw, self.key)):
                rounds += in_file
                file_of_last = raw
        forgotten = max([self._forgotten(), *(found.forgotten for found in rounds)])
        numbers = {found.number for found in rounds}
        self.highest = max(forgotten, self._begun, *numbers)
        # An earlier version forgets rounds and does not say that their file need not be there.
        if self._begun > forgotten and self._begun not in numbers:
            why = f"the newest file is missing or damaged, which began with round {self._begun}"
            self._damage_all(self.folder, why)
        for path in kept:
            try:
                found = journal.round_at(path.read_bytes(), 0, self.key)
            except OSError as e:
                # Other logs have nothing in it.
                self._why[int(path.stem)] = unreadable(path, e)
                continue
            if found is None or found.damaged:
                self._damage(int(path.stem), path)
            else:
                self._add(found)
        chain = list(confirmed(rounds, forgotten, self._begun))
        is_more_missing = bool(chain) and may_miss_later(file_of_last, rounds[-1], self._begun)
        if None in chain or is_more_missing:
            self._damage_all(self.folder, "a round of the journal is missing or damaged")
            # What was refused among them says what its segments were given all the same.
            intact = sorted(rounds, key=lambda found: found.number) if self._gives_up else []
            chain = [found for found in intact if found.number > forgotten]
        for found in filter(None, chain):
            self._add(found)

    def _add(self, found: JournalRound) -> None:
        if found.version != journal.FORMAT_VERSION:
            self._damage_all(self.folder, "the journal is of a newer format version", "NEWER_FORMAT")
        for incarnation in found.damaged:
            self._damage(incarnation, self.folder)
        for part in found.parts:
            if part.incarnation not in self._done:
                self._parts[part.incarnation].append(part)

    def _damage(self, incarnation: int, path: Path) -> None:
        if self._gives_up:
            self.given_up.append(f"{path}: the part of log {incarnation} in the journal is damaged")
            self._files += [path] if path.is_file() else []
        elif incarnation not in self._done:
            self._why[incarnation] = _why(path, "the log's part of the journal is damaged")

    def _damage_all(self, path: Path, what: str, reason: str = "LOG_DAMAGED") -> None:
        """Each log that there is may have something in it."""
        if self._gives_up and reason == "LOG_DAMAGED":
            self.given_up.append(f"{path}: {what}")
            return
        names = [path.name for path in self._logs_folder.glob("*") if path.name.isdecimal()]
        for incarnation in set(map(int, names)) - self._done:
            self._why[incarnation] = _why(path, what, reason)

    def _read_begun(self) -> int:
        path = self._logs_folder / BEGUN_FILE
        number = _number_in(path)
        if number is None and path.exists():
            logger.warning("%s is damaged: a newest file of the journal that is missing would not be noticed", path)
        return number or 0

    def _forgotten(self) -> int:
        path = self.folder / FORGOTTEN_FILE
        if (number := _number_in(path)) is not None:
            return number
        # Then more is written back than is needed, at the place where it stands already.
        logger.warning("%s is missing or damaged: the whole journal is taken back", path)
        return 0


def confirmed(rounds: list[JournalRound], forgotten: int, begun: int) -> Iterator[JournalRound | None]:
    """The rounds that were confirmed, in order; None where one is missing or damaged beyond telling whose it was.

    The last one may be torn, and then it does not count; if it is not, it may have been confirmed. Every other one was
    if the one after it says so: what was refused, and stands there all the same, is passed over.
    """
    by_number = {found.number: found for found in rounds if found.number > forgotten}
    number = max(by_number, default=0)
    chain: list[JournalRound | None] = []
    while number > forgotten:
        found = by_number.get(number)
        chain.append(found)
        if found is None:
            # What stands before it cannot be told from what was refused: all logs are concerned anyway.
            break
        number = found.previous
    return reversed(chain[1:] if chain and chain[0] and is_unconfirmed(chain[0], begun) else chain)


def is_unconfirmed(last: JournalRound, begun: int) -> bool:
    """Whether the last round was perhaps never confirmed. The one with which the newest file was `begun` was."""
    return last.is_torn and last.number > begun


def may_miss_later(raw: bytes, last: JournalRound, begun: int) -> bool:
    """Whether rounds may be missing after the last one that can be read, and a power cut does not explain that.

    `raw` is the file of that round.
    """
    if last.damaged and not is_unconfirmed(last, begun):
        # What has damaged it may have damaged more.
        return last.end != len(raw)
    return journal.has_damaged_head(raw, last.end)


def put_back(folder: Path, identity: LogIdentity, parts: list[Part]) -> bool:
    """Writes a log's parts to its segments, durable on return; False if it has none. Raises LOG_DAMAGED; OSError."""
    bases = base_indexes(folder) if folder.exists() else []
    # Without any there is damage enough: `open_segments` says so. What retention has dropped is not made again.
    for base in sorted({part.base_index for part in parts if bases and part.base_index >= bases[0]}):
        _put_back(folder, identity, base, [part for part in parts if part.base_index == base])
    return bool(bases)


def _put_back(folder: Path, identity: LogIdentity, base_index: int, parts: list[Part]) -> None:
    path = segment_path(folder, base_index)
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as e:
        raise damaged(path, parts[0].offset, "the file is missing, and the journal holds records of it") from e
    try:
        if why := why_not(path, file, identity, parts):
            raise why
        for part in parts:
            write_all(file, part.body, part.offset)
        os.fsync(file)
    finally:
        os.close(file)


def why_not(path: Path, file: int, identity: LogIdentity, parts: list[Part]) -> DamagedError | None:
    """Why a segment cannot take these back; None if it can. Changes nothing."""
    end = os.fstat(file).st_size
    try:
        for part in parts:
            _check_place(path, file, identity, part, end)
            end = max(end, part.end)
    except DamagedError as e:
        return e
    return None


def _check_place(path: Path, file: int, identity: LogIdentity, part: Part, end: int) -> None:
    """Raises LOG_DAMAGED if the segment holds other records there, or the part is none of this log."""
    body, offset = part.body, part.offset
    table, size, _ = scan_bytes(body, identity, offset, -1, -1)
    if size != len(body):
        raise damaged(path, offset + size, "the journal holds something else for this place than a record of this log")
    if end < offset:
        raise damaged(path, end, f"it ends there, and was synced up to byte {offset}")
    standing = os.pread(file, len(body), offset)
    for start, stop in table[:, (START, END)].tolist():
        if standing[start:stop] != body[start:stop] and start < len(standing):
            there = read_piece(file, identity, offset + start, end, -1, payloads_from=-1)
            if there.size:
                raise damaged(path, offset + start, "the journal holds another record for this place", records.DAMAGED)


def _write_in_place(path: Path, data: bytes) -> None:
    """Durable on return, but for the file's entry. So few bytes as a number has are never torn. Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        write_all(file, data, 0)
        os.fdatasync(file)
    finally:
        os.close(file)


def _kept_path(folder: Path, incarnation: int) -> Path:
    return folder / f"{incarnation}{KEPT_SUFFIX}"


def _number_in(path: Path) -> int | None:
    """What `_sealed` has written there; None if nothing, or something else, stands there. Raises OSError."""
    raw = path.read_bytes() if path.exists() else b""
    number = int.from_bytes(raw[:_NUMBER_BYTES], "little")
    return number if raw == _sealed(number) else None


def _sealed(number: int) -> bytes:
    raw = number.to_bytes(_NUMBER_BYTES, "little")
    crc: int = google_crc32c.value(raw)
    return raw + crc.to_bytes(_CRC_BYTES, "little")


def _why(path: Path, what: str, reason: str = "LOG_DAMAGED") -> SeqdedupeError:
    return error(reason, f"{path}: {what}", hint=_HINT if reason == "LOG_DAMAGED" else None, file=path)
