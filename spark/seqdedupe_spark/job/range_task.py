"""A job's task: it reads a range, transforms it, and writes rows and position in one transaction.

It knows nothing of Spark. Whoever runs it, however often, twice at once or after a kill -9, a range takes effect once.
Begin with `RangeTask._run`. Below the task stands how the message is found that a refusal is about.
"""

import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seqdedupe.databases.failures import ended
from seqdedupe.errors import SeqdedupeError, UnavailableError, error
from seqdedupe.message_id import MessageId, Position
from seqdedupe_spark.dedupe import Deduplicator
from seqdedupe_spark.job.dead_letter_rows import SUFFIX, DeadLetterRows, Key
from seqdedupe_spark.message_columns import column_of, to_arrow
from seqdedupe_spark.planning import patiently
from seqdedupe_spark.range_reader import joined, message_id_at, read_range, read_stored
from seqdedupe_spark.ranges import TopicRange
from seqdedupe_spark.service import Service
from seqdedupe_spark.stores.contract import Advance, Beside, OutputStore, Stored, StoreFactory, Take, Watermarks

Transform = Callable[[pa.RecordBatch], pa.RecordBatch | None]
"""Row by row: what it makes of a message may depend on that message alone. None stands for no rows."""


class RangeStep(NamedTuple):
    """What a round does with one topic: its range, planned in an epoch of the topic's position."""

    range: TopicRange
    epoch: int


@dataclass(frozen=True)
class TaskReport:
    """What became of a task. `failure` is of those that trying the task again as it is cannot cure."""

    read: int = 0
    written: int = 0
    duplicates: int = 0
    dead_letters: int = 0
    failure: SeqdedupeError | None = None


@dataclass(frozen=True)
class JobOutput:
    """Where a job writes rows of this schema, and keeps its positions."""

    store: StoreFactory
    job: str
    table: str
    schema: pa.Schema


def all_done(steps: Sequence[RangeStep], stored: Sequence[Stored | None]) -> bool:
    """Whether the steps have been taken already, by an earlier attempt or by another run; false if all are to be taken.

    Raises POSITION_CHANGED if another run has moved a position elsewhere, POSITION_RESET if an operator has,
    POSITION_WENT_BACK if the database is an older one than that which the steps were planned from.
    """
    done = [_is_done(step, each) for step, each in zip(steps, stored, strict=True)]
    if any(done) and not all(done):
        raise error("POSITION_CHANGED", "another run has taken some of the round's ranges, but not all")
    return all(done)


def _is_done(step: RangeStep, stored: Stored | None) -> bool:
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
    dead: DeadLetterRows | None = None
    """None: none are kept."""
    read: int = 0
    duplicates: int = 0
    handed: list[tuple[str, pa.Array, pa.Array]] = field(default_factory=list)
    """For every batch of rows that the store was given, the topic, the indexes and the message IDs of the messages it
    was made of."""


