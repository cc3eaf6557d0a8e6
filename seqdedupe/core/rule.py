"""The rule: whether a frame is admitted, the verdict of each row of the frame, and how the log's answer changes the
numbers.

`numbers` has one row of int64 for each producer, the *producer row*. A kernel receives the producers of a call
(`producer_rows`) and columns with one value for each row: the place of the row's producer among these producers
(`indexes`; empty: always the first), the lowest sequence ID, and the highest sequence ID. A row of a batch is one
message, so both IDs are in the same column. A row may also be an opaque range. Then the lowest ID decides and the
highest ID is recorded, as in Pulsar. The functions at the end handle such ranges, for brokers with their own log.
"""

import numpy as np

from seqdedupe.format.jit import Bytes, Int32Column, Int64Column, Int64s, Int64s2, Uint8s, kernel
from seqdedupe.format.layout import (
    BASE_INDEX,
    EPOCHS,
    LINKS,
    PRODUCER_INDEXES,
    SEQUENCE_IDS,
    int32_column,
    int64_column,
)
from seqdedupe.limits import LINK_LEFT_OUT

# Columns of `numbers`.
PUSHED = 0
"""The highest ID that was passed to the log."""
PERSISTED = 1
"""The highest ID that the log has confirmed."""
EPOCH = 2
"""The epoch that owns the name, from the moment of Open."""
DURABLE_EPOCH = 3
"""The newest epoch in a confirmed record; 0 is none."""
STATED = 4
"""A lower bound of the index from which on the log states both DURABLE_EPOCH and PERSISTED; -1: not known."""
NEWEST = 5
"""The producer's newest message in the ring of recent messages (see `recent`); -1 is none."""
NUMBERS = 6

# Verdicts, as on the wire.
NOT_DUP = 1
DUP = 2
UNKNOWN = 3

# Why a producer's part of a frame is not admitted, in the order of the checks.
ADMITTED = 0
INVALID_PREDECESSOR = 1
FENCED = 2
LINK_REQUIRED = 3
PREDECESSOR_MISSING = 4
GAP = 5


NO_PASSES: Bytes = np.zeros(0, np.uint8)
"""The `passes` of a batch: every row is a message."""


@kernel(inline=True)
def mark(dirty: Uint8s, producer_row: int) -> int:
    """Set the bit of a producer row in `dirty`, because numbers that a snapshot contains have changed."""
    dirty[producer_row >> 3] |= 1 << (producer_row & 7)
    return 0


@kernel(inline=True)
def reason(epoch: int, link: int, first: int, pushed: int, persisted: int, current: int, lone: bool) -> int:
    """Return the reason why one producer's messages are not admitted, or ADMITTED.

    `first` is the producer's first ID, `current` the epoch in force. A message is admitted only after its predecessor.
    If the message's ID and its predecessor's ID are both above `pushed`, a message between them is missing. Admitting
    the message would move the watermark past the missing message.
    """
    if link < LINK_LEFT_OUT or link >= first:
        return INVALID_PREDECESSOR
    if epoch != current:
        return FENCED
    if link == LINK_LEFT_OUT:
        return ADMITTED if lone and pushed == persisted else LINK_REQUIRED
    if first > pushed and link > pushed:
        return PREDECESSOR_MISSING
    return ADMITTED


@kernel(inline=True)
def first_ids(indexes: Int32Column, ids: Int64Column, producers: int) -> Int64s:
    """Return the first sequence ID of each producer."""
    first = np.full(producers, -1, np.int64)
    if indexes.shape[0] == 0:
        first[0] = ids[0]
        return first
    for row in range(ids.shape[0]):
        if first[indexes[row]] < 0:
            first[indexes[row]] = ids[row]
    return first


@kernel(inline=True)
def leaves_out(first: int, pushed: int) -> bool:
    """Return whether IDs are missing between `pushed` and the higher ID `first`. If no ID was pushed, no IDs are
    missing."""
    return 0 <= pushed < first - 1


