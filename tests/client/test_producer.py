"""The producer against a real sidecar: what it sends is read back, whatever happens on the way."""

import asyncio
import shutil

import numpy as np
import pytest

from seqdedupe.client import (
    Binary,
    Client,
    DataLossError,
    FencedError,
    InvalidRequestError,
    Message,
    OutcomeUnknownError,
    Producer,
    ProducerConfig,
    Receipt,
    UnavailableError,
    Verdict,
)
from seqdedupe.message_id import Position
from tests.client.proxy import Proxy
from tests.conftest import StartSidecar
from tests.sidecar import Sidecar

TOPIC = "t"


async def read_all(sidecar: Sidecar, topic: str = TOPIC) -> list[Message]:
    async with Client(sidecar.address) as client, client.reader(topic) as reader:
        return [message async for message in reader]


async def ids_in_log(sidecar: Sidecar) -> list[int]:
    return [message.sequence_id for message in await read_all(sidecar)]


async def until(condition: object, timeout_seconds: float = 30) -> None:
    async with asyncio.timeout(timeout_seconds):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.005)


async def test_what_is_sent_is_read_back_field_by_field(sidecar: Sidecar) -> None:
    async with Client(sidecar.address) as client, client.producer(TOPIC, "naïve ✓") as producer:
        receipts: list[Receipt] = []
        for i in range(2500):
            receipts.append(
                await producer.send(
                    None if i % 7 == 0 else b"payload %d" % i,
                    key=None if i % 3 else f"key {i}",
                    event_time=None if i % 2 else 1_700_000_000_000 + i,
                    properties={"i": str(i), "ä": ""} if i % 5 == 0 else None,
                )
            )
        published = [await receipt for receipt in receipts]
    messages = await read_all(sidecar)
    assert len(messages) == 2500
    for i, (message, receipt) in enumerate(zip(messages, published, strict=True)):
        assert message.payload == (None if i % 7 == 0 else b"payload %d" % i)
        assert message.key == (None if i % 3 else f"key {i}".encode())
        assert message.event_time_ms == (0 if i % 2 else 1_700_000_000_000 + i)
        assert message.properties == ({"i": str(i), "ä": ""} if i % 5 == 0 else {})
        assert message.producer_name == "naïve ✓"
        assert receipt.verdict is Verdict.NOT_DUP
        assert (message.sequence_id, message.index, message.message_id) == (i, receipt.index, receipt.message_id)
        assert receipt.sequence_id == i


async def test_ready_columns_are_read_back(sidecar: Sidecar) -> None:
    ids = np.array([3, 5, 2**62], np.int64)
    async with Client(sidecar.address) as client, client.producer(TOPIC, "p") as producer:
        await producer.send(b"zero")
        receipt = await producer.send_batch(Binary.of_all([b"a", b"", b"c"]), ids, keys=[b"k", None, "s"])
        result = await receipt
        assert receipt.done()
        assert [result[row].sequence_id for row in range(3)] == ids.tolist()
        assert result.indexes.tolist() == [1, 2, 3]
        assert producer.last_sequence_id == 2**62
    messages = await read_all(sidecar)
    assert [(m.sequence_id, m.payload, m.key) for m in messages] == [
        (0, b"zero", None),
        (3, b"a", b"k"),
        (5, b"", None),
        (2**62, b"c", b"s"),
    ]


async def test_the_next_session_goes_on_behind_the_last_id(sidecar: Sidecar) -> None:
    async with Client(sidecar.address) as client:
        async with client.producer(TOPIC, "p") as producer:
            assert (producer.last_sequence_id, producer.persisted_position) == (-1, None)
            for _ in range(5):
                receipt = await producer.send(b"first")
            published = await receipt
        async with client.producer(TOPIC, "p") as producer:
            assert producer.last_sequence_id == producer.persisted_sequence_id == 4
            assert producer.persisted_position == Position(
                published.message_id.ledger_id if published.message_id else 0, published.message_id, 4
            )
            published = await (await producer.send(b"second"))
            assert (published.sequence_id, published.verdict) == (5, Verdict.NOT_DUP)
    assert await ids_in_log(sidecar) == list(range(6))


