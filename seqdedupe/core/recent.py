"""The last 65,536 messages of a topic: which index a known sequence ID has.

A ring of rows (sequence ID, index, the same producer's message before this one, one far before it). Messages are
counted from 0 as they enter; `numbers[producer_row, NEWEST]` is the count of a producer's newest one, and each leads on
to the one before, so finding a frame's duplicates walks over that producer's messages only. -1 is none.

What is old, or is gone from the ring, is found to be so in a few dozen steps, since each message leads far back too: as
far as its two predecessors together where those go equally far, else to the one before (Myers' skew-binary lists).

A ring begins without rows and is doubled as messages enter (`with_room`), so that a topic pays for those that it had:
2.5 MiB is for 65,536. It has a power of two of rows, and goes round only when it has them all.
"""

import numpy as np

from seqdedupe.core.rule import DUP, NEWEST, confirm_batch
from seqdedupe.format.columns import BASE_INDEX, PRODUCER_INDEXES, SEQUENCE_IDS, int32_column, int64_column
from seqdedupe.format.jit import Bytes, Int64s, Int64s2, Uint8s, kernel

RECENT_MESSAGES = 2**16
_FIRST_ROWS = 64

NO_MESSAGE = -1
"""For `NEWEST`: none is known."""

SEQUENCE_ID = 0
INDEX = 1
BEFORE = 2
FAR = 3
STEPS = 4
"""How many messages of its producer FAR goes back."""
COLUMNS = 5


def new_ring() -> Int64s:
    """A ring in which nothing is."""
    return np.empty((0, COLUMNS), np.int64)


def with_room(ring: Int64s, entered: int, more: int) -> None:
    """Makes the ring longer, in place, if it has no room for so many more messages after the `entered` ones."""
    needed = min(entered + more, RECENT_MESSAGES)
    if needed > len(ring):
        # In place: no view of it is kept. Before it goes round each message's count is its place, in any length.
        ring.resize((max(1 << (needed - 1).bit_length(), _FIRST_ROWS), COLUMNS), refcheck=False)


@kernel(inline=True)
def enter(raw: Bytes, places: Int64s, producer_rows: Int64s, numbers: Int64s2, ring: Int64s2, entered: int) -> int:
    """The messages of a stored batch enter the ring, which has room (`with_room`). Returns how many have entered by
    now; before it was `entered`."""
    ids = int64_column(raw, places, SEQUENCE_IDS)
    indexes = int32_column(raw, places, PRODUCER_INDEXES)
    producer_row = producer_rows[0]
    # The bits of a count that are its place in the ring: quicker than a remainder.
    in_ring = ring.shape[0] - 1
    for row in range(ids.shape[0]):
        if indexes.shape[0] != 0:
            producer_row = producer_rows[indexes[row]]
        gone = max(entered - ring.shape[0], NO_MESSAGE)
        far = before = numbers[producer_row, NEWEST]
        steps = 1
        if before > gone:
            of_before, middle = before & in_ring, ring[before & in_ring, FAR]
            if middle > gone and ring[of_before, STEPS] == ring[middle & in_ring, STEPS]:
                far = ring[middle & in_ring, FAR]
                steps += 2 * ring[of_before, STEPS]
        place = entered & in_ring
        ring[place, SEQUENCE_ID] = ids[row]
        ring[place, INDEX] = places[BASE_INDEX] + row
        ring[place, BEFORE] = before
        ring[place, FAR] = far
        ring[place, STEPS] = steps
        numbers[producer_row, NEWEST] = entered
        entered += 1
    return entered


@kernel()
def find(sequence_id: int, producer_row: int, numbers: Int64s2, ring: Int64s2, entered: int) -> int:
    """The index of the newest message with this ID of this producer, or -1 if it is not known (any more)."""
    here = numbers[producer_row, NEWEST]
    in_ring = ring.shape[0] - 1
    while here >= 0 and here >= entered - ring.shape[0]:
        place = here & in_ring
        if ring[place, SEQUENCE_ID] == sequence_id:
            return int(ring[place, INDEX])
        here = ring[place, BEFORE]
    return -1


@kernel()
def find_duplicates(
    raw: Bytes,
    places: Int64s,
    producer_rows: Int64s,
    numbers: Int64s2,
    ring: Int64s2,
    entered: int,
    verdicts: Uint8s,
    found: Int64s,
) -> int:
    """For each row with verdict DUP the index of the original, else -1, into `found`; returns how many are known.

    Rows are gone through from the last to the first: a producer's IDs fall then, and so they do along its chain in
    the ring, so one walk serves all its rows, and nothing is looked for between two that are above it. (Where
    deduplication was off IDs may rise along the chain: some originals are not found then.)
    """
    ids = int64_column(raw, places, SEQUENCE_IDS)
    indexes = int32_column(raw, places, PRODUCER_INDEXES)
    chain = producer_rows.copy()
    in_ring = ring.shape[0] - 1
    oldest = max(entered - ring.shape[0], 0)
    for p in range(producer_rows.shape[0]):
        chain[p] = numbers[producer_rows[p], NEWEST]
    known = 0
    p = 0
    for row in range(ids.shape[0] - 1, -1, -1):
        found[row] = -1
        if verdicts[row] != DUP:
            continue
        if indexes.shape[0] != 0:
            p = indexes[row]
        sequence_id = ids[row]
        here = chain[p]
        while here >= oldest:
            place = here & in_ring
            if ring[place, SEQUENCE_ID] <= sequence_id:
                if ring[place, SEQUENCE_ID] == sequence_id:
                    found[row] = ring[place, INDEX]
                    known += 1
                break
            far = ring[place, FAR]
            here = far if far >= oldest and ring[far & in_ring, SEQUENCE_ID] > sequence_id else ring[place, BEFORE]
        chain[p] = here
    return known


@kernel()
def persist(
    raw: Bytes, places: Int64s, producer_rows: Int64s, numbers: Int64s2, dirty: Uint8s, ring: Int64s2, entered: int
) -> int:
    """A batch is in the log: see `rule.confirm` and `enter`, whose result this returns."""
    confirm_batch(raw, places, producer_rows, numbers, dirty)
    return enter(raw, places, producer_rows, numbers, ring, entered)
