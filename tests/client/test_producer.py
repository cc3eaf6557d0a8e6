"""The producer against a real sidecar: what it sends is read back, no matter what happens on the way."""

import asyncio
import functools
import operator

import numpy as np
import pytest

from seqdedupe.client import (
    Binary,
    Client,
    DataLossError,
    FencedError,
    InvalidRequestError,
    OutcomeUnknownError,
    Producer,
    ProducerConfig,
    Verdict,
)
from seqdedupe.message_id import Position
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.client.helpers import ids_in_log, read_all, until, until_stored, wait_for
from tests.client.proxy import Proxy


async def test_what_is_sent_is_read_back_field_by_field(shared_sidecar: Sidecar, topic: str) -> None:
    async with Client(shared_sidecar.address) as client, client.producer(topic, "naïve ✓") as producer:
        receipts = [
            await producer.send(
                None if i % 7 == 0 else b"payload %d" % i,
                key=None if i % 3 else f"key {i}",
                event_time=None if i % 2 else 1_700_000_000_000 + i,
                properties={"i": str(i), "ä": ""} if i % 5 == 0 else None,
            )
            for i in range(2500)
        ]
        published = [await receipt for receipt in receipts]
    messages = await read_all(shared_sidecar, topic)
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


async def test_ready_columns_are_read_back(shared_sidecar: Sidecar, topic: str) -> None:
    ids = np.array([3, 5, 2**62], np.int64)
    async with Client(shared_sidecar.address) as client, client.producer(topic, "p") as producer:
        await producer.send(b"zero")
        receipt = await producer.send_batch(Binary.of_all([b"a", b"", b"c"]), ids, keys=[b"k", None, "s"])
        result = await receipt
        assert receipt.done()
        assert [result[row].sequence_id for row in range(3)] == ids.tolist()
        assert result.indexes.tolist() == [1, 2, 3]
        assert producer.last_sequence_id == 2**62
    messages = await read_all(shared_sidecar, topic)
    assert [(m.sequence_id, m.payload, m.key) for m in messages] == [
        (0, b"zero", None),
        (3, b"a", b"k"),
        (5, b"", None),
        (2**62, b"c", b"s"),
    ]


async def test_the_next_session_goes_on_after_the_last_id(shared_sidecar: Sidecar, topic: str) -> None:
    async with Client(shared_sidecar.address) as client:
        async with client.producer(topic, "p") as producer:
            assert (producer.last_sequence_id, producer.persisted_position) == (-1, None)
            for _ in range(5):
                receipt = await producer.send(b"first")
            published = await receipt
        async with client.producer(topic, "p") as producer:
            assert producer.last_sequence_id == producer.persisted_sequence_id == 4
            assert producer.persisted_position == Position(
                published.message_id.ledger_id if published.message_id else 0, published.message_id, 4
            )
            published = await (await producer.send(b"second"))
            assert (published.sequence_id, published.verdict) == (5, Verdict.NOT_DUP)
    assert await ids_in_log(shared_sidecar, topic) == list(range(6))


async def test_an_old_id_is_dup_and_names_the_original_only_if_it_is_there(shared_sidecar: Sidecar, topic: str) -> None:
    async with Client(shared_sidecar.address) as client:
        async with client.producer(topic, "p") as producer:
            originals = [await (await producer.send(b"", i)) for i in (2, 4, 6)]
        async with client.producer(topic, "p") as producer:
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
    assert await ids_in_log(shared_sidecar, topic) == [2, 4, 6, 7]


async def test_flush_and_linger(shared_sidecar: Sidecar, topic: str) -> None:
    async with Client(shared_sidecar.address) as client:
        config = ProducerConfig(linger_ms=60_000)
        async with client.producer(topic, "p", config) as producer:
            first = await producer.send(b"")  # finds nothing in flight, and goes at the loop's next turn
            await asyncio.sleep(0)
            second = await producer.send(b"")
            await first
            assert not second.done()
            await producer.flush()
            assert second.done()
        async with client.producer(topic, "q", ProducerConfig(linger_ms=1)) as producer:
            receipts = [await producer.send(b"") for _ in range(3)]
            for receipt in receipts:  # nobody flushes
                await asyncio.wait_for(wait_for(receipt), LAST_RESORT_SECONDS)


async def test_a_sender_that_never_waits_does_not_keep_the_loop(shared_sidecar: Sidecar, topic: str) -> None:
    """Not even for a receipt, and while there is room for all of it."""
    config = ProducerConfig(max_batch_rows=10, max_in_flight_batches=1_000)
    async with Client(shared_sidecar.address) as client, client.producer(topic, "p", config) as producer:
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count_turns())
        for _ in range(500):
            await producer.send(b"")
        assert turns >= 49  # one after each batch, before the next message
        counting.cancel()
        await producer.flush()
    assert await ids_in_log(shared_sidecar, topic) == list(range(500))


