"""Reading past what is damaged on the sidecar's disk, over gRPC and by the command."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import grpc.aio
import pytest
from click.testing import CliRunner

from seqdedupe.cli.commands import cli
from seqdedupe.client import Client, DamagedError, Position
from seqdedupe.client.blocking import Client as BlockingClient
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2, read_pb2
from seqdedupe.v1.read_pb2_grpc import ReadServiceStub
from tests.client.helpers import until
from tests.client.proxy import Proxy
from tests.client.test_reader import publish

COUNT = 50
HIT = range(30, 40)
OTHERS = [i for i in range(COUNT) if i not in HIT]
PADDING = 30


def damage(sidecar: Sidecar, incarnation: int, index: int) -> Callable[[], None]:
    """A byte of the payload of a message that `publish` has sent. Returns what makes it good again."""
    path = Path(sidecar.data) / "logs" / str(incarnation) / f"{0:020d}.log"
    raw = path.read_bytes()
    at = raw.index(b"%d" % index + b"." * PADDING)

    def put(byte: bytes) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(byte)

    put(b"x")
    return lambda: put(raw[at : at + 1])


@pytest.fixture
async def damaged(shared_sidecar: Sidecar, topic: str) -> str:
    """A topic of COUNT messages, ten a batch, of which HIT are damaged."""
    await publish(shared_sidecar, topic, COUNT, PADDING)
    async with Client(shared_sidecar.address) as client:
        found = await client.admin.topic(topic)
    damage(shared_sidecar, found.incarnation, 33)
    return topic


async def test_a_reader_is_told_before_the_next_message(shared_sidecar: Sidecar, damaged: str) -> None:
    async with Client(shared_sidecar.address) as client, client.reader(damaged, skip_damaged=True) as reader:
        seen = []
        async for message in reader:
            seen.append(message.index)
            assert reader.skipped == ([HIT] if message.index >= HIT.stop else [])
        assert seen == OTHERS
    with BlockingClient(shared_sidecar.address) as blocking, blocking.reader(damaged, skip_damaged=True) as again:
        assert ([message.index for message in again], again.skipped) == (OTHERS, [HIT])
    # The sidecar goes on as ever.
    async with Client(shared_sidecar.address) as client:
        assert (await client.admin.topic(damaged)).state == admin_pb2.TOPIC_STATE_SERVING
    await publish(shared_sidecar, damaged, 1)


async def test_control_without_the_option_it_is_an_error(shared_sidecar: Sidecar, damaged: str) -> None:
    async with Client(shared_sidecar.address) as client, client.reader(damaged) as reader:
        assert [(await anext(reader)).index for _ in range(HIT.start)] == list(range(HIT.start))
        with pytest.raises(DamagedError) as caught:
            await anext(reader)
        assert caught.value.reason == "LOG_DAMAGED"
        assert "skip_damaged" in caught.value.hint
        assert reader.skipped == []


async def test_a_bounded_reader(shared_sidecar: Sidecar, damaged: str) -> None:
    async with Client(shared_sidecar.address) as client:
        for start, stop, skipped in ((25, 35, range(30, 35)), (33, 37, range(33, 37)), (35, 45, range(35, 40))):
            async with client.reader(damaged, start, stop_index=stop, skip_damaged=True) as reader:
                seen = [message.index async for message in reader]
                assert (seen, reader.skipped) == ([i for i in range(start, stop) if i not in HIT], [skipped])


@pytest.mark.parametrize("passes", [False, True])
async def test_what_is_at_the_end_is_told_once_over_connections(
    shared_sidecar: Sidecar, topic: str, passes: bool
) -> None:
    """Also where the damage passes before the new connection: what was said to be missing does not come after all."""
    await publish(shared_sidecar, topic, 20, PADDING)
    async with Proxy(shared_sidecar.address) as proxy, Client(proxy.address) as client:
        mend = damage(shared_sidecar, (await client.admin.topic(topic)).incarnation, 15)
        async with client.reader(topic, follow=True, skip_damaged=True) as reader:
            seen = [(await anext(reader)).index for _ in range(10)]
            following = asyncio.ensure_future(anext(reader))
            await until(lambda: reader.skipped != [])
            assert not following.done()
            if passes:
                mend()
            connections = proxy.connections
            proxy.cut()
            await until(lambda: proxy.connections > connections)
            await publish(shared_sidecar, topic, 5)
            seen.append((await following).index)
            assert seen == [*range(10), 20]
            assert reader.skipped == [range(10, 20)]
            assert reader.position is not None
            assert reader.position.index == 20


async def test_a_page(shared_sidecar: Sidecar, damaged: str) -> None:
    async with grpc.aio.insecure_channel(shared_sidecar.address) as channel:
        stub = ReadServiceStub(channel)

        async def page(index: int, *, skip: bool = True) -> read_pb2.ReadResponse:
            start = read_pb2.ReadStart(index=index)
            return await stub.Read(read_pb2.ReadRequest(topic=damaged, start=start, skip_damaged=skip))

        answer = await page(0)
        assert (len(answer.records), answer.next_index, answer.HasField("skipped")) == (3, 30, False)
        answer = await page(30)
        assert not answer.records
        assert (answer.skipped.first_index, answer.skipped.next_index, answer.next_index) == (30, 40, 40)
        assert answer.end_index == COUNT
        answer = await page(40)
        assert (answer.records[0].base_index, answer.HasField("skipped")) == (40, False)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await page(30, skip=False)
        assert caught.value.code() == grpc.StatusCode.DATA_LOSS


async def test_after_a_position_that_is_damaged(shared_sidecar: Sidecar, topic: str) -> None:
    await publish(shared_sidecar, topic, COUNT, PADDING)
    async with Client(shared_sidecar.address) as client:
        async with client.reader(topic) as reader:
            taken: list[Position] = [message.position async for message in reader]
        damage(shared_sidecar, taken[0].incarnation, 33)
        async with client.reader(topic, taken[34], skip_damaged=True) as reader:
            assert [message.index async for message in reader] == list(range(40, COUNT))
            assert reader.skipped == [range(35, 40)]


async def test_the_command_says_on_stderr_what_is_missing(shared_sidecar: Sidecar, damaged: str) -> None:
    def run(*more: str) -> tuple[int, str, str]:
        arguments = [damaged, "--address", shared_sidecar.address, *more]
        done = CliRunner().invoke(cli, ["read", *arguments])
        return done.exit_code, done.stdout, done.stderr

    status, out, errors = await asyncio.to_thread(run, "--skip-damaged")
    assert status == 0
    assert out.splitlines() == [str(i) + "." * PADDING for i in OTHERS]
    full = f"persistent://public/default/{damaged}"
    assert errors == f"seqdedupe: skipped 10 damaged messages of {full}, indexes 30 to 39\n"
    status, out, errors = await asyncio.to_thread(run, "--skip-damaged", "--json", "--from", "35")
    assert status == 0
    assert [json.loads(line)["index"] for line in out.splitlines()] == list(range(40, COUNT))
    assert json.loads(errors) == {"skipped": {"topic": full, "first_index": 35, "next_index": 40, "messages": 5}}
    status, out, errors = await asyncio.to_thread(run)
    assert status != 0
