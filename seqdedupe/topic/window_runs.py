"""The older part of a topic's window of deduplication IDs: runs in the store.

IDs that leave memory are moved into runs, and runs are merged; one run may be imported. Frames are looked up in the
runs. The memory limit for the windows of all topics determines when IDs leave memory.

Runs are built in the background and written in small parts, in threads, by kernels that do not block other threads.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from seqdedupe.core.id_runs import (
    MILLISECONDS_A_SECOND,
    IdRun,
    ImportedIds,
    Piece,
    RunEntries,
    entries_in,
    entries_of,
    find,
    parts_of,
)
from seqdedupe.core.id_table import IMPORTED, NOWHERE
from seqdedupe.core.id_window import IdWindow
from seqdedupe.errors import DamagedError, SeqdedupeError, error
from seqdedupe.figures import counted
from seqdedupe.format.jit import Int64s
from seqdedupe.store.db import Store
from seqdedupe.store.windows import FIRST_RUN, RunWriter, read_pages
from seqdedupe.tasks import Broadcast
from seqdedupe.topic.frame import Frame, check_by_id
from seqdedupe.topic.policy import Policy

MOVED_PART = 8
"""One part in this number of the IDs in memory is moved to a run, or one chunk."""
MAX_RUNS = 8
"""If there are more runs than this, the smallest neighbours are merged: every new ID is looked up in the filters of all
runs."""
PAGES_A_PART = 64
"""The number of pages of a run that are merged in one step."""
READ_AT_ONCE = 1024
"""The number of pages that are read together for a frame."""
TIDIED_AT_ONCE = 4096
"""The number of IDs tidied in one step of the event loop."""
EXCESS = 4
"""One part in this number of the limit may be used in addition, before publishers wait."""

logger = logging.getLogger("seqdedupe.exports")
_topic_logger = logging.getLogger("seqdedupe.topic")


# -- The import.


class WindowImported:
    """The import of a window. `policy` returns the policy in force. `on_expired` is called when all imported IDs have
    expired."""

    def __init__(
        self,
        topic: str,
        there: ImportedIds | None,
        policy: Callable[[], Policy],
        on_expired: Callable[[], None],
    ) -> None:
        self.there = there
        """The import in the store. It is valid only if the policy names it."""
        self.is_under_way = False
        """Whether the log may contain a policy that names the import, but is not in force yet."""
        self.changing = asyncio.Lock()
        """The lock for a change of the import in the store together with the policy."""
        self._topic = topic
        self._policy = policy
        self._on_expired = on_expired
        self._next_number = FIRST_RUN if there is None else there.run.number + 1

    def take_number(self) -> int:
        """Return the number of a new run. No number is used twice. Otherwise a record that names the first run would
        seem to name the second run, whose IDs are hashed with a different key."""
        self._next_number += 1
        return self._next_number - 1

    @property
    def in_force(self) -> ImportedIds | None:
        """The import in force; None if no window was imported, or the import is missing."""
        wanted = self._policy().imported
        if wanted is None or self.there is None or self.there.checksum != wanted.checksum:
            return None
        return self.there

    @property
    def is_missing(self) -> bool:
        """Whether a window was imported but is not in the store."""
        return self._policy().imported is not None and self.in_force is None

    @property
    def memory_bytes(self) -> int:
        return 0 if self.there is None else self.there.run.memory_bytes

    def settled(self) -> None:
        """Record that everything in the log is in force."""
        self.is_under_way = False

    def say_if_missing(self) -> None:
        """If the import is missing, log an error, because an operator must be notified."""
        wanted = self._policy().imported
        if wanted is not None and self.is_missing:
            _topic_logger.error(
                "topic %s: the deduplication IDs that were imported into it are not in the store: nothing is taken "
                "until the same window is imported again (the file whose SHA-256 is %s)",
                self._topic,
                wanted.checksum.hex(),
            )

    def to_look_into(self, since_ms: int) -> ImportedIds | None:
        """Return the import if a verdict about IDs published after this time needs it; otherwise None.

        Raises WINDOW_MISSING, and RECOVERING while an import is not durable yet.
        """
        wanted = self._policy().imported
        if self.is_under_way:
            raise error("RECOVERING", f"topic {self._topic} accepts no messages now: a window is being imported")
        if wanted is None:
            return None
        if wanted.last_time_ms <= since_ms:
            self._on_expired()
            return None
        if self.is_missing:
            raise error(
                "WINDOW_MISSING",
                f"topic {self._topic} has lost what was imported into it: {counted(wanted.ids, 'deduplication ID')}",
                ids=wanted.ids,
                checksum=wanted.checksum.hex(),
            )
        return self.there


# -- The runs of one window.


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The result of looking up a frame's IDs in the runs of a generation: the index of each ID, or NOWHERE. For the
    import: the publish second of each ID."""

    generation: int
    imported: ImportedIds | None
    indexes: Int64s
    seconds: Int64s


