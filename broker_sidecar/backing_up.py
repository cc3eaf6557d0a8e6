"""What goes into a backup, of one moment.

What the store says, and how far readers may see the logs, is looked at in one step of the event loop. The rest is
copying: a log is only appended to, and retention waits.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from broker_sidecar.data import Data
from seqdedupe.backup.making import OF_THE_WHOLE, Making
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.embedded.inspection import DurablePart
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.names import whole_of
from seqdedupe.store import directories
from seqdedupe.store.records import incarnation_of
from seqdedupe.store.topics import TopicRecord, TopicState
from seqdedupe.topic.directory import Topics

Run = Callable[..., Awaitable[Any]]
"""Calls a function in the backup's thread."""


class _Moment(NamedTuple):
    """What there is to be copied."""

    at_us: int
    records: list[TopicRecord]
    """Of the topics that there are."""
    rows: Iterator[tuple[bytes, bytes]]
    """All records of the store but those of topics that are being made or deleted, or were moved to other sidecars."""
    parts: dict[int, Sequence[DurablePart]]
    """Of each log that is open, by incarnation."""
    closed: dict[int, SeqdedupeError]
    """Why others are not."""


async def back_up(data: Data, folder: Path, making: Making, others: list[Path], run: Run) -> int:
    """Makes a backup of the data directory in this folder; how many topics it has. `others` are perhaps backups too.

    Raises DRAINING, STORE_DAMAGED, STORE_UNAVAILABLE, and what `Making` raises.
    """
    await run(making.begin, others)
    topics = data.all_topics
    if data.logs is None:
        # The messages are elsewhere.
        moment = _moment(data, {})
        await run(making.add_store, moment.rows, moment.at_us)
        records = moment.records
    else:
        await topics.waiting.use_all()
        async with data.logs.kept():
            moment = await _settled_moment(data, data.logs)
            await run(making.add_store, moment.rows, moment.at_us)
            records = await _add_logs(making, moment, topics, run)
    await run(making.add_file, folder / directories.SHARDS_FILE)
    whole = directories.whole_of(folder)
    for name in OF_THE_WHOLE:
        await run(making.add_of_the_whole, (whole or folder) / name, whole is not None)
    await run(making.finish)
    return len(records)


async def _settled_moment(data: Data, logs: EmbeddedLogs) -> _Moment:
    while renewing := list(data.all_topics.renewing.values()):
        await asyncio.wait(renewing)
    return _moment(data, logs.parts())


def _moment(data: Data, parts: dict[int, Sequence[DurablePart]]) -> _Moment:
    """As of this call, which nothing comes between."""
    topics, store = data.all_topics, data.store
    if topics.is_draining:
        raise error("DRAINING", "the sidecar is shutting down")
    rows = store.scan(b"", b"\xff")
    # From the first one on the store is shown as it is now, whenever the others are read.
    first = list(islice(rows, 1))
    moved = {one.record.incarnation for one in topics.closed.values() if data.has_moved(one.record)}
    active = [record for record in store.topics() if record.state is TopicState.ACTIVE]
    records = [record for record in active if record.incarnation not in moved]
    wanted = {None, *(record.incarnation for record in records)}
    kept = ((key, value) for key, value in chain(first, rows) if incarnation_of(key) in wanted)
    closed = {one.record.incarnation: one.told for one in topics.closed.values()}
    return _Moment(time.time_ns() // 1000, records, kept, parts, closed)


async def _add_logs(making: Making, moment: _Moment, topics: Topics[Any], run: Run) -> list[TopicRecord]:
    """The topics that are in the backup."""
    gone: list[TopicRecord] = []
    for record in moment.records:
        try:
            if (parts := moment.parts.get(record.incarnation)) is None:
                why = moment.closed.get(record.incarnation)
                raise error("LOG_UNREADABLE", str(why) if why else "its log was closed")
            await run(making.add_log, record, parts)
        except SeqdedupeError as e:
            if e.reason not in ("LOG_UNREADABLE", "NEWER_FORMAT"):
                raise
            if _is_deleted(topics, record):
                gone.append(record)
            else:
                making.leave_out(record, e.message)
    # All partitions of a topic are deleted together.
    wholes = {whole_of(record.name) for record in gone if record.partitions}
    gone = [one for one in moment.records if one in gone or (one.partitions and whole_of(one.name) in wholes)]
    if gone:
        store = await run(making.open_store)
        try:
            for record in gone:
                await run(making.drop_log, record)
                await store.remove_topic(record.incarnation)
        finally:
            await run(store.close)
    left_out = {fault.incarnation for fault in making.manifest.left_out}
    return [record for record in moment.records if record not in gone and record.incarnation not in left_out]


def _is_deleted(topics: Topics[Any], record: TopicRecord) -> bool:
    """Whether the topic is being deleted, or was."""
    known = topics.records.get(record.name)
    is_changing = record.name in topics.deleting or (record.partitions and whole_of(record.name) in topics.changing)
    return bool(is_changing) or known is None or known.incarnation != record.incarnation