async def test_send_waits_while_too_much_is_in_flight(shared_sidecar: Sidecar, topic: str) -> None:
    """The control is the end: with the answers back, the same sender goes on."""
    config = ProducerConfig(max_batch_rows=10, max_in_flight_batches=4)
    async with (
        Proxy(shared_sidecar.address) as proxy,
        Client(proxy.address) as client,
        client.producer(topic, "p", config) as producer,
    ):
        await (await producer.send(b""))
        proxy.stall()
        sent = 0

        async def send_all() -> None:
            nonlocal sent
            for _ in range(200):
                await producer.send(b"")
                sent += 1

        sending = asyncio.create_task(send_all())
        await until(lambda: len(producer._topic.session.queue) == 4)
        for _ in range(20):
            await asyncio.sleep(0)
        stuck_at = sent
        assert stuck_at <= 40
        await asyncio.sleep(0.05)
        assert sent == stuck_at
        proxy.go_on()
        await sending
    assert await ids_in_log(shared_sidecar, topic) == list(range(201))


async def test_a_waiter_that_is_cancelled_does_not_take_others_with_it(shared_sidecar: Sidecar, topic: str) -> None:
    async with (
        Proxy(shared_sidecar.address) as proxy,
        Client(proxy.address) as client,
        client.producer(topic, "p", ProducerConfig(max_batch_rows=5)) as producer,
    ):
        await (await producer.send(b""))
        proxy.stall()
        receipts = [await producer.send(b"") for _ in range(5)]
        waiters = [asyncio.create_task(wait_for(receipt)) for receipt in receipts]
        await asyncio.sleep(0)
        waiters[0].cancel()
        await until(waiters[0].cancelled)
        proxy.go_on()
        await asyncio.gather(*waiters[1:])
        assert (await receipts[0]).verdict is Verdict.NOT_DUP


@pytest.mark.parametrize("loses_receipts", [True, False])
async def test_lost_receipts_end_in_dup_and_nothing_is_doubled(
    shared_sidecar: Sidecar, topic: str, loses_receipts: bool
) -> None:
    """Without the fault (the control) there is no Dup."""
    config = ProducerConfig(max_batch_rows=10)
    async with Proxy(shared_sidecar.address) as proxy, Client(proxy.address) as client:
        async with client.producer(topic, "p", config) as producer, Client(shared_sidecar.address) as direct:
            receipts = []
            for round_number in range(5):
                proxy.swallows_answers = loses_receipts
                receipts += [await producer.send(b"%d" % i) for i in range(100)]
                producer._topic.builder.seal()
                await until_stored(direct, topic, 100 * (round_number + 1))
                proxy.swallows_answers = False
                if loses_receipts:
                    proxy.cut()
                await producer.flush()
            published = [await receipt for receipt in receipts]
        dups = sum(p.verdict is Verdict.DUP for p in published)
        assert producer.counters.dup >= dups
        assert (dups == 500) if loses_receipts else (producer.counters.dup == 0)
        assert (proxy.swallowed_bytes > 0) == loses_receipts
    messages = await read_all(shared_sidecar, topic)
    assert [m.sequence_id for m in messages] == list(range(500))
    assert [p.message_id for p in published] == [m.message_id for m in messages]


async def test_cut_connections_lose_and_double_nothing(shared_sidecar: Sidecar, topic: str) -> None:
    async with Proxy(shared_sidecar.address) as proxy, Client(proxy.address) as client:
        async with client.producer(topic, "p", ProducerConfig(max_batch_rows=7)) as producer:
            receipts = []
            for i in range(6000):
                receipts.append(await producer.send(b"%d" % i))
                if i % 300 == 299:
                    proxy.cut()
            published = [await receipt for receipt in receipts]
        assert producer.counters.connections > 5
    messages = await read_all(shared_sidecar, topic)
    assert [(m.sequence_id, m.payload) for m in messages] == [(i, b"%d" % i) for i in range(6000)]
    assert [p.index for p in published] == list(range(6000))


async def test_of_two_that_fight_for_a_name_the_older_is_fenced_for_good(shared_sidecar: Sidecar, topic: str) -> None:
    async with Client(shared_sidecar.address) as client:
        older = client.producer(topic, "p")
        await older.open()
        await (await older.send(b"older"))
        async with client.producer(topic, "p") as newer:
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
    assert [m.payload for m in await read_all(shared_sidecar, topic)] == [b"older", b"newer"]


async def test_a_topic_made_anew_is_data_loss(shared_sidecar: Sidecar, topic: str) -> None:
    async with Client(shared_sidecar.address) as client:
        producer = client.producer(topic, "p")
        await producer.open()
        await (await producer.send(b"0"))
        await client.admin.delete_topic(topic)
        await client.admin.create_topic(topic)
        receipt = await producer.send(b"1")
        with pytest.raises((DataLossError, InvalidRequestError)):
            await receipt
        await producer.abort()
    assert await ids_in_log(shared_sidecar, topic) == []


async def test_what_has_no_receipt_when_it_is_aborted_is_of_unknown_outcome(
    shared_sidecar: Sidecar, topic: str
) -> None:
    async with Proxy(shared_sidecar.address) as proxy, Client(proxy.address) as client:
        producer = client.producer(topic, "p")
        with pytest.raises(RuntimeError, match="the body's own"):  # noqa: PT012
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


