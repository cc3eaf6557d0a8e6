"""The last 65,536 messages of a topic, which are used to find the index of a known sequence ID.

A ring of rows. Each row contains a sequence ID, an index, a link to the same producer's previous message, and a link to
a message of the producer far before it. Messages are counted from 0 as they enter the ring. `numbers[producer_row,
NEWEST]` is the count of a producer's newest message. Each message has a link to the previous one, so a search for
duplicates visits only the messages of one producer. -1 means no message.

An old message, or a message that has left the ring, is recognized in a few dozen steps, because each message also has
the link far back. If the far links of a message's two predecessors span equal distances, its own far link spans both
together; otherwise it leads to the previous message (Myers' skew-binary lists).

A ring begins without rows and is doubled as messages enter (`with_room`). So a topic uses memory only for messages that
it has had: 2.5 MiB for 65,536 messages. The number of rows is a power of two. The ring wraps only at 65,536 rows.
"""

import numpy as np

from seqdedupe.core.rule import DUP, NEWEST, confirm_batch
from seqdedupe.format.columns import BASE_INDEX, PRODUCER_INDEXES, SEQUENCE_IDS, int32_column, int64_column
from seqdedupe.format.jit import Bytes, Int64s, Int64s2, Uint8s, kernel

RECENT_MESSAGES = 2**16
_FIRST_ROWS = 64

NO_MESSAGE = -1
"""The `NEWEST` of a producer without a known message."""

SEQUENCE_ID = 0
INDEX = 1
BEFORE = 2
FAR = 3
STEPS = 4
"""FAR leads back by this number of the producer's messages."""
COLUMNS = 5


def new_ring() -> Int64s:
    """Make an empty ring."""
    return np.empty((0, COLUMNS), np.int64)


def with_room(ring: Int64s, entered: int, more: int) -> None:
    """Make the ring longer, in place, if it has no room for `more` messages after the `entered` ones."""
    needed = min(entered + more, RECENT_MESSAGES)
    if needed > len(ring):
        # In place, since no view of it is kept. Before the ring wraps, a message's count is its row at any length.
        ring.resize((max(1 << (needed - 1).bit_length(), _FIRST_ROWS), COLUMNS), refcheck=False)


@kernel(inline=True)
def enter(raw: Bytes, places: Int64s, producer_rows: Int64s, numbers: Int64s2, ring: Int64s2, entered: int) -> int:
    """Enter the messages of a stored batch into the ring, which must have room (`with_room`).

    Return the number of messages entered so far, which was `entered` before.
    """
    ids = int64_column(raw, places, SEQUENCE_IDS)
    indexes = int32_column(raw, places, PRODUCER_INDEXES)
    producer_row = producer_rows[0]
    # A bit mask gives a count's row in the ring faster than a remainder.
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
    """Return the index of the newest message with this ID of this producer; -1 if it is not known, or no longer."""
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
    """Write to `found` the index of the original of each row with verdict DUP, else -1. Return how many are known.

    Rows are taken from the last to the first. A producer's IDs fall in that order, as they do along its chain in the
    ring, so one walk serves all its rows. Parts of the chain that are above an ID are skipped. (Where deduplication was
    off, IDs may rise along the chain; then some originals are not found.)
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
    """Confirm a batch that is in the log (`rule.confirm`), and enter it. Return the result of `enter`."""
    confirm_batch(raw, places, producer_rows, numbers, dirty)
    return enter(raw, places, producer_rows, numbers, ring, entered)
