"""One window of deduplication IDs, dealt to the partitions of a topic: each gets the IDs that belong there.

What a partition gets follows from the file and the number of partitions alone, byte by byte. So the same file may be
dealt again, whatever ended it before: a partition that has its part takes it for the same one.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from seqdedupe import windows
from seqdedupe.client.spread_by_id import check_route_is_known
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.names import partition_name
from seqdedupe.routing import partition_of
from seqdedupe.v1 import admin_pb2

AT_ONCE = 64
"""Of so many partitions the parts are written while the file is read once: each has a block in memory."""


class Part(NamedTuple):
    """What a partition gets."""

    topic: str
    path: Path
    ids: int


async def import_window(
    whole: admin_pb2.Topic,
    path: Path,
    look: Callable[[str], Awaitable[admin_pb2.Topic]],
    bring: Callable[[str, Path], Awaitable[int]],
) -> int:
    """Imports it into a partitioned topic; returns how many IDs it has. A partition that none belongs to is left alone.

    `look` gives a topic as it is, `bring` imports a file into one. Raises as `Admin.import_window`, and then says how
    many partitions have their part; INVALID_REQUEST for a topic to whose partitions no ID leads, RECOVERING while that
    is not known.
    """
    _check_id_leads(whole)
    ids = done = 0
    for first in range(0, whole.partitions, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, whole.partitions))
        with TemporaryDirectory(prefix="seqdedupe-") as folder:
            parts = await asyncio.to_thread(_dealt, whole, path, Path(folder), numbers)
            for part in parts:
                _check_takes(await look(part.topic))
            for part in parts:
                try:
                    ids += await bring(part.topic, part.path)
                except SeqdedupeError as e:
                    raise _broken_off(e, part.topic, done) from e
                done += 1
    return ids


def _check_id_leads(whole: admin_pb2.Topic) -> None:
    check_route_is_known(whole)
    if whole.deduplication_mode != admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID:
        why = f"topic {whole.name} is one of sequence IDs: no window of deduplication IDs goes into it"
        raise error("INVALID_REQUEST", why)
    if whole.deduplication_route == admin_pb2.DEDUPLICATION_ROUTE_KEY:
        raise error(
            "INVALID_REQUEST",
            f"messages of topic {whole.name} find their partitions by their keys, which a window does not have: nobody "
            "knows in which partition a copy will come",
            hint=f"Import the whole file into each partition: `seqdedupe import {whole.name}-partition-0 FILE`, and so "
            "on.",
        )


def _check_takes(partition: admin_pb2.Topic) -> None:
    """Raises TOPIC_IN_USE: before anything is in force in any of them, not when half of them have their part."""
    if partition.last.index >= 0 and not partition.window_imported:
        raise error("TOPIC_IN_USE", f"the window cannot be imported into topic {partition.name}: it has messages")


def _broken_off(e: SeqdedupeError, partition: str, done: int) -> SeqdedupeError:
    return error(
        e.reason,
        f"{partition}: {e.message} ({done} partitions before it have their part)",
        hint=f"{e.hint} Then import the same file again, all of it: what is in force stays.",
        retry_delay_ms=e.retry_delay_ms,
        **e.numbers,
    )


def _dealt(whole: admin_pb2.Topic, path: Path, folder: Path, numbers: range) -> list[Part]:
    """Writes what each of these partitions gets; those that get something. Blocks."""
    paths = {number: folder / str(number) for number in numbers}
    with ExitStack() as files, closing(windows.read(path)) as blocks:
        writers = {number: files.enter_context(windows.writing(part)) for number, part in paths.items()}
        next(blocks)
        for block in blocks:
            for one, time_ms in windows.known_in(block):
                if (writer := writers.get(partition_of(one, b"", whole.partitions))) is not None:
                    writer.add(one, time_ms)
    return [
        Part(partition_name(whole.name, number), paths[number], writer.ids)
        for number, writer in writers.items()
        if writer.ids
    ]