async def test_a_cancelled_close_leaves_nobody_waiting(shared_sidecar: Sidecar, topic: str) -> None:
    async with Proxy(shared_sidecar.address) as proxy, Client(proxy.address) as client:
        producer = client.producer(topic, "p")
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


async def test_nor_does_a_cancelled_abort(shared_sidecar: Sidecar, topic: str) -> None:
    async with Proxy(shared_sidecar.address) as proxy, Client(proxy.address) as client:
        producer = client.producer(topic, "p")
        await producer.open()
        proxy.refuses = True
        proxy.cut()
        receipt = await producer.send(b"")
        aborting = asyncio.create_task(producer.abort())
        await asyncio.sleep(0)
        aborting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await aborting
        with pytest.raises(OutcomeUnknownError):
            await asyncio.wait_for(receipt, LAST_RESORT_SECONDS)


async def test_the_delivery_timeout_ends_the_waiting(shared_sidecar: Sidecar, topic: str) -> None:
    config = ProducerConfig(delivery_timeout_seconds=0.3)
    async with Proxy(shared_sidecar.address) as proxy, Client(proxy.address) as client:
        producer = client.producer(topic, "p", config)
        await producer.open()
        await (await producer.send(b"in time"))
        proxy.refuses = True
        proxy.cut()
        receipt = await producer.send(b"too late")
        with pytest.raises(
            OutcomeUnknownError, match=r"within 0\.3 seconds: .*up to sequence ID 0 is durable, 1 message has"
        ):
            await receipt
        assert producer.durable_sequence_id == 0
        proxy.refuses = False
        # Nothing may get past what was given up, and nothing is sent any more.
        with pytest.raises(OutcomeUnknownError):
            await producer.send(b"later")
        with pytest.raises(OutcomeUnknownError):
            await producer.close()
        connections = proxy.connections
        async with client.producer(topic, "p", config) as successor:
            assert successor.last_sequence_id == 0
            await successor.send(b"again")
        assert proxy.connections > connections, "the one that was given up is not used again"
    assert await ids_in_log(shared_sidecar, topic) == [0, 1]


async def test_a_stalled_connection_is_given_up(
    shared_sidecar: Sidecar, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seqdedupe.client.stream.ANSWER_TIMEOUT_SECONDS", 0.5)
    async with (
        Proxy(shared_sidecar.address) as proxy,
        Client(proxy.address) as client,
        client.producer(topic, "p") as producer,
    ):
        await (await producer.send(b"0"))
        connections = proxy.connections
        proxy.swallows_answers = True
        receipt = await producer.send(b"1")
        await until(lambda: proxy.connections > connections)
        proxy.swallows_answers = False
        proxy.cut()
        assert (await receipt).verdict is Verdict.DUP
    assert await ids_in_log(shared_sidecar, topic) == [0, 1]


async def test_a_client_that_does_not_read_its_receipts_disturbs_nobody(shared_sidecar: Sidecar, topic: str) -> None:
    config = ProducerConfig(max_in_flight_batches=10_000, max_batch_rows=1, linger_ms=0)
    async with (
        Proxy(shared_sidecar.address) as proxy,
        Client(proxy.address) as client,
        Client(shared_sidecar.address) as direct,
    ):
        deaf = client.producer(topic, "deaf", config)
        await deaf.open()
        await (await deaf.send(b""))
        proxy.stall()
        for _ in range(1000):
            await deaf.send(b"x" * 1000)
        async with asyncio.timeout(LAST_RESORT_SECONDS), direct.producer(topic, "other") as other:
            for _ in range(20):
                assert (await (await other.send(b""))).verdict is Verdict.NOT_DUP
        proxy.go_on()
        await deaf.close()
    by_name: dict[str, list[int]] = {"deaf": [], "other": []}
    for message in await read_all(shared_sidecar, topic):
        by_name[message.producer_name].append(message.sequence_id)
    assert by_name == {"deaf": list(range(1001)), "other": list(range(20))}


@pytest.mark.parametrize("name", ["", "n" * 256, "\ud800"])
async def test_bad_names_are_refused_at_once(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Client("127.0.0.1:1").producer("t", name)
    assert caught.value.reason == "INVALID_NAME"
    with pytest.raises(InvalidRequestError) as caught:
        Client("127.0.0.1:1").producer("no topic", "p")
    assert caught.value.reason == "INVALID_TOPIC_NAME"


async def test_many_tasks_share_a_producer(shared_sidecar: Sidecar, topic: str) -> None:
    async with Client(shared_sidecar.address) as client, client.producer(topic, "p") as producer:

        async def send_some(producer: Producer, task: int) -> list[int]:
            return [(await (await producer.send(b"%d" % task))).sequence_id for _ in range(20)]

        ids = await asyncio.gather(*(send_some(producer, task) for task in range(30)))
    assert sorted(functools.reduce(operator.iadd, ids, [])) == list(range(600))
    messages = await read_all(shared_sidecar, topic)
    assert [m.sequence_id for m in messages] == list(range(600))
    for task, sent in enumerate(ids):
        assert [m.sequence_id for m in messages if m.payload == b"%d" % task] == sent
