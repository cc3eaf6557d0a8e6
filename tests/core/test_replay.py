"""Many stored batches at once: the numbers must be those that one batch after the other gives."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.batch import Batch
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import NUMBERS
from seqdedupe.format import layout
from seqdedupe.format.layout import BASE_INDEX, PLACES
from tests.batches import batch
from tests.plain import PLAIN

# Lists of names of which many are the same letters, cut elsewhere.
LISTS = st.sampled_from([("ab", "c"), ("a", "bc"), ("abc",), ("a", "b", "c"), ("c", "ab"), ("bc", "a"), ("b", "ca")])


def stored(batches: list[Batch]) -> tuple[bytes, Any]:
    """The batches in a buffer, and the table of their place rows."""
    table = np.zeros((len(batches), PLACES), np.int64)
    raw = b""
    index = 0
    for places, b in zip(table, batches, strict=True):
        begin, raw = len(raw), raw + b.encode()
        assert layout.layout(np.frombuffer(raw, np.uint8), begin, len(raw), places) == layout.CANONICAL
        places[BASE_INDEX] = index
        index += len(b)
    return raw, table


def numbers_of(producers: Producers) -> dict[bytes, list[int]]:
    names = producers.names_from(0)
    return dict(zip(names, producers.numbers[: len(names), :NUMBERS].tolist(), strict=True))


def replayed_agrees(batches: list[Batch]) -> None:
    """Compiled and plain, all at once and one by one: all four give the same numbers."""
    raw, table = stored(batches)
    one_by_one = Producers()
    view = np.frombuffer(raw, np.uint8)
    for places, b in zip(table, batches, strict=True):
        one_by_one.persist(view, places, one_by_one.add_all([name.encode() for name in b.names()]))
    for module in (Producers, PLAIN["producers"].Producers):
        replayed = module()
        replayed.replay(raw, table, len(batches))
        assert numbers_of(replayed) == numbers_of(one_by_one)


def drawn(lists: list[tuple[str, ...]]) -> list[Batch]:
    return [
        batch([(name, 100 * k + i) for i, name in enumerate(names)], epochs=dict.fromkeys(names, k % 3 + 1))
        for k, names in enumerate(lists)
    ]


@given(st.lists(LISTS, min_size=1, max_size=8))
def test_replay_of_many_batches_is_that_of_one_after_the_other(lists: list[tuple[str, ...]]) -> None:
    replayed_agrees(drawn(lists))


AB_C_THEN_A_BC: list[tuple[str, ...]] = [("ab", "c"), ("a", "bc")]


def test_names_of_the_same_letters_cut_elsewhere_are_other_names() -> None:
    replayed_agrees(drawn(AB_C_THEN_A_BC))


def offsets_left_out(original: Callable[..., bool]) -> Callable[..., bool]:
    offsets_bytes = 4 * 3
    return lambda raw, one, other, count: count == offsets_bytes or original(raw, one, other, count)


def names_left_out(original: Callable[..., bool]) -> Callable[..., bool]:
    names_bytes = 3
    return lambda raw, one, other, count: count == names_bytes or original(raw, one, other, count)


@pytest.mark.parametrize(
    ("planted", "lists"), [(offsets_left_out, AB_C_THEN_A_BC), (names_left_out, [("ab", "c"), ("bc", "a")])]
)
def test_a_comparison_that_leaves_something_out_is_noticed(
    monkeypatch: pytest.MonkeyPatch, planted: Callable[[Any], Any], lists: list[tuple[str, ...]]
) -> None:
    monkeypatch.setattr(PLAIN["recent"], "same_bytes", planted(PLAIN["recent"].same_bytes))
    with pytest.raises(AssertionError):
        replayed_agrees(drawn(lists))
