"""Files that are written once, whole or not at all: a head that says what they are, a body, and a digest of both."""

import hashlib
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import sync_folder

MAGIC_BYTES = 16
DIGEST_BYTES = hashlib.sha256().digest_size
_BLOCK_BYTES = 1024 * 1024


def head_of(magic: bytes, version: int) -> bytes:
    """What a file of this kind begins with: 16 bytes of text, and the format version."""
    return magic + struct.pack("<I", version)


@contextmanager
def writing(path: Path, head: bytes) -> Iterator[Callable[[bytes | bytearray], None]]:
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


def check(path: Path, file: BinaryIO, head: bytes, least_bytes: int, kind: str) -> int:
    """Checks head and digest, which covers all the rest; returns the size of the body in bytes, at which `file` stands.

    The body has at least so many bytes. Raises INVALID_SOURCE, NEWER_FORMAT, OSError.
    """
    there = file.read(len(head))
    if not there.startswith(head[:MAGIC_BYTES]):
        raise damaged(path, f"it does not begin as a file of {kind} does")
    body_bytes = file.seek(0, os.SEEK_END) - len(head) - DIGEST_BYTES
    if body_bytes < least_bytes:
        raise damaged(path, "it is cut short")
    file.seek(len(head))
    digest = hashlib.sha256(there)
    left = body_bytes
    while left and (block := file.read(min(left, _BLOCK_BYTES))):
        digest.update(block)
        left -= len(block)
    if file.read() != digest.digest():
        raise damaged(path, "its checksum does not fit: it is damaged, or cut short")
    if there != head:
        version, known = (int.from_bytes(each[MAGIC_BYTES:], "little") for each in (there, head))
        raise error("NEWER_FORMAT", f"{path} has format version {version}; this version reads {known}")
    file.seek(len(head))
    return body_bytes


def damaged(path: Path, what: str) -> SeqdedupeError:
    """The error of a file that is not what was written."""
    return error(
        "INVALID_SOURCE", f"{path}: {what}", hint="Give a file that `seqdedupe export` has written, or write it again."
    )
