"""What happens again and again is told once, and then counted, for each caller apart."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
C = TypeVar("C", bound=Hashable)

MOST_OF_CALLER = 20
"""Different ones that are told of one caller; the rest is counted together."""

MOST_CALLERS = 1_000
"""That are kept apart; what the rest does is counted together."""


@dataclass(slots=True)
class _Caller(Generic[T]):
    counts: dict[T, int] = field(default_factory=dict)
    others: int = 0


class Repeats(Generic[C, T]):
    """What callers did since the last `take`, and how often it came again. Bounded, whatever comes.

    No caller can hide what another one does, unless there are more than `MOST_CALLERS`.
    """

    def __init__(self) -> None:
        self._callers: dict[C, _Caller[T]] = {}
        self._others = 0

    def is_first(self, who: C, told: T) -> bool:
        """Whether this is to be told now; else it is counted."""
        caller = self._callers.get(who)
        if caller is None:
            if len(self._callers) == MOST_CALLERS:
                self._others += 1
                return False
            caller = self._callers[who] = _Caller()
        count = caller.counts.get(told)
        if count is None and len(caller.counts) == MOST_OF_CALLER:
            caller.others += 1
            return False
        caller.counts[told] = 0 if count is None else count + 1
        return count is None

    def take(self) -> Iterator[tuple[C | None, T | None, int]]:
        """Each that came again, of whom, and how often; with None, how many others of that caller were not told at
        all; and with None twice, how many of other callers. Forgets them."""
        callers, others = self._callers, self._others
        self._callers, self._others = {}, 0
        for who, caller in callers.items():
            yield from ((who, told, count) for told, count in caller.counts.items() if count)
            if caller.others:
                yield who, None, caller.others
        if others:
            yield None, None, others
