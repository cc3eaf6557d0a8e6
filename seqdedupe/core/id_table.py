"""A hash table of deduplication IDs. It shows whether an ID is known, and where the ID's newest message is.

The IDs themselves are in *chunks*. Each chunk is at a *place*, with room for CHUNK_ROWS IDs and CHUNK_BYTES in total. A
row of a place is `place << ROW_BITS | row`. A slot of the table contains the row of an ID and some bits of the ID's
hash. The bits only save comparisons: an ID is found if its bytes are equal. The hash is keyed, so nobody can choose IDs
that collide.

A slot is negative, with 27 bits of the hash and 36 bits of the row; or it is EMPTY. EMPTY is zero, like new memory, so
a table of any size is created at once. The *home* of an ID is the slot to which the ID's hash points. The ID is at its
home or in a later slot, with no empty slot between. Removing an ID moves later IDs up, so no tombstones are needed.
"""

from typing import Any

from seqdedupe.core.rule import DUP, NOT_DUP, UNKNOWN
from seqdedupe.format.headers import siphash
from seqdedupe.format.jit import (
    Bytes,
    Int32s,
    Int64s,
    Int64s2,
    Uint8s,
    copy,
    element,
    for_kernels,
    kernel,
    load32,
    load64,
    prefetch,
)
from seqdedupe.format.layout import DEDUPLICATION_ID_OFFSETS, DEDUPLICATION_IDS, start
from seqdedupe.limits import MAX_DEDUPLICATION_ID_BYTES

ROW_BITS = 16
CHUNK_ROWS = 1 << ROW_BITS
CHUNK_BYTES = 1 << 20
CHUNK_OFFSETS = CHUNK_ROWS + 1
"""Offsets per place: the beginning of each ID, and the end of the last one."""

EMPTY = 0
"""A slot without an ID."""
NOWHERE = -1
"""No row of a place."""
IMPORTED = -2
"""The index of an imported ID: no message of this log has it."""

_TAKEN = -(1 << 63)
_PLACE_BITS = 36
_PLACE = (1 << _PLACE_BITS) - 1
_HOME_BITS = 13
_HOME = (1 << _HOME_BITS) - 1
_MORE = (1 << 14) - 1

HASHED = 128
"""The number of IDs that are hashed before the first of them is looked up."""
_FARTHER = 5
"""A look-up ends about this number of slots after the home, which may be in the next cache line."""

# Columns of `chunks`, one row per place.
FIRST_INDEX = 0
ROWS = 1
FIRST_TIME_MS = 2
LAST_TIME_MS = 3
COLUMNS = 4

GONE = -(1 << 62)
"""The FIRST_INDEX of a chunk that is forgotten or is in runs. Slots that still lead to such a chunk are ignored."""

# The elements of `state`.
WINDOW = 0
"""The first index whose ID is valid. The table may still contain earlier IDs that are not swept out yet."""
CONFIRMED = 1
"""All messages below this index are in the log."""
NEXT = 2
"""The index of the next new message. Messages from CONFIRMED to before NEXT are in flight."""
CURRENT = 3
"""The place of the chunk that is being filled."""
USED = 4
"""The number of slots in use."""
IS_FAR = 5
"""1 if an ID was ever so far from its home that its slot does not show the home."""
STATES = 6


@for_kernels
def _slot(hashed: int, at: int) -> int:
    return _TAKEN | ((hashed & _HOME) | (((hashed >> 30) & _MORE) << _HOME_BITS)) << _PLACE_BITS | at


@for_kernels
def same(raw: Bytes, begin: int, ids: Uint8s, other: int, size: int) -> bool:
    at = 0
    while at + 8 <= size:
        if load64(raw, begin + at) != load64(ids, other + at):
            return False
        at += 8
    while at < size:
        if raw[begin + at] != ids[other + at]:
            return False
        at += 1
    return True


@for_kernels
def _begin(offsets: Int32s, at: int) -> int:
    """Return where the ID of this row begins in the bytes of all IDs."""
    place = at >> ROW_BITS
    return place * CHUNK_BYTES + int(offsets[place * CHUNK_OFFSETS + (at & (CHUNK_ROWS - 1))])


@for_kernels
def _size(offsets: Int32s, at: int) -> int:
    first = (at >> ROW_BITS) * CHUNK_OFFSETS + (at & (CHUNK_ROWS - 1))
    return int(offsets[first + 1]) - int(offsets[first])


