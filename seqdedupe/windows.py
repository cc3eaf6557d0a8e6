"""A file of a window: deduplication IDs and when each was published, to be taken over into a topic.

`docs/formats-window.md` has the format, byte by byte.
"""

import hashlib
import os
import struct
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from seqdedupe import sealed
from seqdedupe.errors import error
from seqdedupe.limits import MAX_DEDUPLICATION_ID_BYTES

MAGIC = b"seqdedupe-idset\n"
FORMAT_VERSION = 1

CHECKSUM_BYTES = sealed.DIGEST_BYTES

BLOCK_BYTES = 512 * 1024
"""A block is full when it has so many bytes, or more: with its last ID it has less than MAX_BLOCK_BYTES."""
MAX_BLOCK_BYTES = BLOCK_BYTES + 1024

LATEST_MS = (2**32 - 1) * 1000
"""The latest time, in the year 2106: topics keep whole seconds, in 32 bits."""

_HEAD = sealed.head_of(MAGIC, FORMAT_VERSION)
_COUNT = struct.Struct("<I")
_END = struct.Struct("<IQ")
"""No IDs, where another block would begin, and how many there are in all."""
_TIME_BYTES = 8


class Known(NamedTuple):
    """An ID, of 1 to 255 bytes, and when its message was published, in milliseconds since 1970, up to LATEST_MS."""

    deduplication_id: bytes
    publish_time_ms: int


class Block(NamedTuple):
    """Some of them, in columns."""

    times_ms: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.uint8]
    ids: npt.NDArray[np.uint8]
    """One after the other."""


class Writer:
    """What takes the IDs of a file, as `writing` gives it."""

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self.ids = 0
        """So many have come."""
        self._put = put
        self._before = b""
        self._begin_block()

    def add(self, one: bytes, time_ms: int) -> None:
        """The next ID, and when its message was published. Raises INVALID_DEDUPLICATION_ID, INVALID_REQUEST for a time
        that cannot be."""
        if not 1 <= len(one) <= MAX_DEDUPLICATION_ID_BYTES:
            why = f"the deduplication ID {one[:40]!r} has {len(one)} bytes"
            raise error("INVALID_DEDUPLICATION_ID", f"{why}: it should have 1 to {MAX_DEDUPLICATION_ID_BYTES}")
        if not 0 <= time_ms <= LATEST_MS:
            raise error("INVALID_REQUEST", f"{time_ms}, of the ID {one!r}, is no publish time: 0 to {LATEST_MS}")
        if one <= self._before:
            raise error("INTERNAL", f"the ID {one!r} comes after {self._before!r}")
        self._before = one
        self.ids += 1
        self._block.append(one)
        self._times.append(time_ms)
        self._block_bytes += _TIME_BYTES + 1 + len(one)
        if self._block_bytes >= BLOCK_BYTES:
            self._end_block()

    def finish(self) -> None:
        """That was all."""
        if self._block:
            self._end_block()
        self._put(_END.pack(0, self.ids))

    def _begin_block(self) -> None:
        self._times: list[int] = []
        self._block: list[bytes] = []
        self._block_bytes = _COUNT.size

    def _end_block(self) -> None:
        self._put(_encoded(self._times, self._block))
        self._begin_block()


@contextmanager
def writing(path: Path) -> Iterator[Writer]:
    """Gives what takes the IDs of a file one by one, at most a block of them in memory. After the block the file is
    durable; if the block raises, a file that was there before is as it was. Raises OSError.

    They have to rise, compared as bytes, none twice.
    """
    with sealed.writing(path, _HEAD) as put:
        writer = Writer(put)
        yield writer
        writer.finish()


def write(path: Path, known: Iterable[Known]) -> int:
    """Writes the file and returns how many IDs there are; when it returns, the file is durable.

    They have to rise, compared as bytes, none twice. They are taken one by one, so there may be any number of them.
    Raises INVALID_DEDUPLICATION_ID, INVALID_REQUEST for a time that cannot be, INTERNAL for an ID that does not rise,
    OSError, and what `known` raises; then a file that was there before is as it was.
    """
    with writing(path) as writer:
        for one, time_ms in known:
            writer.add(one, time_ms)
    return writer.ids


def _encoded(times: list[int], ids: list[bytes]) -> bytes:
    sizes = bytes(map(len, ids))
    return _COUNT.pack(len(ids)) + np.array(times, "<i8").tobytes() + sizes + b"".join(ids)


def read(path: Path) -> Generator[bytes, None, None]:
    """The file's checksum, and then its blocks as they stand there. The whole file is checked before anything is given.

    Raises INVALID_SOURCE for a file that is not as `write` has written it, NEWER_FORMAT, OSError.
    """
    with path.open("rb") as file:
        left = sealed.check(path, file, _HEAD, _END.size, "deduplication IDs") - _END.size
        first_block = file.tell()
        file.seek(-CHECKSUM_BYTES, os.SEEK_END)
        checksum = file.read()
        file.seek(first_block)
        yield checksum
        while left > 0:
            head = file.read(_COUNT.size)
            rows = _COUNT.unpack(head)[0]
            if not 0 < rows <= MAX_BLOCK_BYTES:
                raise sealed.damaged(path, f"it has a block of {rows} IDs")
            fixed = file.read((_TIME_BYTES + 1) * rows)
            block = head + fixed + file.read(sum(fixed[_TIME_BYTES * rows :]))
            left -= len(block)
            yield block


def parse(block: bytes) -> Block:
    """The columns of a block. Raises INVALID_REQUEST if it is none; whether the IDs rise is not looked at."""
    rows = _COUNT.unpack_from(block)[0] if _COUNT.size <= len(block) <= MAX_BLOCK_BYTES else 0
    if not 0 < rows <= (len(block) - _COUNT.size) // (_TIME_BYTES + 2):
        raise error("INVALID_REQUEST", f"{len(block)} bytes are no block of deduplication IDs")
    sizes_at = _COUNT.size + _TIME_BYTES * rows
    times = np.frombuffer(block, "<i8", rows, _COUNT.size)
    sizes = np.frombuffer(block, np.uint8, rows, sizes_at)
    ids = np.frombuffer(block, np.uint8, -1, sizes_at + rows)
    if not sizes.all() or len(ids) != int(sizes.sum(dtype=np.int64)):
        raise error("INVALID_REQUEST", f"the lengths of the {rows} deduplication IDs of a block do not fit")
    if times.min() < 0 or times.max() > LATEST_MS:
        raise error("INVALID_REQUEST", f"a block has publish times that cannot be: 0 to {LATEST_MS} are")
    return Block(times, sizes, ids)


def known_in(block: bytes) -> Iterator[Known]:
    """The IDs of a block, in order. Raises as `parse`."""
    columns = parse(block)
    ids, ends = columns.ids.tobytes(), accumulate(columns.sizes.tolist(), initial=0)
    for (begin, end), time_ms in zip(pairwise(ends), columns.times_ms.tolist(), strict=True):
        yield Known(ids[begin:end], time_ms)


class Checksum:
    """That of a file, made of its blocks."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256(_HEAD)
        self._ids = 0

    def add(self, block: bytes, ids: int) -> None:
        """The next block, which has so many IDs."""
        self._digest.update(block)
        self._ids += ids

    def finish(self) -> bytes:
        """After the last one."""
        self._digest.update(_END.pack(0, self._ids))
        return self._digest.digest()
