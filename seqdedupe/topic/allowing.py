"""Which producers of one topic somebody may publish as: a column by producer number, filled as names come."""

from collections.abc import Callable

import numpy as np

from seqdedupe.core.producers import Producers
from seqdedupe.errors import SeqdedupeError
from seqdedupe.format.jit import Bytes, Int64s, Int64s2, Uint8s

Judge = Callable[[Bytes, Int64s2], Uint8s]
"""1 for each of the names at these places of a buffer that is allowed."""

_NOT_JUDGED = 0
_FORBIDDEN = 1


class Allowing:
    """What was judged of a topic's producers for one caller; each name is judged once, until that counts no more.

    `deny` makes the error for names that are forbidden.
    """

    def __init__(self, producers: Producers, judge: Judge, deny: Callable[[list[str]], SeqdedupeError]) -> None:
        self.producers = producers
        self.deny = deny
        self.generation = 0
        """How often what was judged has come to count no more."""
        self._judge = judge
        self._judged = np.zeros(0, np.uint8)
        self._numbers = producers.generation

    def judge_again(self, judge: Judge) -> None:
        """From now on this is what judges."""
        self._judge = judge
        self._judged[:] = _NOT_JUDGED
        self.generation += 1

    def forbidden(self, numbers: Int64s) -> Int64s:
        """Those of these producers, by number, that are forbidden."""
        if self._numbers != self.producers.generation:
            self._judged[:], self._numbers = _NOT_JUDGED, self.producers.generation
        if len(self._judged) < len(self.producers):
            more = np.zeros(2 * len(self.producers), np.uint8)
            more[: len(self._judged)] = self._judged
            self._judged = more
        judged = self._judged[numbers]
        if not judged.all():
            new = numbers[judged == _NOT_JUDGED]
            self._judged[new] = _FORBIDDEN + self._judge(*self.producers.listed(new))
            judged = self._judged[numbers]
        found: Int64s = numbers[judged == _FORBIDDEN]
        return found
