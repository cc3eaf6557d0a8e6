"""The rule: Dup, NotDup or Unknown, and whether a frame may be admitted at all.

`numbers` has one row of int64 a producer: what was pushed, what persisted, the epoch that owns the name, and the
newest message of it that the ring of recent messages knows (see `recent`).
"""

import numpy as np

from seqdedupe.format.columns import (
    EPOCHS,
    LINKS,
    PRODUCER_INDEXES,
    PRODUCERS,
    ROWS,
    SEQUENCE_IDS,
    load32,
    load64,
    start,
)
from seqdedupe.format.jit import Bytes, Int64s, Int64s2, Uint8s, kernel
from seqdedupe.limits import LINK_LEFT_OUT

# Columns of `numbers`.
PUSHED = 0
PERSISTED = 1
EPOCH = 2
NEWEST = 3
NUMBERS = 4

# Verdicts, as on the wire.
NOT_DUP = 1
DUP = 2
UNKNOWN = 3

# Why a frame is refused, in the order in which it is looked for.
INVALID_PREDECESSOR = -1
FENCED = -2
LINK_REQUIRED = -3
PREDECESSOR_MISSING = -4


@kernel()
def first_ids(raw: Bytes, places: Int64s) -> Int64s:
    """The first sequence ID of each producer in a batch."""
    producers = places[PRODUCERS]
    first = np.full(producers, -1, np.int64)
    ids = start(places, SEQUENCE_IDS)
    if producers == 1:
        first[0] = load64(raw, ids)
        return first
    indexes = start(places, PRODUCER_INDEXES)
    for row in range(places[ROWS]):
        p = load32(raw, indexes + 4 * row)
        if first[p] < 0:
            first[p] = load64(raw, ids + 8 * row)
    return first


@kernel()
def refusal(raw: Bytes, places: Int64s, slots: Int64s, numbers: Int64s2, link_may_be_left_out: bool) -> int:
    """Why this frame cannot be admitted, or 0. `slots` are its producers' rows in `numbers`; changes nothing.

    A message is admitted only behind its predecessor: if its ID and the one that its producer sent before are both
    above what was pushed, something between them is missing, and taking it would move the watermark over a hole.
    """
    epochs = start(places, EPOCHS)
    links = start(places, LINKS)
    why = 0
    first = first_ids(raw, places)
    for p in range(places[PRODUCERS]):
        slot = slots[p]
        link = load64(raw, links + 8 * p)
        if link < LINK_LEFT_OUT or link >= first[p]:
            return INVALID_PREDECESSOR
        if load64(raw, epochs + 8 * p) != numbers[slot, EPOCH]:
            why = FENCED
        elif link == LINK_LEFT_OUT:
            if not link_may_be_left_out or numbers[slot, PUSHED] != numbers[slot, PERSISTED]:
                why = max(why, LINK_REQUIRED) if why != 0 else LINK_REQUIRED
        elif first[p] > numbers[slot, PUSHED] and link > numbers[slot, PUSHED] and why == 0:
            why = PREDECESSOR_MISSING
    return why


@kernel()
def decide(raw: Bytes, places: Int64s, slots: Int64s, numbers: Int64s2, deduplicate: bool, verdicts: Uint8s) -> int:
    """The verdict of each row of a frame that `refusal` lets pass; what is new counts as pushed from now on.

    Fills `verdicts` (one byte a row) and returns how many rows are new. With `deduplicate` off every row is new;
    the numbers move as ever, by maximum.
    """
    ids = start(places, SEQUENCE_IDS)
    indexes = start(places, PRODUCER_INDEXES)
    alone = places[PRODUCERS] == 1
    slot = slots[0]
    new = 0
    for row in range(places[ROWS]):
        if not alone:
            slot = slots[load32(raw, indexes + 4 * row)]
        sequence_id = load64(raw, ids + 8 * row)
        if sequence_id > numbers[slot, PUSHED]:
            numbers[slot, PUSHED] = sequence_id
        elif deduplicate:
            verdicts[row] = DUP if sequence_id <= numbers[slot, PERSISTED] else UNKNOWN
            continue
        verdicts[row] = NOT_DUP
        new += 1
    return new
