"""Which producers of one topic somebody may publish as: a column by producer number, filled as names come."""

from collections.abc import Callable

import numpy as np

from seqdedupe.core.producers import Producers, are_all
from seqdedupe.errors import SeqdedupeError
from seqdedupe.format.jit import Bytes, Int64s, Int64s2, Uint8s

Judge = Callable[[Bytes, Int64s2], Uint8s]
"""1 for each of the names at these places of a buffer that is allowed."""

_NOT_JUDGED = 0
_FORBIDDEN = 1
_ALLOWED = 2

_NONE = np.zeros(0, np.int64)


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
        # Every frame with other names than the one before comes here, and nearly all of them find that all is well.
        is_of_these = self._numbers == self.producers.generation
        if is_of_these and are_all(self._judged, numbers, _ALLOWED):
            return _NONE
        if not is_of_these:
            self._judged[:], self._numbers = _NOT_JUDGED, self.producers.generation
        if len(self._judged) < len(self.producers):
            more = np.zeros(2 * len(self.producers), np.uint8)
            more[: len(self._judged)] = self._judged
            self._judged = more
        new = numbers[self._judged[numbers] == _NOT_JUDGED]
        if len(new):
            self._judged[new] = _FORBIDDEN + self._judge(*self.producers.listed(new))
        found: Int64s = numbers[self._judged[numbers] == _FORBIDDEN]
        return found
