"""Pages of producers while names come and are freed: none is omitted."""

import numpy as np
import pytest

from broker_sidecar.services.admin_service import ProducerPages
from seqdedupe.core.producers import LettingGo, Producers
from seqdedupe.errors import InvalidRequestError

PAGE = 10


def made(count: int = 50) -> Producers:
    producers = Producers()
    names = [b"p%d" % number for number in range(count)]
    producers.confirm_sessions(producers.add_all(names), np.ones(count, np.int64), None, 0)
    return producers


def purge(producers: Producers, *numbers: int) -> None:
    producers.purge(np.array(numbers), 0)


def let_go(producers: Producers) -> None:
    letting_go = LettingGo(producers, producers.empty())
    list(letting_go.prepare())
    letting_go.finish(producers.empty())


def names(page: list[tuple[int, bytes]]) -> list[bytes]:
    return [name for _, name in page]


def rest(listing: ProducerPages, producers: Producers, place: int) -> list[bytes]:
    listed: list[bytes] = []
    while place:
        page, place = listing.page(producers, place, PAGE)
        listed += names(page)
    return listed


def test_each_name_once_with_those_that_come_meanwhile() -> None:
    producers, listing = made(), ProducerPages()
    purge(producers, 3, 25)
    page, place = listing.page(producers, 0, PAGE)
    producers.confirm_sessions(producers.add_all([b"new"]), np.ones(1, np.int64), None, 0)
    left = [b"p%d" % number for number in range(50) if number not in (3, 25)]
    assert names(page) + rest(listing, producers, place) == [*left, b"new"]


def test_no_name_is_left_out_when_those_before_it_are_freed() -> None:
    producers, listing = made(), ProducerPages()
    first, place = listing.page(producers, 0, PAGE)
    purge(producers, *range(5))
    let_go(producers)
    # The control arm: by its number in the old order the next page would begin too late.
    assert producers.names_from(PAGE, 1) == [b"p15"]
    listed = rest(listing, producers, place)
    assert set(names(first) + listed) == {b"p%d" % number for number in range(50)}
    assert listed == [b"p%d" % number for number in range(5, 50)]


def test_a_place_of_another_topic_or_process_is_the_first_one() -> None:
    producers, listing = made(), ProducerPages()
    _, place = listing.page(producers, 0, PAGE)
    for other, asked in ((listing, made()), (ProducerPages(), producers)):
        assert names(other.page(asked, place, PAGE)[0])[0] == b"p0"
    assert names(listing.page(producers, place, PAGE)[0])[0] == b"p10"


def test_the_end() -> None:
    listing = ProducerPages()
    assert listing.page(Producers(), 0, PAGE) == ([], 0)
    page, place = listing.page(made(PAGE), 0, PAGE)
    assert (len(page), place) == (PAGE, 0)
    with pytest.raises(InvalidRequestError, match="offset is -1"):
        listing.page(Producers(), -1, PAGE)
