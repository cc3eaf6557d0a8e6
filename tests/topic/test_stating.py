"""What the log has to state again is looked for some producers at a time, while others are let go."""

import numpy as np
import pytest

from seqdedupe.core.name_table import Names
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import PERSISTED, STATED
from seqdedupe.topic import control
from seqdedupe.topic.control import ProducerSessions, stated_again

STEP = 8
INDEX = 100


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "STATED_A_RECORD", STEP)


def of(names: int, unsaid: list[int]) -> Producers:
    """Producers of which the log states these only below INDEX."""
    producers = Producers()
    producers.add_all([b"p%d" % i for i in range(names)])
    producers.numbers[:names, PERSISTED] = np.arange(names)
    producers.numbers[:names, STATED] = INDEX
    producers.numbers[unsaid, STATED] = INDEX - 1
    return producers


@pytest.mark.parametrize("names", [0, 1, STEP, STEP + 1, 10 * STEP])
@pytest.mark.parametrize("every", [1, 3, 50])
def test_the_steps_say_all_of_it_once(names: int, every: int) -> None:
    unsaid = list(range(0, names, every))
    steps = list(stated_again(of(names, unsaid), INDEX))
    assert [name for step in steps for name in step.names] == [b"p%d" % i for i in unsaid]
    assert [i for step in steps if step.persisted is not None for i in step.persisted.tolist()] == unsaid
    assert len(steps) == -(-names // STEP), "whether a step says anything or not"
    assert max((len(step.names) for step in steps), default=0) <= STEP


def said_while_others_go(producers: Producers) -> list[bytes]:
    """The first half is released after it was looked at."""
    half = len(producers) // 2
    said = list[bytes]()

    def say(step: ProducerSessions) -> None:
        said.extend(step.names)
        numbers = producers.add_all(step.names)
        producers.numbers[numbers, STATED] = INDEX

    steps = stated_again(producers, INDEX)
    for _ in range(half // STEP):
        say(next(steps))
    stays = np.arange(len(producers)) >= half
    producers.renumber(Names.of(producers.names_from(half)), stays, np.zeros(0, np.int64))
    for step in steps:
        say(step)
    return said


def test_who_gets_a_number_that_was_looked_at_before_is_said() -> None:
    assert said_while_others_go(of(4 * STEP, [2 * STEP + 1, 4 * STEP - 1])) == [b"p17", b"p31"]


def test_who_goes_on_by_numbers_leaves_some_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control arm: nobody learns that the numbers are others."""
    monkeypatch.setattr(Producers, "generation", property(lambda self: 0, lambda self, value: None), raising=False)
    assert said_while_others_go(of(4 * STEP, [2 * STEP + 1, 4 * STEP - 1])) != [b"p17", b"p31"]
