"""What is known of a topic without reading it: how far it goes, and from where on each part of it is read."""

import struct
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from seqdedupe.entry_properties import BATCH, KIND, EntryOwner
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.contract import Run, Runs
from seqdedupe.log.pulsar.entries import NOWHERE, PulsarMessage, begins_batch, content_bytes
from seqdedupe.log.pulsar.terms import TermStanding
from seqdedupe.message_id import MessageId

STEP_BYTES = 256 * 1024
"""About so much is read to find one message, where the points are near enough."""
MAX_POINTS = 4096
"""Of a topic: 1 GiB of it at a step from each other."""
ENTRY_BYTES = 64
"""What an entry is counted as beside its payload and its key."""
RECENT_ENTRIES = 4096
"""Of so many newest entries with messages the message IDs are known."""


class Point(NamedTuple):
    """A place between two entries, and all that is needed to read on there."""

    standing: TermStanding
    message_id: MessageId
    """That of the valid entry before. At the topic's beginning it has no entry (-1), and the ledger of the first valid
    one, once that is known."""
    publish_time_ms: int
    """That of the record before: at the earliest, where it was written and not read."""
    at_latest_ms: int
    """The same, at the latest."""
    size_bytes: int
    """What stands before. No two points have the same."""

    @staticmethod
    def start(incarnation: int) -> "Point":
        """Before everything."""
        return Point(TermStanding.start(incarnation), NOWHERE, 0, 0, 0)

    @property
    def next_index(self) -> int:
        """That of the next message."""
        return self.standing.next_index

    def after(
        self, standing: TermStanding, message_id: MessageId, publish_time_ms: int, at_latest_ms: int, size_bytes: int
    ) -> "Point":
        """The point after the next valid entry, which has so many bytes, and after which the topic stands so."""
        return Point(
            standing,
            message_id,
            max(publish_time_ms, self.publish_time_ms),
            max(at_latest_ms, self.at_latest_ms),
            self.size_bytes + size_bytes,
        )


