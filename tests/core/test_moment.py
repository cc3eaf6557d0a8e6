"""What time it is by a clock that jumps. A second, one process."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.core.id_window import Moment
from seqdedupe.topic.clock import LOOK_SECONDS, LOOKS, Steadied

LOOK_MS = int(1000 * LOOK_SECONDS)
BEGAN_MS = 1_700_000_000_000

WRONG_MS = st.sampled_from([0, 0, 0, 1, -1, 1000, -1000, 86_400_000, -86_400_000])
"""By how much the clock is ahead."""
PERIODS = st.lists(st.tuples(WRONG_MS, st.integers(1, LOOKS)), min_size=1, max_size=8)
"""For this many looks each."""


def look_through(periods: list[tuple[int, int]], now_wrong_ms: int) -> None:
    """After each look: the time is one of those that it may be, if the clock was right once in the last LOOKS looks."""
    steadied, history = Steadied(), list[int]()
    for wrong_ms, looks in periods:
        for _ in range(looks):
            steady_ms = LOOK_MS * len(history)
            steadied.look(BEGAN_MS + steady_ms + wrong_ms, steady_ms)
            history.append(wrong_ms)
            moment = steadied.now(BEGAN_MS + steady_ms + 7 + now_wrong_ms, steady_ms + 7)
            if 0 in (now_wrong_ms, *history[-LOOKS:]):
                assert moment.earliest_ms <= BEGAN_MS + steady_ms + 7
            assert (moment.earliest_ms == 0) == (len(history) < LOOKS)
            if {now_wrong_ms, *history[-LOOKS:]} == {0}:
                assert moment.latest_ms == BEGAN_MS + steady_ms + 7
                assert moment.earliest_ms in (0, moment.latest_ms)
            assert moment.latest_ms >= BEGAN_MS + steady_ms + 7 or 0 not in (now_wrong_ms, *history[-LOOKS:])


@given(PERIODS, WRONG_MS)
def test_the_time_is_between_what_a_clock_says_that_was_right_once(
    periods: list[tuple[int, int]], now_wrong_ms: int
) -> None:
    look_through(periods, now_wrong_ms)


def test_a_clock_that_is_right_is_believed_after_so_many_looks() -> None:
    steadied = Steadied()
    for look in range(LOOKS):
        assert steadied.now(BEGAN_MS + look * LOOK_MS, look * LOOK_MS).earliest_ms == 0
        steadied.look(BEGAN_MS + look * LOOK_MS, look * LOOK_MS)
    now_ms = BEGAN_MS + LOOKS * LOOK_MS
    assert steadied.now(now_ms, LOOKS * LOOK_MS) == Moment(now_ms, now_ms)


def test_so_many_looks_take_longer_than_time_services_wait() -> None:
    assert (LOOKS - 1) * LOOK_SECONDS > 2048


def _believed_at_once(self: Steadied, clock_ms: int, steady_ms: int) -> Moment:
    return Moment(clock_ms, clock_ms)


def _of_the_last_look(self: Steadied, clock_ms: int, steady_ms: int) -> Moment:
    apart_ms = self._apart_ms[-1]
    return Moment(0 if len(self._apart_ms) < LOOKS else steady_ms + apart_ms, steady_ms + apart_ms)


@pytest.mark.parametrize("planted", [_believed_at_once, _of_the_last_look])
def test_control_a_clock_that_is_believed_too_soon_is_noticed(
    planted: Callable[..., Moment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Steadied, "now", planted)
    with pytest.raises(AssertionError):
        look_through([(0, LOOKS), (1000, 2), (0, 2)], 0)
