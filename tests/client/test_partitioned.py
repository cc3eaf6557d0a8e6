"""Producers of partitioned topics against a real sidecar: what is sent is in its partition once, no matter what
happens."""

import asyncio
import itertools
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.client import (
    Binary,
    Client,
    FencedError,
    InvalidRequestError,
    Message,
    OutcomeUnknownError,
    Producer,
    ProducerConfig,
    Verdict,
    blocking,
)
from seqdedupe.client.partitioned_ids import Numbering, SettledIds
from seqdedupe.client.pending import PendingBatch
from seqdedupe.client.producer import PartitionedProducer
from seqdedupe.errors import error
from seqdedupe.names import partition_of
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import admin_pb2
from tests.client.helpers import read_all

PARTITIONS = 3
SMALL = ProducerConfig(max_batch_rows=5)


@pytest.fixture
async def made(shared_sidecar: Sidecar, topic: str) -> str:
    """A partitioned topic."""
    async with Client(shared_sidecar.address) as client:
        await client.admin.create_topic(topic, partitions=PARTITIONS)
    return topic


async def read_parts(sidecar: Sidecar, topic: str) -> list[list[Message]]:
    return [await read_all(sidecar, f"{topic}-partition-{k}") for k in range(PARTITIONS)]


def key(i: int) -> bytes:
    return b"key %d" % (i * 7 % 23)


def of_key(i: int) -> int:
    return partition_of(key(i), b"", PARTITIONS)


def check_once(parts: list[list[Message]], ids: list[int], name: str = "p") -> None:
    """Each of these IDs is there once, with its payload, in the partition of its key, in order."""
    for k, messages in enumerate(parts):
        assert [m.sequence_id for m in messages] == [i for i in ids if of_key(i) == k]
        assert all(m.payload == b"%d" % m.sequence_id and m.key == key(m.sequence_id) for m in messages)
        assert {m.producer_name for m in messages} <= {name}


async def test_each_message_goes_to_the_partition_of_its_key(shared_sidecar: Sidecar, made: str) -> None:
    async with Client(shared_sidecar.address) as client, client.producer(made, "p", SMALL) as producer:
        receipts = [await producer.send(b"%d" % i, key=key(i)) for i in range(100)]
        published = [await receipt for receipt in receipts]
        assert producer.last_sequence_id == producer.durable_sequence_id == 99
        assert producer.counters.not_dup == 100
    parts = await read_parts(shared_sidecar, made)
    check_once(parts, list(range(100)))
    for i, one in enumerate(published):
        assert (one.sequence_id, one.partition, one.verdict) == (i, of_key(i), Verdict.NOT_DUP)
        found = parts[one.partition][one.index]
        assert (found.sequence_id, found.message_id) == (i, one.message_id)


async def test_without_a_key_the_name_decides_and_never_the_turn(shared_sidecar: Sidecar, made: str) -> None:
    names = ["a", "b", "c", "d", "producer-1"]
    async with Client(shared_sidecar.address) as client:
        for name in names:
            async with client.producer(made, name) as producer:
                for _ in range(5):
                    await producer.send(b"x")
    for k, messages in enumerate(await read_parts(shared_sidecar, made)):
        expected = [name for name in names if partition_of(None, name.encode(), PARTITIONS) == k]
        assert sorted({m.producer_name for m in messages}) == sorted(expected)
        assert len(messages) == 5 * len(expected)


