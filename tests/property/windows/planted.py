"""Bugs put into windows and their runs on purpose, each a mistake that somebody might make. The property finds all.

Each function breaks the code through a `MonkeyPatch`.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from seqdedupe.core import id_table
from seqdedupe.core.id_runs import IdRun, add_to_filter, entries_in
from seqdedupe.core.id_slots import Slots
from seqdedupe.core.id_table import NOWHERE, ROWS
from seqdedupe.core.id_window import IdWindow, Older
from seqdedupe.store import windows
from seqdedupe.store import windows as stored_runs
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic import window_runs
from seqdedupe.topic.frame import check_by_id
from seqdedupe.topic.keeper import Snapshotter
from seqdedupe.topic.topic import Topic
from seqdedupe.topic.window_runs import WindowMemory, WindowRuns


def runs_that_were_looked_up_before_count(patch: pytest.MonkeyPatch) -> None:
    original = WindowRuns.older

    def older(self: WindowRuns, frame: Any, since_ms: int, looked_up: Any) -> Any:
        return looked_up.indexes if looked_up is not None else original(self, frame, since_ms, looked_up)

    patch.setattr(WindowRuns, "older", older)


def what_leaves_memory_is_no_news_to_a_look_up(patch: pytest.MonkeyPatch) -> None:
    """A chunk is freed while somebody has looked into the runs before it."""
    original = Older.named

    def named(self: Older, runs: tuple[IdRun, ...]) -> None:
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

    original = Slots.forget

    def forget(self: Slots, place: int) -> None:
        rows = int(self._newer.chunks[place, ROWS])
        self.put(place, 0, rows)
        self.take_out(place, 0, rows)
        original(self, place)

    patch.setattr(Slots, "forget", forget)


def the_lowest_index_of_an_id_counts(patch: pytest.MonkeyPatch) -> None:
    original = WindowRuns._found

    def found(self: WindowRuns, frame: Any, wanted: Any) -> Any:
        indexes = seconds = np.full(frame.rows, NOWHERE, np.int64)
        for one in wanted:
            here, seconds = original(self, frame, [one])
            indexes = np.where(indexes == NOWHERE, here, indexes)
        return indexes, seconds

    patch.setattr(WindowRuns, "_found", found)


def a_run_goes_with_the_write_of_a_snapshot(patch: pytest.MonkeyPatch) -> None:
    """It is in use until that is durable."""
    original = windows.put

    def put(batch: Any, incarnation: int, stored: Any, pieces: Any) -> None:
        numbers = [run.number for run in stored.runs]
        stored_runs.put_gaps(batch, incarnation, numbers, max(numbers, default=0))
        original(batch, incarnation, stored, pieces)

    patch.setattr(windows, "put", put)


def what_no_snapshot_names_stays_at_a_start(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Snapshots, "has_left_over", lambda self, window: False)


def a_run_in_use_is_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Older, "numbers", property(lambda self: [run.number for run in self.runs[1:]]))


def the_window_is_cut_where_the_log_begins(patch: pytest.MonkeyPatch) -> None:
    """Recovery puts in order what the log has no more."""
    original = Topic._learn

    def learn(self: Topic, *arguments: Any) -> None:
        window = self.window
        if window is not None and window.first_index < self.log.first_index <= window.confirmed_index:
            index = window.confirmed_index
            window._begin_at(self.log.first_index)
            window._state[[id_table.CONFIRMED, id_table.NEXT]] = index
        original(self, *arguments)

    patch.setattr(Topic, "_learn", learn)


def a_filter_lies(patch: pytest.MonkeyPatch) -> None:
    original = add_to_filter
    patch.setattr(stored_runs, "add_to_filter", lambda hashes, words: original(hashes[1:], words))


def a_page_goes_missing_in_a_merge(patch: pytest.MonkeyPatch) -> None:
    original = WindowRuns._entries
    patch.setattr(WindowRuns, "_entries", lambda self, wanted, *rest: original(self, wanted[-1:], *rest))


def indexes_of_a_merged_run_count_from_each_of_the_two(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(window_runs, "entries_in", lambda pages, key: entries_in([(page, 0) for page, _ in pages], key))


def a_snapshot_keeps_the_pieces_of_a_run(patch: pytest.MonkeyPatch) -> None:
    """In the store they are still before what follows."""
    original = Snapshotter._ids

    async def ids(self: Snapshotter, window: IdWindow, next_index: int) -> Any:
        found = await original(self, window, next_index)
        found.moved_from = None
        return found

    patch.setattr(Snapshotter, "_ids", ids)


def what_is_in_flight_is_in_a_snapshot(patch: pytest.MonkeyPatch) -> None:
    original = Snapshotter._ids
    patch.setattr(Snapshotter, "_ids", lambda self, window, _: original(self, window, window.next_index))


def publishers_wait_for_a_move_that_was_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowMemory, "_moved", lambda self, task: None)


ALL: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    runs_that_were_looked_up_before_count: 2,
    what_leaves_memory_is_no_news_to_a_look_up: 2,
    a_look_up_that_met_a_dropped_run_is_believed: 31,
    what_goes_takes_the_newest_copy_along: 36,
    the_lowest_index_of_an_id_counts: 8,
    a_run_goes_with_the_write_of_a_snapshot: 1,
    what_no_snapshot_names_stays_at_a_start: 4,
    a_run_in_use_is_dropped: 0,
    the_window_is_cut_where_the_log_begins: 0,
    a_filter_lies: 0,
    a_page_goes_missing_in_a_merge: 0,
    indexes_of_a_merged_run_count_from_each_of_the_two: 0,
    a_snapshot_keeps_the_pieces_of_a_run: 0,
    what_is_in_flight_is_in_a_snapshot: 0,
    publishers_wait_for_a_move_that_was_given_up: 0,
}
"""And the seed of a case that finds it."""
