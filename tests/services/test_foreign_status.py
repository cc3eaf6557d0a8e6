"""Pipe, consumer and relay where a proxy answers for the sidecar: at work they wait, and at a start they say so.

Costs: a sidecar for each test, about 20 seconds in all.
"""

import asyncio
import threading
from collections.abc import Awaitable
from concurrent.futures import Executor
from pathlib import Path

import grpc
import pytest
from sqlalchemy import Connection, Engine

from seqdedupe.client import Client, InvalidRequestError, Message, UnavailableError
from seqdedupe.client.blocking import Client as BlockingClient
from seqdedupe.services.consumer import Consumer, ConsumerConfig
from seqdedupe.services.outbox import Relay
from seqdedupe.services.outbox.relay import RelayWork
from seqdedupe.services.pipe import Pipe
from seqdedupe.services.pipe.pipe import Lane
from seqdedupe.testing import Sidecar
from tests.client.foreign import CODES, answering
from tests.client.helpers import read_all, until, until_stored
from tests.services.effects import TIMEOUT_SECONDS, effects, make_table, numbers, write
from tests.services.outbox.conftest import Database, payloads
from tests.services.pipe.scene import expected, found, function, publish

each_code = pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)


async def names_a_proxy(what: Awaitable[object]) -> None:
    with pytest.raises(UnavailableError, match="a proxy on the way") as caught:
        await what
    assert caught.value.reason == "NOT_A_SIDECAR"
    assert "\n" not in str(caught.value)


@each_code
@pytest.mark.parametrize("follow", [True, False], ids=["follow", "once"])
async def test_a_pipe_goes_on(tmp_path: Path, code: grpc.StatusCode, follow: bool) -> None:
    has_come, may_go_on = threading.Event(), threading.Event()

    def waits(message: Message) -> object:
        if message.payload == b"1000":
            has_come.set()
            may_go_on.wait(TIMEOUT_SECONDS)
        return function(message)

    with Sidecar(tmp_path) as sidecar:
        async with Client(sidecar.address) as client:
            await publish(client, "in", 0, 2000)
            running = asyncio.create_task(Pipe(client, "in", "out", waits, name="pipe").run(follow=follow))  # type: ignore[arg-type]
            await asyncio.to_thread(has_come.wait)
            sidecar.kill()
            async with answering(sidecar.address, code) as calls:
                may_go_on.set()
                await until(lambda: calls["PublishStream"] >= 6)
            await asyncio.to_thread(sidecar.start)
            if follow:
                await publish(client, "in", 2000, 10)
                await until_stored(client, "out", len(expected(2010)))
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
            else:
                await running
            assert await found(client, "out") == expected(2010 if follow else 2000)


