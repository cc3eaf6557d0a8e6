"""Merging scanned records into the numbers, many at a time: recovery's loop, without a Python step a record."""

import numpy as np

from seqdedupe.core.recent import persist
from seqdedupe.format.columns import NAME_OFFSETS, NAMES, PRODUCERS, ROWS
from seqdedupe.format.jit import kernel, load32


@kernel("bool", "bytes", "int", "int", "int")
def same_bytes(raw, one, other, size):  # type: ignore[no-untyped-def]
    """Whether the same bytes stand at two places of a buffer."""
    for i in range(size):  # noqa: SIM110 (numba compiles the loop, not the generator)
        if raw[one + i] != raw[other + i]:
            return False
    return True


@kernel("int", "bytes", "int64s2", "int", "int64s2", "int64s")
def name_places(raw, table, count, places_of_names, first_name):  # type: ignore[no-untyped-def]
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
        offsets = places[2 * NAME_OFFSETS]
        names = places[2 * NAMES]
        if before >= 0:
            earlier = table[before]
            if (
                earlier[PRODUCERS] == producers
                and earlier[2 * NAMES + 1] == places[2 * NAMES + 1]
                and same_bytes(raw, earlier[2 * NAME_OFFSETS], offsets, 4 * producers + 4)
                and same_bytes(raw, earlier[2 * NAMES], names, places[2 * NAMES + 1])
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


@kernel("int", "bytes", "int64s2", "int", "int64s", "int64s", "int64s2", "uint8s", "int64s2", "int")
def persist_all(raw, table, count, slots, first_name, numbers, dirty, ring, entered):  # type: ignore[no-untyped-def]
    """`persist` for every batch among `count` scanned records; `slots` are those of the listed names."""
    for k in range(count):
        places = table[k]
        if places[ROWS] > 0:
            of_batch = slots[first_name[k] : first_name[k] + places[PRODUCERS]]
            entered = persist(raw, places, of_batch, numbers, dirty, ring, entered)
    return entered


def list_names(raw: bytes, table: np.ndarray, count: int) -> tuple[list[bytes], np.ndarray]:
    """The producer names in `count` scanned records, and for each record the place of its first one in the list."""
    view = np.frombuffer(raw, np.uint8)
    first_name = np.zeros(count, np.int64)
    room = count + 1024
    while True:
        places = np.zeros((room, 2), np.int64)
        listed = name_places(view, table, count, places, first_name)
        if listed >= 0:
            return [raw[start:end] for start, end in places[:listed].tolist()], first_name
        room *= 4
