"""A flush policy over the wire: early receipts, what readers see, kill -9, and who never gets one."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.client import Client, Producer, ProducerConfig
from seqdedupe.client.blocking import Client as BlockingClient
from seqdedupe.errors import InvalidRequestError
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar import with_constants
from tests.broker_sidecar.calls import Client as Caller
from tests.broker_sidecar.calls import batch, receipt_of

NEVER_BY_ITSELF: dict[str, Any] = {"log_flush_interval_messages": 2**31 - 1, "log_flush_interval_ms": 2**31 - 1}
TIMEOUT_SECONDS = LAST_RESORT_SECONDS
ONE_BY_ONE = ProducerConfig(max_batch_rows=1)


def patient(folder: Path) -> Sidecar:
    """A sidecar that takes any interval, and syncs nothing for being idle: no test depends on how long it takes."""
    constants = {"seqdedupe.topic.policy.MOST": {}, "seqdedupe.log.embedded.commit.IDLE_SECONDS": 100_000}
    environment = {with_constants.VARIABLE: json.dumps(constants)}
    return Sidecar(folder, module=with_constants.MODULE, environment=environment)


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """One that no test may kill."""
    with patient(tmp_path_factory.mktemp("patient")) as sidecar:
        yield sidecar


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Sidecar]:
    with patient(tmp_path / "mortal") as sidecar:
        yield sidecar


def create(sidecar: Sidecar, topic: str, **policy: Any) -> tuple[Caller, admin_pb2.Topic]:
    caller = Caller(sidecar.address)
    policy = NEVER_BY_ITSELF | policy
    request = admin_pb2.CreateTopicRequest(topic=topic, policy=admin_pb2.TopicPolicy(**policy))
    caller.admin.CreateTopic(request, timeout=TIMEOUT_SECONDS)
    return caller, caller.topic(topic)


async def early(producer: Producer, count: int) -> list[Any]:
    """Receipts of messages that are written, and not durable."""
    receipts = []
    for _ in range(count):
        receipts.append(await producer.send(b"x"))
        await receipts[-1]
    return receipts


async def next_index(client: Client, topic: str) -> int:
    """That of the next message, as readers see it."""
    return (await client.ends(topic)).last.index + 1


async def flushed(client: Client, topic: str) -> None:
    """Anyone who opens a session has all synced that stands before it."""
    async with client.producer(topic, "another"):
        pass


async def test_a_receipt_comes_before_the_sync_and_what_it_says_follows(unharmed: Sidecar, topic: str) -> None:
    caller, _ = create(unharmed, topic)
    async with (
        asyncio.timeout(TIMEOUT_SECONDS),
        Client(unharmed.address) as client,
        client.producer(topic, "p", ONE_BY_ONE) as producer,
    ):
        receipts = await early(producer, 100)
        assert not any(receipt.is_durable() for receipt in receipts)
        assert (producer.durable_sequence_id, await next_index(client, topic)) == (-1, 0)
        assert caller.topic(topic).not_durable_messages == 100
        await flushed(client, topic)
        found = [await receipt.until_durable() for receipt in receipts]
        assert [(one.sequence_id, one.index) for one in found] == [(i, i) for i in range(100)]
        assert (producer.durable_sequence_id, await next_index(client, topic)) == (99, 100)
        assert caller.topic(topic).not_durable_messages == 0


async def test_control_without_the_policy_a_receipt_says_durable(unharmed: Sidecar, topic: str) -> None:
    async with (
        asyncio.timeout(TIMEOUT_SECONDS),
        Client(unharmed.address) as client,
        client.producer(topic, "p", ONE_BY_ONE) as producer,
    ):
        for i, receipt in enumerate(await early(producer, 20)):
            assert receipt.is_durable(), i
        assert producer.durable_sequence_id == 19


async def test_a_reader_is_shown_nothing_that_is_only_written(unharmed: Sidecar, topic: str) -> None:
    create(unharmed, topic)
    async with (
        asyncio.timeout(TIMEOUT_SECONDS),
        Client(unharmed.address) as client,
        client.producer(topic, "p", ONE_BY_ONE) as producer,
        client.reader(topic, 0, follow=True) as reader,
    ):
        reading = asyncio.create_task(anext(aiter(reader)))
        receipts = await early(producer, 10)
        assert await next_index(client, topic) == 0
        assert not reading.done()
        assert not receipts[-1].is_durable()
        await flushed(client, topic)
        assert (await reading).index == 0


@pytest.mark.parametrize("messages", [7, 100])
async def test_never_more_are_told_early_than_the_topic_says(unharmed: Sidecar, topic: str, messages: int) -> None:
    _, said = create(unharmed, topic, log_flush_interval_messages=messages)
    assert (said.may_lose_messages, said.may_lose_ms) == (messages - 1, 2**31 - 1)
    async with (
        asyncio.timeout(TIMEOUT_SECONDS),
        Client(unharmed.address) as client,
        client.producer(topic, "p", ONE_BY_ONE) as producer,
    ):
        for sent in range(1, 3 * messages):
            receipt = await producer.send(b"x")
            await receipt
            # What the server has synced is asked of it: the client may hear of it later.
            durable = await next_index(client, topic)
            assert sent - durable <= said.may_lose_messages, sent
        assert durable > 0
        await flushed(client, topic)


async def test_flush_and_close_wait_until_all_is_durable(unharmed: Sidecar, topic: str) -> None:
    create(unharmed, topic, log_flush_interval_ms=300)
    async with asyncio.timeout(TIMEOUT_SECONDS), Client(unharmed.address) as client:
        async with client.producer(topic, "p") as producer:
            receipt = await producer.send(b"x")
            await producer.flush()
            assert receipt.is_durable()
            receipt = await producer.send(b"x")
        assert receipt.is_durable()
        assert await next_index(client, topic) == 2


async def test_kill_9_alone_takes_nothing(mortal: Sidecar, topic: str) -> None:
    """What was written stays in the system's memory, and the producer goes on with what it has kept."""
    create(mortal, topic)
    async with asyncio.timeout(TIMEOUT_SECONDS), Client(mortal.address) as client:
        async with client.producer(topic, "p", ONE_BY_ONE) as producer:
            receipts = await early(producer, 50)
            assert not receipts[-1].is_durable()
            await asyncio.to_thread(mortal.kill)
            await asyncio.to_thread(mortal.start)
            more = await producer.send(b"x")
            await more
            assert [(await receipt.until_durable()).index for receipt in receipts] == list(range(50))
            await flushed(client, topic)
            assert (await more.until_durable()).index == 50
        async with client.reader(topic, 0, stop_index=51) as reader:
            assert [message.sequence_id async for message in reader] == list(range(51))


