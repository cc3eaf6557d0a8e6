"""The two kinds of topics, by their logs. The directory of topics uses a kind to create, open, check and delete topics.

`PublishedTopics` are opened from a log of this project and a snapshot. `BrokersTopics` have only the store's records
and snapshots.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from seqdedupe.core.id_runs import ImportedIds
from seqdedupe.errors import DamagedError, PositionError, UnavailableError, error
from seqdedupe.figures import counted
from seqdedupe.log.contract import AS_USUAL, Layout, Log, LogName, Logs
from seqdedupe.store import windows
from seqdedupe.store.db import Store
from seqdedupe.store.parts import LogKind, TopicRecord
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.topic.attached import AttachedTopic
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.clock import Clock
from seqdedupe.topic.control import decode_policy
from seqdedupe.topic.keeper import RestoredState
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.topic import Topic
from seqdedupe.topic.window_runs import WindowMemory

# -- The operations that the directory of topics needs of a kind of log: topics on it, and the list of logs.

T_co = TypeVar("T_co", bound=TopicBase, covariant=True)


class TopicKind(Protocol[T_co]):
    """Topics on one kind of log."""

    log: LogKind

    async def list(self, without: Container[str] = ()) -> list[LogName]:
        """Return the logs that exist. See `Logs.list`."""

    async def make(self, record: TopicRecord, applied: Applied, layout: Layout = AS_USUAL) -> T_co:
        """Create a topic on a new log and return it, ready for use. It inherits this policy. `layout`: see
        `Logs.create`.

        Raises the reason for a failure; then the caller must `delete` the log.
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
        """Return a topic on an existing log. It inherits this policy. `without_snapshot`: the topic need not have a
        snapshot. `stored` is the result of an earlier `load`, if there was one.

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
        """Remove these logs, as far as they exist. None of them may be open. See `Logs.delete`."""


# -- Topics whose logs are a broker's own: nothing but the store's records and snapshots.


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
                "INVALID_REQUEST", why, hint="Import a snapshot; or delete the topic, and let the broker replay."
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


logger = logging.getLogger("seqdedupe.topic")


class PublishedTopics:
    """A `TopicKind` for logs of this project. `on_state` is called at each change of state. `rebuild_store`: snapshots
    may be missing.

    `stands_by` returns whether the process follows a topic that another sidecar owns, and takes it over automatically.
    `clock` is for topics of deduplication IDs; without it these topics forget nothing by time.
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
        """Return the imported window in the store. If it is damaged, it counts as missing, because the imported file
        still contains it."""
        incarnation = record.incarnation
        try:
            imported = await asyncio.to_thread(windows.load_import, self._store, incarnation)
        except DamagedError as e:
            logger.error("topic %s: its imported window cannot be read: %s", record.name, e)
            return None
        if await asyncio.to_thread(windows.has_other_imports, self._store, incarnation, imported):
            try:
                windows.keep_only_import(self._store, incarnation, imported)
            except UnavailableError as e:
                logger.warning("topic %s: what is left of an import cannot be removed now: %s", record.name, e)
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
            hint="Let `seqdedupe rebuild-topic` make the topic's records again from its log; or restore a backup.",
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
