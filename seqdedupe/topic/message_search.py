"""Searches the log for a producer's message that is no longer in the ring of recent messages."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import numpy as np

from seqdedupe import batch as batches
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import PERSISTED, STATED
from seqdedupe.errors import DamagedError, PositionError, SeqdedupeError, error
from seqdedupe.format.columns import BASE_INDEX, COLUMNS_END, PLACES, PUBLISH_TIME_MS, RECORD_END, RECORD_START
from seqdedupe.format.headers import NO_KEY
from seqdedupe.format.jit import Int64s
from seqdedupe.format.records import END, body_of, scan_record, span
from seqdedupe.log.contract import LargerRecordError, Log

NOT_KNOWN = -1

LOOKED_THROUGH_MESSAGES = 2**16
"""The search covers this number of messages, and approximately this number of bytes, before the log's end."""
LOOKED_THROUGH_BYTES = 64 * 1024 * 1024
_PAGE_BYTES = 256 * 1024
"""The number of bytes searched in one step of the event loop."""

LOOK_BYTES = 1024 * 1024
"""The approximate number of bytes that a search in the log keeps in memory, unless one record is larger."""

Room = Callable[[int], Awaitable[int]]
"""A function called before a read of the log. Its parameter is the smallest useful number of bytes (0: any). It returns
the number of bytes that may be read."""


async def any_room(least_bytes: int) -> int:
    return max(LOOK_BYTES, least_bytes)


async def index_in_log(producers: Producers, number: int, log: Log) -> int:
    """Return the index of the message with a producer's persisted ID; NOT_KNOWN if the message is gone, or cannot be
    read now.

    This reads the log: STATED is the base index of the batch with the message, unless retention has dropped that batch,
    or deduplication was disabled meanwhile.
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
    """Return the first index that is near enough to the end, in messages and in bytes."""
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
            raw, _ = await log.read(here, stop, _PAGE_BYTES, most_bytes)
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