@kernel()
def gaps(raw: Bytes, places: Int64s, producer_rows: Int64s, numbers: Int64s2, expected: Int64s) -> int:
    """Examine the rows of a frame that are above PUSHED. Return the number of producers that skip an ID in these rows.
    See `leaves_out`.

    Fill `expected`, one element for each producer, with the ID that is missing at the first gap, -1 if there is no gap.
    """
    ids = int64_column(raw, places, SEQUENCE_IDS)
    indexes = int32_column(raw, places, PRODUCER_INDEXES)
    last = np.empty(producer_rows.shape[0], np.int64)
    for p in range(producer_rows.shape[0]):
        last[p] = numbers[producer_rows[p], PUSHED]
        expected[p] = -1
    found = 0
    p = 0
    for row in range(ids.shape[0]):
        if indexes.shape[0] != 0:
            p = indexes[row]
        if ids[row] > last[p]:
            if expected[p] < 0 and leaves_out(ids[row], last[p]):
                expected[p] = last[p] + 1
                found += 1
            last[p] = ids[row]
    return found


@kernel()
def refusal(
    raw: Bytes, places: Int64s, producer_rows: Int64s, numbers: Int64s2, lone: bool, gapless: bool, reasons: Uint8s
) -> int:
    """Return the reason why a frame is not admitted, or ADMITTED. If its producers have different reasons, the reason
    that is checked first is returned.

    Fill `reasons`, one element for each producer, unless it is empty. Nothing else changes. With `lone` a link may be
    omitted; with `gapless` no ID may be skipped.
    """
    ids = int64_column(raw, places, SEQUENCE_IDS)
    indexes = int32_column(raw, places, PRODUCER_INDEXES)
    epochs = int64_column(raw, places, EPOCHS)
    links = int64_column(raw, places, LINKS)
    first = first_ids(indexes, ids, producer_rows.shape[0])
    expected = np.empty(producer_rows.shape[0] if gapless else 0, np.int64)
    has_gaps = gapless and gaps(raw, places, producer_rows, numbers, expected) > 0
    why = ADMITTED
    for p in range(producer_rows.shape[0]):
        row = producer_rows[p]
        its = reason(
            epochs[p], links[p], first[p], numbers[row, PUSHED], numbers[row, PERSISTED], numbers[row, EPOCH], lone
        )
        if has_gaps and its == ADMITTED and expected[p] >= 0:
            its = GAP
        if reasons.shape[0] != 0:
            reasons[p] = its
        if its != ADMITTED and (why == ADMITTED or its < why):
            why = its
    return why


@kernel(inline=True)
def decide(
    producer_rows: Int64s,
    indexes: Int32Column,
    lowest: Int64Column,
    highest: Int64Column,
    passes: Bytes,
    numbers: Int64s2,
    deduplicate: bool,
    verdicts: Uint8s,
) -> int:
    """Judge each row, and count new rows as pushed. Return the number of new rows.

    With `deduplicate` off every row is new, and the numbers still move by maximum. A range's highest ID is not below
    its lowest. Rows marked in `passes` (empty: none) are not messages: they are new, and change no number.
    """
    producer_row = producer_rows[0]
    new = 0
    for row in range(lowest.shape[0]):
        if passes.shape[0] != 0 and passes[row] != 0:
            verdicts[row] = NOT_DUP
            new += 1
            continue
        if indexes.shape[0] != 0:
            producer_row = producer_rows[indexes[row]]
        if deduplicate and lowest[row] <= numbers[producer_row, PUSHED]:
            verdicts[row] = DUP if lowest[row] <= numbers[producer_row, PERSISTED] else UNKNOWN
            continue
        numbers[producer_row, PUSHED] = max(numbers[producer_row, PUSHED], highest[row])
        verdicts[row] = NOT_DUP
        new += 1
    return new


@kernel()
def decide_batch(
    raw: Bytes, places: Int64s, producer_rows: Int64s, numbers: Int64s2, deduplicate: bool, verdicts: Uint8s
) -> int:
    """Call `decide` for a frame that `refusal` admits."""
    ids = int64_column(raw, places, SEQUENCE_IDS)
    indexes = int32_column(raw, places, PRODUCER_INDEXES)
    return decide(producer_rows, indexes, ids, ids, NO_PASSES, numbers, deduplicate, verdicts)


