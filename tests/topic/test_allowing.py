"""As which producers somebody may publish: judged once a name, and the same as if each were judged again.

Costs a second.
"""

from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.core.producers import Producers
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.format.jit import Bytes, Int64s2, Uint8s
from seqdedupe.topic import frame
from seqdedupe.topic.frame import Allowing

Step = tuple[str, list[int]]

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["names come", "frame", "frame", "other rules", "new numbers"]),
        st.lists(st.integers(0, 999), max_size=6),
    ),
    max_size=25,
)


class Judging:
    """Rules by which a name is allowed whose number in it has no remainder; and how many names it was asked for."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor
        self.asked = 0

    def __call__(self, raw: Bytes, spans: Int64s2) -> Uint8s:
        self.asked += len(spans)
        names = [bytes(raw[begin:end]) for begin, end in spans.tolist()]
        return np.array([self.is_allowed(name) for name in names], np.uint8)

    def is_allowed(self, name: bytes) -> bool:
        return int(name[1:]) % self.divisor != 0


def deny(names: list[str]) -> SeqdedupeError:
    return error("NOT_ALLOWED", str(names))


def run(steps: list[Step]) -> None:
    producers, judge, fresh = Producers(), Judging(2), count()
    judged = Allowing(producers, judge, deny)
    for what, chosen in steps:
        if what == "names come":
            producers.add_all([b"p%d" % next(fresh) for _ in range(10 * len(chosen))])
        elif what == "other rules":
            judge = Judging(2 + len(chosen))
            judged.judge_again(judge)
        elif what == "new numbers":
            names = producers.copied_names()
            stays = np.zeros(len(producers), bool)
            back = np.arange(len(producers))[::-1].copy()
            turned = Producers()
            turned.add_all([names.some(int(number), 1)[0] for number in back])
            producers.renumber(turned.copied_names(), stays, back)
        elif len(producers):
            numbers = np.array(sorted({k % len(producers) for k in chosen}), np.int64)
            wanted = [k for k in numbers.tolist() if not judge.is_allowed(producers.names_from(k, 1)[0])]
            assert judged.forbidden(numbers).tolist() == wanted
            before = judge.asked
            assert judged.forbidden(numbers).tolist() == wanted
            assert judge.asked == before


@given(STEPS)
def test_it_is_as_if_each_name_were_judged_in_each_frame(steps: list[Step]) -> None:
    run(steps)


HISTORY: list[Step] = [
    ("names come", [0]),
    ("frame", [0, 1, 3]),
    ("new numbers", []),
    ("frame", [0, 1, 2, 3, 4, 5]),
    ("names come", [0] * 6),
    ("frame", [1, 50]),
]


def test_the_history_below_is_judged_right() -> None:
    run(HISTORY)


def always(_column: Uint8s, _numbers: object, _value: int) -> bool:
    return True


def as_far_as_it_goes(column: Uint8s, numbers: np.ndarray, value: int) -> bool:
    return bool((column[numbers[numbers < len(column)]] == value).all())


@pytest.mark.parametrize("bug", [always, as_far_as_it_goes])
def test_a_look_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch, bug: Callable[..., bool]) -> None:
    monkeypatch.setattr(frame, "are_all", bug)
    with pytest.raises(AssertionError):
        run(HISTORY)


def test_numbers_that_have_changed_unseen_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Producers, "generation", property(lambda self: 0, lambda self, value: None), raising=False)
    with pytest.raises(AssertionError):
        run(HISTORY)
