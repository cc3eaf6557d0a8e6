"""The passing of one client's frames to brokers, before brokers that do what a test wants."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import pytest
from google.protobuf.message import Message

from broker_sidecar.door import broker_pass
from broker_sidecar.door.broker_pass import BrokerPass, BrokersToPass
from broker_sidecar.security.permissions import Permissions
from broker_sidecar.security.subject import Subject, set_caller
from broker_sidecar.shares import NO_LIMITS, Budget, Share, Use
from seqdedupe.errors import InvalidRequestError, SeqdedupeError
from seqdedupe.pulsar_wire.frames import (
    PulsarFrame,
    Splitter,
    WireEntry,
    command_frame,
    command_of,
    entry_frame,
    frame_of,
)
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    AuthData,
    BaseCommand,
    CommandAck,
    CommandAuthChallenge,
    CommandAuthResponse,
    CommandCloseConsumer,
    CommandConnect,
    CommandConnected,
    CommandFlow,
    CommandGetOrCreateSchema,
    CommandGetSchema,
    CommandGetTopicsOfNamespace,
    CommandLookupTopicResponse,
    CommandMessage,
    CommandPing,
    CommandPong,
    CommandSeek,
    CommandSubscribe,
    CommandSuccess,
    CommandUnsubscribe,
    CommandWatchTopicList,
    FeatureFlags,
    ServerError,
)
from tests.listener import Listener

JWT = b"head.body.signature"
TOPIC = "persistent://public/elsewhere/t"


class FakeBroker:
    """A broker that serves one topic, or names the broker that does."""

    def __init__(self) -> None:
        self.owner: FakeBroker = self
        self.redirects = False
        self.received: list[PulsarFrame] = []
        self.pongs = self.pings = 0
        self.writers: list[asyncio.StreamWriter] = []
        self.url = ""
        self.has_more = asyncio.Event()

    async def start(self) -> None:
        self.listener = await Listener(self._serve).__aenter__()
        self.url = f"pulsar://127.0.0.1:{self.listener.port}"

    def say(self, field: str, message: Message) -> None:
        self.writers[-1].write(command_frame(command_of(field, message)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        splitter = Splitter(1 << 24)
        while data := await reader.read(65536):
            for frame in splitter.feed(data):
                self._take(frame)

    def _take(self, frame: PulsarFrame) -> None:
        match frame.field:
            case "connect":
                flags = FeatureFlags(supports_topic_watchers=True)
                connected = CommandConnected(protocol_version=19, max_message_size=1 << 20, feature_flags=flags)
                self.say("connected", connected)
            case "lookupTopic":
                kind = CommandLookupTopicResponse.Redirect if self.redirects else CommandLookupTopicResponse.Connect
                answer = CommandLookupTopicResponse(
                    request_id=frame.command.lookupTopic.request_id,
                    response=kind,
                    brokerServiceUrl=self.owner.url,
                    authoritative=True,
                )
                self.say("lookupTopicResponse", answer)
            case "ping":
                self.pings += 1
                self.say("pong", CommandPong())
            case "pong":
                self.pongs += 1
            case _:
                pass
        self.received.append(frame)
        self.has_more.set()

    async def next_of(self, field: str) -> PulsarFrame:
        """The first frame of this kind, which is taken out."""
        while True:
            for frame in self.received:
                if frame.field == field:
                    self.received.remove(frame)
                    return frame
            self.has_more.clear()
            await self.has_more.wait()


class FakeClient:
    """The client's side of a door's connection."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.errors: list[tuple[int, SeqdedupeError, Any]] = []
        self.is_aborted = asyncio.Event()
        self.has_more = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def say(self, field: str, message: Message) -> None:
        self.got.append(command_frame(command_of(field, message)))
        self.has_more.set()

    def say_error(self, request_id: int, e: SeqdedupeError, code: Any = None) -> None:
        self.errors.append((request_id, e, code))
        self.has_more.set()

    async def pass_on(self, parts: Sequence[Any]) -> None:
        self.got += map(bytes, parts)
        self.has_more.set()
        await self.reads.wait()

    def start(self, request: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(request)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def abort(self) -> None:
        self.is_aborted.set()

    async def next(self) -> BaseCommand:
        while not self.got:
            self.has_more.clear()
            await self.has_more.wait()
        return frame_of(memoryview(self.got.pop(0))).command

    async def error(self) -> tuple[int, SeqdedupeError, Any]:
        while not self.errors:
            self.has_more.clear()
            await self.has_more.wait()
        return self.errors.pop(0)


@pytest.fixture
async def brokers() -> AsyncIterator[list[FakeBroker]]:
    two = [FakeBroker(), FakeBroker()]
    for one in two:
        await one.start()
    yield two
    for one in two:
        await one.listener.close()


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
async def passing(brokers: list[FakeBroker], client: FakeClient) -> AsyncIterator[BrokerPass]:
    set_caller(Subject("operator", "token", None, ""))
    budget = Budget(lambda budget: None, 1 << 24)
    share = Share(Budget(lambda budget: None, 1 << 23, within=budget), Use("", NO_LIMITS))
    connect = CommandConnect(
        client_version="Pulsar Go 0.19.0", protocol_version=21, auth_method_name="token", auth_data=JWT
    )
    target = BrokersToPass(brokers[0].url, None, frozenset({"public/default"}))
    topics: Any = None
    one = BrokerPass(target, topics, Permissions(), client, share, connect)
    yield one
    await one.close()
    assert share.held_bytes == 0


def frame(field: str, message: Message) -> PulsarFrame:
    return frame_of(memoryview(command_frame(command_of(field, message))))


def subscribe(consumer_id: int = 1, request_id: int = 7, subscription: str = "s") -> PulsarFrame:
    command = CommandSubscribe(
        topic=TOPIC,
        subscription=subscription,
        subType=CommandSubscribe.Shared,
        consumer_id=consumer_id,
        request_id=request_id,
    )
    return frame("subscribe", command)


async def test_the_client_is_shown_to_the_broker_and_learns_what_the_broker_announces(
    passing: BrokerPass, brokers: list[FakeBroker]
) -> None:
    announced = await passing.announced()
    assert announced is not None
    assert (announced.protocol_version, announced.max_message_size) == (19, 1 << 20)
    assert announced.feature_flags.supports_topic_watchers
    shown = (await brokers[0].next_of("connect")).command.connect
    assert (shown.client_version, shown.protocol_version) == ("Pulsar Go 0.19.0", 21)
    assert (shown.auth_method_name, shown.auth_data) == ("token", JWT)


@pytest.mark.parametrize("redirects", [True, False])
async def test_frames_of_a_consumer_go_to_the_broker_that_owns_its_topic(
    passing: BrokerPass, brokers: list[FakeBroker], client: FakeClient, redirects: bool
) -> None:
    home, owner = brokers
    home.owner, home.redirects = owner, redirects
    sent = subscribe()
    await passing.take(sent)
    assert (await owner.next_of("subscribe")).raw == sent.raw
    owner.say("success", CommandSuccess(request_id=7))
    assert (await client.next()).success.request_id == 7
    for field, message in (
        ("flow", CommandFlow(consumer_id=1, messagePermits=10)),
        ("ack", CommandAck(consumer_id=1, ack_type=CommandAck.Individual, request_id=8)),
    ):
        await passing.take(frame(field, message))
        await owner.next_of(field)
    await passing.take(frame("getTopicsOfNamespace", CommandGetTopicsOfNamespace(request_id=9, namespace="a/b")))
    await home.next_of("getTopicsOfNamespace")
    await passing.take(frame("close_consumer", CommandCloseConsumer(consumer_id=1, request_id=10)))
    await owner.next_of("close_consumer")
    # Nothing of it went to the other broker, and the consumer is gone.
    assert {frame.field for frame in home.received} <= {"connect", "lookupTopic", "ping"}
    assert passing.consumers == 0
    await passing.take(frame("close_consumer", CommandCloseConsumer(consumer_id=1, request_id=11)))
    assert (await client.next()).success.request_id == 11


async def test_an_entry_passes_byte_for_byte_and_late_ones_of_a_former_broker_do_not(
    passing: BrokerPass, brokers: list[FakeBroker], client: FakeClient
) -> None:
    home, owner = brokers
    await passing.take(subscribe())
    await home.next_of("subscribe")
    command = command_of("message", CommandMessage(consumer_id=1))
    entry = b"".join(map(bytes, entry_frame(command, WireEntry(b"metadata", bytes(1000)))))
    home.writers[0].write(entry)
    home.say("success", CommandSuccess(request_id=70))
    while len(client.got) < 2:
        client.has_more.clear()
        await client.has_more.wait()
    assert client.got.pop(0) == entry
    assert (await client.next()).success.request_id == 70
    # The topic moves, and the client subscribes again.
    home.owner = owner
    await passing.take(subscribe(request_id=71))
    await owner.next_of("subscribe")
    assert (await home.next_of("close_consumer")).command.close_consumer.consumer_id == 1
    home.writers[0].write(entry)
    home.say("success", CommandSuccess(request_id=72))
    assert (await client.next()).success.request_id == 72


async def test_a_closed_consumer_is_not_sent_to_another_broker_by_its_address(
    passing: BrokerPass, brokers: list[FakeBroker], client: FakeClient
) -> None:
    await passing.take(subscribe())
    await brokers[0].next_of("subscribe")
    closed = CommandCloseConsumer(consumer_id=1, request_id=2**64 - 1, assignedBrokerServiceUrl="pulsar://elsewhere:1")
    brokers[0].say("close_consumer", closed)
    got = (await client.next()).close_consumer
    assert got.consumer_id == 1
    assert not got.assignedBrokerServiceUrl


async def test_a_broker_that_challenges_gets_the_clients_answer(
    passing: BrokerPass, brokers: list[FakeBroker], client: FakeClient
) -> None:
    home, owner = brokers
    home.owner = owner
    await passing.take(subscribe())
    await owner.next_of("subscribe")
    owner.say("authChallenge", CommandAuthChallenge(protocol_version=19))
    assert (await client.next()).type == BaseCommand.AUTH_CHALLENGE
    await passing.take(frame("authResponse", CommandAuthResponse(response=AuthData(auth_data=JWT))))
    assert (await owner.next_of("authResponse")).command.authResponse.response.auth_data == JWT


async def test_pings_are_answered_and_sent_also_while_the_client_does_not_read(
    passing: BrokerPass, brokers: list[FakeBroker], client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_pass, "PING_SECONDS", 0.1)
    [home, _] = brokers
    await passing.take(subscribe())
    await home.next_of("subscribe")
    home.say("ping", CommandPing())
    await home.next_of("pong")
    client.reads.clear()
    command = command_of("message", CommandMessage(consumer_id=1))
    entry = b"".join(map(bytes, entry_frame(command, WireEntry(b"metadata", bytes(100_000)))))
    home.writers[0].write(entry)
    await client.next()
    before = home.pings
    while home.pings < before + 3:
        await home.next_of("ping")
    assert not client.is_aborted.is_set()


async def test_while_the_client_does_not_read_little_is_read_from_the_broker(
    passing: BrokerPass, brokers: list[FakeBroker], client: FakeClient
) -> None:
    [home, _] = brokers
    await passing.take(subscribe())
    await home.next_of("subscribe")
    client.reads.clear()
    command = command_of("message", CommandMessage(consumer_id=1))
    entry = b"".join(map(bytes, entry_frame(command, WireEntry(b"metadata", bytes(100_000)))))
    total = 200
    for _ in range(total):
        home.writers[0].write(entry)
    await client.next()
    # The rest is in the sockets, and with the broker.
    assert home.writers[0].transport.get_write_buffer_size() > 0
    assert passing.share.held_bytes <= 2 * broker_pass.READ_BYTES
    client.reads.set()
    got = 1
    while got < total:
        got += (await client.next()).type == BaseCommand.MESSAGE


async def test_a_broken_connection_to_a_broker_ends_the_clients(
    passing: BrokerPass, brokers: list[FakeBroker], client: FakeClient
) -> None:
    await passing.take(subscribe())
    await brokers[0].next_of("subscribe")
    brokers[0].writers[0].transport.abort()
    await client.is_aborted.wait()


async def test_without_a_broker_a_consumer_is_told_to_try_again(
    passing: BrokerPass, brokers: list[FakeBroker], client: FakeClient
) -> None:
    await brokers[0].listener.close()
    assert await passing.announced() is None
    await passing.take(subscribe())
    request_id, e, _ = await client.error()
    assert (request_id, e.reason) == (7, "LOG_REFUSED")
    assert e.retry_delay_ms >= 0
    assert not client.is_aborted.is_set()


async def test_the_subscriptions_of_sidecars_are_theirs(passing: BrokerPass, client: FakeClient) -> None:
    await passing.take(subscribe(subscription="seqdedupe-one"))
    request_id, e, _ = await client.error()
    assert (request_id, e.reason) == (7, "INVALID_REQUEST")


async def test_a_client_without_the_right_to_read_reaches_no_broker(
    passing: BrokerPass, brokers: list[FakeBroker], client: FakeClient
) -> None:
    set_caller(Subject("stranger", "jwt", None, ""))
    for sent in (
        subscribe(),
        frame("getSchema", CommandGetSchema(request_id=7, topic=TOPIC)),
        frame("getOrCreateSchema", CommandGetOrCreateSchema(request_id=7, topic=TOPIC)),
        frame("getTopicsOfNamespace", CommandGetTopicsOfNamespace(request_id=7, namespace="public/elsewhere")),
        frame("watchTopicList", CommandWatchTopicList(request_id=7, namespace="public/elsewhere")),
    ):
        await passing.take(sent)
        request_id, e, _ = await client.error()
        assert (request_id, e.reason) == (7, "NOT_ALLOWED")
    await passing.take(frame("seek", CommandSeek(consumer_id=1, request_id=8)))
    request_id, _, code = await client.error()
    assert (request_id, code) == (8, ServerError.MetadataError)
    assert not brokers[0].received


async def test_a_consumer_that_was_unsubscribed_is_forgotten(
    passing: BrokerPass, brokers: list[FakeBroker], client: FakeClient
) -> None:
    [home, _] = brokers
    await passing.take(subscribe())
    await home.next_of("subscribe")
    assert passing.consumers == 1
    await passing.take(frame("unsubscribe", CommandUnsubscribe(consumer_id=1, request_id=9)))
    await home.next_of("unsubscribe")
    home.say("success", CommandSuccess(request_id=9))
    await client.next()
    assert passing.consumers == 0


@pytest.mark.parametrize(
    "numbers", [{"consumer_id": 2**62, "request_id": 1}, {"consumer_id": 1, "request_id": 2**63 - 1}]
)
async def test_a_client_cannot_use_the_numbers_of_the_door(
    passing: BrokerPass, brokers: list[FakeBroker], numbers: dict[str, int]
) -> None:
    """The control: what the broker said of such a consumer or request never reached the client."""
    command = CommandSubscribe(topic=TOPIC, subscription="s", **numbers)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="of the door's own"):
        await passing.take(frame("subscribe", command))
    assert not any(broker.received for broker in brokers)


async def test_transactions_are_refused(passing: BrokerPass, brokers: list[FakeBroker]) -> None:
    assert await passing.partitions(broker_pass.TRANSACTIONS_TOPIC) == 0
    new_txn: Any = 50
    with pytest.raises(InvalidRequestError, match="transaction"):
        await passing.take(frame_of(memoryview(command_frame(BaseCommand(type=new_txn)))))
    assert not brokers[0].received
