"""Bugs put into windows and their runs on purpose, each a mistake that somebody might make. The property finds all.

Each function breaks the code through a `MonkeyPatch`.
"""

import asyncio
from typing import Any

import numpy as np
import pytest

from seqdedupe.core import id_slots, id_table
from seqdedupe.core.id_older import Older
from seqdedupe.core.id_runs import Run, add_to_filter
from seqdedupe.core.id_table import NOWHERE
from seqdedupe.core.id_window import IdWindow
from seqdedupe.store import id_runs
from seqdedupe.store.ids import WrittenPieces
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic import logged, window_runs
from seqdedupe.topic.frame import check_by_id
from seqdedupe.topic.snapshotter import Snapshotter
from seqdedupe.topic.window_memory import WindowMemory
from seqdedupe.topic.window_runs import WindowRuns


def runs_that_were_looked_up_before_count(patch: pytest.MonkeyPatch) -> None:
    original = WindowRuns.older

    def older(self: WindowRuns, frame: Any, since_ms: int, looked_up: Any) -> Any:
        return looked_up.indexes if looked_up is not None else original(self, frame, since_ms, looked_up)

    patch.setattr(WindowRuns, "older", older)


def what_leaves_memory_is_no_news_to_a_look_up(patch: pytest.MonkeyPatch) -> None:
    """A chunk is freed while somebody has looked into the runs before it."""
    original = Older.named

    def named(self: Older, runs: tuple[Run, ...]) -> None:
        generation = self.generation
        original(self, runs)
        self.generation = generation

    patch.setattr(Older, "named", named)


def a_look_up_that_met_a_dropped_run_is_believed(patch: pytest.MonkeyPatch) -> None:
    async def look_up(self: WindowRuns, encoded: bytes) -> Any:
        window = self._window()
        if window is None or not window.older.runs:
            return None
        frame = check_by_id(encoded)
        wanted = self._candidates(window, frame)
        found = await asyncio.to_thread(self._found, frame, wanted)
        return window_runs.LookedUp(window.older.generation, None, *found)

    patch.setattr(WindowRuns, "look_up", look_up)


def what_goes_takes_the_newest_copy_along(patch: pytest.MonkeyPatch) -> None:
    """Expiry does not compare the highest index of an ID."""

    def forgets(place: int, first: int, end: int, key: Any, slots: Any, ids: Any, offsets: Any, state: Any) -> int:
        gone = id_table.take_out(place, first, end, key, slots, ids, offsets, state)
        for row in range(first, end):
            at = place * id_table.CHUNK_BYTES + int(offsets[place * id_table.CHUNK_OFFSETS + row])
            size = int(offsets[place * id_table.CHUNK_OFFSETS + row + 1]) - at + place * id_table.CHUNK_BYTES
            one = ids[at : at + size].tobytes()
            for slot in slots[slots != id_table.EMPTY].tolist():
                lies = slot & ((1 << 36) - 1)
                other = lies >> id_table.ROW_BITS, lies & (id_table.CHUNK_ROWS - 1)
                begin, stop = (int(offsets[other[0] * id_table.CHUNK_OFFSETS + other[1] + k]) for k in (0, 1))
                base = other[0] * id_table.CHUNK_BYTES
                if ids[base + begin : base + stop].tobytes() == one:
                    gone += id_table.take_out(*other, other[1] + 1, key, slots, ids, offsets, state)
        return gone

    patch.setattr(id_slots, "take_out", forgets)


def the_lowest_index_of_an_id_counts(patch: pytest.MonkeyPatch) -> None:
    original = WindowRuns._found

    def found(self: WindowRuns, frame: Any, wanted: Any) -> Any:
        indexes = seconds = np.full(frame.rows, NOWHERE, np.int64)
        for one in wanted:
            here, seconds = original(self, frame, [one])
            indexes = np.where(indexes == NOWHERE, here, indexes)
        return indexes, seconds

    patch.setattr(WindowRuns, "_found", found)


def a_run_counts_before_a_snapshot_names_it(patch: pytest.MonkeyPatch) -> None:
    original = WindowRuns._name

    async def name(self: WindowRuns, window: IdWindow) -> None:
        runs = window.older.to_name(window.first_index)
        window.named(runs)
        Snapshots(self._store, self._incarnation).drop_left_over(window, end=window.older.next_number)
        await original(self, window)

    patch.setattr(WindowRuns, "_name", name)


def what_a_failed_snapshot_named_is_in_force(patch: pytest.MonkeyPatch) -> None:
    original = Snapshotter._ids

    async def ids(self: Snapshotter, window: IdWindow, next_index: int) -> Any:
        found = await original(self, window, next_index)
        self._named(window, found.runs)
        return found

    patch.setattr(Snapshotter, "_ids", ids)


def what_no_snapshot_names_stays_at_a_start(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Snapshots, "has_left_over", lambda self, window: False)


