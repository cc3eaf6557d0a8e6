"""The property finds bugs that are put into the code on purpose. Without them the same cases pass (`test_property`)."""

from collections.abc import Callable

import pytest

from tests.property import planted
from tests.property.run import first_failure, many_cases

CASES = 2000
"""So many without a failure, and the bug has not been found. Most need fewer than a hundred."""


@pytest.mark.parametrize("bug", planted.ALL, ids=lambda bug: bug.__name__)
def test_the_property_finds(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with many_cases() as store:
        assert first_failure(store, 0, CASES) is not None, f"{bug.__name__} is not found in {CASES} cases"


def test_the_first_cases_pass_as_long_as_no_bug_is_planted() -> None:
    with many_cases() as store:
        assert first_failure(store, 0, 300) is None
