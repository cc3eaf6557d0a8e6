"""Ranges of a topic: one task of a job reads a range, and one transaction moves a position over it. No I/O.

`planning` finds the ranges. The functions here cut and pack them.
"""

import re
from dataclasses import dataclass

from seqdedupe.message_id import Position

NOT_PARTITIONED = -1
"""The partition of a topic that is not a partition, as in Pulsar."""

_PARTITION = re.compile(r"-partition-(\d+)$")


def partition_of(topic: str) -> int:
    """Return the partition number in a topic's name, `…-partition-3`, as in Pulsar; NOT_PARTITIONED if the name
    contains no partition number."""
    found = _PARTITION.search(topic)
    return int(found[1]) if found else NOT_PARTITIONED


@dataclass(frozen=True)
class TopicRange:
    """The messages of one topic (or partition) after `start`, up to and including `end`. Both positions have the same
    incarnation.

    `topic` is the full name of the topic. Each partition of a partitioned topic is a separate topic.
    """

    topic: str
    start: Position
    end: Position
    entries: int | None = None
    """The number of entries in a topic that no sidecar writes, as Pulsar stores them. In such a topic entries are
    counted instead of messages. None if indexes determine the number of messages."""

    @property
    def partition(self) -> int:
        return partition_of(self.topic)

    @property
    def incarnation(self) -> int:
        return self.start.incarnation

    @property
    def first_index(self) -> int:
        return self.start.index + 1

    @property
    def stop_index(self) -> int:
        """The index before which the range ends."""
        return self.end.index + 1

    def __len__(self) -> int:
        """Return the number of messages, or of entries if entries are counted."""
        return self.end.index - self.start.index if self.entries is None else self.entries

    def __str__(self) -> str:
        if self.entries is not None:
            return f"{self.topic} after {self.start} up to {self.end}"
        return f"{self.topic} [{self.first_index}, {self.stop_index})"


# -- Sharing out ranges: a limit over topics, a topic over tasks, and many small ranges over few tasks.

PACKED_MESSAGES = 10_000
"""Several ranges share a task if they have at most this number of messages together."""

PACKED_RANGES = 32
"""The maximum number of ranges for a task, because messages may be large."""


def shares(there: list[int], limit: int) -> list[int]:
    """Divide the limit in proportion to the numbers in `there`. Each share is at least 1."""
    rest, more = max(limit - len(there), 0), max(sum(there) - len(there), 1)
    return [1 + rest * (one - 1) // more for one in there]


def split(ranges: list[TopicRange], parts: int, most: int | None = None) -> list[TopicRange]:
    """Divide the ranges into at least `parts` smaller ranges with the same messages, if there are enough messages. Each
    smaller range has at most `most` messages. Each range is divided evenly. A range in a topic that no sidecar writes
    is not divided."""
    messages = sum(len(one) for one in ranges)

    def pieces(one: TopicRange) -> int:
        if one.entries is not None:
            return 1
        by_most = -(-len(one) // most) if most else 1
        return min(max(-(-len(one) * parts // messages), by_most), len(one))

    return [
        cut(one, len(one) * i // count, len(one) * (i + 1) // count) if count > 1 else one
        for one in ranges
        if len(one)
        for count in [pieces(one)]
        for i in range(count)
    ]


def cut(whole: TopicRange, first: int, stop: int) -> TopicRange:
    """Return the part of a range from message number `first` to the message before number `stop`. The position at a cut
    contains only an index."""
    start = Position.before(whole.incarnation, whole.first_index + first) if first else whole.start
    end = Position.before(whole.incarnation, whole.first_index + stop) if stop < len(whole) else whole.end
    return TopicRange(whole.topic, start, end)


def packed(messages: list[int], least_parts: int = 1, most: int | None = None) -> list[range]:
    """Return groups of adjacent ranges, one group for each task. `messages` contains the number of messages of each
    range.

    There are at least `least_parts` groups, if there are enough ranges and messages. A group has at most `most`
    messages.
    """
    most = max(min(PACKED_MESSAGES, sum(messages) // max(least_parts, 1), most or PACKED_MESSAGES), 1)
    parts: list[range] = []
    first = total = 0
    for number, count in enumerate(messages):
        if number > first and (total + count > most or number - first == PACKED_RANGES):
            parts.append(range(first, number))
            first, total = number, 0
        total += count
    return [*parts, range(first, len(messages))] if messages else []