async def test_kill_9_takes_nothing_of_a_producer_that_has_ended(mortal: Sidecar, topic: str) -> None:
    create(mortal, topic)
    async with asyncio.timeout(TIMEOUT_SECONDS), Client(mortal.address) as client:
        producer = client.producer(topic, "p", ONE_BY_ONE)
        await producer.open()
        receipts = await early(producer, 20)
        assert not receipts[-1].is_durable()
        await producer.abort()
        with pytest.raises(Exception, match="20 with a receipt are not known to be"):
            await receipts[-1].until_durable()
        assert (await receipts[-1]).index == 19
        await asyncio.to_thread(mortal.kill)
        await asyncio.to_thread(mortal.start)
        async with client.producer(topic, "p") as again:
            assert again.persisted_sequence_id == 19


async def test_sigterm_syncs_what_waits(mortal: Sidecar, topic: str) -> None:
    create(mortal, topic)
    async with (
        asyncio.timeout(TIMEOUT_SECONDS),
        Client(mortal.address) as client,
        client.producer(topic, "p", ONE_BY_ONE) as producer,
    ):
        receipts = await early(producer, 20)
        assert await asyncio.to_thread(mortal.stop) == 0
        await asyncio.to_thread(mortal.start)
        assert [(await receipt.until_durable()).index for receipt in receipts] == list(range(20))