@dataclass(frozen=True)
class RangeTask:
    """What all tasks of a job have in common: pickled, and run with the steps of one transaction."""

    output: JobOutput
    service: Service
    columns: pa.Schema
    transform: Transform | None
    deduplicate: bool
    read_timeout_seconds: float | None = None
    max_dead_letters: int | None = None
    """So many messages of a transaction that cannot be written are put aside; None: the first one is an error."""

    def run(self, steps: Sequence[RangeStep]) -> TaskReport:
        """Takes the steps in one transaction, unless they are taken already. The report carries what is raised."""
        try:
            with self.output.store() as store:
                return self._run(store, steps)
        except SeqdedupeError as failure:
            return TaskReport(failure=failure)

    def _run(self, store: OutputStore, steps: Sequence[RangeStep]) -> TaskReport:
        """Takes the steps, however often that was tried before:

        1. What the store has decides whether somebody has taken them.
        2. The ranges are read, transformed and written with their new positions, in one transaction.
        3. If the store refuses and names no row, the row is looked for. If the statement or the connection was ended,
           that is tried once more first: a message is to blame only if it is so again, on a database that does other
           work.
        4. The message that the row was made of is named. As a dead letter it goes aside, and 2. is done again without
           it; otherwise it is the error.
        """
        job = self.output.job
        # 1.
        found = [store.watermarks(job, step.range.topic) for step in steps]
        if all_done(steps, [stored for stored, _ in found]):
            return TaskReport()
        known = [watermarks for _, watermarks in found]
        dead = None if self.max_dead_letters is None else DeadLetterRows(job, self.max_dead_letters)
        has_ended = False
        while True:
            # 2.
            tally = _Tally(dead)
            try:
                return self._write(store, steps, known, tally)
            except SeqdedupeError as e:
                failure, is_ended = e, not names_a_row(e) and e.__cause__ is not None and ended(e.__cause__)
            # 3.
            if is_ended:
                positions = patiently(partial(store.positions, job))
                if all_done(steps, [positions.get(step.range.topic) for step in steps]):
                    # It was lost in the commit.
                    return TaskReport()
                if not has_ended:
                    has_ended = True
                    continue
            if not names_a_row(failure):
                if not is_ended and failure.reason != "INVALID_OUTPUT":
                    raise failure
                tally = _Tally(dead)
                failure = self._refused(store, steps, known, tally, failure, ended=is_ended)
            # 4.
            named, key = self._naming(failure, tally, [step.range for step in steps])
            if dead is None or key is None or len(dead.refused) >= dead.most:
                raise named from failure
            dead.refused[key] = named
            if is_ended:
                dead.ended.add(key)
            has_ended = False

    def _refused(
        self,
        store: OutputStore,
        steps: Sequence[RangeStep],
        watermarks: Sequence[Watermarks],
        tally: _Tally,
        failure: SeqdedupeError,
        *,
        ended: bool,
    ) -> SeqdedupeError:
        """The failure that names a row, for one that names none: all is read again, and rows are tried by halves.
        Raises the failure itself if no row is the cause."""
        rows, _ = self._source(steps, watermarks, tally)
        with store.trial(self.output.table) as take:

            def take_patiently(some: pa.RecordBatch) -> SeqdedupeError | None:
                why = patiently(lambda: take(some))
                if isinstance(why, UnavailableError):
                    # Before the next rows are tried the database, which may start again now, does other work.
                    patiently(partial(store.positions, self.output.job))
                return why

            found = find_refused(take_patiently, rows, ended=ended)
        if found is None:
            raise failure
        return found

    def _write(
        self, store: OutputStore, steps: Sequence[RangeStep], watermarks: Sequence[Watermarks], tally: _Tally
    ) -> TaskReport:
        rows, advances = self._source(steps, watermarks, tally)
        table = self.output.table
        if tally.dead is None:
            written = store.write(self.output.job, table, rows, advances)
            return TaskReport(tally.read, written, tally.duplicates)
        written = store.write(self.output.job, table, rows, advances, Beside(table + SUFFIX, tally.dead.rows))
        return TaskReport(tally.read, written, tally.duplicates, len(tally.dead))

    def _source(
        self, steps: Sequence[RangeStep], watermarks: Sequence[Watermarks], tally: _Tally
    ) -> tuple[Iterator[pa.RecordBatch], list[Advance]]:
        """The rows of the steps' messages, and how the positions move when all are taken."""
        sources: list[Iterator[pa.RecordBatch]] = []
        advances: list[Advance] = []
        for step, known in zip(steps, watermarks, strict=True):
            if self.deduplicate:
                deduplicator = Deduplicator(known)
                sources.append(self._read_once_each(step.range, deduplicator, tally))
                advances.append(Advance(step.range, step.epoch, deduplicator.changed))
            else:
                sources.append(read_range(self.service, step.range, self.columns, self.read_timeout_seconds))
                advances.append(Advance(*step))
        if tally.dead is not None:
            tally.dead.begin()
        return self._transformed((batch for source in sources for batch in source), tally), advances

    def _read_once_each(self, span: TopicRange, deduplicator: Deduplicator, tally: _Tally) -> Iterator[pa.RecordBatch]:
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
            for messages, rows in self._made_of(batch, tally):
                if rows is not None and len(rows):
                    if rows.schema != self.output.schema:
                        raise error("INVALID_OUTPUT", f"the transformation's columns vary: {_columns(rows.schema)}")
                    ids = column_of(messages, "messageId")
                    tally.handed.append((_value(messages, "topic", 0), column_of(messages, "index"), ids))
                    yield rows

    def _made_of(
        self, messages: pa.RecordBatch, tally: _Tally
    ) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch | None]]:
        """Messages, and the rows that the transformation makes of them. Those that it fails on are put aside, if they
        may be."""
        if tally.dead is not None:
            messages = tally.dead.bury_refused(messages)
        while True:
            try:
                yield messages, self._rows(messages)
                return
            except SeqdedupeError as failure:
                found = first_failing(self._rows, messages)
                if found is None:
                    raise
                named = self._naming_one(failure, messages, found)
                if tally.dead is None:
                    raise named from failure
                tally.dead.bury(messages, found, named)
            before, messages = messages.slice(0, found), messages.slice(found + 1)
            yield before, self._rows(before)

    def _rows(self, messages: pa.RecordBatch) -> pa.RecordBatch | None:
        return messages if self.transform is None else transformed(self.transform, messages)

    def _naming_one(self, failure: SeqdedupeError, messages: pa.RecordBatch, row: int) -> SeqdedupeError:
        topic, incarnation, index = (_value(messages, name, row) for name in ("topic", "incarnation", "index"))
        if index is None:
            message_id = MessageId.from_bytes(_value(messages, "messageId", row))
            return naming_by_id(failure, topic, message_id, message_id)
        return naming(failure, topic, incarnation, index, self._find_message_id)

    def _naming(
        self, failure: SeqdedupeError, tally: _Tally, ranges: Sequence[TopicRange]
    ) -> tuple[SeqdedupeError, Key | None]:
        """A store's failure, which says which message the row was made of, and that message; None if it may be one of
        several. It is read again for it."""
        batch, row = int(failure.numbers["batch"]), int(failure.numbers["row"])
        topic, indexes, ids = tally.handed[batch]
        if indexes.null_count:
            # Which of them a row was made of could be told by reading them again, up to the same indexes.
            first, last = (row, row) if self.transform is None else (0, len(ids) - 1)
            named = naming_by_id(failure, topic, *(MessageId.from_bytes(ids[n].as_py()) for n in (first, last)))
            return named, (topic, ids[first].as_py()) if first == last else None
        incarnation = next(one.incarnation for one in ranges if one.topic == topic)
        found = row
        if self.transform is not None:
            start = Position.before(incarnation, indexes[0].as_py())
            span = TopicRange(topic, start, Position.before(incarnation, indexes[-1].as_py() + 1))
            read = pa.Table.from_batches(
                read_range(self.service, span, self.columns, self.read_timeout_seconds), self.columns
            )
            there = pc.is_in(column_of(read, "index"), value_set=indexes)
            (messages,) = read.filter(there).combine_chunks().to_batches()
            made_of = message_of_row(self._rows, messages, row)
            if made_of is None:
                return naming_none(failure, topic, indexes[0].as_py(), indexes[-1].as_py()), None
            found = made_of
        named = naming(failure, topic, incarnation, indexes[found].as_py(), self._find_message_id)
        return named, (topic, ids[found].as_py())

    def _find_message_id(self, topic: str, incarnation: int, index: int) -> MessageId:
        return message_id_at(self.service, topic, incarnation, index, self.read_timeout_seconds)


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


