"""The files that `export` and `job bootstrap` write, and that `import` loads into a topic. A file contains the
watermarks of producers, a topic's snapshot, or a window of deduplication IDs. Each file is sealed (`files`).
`topics create` takes a file with the watermarks of a Pulsar topic.

A file is written in order, and checked as a whole before any of its contents is returned. The first 16 bytes identify
the kind. These pages define the formats: `docs/internals/formats-watermarks.md`, `docs/internals/formats-snapshot.md`,
`docs/internals/formats-window.md`.
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
from google.protobuf.message import DecodeError

from seqdedupe import files
from seqdedupe.errors import error
from seqdedupe.limits import MAX_DEDUPLICATION_ID_BYTES, MAX_NAME_BYTES, MAX_SEQUENCE_ID
from seqdedupe.v1 import admin_pb2

# -- Watermarks: the highest sequence ID of each producer.

WATERMARKS_MAGIC = b"seqdedupe-marks\n"
WATERMARKS_FORMAT_VERSION = 1

_WATERMARKS_HEAD = files.head_of(WATERMARKS_MAGIC, WATERMARKS_FORMAT_VERSION)
_WATERMARKS_END = b"\0"
_WATERMARKS_COUNT = struct.Struct("<Q")
_WATERMARKS_ID = struct.Struct("<q")
_WATERMARKS_TAIL_BYTES = len(_WATERMARKS_END) + _WATERMARKS_COUNT.size
_WATERMARKS_BLOCK_BYTES = 1024 * 1024


class Watermark(NamedTuple):
    """A producer's name (1 to 255 bytes of UTF-8), and the producer's highest sequence ID."""

    producer: bytes
    sequence_id: int


def write_watermarks(path: Path, watermarks: Iterable[Watermark]) -> int:
    """Write the file and return the number of watermarks. When this returns, the file is durable.

    Names must be in ascending order, compared as bytes, without repeats. The function reads `watermarks` one by one, so
    the number of watermarks is not limited. Raises INVALID_NAME or INVALID_SEQUENCE_ID for an invalid watermark,
    OSError, and the errors of `watermarks`. After an error an existing file is unchanged.
    """
    count = 0
    before = b""
    with files.writing_sealed(path, _WATERMARKS_HEAD) as put:
        block = bytearray()
        for name, sequence_id in watermarks:
            _check_watermark(name, sequence_id)
            if name <= before:
                raise error("INTERNAL", f"the producer {name!r} comes after {before!r}")
            before = name
            count += 1
            block += bytes((len(name),)) + name + _WATERMARKS_ID.pack(sequence_id)
            if len(block) >= _WATERMARKS_BLOCK_BYTES:
                put(block)
                block.clear()
        put(block + _WATERMARKS_END + _WATERMARKS_COUNT.pack(count))
    return count


def _check_watermark(name: bytes, sequence_id: int) -> None:
    try:
        text = name.decode()
    except UnicodeDecodeError as e:
        raise error("INVALID_NAME", f"the producer name {name!r} is not UTF-8") from e
    if not 1 <= len(name) <= MAX_NAME_BYTES:
        shown = f"{text[:40]!r}…" if name else "''"
        raise error("INVALID_NAME", f"the producer name {shown} has {len(name)} bytes: 1 to {MAX_NAME_BYTES} are legal")
    if not 0 <= sequence_id <= MAX_SEQUENCE_ID:
        raise error("INVALID_SEQUENCE_ID", f"{sequence_id} of producer {text!r} is not a sequence ID")


def read_watermarks(path: Path) -> Generator[Watermark, None, None]:
    """Yield the watermarks of a file, sorted by name. The whole file is checked before the first watermark is yielded.

    Raises INVALID_SOURCE if any byte differs from the written byte, NEWER_FORMAT, OSError.
    """
    with path.open("rb") as file:
        left = (
            files.check_sealed(path, file, _WATERMARKS_HEAD, _WATERMARKS_TAIL_BYTES, "watermarks")
            - _WATERMARKS_TAIL_BYTES
        )
        while left > 0:
            name = file.read(file.read(1)[0])
            left -= 1 + len(name) + _WATERMARKS_ID.size
            yield Watermark(name, _WATERMARKS_ID.unpack(file.read(_WATERMARKS_ID.size))[0])


# -- A topic's snapshot: its parts as a sidecar sends them.

SNAPSHOT_MAGIC = b"seqdedupe-state\n"
SNAPSHOT_FORMAT_VERSION = 1

_SNAPSHOT_HEAD = files.head_of(SNAPSHOT_MAGIC, SNAPSHOT_FORMAT_VERSION)
_SNAPSHOT_LENGTH = struct.Struct("<I")
_SNAPSHOT_END = _SNAPSHOT_LENGTH.pack(0)


@contextmanager
def writing_snapshot(path: Path) -> Iterator[Callable[[admin_pb2.SnapshotPart], None]]:
    """Yield a function that writes the parts, in order. After the block the file is durable.

    If the block raises an error, an existing file is unchanged. Raises OSError.
    """
    with files.writing_sealed(path, _SNAPSHOT_HEAD) as put:

        def take(part: admin_pb2.SnapshotPart) -> None:
            data = part.SerializeToString()
            put(_SNAPSHOT_LENGTH.pack(len(data)) + data)

        yield take
        put(_SNAPSHOT_END)


def read_snapshot(path: Path) -> Generator[admin_pb2.SnapshotPart, None, None]:
    """Yield the parts in the file. The whole file is checked before the first part is yielded.

    Raises INVALID_SOURCE if any byte differs from the written byte, NEWER_FORMAT, OSError.
    """
    with path.open("rb") as file:
        left = files.check_sealed(path, file, _SNAPSHOT_HEAD, len(_SNAPSHOT_END), "a snapshot")
        while (left := left - _SNAPSHOT_LENGTH.size) >= 0 and (
            size := _SNAPSHOT_LENGTH.unpack(file.read(_SNAPSHOT_LENGTH.size))[0]
        ):
            left -= size
            if left < 0:
                break
            try:
                yield admin_pb2.SnapshotPart.FromString(file.read(size))
            except DecodeError as e:
                raise files.not_as_written(path, "a part of it is none") from e
    if left != 0:
        raise files.not_as_written(path, "its parts do not end where it does")


# -- Watermarks of a Pulsar topic that no sidecar has created, and the entries from which they were read.

STOCK_MAGIC = b"seqdedupe-stock\n"
STOCK_FORMAT_VERSION = 1
MAX_STOCK_BYTES = 15 * 1024 * 1024
"""The maximum size of the watermarks: one request to a sidecar holds them."""

_STOCK_HEAD = files.head_of(STOCK_MAGIC, STOCK_FORMAT_VERSION)


def write_stock(path: Path, watermarks: admin_pb2.StockWatermarks) -> None:
    """Write the file. When this returns, the file is durable. After an error an existing file is unchanged.

    Raises INVALID_REQUEST if the watermarks need more than MAX_STOCK_BYTES; OSError.
    """
    data = watermarks.SerializeToString()
    if len(data) > MAX_STOCK_BYTES:
        what = f"the watermarks need {len(data)} bytes: a sidecar takes {MAX_STOCK_BYTES}"
        raise error("INVALID_REQUEST", what, hint="Take the topic over without watermarks.")
    with files.writing_sealed(path, _STOCK_HEAD) as put:
        put(data)


def read_stock(path: Path) -> admin_pb2.StockWatermarks:
    """Return the watermarks in the file. Raises INVALID_SOURCE if any byte differs from the written byte, NEWER_FORMAT,
    OSError."""
    with path.open("rb") as file:
        data = file.read(files.check_sealed(path, file, _STOCK_HEAD, 0, "a Pulsar topic's watermarks"))
    try:
        return admin_pb2.StockWatermarks.FromString(data)
    except DecodeError as e:
        raise files.not_as_written(path, "its content is none") from e


# -- A window: deduplication IDs and the publish time of each.

WINDOW_MAGIC = b"seqdedupe-idset\n"
WINDOW_FORMAT_VERSION = 1

WINDOW_CHECKSUM_BYTES = files.DIGEST_BYTES

WINDOW_BLOCK_BYTES = 512 * 1024
"""A block with at least this number of bytes is full. Together with its last ID, the block has less than
MAX_WINDOW_BLOCK_BYTES."""
MAX_WINDOW_BLOCK_BYTES = WINDOW_BLOCK_BYTES + 1024

LATEST_MS = (2**32 - 1) * 1000
"""The latest time, in the year 2106: topics keep whole seconds, in 32 bits."""

_WINDOW_HEAD = files.head_of(WINDOW_MAGIC, WINDOW_FORMAT_VERSION)
_WINDOW_COUNT = struct.Struct("<I")
_WINDOW_END = struct.Struct("<IQ")
"""The count 0 in place of another block, and the number of all IDs."""
_WINDOW_TIME_BYTES = 8


class KnownId(NamedTuple):
    """An ID of 1 to 255 bytes, and the publish time of the ID's message. The time is in milliseconds since 1970, and is
    at most LATEST_MS."""

    deduplication_id: bytes
    publish_time_ms: int


class WindowBlock(NamedTuple):
    """Some known IDs, in columns."""

    times_ms: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.uint8]
    ids: npt.NDArray[np.uint8]
    """The IDs, one after the other."""


class WindowWriter:
    """The writer of a file's IDs, which `writing_window` yields."""

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self.ids = 0
        """The number of IDs added."""
        self._put = put
        self._before = b""
        self._begin_block()

    def add(self, one: bytes, time_ms: int) -> None:
        """Add the next ID, and its message's publish time.

        Raises INVALID_DEDUPLICATION_ID, INVALID_REQUEST for an invalid time."""
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
        self._block_bytes += _WINDOW_TIME_BYTES + 1 + len(one)
        if self._block_bytes >= WINDOW_BLOCK_BYTES:
            self._end_block()

    def finish(self) -> None:
        """Write the last block, and the end."""
        if self._block:
            self._end_block()
        self._put(_WINDOW_END.pack(0, self.ids))

    def _begin_block(self) -> None:
        self._times: list[int] = []
        self._block: list[bytes] = []
        self._block_bytes = _WINDOW_COUNT.size

    def _end_block(self) -> None:
        self._put(_encoded(self._times, self._block))
        self._begin_block()


