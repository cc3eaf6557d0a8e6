"""Reading a topic's log: start positions, pages with batches that are cut at both ends, streams of pages, and searches
for one message.

Begin with `read_page` and `read_on`. At the end of a topic, `Followers` give the same page to all readers, in turns.
`index_in_log` and `find_in_log` search for a producer's message that is no longer in the ring of recent messages.
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from seqdedupe import batch as batches
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import PERSISTED, STATED
from seqdedupe.errors import DamagedError, PositionError, SeqdedupeError, error
from seqdedupe.format.headers import BATCH_TAG, NO_KEY, header
from seqdedupe.format.jit import Int64s
from seqdedupe.format.layout import (
    BASE_INDEX,
    COLUMNS_END,
    PLACES,
    PUBLISH_TIME_MS,
    RECORD_END,
    RECORD_START,
    ROWS,
    layout_columns,
)
from seqdedupe.format.records import END, body_of, ownership, scan_record, span
from seqdedupe.log.contract import ANY_BYTES, LargerRecordError, Log, Runs
from seqdedupe.message_id import MessageIds, Position
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.topic import Topic

PAGE_BYTES = 1024 * 1024
"""The approximate size of an answer. It is large enough that gRPC's cost per message is negligible."""

CUT_BYTES = 4_000_000
"""With an answer around it, a batch of this size is below gRPC's default limit of 4 MiB for a message."""


_SKIP_HINT = (
    "What is damaged is not shown. Read past it with skip_damaged (`seqdedupe read --skip-damaged`), which says which "
    "messages are missing; or restore logs and store from one backup. `seqdedupe doctor` says what else is damaged."
)

Room = Callable[[int], Awaitable[int]]
"""A function called before a read of the log. Its parameter is the smallest useful number of bytes (0: any). It returns
the number of bytes that may be read."""


async def any_room(least_bytes: int) -> int:
    return max(PAGE_BYTES, least_bytes)


@dataclass(frozen=True, slots=True)
class Page:
    """Stored records, complete or cut, and the index where the next page starts."""

    records: bytes | memoryview
    next_index: int
    skipped: range = range(0)
    """The indexes of damaged messages, if the page lists these instead of records."""
    encoded: bytes = b""
    """The encoded answer, if it is created once for several readers."""


def end_index(topic: TopicBase) -> int:
    """Return the index of the next message to be stored. Raises RECOVERING while this index is not known, NOT_OWNER,
    LOG_DAMAGED."""
    topic.check_knows_its_end()
    return topic.confirmed_index


async def settled_end(topic: Topic) -> int:
    """Return `end_index` when all that is in flight now has settled.

    Only then are later messages certainly not stored. A standby that reads the log may know of a message, and show it,
    earlier than the owner that has appended it. Raises the errors of `end_index`; DRAINING or TOPIC_NOT_FOUND if the
    topic is closed meanwhile.
    """
    end_index(topic)
    await topic.flight.all_of_now(topic.check_knows_its_end)
    if topic.state is State.DRAINING:
        raise error(topic.closed_because, f"topic {topic.name} is closed: {topic.why}")
    return end_index(topic)


async def _is_after_end(topic: Topic, index: int) -> bool:
    """Return whether the topic has no message with this index, for certain: another sidecar, which owns the topic by
    now, would have stored it before this call. Raises the errors of `settled_end` and `Owner.prove`."""
    if index < topic.readable_index or index < await settled_end(topic):
        return False
    await topic.owner.prove()
    return index >= end_index(topic)


async def shown_end(topic: Topic) -> int:
    """Return an end of the topic that is not before a message that any sidecar had shown when this was called.

    In a log that only this process reads, this is `end_index`. Raises the errors of `settled_end`.
    """
    return await settled_end(topic) if topic.log.replays_what_is_certain else end_index(topic)


