"""What is known of a topic without reading it: how far it goes, and from where on each part of it is read."""

from bisect import bisect_left, bisect_right
from collections import deque
from typing import NamedTuple

from seqdedupe.log.contract import Run, Runs
from seqdedupe.log.pulsar.entries import BATCH, KIND, Message
from seqdedupe.log.pulsar.plain import begins_batch
from seqdedupe.log.pulsar.terms import Standing
from seqdedupe.message_id import MessageId

STEP_BYTES = 256 * 1024
"""About so much is read to find one message."""
ENTRY_BYTES = 64
"""What an entry is counted as beside its payload and its key."""
RECENT_ENTRIES = 4096
"""Of so many newest entries with messages the message IDs are known."""


class Point(NamedTuple):
    """A place between two entries, and all that is needed to read on there."""

    standing: Standing
    message_id: MessageId | None
    """That of the valid entry before; None at the beginning."""
    publish_time_ms: int
    """That of the record before: at the earliest, where it was written and not read."""
    at_latest_ms: int
    """The same, at the latest."""
    size_bytes: int
    """What stands before."""


class Places:
    """The points of a topic, a step from each other, and its end as far as it is known."""

    def __init__(self, incarnation: int) -> None:
        self.end = Point(Standing.start(incarnation), None, 0, 0, 0)
        """After the last entry that is known to be valid."""
        self._points = [self.end]
        self._recent: deque[tuple[int, Run]] = deque(maxlen=RECENT_ENTRIES)

    def advance(
        self,
        standing: Standing,
        message_id: MessageId,
        publish_time_ms: int,
        at_latest_ms: int,
        size_bytes: int,
        *,
        begins_record: bool,
        is_batch: bool,
    ) -> Runs:
        """The next valid entry stands there, and that is how the topic stands after it. Its rows' message IDs."""
        end = self.end
        if begins_record and end.size_bytes - self._points[-1].size_bytes >= STEP_BYTES:
            self._points.append(end)
        self.end = Point(
            standing,
            message_id,
            max(publish_time_ms, end.publish_time_ms),
            max(at_latest_ms, end.at_latest_ms),
            end.size_bytes + size_bytes,
        )
        index = end.standing.next_index
        rows = standing.next_index - index
        if not rows:
            return ()
        run = Run(rows, message_id.ledger_id, message_id.entry_id, 0 if is_batch else -1)
        self._recent.append((index, run))
        return (run,)

    def part_of(self, index: int) -> tuple[Point, Point]:
        """Between which points the message with this index stands."""
        at = bisect_right(self._points, index, key=lambda point: point.standing.next_index)
        return self._points[at - 1], self._points[at] if at < len(self._points) else self.end

    def part_at(self, size_bytes: int) -> tuple[Point, Point]:
        """Between which points so many bytes stand before something."""
        at = max(1, bisect_right(self._points, size_bytes, key=lambda point: point.size_bytes))
        return self._points[at - 1], self._points[at] if at < len(self._points) else self.end

    def before_time(self, publish_time_ms: int) -> int:
        """An index below which nothing was published at that time or later; the points before it are too early."""
        at = bisect_left(self._points, publish_time_ms, key=lambda point: point.at_latest_ms)
        return self._points[max(at - 1, 0)].standing.next_index

    def before(self, index: int) -> Point:
        """The last point with a message between it and this index, else the first point."""
        at = bisect_left(self._points, index, key=lambda point: point.standing.next_index)
        return self._points[max(at - 1, 0)]

    def recent(self, index: int) -> MessageId | None:
        """The message ID of a message, if it is known."""
        if not self._recent or index < self._recent[0][0] or index >= self.end.standing.next_index:
            return None
        first, run = self._recent[bisect_right(self._recent, index, key=lambda one: one[0]) - 1]
        return run.message_id(index - first)


def size_of(message: Message) -> int:
    """What an entry is counted as."""
    return len(message.payload or b"") + len(message.key) + ENTRY_BYTES


def begins_record(message: Message) -> bool:
    """Whether a valid entry begins a stored record."""
    return KIND in message.properties or begins_batch(message)


def is_batch(message: Message) -> bool:
    """Whether an entry of ours has several messages."""
    return message.properties.get(KIND) == BATCH
