"""The runs of a topic's window of deduplication IDs: looked through for its frames, made of what leaves memory, merged.

Runs are built beside serving: in threads, by kernels that leave other threads alone, and written bit by bit.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from seqdedupe.core.id_runs import (
    MILLISECONDS_A_SECOND,
    Entries,
    Imported,
    Piece,
    Run,
    entries_in,
    entries_of,
    find,
    parts_of,
)
from seqdedupe.core.id_table import IMPORTED, NOWHERE
from seqdedupe.core.id_window import IdWindow
from seqdedupe.errors import DamagedError, SeqdedupeError, error
from seqdedupe.format.jit import Int64s
from seqdedupe.store.db import Store
from seqdedupe.store.imported import FIRST_RUN
from seqdedupe.store.windows import RunWriter, read_pages
from seqdedupe.topic.frame import Frame, check_by_id
from seqdedupe.topic.window_imported import WindowImported

MOVED_PART = 8
"""A run has one in so many of the IDs in memory, or a chunk."""
MAX_RUNS = 8
"""From more on the smallest neighbours are merged: every new ID is looked for in the filters of all."""
PAGES_A_PART = 64
"""Of a run, merged at once."""
READ_AT_ONCE = 1024
"""Pages, for a frame."""
TIDIED_AT_ONCE = 4096
"""IDs, in one step of the event loop."""


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Where the IDs of a frame are in the runs of a generation: each one's index, NOWHERE for others. And in what was
    imported: the second of each."""

    generation: int
    imported: Imported | None
    indexes: Int64s
    seconds: Int64s


class WindowRuns:
    """`take_snapshot` returns when one is durable that began after the call, or raises why there is none.

    Once it is closed nothing is written and named any more, whatever is being built: the incarnation may be another
    topic's by then.
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
        self._damaged: list[tuple[Run, Run]] = []
        """Neighbours of which one cannot be read: others are merged in their stead."""

    def close(self) -> None:
        self.is_closed = True

    def check_open(self) -> None:
        """Raises DRAINING."""
        if self.is_closed:
            raise error("DRAINING", "the topic is closed")

    # -- looking up ----------------------------------------------------------------------------------------------

    async def look_up(self, encoded: bytes) -> LookedUp | None:
        """Reads for a frame what is to be decided next, without holding up others; None if nothing has to be read.

        What it answers is for the step of the event loop that follows: later the runs may be others.
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
            # Whoever decides about the frame finds the same, and says so.
            return None

    def older(self, frame: Frame, since_ms: int, looked_up: LookedUp | None) -> Int64s:
        """The index of each ID of a frame in the runs there are now, or IMPORTED: as it was looked up, or read at once.

        Of what was imported that counts which was published after `since_ms`. Raises STORE_DAMAGED, STORE_UNAVAILABLE,
        and what `WindowImported.to_look_into` raises.
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

    def _candidates(self, window: IdWindow, frame: Frame) -> list[tuple[Run, int, int]]:
        """Rows that a filter lets through: in which run, and in which of its pages."""
        found = window.older.candidates(frame.view, frame.places, window.hash_key, window.first_index)
        if (imported := self.imported.in_force) is not None:
            found += [(imported.run, row, pages) for row, pages in imported.candidates(frame.view, frame.places)]
        return [(run, row, page) for run, row, pages in found for page in pages]

    def _found(self, frame: Frame, wanted: "list[tuple[Run, int, int]] | tuple[()]") -> tuple[Int64s, Int64s]:
        """The highest index of each row, and the highest second, of those that these pages have with its very bytes.
        Blocks, in any thread."""
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
        """The oldest IDs in memory lie in a run from now on. Whether there were any that could.

        Raises STORE_UNAVAILABLE, DRAINING, and what `take_snapshot` raises: they are in memory then, and nothing is
        lost.
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
        while window.tidy(TIDIED_AT_ONCE):  # noqa: ASYNC110 (this is what gets it done)
            await asyncio.sleep(0)
        return True

    async def merge(self) -> bool:
        """Two runs are one from now on, if there are too many. Whether there were. Raises as `move_out`."""
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
        """A snapshot that names what is offered; if that is forgotten by now it is given up."""
        self.check_open()
        offered = window.older.offered
        await self._take_snapshot()
        if window.older.offered is offered:
            window.older.offered = None

    async def _oldest(self, window: IdWindow) -> list[Piece]:
        """Copies of the oldest chunks in memory, which follow one another."""
        pieces: list[Piece] = []
        for first_index in window.oldest_chunks(MOVED_PART):
            piece = window.whole_chunk(first_index)
            if piece is None:
                # It is forgotten by now, and with it all that are older.
                pieces.clear()
            else:
                pieces.append(piece)
            await asyncio.sleep(0)
        return pieces

    async def _made(self, window: IdWindow, pieces: list[Piece]) -> Run:
        first_index, end_index = pieces[0].first_index, pieces[-1].end_index
        entries = await asyncio.to_thread(entries_of, pieces, first_index, window.hash_key)
        chunks = [
            (piece.first_index, len(piece.sizes), len(piece.ids), piece.first_time_ms, piece.last_time_ms)
            for piece in pieces
        ]
        writer = await self._begun(window, first_index, end_index)
        await writer.add(entries)
        return await writer.finish(end_index, np.array(chunks, np.int64))

    async def _merged(self, window: IdWindow, pair: tuple[Run, Run]) -> Run | None:
        """One run with all of these that is not forgotten; None if all of it is."""
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

    def _entries(self, wanted: list[tuple[Run, int]], first_index: int, key: Int64s) -> Entries:
        pages = read_pages(self._store, self._incarnation, [(run.number, page) for run, page in wanted])
        based = [(page, run.first_index - first_index) for (run, _), page in zip(wanted, pages, strict=True)]
        return entries_in(based, key)