@for_kernels
def _find(slots: Int64s, hashed: int, raw: Bytes, begin: int, size: int, ids: Uint8s, offsets: Int32s) -> int:
    """Return the slot of this ID, or the empty slot that it would get."""
    mask = len(slots) - 1
    tag = _slot(hashed, 0)
    at = hashed & mask
    found = int(element(slots, at))
    while found != EMPTY:
        if found & ~_PLACE == tag:
            row = found & _PLACE
            if _size(offsets, row) == size and same(raw, begin, ids, _begin(offsets, row), size):
                return at
        at = (at + 1) & mask
        found = int(element(slots, at))
    return at


@for_kernels
def _fill(slots: Int64s, at: int, hashed: int, row: int, state: Int64s) -> None:
    """Write `row`, the row of the ID with this hash, to the slot that `_find` returned."""
    mask = slots.shape[0] - 1
    if slots[at] == EMPTY:
        state[USED] += 1
        if ((at - (hashed & mask)) & mask) >= _HOME:
            state[IS_FAR] = 1
    slots[at] = _slot(hashed, row)


@for_kernels
def _close(slots: Int64s, hole: int) -> None:
    """Empty a slot, and move up the later IDs that could no longer be found otherwise. No ID may be far from its
    home."""
    mask = slots.shape[0] - 1
    at = (hole + 1) & mask
    slot = int(element(slots, at))
    while slot != EMPTY:
        if ((at - (slot >> _PLACE_BITS)) & _HOME & mask) >= ((at - hole) & mask):
            slots[hole] = slot
            hole = at
        at = (at + 1) & mask
        slot = int(element(slots, at))
    slots[hole] = EMPTY


@for_kernels
def _close_far(slots: Int64s, hole: int, key: Int64s, ids: Uint8s, offsets: Int32s) -> None:
    """Do the same as `_close` in a table where IDs may be far from home. The two functions are separate because this
    function would slow down `_close`."""
    mask = slots.shape[0] - 1
    at = (hole + 1) & mask
    slot = int(slots[at])
    while slot != EMPTY:
        begin = _begin(offsets, slot & _PLACE)
        home = siphash(ids, begin, begin + _size(offsets, slot & _PLACE), key) & mask
        if ((at - home) & mask) >= ((at - hole) & mask):
            slots[hole] = slot
            hole = at
        at = (at + 1) & mask
        slot = int(slots[at])
    slots[hole] = EMPTY


@kernel(bare=True)
def _hash_ids(raw: Bytes, offsets: int, blob: int, first_row: int, end_row: int, key: Int64s, slots: Int64s,
              hashes: Int64s) -> int:  # fmt: skip
    """Hash the IDs of these rows of a batch into `hashes`, one element per row.

    The IDs begin at `blob`, and the offsets of the IDs begin at `offsets`. The function also prefetches the homes:
    otherwise the look-up of each ID would wait for memory.
    """
    mask = slots.shape[0] - 1
    for row in range(first_row, end_row):
        begin, end = load32(raw, offsets + 4 * row), load32(raw, offsets + 4 * row + 4)
        hashed = siphash(raw, blob + begin, blob + end, key)
        hashes[row] = hashed
        prefetch(slots, hashed & mask)
        prefetch(slots, (hashed + _FARTHER) & mask)
    return end_row - first_row


@kernel(bare=True)
def _hash_rows(place: int, first_row: int, end_row: int, key: Int64s, slots: Int64s, ids: Uint8s, offsets: Int32s,
               hashes: Int64s) -> int:  # fmt: skip
    """Hash at most HASHED rows of a place into the first elements of `hashes`, and prefetch the homes."""
    mask = slots.shape[0] - 1
    for row in range(first_row, end_row):
        lies = (place << ROW_BITS) | row
        begin = _begin(offsets, lies)
        hashed = siphash(ids, begin, begin + _size(offsets, lies), key)
        hashes[row - first_row] = hashed
        prefetch(slots, hashed & mask)
        prefetch(slots, (hashed + _FARTHER) & mask)
    return end_row - first_row


@kernel(bare=True)
def bad_id(raw: Bytes, places: Int64s, rows: int) -> int:
    """Return the first row of a batch whose ID does not have 1 to MAX_DEDUPLICATION_ID_BYTES bytes; -1 if all IDs are
    valid."""
    offsets = start(places, DEDUPLICATION_ID_OFFSETS)
    for row in range(rows):
        size = load32(raw, offsets + 4 * row + 4) - load32(raw, offsets + 4 * row)
        if size < 1 or size > MAX_DEDUPLICATION_ID_BYTES:
            return row
    return -1