async def test_a_pipe_that_begins_again_waits_out_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed for another reason is begun again with calls, which a proxy refuses."""
    runs: list[Lane] = []
    original = Lane.run

    async def run(lane: Lane, executor: Executor, *, follow: bool) -> None:
        runs.append(lane)
        await original(lane, executor, follow=follow)

    monkeypatch.setattr(Lane, "run", run)
    with Sidecar(tmp_path) as sidecar:
        async with Client(sidecar.address) as client:
            await publish(client, "in", 0, 10)
            await client.admin.create_topic("out")
            pipe = Pipe(client, "in", "out", function, name="pipe")
            await pipe._sources(follow=True)
            sidecar.kill()
            async with answering(sidecar.address, grpc.StatusCode.UNIMPLEMENTED) as calls:
                lane = Lane(client, "in", "out", function, "pipe", None, pipe.activity)
                following = asyncio.create_task(pipe._follow(lane, None))  # type: ignore[arg-type]
                await until(lambda: calls["GetLastMessageId"] >= 3)
            await asyncio.to_thread(sidecar.start)
            await until_stored(client, "out", len(expected(10)))
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            assert len(runs) > 3


@each_code
@pytest.mark.parametrize("partitions", [0, 2])
async def test_a_consumer_goes_on(tmp_path: Path, code: grpc.StatusCode, partitions: int, sqlite: Engine) -> None:
    """With a dead letter, too, whose publisher is new."""
    make_table(sqlite)
    has_come, may_go_on = threading.Event(), threading.Event()

    def handle(connection: Connection, message: Message) -> None:
        if message.payload == b"10":
            has_come.set()
            may_go_on.wait(TIMEOUT_SECONDS)
            raise ValueError("not this one")
        write(connection, message)

    with Sidecar(tmp_path) as sidecar, BlockingClient(sidecar.address) as blocking:
        async with Client(sidecar.address) as client:
            if partitions:
                await client.admin.create_topic("t", partitions=partitions)
            await client.admin.create_topic("dead", deduplication_mode="deduplication-id")
            config = ConsumerConfig(max_attempts=1, poison="dead letter", dead_letter_topic="dead")
            consumer = Consumer(blocking, "t", "c", sqlite, handle, start="earliest", config=config)
            async with client.producer("t", "p") as producer:
                for payload in numbers(20):
                    await producer.send(payload.encode(), key=payload)
            running = asyncio.create_task(asyncio.to_thread(consumer.run))
            try:
                await asyncio.to_thread(has_come.wait)
                sidecar.kill()
                async with answering(sidecar.address, code) as calls:
                    may_go_on.set()
                    await until(lambda: calls["PublishStream"] >= 1 and calls["ReadStream"] >= 3)
                await asyncio.to_thread(sidecar.start)
                async with client.producer("t", "another") as producer:
                    for payload in numbers(5, 20):
                        await producer.send(payload.encode(), key=payload)
                rest = sorted(set(numbers(25)) - {"10"})
                await until(lambda: len(effects(sqlite)) >= len(rest))
                await until_stored(client, "dead", 1)
            finally:
                consumer.stop()
                await running
            assert sorted(effects(sqlite)) == rest
        assert [letter.payload for letter in await read_all(sidecar, "dead")] == [b"10"]


@each_code
async def test_a_relay_goes_on(tmp_path: Path, code: grpc.StatusCode) -> None:
    """To a topic that it opens only now, too."""
    database = Database(f"sqlite:///{tmp_path / 'shop.db'}")
    with Sidecar(tmp_path / "sidecar") as sidecar:
        async with Client(sidecar.address) as client:
            relay = Relay(client, database.url, "shop-{aggregatetype}", "shop", report=lambda line: None)
            running = asyncio.create_task(relay.run())
            database.add(b"1", kind="order")
            await until(lambda: database.rows() == 0)
            sidecar.kill()
            async with answering(sidecar.address, code) as calls:
                database.add(b"2", kind="order")
                await until(lambda: calls["PublishStream"] >= 3)
                database.add(b"3", kind="refund")
                await until(lambda: calls["GetTopic"] >= 3)
            await asyncio.to_thread(sidecar.start)
            database.add(b"4", kind="order")
            await until(lambda: database.rows() == 0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert await payloads(sidecar, "shop-order") == [b"1", b"2", b"4"]
        assert await payloads(sidecar, "shop-refund") == [b"3"]
    database.engine.dispose()


@each_code
@pytest.mark.parametrize("is_up", [True, False], ids=["up", "not up"])
async def test_a_relay_that_takes_over_goes_on(
    tmp_path: Path, code: grpc.StatusCode, is_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has found no row yet, since another one works or there are none, makes its first call to a topic only
    when it has some: that is no start. Nor is it one if it has waited for a sidecar that was not up."""
    has_waited = asyncio.Event()
    original = RelayWork._wait

    async def wait(work: RelayWork) -> bool:
        has_waited.set()
        return await original(work)

    monkeypatch.setattr(RelayWork, "_wait", wait)
    database = Database(f"sqlite:///{tmp_path / 'shop.db'}")
    sidecar = Sidecar(tmp_path / "sidecar")
    if is_up:
        await asyncio.to_thread(sidecar.start)
    try:
        async with Client(sidecar.address) as client:
            relay = Relay(client, database.url, "shop", "shop", report=lambda line: has_waited.set())
            running = asyncio.create_task(relay.run())
            await has_waited.wait()
            if is_up:
                sidecar.kill()
            async with answering(sidecar.address, code) as calls:
                database.add(b"1")
                await until(lambda: calls["GetTopic" if is_up else "GetLastMessageId"] >= 3 or running.done())
                assert not running.done()
            await asyncio.to_thread(sidecar.start)
            await until(lambda: database.rows() == 0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert await payloads(sidecar, "shop") == [b"1"]
    finally:
        sidecar.kill()
        database.engine.dispose()


async def test_a_relay_of_a_sidecar_that_is_none_for_producers_ends_at_once(tmp_path: Path) -> None:
    """One next to brokers of another system answers what is asked of it."""
    database = Database(f"sqlite:///{tmp_path / 'shop.db'}")
    with Sidecar(tmp_path / "sidecar", log="broker") as sidecar:
        async with Client(sidecar.address) as client:
            with pytest.raises(InvalidRequestError, match="UNKNOWN_CALL"):
                await Relay(client, database.url, "shop-{aggregatetype}", "shop").run()
    database.engine.dispose()


@each_code
async def test_what_starts_names_a_proxy(tmp_path: Path, code: grpc.StatusCode, sqlite: Engine) -> None:
    sidecar = Sidecar(tmp_path / "sidecar")
    database = Database(f"sqlite:///{tmp_path / 'shop.db'}")
    async with answering(sidecar.address, code), Client(sidecar.address) as client:
        await names_a_proxy(Relay(client, database.url, "t", "shop").run())  # without a row, too
        database.add(b"1")
        for follow in (True, False):
            await names_a_proxy(Pipe(client, "in", "out", function, name="pipe").run(follow=follow))
            await names_a_proxy(Consumer(client, "t", "c", sqlite, write).run_async(follow=follow))
            await names_a_proxy(Relay(client, database.url, "t", "shop").run(follow=follow))
    assert database.rows() == 1
    database.engine.dispose()
