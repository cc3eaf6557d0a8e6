"""Make, check and restore backups of a data directory.

The manifest lists the files of a backup. Each file is copied together with its checksum. `BackupMaker` writes a backup
while a sidecar runs. It writes the manifest last: a folder without a manifest is not a backup.
`docs/internals/formats-backup.md` describes the format.
"""

import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import google_crc32c
from rocksdict import WriteBatch

from seqdedupe.errors import InvalidRequestError, SeqdedupeError, error
from seqdedupe.files import UNFINISHED, becoming, check_sealed, head_of, sync_folder, writing_sealed
from seqdedupe.log.embedded.inspection import Damage, DurablePart, inspect_part
from seqdedupe.log.embedded.log_folder import SECRET_FILE, TOPIC_FILE
from seqdedupe.log.embedded.segment import unreadable
from seqdedupe.log.embedded.tail import read_what_can_be
from seqdedupe.store import directories
from seqdedupe.store.db import Store, write_copy
from seqdedupe.store.directories import MANIFEST_FILE, WORKERS_FILE
from seqdedupe.store.parts import LAST_BACKUP, TopicRecord, seal

MAGIC = b"seqdedupe-backup"
FORMAT_VERSION = 1

_HEAD = head_of(MAGIC, FORMAT_VERSION)


@dataclass(frozen=True, slots=True)
class BackupFile:
    """A file of a backup."""

    path: str
    """The path below the backup's folder, with `/` between the parts."""
    size: int
    crc32c: int
    mtime_ns: int
    """The modification time of the sidecar's original file, if all bytes of that file were copied; else 0."""


@dataclass(frozen=True, slots=True)
class BackupFault:
    """A topic that is damaged or missing in the backup, because the original was damaged."""

    topic: str
    incarnation: int
    what: str


@dataclass(slots=True)
class Manifest:
    """The content of a backup."""

    made_at_us: int
    """The time at which the backed-up state was taken, in microseconds since 1970."""
    version: str
    """The version of the program that made the backup."""
    files: list[BackupFile] = field(default_factory=list)
    damaged: list[BackupFault] = field(default_factory=list)
    """Places where the copy has the same damage as the original."""
    left_out: list[BackupFault] = field(default_factory=list)
    """Topics whose logs are not in the backup: only their records in the store are."""

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size for file in self.files)

    def write(self, folder: Path) -> None:
        """Write the manifest, durable on return. Raises OSError."""
        with writing_sealed(folder / MANIFEST_FILE, _HEAD) as put:
            put(json.dumps(asdict(self), indent=1, ensure_ascii=False).encode())


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a backup. Raises BACKUP_DAMAGED if the manifest is missing or damaged, NEWER_FORMAT;
    OSError."""
    path = folder / MANIFEST_FILE
    try:
        with path.open("rb") as file:
            size = check_sealed(path, file, _HEAD, 1, "a backup's manifest")
            said: dict[str, Any] = json.loads(file.read(size))
    except FileNotFoundError as e:
        if not folder.exists():
            raise error(
                "BACKUP_DAMAGED", f"{folder} is not there", hint="Check the name and the place of the backup."
            ) from e
        what = f"{folder} is not a backup, or a backup that was never finished: it has no file {MANIFEST_FILE}"
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
    """Return the error for a backup whose files differ from the written files."""
    return error("BACKUP_DAMAGED", f"{folder} is damaged: {what}")


def _check_paths(paths: Iterable[str]) -> None:
    """Raise INVALID_REQUEST for a path that leads out of the backup."""
    for path in paths:
        parts = PurePosixPath(path).parts
        if not parts or ".." in parts or parts[0] == "/" or MANIFEST_FILE in parts:
            raise error("INVALID_REQUEST", f"{path!r} is no file of a backup")


# -- Copy a file and compute its checksum in one pass. The copy is durable on return.

PIECE_BYTES = 1024 * 1024
SYNC_BYTES = 8 * 1024 * 1024
"""The copy is synced after each part of this size, so that syncs of a log on the same disk wait at most for about one
part."""


Pay = Callable[[int], None]
"""A function that is called with the number of bytes just copied. If it raises, the copying ends."""

Copy = Callable[[Path, Path, int, Pay], tuple[int, int]]
"""`copy_file`, or a function that copies in the same way from another place."""


def copy_file(source: Path, target: Path, size: int, pay: Pay) -> tuple[int, int]:
    """Copy the first `size` bytes of a file to a new file that only its owner may read. Return the number and the
    CRC32C of the copied bytes.

    Data that the disk cannot return becomes zeros. Raises LOG_UNREADABLE if the source cannot be read; OSError if the
    target cannot be written, including FileExistsError.
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


