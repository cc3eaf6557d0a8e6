"""A connection to a broker that says what the test wants, right or wrong."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import uvloop

from seqdedupe.errors import SeqdedupeError
from seqdedupe.pulsar_wire import connection as module
from seqdedupe.pulsar_wire.connection import (
    MAX_OUTSTANDING,
    Connection,
    EntryProducer,
    WirePlace,
    connect,
    connect_to_owner,
)
from seqdedupe.pulsar_wire.frames import PulsarFrame, Splitter, WireEntry, command_frame, command_of, entry_frame
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    AuthData,
    BaseCommand,
    CommandAuthChallenge,
    CommandCloseConsumer,
    CommandCloseProducer,
    CommandConnected,
    CommandError,
    CommandLookupTopicResponse,
    CommandMessage,
    CommandPartitionedTopicMetadata,
    CommandPartitionedTopicMetadataResponse,
    CommandPing,
    CommandProducerSuccess,
    CommandSendError,
    CommandSendReceipt,
    CommandSuccess,
    MessageIdData,
    MessageMetadata,
    ServerError,
)
from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.listener import Listener

METADATA = MessageMetadata(producer_name=b"p", sequence_id=1, publish_time=1).SerializeToString()
ENTRY = WireEntry(METADATA, b"payload")
MAX_MESSAGE_BYTES = 10_000

Answer = Callable[["Peer", Any], object]


class Peer:
    """One connection to the broker."""

    def __init__(self, broker: "FakeBroker", writer: asyncio.StreamWriter) -> None:
        self.broker = broker
        self._writer = writer

    def say(self, field: str, message: Any) -> None:
        self._writer.write(command_frame(command_of(field, message)))

    def say_raw(self, data: bytes) -> None:
        self._writer.write(data)

    def cut(self) -> None:
        self._writer.transport.abort()


class FakeBroker:
    """Answers each command by a function of its field's name; those without one are only kept."""

    def __init__(self) -> None:
        self.url = ""
        self.commands: list[BaseCommand] = []
        self.peers: list[Peer] = []
        self.answers: dict[str, Answer] = {
            "connect": lambda peer, _: peer.say(
                "connected", CommandConnected(server_version="x", max_message_size=MAX_MESSAGE_BYTES)
            ),
            "partitionMetadata": lambda peer, command: peer.say(
                "partitionMetadataResponse",
                CommandPartitionedTopicMetadataResponse(request_id=command.request_id, partitions=3),
            ),
            "producer": lambda peer, command: peer.say(
                "producer_success",
                CommandProducerSuccess(request_id=command.request_id, producer_name="named", schema_version=b"4"),
            ),
            "send": lambda peer, command: peer.say("send_receipt", receipt(command, command.sequence_id)),
            "close_producer": lambda peer, command: peer.say("success", CommandSuccess(request_id=command.request_id)),
            "subscribe": lambda peer, command: peer.say("success", CommandSuccess(request_id=command.request_id)),
            "close_consumer": lambda peer, command: peer.say("success", CommandSuccess(request_id=command.request_id)),
        }
        self._news = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(self, writer)
        self.peers.append(peer)
        splitter = Splitter(1_000_000)
        while data := await reader.read(65_536):
            for frame in splitter.feed(data):
                self._take(peer, frame)

    def _take(self, peer: Peer, frame: PulsarFrame) -> None:
        self.commands.append(frame.command)
        self._news.set()
        if (answer := self.answers.get(frame.field)) is not None:
            answer(peer, getattr(frame.command, frame.field))

    async def until(self, field: str, count: int = 1) -> list[Any]:
        """The commands of this field, as soon as there are so many."""
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            while True:
                found = [getattr(command, field) for command in self.commands if command.HasField(field)]  # type: ignore[arg-type]
                if len(found) >= count:
                    return found
                self._news.clear()
                await self._news.wait()


def receipt(command: Any, sequence_id: int, ledger: int = 9) -> CommandSendReceipt:
    place = MessageIdData(ledgerId=ledger, entryId=sequence_id if ledger == 9 else 2**64 - 1)
    return CommandSendReceipt(producer_id=command.producer_id, sequence_id=sequence_id, message_id=place)


