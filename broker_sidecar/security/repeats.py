"""What happens again and again is told once, and then counted."""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

MOST = 1_000
"""Different ones that are kept apart; the rest is counted together."""


class Repeats(Generic[T]):
    """What was told since the last `take`, and how often it came again. Bounded, whatever comes."""

    def __init__(self) -> None:
        self._counts: dict[T, int] = {}
        self._others = 0

    def is_first(self, told: T) -> bool:
        """Whether this is to be told now; else it is counted."""
        count = self._counts.get(told)
        if count is None and len(self._counts) == MOST:
            self._others += 1
            return False
        self._counts[told] = 0 if count is None else count + 1
        return count is None

    def take(self) -> Iterator[tuple[T | None, int]]:
        """Each that came again, and how often; then None, and how many others were not told at all. Forgets them."""
        counts, others = self._counts, self._others
        self._counts, self._others = {}, 0
        yield from ((told, count) for told, count in counts.items() if count)
        if others:
            yield None, others
