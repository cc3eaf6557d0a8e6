"""What a topic of every kind has: producers and their sessions, a policy, snapshots; its state is in `state`.

It says nothing of how messages come into the topic's log: `publishing` does.
"""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from seqdedupe.core.id_window import IdWindow
from seqdedupe.core.producers import Bools, LettingGo, Producers
from seqdedupe.errors import SeqdedupeError
from seqdedupe.format.jit import Int64s
from seqdedupe.log.contract import DamageFound, Skipped
from seqdedupe.message_id import MessageId, Position
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.topic.control import decode_policy, encode
from seqdedupe.topic.counters import Counters
from seqdedupe.topic.inactivity import Inactivity, shown
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.sessions import Sessions
from seqdedupe.topic.snapshotter import Snapshotter
from seqdedupe.topic.state import Serving, State
from seqdedupe.topic.stored import producers_of

logger = logging.getLogger("seqdedupe.topic")

LET_GO_SHARE = 4
"""Rows and names are freed when one in so many of them is empty: that takes a pass over all, and a whole snapshot."""


class TopicBase(Serving):
    """A topic of this process, without its way of appending.

    `window` is what it knows of deduplication IDs; None in a topic of sequence IDs.

    `loaded` is its newest snapshot; without one it begins at `first_index`. `producers` are those of the snapshot, if
    they were made already. `applied` is the policy that it inherits.
    """

    window: IdWindow | None = None

    def __init__(
        self,
        name: str,
        incarnation: int,
        store: Store,
        snapshots: Snapshots,
        loaded: Loaded | None,
        *,
        first_index: int,
        applied: Applied,
        on_state: Callable[[Any], None],
        producers: Producers | None = None,
    ) -> None:
        super().__init__(name, on_state)
        self.incarnation = incarnation
        self.policy = Policy()
        """What is set for this topic."""
        self.applied = applied
        """What is in force."""
        self._inherited = applied
        self.counters = Counters()
        self.term = 0
        self.producers = producers_of(loaded) if producers is None else producers
        self.confirmed_index = first_index
        """All messages below it are in the log for good, and in the producers' numbers."""
        self.last_message_id: MessageId | None = None
        """That of the last confirmed message; None if there is none."""
        self.last_ownership = 0
        """That of the last confirmed message; 0 if there is none or it is not known."""
        self.newest_import: object = None
        """The one that was begun last: it alone may go on."""
        if loaded is not None:
            self.term = loaded.term
            self.confirmed_index = loaded.next_index
            self.last_message_id = loaded.message_id
            self.last_ownership = loaded.ownership
            if loaded.policy:
                self.policy = decode_policy(loaded.policy)
                self.applied = applied.under(self.policy)
        self.sessions = Sessions(self.producers)
        self.has_successor = False
        """Whether the topic was opened again, so that nothing comes of using this one."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.snapshotter = Snapshotter(
            store,
            snapshots,
            self.producers,
            lambda: (self.term, self.last_position, encode(self.policy), self.log_place()),
            next_index=self.confirmed_index,
            applied=self.applied,
            on_durable=self._snapshot_is_durable,
            window=lambda: self.window,
        )
        self.inactivity = Inactivity(
            name,
            self.producers,
            self.applied,
            is_counting=lambda: self.state is State.SERVING,
            in_use=self._in_use,
            purge=self._purge,
            let_go=self._let_go_of_empty,
            spawn=self._spawn,
        )

    @property
    @abstractmethod
    def last_position(self) -> Position:
        """The position of the last confirmed message."""

    @property
    def certain_position(self) -> Position:
        """That of the last message that may be shown to readers, or of an earlier one where that would take a read."""
        return self.last_position

    def log_place(self) -> bytes:
        """Where the log goes on after the last confirmed message: the position in a broker's own, or `Log.place_at`."""
        return b""

    @abstractmethod
    def _snapshot_is_durable(self) -> None:
        """All below `snapshot_index` is covered by a durable snapshot: retention may go on."""

    @property
    def damage_found(self) -> DamageFound:
        """What a scrub of the log has found."""
        return DamageFound()

    @property
    def skipped(self) -> Skipped:
        """What stands in the log and is no part of it."""
        return Skipped()

    @property
    def not_durable(self) -> int:
        """So many messages have a receipt that was given early, and are not durable yet."""
        return 0

    @property
    @abstractmethod
    def first_index(self) -> int:
        """The index of the first message that is left in the log."""

    @property
    def entry_format(self) -> str:
        """See `Log.entry_format`."""
        return ""

    @property
    @abstractmethod
    def log_bytes(self) -> int:
        """The bytes of the log on disk; 0 if it is none of ours."""

    @abstractmethod
    async def position_before(self, index: int) -> Position:
        """The position after which the message with this index stands. It may take a read: raises as `Log.locate`."""

    @abstractmethod
    async def recover(self) -> None:
        """Begins to serve, now or when that is possible."""

    @property
    def newest_policy(self) -> Policy:
        """What will be set for this topic when all that is under way has settled."""
        return self.policy

    @abstractmethod
    async def set_policy(self, policy: Policy) -> None:
        """Sets the policy, as a whole: durable and in force on return. Raises why it could not be."""

    @abstractmethod
    async def drain(self) -> None:
        """Takes nothing more, settles what is in flight, takes a last snapshot, and lets go of everything."""

    @abstractmethod
    async def close(self, why: str) -> None:
        """Lets go of everything at once: who uses the topic comes again, and finds its successor."""

    @abstractmethod
    async def delete(self) -> None:
        """Closes it for good: whoever still uses the topic is told that it is not there."""

    def inherit(self, applied: Applied) -> None:
        """This is what the topic inherits from now on."""
        self._inherited = applied
        self._put_in_force(self.policy)

    def _put_in_force(self, policy: Policy) -> None:
        self.policy = policy
        self.applied = self._inherited.under(policy)
        self.snapshotter.apply(self.applied)
        self.inactivity.apply(self.applied)

    # -- tasks -------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task of topic %s failed", self.name, exc_info=task.exception())

    # -- reading -----------------------------------------------------------------------------------------------

    @property
    def readable_index(self) -> int:
        """All messages below it may be shown to readers. Where the topic ends only if it `knows_its_end`."""
        return self.confirmed_index

    async def wait_for_message(self, index: int) -> None:
        """Returns when the message with this index can be read, or will not be from here for now: the topic is
        closing, damaged, terminated, or another sidecar's."""
        ends = State.DRAINING, State.DAMAGED, State.STANDBY, State.TERMINATED
        while self.readable_index <= index and self.state not in ends:
            await self.confirmed.wait()

    # -- snapshots ---------------------------------------------------------------------------------------------

    async def snapshot(self) -> None:
        """Takes a snapshot; returns when it is durable.

        Raises STORE_UNAVAILABLE (the next one makes up for it), and what `check_knows_its_end` raises: before this
        process owns the log, what it holds may not be durable.
        """
        self.check_knows_its_end()
        await self.snapshotter.take()

    async def snapshot_in_background(self) -> None:
        """`snapshot`, with a warning in the log instead of an error."""
        try:
            await self.snapshot()
        except SeqdedupeError as e:
            logger.warning("no snapshot of topic %s: %s", self.name, e)

    @property
    def snapshot_index(self) -> int:
        """What the last durable snapshot covers: all messages below this index."""
        return self.snapshotter.next_index

    # -- producers that nobody uses ----------------------------------------------------------------------------

    @abstractmethod
    async def _purge(self, numbers: Int64s) -> int:
        """Forgets these producers, durably; returns how many it were. Raises why it cannot."""

    @abstractmethod
    def _in_use(self) -> list[Int64s]:
        """The producers that somebody holds now otherwise than by a stream, and those with messages in flight.

        Each part is looked at in one step.
        """

    @abstractmethod
    def _renumber(self, new_numbers: Int64s) -> None:
        """The producers have these numbers from now on, by their old ones; -1: it is gone."""

    def resumed_after_purge(self, names: list[bytes]) -> None:
        """Sessions were resumed of producers that are forgotten: counts and logs it."""
        self.counters.resumed_after_purge += len(names)
        if names:
            logger.warning(
                "topic %s: %d sessions are resumed of producers that were forgotten (%s): what they send again is new, "
                "stored or not",
                self.name,
                len(names),
                shown(names),
            )

    async def _let_go_of_empty(self) -> None:
        """Names and rows of producers of which nothing is known are freed, if many are, here and in the store."""
        is_free = self._free()
        if np.count_nonzero(is_free) < max(len(is_free), 1) / LET_GO_SHARE:
            return
        letting_go = LettingGo(self.producers, is_free)
        async with self.snapshotter.stands_still():
            for _ in letting_go.prepare():
                await asyncio.sleep(0)
            self._renumber(letting_go.finish(self._free()))
            self.snapshotter.renumbered()
        for _ in letting_go.clear():
            await asyncio.sleep(0)
        await self.snapshot()

    def _free(self) -> Bools:
        """By producer number, whether nothing is known of it, and nobody holds it."""
        is_free = self.producers.empty()
        for numbers in self._in_use():
            is_free[numbers] = False
        return is_free

    async def _end_tasks(self) -> None:
        self.inactivity.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.snapshotter.close()
