"""The clock of the process. All topics use this clock. The clock is checked as long as the process runs.

Begin with `Clock`. `Steadied` computes bounds of the time, because the system's clock may jump forward or back, and may
later be corrected.

A clock may be wrong for a while (because a time service sets it, or a machine is resumed). It then differs from the
steady clock, which shows only how much time passes. So readings of both clocks are kept for a while. The largest and
the smallest difference are the bounds of the time. New messages get the latest possible time, and ages are computed
with the earliest possible time. So if a jump in either direction is undone, nothing has been forgotten too early.
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
"""If the clock at the start is ahead of the last believed time by more than this, there is a warning. The sidecar may
also have been stopped for that long."""

LOOK_SECONDS = 60.0
"""The time between two looks at the clocks."""

LOOKS = 41
"""The number of readings that must agree, over 40 minutes. Time services check the clocks that they set more often:
they wait for 34 minutes at most."""

_NANOSECONDS_A_MILLISECOND = 1_000_000
_TIME_BYTES = 8


class Clock:
    """The clock of the process. `keep_looking` must run. Nothing expires by time until it has run for 40 minutes.

    With a store, the clock saves the last believed time there, and compares this time at the start. If the clock stays
    ahead for longer than 40 minutes, its time is believed. Retention and windows then drop data permanently, even if
    the clock is wrong.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._steadied = Steadied()
        self._store = store
        self.ahead_ms = 0
        """If suspicious: the time by which the clock was ahead of the last believed time at the start. Otherwise 0, and
        0 again as soon as the clock's time is believed."""
        if store is not None:
            self._compare(store)

    def now(self) -> Moment:
        """Return the current time."""
        return self._steadied.now(*_both_ms())

    async def keep_looking(self) -> None:
        """Read the clocks at intervals, until cancelled."""
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
                "the sidecar within 40 minutes and set the clock. Later, retention by time drops what is too old by it",
                ahead_ms / AHEAD_MS,
            )

    def _keep(self, believed_ms: int) -> None:
        """Store the believed time. It is durable with the next data that the store makes durable."""
        if self._store is None:
            return
        batch = WriteBatch(raw_mode=True)
        batch.put(BELIEVED_TIME, seal(BELIEVED_TIME, believed_ms.to_bytes(_TIME_BYTES, "little")))
        try:
            self._store.write(batch)
        except SeqdedupeError as e:
            logger.warning("the time cannot be kept: %s", e)


def _both_ms() -> tuple[int, int]:
    """Return the readings of the clock and of the steady clock."""
    return time.time_ns() // _NANOSECONDS_A_MILLISECOND, time.monotonic_ns() // _NANOSECONDS_A_MILLISECOND


class Steadied:
    """The time computed from LOOKS readings of a clock, one every LOOK_SECONDS."""

    def __init__(self) -> None:
        self._apart_ms: deque[int] = deque(maxlen=LOOKS)
        """For each reading, the difference by which the clock was ahead of the steady clock."""
        self._least_ms = self._most_ms = 0
        """The bounds of these differences, once there is a difference. They are stored because each frame needs
        them."""

    def look(self, clock_ms: int, steady_ms: int) -> None:
        """Record a reading of the clock and of the steady clock. The steady clock starts at any value and never
        jumps."""
        self._apart_ms.append(clock_ms - steady_ms)
        self._least_ms, self._most_ms = min(self._apart_ms), max(self._apart_ms)

    def now(self, clock_ms: int, steady_ms: int) -> Moment:
        """Return the time for these readings. Until there are LOOKS readings, the earliest possible time is not
        known."""
        if not self._apart_ms:
            return Moment(0, clock_ms)
        latest_ms = max(clock_ms, steady_ms + self._most_ms)
        is_known = len(self._apart_ms) == LOOKS
        return Moment(min(clock_ms, steady_ms + self._least_ms) if is_known else 0, latest_ms)
