"""Reads a topic's range from the topic's brokers, in the process that needs the messages.

Begin with `read_stored`. `_LogReading` reads topics that a sidecar has written, and judges the entries by the rule of
terms. `StockReading` of `stock_reader` reads all other topics, entry by entry.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Protocol

import numpy as np

from seqdedupe.batch import decode
from seqdedupe.client.blocking.loop import run
from seqdedupe.client.connection import Backoff
from seqdedupe.client.message import StoredBatch
from seqdedupe.entry_properties import ENTRY, EntryPlace
from seqdedupe.errors import DamagedError, SeqdedupeError, UnavailableError, error
from seqdedupe.format.columns import BASE_INDEX, PUBLISH_TIME_MS, ROWS
from seqdedupe.format.records import body_of, ownership
from seqdedupe.log.contract import Entries
from seqdedupe.log.pulsar.entries import PulsarEntry
from seqdedupe.log.pulsar.finder import Finder, last_of, trimmed
from seqdedupe.log.pulsar.places import begins_record, size_of
from seqdedupe.log.pulsar.reader import Collector
from seqdedupe.log.pulsar.terms import Terms, TermStanding, TermVerdict
from seqdedupe.message_id import MessageId, MessageIds, Position
from seqdedupe_spark.cluster.broker_connection import (
    STEP_BYTES,
    BrokerConnection,
    connected,
    next_entries,
)
from seqdedupe_spark.cluster.stock_reader import StockReading
from seqdedupe_spark.ranges import TopicRange
from seqdedupe_spark.service import PulsarCluster
from seqdedupe_spark.stock import STOCK


class RangeReading(Protocol):
    """The progress of reading a range. Reading can continue from this progress with another connection."""

    @property
    def is_done(self) -> bool:
        """Whether all of the range was read."""

    def steps(self, connection: BrokerConnection, /) -> AsyncGenerator[Sequence[StoredBatch], None]:
        """Yield the messages that are still to be read. Raises UnavailableError for temporary failures."""


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
    cluster: PulsarCluster, span: TopicRange, reading: RangeReading, timeout_seconds: float | None
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
    """The progress of reading a range of a topic that a sidecar writes."""

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
        beginning = (await finder.beginning()).standing
        if len(finder.ledgers) and beginning.next_index == self._next_index:
            return finder.ledgers.message_id(0), beginning
        before, _ = await finder.around(self._next_index)
        return finder.ledgers.message_id(before.at + 1), before.standing

    def _standing_before(self, entry: PulsarEntry, start: MessageId) -> TermStanding:
        """Return the state of the terms before the entry that contains the start position. If the entry is the right
        one, it is valid."""
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
