"""Import the watermarks of producers, or a window of deduplication IDs, into a topic that nobody has used yet.

No part of an import takes effect before `finish` is called. `finish` puts the whole import in force. `begin_import`
begins an import of watermarks. `WindowImport` imports a window. Both imports are a `TopicImport`.
"""

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from dataclasses import replace
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np

from seqdedupe.core.id_runs import (
    MAX_ROWS,
    IdRun,
    ImportedIds,
    RunEntries,
    entries_in,
    entries_with,
    first_not_above,
    parts_of,
    seconds_of,
)
from seqdedupe.errors import SeqdedupeError, UnavailableError, error
from seqdedupe.exports import LATEST_MS, WindowBlock, WindowChecksum, parse_block
from seqdedupe.format.headers import SECRET_BYTES, key_of
from seqdedupe.format.jit import Int64s, Uint8s
from seqdedupe.names import decoded_producer_name, new_producer_name
from seqdedupe.store import windows
from seqdedupe.store.windows import RunWriter, read_pages
from seqdedupe.topic.attached import AttachedTopic
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.control import Import, ImportParts
from seqdedupe.topic.policy import ImportedWindow
from seqdedupe.topic.sessions import NAMES_A_STEP
from seqdedupe.topic.topic import Topic

logger = logging.getLogger("seqdedupe.topic")

Imported = TypeVar("Imported", bound=TopicBase)


class TopicImport(ABC, Generic[Imported]):
    """An import into one topic. An earlier import into the topic that is not finished can no longer be finished. The
    caller must call `close`.

    All methods raise TOPIC_IN_USE. If the topic is not serving, they raise the reason.
    """

    def __init__(self, topic: Imported) -> None:
        self._topic: Imported = topic
        self._check_unused()
        topic.newest_import = self

    @property
    def _is_newest(self) -> bool:
        return self._topic.newest_import is self

    def close(self) -> None:
        """Release the topic."""
        if self._is_newest:
            self._topic.newest_import = None

    def _check(self) -> None:
        self._check_unused()
        if not self._is_newest:
            what = f"another import into topic {self._topic.name} was begun meanwhile"
            raise error("TOPIC_IN_USE", what, hint="Let one import end before another one begins.")

    @abstractmethod
    def _check_unused(self) -> None: ...


# -- Watermarks: the highest sequence ID of each producer.


class WatermarksImport(TopicImport[Imported]):
    """An import of watermarks. No part of the import takes effect unless `finish` is called."""

    def __init__(self, topic: Imported) -> None:
        super().__init__(topic)
        self._order = _Order()

    @abstractmethod
    async def add(self, names: list[bytes], persisted: Int64s) -> None:
        """Add producers. Their names must ascend within a call and from call to call. Also raises INVALID_NAME,
        INVALID_SEQUENCE_ID, INVALID_REQUEST."""

    @abstractmethod
    async def finish(self) -> None:
        """Put the import in force. On return, the import is in force and durable. If this method raises, either the
        whole import is in force or no part of it.

        The call blocks the event loop for about 40 ms per million producers, or 170 ms if the import is repeated.
        """

    def _in_use(self, why: str) -> SeqdedupeError:
        return error("TOPIC_IN_USE", f"watermarks cannot be imported into topic {self._topic.name}: {why}")


def begin_import(topic: TopicBase) -> WatermarksImport[Any]:
    """Return an import into this topic. Raises the errors that all methods of the import raise."""
    if isinstance(topic, Topic):
        return _ImportIntoLog(topic)
    if isinstance(topic, AttachedTopic):
        return _ImportIntoStore(topic)
    raise error("INTERNAL", f"no watermarks can be imported into {topic.name}")


class _ImportIntoLog(WatermarksImport[Topic]):
    """An import as control records. Each part is appended to the log when the part arrives. The last part is written
    only if nobody has opened the topic by then. A producer that opens the topic later waits until the last part has
    settled."""

    def __init__(self, topic: Topic) -> None:
        super().__init__(topic)
        self._parts = 0
        self._may_be_complete = False

    async def add(self, names: list[bytes], persisted: Int64s) -> None:
        await self._order.check(names, persisted)
        await self._append(names, persisted, is_last=False)

    async def finish(self) -> None:
        self._may_be_complete = True
        await self._append([], np.zeros(0, np.int64), is_last=True)

    async def _append(self, names: list[bytes], persisted: Int64s, *, is_last: bool) -> None:
        self._check()
        part = Import(names, persisted, self._parts, is_last)
        self._parts += 1
        await self._topic.append_change(part)

    def close(self) -> None:
        # Once `finish` was called, the log may still complete the import. Then these parts must count, as they will in
        # a replay.
        if self._is_newest and not self._may_be_complete:
            self._topic.import_parts.clear()
        super().close()

    def _check_unused(self) -> None:
        topic = self._topic
        topic.check_serving()
        if topic.next_index > 0:
            raise self._in_use("it has messages")
        if topic.producers.has_sessions():
            raise self._in_use("a producer has opened it, or was reset")


