"""Gives planning and tasks the same data as a sidecar's client, but reads it from Pulsar's brokers.

`ClusterClient` answers the questions of planning. It reads a few entries of each topic. `read_stored` reads a range, in
the process that needs the messages: `_LogReading` reads topics that a sidecar has written, and judges the entries by
the rule of terms. `StockReading` of `stock_reader` reads all other topics, entry by entry.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Self, TypeVar

import numpy as np

from seqdedupe.batch import decode
from seqdedupe.client.blocking.loop import run
from seqdedupe.client.client import Located, TopicEnds
from seqdedupe.client.connection import Backoff
from seqdedupe.client.message import StoredBatch
from seqdedupe.entry_properties import ENTRY, EntryPlace
from seqdedupe.errors import DamagedError, NotFoundError, SeqdedupeError, UnavailableError, error
from seqdedupe.format.layout import BASE_INDEX, PUBLISH_TIME_MS, ROWS
from seqdedupe.format.records import body_of, ownership
from seqdedupe.log.contract import Entries
from seqdedupe.log.pulsar import wholes
from seqdedupe.log.pulsar.admin_url import PulsarAdmin
from seqdedupe.log.pulsar.entries import PulsarEntry
from seqdedupe.log.pulsar.finder import Finder, last_of, trimmed
from seqdedupe.log.pulsar.places import begins_record, size_of
from seqdedupe.log.pulsar.reader import Collector
from seqdedupe.log.pulsar.terms import Terms, TermStanding, TermVerdict
from seqdedupe.log.pulsar.wholes import Life, Whole
from seqdedupe.message_id import MessageId, MessageIds, Position
from seqdedupe.names import number_of, whole_of
from seqdedupe.v1 import admin_pb2
from seqdedupe_spark import stock
from seqdedupe_spark.cluster.broker_connection import (
    STEP_BYTES,
    BrokerConnection,
    connected,
    next_entries,
)
from seqdedupe_spark.cluster.stock_reader import StockReading, last_readable
from seqdedupe_spark.ranges import TopicRange
from seqdedupe_spark.service import PulsarCluster
from seqdedupe_spark.stock import STOCK, StockEnds

# -- Planning.

AT_ONCE = 16
"""The number of topics that are examined at the same time."""

T = TypeVar("T")


class ClusterClient:
    """Has the methods of `seqdedupe.client.blocking.Client` that planning uses. Each call opens a separate connection.

    Every reader can determine an end of a topic, because a valid entry stays valid. More entries may follow at any
    moment. Only the owner of the topic knows these entries.
    """

    def __init__(
        self,
        cluster: PulsarCluster,
        namespaces: Collection[str],
        is_wanted: Callable[[str], bool],
        *,
        skips: bool,
        may_lose: bool,
    ) -> None:
        """Use the topics in these namespaces for which `is_wanted` returns true. `is_wanted` receives a topic's full
        name.

        A topic that no sidecar writes is skipped or read. A job reads such a topic with its subscription. Other callers
        read it only with `may_lose`.
        """
        self.admin = self
        self._cluster = cluster
        self._namespaces = namespaces
        self._is_wanted = is_wanted
        self._skips = skips
        self._may_lose = may_lose
        self._kept: dict[str, Position] = {}
        """By topic: the position from which the subscription keeps messages, as this client has set it."""
        self._readable: dict[str, tuple[MessageId, MessageId | None]] = {}
        """By the last entry of a topic: the last entry that a reader receives."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def topics(self) -> list[admin_pb2.Topic]:
        """Return the wanted topics. Raises INVALID_OPTION."""

        async def all_of(connection: BrokerConnection) -> list[admin_pb2.Topic]:
            places = asyncio.Semaphore(AT_ONCE)
            names, found = await self._names(connection.admin)
            due = {name: incarnation for whole in found for incarnation, name in whole.topics.items()}

            async def one(topic: str) -> admin_pb2.Topic | None:
                async with places:
                    # The topic may have been deleted meanwhile.
                    with suppress(NotFoundError):
                        incarnation = await connection.incarnation(topic)
                        if due.get(topic, incarnation) != incarnation:
                            # Pulsar has recreated the topic automatically: its earlier messages are lost.
                            return None
                        if incarnation != STOCK:
                            return await _listed(connection, topic)
                        if not self._skips:
                            return await self._stock(connection, topic)
                return None

            listed = [topic for topic in await asyncio.gather(*map(one, names)) if topic is not None]
            return listed + [admin_pb2.Topic(name=whole.topic, partitions=whole.partitions) for whole in found]

        return self._call(all_of)

    def ends(self, topic: str) -> TopicEnds | StockEnds:
        """Return the ends of the topic. Raises NotFoundError."""

        async def find(connection: BrokerConnection) -> TopicEnds | StockEnds:
            if await connection.is_log(topic):
                return await _looked(connection, topic, _ends)
            return await self._stock_ends(connection, topic)

        return self._call(find)

    def locate_time(self, topic: str, publish_time_ms: int) -> Located:
        async def locate(finder: Finder) -> Located:
            return Located(finder.incarnation, await finder.first_at(publish_time_ms))

        async def find(connection: BrokerConnection) -> Located:
            if await connection.is_log(topic):
                return await _looked(connection, topic, locate)
            place = stock.before(await connection.admin.first_since(topic, publish_time_ms))
            last = (await self._stock_ends(connection, topic)).last
            return Located(STOCK, min(place.index, last.index) + 1)

        return self._call(find)

    def locate_bytes(self, topic: str, from_index: int, size_bytes: int) -> Located:
        async def locate(finder: Finder) -> Located:
            before, _ = await finder.around(from_index)
            after = await finder.known_at(finder.ledgers.after(before.at + 1, size_bytes))
            return Located(finder.incarnation, max(after.standing.next_index, from_index + 1))

        return self._find(topic, locate)

    def position_at(self, topic: str, index: int) -> Position:
        """Return the position at the index. Raises PositionError, NotFoundError."""
        return self._find(topic, lambda finder: finder.position_of(index))

    def subscribe(self, topic: str) -> None:
        """Create the job's subscription of a topic that no sidecar writes. From then on Pulsar keeps all messages that
        are still stored."""
        self._call(lambda connection: connection.admin.create_subscription(topic, self._cluster.subscription))

    def keep_from(self, topic: str, position: Position) -> None:
        """Move the subscription. Pulsar keeps the entry before the position, and all later entries."""
        entry = stock.entry_before(position)
        if entry.entry_id < 0 or self._kept.get(topic) == position:
            return
        # If the subscription was removed, the next look-up creates it again.
        with suppress(NotFoundError):
            self._call(lambda connection: connection.admin.keep_from(topic, self._cluster.subscription, entry))
            self._kept[topic] = position

    async def _names(self, admin: PulsarAdmin) -> tuple[list[str], list[Whole]]:
        """Return the wanted topics, and the partitioned topics that sidecars have created, with their partitions.

        A partitioned topic has no partitions while it is being created or deleted. Partitions that Pulsar has added are
        ignored.
        """
        names, found = list[str](), list[Whole]()
        for namespace in self._namespaces:
            wanted = [name for name in await admin.topics(namespace) if self._is_wanted(name)]
            of_wanted = {whole_of(name) for name in wanted}
            looked = {
                topic: await wholes.look_at(admin, topic)
                for topic in await admin.partitioned_topics(namespace)
                if topic in of_wanted or self._is_wanted(topic)
            }
            found += [whole for whole in looked.values() if whole is not None and whole.life is Life.MADE]
            for name in wanted:
                whole = looked.get(whole_of(name) or "")
                if whole is None or (whole.life is Life.MADE and number_of(name) < whole.partitions):
                    names.append(name)
        return names, found

    async def _stock(self, connection: BrokerConnection, topic: str) -> admin_pb2.Topic:
        if not self._cluster.subscription and not self._may_lose:
            raise error(
                "INVALID_OPTION",
                f"topic: no sidecar writes {topic}, and without a subscription Pulsar drops unread messages",
                hint="Read it with a reader job, which has a subscription, or set failOnDataLoss to false.",
            )
        size_bytes = (await connection.stored(topic)).ledgers.size_bytes
        return admin_pb2.Topic(name=topic, log_bytes=size_bytes)

    async def _stock_ends(self, connection: BrokerConnection, topic: str) -> StockEnds:
        found = await connection.stored(topic)
        ledgers = found.ledgers
        if not len(ledgers):
            return found
        last = ledgers.message_id(len(ledgers) - 1)
        if self._readable.get(topic, (None, None))[0] != last:
            self._readable[topic] = last, await last_readable(connection, topic, ledgers)
        readable = self._readable[topic][1]
        number = None if readable is None else ledgers.ordinal(readable)
        return replace(found, readable=0 if number is None else number + 1)

    def _find(self, topic: str, find: Callable[[Finder], Awaitable[T]]) -> T:
        async def found(connection: BrokerConnection) -> T:
            return await _looked(connection, topic, find)

        return self._call(found)

    def _call(self, call: Callable[[BrokerConnection], Awaitable[T]]) -> T:
        async def connect_and_call() -> T:
            async with connected(self._cluster) as connection:
                return await call(connection)

        return run(connect_and_call)