def a_run_in_use_is_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Older, "numbers", property(lambda self: [run.number for run in self.runs[1:]]))


def the_window_is_cut_where_the_log_begins(patch: pytest.MonkeyPatch) -> None:
    """Recovery puts in order what the log has no more."""
    original = logged.LoggedTopic._replay_ids

    def replay_ids(self: Any, chunk: bytes, batches: Any) -> None:
        window = self.window
        if window is not None and window.first_index < self.log.first_index <= window.confirmed_index:
            index = window.confirmed_index
            window._begin_at(self.log.first_index)
            window._state[[id_table.CONFIRMED, id_table.NEXT]] = index
        original(self, chunk, batches)

    patch.setattr(logged.LoggedTopic, "_replay_ids", replay_ids)


def a_filter_lies(patch: pytest.MonkeyPatch) -> None:
    original = add_to_filter
    patch.setattr(id_runs, "add_to_filter", lambda hashes, words: original(hashes[1:], words))


def a_page_goes_missing_in_a_merge(patch: pytest.MonkeyPatch) -> None:
    original = WindowRuns._entries
    patch.setattr(WindowRuns, "_entries", lambda self, wanted, *rest: original(self, wanted[-1:], *rest))


def forgotten_ids_of_a_merged_run_count(patch: pytest.MonkeyPatch) -> None:
    """The run that is made begins where the older one did."""
    original = id_runs.RunWriter.finish

    async def finish(self: Any, end_index: int, chunks: Any) -> Run:
        run = await original(self, end_index, chunks)
        return Run(run.number, run.first_index + 1, run.end_index, run.first_hashes, run.filter, run.chunks)

    patch.setattr(id_runs.RunWriter, "finish", finish)


def a_snapshot_keeps_the_pieces_of_a_run(patch: pytest.MonkeyPatch) -> None:
    """In the store they are still before what follows."""
    original = Snapshotter._ids

    async def ids(self: Snapshotter, window: IdWindow, next_index: int) -> Any:
        found = await original(self, window, next_index)
        found.moved_from = None
        return found

    patch.setattr(Snapshotter, "_ids", ids)


def pieces_of_an_opening_before_count(patch: pytest.MonkeyPatch) -> None:
    """A snapshot names what may have been lost with it."""
    original = Snapshots._catch_up

    def catch_up(self: Snapshots) -> None:
        pieces = self._pieces
        original(self)
        pieces.end_index = max(pieces.end_index, self._pieces.end_index)
        self._pieces = pieces

    patch.setattr(Snapshots, "_catch_up", catch_up)


def what_is_left_of_pieces_stays(patch: pytest.MonkeyPatch) -> None:
    """Those of a snapshot that was not written to its end, and was cut otherwise."""
    original = WrittenPieces.put

    def put(self: WrittenPieces, batch: Any, piece: Any) -> None:
        self._has_left_over = False
        original(self, batch, piece)

    patch.setattr(WrittenPieces, "put", put)


def what_failed_is_in_a_run(patch: pytest.MonkeyPatch) -> None:
    """Chunks with something in flight move out."""
    original = IdWindow.oldest_chunks

    def oldest_chunks(self: IdWindow, part: int) -> list[int]:
        confirmed = int(self._state[id_table.CONFIRMED])
        self._state[id_table.CONFIRMED] = self._state[id_table.NEXT]
        try:
            return original(self, part)
        finally:
            self._state[id_table.CONFIRMED] = confirmed

    def whole_chunk(self: IdWindow, first_index: int) -> Any:
        confirmed = int(self._state[id_table.CONFIRMED])
        self._state[id_table.CONFIRMED] = self._state[id_table.NEXT]
        try:
            return whole(self, first_index)
        finally:
            self._state[id_table.CONFIRMED] = confirmed

    whole = IdWindow.whole_chunk
    patch.setattr(IdWindow, "oldest_chunks", oldest_chunks)
    patch.setattr(IdWindow, "whole_chunk", whole_chunk)


def publishers_wait_for_a_move_that_was_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowMemory, "_moved", lambda self, task: None)


ALL = [
    runs_that_were_looked_up_before_count,
    what_leaves_memory_is_no_news_to_a_look_up,
    a_look_up_that_met_a_dropped_run_is_believed,
    what_goes_takes_the_newest_copy_along,
    the_lowest_index_of_an_id_counts,
    a_run_counts_before_a_snapshot_names_it,
    what_a_failed_snapshot_named_is_in_force,
    what_no_snapshot_names_stays_at_a_start,
    a_run_in_use_is_dropped,
    the_window_is_cut_where_the_log_begins,
    a_filter_lies,
    a_page_goes_missing_in_a_merge,
    forgotten_ids_of_a_merged_run_count,
    a_snapshot_keeps_the_pieces_of_a_run,
    pieces_of_an_opening_before_count,
    what_is_left_of_pieces_stays,
    what_failed_is_in_a_run,
    publishers_wait_for_a_move_that_was_given_up,
]
