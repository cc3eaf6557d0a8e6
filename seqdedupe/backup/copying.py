"""Copying a file while it is read, with its checksum, durable on return."""

import os
from collections.abc import Callable
from pathlib import Path

import google_crc32c

from seqdedupe.log.embedded.past_damage import read_what_can_be
from seqdedupe.log.embedded.segment import unreadable

PIECE_BYTES = 1024 * 1024
SYNC_BYTES = 8 * 1024 * 1024
"""What is written is synced in so large parts, so that syncs of a log on the same disk do not wait for much more."""

Pay = Callable[[int], None]
"""Told how many bytes were copied. May raise, which breaks the copying off."""


def copy_file(source: Path, target: Path, size: int, pay: Pay) -> tuple[int, int]:
    """The first bytes of a file, as a new file that only its owner may read; how many there were, and their CRC32C.

    Zeros stand for what the disk cannot give. Raises LOG_UNREADABLE if the source cannot be read; OSError if the target
    cannot be written, FileExistsError among them.
    """
    try:
        there = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        raise unreadable(source, e) from e
    try:
        made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            return _copy(source, there, made, size, pay)
        finally:
            os.close(made)
    finally:
        os.close(there)


def _copy(path: Path, source: int, target: int, size: int, pay: Pay) -> tuple[int, int]:
    at = synced = crc = 0
    while at < size:
        try:
            raw = read_what_can_be(source, min(PIECE_BYTES, size - at), at)
        except OSError as e:
            raise unreadable(path, e) from e
        if not raw:
            break
        crc = google_crc32c.extend(crc, raw)
        rest = memoryview(raw)
        while rest:
            rest = rest[os.write(target, rest) :]
        at += len(raw)
        if at - synced >= SYNC_BYTES:
            os.fdatasync(target)
            synced = at
        pay(len(raw))
    os.fsync(target)
    return at, crc


def checksum(path: Path, pay: Pay) -> int:
    """The CRC32C of a file. Raises OSError."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        while raw := file.read(PIECE_BYTES):
            crc = google_crc32c.extend(crc, raw)
            pay(len(raw))
    return crc


def forget_pages(path: Path) -> None:
    """Has the system read a file from the disk the next time, where it can. Raises LOG_UNREADABLE."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise unreadable(path, e) from e
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
