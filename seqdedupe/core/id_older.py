"""The older part of a window of deduplication IDs: runs, and the chunks that they were made of."""

from collections import deque
from collections.abc import Container
from itertools import pairwise

import numpy as np

from seqdedupe.core.id_chunks import Chunk
from seqdedupe.core.id_runs import MAX_ROWS, Run, hash_rows, probe
from seqdedupe.format.columns import ROWS
from seqdedupe.format.jit import Int64s, Uint8s


class Older:
    """Runs, each of which begins where the one before it ends, the oldest first."""

    def __init__(self) -> None:
        self.runs: tuple[Run, ...] = ()
        self.generation = 0
        """Of the runs: what was found in those of another one says nothing."""
        self.offered: Run | None = None
        """A run that is whole, and is to be named by the next snapshot: of the oldest chunks in memory, or of some runs
        that follow one another."""
        self.next_number = 1
        """That of the run which is being made, or will be next. All others that are in use are lower."""
        self.clears = 0
        """How often all that was known was given up: a run that was begun before is of no use."""
        self.chunks: deque[Chunk] = deque()
        """Those that are not forgotten, the oldest first."""

    @property
    def end_index(self) -> int:
        """The index after the last one; 0 if there are no runs."""
        return self.runs[-1].end_index if self.runs else 0

    @property
    def memory_bytes(self) -> int:
        return sum(run.memory_bytes for run in self.runs)

    def candidates(self, view: Uint8s, places: Int64s, key: Int64s, first_index: int) -> list[tuple[Run, int, range]]:
        """The rows of a batch whose IDs may be in runs, but for forgotten ones; in which, and in which of its pages."""
        runs = [run for run in self.runs if run.end_index > first_index]
        found: list[tuple[Run, int, range]] = []
        if not runs:
            return found
        hashes, rows = np.empty(int(places[ROWS]), np.int64), np.empty(int(places[ROWS]), np.int64)
        hash_rows(view, places, key, hashes)
        for run in runs:
            through = rows[: probe(hashes, run.filter, rows)].tolist()
            found += [(run, row, pages) for row in through if (pages := run.pages_of(int(hashes[row])))]
        return found

    def to_name(self, first_index: int) -> tuple[Run, ...]:
        """Those that a snapshot of now has to name: with the one that is offered, and without what is forgotten."""
        runs = self.runs
        if (new := self.offered) is not None:
            before = [run for run in runs if run.end_index <= new.first_index]
            runs = (*before, new, *(run for run in runs if run.first_index >= new.end_index))
        return tuple(run for run in runs if run.end_index > first_index)

    def offer(self, run: Run) -> None:
        """This one is whole."""
        self.offered = run
        self.next_number = run.number + 1

    def named(self, runs: tuple[Run, ...]) -> None:
        """These are in force from now on. What else is offered is whole, and was not named yet."""
        if self.offered in runs:
            self.offered = None
        if runs != self.runs:
            self.runs = runs
            self.generation += 1

    @property
    def numbers(self) -> list[int]:
        """Those of all runs, the one that is offered too, rising."""
        return sorted({run.number for run in (*self.runs, self.offered) if run is not None})

    def smallest_pair(self, most_runs: int, without: Container[tuple[Run, Run]] = ()) -> tuple[Run, Run] | None:
        """Two neighbours, but not these, that are to be one run, where there are more than so many; None if there are
        none."""
        if len(self.runs) <= most_runs:
            return None
        pairs = [pair for pair in pairwise(self.runs) if pair[1].end_index - pair[0].first_index < MAX_ROWS]
        return min(
            (pair for pair in pairs if pair not in without),
            key=lambda pair: len(pair[0]) + len(pair[1]),
            default=None,
        )

    def load(self, runs: tuple[Run, ...], first_index: int) -> None:
        """Takes over the runs of a snapshot."""
        self.runs = runs
        self.next_number = max((run.number for run in runs), default=0) + 1
        chunks = (Chunk(*columns) for run in runs for columns in run.chunks.tolist())
        self.chunks.extend(chunk for chunk in chunks if chunk.end_index > first_index)

    def clear(self) -> None:
        """There are none any more."""
        self.chunks.clear()
        self.runs, self.offered = (), None
        self.generation += 1
        self.clears += 1
