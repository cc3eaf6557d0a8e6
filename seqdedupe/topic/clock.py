"""The process's clock, for what goes by time: one for all topics, watched as long as the process runs."""

import asyncio
import logging
import time

from rocksdict import WriteBatch

from seqdedupe.core.moment import LOOK_SECONDS, Moment, Steadied
from seqdedupe.errors import SeqdedupeError
from seqdedupe.store.db import Store
from seqdedupe.store.parts import BELIEVED_TIME, seal

logger = logging.getLogger("seqdedupe.topic")

AHEAD_MS = 24 * 60 * 60 * 1000
"""A start by a clock that is so far ahead of the last believed time is worth a warning. A sidecar may also have been
stopped for that long."""

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
