"""Opens, creates and deletes topics. This module keeps records, logs and topics consistent. An operation on several
topics affects all of these topics, or none.

Begin with `Lives`, at the end. There are two kinds of topics. `PublishedTopics` are opened from a log of this project
and a snapshot. `BrokersTopics` have only the store's records and snapshots. `TopicRecords` writes the store's records
of topics, and repairs failed writes.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

from seqdedupe.core.id_runs import ImportedIds
from seqdedupe.errors import DamagedError, PositionError, SeqdedupeError, UnavailableError, error
from seqdedupe.figures import counted
from seqdedupe.format.headers import SECRET_BYTES
from seqdedupe.log.contract import AS_USUAL, Layout, Log, LogName, Logs
from seqdedupe.names import shard_of, whole_of
from seqdedupe.store import windows
from seqdedupe.store.db import Store
from seqdedupe.store.parts import LogKind, TopicRecord, TopicState
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.tasks import again_until
from seqdedupe.topic.attached import AttachedTopic
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.clock import Clock
from seqdedupe.topic.control import decode_policy
from seqdedupe.topic.keeper import RestoredState
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.registry import Closed, Registry
from seqdedupe.topic.topic import Topic
from seqdedupe.topic.window_runs import WindowMemory

logger = logging.getLogger("seqdedupe.topics")
_topic_logger = logging.getLogger("seqdedupe.topic")

# -- The operations that the directory of topics needs of a kind of log: topics on it, and the list of logs.

T_co = TypeVar("T_co", bound=TopicBase, covariant=True)


class TopicKind(Protocol[T_co]):
    """Topics on one kind of log."""

    log: LogKind

    async def list(self, without: Container[str] = ()) -> list[LogName]:
        """Return the logs that exist. See `Logs.list`."""

    async def make(self, record: TopicRecord, applied: Applied, layout: Layout = AS_USUAL) -> T_co:
        """Create a topic on a new log. Return the topic, ready for use. The topic inherits this policy. `layout`: see
        `Logs.create`.

        Raises the reason for a failure. After a failure the caller must `delete` the log.
        """

    async def load(self, record: TopicRecord) -> RestoredState:
        """Return the data of a topic in the store; this takes long if there is much data. Raises errors of damage,
        STORE_UNAVAILABLE."""

    async def open(
        self,
        record: TopicRecord,
        applied: Applied,
        *,
        without_snapshot: bool = False,
        stored: RestoredState | None = None,
    ) -> T_co:
        """Return a topic on an existing log. The topic inherits this policy. With `without_snapshot`, the topic need
        not have a snapshot. `stored` is the result of an earlier `load`, if there was one.

        Raises errors of damage, or the reason why the topic cannot be opened now.
        """

    async def check_snapshot(self, record: TopicRecord, live: TopicBase | None, loaded: Loaded | None) -> None:
        """Check that a topic can continue from this snapshot, or without a snapshot from its log alone. Change nothing.

        `live` is the topic object, if the topic is open or has just been closed.

        Raises POSITION_AFTER_END, POSITION_TRIMMED, POSITION_DIVERGED, INVALID_REQUEST, LOG_INCOMPLETE, and the reason
        why the log cannot be read.
        """

    async def take_over(self, topic: str, incarnations: Callable[[int], Sequence[int]], layout: Layout) -> None:
        """Make an existing topic of the cluster a log. See `Logs.take_over`."""

    async def announce(self, whole: str) -> None:
        """Announce that all partitions of a new partitioned topic are ready. See `Logs.announce`."""

    async def delete(self, *incarnations: int) -> None:
        """Remove these logs, if they exist. No log may be open. See `Logs.delete`."""


# -- The kinds of topics. First, topics whose logs are a broker's own: nothing but the store's records and snapshots.


class BrokersTopics:
    """A `TopicKind` for brokers' logs. `on_state` is called at each change of a topic's state."""

    log = LogKind.BROKER

    def __init__(
        self,
        store: Store,
        *,
        on_state: Callable[[AttachedTopic], None],
    ) -> None:
        self._store = store
        self._on_state = on_state

    async def list(self, without: Container[str] = ()) -> list[LogName]:
        return []

    async def make(self, record: TopicRecord, applied: Applied, layout: Layout = AS_USUAL) -> AttachedTopic:
        return await self.open(record, applied)

    async def load(self, record: TopicRecord) -> RestoredState:
        return await asyncio.to_thread(RestoredState.load, Snapshots(self._store, record.incarnation))

    async def open(
        self,
        record: TopicRecord,
        applied: Applied,
        *,
        without_snapshot: bool = False,
        stored: RestoredState | None = None,
    ) -> AttachedTopic:
        stored = stored or await self.load(record)
        return AttachedTopic(
            record.name,
            record.incarnation,
            self._store,
            stored.snapshots,
            stored.loaded,
            applied=applied,
            now_seconds=time.monotonic,
            on_state=self._on_state,
            producers=stored.producers,
        )

    async def check_snapshot(self, record: TopicRecord, live: TopicBase | None, loaded: Loaded | None) -> None:
        if loaded is None:
            why = "the log is a broker's own: there is nothing here to make the records from"
            raise error(
                "INVALID_REQUEST",
                why,
                hint="Import a snapshot. Or delete the topic, and let the broker replay its log.",
            )
        if live is not None and loaded.next_index < live.keeper.snapshot_index:
            # The broker may have dropped the entries before that position, as it was allowed to do.
            why = f"the snapshot covers {loaded.next_index} entries, the one in the store {live.keeper.snapshot_index}"
            raise error("POSITION_TRIMMED", why, hint="Import a newer snapshot.")

    async def take_over(self, topic: str, incarnations: Callable[[int], Sequence[int]], layout: Layout) -> None:
        raise error("INVALID_REQUEST", f"{topic} cannot be taken over: the log is a broker's own")

    async def announce(self, whole: str) -> None:
        """Do nothing: there are no partitions."""

    async def delete(self, *incarnations: int) -> None:
        """Do nothing: the log is the broker's."""


