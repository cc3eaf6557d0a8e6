"""Functions for these kinds of files:

- Files that a user names. They are read without waiting.
- Durable files and folders, which exist completely or not at all. A new folder gets its name last.
- Sealed files, which begin with the kind of file and end with a digest.
- Files that a process locks until the process ends.
"""

import errno
import fcntl
import hashlib
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from seqdedupe.errors import SeqdedupeError, error

UNFINISHED = ".unfinished"
"""The suffix of a new folder's name. The suffix is removed when the contents of the folder are durable."""


# -- Files that a user names, and that may be anything.

MAX_NAMED_BYTES = 64 * 1024 * 1024
"""The maximum size of a named file in bytes. The largest certificate revocation lists have a tenth of this size."""


def open_named(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file that a user names for reading, and never wait: a pipe or a device may have no data, or no end.

    Raises OSError, also if the file is not a regular file.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115, the caller closes it
    try:
        check_regular(file.fileno(), path)
    except OSError:
        file.close()
        raise
    return file


def check_regular(file: int, path: str | os.PathLike[str]) -> None:
    """Raise OSError if the open file is not a regular file."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def read_named(path: str | os.PathLike[str], most_bytes: int = MAX_NAMED_BYTES) -> bytes:
    """Return the contents of a named file. Raises OSError, also if the file has more than `most_bytes`."""
    with open_named(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", os.fspath(path))
    return data


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


# -- Functions that write and sync.


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable. Raises OSError."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_synced(path: Path, data: bytes) -> None:
    """Write a small file that only its owner may read, and make it durable. Raises OSError.

    After a power cut during this call, the file may be short or empty.
    """
    file = _written(path, data)
    try:
        os.fsync(file)
    finally:
        os.close(file)
    sync_folder(path.parent)


def write_all_synced(folder: Path, files: dict[str, bytes], threads: Executor) -> None:
    """Do the same as `write_synced` for several files of a folder. The syncs of the files and of the folder run in
    parallel."""
    written: list[int] = []
    try:
        for name, data in files.items():
            written.append(_written(folder / name, data))
        syncs = [*(threads.submit(os.fsync, file) for file in written), threads.submit(sync_folder, folder)]
        wait(syncs)
        for sync in syncs:
            sync.result()
    finally:
        for file in written:
            os.close(file)


def _written(path: Path, data: bytes) -> int:
    """Write a small file that only its owner may read. Return it open."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(file, 0o600)
        os.write(file, data)
    except OSError:
        os.close(file)
        raise
    return file


def write_all(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write all data at this offset. Raises OSError. After an error, any part of the data may have been written."""
    rest = memoryview(data)
    while rest:
        # The write may be short, as on a disk that fills up. Writing the rest then raises the reason.
        written = os.pwrite(file, rest, offset)
        rest, offset = rest[written:], offset + written


@contextmanager
def becoming(to: Path, apart_from: Path) -> Iterator[Path]:
    """Yield a new folder, which gets the name `to` after the block. If the block raises an error, the folder is
    removed.

    Raises DIRECTORY_NOT_EMPTY if `to` is in use, or is inside `apart_from`, which must not change; OSError.
    """
    to = to.resolve()
    unfinished = to.with_name(to.name + UNFINISHED)
    _check_is_free(to, unfinished, apart_from.resolve())
    unfinished.mkdir(mode=0o700, parents=True)
    try:
        yield unfinished
        unfinished.rename(to)
    except BaseException:
        # Import it here: it imports all kinds of archives, which clients do not need.
        from shutil import rmtree

        rmtree(unfinished)
        raise
    sync_folder(to.parent)


def _check_is_free(to: Path, unfinished: Path, apart_from: Path) -> None:
    if unfinished.exists():
        raise error("DIRECTORY_NOT_EMPTY", f"{unfinished} exists: an unfinished command has left it")
    if to.is_relative_to(apart_from):
        raise error("DIRECTORY_NOT_EMPTY", f"{to} is within {apart_from}, which must not change")
    if to.is_mount() or (to.exists() and (not to.is_dir() or any(to.iterdir()))):
        what = "the root of a file system" if to.is_mount() else "not an empty directory"
        raise error("DIRECTORY_NOT_EMPTY", f"{to} is {what}")


# -- Sealed files are written once, completely or not at all: a head with their kind, a body, and a digest of both.

MAGIC_BYTES = 16
DIGEST_BYTES = hashlib.sha256().digest_size
_BLOCK_BYTES = 1024 * 1024


def head_of(magic: bytes, version: int) -> bytes:
    """Return the head of a file of this kind: 16 bytes of text, and the format version."""
    return magic + struct.pack("<I", version)


@contextmanager
def writing_sealed(path: Path, head: bytes) -> Iterator[Callable[[bytes | bytearray], None]]:
    """Yield a function that writes the body in pieces. After the block the file is durable.

    If the block raises an error, an existing file is unchanged. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.writing")
    digest = hashlib.sha256(head)
    try:
        with temporary.open("wb") as file:
            file.write(head)

            def put(data: bytes | bytearray) -> None:
                digest.update(data)
                file.write(data)

            yield put
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as e:
        if e.filename != str(temporary):
            raise
        raise OSError(e.errno, e.strerror, str(path)) from e  # the name that the caller has given
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def magic_of(path: Path) -> bytes:
    """Return the text that identifies the file's kind. Raises OSError."""
    with path.open("rb") as file:
        return file.read(MAGIC_BYTES)


def check_sealed(path: Path, file: BinaryIO, head: bytes, least_bytes: int, kind: str) -> int:
    """Check the head, and the digest of the file. Return the number of bytes of the body. `file` is then at the
    beginning of the body.

    The body must have at least `least_bytes`. Raises INVALID_SOURCE, NEWER_FORMAT, OSError.
    """
    there = file.read(len(head))
    if not there.startswith(head[:MAGIC_BYTES]):
        raise not_as_written(path, f"it does not begin as a file of {kind} does")
    body_bytes = file.seek(0, os.SEEK_END) - len(head) - DIGEST_BYTES
    if body_bytes < least_bytes:
        raise not_as_written(path, "it is cut short")
    file.seek(len(head))
    digest = hashlib.sha256(there)
    left = body_bytes
    while left and (block := file.read(min(left, _BLOCK_BYTES))):
        digest.update(block)
        left -= len(block)
    if file.read() != digest.digest():
        raise not_as_written(path, "its checksum does not fit: it is damaged, or cut short")
    if there != head:
        version, known = (int.from_bytes(each[MAGIC_BYTES:], "little") for each in (there, head))
        raise error("NEWER_FORMAT", f"{path} has format version {version}; this version reads {known}")
    file.seek(len(head))
    return body_bytes


def not_as_written(path: Path, what: str) -> SeqdedupeError:
    """Return the error for a file whose content differs from the written content."""
    return error(
        "INVALID_SOURCE",
        f"{path}: {what}",
        hint="Name a file that `seqdedupe export` has written, or export the file again.",
    )


# -- Files that are locked while their owner lives, and that name the owner.
#
# A data directory's lock is a separate file in it. Operators move store and logs away for repairs. A lock in one of
# these folders would be moved too, and a second process would get a different lock.

DIRECTORY_LOCK = "LOCK"
"""The lock's name in the data directory. No procedure moves or removes it."""

_MAX_OWNER_BYTES = 400

_SYSTEM_LOCKS = Path("/proc/locks")
"""The locks on this machine, with their processes, as far as this process may see them."""


class Lock:
    """A locked file. The system unlocks the file when the process ends or crashes."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @staticmethod
    def take(path: Path) -> "Lock":
        """Lock the file. Create the file if it is missing. Raises BlockingIOError, whose `strerror` names the owner;
        OSError."""
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
        """Return whether the file at the path is still the locked file. If not, another process may lock the new file.

        Raises OSError if this cannot be determined now.
        """
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
        # A full disk has no room for the text. The file is locked nevertheless.
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
    """Return a text about the other process that has locked an open file: the process ID, or that the process is not
    known.

    The system does not name a process outside this process's container, or on another machine.
    """
    pids = _holders(os.fstat(descriptor)) - {os.getpid()}
    if known := sorted(pid for pid in pids if pid > 0):
        return f"process {known[0]}"
    return "another process, whose number the system does not say here,"


def _holders(file: os.stat_result) -> set[int]:
    """Return the IDs of the processes that have locked a file, if this process may see them. A number of 0 or less
    stands for a process without a known ID."""
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
    """Prevent sidecars from using this data directory during the block. Change nothing in the directory.

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
    """Return a text that names the process that has locked this data directory. Return None if no process has locked
    it, or if the process is not known. Lock nothing.

    The function uses the system's list of locks. If this list names another device than the folder's file system, the
    process is not found.
    """
    try:
        file = os.stat(folder / DIRECTORY_LOCK)
        said = (folder / DIRECTORY_LOCK).read_bytes()[:_MAX_OWNER_BYTES].decode("ascii", "replace")
    except OSError:
        return None
    return (said.partition("\n")[0] or "another process") if _holders(file) else None


def in_use(folder: Path, owner: str) -> SeqdedupeError:
    """Return the error DIRECTORY_IN_USE for a data directory. `owner` is a text that names the process that uses the
    directory."""
    return error("DIRECTORY_IN_USE", f"the data directory {folder} is in use: {owner} has it")
