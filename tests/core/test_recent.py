"""The ring of recent messages takes memory as it is used, and knows what a ring of full length knows."""

import tracemalloc
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqdedupe.core import producers as producers_module
from seqdedupe.core import recent
from seqdedupe.core.producers import Producers
from seqdedupe.format import layout
from seqdedupe.format.columns import BASE_INDEX, PLACES
from seqdedupe.format.jit import Int64s, Uint8s
from tests.batches import batch

TOPICS = 50
MAX_BYTES_A_TOPIC = 32_768
SIZES = st.lists(st.sampled_from([1, 3, 63, 64, 65, 127, 129, 700, 2049]), min_size=1, max_size=9)


def full_length() -> Int64s:
    return np.zeros((recent.RECENT_MESSAGES, recent.COLUMNS), np.int64)


def laid_out(rows: list[tuple[str, int]], index: int) -> tuple[bytes, Uint8s, Int64s]:
    encoded = batch(rows, payloads=[b""] * len(rows)).encode()
    view, places = np.frombuffer(encoded, np.uint8), np.zeros(PLACES, np.int64)
    assert layout.layout(view, 0, len(encoded), places) == layout.CANONICAL
    places[BASE_INDEX] = index
    return encoded, view, places


def indexes_after(sizes: list[int], *, replayed: bool = False) -> tuple[list[int], list[int]]:
    """Batches of so many rows of two producers in turn: the index that each one's messages have, and should have."""
    producers = Producers()
    producers.add_all([b"a", b"b"])
    found, index = list[int](), 0
    for size in sizes:
        rows = [("ab"[i % 2], i) for i in range(index, index + size)]
        encoded, view, places = laid_out(rows, index)
        if replayed:
            producers.replay(encoded, places.reshape(1, PLACES), 1)
        else:
            numbers = producers.known(encoded, places)
            assert numbers is not None
            producers.persist(view, places, numbers)
        index += size
    for i in range(index):
        found.append(producers.index_of(i % 2, i))
    return found, list(range(index))


@settings(deadline=None)
@given(SIZES, st.booleans())
def test_a_ring_that_grows_loses_no_message(sizes: list[int], replayed: bool) -> None:
    found, expected = indexes_after(sizes, replayed=replayed)
    assert found == expected


def test_a_ring_that_does_not_grow_would_lose_some(monkeypatch: pytest.MonkeyPatch) -> None:
    with_room = recent.with_room

    def grow_once(ring: Int64s, entered: int, more: int) -> None:
        if not len(ring):
            with_room(ring, entered, more)

    monkeypatch.setattr(producers_module, "with_room", grow_once)
    found, expected = indexes_after([64, 64, 3])
    assert found != expected
    assert found[-3:] == expected[-3:]


@pytest.mark.parametrize("entered", [recent.RECENT_MESSAGES - 1, recent.RECENT_MESSAGES, 3 * recent.RECENT_MESSAGES])
def test_a_ring_is_never_longer_than_all_of_it(entered: int) -> None:
    ring = recent.new_ring()
    recent.with_room(ring, entered, 4096)
    assert len(ring) == recent.RECENT_MESSAGES


def bytes_of_a_topic(make: Callable[[], Producers]) -> float:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        made = [make() for _ in range(TOPICS)]
        return (tracemalloc.get_traced_memory()[0] - before) / len(made)
    finally:
        tracemalloc.stop()


def with_full_ring() -> Producers:
    producers = Producers()
    producers._ring = full_length()
    return producers


def test_producers_of_a_topic_that_nobody_uses_take_little_memory() -> None:
    assert bytes_of_a_topic(Producers) < MAX_BYTES_A_TOPIC
    assert bytes_of_a_topic(with_full_ring) > MAX_BYTES_A_TOPIC


def test_a_topic_of_one_message_takes_little_memory() -> None:
    def used(rows: int) -> Producers:
        producers = Producers()
        encoded, _, places = laid_out([("a", i) for i in range(rows)], 0)
        producers.replay(encoded, places.reshape(1, PLACES), 1)
        return producers

    assert bytes_of_a_topic(partial(used, 1)) < MAX_BYTES_A_TOPIC
    assert bytes_of_a_topic(partial(used, 5_000)) > MAX_BYTES_A_TOPIC
