"""A job's task: it reads a range, transforms the messages, and writes rows and position in one transaction.

This module does not depend on Spark. A range takes effect once, in any process and after any number of attempts, even
if attempts run at the same time or after a kill -9. Begin with `RangeTask._run`. The classes above `RangeTask` handle
the dead letters that the task stores. The functions below `RangeTask` search for the message that the store has
refused.
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
from seqdedupe.figures import counted
from seqdedupe.message_id import MessageId, Position
from seqdedupe_spark.dedupe import Deduplicator
from seqdedupe_spark.message_columns import TIME, column_of, to_arrow
from seqdedupe_spark.planning import patiently
from seqdedupe_spark.range_reader import joined, message_id_at, read_range, read_stored
from seqdedupe_spark.ranges import TopicRange
from seqdedupe_spark.service import Service
from seqdedupe_spark.stores.contract import Advance, Beside, OutputStore, Stored, StoreFactory, Take, Watermarks

# -- Messages that cannot be written. They are stored in a separate table, in the same transaction that moves the
# position past them.

DEAD_LETTER_SUFFIX = "_dead_letters"
"""The suffix of the table of dead letters, after the name of the job's table."""

MAX_DEAD_LETTERS = 100
"""The default for the maximum number of dead letters in one transaction. More dead letters count as a fault of the
job."""

MAX_ERROR_CHARACTERS = 4_000

DEAD_LETTER_SCHEMA = pa.schema(
    {
        "job": pa.string(),
        "topic": pa.string(),
        "incarnation": pa.int64(),
        "index": pa.int64(),
        "message_id": pa.string(),
        "publish_time": TIME,
        "reason": pa.string(),
        "error": pa.string(),
        "key": pa.binary(),
        "value": pa.binary(),
    }
)
"""The columns of the table."""


MessageKey = tuple[str, bytes]
"""A topic, and the encoding of a message ID."""


@dataclass
class DeadLetterRows:
    """The dead letters of one transaction, over all attempts of the transaction. Contains the messages that the store
    refused in earlier attempts."""

    job: str
    most: int
    refused: dict[MessageKey, SeqdedupeError] = field(default_factory=dict)
    ended: set[MessageKey] = field(default_factory=set)
    """The refused messages that ended the connection. Their dead letters contain neither key nor value, which might end
    the connection again, for instance if they are too large for the server."""
    _letters: list[dict[str, object]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._letters)

    def begin(self) -> None:
        """Begin another attempt of the transaction."""
        self._letters.clear()

    def bury(self, messages: pa.RecordBatch, row: int, why: SeqdedupeError) -> None:
        """Add a message to the dead letters. If there are too many, raise the error because of which the message cannot
        be written."""
        if len(self._letters) >= self.most:
            has = f"this transaction already has {counted(self.most, 'dead letter')}"
            what = f"{why.message}; {has}, and no more are allowed"
            raise error(why.reason, what, hint=why.hint, topic=why.numbers.get("topic")) from why
        letter = _letter(self.job, messages, row, why)
        key = (str(letter["topic"]), column_of(messages, "messageId")[row].as_py())
        self._letters.append(letter | {"key": None, "value": None} if key in self.ended else letter)

    def bury_refused(self, messages: pa.RecordBatch) -> pa.RecordBatch:
        """Add the messages of a topic that the store has refused earlier to the dead letters. Return the other
        messages."""
        if not self.refused or not len(messages):
            return messages
        topic = column_of(messages, "topic")[0].as_py()
        of_topic = {one: why for (name, one), why in self.refused.items() if name == topic}
        ids = column_of(messages, "messageId")
        is_refused = pc.is_in(ids, value_set=pa.array(list(of_topic), pa.binary()))
        for row in np.flatnonzero(is_refused.to_numpy(zero_copy_only=False)).tolist():
            self.bury(messages, row, of_topic[ids[row].as_py()])
        return messages.filter(pc.invert(is_refused))

    def rows(self) -> pa.RecordBatch:
        """Return all dead letters, as rows of the table."""
        return pa.RecordBatch.from_pylist(self._letters, DEAD_LETTER_SCHEMA)


def _letter(job: str, messages: pa.RecordBatch, row: int, why: SeqdedupeError) -> dict[str, object]:
    columns = {
        "topic": "topic",
        "incarnation": "incarnation",
        "index": "index",
        "publish_time": "publishTime",
        "key": "key",
        "value": "value",
    }
    found = {name: column_of(messages, column)[row].as_py() for name, column in columns.items()}
    return found | {
        "job": job,
        "message_id": str(MessageId.from_bytes(column_of(messages, "messageId")[row].as_py())),
        "reason": why.reason,
        "error": _storable(why.message),
    }


def _storable(text: str) -> str:
    """Return the text in a form that databases accept: without NUL, and without surrogates, which no encoding can
    represent."""
    whole = text.encode(errors="backslashreplace").decode()
    return whole.replace("\0", "\\0")[:MAX_ERROR_CHARACTERS]