class Log:
    """What the callbacks of a producer are given."""

    def __init__(self) -> None:
        self.receipts: list[tuple[int, WirePlace]] = []
        self.ended: asyncio.Future[tuple[SeqdedupeError, tuple[int, ...]]] = asyncio.get_running_loop().create_future()

    def receipt(self, sequence_id: int, place: WirePlace) -> None:
        self.receipts.append((sequence_id, place))

    def end(self, why: SeqdedupeError, unknown: tuple[int, ...]) -> None:
        self.ended.set_result((why, unknown))


MakeBroker = Callable[[], Awaitable[FakeBroker]]


@pytest.fixture
async def make_broker() -> AsyncIterator[MakeBroker]:
    async with AsyncExitStack() as listeners:

        async def make() -> FakeBroker:
            broker = FakeBroker()
            listener = await listeners.enter_async_context(Listener(broker.serve))
            broker.url = f"pulsar://127.0.0.1:{listener.port}"
            return broker

        yield make


@pytest.fixture
async def broker(make_broker: MakeBroker) -> FakeBroker:
    return await make_broker()


@pytest.fixture
async def connection(broker: FakeBroker) -> AsyncIterator[Connection]:
    connection = await connect(broker.url)
    yield connection
    await connection.close()


async def opened(connection: Connection, log: Log) -> EntryProducer:
    return await connection.producer("t", log.receipt, log.end, name="p")


async def test_a_connection_asks_and_is_answered(connection: Connection, broker: FakeBroker) -> None:
    assert connection.max_message_bytes == MAX_MESSAGE_BYTES
    assert await asyncio.gather(*(connection.partitions("t") for _ in range(5))) == [3] * 5
    [connect_command] = await broker.until("connect")
    assert (connect_command.protocol_version, connect_command.HasField("auth_data")) == (20, False)


async def test_receipts_come_in_order(connection: Connection) -> None:
    log = Log()
    producer = await opened(connection, log)
    assert (producer.name, producer.schema_version, producer.last_sequence_id) == ("named", b"4", -1)
    for k in (3, 1, 2):
        producer.send(k, ENTRY)
    assert producer.outstanding == 3
    await producer.close()
    assert log.receipts == [(3, WirePlace(9, 3)), (1, WirePlace(9, 1)), (2, WirePlace(9, 2))]
    assert log.ended.result()[1] == ()
    with pytest.raises(SeqdedupeError, match="was closed"):
        producer.send(4, ENTRY)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        pytest.param(
            lambda peer, command: peer.say("send_receipt", receipt(command, 9)), "MALFORMED", id="another receipt"
        ),
        pytest.param(
            lambda peer, command: peer.say("send_receipt", receipt(command, command.sequence_id, 2**64 - 1)),
            "duplicate",
            id="duplicate",
        ),
        pytest.param(
            lambda peer, command: peer.say(
                "send_error",
                CommandSendError(producer_id=command.producer_id, error=ServerError.PersistenceError, message="no"),
            ),
            "PersistenceError",
            id="send error",
        ),
        pytest.param(
            lambda peer, command: peer.say("close_producer", CommandCloseProducer(producer_id=command.producer_id)),
            "has closed producer",
            id="closed by the broker",
        ),
        pytest.param(lambda peer, _: peer.cut(), "LOG_REFUSED", id="cut"),
        pytest.param(lambda peer, _: peer.say_raw(b"\xff" * 8), "MESSAGE_TOO_LARGE", id="a huge frame"),
        pytest.param(lambda peer, _: peer.say_raw(b"\x00" * 8), "MALFORMED", id="a frame without a command"),
    ],
)
async def test_what_has_no_receipt_is_reported_once(
    connection: Connection, broker: FakeBroker, answer: Answer, message: str
) -> None:
    log = Log()
    producer = await opened(connection, log)
    producer.send(1, ENTRY)
    await broker.until("send")
    # What was answered later was received later.
    await connection.partitions("t")
    sent = broker.answers["send"]
    broker.answers["send"] = lambda peer, command: (answer if command.sequence_id == 2 else sent)(peer, command)
    for k in (2, 3, 4):
        producer.send(k, ENTRY)
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        why, unknown = await log.ended
    assert message in str(why)
    assert unknown == (2, 3, 4)
    assert log.receipts == [(1, WirePlace(9, 1))]
    with pytest.raises(SeqdedupeError, match=message):
        producer.send(5, ENTRY)
    await connection.close()
    assert [command.send.sequence_id for command in broker.commands if command.HasField("send")].count(2) == 1


