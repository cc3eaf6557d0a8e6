"""The fast route's task: it reads a range, transforms it, and writes rows and position in one transaction.

It knows nothing of Spark. Whoever runs it, however often, twice at once or after a kill -9, a range takes effect once.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.message_id import MessageId, Position
from seqdedupe_spark.cluster.settings import Service
from seqdedupe_spark.columns import to_arrow
from seqdedupe_spark.dedupe import Deduplicator
from seqdedupe_spark.job.poison import first_failing, message_of_row, names_a_row, naming, naming_by_id
from seqdedupe_spark.ranges import Range
from seqdedupe_spark.reading import joined, message_id_at, read_range, read_stored
from seqdedupe_spark.stores.contract import Advance, OutputStore, Stored, StoreFactory

Transform = Callable[[pa.RecordBatch], pa.RecordBatch | None]
"""Row by row: what it makes of a message may depend on that message alone. None stands for no rows."""


class Step(NamedTuple):
    """What a round does with one topic: its range, planned in an epoch of the topic's position."""

    range: Range
    epoch: int


@dataclass(frozen=True)
class Report:
    """What became of a task. `failure` is of those that trying the task again as it is cannot cure."""

    read: int = 0
    written: int = 0
    duplicates: int = 0
    failure: SeqdedupeError | None = None


@dataclass(frozen=True)
class Output:
    """Where a job writes rows of this schema, and keeps its positions."""

    store: StoreFactory
    job: str
    table: str
    schema: pa.Schema


def all_done(steps: Sequence[Step], stored: Sequence[Stored | None]) -> bool:
    """Whether the steps have been taken already, by an earlier attempt or by another run; false if all are to be taken.

    Raises POSITION_CHANGED if another run has moved a position elsewhere, POSITION_RESET if an operator has,
    POSITION_WENT_BACK if the database is an older one than that which the steps were planned from.
    """
    done = [_is_done(step, each) for step, each in zip(steps, stored, strict=True)]
    if any(done) and not all(done):
        raise error("POSITION_CHANGED", "another run has taken some of the round's ranges, but not all")
    return all(done)


def _is_done(step: Step, stored: Stored | None) -> bool:
    span = step.range
    if stored is None or stored.epoch < step.epoch:
        raise error("POSITION_WENT_BACK", f"the position for {span.topic}, {span.start} when planned, is gone")
    position, epoch = stored
    if epoch > step.epoch:
        raise error("POSITION_RESET", f"the position for {span.topic} was reset to {position}", epoch=epoch)
    if position == span.start:
        return False
    if position.incarnation == span.incarnation and position.index >= span.end.index:
        return True
    if position.incarnation != span.incarnation or position.index > span.start.index:
        raise error("POSITION_CHANGED", f"{span} was planned, and now the position for the topic is {position}")
    raise error(
        "POSITION_WENT_BACK",
        f"{span} was planned, and now the position for the topic is {position}",
        index=position.index,
        planned_index=span.start.index,
    )


@dataclass
class _Tally:
    read: int = 0
    duplicates: int = 0
    handed: list[tuple[str, pa.Array, pa.Array]] = field(default_factory=list)
    """For every batch of rows that the store was given, the topic, the indexes and the message IDs of the messages it
    was made of."""