async def test_ready_columns_are_taken_apart_and_receipts_put_together(shared_sidecar: Sidecar, made: str) -> None:
    ids = np.arange(10, 500, 7)
    keys: list[bytes | str | None] = [None if i % 5 == 0 else "" if i % 5 == 1 else key(i) for i in ids.tolist()]
    async with Client(shared_sidecar.address) as client, client.producer(made, "p") as producer:
        await producer.send(b"first", 3)
        receipt = await producer.send_batch(
            Binary.of_all([b"%d" % i for i in ids]),
            ids,
            keys=keys,
            event_times_ms=ids * 1000,
            properties=[{"i": str(i)} if i % 2 else None for i in ids.tolist()],
        )
        result = await receipt
        with pytest.raises(InvalidRequestError, match="not above"):
            await producer.send_batch([b"x"], [int(ids[-1])])
        after = await (await producer.send_batch([b"last"]))
        assert after.sequence_ids.tolist() == [ids[-1] + 1]
    parts = await read_parts(shared_sidecar, made)
    for row, i in enumerate(ids.tolist()):
        given = keys[row]
        given_key = given.encode() if isinstance(given, str) else given
        assert result[row].partition == partition_of(given_key, b"p", PARTITIONS)
        found = parts[result[row].partition][result[row].index]
        assert (found.sequence_id, found.payload, found.key) == (i, b"%d" % i, given_key)
        assert (found.event_time_ms, found.properties) == (i * 1000, {"i": str(i)} if i % 2 else {})


@asynccontextmanager
async def standing_still(client: Client, topic: str, partition: int) -> AsyncIterator[Producer]:
    """A producer of which one partition gets nothing any more, as if its connection were stuck; then it is gone."""
    producer = client.producer(topic, "p", SMALL)
    await producer.open()
    assert isinstance(producer._sends, PartitionedProducer)
    session: Any = producer._sends.parts[partition].session
    session.next_frame = lambda: None
    try:
        yield producer
    finally:
        await producer.abort()


async def stored_up_to(client: Client, topic: str, partition: int) -> int:
    return max(p.persisted for p in await client.admin.producers(f"{topic}-partition-{partition}"))


