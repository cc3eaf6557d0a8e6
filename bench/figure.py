"""What a figure is: arms that are measured side by side, and ratios between them that have to reach something."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import comb
from pathlib import Path

import numpy as np

OUTSIDE = 0.1
"""Of a 90 % interval."""

Arm = Callable[[], float | Mapping[str, float]]
"""Measures once: a rate, a time or a size, as the figure says. Several values are told apart: `p50` of an arm `echo` is
called `echo, p50`."""


def percentiles_ms(seconds: Sequence[float], of: str = "") -> dict[str, float]:
    """p50 and p99, in milliseconds: no middle without what the slow ones took."""
    return {f"{of}p{q}": float(np.percentile(seconds, q)) * 1000 for q in (50, 99)}


def values_of(arm: str, measured: float | Mapping[str, float]) -> dict[str, float]:
    """What an arm has measured, by the names that ratios know it by."""
    return {f"{arm}, {what}": v for what, v in measured.items()} if isinstance(measured, Mapping) else {arm: measured}


@dataclass(frozen=True)
class Ratio:
    """A figure's claim. `value` makes it from one round's measurements, by their names.

    One without bounds is shown for comparison: what the machine allows.
    """

    name: str
    value: Callable[[dict[str, float]], float]
    at_least: float | None = None
    at_most: float | None = None
    aim: float | None = None
    unit: str = "×"

    @property
    def goal(self) -> str:
        """What it has to reach; empty if nothing."""
        bounds = [f"≥ {self.at_least:g}"] if self.at_least is not None else []
        bounds += [f"≤ {self.at_most:g}"] if self.at_most is not None else []
        bounds += [f"aim {self.aim:g}"] if self.aim is not None else []
        return ", ".join(bounds)

    def is_reached(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """A 90 % interval of the median, whatever the distribution is. Fewer than five values do not make it sure."""
    ordered, count = sorted(values), len(values)
    # The probability that the median is outside if k values are cut off at each end.
    outside = [2 * sum(comb(count, j) for j in range(k + 1)) / 2**count for k in range((count + 1) // 2)]
    cut = max((k for k, share in enumerate(outside) if share <= OUTSIDE), default=0)
    return ordered[cut], ordered[-1 - cut]


@dataclass(frozen=True)
class Figure:
    """Arms by name, and ratios. `rounds` are measured after one that is thrown away; the arms take turns."""

    arms: dict[str, Arm]
    ratios: list[Ratio]
    rounds: int = 7
    notes: list[str] = field(default_factory=list)


Make = Callable[[Path], AbstractContextManager[Figure]]
"""What a benchmark's module has as `figure`: sets up in a folder, yields the figure, cleans up."""


def over(numerator: str, denominator: str) -> Callable[[dict[str, float]], float]:
    """The ratio of two measurements."""
    return lambda measured: measured[numerator] / measured[denominator]


def shown(name: str, unit: str = "ms") -> Ratio:
    """A measurement that is shown among the ratios, for what it says about them."""
    return Ratio(name, lambda measured: measured[name], unit=unit)
