"""Reading a range of a topic from its brokers, in the process that needs its messages."""

from collections.abc import AsyncGenerator, Iterator
from functools import partial

import numpy as np

from seqdedupe.batch import decode
from seqdedupe.client.blocking.loop import run
from seqdedupe.client.stored import StoredBatch
from seqdedupe.entry_properties import ENTRY, Place
from seqdedupe.errors import DamagedError, SeqdedupeError, error
from seqdedupe.format.columns import BASE_INDEX, PUBLISH_TIME_MS, ROWS
from seqdedupe.format.records import body_of, ownership
from seqdedupe.log.contract import Entries
from seqdedupe.log.pulsar.collecting import Collector
from seqdedupe.log.pulsar.entries import Entry
from seqdedupe.log.pulsar.finder import Finder, last_of, trimmed
from seqdedupe.log.pulsar.places import begins_record, size_of
from seqdedupe.log.pulsar.terms import Standing, Terms, Verdict
from seqdedupe.message_id import MessageId, Position
from seqdedupe.message_ids import MessageIds
from seqdedupe_spark.cluster import task
from seqdedupe_spark.cluster.connection import Connection, next_entries
from seqdedupe_spark.cluster.settings import Cluster
from seqdedupe_spark.cluster.stock import StockTask
from seqdedupe_spark.cluster.task import Task, queue_entries
from seqdedupe_spark.ranges import Range
from seqdedupe_spark.stock import STOCK


def read_stored(cluster: Cluster, span: Range, timeout_seconds: float | None) -> Iterator[StoredBatch]:
    """As `seqdedupe_spark.reading.read_stored`. A sidecar's entries are judged by the rule of terms."""
    is_stock = span.incarnation == STOCK
    reading = StockTask(span, timeout_seconds, cluster.tells_keys) if is_stock else _LogTask(span, timeout_seconds)
    steps = reading.steps(cluster)
    try:
        while (step := run(lambda: anext(steps, None))) is not None:
            yield from step
    finally:
        run(steps.aclose)


class _LogTask(Task):
    """How far a range of a topic that a sidecar writes was read."""

    def __init__(self, span: Range, timeout_seconds: float | None) -> None:
        super().__init__(span, timeout_seconds)
        self._next_index = span.first_index
        self._at: MessageId | None = None
        """The last valid entry that was read."""
        self._standing: Standing | None = None
        """How the topic stands after it."""

    @property
    def is_done(self) -> bool:
        return self._next_index >= self._span.stop_index

    async def _read(self, connection: Connection) -> AsyncGenerator[list[StoredBatch], None]:
        topic, stop_index = self._span.topic, self._span.stop_index
        finder = await connection.finder_of(topic, self._span.incarnation)
        start, standing = await self._start(finder)
        reader = await connection.open_reader(topic, start, queue_entries(finder.ledgers))
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
                    if size_bytes >= task.STEP_BYTES and begins_record(entry.message):
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

    async def _start(self, finder: Finder) -> tuple[MessageId, Standing | None]:
        """The entry at which to begin; how the topic stands before it, or None if it says so itself."""
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

    def _standing_before(self, entry: Entry, start: MessageId) -> Standing:
        """Before the entry of the position after which to read: it is valid, if it is the one."""
        position = self._span.start
        place = Place.parse(entry.message.properties.get(ENTRY, ""))
        if entry.message_id != start or place is None or not _holds(entry, place, position):
            found = f"{entry.message_id} of {self._span.topic} is not the message of the position {position}"
            raise error("POSITION_DIVERGED", found)
        return Standing(*place[:3])

    def _taken(self, collector: Collector, seen: MessageId) -> list[StoredBatch]:
        """What was collected, as far as it is of the range."""
        entries, span, first_index = collector.take(), self._span, self._next_index
        self._at, self._standing = seen, collector.terms.standing
        self._next_index = max(first_index, collector.terms.next_index)
        return [] if entries is None else list(_batches(entries, first_index, span.stop_index, span.incarnation))

    async def _explained(self, connection: Connection, failure: DamagedError) -> SeqdedupeError:
        """What is missing because Pulsar has trimmed it is no damage; nor is a topic that was made anew."""
        span = self._span
        finder = await connection.finder_of(span.topic, span.incarnation)
        first_index = (await finder.beginning()).standing.next_index
        return trimmed(span.topic, self._next_index, first_index) if first_index > self._next_index else failure


def _holds(entry: Entry, place: Place, position: Position) -> bool:
    """Whether an entry, if it is valid, holds the message of a position."""
    terms = Terms(Standing(*place[:3]))
    last = last_of(entry, terms.standing) if terms.judge(entry.message, entry.message_id) is Verdict.VALID else None
    return (
        last is not None
        and place.owner.incarnation == position.incarnation
        and position.ownership in (0, place.owner.ownership)
        and place.index <= position.index < terms.next_index
    )


def _batches(entries: Entries, first_index: int, stop_index: int, incarnation: int) -> Iterator[StoredBatch]:
    """The batches among stored entries, cut to these indexes."""
    for places, runs in zip(entries.table, entries.runs, strict=True):
        base_index = int(places[BASE_INDEX])
        first, stop = max(first_index - base_index, 0), min(stop_index - base_index, int(places[ROWS]))
        if first >= stop:
            continue
        batch, ids = decode(body_of(entries.raw, places)), MessageIds.of(runs)
        if stop - first < len(batch):
            batch, ids = batch.take(np.arange(first, stop)), ids.cut(first, stop)
        yield StoredBatch(batch, base_index + first, int(places[PUBLISH_TIME_MS]), incarnation, ownership(places), ids)
