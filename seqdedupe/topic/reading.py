"""Pages of a topic for readers: where to start, how far to go, batches cut at both ends."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from seqdedupe import batch as batches
from seqdedupe.errors import PositionError, SeqdedupeError, error
from seqdedupe.format.headers import BATCH_TAG, NO_KEY, header
from seqdedupe.format.layout import BASE_INDEX, COLUMNS_END, PLACES, PUBLISH_TIME_MS, RECORD_END, ROWS, layout_columns
from seqdedupe.format.records import END, body_of, ownership, scan_record, span
from seqdedupe.log.contract import ANY_BYTES, Runs
from seqdedupe.message_id import MessageIds, Position
from seqdedupe.topic.base import TopicBase
from seqdedupe.topic.topic import Topic

PAGE_BYTES = 1024 * 1024
"""What an answer holds, about: large enough that gRPC's cost a message does not count."""

CUT_BYTES = 4_000_000
"""With an answer around it, this is below gRPC's default limit of 4 MiB a message."""


_SKIP_HINT = (
    "What is damaged is not shown. Read past it with skip_damaged (`seqdedupe read --skip-damaged`), which says which "
    "messages are missing; or restore logs and store from one backup. `seqdedupe doctor` says what else is damaged."
)


@dataclass(frozen=True, slots=True)
class Page:
    """Stored records, whole or cut, and where the next page starts."""

    records: bytes | memoryview
    next_index: int
    skipped: range = range(0)
    """Instead of records: the indexes of messages that are damaged."""
    encoded: bytes = b""
    """As it goes out, where that is made once for several readers."""


def end_index(topic: TopicBase) -> int:
    """The index that the next message will get. Raises RECOVERING while it is not known, NOT_OWNER, LOG_DAMAGED."""
    topic.check_knows_its_end()
    return topic.confirmed_index


async def index_after(topic: Topic, position: Position, *, skip_damaged: bool = False) -> int:
    """The index at which to read on after a position.

    Raises POSITION_OF_ANOTHER_INCARNATION, POSITION_AFTER_END, POSITION_DIVERGED if another message stands there or one
    of another history, RECOVERING if it is after what is certain. The history cannot be told of a position that does
    not say it, and of one whose message is trimmed; nor of one whose message is damaged, which is LOG_DAMAGED unless
    `skip_damaged`.
    """
    incarnation = topic.incarnation
    if position.incarnation != incarnation:
        raise error(
            "POSITION_OF_ANOTHER_INCARNATION",
            f"topic {topic.name} is the incarnation {incarnation}, and the position {position} is of another one: of a "
            "topic that was deleted and made anew, or of another topic",
            incarnation=incarnation,
        )
    if not position.is_whole():
        raise error("INVALID_POSITION", f"{position} is not a position: its parts do not fit together")
    if position.index >= topic.readable_index and position.index >= (end := end_index(topic)):
        raise error(
            "POSITION_AFTER_END",
            f"the position {position} is after the end of topic {topic.name}, whose next message gets index {end}",
            end_index=end,
        )
    try:
        await _check_is_the_same(topic, position)
    except SeqdedupeError as e:
        if await _next_readable(topic, position.index, e, skip_damaged) == position.index:
            raise
    return position.index + 1


async def _check_is_the_same(topic: Topic, position: Position) -> None:
    """Raises POSITION_DIVERGED if another message stands there than the position's. Of one that is gone none knows."""
    if position.index < max(0, topic.log.first_index):
        return
    try:
        there = await topic.log.locate(position.index)
    except PositionError:
        # Retention was faster.
        return
    if position.message_id is not None and there.message_id != position.message_id:
        raise error(
            "POSITION_DIVERGED",
            f"the message at index {position.index} of topic {topic.name} is {there.message_id}, not "
            f"{position.message_id}",
            index=position.index,
        )
    if position.ownership and there.ownership != position.ownership:
        raise error(
            "POSITION_DIVERGED",
            f"the message at index {position.index} of topic {topic.name} is not that of the position {position}: it "
            f"was written under {there.ownership:016x}; the topic was restored to an older copy, and has grown again "
            "since",
            index=position.index,
        )


def check_index(topic: Topic, index: int) -> None:
    """Raises INVALID_POSITION, POSITION_TRIMMED, POSITION_AFTER_END, RECOVERING unless reading can start here."""
    if index < 0:
        raise error("INVALID_POSITION", f"{index} is not an index: they begin with 0")
    if index < topic.log.first_index:
        raise error(
            "POSITION_TRIMMED",
            f"topic {topic.name} begins with index {topic.log.first_index} by now, {index} is gone",
            first_index=topic.log.first_index,
        )
    if index > topic.readable_index and index > (end := end_index(topic)):
        raise error(
            "POSITION_AFTER_END",
            f"index {index} is after the end of topic {topic.name}, whose next message gets index {end}",
            hint=f"Start at an index up to {end}, or at the latest.",
            end_index=end,
        )


