"""The process's clock, for topics that forget by time: one for all of them, watched as long as the process runs."""

import asyncio
import time

from seqdedupe.core.moment import LOOK_SECONDS, Moment, Steadied

_NANOSECONDS_A_MILLISECOND = 1_000_000


class Clock:
    """`keep_looking` has to run; before it has for a while nothing is forgotten by time."""

    def __init__(self) -> None:
        self._steadied = Steadied()

    def now(self) -> Moment:
        """What time it is."""
        return self._steadied.now(*_both_ms())

    async def keep_looking(self) -> None:
        """Looks at the clock again and again, until it is cancelled."""
        while True:
            self._steadied.look(*_both_ms())
            await asyncio.sleep(LOOK_SECONDS)


def _both_ms() -> tuple[int, int]:
    """What the clock says, and the steady one."""
    return time.time_ns() // _NANOSECONDS_A_MILLISECOND, time.monotonic_ns() // _NANOSECONDS_A_MILLISECOND