async def _listed(connection: BrokerConnection, topic: str) -> admin_pb2.Topic:
    async def look(finder: Finder) -> admin_pb2.Topic:
        first_index, last = await _ends(finder)
        return admin_pb2.Topic(
            name=topic,
            state=admin_pb2.TOPIC_STATE_SERVING,
            first_index=first_index,
            last=last.to_proto(),
            log_bytes=finder.ledgers.size_bytes,
        )

    return await _looked(connection, topic, look)


async def _ends(finder: Finder) -> TopicEnds:
    end, beginning = await finder.end(), await finder.beginning()
    last = end.last or Position.before(finder.incarnation, end.standing.next_index)
    return TopicEnds(beginning.standing.next_index, last)


async def _looked(connection: BrokerConnection, topic: str, find: Callable[[Finder], Awaitable[T]]) -> T:
    """Call `find` with the current state of a topic, and return the result. Raises TOPIC_NOT_FOUND."""
    incarnation = await connection.incarnation(topic)
    finder = await connection.finder(topic, incarnation)
    while True:
        try:
            return await find(finder)
        except DamagedError:
            # Entries that were trimmed meanwhile are no damage.
            before, finder = finder, await connection.finder(topic, incarnation)
            if before.ledgers.first_id == finder.ledgers.first_id:
                raise


