"""What is not the sidecar's own, as of a proxy on the way: what is open goes on, and what starts says so."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from seqdedupe.client import (
    AccessDeniedError,
    Client,
    InvalidRequestError,
    OutcomeUnknownError,
    ProducerConfig,
    UnavailableError,
)
from seqdedupe.client import reader as reading
from seqdedupe.client.cursor import Kept
from seqdedupe.client.pending import HINT_OF_BREAKS, MAX_BREAKS
from seqdedupe.errors import REASONS
from seqdedupe.message_id import MessageId, Position
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2, publish_pb2, read_pb2
from seqdedupe.wire import EMPTY
from tests.client.fake_sidecar import FakeSidecar, Refused, fake_sidecar
from tests.client.foreign import answering, answering_http, listening
from tests.client.fronts import Front, fronts
from tests.client.helpers import ids_in_log, until
from tests.client.proxy import Proxy

NEVER_GIVES_UP = ProducerConfig(max_batch_rows=1, delivery_timeout_seconds=None)

POISON = b"poison"

CODES = [
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
]


def undecodable(kind: type[Message]) -> bytes:
    """Details with one that is none."""
    detail = any_pb2.Any(type_url=f"type.googleapis.com/{kind.DESCRIPTOR.full_name}", value=b"\xff\xff")
    made: bytes = status_pb2.Status(code=14, message="not here", details=[detail]).SerializeToString()
    return made


STATUSES = {code.name: (code, b"") for code in CODES} | {
    "no details": (grpc.StatusCode.UNAVAILABLE, b"\0\0\0"),
    "text as details": (grpc.StatusCode.UNAVAILABLE, b"upstream connect error"),
    "ErrorInfo": (grpc.StatusCode.UNAVAILABLE, undecodable(error_details_pb2.ErrorInfo)),
    "RetryInfo": (grpc.StatusCode.UNAVAILABLE, undecodable(error_details_pb2.RetryInfo)),
}

ANSWERS = {"empty": b"", "garbage": b"\xff\xff\xff\xff\x07garbage"}

RECEIPTS = publish_pb2.PublishStreamResponse(
    receipts=[publish_pb2.Receipt(frame=number, first_index=number) for number in range(100)]
).SerializeToString()
"""For no topic."""


@asynccontextmanager
async def answering_ok(address: str, answer: bytes) -> AsyncIterator[Counter[str]]:
    """What listens at this address answers all calls with this message and OK; publish streams once there is a frame.
    Yields how often it has done so."""
    calls: Counter[str] = Counter()

    class Foreign(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            name = details.method.rpartition("/")[2]

            async def say(requests: AsyncIterator[bytes], context: Any) -> None:
                await context.send_initial_metadata(())
                if name == "PublishStream":
                    while not publish_pb2.PublishStreamRequest.FromString(await anext(requests)).frames:
                        pass
                calls[name] += 1
                await context.write(answer)

            return grpc.stream_stream_rpc_method_handler(say)

    async with listening(address, Foreign()):
        yield calls


@pytest.fixture
def tries_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has failed is tried again after some milliseconds."""
    monkeypatch.setitem(REASONS, "NOT_A_SIDECAR", REASONS["NOT_A_SIDECAR"]._replace(retry_delay_ms=10))
    for module in ("producer_session", "publisher", "reader"):
        monkeypatch.setattr(f"seqdedupe.client.{module}._LONGEST_DELAY_SECONDS", 0.02)


@pytest.fixture
async def fake() -> AsyncIterator[FakeSidecar]:
    async with fake_sidecar() as fake:
        yield fake


@pytest.mark.parametrize("status", STATUSES.values(), ids=STATUSES)
async def test_what_is_open_goes_on(tmp_path: Path, status: tuple[grpc.StatusCode, bytes]) -> None:
    with Sidecar(tmp_path) as sidecar:
        async with Client(sidecar.address) as client:
            await client.admin.create_topic("ids", deduplication_mode="deduplication-id")
            async with (
                client.producer("t", "p", NEVER_GIVES_UP) as producer,
                client.publisher("ids", delivery_timeout_seconds=None) as publisher,
                client.reader("t", follow=True) as reader,
                client.reader("ids", follow=True) as silent,
            ):
                await (await producer.send(b"1"))
                assert (await anext(reader)).payload == b"1"
                waits = asyncio.create_task(anext(silent))
                await publisher.send(b"1", deduplication_id="1")
                assert (await waits).payload == b"1"
                reads = [asyncio.create_task(anext(one)) for one in (reader, silent)]
                sidecar.kill()
                async with answering(sidecar.address, *status) as calls:
                    receipt = await producer.send(b"2")
                    sends = asyncio.create_task(publisher.send(b"2", deduplication_id="2"))
                    # Two readers, and two that publish.
                    await until(lambda: calls["ReadStream"] >= 6 and calls["PublishStream"] >= 6)
                await asyncio.to_thread(sidecar.start)
                assert (await receipt).index == 1
                assert (await sends).index == 1
                assert [(await read).payload for read in reads] == [b"2", b"2"]
                assert (await publisher.send(b"3", deduplication_id="3")).index == 2
        assert await ids_in_log(sidecar, "t") == [0, 1]


