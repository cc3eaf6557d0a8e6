"""A file that holds a topic's snapshot: the parts that a sidecar sends of it, as they are.

`docs/formats-snapshot.md` has the format, byte by byte.
"""

import struct
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from google.protobuf.message import DecodeError

from seqdedupe import sealed
from seqdedupe.v1 import admin_pb2

MAGIC = b"seqdedupe-state\n"
FORMAT_VERSION = 1

_HEAD = sealed.head_of(MAGIC, FORMAT_VERSION)
_LENGTH = struct.Struct("<I")
_END = _LENGTH.pack(0)


@contextmanager
def writing(path: Path) -> Iterator[Callable[[admin_pb2.SnapshotPart], None]]:
    """Gives what takes the parts, in their order. After the block the file is durable; if the block raises, a file that
    was there before is as it was. Raises OSError."""
    with sealed.writing(path, _HEAD) as put:

        def take(part: admin_pb2.SnapshotPart) -> None:
            data = part.SerializeToString()
            put(_LENGTH.pack(len(data)) + data)

        yield take
        put(_END)


def read(path: Path) -> Generator[admin_pb2.SnapshotPart, None, None]:
    """The parts in the file. The whole file is checked before the first one is given out.

    Raises INVALID_SOURCE if any byte of it is not as it was written, NEWER_FORMAT, OSError.
    """
    with path.open("rb") as file:
        left = sealed.check(path, file, _HEAD, len(_END), "a snapshot")
        while (left := left - _LENGTH.size) >= 0 and (size := _LENGTH.unpack(file.read(_LENGTH.size))[0]):
            left -= size
            if left < 0:
                break
            try:
                yield admin_pb2.SnapshotPart.FromString(file.read(size))
            except DecodeError as e:
                raise sealed.damaged(path, "a part of it is none") from e
    if left != 0:
        raise sealed.damaged(path, "its parts do not end where it does")
