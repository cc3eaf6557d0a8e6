"""Positions: what is printed and encoded comes back whole, and what is none is refused."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from seqdedupe.errors import InvalidRequestError
from seqdedupe.message_id import MessageId, Position

NUMBERS = st.integers(0, 2**63 - 1)
OWNERSHIPS = st.integers(0, 2**64 - 1)
MESSAGE_IDS = st.builds(MessageId, NUMBERS, NUMBERS, st.integers(-1, 2**31 - 1))
MAYBE = st.none() | MESSAGE_IDS
POSITIONS = st.builds(Position, NUMBERS, MAYBE, NUMBERS, OWNERSHIPS) | st.builds(Position.start, NUMBERS)

HERE = Position(123, MessageId(123, 45), 45)
THERE = HERE._replace(ownership=0xAB)


@given(POSITIONS)
def test_a_position_comes_back_whole(position: Position) -> None:
    assert Position.parse(str(position)) == position
    assert Position.from_bytes(position.to_bytes()) == position
    assert Position.from_proto(position.to_proto()) == position


def test_the_text_of_a_position() -> None:
    assert str(HERE) == "123/123:45@45"
    assert str(THERE) == "123/123:45@45#00000000000000ab"
    assert Position.parse("123:45") == HERE
    assert str(Position.before(123, 46)) == "123@45"
    assert str(Position.before(123, 46)._replace(ownership=0xAB)) == "123@45#00000000000000ab"
    assert str(Position.before(123, 0)) == "123/start@-1"


@pytest.mark.parametrize(
    "text",
    [
        "123/123:45@45#",
        "123/123:45@45#ab",
        "123/123:45@45#00000000000000AB",
        "123/123:45@45#00000000000000abc",
        "123/123:45@45#-0000000000000ab",
        "123/start@-1#00000000000000ab",
        "123/start@45",
        "123/@45",
        "123@-1",
        "123@",
        "@45",
        "123:45#00000000000000ab",
    ],
)
def test_what_is_no_position(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="INVALID_POSITION"):
        Position.parse(text)


@given(POSITIONS, MAYBE)
def test_a_message_id_that_is_not_known_fits_any(position: Position, message_id: MessageId | None) -> None:
    assume(position.index >= 0)
    other = position._replace(message_id=message_id)
    fits = position == other or None in (position.message_id, message_id)
    assert position.is_same(other) == other.is_same(position) == fits


@given(POSITIONS, OWNERSHIPS)
def test_an_ownership_that_is_not_known_fits_any(position: Position, ownership: int) -> None:
    other = position._replace(ownership=ownership)
    assert position.is_same(other) == other.is_same(position) == (position == other or 0 in (position[3], ownership))
    assert not position.is_same(other._replace(index=position.index + 1))
    assert not position.is_same(other._replace(incarnation=position.incarnation + 1))
