"""What the writer makes of answers that no broker can be made to give. `tests/pulsar` has it on a real one."""

import asyncio
from collections.abc import Callable
from typing import Any

import pulsar
import pulsar.asyncio
import pytest

from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.pulsar import writer as writers
from seqdedupe.log.pulsar.entries import PulsarMessage
from seqdedupe.log.pulsar.writer import COUNTER_BITS, PRODUCER_NAMES, Confirmed, EntryWriter, SettledEntry, open_writer
from seqdedupe.message_id import MessageId
from seqdedupe.testing import LAST_RESORT_SECONDS

OPENING = 5
FIRST_ID = OPENING << COUNTER_BITS
LIMIT_SECONDS = LAST_RESORT_SECONDS

Answer = Callable[[pulsar.Result, pulsar.MessageId], None]


class Native:
    """Keeps what is sent, and how to answer."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []

    def send_async(self, message: Any, answer: Answer) -> None:
        assert f"seq={FIRST_ID + len(self.answers)}," in str(message)
        self.answers.append(answer)


class Producer:
    """As the client's, where the writer looks at it."""

    def __init__(self) -> None:
        self._producer = Native()
        self.is_closed = False

    def last_sequence_id(self) -> int:
        return -1

    async def close(self) -> None:
        self.is_closed = True
        raise pulsar.asyncio.PulsarException(pulsar.Result.AlreadyClosed)


class Client:
    """Refuses as it should, name by name, and then gives a producer."""

    def __init__(self, *refusals: pulsar.Result) -> None:
        self.names: list[str] = []
        self.producer = Producer()
        self._refusals = list(refusals)

    async def create_producer(self, _: str, *, producer_name: str, access_mode: Any, **__: Any) -> Producer:
        assert access_mode == pulsar.ProducerAccessMode.Exclusive
        self.names.append(producer_name)
        if self._refusals:
            raise pulsar.asyncio.PulsarException(self._refusals.pop(0), "such and such")
        return self.producer


async def opened(client: Any, settle: Callable[[SettledEntry], None], first_name_number: int = 6) -> EntryWriter:
    async def claim(_: int) -> int:
        return OPENING

    return await open_writer(client, "topic", "one", first_name_number, claim, {}, settle)


class Sent:
    """A writer that has handed over this many entries."""

    def __init__(self, writer: EntryWriter, native: Native) -> None:
        self.writer = writer
        self.settled: list[SettledEntry] = []
        self._native = native

    def answer(self, number: int, result: pulsar.Result, ledger_id: int = 1, entry_id: int = -1) -> None:
        place = pulsar.MessageId(-1, ledger_id, number if entry_id < 0 else entry_id, -1)
        self._native.answers[number](result, place)

    async def until_settled(self, times: int) -> None:
        async with asyncio.timeout(LIMIT_SECONDS):
            while len(self.settled) < times:  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0)
        assert len(self.settled) == times


async def sent(entries: int) -> Sent:
    client = Client()
    settled: list[SettledEntry] = []
    made = Sent(await opened(client, settled.append), client.producer._producer)
    made.settled = settled
    made.writer.append([PulsarMessage(b"x", {})] * entries)
    return made


async def test_a_busy_name_is_passed_over() -> None:
    client = Client(*[pulsar.Result.ProducerBusy] * (PRODUCER_NAMES - 1))
    writer = await opened(client, lambda _: None)
    assert client.names == [f"seqdedupe-one-{number}" for number in (6, 7, 0, 1, 2, 3, 4, 5)]
    assert writer.name_number == 5
    await writer.close()
    assert client.producer.is_closed


@pytest.mark.parametrize(
    ("result", "times", "reason"),
    [
        (pulsar.Result.ProducerBusy, PRODUCER_NAMES, "NOT_OWNER"),
        (pulsar.Result.ProducerFenced, 1, "NOT_OWNER"),
        (pulsar.Result.AuthorizationError, 1, "PULSAR_FORBIDS"),
        (pulsar.Result.AuthenticationError, 1, "PULSAR_FORBIDS"),
        (pulsar.Result.Timeout, 1, "LOG_REFUSED"),
        (pulsar.Result.TopicNotFound, 1, "LOG_REFUSED"),
    ],
)
async def test_a_refusal_has_its_reason(result: pulsar.Result, times: int, reason: str) -> None:
    client = Client(*[result] * times)
    with pytest.raises(SeqdedupeError, match=reason):
        await opened(client, lambda _: None)
    assert len(client.names) == times


@pytest.mark.parametrize(
    "result",
    [
        pulsar.Result.Timeout,
        pulsar.Result.ProducerFenced,
        pulsar.Result.AlreadyClosed,
        pulsar.Result.ChecksumError,
        pulsar.Result.MessageTooBig,
        pulsar.Result.ProducerQueueIsFull,
        pulsar.Result.UnknownError,
    ],
)
async def test_whatever_is_not_stored_is_unknown_and_so_is_all_after_it(result: pulsar.Result) -> None:
    made = await sent(4)
    made.answer(0, pulsar.Result.Ok)
    await made.until_settled(1)
    made.writer.was_read([MessageId(1, 0)])
    made.answer(1, pulsar.Result.Ok)
    made.answer(2, result)
    made.answer(3, pulsar.Result.Ok)
    await made.until_settled(2)
    assert made.settled[0] == SettledEntry(None, MessageId(1, 0))
    assert made.settled[1].confirmed == Confirmed(1, MessageId(1, 1))
    assert result.name in str(made.settled[1].failure)
    made.writer.append([PulsarMessage(b"later", {})])
    made.answer(3, pulsar.Result.Ok)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(made.settled) == 2, "something is settled after a failure"


@pytest.mark.parametrize("order", [(1, 0), (0, 2)])
async def test_answers_out_of_their_order_prove_nothing(order: tuple[int, int]) -> None:
    made = await sent(3)
    for number in order:
        made.answer(number, pulsar.Result.Ok)
    await made.until_settled(1)
    assert made.settled[0].confirmed is None
    assert "was due" in str(made.settled[0].failure)


async def test_a_failure_is_told_while_something_is_doubtful() -> None:
    made = await sent(2)
    made.answer(0, pulsar.Result.Ok, -1, 0)
    await made.until_settled(1)
    made.answer(1, pulsar.Result.ProducerFenced)
    await made.until_settled(2)
    assert made.settled[1].confirmed is None
    assert made.settled[1].failure is not None


async def test_what_was_read_before_its_receipt_came_is_not_settled_twice() -> None:
    made = await sent(4)
    made.answer(0, pulsar.Result.Ok)
    await made.until_settled(1)
    made.writer.was_read([MessageId(1, 0), MessageId(1, 1), MessageId(1, 2)])
    for number in (1, 2, 3):
        made.answer(number, pulsar.Result.Ok)
    await made.until_settled(2)
    assert made.settled[1] == SettledEntry(Confirmed(1, MessageId(1, 3)))


async def test_answers_that_go_on_keep_the_time_out_away(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    made = await sent(2)
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda: now)
    made.writer._last_answer_time = now
    now = writers.SEND_TIMEOUT_SECONDS - 1
    made.answer(0, pulsar.Result.Ok)
    made.writer._take_answers()
    now = writers.SEND_TIMEOUT_SECONDS + 1
    made.writer._check_time()
    assert [each.failure for each in made.settled] == [None]
    now = 2 * writers.SEND_TIMEOUT_SECONDS
    made.writer._check_time()
    assert "has not answered" in str(made.settled[-1].failure)
    monkeypatch.undo()
