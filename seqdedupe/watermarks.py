"""A file of watermarks: the highest sequence ID of each producer, to be taken over into a topic.

`docs/formats-watermarks.md` has the format, byte by byte.
"""

import hashlib
import os
import struct
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import sync_folder
from seqdedupe.limits import MAX_NAME_BYTES, MAX_SEQUENCE_ID

MAGIC = b"seqdedupe-marks\n"
FORMAT_VERSION = 1

_HEAD = MAGIC + struct.pack("<I", FORMAT_VERSION)
_END = b"\0"
_COUNT = struct.Struct("<Q")
_ID = struct.Struct("<q")
_DIGEST_BYTES = hashlib.sha256().digest_size
_TAIL_BYTES = len(_END) + _COUNT.size + _DIGEST_BYTES
_BLOCK_BYTES = 1024 * 1024


class Watermark(NamedTuple):
    """The highest sequence ID of a producer, whose name is 1 to 255 bytes of UTF-8."""

    producer: bytes
    sequence_id: int


def write(path: Path, watermarks: Iterable[Watermark]) -> int:
    """Writes the file and returns how many there are; when it returns, the file is durable.

    They have to rise by name, compared as bytes, no name twice. They are taken one by one, so there may be any number
    of them. Raises INVALID_NAME or INVALID_SEQUENCE_ID for what cannot be a producer's, OSError, and what `watermarks`
    raises; then a file that was there before is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.writing")
    try:
        with temporary.open("wb") as file:
            count = _write(file, watermarks)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return count


def _write(file: BinaryIO, watermarks: Iterable[Watermark]) -> int:
    digest = hashlib.sha256()
    count = 0
    before = b""
    block = bytearray(_HEAD)
    for name, sequence_id in watermarks:
        _check(name, sequence_id)
        if name <= before:
            raise error("INTERNAL", f"the producer {name!r} comes after {before!r}")
        before = name
        count += 1
        block += bytes((len(name),)) + name + _ID.pack(sequence_id)
        if len(block) >= _BLOCK_BYTES:
            digest.update(block)
            file.write(block)
            block.clear()
    block += _END + _COUNT.pack(count)
    digest.update(block)
    file.write(block + digest.digest())
    return count


def _check(name: bytes, sequence_id: int) -> None:
    try:
        text = name.decode()
    except UnicodeDecodeError as e:
        raise error("INVALID_NAME", f"the producer name {name!r} is not UTF-8") from e
    if not 1 <= len(name) <= MAX_NAME_BYTES:
        shown = f"{text[:40]!r}…" if name else "''"
        raise error("INVALID_NAME", f"the producer name {shown} has {len(name)} bytes: 1 to {MAX_NAME_BYTES} are legal")
    if not 0 <= sequence_id <= MAX_SEQUENCE_ID:
        raise error("INVALID_SEQUENCE_ID", f"{sequence_id} of producer {text!r} is not a sequence ID")


def read(path: Path) -> Generator[Watermark, None, None]:
    """The watermarks of a file, by name. The whole file is checked before the first one is given out.

    Raises INVALID_SOURCE if any byte of it is not as it was written, NEWER_FORMAT, OSError.
    """
    with path.open("rb") as file:
        size = _check_file(path, file)
        file.seek(len(_HEAD))
        left = size - len(_HEAD) - _TAIL_BYTES
        while left > 0:
            name = file.read(file.read(1)[0])
            left -= 1 + len(name) + _ID.size
            yield Watermark(name, _ID.unpack(file.read(_ID.size))[0])


def _check_file(path: Path, file: BinaryIO) -> int:
    """Checks head and digest, which covers all the rest; returns the size in bytes."""
    head = file.read(len(_HEAD))
    if not head.startswith(MAGIC):
        raise _damaged(path, "it does not begin as a file of watermarks does")
    size = file.seek(0, os.SEEK_END)
    if size < len(_HEAD) + _TAIL_BYTES:
        raise _damaged(path, "it is cut short")
    file.seek(0)
    digest = hashlib.sha256()
    left = size - _DIGEST_BYTES
    while left and (block := file.read(min(left, _BLOCK_BYTES))):
        digest.update(block)
        left -= len(block)
    if file.read() != digest.digest():
        raise _damaged(path, "its checksum does not fit: it is damaged, or cut short")
    if head != _HEAD:
        version = int.from_bytes(head[len(MAGIC) :], "little")
        raise error("NEWER_FORMAT", f"{path} has format version {version}; this version reads {FORMAT_VERSION}")
    return size


def _damaged(path: Path, what: str) -> SeqdedupeError:
    return error("INVALID_SOURCE", f"{path}: {what}")