@kernel(inline=True)
def confirm_rows(
    producer_rows: Int64s,
    indexes: Int32Column,
    highest: Int64Column,
    passes: Bytes,
    stated: int,
    numbers: Int64s2,
    dirty: Uint8s,
) -> int:
    """Merge rows that are in the log by maximum. The log states their IDs from index `stated` on (-1: not known).

    A record of a topic that does not deduplicate may have an ID below the known ID. Such a record does not state the ID
    in force. Return the number of rows.
    """
    producer_row = producer_rows[0]
    for row in range(highest.shape[0]):
        if passes.shape[0] != 0 and passes[row] != 0:
            continue
        if indexes.shape[0] != 0:
            producer_row = producer_rows[indexes[row]]
        mark(dirty, producer_row)
        if highest[row] >= numbers[producer_row, PERSISTED]:
            numbers[producer_row, PERSISTED] = highest[row]
            if highest[row] > numbers[producer_row, PUSHED]:
                numbers[producer_row, PUSHED] = highest[row]
            if stated > numbers[producer_row, STATED]:
                numbers[producer_row, STATED] = stated
    return len(highest)


@kernel(inline=True)
def confirm(
    producer_rows: Int64s,
    epochs: Int64Column,
    indexes: Int32Column,
    highest: Int64Column,
    index: int,
    numbers: Int64s2,
    dirty: Uint8s,
) -> int:
    """Merge the rows and epochs of a record that is in the log at `index` by maximum.

    `epochs` has one value for each producer. Live and replayed records are treated in the same way. Return the number
    of rows.
    """
    stated = index
    for p in range(producer_rows.shape[0]):
        producer_row = producer_rows[p]
        mark(dirty, producer_row)
        if epochs[p] < numbers[producer_row, DURABLE_EPOCH]:
            # Another record states the epoch in force, and may be older than this one.
            stated = -1
        numbers[producer_row, DURABLE_EPOCH] = max(numbers[producer_row, DURABLE_EPOCH], epochs[p])
        numbers[producer_row, EPOCH] = max(numbers[producer_row, EPOCH], epochs[p])
    return int(confirm_rows(producer_rows, indexes, highest, NO_PASSES, stated, numbers, dirty))


@kernel(inline=True)
def confirm_batch(raw: Bytes, places: Int64s, producer_rows: Int64s, numbers: Int64s2, dirty: Uint8s) -> int:
    """Call `confirm` for the relevant rows of a batch that is in the log at `places[BASE_INDEX]`."""
    indexes = int32_column(raw, places, PRODUCER_INDEXES)
    ids = int64_column(raw, places, SEQUENCE_IDS)
    if indexes.shape[0] == 0:
        # A producer's IDs rise within a batch: the last one is the highest.
        ids = ids[ids.shape[0] - 1 :]
    epochs = int64_column(raw, places, EPOCHS)
    return confirm(producer_rows, epochs, indexes, ids, places[BASE_INDEX], numbers, dirty)


@kernel()
def fail(numbers: Int64s2, producers: int) -> int:
    """Revoke all pushed IDs and opened epochs that are not confirmed: they will never be in the log.

    Return the number of producers.
    """
    for producer_row in range(producers):
        numbers[producer_row, PUSHED] = numbers[producer_row, PERSISTED]
        numbers[producer_row, EPOCH] = numbers[producer_row, DURABLE_EPOCH]
    return producers


# -- Ranges of a broker that has its own log, as columns: checked, judged, confirmed.
#
# A row is an opaque range of sequence IDs (lowest, highest) of the producer with this handle. `decide` gives the
# verdicts. `rows_of` has the producer row of each handle, and `is_live` tells whether the handle may be used. Rows
# marked in `passes` (an empty column: none) are not messages, and leave no trace.