async def test_a_producer_is_bounded(connection: Connection, broker: FakeBroker) -> None:
    del broker.answers["send"]
    log = Log()
    producer = await opened(connection, log)
    with pytest.raises(SeqdedupeError, match="MESSAGE_TOO_LARGE"):
        producer.send(0, WireEntry(METADATA, bytes(MAX_MESSAGE_BYTES)))
    for k in range(MAX_OUTSTANDING):
        producer.send(k, ENTRY)
    with pytest.raises(SeqdedupeError, match="QUEUE_FULL"):
        producer.send(MAX_OUTSTANDING, ENTRY)
    await connection.close()
    assert log.ended.result()[1] == tuple(range(MAX_OUTSTANDING))


async def test_requests_fail_with_their_connection(connection: Connection, broker: FakeBroker) -> None:
    broker.answers["partitionMetadata"] = lambda peer, _: peer.cut()
    with pytest.raises(SeqdedupeError, match="LOG_REFUSED"):
        await connection.partitions("t")
    assert not connection.is_open
    with pytest.raises(SeqdedupeError, match="LOG_REFUSED"):
        await connection.partitions("t")


def test_what_is_sent_on_a_closed_connection_is_lost_on_the_sidecars_own_loop_too() -> None:
    async def run() -> None:
        broker = FakeBroker()
        broker.answers["send"] = lambda peer, _: peer.cut()
        server = await asyncio.start_server(broker.serve, "127.0.0.1")
        connection = await connect(f"pulsar://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        log = Log()
        producer = await opened(connection, log)
        sent = 0
        # One at each turn of the loop: also at the one when the connection is closed, and nobody has read that.
        try:
            while not log.ended.done():
                producer.send(sent, ENTRY)
                sent += 1
                await asyncio.sleep(0)
        finally:
            await connection.close()
            server.close()
        why, unknown = log.ended.result()
        assert (why.reason, unknown) == ("LOG_REFUSED", tuple(range(sent)))

    uvloop.run(run())


async def test_a_request_without_an_answer_ends(connection: Connection, broker: FakeBroker) -> None:
    del broker.answers["partitionMetadata"]
    with pytest.raises(SeqdedupeError, match="does not answer"):
        await connection.request("partitionMetadata", CommandPartitionedTopicMetadata(topic="t"), 0.01)
    assert not connection._requests


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (ServerError.ProducerBusy, "NOT_OWNER"),
        (ServerError.ProducerFenced, "NOT_OWNER"),
        (ServerError.AuthorizationError, "PULSAR_FORBIDS"),
        (ServerError.TopicNotFound, "TOPIC_NOT_FOUND"),
        (ServerError.TopicTerminatedError, "TOPIC_TERMINATED"),
        (ServerError.ServiceNotReady, "LOG_REFUSED"),
        (99, "LOG_REFUSED"),
    ],
)
async def test_a_refusal_has_its_reason(
    connection: Connection, broker: FakeBroker, code: ServerError.ValueType, reason: str
) -> None:
    broker.answers["producer"] = lambda peer, command: peer.say(
        "error", CommandError(request_id=command.request_id, error=code, message="because")
    )
    with pytest.raises(SeqdedupeError, match="because") as raised:
        await opened(connection, Log())
    assert (raised.value.reason, raised.value.numbers["server_error"]) == (reason, str(code))
    assert connection.is_open


async def test_who_waits_for_a_topic_is_answered_twice(connection: Connection, broker: FakeBroker) -> None:
    def answer(peer: Peer, command: Any) -> None:
        for name, is_ready in (("not yet", False), ("now", True)):
            success = CommandProducerSuccess(request_id=command.request_id, producer_name=name, producer_ready=is_ready)
            peer.say("producer_success", success)

    broker.answers["producer"] = answer
    assert (await opened(connection, Log())).name == "now"