class PublishedTopics:
    """A `TopicKind` for logs of this project. `on_state` is called at each change of state. With `rebuild_store`,
    snapshots may be missing.

    `stands_by` returns whether the process follows topics of other sidecars, and takes such a topic over automatically.
    `clock` is for topics of deduplication IDs. Without `clock`, these topics never forget IDs because of their age.
    """

    def __init__(
        self,
        store: Store,
        logs: Logs,
        *,
        log: LogKind = LogKind.EMBEDDED,
        on_state: Callable[[Topic], None],
        rebuild_store: bool = False,
        stands_by: Callable[[str], bool] = lambda topic: False,
        window_memory: WindowMemory | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.log = log
        self._store = store
        self._logs = logs
        self._on_state = on_state
        self._rebuild_store = rebuild_store
        self._stands_by = stands_by
        self._window_memory = window_memory
        self._clock = clock or Clock()

    async def list(self, without: Container[str] = ()) -> list[LogName]:
        return await self._logs.list(without)

    async def make(self, record: TopicRecord, applied: Applied, layout: Layout = AS_USUAL) -> Topic:
        await self._logs.create(record.incarnation, record.name, record.secret, record.partitions, layout)
        topic = await self.open(record, applied)
        try:
            await topic.recover()
            topic.check_serving()
        except Exception:
            await topic.delete()
            raise
        return topic

    async def load(self, record: TopicRecord) -> RestoredState:
        snapshots = Snapshots(self._store, record.incarnation)
        stored = await asyncio.to_thread(RestoredState.load, snapshots)
        loaded = stored.loaded
        if loaded is not None and loaded.window is None and loaded.policy:
            _check_needs_none(record, decode_policy(loaded.policy))
        window = loaded.window if loaded is not None else None
        if window is not None and await asyncio.to_thread(snapshots.has_left_over, window):
            snapshots.drop_left_over(window)
        may_have_import = loaded is None or loaded.window is not None
        return replace(stored, imported=await self._imported(record) if may_have_import else None)

    async def open(
        self,
        record: TopicRecord,
        applied: Applied,
        *,
        without_snapshot: bool = False,
        stored: RestoredState | None = None,
    ) -> Topic:
        stored = stored or await self.load(record)
        loaded = stored.loaded
        covered_index, place = (loaded.next_index, loaded.opaque) if loaded else (0, b"")
        log = await self._logs.open(record.incarnation, covered_index, record.secret or None, place)
        if loaded is None and log.first_index > 0 and not (self._rebuild_store or without_snapshot):
            # Retention only drops what a snapshot covers.
            await log.close()
            raise error(
                "STORE_MISSING",
                f"the log of topic {record.name} begins with index {log.first_index}, but the store has no snapshot "
                "that covers what came before",
                hint="Restore log and store from one backup; or let `seqdedupe rebuild-topic` make the topic's records "
                "again from its log, which has all that is in force.",
                topic=record.name,
                first_index=log.first_index,
            )
        topic = Topic(
            record.name,
            log,
            self._store,
            stored.snapshots,
            loaded,
            applied=applied,
            random_bytes=secrets.token_bytes,
            on_state=self._on_state,
            is_standby=self._stands_by(record.name),
            window_memory=self._window_memory,
            imported=stored.imported,
            producers=stored.producers,
        )
        topic.ids.now = self._clock.now
        return topic

    async def _imported(self, record: TopicRecord) -> ImportedIds | None:
        """Return the imported window in the store. A damaged window counts as missing, because the imported file still
        contains its IDs."""
        incarnation = record.incarnation
        try:
            imported = await asyncio.to_thread(windows.load_import, self._store, incarnation)
        except DamagedError as e:
            _topic_logger.error("topic %s: its imported window cannot be read: %s", record.name, e)
            return None
        if await asyncio.to_thread(windows.has_other_imports, self._store, incarnation, imported):
            try:
                windows.keep_only_import(self._store, incarnation, imported)
            except UnavailableError as e:
                _topic_logger.warning("topic %s: what is left of an import cannot be removed now: %s", record.name, e)
        return imported

    async def check_snapshot(self, record: TopicRecord, live: TopicBase | None, loaded: Loaded | None) -> None:
        topic = live if isinstance(live, Topic) else None
        # Without the state of its topic, the contents of a log cannot be interpreted.
        lacks_state = topic is not None and topic.damage is not None and topic.damage.reason == "NO_STATE"
        if topic is not None and topic.state is not State.DRAINING and not lacks_state:
            await _check(topic.log, topic, loaded)
            return
        covered_index, place = (loaded.next_index, loaded.opaque) if loaded and loaded.opaque else (0, b"")
        log = await self._logs.open(record.incarnation, covered_index, record.secret or None, place)
        try:
            await _check(log, topic, loaded)
        finally:
            await log.close()

    async def take_over(self, topic: str, incarnations: Callable[[int], Sequence[int]], layout: Layout) -> None:
        await self._logs.take_over(topic, incarnations, layout)

    async def announce(self, whole: str) -> None:
        await self._logs.announce(whole)

    async def delete(self, *incarnations: int) -> None:
        await self._logs.delete(*incarnations)


def _check_needs_none(record: TopicRecord, policy: Policy) -> None:
    """Raise STORE_DAMAGED if a topic with this policy must have a window."""
    if policy.by_deduplication_id:
        raise error(
            "STORE_DAMAGED",
            f"the store has a snapshot of topic {record.name}, which is one of deduplication IDs, and not its window",
            hint="Run `seqdedupe rebuild-topic`, which rebuilds the topic's records from its log. Or restore a backup.",
        )


async def _check(log: Log, live: Topic | None, loaded: Loaded | None) -> None:
    window = live.window if live is not None else None
    if loaded is not None:
        if window is not None:
            raise error("INVALID_REQUEST", "snapshots of topics of deduplication IDs cannot be imported")
        await _check_belongs(log, loaded)
        return
    if window is not None and window.first_index < log.first_index:
        raise error(
            "LOG_INCOMPLETE",
            f"the log {log.place} begins with index {log.first_index}, and the topic knows the deduplication IDs from "
            f"index {window.first_index} on",
            hint="Do not rebuild this topic from the log: retention has removed messages that the rebuild needs. If "
            "the store's records are wrong, restore a backup.",
            first_index=log.first_index,
        )
    unsaid = live.producers.stated_below(log.first_index) if live is not None and log.first_index > 0 else ()
    if len(unsaid):
        raise error(
            "LOG_INCOMPLETE",
            f"the log {log.place} begins with index {log.first_index}, and does not say what is in force of "
            f"{counted(len(unsaid), 'producer')}",
            first_index=log.first_index,
        )


async def _check_belongs(log: Log, loaded: Loaded) -> None:
    """Raise an error unless the log continues from this snapshot: the log must contain the last message that the
    snapshot covers."""
    if loaded.next_index == 0:
        if log.first_index > 0:
            raise error(
                "POSITION_TRIMMED", f"the snapshot covers no message, and the log begins with index {log.first_index}",
                hint=_HINT, first_index=log.first_index,
            )  # fmt: skip
        return
    index = loaded.next_index - 1
    try:
        location = await log.locate(index)
    except PositionError as e:
        raise error(e.reason, f"the snapshot goes up to index {index}: {e.message}", hint=_HINT, index=index) from e
    if (location.message_id, location.ownership) != (loaded.message_id, loaded.ownership):
        raise error(
            "POSITION_DIVERGED", f"the snapshot goes up to index {index}, where the log has another message",
            hint=_HINT, index=index,
        )  # fmt: skip


_HINT = "Import a snapshot of this log as it is, or let seqdedupe rebuild-topic make the records again from the log."


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
            raise error(
                "TOPIC_EXISTS", what, hint=f"That topic already has this history. Use {other.name}, or delete it first."
            )
        if incarnation in self._cleaning:
            # New data would be removed together with the old data.
            raise error("STORE_UNAVAILABLE", f"the rest of the incarnation {incarnation} is still being removed")

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
        """Remove everything that a failed creation has left. If the removal fails, try again, or finish at the next
        start.

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
        LOG_REFUSED. After LOG_REFUSED, the remains still exist, or the next start finishes the removal."""
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


# -- The life of a topic.

T = TypeVar("T", bound=TopicBase)

MADE_AT_ONCE = 32
"""The number of partitions of a topic that are created at the same time. They share the syncs of disk and store."""


class Lives(Generic[T]):
    """The steps that open, create and remove topics. These steps put a topic, or the reason why the topic is not open,
    into the registry, and remove the topic from the registry. `inherited` returns the policy for a name;
    `topic_changed` is called with a topic that is open."""

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
        """Record that this record's topic exists, but cannot be used."""
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
        """Create topics, all of them or none. The caller ensures that no other caller creates the same topics.
        `partitions` has the same meaning as in their records; `layout`: see `Logs.create`."""
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
        returns, the topic serves; after an error, no part of the topic exists. `check` is called with the topic before
        the topic becomes valid. Raises the reason for a failure, and the errors of `put` and `check`."""
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
        """Delete topics, live or closed, all of them or none. `asked` is the name in the caller's request."""
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

        Users of the topics try again, and find the topics that have the names now. Raises STORE_UNAVAILABLE. After this
        error, call this method again.
        """
        topics = [topic for record in records if (topic := self._registry.topic(record.name)) is not None]
        for record in records:
            self.forget(record.name)
        for topic in topics:
            topic.has_successor = True
            await topic.close("it was deleted and created again")
        for record in records:
            await self._store.remove_topic(record.incarnation)
