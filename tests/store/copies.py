"""Copies of a store's folder while the store is open, as a crash at that moment would leave it."""

import shutil
from pathlib import Path


def _listing(folder: Path) -> set[tuple[str, int, int]]:
    found = set()
    for file in folder.iterdir():
        try:
            status = file.stat()
        except FileNotFoundError:
            continue
        found.add((file.name, status.st_size, status.st_mtime_ns))
    return found


def copy_of_live(folder: Path, target: Path) -> Path:
    """Copies until RocksDB's own threads have changed and removed nothing meanwhile: a copy is of one moment then."""
    while True:
        before = _listing(folder)
        try:
            shutil.copytree(folder, target)
        except shutil.Error:
            # A file that RocksDB does not need any more has gone.
            shutil.rmtree(target, ignore_errors=True)
            continue
        if _listing(folder) == before:
            return target
        shutil.rmtree(target)
