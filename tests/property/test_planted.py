"""The property finds bugs that are put into the code on purpose. Without them the same cases pass (`test_property`)."""

from collections.abc import Callable

import pytest

from tests.property import planted
from tests.property.run import first_failure, many_cases

CASES = 2000
"""A bug that this many cases do not show is not found. Most need fewer than forty, from seed 0 on."""

FIRST_SEEDS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    planted.append_accepted_after_a_refused_one: 191,
    planted.log_trimmed_before_the_snapshot_is_durable: 505,
    planted.merge_by_overwriting: 43,
    planted.open_does_not_wait_for_a_purge: 79,
    planted.policy_not_replayed: 43,
    planted.purge_in_force_before_it_is_durable: 116,
    planted.purge_of_what_another_stream_has_used_since: 83,
    planted.reset_before_the_last_message_replayed_after_it: 106,
    planted.reset_does_not_outlast_a_snapshot: 285,
    planted.snapshot_of_pushed: 70,
}
"""Where the search begins for bugs that take longer. After a change of the cases it may have to go on from there."""


@pytest.mark.parametrize("bug", planted.ALL, ids=lambda bug: bug.__name__)
def test_the_property_finds(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with many_cases() as store:
        assert first_failure(store, FIRST_SEEDS.get(bug, 0), CASES) is not None, (
            f"{bug.__name__} is not found in {CASES} cases"
        )


def test_the_first_cases_pass_as_long_as_no_bug_is_planted() -> None:
    with many_cases() as store:
        assert first_failure(store, 0, 300) is None