# -- Which message a refusal is about.

FindMessageId = Callable[[str, int, int], MessageId]
"""Of a topic and its incarnation, the message ID at an index."""


MAX_SUSPECTS = 1000
"""Rows that a table refuses, each alone: of more of them the table is the cause, not a message."""


class _Suspect(NamedTuple):
    batch: int
    row: int
    rows: pa.RecordBatch


def names_a_row(failure: SeqdedupeError) -> bool:
    """Whether a store says which row it refuses: the number of the batch that it was given, and of the row in it."""
    return {"batch", "row"} <= failure.numbers.keys()


def first_failing(call: Callable[[pa.RecordBatch], object], messages: pa.RecordBatch) -> int | None:
    """The first message that the call fails on alone, by halves; None if it fails on several together only."""
    first, count = 0, len(messages)
    while count > 1:
        half = count // 2
        if _fails(call, messages.slice(first, half)):
            count = half
        else:
            first, count = first + half, count - half
    return first if count and _fails(call, messages.slice(first, count)) else None


def find_refused(take: Take, batches: Iterable[pa.RecordBatch], *, ended: bool) -> SeqdedupeError | None:
    """Why a table does not take a row alone, with the row's place: the number of the batch, and of the row in it. None
    if there is no such row, or more than MAX_SUSPECTS. `ended`: of rows that end the connection or the statement only.

    A row may need another one that comes later, as a foreign key does that is checked in the end. So a row that is
    refused is tried again when all others have been taken.
    """

    def refuses(rows: pa.RecordBatch) -> SeqdedupeError | None:
        why = take(rows)
        if ended and why is not None and len(rows) == 1:
            # A server that fails ends all connections, this one too if it was made before the server has noticed.
            why = take(rows)
        if why is None or isinstance(why, UnavailableError) == ended:
            return why
        if not ended:
            raise why
        return None

    suspects: list[_Suspect] = []
    for number, batch in enumerate(batches):
        refused = _refused_rows(refuses, batch, 0) if len(batch) else iter(())
        room = MAX_SUSPECTS + 1 - len(suspects)
        suspects += [_Suspect(number, row, batch.slice(row, 1)) for row in islice(refused, room)]
        if len(suspects) > MAX_SUSPECTS:
            return None
    while suspects:
        found = [(one, why) for one in suspects if (why := refuses(one.rows)) is not None]
        if len(found) == len(suspects):
            first, why = found[0]
            what = f"{why.message}; it is refused alone too"
            return error("INVALID_OUTPUT", what, hint=why.hint, batch=first.batch, row=first.row)
        suspects = [one for one, _ in found]
    return None


