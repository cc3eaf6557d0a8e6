"""Naming the message that a range cannot be written for: its topic, its index, its message ID."""

from collections.abc import Callable

import pyarrow as pa

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.message_id import MessageId

FindMessageId = Callable[[str, int, int], MessageId]
"""Of a topic and its incarnation, the message ID at an index."""


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


def naming_by_id(failure: SeqdedupeError, topic: str, first: MessageId, last: MessageId) -> SeqdedupeError:
    """The same failure where messages have no indexes: the cause is this message, or one of those up to the last."""
    if first != last:
        what = f"{failure.message}; the message is one of those from {first} to {last} of {topic}"
        return error(failure.reason, what, hint=failure.hint, topic=topic)
    what = f"{failure.message}; the message is {first} of {topic}"
    return error(failure.reason, what, hint=failure.hint, topic=topic, message_id=first)


def naming(failure: SeqdedupeError, topic: str, incarnation: int, index: int, find: FindMessageId) -> SeqdedupeError:
    """The same failure, which says which message is the cause; its message ID too, if that can be found now."""
    try:
        message_id = find(topic, incarnation, index)
    except SeqdedupeError:
        what = f"{failure.message}; the message has index {index} in {topic}"
        return error(failure.reason, what, hint=failure.hint, topic=topic, index=index)
    what = f"{failure.message}; the message is {message_id}, index {index}, of {topic}"
    return error(failure.reason, what, hint=failure.hint, topic=topic, index=index, message_id=message_id)
