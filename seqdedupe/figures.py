"""A sidecar's statistics: how values are counted by size, and the words and numbers that people read of them, which are
the same in the terminal and on the page."""

from bisect import bisect_left
from collections.abc import Sequence

from seqdedupe.v1 import admin_pb2


class Buckets:
    """Counts values by the first of some rising bounds that they do not exceed; larger ones stand last.

    One thread adds. Others may read: each number is right, and they may belong to different moments.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


ORDERS = {
    "rate": admin_pb2.STATISTICS_ORDER_RATE,
    "name": admin_pb2.STATISTICS_ORDER_NAME,
    "state": admin_pb2.STATISTICS_ORDER_STATE,
    "trouble": admin_pb2.STATISTICS_ORDER_TROUBLE,
    "snapshot": admin_pb2.STATISTICS_ORDER_SNAPSHOT,
}
"""By the names that people give."""

_UNITS = ("", "k", "M", "G", "T", "P", "E")


def short(number: float, step: int = 1000) -> str:
    """At most four characters and a unit: 999, 1.2k, 340M."""
    for unit in _UNITS[:-1]:
        if number < 9.95:
            return f"{number:.1f}".removesuffix(".0") + unit
        if round(number) < step:
            return f"{number:.0f}{unit}"
        number /= step
    return f"{number:.0f}{_UNITS[-1]}"


def per_second(values: Sequence[int], interval_ms: int) -> float:
    """In the last interval; 0 before the first one has ended."""
    return values[-1] * 1000 / interval_ms if values else 0.0


def merged(values: Sequence[int], count: int) -> list[int]:
    """As sums of so many values each; what is left over at the beginning is left out."""
    first = len(values) % count
    return [sum(values[at : at + count]) for at in range(first, len(values), count)]


def state_name(state: int) -> str:
    """Of a topic."""
    known = state in admin_pb2.TopicState.values()  # a newer sidecar may say more
    return admin_pb2.TopicState.Name(state).removeprefix("TOPIC_STATE_") if known else str(state)  # type: ignore[arg-type]


def is_open(topic: admin_pb2.Topic) -> bool:
    """Whether what is said of its log is known: it is neither damaged nor still to be opened."""
    return topic.HasField("last") and topic.state != admin_pb2.TOPIC_STATE_DAMAGED


def beyond_snapshot(topic: admin_pb2.Topic) -> int | None:
    """Messages that no durable snapshot covers, which a start would read; None if it is not known."""
    return topic.last.index + 1 - topic.snapshot_index if is_open(topic) else None


def cursor_lag(cursor: admin_pb2.TopicCursor, topic: admin_pb2.Topic) -> int | None:
    """Messages of the topic after the position that a cursor keeps; None if that is not known."""
    if not is_open(topic):
        return None
    is_of_this = cursor.position.incarnation == topic.last.incarnation
    first_index = max(topic.first_index, cursor.position.index + 1 if is_of_this else 0)
    return max(0, topic.last.index + 1 - first_index)


def duration(seconds: int) -> str:
    """The two largest units: 3 d 4 h, 5 min 6 s."""
    for unit, size, smaller, smaller_size in (("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size} {unit} {seconds % size // smaller_size} {smaller}"
    return f"{seconds} s"