class _ImportIntoStore(WatermarksImport[AttachedTopic]):
    """An import into a topic whose log belongs to a broker: only the store holds the import."""

    def __init__(self, topic: AttachedTopic) -> None:
        super().__init__(topic)
        self._parts = ImportParts()
        self._count = 0

    async def add(self, names: list[bytes], persisted: Int64s) -> None:
        self._check()
        await self._order.check(names, persisted)
        self._check()
        self._parts.add(Import(names, persisted, self._count, is_last=False))
        self._count += 1

    async def finish(self) -> None:
        self._check()
        last = Import([], np.zeros(0, np.int64), self._count, is_last=True)
        if (complete := self._parts.add(last)) is not None:
            complete.apply(self._topic.producers, 0)
        await self._topic.keeper.snapshot()

    def _check_unused(self) -> None:
        topic = self._topic
        topic.check_serving()
        if topic.confirmed_index > 0:
            raise self._in_use("its log has entries")
        if topic.is_attached:
            raise self._in_use("a broker is attached")


class _Order:
    """Checks names and IDs, and checks that the names ascend from call to call."""

    def __init__(self) -> None:
        self._last = b""

    async def check(self, names: list[bytes], persisted: Int64s) -> None:
        if len(names) != len(persisted):
            raise error("INVALID_REQUEST", f"persisted has {len(persisted)} values for {len(names)} producer names")
        for place, (before, name) in enumerate(pairwise([self._last, *names]), 1):
            if place % NAMES_A_STEP == 0:
                await asyncio.sleep(0)
            new_producer_name(decoded_producer_name(name))
            if name <= before:
                raise error("INVALID_REQUEST", f"the producer name {name!r} comes after {before!r}: names have to rise")
        if len(names):
            self._last = names[-1]
        below = np.flatnonzero(persisted < 0)
        if len(below):
            which = int(below[0])
            raise error("INVALID_SEQUENCE_ID", f"{persisted[which]} of producer {names[which]!r} is no sequence ID")


# -- A window of deduplication IDs.
#
# Memory holds only one part of the IDs at a time. Each part is sorted by hash and written to the store as a run. Then
# the runs are merged into one run. When the merged run is durable, a record in the log puts the import in force.
# Without that record, the runs are leftovers of an unfinished import, and are removed.

PART_BYTES = 32 * 1024 * 1024
"""When the collected blocks have this number of bytes, they are written as one run."""
MERGED_PAGES = 1024
"""The approximate number of pages merged in one step. A step takes pages of all runs."""

_NO_BYTES: Uint8s = np.zeros(0, np.uint8)


