"""What a backup consists of: its manifest, which says which files it has and what it lacks; how a file is copied with
its checksum; and a backup that is checked against its manifest, or of which a data directory is made.

The manifest is written last: without one nothing is a backup. `docs/formats-backup.md` has the format.
"""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import google_crc32c

from seqdedupe.errors import InvalidRequestError, SeqdedupeError, error
from seqdedupe.files import becoming, check_sealed, head_of, sync_folder, writing_sealed
from seqdedupe.log.embedded.segment import unreadable
from seqdedupe.log.embedded.tail import read_what_can_be
from seqdedupe.store import directories
from seqdedupe.store.directories import MANIFEST_FILE, WORKERS_FILE

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
