"""A log that comes from another sidecar: beside the logs, where no start looks, until all of it is there."""

import os
import secrets
import shutil
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from seqdedupe.errors import error
from seqdedupe.files import sync_folder, write_all, write_synced
from seqdedupe.log.embedded.moved import ARRIVED_FILE
from seqdedupe.log.embedded.secret import SECRET_FILE, TOPIC_FILE
from seqdedupe.log.embedded.segment import segment_path

ARRIVING = "arriving"
"""In the folder of all logs: those that come, and are not this sidecar's yet."""
ROWS_FILE = "snapshot"
RECEIVER_FILE = "receiver"
"""In the folder of all logs: which data directory this is, to those that give it topics."""
RECEIVER_BYTES = 16
MOVE_BYTES = 16
"""Which move to it, made at random, after that."""
SYNC_BYTES = 8 * 1024 * 1024
"""What is written is synced in so large parts, so that little is left to be at the end, when nobody has the topic."""

MAX_ROW_BYTES = 256 * 1024 * 1024
"""What a record of the store has at most: it is read whole. So large is a snapshot of nine million producers that have
all changed since the one before it."""

_ROW = struct.Struct("<II")
_making_receiver = threading.Lock()

Row = tuple[bytes, bytes]
"""Key and value of a record of the store."""


def row_bytes(key: bytes, value: bytes) -> bytes:
    """A record of the store, as it travels."""
    return _ROW.pack(len(key), len(value)) + key + value


def receiver(logs: Path) -> str:
    """Which data directory this is. Durable on return. Raises OSError."""
    path = logs / RECEIVER_FILE
    with _making_receiver:
        said = path.read_text() if path.exists() else ""
        if len(said) != 2 * RECEIVER_BYTES:
            said = secrets.token_hex(RECEIVER_BYTES)
            logs.mkdir(exist_ok=True)
            write_synced(path, said.encode())
        return said


def remove_all(logs: Path) -> None:
    """What was coming when the process ended does not come on. What cannot be removed now is by a later start."""
    shutil.rmtree(logs / ARRIVING, ignore_errors=True)


class Arrival:
    """One that comes. Everything blocks, is done by one thread at a time, and raises OSError."""

    def __init__(self, logs: Path, incarnation: int) -> None:
        self._folder = logs / ARRIVING / str(incarnation)
        self._log_folder = logs / str(incarnation)
        self._base_index, self._end = -1, 0
        """The segment that comes, and how much of it has."""
        self._unsynced = 0
        self._has_begun = False

    def begin(self, topic: str, secret: bytes) -> None:
        """Raises FileExistsError while an earlier one is being removed."""
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._folder.mkdir()
        self._has_begun = True
        write_synced(self._folder / TOPIC_FILE, topic.encode())
        write_synced(self._folder / SECRET_FILE, secret)

    def write(self, base_index: int, offset: int, data: bytes) -> None:
        """The next part of a segment. Raises MOVE_FAILED if it is not the next."""
        if (base_index, offset) != (self._base_index, self._end) and (base_index <= self._base_index or offset):
            raise error("MOVE_FAILED", f"a part of the log came that is not the next: {base_index}, {offset}")
        self._append(segment_path(self._folder, base_index), data, offset)
        self._base_index, self._end = base_index, offset + len(data)

    def add_rows(self, data: bytes) -> None:
        """The next part of the snapshot."""
        path = self._folder / ROWS_FILE
        self._append(path, data, path.stat().st_size if path.exists() else 0)

    def _append(self, path: Path, data: bytes, offset: int) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            write_all(file, data, offset)
            self._unsynced += len(data)
            if self._unsynced >= SYNC_BYTES:
                os.fdatasync(file)
                self._unsynced = 0
        finally:
            os.close(file)

    def rows(self) -> Iterator[Row]:
        """The records of the snapshot. Raises MOVE_FAILED where they are none."""
        path = self._folder / ROWS_FILE
        if not path.exists():
            return
        with path.open("rb") as file:
            left = os.fstat(file.fileno()).st_size
            while left:
                fixed = file.read(_ROW.size)
                sizes = _ROW.unpack(fixed) if len(fixed) == _ROW.size else (left, left)
                left -= _ROW.size + sum(sizes)
                if left < 0 or sum(sizes) > MAX_ROW_BYTES:
                    raise error("MOVE_FAILED", f"the snapshot that came has a record of {sum(sizes)} bytes, and ends")
                yield file.read(sizes[0]), file.read(sizes[1])

    def finish(self, receiver: str) -> None:
        """What has come is a log, durable on return. `receiver` is what whoever gave it was answered."""
        (self._folder / ROWS_FILE).unlink(missing_ok=True)
        write_synced(self._folder / ARRIVED_FILE, receiver.encode())
        for path in self._folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(self._folder)
        os.rename(self._folder, self._log_folder)
        self._has_begun = False
        sync_folder(self._log_folder.parent)

    def remove(self) -> None:
        """Nothing of it is left, unless it is a log by now. What another one has begun meanwhile stays."""
        if self._has_begun:
            shutil.rmtree(self._folder)
            self._has_begun = False