async def crash(sidecar: Sidecar, topic: str, count: int = 60) -> None:
    """Sends this many messages with keys, half of which are settled everywhere; then partition 1 stands still."""
    async with Client(sidecar.address) as client, client.producer(topic, "p", SMALL) as producer:
        for i in range(count // 2):
            await producer.send(b"%d" % i, key=key(i))
            if i % 10 == 9:
                await producer.flush()
    async with Client(sidecar.address) as client, standing_still(client, topic, 1) as producer:
        resumed_after = producer.persisted_sequence_id
        receipts = [await producer.send(b"%d" % i, i, key=key(i)) for i in range(resumed_after + 1, count)]
        for receipt, i in zip(receipts, range(resumed_after + 1, count), strict=True):
            if of_key(i) != 1:
                await receipt


async def resume(sidecar: Sidecar, topic: str, after: int | None, count: int = 60) -> tuple[int, int]:
    """Goes on after what the producer says, or after this; where that was, and the highest ID that was there."""
    async with Client(sidecar.address) as client, client.producer(topic, "p", SMALL) as producer:
        resumed_after = producer.persisted_sequence_id if after is None else after
        for i in range(resumed_after + 1, count):
            await producer.send(b"%d" % i, i, key=key(i))
        return resumed_after, max(one.sequence_id for one in producer.persisted)


async def test_who_resumes_sends_what_any_partition_lacks_and_nothing_twice(shared_sidecar: Sidecar, made: str) -> None:
    await crash(shared_sidecar, made)
    resumed_after, highest = await resume(shared_sidecar, made, None)
    assert 10 <= resumed_after < 30 < highest
    check_once(await read_parts(shared_sidecar, made), list(range(60)))


async def test_control_who_resumes_after_the_highest_id_loses_messages(shared_sidecar: Sidecar, made: str) -> None:
    """As a partitioned producer of Pulsar would."""
    await crash(shared_sidecar, made)
    async with Client(shared_sidecar.address) as client:
        highest = max([await stored_up_to(client, made, k) for k in range(PARTITIONS)])
    await resume(shared_sidecar, made, highest)
    parts = await read_parts(shared_sidecar, made)
    assert len(parts[1]) < sum(of_key(i) == 1 for i in range(60))


async def test_control_who_says_too_early_that_all_is_settled_loses_messages(
    shared_sidecar: Sidecar, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(SettledIds, "up_to", lambda settled: settled._last_sent)
        await crash(shared_sidecar, made)
    await resume(shared_sidecar, made, None)
    parts = await read_parts(shared_sidecar, made)
    assert len(parts[1]) < sum(of_key(i) == 1 for i in range(60))


async def test_a_new_message_never_gets_the_id_of_one_that_is_stored(shared_sidecar: Sidecar, made: str) -> None:
    await crash(shared_sidecar, made)
    async with Client(shared_sidecar.address) as client, client.producer(made, "p") as producer:
        highest = max(one.sequence_id for one in producer.persisted)
        for send in (producer.send(b"new"), producer.send_batch([b"new"])):
            with pytest.raises(InvalidRequestError, match=f"up to {highest} are stored already"):
                await send
        await (await producer.send(b"x", highest))
        # From there on all is new.
        assert (await (await producer.send(b"new"))).sequence_id == highest + 1


async def test_a_partition_without_messages_does_not_hold_the_others_back(shared_sidecar: Sidecar, made: str) -> None:
    one_key = next(key(i) for i in range(23) if of_key(i) == 2)
    async with Client(shared_sidecar.address) as client:
        async with client.producer(made, "p") as producer:
            for _ in range(10):
                await (await producer.send(b"x", key=one_key))
        async with client.producer(made, "p") as producer:
            assert [one.sequence_id for one in producer.persisted] == [-1, -1, 9]
            assert producer.persisted_sequence_id == 8
            assert (await (await producer.send(b"x", 9, key=one_key))).verdict is Verdict.DUP


async def test_kills_of_the_sidecar(start_sidecar: Callable[..., Sidecar], topic: str) -> None:
    """The producer goes on by itself; then another process goes on where it says."""
    sidecar = start_sidecar()
    sent = 0
    async with Client(sidecar.address) as client:
        await client.admin.create_topic(topic, partitions=PARTITIONS)
        for _ in range(3):
            async with client.producer(topic, "p", SMALL) as producer:
                assert producer.persisted_sequence_id <= sent
                sent = producer.persisted_sequence_id + 1
                for turn in range(2):
                    for _ in range(200):
                        await producer.send(b"%d" % sent, sent, key=key(sent))
                        sent += 1
                    if turn == 0:
                        await asyncio.to_thread(sidecar.kill)
                        await asyncio.to_thread(sidecar.start)
    check_once(await read_parts(sidecar, topic), list(range(sent)))


async def test_the_later_one_takes_all_partitions_over(shared_sidecar: Sidecar, made: str) -> None:
    async with Client(shared_sidecar.address) as client:
        old = client.producer(made, "p", SMALL)
        await old.open()
        for i in range(30):
            await (await old.send(b"%d" % i, key=key(i)))
        async with client.producer(made, "p", SMALL) as new:

            async def go_on() -> None:
                for i in range(30, 60):
                    await (await old.send(b"%d" % i, key=key(i)))

            with pytest.raises(FencedError):
                await go_on()
            # What has failed once takes nothing more, in no partition.
            for i in range(30, 40):
                with pytest.raises(FencedError):
                    await old.send(b"no", key=key(i))
            after = new.persisted_sequence_id
            for i in range(after + 1, 60):
                await new.send(b"%d" % i, i, key=key(i))
        with pytest.raises(FencedError):
            await old.close()
    check_once(await read_parts(shared_sidecar, made), list(range(60)))


async def test_one_partition_that_refuses_ends_the_producer(shared_sidecar: Sidecar, made: str) -> None:
    """What was sent to the others has honest receipts, and who opens it again goes on before what was refused."""
    reject = admin_pb2.TopicPolicy(gap=admin_pb2.GAP_POLICY_REJECT)
    async with Client(shared_sidecar.address) as client:
        producer = client.producer(made, "p", SMALL)
        await producer.open()
        for i in range(20):
            await (await producer.send(b"%d" % i, key=key(i)))
        await client.admin.set_policy(f"{made}-partition-1", reject)
        receipts = []

        async def send_on() -> None:
            for i in itertools.count(20):
                receipts.append(await producer.send(b"%d" % i, key=key(i)))
                await asyncio.sleep(0)

        with pytest.raises(InvalidRequestError) as refused:
            await send_on()
        assert refused.value.reason == "GAP"
        ends = await asyncio.gather(*receipts, return_exceptions=True)
        stored = {i for i, end in enumerate(ends, 20) if not isinstance(end, BaseException)}
        assert {of_key(i) for i in range(20, 20 + len(ends)) if i not in stored} == {1}
        first_failed = min(i for i in range(20, 20 + len(ends)) if i not in stored)
        assert producer.durable_sequence_id < first_failed
        with pytest.raises(InvalidRequestError):
            await producer.close()
        with pytest.raises(InvalidRequestError, match="over all partitions"):
            await client.producer(made, "p").open()
        await client.admin.remove_policy(f"{made}-partition-1")
    resumed_after, _ = await resume(shared_sidecar, made, None, 20 + len(ends))
    assert resumed_after < first_failed
    check_once(await read_parts(shared_sidecar, made), list(range(20 + len(ends))))


async def test_a_send_that_is_given_up_was_not_sent(shared_sidecar: Sidecar, made: str) -> None:
    config = ProducerConfig(max_batch_rows=1, max_in_flight_batches=1)
    async with Client(shared_sidecar.address) as client, client.producer(made, "p", config) as producer:
        assert isinstance(producer._sends, PartitionedProducer)
        stuck: Any = producer._sends.parts[0].session
        next_frame = stuck.next_frame
        stuck.next_frame = lambda: None
        keys = [
            next(f"{k}-{i}" for i in itertools.count() if partition_of(f"{k}-{i}".encode(), b"", 3) == k)
            for k in range(3)
        ]
        await producer.send(b"first", key=keys[0])
        waiting = asyncio.ensure_future(producer.send(b"given up", key=keys[0]))
        behind = asyncio.ensure_future(producer.send(b"second", key=keys[1]))
        await asyncio.sleep(0.01)
        # Nobody passes it: IDs rise in the order of the calls.
        assert not behind.done()
        waiting.cancel()
        assert (await (await behind)).sequence_id == 1
        # One that was not confirmed holds back what is said to be settled.
        assert producer.durable_sequence_id == -1
        stuck.next_frame = next_frame
        stuck._stream.ready(stuck)
    parts = await read_parts(shared_sidecar, made)
    assert [m.payload for messages in parts for m in messages] == [b"first", b"second"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60), st.integers(-1, 5))
def test_what_is_settled_is_never_said_too_early_nor_forgotten(steps: list[tuple[int, int]], after: int) -> None:
    """Against the definition: up to which ID all that was sent has its receipt."""
    settled = SettledIds()
    settled._sweep_at = 4
    settled.resume(after)
    batches: list[tuple[list[int], PendingBatch]] = []
    next_id = after + 1
    for what, k in steps:
        if what == 0 or not batches:
            next_id += k
            batches.append(([next_id], PendingBatch()))
            settled.sent(next_id, [batches[-1][1]], next_id)
            next_id += 1
        elif what == 1:
            # One more in a batch that is being gathered.
            ids, pending = batches[k % len(batches)]
            if not pending.durable:
                ids.append(next_id)
                settled.sent(next_id, [], next_id)
                next_id += 1
        elif what == 2:
            batches[k % len(batches)][1].become_durable()
        elif k == 0 and not batches[-1][1].durable:
            batches[-1][1].fail(error("FENCED", "no"))
        open_ids = [i for ids, pending in batches for i in ids if not pending.durable or pending.failed]
        firsts = [ids[0] for ids, pending in batches if not pending.durable or pending.failed]
        last = max((i for ids, _ in batches for i in ids), default=after)
        assert settled.up_to() == max(min(firsts, default=last + 1) - 1, after)
        assert all(settled.up_to() < i for i in open_ids)


def test_ids_are_checked_over_all_partitions() -> None:
    numbers = Numbering("p", b"p", 3, ProducerConfig())
    numbers.resume(10, 10)
    assert [numbers.next_id(None), numbers.next_id(4)] == [11, 4]
    numbers.sent(4, [])
    assert (numbers.next_id(None), numbers.last_sequence_id) == (11, 10)
    with pytest.raises(InvalidRequestError, match="not above"):
        numbers.next_id(4)
    with pytest.raises(InvalidRequestError, match="not a sequence ID"):
        numbers.next_id(2**63)


class TestThreads:
    """The same of the client for threads."""

    def test_what_is_sent_is_in_its_partition_once(self, shared_sidecar: Sidecar, topic: str) -> None:
        with blocking.Client(shared_sidecar.address) as client:
            client.admin.create_topic(topic, partitions=PARTITIONS)
            with client.producer(topic, "p", SMALL) as producer:
                receipts = [producer.send(b"%d" % i, key=key(i)) for i in range(50)]
                columns = producer.send_batch(
                    [b"%d" % i for i in range(50, 100)], keys=[key(i) for i in range(50, 100)]
                )
                assert [r.result(LAST_RESORT_SECONDS).partition for r in receipts] == [of_key(i) for i in range(50)]
                result = columns.result(LAST_RESORT_SECONDS)
                assert result.partitions.tolist() == [of_key(i) for i in range(50, 100)]
                assert columns.done()
                producer.flush()
                assert producer.durable_sequence_id == 99
            with client.producer(topic, "p", SMALL) as producer:
                after = producer.persisted_sequence_id
                assert max(one.sequence_id for one in producer.persisted) == 99
                for i in range(after + 1, 120):
                    producer.send(b"%d" % i, i, key=key(i))
            with pytest.raises(InvalidRequestError, match="not open"):
                producer.send(b"late", 200)
        check_once(asyncio.run(read_parts(shared_sidecar, topic)), list(range(120)))

    def test_threads_share_it(self, shared_sidecar: Sidecar, topic: str) -> None:
        with blocking.Client(shared_sidecar.address) as client:
            client.admin.create_topic(topic, partitions=PARTITIONS)
            with client.producer(topic, "p", SMALL) as producer:
                sent: list[tuple[int, bytes]] = []

                def work(seed: int) -> None:
                    for i in range(100):
                        text = b"%d-%d" % (seed, i)
                        receipt = producer.send(text, key=b"%d" % random.Random(i).randrange(30))
                        sent.append(
                            (receipt.result(LAST_RESORT_SECONDS).sequence_id, text) if i % 20 == 0 else (-1, text)
                        )

                threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        parts = asyncio.run(read_parts(shared_sidecar, topic))
        found = {m.sequence_id: m.payload for messages in parts for m in messages}
        assert sorted(found) == list(range(400))
        assert sorted(map(bytes, found.values())) == sorted(text for _, text in sent)  # type: ignore[arg-type]
        assert all(found[i] == text for i, text in sent if i >= 0)
        for messages in parts:
            assert [m.sequence_id for m in messages] == sorted(m.sequence_id for m in messages)

    @pytest.mark.parametrize("at", ["next_id", "partition", "sent"])
    def test_an_interrupt_in_mid_send_ends_it(
        self, shared_sidecar: Sidecar, topic: str, at: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with blocking.Client(shared_sidecar.address) as client:
            client.admin.create_topic(topic, partitions=PARTITIONS)
            producer = client.producer(topic, "p", SMALL)
            producer.open()
            first = producer.send(b"0", key=key(0))
            with monkeypatch.context() as patch:
                patch.setattr(Numbering, at, interrupt)
                with pytest.raises(KeyboardInterrupt):
                    producer.send(b"1", key=key(1))
            with pytest.raises(OutcomeUnknownError, match="interrupted in mid-send"):
                producer.send(b"2", key=key(2))
            assert first.result(LAST_RESORT_SECONDS).verdict.name == "NOT_DUP"
            producer.close()
