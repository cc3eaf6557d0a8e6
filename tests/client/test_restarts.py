"""The producer over kills, restarts and restored data of a real sidecar."""

import asyncio
import shutil
import tempfile
from functools import partial

import pytest

from seqdedupe.client import (
    Client,
    DataLossError,
    FencedError,
    InvalidRequestError,
    PositionError,
    ProducerConfig,
    Receipt,
    UnavailableError,
)
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.client.helpers import ids_in_log, read_all, until
from tests.client.proxy import Proxy
from tests.conftest import StartSidecar

TOPIC = "t"


async def test_kill_9_in_mid_flow_loses_and_doubles_nothing(sidecar: Sidecar) -> None:
    kills = 3
    async with (
        Client(sidecar.address) as client,
        client.producer(TOPIC, "p", ProducerConfig(max_batch_rows=20)) as producer,
    ):
        receipts: list[Receipt] = []
        is_over = False

        async def send_all() -> None:
            while not is_over:
                receipts.append(await producer.send(b"%d" % len(receipts)))
                await asyncio.sleep(0)

        def is_done(row: int) -> bool:
            return len(receipts) > row and receipts[row].done()

        sending = asyncio.create_task(send_all())
        for kill in range(kills):
            await until(partial(is_done, len(receipts) + 50))
            await asyncio.to_thread(sidecar.restart)
            assert producer.counters.connections >= kill + 1
        is_over = True
        await sending
        published = [await receipt for receipt in receipts]
    messages = await read_all(sidecar, TOPIC)
    assert len(messages) == len(receipts)
    assert [(m.sequence_id, m.payload) for m in messages] == [(i, b"%d" % i) for i in range(len(receipts))]
    for receipt in published:
        assert receipt.message_id is None or receipt.index == receipt.sequence_id
    assert producer.counters.connections == kills + 1


async def test_a_zombie_that_comes_back_after_its_successor_is_fenced(sidecar: Sidecar) -> None:
    """It was cut off when its successor came and went; its unsent messages must not appear after them."""
    async with Proxy(sidecar.address) as proxy, Client(proxy.address) as cut_off, Client(sidecar.address) as client:
        zombie = cut_off.producer(TOPIC, "p")
        await zombie.open()
        await (await zombie.send(b"alive"))
        proxy.refuses = True
        proxy.cut()
        receipts = [await zombie.send(b"undead") for _ in range(3)]
        async with client.producer(TOPIC, "p") as successor:
            await (await successor.send(b"successor"))
        await asyncio.to_thread(sidecar.restart)
        proxy.refuses = False
        for receipt in receipts:
            with pytest.raises(FencedError):
                await receipt
        with pytest.raises(FencedError):
            await zombie.close()
    assert [m.payload for m in await read_all(sidecar, TOPIC)] == [b"alive", b"successor"]


@pytest.mark.parametrize("restored", [True, False])
async def test_an_older_copy_of_the_data_is_noticed(sidecar: Sidecar, restored: bool) -> None:
    """The control arm restarts with the data that it had, and goes on."""
    copy = sidecar.folder / "copy"
    async with Client(sidecar.address) as client:
        producer = client.producer(TOPIC, "p")
        await producer.open()
        await (await producer.send(b"0"))
        assert await asyncio.to_thread(sidecar.stop) == 0
        await asyncio.to_thread(shutil.copytree, sidecar.data, copy)
        await asyncio.to_thread(sidecar.start)
        for i in range(1, 5):
            await (await producer.send(b"%d" % i))
        await asyncio.to_thread(sidecar.kill)
        receipt = await producer.send(b"5")
        if restored:
            await asyncio.to_thread(shutil.rmtree, sidecar.data)
            await asyncio.to_thread(copy.rename, sidecar.data)
        await asyncio.to_thread(sidecar.start)
        if restored:
            with pytest.raises(DataLossError):
                await receipt
            with pytest.raises(DataLossError):
                await producer.send(b"6")
            with pytest.raises(DataLossError):
                await producer.close()
        else:
            await receipt
            await producer.close()
    assert await ids_in_log(sidecar, TOPIC) == ([0] if restored else list(range(6)))


async def test_opening_fails_where_it_cannot_succeed(start_sidecar: StartSidecar) -> None:
    sidecar = start_sidecar(allow_auto_topic_creation=False)
    async with Client(sidecar.address) as client:
        producer = client.producer("unknown", "p")
        with pytest.raises(InvalidRequestError) as caught:
            await producer.open()
        assert caught.value.reason == "TOPIC_NOT_FOUND"
        with pytest.raises(InvalidRequestError):
            await producer.send(b"")
        with pytest.raises(InvalidRequestError):
            await producer.open()
        await client.admin.create_topic("unknown")
        async with client.producer("unknown", "p") as producer:
            await (await producer.send(b""))


async def test_opening_waits_for_a_sidecar_that_comes_up(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    await asyncio.to_thread(sidecar.kill)
    async with Client(sidecar.address) as client:
        producer = client.producer(TOPIC, "p")
        opening = asyncio.create_task(producer.open())
        await asyncio.to_thread(sidecar.start)
        await opening
        await producer.close()
        await asyncio.to_thread(sidecar.kill)
        monkeypatch.setattr("seqdedupe.client.producer_session.OPEN_TIMEOUT_SECONDS", 0.2)
        with pytest.raises(UnavailableError) as caught:
            await client.producer(TOPIC, "p").open()
        assert caught.value.reason == "UNREACHABLE"


async def test_a_unix_socket_does_as_well(start_sidecar: StartSidecar) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sidecar = start_sidecar(listen=f"unix:{folder}/s")
        async with Client(f"unix:{folder}/s") as client:
            await client.wait_ready(LAST_RESORT_SECONDS)
            async with client.producer(TOPIC, "p") as producer:
                assert (await (await producer.send(b""))).index == 0
        assert sidecar.stop() == 0


async def test_several_sidecars_behind_one_address_are_named(sidecar: Sidecar, start_sidecar: StartSidecar) -> None:
    """As behind a balancer: the next connection leads to another sidecar, with data of its own."""
    other = start_sidecar()
    async with Client(other.address) as there:
        await there.admin.create_topic(TOPIC)
    async with Proxy(sidecar.address) as proxy, Client(proxy.address) as client:
        producer, reader = client.producer(TOPIC, "p"), client.reader(TOPIC, follow=True)
        await producer.open()
        await (await producer.send(b"1"))
        assert (await anext(reader)).payload == b"1"
        proxy.leads_to(other.address)
        proxy.cut()
        for what in (await producer.send(b"2"), asyncio.ensure_future(anext(reader))):
            with pytest.raises((DataLossError, PositionError)) as caught:
                await what
            assert "several sidecars with separate data" in caught.value.hint, caught.value
        await producer.abort()
        await reader.close()
