"""All topics of the sidecar: from the store and the logs on disk to live topics, and back."""

import asyncio
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from broker_sidecar.config import Config
from seqdedupe.errors import SeqdedupeError, UnavailableError, error
from seqdedupe.format.records import SECRET_BYTES
from seqdedupe.log.contract import LogName, Logs
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.names import topic_name
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.store.topics import TopicRecord, TopicState
from seqdedupe.topic.publishing import State, Topic

logger = logging.getLogger("seqdedupe.topics")

MB = 1024 * 1024
MILLISECONDS_A_MINUTE = 60_000
EXIT_FATAL = 70
"""Exit status when the log can no longer be trusted: recovery at the next start decides."""


def _clock_ms() -> int:
    return time.time_ns() // 1_000_000


def _fatal(why: str) -> None:
    # At once: whatever would still run could acknowledge what is not on the disk.
    logger.critical("the sidecar ends: %s", why)
    logging.shutdown()
    os._exit(EXIT_FATAL)


class Topics:
    """The live topics by full name. `on_state` is told when a topic's state changes or it goes."""

    def __init__(
        self, config: Config, on_state: Callable[[str, State | None], None], *, rebuild_store: bool = False
    ) -> None:
        self._config = config
        self._on_state = on_state
        self._live: dict[str, Topic] = {}
        self._records: dict[str, TopicRecord] = {}
        self._creating: dict[str, asyncio.Task[Topic]] = {}
        self._changing_record = asyncio.Lock()
        self._rebuild_store = rebuild_store
        data = Path(config.data_directory)
        size = config.default_retention_size_in_mb
        minutes = config.default_retention_time_in_minutes
        self._store = Store.open(data / "store")
        self._logs: Logs = EmbeddedLogs(
            data / "logs",
            clock_ms=_clock_ms,
            fatal=_fatal,
            retention_size_bytes=None if size < 0 else size * MB,
            retention_time_ms=None if minutes < 0 else minutes * MILLISECONDS_A_MINUTE,
        )
        self.is_draining = False

    # -- start and end -----------------------------------------------------------------------------------------

    async def open_all(self) -> None:
        """Opens the store and every log. Raises `DamagedError`: the sidecar must not serve then."""
        known = {record.incarnation for record in self._store.topics()}
        for log in await self._logs.list():
            if log.incarnation not in known:
                await self._orphan(log)
        records = self._store.topics()
        of_name = Counter(record.name for record in records)
        for record in records:
            # A creation that failed, and could not be undone then, may have been followed by one that did not.
            failed = record.state is TopicState.CREATING and of_name[record.name] > 1
            try:
                if failed or record.state is TopicState.DELETING:
                    of_name[record.name] -= 1
                    await self._finish_delete(record)
                else:
                    await self._open_topic(record)
            except UnavailableError as e:
                if record.state is TopicState.ACTIVE:
                    raise
                # On a full disk. The others can be read meanwhile; the next start finishes it.
                logger.warning("making or deleting topic %s cannot be finished now: %s", record.name, e)

    async def recover_all(self) -> None:
        """Recovers every topic. Raises `DamagedError`.

        A topic whose log cannot be written now goes on trying by itself, beside this.
        """
        await asyncio.gather(*(topic.recover() for topic in self._live.values()))
        if self._rebuild_store:
            # So that the next start needs no rebuilding.
            await asyncio.gather(*(topic.snapshot_in_background() for topic in self._live.values()))

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

    async def _open_topic(self, record: TopicRecord) -> Topic:
        if record.state is TopicState.CREATING:
            await self._logs.create(record.incarnation, record.name, secrets.token_bytes(SECRET_BYTES))
            record = replace(record, state=TopicState.ACTIVE)
            await self._store.put_topic(record)
        snapshots = Snapshots(self._store, record.incarnation)
        loaded = await asyncio.to_thread(snapshots.load)
        log = await self._logs.open(record.incarnation, loaded.next_index if loaded else 0)
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
        topic = Topic(
            record.name,
            log,
            self._store,
            snapshots,
            loaded,
            deduplicate=record.deduplication_enabled,
            entries_interval=self._config.deduplication_entries_interval,
            random_bytes=secrets.token_bytes,
            on_state=self._topic_changed,
        )
        self._live[record.name] = topic
        self._records[record.name] = record
        self._topic_changed(topic)
        return topic

    def _topic_changed(self, topic: Topic) -> None:
        logger.info("topic %s is %s%s", topic.name, topic.state.name, f": {topic.why}" if topic.why else "")
        self._on_state(topic.name, topic.state)

    async def take_time_snapshots(self) -> None:
        """Takes a snapshot of every topic with news, every `deduplication_snapshot_interval_seconds`, for ever."""
        seconds = self._config.deduplication_snapshot_interval_seconds
        while seconds:
            await asyncio.sleep(seconds)
            for topic in list(self._live.values()):
                if topic.confirmed_index > topic.snapshot_index and topic.state is State.SERVING:
                    await topic.snapshot_in_background()

    async def drain(self) -> None:
        """Takes nothing more; settles what is in flight; durable snapshots. Reading goes on until `close`."""
        self.is_draining = True
        await asyncio.gather(*(topic.drain() for topic in self._live.values()))

    async def close(self) -> None:
        """Lets go of files, locks and threads."""
        await self._logs.close()
        await asyncio.to_thread(self._store.close)

    # -- topics ------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The full names of all topics, sorted."""
        return sorted(self._live)

    def get(self, name: str) -> Topic:
        """The live topic. Raises INVALID_TOPIC_NAME, TOPIC_NOT_FOUND."""
        full = topic_name(name)
        topic = self._live.get(full)
        if topic is None:
            raise error("TOPIC_NOT_FOUND", f"there is no topic {full}", topic=full)
        return topic

    async def get_or_create(self, name: str) -> Topic:
        """The live topic, made if it is not there and `allow_auto_topic_creation` says so."""
        full = topic_name(name)
        if full not in self._live and self._config.allow_auto_topic_creation:
            return await self.create(full, exists_ok=True)
        return self.get(full)

    async def create(self, name: str, *, deduplicate: bool = True, exists_ok: bool = False) -> Topic:
        """Makes a topic; returns when it serves. Raises INVALID_TOPIC_NAME, TOPIC_EXISTS, TOO_MANY_TOPICS."""
        full = topic_name(name)
        if self.is_draining:
            raise error("DRAINING", "the sidecar is shutting down")
        if full in self._creating and exists_ok:
            return await asyncio.shield(self._creating[full])
        if full in self._live or full in self._creating:
            if exists_ok:
                return self._live[full]
            raise error("TOPIC_EXISTS", f"the topic {full} is there already", topic=full)
        if len(self._live) + len(self._creating) >= self._config.max_topics:
            raise error(
                "TOO_MANY_TOPICS",
                f"there are {len(self._live)} topics: max_topics allows no more",
                max_topics=self._config.max_topics,
            )
        task = asyncio.ensure_future(self._create(full, deduplicate))
        self._creating[full] = task
        task.add_done_callback(lambda _: self._creating.pop(full))
        return await asyncio.shield(task)

    async def _create(self, full: str, deduplicate: bool) -> Topic:
        incarnation = self._store.next_incarnation(time.time_ns() // 1000)
        record = TopicRecord(full, incarnation, TopicState.CREATING, deduplicate)
        await self._store.put_topic(record)
        try:
            topic = await self._open_topic(record)
            await topic.recover()
            topic.check_serving()
            return topic
        except SeqdedupeError:
            if broken := self._live.pop(full, None):
                await broken.delete()
            await self._finish_delete(record)
            raise

    async def delete(self, name: str) -> None:
        """Deletes a topic for good. Raises TOPIC_NOT_FOUND."""
        async with self._changing_record:
            topic = self.get(name)
            record = replace(self._records[topic.name], state=TopicState.DELETING)
            await self._store.put_topic(record)
            del self._live[topic.name]
        await topic.delete()
        await self._finish_delete(record)
        self._on_state(topic.name, None)

    async def _finish_delete(self, record: TopicRecord) -> None:
        await self._logs.delete(record.incarnation)
        await self._store.remove_topic(record.incarnation)
        left = self._records.get(record.name)
        if left is not None and left.incarnation == record.incarnation:
            del self._records[record.name]

    async def set_deduplication(self, name: str, enabled: bool) -> Topic:
        """Switches a topic's deduplication; durable on return, and in force between two frames."""
        async with self._changing_record:
            topic = self.get(name)
            record = replace(self._records[topic.name], deduplication_enabled=enabled)
            await self._store.put_topic(record)
            self._records[topic.name] = record
            topic.deduplicate = enabled
            return topic