def _size_of(source: Path) -> int | None:
    """Return the size of a file of a log in bytes; None if the file does not exist. Raises LOG_UNREADABLE."""
    try:
        return source.stat().st_size
    except FileNotFoundError:
        return None
    except OSError as e:
        raise unreadable(source, e) from e


def checksum(path: Path, pay: Pay) -> int:
    """Return the CRC32C of a file. Raises OSError."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        while raw := file.read(PIECE_BYTES):
            crc = google_crc32c.extend(crc, raw)
            pay(len(raw))
    return crc


def forget_pages(path: Path) -> None:
    """Ask the system to drop the file from its page cache, so that the next read comes from the disk. Raises
    LOG_UNREADABLE."""
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
"""The files that a data directory has only once, even if it has several workers."""


# -- Check a backup against its manifest, and make a data directory from a backup.


def parts_of(backup: Path) -> list[Path]:
    """Return the folders of a backup that have manifests: the backup's own folder, or one folder per worker if there
    are several workers.

    Raises BACKUP_DAMAGED if a worker's folder is missing; STORE_DAMAGED, SHARD_CLAIMED_TWICE if the folders contradict
    each other; OSError.
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
    """Read all files of one part of a backup, and return the part's manifest. Raises BACKUP_DAMAGED if a file differs
    from the manifest, NEWER_FORMAT; OSError."""
    found = read_manifest(backup)
    for file in found.files:
        path = backup / file.path
        _check_is_there(backup, file)
        _check_same(backup, file, path.stat().st_size, checksum(path, _ignore))
    return found


def restore(backup: Path, to: Path, copy: "Copy | None" = None) -> list[Manifest]:
    """Make the data directory `to` from a backup, and check every file. When this returns, the directory is durable. It
    shares no files with the backup. `copy` fetches the files named in the manifests if they are not in `backup`.

    Raises DIRECTORY_NOT_EMPTY unless `to` is an empty directory or does not exist, BACKUP_DAMAGED, NEWER_FORMAT, and
    the errors of `parts_of`; OSError. After an error nothing is left. A power cut leaves a folder named `.unfinished`.
    """
    parts = parts_of(backup)
    with becoming(to, backup) as unfinished:
        found = [_restore_part(part, unfinished / part.relative_to(backup), copy or copy_file) for part in parts]
        if parts != [backup]:
            for name in OF_THE_WHOLE:
                if (source := backup / name).exists():
                    copy_file(source, unfinished / name, source.stat().st_size, _ignore)
        sync_folder(unfinished)
    return found


def _restore_part(backup: Path, to: Path, copy: "Copy") -> Manifest:
    found = read_manifest(backup)
    to.mkdir(mode=0o700, exist_ok=True)
    folders = {to}
    for file in found.files:
        target = to / file.path
        for folder in reversed(target.relative_to(to).parents):
            (to / folder).mkdir(mode=0o700, exist_ok=True)
            folders.add(to / folder)
        if copy is copy_file:
            _check_is_there(backup, file)
        copied, crc = copy(backup / file.path, target, file.size + 1, _ignore)
        _check_same(backup, file, copied, crc)
        if file.mtime_ns:
            # With this time, the next backup recognizes the file and can share it.
            os.utime(target, ns=(file.mtime_ns, file.mtime_ns))
    for folder in folders:
        sync_folder(folder)
    return found


def _check_is_there(backup: Path, file: BackupFile) -> None:
    path = backup / file.path
    if not path.is_file() or path.is_symlink():
        raise damaged(backup, f"the file {file.path} is missing")


def _check_same(backup: Path, file: BackupFile, size: int, crc: int) -> None:
    if size != file.size:
        raise damaged(backup, f"{file.path} has {size} bytes, and was written with {file.size}")
    if crc != file.crc32c:
        raise damaged(backup, f"{file.path} is not what was written: its checksum is wrong")


def _ignore(_: int) -> None:
    """Do nothing: nobody counts the bytes."""


# -- The time of the newest good backup, in the sidecar's store.

_MOMENT_BYTES = 8

CLOCK_TOLERANCE_SECONDS = 300
"""The clocks of two hosts may differ by this time. A time further ahead of the clock counts as in the future."""


