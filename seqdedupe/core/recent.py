"""The last 65,536 messages of a topic: which index a known sequence ID has.

A ring of rows (sequence ID, index, the same producer's message before this one). Messages are counted from 0 as they
enter; `numbers[slot, NEWEST]` is the count of a producer's newest one, and each row leads on to the one before, so
finding a frame's duplicates walks over that producer's messages only. -1 is none.
"""

from seqdedupe.core.rule import DUP, EPOCH, NEWEST, PERSISTED, PUSHED
from seqdedupe.format.columns import (
    BASE_INDEX,
    EPOCHS,
    PRODUCER_INDEXES,
    PRODUCERS,
    ROWS,
    SEQUENCE_IDS,
    load32,
    load64,
    start,
)
from seqdedupe.format.jit import Bytes, Int64s, Int64s2, Uint8s, kernel

RECENT_MESSAGES = 65_536

NEW_NUMBERS = 1
"""In `dirty`: persisted or epoch changed."""

SEQUENCE_ID = 0
INDEX = 1
BEFORE = 2


@kernel()
def persist(
    raw: Bytes, places: Int64s, slots: Int64s, numbers: Int64s2, dirty: Uint8s, ring: Int64s2, entered: int
) -> int:
    """A batch is in the log: merges its IDs and epochs by maximum and enters its rows. Live and in replay the same.

    `entered` counts the messages that entered the ring before; returns that count afterwards.
    """
    ids = start(places, SEQUENCE_IDS)
    indexes = start(places, PRODUCER_INDEXES)
    alone = places[PRODUCERS] == 1
    for p in range(places[PRODUCERS]):
        slot = slots[p]
        dirty[slot] |= NEW_NUMBERS
        numbers[slot, EPOCH] = max(numbers[slot, EPOCH], load64(raw, start(places, EPOCHS) + 8 * p))
    slot = slots[0]
    for row in range(places[ROWS]):
        if not alone:
            slot = slots[load32(raw, indexes + 4 * row)]
        sequence_id = load64(raw, ids + 8 * row)
        numbers[slot, PERSISTED] = max(numbers[slot, PERSISTED], sequence_id)
        numbers[slot, PUSHED] = max(numbers[slot, PUSHED], sequence_id)
        place = entered % RECENT_MESSAGES
        ring[place, SEQUENCE_ID] = sequence_id
        ring[place, INDEX] = places[BASE_INDEX] + row
        ring[place, BEFORE] = numbers[slot, NEWEST]
        numbers[slot, NEWEST] = entered
        entered += 1
    return entered


@kernel()
def find(sequence_id: int, slot: int, numbers: Int64s2, ring: Int64s2, entered: int) -> int:
    """The index of the newest message with this ID of this producer, or -1 if it is not known (any more)."""
    here = numbers[slot, NEWEST]
    while here >= 0 and here >= entered - RECENT_MESSAGES:
        place = here % RECENT_MESSAGES
        if ring[place, SEQUENCE_ID] == sequence_id:
            return int(ring[place, INDEX])
        here = ring[place, BEFORE]
    return -1


@kernel()
def find_duplicates(
    raw: Bytes,
    places: Int64s,
    slots: Int64s,
    numbers: Int64s2,
    ring: Int64s2,
    entered: int,
    verdicts: Uint8s,
    found: Int64s,
) -> int:
    """For each row with verdict DUP the index of the original, else -1, into `found`; returns how many are known.

    Rows are gone through from the last to the first: a producer's IDs fall then, and so they do along its chain in
    the ring (unless deduplication was off), so one walk serves all its rows.
    """
    ids = start(places, SEQUENCE_IDS)
    indexes = start(places, PRODUCER_INDEXES)
    alone = places[PRODUCERS] == 1
    chain = slots.copy()
    for p in range(places[PRODUCERS]):
        chain[p] = numbers[slots[p], NEWEST]
    known = 0
    p = 0
    for row in range(places[ROWS] - 1, -1, -1):
        found[row] = -1
        if verdicts[row] != DUP:
            continue
        if not alone:
            p = load32(raw, indexes + 4 * row)
        sequence_id = load64(raw, ids + 8 * row)
        here = chain[p]
        while here >= 0 and here >= entered - RECENT_MESSAGES:
            place = here % RECENT_MESSAGES
            if ring[place, SEQUENCE_ID] <= sequence_id:
                if ring[place, SEQUENCE_ID] == sequence_id:
                    found[row] = ring[place, INDEX]
                    known += 1
                break
            here = ring[place, BEFORE]
        chain[p] = here
    return known
