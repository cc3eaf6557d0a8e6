"""What a topic of every kind has: a state, producers and their sessions, a policy, snapshots.

It says nothing of how messages come into the topic's log: `publishing` does.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any

import numpy as np

from seqdedupe.core.id_window import IdWindow
from seqdedupe.core.letting_go import LettingGo
from seqdedupe.core.producers import Bools, Producers
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.format.jit import Int64s
from seqdedupe.log.contract import DamageFound, Skipped
from seqdedupe.message_id import MessageId, Position
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.topic.broadcast import Broadcast
from seqdedupe.topic.control import decode_policy, encode
from seqdedupe.topic.counters import Counters
from seqdedupe.topic.inactivity import Inactivity, shown
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.sessions import Sessions
from seqdedupe.topic.snapshotter import Snapshotter

logger = logging.getLogger("seqdedupe.topic")

LET_GO_SHARE = 4
"""Rows and names are freed when one in so many of them is empty: that takes a pass over all, and a whole snapshot."""


class State(Enum):
    """What a topic does at the moment."""

    RECOVERING = 1
    """The log is being read, or cannot be read now; what is certain is served to readers."""
    SERVING = 2
    READ_ONLY = 3
    """The log refuses writes now; it is tried again."""
    DRAINING = 4
    DAMAGED = 5
    """For good: something in the log or the store is not what was written."""
    STANDBY = 6
    """Another sidecar owns the log; what is certain is served to readers."""


class TopicBase(ABC):
    """A topic of this process, without its way of appending.

    `window` is what it knows of deduplication IDs; None in a topic of sequence IDs.

    `loaded` is its newest snapshot; without one it begins at `first_index`. `applied` is the policy that it inherits.
    `on_state` is told each change of state.
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
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.policy = Policy()
        """What is set for this topic."""
        self.applied = applied
        """What is in force."""
        self._inherited = applied
        self.counters = Counters()
        self.state = State.RECOVERING
        self.why = "the log is being read"
        self.term = 0
        self.knows_its_end = False
        """Whether this process owns the log and has read it up to its own marker: only then is the end known."""
        self.producers = Producers()
        self.confirmed_index = first_index
        """All messages below it are in the log for good, and in the producers' numbers."""
        self.last_message_id: MessageId | None = None
        """That of the last confirmed message; None if there is none."""
        self.last_ownership = 0
        """That of the last confirmed message; 0 if there is none or it is not known."""
        self.owner_address = ""
        """Where the sidecar can be reached that owns the log, in STANDBY; empty if it is not known."""
        self.asked = Broadcast()
        """Tells that somebody wants a topic that another sidecar owns."""
        self.newest_import: object = None
        """The one that was begun last: it alone may go on."""
        if loaded is not None:
            self.producers.load(loaded.names, loaded.persisted, loaded.epochs, loaded.stated)
            self.producers.has_forgotten = loaded.has_forgotten
            self.term = loaded.term
            self.confirmed_index = loaded.next_index
            self.last_message_id = loaded.message_id
            self.last_ownership = loaded.ownership
            if loaded.policy:
                self.policy = decode_policy(loaded.policy)
                self.applied = applied.under(self.policy)
        self.sessions = Sessions(self.producers)
        self.confirmed = Broadcast()
        self.damage: SeqdedupeError | None = None
        self.has_successor = False
        """Whether the topic was opened again, so that nothing comes of using this one."""
        self._held: SeqdedupeError | None = None
        self._closed_because = "DRAINING"
        self._on_state = on_state
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

    # -- state -------------------------------------------------------------------------------------------------

    def _set_state(self, state: State, why: str) -> None:
        if self.state is State.DRAINING and state is not State.DRAINING:
            return
        if (state, why) != (self.state, self.why):
            self.state, self.why = state, why
            self._on_state(self)
            self.confirmed.tell()

    def hold(self, why: SeqdedupeError) -> None:
        """Takes nothing from now on, and says why, until `release`. What is in flight settles; readers go on."""
        self._held = why

    def release(self, why: SeqdedupeError | None = None) -> None:
        """Takes messages again, unless it is held for something else than this (None: whatever it is)."""
        if why is None or self._held is why:
            self._held = None

    def check_serving(self) -> None:
        """Raises why the topic takes no messages, if it does not: RECOVERING, LOG_REFUSED, NOT_OWNER, DRAINING,
        TOPIC_NOT_FOUND, LOG_DAMAGED."""
        if self._held is not None and self.state is not State.DRAINING:
            raise self._held
        if self.state is State.SERVING:
            return
        self.check_may_go_on()
        reason = {
            State.RECOVERING: "RECOVERING",
            State.READ_ONLY: "LOG_REFUSED",
            State.DRAINING: self._closed_because,
        }[self.state]
        raise error(reason, f"topic {self.name} takes no messages now: {self.why}")

    def check_not_damaged(self) -> None:
        """Raises LOG_DAMAGED if the topic is damaged."""
        if self.damage is not None:
            raise damaged_topic(self.name, self.damage)

    def check_may_go_on(self) -> None:
        """Raises LOG_DAMAGED, or NOT_OWNER: nothing that is not certain yet will come from here."""
        self.check_not_damaged()
        if self.state is State.STANDBY:
            self.asked.tell()
            raise self.not_owner("")

    def not_owner(self, what: str) -> SeqdedupeError:
        """That another sidecar owns the topic, with its address where that is known; and what comes of it."""
        if not self.owner_address:
            return error("NOT_OWNER", f"somebody else owns topic {self.name}{what}")
        message = f"the sidecar at {self.owner_address} owns topic {self.name}{what}"
        return error("NOT_OWNER", message, owner_address=self.owner_address)

    def check_knows_its_end(self) -> None:
        """Raises RECOVERING, NOT_OWNER or LOG_DAMAGED while nobody here can say where the topic ends."""
        if self.knows_its_end:
            return
        self.check_may_go_on()
        raise error(
            "RECOVERING",
            f"where topic {self.name} ends is not known yet: {self.why}",
            certain_index=self.readable_index,
        )

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
        closing, damaged, or another sidecar's."""
        while self.readable_index <= index and self.state not in (State.DRAINING, State.DAMAGED, State.STANDBY):
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


def damaged_topic(name: str, damage: SeqdedupeError) -> SeqdedupeError:
    """The final answer of a topic that is damaged."""
    if damage.reason == "NO_STATE":
        return error("NO_STATE", f"topic {name} cannot be served here: {damage.message}", topic=name)
    return error("LOG_DAMAGED", f"topic {name} is damaged: {damage}", hint=damage.hint, topic=name)
