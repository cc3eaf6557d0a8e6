"""Topics with a log that is no attached broker's: opened from their log and their snapshot."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Container
from dataclasses import replace

from seqdedupe.core.id_runs import ImportedIds
from seqdedupe.errors import DamagedError, PositionError, UnavailableError, error
from seqdedupe.log.contract import AS_USUAL, Layout, Log, LogName, Logs
from seqdedupe.store import imported_run as stored_import
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.store.topics import LogKind, TopicRecord
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.clock import Clock
from seqdedupe.topic.control import decode_policy
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.stored import Stored
from seqdedupe.topic.topic import Topic
from seqdedupe.topic.window_runs import WindowMemory

logger = logging.getLogger("seqdedupe.topic")


class PublishedTopics:
    """A `TopicKind`. `on_state` is told each change of a topic's state; `rebuild_store`: snapshots may be missing.

    `stands_by` says of a topic whether it is followed, and taken over by itself, while another sidecar owns it.
    `clock` is for topics of deduplication IDs; without it they forget nothing by time."""

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

    async def load(self, record: TopicRecord) -> Stored:
        snapshots = Snapshots(self._store, record.incarnation)
        stored = await asyncio.to_thread(Stored.load, snapshots)
        loaded = stored.loaded
        if loaded is not None and loaded.window is None and loaded.policy:
            _check_needs_none(record, decode_policy(loaded.policy))
        window = loaded.window if loaded is not None else None
        if window is not None and await asyncio.to_thread(snapshots.has_left_over, window):
            snapshots.drop_left_over(window)
        may_have_import = loaded is None or loaded.window is not None
        return replace(stored, imported=await self._imported(record) if may_have_import else None)

    async def open(
        self, record: TopicRecord, applied: Applied, *, without_snapshot: bool = False, stored: Stored | None = None
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
                "anew from its log, which tells all that is in force.",
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
        """What the store has of an imported window. What is damaged is as good as missing: the file has it."""
        incarnation = record.incarnation
        try:
            imported = await asyncio.to_thread(stored_import.load, self._store, incarnation)
        except DamagedError as e:
            logger.error("topic %s: its imported window cannot be read: %s", record.name, e)
            return None
        if await asyncio.to_thread(stored_import.has_other_runs, self._store, incarnation, imported):
            try:
                stored_import.keep_only(self._store, incarnation, imported)
            except UnavailableError as e:
                logger.warning("topic %s: what is left of an import cannot be removed now: %s", record.name, e)
        return imported

    async def check_snapshot(self, record: TopicRecord, live: TopicBase | None, loaded: Loaded | None) -> None:
        topic = live if isinstance(live, Topic) else None
        # Without the state of its topic a log cannot say what stands there.
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

    async def announce(self, whole: str) -> None:
        await self._logs.announce(whole)

    async def delete(self, *incarnations: int) -> None:
        await self._logs.delete(*incarnations)


def _check_needs_none(record: TopicRecord, policy: Policy) -> None:
    """Raises STORE_DAMAGED if a topic of this policy cannot be without a window."""
    if policy.by_deduplication_id:
        raise error(
            "STORE_DAMAGED",
            f"the store has a snapshot of topic {record.name}, which is one of deduplication IDs, and not its window",
            hint="Let `seqdedupe rebuild-topic` make the topic's records anew from its log; or restore a backup.",
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
            first_index=log.first_index,
        )
    unsaid = live.producers.stated_below(log.first_index) if live is not None and log.first_index > 0 else ()
    if len(unsaid):
        raise error(
            "LOG_INCOMPLETE",
            f"the log {log.place} begins with index {log.first_index}, and does not say what is in force of "
            f"{len(unsaid)} producers",
            first_index=log.first_index,
        )


async def _check_belongs(log: Log, loaded: Loaded) -> None:
    """Whether the log goes on from this snapshot: it holds the last message that the snapshot covers."""
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


_HINT = "Import a snapshot of this log as it is, or let seqdedupe rebuild-topic make the records anew from the log."