@kernel(bare=True)
def decide(
    raw: Bytes,
    places: Int64s,
    first_row: int,
    end_row: int,
    frame_index: int,
    deduplicate: bool,
    key: Int64s,
    slots: Int64s,
    ids: Uint8s,
    offsets: Int32s,
    chunks: Int64s2,
    state: Int64s,
    verdicts: Uint8s,
    found: Int64s,
    replaced: Int64s2,
    older: Int64s,
) -> int:
    """Judge rows of a batch, and put the new rows into the current chunk, which must have room for these rows.

    After this call the new rows are in flight. `frame_index` is the index of the first new row of the whole frame. A
    second copy of a row in flight is DUP: the receipt is sent when both rows have settled. `found` receives the index
    of each DUP's original. With `deduplicate` off every row is new. `replaced` then receives the row where the ID is
    now, and the row where the ID was before (or NOWHERE). `older` has the index of each row's ID in the runs (or
    IMPORTED or NOWHERE). `older` is empty if there are no runs. All messages in runs are in the log, before the
    messages in the table. Return the number of new rows.
    """
    row_offsets = start(places, DEDUPLICATION_ID_OFFSETS)
    blob = start(places, DEDUPLICATION_IDS)
    current = int(state[CURRENT])
    base = current * CHUNK_OFFSETS
    here = int(chunks[current, ROWS])
    new = 0
    for row in range(first_row, end_row):
        if (row - first_row) % HASHED == 0:
            _hash_ids(raw, row_offsets, blob, row, min(row + HASHED, end_row), key, slots, found)
        begin = blob + load32(raw, row_offsets + 4 * row)
        size = blob + load32(raw, row_offsets + 4 * row + 4) - begin
        # `found` holds the hash until the index overwrites it.
        hashed = int(found[row])
        at = _find(slots, hashed, raw, begin, size, ids, offsets)
        before = NOWHERE
        if slots[at] != EMPTY:
            before = int(slots[at]) & _PLACE
            index = int(chunks[before >> ROW_BITS, FIRST_INDEX]) + (before & (CHUNK_ROWS - 1))
            if index < state[WINDOW]:
                before = NOWHERE
            elif deduplicate:
                if index < state[CONFIRMED] or index >= frame_index:
                    verdicts[row] = DUP
                    found[row] = index
                else:
                    verdicts[row] = UNKNOWN
                continue
        if (
            deduplicate
            and before == NOWHERE
            and len(older) > 0
            and (older[row] >= state[WINDOW] or older[row] == IMPORTED)
        ):
            verdicts[row] = DUP
            found[row] = older[row]
            continue
        end = int(offsets[base + here])
        copy(ids, current * CHUNK_BYTES + end, raw, begin, size)
        offsets[base + here + 1] = end + size
        lies = (current << ROW_BITS) | here
        _fill(slots, at, hashed, lies, state)
        if not deduplicate:
            replaced[row, 0] = lies
            replaced[row, 1] = before
        here += 1
        new += 1
        verdicts[row] = NOT_DUP
    chunks[current, ROWS] = here
    state[NEXT] += new
    return new


@kernel(bare=True)
def index_of(raw: Bytes, places: Int64s, key: Int64s, slots: Int64s, ids: Uint8s, offsets: Int32s, chunks: Int64s2,
             state: Int64s) -> int:  # fmt: skip
    """Return the index of the message with the ID of a batch's first row. The message may be stored or in flight.
    Return NOWHERE if the table does not contain the ID."""
    row_offsets = start(places, DEDUPLICATION_ID_OFFSETS)
    begin = start(places, DEDUPLICATION_IDS) + load32(raw, row_offsets)
    size = load32(raw, row_offsets + 4) - load32(raw, row_offsets)
    at = _find(slots, siphash(raw, begin, begin + size, key), raw, begin, size, ids, offsets)
    if slots[at] == EMPTY:
        return NOWHERE
    lies = int(slots[at]) & _PLACE
    index = int(chunks[lies >> ROW_BITS, FIRST_INDEX]) + (lies & (CHUNK_ROWS - 1))
    return index if index >= state[WINDOW] else NOWHERE


