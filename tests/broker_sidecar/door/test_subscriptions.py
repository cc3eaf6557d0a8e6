"""What a consumer has acknowledged, against a set of indexes."""

import random

import pytest

from broker_sidecar.door.subscriptions import MAX_RANGES, Acknowledged


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_a_set_says(seed: int) -> None:
    rng = random.Random(seed)
    found, model = Acknowledged(3), set(range(3))
    for _ in range(200):
        if rng.random() < 0.1:
            stop = rng.randrange(80)
            found.add_all_below(stop)
            model |= set(range(stop))
        else:
            first = rng.randrange(80)
            stop = first + rng.choice((0, 1, 1, 1, 5))
            found.add(first, stop)
            model |= set(range(first, stop))
        assert found.next_index == next(i for i in range(200) if i not in model)
        for index in range(90):
            is_open = found.first_open(index)
            assert is_open == next(i for i in range(index, 200) if i not in model)
            if is_open == index:
                assert found.open_until(index) == min((i for i in model if i > index), default=found.open_until(200))


def test_ranges_that_are_too_many_come_again() -> None:
    found = Acknowledged(0)
    for index in range(1, 2 * MAX_RANGES + 10, 2):
        found.add(index, index + 1)
    assert found.first_open(1) == 2
    assert found.first_open(2 * MAX_RANGES + 5) == 2 * MAX_RANGES + 5
    found.add(0, 1)
    assert found.next_index == 2
