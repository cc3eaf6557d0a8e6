"""Read the journal of an earlier process, and write each log's part of the journal back to the log.

When the journal confirmed the records, the segments were not synced yet. So a power cut may have removed the records
from the segments. The records are always written to the segments again, even if the segments seem to have them: after a
failed sync, the system shows data that the disk does not have.
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
"""The folder of the journal, in the folder of the logs."""
SUFFIX = ".journal"
KEPT_SUFFIX = ".kept"
SECRET_FILE = "secret"
FORGOTTEN_FILE = "forgotten"
BEGUN_FILE = "journal-begun"
"""A file in the folder of the logs, with the number of the first confirmed round in the journal's newest file. From
this number, a start notices the loss of the newest file. Later rounds show the loss of any other file."""
DAMAGED_READS = 2
"""Damage is considered permanent after this number of consecutive reads have found it."""
_NUMBER_BYTES, _CRC_BYTES = 8, 4
_HINT = (
    "Nothing was changed. Stop the sidecar, and restore both `logs` and `store` from one backup. If you "
    "have no backup, start the sidecar once with --give-up-journal. Each log then continues with the "
    "messages in its own files."
)


def journal_path(folder: Path, number: int) -> Path:
    """Return the path of the file whose first round has this number."""
    return folder / f"{number:020d}{SUFFIX}"


class JournalReplay:
    """The rounds that earlier processes left in the journal of a folder of logs. Any thread may use this object.

    The journal is read at the first use. While a part is missing or damaged, the journal forgets nothing. With
    `gives_up`, damaged parts are ignored and all intact parts are used. With `is_expected`, a missing journal is
    damage.
    """

    def __init__(self, logs_folder: Path, *, is_expected: bool = False, gives_up: bool = False) -> None:
        self._logs_folder = logs_folder
        self._is_expected = is_expected
        self._gives_up = gives_up
        self.given_up: list[str] = []
        """The missing or damaged parts that were ignored because of `gives_up`."""
        self.folder = logs_folder / FOLDER
        self.key: Int64s = NO_KEY
        self.highest = 0
        """The highest number of any round so far."""
        self._lock = threading.Lock()
        self._begun = 0
        """The number in BEGUN_FILE; 0 if no journal file has to exist."""
        self._begun_lock = threading.Lock()
        self._is_read = False
        self._damaged_reads = 0
        """The number of consecutive reads that found damage."""
        self._parts: defaultdict[int, list[Part]] = defaultdict(list)
        """The parts of each log, by incarnation, in the order in which they were written."""
        self._done: set[int] = set()
        """The incarnations of logs that no longer need the journal, because their parts were written back or they were
        deleted."""
        self._why: dict[int, SeqdedupeError] = {}
        """The errors of logs whose parts are damaged, by incarnation."""
        self._files: list[Path] = []

    @property
    def has_something(self) -> bool:
        """Whether the journal has files that can be removed. False if the journal has not been read yet."""
        return bool(self._files)

    @property
    def is_empty(self) -> bool:
        """Whether the journal has been read, and no log needs any data from the journal any more."""
        return self._is_read and not (self._files or self._parts or self._why)

    def look(self) -> list[str]:
        """Read the journal. Return `given_up`. Raises OSError."""
        with self._lock:
            self._read()
            return self.given_up

    def left(self) -> set[int]:
        """Return the incarnations of the logs for which the journal contains data. Raises OSError."""
        with self._lock:
            self._read()
            return set(self._parts)

    def parts_of(self, incarnation: int) -> list[Part]:
        """Return the parts that `take_back` would write to a log, in order. Change nothing. Raises LOG_DAMAGED,
        NEWER_FORMAT; OSError."""
        with self._lock:
            self._read()
            if why := self._why.get(incarnation):
                # Let the next call read again, because one bad read does not prove damage. After DAMAGED_READS bad
                # reads, do not read again for each further log.
                self._is_read = isinstance(why, DamagedError) and self._damaged_reads >= DAMAGED_READS
                raise why
            return list(self._parts.get(incarnation, ()))

    def take_back(self, folder: Path, identity: LogIdentity) -> None:
        """Write the data that the journal contains for a log to the log's segments. When this returns, the change is
        durable. Raises LOG_DAMAGED, NEWER_FORMAT; OSError. After OSError, the call can be repeated, because the journal
        keeps the part."""
        parts = self.parts_of(identity.incarnation)
        if not parts:
            return
        with self._lock:
            if put_back(folder, identity, parts):
                self._forget_log(identity.incarnation)

    def drop(self, incarnation: int) -> None:
        """Forget the part of a log that is deleted. Raises OSError."""
        with self._lock:
            self._read()
            self._forget_log(incarnation)

    def empty(self) -> bool:
        """Forget all rounds of earlier processes. Parts that are not written back to their logs yet are kept, in one
        file per log.

        When this returns, the change is durable. Afterwards the journal's folder exists. Return whether new rounds may
        be written: False while a part is damaged. Raises OSError. After an error, no new round may be written either.
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
                    # This log no longer exists.
                    self._forget_log(incarnation)
            # Make the names of the kept files durable before any round is forgotten.
            sync_folder(self.folder)
            # Skip one number, which a torn or refused round may have used.
            self.highest += 1
            self.forget(self.highest, self._files)
            self._files = []
            return True

    def begun(self, number: int) -> None:
        """Record the number of the first confirmed round in the newest file. From then on, a start notices the loss of
        this file. When this returns, the change is durable. Raises OSError."""
        with self._begun_lock:
            self._tell_begun(number)

    def forget(self, number: int, files: list[Path]) -> None:
        """Record that the rounds up to this number are forgotten, then remove the files. The record is durable before
        the files are removed. Raises OSError."""
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
        """Make the journal's folder with its secret. Sync an existing folder too, because the process that made it may
        have been killed before the sync."""
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
            self._damage_all(secret_path, "without it nothing in the journal can be trusted")
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
        # `forgotten` is compared because an earlier version of this program forgets rounds without updating BEGUN_FILE.
        if self._begun > forgotten and self._begun not in numbers:
            why = f"the newest file is missing or damaged, which began with round {self._begun}"
            self._damage_all(self.folder, why)
        for path in kept:
            try:
                found = journal.round_at(path.read_bytes(), 0, self.key)
            except OSError as e:
                # This file has only the parts of one log, so the other logs are not affected.
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
            # This includes refused rounds. The segments received the data of these rounds too.
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
        """Record damage for every existing log, since any log may have had records in the journal."""
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
        # Without this number, records that the segments already have are also written back, unchanged.
        logger.warning("%s is missing or damaged: the whole journal is taken back", path)
        return 0


