"""Writing a backup: the records of a store, the logs, and a manifest when all of it is durable."""

import fcntl
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from seqdedupe.backup.manifest import BackupFault, BackupFile, Manifest, checksum, copy_file, read_manifest
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import UNFINISHED, sync_folder
from seqdedupe.log.embedded.inspection import Damage, DurablePart, inspect_part
from seqdedupe.log.embedded.secret import SECRET_FILE, TOPIC_FILE
from seqdedupe.log.embedded.segment import unreadable
from seqdedupe.log.embedded.tail import read_what_can_be
from seqdedupe.store.copy import write_copy
from seqdedupe.store.db import Store
from seqdedupe.store.directories import MANIFEST_FILE
from seqdedupe.store.topics import TopicRecord


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
