"""Names and their numbers, in a table that grows a part at a time."""

import random

import numpy as np
import pytest

from seqdedupe.core import names as names_module
from seqdedupe.core.names import NAMES_A_PART, Names
from seqdedupe.core.producers import Producers

MANY = 100_000
ONE_SPLIT = 3 * NAMES_A_PART
"""No part has more names than this: twice the average is what they are made for, and hashes scatter little."""


def check(names: Names, model: list[bytes]) -> None:
    assert len(names) == len(model)
    assert names.some(0, len(model) + 1) == model
    assert names.numbers([*model, b"never came"]) == [*range(len(model)), -1]
    assert [names.number(name) for name in model] == list(range(len(model)))
    assert names.number(b"never came") is None
    assert b"never came" not in names
    assert names.names(list(range(len(model)))[::-1]) == model[::-1]


@pytest.mark.parametrize("seed", range(20))
def test_it_says_what_a_plain_list_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(names_module, "NAMES_A_PART", rng.choice([1, 2, 7]))
    monkeypatch.setattr(names_module, "NAMES_A_PAGE", rng.choice([1, 3, 8]))
    model = [b"p%d" % i for i in range(rng.choice([0, 1, 8, 20]))]
    names = Names.of(model)
    check(names, model)
    for _ in range(30):
        come = [b"p%d" % rng.randrange(500) for _ in range(rng.choice([0, 1, 2, 30, 100]))]
        model += [name for k, name in enumerate(come) if name not in model and name not in come[:k]]
        assert names.add_all(come) == [model.index(name) for name in come]
        check(names, model)
        first, count = rng.randrange(len(model) + 1), rng.randrange(40)
        assert names.some(first, count) == model[first : first + count]
    for _ in names.clear():
        pass
    check(names, [])
    names.add_all([b"again"])
    check(names, [b"again"])


def moved_by_one_more(names: Names) -> int:
    """How many names are put into another dict, or into a dict that is made anew, when one name comes."""
    before = list(names._parts)
    sizes = [len(part) for part in before]
    names.add_all([b"new-%d" % len(names)])
    kept = {id(part) for part in names._parts}
    return sum(size for part, size in zip(before, sizes, strict=True) if id(part) not in kept)


def test_one_name_more_moves_one_part_of_them_at_most() -> None:
    names = Names.of([b"p%d" % i for i in range(MANY)])
    moved = [moved_by_one_more(names) for _ in range(2 * NAMES_A_PART)]
    assert 0 < max(moved) <= ONE_SPLIT
    assert sum(count > 0 for count in moved) <= 3
    assert len(names._loaded) == MANY
    assert max(map(len, names._parts)) <= ONE_SPLIT, "a dict of more would grow as a whole"


def test_a_table_of_one_part_has_them_all_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control arm: what is measured above tells such a table."""
    monkeypatch.setattr(names_module, "NAMES_A_PART", 10 * MANY)
    names = Names()
    for first in range(0, MANY, 1000):
        names.add_all([b"p%d" % i for i in range(first, first + 1000)])
    assert max(map(len, names._parts)) > ONE_SPLIT
    monkeypatch.setattr(names_module, "NAMES_A_PART", MANY)
    assert moved_by_one_more(names) > ONE_SPLIT


def test_other_numbers_have_other_names() -> None:
    producers = Producers()
    known = [b"p%d" % number for number in range(100)]
    producers.add_all(known)
    stays = np.arange(len(known)) % 2 == 1
    left = [name for name, stay in zip(known, stays, strict=True) if stay]
    _, old = producers.renumber(Names.of(left), stays, np.zeros(0, np.int64))
    assert producers.names_from(10, 10) == left[10:20]
    assert producers.names_of(np.array([49, 3])) == [left[49], left[3]]
    assert old.some(0, 100) == known