class WindowRuns:
    """The runs of one window. `take_snapshot` returns when a snapshot that began after the call is durable, or raises.

    After the window is closed, it writes and names no run any more, not even a run that is being built. By then the
    incarnation may belong to another topic object.
    """

    def __init__(
        self,
        store: Store,
        incarnation: int,
        window: Callable[[], IdWindow | None],
        imported: WindowImported,
        take_snapshot: Callable[[], Awaitable[None]],
    ) -> None:
        self.imported = imported
        self._store = store
        self._incarnation = incarnation
        self._window = window
        self._take_snapshot = take_snapshot
        self._building = asyncio.Lock()
        self.is_closed = False
        self._damaged: list[tuple[IdRun, IdRun]] = []
        """Pairs of neighbours of which one run cannot be read: other pairs are merged instead."""

    def close(self) -> None:
        self.is_closed = True

    def check_open(self) -> None:
        """Raise DRAINING if the window is closed."""
        if self.is_closed:
            raise error("DRAINING", "the topic is closed")

    # -- looking up ----------------------------------------------------------------------------------------------

    async def look_up(self, encoded: bytes) -> LookedUp | None:
        """Read the data that the decision about a frame needs, without blocking other tasks. Return None if nothing
        must be read.

        The result is valid only in the next step of the event loop: later the runs may have changed.
        """
        window = self._window()
        if window is None or not (window.older.runs or self.imported.in_force):
            return None
        try:
            frame = check_by_id(encoded)
            while True:
                looked_into = window.older.generation, self.imported.in_force
                wanted = self._candidates(window, frame)
                try:
                    found = await asyncio.to_thread(self._found, frame, wanted) if wanted else self._found(frame, ())
                except SeqdedupeError:
                    # A run that was dropped meanwhile cannot be read.
                    if (window.older.generation, self.imported.in_force) == looked_into:
                        raise
                    continue
                if (window.older.generation, self.imported.in_force) == looked_into:
                    return LookedUp(*looked_into, *found)
        except SeqdedupeError:
            # The decision about the frame finds the same error, and reports it.
            return None

    def older(self, frame: Frame, since_ms: int, looked_up: LookedUp | None) -> Int64s:
        """Return the index of each ID of a frame in the current runs, or IMPORTED. Use `looked_up`; if it is outdated,
        read now.

        IDs of the import count only if they were published after `since_ms`. Raises STORE_DAMAGED, STORE_UNAVAILABLE,
        and the errors of `WindowImported.to_look_into`.
        """
        window, imported = self._window(), self.imported.to_look_into(since_ms)
        if window is None or not (window.older.runs or imported):
            return np.zeros(0, np.int64)
        if (
            looked_up is None
            or looked_up.generation != window.older.generation
            or looked_up.imported is not self.imported.in_force
        ):
            found = self._found(frame, self._candidates(window, frame))
            looked_up = LookedUp(window.older.generation, imported, *found)
        if imported is None:
            return looked_up.indexes
        seconds = looked_up.seconds
        counts = (seconds != NOWHERE) & (seconds * MILLISECONDS_A_SECOND > since_ms)
        return np.where(counts & (looked_up.indexes < window.first_index), IMPORTED, looked_up.indexes)

    def _candidates(self, window: IdWindow, frame: Frame) -> list[tuple[IdRun, int, int]]:
        """Return the rows that the filter of a run does not exclude, each with the run and the page."""
        found = window.older.candidates(frame.view, frame.places, window.hash_key, window.first_index)
        if (imported := self.imported.in_force) is not None:
            found += [(imported.run, row, pages) for row, pages in imported.candidates(frame.view, frame.places)]
        return [(run, row, page) for run, row, pages in found for page in pages]

    def _found(self, frame: Frame, wanted: "list[tuple[IdRun, int, int]] | tuple[()]") -> tuple[Int64s, Int64s]:
        """Return the highest index and the highest publish second of each row, for IDs that are in these pages with the
        same bytes. The call blocks, and any thread may make it."""
        indexes, seconds = np.full(frame.rows, NOWHERE, np.int64), np.full(frame.rows, NOWHERE, np.int64)
        for at in range(0, len(wanted), READ_AT_ONCE):
            some = wanted[at : at + READ_AT_ONCE]
            pages = read_pages(self._store, self._incarnation, [(run.number, page) for run, _, page in some])
            for (run, row, _), page in zip(some, pages, strict=True):
                delta = find(np.frombuffer(page, np.uint8), frame.view, frame.places, row)
                if delta != NOWHERE:
                    found = seconds if run.number >= FIRST_RUN else indexes
                    found[row] = max(found[row], run.first_index + delta)
        return indexes, seconds

    # -- out of memory -------------------------------------------------------------------------------------------

    async def move_out(self) -> bool:
        """Move the oldest IDs in memory to a run. Return whether there were such IDs.

        Raises STORE_UNAVAILABLE, DRAINING, and the errors of `take_snapshot`. After an error, the IDs are still in
        memory, and no data is lost.
        """
        window = self._window()
        if window is None:
            return False
        async with self._building:
            self.check_open()
            if window.older.offered is None:
                clears = window.older.clears
                pieces = await self._oldest(window)
                if not pieces:
                    return False
                run = await self._made(window, pieces)
                if window.older.clears != clears:
                    return False
                window.older.offer(run)
            await self._name(window)
        while window.tidy(TIDIED_AT_ONCE):  # noqa: ASYNC110 (this loop does the work)
            await asyncio.sleep(0)
        return True

    async def merge(self) -> bool:
        """If there are too many runs, merge two runs into one. Return whether there were too many. Raises the errors of
        `move_out`."""
        window = self._window()
        if window is None:
            return False
        async with self._building:
            self.check_open()
            older = window.older
            pair, clears, generation = older.smallest_pair(MAX_RUNS, self._damaged), older.clears, older.generation
            if pair is None or older.offered is not None:
                return False
            try:
                run = await self._merged(window, pair)
            except SeqdedupeError as e:
                # A run that is dropped meanwhile cannot be read.
                if older.generation != generation:
                    return False
                if isinstance(e, DamagedError):
                    self._damaged = [*(some for some in self._damaged if set(some) <= set(older.runs)), pair]
                raise
            if run is None or older.clears != clears:
                return False
            older.offer(run)
            await self._name(window)
        return True

    async def _name(self, window: IdWindow) -> None:
        """Take a snapshot that names the offered run. If the run is forgotten by now, drop the run."""
        self.check_open()
        offered = window.older.offered
        await self._take_snapshot()
        if window.older.offered is offered:
            window.older.offered = None

    async def _oldest(self, window: IdWindow) -> list[Piece]:
        """Return copies of the oldest chunks in memory, which follow one another."""
        pieces: list[Piece] = []
        for first_index in window.oldest_chunks(MOVED_PART):
            piece = window.whole_chunk(first_index)
            if piece is None:
                # This run is forgotten by now, and so are all older runs.
                pieces.clear()
            else:
                pieces.append(piece)
            await asyncio.sleep(0)
        return pieces

    async def _made(self, window: IdWindow, pieces: list[Piece]) -> IdRun:
        first_index, end_index = pieces[0].first_index, pieces[-1].end_index
        entries = await asyncio.to_thread(entries_of, pieces, first_index, window.hash_key)
        chunks = [
            (piece.first_index, len(piece.sizes), len(piece.ids), piece.first_time_ms, piece.last_time_ms)
            for piece in pieces
        ]
        writer = await self._begun(window, first_index, end_index)
        await writer.add(entries)
        return await writer.finish(end_index, np.array(chunks, np.int64))

    async def _merged(self, window: IdWindow, pair: tuple[IdRun, IdRun]) -> IdRun | None:
        """Return one run with all IDs of these runs that are not forgotten; None if all IDs are forgotten."""
        chunks = np.concatenate([run.chunks for run in pair])
        chunks = chunks[chunks[:, 0] + chunks[:, 1] > window.first_index]
        if not len(chunks):
            return None
        first_index, end_index = int(chunks[0, 0]), pair[-1].end_index
        writer = await self._begun(window, first_index, end_index)
        for low, high in parts_of(list(pair), PAGES_A_PART):
            wanted = [(run, page) for run in pair for page in run.pages_between(low, high)]
            entries = await asyncio.to_thread(self._entries, wanted, first_index, window.hash_key)
            await writer.add(entries, low, high)
        return await writer.finish(end_index, chunks)

    async def _begun(self, window: IdWindow, first_index: int, end_index: int) -> RunWriter:
        writer = RunWriter(
            self._store,
            self._incarnation,
            window.older.next_number,
            first_index,
            end_index - first_index,
            self.check_open,
        )
        await writer.begin()
        return writer

    def _entries(self, wanted: list[tuple[IdRun, int]], first_index: int, key: Int64s) -> RunEntries:
        pages = read_pages(self._store, self._incarnation, [(run.number, page) for run, page in wanted])
        based = [(page, run.first_index - first_index) for (run, _), page in zip(wanted, pages, strict=True)]
        return entries_in(based, key)


