"""Names and their numbers, in a table that is filled again a part at a time."""

import random
from typing import Any

import numpy as np
import pytest

from seqdedupe.core import name_table as names_module
from seqdedupe.core.name_table import Names, joined
from seqdedupe.core.producers import Producers
from tests.plain import PLAIN

MANY = 20_000
MOVED = 4
"""At most, for a name that comes."""


def check(names: Any, model: list[bytes]) -> None:
    assert len(names) == len(model)
    assert names.some(0, len(model) + 1) == model
    assert names.numbers(*joined([*model, b"never came"])).tolist() == [*range(len(model)), -1]
    assert [names.number(name) for name in model[-3:]] == list(range(len(model)))[-3:]
    assert names.number(b"never came") is None
    assert b"never came" not in names
    assert names.names(np.arange(len(model))[::-1]) == model[::-1]


def a_name(rng: random.Random) -> bytes:
    """For any length, and often the beginning of another one."""
    return (b"%d" % rng.randrange(40)) * rng.randrange(40)


@pytest.mark.parametrize("seed", range(20))
def test_it_says_what_a_plain_list_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(names_module, "_FIRST_NAMES", rng.choice([0, 1, 32]))
    monkeypatch.setattr(names_module, "_RELEASED_SLOTS", rng.choice([1, 50]))
    monkeypatch.setattr(names_module, "MAPPED_BYTES", rng.choice([64, 4096, 2**20]))
    model = [b"p%d" % i for i in range(rng.choice([0, 1, 8, 20]))]
    names = Names.of(model)
    check(names, model)
    for _ in range(30):
        come = [a_name(rng) for _ in range(rng.choice([0, 1, 2, 30, 200]))]
        model += [name for k, name in enumerate(come) if name not in model and name not in come[:k]]
        assert names.add_all(come).tolist() == [model.index(name) for name in come]
        check(names, model)
        first, count = rng.randrange(len(model) + 1), rng.randrange(40)
        assert names.some(first, count) == model[first : first + count]


@pytest.mark.parametrize("bits", [0, 32, -(2**32), 2**63 - 1])
def test_names_of_which_the_hashes_are_alike_are_told_apart(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = PLAIN["name_table"]
    siphash = plain.siphash
    monkeypatch.setattr(plain, "siphash", lambda *name: siphash(*name) & bits)
    rng = random.Random(bits)
    model = list(dict.fromkeys(a_name(rng) for _ in range(100)))
    names = plain.Names()
    for name in model:
        names.add_all([name])
    check(names, model)


def test_the_compiled_kernels_and_the_plain_ones_leave_the_same_table() -> None:
    rng = random.Random(5)
    both: list[Any] = [Names(), PLAIN["name_table"].Names()]
    for _ in range(20):
        come = [a_name(rng) for _ in range(rng.choice([1, 30, 70]))]
        assert len({tuple(names.add_all(come).tolist()) for names in both}) == 1
        tables = [[t.rows.tolist() for t in (names._slots, names._bounds, names._text)] for names in both]
        assert tables[0] == tables[1]
    assert both[0]._old is None


def moved_by_each(names: Names, count: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many names enter another table as one name more comes, `count` times; none is ever overfull."""
    moved: list[int] = []
    move = names_module.move_names

    def counted(raw: Any, spans: Any, *rest: Any) -> int:
        moved.append(len(spans))
        return move(raw, spans, *rest)

    monkeypatch.setattr(names_module, "move_names", counted)
    for _ in range(count):
        names.add_all([b"new-%d" % len(names)])
        assert 8 * len(names) <= 7 * len(names._slots.rows)
    return moved


def test_one_name_more_moves_a_few_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names()
    moved = moved_by_each(names, MANY, monkeypatch)
    assert 0 < max(moved) <= MOVED
    assert sum(moved) < 2 * MANY
    assert len(names._slots.rows) < 4 * MANY
    assert names.number(b"new-7") == 7


def test_a_table_that_is_filled_at_once_moves_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control arm: what is measured above tells such a table."""
    monkeypatch.setattr(names_module, "_MOVED_A_NAME", MANY)
    assert max(moved_by_each(Names(), MANY, monkeypatch)) > MANY // 4


def test_an_old_table_is_given_back_some_at_each_call() -> None:
    names = Names.of([b"p%d" % i for i in range(300_000)])
    sizes: list[int] = []
    before = len(names._slots.rows)
    while not sizes or names._old is not None:
        names.add_all([b"new-%d-%d" % (len(names), i) for i in range(2_000)])
        if len(names._slots.rows) > before:
            sizes.append(0 if names._old is None else len(names._old.rows))
    assert len(sizes) > 2
    steps = -np.diff([before, *sizes])
    assert steps.max() <= names_module._RELEASED_SLOTS


def test_clearing_gives_back_some_at_each_step() -> None:
    names = Names.of([b"producer-%020d" % i for i in range(400_000)])
    tables = (names._text, names._bounds, names._slots)
    sizes = [sum(table.rows.nbytes for table in tables)]
    sizes += [sum(table.rows.nbytes for table in tables) for _ in names.clear()]
    assert sizes[0] > 10_000_000
    assert sizes[-1] == 0
    assert -np.diff(sizes).min() > 0
    assert -np.diff(sizes).max() <= names_module._RELEASED_BYTES


def test_without_memory_no_name_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names.of([b"a", b"b"])

    def nothing(size_bytes: int) -> Any:
        raise MemoryError

    monkeypatch.setattr(names_module, "_mapped", nothing)
    for too_many in ([b"x" * 2**20], [b"%d" % i for i in range(2**18)]):
        with pytest.raises(MemoryError):
            names.add_all(too_many)
        check(names, [b"a", b"b"])
    assert names.add_all([b"c"]).tolist() == [2]
    check(names, [b"a", b"b", b"c"])


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
