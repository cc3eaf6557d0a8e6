"""All topics: from the store and the logs to live topics, and back. It knows no kind of log.

A topic's record says where it is in its life; it is durable before anything that it says is done. Creating and
deleting run as tasks of their own: whoever asked for them may give up waiting, they are finished all the same.
"""

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Generic, TypeVar

from seqdedupe.errors import DamagedError, SeqdedupeError, error
from seqdedupe.format.tag import SECRET_BYTES
from seqdedupe.log.contract import LogName
from seqdedupe.names import namespace_of, topic_name
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.store.topics import LogKind, TopicRecord, TopicState
from seqdedupe.topic.closed import Closed
from seqdedupe.topic.kind import TopicKind
from seqdedupe.topic.namespaces import Namespaces
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.records import Records
from seqdedupe.topic.retry import again_until
from seqdedupe.topic.shielded import shielded
from seqdedupe.topic.state import State, TopicBase

logger = logging.getLogger("seqdedupe.topics")

T = TypeVar("T", bound=TopicBase)


class Topics(Generic[T]):
    """The topics by full name, all of one kind.

    `make_kind` is given whom the kind tells of a topic's changes; `on_state` is told them, and None when one is gone.
    `applied` is what namespaces inherit.
    """

    def __init__(
        self,
        store: Store,
        make_kind: Callable[[Callable[[Any], None]], TopicKind[T]],
        *,
        max_topics: int,
        allow_auto_topic_creation: bool,
        on_state: Callable[[str, State | None], None],
        rebuild_store: bool = False,
        applied: Applied | None = None,
    ) -> None:
        self._store = store
        self.namespaces = Namespaces(store, applied or Applied(), self._inherit)
        self._kind = make_kind(self._topic_changed)
        self._stored = Records(store, self._kind.delete, self._in_background)
        self._max_topics = max_topics
        self._allow_auto_topic_creation = allow_auto_topic_creation
        self._on_state = on_state
        self._rebuild_store = rebuild_store
        self._live: dict[str, T] = {}
        self._closed: dict[str, Closed] = {}
        self._records: dict[str, TopicRecord] = {}
        self._creating: dict[str, asyncio.Task[T]] = {}
        self._deleting: dict[str, asyncio.Task[None]] = {}
        self._renewing: dict[str, asyncio.Task[asyncio.Task[None] | None]] = {}
        self._opening: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By name: nobody opens a topic that another one opens."""
        self._opened_at_start: list[T] = []
        self._background: set[asyncio.Task[None]] = set()
        self.is_draining = False

    # -- start and end -----------------------------------------------------------------------------------------

    async def open_all(self) -> None:
        """Opens every log. One that cannot be opened is tried again or DAMAGED, and the others are there.

        Raises STORE_MISSING if there is a log without a record, and what `Logs.list` raises.
        """
        self.namespaces.load()
        records = self._store.topics()
        if other := next((record for record in records if record.log is not self._kind.log), None):
            raise error(
                "INVALID_CONFIGURATION",
                f"log = {self._kind.log.name.lower()!r}: the data directory has topics on the log "
                f"{other.log.name.lower()!r}, of which {other.name} is one",
                key="log",
            )
        known = {record.incarnation for record in records}
        for log in await self._kind.list():
            if log.incarnation not in known:
                await self._orphan(log)
        await asyncio.gather(*(self._open_at_start(record) for record in self._store.topics()))

    async def _orphan(self, log: LogName) -> None:
        name = log.topic or topic_name(f"rebuilt-{log.incarnation}")
        if not self._rebuild_store:
            raise error(
                "STORE_MISSING",
                f"there is a log of the topic {name}, of which the store knows nothing",
                topic=name,
                incarnation=log.incarnation,
            )
        logger.warning("making the store's record of the topic %s anew, from all that is left in its log", name)
        await self._store.put_topic(TopicRecord(name, log.incarnation, TopicState.ACTIVE))

    async def _open_at_start(self, record: TopicRecord) -> None:
        """Finishes what was begun with a topic, or opens it."""
        if record.state is TopicState.DELETING:
            await self._stored.clean_up(record)
            return
        if record.state is TopicState.CREATING:
            # Nobody was told that it is there.
            await self._stored.undo(record)
            return
        if record.name in self._records:
            why = error("STORE_DAMAGED", f"the store has two records of the topic {record.name}")
            self._close(Closed(record, why, State.DAMAGED))
            return
        self._records[record.name] = record
        if not await self._opened(record):
            self._in_background(self._go_on_opening(record))
        elif topic := self._live.get(record.name):
            self._opened_at_start.append(topic)

    async def _go_on_opening(self, record: TopicRecord) -> None:
        await again_until(lambda: self._opened(record))
        if topic := self._live.get(record.name):
            await topic.recover()

    async def _opened(self, record: TopicRecord) -> bool:
        """Tries to open a topic. Whether there is nothing left to try: it is open, or damaged at the second look."""
        async with self._opening[record.name]:
            return record.name in self._live or await self._open(record)

    async def _open(self, record: TopicRecord, *, without_snapshot: bool = False) -> bool:
        before = self._closed.get(record.name)
        inherited = self._inherited(record.name)
        try:
            topic = await self._kind.open(record, inherited, without_snapshot=without_snapshot)
        except Exception as e:
            # Whatever it is: one topic never keeps the others down.
            if not isinstance(e, SeqdedupeError | OSError):
                logger.error("topic %s could not be opened", record.name, exc_info=e)
            why = e if isinstance(e, SeqdedupeError) else error("RECOVERING", f"{type(e).__name__}: {e}")
            # A disk that fails for a moment can look like damage.
            is_damaged = isinstance(e, DamagedError) and before is not None and isinstance(before.why, DamagedError)
            self._close(Closed(record, why, State.DAMAGED if is_damaged else State.RECOVERING))
            return is_damaged
        self._closed.pop(record.name, None)
        self._live[topic.name] = topic
        topic.inherit(self._inherited(topic.name))
        self._topic_changed(topic)
        return True

    def _close(self, closed: Closed) -> None:
        name = closed.record.name
        self._closed[name] = closed
        logger.error("topic %s is %s: %s %s", name, closed.state.name, closed.why, closed.why.hint)
        self._on_state(name, closed.state)

    def _topic_changed(self, topic: T) -> None:
        logger.info("topic %s is %s%s", topic.name, topic.state.name, f": {topic.why}" if topic.why else "")
        if self._live.get(topic.name) is topic:
            self._on_state(topic.name, topic.state)

    async def recover_all(self) -> None:
        """Recovers every topic; one that cannot be recovered now goes on trying by itself, beside this."""
        opened, self._opened_at_start = self._opened_at_start, []
        await asyncio.gather(*(topic.recover() for topic in opened))
        if self._rebuild_store:
            # So that the next start needs no rebuilding.
            await asyncio.gather(*(topic.snapshot_in_background() for topic in opened))

    async def drain(self) -> None:
        """Takes nothing more; settles what is in flight; durable snapshots. Reading goes on."""
        self.is_draining = True
        await self.namespaces.close()
        under_way = [*self._creating.values(), *self._deleting.values(), *self._renewing.values()]
        if under_way:
            await asyncio.wait(under_way)
        # What is tried again and again is finished at the next start.
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        topics = list(self._live.values())
        ends = await asyncio.gather(*(topic.drain() for topic in topics), return_exceptions=True)
        for topic, end in zip(topics, ends, strict=True):
            if end is not None:
                logger.error("topic %s did not end as it should", topic.name, exc_info=end)

    def _inherited(self, topic: str) -> Applied:
        return self.namespaces.applied(namespace_of(topic))

    def _inherit(self, namespace: str) -> None:
        """The policy of this namespace has changed. A topic that is being opened looks again when it is there."""
        for topic in self._live.values():
            if namespace_of(topic.name) == namespace:
                topic.inherit(self.namespaces.applied(namespace))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _check_takes_changes(self, full: str) -> None:
        if self.is_draining:
            raise error("DRAINING", "the sidecar is shutting down")
        self._stored.check_written(full)

    # -- topics ------------------------------------------------------------------------------------------------

    def all(self) -> list[T | Closed]:
        """All topics by name: live ones, and those that cannot be opened."""
        every: dict[str, T | Closed] = {**self._closed, **self._live}
        return [every[name] for name in sorted(every)]

    def look_at(self, name: str) -> T | Closed:
        """A topic, whether or not it can be used. Raises INVALID_TOPIC_NAME, TOPIC_NOT_FOUND."""
        full = topic_name(name)
        found = self._live.get(full) or self._closed.get(full)
        if found is None:
            raise error("TOPIC_NOT_FOUND", f"there is no topic {full}", topic=full)
        return found

    def get(self, name: str) -> T:
        """The live topic. Raises INVALID_TOPIC_NAME, TOPIC_NOT_FOUND, and what a topic that cannot be opened says."""
        found = self.look_at(name)
        if isinstance(found, Closed):
            raise found.error()
        return found

    async def get_or_create(self, name: str) -> T:
        """The live topic, made if it is not there and `allow_auto_topic_creation` says so."""
        full = topic_name(name)
        if full in self._live or full in self._closed or not self._allow_auto_topic_creation:
            return self.get(full)
        return await self.create(full, exists_ok=True)

    async def create(self, name: str, *, policy: Policy | None = None, exists_ok: bool = False) -> T:
        """Makes a topic; returns when it serves.

        Raises INVALID_TOPIC_NAME, TOPIC_EXISTS, TOO_MANY_TOPICS; LOG_DAMAGED if one of that name is damaged; DRAINING,
        LOG_REFUSED, STORE_UNAVAILABLE: then there is none.
        """
        full = topic_name(name)
        while deletion := self._deleting.get(full):
            await asyncio.wait({deletion})
        self._check_takes_changes(full)
        if full in self._creating and exists_ok:
            return await asyncio.shield(self._creating[full])
        if full in self._live or full in self._closed or full in self._creating:
            if full not in self._creating:
                topic = self.get(full)
                topic.check_not_damaged()
                if exists_ok:
                    return topic
            raise error("TOPIC_EXISTS", f"the topic {full} is there already", topic=full)
        self._check_room()
        return await shielded(self._creating, full, self._create(full, policy or Policy()))

    async def _create(self, full: str, policy: Policy) -> T:
        incarnation = self._store.next_incarnation(time.time_ns() // 1000)
        secret = secrets.token_bytes(SECRET_BYTES) if self._kind.log is LogKind.EMBEDDED else b""
        record = TopicRecord(full, incarnation, TopicState.CREATING, secret, self._kind.log)
        topic: T | None = None
        try:
            await self._store.put_topic(record)
            topic = await self._kind.make(record, self._inherited(full))
            if policy != Policy():
                await topic.set_policy(policy)
            record = replace(record, state=TopicState.ACTIVE)
            await self._store.put_topic(record)
        except Exception:
            if topic is not None:
                await topic.delete()
            await self._stored.undo(record)
            raise
        self._records[full] = record
        self._live[full] = topic
        topic.inherit(self._inherited(full))
        self._on_state(full, topic.state)
        return topic

    async def delete(self, name: str) -> None:
        """Deletes a topic for good. It takes nothing more from now on.

        Raises TOPIC_NOT_FOUND, LOG_DAMAGED; STORE_UNAVAILABLE: then it is still there, and takes messages again once
        the store says so. Whoever is cancelled here does not know: the deletion goes on.
        """
        full = topic_name(name)
        while creation := self._creating.get(full):
            await asyncio.wait({creation})
        if deletion := self._deleting.get(full):
            await asyncio.shield(deletion)
            return
        self._check_takes_changes(full)
        topic = self.get(full)
        topic.check_not_damaged()
        await shielded(self._deleting, full, self._delete(topic))

    async def _delete(self, topic: T) -> None:
        topic.hold(error("DRAINING", f"topic {topic.name} is being deleted"))
        deleting = replace(self._records[topic.name], state=TopicState.DELETING)
        await self._stored.write(topic, deleting, self._records[topic.name])
        try:
            await topic.delete()
        finally:
            del self._live[topic.name], self._records[topic.name]
            self._on_state(topic.name, None)
        await self._stored.clean_up(deleting)

    async def renew(self, name: str, incarnation: int | None, loaded: Loaded | None) -> T | Closed:
        """Opens a topic again, from this snapshot of this incarnation, or (None) from its log alone.

        The snapshot takes the place of the one in the store, durably, and the topic has tried to recover, on return.
        Who uses the topic comes again. Raises TOPIC_NOT_FOUND, POSITION_OF_ANOTHER_INCARNATION, DRAINING, and what
        `TopicKind.check_snapshot` raises: then nothing has changed; STORE_UNAVAILABLE: then it goes on from what the
        store has, the one snapshot or the other.
        """
        full = topic_name(name)
        self._check_takes_changes(full)
        if full in self._renewing:
            raise error("RECOVERING", f"topic {full} is being opened again")
        record = self._records.get(full)
        if full in self._creating or full in self._deleting:
            record = None
        elif record is None and self._kind.log is LogKind.BROKER and incarnation is not None and loaded is not None:
            # The store was lost, and with it all that was known of the topic.
            work = self._make_anew(self._claimed(full, incarnation), loaded)
            return await self._renewed(full, work)
        if record is None:
            raise error("TOPIC_NOT_FOUND", f"there is no topic {full}", topic=full)
        if incarnation not in (None, record.incarnation):
            raise error(
                "POSITION_OF_ANOTHER_INCARNATION",
                f"the snapshot is of the incarnation {incarnation}, and topic {full} is the incarnation "
                f"{record.incarnation}",
                hint="The topic was deleted and made anew since the snapshot was taken, or it is another topic's.",
            )
        return await self._renewed(full, self._renew(record, loaded))

    async def _renewed(self, name: str, work: Coroutine[Any, Any, "asyncio.Task[None] | None"]) -> T | Closed:
        if begun := await shielded(self._renewing, name, work):
            await asyncio.wait({begun})
        return self.look_at(name)

    def _claimed(self, name: str, incarnation: int) -> TopicRecord:
        """The record of a topic that is made anew. Name and incarnation are taken from now on."""
        self._stored.check_is_free(incarnation, self._records.values())
        self._check_room()
        record = TopicRecord(name, incarnation, TopicState.ACTIVE, log=LogKind.BROKER)
        self._records[name] = record
        self._closed[name] = Closed(record, error("RECOVERING", "its snapshot is being imported"))
        self._on_state(name, State.RECOVERING)
        return record

    def _check_room(self) -> None:
        count = len(self._live) + len(self._closed) + len(self._creating)
        if count >= self._max_topics:
            raise error(
                "TOO_MANY_TOPICS",
                f"there are {count} topics: max_topics allows no more",
                max_topics=self._max_topics,
            )

    async def _make_anew(self, record: TopicRecord, loaded: Loaded) -> "asyncio.Task[None] | None":
        """`renew` of a topic that the store knows nothing of."""
        try:
            await Snapshots(self._store, record.incarnation).replace(loaded)
            await self._store.put_topic(record)
        except Exception:
            await self._stored.undo(record)
            del self._closed[record.name], self._records[record.name]
            self._on_state(record.name, None)
            raise
        async with self._opening[record.name]:
            return await self._open_anew(record)

    async def _renew(self, record: TopicRecord, loaded: Loaded | None) -> "asyncio.Task[None] | None":
        """`renew`, up to where the topic begins to recover, which goes on beside this."""
        name = record.name
        async with self._opening[name]:
            topic = self._live.get(name)
            await self._kind.check_snapshot(record, topic, loaded)
            if name in self._deleting:
                raise error("TOPIC_NOT_FOUND", f"the topic {name} is being deleted", topic=name)
            self._live.pop(name, None)
            self._closed[name] = Closed(record, error("RECOVERING", "it is being opened again"))
            self._on_state(name, State.RECOVERING)
            if topic is not None:
                topic.has_successor = True
                await topic.close("it is being opened again")
            try:
                if topic is not None and loaded is not None:
                    # Retention went on until it was closed.
                    await self._kind.check_snapshot(record, None, loaded)
                await Snapshots(self._store, record.incarnation).replace(loaded)
            finally:
                begun = await self._open_anew(record, without_snapshot=loaded is None)
            return begun

    async def _open_anew(self, record: TopicRecord, *, without_snapshot: bool = False) -> "asyncio.Task[None] | None":
        if await self._open(record, without_snapshot=without_snapshot):
            return self._in_background(self._begin_again(self._live[record.name]))
        self._in_background(self._go_on_opening(record))
        return None

    async def _begin_again(self, topic: T) -> None:
        await topic.recover()
        if topic.knows_its_end:
            # So that the next start finds a snapshot in any case.
            await topic.snapshot_in_background()