@kernel(bare=True)
def put(place: int, first_row: int, end_row: int, key: Int64s, slots: Int64s, ids: Uint8s, offsets: Int32s,
        state: Int64s, hashes: Int64s) -> int:  # fmt: skip
    """Put the IDs of these rows of a place into the table. If the table has equal IDs, the ID that was put in first is
    found. `hashes` has room for HASHED."""
    for row in range(first_row, end_row):
        if (row - first_row) % HASHED == 0:
            _hash_rows(place, row, min(row + HASHED, end_row), key, slots, ids, offsets, hashes)
        lies = (place << ROW_BITS) | row
        begin, size = _begin(offsets, lies), _size(offsets, lies)
        hashed = int(hashes[(row - first_row) % HASHED])
        _fill(slots, _find(slots, hashed, ids, begin, size, ids, offsets), hashed, lies, state)
    return end_row - first_row


@kernel(bare=True)
def take_out(place: int, first_row: int, end_row: int, key: Int64s, slots: Int64s, ids: Uint8s, offsets: Int32s,
             state: Int64s, hashes: Int64s) -> int:  # fmt: skip
    """Remove these rows of a place from the table. If an ID now points to another row, the ID stays. `hashes` has room
    for HASHED elements. Return the number of removed IDs."""
    mask = slots.shape[0] - 1
    is_far = state[IS_FAR] != 0
    gone = 0
    for row in range(first_row, end_row):
        if (row - first_row) % HASHED == 0:
            _hash_rows(place, row, min(row + HASHED, end_row), key, slots, ids, offsets, hashes)
        lies = (place << ROW_BITS) | row
        at = int(hashes[(row - first_row) % HASHED]) & mask
        while slots[at] != EMPTY and slots[at] & _PLACE != lies:
            at = (at + 1) & mask
        if slots[at] != EMPTY:
            if is_far:
                _close_far(slots, at, key, ids, offsets)
            else:
                _close(slots, at)
            gone += 1
    state[USED] -= gone
    return gone


@kernel(bare=True)
def sweep(first: int, end: int, key: Int64s, slots: Int64s, ids: Uint8s, offsets: Int32s, chunks: Int64s2,
          state: Int64s) -> int:  # fmt: skip
    """Empty the slots from `first` to before `end` that point to chunks that are GONE. Return the number of emptied
    slots."""
    is_far = state[IS_FAR] != 0
    gone = 0
    at = first
    while at < end:
        slot = int(element(slots, at))
        # True if both are negative, which an empty slot is not. One rare branch is faster than two unpredictable ones.
        if slot & int(chunks[(slot & _PLACE) >> ROW_BITS, FIRST_INDEX]) < 0:
            # A slot that moved up to here is looked at next.
            if is_far:
                _close_far(slots, at, key, ids, offsets)
            else:
                _close(slots, at)
            gone += 1
        else:
            at += 1
    state[USED] -= gone
    return gone


# -- The kernels of a window's table for many rows. They release the interpreter, so other threads run.
#
# Otherwise the commit thread would wait while a thousand IDs are looked up. For a few rows, releasing the interpreter
# lock costs more time than it saves. No other thread may use the window during such a call.

MANY_ROWS = 256
_MANY_SLOTS = 4096


@kernel(nogil=True, bare=True)
def decide_beside(
    raw: Bytes,
    places: Int64s,
    first_row: int,
    end_row: int,
    frame_index: int,
    deduplicate: bool,
    key: Int64s,
    slots: Int64s,
    ids: Uint8s,
    offsets: Int32s,
    chunks: Int64s2,
    state: Int64s,
    verdicts: Uint8s,
    found: Int64s,
    replaced: Int64s2,
    older: Int64s,
) -> int:
    """Do the same as `decide`, for MANY_ROWS or more."""
    return decide(
        raw, places, first_row, end_row, frame_index, deduplicate, key, slots, ids, offsets, chunks, state, verdicts,
        found, replaced, older,
    )  # fmt: skip


@kernel(nogil=True, bare=True)
def _sweep(first: int, end: int, key: Int64s, slots: Int64s, ids: Uint8s, offsets: Int32s, chunks: Int64s2,
           state: Int64s) -> int:  # fmt: skip
    return sweep(first, end, key, slots, ids, offsets, chunks, state)


def sweep_beside(first: int, end: int, *rest: Any) -> int:
    """Do the same as `sweep`. If there are many slots, release the interpreter lock (GIL) meanwhile."""
    return (_sweep if end - first >= _MANY_SLOTS else sweep)(first, end, *rest)
