"""Backups of a data directory: what one consists of, as its manifest says; how a file is copied with its checksum; a
backup that is checked, or of which a data directory is made; and `BackupMaker`, which writes one while a sidecar runs.

The manifest is written last: without one nothing is a backup. `docs/internals/formats-backup.md` has the format.
"""

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import google_crc32c

from seqdedupe.errors import InvalidRequestError, SeqdedupeError, error
from seqdedupe.files import UNFINISHED, becoming, check_sealed, head_of, sync_folder, writing_sealed
from seqdedupe.log.embedded.inspection import Damage, DurablePart, inspect_part
from seqdedupe.log.embedded.log_folder import SECRET_FILE, TOPIC_FILE
from seqdedupe.log.embedded.segment import unreadable
from seqdedupe.log.embedded.tail import read_what_can_be
from seqdedupe.store import directories
from seqdedupe.store.db import Store, write_copy
from seqdedupe.store.directories import MANIFEST_FILE, WORKERS_FILE
from seqdedupe.store.parts import TopicRecord

MAGIC = b"seqdedupe-backup"
FORMAT_VERSION = 1

_HEAD = head_of(MAGIC, FORMAT_VERSION)


@dataclass(frozen=True, slots=True)
class BackupFile:
    """A file of a backup."""

    path: str
    """Below the backup's folder, with `/` between the parts."""
    size: int
    crc32c: int
    mtime_ns: int
    """When the sidecar's own file was last written to, if that had no more than was copied; else 0."""


@dataclass(frozen=True, slots=True)
class BackupFault:
    """A topic that is not whole in the backup, because it was not where it was taken."""

    topic: str
    incarnation: int
    what: str


