"""The PySpark data source `seqdedupe`: it reads a topic's messages into a DataFrame, as a batch or as a stream. It also
contains the sink.

Begin with `SeqdedupeDataSource`, which Spark creates. The file first defines the offsets that a streaming query stores
in its checkpoint. The readers and the delay of triggers follow after `SeqdedupeDataSource`.
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from seqdedupe.errors import InvalidRequestError, NotFoundError, PositionError, SeqdedupeError, error
from seqdedupe.message_id import Position
from seqdedupe_spark.message_columns import columns_of, to_arrow
from seqdedupe_spark.options import (
    NO_LIMITS,
    TURNED_ROUND,
    Least,
    Options,
    SinkOptions,
    check_shows_no_secret,
    of_table,
    parse,
    parse_sink,
)
from seqdedupe_spark.planning import Loss, PlanningClient, TopicListing, open_client
from seqdedupe_spark.range_reader import joined, read_range, read_stored
from seqdedupe_spark.ranges import TopicRange, packed, split
from seqdedupe_spark.row_layout import layout_of
from seqdedupe_spark.sink import BatchWriter, Began, SinkTask, StreamWriter, began, now

# -- The offsets of a streaming query. Spark keeps them in a checkpoint, and returns them to plan a batch, or to plan it
# again.
#
# An offset is a position for each topic, after the last message of the batch: `{"TOPIC": "POSITION"}`. If the batch is
# the first to read a topic, `"starts"` has the position before its first message, in the same form. Spark logs only the
# ends of batches. To repeat its first batch it asks for the start once more. By then, `latest`, a time, or the first
# remaining message may be a different place.

Offsets = dict[str, Any]

_STARTS = "starts"
"""The key for the starts. No topic has this name, because topics have full names here."""

NOTHING_YET: Offsets = {_STARTS: None}
"""The offset before the first batch. The start of the first batch is in the batch's own offset."""


def as_texts(positions: Mapping[str, Position]) -> dict[str, str]:
    return {topic: str(position) for topic, position in sorted(positions.items())}


def offset_after(before: Offsets, ends: Mapping[str, Position], starts: Mapping[str, Position]) -> Offsets:
    """Return the offset of a batch after `before`. The batch reads up to `ends`. It reads the topics in `starts` for
    the first time, from these positions. If there is nothing new, return `before`: Spark then runs no batch."""
    if before != NOTHING_YET and not starts and ends == positions_in(before):
        return before
    return as_texts(ends) | ({_STARTS: as_texts(starts)} if starts else {})


def positions_in(offset: Offsets) -> dict[str, Position]:
    """Return the query's positions in the topics that it has read. Raises INVALID_POSITION."""
    return _parsed({topic: text for topic, text in offset.items() if topic != _STARTS})


def starts_in(before: Offsets, offset: Offsets) -> dict[str, Position]:
    """Return the start positions in the offsets of a batch, by topic. The result omits topics for which the offsets
    contain no start. Raises INVALID_POSITION."""
    return _parsed(offset.get(_STARTS) or {}) | positions_in(before)


def _parsed(texts: Mapping[str, str]) -> dict[str, Position]:
    try:
        return {topic: Position.parse(text) for topic, text in texts.items()}
    except InvalidRequestError as e:
        what = f"the checkpoint's offsets are not from this source: {e.message}"
        raise error("INVALID_POSITION", what, hint="Start the query with its own checkpoint, or with a new one.") from e


NAME = "seqdedupe"

_OPTIONS = "seqdedupe.options"
"""A key in the metadata of a table's first column. Spark passes no other part of CREATE TABLE to the reader."""

_log = logging.getLogger(__name__)


