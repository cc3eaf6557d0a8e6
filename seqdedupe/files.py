"""Files that somebody names, which are read without waiting. Files and folders that are durable, and there whole or not
at all: what writes and syncs, a new folder that gets its name last, and sealed files, which say what they are and end
with a digest."""

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
"""What the name of a new folder ends with until everything in it is durable."""


# -- Files that somebody names, and may put anything in the place of.

MAX_NAMED_BYTES = 64 * 1024 * 1024
"""Of one. The largest lists of revoked certificates have a tenth."""


def open_named(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file that somebody names, to read it, and never waits: a pipe or a device has no end, or no beginning.

    Raises OSError, also where it is no regular file.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115, the caller closes it
    try:
        check_regular(file.fileno(), path)
    except OSError:
        file.close()
        raise
    return file


def check_regular(file: int, path: str | os.PathLike[str]) -> None:
    """Raises OSError if what is open is no regular file."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def read_named(path: str | os.PathLike[str], most_bytes: int = MAX_NAMED_BYTES) -> bytes:
    """What such a file holds. Raises OSError, also where it has more bytes."""
    with open_named(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", os.fspath(path))
    return data


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


# -- What writes and syncs.


def sync_folder(folder: Path) -> None:
    """Makes the entries of a folder durable. Raises OSError."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_synced(path: Path, data: bytes) -> None:
    """Writes a small file that only its owner may read, and makes it durable. Raises OSError.

    A power cut meanwhile may leave it short or empty.
    """
    file = _written(path, data)
    try:
        os.fsync(file)
    finally:
        os.close(file)
    sync_folder(path.parent)


def write_all_synced(folder: Path, files: dict[str, bytes], threads: Executor) -> None:
    """As `write_synced`, several files of a folder, whose syncs and the folder's come at once."""
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
    """A small file that only its owner may read, open, with that in it."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(file, 0o600)
        os.write(file, data)
    except OSError:
        os.close(file)
        raise
    return file


def write_all(file: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of it there. Raises OSError; then any part of it may have been written."""
    rest = memoryview(data)
    while rest:
        # Short, as on a disk that is filling up: writing the rest tells why.
        written = os.pwrite(file, rest, offset)
        rest, offset = rest[written:], offset + written


@contextmanager
def becoming(to: Path, apart_from: Path) -> Iterator[Path]:
    """A new folder for the block, which afterwards is there by the name `to`; if the block raises nothing is left.

    Raises DIRECTORY_NOT_EMPTY if `to` is not free, or within the folder that is to stay as it is; OSError.
    """
    to = to.resolve()
    unfinished = to.with_name(to.name + UNFINISHED)
    _check_is_free(to, unfinished, apart_from.resolve())
    unfinished.mkdir(mode=0o700, parents=True)
    try:
        yield unfinished
        unfinished.rename(to)
    except BaseException:
        # Here, since it imports all kinds of archives, which clients do not need.
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


# -- Sealed files are written once, whole or not at all: a head that says what they are, a body, and a digest of both.

MAGIC_BYTES = 16
DIGEST_BYTES = hashlib.sha256().digest_size
_BLOCK_BYTES = 1024 * 1024


def head_of(magic: bytes, version: int) -> bytes:
    """What a file of this kind begins with: 16 bytes of text, and the format version."""
    return magic + struct.pack("<I", version)


@contextmanager
def writing_sealed(path: Path, head: bytes) -> Iterator[Callable[[bytes | bytearray], None]]:
    """Gives what takes the body, some bytes at once. After the block the file is durable; if the block raises, a file
    that was there before is as it was. Raises OSError."""
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
        raise OSError(e.errno, e.strerror, str(path)) from e  # the name that somebody has asked for
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def magic_of(path: Path) -> bytes:
    """The text that tells what kind of file it is. Raises OSError."""
    with path.open("rb") as file:
        return file.read(MAGIC_BYTES)


def check_sealed(path: Path, file: BinaryIO, head: bytes, least_bytes: int, kind: str) -> int:
    """Checks head and digest, which covers all the rest; returns the size of the body in bytes, at which `file` stands.

    The body has at least so many bytes. Raises INVALID_SOURCE, NEWER_FORMAT, OSError.
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
    """The error of a file that is not what was written."""
    return error(
        "INVALID_SOURCE", f"{path}: {what}", hint="Give a file that `seqdedupe export` has written, or write it again."
    )