def _refused_rows(
    refuses: Callable[[pa.RecordBatch], object | None], rows: pa.RecordBatch, first: int
) -> Iterator[int]:
    """The rows that are refused, by halves, counted from `first`."""
    if refuses(rows) is None:
        return
    if len(rows) == 1:
        yield first
        return
    half = len(rows) // 2
    yield from _refused_rows(refuses, rows.slice(0, half), first)
    yield from _refused_rows(refuses, rows.slice(half), first + half)


def _fails(call: Callable[[pa.RecordBatch], object], messages: pa.RecordBatch) -> bool:
    try:
        call(messages)
    except SeqdedupeError:
        return True
    return False


def message_of_row(rows_of: Transform, messages: pa.RecordBatch, row: int) -> int | None:
    """The message that alone makes what stands in that row of all messages' rows, behind those of the messages before
    it. None: rows are made in another order, or of several messages. Columns that vary from call to call do not tell.
    """

    def count(until: int) -> int:
        rows = rows_of(messages.slice(0, until))
        return 0 if rows is None else len(rows)

    found = bisect_right(range(len(messages) - 1), row, key=lambda message: count(message + 1))
    try:
        before = count(found) if found else 0
        whole, once, again = (rows_of(some) for some in (messages, *[messages.slice(found, 1)] * 2))
    except SeqdedupeError:
        return None
    rows = (_cells(whole, row), _cells(once, row - before), _cells(again, row - before))
    is_it = all(rows) and all(one == wanted for wanted, one, other in zip(*rows, strict=False) if one == other)
    return found if is_it else None


def _cells(rows: pa.RecordBatch | None, row: int) -> list[str]:
    """What stands in a row; nothing where there is no such row."""
    if rows is None or not 0 <= row < len(rows):
        return []
    # As text, in which NaN equals itself.
    return [repr(column[row].as_py()) for column in rows.columns]


def naming_by_id(failure: SeqdedupeError, topic: str, first: MessageId, last: MessageId) -> SeqdedupeError:
    """The same failure where messages have no indexes: the cause is this message, or one of those up to the last."""
    if first != last:
        return _named(failure, topic, f"the message is one of those from {first} to {last} of {topic}")
    return _named(failure, topic, f"the message is {first} of {topic}", message_id=first)


def naming_none(failure: SeqdedupeError, topic: str, first_index: int, last_index: int) -> SeqdedupeError:
    """The same failure where rows are not made one message after the other: the cause may be any of these messages."""
    which = f"the message is one of those with the indexes {first_index} to {last_index} in {topic}"
    return _named(failure, topic, f"{which}: its row was not made of it alone, in the order of the messages")


def naming(failure: SeqdedupeError, topic: str, incarnation: int, index: int, find: FindMessageId) -> SeqdedupeError:
    """The same failure, which says which message is the cause; its message ID too, if that can be found now."""
    try:
        found = find(topic, incarnation, index)
    except SeqdedupeError:
        return _named(failure, topic, f"the message has index {index} in {topic}", index=index)
    return _named(failure, topic, f"the message is {found}, index {index}, of {topic}", index=index, message_id=found)


def _named(failure: SeqdedupeError, topic: str, which: str, **numbers: Any) -> SeqdedupeError:
    return error(failure.reason, f"{failure.message}; {which}", hint=failure.hint, topic=topic, **numbers)
