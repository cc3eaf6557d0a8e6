"""Names are freed in steps, between which everything goes on."""

import random

import numpy as np
import pytest

from seqdedupe.core import producers as producers_module
from seqdedupe.core.producers import LettingGo, Producers
from seqdedupe.core.rule import DURABLE_EPOCH, EPOCH, PUSHED

STEP = 8


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers_module, "NAMES_A_STEP", STEP)


class Model:
    """Producers, and with them the ID that each name has; -1: nothing is known of it."""

    def __init__(self, count: int, gone: list[int]) -> None:
        self.producers = Producers()
        self.ids: dict[bytes, int] = {}
        for number in range(count):
            self.write(b"p%d" % number, -1 if number in gone else number)
        self.letting_go = LettingGo(self.producers, self.producers.empty())

    def write(self, name: bytes, sequence_id: int) -> None:
        number = self.producers.add(name)
        self.producers.numbers[number, PUSHED] = sequence_id
        self.ids[name] = sequence_id

    def finish(self) -> np.ndarray:
        known = self.producers.names_from(0)
        new_numbers = self.letting_go.finish(self.producers.empty())
        for name, new in zip(known, new_numbers.tolist(), strict=True):
            assert self.producers.number(name) == (None if new < 0 else new), name
        return new_numbers

    def check(self, left: set[bytes]) -> None:
        """These names are left, each with what it had; and what comes is as new."""
        producers = self.producers
        assert set(producers.names_from(0)) == left
        assert [producers.number(name) for name in producers.names_from(0)] == list(range(len(left)))
        for name in left:
            assert producers.numbers[producers.number(name), PUSHED] == self.ids[name], name
        assert producers.collect_dirty()[0].tolist() == list(range(len(left))), "all count as changed"
        for number in producers.add_all([b"later%d" % i for i in range(len(producers.numbers))]).tolist():
            assert producers.numbers[number].tolist() == [-1, -1, 0, 0, -1, -1]


def test_no_step_takes_more_names_than_it_may() -> None:
    model = Model(10 * STEP + 3, [])
    ends = [len(model.letting_go._left) for _ in model.letting_go.prepare()]
    assert np.diff(ends, prepend=0).tolist() == [STEP] * 10 + [3]
    old = model.producers._names
    model.finish()
    list(model.letting_go.clear())
    assert len(old._text.rows) == len(old._bounds.rows) == len(old._slots.rows) == 0


@pytest.mark.parametrize("count", [0, 1, STEP - 1, STEP, 5 * STEP, 5 * STEP + 1])
def test_nothing_has_changed_before_it_is_finished(count: int) -> None:
    gone = list(range(0, count, 3))
    model = Model(count, gone)
    known = model.producers.names_from(0)
    for _ in model.letting_go.prepare():
        assert model.producers.names_from(0) == known
        assert [model.producers.number(name) for name in known] == list(range(count))
        assert model.producers.generation == 0
    model.finish()
    assert model.producers.generation == 1
    list(model.letting_go.clear())
    model.check({b"p%d" % number for number in range(count) if number not in gone})


@pytest.mark.parametrize("count", [STEP, 4 * STEP, 4 * STEP + 5])
def test_names_come_and_come_back_between_the_steps(count: int) -> None:
    for seed in range(100):
        rng = random.Random(seed)
        gone = [number for number in range(count) if rng.random() < 0.5]
        model = Model(count, gone)
        left = {b"p%d" % number for number in range(count) if number not in gone}
        come = 0
        for _ in model.letting_go.prepare():
            for _ in range(rng.choice([0, 0, 1, 3])):
                # Two of three are new.
                name = b"new%d" % come if rng.random() < 0.7 or not gone else b"p%d" % rng.choice(gone)
                come += 1
                if come <= 5 * count:
                    model.write(name, come)
                    left.add(name)
            changes = rng.choice(sorted(left)) if left else b"new"
            left.add(changes)
            model.write(changes, 1000 + come)
        model.finish()
        list(model.letting_go.clear())
        model.check(left)


def test_names_that_come_when_all_have_been_taken() -> None:
    """At the end of the old table, and again."""
    model = Model(STEP + 2, [1])
    steps = model.letting_go.prepare()
    next(steps)
    next(steps)
    model.write(b"new", 5)
    next(steps)
    model.write(b"newer", 6)
    assert len(list(steps)) == 1
    model.finish()
    model.check({b"p%d" % number for number in range(STEP + 2) if number != 1} | {b"new", b"newer"})


def test_who_is_held_since_stays_though_nothing_is_known_of_it() -> None:
    model = Model(4, [0, 2])
    list(model.letting_go.prepare())
    is_free = model.producers.empty()
    is_free[2] = False
    assert model.letting_go.finish(is_free).tolist() == [-1, 0, 2, 1]
    assert model.producers.names_from(0) == [b"p1", b"p3", b"p2"]


def test_who_came_back_is_lost_if_nobody_looks_again() -> None:
    """The control arm: what was free when it began says nothing about the end."""
    model = Model(4, [0, 2])
    begun = model.producers.empty()
    list(model.letting_go.prepare())
    model.producers.numbers[2, EPOCH] = 7
    model.letting_go.finish(begun)
    assert b"p2" not in model.producers


def test_who_is_empty() -> None:
    """Looked at all at once or one by one: the same."""
    rng = np.random.default_rng(1)
    producers = Producers()
    producers.add_all([b"%d" % number for number in range(2000)])
    producers.numbers[:2000] = rng.integers(-1, 2, (2000, 6))
    producers.numbers[:2000, [EPOCH, DURABLE_EPOCH]] = rng.integers(0, 2, (2000, 2))
    producers.purge(np.zeros(0, np.int64), 0)
    known = [producers.is_known(number) for number in range(2000)]
    assert producers.empty().tolist() == [not is_known for is_known in known]
    assert 0 < producers.known_count() == sum(known) < 2000
