"""Forgetting producers that nobody has used for as long as the policy says.

The topic is looked through three times within that time, as Pulsar does, and each look counts as a third of it: so only
time counts in which this process runs and the topic takes messages, however the clock jumps, and every name has a full
timeout after a restart and after a change of the policy.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from seqdedupe.core.producers import Producers
from seqdedupe.errors import SeqdedupeError
from seqdedupe.format.jit import Int64s
from seqdedupe.topic.control import STATED_A_RECORD
from seqdedupe.topic.policy import NEVER, Applied

logger = logging.getLogger("seqdedupe.topic")

LOOKS_A_TIMEOUT = 3
DUE_PERIODS = LOOKS_A_TIMEOUT + 1
"""The first look comes when less than a period may have passed since a producer was used."""

ROWS_A_STEP = 65_536
"""Looked at before others have their turn."""

EXAMPLES = 3
"""So many names are logged."""

SECONDS_A_MINUTE = 60


class Inactivity:
    """Looks for producers of a topic that are due, a period after the other, while the policy says so.

    `is_counting`: whether the topic takes messages. `in_use` gives the producers that somebody holds now otherwise than
    by a stream, in parts (see `Activity`). `purge` forgets producers, durably before it returns
    how many it were; `let_go` frees the names and rows of those of which nothing is known.
    What takes time is a task of the topic's (`spawn`).
    """

    def __init__(
        self,
        topic: str,
        producers: Producers,
        applied: Applied,
        *,
        is_counting: Callable[[], bool],
        in_use: Callable[[], list[Int64s]],
        purge: Callable[[Int64s], Awaitable[int]],
        let_go: Callable[[], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
    ) -> None:
        self._topic = topic
        self._producers = producers
        self._is_counting = is_counting
        self._in_use = in_use
        self._purge = purge
        self._let_go = let_go
        self._spawn = spawn
        self._minutes = NEVER
        self._timer: asyncio.TimerHandle | None = None
        self._look: asyncio.Task[None] | None = None
        self.apply(applied)

    def apply(self, applied: Applied) -> None:
        """This is in force from now on. With another timeout every producer begins with a full one."""
        minutes = applied.deduplication_producer_inactivity_timeout_minutes if applied.forgets else NEVER
        if minutes != self._minutes:
            self._minutes = minutes
            self._producers.activity.renew_all()
            self._set_timer()

    def close(self) -> None:
        """Looks no more."""
        self._minutes = NEVER
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._minutes != NEVER:
            period_seconds = self._minutes * SECONDS_A_MINUTE / LOOKS_A_TIMEOUT
            self._timer = asyncio.get_running_loop().call_later(period_seconds, self._period_is_over)

    def _period_is_over(self) -> None:
        if self._look is None or self._look.done():
            self._look = self._spawn(self._look_through())
        self._set_timer()

    async def _look_through(self) -> None:
        try:
            await self.look()
        except SeqdedupeError as e:
            logger.warning(
                "topic %s: producers that are due to be forgotten wait for the next look: %s", self._topic, e
            )

    async def look(self) -> None:
        """A period has passed: counts it, and forgets who is due. Raises why it could not; the next one makes up."""
        if not self._is_counting():
            return
        producers = self._producers
        minutes, purged, examples = self._minutes, 0, list[bytes]()
        for first in range(0, len(producers), ROWS_A_STEP):
            producers.activity.pass_period(first, min(first + ROWS_A_STEP, len(producers)))
            await asyncio.sleep(0)
        # After that: whoever lets go of one in a moment has used it until then.
        for _ in producers.activity.use_shared():
            await asyncio.sleep(0)
        for numbers in self._in_use():
            producers.activity.use(numbers)
            await asyncio.sleep(0)
        for first in range(0, len(producers), ROWS_A_STEP):
            end = min(first + ROWS_A_STEP, len(producers))
            for start in range(first, end, STATED_A_RECORD):
                # Looked for anew each time: meanwhile somebody may have come back.
                due = producers.due(DUE_PERIODS, start, min(start + STATED_A_RECORD, end))
                if len(due) and self._minutes == minutes != NEVER:
                    examples += producers.names_of(due[: EXAMPLES + 1]) if not purged else []
                    purged += await self._purge(due)
            await asyncio.sleep(0)
        if purged:
            logger.warning(
                "topic %s: %d producers that nobody had used for %d minutes are forgotten (%s): what they send again "
                "is new, stored or not",
                self._topic,
                purged,
                minutes,
                shown(examples),
            )
        await self._let_go()


def shown(names: list[bytes]) -> str:
    """A few of the names, for the log."""
    some = ", ".join(repr(name.decode()) for name in names[:EXAMPLES])
    return f"{some}, …" if len(names) > EXAMPLES else some