async def test_an_old_id_is_dup_and_names_the_original_only_if_it_is_there(sidecar: Sidecar) -> None:
    async with Client(sidecar.address) as client:
        async with client.producer(TOPIC, "p") as producer:
            originals = [await (await producer.send(b"", i)) for i in (2, 4, 6)]
        async with client.producer(TOPIC, "p") as producer:
            again = [await producer.send(b"again", i) for i in (3, 4, 5, 6, 7)]
            published = [await receipt for receipt in again]
            assert [p.verdict for p in published] == [Verdict.DUP] * 4 + [Verdict.NOT_DUP]
            assert [p.message_id for p in published[:4]] == [
                None,
                originals[1].message_id,
                None,
                originals[2].message_id,
            ]
            assert [p.index for p in published] == [-1, 1, -1, 2, 3]
            with pytest.raises(InvalidRequestError) as caught:
                await producer.send(b"", 7)
            assert caught.value.reason == "NOT_ASCENDING"
    assert await ids_in_log(sidecar) == [2, 4, 6, 7]


async def test_flush_and_linger(sidecar: Sidecar) -> None:
    async with Client(sidecar.address) as client:
        config = ProducerConfig(linger_ms=60_000)
        async with client.producer(TOPIC, "p", config) as producer:
            first, second = await producer.send(b""), await producer.send(b"")
            await first  # found nothing in flight
            assert not second.done()
            await producer.flush()
            assert second.done()
        async with client.producer(TOPIC, "q", ProducerConfig(linger_ms=1)) as producer:
            receipts = [await producer.send(b"") for _ in range(3)]
            for receipt in receipts:  # nobody flushes
                await asyncio.wait_for(_wait_for(receipt), 30)


async def _wait_for(receipt: Receipt) -> None:
    await receipt


async def test_send_waits_while_too_much_is_in_flight(sidecar: Sidecar) -> None:
    """The control is the end: with the answers back, the same sender goes on."""
    config = ProducerConfig(max_batch_rows=10, max_in_flight_batches=4)
    async with Proxy(sidecar.address) as proxy, Client(proxy.address) as client:
        async with client.producer(TOPIC, "p", config) as producer:
            await (await producer.send(b""))
            proxy.stall()
            sent = 0

            async def send_all() -> None:
                nonlocal sent
                for _ in range(200):
                    await producer.send(b"")
                    sent += 1

            sending = asyncio.create_task(send_all())
            await until(lambda: len(producer._session.outbox) == 4)
            for _ in range(20):
                await asyncio.sleep(0)
            stuck_at = sent
            assert stuck_at <= 40
            await asyncio.sleep(0.05)
            assert sent == stuck_at
            proxy.go_on()
            await sending
    assert await ids_in_log(sidecar) == list(range(201))


async def test_a_waiter_that_is_cancelled_does_not_take_others_with_it(sidecar: Sidecar) -> None:
    async with Proxy(sidecar.address) as proxy, Client(proxy.address) as client:
        async with client.producer(TOPIC, "p", ProducerConfig(max_batch_rows=5)) as producer:
            await (await producer.send(b""))
            proxy.stall()
            receipts = [await producer.send(b"") for _ in range(5)]
            waiters = [asyncio.create_task(_wait_for(receipt)) for receipt in receipts]
            await asyncio.sleep(0)
            waiters[0].cancel()
            await until(waiters[0].cancelled)
            proxy.go_on()
            await asyncio.gather(*waiters[1:])
            assert (await receipts[0]).verdict is Verdict.NOT_DUP


@pytest.mark.parametrize("loses_receipts", [True, False])
async def test_lost_receipts_end_in_dup_and_nothing_is_doubled(sidecar: Sidecar, loses_receipts: bool) -> None:
    """Without the fault (the control) there is no Dup."""
    config = ProducerConfig(max_batch_rows=10)
    async with Proxy(sidecar.address) as proxy, Client(proxy.address) as client:
        async with client.producer(TOPIC, "p", config) as producer, Client(sidecar.address) as direct:
            receipts = []
            for round_number in range(5):
                proxy.swallows_answers = loses_receipts
                receipts += [await producer.send(b"%d" % i) for i in range(100)]
                producer._builder.seal()

                async def is_stored(count: int = 100 * (round_number + 1)) -> bool:
                    return (await direct.admin.topic(TOPIC)).last.index + 1 == count

                while not await is_stored():
                    await asyncio.sleep(0.005)
                proxy.swallows_answers = False
                if loses_receipts:
                    proxy.cut()
                await producer.flush()
            published = [await receipt for receipt in receipts]
        dups = sum(p.verdict is Verdict.DUP for p in published)
        assert producer.counters.dup >= dups
        assert (dups == 500) if loses_receipts else (producer.counters.dup == 0)
        assert (proxy.swallowed_bytes > 0) == loses_receipts
    messages = await read_all(sidecar)
    assert [m.sequence_id for m in messages] == list(range(500))
    assert [p.message_id for p in published] == [m.message_id for m in messages]