async def index_after(topic: Topic, position: Position, *, skip_damaged: bool = False) -> int:
    """Return the index at which to continue reading after a position.

    Raises POSITION_OF_ANOTHER_INCARNATION, POSITION_AFTER_END, and the reason why the topic accepts no messages if the
    position is after the last certain message and this sidecar cannot be certain of the end now. Raises
    POSITION_DIVERGED if the log has a different message at this position, or a message of another history. The history
    is not checked if the position does not state it, or if its message is trimmed or damaged. A damaged message raises
    LOG_DAMAGED unless `skip_damaged`.
    """
    incarnation = topic.incarnation
    if position.incarnation != incarnation:
        raise error(
            "POSITION_OF_ANOTHER_INCARNATION",
            f"topic {topic.name} is the incarnation {incarnation}, and the position {position} is of another one: "
            "the topic was deleted and created again, or the position is of another topic",
            incarnation=incarnation,
        )
    if not position.is_whole():
        raise error("INVALID_POSITION", f"{position} is not a position: its parts do not fit together")
    if await _is_after_end(topic, position.index):
        end = end_index(topic)
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
    """Raise POSITION_DIVERGED if the log has a different message at the position. A trimmed message cannot be
    checked."""
    if position.index < max(0, topic.log.first_index):
        return
    try:
        there = await topic.log.locate(position.index)
    except PositionError:
        # Retention has dropped the message meanwhile.
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


