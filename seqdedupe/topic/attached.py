"""A topic whose log is a broker's own: the numbers, and snapshots of them, for as long as a broker is attached."""

import asyncio
import logging
from collections.abc import Callable

import numpy as np

from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import PERSISTED, PUSHED
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.format.jit import Int64s
from seqdedupe.message_id import Position
from seqdedupe.names import producer_name
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.topic.attachment import Attachment, Checked, Columns
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.keeper import DUE_PERIODS, Keeper
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.stored import producers_of
from seqdedupe.topic.tasks import again_until

logger = logging.getLogger("seqdedupe.topic")

NOBODY = "no broker is attached"

COUNT_SECONDS = 0.05
"""Entries that are stored within it count together towards the next snapshot: a log may grow by millions a second, and
would be snapshotted without a break."""


class AttachedTopic(TopicBase):
    """The numbers of a topic of a broker. `confirmed_index` counts the entries that the log is known to hold.

    What its snapshot says is certain whoever is attached; everything else is told again by who attaches next.
    `now_seconds` is a clock that never goes back.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        store: Store,
        snapshots: Snapshots,
        loaded: Loaded | None,
        *,
        applied: Applied,
        admission_timeout_seconds: float,
        now_seconds: Callable[[], float],
        on_state: Callable[["AttachedTopic"], None],
        producers: Producers | None = None,
    ) -> None:
        super().__init__(
            name,
            incarnation,
            producers_of(loaded) if producers is None else producers,
            loaded,
            first_index=0,
            applied=applied,
            on_state=on_state,
        )
        self.position = loaded.opaque if loaded else b""
        """Of the last entry that is known to be in the log; empty: none."""
        self.trim_position = self.position
        """The entries up to here, itself included, are covered by a durable snapshot."""
        self.why = NOBODY
        self.knows_its_end = True
        self._timeout_seconds = admission_timeout_seconds
        self._now_seconds = now_seconds
        self._attachment: Attachment | None = None
        self._end: Callable[[SeqdedupeError], None] | None = None
        self._trim_moved: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._uncounted = 0
        self._counting: asyncio.TimerHandle | None = None
        self.keeper = Keeper(self, store, snapshots)

    @property
    def window(self) -> None:
        """There are no deduplication IDs."""
        return None

    @property
    def first_index(self) -> int:
        return 0

    @property
    def log_bytes(self) -> int:
        return 0

    @property
    def last_position(self) -> Position:
        """How many entries there are; where the last one is, the broker's own positions tell."""
        return Position(self.incarnation, None, self.confirmed_index - 1)

    async def position_before(self, index: int) -> Position:
        return Position(self.incarnation, None, index - 1)

    def check_serving(self) -> None:
        """Raises DRAINING, TOPIC_NOT_FOUND: the numbers are there whoever is attached."""
        if self.state is State.DRAINING:
            raise error(self.closed_because, f"topic {self.name}: {self.why}")

    def log_place(self) -> bytes:
        return self.position

    def snapshot_is_durable(self) -> None:
        if self.trim_position != self.keeper.snapshotter.opaque:
            self.trim_position = self.keeper.snapshotter.opaque
            if self._trim_moved is not None:
                self._trim_moved()

    # -- who is attached ---------------------------------------------------------------------------------------

    def attach(self, end: Callable[[SeqdedupeError], None], trim_moved: Callable[[], None]) -> Attachment:
        """A broker takes the topic; one that had it is told the end. What was in flight is forgotten: replay tells.

        `end` is called once, with the reason, when the attachment ends by itself; `trim_moved` when `trim_position` has
        changed. Raises DRAINING, TOPIC_NOT_FOUND.
        """
        if self.held is not None:
            raise self.held
        if self.state is State.DRAINING:
            raise error(self.closed_because, f"topic {self.name} is closed")
        self._detach(error("NOT_ATTACHED", f"another broker has attached topic {self.name}"))
        self.producers.fail_in_flight()
        self._attachment = attachment = Attachment(self.producers, self.position)
        self._end, self._trim_moved = end, trim_moved
        self.change_state(State.RECOVERING, "the broker replays its log")
        return attachment

    @property
    def is_attached(self) -> bool:
        """Whether a broker holds it."""
        return self._attachment is not None

    def detach(self, attachment: Attachment) -> None:
        """The broker is gone, if it is still this one."""
        if attachment is self._attachment:
            self._end = None
            self._detach(error("NOT_ATTACHED", NOBODY))
            self.change_state(State.RECOVERING, NOBODY)

    def _detach(self, why: SeqdedupeError) -> None:
        end, self._end = self._end, None
        self._attachment = self._trim_moved = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if end is not None:
            end(why)

    # -- what the broker says ----------------------------------------------------------------------------------

    def replayed(self, attachment: Attachment, entries: int) -> None:
        """So many entries were replayed, up to `attachment.position`."""
        self.position = attachment.position
        self._stored(entries)

    def ready(self) -> None:
        """The replay has ended."""
        self.change_state(State.SERVING, "")

    def check(self, attachment: Attachment, columns: Columns) -> Checked:
        """See `Attachment.check`; raises what the topic is held for too."""
        try:
            if self.held is not None:
                raise self.held
            checked = attachment.check(columns, self.applied, self._now_seconds())
        except SeqdedupeError:
            self.counters.refused += 1
            raise
        self.counters.count_verdicts(checked.verdicts, checked.admissions)
        if self._timer is None and attachment.in_flight:
            self._watch(attachment)
        return checked

    def report(
        self, attachment: Attachment, first_admission: int, persisted: int, position: bytes, failed: int
    ) -> None:
        """See `Attachment.report`."""
        attachment.report(first_admission, persisted, position, failed)
        if persisted:
            self.position = attachment.position
            self._stored(persisted)
        self.counters.log_failures += bool(failed)

    def _stored(self, entries: int) -> None:
        self.confirmed_index += entries
        self._uncounted += entries
        if self._counting is None:
            self._count()

    def _count(self) -> None:
        self._counting = None
        if self._uncounted:
            self.keeper.snapshotter.stored(self._uncounted)
            self._uncounted = 0
            self._counting = asyncio.get_running_loop().call_later(COUNT_SECONDS, self._count)

    def _watch(self, attachment: Attachment) -> None:
        """Looks again when the oldest admission in flight will have waited for too long."""
        self._timer = None
        since = attachment.waits_since
        if since is None:
            return
        left = since + self._timeout_seconds - self._now_seconds()
        if left > 0:
            self._timer = asyncio.get_running_loop().call_later(left, self._watch, attachment)
            return
        why = f"of an admission nothing was reported for {self._timeout_seconds:g} seconds"
        logger.warning("topic %s: %s", self.name, why)
        self._detach(error("NOT_ATTACHED", why))
        self.change_state(State.RECOVERING, NOBODY)

    # -- what others ask ---------------------------------------------------------------------------------------

    def numbers_of(self, name: str) -> tuple[int, int]:
        """Pushed and persisted of a producer. Raises NOT_ATTACHED while they are not known, PRODUCER_NOT_FOUND."""
        if self.state is not State.SERVING:
            raise error("NOT_ATTACHED", f"topic {self.name}: {self.why}")
        number = self.producers.number(producer_name(name))
        if number is None or not self.producers.is_known(number):
            raise error("PRODUCER_NOT_FOUND", f"topic {self.name} knows no producer {name!r}", topic=self.name)
        numbers = self.producers.numbers[number]
        return int(numbers[PUSHED]), int(numbers[PERSISTED])

    def put_in_force(self, policy: Policy) -> None:
        self.policy = policy
        self.applied = self.inherited.under(policy)
        self.keeper.apply(self.applied)

    async def set_policy(self, policy: Policy) -> None:
        """Sets the policy, as a whole: in force at once, durable on return. Raises STORE_UNAVAILABLE: it is tried
        again, and until then it is in force but not durable."""
        self.put_in_force(policy)
        try:
            await self.keeper.snapshot()
        except SeqdedupeError:
            self.spawn(again_until(self._is_durable))
            raise

    async def _is_durable(self) -> bool:
        try:
            await self.keeper.snapshot()
        except SeqdedupeError:
            return False
        return True

    # -- producers that nobody uses ----------------------------------------------------------------------------

    def in_use(self) -> list[Int64s]:
        """Those that the broker has registered, or that have something in flight."""
        return [] if self._attachment is None else self._attachment.in_use()

    async def purge(self, numbers: Int64s) -> int:
        """A durable snapshot says so first: a replay begins after it, and never meets what is forgotten again."""
        producers, before = self.producers, self.counters.purged

        def due() -> Int64s:
            return np.intersect1d(numbers, producers.due(DUE_PERIODS, int(numbers[0]), int(numbers[-1]) + 1))

        def forget(forgotten: Int64s) -> None:
            if not len(forgotten):
                return
            still = due()
            producers.purge(still, self.confirmed_index)
            self.counters.purged += len(still)
            producers.mark_dirty(forgotten)
            if len(still) < len(forgotten):
                # Of those that came back meanwhile the store has to be told again.
                self.spawn(self.keeper.snapshot_in_background())

        await self.keeper.snapshotter.forget(due, forget)
        return self.counters.purged - before

    def renumber(self, new_numbers: Int64s) -> None:
        if self._attachment is not None:
            self._attachment.renumber(new_numbers)

    # -- the end -----------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """There is nothing to read: the broker's log is told by who attaches."""

    async def drain(self) -> None:
        """Takes nothing more, takes a last snapshot."""
        self._closing("the sidecar is shutting down")
        await self.keeper.snapshot_in_background()
        await self.end_tasks()

    async def close(self, why: str) -> None:
        self._closing(why)
        await self.end_tasks()

    async def delete(self) -> None:
        """Closes it for good: whoever still uses the topic is told that it is not there."""
        self.closed_because = "TOPIC_NOT_FOUND"
        self._closing("it was deleted")
        await self.end_tasks()

    def _closing(self, why: str) -> None:
        self.change_state(State.DRAINING, why)
        self._detach(error(self.closed_because, f"topic {self.name}: {why}"))