async def test_cut_connections_lose_and_double_nothing(sidecar: Sidecar) -> None:
    async with Proxy(sidecar.address) as proxy, Client(proxy.address) as client:
        async with client.producer(TOPIC, "p", ProducerConfig(max_batch_rows=7)) as producer:
            receipts = []
            for i in range(6000):
                receipts.append(await producer.send(b"%d" % i))
                if i % 300 == 299:
                    proxy.cut()
            published = [await receipt for receipt in receipts]
        assert producer.counters.connections > 5
    messages = await read_all(sidecar)
    assert [(m.sequence_id, m.payload) for m in messages] == [(i, b"%d" % i) for i in range(6000)]
    assert [p.index for p in published] == list(range(6000))


async def test_kill_9_in_mid_flow_loses_and_doubles_nothing(sidecar: Sidecar) -> None:
    kills, most = 8, 2000
    async with Client(sidecar.address) as client:
        async with client.producer(TOPIC, "p", ProducerConfig(max_batch_rows=20)) as producer:
            receipts: list[Receipt] = []
            is_over = False

            async def send_all() -> None:
                while not is_over:
                    receipts.append(await producer.send(b"%d" % len(receipts)))
                    await asyncio.sleep(0)

            sending = asyncio.create_task(send_all())
            for kill in range(kills):
                seen = len(receipts)
                await until(lambda seen=seen: len(receipts) > seen + 50 and receipts[seen + 50].done())
                await asyncio.to_thread(sidecar.restart)
                assert producer.counters.connections >= kill + 1
            is_over = True
            await sending
            published = [await receipt for receipt in receipts]
    messages = await read_all(sidecar)
    assert len(messages) == len(receipts) > most / 10
    assert [(m.sequence_id, m.payload) for m in messages] == [(i, b"%d" % i) for i in range(len(receipts))]
    for receipt in published:
        assert receipt.message_id is None or receipt.index == receipt.sequence_id
    assert producer.counters.connections == kills + 1


async def test_of_two_that_fight_for_a_name_the_older_is_fenced_for_good(sidecar: Sidecar) -> None:
    async with Client(sidecar.address) as client:
        older = client.producer(TOPIC, "p")
        await older.open()
        await (await older.send(b"older"))
        async with client.producer(TOPIC, "p") as newer:
            lost = await older.send(b"too late")
            with pytest.raises(FencedError):
                await lost
            for _ in range(3):
                with pytest.raises(FencedError):
                    await older.send(b"still too late")
            with pytest.raises(FencedError):
                await older.flush()
            assert (await (await newer.send(b"newer"))).verdict is Verdict.NOT_DUP
        with pytest.raises(FencedError):
            await older.close()
    assert [m.payload for m in await read_all(sidecar)] == [b"older", b"newer"]


async def test_a_zombie_that_comes_back_after_its_successor_is_fenced(sidecar: Sidecar) -> None:
    """It was cut off when its successor came and went; its unsent messages must not appear behind it."""
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
    assert [m.payload for m in await read_all(sidecar)] == [b"alive", b"successor"]


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
    assert await ids_in_log(sidecar) == ([0] if restored else list(range(6)))


async def test_a_topic_made_anew_is_data_loss(sidecar: Sidecar) -> None:
    async with Client(sidecar.address) as client:
        producer = client.producer(TOPIC, "p")
        await producer.open()
        await (await producer.send(b"0"))
        await client.admin.delete_topic(TOPIC)
        await client.admin.create_topic(TOPIC)
        receipt = await producer.send(b"1")
        with pytest.raises((DataLossError, InvalidRequestError)):
            await receipt
        await producer.abort()
    assert await ids_in_log(sidecar) == []


async def test_what_has_no_receipt_when_it_is_aborted_is_of_unknown_outcome(sidecar: Sidecar) -> None:
    async with Proxy(sidecar.address) as proxy, Client(proxy.address) as client:
        producer = client.producer(TOPIC, "p")
        with pytest.raises(RuntimeError, match="the body's own"):
            async with producer:
                before = await (await producer.send(b"before"))
                proxy.refuses = True
                proxy.cut()
                receipts = [await producer.send(b"") for _ in range(3)]
                raise RuntimeError("the body's own")
        assert before.verdict is Verdict.NOT_DUP
        for receipt in receipts:
            with pytest.raises(OutcomeUnknownError):
                await receipt
        with pytest.raises((OutcomeUnknownError, InvalidRequestError)):
            await producer.send(b"")


