"""Making files durable, and folders that are there whole or not at all."""

import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, wait
from contextlib import contextmanager
from pathlib import Path

from seqdedupe.errors import error

UNFINISHED = ".unfinished"
"""What the name of a new folder ends with until everything in it is durable."""

WRITE_BYTES = 1024 * 1024
"""What one call writes. For a larger write the system takes memory in larger pieces, of those that it has not used for
long, which in a virtual machine may have to come from the host: 16 MB in one call took up to five times as long."""


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


def write_buffers(file: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
    """Writes the buffers one after the other. Raises OSError; then any part of them may have been written."""
    for some in _in_pieces(buffers):
        size = sum(map(len, some))
        written = os.pwritev(file, some, offset)
        if written < size:
            write_all(file, memoryview(b"".join(some))[written:], offset + written)
        offset += size


def _in_pieces(buffers: Sequence[bytes | memoryview]) -> Iterator[Sequence[bytes | memoryview]]:
    """The buffers, so many at once that they have WRITE_BYTES at most."""
    if sum(map(len, buffers)) <= WRITE_BYTES:
        yield buffers
        return
    some: list[bytes | memoryview] = []
    left = WRITE_BYTES
    for buffer in buffers:
        for at in range(0, len(buffer), WRITE_BYTES):
            part = buffer if len(buffer) <= WRITE_BYTES else memoryview(buffer)[at : at + WRITE_BYTES]
            if len(part) > left:
                yield some
                some, left = [], WRITE_BYTES
            some.append(part)
            left -= len(part)
    yield some


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
        shutil.rmtree(unfinished)
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
