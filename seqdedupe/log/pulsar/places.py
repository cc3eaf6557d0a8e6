"""The knowledge about a topic that needs no reading: where the topic ends, and where reading must start to find each
part of the topic."""

import struct
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from seqdedupe.entry_properties import BATCH, KIND, EntryOwner
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.contract import Run, Runs
from seqdedupe.log.pulsar.entries import PulsarMessage, begins_batch, content_bytes
from seqdedupe.log.pulsar.terms import TermStanding
from seqdedupe.message_id import NOWHERE, MessageId

STEP_BYTES = 256 * 1024
"""The approximate bytes read to find one message, where the points are near enough."""
MAX_POINTS = 4096
"""The most points of a topic: enough for 1 GiB, one step apart."""
ENTRY_BYTES = 64
"""The counted size of an entry, in addition to its payload and its key."""
RECENT_ENTRIES = 4096
"""The message IDs of this number of the newest entries with messages are known."""


class Point(NamedTuple):
    """A place between two entries, with all data that is needed to continue reading there."""

    standing: TermStanding
    message_id: MessageId
    """The ID of the valid entry before. At the topic's beginning it has no entry (-1), and the ledger of the first
    valid entry, once that is known."""
    publish_time_ms: int
    """The earliest publish time of the previous record, if that record was written by this process and not read."""
    at_latest_ms: int
    """The latest publish time of the previous record."""
    size_bytes: int
    """The total size of the entries before the point. No two points have the same value."""

    @staticmethod
    def start(incarnation: int) -> "Point":
        """Return the point before all entries."""
        return Point(TermStanding.start(incarnation), NOWHERE, 0, 0, 0)

    @property
    def next_index(self) -> int:
        """The index of the next message."""
        return self.standing.next_index

    def after(
        self, standing: TermStanding, message_id: MessageId, publish_time_ms: int, at_latest_ms: int, size_bytes: int
    ) -> "Point":
        """Return the point after the next valid entry. The entry has `size_bytes`. `standing` is the state after the
        entry."""
        return Point(
            standing,
            message_id,
            max(publish_time_ms, self.publish_time_ms),
            max(at_latest_ms, self.at_latest_ms),
            self.size_bytes + size_bytes,
        )


