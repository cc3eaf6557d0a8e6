"""What receipts confirm: what follows without a gap, and else nothing before the topic was read."""

import pytest

from seqdedupe.log.pulsar.writer import Confirmed, Unsettled
from seqdedupe.message_id import MessageId

MARKER = MessageId(7, 3)


@pytest.fixture
def unsettled() -> Unsettled:
    """Whose marker was read."""
    unsettled = Unsettled()
    unsettled.add(MARKER)
    assert (unsettled.confirm(), unsettled.doubtful) == (None, MARKER), "the first receipt proves something"
    unsettled.was_read(MARKER)
    assert (unsettled.confirm(), unsettled.doubtful) == (None, None)
    return unsettled


def test_what_follows_is_confirmed(unsettled: Unsettled) -> None:
    ids = [MessageId(7, entry) for entry in range(4, 9)]
    for message_id in ids:
        unsettled.add(message_id)
    assert (unsettled.confirm(), unsettled.doubtful) == (Confirmed(len(ids), ids[0]), None)
    assert unsettled.confirm() is None, "confirmed twice"


@pytest.mark.parametrize(
    "doubtful",
    [MessageId(7, 6), MessageId(8, 0), MessageId(8, 5), MessageId(7, 4), MessageId(6, 5)],
)
def test_what_does_not_follow_holds_up_all_that_comes_later(unsettled: Unsettled, doubtful: MessageId) -> None:
    unsettled.add(MessageId(7, 4))
    unsettled.add(doubtful)
    later = [MessageId(9, entry) for entry in range(1, 4)]
    for message_id in later:
        unsettled.add(message_id)
    assert (unsettled.confirm(), unsettled.doubtful) == (Confirmed(1, MessageId(7, 4)), doubtful)
    assert (unsettled.confirm(), unsettled.doubtful) == (None, doubtful)

    unsettled.was_read(MessageId(9, 0))
    assert (unsettled.confirm(), unsettled.doubtful) == (Confirmed(len(later), later[0]), None)
