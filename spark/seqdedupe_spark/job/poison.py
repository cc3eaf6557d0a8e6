"""Messages that a range cannot be written for: each is named, and may go into a table of its own."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seqdedupe.errors import SeqdedupeError, UnavailableError, error
from seqdedupe.message_id import MessageId
from seqdedupe_spark.columns import TIME, column_of
from seqdedupe_spark.stores.contract import Take

# -- Messages that a job cannot write: kept in a table of their own, in the transaction that moves over them.

SUFFIX = "_dead_letters"
"""What the table of dead letters is named by, after the job's table."""

MAX_DEAD_LETTERS = 100
"""In one transaction, unless the job says otherwise: more of them are taken for a fault of the job's."""

MAX_ERROR_CHARACTERS = 4_000

SCHEMA = pa.schema(
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


Key = tuple[str, bytes]
"""A topic, and the encoding of a message ID."""


@dataclass
class DeadLetters:
    """The dead letters of one transaction, while it is tried: what the store refused in an earlier try is known."""

    job: str
    most: int
    refused: dict[Key, SeqdedupeError] = field(default_factory=dict)
    ended: set[Key] = field(default_factory=set)
    """The refused messages that ended the connection. Their letters have neither key nor value, which may end it
    too, as what is too large for the server does."""
    _letters: list[dict[str, object]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._letters)

    def begin(self) -> None:
        """The transaction is tried anew."""
        self._letters.clear()

    def bury(self, messages: pa.RecordBatch, row: int, why: SeqdedupeError) -> None:
        """Keeps a message. Raises why it cannot be written if there are too many."""
        if len(self._letters) >= self.most:
            what = f"{why.message}; {self.most} messages before it were to be dead letters of the same transaction"
            raise error(why.reason, what, hint=why.hint, topic=why.numbers.get("topic")) from why
        letter = _letter(self.job, messages, row, why)
        key = (str(letter["topic"]), column_of(messages, "messageId")[row].as_py())
        self._letters.append(letter | {"key": None, "value": None} if key in self.ended else letter)

    def bury_refused(self, messages: pa.RecordBatch) -> pa.RecordBatch:
        """Keeps those messages of a topic that the store has refused; returns the others."""
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
        """All of them, as the table has them."""
        return pa.RecordBatch.from_pylist(self._letters, SCHEMA)


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
    """Databases take no NUL in a text, and a text of Python's may have surrogates, which no encoding has."""
    whole = text.encode(errors="backslashreplace").decode()
    return whole.replace("\0", "\\0")[:MAX_ERROR_CHARACTERS]


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


def message_of_row(count_rows: Callable[[pa.RecordBatch], int], messages: pa.RecordBatch, row: int) -> int:
    """The message that a row was made of, where rows are made one message after the other."""
    low, high = 0, len(messages) - 1
    while low < high:
        middle = (low + high) // 2
        if count_rows(messages.slice(0, middle + 1)) > row:
            high = middle
        else:
            low = middle + 1
    return low


def makes_alone(
    rows_of: Callable[[pa.RecordBatch], pa.RecordBatch | None], messages: pa.RecordBatch, message: int, row: int
) -> bool:
    """Whether a message alone makes what stands in that row of all messages' rows, behind those of the messages before
    it. If not, rows are made in another order, or of several messages. Columns that vary from call to call do not tell.
    """
    try:
        before = _count(rows_of(messages.slice(0, message))) if message else 0
        whole, once, again = (rows_of(some) for some in (messages, *[messages.slice(message, 1)] * 2))
    except SeqdedupeError:
        return False
    rows = (_cells(whole, row), _cells(once, row - before), _cells(again, row - before))
    return all(rows) and all(one == wanted for wanted, one, other in zip(*rows, strict=False) if one == other)


def _count(rows: pa.RecordBatch | None) -> int:
    return 0 if rows is None else len(rows)


def _cells(rows: pa.RecordBatch | None, row: int) -> list[str]:
    """What stands in a row; nothing where there is no such row."""
    if rows is None or not 0 <= row < len(rows):
        return []
    # As text, in which NaN equals itself.
    return [repr(column[row].as_py()) for column in rows.columns]


def naming_by_id(failure: SeqdedupeError, topic: str, first: MessageId, last: MessageId) -> SeqdedupeError:
    """The same failure where messages have no indexes: the cause is this message, or one of those up to the last."""
    if first != last:
        what = f"{failure.message}; the message is one of those from {first} to {last} of {topic}"
        return error(failure.reason, what, hint=failure.hint, topic=topic)
    what = f"{failure.message}; the message is {first} of {topic}"
    return error(failure.reason, what, hint=failure.hint, topic=topic, message_id=first)


def naming_none(failure: SeqdedupeError, topic: str, first_index: int, last_index: int) -> SeqdedupeError:
    """The same failure where rows are not made one message after the other: the cause may be any of these messages."""
    which = f"the message is one of those with the indexes {first_index} to {last_index} in {topic}"
    what = f"{failure.message}; {which}: its row was not made of it alone, in the order of the messages"
    return error(failure.reason, what, hint=failure.hint, topic=topic)


def naming(failure: SeqdedupeError, topic: str, incarnation: int, index: int, find: FindMessageId) -> SeqdedupeError:
    """The same failure, which says which message is the cause; its message ID too, if that can be found now."""
    try:
        message_id = find(topic, incarnation, index)
    except SeqdedupeError:
        what = f"{failure.message}; the message has index {index} in {topic}"
        return error(failure.reason, what, hint=failure.hint, topic=topic, index=index)
    what = f"{failure.message}; the message is {message_id}, index {index}, of {topic}"
    return error(failure.reason, what, hint=failure.hint, topic=topic, index=index, message_id=message_id)