class Places:
    """The points of a topic, and the known end of the topic.

    A record begins at each point. The newer half of the points are one step apart, or before a marker. The distance of
    older points grows with the size of the topic. Where the topic is read, further points are added again (`learn`).
    """

    def __init__(self, points: Sequence[Point], begins_at: MessageId | None = None) -> None:
        """Begin with these points. The first is the beginning of the topic, the last is the known end. Nothing valid is
        before the entry `begins_at`."""
        self._points = [*points]
        self.end = points[-1]
        """The point after the last entry that is known to be valid."""
        self._last_record = self.end
        """The point before the last record that has messages."""
        ledger_id, entry_id, _ = points[0].message_id
        is_known = len(points) > 1 and ledger_id >= 0 and entry_id < 0
        self.begins_at: MessageId | None = MessageId(ledger_id, 0) if is_known else begins_at
        """An entry from which on nothing valid is missed, if `first` is before all of them. Entries of other producers
        before it may be many. None: the topic must be read from its first entry on."""
        self._recent: deque[tuple[int, Run]] = deque(maxlen=RECENT_ENTRIES)

    @property
    def first(self) -> Point:
        """The beginning of the topic."""
        return self._points[0]

    def advance(self, to: Point, *, begins_record: bool, is_batch: bool) -> Runs:
        """Add the next valid entries, which are consecutive. `to` is the point after these entries. Return the message
        IDs of the rows. If there are several entries, each entry is one row of the same record."""
        end, self.end = self.end, to
        if end.message_id == NOWHERE:
            self._points[0] = end._replace(message_id=MessageId(to.message_id.ledger_id, NOWHERE.entry_id))
            self.begins_at = to.message_id
        rows = to.next_index - end.next_index
        if begins_record:
            distance = end.size_bytes - self._points[-1].size_bytes
            if distance >= STEP_BYTES or (distance > 0 and to.standing.owner != end.standing.owner):
                self._points.append(end)
                self._thin()
            if rows:
                self._last_record = end
        if not rows:
            return ()
        ledger_id, entry_id, _ = to.message_id
        run = Run(rows, ledger_id, entry_id, 0) if is_batch else Run(rows, ledger_id, entry_id - rows + 1)
        self._recent.append((end.next_index, run))
        return (run,)

    def go_back(self, end: Point) -> None:
        """Forget everything after this point, where a record ends."""
        self.end = end
        while len(self._points) > 1 and self._points[-1].size_bytes > end.size_bytes:
            self._points.pop()
        if self._last_record.size_bytes > end.size_bytes:
            self._last_record = self._points[-1]
        while self._recent and self._recent[-1][0] >= end.next_index:
            self._recent.pop()

    def learn(self, point: Point) -> None:
        """Remember a point found by reading the topic, if the other points are far away."""
        at = bisect_left(self._points, point.size_bytes, key=_size)
        if 0 < at < len(self._points) and (
            point.size_bytes - self._points[at - 1].size_bytes >= STEP_BYTES
            and self._points[at].size_bytes - point.size_bytes >= STEP_BYTES
        ):
            self._points.insert(at, point)
            self._thin()

    def left(self, first_ledger_id: int) -> Point:
        """Return the first point whose previous entry still exists, if all ledgers before this ledger are removed. If
        there is none, return a point whose previous entry is gone."""
        points = sorted([*self._points, self._last_record, self.end], key=_size)
        at = bisect_left(points, first_ledger_id, key=lambda point: point.message_id.ledger_id)
        return points[at] if at < len(points) else self._points[-1]

    def trim(self, first: Point) -> None:
        """Make this point the beginning of the topic."""
        self._points[: bisect_right(self._points, first.size_bytes, key=_size)] = [first]
        if first.message_id.entry_id < 0 < first.next_index:
            self.begins_at = first.message_id._replace(entry_id=0)

    def _thin(self) -> None:
        if len(self._points) > MAX_POINTS:
            newer = len(self._points) - MAX_POINTS // 2
            self._points[:newer] = thinned(self._points[:newer], MAX_POINTS // 4)

    def at(self, index: int) -> Point:
        """Return the last point that is not after the message with this index."""
        point, last = self._points[max(1, bisect_right(self._points, index, key=_next_index)) - 1], self._last_record
        return last if last.next_index <= index and last.size_bytes > point.size_bytes else point

    def before(self, point: Point) -> Point:
        """Return the last point before this one; the first point if there is none."""
        return self._points[max(1, bisect_left(self._points, point.size_bytes, key=_size)) - 1]

    def at_size(self, size_bytes: int) -> Point:
        """Return the last point with at most this number of bytes before it."""
        return self._points[max(1, bisect_right(self._points, size_bytes, key=_size)) - 1]

    def before_time(self, publish_time_ms: int) -> Point:
        """Return a point before which nothing was published at that time or later."""
        at = bisect_left(self._points, publish_time_ms, key=lambda point: point.at_latest_ms)
        return self._points[max(at - 1, 0)]

    def below(self, index: int) -> list[Point]:
        """Return the points with a next index below this index; at least the first."""
        return self._points[: max(1, bisect_left(self._points, index, key=_next_index))]

    def recent(self, index: int) -> MessageId | None:
        """Return the message ID of a message, if it is known."""
        if not self._recent or index < self._recent[0][0] or index >= self.end.next_index:
            return None
        first, run = self._recent[bisect_right(self._recent, index, key=lambda one: one[0]) - 1]
        return run.message_id(index - first)


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` of the points, about evenly spaced, including the first and the last."""
    if len(points) <= most:
        return [*points]
    apart_bytes = (points[-1].size_bytes - points[0].size_bytes) / (most - 1)
    kept = [points[0]]
    for point in points[1:-1]:
        if point.size_bytes - kept[-1].size_bytes >= apart_bytes:
            kept.append(point)
    return [*kept, points[-1]]


def size_of(message: PulsarMessage) -> int:
    """Return the counted size of an entry."""
    return content_bytes(message) + len(message.key) + ENTRY_BYTES


def begins_record(message: PulsarMessage) -> bool:
    """Return whether a valid entry begins a stored record."""
    return KIND in message.properties or begins_batch(message)


def is_batch(message: PulsarMessage) -> bool:
    """Return whether an entry of ours has several messages."""
    return message.properties.get(KIND) == BATCH


def _size(point: Point) -> int:
    return point.size_bytes


def _next_index(point: Point) -> int:
    return point.next_index


# -- Points of a topic as a snapshot holds them, byte by byte: `docs/internals/formats-pulsar.md`.

VERSION = 1
MAX_STORED_POINTS = 64
"""The most points in a snapshot. After a start a 30th of a topic may have to be read to find an old message."""

_HEAD = struct.Struct("<BQ")
_POINT = struct.Struct("<QQQQqqqqQ")


def bytes_of_points(incarnation: int, points: Sequence[Point]) -> bytes:
    """Return the encoded points, in ascending order: the first point, the last point, and as many other points as
    allowed."""
    return _HEAD.pack(VERSION, incarnation) + b"".join(map(_encode, thinned(points, MAX_STORED_POINTS)))


def _encode(point: Point) -> bytes:
    (_, term, ownership), number, index, _ = point.standing
    ledger_id, entry_id, _ = point.message_id
    times = point.publish_time_ms, point.at_latest_ms
    return _POINT.pack(term, ownership, number, index, ledger_id, entry_id, *times, point.size_bytes)


def points_of_bytes(incarnation: int, raw: bytes) -> list[Point]:
    """Return the points of a topic of this incarnation. Raises STORE_DAMAGED, NEWER_FORMAT."""
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
    standing = TermStanding(EntryOwner(incarnation, term, ownership), number, index)
    return Point(standing, MessageId(ledger_id, entry_id), publish_time_ms, at_latest_ms, size_bytes)


def _damaged(why: str) -> SeqdedupeError:
    return error("STORE_DAMAGED", f"a snapshot holds no place in its topic of Pulsar's: {why}")