# -- Reading a range.


def read_stored(cluster: PulsarCluster, span: TopicRange, timeout_seconds: float | None) -> Iterator[StoredBatch]:
    """Do the same as `seqdedupe_spark.range_reader.read_stored`. The rule of terms decides which of a sidecar's entries
    are valid."""
    reading = StockReading(span, cluster.tells_keys) if span.incarnation == STOCK else _LogReading(span)
    steps = _read_on(cluster, span, reading, timeout_seconds)
    try:
        while (step := run(lambda: anext(steps, None))) is not None:
            yield from step
    finally:
        run(steps.aclose)


async def _read_on(
    cluster: PulsarCluster, span: TopicRange, reading: "StockReading | _LogReading", timeout_seconds: float | None
) -> AsyncGenerator[Sequence[StoredBatch], None]:
    """Yield the messages of the range. After a temporary failure, try again from the place that was reached."""
    backoff, heard = Backoff(0.05, 5.0), time.monotonic()
    while not reading.is_done:
        try:
            async with connected(cluster) as connection, aclosing(reading.steps(connection)) as steps:
                async for step in steps:
                    yield step
                    backoff, heard = Backoff(0.05, 5.0), time.monotonic()
        except UnavailableError as e:
            delay = backoff.next_seconds()
            if timeout_seconds is not None and time.monotonic() + delay - heard > timeout_seconds:
                what = f"no message of {span} has come for {timeout_seconds:g} seconds"
                raise error("UNREACHABLE", f"{what}: {e.message}", hint=e.hint) from e
            await asyncio.sleep(delay)


