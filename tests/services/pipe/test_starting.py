"""From where a pipe reads on: each thing that source, target and cursor may say. No sidecar: a second."""

import pytest

from seqdedupe.client import Kept, MessageId, Persisted, Position, PositionError, TopicEnds
from seqdedupe.services.pipe.pipe import later, note_of, start_of


def ends(first_index: int, last_index: int) -> TopicEnds:
    return TopicEnds(first_index, Position(7, MessageId(7, last_index), last_index, 1))


def persisted(*sequence_ids: int, incarnation: int = 9) -> tuple[Persisted, ...]:
    return tuple(Persisted("t", one, None, incarnation) for one in sequence_ids)


@pytest.mark.parametrize(
    ("first_index", "last_index", "complete_up_to", "next_index"),
    [
        (0, -1, -1, 0),  # nothing is there, nothing was piped
        (0, 99, -1, 0),
        (50, 99, -1, 50),  # begins with the first message left
        (0, 99, 0, 0),  # the last input is asked for again
        (0, 99, 42 << 10 | 3, 42),
        (42, 99, 42 << 10, 42),
        (43, 99, 42 << 10, 43),  # it is gone by retention, but all after it is there
        (0, 99, 99 << 10 | 1023, 99),
        (100, 99, 99 << 10, 100),  # all of it is gone, and all of it was piped
    ],
)
def test_it_goes_on_with_the_last_input(
    first_index: int, last_index: int, complete_up_to: int, next_index: int
) -> None:
    start = start_of("s", ends(first_index, last_index), complete_up_to, persisted(complete_up_to))
    assert start == Position.before(7, next_index)


@pytest.mark.parametrize(
    ("first_index", "last_index", "complete_up_to", "reason", "says"),
    [
        (44, 99, 42 << 10, "POSITION_TRIMMED", "left has index 44: retention has removed 1 that"),
        (1044, 9999, 42 << 10 | 5, "POSITION_TRIMMED", "1,001 that it has not read"),
        (0, 99, 100 << 10, "POSITION_AFTER_END", "message 100 of s, which ends with index 99"),
        (0, -1, 0, "POSITION_AFTER_END", "ends with index -1"),
    ],
)
def test_what_is_missing_is_said(
    first_index: int, last_index: int, complete_up_to: int, reason: str, says: str
) -> None:
    with pytest.raises(PositionError) as caught:
        start_of("s", ends(first_index, last_index), complete_up_to, persisted(complete_up_to))
    assert caught.value.reason == reason
    assert says in caught.value.message


def test_partitions_that_no_longer_say_how_far_it_got() -> None:
    assert start_of("s", ends(0, 99), -1, persisted(-1, 70 << 10)) == Position.before(7, 0)
    with pytest.raises(PositionError) as caught:
        start_of("s", ends(1, 99), -1, persisted(-1, 70 << 10))
    assert caught.value.reason == "POSITION_TRIMMED"


def test_a_cursor_counts_only_for_what_the_target_still_holds() -> None:
    start, position = Position.before(7, 20), Position(7, MessageId(7, 60), 60, 5)
    note = note_of(persisted(0), 20 << 10)
    assert later(start, Kept(position, note), persisted(20 << 10)) == position
    assert later(start, Kept(position, note_of(persisted(0), -1)), persisted(-1)) == position
    for kept, now in (
        (None, persisted(20 << 10)),
        (Kept(position, note), persisted(20 << 10, incarnation=10)),  # another target
        (Kept(position, note), persisted((20 << 10) - 1)),  # an older copy of it
        (Kept(position._replace(incarnation=8), note), persisted(20 << 10)),  # another source
        (Kept(Position(7, MessageId(7, 5), 5), note), persisted(20 << 10)),  # the target is further
        (Kept(position, ""), persisted(20 << 10)),
        (Kept(position, "somebody:else"), persisted(20 << 10)),
    ):
        assert later(start, kept, now) == start