@pytest.mark.usefixtures("tries_often")
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_what_is_open_goes_on_after_foreign_answers(tmp_path: Path, answer: bytes) -> None:
    with Sidecar(tmp_path) as sidecar:
        async with Client(sidecar.address) as client:
            await client.admin.create_topic("ids", deduplication_mode="deduplication-id")
            async with (
                client.producer("t", "p", NEVER_GIVES_UP) as producer,
                client.publisher("ids", delivery_timeout_seconds=None) as publisher,
                client.reader("t", follow=True) as reader,
                client.reader("t", "latest") as ends,
            ):
                await (await producer.send(b"1"))
                await publisher.send(b"1", deduplication_id="1")
                assert (await anext(reader)).payload == b"1"
                ends._has_begun = True  # as one whose connection broke before it had read anything
                reads = asyncio.create_task(anext(reader))
                sidecar.kill()
                async with answering_ok(sidecar.address, answer) as calls:
                    receipt = await producer.send(b"2")
                    sends = asyncio.create_task(publisher.send(b"2", deduplication_id="2"))
                    finds = asyncio.create_task(anext(ends, None))
                    often = ("ReadStream", 3), ("Open", 3), ("GetLastMessageId", 3), ("PublishStream", MAX_BREAKS + 2)
                    await until(lambda: all(calls[name] >= times for name, times in often))
                    assert not any(task.done() for task in (reads, sends, finds))
                await asyncio.to_thread(sidecar.start)
                assert (await receipt).index == 1
                assert (await sends).index == 1
                assert (await reads).payload == b"2"
                assert await finds is None
                assert (await publisher.send(b"3", deduplication_id="3")).index == 2
        assert await ids_in_log(sidecar, "t") == [0, 1]


@pytest.mark.usefixtures("tries_often")
@pytest.mark.parametrize("answer", [ANSWERS["garbage"], RECEIPTS], ids=["garbage", "receipts"])
async def test_a_stream_goes_on_after_foreign_answers(fake: FakeSidecar, answer: bytes) -> None:
    """For a producer whose sessions are opened by the sidecar itself: no frame is to blame."""

    def on_frame(frame: publish_pb2.Frame) -> list[publish_pb2.PublishStreamResponse | bytes]:
        return [answer if len(fake.frames) <= MAX_BREAKS + 2 else fake.stored(frame)]

    fake.on_frame = on_frame
    async with Client(fake.address) as client, client.producer("t", "p", NEVER_GIVES_UP) as producer:
        assert (await (await producer.send(b""))).index == 0
    assert len(fake.frames) == MAX_BREAKS + 3


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_what_starts_names_what_answers_for_the_sidecar(tmp_path: Path, answer: bytes) -> None:
    async def refused(what: Awaitable[object], reason: str = "NOT_A_SIDECAR") -> None:
        with pytest.raises(UnavailableError, match="answered OK with what no sidecar sends") as caught:
            await what
        assert caught.value.reason == reason

    sidecar = Sidecar(tmp_path)
    async with Client(sidecar.address) as client:
        async with answering_ok(sidecar.address, answer) as calls:
            await refused(client.producer("t", "p").open())
            await refused(anext(client.reader("t")))
            publisher = await client.publisher("ids", delivery_timeout_seconds=None).__aenter__()
            if answer:  # a stream may begin with an empty one
                await refused(publisher.send(b"1", deduplication_id="1"))
            await refused(client.admin.topic("t"))
            # A reader with a cursor would begin with the first message.
            await refused(client.cursor("t", "c").read())
            await refused(client.admin.topics())
            # What changes something may have reached the sidecar.
            kept = Kept(Position(1, MessageId(1, 0, -1), 0))
            await refused(client.cursor("t", "c").compare_and_set(None, kept), "OUTCOME_UNKNOWN")
            await refused(client.admin.delete_topic("t"), "OUTCOME_UNKNOWN")
            assert calls["Open"] == calls["GetLastMessageId"] == 1
        await asyncio.to_thread(sidecar.start)
        try:
            await client.admin.create_topic("ids", deduplication_mode="deduplication-id")
            assert (await publisher.send(b"1", deduplication_id="1")).index == 0
            await publisher.close()
        finally:
            sidecar.kill()


