"""A window of deduplication IDs that was imported: one run, which has times where others have indexes."""

from dataclasses import dataclass

import numpy as np

from seqdedupe.core.id_runs import CHUNK_FIRST_TIME_MS, CHUNK_LAST_TIME_MS, Run, hash_rows, probe
from seqdedupe.format.columns import ROWS
from seqdedupe.format.jit import Bytes, Int64s, Uint8s, kernel
from seqdedupe.format.tag import key_of

MILLISECONDS_A_SECOND = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Imported:
    """What memory has of it. Its run begins with 0 and has as many IDs as its `end_index` says; how far an ID is from
    the first one is the second since 1970 up to which it was published."""

    run: Run
    key: bytes
    """Of the hash, SECRET_BYTES of them. It is the run's own: the topic's may be another one by the next start."""
    checksum: bytes
    """That of the file."""

    @property
    def first_time_ms(self) -> int:
        """When the first one was published, in milliseconds since 1970."""
        return int(self.run.chunks[0, CHUNK_FIRST_TIME_MS])

    @property
    def last_time_ms(self) -> int:
        return int(self.run.chunks[-1, CHUNK_LAST_TIME_MS])

    def candidates(self, view: Uint8s, places: Int64s) -> list[tuple[int, range]]:
        """The rows of a batch whose IDs may be there, and in which of its pages."""
        hashes, rows = np.empty(int(places[ROWS]), np.int64), np.empty(int(places[ROWS]), np.int64)
        hash_rows(view, places, key_of(self.key), hashes)
        through = rows[: probe(hashes, self.run.filter, rows)].tolist()
        return [(row, pages) for row in through if (pages := self.run.pages_of(int(hashes[row])))]


def seconds_of(times_ms: Int64s) -> Int64s:
    """The seconds that count for these times: none ends before its time."""
    return -(-times_ms // MILLISECONDS_A_SECOND)


@kernel(nogil=True)
def first_not_above(ids: Bytes, offsets: Int64s) -> int:
    """The first ID, of such as lie one after the other, that is not above the one before it, compared as bytes; -1 if
    there is none."""
    for row in range(1, len(offsets) - 1):
        before, here, end = int(offsets[row - 1]), int(offsets[row]), int(offsets[row + 1])
        size = min(here - before, end - here)
        at = 0
        while at < size and ids[before + at] == ids[here + at]:
            at += 1
        is_above = end - here > here - before if at == size else ids[before + at] < ids[here + at]
        if not is_above:
            return row
    return -1
