"""Clients that want to shut others out: messages that are costly to parse, silent streams, answers left unread.

Each time a good client stands next to them and must get through; and a sidecar without the defence shows that it would
not.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from broker_sidecar.rpc import MAX_CALL_BYTES, unary
from broker_sidecar.services.publish_service import MAX_FIELDS, MAX_FRAMES
from seqdedupe.client import Client as SidecarClient
from seqdedupe.errors import UnavailableError
from seqdedupe.limits import MAX_BATCH_ROWS, MAX_OPEN_NAMES
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import publish_pb2, read_pb2, read_pb2_grpc
from tests.broker_sidecar import with_constants
from tests.broker_sidecar.calls import (
    NOT_DUP,
    Client,
    Stream,
    batch,
    encoded,
    receipt_of,
    refused,
    status,
    topic_bytes,
    verdicts,
)
from tests.broker_sidecar.metrics.scraping import scrape

MIB = 1024 * 1024
LARGEST = 16 * MIB - 64 * 1024
WAIT_SECONDS = LAST_RESORT_SECONDS


@contextmanager
def sidecar_with(folder: Path, keys: dict[str, Any], **constants: object) -> Iterator[Sidecar]:
    module, environment = with_constants.MODULE, with_constants.environment(**constants)
    with Sidecar(folder, module=module, environment=environment, **keys) as sidecar:
        yield sidecar


def cpu_seconds(sidecar: Sidecar) -> float:
    times = psutil.Process(sidecar.pid).cpu_times()
    return float(times.user + times.system)


def resident_bytes(sidecar: Sidecar) -> int:
    return int(psutil.Process(sidecar.pid).memory_info().rss)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)


# -- messages that are costly to parse ---------------------------------------------------------------------------

COSTLY: dict[str, tuple[str, bytes]] = {
    "empty frames": ("INVALID_REQUEST", b"\x12\x00" * (LARGEST // 2)),
    "empty frames after a good one": ("INVALID_REQUEST", b"\x12\x0b\x09" + bytes(8) + b"\x7a\x00" + b"\x12\x00" * MIB),
    "frames with numbers": ("INVALID_REQUEST", (b"\x12\x09\x09" + bytes(8)) * (LARGEST // 11)),
    "unknown fields": ("INVALID_REQUEST", b"\x28\x01" * (LARGEST // 2)),
    "unknown fields of every kind": (
        "INVALID_REQUEST",
        b"".join((b"\x28\xff\xff\xff\xff\x0f", b"\x29" + bytes(8), b"\x2a\x01a", b"\x2d" + bytes(4), b"\x2b\x2c"))
        * MAX_FIELDS,
    ),
    "lengths in too many bytes": ("MALFORMED_MESSAGE", b"\x12\x80\x80\x80\x80\x80\x00" * (LARGEST // 7)),
    "a frame that goes beyond the end": ("MALFORMED_MESSAGE", b"\x12\x00" * 8 + b"\x12\xff\xff\xff\x7f"),
    "no wire type": ("MALFORMED_MESSAGE", b"\x12\x00\x2f" + b"\x12\x00" * MIB),
}


@pytest.mark.parametrize("case", COSTLY)
def test_what_is_costly_to_parse_is_refused_by_a_look_at_the_bytes(
    client: Client, shared: Sidecar, topic: str, case: str
) -> None:
    reason, data = COSTLY[case]
    epochs = client.epochs(topic, "p")
    stream = client.stream(topic)
    stream.receipt(batch([("p", 0)], epochs))
    before, held = cpu_seconds(shared), resident_bytes(shared)
    stream.send_raw(data)
    assert refused(stream.end).reason == reason
    assert cpu_seconds(shared) - before < 0.5  # 10 to 16 if millions of objects are made
    assert resident_bytes(shared) - held < 100 * MIB
    assert client.end_index(topic) == 1


def test_as_many_frames_and_fields_as_may_be(client: Client, topic: str) -> None:
    """Fields of a newer client are no harm, in a message as full as it may be."""
    epochs = client.epochs(topic, "p")
    stream = client.stream(topic)
    frames = [publish_pb2.Frame(number=i, batch=batch([("p", i)], epochs)) for i in range(MAX_FRAMES)]
    message = publish_pb2.PublishStreamRequest(topic=topic, frames=frames)
    unknown = b"\x28\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01" * (MAX_FIELDS - MAX_FRAMES - 1)
    stream.send_raw(unknown + message.SerializeToString())
    assert all(verdicts(receipt_of(stream.answer(i)), 1) == [NOT_DUP] for i in range(MAX_FRAMES))
    stream.end()


CALLS = {
    "/seqdedupe.v1.PublishService/Open": publish_pb2.OpenRequest(topic="t", producer_names=["n" * MAX_CALL_BYTES]),
    "/seqdedupe.v1.ReadService/Read": read_pb2.ReadRequest(topic="t" * MAX_CALL_BYTES),
    "/seqdedupe.v1.ReadService/Locate": read_pb2.LocateRequest(topic="t" * MAX_CALL_BYTES),
    "/seqdedupe.v1.AdminService/CreateTopic": publish_pb2.OpenRequest(topic="t" * MAX_CALL_BYTES),
    "/grpc.health.v1.Health/Check": publish_pb2.OpenRequest(topic="t" * MAX_CALL_BYTES),
}


@pytest.mark.parametrize("method", CALLS)
def test_calls_that_do_not_publish_take_a_mebibyte(client: Client, method: str) -> None:
    answer = refused(lambda: client.raw(method, encoded(CALLS[method])))
    assert (answer.reason, answer.numbers["limit_bytes"]) == ("INVALID_REQUEST", str(MAX_CALL_BYTES))


@pytest.mark.parametrize("method", ["/seqdedupe.v1.ReadService/ReadStream", "/grpc.health.v1.Health/Watch"])
def test_so_do_streams_that_do_not_publish(client: Client, method: str) -> None:
    request = encoded(read_pb2.ReadStreamRequest(topic="t" * MAX_CALL_BYTES))
    call: Any = client.channel.unary_stream(method)
    with pytest.raises(grpc.RpcError) as e:
        list(call(request, timeout=WAIT_SECONDS))
    assert status(e.value).reason == "INVALID_REQUEST"


def test_names_of_an_open_are_counted_before_they_become_objects(client: Client, shared: Sidecar, topic: str) -> None:
    before = cpu_seconds(shared)
    data = topic_open(topic) + b"\x12\x00" * (MAX_CALL_BYTES // 2 - 64)
    answer = refused(lambda: client.raw("/seqdedupe.v1.PublishService/Open", data))
    assert answer.reason == "INVALID_NAME"
    assert str(MAX_OPEN_NAMES) in answer.message
    assert cpu_seconds(shared) - before < 0.5


def topic_open(topic: str) -> bytes:
    return publish_pb2.OpenRequest(topic=topic).SerializeToString()


# -- streams that are of no use ----------------------------------------------------------------------------------


PUBLISH_STREAM = "/seqdedupe.v1.PublishService/PublishStream"
OTHERS = {
    "publish": (PUBLISH_STREAM, None),
    "watch": ("/grpc.health.v1.Health/Watch", b""),
    "reflection": ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", None),
}
NEVER = 1e9
READY = grpc.ChannelConnectivity.READY


@asynccontextmanager
async def silent_streams(address: str, connections: int, streams: int, kind: str) -> AsyncIterator[list[Any]]:
    """This many streams over each of this many connections, taken or refused by now; they never say anything."""
    method, request = OTHERS[kind]
    own = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, own) for _ in range(connections)]
    calls: list[Any] = []
    for channel in channels:
        for _ in range(streams):
            kind_of_call: Any = channel.stream_stream if request is None else channel.unary_stream
            calls.append(kind_of_call(method)(*([] if request is None else [request])))
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            await asyncio.gather(*(call.initial_metadata() for call in calls))
        yield calls
    finally:
        for channel in channels:
            await channel.close()


async def publishes(address: str, topic: str, seconds: float, messages: int = 20) -> bool:
    """Whether a good client gets its receipts in time, and reads what it has published."""
    try:
        async with asyncio.timeout(seconds), SidecarClient(address) as client:
            async with client.producer(topic, "good") as producer:
                for i in range(messages):
                    await producer.send(b"x", sequence_id=i)
                await producer.flush()
            return [message.sequence_id async for message in client.reader(topic)] == list(range(messages))
    except TimeoutError:
        return False


@pytest.mark.parametrize("kind", OTHERS)
async def test_silent_streams_give_way(tmp_path: Path, kind: str) -> None:
    keys = {"max_streams": 40}
    with sidecar_with(tmp_path / "defended", keys) as sidecar:
        async with silent_streams(sidecar.address, 4, 40, kind):
            assert await publishes(sidecar.address, "t", WAIT_SECONDS)


@pytest.mark.parametrize("kind", OTHERS)
async def test_the_control_silent_streams_that_do_not_give_way_shut_everybody_out(tmp_path: Path, kind: str) -> None:
    keys = {"max_streams": 40}
    with sidecar_with(tmp_path, keys, streams__IDLE_SECONDS=NEVER, streams__FIRST_MESSAGE_SECONDS=NEVER) as sidecar:
        async with silent_streams(sidecar.address, 4, 40, kind):
            assert not await publishes(sidecar.address, "t", 5.0)


NOTHING = {"empty": b"", "its topic alone": topic_bytes("t"), "what nobody knows": b"\x28\x01"}


@pytest.mark.parametrize("said", NOTHING.values(), ids=list(NOTHING))
async def test_who_says_nothing_again_and_again_is_silent(tmp_path: Path, said: bytes) -> None:
    with sidecar_with(tmp_path, {"max_streams": 4}) as sidecar:
        async with SidecarClient(sidecar.address) as client:
            await client.admin.create_topic("t")
        async with silent_streams(sidecar.address, 2, 2, "publish") as calls:
            saying = [asyncio.ensure_future(say_again_and_again(call, topic_bytes("t"), said)) for call in calls]
            assert await publishes(sidecar.address, "good", WAIT_SECONDS)
            assert not all(one.done() for one in saying)
            for one in saying:
                one.cancel()


async def say_again_and_again(call: Any, first: bytes, others: bytes) -> None:
    """Until the call ends."""
    try:
        await call.write(first)
        while True:
            await asyncio.sleep(0.05)
            await call.write(others)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return


async def test_the_first_message_has_a_deadline(tmp_path: Path) -> None:
    with sidecar_with(tmp_path, {}, streams__FIRST_MESSAGE_SECONDS=0.2) as sidecar:
        async with silent_streams(sidecar.address, 1, 3, "publish") as calls:
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as e:
                    await asyncio.wait_for(call.read(), WAIT_SECONDS)
                said = status(e.value)
                assert (said.reason, said.numbers["frames_taken"]) == ("STREAM_IDLE", "0")
                assert said.retry_delay_ms > 0


async def test_thousands_of_streams(shared: Sidecar) -> None:
    """Most of them are not served at all; who publishes meanwhile does not wait long."""
    async with silent_streams(shared.address, 10, 400, "publish"):
        assert await publishes(shared.address, "beside-thousands", WAIT_SECONDS)
    assert shared.is_running


async def test_one_connection_has_its_share(tmp_path: Path) -> None:
    """Were there none, one connection that keeps all of its streams busy would have them all."""
    with sidecar_with(tmp_path, {"max_streams": 8}, streams__IDLE_SECONDS=NEVER) as sidecar:
        async with silent_streams(sidecar.address, 1, 20, "publish"):
            assert await publishes(sidecar.address, "t", WAIT_SECONDS)


async def test_streams_that_gave_way_are_resumed_with_their_epochs(tmp_path: Path) -> None:
    """Ten producers share two streams: each loses its own while it is silent, and none of them notices."""
    keys = {"max_streams": 4}  # two for each connection at most, and one at a time for each of these
    with sidecar_with(tmp_path, keys, streams__IDLE_SECONDS=0.01) as sidecar:
        async with SidecarClient(sidecar.address) as client, AsyncExitStack() as stack:
            names = [f"p{i}" for i in range(10)]
            producers = [await stack.enter_async_context(client.producer("t", name)) for name in names]
            first = [(await client.admin.producer("t", name)).epoch for name in names]
            async with asyncio.timeout(WAIT_SECONDS):
                for i in range(3):
                    for producer in producers:
                        await producer.send(b"x", sequence_id=i)
                        await producer.flush()
            assert [(await client.admin.producer("t", name)).epoch for name in names] == first
            found = sorted([(m.producer_name, m.sequence_id) async for m in client.reader("t")])
            assert found == [(name, i) for name in names for i in range(3)]


# -- answers left unread -----------------------------------------------------------------------------------------

STREAMS = 24
ROUNDS = 5
UNREAD_LIMIT = 32 * MIB
CONNECTION_BYTES = 4 * MIB
"""What does not count of a connection with one stream: `UNREAD_BYTES` and gRPC's buffers for them, a message that was
read at the same time as others, and freed memory in between. It is some 2 MiB; without a limit all is 20."""


def leave_receipts_unread(address: str, topic: str, content: bytes) -> list[tuple[Client, Stream]]:
    """Streams that send a batch of old rows over and over, and read nothing."""
    clients = [Client(address) for _ in range(STREAMS)]
    streams = [client.stream(topic) for client in clients]
    for stream in streams:
        for _ in range(20):
            stream.send(content)
    return list(zip(clients, streams, strict=True))


def old_rows(client: Client, topic: str) -> bytes:
    rows = [("p", i) for i in range(MAX_BATCH_ROWS)]
    content = encoded(batch(rows, client.epochs(topic, "p"), payloads=[b""] * len(rows)))
    client.publish_unary(topic, content)
    return content


def until_it_stands(value: Callable[[], int], seconds: float = 1.0) -> int:
    before, since = value(), time.monotonic()
    until = since + WAIT_SECONDS
    while time.monotonic() < since + seconds and time.monotonic() < until:
        time.sleep(0.05)
        if (now := value()) != before:
            before, since = now, time.monotonic()
    return before


def receipts_left_unread(sidecar: Sidecar) -> tuple[int, int]:
    """How many receipts streams have unread when the sidecar takes no more of them, and what memory all of it takes."""
    client = Client(sidecar.address)
    content = old_rows(client, "t")
    before = resident_bytes(sidecar)
    hostile = leave_receipts_unread(sidecar.address, "t", content)
    rows = until_it_stands(lambda: client.topic("t").dup)
    held_bytes = resident_bytes(sidecar) - before
    for one, stream in hostile:
        stream.call.cancel()
        one.close()
    client.close()
    return rows // MAX_BATCH_ROWS, held_bytes


def test_unread_receipts_cost_no_more_than_all_clients_may_hold(tmp_path: Path) -> None:
    with sidecar_with(tmp_path, {}, streams__MAX_HELD_BYTES=UNREAD_LIMIT) as sidecar:
        receipts, held_bytes = receipts_left_unread(sidecar)
        assert receipts < 5 * STREAMS
        assert held_bytes < UNREAD_LIMIT + STREAMS * CONNECTION_BYTES


def test_streams_that_were_ended_for_unread_receipts_cost_nothing_more(tmp_path: Path) -> None:
    """Streams end again and again, and it stays at some 135 MiB; each has gRPC's part of those that are just ending
    next to its own."""
    constants = {"streams__MAX_HELD_BYTES": UNREAD_LIMIT, "streams__UNREAD_SECONDS": 0.3}
    with sidecar_with(tmp_path, {"metrics_listen": "127.0.0.1:0"}, **constants) as sidecar:
        client = Client(sidecar.address)
        content = old_rows(client, "t")
        before = resident_bytes(sidecar)
        for _ in range(ROUNDS):
            hostile = leave_receipts_unread(sidecar.address, "t", content)
            until_it_stands(lambda: client.topic("t").dup)
            for one, stream in hostile:
                stream.call.cancel()
                one.close()
        held_bytes = resident_bytes(sidecar) - before
        client.close()
        assert scrape(sidecar).value("seqdedupe_evicted_streams_total", why="unread") > ROUNDS * STREAMS / 2
        assert held_bytes < UNREAD_LIMIT + 2 * STREAMS * CONNECTION_BYTES


def test_the_control_without_a_limit_they_cost_more(tmp_path: Path) -> None:
    with sidecar_with(tmp_path, {}, streams__MAX_HELD_BYTES=1 << 40) as sidecar:
        receipts, held_bytes = receipts_left_unread(sidecar)
        assert receipts > 7 * STREAMS
        assert held_bytes > UNREAD_LIMIT + STREAMS * CONNECTION_BYTES


async def test_a_good_client_beside_unread_receipts(tmp_path: Path) -> None:
    """At once while there is room for little ones; and when those who read nothing have all of it, soon."""
    with sidecar_with(tmp_path, {}, streams__MAX_HELD_BYTES=UNREAD_LIMIT) as sidecar:
        client = Client(sidecar.address)
        content = old_rows(client, "t")
        hostile = leave_receipts_unread(sidecar.address, "t", content)
        assert await publishes(sidecar.address, "good", 30.0)
        assert await publishes(sidecar.address, "good-too", 30.0)
        for one, stream in hostile:
            stream.call.cancel()
            one.close()
        client.close()


# -- pings -------------------------------------------------------------------------------------------------------


async def test_who_waits_for_messages_may_ask_whether_the_sidecar_is_there(shared: Sidecar, topic: str) -> None:
    """A follower that pings every 1.2 seconds is not thrown out, as gRPC does with anyone who pings more often than it
    is told: at the third ping."""
    client = Client(shared.address)
    epochs = client.epochs(topic, "p")
    pings = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.keepalive_time_ms", 1_200),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with grpc.aio.insecure_channel(shared.address, pings) as channel:
        request = read_pb2.ReadStreamRequest(topic=topic, follow=True)
        follower: Any = read_pb2_grpc.ReadServiceStub(channel).ReadStream(request)
        await follower.read()
        waiting = asyncio.ensure_future(follower.read())
        done, _ = await asyncio.wait({waiting}, timeout=7.0)
        assert not done, waiting.result()
        client.publish_unary(topic, batch([("p", 0)], epochs))
        answer = await asyncio.wait_for(waiting, WAIT_SECONDS)
        assert answer.records[0].rows == 1
        follower.cancel()
    client.close()


# -- no memory ---------------------------------------------------------------------------------------------------


async def test_a_call_for_which_there_is_no_memory_may_be_made_again() -> None:
    async def call(_: read_pb2.LocateRequest) -> read_pb2.LocateResponse:
        raise MemoryError

    server = grpc.aio.server()
    handlers = {"Locate": unary(read_pb2.LocateRequest, call)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("seqdedupe.v1.ReadService", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with SidecarClient(f"127.0.0.1:{port}") as client:
        with pytest.raises(UnavailableError) as e:
            await client.locate_time("t", 0)
    assert e.value.reason == "OUT_OF_MEMORY"
    assert e.value.retry_delay_ms > 0
    await server.stop(0)