async def test_an_earlier_sidecar_does_not_say_that_an_empty_answer_is_one(fake: FakeSidecar) -> None:
    called: list[str] = []

    def on_unary(method: str) -> bytes:
        called.append(method.rpartition("/")[2])
        return b"\x0a\x011" if method.endswith("GetVersion") else b""

    fake.on_unary = on_unary
    async with Client(fake.address) as client:
        assert await client.cursor("t", "c").read() is None
        assert called == ["GetCursor", "GetVersion"]


async def test_a_sidecar_says_that_an_empty_answer_is_one(shared_sidecar: Sidecar, topic: str) -> None:
    async with Client(shared_sidecar.address) as client:
        await client.admin.create_topic(topic)
        connection = client._calls.connection(client._sidecars.addresses[0])
        for call in (
            connection.read.GetCursor(read_pb2.GetCursorRequest(topic=topic, name="c")),
            connection.admin.ListProducers(admin_pb2.ListProducersRequest(topic=topic)),
            connection.admin.ListInFlight(admin_pb2.ListInFlightRequest(topic=topic)),
        ):
            assert not (await call).ByteSize()
            assert dict(await call.trailing_metadata())[EMPTY] == "1"


async def test_a_reader_that_has_read_nothing_goes_on(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar:
        async with (
            Client(sidecar.address) as client,
            client.producer("t", "p", NEVER_GIVES_UP) as producer,
            client.reader("t", follow=True) as reader,
        ):
            reads = asyncio.create_task(anext(reader))
            await until(lambda: reader._has_begun)
            sidecar.kill()
            async with answering(sidecar.address, grpc.StatusCode.UNIMPLEMENTED) as calls:
                await until(lambda: calls["ReadStream"] >= 3)
            await asyncio.to_thread(sidecar.start)
            await (await producer.send(b"1"))
            assert (await reads).payload == b"1"


async def test_a_reader_of_partitions_that_has_asked_for_their_ends_goes_on(tmp_path: Path) -> None:
    """Its parts make their first calls after that."""
    with Sidecar(tmp_path) as sidecar:
        async with Client(sidecar.address) as client:
            await client.admin.create_topic("t", partitions=2)
            async with client.producer("t", "p") as producer:
                await (await producer.send(b"1", key="k"))
            async with client.partitioned_reader("t") as reader:
                await reader._open()
                sidecar.kill()
                async with answering(sidecar.address, grpc.StatusCode.UNIMPLEMENTED) as calls:
                    reads = asyncio.create_task(anext(reader))
                    await until(lambda: calls["GetLastMessageId"] >= 4 or reads.done())
                    assert not reads.done()
                await asyncio.to_thread(sidecar.start)
                assert (await reads).payload == b"1"


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
async def test_what_starts_names_a_proxy(tmp_path: Path, code: grpc.StatusCode) -> None:
    async def refused(what: Awaitable[object]) -> None:
        with pytest.raises(UnavailableError, match="a proxy on the way") as caught:
            await what
        assert caught.value.reason == "NOT_A_SIDECAR"
        assert code.name in str(caught.value)
        assert "not here" in str(caught.value)

    sidecar = Sidecar(tmp_path)
    async with Client(sidecar.address) as client:
        async with answering(sidecar.address, code) as calls:
            await refused(client.producer("t", "p").open())
            await refused(anext(client.reader("t", follow=True)))
            await refused(client.admin.topic("t"))
            publisher = await client.publisher("ids", delivery_timeout_seconds=None).__aenter__()
            await refused(publisher.send(b"1", deduplication_id="1"))
            assert calls == {"GetLastMessageId": 1, "GetTopic": 1, "PublishStream": 2}
        await asyncio.to_thread(sidecar.start)
        try:
            # A call that was made too early has not ended it.
            await client.admin.create_topic("ids", deduplication_mode="deduplication-id")
            assert (await publisher.send(b"1", deduplication_id="1")).index == 0
            await publisher.close()
        finally:
            sidecar.kill()


@pytest.mark.parametrize(
    ("status", "reason"),
    [(503, "UNREACHABLE"), (413, "OUTCOME_UNKNOWN"), (404, "NOT_A_SIDECAR"), (200, "NOT_A_SIDECAR")],
)
async def test_what_starts_names_the_status_of_a_page(status: int, reason: str) -> None:
    async def refused(what: Awaitable[object], reason: str) -> None:
        with pytest.raises(UnavailableError) as caught:
            await what
        assert caught.value.reason == reason
        assert "proxy" in caught.value.hint
        assert ("without a gRPC status" if status == 200 else f"status: {status}") in caught.value.message

    async with answering_http(status) as (address, came), Client(address) as client:
        await refused(client.admin.topics(), reason)
        await refused(client.admin.create_topic("t"), "OUTCOME_UNKNOWN")
        assert len(came) == 2
    async with answering_http(status, resets=True) as (address, came), Client(address) as client:
        opening = asyncio.create_task(client.producer("t", "p").open())
        if reason == "NOT_A_SIDECAR":
            await refused(opening, reason)
        else:
            await until(lambda: len(came) > 5 or opening.done())
            assert not opening.done()
            opening.cancel()
            await asyncio.wait({opening})


async def test_another_address_is_tried_first(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar:
        wrong = Sidecar(tmp_path)
        async with answering(wrong.address, grpc.StatusCode.UNIMPLEMENTED) as calls:
            for topic in map(str, range(20)):
                async with Client([wrong.address, sidecar.address]) as client, client.producer(topic, "p") as producer:
                    await (await producer.send(b""))
                    assert (await anext(client.reader(topic))).payload == b""
            assert calls["PublishStream"] > 0
            assert calls["GetLastMessageId"] > 0


async def test_wrong_credentials_are_final(fake: FakeSidecar) -> None:
    def on_frame(frame: publish_pb2.Frame) -> list[publish_pb2.PublishStreamResponse]:
        if len(fake.frames) > 1:
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
        return [fake.stored(frame)]

    fake.on_frame = on_frame
    async with Client(fake.address) as client:
        producer = client.producer("t", "p", NEVER_GIVES_UP)
        await producer.open()
        await (await producer.send(b""))
        with pytest.raises((AccessDeniedError, OutcomeUnknownError), match="UNAUTHENTICATED"):
            await (await producer.send(b""))
        await producer.abort()


async def test_a_size_that_gRPC_refuses_here_is_final(fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqdedupe.client.connection._OPTIONS", (("grpc.max_receive_message_length", 1000),))
    fake.on_unary = lambda _: bytes(2000)
    async with Client(fake.address) as client:
        with pytest.raises(InvalidRequestError, match=r"2000 vs\. 1000") as caught:
            await client.admin.topic("t")
    assert caught.value.reason == "MESSAGE_TOO_LARGE"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame is given up as soon as it was alone often enough."""
    monkeypatch.setattr("seqdedupe.client.pending.BREAKS_SECONDS", 0)


@pytest.fixture
async def front(shared_sidecar: Sidecar) -> AsyncIterator[Front]:
    """A proxy that ends the streams over which POISON comes."""
    async with fronts(shared_sidecar.address, 1) as [front]:
        front.breaks_on = POISON
        yield front


@pytest.mark.usefixtures("at_once")
async def test_a_frame_that_breaks_each_connection_is_named(front: Front, topic: str) -> None:
    async with Client(front.address) as client:
        producer = client.producer(topic, "p", NEVER_GIVES_UP)
        await producer.open()
        async with client.producer(topic, "innocent", NEVER_GIVES_UP) as innocent:
            first = await producer.send(b"1")
            poisoned = await producer.send(POISON)
            behind = await producer.send(b"3")
            receipts = [await innocent.send(b"") for _ in range(10)]
            with pytest.raises(OutcomeUnknownError, match="sequence IDs 1 to 1, of") as caught:
                await poisoned
            assert f"was alone on {MAX_BREAKS} connections in a row" in str(caught.value)
            assert "proxy" in caught.value.hint
            assert (await first).sequence_id == 0
            assert [(await receipt).sequence_id for receipt in receipts] == list(range(10))
            with pytest.raises(OutcomeUnknownError):
                await behind
            await (await innocent.send(b""))
        await producer.abort()


async def test_what_is_given_up_before_its_frame_is_names_a_proxy_too(front: Front, topic: str) -> None:
    """As by a `delivery_timeout_seconds` shorter than BREAKS_SECONDS: the sidecar's log says nothing of it."""
    async with Client(front.address) as client:
        await client.admin.create_topic(topic + "-ids", deduplication_mode="deduplication-id")
        producer = client.producer(topic, "p", NEVER_GIVES_UP)
        await producer.open()
        await (await producer.send(b"1"))
        async with client.publisher(topic + "-ids", delivery_timeout_seconds=1e6) as publisher:
            await publisher.send(b"1", deduplication_id="1")
            receipt = await producer.send(POISON)
            sends = asyncio.create_task(publisher.send(POISON, deduplication_id="2"))
            # What anyone who waits for the one or the other learns when it takes too long.
            await until(lambda: (why := receipt._pending.last_refusal) is not None and why.hint == HINT_OF_BREAKS)
            await until(lambda: publisher._delivery._given_up().hint == HINT_OF_BREAKS)
        await asyncio.wait({sends})
        await producer.abort()
        with pytest.raises(OutcomeUnknownError, match="broke") as caught:
            await receipt
        assert caught.value.hint == HINT_OF_BREAKS


async def test_what_times_out_is_no_fault_of_the_frame(
    front: Front, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that ends long after its frame was sent: here each end counts as late."""
    monkeypatch.setattr("seqdedupe.client.stream.SOON_SECONDS", 0)
    monkeypatch.setattr("seqdedupe.client.producer_session._LONGEST_DELAY_SECONDS", 0.02)
    monkeypatch.setattr("seqdedupe.client.pending.BREAKS_SECONDS", 0)
    async with Client(front.address) as client, client.producer(topic, "p", NEVER_GIVES_UP) as producer:
        poisoned = await producer.send(POISON)
        await until(lambda: front.calls.count("PublishStream") > 2 * MAX_BREAKS)
        front.breaks_on = b""
        await poisoned


@pytest.mark.usefixtures("tries_often", "at_once")
async def test_streams_that_nobody_takes_are_no_fault_of_the_frame(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar:
        async with Client(sidecar.address) as client:
            await client.admin.create_topic("ids", deduplication_mode="deduplication-id")
            async with client.publisher("ids", delivery_timeout_seconds=None) as publisher:
                await publisher.send(b"1", deduplication_id="1")
                sidecar.kill()
                async with answering(sidecar.address, grpc.StatusCode.UNIMPLEMENTED) as calls:
                    sends = asyncio.create_task(publisher.send(b"2", deduplication_id="2"))
                    await until(lambda: calls["PublishStream"] > 2 * MAX_BREAKS)
                await asyncio.to_thread(sidecar.start)
                assert (await sends).index == 1


@pytest.mark.usefixtures("tries_often")
async def test_what_lets_nothing_pass_for_a_while_is_waited_for(front: Front, topic: str) -> None:
    """It takes the streams, and breaks those with a frame."""
    async with Client(front.address) as client, client.producer(topic, "p", NEVER_GIVES_UP) as producer:
        await client.admin.create_topic(topic + "-ids", deduplication_mode="deduplication-id")
        async with client.publisher(topic + "-ids", delivery_timeout_seconds=None) as publisher:
            receipt = await producer.send(POISON)
            sends = asyncio.create_task(publisher.send(POISON, deduplication_id="1"))
            await until(lambda: front.calls.count("PublishStream") > 6 * MAX_BREAKS)
            front.breaks_on = b""
            assert (await receipt).index == (await sends).index == 0


@pytest.mark.usefixtures("at_once")
async def test_a_publishers_batch_that_breaks_each_connection_is_named(front: Front, topic: str) -> None:
    async with Client(front.address) as client:
        await client.admin.create_topic(topic, deduplication_mode="deduplication-id")
        async with client.publisher(topic, delivery_timeout_seconds=None) as publisher:
            good = [asyncio.create_task(publisher.send(b"")) for _ in range(10)]
            with pytest.raises(OutcomeUnknownError, match="a batch of 1 message, of") as caught:
                await publisher.send(POISON)
            assert f"was alone on {MAX_BREAKS} connections in a row" in str(caught.value)
            assert "proxy" in caught.value.hint
            await asyncio.gather(*good)
            await publisher.send(b"")


async def test_a_stream_that_is_resumed_says_at_once_what_it_is_for(fake: FakeSidecar) -> None:
    """The sidecar ends a stream that says nothing, and `Open` may take longer than it waits for that."""
    async with Client(fake.address) as client, client.producer("t", "p", NEVER_GIVES_UP) as producer:
        await (await producer.send(b""))
        said = len(fake.messages)

        def on_open(_: publish_pb2.OpenRequest) -> publish_pb2.OpenResponse:
            if not any(message.topic for message in fake.messages[said + 1 :]):
                raise Refused(grpc.StatusCode.UNAVAILABLE, "RECOVERING", 20)
            return fake.opened(persisted=0)

        fake.on_open = on_open
        fake.ends_streams = 1
        await (await producer.send(b""))


@pytest.mark.parametrize("topics", [3, 4, 6])
async def test_a_connection_may_have_few_streams(topics: int) -> None:
    """As proxies limit them: as many topics as that, and more, are opened, published to and opened again."""
    async with fake_sidecar(max_concurrent_streams=4) as fake, Client(fake.address) as client:
        producers = [client.producer(f"t{k}", "p", NEVER_GIVES_UP) for k in range(topics)]
        await asyncio.gather(*(producer.open() for producer in producers))
        others = [client.producer(f"t{k}", "another", NEVER_GIVES_UP) for k in range(topics)]
        await asyncio.gather(*(other.open() for other in others))
        receipts = [await producer.send(b"") for producer in (*producers, *others)]
        assert len([await receipt for receipt in receipts]) == 2 * topics
        assert len(fake.peers) == 2
        for producer in (*producers, *others):
            await producer.close()


async def test_a_connection_without_a_free_stream_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqdedupe.client.stream.CALL_TIMEOUT_SECONDS", 1.5)
    monkeypatch.setattr("seqdedupe.client.producer_session.OPEN_TIMEOUT_SECONDS", 0)
    async with fake_sidecar(max_concurrent_streams=2) as fake, Client(fake.address) as client:
        # Two on the first connection, and one on the second, which keeps a place for `Open`.
        producers = [client.producer(f"t{k}", "p", NEVER_GIVES_UP) for k in range(3)]
        for producer in producers:
            await producer.open()
        with pytest.raises(UnavailableError, match="has no free stream: 3 are open") as caught:
            await client.producer("one-more", "p").open()
        assert caught.value.reason == "TOO_MANY_STREAMS"
        for producer in producers:
            await (await producer.send(b""))
            await producer.close()
        assert len(fake.peers) == 2


async def test_the_second_connection_ends_when_it_is_idle(
    shared_sidecar: Sidecar, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seqdedupe.client.connection._BRIEF", (("grpc.client_idle_timeout_ms", 1000),))
    async with (
        Proxy(shared_sidecar.address) as proxy,
        Client(proxy.address) as client,
        client.producer(topic, "p", NEVER_GIVES_UP) as producer,
    ):
        assert proxy.connections == 2
        await until(lambda: proxy.open_connections == 1)
        await (await producer.send(b""))
        async with client.producer(topic, "another", NEVER_GIVES_UP) as another:
            await (await another.send(b""))
        assert proxy.connections == 3


async def test_a_reader_leaves_what_takes_its_stream_and_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a proxy whose way to the sidecar has gone."""
    monkeypatch.setattr(reading, "CALL_TIMEOUT_SECONDS", 0.5)
    calls: Counter[str] = Counter()

    class Silent(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            async def be_silent(_: object, context: Any) -> None:
                calls[details.method.rpartition("/")[2]] += 1
                await asyncio.Event().wait()

            return grpc.stream_stream_rpc_method_handler(be_silent)

    with Sidecar(tmp_path) as sidecar:
        async with (
            Client(sidecar.address) as client,
            client.producer("t", "p", NEVER_GIVES_UP) as producer,
            client.reader("t", follow=True) as following,
        ):
            await (await producer.send(b"1"))
            assert (await anext(following)).payload == b"1"
            reads = asyncio.create_task(anext(following))
            sidecar.kill()
            server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
            server.add_generic_rpc_handlers((Silent(),))
            server.add_insecure_port(sidecar.address)
            await server.start()
            try:
                await until(lambda: calls["ReadStream"] >= 3)
            finally:
                await server.stop(None)
            await asyncio.to_thread(sidecar.start)
            await (await producer.send(b"2"))
            assert (await reads).payload == b"2"
