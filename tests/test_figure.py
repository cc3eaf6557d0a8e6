"""What a benchmark says about its measurements."""

import pytest

from bench.figure import interval_of_median


@pytest.mark.parametrize(("count", "cut"), [(1, 0), (4, 0), (5, 0), (7, 0), (8, 1), (10, 1), (11, 2), (13, 3), (20, 5)])
def test_the_interval_cuts_off_as_much_as_90_percent_allow(count: int, cut: int) -> None:
    """The numbers are those of the sign test's tables, of 5 % on each side."""
    values = [float(k) for k in reversed(range(count))]
    assert interval_of_median(values) == (cut, count - 1 - cut)
