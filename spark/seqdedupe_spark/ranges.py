"""Ranges of a topic: what one task of a job reads, and what one transaction moves a position over."""

import re
from dataclasses import dataclass

from seqdedupe.message_id import Position

NOT_PARTITIONED = -1
"""The partition of a topic that is none, as in Pulsar."""

_PARTITION = re.compile(r"-partition-(\d+)$")


def partition_of(topic: str) -> int:
    """The partition that a topic is by its name, `…-partition-3`, as in Pulsar; NOT_PARTITIONED if it is none."""
    found = _PARTITION.search(topic)
    return int(found[1]) if found else NOT_PARTITIONED


@dataclass(frozen=True)
class Range:
    """The messages of one topic partition after `start`, up to and with `end`. Both are of one incarnation.

    `topic` is the full name of the topic; each partition of a partitioned topic is a topic of its own.
    """

    topic: str
    start: Position
    end: Position
    entries: int | None = None
    """Of a topic that no sidecar writes: how many entries it has, as Pulsar stores them, which are counted there
    instead of messages. None where indexes say how many messages there are."""

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
        """The index before which it ends."""
        return self.end.index + 1

    def __len__(self) -> int:
        """How many messages it has; or entries, where these are counted."""
        return self.end.index - self.start.index if self.entries is None else self.entries

    def __str__(self) -> str:
        if self.entries is not None:
            return f"{self.topic} after {self.start} up to {self.end}"
        return f"{self.topic} [{self.first_index}, {self.stop_index})"