async def test_a_producer_that_nobody_waits_for_is_closed(connection: Connection, broker: FakeBroker) -> None:
    del broker.answers["producer"]
    opening = asyncio.create_task(opened(connection, Log()))
    [command] = await broker.until("producer")
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    [closed] = await broker.until("close_producer")
    assert closed.producer_id == command.producer_id
    assert await connection.partitions("t") == 3


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_topic_may_go_while_a_producer_opens(connection: Connection, broker: FakeBroker, is_open: bool) -> None:
    success = broker.answers["producer"]

    def answer(peer: Peer, command: Any) -> None:
        if is_open:
            success(peer, command)
        peer.say("close_producer", CommandCloseProducer(producer_id=command.producer_id))

    broker.answers["producer"] = answer
    with pytest.raises(SeqdedupeError, match="has closed"):
        await opened(connection, Log())


async def test_a_challenge_is_answered_with_a_new_token(broker: FakeBroker) -> None:
    tokens = iter(["first", "second"])
    connection = await connect(broker.url, token=lambda: next(tokens))
    broker.peers[0].say("authChallenge", CommandAuthChallenge(challenge=AuthData(auth_method_name="token")))
    [response] = await broker.until("authResponse")
    [first] = await broker.until("connect")
    assert (first.auth_method_name, first.auth_data) == ("token", b"first")
    assert first.feature_flags.supports_auth_refresh
    assert response.response.auth_data == b"second"
    await connection.close()


@pytest.mark.parametrize("failing", ["", "\udc80SECRET"])
async def test_a_token_function_that_fails_ends_the_connection(broker: FakeBroker, failing: str) -> None:
    """It may raise anything, or return what is no token. The control is the test above."""
    tokens = iter(["first"])

    def token() -> str:
        if (one := next(tokens, failing)) == "":
            raise KeyError("SECRET")
        return one

    connection = await connect(broker.url, token=token)
    log = Log()
    await opened(connection, log)
    broker.peers[0].say("authChallenge", CommandAuthChallenge(challenge=AuthData(auth_method_name="token")))
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        why, _ = await log.ended
    assert not connection.is_open
    with pytest.raises(SeqdedupeError, match="LOG_REFUSED") as refused:
        await connect(broker.url, token=token)
    for one in (why, refused.value):
        assert "there is no token" in str(one)
        assert "SECRET" not in str(one)
    await connection.close()


async def test_a_refused_connection_says_why(broker: FakeBroker) -> None:
    broker.answers["connect"] = lambda peer, _: peer.say(
        "error", CommandError(request_id=2**64 - 1, error=ServerError.AuthenticationError, message="who are you")
    )
    with pytest.raises(SeqdedupeError, match="who are you") as raised:
        await connect(broker.url)
    assert raised.value.reason == "PULSAR_FORBIDS"


async def test_pings_are_answered(connection: Connection, broker: FakeBroker) -> None:
    broker.peers[0].say("ping", CommandPing())
    await broker.until("pong")
    assert connection.is_open


async def test_a_silent_host_leaves_time_for_the_others(make_broker: MakeBroker) -> None:
    """Whoever waits for a connection waits about as long as for all hosts together."""
    silent, other = await make_broker(), await make_broker()
    del silent.answers["connect"]
    async with asyncio.timeout(2.0):
        connection = await connect(f"{silent.url},{other.url.removeprefix('pulsar://')}", timeout=2.0)
    assert connection.url == other.url
    await connection.close()