@contextmanager
def writing_window(path: Path) -> Iterator[WindowWriter]:
    """Yield a writer that accepts the IDs of a file one by one, and keeps at most one block of IDs in memory.

    After the `with` block the file is durable. If the `with` block raises an error, an existing file is unchanged.
    Raises OSError. IDs must be in ascending order, compared as bytes, without repeats.
    """
    with files.writing_sealed(path, _WINDOW_HEAD) as put:
        writer = WindowWriter(put)
        yield writer
        writer.finish()


def write_window(path: Path, known: Iterable[KnownId]) -> int:
    """Write the file and return the number of IDs. When this returns, the file is durable.

    IDs must be in ascending order, compared as bytes, without repeats. The function reads `known` one by one, so the
    number of IDs is not limited. Raises INVALID_DEDUPLICATION_ID, INVALID_REQUEST for an invalid time, INTERNAL for an
    ID out of order, OSError, and the errors of `known`. After an error an existing file is unchanged.
    """
    with writing_window(path) as writer:
        for one, time_ms in known:
            writer.add(one, time_ms)
    return writer.ids


def _encoded(times: list[int], ids: list[bytes]) -> bytes:
    sizes = bytes(map(len, ids))
    return _WINDOW_COUNT.pack(len(ids)) + np.array(times, "<i8").tobytes() + sizes + b"".join(ids)


