"""The small files in a log's folder, beside its segments, which every opening obeys.

`secret` makes its records its own, and `topic` says whose log it is. Others say that another sidecar has the log, or
may have by now: `leaving` is there before the other one is told that it may serve. Then only that one can say who has
the topic: the file becomes `moved` if it has, and goes if it has not and never will.
"""

import os
import secrets
import shutil
import threading
from pathlib import Path
from typing import NamedTuple

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import sync_folder, write_all, write_synced
from seqdedupe.format.headers import SECRET_BYTES
from seqdedupe.log.embedded.segment import begins_with_an_older_record, older, segment_path
from seqdedupe.log.embedded.tail import base_indexes

# -- A log's secret, which makes its records its own: in a file of its folder, and in the store's record of the topic.

SECRET_FILE = "secret"
"""Never served."""
TOPIC_FILE = "topic"
"""Beside it: the full name of the log's topic, for the case that the store is lost. Where it is a partition, a line
says of how many."""


class Secret(NamedTuple):
    """What is known of a log's secret."""

    secret: bytes
    """Empty if nobody knows it."""
    missing: Path | None
    """The file, if it has to be written again."""
    why: SeqdedupeError | None
    """Why the log cannot be opened: LOG_DAMAGED, OLDER_FORMAT."""


def secret_of(folder: Path, known: bytes) -> Secret:
    """The secret of the log in a folder; `known` is what the store says, empty if nothing.

    Changes nothing. Raises OSError.
    """
    bases = base_indexes(folder) if folder.exists() else []
    if not bases:
        # Which is damage enough: `open_segments` says so.
        return Secret(bytes(SECRET_BYTES), None, None)
    path = folder / SECRET_FILE
    there = path.read_bytes() if path.exists() else b""
    is_whole = len(there) == SECRET_BYTES
    if is_whole and known in (b"", there):
        return Secret(there, None, None)
    if begins_with_an_older_record(segment := segment_path(folder, bases[0])):
        return Secret(b"", None, older(segment, 0))
    if is_whole:
        return Secret(known, None, error("LOG_DAMAGED", f"{path} is the secret of another log", file=path))
    if known:
        return Secret(known, path, None)
    why = error(
        "LOG_DAMAGED",
        f"{path} is missing or short, and the store does not have it either: no record of the log can be believed",
        hint="Restore the log's file secret from a backup.",
        file=path,
    )
    return Secret(b"", None, why)


# -- A log that another sidecar has, or may have by now.

LEAVING_FILE = "leaving"
MOVED_FILE = "moved"
ARRIVED_FILE = "arrived"
"""In the folder of one that has come, while it is not certain that the sidecar that it came from knows so."""


class To(NamedTuple):
    """Who was given a log."""

    address: str
    receiver: str
    """Which data directory there, and which move, as it has said."""


def check_stays(folder: Path) -> None:
    """Raises NOT_OWNER with the address of who has the topic, or may have it; OSError."""
    if (to := moved_to(folder)) is not None:
        raise not_here(to, "has it")
    if (to := leaving_to(folder)) is not None:
        raise not_here(to, "has it, or is asked whether it has it")


def not_here(to: To, what: str) -> SeqdedupeError:
    """NOT_OWNER, of a topic whose log was given to that sidecar."""
    hint = f"Name both sidecars to clients, this one and that one, with a comma between them: …,{to.address}"
    return error("NOT_OWNER", f"it was moved: the sidecar at {to.address} {what}", hint=hint, owner_address=to.address)


def leaving_to(folder: Path) -> To | None:
    """Who is to be asked whether it has the topic; None: nobody. Raises OSError."""
    return _said(folder / LEAVING_FILE)


def moved_to(folder: Path) -> To | None:
    """Who has it; None: nobody else, for all that is known. Raises OSError."""
    return _said(folder / MOVED_FILE)


def leave(folder: Path, to: To) -> None:
    """From now on only the sidecar there can say who has the topic. Durable on return. Raises OSError: it is so, or
    not."""
    new = folder / f"{LEAVING_FILE}.new"
    write_synced(new, "\n".join(to).encode())
    os.rename(new, folder / LEAVING_FILE)
    sync_folder(folder)


def has_left(folder: Path) -> None:
    """The other one has it, for good. Durable on return. Raises OSError; it may be done again."""
    if (folder / LEAVING_FILE).exists():
        os.rename(folder / LEAVING_FILE, folder / MOVED_FILE)
    sync_folder(folder)


def stays(folder: Path) -> None:
    """The other one has it not, and never will. Durable on return. Raises OSError; it may be done again."""
    (folder / LEAVING_FILE).unlink(missing_ok=True)
    sync_folder(folder)


def has_messages(folder: Path) -> bool:
    """Whether there is still something of a log that was moved. Raises OSError."""
    return bool(base_indexes(folder))


def remove_messages(folder: Path) -> None:
    """Of a log that was moved nothing is left but where it is. Raises OSError; it may be done again."""
    for base_index in base_indexes(folder):
        segment_path(folder, base_index).unlink()
    sync_folder(folder)


def is_known(folder: Path, receiver: str) -> None:
    """Whoever had the log knows that it has come here by the move of which this was said. Durable on return. Raises
    OSError; it may be done again."""
    arrived = folder / ARRIVED_FILE
    # One that gave it here long ago may say so once more: that is not who gave it last.
    if arrived.exists() and arrived.read_text() == receiver:
        arrived.unlink()
    sync_folder(folder)


def _said(path: Path) -> To | None:
    try:
        address, receiver = path.read_text().split("\n")
    except FileNotFoundError:
        return None
    except ValueError as e:
        raise error("LOG_DAMAGED", f"{path} does not say where the log has gone", file=path) from e
    return To(address, receiver)


# -- A log that comes from another sidecar: beside the logs, where no start looks, until all of it is there.

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
        write_synced(self._folder / ARRIVED_FILE, receiver.encode())
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
            remove_messages(self._folder)

    def remove(self) -> None:
        """Nothing of it is left, unless it is a log by now. What another one has begun meanwhile stays."""
        if self.has_begun:
            shutil.rmtree(self._folder)
            self.has_begun = False
