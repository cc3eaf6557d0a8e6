"""What the producers tell: numbers in shared memory, which outlive a producer that is killed."""

from ctypes import c_int64
from multiprocessing.sharedctypes import RawArray
from typing import Any

from demo.flights import ORIGINS

COLUMNS = ("sent", "not_dup", "dup", "unknown", "lost_answers", "done", "in_flight")
"""Messages sent, resends counted again, and their verdicts; how often the network lost answers; how many of a
producer's flights have receipts; how many wait for one."""


class Board:
    """One row of `COLUMNS` for each origin."""

    def __init__(self) -> None:
        self._numbers: Any = RawArray(c_int64, len(ORIGINS) * len(COLUMNS))

    def get(self, origin: str, column: str) -> int:
        return int(self._numbers[_place(origin, column)])

    def set(self, origin: str, column: str, number: int) -> None:
        self._numbers[_place(origin, column)] = number

    def total(self, column: str) -> int:
        return sum(self.get(origin, column) for origin in ORIGINS)


def _place(origin: str, column: str) -> int:
    return ORIGINS.index(origin) * len(COLUMNS) + COLUMNS.index(column)
