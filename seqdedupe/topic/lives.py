"""Opening, creation and deletion of topics. Records, logs and topics are kept consistent; an operation on several
topics affects all of them or none.

`TopicRecords` writes the store's records of topics, and repairs failed writes; `Lives` does everything else.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Generic, TypeVar

from seqdedupe.errors import DamagedError, SeqdedupeError, error
from seqdedupe.format.headers import SECRET_BYTES
from seqdedupe.log.contract import AS_USUAL, Layout
from seqdedupe.names import shard_of, whole_of
from seqdedupe.store.db import Store
from seqdedupe.store.parts import LogKind, TopicRecord, TopicState
from seqdedupe.tasks import again_until
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.keeper import RestoredState
from seqdedupe.topic.kinds import TopicKind
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.registry import Closed, Registry

# -- Records of topics in the store: written, repaired after a failed write, removed with the data of the topic.


class TopicRecords:
    """The store's records of topics. `delete_logs` removes the logs of incarnations; `in_background` runs a
    coroutine."""

    def __init__(
        self,
        store: Store,
        delete_logs: Callable[..., Awaitable[None]],
        in_background: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
    ) -> None:
        self._store = store
        self._delete_logs = delete_logs
        self._in_background = in_background
        self._cleaning: set[int] = set()
        """The incarnations whose remains are being removed."""
        self._unwritten: dict[str, SeqdedupeError] = {}
        """The names whose record could not be written. The store may nevertheless contain the record, and it is being
        repaired."""

    def check_written(self, name: str) -> None:
        """Raise STORE_UNAVAILABLE while an operation on this name is being undone."""
        if why := self._unwritten.get(name):
            raise error("STORE_UNAVAILABLE", f"what was begun with topic {name} is still being undone: {why.message}")

    def check_is_free(self, incarnation: int, known: Iterable[TopicRecord]) -> None:
        """Raise INVALID_REQUEST, TOPIC_EXISTS or STORE_UNAVAILABLE if no topic can be created with this incarnation.

        `known` contains records that the store may not have yet.
        """
        if not 0 < incarnation <= time.time_ns() // 1000:
            raise error("INVALID_REQUEST", f"no topic can have been made at {incarnation}, the snapshot's incarnation")
        if other := next((r for r in chain(self._store.topics(), known) if r.incarnation == incarnation), None):
            what = f"the topic {other.name} has the incarnation {incarnation} of the snapshot"
            raise error("TOPIC_EXISTS", what, hint=f"It is that history already: use {other.name}, or delete it first.")
        if incarnation in self._cleaning:
            # New data would be removed together with the old data.
            raise error("STORE_UNAVAILABLE", f"what is left of the incarnation {incarnation} is still being removed")

    async def write(
        self, topics: Sequence[TopicBase], records: Sequence[TopicRecord], in_force: Sequence[TopicRecord]
    ) -> None:
        """Make the new records of live topics durable, all in one write. Raises STORE_UNAVAILABLE.

        After this error the store may nevertheless contain the new records, which would be in force after the next
        start. So the topics accept nothing until the records in force have been written again.
        """
        try:
            await self._store.put_topics(*records)
        except SeqdedupeError as e:
            for topic in topics:
                topic.hold(
                    error("STORE_UNAVAILABLE", f"the record of topic {topic.name} could not be written: {e.message}")
                )
                self._unwritten[topic.name] = e
            self._in_background(self._write_again(topics, in_force))
            raise

    async def _write_again(self, topics: Sequence[TopicBase], records: Sequence[TopicRecord]) -> None:
        await again_until(lambda: self._are_durable(records))
        for topic in topics:
            topic.release()

    async def _are_durable(self, records: Sequence[TopicRecord]) -> bool:
        try:
            await self._store.put_topics(*records)
        except SeqdedupeError as e:
            self._unwritten |= {record.name: e for record in records}
            return False
        for record in records:
            self._unwritten.pop(record.name, None)
        return True

    async def undo(self, *records: TopicRecord) -> None:
        """Remove everything that a failed creation has left. If that fails, try again, or finish at the next start.

        The names stay reserved until the store has the change, because one name must never have two records.
        """
        deleting = [replace(record, state=TopicState.DELETING) for record in records]
        if await self._are_durable(deleting):
            await self.clean_up(*deleting)
        else:
            self._in_background(self._undo_later(deleting))

    async def _undo_later(self, deleting: Sequence[TopicRecord]) -> None:
        await again_until(lambda: self._are_durable(deleting))
        await self.clean_up(*deleting)

    async def remove(self, record: TopicRecord) -> None:
        """Remove the remains of a topic that has no users and whose record is DELETING. Raises STORE_UNAVAILABLE,
        LOG_REFUSED: then the remains still exist, or the next start finishes the removal."""
        await self._store.put_topics(record)
        await self._delete_logs(record.incarnation)
        await self._store.remove_topic(record.incarnation)

    async def clean_up(self, *records: TopicRecord) -> None:
        """Remove the remains of a topic, or of all partitions of one topic, whose records are DELETING.

        Remains that cannot be removed now are tried again.
        """
        self._cleaning.update(record.incarnation for record in records)
        if not await self._cleaned_up(records):
            self._in_background(again_until(lambda: self._cleaned_up(records)))

    async def _cleaned_up(self, records: Sequence[TopicRecord]) -> bool:
        try:
            await self._delete_logs(*(record.incarnation for record in records))
            for record in records:
                await self._store.remove_topic(record.incarnation)
        except SeqdedupeError as e:
            logger.warning("what is left of topic %s cannot be removed now: %s", records[0].name, e)
            return False
        self._cleaning.difference_update(record.incarnation for record in records)
        return True


logger = logging.getLogger("seqdedupe.topics")

T = TypeVar("T", bound=TopicBase)

MADE_AT_ONCE = 32
"""The number of partitions of a topic that are created at the same time. They share the syncs of disk and store."""


class Lives(Generic[T]):
    """The steps that open, create and remove topics. They put a topic, or the reason for its absence, into the
    registry, and remove it. `inherited` returns the policy for a name; `topic_changed` is called with a topic that is
    open."""

    def __init__(
        self,
        store: Store,
        kind: TopicKind[T],
        stored: TopicRecords,
        registry: Registry[T],
        inherited: Callable[[str], Applied],
        on_state: Callable[[str, State | None], None],
        topic_changed: Callable[[T], None],
    ) -> None:
        self.rebuilt: set[int] = set()
        """The incarnations that restart from their log alone, and have no durable snapshot yet."""
        self._store = store
        self._kind = kind
        self._stored = stored
        self._registry = registry
        self._inherited = inherited
        self._on_state = on_state
        self._topic_changed = topic_changed

    # -- from their records ----------------------------------------------------------------------------------------

    async def opened(self, record: TopicRecord) -> bool:
        """Try to open a topic. Return whether no further attempt is needed: the topic is open, or was found damaged for
        the second time."""
        async with self._registry.locked(record.name) as entry:
            is_gone = entry.record is not record
            return is_gone or entry.topic is not None or await self.open(record)

    async def open(self, record: TopicRecord) -> bool:
        """Do the same as `opened`. The caller holds the lock of the name and has checked that the topic is not live."""
        entry = self._registry.entry(record.name)
        before = entry.closed
        inherited = self._inherited(record.name)
        without_snapshot = record.incarnation in self.rebuilt
        try:
            topic = await self._kind.open(record, inherited, without_snapshot=without_snapshot)
        except Exception as e:
            # After any error: one topic must never block other topics.
            if not isinstance(e, SeqdedupeError | OSError):
                logger.error("topic %s could not be opened", record.name, exc_info=e)
            why = e if isinstance(e, SeqdedupeError) else error("RECOVERING", f"{type(e).__name__}: {e}")
            # A disk that fails for a moment can look like damage.
            is_damaged = isinstance(e, DamagedError) and before is not None and isinstance(before.why, DamagedError)
            # A log of this sidecar can belong to another sidecar only if the topic was moved there.
            has_moved = why.reason == "NOT_OWNER" and not self._kind.log.is_shared
            state = State.STANDBY if has_moved else State.DAMAGED if is_damaged else State.RECOVERING
            self.close(Closed(record, why, state))
            return is_damaged or has_moved
        entry.found = topic
        topic.inherit(self._inherited(topic.name))
        self._topic_changed(topic)
        return True

    async def go_on_opening(self, record: TopicRecord) -> None:
        """Try to open the topic until no further attempt is needed, and recover it."""
        await again_until(lambda: self.opened(record))
        if topic := self._registry.topic(record.name):
            await topic.recover()

    def close(self, closed: Closed) -> None:
        """Note that the topic of this record exists, but cannot be used."""
        name = closed.record.name
        entry = self._registry.entry(name)
        before, entry.found = entry.closed, closed
        if before is not None and (before.state, str(before.why)) == (closed.state, str(closed.why)):
            # The same failure occurs at each attempt.
            return
        level = logging.INFO if closed.state is State.STANDBY else logging.ERROR
        logger.log(level, "topic %s is %s: %s %s", name, closed.state.name, closed.why, closed.why.hint)
        self._on_state(name, closed.state)

    # -- made and removed ------------------------------------------------------------------------------------------

    async def make(self, names: list[str], policy: Policy, partitions: int = 0, layout: Layout = AS_USUAL) -> list[T]:
        """Create topics, all of them or none. No other caller is creating them. `partitions` has the same meaning as in
        their records; `layout`: see `Logs.create`."""
        now_us = time.time_ns() // 1000
        is_own = self._kind.log is LogKind.EMBEDDED
        secret_bytes = SECRET_BYTES if is_own else 0
        records = [
            TopicRecord(
                name,
                # The incarnations of a cluster's partitions are consecutive.
                self._store.next_incarnation(now_us, shard_of(name) if is_own else None),
                TopicState.CREATING,
                secrets.token_bytes(secret_bytes),
                self._kind.log,
                partitions,
            )
            for name in names
        ]
        made: dict[str, T] = {}
        try:
            await self._store.put_topics(*records)
            await self._make_all(records, policy, layout, made)
            if partitions:
                await self._kind.announce(whole_of(names[0]) or "")
            records = [replace(record, state=TopicState.ACTIVE) for record in records]
            await self._store.put_topics(*records)
        except Exception:
            for topic in made.values():
                await topic.delete()
            await self._stored.undo(*records)
            raise
        for record in records:
            self._begins(record, made[record.name])
        return [made[record.name] for record in records]

    async def take_in(
        self, record: TopicRecord, stored: RestoredState, put: Callable[[], Awaitable[None]], check: Callable[[T], None]
    ) -> T:
        """Create a topic from a snapshot that is already stored, and a log that `put` moves to its place. When this
        returns, the topic serves; after an error, nothing of it exists. `check` is called with the topic before the
        topic becomes valid. Raises the reason for a failure, and the errors of `put` and `check`."""
        topic: T | None = None
        try:
            await self._store.put_topics(record)
            await put()
            topic = await self._kind.open(record, self._inherited(record.name), stored=stored)
            await topic.recover()
            topic.check_serving()
            check(topic)
            active = replace(record, state=TopicState.ACTIVE)
            await self._store.put_topics(active)
        except Exception:
            if topic is not None:
                await topic.delete()
            await self._stored.undo(record)
            raise
        self._begins(active, topic)
        return topic

    def _begins(self, record: TopicRecord, topic: T) -> None:
        entry = self._registry.entry(topic.name)
        entry.record, entry.found = record, topic
        topic.inherit(self._inherited(topic.name))
        self._on_state(topic.name, topic.state)

    async def _make_all(
        self, records: Sequence[TopicRecord], policy: Policy, layout: Layout, made: dict[str, T]
    ) -> None:
        """Create the logs of these topics and open them, adding the topics to `made`. Return or raise only when no
        creation is in progress any more."""
        left = list(reversed(records))

        async def some() -> None:
            try:
                while left:
                    record = left.pop()
                    made[record.name] = await self._kind.make(record, self._inherited(record.name), layout)
                    if policy != Policy():
                        await made[record.name].set_policy(policy)
            finally:
                # After a failure no further creation is started.
                left.clear()

        # The partitions of a topic in a cluster are created in order.
        at_once = 1 if self._kind.log.is_shared else MADE_AT_ONCE
        ends = await asyncio.gather(*(some() for _ in range(min(at_once, len(records)))), return_exceptions=True)
        for end in ends:
            if end is not None:
                raise end

    async def remove(self, names: list[str], asked: str) -> None:
        """Delete topics, live or closed, all of them or none. `asked` is the name that the caller uses for them."""
        topics = [topic for name in names if (topic := self._registry.topic(name)) is not None]
        for topic in topics:
            topic.hold(error("DRAINING", f"topic {asked} is being deleted"))
        records = [record for name in names if (record := self._registry.record(name)) is not None]
        deleting = [replace(record, state=TopicState.DELETING) for record in records]
        await self._stored.write(topics, deleting, records)
        try:
            await asyncio.gather(*(topic.delete() for topic in topics))
        finally:
            for name in names:
                self.forget(name)
        await self._stored.clean_up(*deleting)

    def forget(self, name: str) -> None:
        """Remove the topic of this name from the registry."""
        entry = self._registry.entry(name)
        entry.record = entry.found = None
        self._on_state(name, None)
        self._registry.tidy(name)

    async def leave(self, records: Sequence[TopicRecord]) -> None:
        """Remove topics, live or closed, from this process. Their logs have been deleted and their names belong to
        other topics. Delete nothing else.

        Users of the topics try again, and find the topics that have the names now. Raises STORE_UNAVAILABLE: then call
        this again.
        """
        topics = [topic for record in records if (topic := self._registry.topic(record.name)) is not None]
        for record in records:
            self.forget(record.name)
        for topic in topics:
            topic.has_successor = True
            await topic.close("it was deleted and created again")
        for record in records:
            await self._store.remove_topic(record.incarnation)
