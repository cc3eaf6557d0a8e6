"""What an Open and a snapshot of one producer take does not grow with the names: rows that are touched, counted.

The kernels run as plain Python here, so that each look into a table is one that can be counted.
"""

from typing import Any

import numpy as np
import pytest

from seqdedupe.topic.sessions import RANDOM_BYTES, Sessions
from tests.plain import PLAIN

MANY = 10_000
FEW = 200

OPENED = 18
"""Looks at rows, at most: written when the name comes, opened, confirmed, answered, collected (in three columns)."""

LOOKS = 200
"""At slots, at most."""

FLAGS_AT_ONCE = 64
"""Producers of which a snapshot sees in one look that none has changed."""


class Counted(np.ndarray):
    """Counts the rows that are read or written."""

    rows = 0

    def __getitem__(self, key: Any) -> Any:
        self._count(key)
        got = super().__getitem__(key)
        return got.view(np.ndarray) if isinstance(got, np.ndarray) else got

    def __setitem__(self, key: Any, value: Any) -> None:
        self._count(key)
        super().__setitem__(key, value)

    def _count(self, key: Any) -> None:
        # In some columns alone they are rows all the same.
        got = super().__getitem__(key[0] if isinstance(key, tuple) else key)
        is_row = not isinstance(got, np.ndarray) or got.ndim < self.ndim
        Counted.rows += 1 if is_row else len(got)


def filled(names: int) -> Any:
    producers = PLAIN["producers"].Producers()
    ones = np.ones(names, np.int64)
    producers.load(PLAIN["name_table"].Names.of([b"p%d" % i for i in range(names)]), ones, ones, ones)
    producers.add(b"makes room for more")
    producers.collect_dirty()
    return producers


def touched(table: Any, work: Any) -> int:
    """How many rows of a table the work reads and writes."""
    before, Counted.rows = table.rows, 0
    table.rows = before.view(Counted)
    try:
        work()
    finally:
        table.rows = before
    return Counted.rows


def opens(producers: Any, name: str) -> None:
    """One Open, as `open_sessions` goes about it, and the snapshot after it."""
    sessions = Sessions(producers)
    sessions.begin_term(5, bytes(RANDOM_BYTES))
    opening = sessions.open([name], None)
    numbers = producers.find_all(opening.names)
    producers.confirm_sessions(numbers, opening.epochs, None, 7)
    answer = sessions.opened(opening)
    assert answer.epochs == opening.epochs.tolist()
    changed, _, epochs, _ = producers.collect_dirty()
    assert (changed.tolist(), epochs.tolist()) == (numbers.tolist(), opening.epochs.tolist())


@pytest.mark.parametrize("name", ["p77", "new"])
def test_an_open_and_its_snapshot_touch_the_same_rows_of_few_names_and_of_many(name: str) -> None:
    few, many = filled(FEW), filled(MANY)
    of_few = touched(few._numbers, lambda: opens(few, name))
    of_many = touched(many._numbers, lambda: opens(many, name))
    assert 4 <= of_few == of_many <= OPENED


def test_a_snapshot_looks_at_many_producers_at_once() -> None:
    producers = filled(MANY)
    producers.mark_dirty(np.array([5, MANY // 2]))
    looks = touched(producers._dirty, producers.collect_dirty)
    assert MANY / FLAGS_AT_ONCE <= looks <= MANY / FLAGS_AT_ONCE + 10


def test_what_goes_over_all_names_is_counted() -> None:
    """The control arm: by this counter a scan of all is one."""
    producers = filled(MANY)
    assert touched(producers._numbers, lambda: producers.stated_below(7)) >= MANY
    assert touched(producers._numbers, lambda: producers.collect_dirty(np.arange(MANY))) >= MANY


@pytest.mark.parametrize("name", ["p77", "new"])
def test_a_name_is_found_by_few_looks_among_few_and_among_many(name: str) -> None:
    """The slots that a name may be in are as many as others are in its way: few, since the table is never full."""
    for names in (FEW, MANY):
        producers = filled(names)
        assert touched(producers._names._slots, lambda known=producers: known.add(name.encode())) <= LOOKS


def test_names_between_others_are_found_without_a_walk() -> None:
    producers = filled(MANY)
    names = producers._names
    middle = MANY // 2

    def some() -> None:
        assert producers.names_from(middle, 3) == [b"p%d" % i for i in range(middle, middle + 3)]
        assert producers.names_of(np.array([3, middle])) == [b"p3", b"p%d" % middle]

    assert touched(names._bounds, some) <= 20
    assert touched(names._text, some) <= 40
    assert touched(names._bounds, lambda: producers.names_from(0)) >= MANY, "the control arm"
