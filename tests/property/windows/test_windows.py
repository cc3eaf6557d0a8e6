"""Topics of deduplication IDs with memory for a few, no matter what fails: see `world`. The bugs of `planted` are
found.

`make campaign` runs more; `python -m tests.kernels tests.property.run --windows --seed N --cases 1` runs one again.
"""

from collections.abc import Callable

import pytest

from seqdedupe.core.id_window import Older
from seqdedupe.core.rule import DUP, NOT_DUP, UNKNOWN
from seqdedupe.topic.frame import FrameReceipt, Refusal
from seqdedupe.topic.topic import Topic
from seqdedupe.topic.window_runs import WindowRuns
from tests.property.disk import CrashableStore
from tests.property.run import WINDOWS, first_failure, many_cases, report
from tests.property.windows import planted
from tests.property.windows.actions import run_case, steps_of
from tests.property.windows.model import Frame, Model

CASES = 32
"""From seed 0 on, as the bugs are looked for."""
PARTS = 8

CASES_OF_A_BUG = 100
"""This many without a failure, and the bug has not been found. The first one finds it, unless a change of the code has
made another history of its seed."""


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_lost_or_doubled(part: int) -> None:
    with many_cases() as store:
        found = first_failure(store, part * CASES // PARTS, CASES // PARTS, WINDOWS)
        if found is not None:
            pytest.fail(report(store, found[0], WINDOWS), pytrace=False)


@pytest.mark.parametrize("first_seed", [6, 8, 10, 12])
def test_a_case_replays(first_seed: int) -> None:
    with many_cases() as store:
        for seed in (first_seed, first_seed + 1):
            first, again = _trace(store, seed), _trace(store, seed)
            assert first == again
            assert len(first) > 20


def _trace(store: CrashableStore, seed: int) -> list[str]:
    trace: list[str] = []
    run_case(store, seed, steps_of(seed), trace)
    return trace


def test_the_cases_are_not_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases in which nothing happens would prove nothing."""
    counts = dict.fromkeys(("made", "merged", "dropped", "decided with runs", NOT_DUP, DUP, UNKNOWN), 0)
    answered, decided, named, merged = Model.answered, Model.decided, Older.named, WindowRuns._merged

    def count_answer(self: Model, frame: Frame, answer: FrameReceipt | Refusal, topic: Topic) -> None:
        if isinstance(answer, FrameReceipt):
            for verdict in [NOT_DUP] * len(frame.ids) if answer.verdicts is None else answer.verdicts.tolist():
                counts[verdict] += 1
        answered(self, frame, answer, topic)

    def count_decided(self: Model, frame: Frame, topic: Topic) -> None:
        counts["decided with runs"] += topic.window is not None and len(topic.window.older.runs) > 0
        decided(self, frame, topic)

    def count_named(self: Older, runs: tuple[object, ...]) -> None:
        before = self.runs
        named(self, runs)  # type: ignore[arg-type]
        counts["made"] += self.runs != before
        counts["dropped"] += len(before) > 0 and (not self.runs or self.runs[0].first_index > before[0].first_index)

    async def count_merged(self: WindowRuns, *arguments: object) -> object:
        counts["merged"] += 1
        return await merged(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Model, "answered", count_answer)
    monkeypatch.setattr(Model, "decided", count_decided)
    monkeypatch.setattr(Older, "named", count_named)
    monkeypatch.setattr(WindowRuns, "_merged", count_merged)
    cases = 12
    with many_cases() as store:
        assert first_failure(store, 0, cases, WINDOWS) is None
    assert counts["made"] > 3 * cases
    assert counts["merged"] > cases
    assert counts["dropped"] > 0
    assert counts["decided with runs"] > 5 * cases
    assert counts[NOT_DUP] > 20 * cases
    assert counts[DUP] > 20 * cases
    assert counts[UNKNOWN] > 0


@pytest.mark.parametrize(("bug", "seed"), planted.ALL.items(), ids=lambda it: getattr(it, "__name__", ""))
def test_control_a_planted_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with many_cases() as store:
        found = first_failure(store, seed, CASES_OF_A_BUG, WINDOWS)
    assert found is not None, f"{bug.__name__} is not found in {CASES_OF_A_BUG} cases"