async def read_page(
    topic: Topic,
    from_index: int,
    stop_index: int,
    max_bytes: int,
    *,
    skip_damaged: bool = False,
    most_bytes: int = ANY_BYTES,
) -> Page:
    """The records with the messages from `from_index` to before `stop_index`, about `max_bytes` of them.

    A batch that is larger than clients take by default is cut between its rows. `from_index` below `stop_index`, and
    `stop_index` at most the topic's readable index. With `skip_damaged`, a page may instead say what is damaged
    there, up to the next message that can be read; otherwise that is LOG_DAMAGED. Raises `LargerRecordError` where a
    record has more than `most_bytes`.
    """
    try:
        return await _limited_page(topic, from_index, stop_index, max_bytes, most_bytes)
    except SeqdedupeError as e:
        next_index = min(await _next_readable(topic, from_index, e, skip_damaged), stop_index)
    if next_index > from_index:
        return Page(b"", next_index, range(from_index, next_index))
    # The disk has failed for a moment.
    return await _limited_page(topic, from_index, stop_index, max_bytes, most_bytes)


async def _next_readable(topic: Topic, index: int, e: SeqdedupeError, skip_damaged: bool) -> int:
    """The first message from this one on that can be read, where `e` was raised when it was.

    Raises `e` unless it says that something cannot be read, and the reader that this may be skipped.
    """
    if skip_damaged and e.reason in ("LOG_DAMAGED", "LOG_UNREADABLE"):
        return await topic.log.next_readable(index)
    if e.reason == "LOG_DAMAGED":
        e.hint = _SKIP_HINT
    raise e


async def _limited_page(topic: Topic, from_index: int, stop_index: int, max_bytes: int, most_bytes: int) -> Page:
    page = await _read_page(topic, from_index, stop_index, max_bytes, most_bytes)
    while len(page.records) > CUT_BYTES and (rows := page.next_index - from_index) > 1:
        del page  # while the same record is read again
        page = await _read_page(topic, from_index, from_index + rows // 2, max_bytes, most_bytes)
    return page


async def _read_page(topic: Topic, from_index: int, stop_index: int, max_bytes: int, most_bytes: int) -> Page:
    raw, runs = await topic.log.read(from_index, stop_index, max_bytes, most_bytes)
    if runs is not None:
        return _with_message_ids(topic, raw, runs, from_index, stop_index)
    covers = np.empty(5, np.int64)
    span(np.frombuffer(raw, np.uint8), covers)
    first, after_first, last_at, last, after_last = covers.tolist()
    if first >= from_index and after_last <= stop_index:
        return Page(raw, after_last)
    whole_from = 0
    head = tail = b""
    if first < from_index or after_first > stop_index:
        head, whole_from, _ = _cut(topic, raw, 0, from_index, stop_index)
    whole_to = len(raw)
    if after_last > stop_index and last_at >= whole_from and last_at > 0:
        tail, _, _ = _cut(topic, raw, last_at, last, stop_index)
        whole_to = last_at
    return Page(b"".join((head, raw[whole_from:whole_to], tail)), min(after_last, stop_index))


def _with_message_ids(
    topic: Topic, raw: bytes | memoryview, runs: Sequence[Runs], from_index: int, stop_index: int
) -> Page:
    """Records cut to what was asked for, each with the message IDs of its rows."""
    at, end = 0, from_index
    parts: list[bytes] = []
    for of_record in runs:
        part, at, end = _cut(topic, raw, at, from_index, stop_index, of_record)
        parts.append(part)
    return Page(b"".join(parts), end)


def _cut(
    topic: Topic, raw: bytes | memoryview, at: int, from_index: int, stop_index: int, runs: Runs = ()
) -> tuple[bytes, int, int]:
    """The record at `at` with only those of its rows that were asked for, and where it ends; the index after it.

    With `runs`, the message IDs of its rows, it carries those of the rows that it has.
    """
    places = np.empty(PLACES, np.int64)
    if scan_record(np.frombuffer(raw, np.uint8), at, topic.log.incarnation, -1, NO_KEY, places) != END:
        where = f"in the log {topic.log.place}, at index {from_index} or after it"
        raise error("LOG_DAMAGED", f"a record {where}, cannot be read")
    base = int(places[BASE_INDEX])
    first, last = max(from_index - base, 0), min(stop_index - base, int(places[ROWS]))
    encoded = body_of(raw, places)
    if last - first < places[ROWS]:
        encoded = batches.decode(encoded).take(np.arange(first, last)).encode()
    ids = MessageIds.of(runs).cut(first, last).encode() if runs else b""
    cut = np.empty(PLACES, np.int64)
    layout_columns(np.frombuffer(encoded, np.uint8), 0, len(encoded), cut)
    cut_header = header(
        encoded,
        BATCH_TAG,
        rows=last - first,
        column_bytes=int(cut[COLUMNS_END]),
        incarnation=topic.log.incarnation,
        file_offset=0,
        base_index=base + first,
        publish_time_ms=int(places[PUBLISH_TIME_MS]),
        synced_offset=0,
        ownership=ownership(places),
        key=NO_KEY,
        after_body_bytes=len(ids),
    )
    return cut_header + encoded + ids, int(places[RECORD_END]), base + last