# -- The memory of all windows.


class WindowMemory:
    """The memory limit of all windows. While the windows together exceed `limit_bytes`, the largest window moves its
    oldest IDs to a run.

    One run is made at a time. Meanwhile, new IDs may use some memory above the limit (`EXCESS`). A window that is read
    from the log uses the memory that it needs. While the store cannot be written, all IDs stay in memory.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._bytes: dict[WindowRuns, int] = {}
        self._windows: dict[WindowRuns, IdWindow] = {}
        self._total = 0
        self._moving: asyncio.Task[None] | None = None
        self._progress = Broadcast()

    async def room(self) -> None:
        """Wait until memory has room for more IDs, or until it is clear that no memory can be freed now."""
        while self._moving is not None and self._total > self.limit_bytes + self.limit_bytes // EXCESS:
            await self._progress.wait()

    def measure(self, runs: WindowRuns, window: IdWindow) -> None:
        """Measure a window that may have grown. The window of a closed topic does not count."""
        if runs.is_closed:
            return
        self._windows[runs] = window
        self._total -= self._bytes.get(runs, 0)
        self._bytes[runs] = window.needed_bytes + runs.imported.memory_bytes
        self._total += self._bytes[runs]
        if self._total > self.limit_bytes and self._moving is None:
            self._moving = asyncio.ensure_future(self._make_room())
            self._moving.add_done_callback(self._moved)

    async def forget(self, runs: WindowRuns) -> None:
        """Stop moving and measuring the window of a topic that is closed."""
        self._windows.pop(runs, None)
        self._total -= self._bytes.pop(runs, 0)
        if self._moving is not None:
            self._moving.cancel()
            await asyncio.wait({self._moving})

    async def _make_room(self) -> None:
        failed: set[WindowRuns] = set()
        while self._total > self.limit_bytes:
            left = [runs for runs in self._bytes if runs not in failed]
            for runs in sorted(left, key=lambda runs: self._bytes[runs], reverse=True):
                try:
                    if await runs.move_out():
                        break
                except SeqdedupeError as e:
                    # A topic that cannot take a snapshot now does not block other topics.
                    failed.add(runs)
                    logger.warning("deduplication IDs stay in memory for now: %s", e)
            else:
                return
            self._measure_again(runs)
            self._progress.tell()
            await self._merge(runs)

    async def _merge(self, runs: WindowRuns) -> None:
        try:
            while await runs.merge():
                self._measure_again(runs)
        except SeqdedupeError as e:
            logger.warning("runs of deduplication IDs are not merged for now: %s", e)

    def _measure_again(self, runs: WindowRuns) -> None:
        if (window := self._windows.get(runs)) is not None:
            needed_bytes = window.needed_bytes + runs.imported.memory_bytes
            self._total += needed_bytes - self._bytes[runs]
            self._bytes[runs] = needed_bytes

    def _moved(self, task: "asyncio.Task[None]") -> None:
        self._moving = None
        self._progress.tell()
        if not task.cancelled() and (e := task.exception()) is not None:
            logger.error("deduplication IDs stay in memory", exc_info=e)