def confirmed(rounds: list[JournalRound], forgotten: int, begun: int) -> Iterator[JournalRound | None]:
    """Yield the confirmed rounds, in order. Yield None for a round that is missing, or so damaged that the affected
    logs are unknown.

    The last round is omitted if it is torn. Otherwise the last round may have been confirmed, and is yielded. An
    earlier round was confirmed if the next confirmed round names it in `previous`. Refused rounds that are still in the
    file are skipped.
    """
    by_number = {found.number: found for found in rounds if found.number > forgotten}
    number = max(by_number, default=0)
    chain: list[JournalRound | None] = []
    while number > forgotten:
        found = by_number.get(number)
        chain.append(found)
        if found is None:
            # Earlier rounds cannot be distinguished from refused rounds. The missing round affects all logs anyway.
            break
        number = found.previous
    return reversed(chain[1:] if chain and chain[0] and is_unconfirmed(chain[0], begun) else chain)


def is_unconfirmed(last: JournalRound, begun: int) -> bool:
    """Return whether the last round may never have been confirmed. The round with the number `begun` was confirmed."""
    return last.is_torn and last.number > begun


def may_miss_later(raw: bytes, last: JournalRound, begun: int) -> bool:
    """Return whether rounds may be missing after the last readable round for a reason other than a power cut.

    `last` is the last readable round, and `raw` is the content of its file.
    """
    if last.damaged and not is_unconfirmed(last, begun):
        # The cause of this damage may also have damaged later rounds in the file.
        return last.end != len(raw)
    return journal.has_damaged_head(raw, last.end)


def put_back(folder: Path, identity: LogIdentity, parts: list[Part]) -> bool:
    """Write these parts of the journal to the log's segments. When this returns, the change is durable. If the log has
    no segments, return False. Raises LOG_DAMAGED; OSError."""
    bases = base_indexes(folder) if folder.exists() else []
    # If all segments are missing, `open_segments` reports the damage. Segments that retention has dropped are not
    # recreated.
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
    """Return the reason why these parts cannot be written to a segment; None if they can. Change nothing."""
    end = os.fstat(file).st_size
    try:
        for part in parts:
            _check_place(path, file, identity, part, end)
            end = max(end, part.end)
    except DamagedError as e:
        return e
    return None


def _check_place(path: Path, file: int, identity: LogIdentity, part: Part, end: int) -> None:
    """Raise LOG_DAMAGED if the segment has other records at the part's offset, or ends before it, or if the part does
    not belong to this log."""
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
    """Write a file in place. The content is durable on return, but the file's entry in its folder is not. A crash never
    tears the few bytes of a number. Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        write_all(file, data, 0)
        os.fdatasync(file)
    finally:
        os.close(file)


def _kept_path(folder: Path, incarnation: int) -> Path:
    return folder / f"{incarnation}{KEPT_SUFFIX}"


def _number_in(path: Path) -> int | None:
    """Return the number that `_sealed` has encoded in a file; None if the file is missing or has any other content.
    Raises OSError."""
    raw = path.read_bytes() if path.exists() else b""
    number = int.from_bytes(raw[:_NUMBER_BYTES], "little")
    return number if raw == _sealed(number) else None


def _sealed(number: int) -> bytes:
    raw = number.to_bytes(_NUMBER_BYTES, "little")
    crc: int = google_crc32c.value(raw)
    return raw + crc.to_bytes(_CRC_BYTES, "little")


def _why(path: Path, what: str, reason: str = "LOG_DAMAGED") -> SeqdedupeError:
    return error(reason, f"{path}: {what}", hint=_HINT if reason == "LOG_DAMAGED" else None, file=path)
