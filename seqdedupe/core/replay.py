"""Batches that are in the log: into the numbers and the ring, one while serving, and many at a time in recovery."""

import numpy as np

from seqdedupe.core.recent import enter
from seqdedupe.core.rule import confirm_batch
from seqdedupe.format.columns import NAME_OFFSETS, NAMES, PRODUCERS, ROWS, size, start
from seqdedupe.format.jit import Bytes, Int64s, Int64s2, Uint8s, kernel, load32


@kernel()
def persist(
    raw: Bytes, places: Int64s, producer_rows: Int64s, numbers: Int64s2, dirty: Uint8s, ring: Int64s2, entered: int
) -> int:
    """A batch is in the log: see `rule.confirm` and `recent.enter`, whose result this returns."""
    confirm_batch(raw, places, producer_rows, numbers, dirty)
    return enter(raw, places, producer_rows, numbers, ring, entered)


@kernel()
def same_bytes(raw: Bytes, one: int, other: int, count: int) -> bool:
    """Whether the same bytes stand at two places of a buffer."""
    for i in range(count):  # noqa: SIM110 (numba compiles the loop, not the generator)
        if raw[one + i] != raw[other + i]:
            return False
    return True


@kernel()
def name_places(raw: Bytes, table: Int64s2, count: int, places_of_names: Int64s2, first_name: Int64s) -> int:
    """Where the producer names of `count` scanned records stand: start and end of each, in `places_of_names`.

    `first_name[k]` is the place in that list of record k's first name. A record whose names are those of the batch
    before it shares that one's. Returns the length of the list, or -1 if it is too short for all.
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
    """`persist` for every batch among `count` scanned records; `producer_rows` are those of the listed names."""
    for k in range(count):
        places = table[k]
        if places[ROWS] > 0 and places[PRODUCERS] > 0:
            of_batch = producer_rows[first_name[k] : first_name[k] + places[PRODUCERS]]
            entered = persist(raw, places, of_batch, numbers, dirty, ring, entered)
    return entered


def list_names(raw: Bytes, table: Int64s2, count: int) -> tuple[Int64s2, Int64s]:
    """Where the producer names in `count` scanned records stand, and in this list the first one of each record."""
    first_name = np.zeros(count, np.int64)
    room = count + 1024
    while True:
        places = np.empty((room, 2), np.int64)
        listed = name_places(raw, table, count, places, first_name)
        if listed >= 0:
            return places[:listed], first_name
        room *= 4
