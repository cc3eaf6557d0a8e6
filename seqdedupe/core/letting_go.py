"""Freeing names and rows of producers of which nothing is known, while a topic serves.

A table of a million names takes a fifth of a second to make. So the new one is made beside the one in use, some
names at a time; in between names come, are opened and used as always, by their old numbers. All numbers change at once,
in `finish`, which goes over rows only.
"""

from collections.abc import Iterator
from itertools import compress

import numpy as np

from seqdedupe.core.names import Names
from seqdedupe.core.producer_rows import Bools
from seqdedupe.core.producers import Producers
from seqdedupe.format.jit import Int64s

NAMES_A_STEP = 4096
"""Taken before others have their turn."""


class LettingGo:
    """The producers of a topic go on without some of them. Only one of these may be under way."""

    def __init__(self, producers: Producers, is_free: Bools) -> None:
        """`is_free`, by producer number: who is `empty`, and nobody holds it."""
        self._producers = producers
        self._stays = ~is_free
        self._taken = 0
        self._left = Names(int(np.count_nonzero(self._stays)))

    def prepare(self) -> Iterator[None]:
        """Takes names, `NAMES_A_STEP` at each step. Where it ends, `finish` may follow, if nothing comes in between."""
        while self._taken < len(self._producers):
            names = self._producers.names_from(self._taken, NAMES_A_STEP)
            stays = self._stays[self._taken : self._taken + len(names)].tolist()
            # Those that are newer than `is_free` stay.
            stays += [True] * (len(names) - len(stays))
            self._left.add_all(list(compress(names, stays)))
            self._taken += len(names)
            yield

    def finish(self, is_free: Bools) -> Int64s:
        """The others have new numbers from now on, in their order. Returns the new number of each old one, -1: gone.

        `is_free` as it is now: who came back since stays, and gets one of the last numbers. All count as changed.
        """
        newer = len(is_free) - len(self._stays)
        stays = np.concatenate([self._stays, np.ones(newer, bool)])
        back = np.flatnonzero(~stays & ~is_free)
        self._left.add_all(self._producers.names_of(back))
        new_numbers, self._left = self._producers.renumber(self._left, stays, back)
        return new_numbers

    def clear(self) -> Iterator[None]:
        """Gives back the old table, some of it at each step."""
        return self._left.clear()