# -- The task.

Transform = Callable[[pa.RecordBatch], pa.RecordBatch | None]
"""A function that works row by row: the rows for a message may depend only on that message. None stands for no rows."""


class RangeStep(NamedTuple):
    """The step of a round for one topic: its range, planned in an epoch of the topic's position."""

    range: TopicRange
    epoch: int


@dataclass(frozen=True)
class TaskReport:
    """The result of a task. `failure` is an error that repeating the unchanged task cannot fix."""

    read: int = 0
    written: int = 0
    duplicates: int = 0
    dead_letters: int = 0
    failure: SeqdedupeError | None = None


@dataclass(frozen=True)
class JobOutput:
    """The place where a job writes rows of this schema and stores its positions."""

    store: StoreFactory
    job: str
    table: str
    schema: pa.Schema


def all_done(steps: Sequence[RangeStep], stored: Sequence[Stored | None]) -> bool:
    """Return true if the steps have been committed already, by an earlier attempt or another run. Return false if all
    steps remain to be done.

    Raises POSITION_CHANGED if another run has moved a position to a different place, POSITION_RESET if an operator has
    reset a position, POSITION_WENT_BACK if the database is older than when the steps were planned.
    """
    done = [_is_done(step, each) for step, each in zip(steps, stored, strict=True)]
    if any(done) and not all(done):
        raise error("POSITION_CHANGED", "another run has written some of the round's ranges, but not all")
    return all(done)


def _is_done(step: RangeStep, stored: Stored | None) -> bool:
    span = step.range
    if stored is None or stored.epoch < step.epoch:
        raise error(
            "POSITION_WENT_BACK",
            f"the position for {span.topic} is gone; it was {span.start} when the round was planned",
        )
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
    """The dead letters. None: the job stores no dead letters."""
    read: int = 0
    duplicates: int = 0
    handed: list[tuple[str, pa.Array, pa.Array]] = field(default_factory=list)
    """For every batch of rows that the store received: the topic, the indexes and the message IDs of its messages."""


@dataclass(frozen=True)
class RangeTask:
    """The base class of all tasks of a job. Spark pickles a task, and calls the task with the steps of one
    transaction."""

    output: JobOutput
    service: Service
    columns: pa.Schema
    transform: Transform | None
    deduplicate: bool
    read_timeout_seconds: float | None = None
    max_dead_letters: int | None = None
    """The maximum number of dead letters in a transaction. None: the first message that cannot be written is an
    error."""

    def run(self, steps: Sequence[RangeStep]) -> TaskReport:
        """Commit the steps in one transaction, unless they have been committed already. After an error, the report
        contains the error."""
        try:
            with self.output.store() as store:
                return self._run(store, steps)
        except SeqdedupeError as failure:
            return TaskReport(failure=failure)

    def _run(self, store: OutputStore, steps: Sequence[RangeStep]) -> TaskReport:
        """Commit the steps, after any number of earlier attempts:

        1. The stored positions show whether the steps have been committed already.
        2. The ranges are read, transformed and written with their new positions, in one transaction.
        3. If the store refuses the transaction and names no row, the task searches for the row. If the statement or the
           connection was ended, the transaction is first repeated once. A message is the cause only if it ends them
           again while the database does other work.
        4. The message from which the row was made is identified. If dead letters are allowed, the message becomes a
           dead letter, and step 2 is repeated without it. Otherwise the message is the error.
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
                    # The answer was lost in the commit.
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
        """Convert a failure that names no row to a failure that names a row: read everything again, and bisect the
        rows. Raises the failure itself if no single row is the cause."""
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
        written = store.write(
            self.output.job, table, rows, advances, Beside(table + DEAD_LETTER_SUFFIX, tally.dead.rows)
        )
        return TaskReport(tally.read, written, tally.duplicates, len(tally.dead))

    def _source(
        self, steps: Sequence[RangeStep], watermarks: Sequence[Watermarks], tally: _Tally
    ) -> tuple[Iterator[pa.RecordBatch], list[Advance]]:
        """Return the rows of the messages of all steps, and one `Advance` for each step.

        The returned iterator reads the messages. An `Advance` moves a step's position to the end of the step's range.
        Store the advances only after the iterator has returned all rows.
        """
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
        """Yield the range's messages without duplicates."""
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
        """Yield messages, and the rows that the transformation makes of them. If the transformation fails for a
        message, the message becomes a dead letter, if that is allowed."""
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
    ) -> tuple[SeqdedupeError, MessageKey | None]:
        """Add the message of the row to a store's failure, and return both. The message is None if several messages may
        be the cause. This reads the messages again."""
        batch, row = int(failure.numbers["batch"]), int(failure.numbers["row"])
        topic, indexes, ids = tally.handed[batch]
        if indexes.null_count:
            # The message of a row could be found by reading the messages again, up to the same indexes.
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
    """Return the result of the user's function. If the function raises an exception, this raises INVALID_OUTPUT, which
    names the line that raised the exception."""
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
    """Return the columns that the transformation makes of these columns. For this, the transformation is called with a
    batch without rows.

    Raises INVALID_OUTPUT if that call fails or returns None.
    """
    if transform is None:
        return columns
    rows = transformed(transform, pa.RecordBatch.from_pylist([], columns))
    if rows is None:
        raise error("INVALID_OUTPUT", "the transformation must return an empty batch for an empty batch")
    return rows.schema


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