async def test_changes_of_the_policy_under_load(unharmed: Sidecar, topic: str) -> None:
    caller, _ = create(unharmed, topic)
    async with (
        asyncio.timeout(TIMEOUT_SECONDS),
        Client(unharmed.address) as client,
        client.producer(topic, "p", ONE_BY_ONE) as producer,
    ):
        receipts: list[Any] = []
        enough = asyncio.Event()

        async def publish() -> None:
            while not enough.is_set():
                receipts.append(await producer.send(b"x"))
                await receipts[-1]

        publishing = asyncio.create_task(publish())
        every_commit: dict[str, Any] = {"log_flush_interval_messages": 1, "log_flush_interval_ms": 0}
        for policy in (
            every_commit,
            NEVER_BY_ITSELF,
            {"log_flush_interval_messages": 5},
            NEVER_BY_ITSELF,
            every_commit,
        ):
            request = admin_pb2.SetTopicPolicyRequest(topic=topic, policy=admin_pb2.TopicPolicy(**policy))
            before = len(receipts)
            await asyncio.to_thread(caller.admin.SetTopicPolicy, request, timeout=TIMEOUT_SECONDS)
            # All that had a receipt when it was asked for stands before it, and it is durable.
            assert await next_index(client, topic) >= before - 1
            sent = len(receipts)
            while len(receipts) < sent + 20:  # noqa: ASYNC110 (a load that goes on)
                await asyncio.sleep(0.001)
        enough.set()
        await publishing
        assert [(await receipt.until_durable()).index for receipt in receipts] == list(range(len(receipts)))


async def test_whoever_does_not_ask_for_early_receipts_gets_none(unharmed: Sidecar, topic: str) -> None:
    """A unary call, and a stream of a client that knows nothing of them, are answered when it is durable."""
    caller, _ = create(unharmed, topic)

    def publish() -> None:
        epochs = caller.epochs(topic, "p")
        assert caller.publish_unary(topic, batch([("p", 0)], epochs)).durable_at == 0
        assert caller.topic(topic).last.index == 0
        stream = caller.stream(topic)
        for i in range(1, 5):
            assert receipt_of(stream.answer(stream.send(batch([("p", i)], epochs, {"p": i - 1})))).durable_at == 0
            assert caller.topic(topic).last.index == i

    await asyncio.to_thread(publish)


async def test_receipts_for_threads(unharmed: Sidecar, topic: str) -> None:
    create(unharmed, topic, log_flush_interval_ms=300)

    def publish() -> None:
        with BlockingClient(unharmed.address) as client, client.producer(topic, "p") as producer:
            receipt = producer.send(b"x")
            assert receipt.result(TIMEOUT_SECONDS).index == 0
            assert receipt.until_durable(TIMEOUT_SECONDS).index == 0
            assert receipt.is_durable()
            several = producer.send_batch([b"x", b"y"])
            producer.flush()
            assert several.is_durable()
            assert list(several.until_durable(TIMEOUT_SECONDS).indexes) == [1, 2]

    await asyncio.to_thread(publish)


@pytest.mark.parametrize("policy", [{"log_flush_interval_ms": 10_001}, {"log_flush_interval_messages": 0}])
def test_values_out_of_their_range_change_nothing(shared: Sidecar, topic: str, policy: dict[str, Any]) -> None:
    with BlockingClient(shared.address) as client:
        client.admin.create_topic(topic)
        with pytest.raises(InvalidRequestError, match="it should be"):
            client.admin.set_policy(topic, admin_pb2.TopicPolicy(**policy))
        assert client.admin.policy(topic).applied.log_flush_interval_messages == 1


def test_a_topic_of_a_broker_refuses_it(start_sidecar: Callable[..., Sidecar]) -> None:
    address = start_sidecar(log="broker").address
    with BlockingClient(address) as client:
        client.admin.create_topic("t")
        with pytest.raises(InvalidRequestError, match="log_flush_interval_ms has an effect only on topics on the"):
            client.admin.set_policy("t", admin_pb2.TopicPolicy(log_flush_interval_ms=5))
