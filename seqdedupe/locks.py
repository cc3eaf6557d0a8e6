"""Files that are locked while their owner lives, and that name the owner.

A data directory's lock is a separate file in the directory. Operators move the folders `store` and `logs` away for
repairs. A lock in these folders would move with them, and a second process could get a new lock.
"""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from seqdedupe.errors import SeqdedupeError, error

DIRECTORY_LOCK = "LOCK"
"""The lock's name in the data directory. No procedure moves or removes it."""

_MAX_OWNER_BYTES = 400

_SYSTEM_LOCKS = Path("/proc/locks")
"""The locks on this machine, with their processes, as far as this process may see them."""


class Lock:
    """A locked file. The system unlocks it when the process ends, in any way."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @staticmethod
    def take(path: Path) -> "Lock":
        """Lock the file, made if missing. Raises BlockingIOError, whose `strerror` names the owner; OSError."""
        while True:
            lock = Lock(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
            try:
                fcntl.flock(lock._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The earlier owner may have removed it meanwhile.
                if lock.is_held():
                    lock._say_owner()
                    return lock
            except BlockingIOError as e:
                owner = lock._owner()
                lock.close()
                raise BlockingIOError(e.errno, owner) from e
            except BaseException:
                lock.close()
                raise
            lock.close()

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._path

    def is_held(self) -> bool:
        """Return whether the file at the path is still the locked one. Otherwise another process may lock the new file.

        Raises OSError if that cannot be found out now."""
        try:
            return os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def remove(self) -> None:
        """Remove the file and unlock it."""
        with suppress(OSError):
            if self.is_held():
                self._path.unlink()
        self.close()

    def close(self) -> None:
        """Unlock it. The file stays."""
        os.close(self._descriptor)

    def _say_owner(self) -> None:
        started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        said = f"process {os.getpid()} on {socket.gethostname()}, started {started}\n"
        # A full disk has no room for the text. The file is locked all the same.
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, said.encode(), 0)

    def _owner(self) -> str:
        """Return in words who has locked it."""
        with suppress(BlockingIOError):
            # Two processes that only examine do not exclude each other, and write nothing into the file.
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return f"{holder_of(self._descriptor)}, which examines it,"
        said = os.pread(self._descriptor, _MAX_OWNER_BYTES, 0).decode("ascii", "replace")
        return said.partition("\n")[0] or holder_of(self._descriptor)


def holder_of(descriptor: int) -> str:
    """Return in words which other process has locked an open file: its process ID, or that it is not known.

    The system does not name a process outside of this one's container, nor one on another machine.
    """
    pids = _holders(os.fstat(descriptor)) - {os.getpid()}
    if known := sorted(pid for pid in pids if pid > 0):
        return f"process {known[0]}"
    return "another process, whose number the system does not say here,"


def _holders(file: os.stat_result) -> set[int]:
    """Return the processes that have locked a file, as far as this process may see them. 0 or less: not named."""
    name = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    try:
        lines = [line.split() for line in _SYSTEM_LOCKS.read_text().splitlines()]
    except OSError:
        return set()
    return {int(words[4]) for words in lines if words[1] == "FLOCK" and words[5] == name}


@contextmanager
def locked_directory(folder: Path) -> Iterator[Lock]:
    """Lock a data directory, so that no other process uses or examines it during the block.

    Raises DIRECTORY_IN_USE; OSError."""
    try:
        lock = Lock.take(folder / DIRECTORY_LOCK)
    except BlockingIOError as e:
        raise in_use(folder, str(e.strerror)) from e
    try:
        yield lock
    finally:
        lock.close()


@contextmanager
def kept_unused(folder: Path) -> Iterator[None]:
    """Keep sidecars from using this data directory during the block. Nothing in it changes.

    Raises DIRECTORY_IN_USE; OSError.
    """
    with ExitStack() as held:
        # A directory of an earlier version has no such lock. There the store's own lock keeps a sidecar away. A process
        # that makes a store locks the folder above it.
        for path in (folder / DIRECTORY_LOCK, folder, folder / "store" / "DURABLE"):
            if path.exists():
                lock = Lock(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                held.callback(lock.close)
                try:
                    fcntl.flock(lock._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError as e:
                    is_named = path.name == DIRECTORY_LOCK
                    raise in_use(folder, lock._owner() if is_named else holder_of(lock._descriptor)) from e
        yield


def owner_of(folder: Path) -> str | None:
    """Return in words who has locked this data directory; None if nobody has, or it is not known. Locks nothing.

    The system's list of locks decides. It may name another device than the folder's file system does. Then the owner
    is not found.
    """
    try:
        file = os.stat(folder / DIRECTORY_LOCK)
        said = (folder / DIRECTORY_LOCK).read_bytes()[:_MAX_OWNER_BYTES].decode("ascii", "replace")
    except OSError:
        return None
    return (said.partition("\n")[0] or "another process") if _holders(file) else None


def in_use(folder: Path, owner: str) -> SeqdedupeError:
    """Return DIRECTORY_IN_USE for a data directory and its owner in words."""
    return error("DIRECTORY_IN_USE", f"the data directory {folder} is in use: {owner} has it")
