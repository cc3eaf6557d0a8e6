"""The ring of recent messages takes memory as it is used, and knows what a ring of full length knows."""

import random
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqdedupe.core import producers as producers_module
from seqdedupe.core import recent
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import DUP
from seqdedupe.format import layout
from seqdedupe.format.jit import Int64s, Uint8s
from seqdedupe.format.layout import BASE_INDEX, PLACES
from tests.batches import batch
from tests.plain import PLAIN

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
    """Batches of this many rows of two producers in turn: the index that each one's messages have, and should have."""
    producers = Producers()
    producers.add_all([b"a", b"b"])
    found, index = list[int](), 0
    for size in sizes:
        rows = [("ab"[i % 2], i) for i in range(index, index + size)]
        encoded, view, places = laid_out(rows, index)
        if replayed:
            producers.replay(encoded, places.reshape(1, PLACES), 1)
        else:
            numbers = producers.known(view, places)
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


FOUND_IN = 200
"""Looks into the ring that one message takes at most, of any age."""


class Counted(np.ndarray):
    """A ring that counts how often a number is taken out of it."""

    looks = 0

    def __getitem__(self, key: Any) -> Any:
        Counted.looks += 1
        return super().__getitem__(key)


def looks_for(producers: Producers, rows: list[tuple[str, int]]) -> tuple[int, list[int]]:
    """How often the ring is looked into for the original of these duplicates, and where they are found."""
    _, view, places = laid_out(rows, 0)
    numbers = producers.known(view, places)
    verdicts, found = np.full(len(rows), DUP, np.uint8), np.zeros(len(rows), np.int64)
    ring = producers._ring.view(Counted)
    Counted.looks = 0
    PLAIN["recent"].find_duplicates(view, places, numbers, producers.numbers, ring, producers._entered, verdicts, found)
    return Counted.looks, found.tolist()


def fill(producers: Producers, rows: int, name_of: Callable[[int], str]) -> None:
    """This many messages; each one's sequence ID is its index."""
    for index in range(producers._entered, producers._entered + rows, 4096):
        _, view, places = laid_out([(name_of(i), i) for i in range(index, index + 4096)], index)
        numbers = producers.known(view, places)
        assert numbers is not None
        producers.persist(view, places, numbers)


@pytest.mark.parametrize("names", [1, 3])
def test_an_old_message_is_found_and_a_gone_one_missed_in_few_steps(names: int) -> None:
    producers = Producers()
    producers.add_all([b"%d" % i for i in range(names)])
    fill(producers, recent.RECENT_MESSAGES + 5 * 4096, lambda i: str(i % names))
    end, gone = producers._entered, 5 * 4096
    for age in (1, 100, 5_000, 40_000, recent.RECENT_MESSAGES - names, recent.RECENT_MESSAGES + 1, end - names):
        index = end - age
        looks, found = looks_for(producers, [(str(index % names), index)])
        assert found == [index if index >= gone else -1]
        assert looks <= FOUND_IN, age


def test_without_far_ways_it_takes_a_walk() -> None:
    """The control arm."""
    producers = Producers()
    producers.add_all([b"0"])
    fill(producers, recent.RECENT_MESSAGES + 4096, lambda i: "0")
    producers._ring[:, recent.FAR] = producers._ring[:, recent.BEFORE]
    looks, found = looks_for(producers, [("0", 5)])
    assert looks > recent.RECENT_MESSAGES
    assert found == [-1]


@pytest.mark.parametrize("seed", range(10))
def test_of_the_last_messages_all_are_found_and_no_others(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    kept = rng.choice([64, 128])
    monkeypatch.setattr(recent, "RECENT_MESSAGES", kept)
    names = "abcd"[: rng.choice([1, 2, 4])]
    producers = Producers()
    producers.add_all([name.encode() for name in names])
    log: list[tuple[str, int]] = []
    ids = dict.fromkeys(names, -1)
    for _ in range(60):
        rows = []
        for _ in range(rng.choice([1, 2, 9, 40])):
            # Some send seldom, so that what they sent before is gone.
            name = names[min(rng.randrange(12), len(names) - 1)]
            ids[name] += rng.choice([1, 1, 5])
            rows.append((name, ids[name]))
        _, view, places = laid_out(rows, len(log))
        numbers = producers.known(view, places)
        assert numbers is not None
        producers.persist(view, places, numbers)
        log += rows
        asked = [(name, i) for name in names for i in range(ids[name] + 2)]
        _, found = looks_for(producers, asked)
        known = {row: len(log) - 1 - age for age, row in enumerate(reversed(log[-kept:]))}
        assert found == [known.get(row, -1) for row in asked]
