"""Names by their numbers, walked over in parts."""

from collections.abc import Iterator

import numpy as np
import pytest

from seqdedupe.core.producers import Producers

NAMES = [b"p%d" % number for number in range(100)]


class Counting(dict[bytes, int]):
    """Counts who begins to walk over it."""

    walks = 0

    def __iter__(self) -> Iterator[bytes]:
        self.walks += 1
        return super().__iter__()


@pytest.mark.parametrize("part", [1, 7, 99])
def test_who_goes_on_where_the_last_one_ended_walks_once(part: int) -> None:
    producers = Producers()
    counting = producers._number_of = Counting()
    producers._walk_anew()
    producers.add_all(NAMES)
    producers.names_from(0, part)
    before = counting.walks
    parts = [producers.names_from(first, part) for first in range(part, len(NAMES), part)]
    assert b"".join(NAMES[:part]) + b"".join(b"".join(names) for names in parts) == b"".join(NAMES)
    assert counting.walks == before
    # Further on, back, and with names that come in between.
    assert producers.names_from(1, 2) == NAMES[1:3]
    assert producers.names_from(50, 2) == NAMES[50:52]
    assert producers.names_of(np.array([60, 62])) == [NAMES[60], NAMES[62]]
    assert producers.names_from(0, 2) == NAMES[:2]
    producers.add(b"new")
    assert producers.names_from(2, 2) == NAMES[2:4]
    assert producers.names_from(98, 2) == NAMES[98:]
    assert producers.names_from(99, 2) == [NAMES[99], b"new"]


def test_other_numbers_are_walked_over_anew() -> None:
    producers = Producers()
    producers.add_all(NAMES)
    producers.names_from(0, 10)
    stays = np.arange(len(NAMES)) % 2 == 1
    left = [name for name, stay in zip(NAMES, stays, strict=True) if stay]
    producers.renumber({name: number for number, name in enumerate(left)}, stays, np.zeros(0, np.int64))
    assert producers.names_from(10, 10) == left[10:20]