def is_in_future(at_us: int) -> bool:
    """Return whether the time of a backup, in microseconds since 1970, is in the future: the clock was ahead when the
    backup was made."""
    return at_us > time.time_ns() // 1000 + CLOCK_TOLERANCE_SECONDS * 1_000_000


class LastBackup:
    """The newest backup of a data directory that was verified."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.made_at_us = int.from_bytes(store.sealed(LAST_BACKUP), "little")
        """The time of that backup, in microseconds since 1970; 0 if there is no such backup."""

    async def confirm(self, made_at_us: int) -> None:
        """Record that a backup of this time was verified. Ignore the call if a later backup is recorded whose time is
        not in the future. When this returns, the change is durable. Raises STORE_UNAVAILABLE."""
        if made_at_us > self.made_at_us or is_in_future(self.made_at_us):
            batch = WriteBatch(raw_mode=True)
            batch.put(LAST_BACKUP, seal(LAST_BACKUP, made_at_us.to_bytes(_MOMENT_BYTES, "little")))
            await self._store.flush(self._store.write(batch))
            self.made_at_us = made_at_us


# -- Write a backup: the records of a store, the logs, and, when these are durable, the manifest.


LOGS, STORE = "logs", "store"
LOCK_FILE = "LOCK"
"""A file that is in a backup's folder while the backup is being written."""
REMOVING = ".removing"
"""The suffix of a former backup that is being removed."""
MAX_FAULTS_A_FILE = 100