# The problem of a row, in the order of the checks.
SOUND = 0
BAD_HANDLE = 1
BAD_ID = 2
OVERLAP = 3
RANGE_GAP = 4


@kernel()
def check_ranges(
    handles: Int32Column,
    lowest: Int64Column,
    highest: Int64Column,
    passes: Bytes,
    rows_of: Int64s,
    is_live: Uint8s,
    numbers: Int64s2,
    overlap: bool,
    found: Int64s,
) -> int:
    """Return the problem of the first row that cannot be judged, and set `found[0]` to the row. Return SOUND if all
    rows can be judged.

    With `overlap`, a range of which only a part is at or below `persisted` cannot be judged, because no single verdict
    would be true for all its messages.
    """
    for row in range(lowest.shape[0]):
        if passes.shape[0] != 0 and passes[row] != 0:
            continue
        found[0] = row
        handle = handles[row]
        if handle < 0 or handle >= is_live.shape[0] or is_live[handle] == 0:
            return BAD_HANDLE
        if lowest[row] < 0 or highest[row] < lowest[row]:
            return BAD_ID
        if overlap and lowest[row] <= numbers[rows_of[handle], PERSISTED] < highest[row]:
            return OVERLAP
    return SOUND


@kernel()
def find_gap(
    handles: Int32Column,
    lowest: Int64Column,
    highest: Int64Column,
    passes: Bytes,
    rows_of: Int64s,
    numbers: Int64s2,
    deduplicate: bool,
    found: Int64s,
) -> int:
    """Return RANGE_GAP if a row above `pushed` skips an ID, else SOUND. The rows must have passed `check_ranges`.

    `found` receives the row and the missing ID. The function changes PUSHED in the same way as `decide`, and then
    restores the old values.
    """
    before = np.empty(lowest.shape[0], np.int64)
    wrong = SOUND
    judged = 0
    for row in range(lowest.shape[0]):
        if passes.shape[0] == 0 or passes[row] == 0:
            producer_row = rows_of[handles[row]]
            pushed = numbers[producer_row, PUSHED]
            if lowest[row] > pushed and leaves_out(lowest[row], pushed):
                found[0] = row
                found[1] = pushed + 1
                wrong = RANGE_GAP
                break
            before[row] = pushed
            if lowest[row] > pushed or not deduplicate:
                numbers[producer_row, PUSHED] = max(pushed, highest[row])
        judged = row + 1
    for row in range(judged - 1, -1, -1):
        if passes.shape[0] == 0 or passes[row] == 0:
            numbers[rows_of[handles[row]], PUSHED] = before[row]
    return wrong


@kernel()
def judge_ranges(
    handles: Int32Column,
    lowest: Int64Column,
    highest: Int64Column,
    passes: Bytes,
    rows_of: Int64s,
    is_live: Uint8s,
    numbers: Int64s2,
    overlap: bool,
    gapless: bool,
    deduplicate: bool,
    found: Int64s,
    verdicts: Uint8s,
) -> int:
    """Judge all rows. Return the number of new rows.

    If a row cannot be judged, or skips an ID with `gapless`, nothing changes. Then return the result of
    `check_ranges` or `find_gap` as a negative number.
    """
    wrong = check_ranges(handles, lowest, highest, passes, rows_of, is_live, numbers, overlap, found)
    if wrong == SOUND and gapless:
        wrong = find_gap(handles, lowest, highest, passes, rows_of, numbers, deduplicate, found)
    if wrong != SOUND:
        return -wrong
    return int(decide(rows_of, handles, lowest, highest, passes, numbers, deduplicate, verdicts))


@kernel()
def confirm_ranges(
    handles: Int32Column,
    highest: Int64Column,
    passes: Bytes,
    rows_of: Int64s,
    numbers: Int64s2,
    dirty: Uint8s,
) -> int:
    """Merge valid rows that are in the log by maximum. Live and replayed rows are treated in the same way.

    Return the number of rows.
    """
    return int(confirm_rows(rows_of, handles, highest, passes, -1, numbers, dirty))