def read_window(path: Path) -> Generator[bytes, None, None]:
    """Yield the file's checksum, and then its blocks unchanged. The whole file is checked before anything is returned.

    Raises INVALID_SOURCE if the file differs from the file that `write_window` has written, NEWER_FORMAT, OSError.
    """
    with path.open("rb") as file:
        left = files.check_sealed(path, file, _WINDOW_HEAD, _WINDOW_END.size, "deduplication IDs") - _WINDOW_END.size
        first_block = file.tell()
        file.seek(-WINDOW_CHECKSUM_BYTES, os.SEEK_END)
        checksum = file.read()
        file.seek(first_block)
        yield checksum
        while left > 0:
            head = file.read(_WINDOW_COUNT.size)
            rows = _WINDOW_COUNT.unpack(head)[0]
            if not 0 < rows <= MAX_WINDOW_BLOCK_BYTES:
                raise files.not_as_written(path, f"it has a block of {rows} IDs")
            fixed = file.read((_WINDOW_TIME_BYTES + 1) * rows)
            block = head + fixed + file.read(sum(fixed[_WINDOW_TIME_BYTES * rows :]))
            left -= len(block)
            yield block


def parse_block(block: bytes) -> WindowBlock:
    """Return the columns of a block. Raises INVALID_REQUEST for an invalid block. The order of IDs is not checked."""
    rows = _WINDOW_COUNT.unpack_from(block)[0] if _WINDOW_COUNT.size <= len(block) <= MAX_WINDOW_BLOCK_BYTES else 0
    if not 0 < rows <= (len(block) - _WINDOW_COUNT.size) // (_WINDOW_TIME_BYTES + 2):
        raise error("INVALID_REQUEST", f"{len(block)} bytes are no block of deduplication IDs")
    sizes_at = _WINDOW_COUNT.size + _WINDOW_TIME_BYTES * rows
    times = np.frombuffer(block, "<i8", rows, _WINDOW_COUNT.size)
    sizes = np.frombuffer(block, np.uint8, rows, sizes_at)
    ids = np.frombuffer(block, np.uint8, -1, sizes_at + rows)
    if not sizes.all() or len(ids) != int(sizes.sum(dtype=np.int64)):
        raise error("INVALID_REQUEST", f"the lengths of the {rows} deduplication IDs of a block do not fit")
    if times.min() < 0 or times.max() > LATEST_MS:
        raise error("INVALID_REQUEST", f"a block has publish times that cannot be: 0 to {LATEST_MS} are")
    return WindowBlock(times, sizes, ids)


def known_in(block: bytes) -> Iterator[KnownId]:
    """Yield the IDs of a block, in order. Raises the errors of `parse_block`."""
    columns = parse_block(block)
    ids, ends = columns.ids.tobytes(), accumulate(columns.sizes.tolist(), initial=0)
    for (begin, end), time_ms in zip(pairwise(ends), columns.times_ms.tolist(), strict=True):
        yield KnownId(ids[begin:end], time_ms)


class WindowChecksum:
    """The checksum of a file, made from its blocks."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256(_WINDOW_HEAD)
        self._ids = 0

    def add(self, block: bytes, ids: int) -> None:
        """Add the next block, which has this number of IDs."""
        self._digest.update(block)
        self._ids += ids

    def finish(self) -> bytes:
        """Return the checksum, after the last block."""
        self._digest.update(_WINDOW_END.pack(0, self._ids))
        return self._digest.digest()