@dataclass(frozen=True, slots=True)
class Earlier:
    """An existing backup. A new backup shares the unchanged files of the existing backup, and does not copy these files
    again."""

    folder: Path
    files: dict[str, BackupFile]

    @staticmethod
    def newest(folders: list[Path]) -> "Earlier | None":
        """Return the newest backup among these folders, by the modification times of the manifests. Return None if no
        folder is a backup. A backup from the future is returned only if there is no other."""
        found: list[tuple[bool, int, Path]] = []
        for folder in folders:
            with suppress(OSError):
                written_ns = (folder / MANIFEST_FILE).lstat().st_mtime_ns
                found.append((not is_in_future(written_ns // 1000), written_ns, folder))
        for *_, folder in sorted(found, reverse=True):
            with suppress(SeqdedupeError, OSError):
                return Earlier(folder, {file.path: file for file in read_manifest(folder).files})
        return None


class BackupMaker:
    """A backup that is being written. The folder `to` does not exist before `finish`. All methods block. Only one
    thread may use a backup, except for `stop` and the numbers.

    All methods raise OSError if the backup cannot be written, and OUTCOME_UNKNOWN after `stop` was called.
    """

    def __init__(self, to: Path) -> None:
        self._to = to
        self._folder = to.with_name(to.name + UNFINISHED)
        self._lock: int | None = None
        """The descriptor of the locked file; None if this process does not hold the lock."""
        self._earlier: Earlier | None = None
        self._stopped = threading.Event()
        self.manifest = Manifest(0, version("seqdedupe"))
        self.bytes_done = 0
        self.bytes_linked = 0
        """The part of `bytes_done` that is in files shared with an earlier backup."""

    def begin(self, others: list[Path]) -> None:
        """Begin the backup. It shares files with the newest backup among the folders `others`. Unfinished files that an
        ended process has left under this name are removed.

        Raises BACKUP_FAILED if another process is making a backup with this name. The other process continues.
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
        # The lock is on a file, because some file systems cannot lock folders.
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
        """Stop the running work. Any thread may call this method."""
        self._stopped.set()

    def remove(self) -> None:
        """Remove everything that was written. Keep a backup that another process is making under this name."""
        if self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._let_go()
        with suppress(OSError):
            # The folder still exists if the disk had no room for the lock file.
            self._folder.rmdir()

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def add_store(self, rows: Iterator[tuple[bytes, bytes]], at_us: int) -> None:
        """Add a store with these records. `at_us` is the time of the records, in microseconds since 1970.

        Raises STORE_DAMAGED for a damaged record, STORE_UNAVAILABLE.
        """
        self.manifest.made_at_us = at_us
        write_copy(self._folder / STORE, self._counted(rows))

    def _counted(self, rows: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        for key, value in rows:
            yield key, value
            self._pay(len(key) + len(value))

    def open_store(self) -> Store:
        """Open the written store, so that the caller can change it."""
        return Store.open(self._folder / STORE)

    def add_file(self, source: Path) -> None:
        """Add a small file next to the logs and the store, if the file exists."""
        if source.exists():
            self._add(source, source.name, source.stat().st_size)

    def add_of_the_whole(self, source: Path, has_workers: bool) -> None:
        """Add a file that all workers of a data directory share, if the file exists. Without workers, treat it like an
        ordinary file."""
        if not has_workers:
            self.add_file(source)
        elif source.exists():
            new = self._folder / f"{source.name}.new"
            new.unlink(missing_ok=True)
            copy_file(source, new, source.stat().st_size, self._pay)
            new.replace(self._to.with_name(source.name))
            sync_folder(self._to.parent)

    def add_log(self, record: TopicRecord, parts: Sequence[DurablePart]) -> None:
        """Add a topic's log. Raises LOG_UNREADABLE if the log cannot be read. In that case, no part of the log is in
        the backup."""
        folder = f"{LOGS}/{record.incarnation}"
        (self._folder / folder).mkdir(mode=0o700)
        files, damaged = len(self.manifest.files), len(self.manifest.damaged)
        try:
            for name in (TOPIC_FILE, SECRET_FILE):
                source = parts[0].path.with_name(name)
                if (size := _size_of(source)) is not None:
                    self._add(source, f"{folder}/{name}", size)
            for part in parts:
                self._add_segment(record, part, f"{folder}/{part.path.name}")
        except SeqdedupeError:
            del self.manifest.files[files:], self.manifest.damaged[damaged:]
            shutil.rmtree(self._folder / folder)
            raise
        sync_folder(self._folder / folder)

    def drop_log(self, record: TopicRecord) -> None:
        """Remove the log of a topic that was deleted during the backup. The topic's record stays in the backed-up
        store."""
        folder = f"{LOGS}/{record.incarnation}"
        shutil.rmtree(self._folder / folder, ignore_errors=True)
        made = self.manifest
        made.files = [file for file in made.files if not file.path.startswith(f"{folder}/")]
        made.damaged = [fault for fault in made.damaged if fault.incarnation != record.incarnation]
        made.left_out = [fault for fault in made.left_out if fault.incarnation != record.incarnation]

    def leave_out(self, record: TopicRecord, why: str) -> None:
        """Record in the manifest that the backup has only this topic's record, not the topic's log. After a restore the
        topic is DAMAGED, and no other topic can have its name."""
        self.manifest.left_out.append(BackupFault(record.name, record.incarnation, why))

    def finish(self) -> None:
        """Finish the backup. When this returns, the backup is complete and durable, and its folder has the final
        name."""
        store = self._folder / STORE
        for path in sorted(store.iterdir()):
            if path.name.startswith("LOG"):
                # RocksDB writes its own log messages to these files.
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
            raise error("OUTCOME_UNKNOWN", "the backup was stopped: no part of it is left")

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
            # Damage is read a second time before it is reported: the first read may have failed by chance.
            self.manifest.files.pop()
            (self._folder / path).unlink()
            forget_pages(part.path)
            self._add(part.path, path, part.end)
        for damage in self._damage_of(part, path):
            what = f"{part.path}, byte {damage.offset}: {damage.what}"
            self.manifest.damaged.append(BackupFault(record.name, record.incarnation, what))

    def _damage_of(self, part: DurablePart, path: str) -> list[Damage]:
        """Read the copy again, in the same way as the scrub, and return its damage. Raises LOG_UNREADABLE for a newer
        format version."""
        found: list[Damage] = []
        copy = replace(part, path=self._folder / path)
        for one in inspect_part(copy, read_what_can_be):
            self._check_goes_on()
            if isinstance(one, Damage) and len(found) < MAX_FAULTS_A_FILE:
                found.append(replace(one, record=None))
        return found

    def _is_linked(self, source: Path, path: str, size: int) -> bool:
        """Link a file from the earlier backup if that backup has the same file. Return whether the file was linked."""
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
            # The file system does not support hard links, or allows no more links to this file.
            return False
        self.manifest.files.append(known)
        self.bytes_linked += size
        self._pay(size)
        return True

    @staticmethod
    def _stamp(source: Path, size: int) -> int:
        """Return the modification time of a file if the file has exactly `size` bytes; else 0."""
        try:
            found = source.stat()
        except OSError:
            return 0
        return found.st_mtime_ns if found.st_size == size else 0
