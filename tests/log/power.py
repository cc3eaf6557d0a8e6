"""A disk that loses at a power cut everything that was not synced: contents of files, and entries of folders."""

import os
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest


class Disk:
    """Watches a folder: what `os.fsync` and `os.fdatasync` have made durable below it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._contents: dict[int, bytes] = {}
        """By inode: what a file held when it was last synced."""
        self._held: dict[int, int] = {}
        """A descriptor of each: while there is one, no other file gets its inode."""
        weakref.finalize(self, _close_all, self._held)
        self._entries: dict[Path, dict[str, int]] = {}
        """By folder: names and inodes when it was last synced."""
        self._lock = threading.Lock()
        for name in ("fsync", "fdatasync"):
            self._watch(monkeypatch, name)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        really = getattr(os, name)

        def sync(fd: int) -> Any:
            with self._lock:
                really(fd)
                path = Path(os.readlink(f"/proc/self/fd/{fd}"))
                if path.is_dir():
                    self._entries[path] = {entry.name: entry.inode() for entry in os.scandir(path)}
                elif path.is_file():
                    inode = path.stat().st_ino
                    self._contents[inode] = path.read_bytes()
                    if inode not in self._held:
                        self._held[inode] = os.dup(fd)

        monkeypatch.setattr(os, name, sync)

    def after_a_power_cut(self, to: Path) -> Path:
        """A copy of the folder as it would be found; what was only written is lost."""
        shutil.rmtree(to, ignore_errors=True)
        with self._lock:
            self._restore(self.folder, to)
        return to

    def _restore(self, folder: Path, to: Path) -> None:
        to.mkdir(parents=True)
        folders = {path.name: path for path in self._entries if path.parent == folder}
        for name, inode in self._entries.get(folder, {}).items():
            if name in folders:
                self._restore(folders[name], to / name)
            else:
                (to / name).write_bytes(self._contents.get(inode, b""))


def _close_all(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
