"""Replay: merges many batches of the log together into the numbers and the ring. Also handles ranges of a broker's
log."""

import numpy as np

from seqdedupe.batch import Binary
from seqdedupe.core.recent import persist
from seqdedupe.core.rule import PERSISTED, PUSHED, confirm_rows, decide, leaves_out
from seqdedupe.format.columns import NAME_OFFSETS, NAMES, PRODUCERS, ROWS, size, start
from seqdedupe.format.jit import Bytes, Int32Column, Int64Column, Int64s, Int64s2, Uint8s, kernel, load32


@kernel()
def same_bytes(raw: Bytes, one: int, other: int, count: int) -> bool:
    """Whether two places of a buffer have the same bytes."""
    for i in range(count):  # noqa: SIM110 (numba compiles the loop, not the generator)
        if raw[one + i] != raw[other + i]:
            return False
    return True


@kernel()
def name_places(raw: Bytes, table: Int64s2, count: int, places_of_names: Int64s2, first_name: Int64s) -> int:
    """List the producer names of `count` scanned records: begin and end of each, in `places_of_names`.

    `first_name[k]` is the place in that list of record k's first name. A record with the same names as the batch before
    it shares that batch's entries. Return the length of the list, or -1 if there is no room for all.
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
    """Return begin and end of the producer names in `count` scanned records, and each record's first entry there."""
    first_name = np.zeros(count, np.int64)
    room = count + 1024
    while True:
        places = np.empty((room, 2), np.int64)
        listed = name_places(raw, table, count, places, first_name)
        if listed >= 0:
            return places[:listed], first_name
        room *= 4


# -- Ranges of a broker that has its own log, as columns: checked, judged, confirmed.
#
# A row is an opaque range of sequence IDs (lowest, highest) of the producer with this handle. `rule.decide` gives the
# verdicts. `rows_of` has the producer row of each handle, and `is_live` tells whether the handle may be used. Rows
# marked in `passes` (an empty column: none) are not messages, and leave no trace.

# The problem of a row, in the order of the checks.
SOUND = 0
BAD_HANDLE = 1
BAD_ID = 2
OVERLAP = 3
GAP = 4


@kernel()
def look(
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

    With `overlap` a range that is partly at or below `persisted` cannot be judged: no verdict would be true of all its
    messages.
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
    """Return GAP if a row above `pushed` skips an ID, else SOUND. The rows must have passed `look`.

    `found` gets that row and the missing ID. The function pushes as `decide` would, and takes it back.
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
                wrong = GAP
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
def judge(
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

    If a row cannot be judged, or skips an ID with `gapless`, nothing changes. Then return the result of `look` or
    `find_gap` as a negative number.
    """
    wrong = look(handles, lowest, highest, passes, rows_of, is_live, numbers, overlap, found)
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


def follow(last: bytes, positions: Binary, previous: Binary) -> bool:
    """Whether each entry names the entry before it as its predecessor, and the first entry names `last`."""
    before = np.concatenate((np.zeros(1, np.int32), positions.offsets[:-1] + np.int32(len(last))))
    if not np.array_equal(previous.offsets, before):
        return False
    return previous.data == last + positions.data[: int(positions.offsets[-2])]
