"""Random interleavings of everything that producers, logs, stores and crashes do: see `world`.

`make campaign` runs more of them. A failure shows its seed, the fewest steps that still fail, and what happened in
them; `python -m tests.kernels tests.property.run --seed N --cases 1` runs it again.
"""

import secrets

import pytest

from seqdedupe.core.rule import DUP, NOT_DUP, UNKNOWN
from seqdedupe.topic.frame import FrameReceipt
from tests.property.cases import steps_of
from tests.property.client import Frame
from tests.property.disk import CrashableStore
from tests.property.judge import Judge
from tests.property.run import first_failure, many_cases, report, run_steps
from tests.property.world import World

CASES = 1200
PARTS = 8
SEEDS = 2**40


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_lost_doubled_or_out_of_order(part: int) -> None:
    first_seed = secrets.randbelow(SEEDS)
    with many_cases() as store:
        found = first_failure(store, first_seed, CASES // PARTS)
        if found is not None:
            pytest.fail(report(store, found[0]), pytrace=False)


def test_a_case_replays() -> None:
    with many_cases() as store:
        for seed in range(20):
            first, again = _trace(store, seed), _trace(store, seed)
            assert first == again
            assert len(first) > 20


def _trace(store: CrashableStore, seed: int) -> list[str]:
    trace: list[str] = []
    run_steps(store, seed, steps_of(seed), trace)
    return trace


def test_the_cases_are_not_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases in which nothing happens would prove nothing."""
    counts = dict.fromkeys(("rows", "crashes", "known", "refused", NOT_DUP, DUP, UNKNOWN), 0)
    judge_receipt, end_process, finish = Judge.receipt, World.end_process, World.finish

    def count_receipt(self: Judge, frame: Frame, receipt: FrameReceipt) -> None:
        for verdict in [NOT_DUP] if receipt.verdicts is None else receipt.verdicts.tolist():
            counts[verdict] += 1
        counts["known"] += len(receipt.known_rows)
        judge_receipt(self, frame, receipt)

    def count_crash(self: World, lands: int) -> None:
        counts["crashes"] += 1
        counts["refused"] += self.topic.counters.refused
        end_process(self, lands)

    def count_rows(self: World) -> None:
        counts["rows"] += len(self.judge.storage.rows)
        finish(self)

    monkeypatch.setattr(Judge, "receipt", count_receipt)
    monkeypatch.setattr(World, "end_process", count_crash)
    monkeypatch.setattr(World, "finish", count_rows)
    cases = 200
    with many_cases() as store:
        assert first_failure(store, 0, cases) is None
    assert counts["rows"] > 4 * cases
    assert counts["crashes"] > 1.5 * cases
    assert counts["refused"] > 3 * cases
    assert counts[NOT_DUP] > 3 * cases
    assert counts[DUP] > cases / 2
    assert counts[UNKNOWN] > cases / 4
    assert counts["known"] > cases / 4