class _LogReading:
    """The progress of reading a range of a topic that a sidecar writes. Reading can continue from this progress with
    another connection. `StockReading` is the same for other topics."""

    def __init__(self, span: TopicRange) -> None:
        self._span = span
        self._next_index = span.first_index
        self._at: MessageId | None = None
        """The last valid entry that was read."""
        self._standing: TermStanding | None = None
        """The state of the terms after that entry."""

    @property
    def is_done(self) -> bool:
        return self._next_index >= self._span.stop_index

    async def steps(self, connection: BrokerConnection) -> AsyncGenerator[list[StoredBatch], None]:
        topic, stop_index = self._span.topic, self._span.stop_index
        finder = await connection.finder_of(topic, self._span.incarnation)
        start, standing = await self._start(finder)
        reader = await connection.open_reader(topic, start, finder.ledgers)
        collector: Collector | None = None
        failure: DamagedError | None = None
        seen, size_bytes = start, 0
        try:
            while failure is None and (collector is None or collector.terms.next_index < stop_index):
                for entry in await next_entries(reader, topic):
                    if collector is None:
                        is_known = start == self._at == entry.message_id
                        after = start if is_known else finder.ledgers.before(start)
                        collector = Collector(Terms(standing or self._standing_before(entry, start), after))
                        if is_known:
                            continue
                    if size_bytes >= STEP_BYTES and begins_record(entry.message):
                        yield self._taken(collector, seen)
                        size_bytes = 0
                    try:
                        await collector.add_over_borders(entry, partial(connection.admin.ledgers, topic))
                    except DamagedError as e:
                        failure = e
                        break
                    seen = entry.message_id
                    size_bytes += size_of(entry.message)
                    if collector.terms.next_index >= stop_index:
                        break
        finally:
            await reader.close()
        if collector is not None:
            yield self._taken(collector, seen)
        if failure is not None:
            raise await self._explained(connection, failure)

    async def _start(self, finder: Finder) -> tuple[MessageId, TermStanding | None]:
        """Return the entry at which to begin, and the state of the terms before it. The state is None if the entry
        itself contains it."""
        if self._at is not None and finder.ledgers.ordinal(self._at) is not None:
            return self._at, self._standing
        position = self._span.start
        if self._at is None and position.message_id is not None:
            entry = position.message_id._replace(batch_index=-1)
            if finder.ledgers.ordinal(entry) is not None:
                return entry, None
        at, beginning, _ = await finder.beginning()
        if at + 1 < len(finder.ledgers) and beginning.next_index == self._next_index:
            return finder.ledgers.message_id(at + 1), beginning
        before, _ = await finder.around(self._next_index)
        return finder.ledgers.message_id(before.at + 1), before.standing

    def _standing_before(self, entry: PulsarEntry, start: MessageId) -> TermStanding:
        """Return the state of the terms before the entry that contains the start position. If the entry contains the
        start position, the entry is valid."""
        position = self._span.start
        place = EntryPlace.parse(entry.message.properties.get(ENTRY, ""))
        if entry.message_id != start or place is None or not _holds(entry, place, position):
            found = f"{entry.message_id} of {self._span.topic} is not the message of the position {position}"
            raise error("POSITION_DIVERGED", found)
        return TermStanding(*place[:3])

    def _taken(self, collector: Collector, seen: MessageId) -> list[StoredBatch]:
        """Return the collected messages that belong to the range."""
        entries, span, first_index = collector.take(), self._span, self._next_index
        self._at, self._standing = seen, collector.terms.standing
        self._next_index = max(first_index, collector.terms.next_index)
        return [] if entries is None else list(_batches(entries, first_index, span.stop_index, span.incarnation))

    async def _explained(self, connection: BrokerConnection, failure: DamagedError) -> SeqdedupeError:
        """Return the error for a failure. If Pulsar has trimmed the messages, or the topic was recreated, the failure
        is not damage."""
        span = self._span
        finder = await connection.finder_of(span.topic, span.incarnation)
        first_index = (await finder.beginning()).standing.next_index
        return trimmed(span.topic, self._next_index, first_index) if first_index > self._next_index else failure


def _holds(entry: PulsarEntry, place: EntryPlace, position: Position) -> bool:
    """Return whether an entry, if it is valid, contains the message of a position."""
    terms = Terms(TermStanding(*place[:3]))
    last = last_of(entry, terms.standing) if terms.judge(entry.message, entry.message_id) is TermVerdict.VALID else None
    return (
        last is not None
        and place.owner.incarnation == position.incarnation
        and position.ownership in (0, place.owner.ownership)
        and place.index <= position.index < terms.next_index
    )


def _batches(entries: Entries, first_index: int, stop_index: int, incarnation: int) -> Iterator[StoredBatch]:
    """Yield the batches among stored entries, cut to these indexes."""
    for places, runs in zip(entries.table, entries.runs, strict=True):
        base_index = int(places[BASE_INDEX])
        first, stop = max(first_index - base_index, 0), min(stop_index - base_index, int(places[ROWS]))
        if first >= stop:
            continue
        batch, ids = decode(body_of(entries.raw, places)), MessageIds.of(runs)
        if stop - first < len(batch):
            batch, ids = batch.take(np.arange(first, stop)), ids.cut(first, stop)
        yield StoredBatch(batch, base_index + first, int(places[PUBLISH_TIME_MS]), incarnation, ownership(places), ids)
