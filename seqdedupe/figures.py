"""Numbers in texts for people, and a sidecar's statistics: counts of values by size. The terminal and the web page show
the statistics in the same form."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol


def counted(count: int, one: str, many: str = "") -> str:
    """Return the count with its noun, such as "1 topic" or "1,024 topics". `many` is needed if the plural is not `one`
    with an s, or if a verb follows: `counted(n, "message is", "messages are")`."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


class Buckets:
    """Counts of values by size. The bounds ascend, and each value is counted at the first bound that the value does not
    exceed. Larger values are counted last. Only one thread may add values. Other threads may read: each number is
    correct, but the numbers may come from different moments."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


_UNITS = ("", "k", "M", "G", "T", "P", "E")


def short(number: float) -> str:
    """Return the number in at most four characters and a unit: 999, 1.2k, 340M."""
    for unit in _UNITS[:-1]:
        if number < 9.95:
            return f"{number:.1f}".removesuffix(".0") + unit
        if round(number) < 1000:
            return f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:.0f}{_UNITS[-1]}"


def per_second(values: Sequence[int], interval_ms: int) -> float:
    """Return the rate in the last interval; 0 before the first interval has ended."""
    return values[-1] * 1000 / interval_ms if values else 0.0


def merged(values: Sequence[int], count: int) -> list[int]:
    """Return the sums of `count` values each. Extra values at the beginning are omitted."""
    first = len(values) % count
    return [sum(values[at : at + count]) for at in range(first, len(values), count)]


class _Place(Protocol):
    """A position, or its message on the wire."""

    @property
    def incarnation(self) -> int: ...

    @property
    def index(self) -> int: ...


def first_unread(position: _Place, incarnation: int, first_index: int) -> int:
    """Return the first index that a reader at this position has not read, in a topic that begins at `first_index`.

    If a topic was deleted and created again, a position of the old topic is before all messages of the new topic.
    """
    is_of_this = position.incarnation == incarnation
    return max(first_index, position.index + 1 if is_of_this else 0)


def duration(seconds: int) -> str:
    """Return the two largest units: 3 d 4 h, 5 min 6 s."""
    for unit, size, smaller, smaller_size in (("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size} {unit} {seconds % size // smaller_size} {smaller}"
    return f"{seconds} s"
