"""Making files durable."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

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
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(file, 0o600)
        os.write(file, data)
        os.fsync(file)
    finally:
        os.close(file)
    sync_folder(path.parent)


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
