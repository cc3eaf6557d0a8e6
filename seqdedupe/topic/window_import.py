"""An import of a window of deduplication IDs into a topic that has no messages yet.

However many IDs come, memory has a part of them: parts are sorted by hash and written to the store as runs, which are
merged into one. When that is durable the log is told, and from then on it counts; before, it is left over, and goes.
"""

import asyncio
import logging
import secrets
from dataclasses import replace

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
from seqdedupe.format.jit import Uint8s
from seqdedupe.store import imported_run as stored_import
from seqdedupe.store.windows import RunWriter, read_pages
from seqdedupe.topic.base import State
from seqdedupe.topic.policy import ImportedWindow
from seqdedupe.topic.topic import Topic

logger = logging.getLogger("seqdedupe.topic")

PART_BYTES = 32 * 1024 * 1024
"""Of blocks, of which a run is made."""
MERGED_PAGES = 1024
"""So many are merged at once, and some of each run."""


class WindowImport:
    """An import into one topic; an earlier one that is not finished never will be.

    Nothing of it is in force unless `finish` is called. All raise INVALID_REQUEST for what is no window, TOPIC_IN_USE,
    STORE_UNAVAILABLE, and why the topic takes nothing now.
    """

    def __init__(self, topic: Topic, checksum: bytes) -> None:
        self._topic = topic
        self._checksum = checksum
        self._check_takes()
        topic.newest_import = self
        self._key = secrets.token_bytes(SECRET_BYTES)
        if topic.ids.imported.there is None:
            # What could not be read may name a run that is written anew now, and would pass for whole.
            stored_import.remove(topic.store, topic.incarnation)
        self._digest = WindowChecksum()
        self._ids = self._id_bytes = 0
        self._first_ms, self._last_ms = LATEST_MS, 0
        self._last_id: Uint8s = _NO_BYTES
        self._part: list[WindowBlock] = []
        """What has come and is in no run yet."""
        self._part_bytes = 0
        self._runs: list[IdRun] = []

    async def add(self, block: bytes) -> None:
        """The next block of the file."""
        self._check()
        await asyncio.to_thread(self._take, block)
        if self._part_bytes >= PART_BYTES:
            self._runs.append(await self._part_written(for_good=False))

    async def finish(self, ids: int) -> None:
        """That was all, so many IDs. It is in force and durable on return; raises why it is not, or OUTCOME_UNKNOWN."""
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
            await topic.store.flush(stored_import.put(topic.store, topic.incarnation, imported))
            self._check()
            topic.ids.imported.there = imported
            self._remove_other_runs()
            await self._put_in_force(ImportedWindow(self._checksum, self._ids, self._last_ms))

    def close(self) -> None:
        """Lets go of what it holds."""
        if self._topic.newest_import is self:
            self._topic.newest_import = None
            if self._topic.state is not State.DRAINING:
                self._remove_other_runs()

    def _remove_other_runs(self) -> None:
        """Nothing is left of runs that were made on the way, nor what names one that never came to count."""
        try:
            stored_import.keep_only(self._topic.store, self._topic.incarnation, self._topic.ids.imported.there)
        except UnavailableError as e:
            logger.warning("what is left of an import goes at the next start: %s", e)

    def _check(self) -> None:
        self._check_takes()
        if self._topic.newest_import is not self:
            raise error("TOPIC_IN_USE", f"another import into topic {self._topic.name} was begun meanwhile")

    def _check_takes(self) -> None:
        topic = self._topic
        topic.check_serving()
        if topic.window is None:
            why = f"topic {topic.name} is one of sequence IDs: no window of deduplication IDs goes into it"
            raise error("INVALID_REQUEST", why, hint="Into such a topic `seqdedupe import` takes watermarks.")
        there = topic.newest_policy.imported
        if there is None and topic.next_index > 0:
            raise _in_use(topic, "it has messages")
        if there is not None and there.checksum != self._checksum:
            raise _in_use(topic, f"another one was, of the file whose SHA-256 is {there.checksum.hex()}")

    async def _put_in_force(self, window: ImportedWindow) -> None:
        """The log says so, durably, before anything else comes."""
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
        """A run of what has come and is in none yet."""
        entries = await asyncio.to_thread(self._entries)
        self._part, self._part_bytes = [], 0
        # In what is merged nothing is looked up.
        writer = await self._begun(self._ids if for_good else 0)
        await writer.add(entries)
        return await self._finished(writer, self._ids if for_good else len(entries.hashes))

    def _entries(self) -> RunEntries:
        sizes = np.concatenate([_NO_BYTES, *(block.sizes for block in self._part)])
        ids = np.concatenate([_NO_BYTES, *(block.ids for block in self._part)])
        times = np.concatenate([np.zeros(0, np.int64), *(block.times_ms for block in self._part)])
        return entries_with(sizes, seconds_of(times), ids, key_of(self._key))

    async def _merged(self) -> IdRun:
        """One run of all."""
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


_NO_BYTES: Uint8s = np.zeros(0, np.uint8)


def _in_use(topic: Topic, why: str) -> SeqdedupeError:
    return error(
        "TOPIC_IN_USE",
        f"the window cannot be imported into topic {topic.name}: {why}",
        hint="Import it into a topic that was just created, before anything is published.",
    )
