"""A backup, checked against its manifest, and a data directory made of it."""

import os
from pathlib import Path

from seqdedupe.backup import manifest
from seqdedupe.backup.making import OF_THE_WHOLE, checksum, copy_file
from seqdedupe.backup.manifest import BackupFile, Manifest, damaged
from seqdedupe.files import becoming, sync_folder
from seqdedupe.store import directories


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
    found = manifest.read(backup)
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
    found = manifest.read(backup)
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
