"""What the writer makes of answers that no broker can be made to give. `tests/pulsar` has it on a real one."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.pulsar import writer as writers
from seqdedupe.log.pulsar.entries import EntryFormat, PulsarMessage
from seqdedupe.log.pulsar.writer import COUNTER_BITS, PRODUCER_NAMES, Confirmed, EntryWriter, SettledEntry, open_writer
from seqdedupe.message_id import MessageId
from seqdedupe.pulsar_wire.connection import WirePlace, refusal_of
from seqdedupe.pulsar_wire.frames import WireEntry, metadata_of
from seqdedupe.pulsar_wire.pulsar_api_pb2 import Exclusive, ServerError
from seqdedupe.testing import LAST_RESORT_SECONDS

OPENING = 5
FIRST_ID = OPENING << COUNTER_BITS
LIMIT_SECONDS = LAST_RESORT_SECONDS


class Producer:
    """Keeps what is sent."""

    last_sequence_id = -1
    schema_version = b""

    def __init__(self) -> None:
        self.sent = 0
        self.is_closed = False

    def send(self, number: int, entry: WireEntry, *, rows: int) -> None:
        assert number == metadata_of(entry).sequence_id == FIRST_ID + self.sent
        assert rows == 1
        self.sent += 1

    async def close(self) -> None:
        self.is_closed = True
        raise error("LOG_REFUSED", "it is closed already")


class Client:
    """Brokers, with one connection: they refuse as they should, name by name, and then give a producer."""

    def __init__(self, *refusals: ServerError.ValueType) -> None:
        self.names: list[str] = []
        self.made = Producer()
        self.is_open = False
        self._refusals = list(refusals)

    async def connection(self, _: str) -> "Client":
        self.is_open = True
        return self

    async def producer(
        self, _: str, on_receipt: Any, on_end: Any, *, name: str, access_mode: Any = Exclusive, **__: Any
    ) -> Producer:
        assert access_mode == Exclusive
        self.names.append(name)
        if self._refusals:
            raise refusal_of("pulsar://host", self._refusals.pop(0), "such and such")
        self.on_receipt, self.on_end = on_receipt, on_end
        return self.made

    async def close(self) -> None:
        self.is_open = False


async def opened(client: Any, settle: Callable[[SettledEntry], None], first_name_number: int = 6) -> EntryWriter:
    async def claim(_: int) -> int:
        return OPENING

    return await open_writer(client, "topic", "one", first_name_number, claim, {}, settle, EntryFormat.PLAIN)


class Sent:
    """A writer that has handed over this many entries."""

    def __init__(self, writer: EntryWriter, client: Client, settled: list[SettledEntry]) -> None:
        self.writer = writer
        self.settled = settled
        self._client = client

    def answer(self, number: int) -> None:
        self._client.on_receipt(FIRST_ID + number, WirePlace(1, number))

    def fail(self, why: str) -> None:
        self._client.on_end(error("LOG_REFUSED", why), ())

    async def until_settled(self, times: int) -> None:
        async with asyncio.timeout(LIMIT_SECONDS):
            while len(self.settled) < times:  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0)
        assert len(self.settled) == times


async def sent(entries: int) -> Sent:
    client = Client()
    settled: list[SettledEntry] = []
    made = Sent(await opened(client, settled.append), client, settled)
    made.writer.append([PulsarMessage(b"x", {})] * entries)
    return made


async def test_a_busy_name_is_passed_over() -> None:
    client = Client(*[ServerError.ProducerBusy] * (PRODUCER_NAMES - 1))
    writer = await opened(client, lambda _: None)
    assert client.names == [f"seqdedupe-one-{number}" for number in (6, 7, 0, 1, 2, 3, 4, 5)]
    assert writer.name_number == 5
    await writer.close()
    assert client.made.is_closed
    assert not client.is_open


@pytest.mark.parametrize(
    ("code", "times", "reason"),
    [
        (ServerError.ProducerBusy, PRODUCER_NAMES, "NOT_OWNER"),
        (ServerError.ProducerFenced, 1, "NOT_OWNER"),
        (ServerError.AuthorizationError, 1, "PULSAR_FORBIDS"),
        (ServerError.AuthenticationError, 1, "PULSAR_FORBIDS"),
        (ServerError.ServiceNotReady, 1, "LOG_REFUSED"),
        (ServerError.TopicNotFound, 1, "LOG_REFUSED"),
        (ServerError.IncompatibleSchema, 1, "LOG_REFUSED"),
    ],
)
async def test_a_refusal_has_its_reason(code: ServerError.ValueType, times: int, reason: str) -> None:
    client = Client(*[code] * times)
    with pytest.raises(SeqdedupeError, match=reason):
        await opened(client, lambda _: None)
    assert len(client.names) == times
    assert not client.is_open


async def test_whatever_is_not_stored_is_unknown_and_so_is_all_after_it() -> None:
    made = await sent(4)
    made.answer(0)
    await made.until_settled(1)
    made.writer.was_read(MessageId(1, 0))
    made.answer(1)
    made.fail("it is not the time")
    await made.until_settled(2)
    assert made.settled[0] == SettledEntry(None, MessageId(1, 0))
    assert made.settled[1].confirmed == Confirmed(1, MessageId(1, 1))
    assert made.settled[1].failure == "it is not the time"
    made.writer.append([PulsarMessage(b"later", {})])
    made.answer(2)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(made.settled) == 2, "something is settled after a failure"


@pytest.mark.parametrize("order", [(1, 0), (0, 2)])
async def test_answers_out_of_their_order_prove_nothing(order: tuple[int, int]) -> None:
    made = await sent(3)
    for number in order:
        made.answer(number)
    await made.until_settled(1)
    assert made.settled[0].confirmed is None
    assert "was due" in str(made.settled[0].failure)


async def test_a_failure_is_told_while_something_is_doubtful() -> None:
    made = await sent(2)
    made.answer(0)
    await made.until_settled(1)
    made.fail("it is not the time")
    await made.until_settled(2)
    assert made.settled[1].confirmed is None
    assert made.settled[1].failure is not None


async def test_answers_that_go_on_keep_the_time_out_away(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    made = await sent(2)
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda: now)
    made.writer._last_answer_time = now
    now = writers.SEND_TIMEOUT_SECONDS - 1
    made.answer(0)
    made.writer._take_answers()
    now = writers.SEND_TIMEOUT_SECONDS + 1
    made.writer._check_time()
    assert [each.failure for each in made.settled] == [None]
    now = 2 * writers.SEND_TIMEOUT_SECONDS
    made.writer._check_time()
    assert "has not answered" in str(made.settled[-1].failure)
    monkeypatch.undo()
