"""Making files durable."""

import os
from collections.abc import Sequence
from pathlib import Path


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
    written = os.pwritev(file, buffers, offset)
    if written < sum(map(len, buffers)):
        write_all(file, memoryview(b"".join(buffers))[written:], offset + written)
