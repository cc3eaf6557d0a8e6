"""A file of watermarks: the highest sequence ID of each producer, to be taken over into a topic.

`docs/formats-watermarks.md` has the format, byte by byte.
"""

import struct
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import NamedTuple

from seqdedupe import sealed
from seqdedupe.errors import error
from seqdedupe.limits import MAX_NAME_BYTES, MAX_SEQUENCE_ID

MAGIC = b"seqdedupe-marks\n"
FORMAT_VERSION = 1

_HEAD = sealed.head_of(MAGIC, FORMAT_VERSION)
_END = b"\0"
_COUNT = struct.Struct("<Q")
_ID = struct.Struct("<q")
_TAIL_BYTES = len(_END) + _COUNT.size
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
    count = 0
    before = b""
    with sealed.writing(path, _HEAD) as put:
        block = bytearray()
        for name, sequence_id in watermarks:
            _check(name, sequence_id)
            if name <= before:
                raise error("INTERNAL", f"the producer {name!r} comes after {before!r}")
            before = name
            count += 1
            block += bytes((len(name),)) + name + _ID.pack(sequence_id)
            if len(block) >= _BLOCK_BYTES:
                put(block)
                block.clear()
        put(block + _END + _COUNT.pack(count))
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
        left = sealed.check(path, file, _HEAD, _TAIL_BYTES, "watermarks") - _TAIL_BYTES
        while left > 0:
            name = file.read(file.read(1)[0])
            left -= 1 + len(name) + _ID.size
            yield Watermark(name, _ID.unpack(file.read(_ID.size))[0])