@dataclass(frozen=True)
class RangeTask:
    """What all tasks of the fast route have in common: pickled, and run with the steps of one transaction."""

    output: Output
    service: Service
    columns: pa.Schema
    transform: Transform | None
    deduplicate: bool
    read_timeout_seconds: float | None = None

    def run(self, steps: Sequence[Step]) -> Report:
        """Takes the steps in one transaction, unless they are taken already. The report carries what is raised."""
        try:
            with self.output.store() as store:
                return self._run(store, steps)
        except SeqdedupeError as failure:
            return Report(failure=failure)

    def _run(self, store: OutputStore, steps: Sequence[Step]) -> Report:
        job = self.output.job
        found = [store.watermarks(job, step.range.topic) for step in steps]
        if all_done(steps, [stored for stored, _ in found]):
            return Report()
        tally = _Tally()
        sources: list[Iterator[pa.RecordBatch]] = []
        advances: list[Advance] = []
        for step, (_, watermarks) in zip(steps, found, strict=True):
            if self.deduplicate:
                deduplicator = Deduplicator(watermarks)
                sources.append(self._read_once_each(step.range, deduplicator, tally))
                advances.append(Advance(step.range, step.epoch, deduplicator.changed))
            else:
                sources.append(read_range(self.service, step.range, self.columns, self.read_timeout_seconds))
                advances.append(Advance(*step))
        batches = (batch for source in sources for batch in source)
        try:
            written = store.write(job, self.output.table, self._transformed(batches, tally), advances)
        except SeqdedupeError as failure:
            if not names_a_row(failure):
                raise
            raise self._naming(failure, tally, [step.range for step in steps]) from failure
        return Report(tally.read, written, tally.duplicates)

    def _read_once_each(self, span: Range, deduplicator: Deduplicator, tally: _Tally) -> Iterator[pa.RecordBatch]:
        """The range's messages but for those that are duplicates."""
        for group in joined(read_stored(self.service, span, self.read_timeout_seconds)):
            batch = to_arrow(group, span.topic, self.columns)
            kept = [deduplicator.keep(stored) for stored in group]
            if any(rows is not None for rows in kept):
                starts = np.cumsum([0, *(len(stored) for stored in group[:-1])])
                rows = np.concatenate(
                    [
                        start + (np.arange(len(stored)) if some is None else some)
                        for start, stored, some in zip(starts, group, kept, strict=True)
                    ]
                )
                tally.read += len(batch) - len(rows)
                tally.duplicates += len(batch) - len(rows)
                batch = batch.take(pa.array(rows))
            yield batch

    def _transformed(self, batches: Iterator[pa.RecordBatch], tally: _Tally) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            tally.read += len(batch)
            rows = self._rows(batch)
            if rows is not None and len(rows):
                if rows.schema != self.output.schema:
                    raise error("INVALID_OUTPUT", f"the transformation's columns vary: {_columns(rows.schema)}")
                ids = column_of(batch, "messageId")
                tally.handed.append((_value(batch, "topic", 0), column_of(batch, "index"), ids))
                yield rows

    def _rows(self, messages: pa.RecordBatch) -> pa.RecordBatch | None:
        transform = self.transform
        if transform is None:
            return messages
        try:
            return transformed(transform, messages)
        except SeqdedupeError as failure:
            found = first_failing(lambda some: transformed(transform, some), messages)
            if found is None:
                raise
            topic, incarnation, index = (_value(messages, name, found) for name in ("topic", "incarnation", "index"))
            if index is None:
                message_id = MessageId.from_bytes(_value(messages, "messageId", found))
                raise naming_by_id(failure, topic, message_id, message_id) from failure
            raise naming(failure, topic, incarnation, index, self._find_message_id) from failure

    def _naming(self, failure: SeqdedupeError, tally: _Tally, ranges: Sequence[Range]) -> SeqdedupeError:
        """A store's failure, which says which message the row was made of. That one is read again for it."""
        batch, row = int(failure.numbers["batch"]), int(failure.numbers["row"])
        topic, indexes, ids = tally.handed[batch]
        if indexes.null_count:
            # Which of them a row was made of could be told by reading them again, up to the same indexes.
            first, last = (row, row) if self.transform is None else (0, len(ids) - 1)
            return naming_by_id(failure, topic, *(MessageId.from_bytes(ids[n].as_py()) for n in (first, last)))
        incarnation = next(one.incarnation for one in ranges if one.topic == topic)
        found = row
        if self.transform is not None:
            start = Position.before(incarnation, indexes[0].as_py())
            span = Range(topic, start, Position.before(incarnation, indexes[-1].as_py() + 1))
            read = pa.Table.from_batches(
                read_range(self.service, span, self.columns, self.read_timeout_seconds), self.columns
            )
            there = pc.is_in(column_of(read, "index"), value_set=indexes)
            (messages,) = read.filter(there).combine_chunks().to_batches()
            found = message_of_row(lambda some: len(self._rows(some) or ()), messages, row)
        return naming(failure, topic, incarnation, indexes[found].as_py(), self._find_message_id)

    def _find_message_id(self, topic: str, incarnation: int, index: int) -> MessageId:
        return message_id_at(self.service, topic, incarnation, index, self.read_timeout_seconds)


def column_of(batch: pa.RecordBatch | pa.Table, name: str) -> Any:
    """The column of messages, with the leading `__` or without it. Raises KeyError if there is none."""
    return batch.column("__" + name if "__" + name in batch.schema.names else name)


def _value(batch: pa.RecordBatch, name: str, row: int) -> Any:
    return column_of(batch, name)[row].as_py()


def transformed(transform: Transform, batch: pa.RecordBatch) -> pa.RecordBatch | None:
    """What the user's function makes of it. What that raises becomes INVALID_OUTPUT, with the line that raised it."""
    try:
        rows = transform(batch)
    except SeqdedupeError:
        raise
    except Exception as e:
        where = traceback.extract_tb(e.__traceback__)[:2][-1]
        place = f"{where.filename}:{where.lineno}"
        raise error("INVALID_OUTPUT", f"the transformation failed at {place}: {type(e).__name__}: {e}") from e
    if rows is not None and not isinstance(rows, pa.RecordBatch):
        raise error("INVALID_OUTPUT", f"the transformation returned {type(rows).__name__}, not a RecordBatch or None")
    return rows


def output_schema(transform: Transform | None, columns: pa.Schema) -> pa.Schema:
    """The columns that the transformation makes of these, as it shows with a batch of no rows.

    Raises INVALID_OUTPUT if it fails on that or returns None.
    """
    if transform is None:
        return columns
    rows = transformed(transform, pa.RecordBatch.from_pylist([], columns))
    if rows is None:
        raise error("INVALID_OUTPUT", "the transformation has to make a batch of no rows of a batch of no rows")
    return rows.schema


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
