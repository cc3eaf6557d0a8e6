"""Readers that read nothing: what they hold is bounded, publishers never wait for it, and other readers go on."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from broker_sidecar.rpc import Context
from broker_sidecar.security.authentication import anybody
from broker_sidecar.security.permissions import Permissions
from broker_sidecar.shares import MAX_HELD_BYTES
from broker_sidecar.streams import CALLER_SHARE, EXPORTS_AT_ONCE, UNREAD_SECONDS, Stream, Streams
from seqdedupe.address import SidecarAddress
from seqdedupe.client import Client as SidecarClient
from seqdedupe.client.connection import typed_errors
from seqdedupe.errors import SeqdedupeError
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import admin_pb2, read_pb2
from tests.broker_sidecar.calls import Client, batch, encoded, refused
from tests.broker_sidecar.metrics.scraping import scrape
from tests.broker_sidecar.test_hostile import MIB, resident_bytes, sidecar_with, until_it_stands

WAIT_SECONDS = LAST_RESORT_SECONDS
NEVER = 1e9
READ_STREAM, READ = "/seqdedupe.v1.ReadService/ReadStream", "/seqdedupe.v1.ReadService/Read"
MESSAGES = 20
LIMIT = 8 * MIB
READERS = 24
MORE = 64 * MIB
"""What the process may grow by beyond the limit: buffers of the threads that read, and what the C library keeps."""


def begin(channel: grpc.aio.Channel, method: str, request: Any) -> Any:
    call: Any = channel.unary_stream(method)
    return call(encoded(request))


def publish_large(client: Client) -> None:
    epochs = client.epochs("large", "p")
    for i in range(MESSAGES):
        client.publish_unary("large", batch([("p", i)], epochs, payloads=[bytes(MIB)]))


@asynccontextmanager
async def unread_pages(
    address: str, connections: int = 10, each: int = 1
) -> AsyncIterator[dict[Any, grpc.aio.Channel]]:
    """Readers, by connection. They have taken the first answer, and leave the pages that follow unread."""
    request = read_pb2.ReadStreamRequest(topic="large")
    async with unread(address, READ_STREAM, request, connections, each) as calls:
        for call in calls:
            await call.read()
        yield calls


@asynccontextmanager
async def unread(
    address: str, method: str, request: Any, connections: int, each: int = 1
) -> AsyncIterator[dict[Any, grpc.aio.Channel]]:
    """Calls whose answers nobody reads, with their connections."""
    own = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    channels = [grpc.aio.insecure_channel(address, own) for _ in range(connections)]
    try:
        # A call that nobody refers to is cancelled.
        calls = {begin(channel, method, request): channel for channel in channels for _ in range(each)}
        yield calls
    finally:
        for channel in channels:
            await channel.close()


async def all_is_read(call: Any, seconds: float) -> bool:
    """Whether all messages come in this time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while await call.read() is not grpc.aio.EOF:
                pass
            return True
    return False