async def test_a_cancelled_close_leaves_nobody_waiting(sidecar: Sidecar) -> None:
    async with Proxy(sidecar.address) as proxy, Client(proxy.address) as client:
        producer = client.producer(TOPIC, "p")
        await producer.open()
        proxy.refuses = True
        proxy.cut()
        receipt = await producer.send(b"")
        closing = asyncio.create_task(producer.close())
        await asyncio.sleep(0.01)
        assert not closing.done()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(OutcomeUnknownError):
            await receipt


async def test_the_delivery_timeout_ends_the_waiting(sidecar: Sidecar) -> None:
    config = ProducerConfig(delivery_timeout_seconds=0.3)
    async with Proxy(sidecar.address) as proxy, Client(proxy.address) as client:
        producer = client.producer(TOPIC, "p", config)
        await producer.open()
        await (await producer.send(b"in time"))
        proxy.refuses = True
        proxy.cut()
        receipt = await producer.send(b"too late")
        with pytest.raises(OutcomeUnknownError, match="0.3"):
            await receipt
        with pytest.raises(OutcomeUnknownError):
            await producer.close()


async def test_a_stalled_connection_is_given_up(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqdedupe.client.session.ANSWER_TIMEOUT_SECONDS", 0.5)
    async with Proxy(sidecar.address) as proxy, Client(proxy.address) as client:
        async with client.producer(TOPIC, "p") as producer:
            await (await producer.send(b"0"))
            proxy.swallows_answers = True
            receipt = await producer.send(b"1")
            await until(lambda: proxy.connections > 1)
            proxy.swallows_answers = False
            proxy.cut()
            assert (await receipt).verdict is Verdict.DUP
    assert await ids_in_log(sidecar) == [0, 1]


async def test_a_client_that_does_not_read_its_receipts_disturbs_nobody(sidecar: Sidecar) -> None:
    config = ProducerConfig(max_in_flight_batches=10_000, max_batch_rows=1, linger_ms=0)
    async with Proxy(sidecar.address) as proxy, Client(proxy.address) as client, Client(sidecar.address) as direct:
        deaf = client.producer(TOPIC, "deaf", config)
        await deaf.open()
        await (await deaf.send(b""))
        proxy.stall()
        for _ in range(1000):
            await deaf.send(b"x" * 1000)
        async with asyncio.timeout(30), direct.producer(TOPIC, "other") as other:
            for _ in range(20):
                assert (await (await other.send(b""))).verdict is Verdict.NOT_DUP
        proxy.go_on()
        await deaf.close()
    by_name: dict[str, list[int]] = {"deaf": [], "other": []}
    for message in await read_all(sidecar):
        by_name[message.producer_name].append(message.sequence_id)
    assert by_name == {"deaf": list(range(1001)), "other": list(range(20))}


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
        monkeypatch.setattr("seqdedupe.client.session.OPEN_TIMEOUT_SECONDS", 0.2)
        with pytest.raises(UnavailableError) as caught:
            await client.producer(TOPIC, "p").open()
        assert caught.value.reason == "UNREACHABLE"


@pytest.mark.parametrize("name", ["", "n" * 256, "\ud800"])
async def test_bad_names_are_refused_at_once(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Client("127.0.0.1:1").producer(TOPIC, name)
    assert caught.value.reason == "INVALID_NAME"
    with pytest.raises(InvalidRequestError) as caught:
        Client("127.0.0.1:1").producer("no topic", "p")
    assert caught.value.reason == "INVALID_TOPIC_NAME"


async def test_many_tasks_share_a_producer(sidecar: Sidecar) -> None:
    async with Client(sidecar.address) as client, client.producer(TOPIC, "p") as producer:

        async def send_some(producer: Producer, task: int) -> list[int]:
            return [(await (await producer.send(b"%d" % task))).sequence_id for _ in range(20)]

        ids = await asyncio.gather(*(send_some(producer, task) for task in range(30)))
    assert sorted(sum(ids, [])) == list(range(600))
    messages = await read_all(sidecar)
    assert [m.sequence_id for m in messages] == list(range(600))
    for task, sent in enumerate(ids):
        assert [m.sequence_id for m in messages if m.payload == b"%d" % task] == sent
