"""Topics whose logs are a broker's own: nothing but the store's records and snapshots."""

import asyncio
import time
from collections.abc import Callable, Container

from seqdedupe.errors import error
from seqdedupe.log.contract import AS_USUAL, Layout, LogName
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.store.topics import LogKind, TopicRecord
from seqdedupe.topic.attached import AttachedTopic
from seqdedupe.topic.base import TopicBase
from seqdedupe.topic.policy import Applied
from seqdedupe.topic.stored import Stored


class BrokersTopics:
    """A `TopicKind`. `on_state` is told each change of a topic's state."""

    log = LogKind.BROKER

    def __init__(
        self,
        store: Store,
        *,
        admission_timeout_seconds: float,
        on_state: Callable[[AttachedTopic], None],
    ) -> None:
        self._store = store
        self._admission_timeout_seconds = admission_timeout_seconds
        self._on_state = on_state

    async def list(self, without: Container[str] = ()) -> list[LogName]:
        return []

    async def make(self, record: TopicRecord, applied: Applied, layout: Layout = AS_USUAL) -> AttachedTopic:
        return await self.open(record, applied)

    async def load(self, record: TopicRecord) -> Stored:
        return await asyncio.to_thread(Stored.load, Snapshots(self._store, record.incarnation))

    async def open(
        self, record: TopicRecord, applied: Applied, *, without_snapshot: bool = False, stored: Stored | None = None
    ) -> AttachedTopic:
        stored = stored or await self.load(record)
        return AttachedTopic(
            record.name,
            record.incarnation,
            self._store,
            stored.snapshots,
            stored.loaded,
            applied=applied,
            admission_timeout_seconds=self._admission_timeout_seconds,
            now_seconds=time.monotonic,
            on_state=self._on_state,
            producers=stored.producers,
        )

    async def check_snapshot(self, record: TopicRecord, live: TopicBase | None, loaded: Loaded | None) -> None:
        if loaded is None:
            why = "the log is a broker's own: there is nothing here to make the records anew from"
            raise error(
                "INVALID_REQUEST", why, hint="Import a snapshot; or delete the topic, and let the broker replay."
            )
        if live is not None and loaded.next_index < live.keeper.snapshot_index:
            # The broker was told that it may drop what stands before that.
            why = f"the snapshot covers {loaded.next_index} entries, the one in the store {live.keeper.snapshot_index}"
            raise error("POSITION_TRIMMED", why, hint="Import a newer snapshot.")

    async def announce(self, whole: str) -> None:
        """There are no partitions."""

    async def delete(self, *incarnations: int) -> None:
        """Its log is none of ours."""
