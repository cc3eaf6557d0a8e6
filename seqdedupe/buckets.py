"""How often something took how long, or was how large."""

from bisect import bisect_left
from collections.abc import Sequence


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
