"""The last 65,536 messages of a topic, which are used to find the index of a known sequence ID. The functions at the
end replay the log: they merge many batches at once into the producers' numbers, and into the recent messages.

The messages are in a ring of rows. Each row contains a sequence ID, an index, a link to the same producer's previous
message, and a link to a much earlier message of the producer. Messages are counted from 0 as they enter the ring.
`numbers[producer_row, NEWEST]` is the count of a producer's newest message. Each message has a link to the producer's
previous message, so a search for duplicates visits only the messages of one producer. -1 means no message.

An old message, or a message that has left the ring, is recognized in a few dozen steps, because each message also has
the link far back. If the far links of a message's two predecessors span equal distances, its own far link spans both
together; otherwise it leads to the previous message (Myers' skew-binary lists).

A ring begins without rows and is doubled as messages enter (`with_room`). So a topic uses memory only for messages that
it has had: 2.5 MiB for 65,536 messages. The number of rows is a power of two. The ring wraps only at 65,536 rows.
"""

import numpy as np

from seqdedupe.core.rule import DUP, NEWEST, confirm_batch
from seqdedupe.format.jit import Bytes, Int64s, Int64s2, Uint8s, kernel, load32
from seqdedupe.format.layout import (
    BASE_INDEX,
    NAME_OFFSETS,
    NAMES,
    PRODUCER_INDEXES,
    PRODUCERS,
    ROWS,
    SEQUENCE_IDS,
    int32_column,
    int64_column,
    size,
    start,
)

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
    """Make the ring longer, in place, if the ring has no room for `more` messages after the `entered` messages."""
    needed = min(entered + more, RECENT_MESSAGES)
    if needed > len(ring):
        # In place, since no view of it is kept. Before the ring wraps, a message's count is its row at any length.
        ring.resize((max(1 << (needed - 1).bit_length(), _FIRST_ROWS), COLUMNS), refcheck=False)


@kernel(inline=True)
def enter(raw: Bytes, places: Int64s, producer_rows: Int64s, numbers: Int64s2, ring: Int64s2, entered: int) -> int:
    """Enter the messages of a stored batch into the ring, which must have room (`with_room`).

    Return the new number of entered messages; `entered` is the old number.
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
    """Return the index of the newest message with this ID of this producer; -1 if the index is unknown or no longer
    known."""
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
    """For each row with verdict DUP, write the index of the original (or -1) to `found`. Return the number of known
    originals.

    The function handles the rows from the last to the first. In this order a producer's IDs descend, like the IDs along
    the producer's chain in the ring. So one walk along the chain serves all rows of the producer. The walk skips parts
    of the chain with higher IDs. (If deduplication was off, IDs may ascend along the chain. In this case some originals
    are not found.)
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
    """Confirm a batch that is in the log (`rule.confirm`), and enter the batch into the ring. Return the result of
    `enter`."""
    confirm_batch(raw, places, producer_rows, numbers, dirty)
    return enter(raw, places, producer_rows, numbers, ring, entered)


# -- Replay: many batches at once.


@kernel()
def same_bytes(raw: Bytes, one: int, other: int, count: int) -> bool:
    """Whether two places of a buffer have the same bytes."""
    for i in range(count):  # noqa: SIM110 (numba compiles the loop, not the generator)
        if raw[one + i] != raw[other + i]:
            return False
    return True


@kernel()
def name_places(raw: Bytes, table: Int64s2, count: int, places_of_names: Int64s2, first_name: Int64s) -> int:
    """List the begin and end of each producer name of `count` scanned records in `places_of_names`.

    `first_name[k]` is the position of record k's first name in this list. If a record has the same names as the
    previous batch, both share the same entries. Return the length of the list, or -1 if the list has no room for all
    names.
    """
    listed = 0
    before = -1
    for k in range(count):
        places = table[k]
        if places[ROWS] == 0:
            continue
        producers = places[PRODUCERS]
        offsets = start(places, NAME_OFFSETS)
        names = start(places, NAMES)
        if before >= 0:
            earlier = table[before]
            if (
                earlier[PRODUCERS] == producers
                and size(earlier, NAMES) == size(places, NAMES)
                and same_bytes(raw, start(earlier, NAME_OFFSETS), offsets, 4 * producers + 4)
                and same_bytes(raw, start(earlier, NAMES), names, size(places, NAMES))
            ):
                first_name[k] = first_name[before]
                before = k
                continue
        if listed + producers > places_of_names.shape[0]:
            return -1
        first_name[k] = listed
        for p in range(producers):
            places_of_names[listed, 0] = names + load32(raw, offsets + 4 * p)
            places_of_names[listed, 1] = names + load32(raw, offsets + 4 * p + 4)
            listed += 1
        before = k
    return listed


@kernel()
def persist_all(
    raw: Bytes,
    table: Int64s2,
    count: int,
    producer_rows: Int64s,
    first_name: Int64s,
    numbers: Int64s2,
    dirty: Uint8s,
    ring: Int64s2,
    entered: int,
) -> int:
    """Call `persist` for every batch among `count` scanned records. `producer_rows` has the row of each listed name."""
    for k in range(count):
        places = table[k]
        if places[ROWS] > 0 and places[PRODUCERS] > 0:
            of_batch = producer_rows[first_name[k] : first_name[k] + places[PRODUCERS]]
            entered = persist(raw, places, of_batch, numbers, dirty, ring, entered)
    return entered


def list_names(raw: Bytes, table: Int64s2, count: int) -> tuple[Int64s2, Int64s]:
    """Return a list with begin and end of the producer names in `count` scanned records, and the position of each
    record's first entry in this list."""
    first_name = np.zeros(count, np.int64)
    room = count + 1024
    while True:
        places = np.empty((room, 2), np.int64)
        listed = name_places(raw, table, count, places, first_name)
        if listed >= 0:
            return places[:listed], first_name
        room *= 4
