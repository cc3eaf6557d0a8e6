"""What is kept of a topic for the next start, and what is let go: snapshots, and producers that nobody uses.

A topic is looked through three times within the time after which its policy has producers forgotten, as Pulsar does,
and each look counts as a third of it: so only time counts in which this process runs and the topic takes messages,
however the clock jumps, and every name has a full timeout after a restart and after a change of the policy.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

import numpy as np

from seqdedupe.core.id_window import IdWindow
from seqdedupe.core.producers import Bools, LettingGo, Producers
from seqdedupe.errors import SeqdedupeError
from seqdedupe.format.jit import Int64s
from seqdedupe.message_id import Position
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic.control import STATED_A_RECORD, encode
from seqdedupe.topic.policy import NEVER, Applied, Policy
from seqdedupe.topic.snapshotter import Snapshotter

logger = logging.getLogger("seqdedupe.topic")

LET_GO_SHARE = 4
"""Rows and names are freed when one in so many of them is empty: that takes a pass over all, and a whole snapshot."""

LOOKS_A_TIMEOUT = 3
DUE_PERIODS = LOOKS_A_TIMEOUT + 1
"""The first look comes when less than a period may have passed since a producer was used."""

ROWS_A_STEP = 65_536
"""Looked at before others have their turn."""

EXAMPLES = 3
"""So many names are logged."""

SECONDS_A_MINUTE = 60


class Kept(Protocol):
    """What a keeper asks of its topic; `base.TopicBase` says what each means."""

    name: str
    term: int
    policy: Policy
    applied: Applied
    confirmed_index: int
    producers: Producers

    @property
    def window(self) -> IdWindow | None: ...

    @property
    def last_position(self) -> Position: ...

    @property
    def is_serving(self) -> bool: ...

    def log_place(self) -> bytes: ...

    def check_knows_its_end(self) -> None: ...

    def snapshot_is_durable(self) -> None: ...

    def in_use(self) -> list[Int64s]: ...

    async def purge(self, numbers: Int64s) -> int: ...

    def renumber(self, new_numbers: Int64s) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]": ...


class Keeper:
    """Snapshots of a topic's numbers, and the looks for producers that are to be forgotten."""

    def __init__(self, topic: Kept, store: Store, snapshots: Snapshots) -> None:
        self._topic = topic
        self.snapshotter = Snapshotter(
            store,
            snapshots,
            topic.producers,
            lambda: (topic.term, topic.last_position, encode(topic.policy), topic.log_place()),
            next_index=topic.confirmed_index,
            applied=topic.applied,
            on_durable=topic.snapshot_is_durable,
            window=lambda: topic.window,
        )
        self.inactivity = Inactivity(
            topic.name,
            topic.producers,
            topic.applied,
            is_counting=lambda: topic.is_serving,
            in_use=topic.in_use,
            purge=lambda numbers: topic.purge(numbers),
            let_go=self._let_go_of_empty,
            spawn=topic.spawn,
        )

    def apply(self, applied: Applied) -> None:
        """This policy is in force from now on."""
        self.snapshotter.apply(applied)
        self.inactivity.apply(applied)

    @property
    def snapshot_index(self) -> int:
        """What the last durable snapshot covers: all messages below this index."""
        return self.snapshotter.next_index

    async def snapshot(self) -> None:
        """Takes a snapshot; returns when it is durable.

        Raises STORE_UNAVAILABLE (the next one makes up for it), and what `check_knows_its_end` raises: before this
        process owns the log, what it holds may not be durable.
        """
        self._topic.check_knows_its_end()
        await self.snapshotter.take()

    async def snapshot_in_background(self) -> None:
        """`snapshot`, with a warning in the log instead of an error."""
        try:
            await self.snapshot()
        except SeqdedupeError as e:
            logger.warning("no snapshot of topic %s: %s", self._topic.name, e)

    async def _let_go_of_empty(self) -> None:
        """Names and rows of producers of which nothing is known are freed, if many are, here and in the store."""
        is_free = self._free()
        if np.count_nonzero(is_free) < max(len(is_free), 1) / LET_GO_SHARE:
            return
        letting_go = LettingGo(self._topic.producers, is_free)
        async with self.snapshotter.stands_still():
            for _ in letting_go.prepare():
                await asyncio.sleep(0)
            self._topic.renumber(letting_go.finish(self._free()))
            self.snapshotter.renumbered()
        for _ in letting_go.clear():
            await asyncio.sleep(0)
        await self.snapshot()

    def _free(self) -> Bools:
        """By producer number, whether nothing is known of it, and nobody holds it."""
        is_free = self._topic.producers.empty()
        for numbers in self._topic.in_use():
            is_free[numbers] = False
        return is_free


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