@asynccontextmanager
async def one_that_reads(address: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield begin(channel, READ_STREAM, read_pb2.ReadStreamRequest(topic="large"))


@asynccontextmanager
async def sidecar_of(tmp_path: Path, held_bytes: int, unread_seconds: float, **keys: Any) -> AsyncIterator[Sidecar]:
    constants = {"streams__MAX_HELD_BYTES": held_bytes, "streams__UNREAD_SECONDS": unread_seconds}
    with sidecar_with(tmp_path, keys, **constants) as sidecar:
        client = Client(sidecar.address)
        publish_large(client)
        client.close()
        yield sidecar


async def grown_by(sidecar: Sidecar, before: int) -> int:
    loop = asyncio.get_running_loop()
    # What grpc.aio has to do goes on meanwhile.
    return await loop.run_in_executor(None, until_it_stands, lambda: resident_bytes(sidecar)) - before


async def test_pages_that_nobody_reads_cost_no_more_than_the_limit(tmp_path: Path) -> None:
    async with sidecar_of(tmp_path, MAX_HELD_BYTES, NEVER) as sidecar:
        before = resident_bytes(sidecar)
        async with unread_pages(sidecar.address, READERS):
            assert await grown_by(sidecar, before) < MAX_HELD_BYTES + MORE


async def test_the_control_without_a_limit_they_cost_more(tmp_path: Path) -> None:
    async with sidecar_of(tmp_path, 1 << 40, NEVER) as sidecar:
        before = resident_bytes(sidecar)
        async with unread_pages(sidecar.address, READERS, 4):
            assert await grown_by(sidecar, before) > MAX_HELD_BYTES + MORE


async def test_they_hold_up_no_publisher(tmp_path: Path) -> None:
    """Not even one of the same caller."""
    async with (
        sidecar_of(tmp_path, LIMIT, NEVER) as sidecar,
        unread_pages(sidecar.address, READERS),
        asyncio.timeout(WAIT_SECONDS),
        SidecarClient(sidecar.address) as client,
        client.producer("good", "good") as producer,
    ):
        for _ in range(MESSAGES):
            await producer.send(bytes(MIB // 2))
        await producer.flush()


async def test_calls_whose_answers_nobody_reads_cost_no_more_either(tmp_path: Path) -> None:
    request = read_pb2.ReadRequest(topic="large")
    async with sidecar_of(tmp_path, LIMIT, NEVER) as sidecar:
        before = resident_bytes(sidecar)
        async with unread(sidecar.address, READ, request, READERS):
            assert await grown_by(sidecar, before) < LIMIT + MORE
            client = Client(sidecar.address)
            assert refused(lambda: client.reading.Read(request)).reason == "QUEUE_FULL"
            client.close()


async def test_they_are_given_up_when_others_call(tmp_path: Path) -> None:
    request = read_pb2.ReadRequest(topic="large")
    async with sidecar_of(tmp_path, LIMIT, 0.5) as sidecar, unread(sidecar.address, READ, request, READERS):
        client = Client(sidecar.address)
        await until(lambda: answered(client, request))
        client.close()


def answered(client: Client, request: read_pb2.ReadRequest) -> bool:
    try:
        return len(client.reading.Read(request).records) == 1
    except grpc.RpcError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 (it tells nobody)
            await asyncio.sleep(0.02)


async def test_who_reads_goes_on_beside_any_number_that_do_not(tmp_path: Path) -> None:
    """They have the same caller, and are never ended."""
    async with sidecar_of(tmp_path, LIMIT, NEVER) as sidecar, one_that_reads(sidecar.address) as call:
        # The one that says that the stream is served, and a page.
        for _ in range(2):
            await call.read()
        async with unread_pages(sidecar.address, READERS):
            assert await all_is_read(call, WAIT_SECONDS)


async def test_the_control_who_reads_nothing_and_is_never_ended_keeps_the_memory(tmp_path: Path) -> None:
    """From those of the same caller who come later."""
    async with (
        sidecar_of(tmp_path, 4 * MIB, NEVER) as sidecar,
        unread_pages(sidecar.address),
        one_that_reads(sidecar.address) as late,
    ):
        assert not await all_is_read(late, 4.0)


async def test_pages_left_unread_are_given_up_when_others_wait_for_memory(tmp_path: Path) -> None:
    async with (
        sidecar_of(tmp_path, 4 * MIB, 0.5) as sidecar,
        unread_pages(sidecar.address) as calls,
        one_that_reads(sidecar.address) as late,
    ):
        assert await all_is_read(late, WAIT_SECONDS)
        reasons = set()
        for call in calls:
            try:
                with typed_errors(SidecarAddress.parse(sidecar.address)):
                    while await call.read() is not grpc.aio.EOF:
                        pass
            except SeqdedupeError as e:
                reasons.add(e.reason)
        # The stream has ended, or its connection too, before the client learned.
        assert reasons
        assert reasons <= {"STREAM_IDLE", "UNREACHABLE"}


async def test_grpc_keeps_nothing_for_streams_that_were_ended_and_are_not_read(tmp_path: Path) -> None:
    """It keeps what was written until it is read, or the connection ends. Nobody here reads."""
    async with (
        sidecar_of(tmp_path, 4 * MIB, 0.5, metrics_listen="127.0.0.1:0") as sidecar,
        unread_pages(sidecar.address) as calls,
        one_that_reads(sidecar.address) as late,
    ):
        assert await all_is_read(late, WAIT_SECONDS)
        ended = scrape(sidecar).value("seqdedupe_evicted_streams_total", why="unread")
        assert ended
        async with asyncio.timeout(WAIT_SECONDS):
            ready = grpc.ChannelConnectivity.READY
            leaving = [asyncio.ensure_future(channel.wait_for_state_change(ready)) for channel in calls.values()]
            for one in itertools.islice(asyncio.as_completed(leaving), int(ended)):
                await one
        for one in leaving:
            one.cancel()


PRODUCERS = 20_000
"""With names of 200 bytes: a copy of a topic's numbers takes some 5 MB."""
EXPORTS = 60


@pytest.mark.parametrize(("at_once", "is_bounded"), [(4, True), (EXPORTS, False)], ids=["", "the control without"])
async def test_exports_that_nobody_reads_do_not_each_hold_a_copy_of_the_topic(
    tmp_path: Path, at_once: int, is_bounded: bool
) -> None:
    constants = {"streams__EXPORTS_AT_ONCE": at_once, "streams__CALLER_SHARE": 1, "streams__UNREAD_SECONDS": NEVER}
    with sidecar_with(tmp_path, {}, **constants) as sidecar:
        client = Client(sidecar.address)
        names = [f"{k:06d}".ljust(200, "x") for k in range(PRODUCERS)]
        for first in range(0, PRODUCERS, 5_000):
            client.open("large", *names[first : first + 5_000])
        request = admin_pb2.ExportSnapshotRequest(topic="large")
        assert len(list(client.admin.ExportSnapshot(request))) > 4
        before = resident_bytes(sidecar)
        async with unread(sidecar.address, "/seqdedupe.v1.AdminService/ExportSnapshot", request, EXPORTS):
            assert (await grown_by(sidecar, before) < MORE + 48 * MIB) == is_bounded
        client.close()


async def test_who_reads_an_export_has_it_beside_others_that_do_not(tmp_path: Path) -> None:
    constants = {"streams__EXPORTS_AT_ONCE": 2, "streams__UNREAD_SECONDS": 0.1}
    path = "/seqdedupe.v1.AdminService/ExportSnapshot"
    with sidecar_with(tmp_path, {}, **constants) as sidecar:
        client = Client(sidecar.address)
        for first in (0, 5_000):
            client.open("large", *(f"{k:06d}".ljust(200, "x") for k in range(first, first + 5_000)))
        request = admin_pb2.ExportSnapshotRequest(topic="large")
        async with unread(sidecar.address, path, request, 8), grpc.aio.insecure_channel(sidecar.address) as channel:
            assert await all_is_read(begin(channel, path, request), WAIT_SECONDS)
        client.close()


def test_an_export_that_waits_ends_one_that_is_unread_and_not_all() -> None:
    streams = Streams(10, Permissions())
    context = cast(Context, SimpleNamespace(peer=lambda: "somewhere"))

    def stream() -> Stream:
        return Stream(context, streams.reading, anybody(context), streams.shares)

    unread = [stream() for _ in range(EXPORTS_AT_ONCE // CALLER_SHARE)]
    for k, one in enumerate(unread):
        one.writing_since = time.monotonic() - UNREAD_SECONDS - k
    waiting = stream()
    streams._exporting.update(unread)
    streams._to_export.add(waiting)
    for _ in range(3):
        assert not streams._may_export(waiting.use)
    assert [one for one in unread if one.ended_because is not None] == unread[-1:]
    assert streams.unread == 1
    streams._exporting.discard(unread[-1])
    assert streams._may_export(waiting.use)


async def test_exports_wait_for_the_memory_of_readers_and_go_on(tmp_path: Path) -> None:
    request = admin_pb2.ExportSnapshotRequest(topic="large")  # the same field in both
    async with (
        sidecar_of(tmp_path, LIMIT, 0.5) as sidecar,
        unread_pages(sidecar.address, READERS),
        grpc.aio.insecure_channel(sidecar.address) as channel,
    ):
        for method in ("ExportSnapshot", "ExportWatermarks"):
            call = begin(channel, f"/seqdedupe.v1.AdminService/{method}", request)
            assert await all_is_read(call, WAIT_SECONDS)
