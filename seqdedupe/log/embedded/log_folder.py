"""The small files in a log's folder, next to its segments. Every opening of the log reads them.

- `secret` has the secret that binds the log's records to the log.
- `topic` has the topic's name.
- `leaving` and `moved` record that a different sidecar has the log, or may have the log.

`leaving` is written before the other sidecar learns that it may serve the topic. While `leaving` exists, only the other
sidecar knows which sidecar has the topic. If the other sidecar has the topic, `leaving` is renamed to `moved`. If the
other sidecar does not have the topic and never will, `leaving` is removed.
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

# -- A log's secret, which binds the log's records to the log. The log's folder and the store's record of the topic both
# have the secret.

SECRET_FILE = "secret"
"""The file with the log's secret. The sidecar never serves this file."""
TOPIC_FILE = "topic"
"""The file with the full name of the log's topic. It is needed if the store is lost. For a partition, a second line has
the number of partitions."""


class Secret(NamedTuple):
    """The result of looking for a log's secret."""

    secret: bytes
    """The secret; empty if it is unknown."""
    missing: Path | None
    """The path of the secret file if the file must be written again; else None."""
    why: SeqdedupeError | None
    """The error, LOG_DAMAGED or OLDER_FORMAT, if the log cannot be opened; else None."""


def secret_of(folder: Path, known: bytes) -> Secret:
    """Return the secret of the log in a folder. `known` is the store's copy of the secret; empty if the store has no
    copy.

    Changes nothing. Raises OSError.
    """
    bases = base_indexes(folder) if folder.exists() else []
    if not bases:
        # `open_segments` reports the missing segments as damage.
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
        f"{path} is missing or short, and the store does not have it either: no record of the log can be trusted",
        hint="Restore the log's file secret from a backup.",
        file=path,
    )
    return Secret(b"", None, why)


# -- A log that another sidecar has, or may have.

LEAVING_FILE = "leaving"
MOVED_FILE = "moved"
ARRIVED_FILE = "arrived"
"""A file in the folder of a log that has arrived from another sidecar. It is removed when the sending sidecar certainly
knows of the arrival."""


class To(NamedTuple):
    """The sidecar that receives a log."""

    address: str
    receiver: str
    """The ID that the receiver has given, which names its data directory and the move."""


def check_stays(folder: Path) -> None:
    """Raise NOT_OWNER, with the address of the other sidecar, if another sidecar has the topic or may have it. Raises
    OSError."""
    if (to := moved_to(folder)) is not None:
        raise not_here(to, "has it")
    if (to := leaving_to(folder)) is not None:
        raise not_here(to, "has it, or may have it")


def not_here(to: To, what: str) -> SeqdedupeError:
    """Return the error NOT_OWNER for a topic whose log was moved to another sidecar."""
    hint = f"Name both sidecars to clients, this one and that one, with a comma between them: …,{to.address}"
    return error("NOT_OWNER", f"it was moved: the sidecar at {to.address} {what}", hint=hint, owner_address=to.address)


def leaving_to(folder: Path) -> To | None:
    """Return the sidecar that may have the topic and must be asked; None if there is no such sidecar. Raises
    OSError."""
    return _said(folder / LEAVING_FILE)


def moved_to(folder: Path) -> To | None:
    """Return the other sidecar that certainly has the topic; None if there is no such sidecar. Raises OSError."""
    return _said(folder / MOVED_FILE)


def leave(folder: Path, to: To) -> None:
    """Record that from now on only the other sidecar knows which sidecar has the topic. When this returns, the change
    is durable. Raises OSError. After an error, the record may exist or not."""
    new = folder / f"{LEAVING_FILE}.new"
    write_synced(new, "\n".join(to).encode())
    os.rename(new, folder / LEAVING_FILE)
    sync_folder(folder)


def has_left(folder: Path) -> None:
    """Record that the other sidecar permanently has the topic. When this returns, the change is durable. Raises
    OSError; the call can be repeated."""
    if (folder / LEAVING_FILE).exists():
        os.rename(folder / LEAVING_FILE, folder / MOVED_FILE)
    sync_folder(folder)


def stays(folder: Path) -> None:
    """Record that the other sidecar does not have the topic and never will. When this returns, the change is durable.
    Raises OSError; the call can be repeated."""
    (folder / LEAVING_FILE).unlink(missing_ok=True)
    sync_folder(folder)