class SeqdedupeDataSource(DataSource):
    """`format("seqdedupe")` of `spark.read`, `spark.readStream`, `DataFrame.write` and `DataFrame.writeStream`.

    Raises ConfigurationError (INVALID_OPTION) for invalid options, before anything is read or written.
    """

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        schema = from_arrow_schema(_all_columns(parse(self.options)))
        if given := of_table(self.options):
            check_shows_no_secret(given)
            schema.fields[0].metadata = {_OPTIONS: given}
        return schema

    def _parsed(self, schema: StructType) -> Options:
        """Return the options. For a table, combine the options with which the table was created, and the options of the
        query."""
        given: dict[str, str] = next(
            (field.metadata[_OPTIONS] for field in schema if _OPTIONS in (field.metadata or {})), {}
        )
        return parse(given | dict(self.options))

    def reader(self, schema: StructType) -> "BatchReader":
        options = self._parsed(schema)
        if options.limits != NO_LIMITS or options.least is not None:
            names = "maxOffsetsPerTrigger, maxBytesPerTrigger, minOffsetsPerTrigger and maxTriggerDelay"
            raise error("INVALID_OPTION", f"{names} are for streams: a batch reads everything")
        return BatchReader(options, wanted_columns(schema, options))

    def streamReader(self, schema: StructType) -> "StreamReader":  # noqa: N802
        options = self._parsed(schema)
        if options.ending is not None:
            raise error("INVALID_OPTION", "endingOffsets and endingTime are for batches: a stream has no end")
        return StreamReader(options, wanted_columns(schema, options))

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        try:
            options = parse_sink(self.options)
            since = now() if options.checkpoint is None else began(options.checkpoint)
            return BatchWriter(_sink_task(options, schema, overwrite, since))
        except SeqdedupeError as e:
            # Spark shows the traceback: the important line should not come after many unimportant ones.
            raise e.with_traceback(None) from None

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        # Spark calls it for every batch, and once more to commit it.
        try:
            options = parse_sink(self.options)
            return StreamWriter(_sink_task(options, schema, overwrite, began(options.checkpoint)))
        except SeqdedupeError as e:
            raise e.with_traceback(None) from None


def _sink_task(options: SinkOptions, schema: StructType, overwrite: bool, since: Began) -> SinkTask:
    if overwrite:
        raise error("INVALID_OPTION", "a topic can only be appended to: use mode('append') or outputMode('append')")
    task = SinkTask(options.service, layout_of(schema, options.topic), since, options.fail_on_forgotten_ids)
    task.check_topic()
    return task


def _all_columns(options: Options) -> pa.Schema:
    return columns_of(options.pulsar_columns, options.plain_column_names)


def wanted_columns(schema: StructType, options: Options) -> pa.Schema:
    """Return the columns that Spark expects for a schema: a selection of columns by name, with the types of this data
    source.

    Raises ConfigurationError (INVALID_OPTION) that names a column that is unknown or has a different type.
    """
    known = from_arrow_schema(_all_columns(options))
    if not schema.fields:
        raise error("INVALID_OPTION", f"schema: it has no column; the columns are {', '.join(known.names)}")
    for field in schema.fields:
        if field.name not in known.names:
            raise error(
                "INVALID_OPTION", f"schema: there is no column {field.name}; the columns are {', '.join(known.names)}"
            )
        kind = known[field.name].dataType
        if field.dataType != kind:
            named = f"{field.dataType.simpleString()}, it should be {kind.simpleString()}"
            raise error("INVALID_OPTION", f"schema: column {field.name} is {named}")
    return to_arrow_schema(schema, timezone="UTC")


