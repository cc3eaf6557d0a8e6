"""Points of a topic as a snapshot holds them, byte by byte: `docs/formats-pulsar.md`."""

import struct
from collections.abc import Sequence

from seqdedupe.entry_properties import Owner
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.pulsar.places import Point, thinned
from seqdedupe.log.pulsar.terms import Standing
from seqdedupe.message_id import MessageId

VERSION = 1
MAX_STORED_POINTS = 64
"""They go with every snapshot. After a start a 30th of a topic may have to be read to find an old message."""

_HEAD = struct.Struct("<BQ")
_POINT = struct.Struct("<QQQQqqqqQ")


def encode(incarnation: int, points: Sequence[Point]) -> bytes:
    """The first and the last of the points, which rise, and of the others as many as there may be."""
    return _HEAD.pack(VERSION, incarnation) + b"".join(map(_encode, thinned(points, MAX_STORED_POINTS)))


def _encode(point: Point) -> bytes:
    (_, term, ownership), number, index, _ = point.standing
    ledger_id, entry_id, _ = point.message_id
    times = point.publish_time_ms, point.at_latest_ms
    return _POINT.pack(term, ownership, number, index, ledger_id, entry_id, *times, point.size_bytes)


def decode(incarnation: int, raw: bytes) -> list[Point]:
    """The points of a topic of this incarnation. Raises STORE_DAMAGED, NEWER_FORMAT."""
    if raw[:1] and raw[0] > VERSION:
        raise error("NEWER_FORMAT", f"a snapshot holds a place in its topic of version {raw[0]}, not {VERSION}")
    try:
        version, of_incarnation = _HEAD.unpack_from(raw)
        points = [_decode(incarnation, *numbers) for numbers in _POINT.iter_unpack(raw[_HEAD.size :])]
    except struct.error as e:
        raise _damaged(str(e)) from e
    if (version, of_incarnation) != (VERSION, incarnation) or not points:
        raise _damaged(f"version {version}, incarnation {of_incarnation}, {len(points)} points")
    sizes, indexes = [point.size_bytes for point in points], [point.next_index for point in points]
    if sorted(set(sizes)) != sizes or sorted(indexes) != indexes:
        raise _damaged("its points do not rise")
    return points


def _decode(
    incarnation: int,
    term: int,
    ownership: int,
    number: int,
    index: int,
    ledger_id: int,
    entry_id: int,
    publish_time_ms: int,
    at_latest_ms: int,
    size_bytes: int,
) -> Point:
    standing = Standing(Owner(incarnation, term, ownership), number, index)
    return Point(standing, MessageId(ledger_id, entry_id), publish_time_ms, at_latest_ms, size_bytes)


def _damaged(why: str) -> SeqdedupeError:
    return error("STORE_DAMAGED", f"a snapshot holds no place in its topic of Pulsar's: {why}")