async def test_a_silent_broker_is_left(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PING_SECONDS", 0.01)
    connection = await connect(broker.url)
    log = Log()
    producer = await opened(connection, log)
    del broker.answers["send"]
    producer.send(1, ENTRY)
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        why, unknown = await log.ended
    assert ("silent" in str(why), unknown) == (True, (1,))
    assert await broker.until("ping")
    await connection.close()


async def test_the_owner_is_found_by_redirects(make_broker: MakeBroker) -> None:
    service, second, third = [await make_broker() for _ in range(3)]

    def leads(to: FakeBroker, response: CommandLookupTopicResponse.LookupType.ValueType, **fields: Any) -> Answer:
        return lambda peer, command: peer.say(
            "lookupTopicResponse",
            CommandLookupTopicResponse(
                request_id=command.request_id, response=response, brokerServiceUrl=to.url, **fields
            ),
        )

    service.answers["lookupTopic"] = leads(second, CommandLookupTopicResponse.Redirect, authoritative=True)
    second.answers["lookupTopic"] = leads(third, CommandLookupTopicResponse.Connect)
    third.answers["lookupTopic"] = leads(third, CommandLookupTopicResponse.Connect)
    connection = await connect_to_owner(f"pulsar://127.0.0.1:1,{service.url.removeprefix('pulsar://')}", "t")
    assert connection.url == third.url
    await connection.close()
    assert [command.authoritative for command in await second.until("lookupTopic")] == [True]

    connection = await connect_to_owner(third.url, "t")
    assert len(third.peers) == 2
    await connection.close()

    through = leads(third, CommandLookupTopicResponse.Connect, proxy_through_service_url=True)
    service.answers["lookupTopic"] = through
    connection = await connect_to_owner(service.url, "t")
    assert connection.url == service.url
    assert (await service.until("connect", 3))[-1].proxy_to_broker_url == third.url
    await connection.close()

    service.answers["lookupTopic"] = leads(service, CommandLookupTopicResponse.Redirect)
    with pytest.raises(SeqdedupeError, match="20 times"):
        await connect_to_owner(service.url, "t")


@pytest.mark.parametrize("url", ["http://localhost:80", "pulsar:", "localhost:6650"])
async def test_what_is_no_service_url_is_refused(url: str) -> None:
    with pytest.raises(SeqdedupeError, match="INVALID_CONFIGURATION"):
        await connect(url)


async def test_a_reader_asks_for_more_and_is_bounded(
    connection: Connection, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READER_BYTES", 100 * len(ENTRY.payload))
    monkeypatch.setattr(module, "MAX_QUEUED", 200)
    reader = await connection.reader("t", "name", WirePlace(3, 4))
    [subscribe] = await broker.until("subscribe")
    assert (subscribe.durable, subscribe.start_message_id.ledgerId, subscribe.start_message_id.entryId) == (False, 3, 4)

    def send(count: int) -> None:
        command = CommandMessage(consumer_id=subscribe.consumer_id, message_id=MessageIdData(ledgerId=3, entryId=4))
        broker.peers[0].say_raw(b"".join(entry_frame(command_of("message", command), ENTRY)) * count)

    send(60)
    for _ in range(60):
        stored = await reader.next()
        assert (stored.place, *map(bytes, stored.entry)) == (WirePlace(3, 4), *ENTRY)
    assert reader.next_now() is None
    # One at first: then the size of what came says how many.
    flows = await broker.until("flow", 3)
    assert [flow.messagePermits for flow in flows] == [1, 100, 50]
    send(300)
    await broker.until("close_consumer")
    for _ in range(200):
        assert reader.next_now() is not None
    for _ in range(2):
        with pytest.raises(SeqdedupeError, match="nobody has taken"):
            await reader.next()


async def test_a_reader_ends_with_its_broker(connection: Connection, broker: FakeBroker) -> None:
    reader = await connection.reader("t", "name")
    [subscribe] = await broker.until("subscribe")
    broker.peers[0].say("close_consumer", CommandCloseConsumer(consumer_id=subscribe.consumer_id))
    with pytest.raises(SeqdedupeError, match="has closed a reader"):
        await reader.next()
    await reader.close()


async def test_an_entry_that_claims_any_number_of_rows_stops_no_reader(
    connection: Connection, broker: FakeBroker
) -> None:
    """A broker believes it. It takes more permits than an int32 at once for a negative number, and gives up."""
    reader = await connection.reader("t", "name")
    [subscribe] = await broker.until("subscribe")
    claimed = 2**31 - 1
    metadata = MessageMetadata(producer_name=b"p", sequence_id=1, publish_time=1, num_messages_in_batch=claimed)
    command = CommandMessage(consumer_id=subscribe.consumer_id, message_id=MessageIdData(ledgerId=3, entryId=4))
    entry = WireEntry(metadata.SerializeToString(), b"x")
    broker.peers[0].say_raw(b"".join(entry_frame(command_of("message", command), entry)))
    await reader.next()
    assert all(0 < flow.messagePermits < 2**31 for flow in await broker.until("flow", 2))
    assert sum(flow.messagePermits for flow in await broker.until("flow", 3)) > claimed
