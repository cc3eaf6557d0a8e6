"""Files that a user names, and durable files and folders. Files that a user names are read without waiting. Durable
files and folders exist completely or not at all: functions write and sync them, a new folder gets its name last, and a
sealed file begins with its kind and ends with a digest."""

import errno
import hashlib
import os
import stat
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from seqdedupe.errors import SeqdedupeError, error

UNFINISHED = ".unfinished"
"""The end of a new folder's name until everything in it is durable."""


# -- Files that a user names, and that may be anything.

MAX_NAMED_BYTES = 64 * 1024 * 1024
"""The most bytes of a named file. The largest lists of revoked certificates have a tenth of this."""


def open_named(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file that a user names, to read it, and never wait: a pipe or a device may have no data, or no end.

    Raises OSError, also if it is not a regular file.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115, the caller closes it
    try:
        check_regular(file.fileno(), path)
    except OSError:
        file.close()
        raise
    return file


def check_regular(file: int, path: str | os.PathLike[str]) -> None:
    """Raise OSError if the open file is not a regular one."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def read_named(path: str | os.PathLike[str], most_bytes: int = MAX_NAMED_BYTES) -> bytes:
    """Return the contents of a named file. Raises OSError, also if it has more than `most_bytes`."""
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

    A power cut meanwhile may leave it short or empty.
    """
    file = _written(path, data)
    try:
        os.fsync(file)
    finally:
        os.close(file)
    sync_folder(path.parent)


def write_all_synced(folder: Path, files: dict[str, bytes], threads: Executor) -> None:
    """Do as `write_synced`, for several files of a folder. Their syncs and the folder's run in parallel."""
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
    """Write all of it at this offset. Raises OSError; then any part may have been written."""
    rest = memoryview(data)
    while rest:
        # The write may be short, as on a disk that fills up. Writing the rest then raises the reason.
        written = os.pwrite(file, rest, offset)
        rest, offset = rest[written:], offset + written


@contextmanager
def becoming(to: Path, apart_from: Path) -> Iterator[Path]:
    """Yield a new folder, which gets the name `to` after the block. If the block raises, nothing is left.

    Raises DIRECTORY_NOT_EMPTY if `to` is in use, or lies within `apart_from`, which must not change; OSError.
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
        raise error("DIRECTORY_NOT_EMPTY", f"{unfinished} is there: what did not end has left it")
    if to.is_relative_to(apart_from):
        raise error("DIRECTORY_NOT_EMPTY", f"{to} is within {apart_from}, which stays as it is")
    if to.is_mount() or (to.exists() and (not to.is_dir() or any(to.iterdir()))):
        what = "the root of a file system" if to.is_mount() else "not an empty directory"
        raise error("DIRECTORY_NOT_EMPTY", f"{to} is {what}")


# -- Sealed files are written once, completely or not at all: a head with their kind, a body, and a digest of both.

MAGIC_BYTES = 16
DIGEST_BYTES = hashlib.sha256().digest_size
_BLOCK_BYTES = 1024 * 1024


def head_of(magic: bytes, version: int) -> bytes:
    """Return the beginning of a file of this kind: 16 bytes of text, and the format version."""
    return magic + struct.pack("<I", version)


@contextmanager
def writing_sealed(path: Path, head: bytes) -> Iterator[Callable[[bytes | bytearray], None]]:
    """Yield a function that takes the body in pieces. After the block the file is durable.

    If the block raises, an earlier file is unchanged. Raises OSError."""
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
    """Check the head, and the digest, which covers all the rest. Return the bytes of the body; `file` is at its begin.

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
    """Return the error for a file that differs from what was written."""
    return error(
        "INVALID_SOURCE", f"{path}: {what}", hint="Give a file that `seqdedupe export` has written, or write it again."
    )