@dataclass(slots=True)
class Manifest:
    """What a backup holds."""

    made_at_us: int
    """The moment that it is of, since 1970."""
    version: str
    """Of the program that made it."""
    files: list[BackupFile] = field(default_factory=list)
    damaged: list[BackupFault] = field(default_factory=list)
    """Places where the copy is damaged as the original is."""
    left_out: list[BackupFault] = field(default_factory=list)
    """Topics of which there is nothing but the name."""

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files)

    def write(self, folder: Path) -> None:
        """Writes it, durable on return. Raises OSError."""
        with writing_sealed(folder / MANIFEST_FILE, _HEAD) as put:
            put(json.dumps(asdict(self), indent=1, ensure_ascii=False).encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a backup. Raises BACKUP_DAMAGED if there is none or it is not what was written, NEWER_FORMAT;
    OSError."""
    path = folder / MANIFEST_FILE
    try:
        with path.open("rb") as file:
            size = check_sealed(path, file, _HEAD, 1, "a backup's manifest")
            said: dict[str, Any] = json.loads(file.read(size))
    except FileNotFoundError as e:
        if not folder.exists():
            raise error("BACKUP_DAMAGED", f"{folder} is not there", hint="Is that the backup's name, and place?") from e
        what = f"{folder} is no backup, or one that was never finished: it has no file {MANIFEST_FILE}"
        raise error("BACKUP_DAMAGED", what) from e
    except SeqdedupeError as e:
        if e.reason == "NEWER_FORMAT":
            raise
        raise damaged(folder, e.message) from e
    try:
        files = [BackupFile(**one) for one in said.pop("files")]
        damaged_, left_out = ([BackupFault(**one) for one in said.pop(name)] for name in ("damaged", "left_out"))
        manifest = Manifest(**said, files=files, damaged=damaged_, left_out=left_out)
        _check_paths(file.path for file in files)
    except (KeyError, TypeError, InvalidRequestError) as e:
        raise damaged(folder, f"its manifest says what cannot be: {e}") from e
    return manifest


def damaged(folder: Path, what: str) -> SeqdedupeError:
    """The error of a backup that is not what was written."""
    return error("BACKUP_DAMAGED", f"{folder} is damaged: {what}")


def _check_paths(paths: Iterable[str]) -> None:
    """Raises INVALID_REQUEST for one that leads elsewhere."""
    for path in paths:
        parts = PurePosixPath(path).parts
        if not parts or ".." in parts or parts[0] == "/" or MANIFEST_FILE in parts:
            raise error("INVALID_REQUEST", f"{path!r} is no file of a backup")


# -- Copying a file while it is read, with its checksum, durable on return.

PIECE_BYTES = 1024 * 1024
SYNC_BYTES = 8 * 1024 * 1024
"""What is written is synced in so large parts, so that syncs of a log on the same disk do not wait for much more."""


Pay = Callable[[int], None]
"""Told how many bytes were copied. May raise, which breaks the copying off."""


def copy_file(source: Path, target: Path, size: int, pay: Pay) -> tuple[int, int]:
    """The first bytes of a file, as a new file that only its owner may read; how many there were, and their CRC32C.

    Zeros stand for what the disk cannot give. Raises LOG_UNREADABLE if the source cannot be read; OSError if the target
    cannot be written, FileExistsError among them.
    """
    try:
        there = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        raise unreadable(source, e) from e
    try:
        made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            return _copy(source, there, made, size, pay)
        finally:
            os.close(made)
    finally:
        os.close(there)


def _copy(path: Path, source: int, target: int, size: int, pay: Pay) -> tuple[int, int]:
    at = synced = crc = 0
    while at < size:
        try:
            raw = read_what_can_be(source, min(PIECE_BYTES, size - at), at)
        except OSError as e:
            raise unreadable(path, e) from e
        if not raw:
            break
        crc = google_crc32c.extend(crc, raw)
        rest = memoryview(raw)
        while rest:
            rest = rest[os.write(target, rest) :]
        at += len(raw)
        if at - synced >= SYNC_BYTES:
            os.fdatasync(target)
            synced = at
        pay(len(raw))
    os.fsync(target)
    return at, crc


def checksum(path: Path, pay: Pay) -> int:
    """The CRC32C of a file. Raises OSError."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        while raw := file.read(PIECE_BYTES):
            crc = google_crc32c.extend(crc, raw)
            pay(len(raw))
    return crc


def forget_pages(path: Path) -> None:
    """Has the system read a file from the disk the next time, where it can. Raises LOG_UNREADABLE."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise unreadable(path, e) from e
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


TOKEN_FILE = "token"
OF_THE_WHOLE = (WORKERS_FILE, TOKEN_FILE)
"""What a data directory has once, however many workers it is split into."""


# -- A backup, checked against its manifest, and a data directory made of it.


def parts_of(backup: Path) -> list[Path]:
    """The folders of a backup that have manifests: itself, or one for each of several workers.

    Raises BACKUP_DAMAGED if that of a worker is missing; STORE_DAMAGED, SHARD_CLAIMED_TWICE if what they say does not
    fit; OSError.
    """
    split = directories.check_stays(backup) if (backup / directories.WORKERS_FILE).exists() else None
    if split is None:
        return [backup]
    parts = [directories.of_worker(backup, worker) for worker in range(split.workers)]
    if missing := [part.name for part in parts if not part.is_dir()]:
        what = f"it is one of {split.workers} workers, and these are not there: {', '.join(missing)}"
        raise damaged(backup, what)
    directories.check_workers(backup, split)
    return parts


def check(backup: Path) -> Manifest:
    """Reads all files of a part of a backup. Raises BACKUP_DAMAGED if one is not what the manifest says, NEWER_FORMAT;
    OSError."""
    found = read_manifest(backup)
    for file in found.files:
        path = backup / file.path
        if not path.is_file() or path.is_symlink():
            raise damaged(backup, f"the file {file.path} is missing")
        _check_same(backup, file, path.stat().st_size, checksum(path, _ignore))
    return found


def restore(backup: Path, to: Path) -> list[Manifest]:
    """Makes a data directory of a backup: durable, and there by its name, on return. Everything is checked on the way.
    The backup shares nothing with it.

    Raises DIRECTORY_NOT_EMPTY unless `to` is an empty directory or not there, BACKUP_DAMAGED, NEWER_FORMAT, and what
    `parts_of` raises; OSError. Then nothing is left; a power cut leaves what is named `.unfinished`.
    """
    parts = parts_of(backup)
    with becoming(to, backup) as unfinished:
        found = [_restore_part(part, unfinished / part.relative_to(backup)) for part in parts]
        if parts != [backup]:
            for name in OF_THE_WHOLE:
                if (source := backup / name).exists():
                    copy_file(source, unfinished / name, source.stat().st_size, _ignore)
        sync_folder(unfinished)
    return found


def _restore_part(backup: Path, to: Path) -> Manifest:
    found = read_manifest(backup)
    to.mkdir(mode=0o700, exist_ok=True)
    folders = {to}
    for file in found.files:
        target = to / file.path
        for folder in reversed(target.relative_to(to).parents):
            (to / folder).mkdir(mode=0o700, exist_ok=True)
            folders.add(to / folder)
        copied, crc = copy_file(backup / file.path, target, file.size + 1, _ignore)
        _check_same(backup, file, copied, crc)
        if file.mtime_ns:
            # So that the next backup knows it.
            os.utime(target, ns=(file.mtime_ns, file.mtime_ns))
    for folder in folders:
        sync_folder(folder)
    return found


def _check_same(backup: Path, file: BackupFile, size: int, crc: int) -> None:
    if size != file.size:
        raise damaged(backup, f"{file.path} has {size} bytes, and was written with {file.size}")
    if crc != file.crc32c:
        raise damaged(backup, f"{file.path} is not what was written: its checksum is wrong")


def _ignore(_: int) -> None:
    """Nobody counts."""


# -- Writing a backup: the records of a store, the logs, and a manifest when all of it is durable.


LOGS, STORE = "logs", "store"
LOCK_FILE = "LOCK"
"""In a backup while it is written."""
MAX_FAULTS_A_FILE = 100


@dataclass(frozen=True, slots=True)
class Earlier:
    """A backup that is there already: what it has need not be copied again."""

    folder: Path
    files: dict[str, BackupFile]

    @staticmethod
    def newest(folders: list[Path]) -> "Earlier | None":
        """The newest of those among them that are backups, as far as their manifests say."""
        found: list[tuple[int, Path]] = []
        for folder in folders:
            with suppress(OSError):
                found.append(((folder / MANIFEST_FILE).lstat().st_mtime_ns, folder))
        for _, folder in sorted(found, reverse=True):
            with suppress(SeqdedupeError, OSError):
                return Earlier(folder, {file.path: file for file in read_manifest(folder).files})
        return None


class BackupMaker:
    """A backup that is being written, to the folder `to`, which is not there before `finish`. Blocks; for one thread,
    but for `stop` and the numbers.

    Everything raises OSError if the backup cannot be written, and OUTCOME_UNKNOWN once it was stopped.
    """

    def __init__(self, to: Path) -> None:
        self._to = to
        self._folder = to.with_name(to.name + UNFINISHED)
        self._lock: int | None = None
        """The descriptor, once nobody else may write there."""
        self._earlier: Earlier | None = None
        self._stopped = threading.Event()
        self.manifest = Manifest(0, version("seqdedupe"))
        self.bytes_done = 0
        self.bytes_linked = 0
        """Of `bytes_done`, those of files that an earlier backup shares."""

    def begin(self, others: list[Path]) -> None:
        """Files are shared with the newest of these, of those that are backups. What another process has left
        unfinished under this name goes.

        Raises BACKUP_FAILED if another process makes one of this name meanwhile, which goes on.
        """
        self._earlier = Earlier.newest(others)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._claim()
        for left in self._folder.iterdir():
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            elif left.name != LOCK_FILE:
                left.unlink()
        (self._folder / LOGS).mkdir(mode=0o700)

    def _claim(self) -> None:
        # A file, since not every file system locks folders.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(self._folder / LOCK_FILE, flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(lock)
            if not isinstance(e, BlockingIOError):
                raise
            raise error("BACKUP_FAILED", f"another process makes the backup {self._to} at the moment") from e
        self._lock = lock

    def stop(self) -> None:
        """Breaks off what runs. For any thread."""
        self._stopped.set()

    def remove(self) -> None:
        """Nothing is left of it. What another process makes by its name stays."""
        if self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._let_go()
        with suppress(OSError):
            # The lock found no room.
            self._folder.rmdir()

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def add_store(self, rows: Iterator[tuple[bytes, bytes]], at_us: int) -> None:
        """A store of these records, which are of that moment, in microseconds since 1970.

        Raises STORE_DAMAGED if one is not what was written, STORE_UNAVAILABLE.
        """
        self.manifest.made_at_us = at_us
        write_copy(self._folder / STORE, self._counted(rows))

    def _counted(self, rows: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        for key, value in rows:
            yield key, value
            self._pay(len(key) + len(value))

    def open_store(self) -> Store:
        """The store that was written, to be changed."""
        return Store.open(self._folder / STORE)

    def add_file(self, source: Path) -> None:
        """A small file beside logs and store, if it is there."""
        if source.exists():
            self._add(source, source.name, source.stat().st_size)

    def add_of_the_whole(self, source: Path, has_workers: bool) -> None:
        """A file that the workers of a data directory have together, if it is there. Without workers it is as any."""
        if not has_workers:
            self.add_file(source)
        elif source.exists():
            new = self._folder / f"{source.name}.new"
            new.unlink(missing_ok=True)
            copy_file(source, new, source.stat().st_size, self._pay)
            new.replace(self._to.with_name(source.name))
            sync_folder(self._to.parent)

    def add_log(self, record: TopicRecord, parts: Sequence[DurablePart]) -> None:
        """A topic's log. Raises LOG_UNREADABLE if it cannot be read: then nothing of it is there."""
        folder = f"{LOGS}/{record.incarnation}"
        (self._folder / folder).mkdir(mode=0o700)
        files, damaged = len(self.manifest.files), len(self.manifest.damaged)
        try:
            for name in (TOPIC_FILE, SECRET_FILE):
                source = parts[0].path.with_name(name)
                if source.exists():
                    self._add(source, f"{folder}/{name}", source.stat().st_size)
            for part in parts:
                self._add_segment(record, part, f"{folder}/{part.path.name}")
        except SeqdedupeError:
            del self.manifest.files[files:], self.manifest.damaged[damaged:]
            shutil.rmtree(self._folder / folder)
            raise
        sync_folder(self._folder / folder)

    def drop_log(self, record: TopicRecord) -> None:
        """The topic was deleted meanwhile. Its record is in the store all the same."""
        folder = f"{LOGS}/{record.incarnation}"
        shutil.rmtree(self._folder / folder, ignore_errors=True)
        made = self.manifest
        made.files = [file for file in made.files if not file.path.startswith(f"{folder}/")]
        made.damaged = [fault for fault in made.damaged if fault.incarnation != record.incarnation]
        made.left_out = [fault for fault in made.left_out if fault.incarnation != record.incarnation]

    def leave_out(self, record: TopicRecord, why: str) -> None:
        """There is nothing of this topic but its record: restored, it is DAMAGED, and its name taken."""
        self.manifest.left_out.append(BackupFault(record.name, record.incarnation, why))

    def finish(self) -> None:
        """The backup is whole, durable, and there by its name."""
        store = self._folder / STORE
        for path in sorted(store.iterdir()):
            if path.name.startswith("LOG"):
                # RocksDB's notes.
                path.unlink()
                continue
            size, crc = path.stat().st_size, checksum(path, lambda _: None)
            path.chmod(0o600)
            with path.open("rb") as file:
                os.fsync(file.fileno())
            self.manifest.files.append(BackupFile(f"{STORE}/{path.name}", size, crc, 0))
        for folder in (store, self._folder / LOGS):
            sync_folder(folder)
        self._check_goes_on()
        self.manifest.write(self._folder)
        self._folder.rename(self._to)
        (self._to / LOCK_FILE).unlink()
        self._let_go()
        for folder in (self._to, self._to.parent):
            sync_folder(folder)

    def _pay(self, size: int) -> None:
        self.bytes_done += size
        self._check_goes_on()

    def _check_goes_on(self) -> None:
        if self._stopped.is_set():
            raise error("OUTCOME_UNKNOWN", "the backup was broken off: nothing of it is left")

    def _add(self, source: Path, path: str, size: int) -> None:
        before = self._stamp(source, size)
        copied, crc = copy_file(source, self._folder / path, size, self._pay)
        is_same = copied == size and before == self._stamp(source, size)
        self.manifest.files.append(BackupFile(path, copied, crc, before if is_same else 0))

    def _add_segment(self, record: TopicRecord, part: DurablePart, path: str) -> None:
        if self._is_linked(part.path, path, part.end):
            return
        self._add(part.path, path, part.end)
        if self._damage_of(part, path):
            # Nobody is told of damage because of one bad read.
            self.manifest.files.pop()
            (self._folder / path).unlink()
            forget_pages(part.path)
            self._add(part.path, path, part.end)
        for damage in self._damage_of(part, path):
            what = f"{part.path}, byte {damage.offset}: {damage.what}"
            self.manifest.damaged.append(BackupFault(record.name, record.incarnation, what))

    def _damage_of(self, part: DurablePart, path: str) -> list[Damage]:
        """What was written is read once more, as the scrub does. Raises LOG_UNREADABLE for a newer format version."""
        found: list[Damage] = []
        copy = replace(part, path=self._folder / path)
        for one in inspect_part(copy, read_what_can_be):
            self._check_goes_on()
            if isinstance(one, Damage) and len(found) < MAX_FAULTS_A_FILE:
                found.append(replace(one, record=None))
        return found

    def _is_linked(self, source: Path, path: str, size: int) -> bool:
        """Whether the earlier backup has the same file, which is now in this one too."""
        known = self._earlier.files.get(path) if self._earlier is not None else None
        if self._earlier is None or known is None or not known.mtime_ns:
            return False
        if (known.size, known.mtime_ns) != (size, self._stamp(source, size)):
            return False
        try:
            there = self._earlier.folder / path
            if there.lstat().st_size != size:
                return False
            os.link(there, self._folder / path, follow_symlinks=False)
        except OSError:
            # The file system has no links, or no more of them.
            return False
        self.manifest.files.append(known)
        self.bytes_linked += size
        self._pay(size)
        return True

    @staticmethod
    def _stamp(source: Path, size: int) -> int:
        """When a file was last written to, if it has just so many bytes; else 0."""
        try:
            found = source.stat()
        except OSError:
            return 0
        return found.st_mtime_ns if found.st_size == size else 0
