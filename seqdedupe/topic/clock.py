"""The process's clock, for what goes by time: one for all topics, watched as long as the process runs.

Begin with `Clock`; `Steadied` says what time it is, as far as a clock can be believed that may jump, and come back.

A clock that is set wrong for a while (a step by a time service, a machine that is resumed) differs from the steady one,
which only says how much time goes by. So what both said is kept for a while: how far apart they were at most and at
least says between what the time is. What comes now is as young as it can be, and what is forgotten by its age as old as
it must be: then a clock that jumps and comes back has nothing forgotten too early, whichever way it jumped.
"""

import asyncio
import logging
import time
from collections import deque

from rocksdict import WriteBatch

from seqdedupe.core.id_window import Moment
from seqdedupe.errors import SeqdedupeError
from seqdedupe.store.db import Store
from seqdedupe.store.parts import BELIEVED_TIME, seal

logger = logging.getLogger("seqdedupe.topic")

AHEAD_MS = 24 * 60 * 60 * 1000
"""A start by a clock that is so far ahead of the last believed time is worth a warning. A sidecar may also have been
stopped for that long."""

LOOK_SECONDS = 60.0
"""So long it is between two looks at the clocks."""

LOOKS = 41
"""So many of them have to agree, over 40 minutes. Whatever sets clocks right looks at them more often: time services
wait for 34 minutes at most."""

_NANOSECONDS_A_MILLISECOND = 1_000_000
_TIME_BYTES = 8


class Clock:
    """`keep_looking` has to run; before it has for 40 minutes nothing goes by time.

    With a store it keeps the last time that it believed there, and compares it with the clock at the start: a clock
    that stays ahead for longer than 40 minutes is believed, and what retention and windows then drop is gone.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._steadied = Steadied()
        self._store = store
        self.ahead_ms = 0
        """How far the clock was ahead of the last believed time at the start, if that is suspicious; else 0. 0 again as
        soon as the time is believed."""
        if store is not None:
            self._compare(store)

    def now(self) -> Moment:
        """What time it is."""
        return self._steadied.now(*_both_ms())

    async def keep_looking(self) -> None:
        """Looks at the clock again and again, until it is cancelled."""
        while True:
            self._steadied.look(*_both_ms())
            if believed_ms := self.now().earliest_ms:
                self.ahead_ms = 0
                self._keep(believed_ms)
            await asyncio.sleep(LOOK_SECONDS)

    def _compare(self, store: Store) -> None:
        if not (stored := store.sealed(BELIEVED_TIME)):
            return
        believed_ms = int.from_bytes(stored, "little")
        ahead_ms = _both_ms()[0] - believed_ms
        if ahead_ms > AHEAD_MS:
            self.ahead_ms = ahead_ms
            logger.warning(
                "the clock is %.1f days ahead of the time that this sidecar has last believed. If it is wrong, stop "
                "the sidecar within 40 minutes and set the clock: later, retention by time drops what is too old by it",
                ahead_ms / AHEAD_MS,
            )

    def _keep(self, believed_ms: int) -> None:
        """Durable with what the store makes durable next."""
        if self._store is None:
            return
        batch = WriteBatch(raw_mode=True)
        batch.put(BELIEVED_TIME, seal(BELIEVED_TIME, believed_ms.to_bytes(_TIME_BYTES, "little")))
        try:
            self._store.write(batch)
        except SeqdedupeError as e:
            logger.warning("the time cannot be kept: %s", e)


def _both_ms() -> tuple[int, int]:
    """What the clock says, and the steady one."""
    return time.time_ns() // _NANOSECONDS_A_MILLISECOND, time.monotonic_ns() // _NANOSECONDS_A_MILLISECOND


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