# -- The message that a refusal is about.

FindMessageId = Callable[[str, int, int], MessageId]
"""The function that returns the message ID at an index of a topic and its incarnation."""


MAX_SUSPECTS = 1000
"""If a table refuses more single rows than this, the table is the cause, not a message."""


class _Suspect(NamedTuple):
    batch: int
    row: int
    rows: pa.RecordBatch


def names_a_row(failure: SeqdedupeError) -> bool:
    """Return whether the store's failure names the refused row: the number of its batch, and of the row in the
    batch."""
    return {"batch", "row"} <= failure.numbers.keys()


def first_failing(call: Callable[[pa.RecordBatch], object], messages: pa.RecordBatch) -> int | None:
    """Return the first message for which the call fails, found by bisection. Return None if the call fails only for
    several messages together."""
    first, count = 0, len(messages)
    while count > 1:
        half = count // 2
        if _fails(call, messages.slice(first, half)):
            count = half
        else:
            first, count = first + half, count - half
    return first if count and _fails(call, messages.slice(first, count)) else None


def find_refused(take: Take, batches: Iterable[pa.RecordBatch], *, ended: bool) -> SeqdedupeError | None:
    """Return the reason why a table refuses a single row, with the number of the row's batch and of the row in the
    batch. Return None if the table refuses no single row, or if there are more than MAX_SUSPECTS suspect rows.

    With `ended`, consider only rows that end the connection or the statement. A row may need a later row, for instance
    for a foreign key that is checked at the end. So a refused row is tried again when all other rows have been
    inserted.
    """

    def refuses(rows: pa.RecordBatch) -> SeqdedupeError | None:
        why = take(rows)
        if ended and why is not None and len(rows) == 1:
            # A server that fails ends all connections, also this one if it was made before the server noticed.
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
            what = f"{why.message}; the row is also refused when it is alone"
            return error("INVALID_OUTPUT", what, hint=why.hint, batch=first.batch, row=first.row)
        suspects = [one for one, _ in found]
    return None


def _refused_rows(
    refuses: Callable[[pa.RecordBatch], object | None], rows: pa.RecordBatch, first: int
) -> Iterator[int]:
    """Yield the numbers of the refused rows, found by bisection and counted from `first`."""
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
    """Return the message that alone makes this row. `row` is the row's number among the rows of all messages, which
    come in the order of the messages.

    Return None if rows are made in another order, or from several messages. Columns that vary from call to call are not
    compared.
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
    """Return the cells of a row; no cells if the row does not exist."""
    if rows is None or not 0 <= row < len(rows):
        return []
    # As text, in which NaN equals itself.
    return [repr(column[row].as_py()) for column in rows.columns]


def naming_by_id(failure: SeqdedupeError, topic: str, first: MessageId, last: MessageId) -> SeqdedupeError:
    """Return the failure for messages without indexes. The failure names `first` and `last`: one of the messages in
    this range is the cause."""
    if first != last:
        return _named(failure, topic, f"the message is one of those from {first} to {last} of {topic}")
    return _named(failure, topic, f"the message is {first} of {topic}", message_id=first)


def naming_none(failure: SeqdedupeError, topic: str, first_index: int, last_index: int) -> SeqdedupeError:
    """Return the failure for rows that are not made message by message: any of these messages may have caused the
    failure."""
    which = f"the message is one of those with the indexes {first_index} to {last_index} in {topic}"
    return _named(
        failure,
        topic,
        f"{which}: the transformation did not make its row from this message alone, in the order of the messages",
    )


def naming(failure: SeqdedupeError, topic: str, incarnation: int, index: int, find: FindMessageId) -> SeqdedupeError:
    """Return the failure with the name of the message that caused the failure. If the message's ID can be found now,
    the failure also contains the ID."""
    try:
        found = find(topic, incarnation, index)
    except SeqdedupeError:
        return _named(failure, topic, f"the message has index {index} in {topic}", index=index)
    return _named(failure, topic, f"the message is {found}, index {index}, of {topic}", index=index, message_id=found)


def _named(failure: SeqdedupeError, topic: str, which: str, **numbers: Any) -> SeqdedupeError:
    return error(failure.reason, f"{failure.message}; {which}", hint=failure.hint, topic=topic, **numbers)
