"""What a figure is: arms that are measured side by side, and ratios between them that have to reach something."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

Arm = Callable[[], float]
"""Measures once; a rate, a time or a size, as the figure says."""


@dataclass(frozen=True)
class Ratio:
    """A figure's claim. `value` makes it from one round's measurements, by the arms' names.

    One without bounds is shown for comparison: what the machine allows.
    """

    name: str
    value: Callable[[dict[str, float]], float]
    at_least: float | None = None
    at_most: float | None = None
    aim: float | None = None
    unit: str = "×"

    def is_reached(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


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
    """The ratio of two arms."""
    return lambda measured: measured[numerator] / measured[denominator]