class WindowImport(TopicImport[Topic]):
    """An import of a window. No part of the window takes effect unless `finish` is called. All methods also raise
    INVALID_REQUEST for data that is not a window, and STORE_UNAVAILABLE."""

    def __init__(self, topic: Topic, checksum: bytes) -> None:
        self._checksum = checksum
        super().__init__(topic)
        self._key = secrets.token_bytes(SECRET_BYTES)
        if topic.ids.imported.there is None:
            # The record of an unreadable import may name a run with a number that is used again now. That record would
            # then seem valid.
            windows.remove_import(topic.store, topic.incarnation)
        self._digest = WindowChecksum()
        self._ids = self._id_bytes = 0
        self._first_ms, self._last_ms = LATEST_MS, 0
        self._last_id: Uint8s = _NO_BYTES
        self._part: list[WindowBlock] = []
        """The blocks that have arrived and are not in a run yet."""
        self._part_bytes = 0
        self._runs: list[IdRun] = []

    async def add(self, block: bytes) -> None:
        """Add the next block of the file."""
        self._check()
        await asyncio.to_thread(self._take, block)
        if self._part_bytes >= PART_BYTES:
            self._runs.append(await self._part_written(for_good=False))

    async def finish(self, ids: int) -> None:
        """End the import, which has `ids` IDs. On return, the import is in force and durable. Raises the reason why it
        is not in force, or OUTCOME_UNKNOWN."""
        self._check()
        if ids != self._ids:
            raise error("INVALID_REQUEST", f"ids is {ids}, but {self._ids} have come")
        if self._digest.finish() != self._checksum:
            raise error("INVALID_REQUEST", "the checksum is that of other deduplication IDs than have come")
        run = await (self._merged() if self._runs else self._part_written(for_good=True))
        imported = ImportedIds(run, self._key, self._checksum)
        topic = self._topic
        async with topic.ids.imported.changing:
            await topic.store.wait_until_idle()
            self._check()
            await topic.store.flush(windows.put_import(topic.store, topic.incarnation, imported))
            self._check()
            topic.ids.imported.there = imported
            self._remove_other_runs()
            await self._put_in_force(ImportedWindow(self._checksum, self._ids, self._last_ms))

    def close(self) -> None:
        """Release the topic, and remove the runs that are not in force."""
        was_newest = self._is_newest
        super().close()
        if was_newest and self._topic.state is not State.DRAINING:
            self._remove_other_runs()

    def _remove_other_runs(self) -> None:
        """Remove the intermediate runs, and the record of an import that was never in force."""
        try:
            windows.keep_only_import(self._topic.store, self._topic.incarnation, self._topic.ids.imported.there)
        except UnavailableError as e:
            logger.warning("what is left of an import goes at the next start: %s", e)

    def _check_unused(self) -> None:
        topic = self._topic
        topic.check_serving()
        if topic.window is None:
            why = f"topic {topic.name} is one of sequence IDs: no window of deduplication IDs goes into it"
            raise error("INVALID_REQUEST", why, hint="Into such a topic `seqdedupe import` takes watermarks.")
        there = topic.newest_policy.imported
        if there is None and topic.next_index > 0:
            raise self._in_use("it has messages")
        if there is not None and there.checksum != self._checksum:
            raise self._in_use(f"another one was imported, of the file whose SHA-256 is {there.checksum.hex()}")

    def _in_use(self, why: str) -> SeqdedupeError:
        return error(
            "TOPIC_IN_USE",
            f"the window cannot be imported into topic {self._topic.name}: {why}",
            hint="Import it into a topic that was just created, before anything is published.",
        )

    async def _put_in_force(self, window: ImportedWindow) -> None:
        """Record the window in the log, durably, before any other record."""
        topic = self._topic
        if topic.newest_policy.imported == window:
            await topic.all_settled()
            return
        done = topic.append_change(replace(topic.newest_policy, imported=window))
        topic.ids.imported.is_under_way = True
        done.add_done_callback(lambda _: topic.ids.imported.settled())
        await asyncio.shield(done)

    # -- blocks and runs -----------------------------------------------------------------------------------------

    def _take(self, raw: bytes) -> None:
        block = parse_block(raw)
        rows = len(block.sizes)
        ids = np.concatenate((self._last_id, block.ids))
        begins = [0] * bool(len(self._last_id)) + [len(self._last_id)]
        offsets = np.concatenate((begins, len(self._last_id) + np.cumsum(block.sizes, dtype=np.int64)))
        if first_not_above(ids, offsets) >= 0:
            why = "the deduplication IDs do not rise: a window is sorted by them, and has none twice"
            raise error("INVALID_REQUEST", why)
        self._last_id = block.ids[len(block.ids) - int(block.sizes[-1]) :]
        self._digest.add(raw, rows)
        self._ids += rows
        if self._ids >= MAX_ROWS:
            raise error("INVALID_REQUEST", f"more than {MAX_ROWS - 1} deduplication IDs cannot be imported")
        self._id_bytes += len(block.ids)
        self._first_ms = min(self._first_ms, int(block.times_ms.min()))
        self._last_ms = max(self._last_ms, int(block.times_ms.max()))
        self._part.append(block)
        self._part_bytes += len(raw)

    async def _part_written(self, *, for_good: bool) -> IdRun:
        """Write the collected blocks as a run, and return the run."""
        entries = await asyncio.to_thread(self._entries)
        self._part, self._part_bytes = [], 0
        # A run that will be merged needs no lookup filter, since no IDs are looked up in it.
        writer = await self._begun(self._ids if for_good else 0)
        await writer.add(entries)
        return await self._finished(writer, self._ids if for_good else len(entries.hashes))

    def _entries(self) -> RunEntries:
        sizes = np.concatenate([_NO_BYTES, *(block.sizes for block in self._part)])
        ids = np.concatenate([_NO_BYTES, *(block.ids for block in self._part)])
        times = np.concatenate([np.zeros(0, np.int64), *(block.times_ms for block in self._part)])
        return entries_with(sizes, seconds_of(times), ids, key_of(self._key))

    async def _merged(self) -> IdRun:
        """Return one run with all IDs."""
        if self._part:
            self._runs.append(await self._part_written(for_good=False))
        writer = await self._begun(self._ids)
        for low, high in parts_of(self._runs, MERGED_PAGES + 2 * len(self._runs)):
            wanted = [(run.number, page) for run in self._runs for page in run.pages_between(low, high)]
            await writer.add(await asyncio.to_thread(self._read, wanted), low, high)
        return await self._finished(writer, self._ids)

    def _read(self, wanted: list[tuple[int, int]]) -> RunEntries:
        pages = read_pages(self._topic.store, self._topic.incarnation, wanted)
        return entries_in([(page, 0) for page in pages], key_of(self._key))

    async def _begun(self, ids: int) -> RunWriter:
        number = self._topic.ids.imported.take_number()
        writer = RunWriter(self._topic.store, self._topic.incarnation, number, 0, ids, self._check)
        await writer.begin()
        return writer

    async def _finished(self, writer: RunWriter, ids: int) -> IdRun:
        times = min(self._first_ms, self._last_ms), self._last_ms
        return await writer.finish(ids, np.array([(0, ids, self._id_bytes, *times)], np.int64))