def has_messages(folder: Path) -> bool:
    """Return whether messages of a moved log are still stored. Raises OSError."""
    return bool(base_indexes(folder))


def remove_messages(folder: Path) -> None:
    """Remove the messages of a moved log. Keep the record of the sidecar that now has the log. Raises OSError; the call
    can be repeated."""
    for base_index in base_indexes(folder):
        segment_path(folder, base_index).unlink()
    sync_folder(folder)


def is_known(folder: Path, receiver: str) -> None:
    """Record that the sending sidecar knows that the log has arrived with the move named in `receiver`. When this
    returns, the change is durable. Raises OSError; the call can be repeated."""
    arrived = folder / ARRIVED_FILE
    # Ignore a confirmation from a sidecar that sent the log earlier and is not the last sender.
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


# -- A log that arrives from another sidecar. Until the log is complete, it is in a separate folder, which a start
# ignores.

ARRIVING = "arriving"
"""A folder in the folder of all logs. It contains the logs that are arriving and do not belong to this sidecar yet."""
RECEIVER_FILE = "receiver"
"""A file in the folder of all logs. It has the ID of this data directory for sidecars that send topics."""
RECEIVER_BYTES = 16
MOVE_BYTES = 16
"""The size of the random ID of a move, which follows the ID of the data directory."""
SYNC_BYTES = 8 * 1024 * 1024
"""An arriving log is synced after each part of this size. So little is left to sync at the end of the move, when no
sidecar serves the topic."""

_making_receiver = threading.Lock()


def receiver(logs: Path) -> str:
    """Return the ID of this data directory. When this returns, the ID is durable. Raises OSError."""
    path = logs / RECEIVER_FILE
    with _making_receiver:
        said = path.read_text() if path.exists() else ""
        if len(said) != 2 * RECEIVER_BYTES:
            said = secrets.token_hex(RECEIVER_BYTES)
            logs.mkdir(exist_ok=True)
            write_synced(path, said.encode())
        else:
            # The process that made the file may have been killed before it synced the file. The ID must be durable,
            # because other sidecars store it.
            with path.open("rb") as file:
                os.fsync(file.fileno())
            sync_folder(logs)
        return said


def remove_all(logs: Path) -> None:
    """Remove the logs that were still arriving when the previous process ended. A later start removes files that cannot
    be removed now."""
    shutil.rmtree(logs / ARRIVING, ignore_errors=True)


class Arrival:
    """A log that is arriving from another sidecar. Every method blocks, and may raise OSError. Only one thread at a
    time may call the methods."""

    def __init__(self, logs: Path, incarnation: int) -> None:
        self._folder = logs / ARRIVING / str(incarnation)
        self._log_folder = logs / str(incarnation)
        self._base_index, self._end = -1, 0
        """The first index of the segment that is arriving (-1: none), and the number of its bytes that have arrived."""
        self._unsynced = 0
        self.has_begun = False
        """Whether the arrival has files and is not a complete log yet."""

    def begin(self, topic: str, secret: bytes) -> None:
        """Begin the arrival. Its folder is durable on return, and shows that the store may hold data of this log.
        Raises FileExistsError while an earlier arrival is being removed."""
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._folder.mkdir()
        self.has_begun = True
        write_synced(self._folder / TOPIC_FILE, topic.encode())
        write_synced(self._folder / SECRET_FILE, secret)
        for made in (self._folder.parent, self._folder.parent.parent):
            sync_folder(made)

    def write(self, base_index: int, offset: int, data: bytes) -> None:
        """Write the next part of a segment. Raises MOVE_FAILED if the data is not the next part."""
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
        """Turn the arrival into a log of this sidecar. When this returns, the change is durable. `receiver` is the ID
        that the sender has received."""
        write_synced(self._folder / ARRIVED_FILE, receiver.encode())
        for path in self._folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(self._folder)
        os.rename(self._folder, self._log_folder)
        self.has_begun = False
        sync_folder(self._log_folder.parent)

    def remove_messages(self) -> None:
        """Remove the segments, unless the arrival has become a log. Keep the folder."""
        if self.has_begun:
            remove_messages(self._folder)

    def remove(self) -> None:
        """Remove all files of this arrival, unless it has become a log. Keep another arrival that has begun
        meanwhile."""
        if self.has_begun:
            shutil.rmtree(self._folder)
            self.has_begun = False
