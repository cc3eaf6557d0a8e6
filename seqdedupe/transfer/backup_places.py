"""Places where backups are kept: a folder, or a prefix of a bucket in an object store with the S3 API.

A place lists its backups, reports which backups are good, keeps the newest N good backups, and restores a backup. A
backup is good if two conditions hold:

- Its manifests and all files named in the manifests exist and are unchanged.
- The original data had no damage when the backup was made.
"""

import fcntl
import os
import re
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import google_crc32c

from seqdedupe.errors import INSTALL_HINT, SeqdedupeError, error
from seqdedupe.figures import counted
from seqdedupe.files import UNFINISHED, Lock, sync_folder
from seqdedupe.store.directories import MANIFEST_FILE, SHARDS_FILE, WORKERS_FILE
from seqdedupe.transfer.backup import (
    LOCK_FILE,
    LOGS,
    REMOVING,
    TOKEN_FILE,
    BackupFile,
    Copy,
    Manifest,
    Pay,
    checksum,
    copy_file,
    damaged,
    forget_pages,
    is_in_future,
    parts_of,
    read_manifest,
    restore,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

S3_SCHEME = "s3://"

TIME_NAME = re.compile(r"\d{8}T\d{6}Z")
"""The names that `seqdedupe backup` chooses. Sorted names are in the order of time. Backups with other names are never
removed."""


@dataclass(frozen=True, slots=True)
class KeptBackup:
    """A backup in a place."""

    name: str
    problem: str
    """The reason why the backup is not good; empty if it is good."""
    made_at_us: int = 0
    """The time at which the backed-up state was taken, in microseconds since 1970; with several workers, the earliest
    time. 0 if the manifests cannot be read. The fields below are then 0 too."""
    size_bytes: int = 0
    topics: int = 0
    """The number of topics whose logs are in the backup."""

    @property
    def is_in_future(self) -> bool:
        """Whether the time of the backup is in the future. Then the backup's real age is unknown, so the backup is
        never chosen as the newest, and `keep` does not count it."""
        return is_in_future(self.made_at_us)


class KeptBackups(NamedTuple):
    """The result of `BackupPlace.keep`."""

    removed: list[str]
    in_future: list[str]
    """The backups that were ignored because their times are in the future."""


class NewestBackup(NamedTuple):
    """The result of `BackupPlace.newest_good`."""

    name: str
    in_future: list[str]
    """As in `KeptBackups`."""


class BackupPlace(ABC):
    """A place where backups are kept. The methods block. Only one thread may use a place."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of possible backups, sorted. Raises BACKUP_DAMAGED if the place does not exist; OSError."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a backup. After the first step of the removal, the remaining files no longer count as a backup. Raises
        OSError."""

    @abstractmethod
    def _opened(self, name: str) -> AbstractContextManager[Path]:
        """Yield a folder that contains the backup's manifests, and the files that state the number of manifests."""

    @abstractmethod
    def _sizes(self, name: str) -> dict[str, int]:
        """Return the sizes of all files of a backup, by path."""

    @abstractmethod
    def _crc32c(self, name: str, path: str, size_bytes: int) -> int:
        """Read a file from the place, and return its CRC32C."""

    @abstractmethod
    def _copy_from(self, name: str, folder: Path) -> Copy:
        """Return a function that copies files out of a backup. The backup's manifests are in `folder`."""

    reads_before_removing = True
    """Whether `keep` reads every byte of a backup before it counts the backup as good."""

    def look(self, name: str, *, reads_all: bool) -> KeptBackup:
        """Return a description of a backup that shows whether the backup is good. Without `reads_all`, only the sizes
        of the backup's files are checked, not their bytes.

        Raises OBJECT_STORE_UNAVAILABLE.
        """
        parts: dict[str, Manifest] = {}
        try:
            with self._opened(name) as folder:
                try:
                    for part in parts_of(folder):
                        parts[part.relative_to(folder).as_posix()] = read_manifest(part)
                except SeqdedupeError as e:
                    return KeptBackup(name, e.message.replace(str(folder), name))
            problem = self._problem(name, parts, reads_all)
        except OSError as e:
            return KeptBackup(name, f"it cannot be read: {e}")
        return KeptBackup(
            name,
            problem,
            min(one.made_at_us for one in parts.values()),
            sum(one.size_bytes for one in parts.values()),
            sum(_topics(one) for one in parts.values()),
        )

    def _problem(self, name: str, parts: dict[str, Manifest], reads_all: bool) -> str:
        sizes = self._sizes(name)
        for part, manifest in parts.items():
            for file in manifest.files:
                path = (PurePosixPath(part) / file.path).as_posix()
                if path not in sizes:
                    return f"the file {path} is missing"
                if sizes[path] != file.size:
                    return f"{path} has {sizes[path]} bytes, and was written with {file.size}"
                if reads_all and self._crc32c(name, path, file.size) != file.crc32c:
                    return f"{path} is not what was written: its checksum is wrong"
        if faults := sum(len(one.damaged) + len(one.left_out) for one in parts.values()):
            return f"{counted(faults, 'place or topic was', 'places or topics were')} damaged where it was taken"
        return ""

    def check(self, name: str, *, reads_all: bool = True) -> None:
        """Raise BACKUP_DAMAGED if this backup is not good according to `look`. Raises OBJECT_STORE_UNAVAILABLE."""
        if problem := self.look(name, reads_all=reads_all).problem:
            raise error("BACKUP_DAMAGED", f"the backup {name} in {self.url} is not good: {problem}")

    def keep(self, new: str, count: int) -> KeptBackups:
        """Keep the newest `count` good backups whose names match TIME_NAME. Also keep `new`, which the caller has
        checked.

        Remove all older backups with such names, good or not. Remove nothing if fewer than `count` backups are good.
        Ignore backups whose times are in the future. Raises OBJECT_STORE_UNAVAILABLE; OSError.
        """
        found = [self.look(name, reads_all=False) for name in self.names() if TIME_NAME.fullmatch(name)]
        past = [one for one in found if not one.is_in_future]
        good: list[str] = []
        for one in reversed(past):
            if len(good) < count:
                looked = self.look(one.name, reads_all=True) if self.reads_before_removing else one
                if not looked.problem:
                    good.append(one.name)
        in_future = [one.name for one in found if one.is_in_future]
        if len(good) < count:
            return KeptBackups([], in_future)
        # If the clock went back, the name of the new backup sorts before older ones.
        oldest = min(good[-1], new)
        removed = [one.name for one in past if one.name < oldest]
        for name in removed:
            self.remove(name)
        return KeptBackups(removed, in_future)

    def newest_good(self) -> NewestBackup:
        """Return the good backup with the latest time that is not in the future. Only the sizes of the files are
        checked.

        Raises BACKUP_DAMAGED if there is no such backup, OBJECT_STORE_UNAVAILABLE; OSError.
        """
        found = [self.look(name, reads_all=False) for name in self.names()]
        good = [one for one in found if not one.problem]
        if past := [one for one in good if not one.is_in_future]:
            newest = max(past, key=lambda one: (one.made_at_us, one.name))
            return NewestBackup(newest.name, [one.name for one in found if one.is_in_future])
        if good:
            what = f"{self.url} has only backups whose moments are in the future: {', '.join(one.name for one in good)}"
            raise error("BACKUP_DAMAGED", what, hint="Check this host's clock. Or name a backup with `--backup`.")
        hint = "Is that the place? `seqdedupe backup list` says what is there; `--backup` restores one that is damaged."
        raise error("BACKUP_DAMAGED", f"{self.url} has no good backup; {len(found)} are not good", hint=hint)

    def restore(self, name: str, to: Path) -> list[Manifest]:
        """Restore a backup of this place with `backup.restore`. Also raises OBJECT_STORE_UNAVAILABLE."""
        with self._opened(name) as folder:
            return restore(folder, to, self._copy_from(name, folder))


def _topics(manifest: Manifest) -> int:
    return len({PurePosixPath(file.path).parts[1] for file in manifest.files if file.path.startswith(f"{LOGS}/")})


def place_at(url: str) -> BackupPlace:
    """Return the place for a URL `s3://bucket/prefix` or for the path of a folder. Raises INVALID_CONFIGURATION."""
    if url.startswith(S3_SCHEME):
        return BucketPlace(url)
    if "://" in url:
        _check_has_no_user(url)
        raise error(
            "INVALID_CONFIGURATION", f"{url} is no place for backups", hint="Give s3://bucket/prefix or a folder."
        )
    return FolderPlace(Path(url))


def _check_has_no_user(url: str) -> None:
    """Raise INVALID_CONFIGURATION if the URL may have user information. The error does not show the URL, because errors
    are printed."""
    authority = url.partition("://")[2].partition("/")[0]
    if "@" in authority or ":" in authority:
        hint = "Give s3://bucket/prefix, and the credentials in the environment (AWS_…)."
        raise error("INVALID_CONFIGURATION", "the URL of a place for backups has user information or a port", hint=hint)


# -- A folder.

COMMAND_LOCK_FILE = ".lock"
"""A file in the folder of the backups. The command that copies or removes backups holds a lock on this file."""


class FolderPlace(BackupPlace):
    """A folder that contains backups, such as a sidecar's `backup_directory`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self._known: dict[tuple[int, int], int] = {}
        """The checksums of files that were read, by device and inode, since several backups share files."""

    def names(self) -> list[str]:
        if not self._folder.is_dir():
            what = f"{self._folder} is not there"
            raise error("BACKUP_DAMAGED", what, hint="Check the name of the folder with the backups.")
        names = [path.name for path in self._folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
        return sorted(name for name in names if not name.endswith((UNFINISHED, REMOVING)))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other commands from copying or removing backups while the block runs. Raises BACKUP_FAILED if another
        command is doing so; OSError."""
        try:
            lock = Lock.take(self._folder / COMMAND_LOCK_FILE)
        except BlockingIOError as e:
            what = f"another command is copying or removing backups in {self._folder} at the moment"
            hint = "This backup is made, but not verified. Let that command end, and make another backup."
            raise error("BACKUP_FAILED", what, hint=hint) from e
        try:
            yield
        finally:
            lock.close()

    def keep(self, new: str, count: int) -> KeptBackups:
        self._remove_leftovers(new)
        return super().keep(new, count)

    def _remove_leftovers(self, new: str) -> None:
        """Remove the remains of ended processes: partly removed backups, and unfinished backups that no process writes
        any more."""
        for path in list(self._folder.iterdir()):
            name, suffix = path.stem, path.suffix
            if not TIME_NAME.fullmatch(name) or name >= new:
                continue
            if suffix == REMOVING or (suffix == UNFINISHED and _is_abandoned(path)):
                shutil.rmtree(path)

    def remove(self, name: str) -> None:
        gone = self._folder / f"{name}{REMOVING}"
        (self._folder / name).rename(gone)
        sync_folder(self._folder)
        shutil.rmtree(gone)

    def drop_damaged_links(self, name: str) -> bool:
        """Remove the damaged files that a backup shares with another backup. Return whether there were such files.

        The next backup then copies these files instead of sharing them. Raises BACKUP_DAMAGED, NEWER_FORMAT, and the
        errors of `parts_of`; OSError.
        """
        whole = self._folder / name
        found = [
            part / file.path
            for part in parts_of(whole)
            for file in read_manifest(part).files
            if self._is_damaged_link(name, part / file.path, file)
        ]
        for path in found:
            path.unlink()
        return bool(found)

    def _is_damaged_link(self, name: str, path: Path, file: BackupFile) -> bool:
        if not path.is_file() or path.is_symlink() or path.stat().st_nlink == 1:
            return False
        try:
            return self._crc32c(name, path.relative_to(self._folder / name).as_posix(), file.size) != file.crc32c
        except OSError:
            # The disk cannot read the file.
            return True

    @contextmanager
    def set_aside(self, name: str) -> Iterator[None]:
        """Free the name of a backup while the block makes a new backup with this name. The new backup can share files
        with the old backup. Remove the old backup after the block. Raises OSError."""
        aside = self._folder / f"{name}{REMOVING}"
        (self._folder / name).rename(aside)
        # A new file may have the inode of a removed one.
        self._known.clear()
        try:
            yield
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _opened(self, name: str) -> AbstractContextManager[Path]:
        return nullcontext(self._folder / name)

    def _sizes(self, name: str) -> dict[str, int]:
        whole, found = self._folder / name, {}
        for folder, _, files in os.walk(whole):
            for file in files:
                path = Path(folder, file)
                if stat.S_ISREG((status := path.lstat()).st_mode):
                    found[path.relative_to(whole).as_posix()] = status.st_size
        return found

    def _crc32c(self, name: str, path: str, size_bytes: int) -> int:
        file = self._folder / name / path
        status = file.stat()
        inode = status.st_dev, status.st_ino
        if inode not in self._known:
            with suppress(SeqdedupeError):
                # A file that was just written must be read from the disk.
                forget_pages(file)
            self._known[inode] = checksum(file, lambda _: None)
        return self._known[inode]

    def _copy_from(self, name: str, folder: Path) -> Copy:
        return copy_file


def _is_abandoned(unfinished: Path) -> bool:
    """Return whether no process has the lock of an unfinished backup."""
    try:
        lock = os.open(unfinished / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        # The process that makes the backup may just have begun.
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


# -- A prefix of a bucket. The objects that complete a backup are written last, after all other objects were read back.

CLAIM_FILE = "CLAIM"
"""The first object of a backup. Only one upload can create it."""

READ_BYTES = 8 * 1024 * 1024
"""The size of one read request."""

_ENDPOINT = re.compile(r"https?://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\]]+)(:(?P<port>[0-9]{1,5}))?(/[^\s?#]*)?", re.IGNORECASE)
_MAX_PORT = 65535
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")

_SMALL_FILES = {MANIFEST_FILE, WORKERS_FILE, SHARDS_FILE, TOKEN_FILE}
_WORKER = re.compile(r"worker-\d+")


class BucketPlace(BackupPlace):
    """A prefix of a bucket. Endpoint, region and credentials come from the environment (`AWS_…`).

    Raises INVALID_CONFIGURATION if the extra `s3` is not installed, the URL names no bucket or has user information, or
    the endpoint is invalid or has user information.
    """

    reads_before_removing = False

    def __init__(self, url: str) -> None:
        super().__init__(url.rstrip("/"))
        _check_has_no_user(url)
        if not url.startswith(S3_SCHEME):
            raise error("INVALID_CONFIGURATION", f"{url} is no {S3_SCHEME}bucket/prefix")
        _check_endpoint()
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import S3Store
        except ModuleNotFoundError as e:
            what = f"an object store is reached with {e.name}, which is not installed"
            raise error("INVALID_CONFIGURATION", what, hint=INSTALL_HINT.format("s3")) from e
        self._objects, self._failures = obstore, exceptions
        try:
            self._store: ObjectStore = S3Store.from_url(self.url)
        except (ValueError, exceptions.BaseError) as e:
            raise error("INVALID_CONFIGURATION", f"{url} is no s3://bucket/prefix: {_said(e)}") from e

    @contextmanager
    def _answered(self) -> Iterator[None]:
        try:
            yield
        except self._failures.BaseError as e:
            raise error("OBJECT_STORE_UNAVAILABLE", f"{self.url} cannot be used: {_said(e)}") from e
        except ValueError as e:
            what = f"{self.url} cannot have a backup of that name: {_said(e)}"
            raise error("INVALID_CONFIGURATION", what, hint="`seqdedupe backup list` shows the names.") from e

    def names(self) -> list[str]:
        # Some servers still list a prefix whose objects have been removed. So only objects count.
        paths = [PurePosixPath(path) for path in self._objects_below(None)]
        if names := {path.parts[0] for path in paths if len(path.parts) > 1}:
            return sorted(names)
        hint = "Is that the bucket, and the prefix of the backups? Without a backup there is no prefix."
        raise error("BACKUP_DAMAGED", f"{self.url} is not there", hint=hint)

    def upload(self, backup: Path, name: str) -> None:
        """Copy a backup from a folder to this place, and read the copy back. The copy counts as a backup when its last
        object is written.

        Raises BACKUP_FAILED if a backup with this name exists or another process uploads one, BACKUP_DAMAGED,
        OBJECT_STORE_UNAVAILABLE; OSError.
        """
        with self._answered():
            try:
                self._objects.put(self._store, f"{name}/{CLAIM_FILE}", b"seqdedupe-backup\n", mode="create")
            except self._failures.AlreadyExistsError as e:
                what = f"{self.url}/{name} is there already, or another process uploads it"
                raise error("BACKUP_FAILED", what) from e
        parts = {part.relative_to(backup): read_manifest(part) for part in parts_of(backup)}
        for part, manifest in parts.items():
            for file in manifest.files:
                self._put_checked(backup, name, part, file)
        last = [(part / MANIFEST_FILE).as_posix() for part in parts]
        if len(parts) > 1 or Path() not in parts:
            last = [*([TOKEN_FILE] if (backup / TOKEN_FILE).exists() else []), *last, WORKERS_FILE]
        for path in last:
            self._put(backup, name, path)

    def _put_checked(self, backup: Path, name: str, part: Path, file: BackupFile) -> None:
        path = (part / file.path).as_posix()
        self._put(backup, name, path)
        if self._crc32c(name, path, file.size) != file.crc32c:
            raise damaged(backup, f"{path} as it was read back from {self.url} is not what was written")

    def _put(self, backup: Path, name: str, path: str) -> None:
        with self._answered():
            self._objects.put(self._store, f"{name}/{path}", backup / path)

    def remove(self, name: str) -> None:
        def last_written_first(path: str) -> tuple[bool, bool, bool, str]:
            last = PurePosixPath(path).name
            return path != WORKERS_FILE, last != MANIFEST_FILE, last == CLAIM_FILE, path

        with self._answered():
            for path in sorted(self._sizes(name), key=last_written_first):
                self._objects.delete(self._store, f"{name}/{path}")

    @contextmanager
    def _opened(self, name: str) -> Iterator[Path]:
        sizes = self._sizes(name)
        with TemporaryDirectory(prefix="seqdedupe-") as temporary:
            folder = Path(temporary, "backup")
            folder.mkdir()
            for path in map(PurePosixPath, sizes):
                if path.name in _SMALL_FILES and (len(path.parts) == 1 or _WORKER.fullmatch(str(path.parent))):
                    (folder / path).parent.mkdir(exist_ok=True)
                    (folder / path).write_bytes(b"".join(self._pieces(name, str(path), sizes[str(path)])))
            yield folder

    def _sizes(self, name: str) -> dict[str, int]:
        return {path.removeprefix(f"{name}/"): size for path, size in self._objects_below(name).items()}

    def _objects_below(self, name: str | None) -> dict[str, int]:
        """Return the sizes of objects, by their paths below the place."""
        with self._answered():
            return {one["path"]: one["size"] for some in self._objects.list(self._store, name) for one in some}

    def _pieces(self, name: str, path: str, size_bytes: int) -> Iterator[bytes]:
        for at in range(0, size_bytes, READ_BYTES):
            end = min(at + READ_BYTES, size_bytes)
            with self._answered():
                yield bytes(self._objects.get_range(self._store, f"{name}/{path}", start=at, end=end))

    def _crc32c(self, name: str, path: str, size_bytes: int) -> int:
        crc = 0
        for raw in self._pieces(name, path, size_bytes):
            crc = google_crc32c.extend(crc, raw)
        return crc

    def _copy_from(self, name: str, folder: Path) -> Copy:
        sizes = self._sizes(name)

        def copy(source: Path, target: Path, size: int, pay: Pay) -> tuple[int, int]:
            path = source.relative_to(folder).as_posix()
            if path not in sizes:
                raise damaged(Path(name), f"the file {path} is missing")
            copied = crc = 0
            made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(made, "wb", buffering=0) as file:
                for raw in self._pieces(name, path, min(size, sizes[path])):
                    crc = google_crc32c.extend(crc, raw)
                    copied += file.write(raw)
                    pay(len(raw))
                os.fsync(made)
            return copied, crc

        return copy


def _check_endpoint() -> None:
    """Raise INVALID_CONFIGURATION if an endpoint in the environment has user information, or would make the library
    panic. The error does not show the URL."""
    for name in _ENDPOINT_VARIABLES:
        if (url := os.environ.get(name)) is None:
            continue
        found = _ENDPOINT.fullmatch(url)
        if not found or int(found["port"] or 0) > _MAX_PORT:
            what = f"{name} in the environment is no http(s)://host:port, or has user information"
            hint = "Give the credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
            raise error("INVALID_CONFIGURATION", what, hint=hint)


def _said(failure: Exception) -> str:
    """Return the text of an object store's failure, without XML tags and without the library's trace."""
    return " ".join(re.sub(r"<[^>]*>", " ", str(failure).partition("\n\nDebug source:")[0]).split())
