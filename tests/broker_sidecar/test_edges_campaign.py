"""A small share of the campaign at a sidecar's edges, and its controls: without a protection each attack does harm."""

from pathlib import Path

import grpc
import pytest

from tests.broker_sidecar.edges_campaign import DAY_MS, ClockAttack, JournalAttack, attack_clock, attack_journal
from tests.broker_sidecar.narrow_callers import attack_by_callers

AHEAD = (0, 8 * DAY_MS)
"""Messages by a clock that is right, then a start by one that is ahead."""


SPEED = 30
"""40 minutes are 80 seconds: no clock is believed."""


def test_a_journal_that_loses_its_newest_file(tmp_path: Path) -> None:
    assert attack_journal(JournalAttack(tmp_path, 1, is_worst=True), 1).refused == 1


def test_control_nobody_misses_the_newest_file(tmp_path: Path) -> None:
    bug = "the newest file of the journal is named nowhere"
    with pytest.raises(AssertionError, match="are there"):
        attack_journal(JournalAttack(tmp_path, 1, bug, is_worst=True), 1)


def test_starts_by_a_clock_that_is_ahead(tmp_path: Path) -> None:
    attack_clock(ClockAttack(tmp_path, 1, speed=SPEED), AHEAD)


def test_control_a_clock_that_is_believed_at_once(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="begins with"):
        attack_clock(ClockAttack(tmp_path, 1, "one look at the clock is enough", SPEED), AHEAD)


def test_callers_with_narrow_rights(tmp_path: Path) -> None:
    assert attack_by_callers(tmp_path, 20, seed=1).refused > 20


@pytest.mark.parametrize("bug", ["who may publish may attach", "who may read may move each cursor"])
def test_control_callers_that_may_do_more(tmp_path: Path, bug: str) -> None:
    with pytest.raises((AssertionError, grpc.RpcError)):
        attack_by_callers(tmp_path, 60, seed=2, bug=bug)