async def check_index(topic: Topic, index: int) -> None:
    """Raise INVALID_POSITION, POSITION_TRIMMED, POSITION_AFTER_END, or the errors of `Owner.prove`, if reading cannot
    start here."""
    if index < 0:
        raise error("INVALID_POSITION", f"{index} is not an index: they begin with 0")
    if index < topic.log.first_index:
        raise error(
            "POSITION_TRIMMED",
            f"topic {topic.name} begins with index {topic.log.first_index} by now, {index} is gone",
            first_index=topic.log.first_index,
        )
    if await _is_after_end(topic, index - 1):
        end = end_index(topic)
        raise error(
            "POSITION_AFTER_END",
            f"index {index} is after the end of topic {topic.name}, whose next message gets index {end}",
            hint=f"Start at an index up to {end}, or at `latest`.",
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
    """Return the records with the messages from `from_index` to before `stop_index`, about `max_bytes` in total.

    A batch that is larger than clients accept by default is cut between its rows. `from_index` is below `stop_index`,
    and `stop_index` is at most the topic's readable index. With `skip_damaged`, a page may instead list the damaged
    messages up to the next readable message. Without `skip_damaged`, damaged messages raise LOG_DAMAGED. Raises
    `LargerRecordError` if a record has more than `most_bytes`.
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
    """Return the first readable message from this index on, after reading there raised `e`.

    Raises `e` unless it is a read error and the reader allows skipping such messages.
    """
    if skip_damaged and e.reason in ("LOG_DAMAGED", "LOG_UNREADABLE"):
        return await topic.log.next_readable(index)
    if e.reason == "LOG_DAMAGED":
        e.hint = _SKIP_HINT
    raise e


async def _limited_page(topic: Topic, from_index: int, stop_index: int, max_bytes: int, most_bytes: int) -> Page:
    page = await _read_page(topic, from_index, stop_index, max_bytes, most_bytes)
    while len(page.records) > CUT_BYTES and (rows := page.next_index - from_index) > 1:
        del page  # so that the memory is free while the same record is read again
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
    """Return records cut to the requested range, each with the message IDs of its rows."""
    at, end = 0, from_index
    parts: list[bytes] = []
    for of_record in runs:
        part, at, end = _cut(topic, raw, at, from_index, stop_index, of_record)
        parts.append(part)
    return Page(b"".join(parts), end)


def _cut(
    topic: Topic, raw: bytes | memoryview, at: int, from_index: int, stop_index: int, runs: Runs = ()
) -> tuple[bytes, int, int]:
    """Return the record at `at` with only the requested rows, the offset of its end, and the index after these rows.

    `runs` are the message IDs of the record's rows. With `runs`, the returned record contains the message IDs of the
    remaining rows.
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


# -- Streams of pages, and the data that followers share: at the end of a topic all get one page, and take turns.
#
# Sending a page costs the event loop the same for one batch as for a hundred. So with more followers, more messages are
# gathered for each follower.

TURNS_AT_ONCE = 2
TURN_SECONDS = 0.002
"""In this period TURNS_AT_ONCE followers get a turn, that is a thousand a second. This uses about a tenth of the event
loop's capacity.

One or two followers get each commit at once; each of a hundred followers gets the messages of a tenth of a second.
"""

MAX_PAGES = 16
"""The number of pages kept for followers that are about to read them, about 16 MiB. The page unused for the longest
time is dropped first."""


class Turns:
    """A queue of callers. In every TURN_SECONDS, the first TURNS_AT_ONCE callers in the queue get a turn."""

    def __init__(self) -> None:
        self._left = TURNS_AT_ONCE
        # A dict, for its order.
        self._waiting: dict[asyncio.Future[None], None] = {}

    async def take(self) -> None:
        """Wait for the caller's turn. The turn comes at once unless there were many callers just before."""
        loop = asyncio.get_running_loop()
        if self._left == TURNS_AT_ONCE:
            loop.call_later(TURN_SECONDS, self._go_on)
        if self._left:
            self._left -= 1
            # The publishers are notified of the same commit first.
            await asyncio.sleep(0)
            return
        turn = loop.create_future()
        self._waiting[turn] = None
        try:
            await turn
        finally:
            self._waiting.pop(turn, None)

    def _go_on(self) -> None:
        self._left = TURNS_AT_ONCE
        while self._left and self._waiting:
            turn = next(iter(self._waiting))
            del self._waiting[turn]
            # A caller that is cancelled at this moment must not use up the next caller's turn.
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        if self._left < TURNS_AT_ONCE:
            asyncio.get_running_loop().call_later(TURN_SECONDS, self._go_on)


class Followers:
    """The data that followers of all topics of a sidecar share. `encode` creates the outgoing bytes of a page."""

    def __init__(self, encode: Callable[[Topic, Page], bytes]) -> None:
        self.turns = Turns()
        self._encode = encode
        self._ends: WeakKeyDictionary[Topic, int] = WeakKeyDictionary()
        """The end index of the newest page, by topic."""
        self._count = itertools.count()
        self._numbers: WeakKeyDictionary[Topic, int] = WeakKeyDictionary()
        """The number of each topic. A topic that was opened again has a different number, because its log may have been
        replaced meanwhile."""
        self._pages: OrderedDict[tuple[int, int, int], asyncio.Future[Page | None]] = OrderedDict()

    def end(self, topic: Topic, index: int) -> int:
        """Return the index up to which a follower reads now, if the follower already has all messages below `index`.
        All followers get the same index, so that their pages end with the same message."""
        end = self._ends.get(topic, 0)
        if end <= index:
            end = self._ends[topic] = topic.readable_index
        return end

    async def page(self, topic: Topic, from_index: int, stop_index: int, max_bytes: int) -> Page | None:
        """Return a page like `read_page`. The page is read once for all callers with the same request. The result None
        means that each caller must read the page itself.

        None is returned if the page cannot be read (each caller then gets the error), if the task that read the page
        was cancelled, or if a record is larger than a page. The page may be larger than `max_bytes` if another caller
        has more room.
        """
        key = self._numbers.setdefault(topic, next(self._count)), from_index, stop_index
        if (made := self._pages.get(key)) is not None:
            self._pages.move_to_end(key)
            # A caller that is cancelled here must not cancel the read for other callers.
            return made.result() if made.done() else await asyncio.shield(made)
        made = self._pages[key] = asyncio.get_running_loop().create_future()
        if len(self._pages) > MAX_PAGES:
            self._pages.popitem(last=False)
        page = None
        try:
            size = min(max_bytes, PAGE_BYTES)
            page = self.encoded(topic, await read_page(topic, from_index, stop_index, size, most_bytes=size))
        except (SeqdedupeError, LargerRecordError):
            pass
        finally:
            made.set_result(page)
        return page

    def encoded(self, topic: Topic, page: Page) -> Page:
        """Return a page in its outgoing form, without the bytes that were read."""
        data = self._encode(topic, page)
        # The records are at the beginning of the encoded page, so they are kept only once.
        return Page(memoryview(data)[: len(page.records)], page.next_index, page.skipped, data)


async def read_on(
    topic: Topic,
    from_index: int,
    stop_index: int | None,
    room: Room = any_room,
    *,
    skip_damaged: bool = False,
    followers: Followers | None = None,
) -> AsyncIterator[Page]:
    """Yield pages from an index on, up to `stop_index`, and wait for messages that do not exist yet. If `stop_index` is
    None, do not end.

    `room` is called before each page and returns the maximum number of bytes for it. For a larger record `room` is
    called again, with the record's size as the minimum. With `followers` pages are encoded; a reader that has read
    everything takes turns with the others, and gets the same pages. Ends early when the topic closes. Raises NOT_OWNER
    or LOG_DAMAGED when this sidecar can return no more messages, and LOG_DAMAGED for damaged messages unless
    `skip_damaged`.
    """
    here = from_index
    had_all = here >= topic.readable_index
    while stop_index is None or here < stop_index:
        await topic.wait_for_message(here)
        sharing = followers if had_all else None
        if sharing is not None:
            await sharing.turns.take()
            if topic.state is State.DRAINING:
                # The topic's log may be deleted by now.
                return
        end = topic.readable_index if sharing is None else sharing.end(topic, here)
        if stop_index is not None:
            end = min(end, stop_index)
        if end <= here:
            topic.check_may_go_on()
            return
        most_bytes = await room(0)
        page = None if sharing is None else await sharing.page(topic, here, end, most_bytes)
        if page is not None and len(page.records) > most_bytes:
            page = None
        while page is None:
            try:
                max_bytes = min(most_bytes, PAGE_BYTES)
                page = await read_page(topic, here, end, max_bytes, skip_damaged=skip_damaged, most_bytes=most_bytes)
            except LargerRecordError as e:
                most_bytes = e.size
            else:
                break
            most_bytes = await room(most_bytes)
        if followers is not None and not page.encoded:
            page = followers.encoded(topic, page)
        yield page
        here = page.next_index
        had_all = here >= end
        del page  # so that the memory is free until there is another page


# -- The search for a producer's message.

NOT_KNOWN = -1

LOOKED_THROUGH_MESSAGES = 2**16
"""The search covers this number of messages, and approximately this number of bytes, before the log's end."""
LOOKED_THROUGH_BYTES = 64 * 1024 * 1024
_STEP_BYTES = 256 * 1024
"""The number of bytes searched in one step of the event loop."""


async def index_in_log(producers: Producers, number: int, log: Log) -> int:
    """Return the index of the message with a producer's persisted ID; NOT_KNOWN if the message was removed, or cannot
    be read now.

    This method reads the log: STATED is the base index of the batch with the message, unless retention has dropped that
    batch, or deduplication was disabled meanwhile.
    """
    last = int(producers.numbers[number, PERSISTED])
    stated = int(producers.numbers[number, STATED])
    if last < 0 or stated < log.first_index:
        return NOT_KNOWN
    [name] = producers.names_from(number, 1)
    try:
        raw, _ = await log.read(stated, stated + 1, 1)
        page = bytes(raw)
        places = next(_records(log, page))
    except SeqdedupeError:
        return NOT_KNOWN
    return _index_in_record(page, places, name, last)


async def find_in_log(log: Log, name: bytes, sequence_id: int, end_index: int, room: Room = any_room) -> int:
    """Return the index of the newest message with this ID of this producer among the last messages before `end_index`.

    Return NOT_KNOWN if the searched part does not contain the message; damaged messages are ignored. Raises errors of a
    log that cannot be read now. Only one page is kept in memory, and none while `room` is called for the next page.
    """
    mark = sequence_id.to_bytes(8, "little")
    found = NOT_KNOWN
    try:
        async for page in _pages(log, await _looked_through_from(log, end_index), end_index, room):
            # Most pages do not have both, and need not be decoded.
            for places in _records(log, page) if mark in page and name in page else ():
                columns = page[places[RECORD_START] : places[COLUMNS_END]]
                if mark in columns and name in columns:
                    found = max(found, _index_in_record(page, places, name, sequence_id))
            del page  # so that the page's memory is free until the next page is read
    except PositionError:
        # Retention has dropped these messages meanwhile.
        pass
    return found


async def _looked_through_from(log: Log, end_index: int) -> int:
    """Return the index where a search begins. From this index to the end of the log, both the messages and their bytes
    are limited."""
    low, high = max(log.first_index, end_index - LOOKED_THROUGH_MESSAGES), end_index
    while low < high:
        middle = (low + high) // 2
        if await log.locate_bytes(middle, LOOKED_THROUGH_BYTES, end_index) < end_index:
            low = middle + 1
        else:
            high = middle
    return low


async def publish_time_ms(log: Log, index: int, room: Room = any_room) -> int:
    """Return the time when the log stored the message with this index; 0 if retention has dropped the message, or it is
    damaged."""
    try:
        async for page in _pages(log, index, index + 1, room):
            return int(next(_records(log, page))[PUBLISH_TIME_MS])
    except PositionError:
        pass
    return 0


async def _pages(log: Log, start: int, stop: int, room: Room) -> AsyncIterator[bytes]:
    """Yield pages of many records with these messages. Damaged messages, and messages that retention drops meanwhile,
    are omitted.

    The caller must drop a page before it requests the next page.
    """
    here = max(start, log.first_index)
    covers = np.empty(5, np.int64)
    least_bytes = 0
    while here < stop:
        most_bytes = await room(least_bytes)
        try:
            raw, _ = await log.read(here, stop, _STEP_BYTES, most_bytes)
        except LargerRecordError as e:
            least_bytes = e.size
            continue
        except DamagedError:
            after = await log.next_readable(here)
            if after == here:
                raise
            here = after
            continue
        page, least_bytes = bytes(raw), 0
        del raw
        span(np.frombuffer(page, np.uint8), covers)
        here = int(covers[-1])
        yield page
        del page


def _records(log: Log, page: bytes) -> Iterator[Int64s]:
    """Yield the places of a page's records, each valid until the next step."""
    raw = np.frombuffer(page, np.uint8)
    places = np.empty(PLACES, np.int64)
    at = 0
    while at < len(page):
        if scan_record(raw, at, log.incarnation, -1, NO_KEY, places) != END:
            raise error("LOG_DAMAGED", f"a record of the log {log.place} cannot be read")
        yield places
        at = int(places[RECORD_END])


def _index_in_record(raw: bytes, places: Int64s, name: bytes, sequence_id: int) -> int:
    """Return the index of the message with this ID of this producer in a scanned record, or NOT_KNOWN."""
    batch = batches.decode(body_of(raw, places))
    producers_in_batch = [batch.producer_names[p] for p in range(len(batch.epochs))]
    if name not in producers_in_batch:
        return NOT_KNOWN
    mine = batch.sequence_ids == sequence_id
    if len(producers_in_batch) > 1:
        mine &= batch.producer_indexes == producers_in_batch.index(name)
    rows = np.flatnonzero(mine)
    return int(places[BASE_INDEX] + rows[-1]) if len(rows) else NOT_KNOWN
