"""A log that comes from another sidecar: beside the logs, where no start looks, until all of it is there."""

import os
import secrets
import shutil
import threading
from pathlib import Path

from seqdedupe.errors import error
from seqdedupe.files import sync_folder, write_all, write_synced
from seqdedupe.log.embedded import moved
from seqdedupe.log.embedded.secret import SECRET_FILE, TOPIC_FILE
from seqdedupe.log.embedded.segment import segment_path

ARRIVING = "arriving"
"""In the folder of all logs: those that come, and are not this sidecar's yet."""
RECEIVER_FILE = "receiver"
"""In the folder of all logs: which data directory this is, to those that give it topics."""
RECEIVER_BYTES = 16
MOVE_BYTES = 16
"""Which move to it, made at random, after that."""
SYNC_BYTES = 8 * 1024 * 1024
"""What is written is synced in so large parts, so that little is left to be at the end, when nobody has the topic."""

_making_receiver = threading.Lock()


def receiver(logs: Path) -> str:
    """Which data directory this is. Durable on return. Raises OSError."""
    path = logs / RECEIVER_FILE
    with _making_receiver:
        said = path.read_text() if path.exists() else ""
        if len(said) != 2 * RECEIVER_BYTES:
            said = secrets.token_hex(RECEIVER_BYTES)
            logs.mkdir(exist_ok=True)
            write_synced(path, said.encode())
        else:
            # The process that made it may have been killed before its syncs. Others remember what they are answered.
            with path.open("rb") as file:
                os.fsync(file.fileno())
            sync_folder(logs)
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
        self.has_begun = False
        """Whether there is something of it, which is no log yet."""

    def begin(self, topic: str, secret: bytes) -> None:
        """Durable on return: its folder says that the store may have something of it. Raises FileExistsError while an
        earlier one is being removed."""
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._folder.mkdir()
        self.has_begun = True
        write_synced(self._folder / TOPIC_FILE, topic.encode())
        write_synced(self._folder / SECRET_FILE, secret)
        for made in (self._folder.parent, self._folder.parent.parent):
            sync_folder(made)

    def write(self, base_index: int, offset: int, data: bytes) -> None:
        """The next part of a segment. Raises MOVE_FAILED if it is not the next."""
        if (base_index, offset) != (self._base_index, self._end) and (base_index <= self._base_index or offset):
            raise error("MOVE_FAILED", f"a part of the log came that is not the next: {base_index}, {offset}")
        file = os.open(segment_path(self._folder, base_index), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            write_all(file, data, offset)
            self._unsynced += len(data)
            if self._unsynced >= SYNC_BYTES:
                os.fdatasync(file)
                self._unsynced = 0
        finally:
            os.close(file)
        self._base_index, self._end = base_index, offset + len(data)

    def finish(self, receiver: str) -> None:
        """What has come is a log, durable on return. `receiver` is what whoever gave it was answered."""
        write_synced(self._folder / moved.ARRIVED_FILE, receiver.encode())
        for path in self._folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(self._folder)
        os.rename(self._folder, self._log_folder)
        self.has_begun = False
        sync_folder(self._log_folder.parent)

    def remove_messages(self) -> None:
        """What takes room goes, unless it is a log by now. The folder stays."""
        if self.has_begun:
            moved.remove_messages(self._folder)

    def remove(self) -> None:
        """Nothing of it is left, unless it is a log by now. What another one has begun meanwhile stays."""
        if self.has_begun:
            shutil.rmtree(self._folder)
            self.has_begun = False
