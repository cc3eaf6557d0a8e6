"""How long a batch waits for more messages."""

import pytest

from seqdedupe.client.pending import PendingBatch
from seqdedupe.client.producer import LONGEST_LINGERS, MANY_A_SECOND, BatchLinger

MANY = MANY_A_SECOND // 1000  # in the millisecond of the default


def asked(linger: BatchLinger, *came: int) -> list[bool]:
    """The answers of a batch to which this many messages came before each time that it was asked."""
    batch, rows, answers = PendingBatch(), 0, []
    for more in came:
        rows += more
        answers.append(linger.is_over(batch, rows))
    return answers


def test_few_messages_go_after_the_first_time() -> None:
    assert asked(BatchLinger(1.0), MANY - 1) == [True]


def test_it_waits_while_many_come_and_not_for_ever() -> None:
    assert asked(BatchLinger(1.0), *[MANY] * LONGEST_LINGERS) == [*[False] * (LONGEST_LINGERS - 1), True]


def test_it_goes_when_no_more_come_however_many_there_are() -> None:
    assert asked(BatchLinger(1.0), 100 * MANY, MANY - 1) == [False, True]


def test_each_batch_waits_for_itself() -> None:
    linger = BatchLinger(1.0)
    assert asked(linger, MANY, MANY) == [False, False]
    assert asked(linger, MANY, MANY) == [False, False]


@pytest.mark.parametrize("linger_ms", [0.0, 0.1, 5.0, 60_000.0])
def test_what_many_are_is_a_rate(linger_ms: float) -> None:
    many = int(MANY_A_SECOND * linger_ms / 1000)
    assert asked(BatchLinger(linger_ms), many + 1) == [False]
    if many:
        assert asked(BatchLinger(linger_ms), many - 1) == [True]
