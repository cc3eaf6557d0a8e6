"""Topics whose log is the sidecar's own: opened from their log and their snapshot."""

import asyncio
import secrets
from collections.abc import Callable

from seqdedupe.errors import error
from seqdedupe.log.contract import LogName, Logs
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.store.topics import LogKind, TopicRecord
from seqdedupe.topic.policy import Applied
from seqdedupe.topic.publishing import Topic


class PublishedTopics:
    """A `TopicKind`. `on_state` is told each change of a topic's state; `rebuild_store`: snapshots may be missing."""

    log = LogKind.EMBEDDED

    def __init__(
        self,
        store: Store,
        logs: Logs,
        *,
        on_state: Callable[[Topic], None],
        rebuild_store: bool = False,
    ) -> None:
        self._store = store
        self._logs = logs
        self._on_state = on_state
        self._rebuild_store = rebuild_store

    async def list(self) -> list[LogName]:
        return await self._logs.list()

    async def make(self, record: TopicRecord, applied: Applied) -> Topic:
        await self._logs.create(record.incarnation, record.name, record.secret)
        topic = await self.open(record, applied)
        try:
            await topic.recover()
            topic.check_serving()
        except Exception:
            await topic.delete()
            raise
        return topic

    async def open(self, record: TopicRecord, applied: Applied) -> Topic:
        snapshots = Snapshots(self._store, record.incarnation)
        loaded = await asyncio.to_thread(snapshots.load)
        log = await self._logs.open(record.incarnation, loaded.next_index if loaded else 0, record.secret or None)
        if loaded is None and log.first_index > 0 and not self._rebuild_store:
            # Retention only drops what a snapshot covers.
            await log.close()
            raise error(
                "STORE_MISSING",
                f"the log of topic {record.name} begins with index {log.first_index}, but the store has no snapshot "
                "that covers what came before",
                topic=record.name,
                first_index=log.first_index,
            )
        return Topic(
            record.name,
            log,
            self._store,
            snapshots,
            loaded,
            applied=applied,
            random_bytes=secrets.token_bytes,
            on_state=self._on_state,
        )

    async def delete(self, incarnation: int) -> None:
        await self._logs.delete(incarnation)
