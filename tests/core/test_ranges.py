"""Ranges of a broker: which checks are refused, against a model of a few lines, and compiled against plain."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.core import rule
from seqdedupe.core.rule import DUP, NOT_DUP, NUMBERS, PERSISTED, PUSHED, UNKNOWN
from tests.plain import PLAIN

N, D, U = NOT_DUP, DUP, UNKNOWN
NAMES = 3
MAX_ID = 2**63 - 1

Row = tuple[int, int, int, bool]
"""Handle, lowest and highest ID, whether it passes."""

Judged = tuple[int, list[int], list[int]]
"""What `judge_ranges` returns, the verdicts, and what it found where it refuses."""


def one(handle: int, lowest: int, highest: int | None = None, *, passes: bool = False) -> Row:
    return handle, lowest, lowest if highest is None else highest, passes


class Names:
    """The numbers of some names, judged compiled and plain; both must agree."""

    def __init__(self, pushed: list[int], persisted: list[int]) -> None:
        self._both: list[tuple[Any, Any]] = []
        for module in (rule, PLAIN["rule"]):
            numbers = np.zeros((NAMES, NUMBERS), np.int64)
            numbers[:, PUSHED], numbers[:, PERSISTED] = pushed, persisted
            self._both.append((module, numbers))

    def judge(
        self, rows: list[Row], *, gapless: bool = True, deduplicate: bool = True, overlap: bool = False
    ) -> Judged:
        handles, lowest, highest, passes = zip(*rows, strict=True)
        answers: list[Judged] = []
        for module, numbers in self._both:
            found, verdicts = np.zeros(2, np.int64), np.zeros(len(rows), np.uint8)
            answer = module.judge_ranges(
                np.array(handles, np.int32),
                np.array(lowest, np.int64),
                np.array(highest, np.int64),
                np.array(passes, np.uint8) if any(passes) else np.zeros(0, np.uint8),
                np.arange(NAMES),
                np.ones(NAMES, np.uint8),
                numbers,
                overlap,
                gapless,
                deduplicate,
                found,
                verdicts,
            )
            answers.append((answer, verdicts.tolist(), found.tolist() if answer < 0 else []))
        assert answers[0] == answers[1]
        return answers[0]

    @property
    def pushed(self) -> list[int]:
        both = [numbers[:, PUSHED].tolist() for _, numbers in self._both]
        assert both[0] == both[1]
        return list(both[0])


@pytest.mark.parametrize(
    ("pushed", "rows", "gap"),
    [
        (-1, [one(0, 7)], None),
        (-1, [one(0, 7), one(0, 9)], (1, 8)),
        (4, [one(0, 5), one(0, 6, 9), one(0, 10)], None),
        (4, [one(0, 6)], (0, 5)),
        (4, [one(0, 6, 9)], (0, 5)),
        (4, [one(0, 5, 8), one(0, 8), one(0, 2), one(0, 9)], None),
        (4, [one(0, 5, 8), one(0, 10)], (1, 9)),
        (4, [one(0, 2, 9), one(0, 5)], None),
        (4, [one(1, 7), one(0, 9, passes=True), one(0, 5)], None),
        (4, [one(1, 7), one(0, 5), one(1, 9), one(0, 9)], (2, 8)),
        (MAX_ID - 1, [one(0, MAX_ID)], None),
        (MAX_ID - 2, [one(0, MAX_ID)], (0, MAX_ID - 1)),
        (MAX_ID, [one(0, MAX_ID), one(0, 0)], None),
        (0, [one(0, MAX_ID)], (0, 1)),
    ],
)
def test_where_gaps_are_refused_the_next_id_must_come(
    pushed: int, rows: list[Row], gap: tuple[int, int] | None
) -> None:
    names = Names([pushed, -1, -1], [-1, -1, -1])
    answer, _, found = names.judge(rows)
    if gap is None:
        assert answer >= 0
    else:
        assert (answer, found) == (-rule.RANGE_GAP, list(gap))
        assert names.pushed == [pushed, -1, -1]
    assert Names([pushed, -1, -1], [-1, -1, -1]).judge(rows, gapless=False)[0] >= 0


@pytest.mark.parametrize(
    ("bad", "wrong"),
    [(one(9, 1), rule.BAD_HANDLE), (one(0, -1), rule.BAD_ID), (one(0, 3, 6), rule.OVERLAP)],
)
def test_what_cannot_be_judged_is_told_before_a_gap(bad: Row, wrong: int) -> None:
    names = Names([4, -1, -1], [4, -1, -1])
    answer, _, found = names.judge([one(0, 9), bad], overlap=True)
    assert (answer, found[0]) == (-wrong, 1)
    assert names.pushed == [4, -1, -1]


ROWS = st.lists(
    st.tuples(st.integers(0, NAMES - 1), st.integers(0, 12), st.integers(0, 3), st.sampled_from([False] * 5 + [True])),
    min_size=1,
    max_size=8,
).map(lambda rows: [one(handle, low, low + more, passes=passes) for handle, low, more, passes in rows])
NUMBERS_OF = st.lists(st.tuples(st.integers(-1, 8), st.integers(0, 4)), min_size=NAMES, max_size=NAMES)


@given(st.lists(ROWS, min_size=1, max_size=4), NUMBERS_OF, st.booleans(), st.booleans())
def test_a_check_is_judged_whole_or_refused_and_changes_nothing(
    checks: list[list[Row]], numbers: list[tuple[int, int]], gapless: bool, deduplicate: bool
) -> None:
    persisted = [low for low, _ in numbers]
    names = Names([low + more for low, more in numbers], persisted)
    pushed = names.pushed
    for rows in checks:
        last, verdicts, gap = list(pushed), [], None
        for row, (handle, low, high, passes) in enumerate(rows):
            if not passes and low > last[handle]:
                if gapless and last[handle] != -1 and low != last[handle] + 1:
                    gap = [row, last[handle] + 1]
                    break
            elif not passes and deduplicate:
                verdicts.append(D if low <= persisted[handle] else U)
                continue
            verdicts.append(N)
            if not passes:
                last[handle] = max(last[handle], high)
        answer, judged, found = names.judge(rows, gapless=gapless, deduplicate=deduplicate)
        if gap is None:
            assert (answer, judged) == (verdicts.count(N), verdicts)
            pushed = last
        else:
            assert (answer, found) == (-rule.RANGE_GAP, gap)
        assert names.pushed == pushed