class Places:
    """The points of a topic, and its end as far as it is known.

    Points stand where a record begins. The newer half are a step from each other, older ones the further the more of
    the topic there is; what was read between them is nearer again (`learn`).
    """

    def __init__(self, points: Sequence[Point]) -> None:
        """The first of the points is where the topic begins, the last one how far it is known."""
        self._points = [*points]
        self.end = points[-1]
        """After the last entry that is known to be valid."""
        self._last_record = self.end
        """Before the last record that has messages."""
        self._recent: deque[tuple[int, Run]] = deque(maxlen=RECENT_ENTRIES)

    @property
    def first(self) -> Point:
        """Where the topic begins."""
        return self._points[0]

    def advance(self, to: Point, *, begins_record: bool, is_batch: bool) -> Runs:
        """The next valid entries stand there, one after the other, and `to` is the point after them. Their rows'
        message IDs. Several are rows of one record, and an entry each."""
        end, self.end = self.end, to
        if end.message_id == NOWHERE:
            self._points[0] = end._replace(message_id=MessageId(to.message_id.ledger_id, NOWHERE.entry_id))
        rows = to.next_index - end.next_index
        if begins_record:
            if end.size_bytes - self._points[-1].size_bytes >= STEP_BYTES:
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
        """Nothing after this point, where a record ends, is known any more."""
        self.end = end
        while len(self._points) > 1 and self._points[-1].size_bytes > end.size_bytes:
            self._points.pop()
        if self._last_record.size_bytes > end.size_bytes:
            self._last_record = self._points[-1]
        while self._recent and self._recent[-1][0] >= end.next_index:
            self._recent.pop()

    def learn(self, point: Point) -> None:
        """A point that was met when the topic was read: it is remembered where the others are far away."""
        at = bisect_left(self._points, point.size_bytes, key=_size)
        if 0 < at < len(self._points) and (
            point.size_bytes - self._points[at - 1].size_bytes >= STEP_BYTES
            and self._points[at].size_bytes - point.size_bytes >= STEP_BYTES
        ):
            self._points.insert(at, point)
            self._thin()

    def left(self, first_ledger_id: int) -> Point:
        """The first point of which the entry before is there, where all ledgers before this one are gone."""
        at = bisect_left(self._points, first_ledger_id, key=lambda point: point.message_id.ledger_id)
        return self._points[min(at, len(self._points) - 1)]

    def trim(self, first: Point) -> None:
        """The topic begins with this point."""
        del self._points[: bisect_left(self._points, first.size_bytes, key=_size)]

    def _thin(self) -> None:
        if len(self._points) > MAX_POINTS:
            newer = len(self._points) - MAX_POINTS // 2
            self._points[:newer] = thinned(self._points[:newer], MAX_POINTS // 4)

    def at(self, index: int) -> Point:
        """The last point that has not the message with this index before it."""
        if self._last_record.next_index <= index and self._last_record.size_bytes > self._points[-1].size_bytes:
            return self._last_record
        return self._points[max(1, bisect_right(self._points, index, key=_next_index)) - 1]

    def at_size(self, size_bytes: int) -> Point:
        """The last point that has at most so many bytes before it."""
        return self._points[max(1, bisect_right(self._points, size_bytes, key=_size)) - 1]

    def before_time(self, publish_time_ms: int) -> Point:
        """A point before which nothing was published at that time or later."""
        at = bisect_left(self._points, publish_time_ms, key=lambda point: point.at_latest_ms)
        return self._points[max(at - 1, 0)]

    def below(self, index: int) -> list[Point]:
        """The points before which all messages are below this index, without the one before it: the first at least."""
        return self._points[: max(1, bisect_left(self._points, index, key=_next_index))]

    def recent(self, index: int) -> MessageId | None:
        """The message ID of a message, if it is known."""
        if not self._recent or index < self._recent[0][0] or index >= self.end.next_index:
            return None
        first, run = self._recent[bisect_right(self._recent, index, key=lambda one: one[0]) - 1]
        return run.message_id(index - first)


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most so many of the points, the first and the last among them, about evenly apart."""
    if len(points) <= most:
        return [*points]
    apart_bytes = (points[-1].size_bytes - points[0].size_bytes) / (most - 1)
    kept = [points[0]]
    for point in points[1:-1]:
        if point.size_bytes - kept[-1].size_bytes >= apart_bytes:
            kept.append(point)
    return [*kept, points[-1]]


def size_of(message: PulsarMessage) -> int:
    """What an entry is counted as."""
    return content_bytes(message) + len(message.key) + ENTRY_BYTES


def begins_record(message: PulsarMessage) -> bool:
    """Whether a valid entry begins a stored record."""
    return KIND in message.properties or begins_batch(message)


def is_batch(message: PulsarMessage) -> bool:
    """Whether an entry of ours has several messages."""
    return message.properties.get(KIND) == BATCH


def _size(point: Point) -> int:
    return point.size_bytes


def _next_index(point: Point) -> int:
    return point.next_index


# -- Points of a topic as a snapshot holds them, byte by byte: `docs/internals/formats-pulsar.md`.

VERSION = 1
MAX_STORED_POINTS = 64
"""They go with every snapshot. After a start a 30th of a topic may have to be read to find an old message."""

_HEAD = struct.Struct("<BQ")
_POINT = struct.Struct("<QQQQqqqqQ")


def bytes_of_points(incarnation: int, points: Sequence[Point]) -> bytes:
    """The first and the last of the points, which rise, and of the others as many as there may be."""
    return _HEAD.pack(VERSION, incarnation) + b"".join(map(_encode, thinned(points, MAX_STORED_POINTS)))


def _encode(point: Point) -> bytes:
    (_, term, ownership), number, index, _ = point.standing
    ledger_id, entry_id, _ = point.message_id
    times = point.publish_time_ms, point.at_latest_ms
    return _POINT.pack(term, ownership, number, index, ledger_id, entry_id, *times, point.size_bytes)


def points_of_bytes(incarnation: int, raw: bytes) -> list[Point]:
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
    standing = TermStanding(EntryOwner(incarnation, term, ownership), number, index)
    return Point(standing, MessageId(ledger_id, entry_id), publish_time_ms, at_latest_ms, size_bytes)


def _damaged(why: str) -> SeqdedupeError:
    return error("STORE_DAMAGED", f"a snapshot holds no place in its topic of Pulsar's: {why}")
