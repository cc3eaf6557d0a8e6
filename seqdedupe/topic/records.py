"""Records of topics in the store: written, put right where a write failed, removed with what they stand for."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.store.db import Store
from seqdedupe.store.topics import TopicRecord, TopicState
from seqdedupe.topic.base import TopicBase
from seqdedupe.topic.tasks import again_until

logger = logging.getLogger("seqdedupe.topics")


class Records:
    """`delete_logs` removes the logs of incarnations; `in_background` runs what goes on beside the caller."""

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
        """Incarnations of which what is left is being removed."""
        self._unwritten: dict[str, SeqdedupeError] = {}
        """Names whose record could not be written: the store may have it all the same, and it is being put right."""

    def check_written(self, name: str) -> None:
        """Raises STORE_UNAVAILABLE while what was begun with a name is being undone."""
        if why := self._unwritten.get(name):
            raise error("STORE_UNAVAILABLE", f"what was begun with topic {name} is still being undone: {why.message}")

    def check_is_free(self, incarnation: int, known: Iterable[TopicRecord]) -> None:
        """Raises INVALID_REQUEST, TOPIC_EXISTS, STORE_UNAVAILABLE if no topic can be made anew as this incarnation.

        `known` are records that the store may not have yet.
        """
        if not 0 < incarnation <= time.time_ns() // 1000:
            raise error("INVALID_REQUEST", f"no topic can have been made at {incarnation}, the snapshot's incarnation")
        if other := next((r for r in chain(self._store.topics(), known) if r.incarnation == incarnation), None):
            raise error("TOPIC_EXISTS", f"the topic {other.name} has the incarnation {incarnation} of the snapshot")
        if incarnation in self._cleaning:
            # What comes now would go with what was there before.
            raise error("STORE_UNAVAILABLE", f"what is left of the incarnation {incarnation} is still being removed")

    async def write(
        self, topics: Sequence[TopicBase], records: Sequence[TopicRecord], in_force: Sequence[TopicRecord]
    ) -> None:
        """Makes the new records of live topics durable, all in one write. Raises STORE_UNAVAILABLE.

        Then the store may have them all the same, and at the next start they would be in force. So the topics take
        nothing until the records that are in force have been written again.
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
        """A creation has failed: nothing of it is left, also if that has to be tried again, or at the next start.

        The names stay taken until the store says so: there must never be two records of one.
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
        """Removes what is left of a topic that nobody uses, whose record says DELETING. Raises STORE_UNAVAILABLE,
        LOG_REFUSED: then it is not done, or the next start finishes it."""
        await self._store.put_topics(record)
        await self._delete_logs(record.incarnation)
        await self._store.remove_topic(record.incarnation)

    async def clean_up(self, *records: TopicRecord) -> None:
        """Removes what is left of a topic, or of all partitions of one, whose records say DELETING.

        What cannot be removed now is tried again.
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
