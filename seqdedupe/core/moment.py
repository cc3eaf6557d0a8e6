"""What time it is, as far as a clock can be believed that may jump, and come back.

A clock that is set wrong for a while (a step by a time service, a machine that is resumed) differs from the steady one,
which only says how much time goes by. So what both said is kept for a while: how far apart they were at most and at
least says between what the time is. What comes now is as young as it can be, and what is forgotten by its age as old as
it must be: then a clock that jumps and comes back has nothing forgotten too early, whichever way it jumped.
"""

from collections import deque
from dataclasses import dataclass

LOOK_SECONDS = 60.0
"""So long it is between two looks at the clocks."""

LOOKS = 41
"""So many of them have to agree, over 40 minutes. Whatever sets clocks right looks at them more often: time services
wait for 34 minutes at most."""


@dataclass(frozen=True, slots=True)
class Moment:
    """In milliseconds since 1970."""

    earliest_ms: int
    """It is not earlier: by this time goes what is forgotten by its age. 0: that is not known, and nothing is."""
    latest_ms: int
    """It is not later: this time has what comes now."""


class Steadied:
    """What time it is by a clock that was looked at LOOKS times, each LOOK_SECONDS after the one before."""

    def __init__(self) -> None:
        self._apart_ms: deque[int] = deque(maxlen=LOOKS)
        """By how much the clock was ahead of the steady one."""
        self._least_ms = self._most_ms = 0
        """Of these, once there is one: each frame asks."""

    def look(self, clock_ms: int, steady_ms: int) -> None:
        """What the clock says, and the steady one, which begins anywhere and never jumps."""
        self._apart_ms.append(clock_ms - steady_ms)
        self._least_ms, self._most_ms = min(self._apart_ms), max(self._apart_ms)

    def now(self, clock_ms: int, steady_ms: int) -> Moment:
        """What time it is when they say so. Before the last look of so many it is not known how early."""
        if not self._apart_ms:
            return Moment(0, clock_ms)
        latest_ms = max(clock_ms, steady_ms + self._most_ms)
        is_known = len(self._apart_ms) == LOOKS
        return Moment(min(clock_ms, steady_ms + self._least_ms) if is_known else 0, latest_ms)
