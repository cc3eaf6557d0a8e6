"""Topics whose logs are a broker's own: nothing but the store's records and snapshots."""

import asyncio
import time
from collections.abc import Callable

from seqdedupe.log.contract import LogName
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.store.topics import LogKind, TopicRecord
from seqdedupe.topic.attached import AttachedTopic
from seqdedupe.topic.policy import Applied


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

    async def list(self) -> list[LogName]:
        return []

    async def make(self, record: TopicRecord, applied: Applied) -> AttachedTopic:
        return await self.open(record, applied)

    async def open(self, record: TopicRecord, applied: Applied) -> AttachedTopic:
        snapshots = Snapshots(self._store, record.incarnation)
        return AttachedTopic(
            record.name,
            record.incarnation,
            self._store,
            snapshots,
            await asyncio.to_thread(snapshots.load),
            applied=applied,
            admission_timeout_seconds=self._admission_timeout_seconds,
            now_seconds=time.monotonic,
            on_state=self._on_state,
        )

    async def delete(self, incarnation: int) -> None:
        """Its log is none of ours."""
