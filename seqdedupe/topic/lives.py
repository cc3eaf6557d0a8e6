"""The beginning and the end of topics: records, logs and live topics in step, of several topics all or none."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from seqdedupe.errors import error
from seqdedupe.format.tag import SECRET_BYTES
from seqdedupe.names import whole_of
from seqdedupe.shards import shard_of
from seqdedupe.store.db import Store
from seqdedupe.store.topics import LogKind, TopicRecord, TopicState
from seqdedupe.topic.closed import Closed
from seqdedupe.topic.kind import TopicKind
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.records import Records
from seqdedupe.topic.state import State, TopicBase

T = TypeVar("T", bound=TopicBase)

MADE_AT_ONCE = 32
"""Of the partitions of a topic: they share the syncs of disk and store."""


class Lives(Generic[T]):
    """Puts what it has made into `live` and `records`, and takes it out, also of `closed`. `inherited` is the policy of
    a name."""

    def __init__(
        self,
        store: Store,
        kind: TopicKind[T],
        stored: Records,
        live: dict[str, T],
        closed: dict[str, Closed],
        records: dict[str, TopicRecord],
        inherited: Callable[[str], Applied],
        on_state: Callable[[str, State | None], None],
    ) -> None:
        self._store = store
        self._kind = kind
        self._stored = stored
        self._live = live
        self._closed = closed
        self._records = records
        self._inherited = inherited
        self._on_state = on_state

    async def make(self, names: list[str], policy: Policy, partitions: int = 0, entry_format: str = "") -> list[T]:
        """Makes topics that nobody else makes, all of them or none; `partitions` as in their records, `entry_format` as
        in `Logs.create`."""
        now_us = time.time_ns() // 1000
        is_own = self._kind.log is LogKind.EMBEDDED
        secret_bytes = SECRET_BYTES if is_own else 0
        records = [
            TopicRecord(
                name,
                # Those of a cluster's partitions follow each other.
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
            await self._make_all(records, policy, entry_format, made)
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

    async def take_in(self, record: TopicRecord, put: Callable[[], Awaitable[None]], check: Callable[[T], None]) -> T:
        """Makes a topic of a log and a snapshot, which `put` puts where they belong: it serves, or nothing of it is
        there. `check` is given it before it counts. Raises why it does not, and what these raise."""
        topic: T | None = None
        try:
            await self._store.put_topics(record)
            await put()
            topic = await self._kind.open(record, self._inherited(record.name))
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
        self._records[topic.name] = record
        self._live[topic.name] = topic
        topic.inherit(self._inherited(topic.name))
        self._on_state(topic.name, topic.state)

    async def _make_all(
        self, records: Sequence[TopicRecord], policy: Policy, entry_format: str, made: dict[str, T]
    ) -> None:
        """Makes the logs of these topics and opens them, into `made`; returns or raises when nothing is under way."""
        left = list(reversed(records))

        async def some() -> None:
            try:
                while left:
                    record = left.pop()
                    made[record.name] = await self._kind.make(record, self._inherited(record.name), entry_format)
                    if policy != Policy():
                        await made[record.name].set_policy(policy)
            finally:
                # After a failure no others are begun.
                left.clear()

        # In a cluster the partitions of a topic are made in order.
        at_once = 1 if self._kind.log.is_shared else MADE_AT_ONCE
        ends = await asyncio.gather(*(some() for _ in range(min(at_once, len(records)))), return_exceptions=True)
        for end in ends:
            if end is not None:
                raise end

    async def remove(self, names: list[str], asked: str) -> None:
        """Deletes topics, live or closed, all of them or none. `asked` is what they are to whoever asks."""
        topics = [self._live[name] for name in names if name in self._live]
        for topic in topics:
            topic.hold(error("DRAINING", f"topic {asked} is being deleted"))
        records = [self._records[name] for name in names]
        deleting = [replace(record, state=TopicState.DELETING) for record in records]
        await self._stored.write(topics, deleting, records)
        try:
            await asyncio.gather(*(topic.delete() for topic in topics))
        finally:
            for name in names:
                self._live.pop(name, None)
                self._closed.pop(name, None)
                del self._records[name]
                self._on_state(name, None)
        await self._stored.clean_up(*deleting)

    async def leave(self, records: Sequence[TopicRecord]) -> None:
        """Forgets topics, live or closed, whose logs are gone, and whose names others have; nothing else is deleted.

        Whoever uses one comes again, and finds what has its name now. Raises STORE_UNAVAILABLE: then it is to be done
        again.
        """
        topics = [self._live[record.name] for record in records if record.name in self._live]
        for record in records:
            for some in (self._live, self._closed, self._records):
                some.pop(record.name, None)
            self._on_state(record.name, None)
        for topic in topics:
            topic.has_successor = True
            await topic.close("it was deleted and made anew")
        for record in records:
            await self._store.remove_topic(record.incarnation)