class _Reading:
    """The base class of both readers. Spark pickles a reader for every task, so the reader contains no connection."""

    def __init__(self, options: Options, schema: pa.Schema) -> None:
        self.options = options
        self.schema = schema
        self._told: set[str] = set()

    def client(self) -> PlanningClient:
        options = self.options
        return open_client(options.service, options.selection, may_lose=not options.fail_on_data_loss)

    def ranges(
        self, listing: TopicListing, starts: Mapping[str, Position], ends: Mapping[str, Position]
    ) -> list[TopicRange]:
        """Return the ranges between the positions. Omit messages that are no longer stored."""
        ranges = []
        for topic, end in ends.items():
            start = starts[topic]
            if start.is_same(end):
                continue
            first, last = self._left(listing, topic, start), self._left(listing, topic, end)
            if first is None or last is None:
                continue
            if first.incarnation != last.incarnation:
                raise error("POSITION_OF_ANOTHER_INCARNATION", f"{topic} was recreated during planning: try again")
            if first.index < last.index:
                ranges.append(listing.range(topic, first, last))
            elif (first, last) == (start, end) and len(listing.range(topic, end, start)):
                what = f"in {topic} the start, after {start}, is behind the end, after {end}"
                raise error("INVALID_OPTION", f"there is nothing to read: {what}", hint=TURNED_ROUND)
        return split(ranges, self.options.min_partitions, self.options.max_records_per_partition)

    def _left(self, listing: TopicListing, topic: str, position: Position) -> Position | None:
        """Return the position. After an accepted data loss, return the position from which messages are still stored;
        None if there are none."""
        loss = listing.find_loss(topic, position)
        if loss is None:
            return position
        self.accept(loss)
        return loss.next

    def tasks(self, ranges: list[TopicRange]) -> list[InputPartition]:
        """Return a task for each range. Small ranges share tasks."""
        options = self.options
        parts = packed([len(one) for one in ranges], options.min_partitions, options.max_records_per_partition)
        return [InputPartition([ranges[number] for number in part]) for part in parts]

    def accept(self, loss: Loss) -> None:
        """If data loss is accepted, report the skipped messages once. Otherwise raise the loss as an error."""
        if self.options.fail_on_data_loss or not loss.may_be_accepted:
            raise loss.error()
        if loss.message not in self._told:
            self._told.add(loss.message)
            _log.warning("failOnDataLoss is false, so reading continues: %s", loss.message)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a task's ranges. If there is no task, Spark passes None."""
        ranges: list[TopicRange] = partition.value or []
        for one in ranges:
            if self.options.fail_on_data_loss:
                yield from read_range(self.options.service, one, self.schema, self.options.read_timeout_seconds)
            else:
                yield from self._read_what_is_left(one)

    def _read_what_is_left(self, range: TopicRange) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a range. Skip the messages that are lost while the range is read."""
        start: Position | None = range.start
        options = self.options
        while start is not None and start.incarnation == range.incarnation and start.index < range.end.index:
            try:
                left = replace(range, start=start)
                for stored in joined(read_stored(options.service, left, options.read_timeout_seconds)):
                    start = stored[-1].position(len(stored[-1]) - 1)
                    yield to_arrow(stored, range.topic, self.schema)
            except (PositionError, NotFoundError):
                with self.client() as client:
                    found = TopicListing(client).look(range.topic, start)
                if not isinstance(found, Loss):
                    raise
                self.accept(found)
                start = found.next


class BatchReader(_Reading, DataSourceReader):
    """Reads all messages between two places, which are resolved once."""

    def partitions(self) -> list[InputPartition]:
        options = self.options
        with self.client() as client:
            listing = TopicListing(client)
            names = listing.select(options.selection)
            if not names:
                raise error("TOPIC_NOT_FOUND", f"topicsPattern: no topic matches {options.selection.pattern}")
            starts = listing.resolve(names, options.starting or "earliest", "startingOffsets")
            ends = listing.resolve(names, options.ending or "latest", "endingOffsets")
            return self.tasks(self.ranges(listing, starts, ends))


@dataclass
class Delaying:
    """The delay of triggers. The delay is not stored in the checkpoint: after a restart, the first trigger of a query
    reads all existing messages."""

    least: Least
    taken_at_seconds: float = -math.inf
    """The time when a trigger last read messages."""

    def waits(self, messages: int, now_seconds: float) -> bool:
        """Return whether a trigger postpones this number of messages. If the trigger reads the messages instead, record
        this."""
        if messages < self.least.messages and now_seconds - self.taken_at_seconds < self.least.delay_seconds:
            return True
        if messages:
            self.taken_at_seconds = now_seconds
        return False


class StreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads from the query's position to the end of the topics, repeatedly. The comments at `Offsets` describe the
    offsets."""

    def __init__(self, options: Options, schema: pa.Schema) -> None:
        super().__init__(options, schema)
        self._stops: dict[str, Position] | None = None
        self._ends: dict[str, Position] = {}
        self._delaying = None if options.least is None else Delaying(options.least)

    def initialOffset(self) -> Offsets:  # noqa: N802
        return NOTHING_YET

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        limits = self.options.limits
        if limits.messages is not None:
            return ReadMaxRows(limits.messages)
        if limits.size_bytes is not None:
            return ReadMaxBytes(limits.size_bytes)
        return ReadAllAvailable() if self.options.least is None else ReadMinRows(self.options.least.messages)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._stops = {}

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:  # noqa: N802
        before = positions_in(start)
        ranges = []
        with self.client() as client:
            listing = TopicListing(client)
            names = listing.select(self.options.selection, known=before)
            new = self._starts_of_new(listing, [name for name in names if name not in before], start)
            ends = before | new
            for topic in names:
                found = listing.look(topic, ends[topic])
                if isinstance(found, Loss):
                    self.accept(found)
                    ends[topic] = found.next or ends[topic]
                    continue
                self._ends[topic] = found
                if (stop := self._stop(topic, found)).index > ends[topic].index:
                    ranges.append(listing.range(topic, ends[topic], stop))
            # With the trigger `once` everything is read, for any options.
            is_limited = not isinstance(limit, ReadAllAvailable)
            if is_limited and self._waits(sum(map(len, ranges))):
                ranges = []
            ranges = listing.within(ranges, self.options.limits if is_limited else NO_LIMITS)
        return offset_after(start, ends | {range.topic: range.end for range in ranges}, new)

    def _starts_of_new(self, listing: TopicListing, names: list[str], start: Offsets) -> dict[str, Position]:
        """Return the starts in topics that the query has not read yet. A topic that is found later begins at its
        earliest message."""
        place = (self.options.starting or "latest") if start == NOTHING_YET else "earliest"
        return listing.resolve(names, place, "startingOffsets")

    def _waits(self, messages: int) -> bool:
        """Return whether to postpone this number of messages to a later trigger. With `availableNow` this is never so,
        because there may be no later trigger with more messages."""
        if self._delaying is None or self._stops is not None:
            return False
        return self._delaying.waits(messages, time.monotonic())

    def _stop(self, topic: str, end: Position) -> Position:
        """Return the end at which to stop. With the trigger `availableNow` this is the end that the topic had when it
        was first seen."""
        if self._stops is None:
            return end
        stop = self._stops.get(topic)
        if stop is None or stop.incarnation != end.incarnation:
            stop = self._stops[topic] = end
        return stop

    def reportLatestOffset(self) -> dict[str, str] | None:  # noqa: N802
        return as_texts(self._ends) or None

    def partitions(self, start: Offsets, end: Offsets) -> list[InputPartition]:
        starts, ends = starts_in(start, end), positions_in(end)
        for topic in ends.keys() - starts.keys():
            starts[topic] = self._unsaid_start(topic, ends[topic].incarnation, start)
        with self.client() as client:
            return self.tasks(self.ranges(TopicListing(client), starts, ends))

    def _unsaid_start(self, topic: str, incarnation: int, start: Offsets) -> Position:
        """Return the start of a topic in a batch that an older version planned without recording the start. The start
        was the earliest message, or the place that the options meant at that moment."""
        if start == NOTHING_YET and self.options.starting != "earliest":
            raise error(
                "INVALID_POSITION",
                f"the checkpoint, written by an older version, does not contain the first batch's start in {topic}",
                hint="No batch of this checkpoint is complete. Start with a new checkpoint, and set startingOffsets.",
            )
        return Position.start(incarnation)
