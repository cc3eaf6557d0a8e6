"""The publisher against a real sidecar, which is killed now and then. About 20 s, one or two processes."""

import asyncio
import itertools
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from seqdedupe.batch import Binary
from seqdedupe.client import (
    Client,
    DataLossError,
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    Publisher,
    Verdict,
    blocking,
)
from seqdedupe.client.connection import Backoff
from seqdedupe.client.publisher import TopicHistory, new_id
from seqdedupe.errors import SeqdedupeError
from seqdedupe.names import partition_of
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.transfer.backup import restore
from seqdedupe.v1 import admin_pb2, publish_pb2
from tests.client.fake_sidecar import FakeSidecar, Refused, fake_sidecar
from tests.client.helpers import read_all, until
from tests.client.proxy import Proxy
from tests.conftest import StartSidecar

MODE = "deduplication-id"


async def test_what_is_sent_is_read_back_and_a_copy_meets_its_original(shared_sidecar: Sidecar, topic: str) -> None:
    async with Client(shared_sidecar.address) as client:
        made = await client.admin.create_topic(topic, deduplication_mode=MODE)
        assert made.deduplication_mode == admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID
        async with client.publisher(topic) as publisher:
            first = await publisher.send(
                b"one", deduplication_id="ä", key="k", event_time=1_700_000_000_000, properties={"a": "b"}
            )
            copies = await asyncio.gather(*(publisher.send(b"two", deduplication_id="ä") for _ in range(20)))
            new = await asyncio.gather(*(publisher.send(b"new") for _ in range(20)))
        assert first.verdict is Verdict.NOT_DUP
        assert {(one.verdict, one.index, one.message_id) for one in copies} == {
            (Verdict.DUP, first.index, first.message_id)
        }
        assert sorted(one.index for one in new) == list(range(1, 21))
        found = await client.admin.topic(topic)
        assert (found.window_messages, found.window_forgotten, found.window_first_index) == (21, 0, 0)
        assert found.window_first_publish_time_ms > 1_700_000_000_000
        assert found.window_memory_bytes > 0
    messages = await read_all(shared_sidecar, topic)
    one = messages[0]
    assert (one.deduplication_id, one.payload, one.key, one.properties) == ("ä".encode(), b"one", b"k", {"a": "b"})
    assert (one.producer_name, one.sequence_id, one.event_time_ms) == ("", -1, 1_700_000_000_000)
    assert len({message.deduplication_id for message in messages}) == 21


async def test_columns(shared_sidecar: Sidecar, topic: str) -> None:
    async with Client(shared_sidecar.address) as client:
        await client.admin.create_topic(topic, deduplication_mode=MODE)
        async with client.publisher(topic) as publisher:
            payloads, ids = Binary.of_all([b"a", b"b", b"c"]), Binary.of_all([b"1", b"2", b"1"])
            result = await publisher.send_batch(payloads, ids)
            assert result.verdicts.tolist() == [Verdict.NOT_DUP, Verdict.NOT_DUP, Verdict.DUP]
            assert result.indexes.tolist() == [0, 1, 0]
            again = await publisher.send_batch([b"b", b"d"], ["2", "3"], keys=["x", None])
            assert again.verdicts.tolist() == [Verdict.DUP, Verdict.NOT_DUP]
            assert again.indexes.tolist() == [1, 2]
    assert [message.payload for message in await read_all(shared_sidecar, topic)] == [b"a", b"b", b"d"]


async def test_bad_input(shared_sidecar: Sidecar, topic: str, tmp_path: Path) -> None:
    async with Client(shared_sidecar.address) as client:
        for more in (
            {"deduplication_mode": MODE, "deduplication_route": "id"},
            {"deduplication_route": "key", "partitions": 3},
            {"deduplication_mode": MODE, "deduplication_route": "producer", "partitions": 3},
        ):
            with pytest.raises(InvalidRequestError, match="route"):
                await client.admin.create_topic(topic, **more)
        with pytest.raises(InvalidRequestError, match="is no mode"):
            await client.admin.create_topic(topic, deduplication_mode="both")
        for nothing in (
            admin_pb2.TopicPolicy(deduplication_window_max_messages=0),
            admin_pb2.TopicPolicy(deduplication_window_max_bytes=0),
            admin_pb2.TopicPolicy(deduplication_window_max_minutes=0),
        ):
            with pytest.raises(InvalidRequestError, match="1"):
                await client.admin.create_topic(topic, deduplication_mode=MODE, policy=nothing)
        small = admin_pb2.TopicPolicy(deduplication_window_max_messages=10)
        with pytest.raises(InvalidRequestError, match="only on topics of deduplication IDs"):
            await client.admin.create_topic(topic, policy=small)
        await client.admin.create_topic(topic, deduplication_mode=MODE, policy=small)
        with pytest.raises(InvalidRequestError, match="deduplication IDs"):
            async with client.producer(topic, "p"):
                pass
        async with client.publisher(topic) as publisher:
            for bad in (b"", "", b"x" * 256, 7, "\ud800"):
                with pytest.raises(InvalidRequestError, match="INVALID_DEDUPLICATION_ID"):
                    await publisher.send(b"x", deduplication_id=bad)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequestError, match="INVALID_BATCH"):
                await publisher.send_batch([b"x", b"y"], [b"a"])
            assert (await publisher.send(b"x", deduplication_id=b"a")).verdict is Verdict.NOT_DUP
        for export in (client.admin.export_snapshot, client.admin.export_watermarks):
            with pytest.raises(InvalidRequestError, match="only a backup"):
                await export(topic, tmp_path / "exported")
        for asked in (client.admin.message_state(topic, "a", 0), client.admin.reset_producer(topic, "a", -1)):
            with pytest.raises(InvalidRequestError, match="neither producers nor sequence IDs"):
                await asked
        await client.admin.remove_policy(topic)
        kept = await client.admin.topic(topic)
        assert kept.deduplication_mode == admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID
        await client.admin.create_topic(topic + "-sequence")
        async with client.publisher(topic + "-sequence") as publisher:
            with pytest.raises(InvalidRequestError, match="no deduplication IDs"):
                await publisher.send(b"x", deduplication_id=b"a")
        async with client.publisher(topic + "-missing") as publisher:
            with pytest.raises(NotFoundError):
                await publisher.send(b"x")
            with pytest.raises(NotFoundError):
                await publisher.send(b"x")
        closed = client.publisher(topic)
        with pytest.raises(InvalidRequestError, match="not open"):
            await closed.send(b"x")
        async with closed:
            pass
        with pytest.raises(InvalidRequestError, match="was closed: nothing was sent"):
            await closed.send(b"x")
        with pytest.raises(InvalidRequestError, match="delivery_timeout_seconds is -1"):
            client.publisher(topic, delivery_timeout_seconds=-1)


async def test_a_call_without_a_receipt_ends_and_the_publisher_goes_on(shared_sidecar: Sidecar, topic: str) -> None:
    async with Proxy(shared_sidecar.address) as proxy, Client(proxy.address) as client:
        await client.admin.create_topic(topic, deduplication_mode=MODE)
        async with client.publisher(topic, delivery_timeout_seconds=1.5) as publisher:
            proxy.refuses = True
            proxy.cut()
            sends = [publisher.send(b"x", deduplication_id=f"{n}") for n in range(3)]
            for ended in await asyncio.gather(*sends, return_exceptions=True):
                assert isinstance(ended, OutcomeUnknownError)
                assert "within 1.5 seconds: no connection to the sidecar at" in ended.message
            assert not publisher._delivery._ready  # nothing is kept that nobody waits for
            proxy.refuses = False
            while True:
                try:
                    published = await publisher.send(b"x", deduplication_id="1")
                    break
                except OutcomeUnknownError:  # the machine may be slow
                    pass
        assert published.verdict in (Verdict.NOT_DUP, Verdict.DUP)
    [one] = await read_all(shared_sidecar, topic)
    assert one.deduplication_id == b"1"


NOT_CLOSED = """
import gc, sys, weakref
from seqdedupe.client import blocking
if sys.argv[1] == "lost":
    weakref.finalize = lambda *given: None
publisher = blocking.Client("127.0.0.1:1").publisher("t")
publisher.__enter__()
del publisher
gc.collect()
"""


@pytest.mark.parametrize("what", ["kept", "lost"])
def test_one_for_threads_that_nobody_closes_ends_quietly(what: str) -> None:
    """ "lost" is the control: its work is not ended."""
    command = [sys.executable, "-c", NOT_CLOSED, what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LAST_RESORT_SECONDS, check=True)
    assert ("Task was destroyed" in done.stderr) is (what == "lost"), done.stderr
    assert what == "lost" or done.stderr == ""


@pytest.mark.parametrize(
    "receipt",
    [
        {"verdicts": [1, 1, 1]},
        {"verdicts": [2, 2], "known_rows": [0, 7], "known_indexes": [0, 0], "known_ledger_ids": [0, 0],
         "known_entry_ids": [0, 0]},
        {"run_rows": [1], "run_ledger_ids": [1], "run_entry_ids": [1], "run_batch_indexes": [1]},
        b"no message",
    ],
)  # fmt: skip
async def test_an_answer_that_is_none_ends_the_call(receipt: dict[str, list[int]] | bytes) -> None:
    async with fake_sidecar() as fake:

        def answers(frame: publish_pb2.Frame) -> list[publish_pb2.PublishStreamResponse | bytes]:
            if isinstance(receipt, bytes):
                return [receipt]
            return [fake.answer(receipts=[{"frame": frame.number, "first_index": 0, **receipt}])]

        fake.on_frame = answers
        async with Client(fake.address) as client, client.publisher("t") as publisher:
            with pytest.raises(SeqdedupeError, match="NOT_A_SIDECAR"):
                await asyncio.wait_for(publisher.send_batch([b"x", b"y"], [b"a", b"b"]), LAST_RESORT_SECONDS)


@pytest.mark.parametrize("ends", ["closed", "broken", "silent"])
async def test_what_may_be_in_the_log_is_to_be_sent_again_with_the_same_id(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For sequence IDs there are none here."""
    monkeypatch.setattr("seqdedupe.client.publisher.ANSWER_TIMEOUT_SECONDS", 0.1)

    def answers(frame: publish_pb2.Frame) -> list[publish_pb2.PublishStreamResponse]:
        if ends == "broken":
            raise Refused(grpc.StatusCode.INTERNAL)
        return []

    async with fake_sidecar() as fake:
        fake.on_frame = answers
        timeout = None if ends == "closed" else 0.5
        async with Client(fake.address) as client:
            async with client.publisher("t", delivery_timeout_seconds=timeout) as publisher:
                sending = asyncio.create_task(publisher.send(b"x", deduplication_id="1"))
                await until(lambda: len(fake.frames) > (ends != "closed"))
                if ends != "closed":
                    await asyncio.wait({sending})
            with pytest.raises(OutcomeUnknownError) as caught:
                await sending
    assert "the same ID" in caught.value.hint
    assert "sequence" not in caught.value.hint


async def test_before_an_idle_stream_is_begun_again_there_is_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it ended while there was something to send. Else a publisher would take the place of another idle stream."""
    pauses: list[Backoff] = []
    next_seconds = Backoff.next_seconds

    def counted(backoff: Backoff) -> float:
        pauses.append(backoff)
        return next_seconds(backoff)

    monkeypatch.setattr(Backoff, "next_seconds", counted)
    async with fake_sidecar() as fake:
        fake.idle_streams = 3
        fake.on_frame = lambda frame: [fake.answer(receipts=[{"frame": frame.number, "first_index": 0}])]
        async with Client(fake.address) as client, client.publisher("t") as publisher:
            assert (await publisher.send(b"x", deduplication_id="1")).index == 0
    assert len(pauses) == 3


async def test_a_call_that_gives_up_before_it_is_sent_again_holds_up_no_other() -> None:
    async with fake_sidecar() as fake:

        def answers(frame: publish_pb2.Frame) -> list[publish_pb2.PublishStreamResponse | bytes]:
            if len(fake.frames) == 1:
                return [fake.refusal(frame, "LOG_REFUSED", 200)]
            return [fake.answer(receipts=[{"frame": frame.number, "first_index": 0}])]

        fake.on_frame = answers
        async with Client(fake.address) as client, client.publisher("t") as publisher:
            gives_up = asyncio.create_task(publisher.send(b"x", deduplication_id="1"))
            await until(lambda: publisher._delivery._is_in_trouble)
            gives_up.cancel()
            await asyncio.gather(gives_up, return_exceptions=True)
            # It is found out when the delay is over that nothing is to be sent.
            await until(lambda: publisher._delivery._delay_until < asyncio.get_running_loop().time())
            assert (await publisher.send(b"y", deduplication_id="2")).index == 0


async def test_a_copy_meets_its_original_in_its_partition(shared_sidecar: Sidecar, topic: str) -> None:
    ids = [b"id %d" % k for k in range(100)]
    async with Client(shared_sidecar.address) as client:
        made = await client.admin.create_topic(topic, deduplication_mode=MODE, partitions=3)
        assert (made.deduplication_mode, made.deduplication_route) == (
            admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID,
            admin_pb2.DEDUPLICATION_ROUTE_ID,
        )
        async with client.publisher(topic) as publisher:
            calls = [publisher.send(one, deduplication_id=one, key="k") for one in ids[:50]]
            rest = asyncio.ensure_future(publisher.send_batch(ids[50:], ids[50:]))
            told = await asyncio.gather(*calls)
            told += [(await rest)[row] for row in range(50)]
            copies = await publisher.send_batch(ids, ids, keys=["another"] * 100)
        again = [copies[row] for row in range(100)]
        assert {one.verdict for one in told} == {Verdict.NOT_DUP}
        assert [one.partition for one in told] == [partition_of(one, b"", 3) for one in ids]
        assert {one.verdict for one in again} == {Verdict.DUP}
        assert [(one.partition, one.index, one.message_id) for one in again] == [
            (one.partition, one.index, one.message_id) for one in told
        ]
        assert (await client.admin.topic(topic)).window_messages == 100
        async with client.partitioned_reader(topic) as reader:
            found = {message.deduplication_id: (message.partition, message.index) async for message in reader}
        assert found == {one: (was.partition, was.index) for one, was in zip(ids, told, strict=True)}


async def test_by_its_key_a_copy_meets_its_original_if_it_has_that(shared_sidecar: Sidecar, topic: str) -> None:
    async with Client(shared_sidecar.address) as client:
        await client.admin.create_topic(topic, deduplication_mode=MODE, partitions=3, deduplication_route="key")
        assert partition_of(b"a", b"", 3) != partition_of(b"c", b"", 3)
        async with client.publisher(topic) as publisher:
            await publisher.send_batch([b"1", b"2"], ["x", "y"], keys=["a", "a"])
            copies = await publisher.send_batch([b"1", b"1"], ["x", "x"], keys=["a", "c"])
            assert copies.verdicts.tolist() == [Verdict.DUP, Verdict.NOT_DUP]
            assert copies.partitions.tolist() == [partition_of(b"a", b"", 3), partition_of(b"c", b"", 3)]
            with pytest.raises(InvalidRequestError, match="row 1 has no key"):
                await publisher.send_batch([b"3", b"3"], ["z", "w"], keys=["a", None])
            with pytest.raises(InvalidRequestError, match="row 0 has no key"):
                await publisher.send(b"3")
        part = f"{topic}-partition-1"
        assert (await client.admin.topic(part)).deduplication_route == admin_pb2.DEDUPLICATION_ROUTE_KEY
        await client.admin.remove_policy(part)
        async with client.publisher(part) as publisher:
            for keys in (None, ["a", None]):
                with pytest.raises(InvalidRequestError, match="some have none"):
                    await publisher.send_batch([b"3", b"3"], ["z", "w"], keys=keys)
            assert (await publisher.send(b"3", deduplication_id="z", key=b"")).verdict is Verdict.NOT_DUP
        await client.admin.create_topic(topic + "-sequence", partitions=2)
        async with client.publisher(topic + "-sequence") as publisher:
            with pytest.raises(InvalidRequestError, match="no deduplication IDs"):
                await publisher.send(b"x")


async def test_it_waits_until_a_sidecar_knows_what_leads_to_the_partitions(
    shared_sidecar: Sidecar, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a partition's log is read that is not known of it."""
    answered: list[admin_pb2.Topic] = []
    async with Client(shared_sidecar.address) as client:
        await client.admin.create_topic(topic, deduplication_mode=MODE, partitions=2)
        describe = client.admin.topic

        async def recovering(name: str) -> admin_pb2.Topic:
            answered.append(await describe(name))
            if len(answered) < 3:
                answered[-1].ClearField("deduplication_mode")
                answered[-1].ClearField("deduplication_route")
            return answered[-1]

        monkeypatch.setattr(client.admin, "topic", recovering)
        async with client.publisher(topic) as publisher:
            assert (await publisher.send(b"1", deduplication_id="x")).verdict is Verdict.NOT_DUP
        assert len(answered) == 3


async def test_the_route_is_for_good(sidecar: Sidecar, topic: str) -> None:
    async with Client(sidecar.address) as client:
        await client.admin.create_topic(topic, deduplication_mode=MODE, partitions=2, deduplication_route="key")
        async with client.publisher(topic) as publisher:
            first = await publisher.send(b"x", deduplication_id="a", key="k")
            await asyncio.to_thread(sidecar.kill)
            await asyncio.to_thread(sidecar.start)
            again = await publisher.send(b"x", deduplication_id="a", key="k")
        assert (again.verdict, again.partition, again.index) == (Verdict.DUP, first.partition, first.index)
        assert (await client.admin.topic(topic)).deduplication_route == admin_pb2.DEDUPLICATION_ROUTE_KEY


def test_threads(shared_sidecar: Sidecar, topic: str) -> None:
    with blocking.Client(shared_sidecar.address) as client:
        client.admin.create_topic(topic, deduplication_mode=MODE)
        with client.publisher(topic) as publisher:
            assert publisher.send(b"x", deduplication_id="a").verdict is Verdict.NOT_DUP
            assert publisher.send_batch([b"x", b"y"], ["a", "b"]).indexes.tolist() == [0, 1]


def test_new_ids_are_uuids_of_version_7_and_rise_with_time() -> None:
    ids = [new_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert {(one[6] >> 4, one[8] >> 6, len(one)) for one in ids} == {(7, 2, 16)}


MESSAGES = 3000


async def _publish_through_kills(sidecar: Sidecar, topic: str, kills: int) -> dict[int, int]:
    """Several senders of the same messages, until all are acknowledged; the index that each learned."""
    rng = random.Random(1)
    told: dict[int, int] = {}

    async def send_all(publisher: Publisher, order: list[int]) -> None:
        for start in range(0, len(order), 20):
            some = order[start : start + 20]
            result = await publisher.send_batch([b"%d" % k for k in some], [b"id %d" % k for k in some])
            for k, index in zip(some, result.indexes.tolist(), strict=True):
                assert told.setdefault(k, index) == index

    async def kill() -> None:
        for part in range(1, kills + 1):
            while len(told) < MESSAGES * part // (kills + 1):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            await asyncio.to_thread(sidecar.kill)
            await asyncio.to_thread(sidecar.start)

    async with Client(sidecar.address) as client:
        publishers = [client.publisher(topic) for _ in range(3)]
        for publisher in publishers:
            await publisher.__aenter__()
        orders = [rng.sample(range(MESSAGES), MESSAGES) for _ in publishers]
        await asyncio.gather(kill(), *map(send_all, publishers, orders))
        for publisher in publishers:
            await publisher.close()
    return told


@pytest.mark.parametrize("is_on", [True, False])
async def test_each_message_is_there_once_through_kill_9(sidecar: Sidecar, topic: str, is_on: bool) -> None:
    """The control arm, with deduplication off, doubles."""
    async with Client(sidecar.address) as client:
        policy = admin_pb2.TopicPolicy(deduplication_entries_interval=37)
        made = client.admin.create_topic(topic, deduplication_mode=MODE, deduplication_enabled=is_on, policy=policy)
        await made
    if not is_on:
        with pytest.raises(AssertionError):
            await _publish_through_kills(sidecar, topic, 0)
        counts = Counter(message.deduplication_id for message in await read_all(sidecar, topic))
        assert max(counts.values()) > 1
        return
    told = await _publish_through_kills(sidecar, topic, 4)
    messages = await read_all(sidecar, topic)
    assert {message.index: message.payload for message in messages} == {k: b"%d" % one for one, k in told.items()}
    assert len(messages) == len(told) == MESSAGES


async def _lose(sidecar: Sidecar, how: str, client: Client, topic: str) -> None:
    """The topic has another history than its publisher knows, or (an empty `how`) the same one."""
    await asyncio.to_thread(sidecar.kill)
    if how.startswith("restored"):
        await asyncio.to_thread(sidecar.data.rename, sidecar.folder / "lost")
        await asyncio.to_thread(restore, sidecar.folder.parent / "older", sidecar.data)
    elif how == "journal given up":
        # What a power cut leaves of a segment that was not synced yet.
        [segment] = (sidecar.data / "logs").glob("[0-9]*/*.log")
        [older] = (sidecar.folder.parent / "older" / "logs").glob("[0-9]*/*.log")
        os.truncate(segment, older.stat().st_size)
        shutil.rmtree(sidecar.data / "logs" / "journal", ignore_errors=True)
        sidecar.keys["give_up_journal"] = True
    await asyncio.to_thread(sidecar.start)
    if how in ("deleted", "made anew"):
        await client.admin.delete_topic(topic)
    if how == "made anew":
        await client.admin.create_topic(topic, deduplication_mode=MODE)


@pytest.mark.parametrize(
    "how", ["", "restored", "restored in the same term", "journal given up", "deleted", "made anew"]
)
async def test_another_history_is_noticed(start_sidecar: StartSidecar, tmp_path: Path, topic: str, how: str) -> None:
    """The control arm restarts with the data that it had, and goes on."""
    sidecar = start_sidecar(backup_directory=tmp_path)
    async with Client(sidecar.address) as client, Client(sidecar.address) as other:
        await client.admin.create_topic(topic, deduplication_mode=MODE)
        async with client.publisher(topic) as publisher, other.publisher(topic) as second:
            for n in range(3):
                await publisher.send(b"before", deduplication_id=b"%d" % n)
            await client.admin.backup("older")
            if how == "restored in the same term":
                await asyncio.to_thread(sidecar.kill)
                await asyncio.to_thread(sidecar.start)
            for n in range(3, 7):
                await publisher.send(b"lost", deduplication_id=b"%d" % n)
            term = (await client.admin.topic(topic)).term
            await _lose(sidecar, how, client, topic)
            if how != "deleted":
                one = await second.send(b"one", deduplication_id=b"of another one")
                assert one.index == {"": 7, "made anew": 0}.get(how, 3)
                same = (await client.admin.topic(topic)).term == term
                assert same is (how in ("restored in the same term", "made anew"))
            if not how:
                assert (await publisher.send(b"new", deduplication_id=b"7")).index == 8
                assert (await publisher.send(b"copy", deduplication_id=b"0")).index == 0
                return
            for _ in range(2):
                with pytest.raises(DataLossError):
                    await publisher.send(b"new", deduplication_id=b"7")


Said = dict[str, Any]
"""What a sidecar answers to a frame."""


def _new(first_index: int, **more: int) -> Said:
    return {"receipts": [{"first_index": first_index}], "durable_index": first_index + 1} | more


def _copy(index: int, durable_index: int) -> Said:
    columns: Said = {"verdicts": [publish_pb2.VERDICT_DUP], "first_index": -1, "known_rows": [0]}
    columns |= {"known_indexes": [index], "known_ledger_ids": [1], "known_entry_ids": [1]}
    return {"receipts": [columns], "durable_index": durable_index}


@pytest.mark.parametrize(
    ("said", "is_loss"),
    [
        ([_new(5), _new(6, incarnation=6)], True),
        ([_new(5, term=3), _new(6, term=2)], True),
        ([_new(5, term=3), _new(6, term=4)], False),
        ([_new(5), _new(4), _new(3), _new(6)], False),
        ([_new(5), _new(4), _new(5, durable_index=9)], True),
        ([_new(5), _copy(5, 6), _copy(1, 6), _copy(5, 6)], False),
        ([_new(5), "a new stream", _new(4, durable_index=6)], False),
        ([_new(5), "a new stream", _new(4, durable_index=5)], True),
        ([_copy(1, 6), "a new stream", _copy(1, 5)], True),
        ([_copy(1, 6), "a new stream", _copy(1, 6)], False),
    ],
)
async def test_what_proves_another_history(said: list[Said | str], is_loss: bool) -> None:
    async with fake_sidecar() as fake:
        fake.on_frame = lambda frame: [_answer(fake, frame, left.pop(0))]
        async with Client(fake.address) as client, client.publisher("t") as publisher:
            left: list[Said] = []
            for k, one in enumerate(said):
                if isinstance(one, str):
                    fake.ends_streams = 1
                    continue
                left.append(one)
                if is_loss and k == len(said) - 1:
                    with pytest.raises(DataLossError):
                        await publisher.send(b"x")
                else:
                    await publisher.send(b"x")
            assert left == []


def _answer(fake: FakeSidecar, frame: publish_pb2.Frame, said: Said) -> publish_pb2.PublishStreamResponse:
    receipts = [{"frame": frame.number, **receipt} for receipt in said["receipts"]]
    return fake.answer(**(said | {"receipts": receipts}))


async def test_a_lower_term_counts_when_all_sidecars_answer_one() -> None:
    async with fake_sidecar() as one, fake_sidecar() as other:
        index = itertools.count()

        def by_this(fake: FakeSidecar) -> Callable[[publish_pb2.Frame], list[publish_pb2.PublishStreamResponse]]:
            return lambda frame: [_answer(fake, frame, _new(next(index)))]

        for fake in (one, other):
            fake.term, fake.on_frame = 3, by_this(fake)
        async with Client(f"{one.address},{other.address}") as client, client.publisher("t") as publisher:
            await publisher.send(b"x")
            first, second = (one, other) if one.frames else (other, one)
            first.term = 2
            await publisher.send(b"x")
            assert (len(first.frames), len(second.frames)) == (2, 1)
            second.term = 2
            with pytest.raises(DataLossError, match="term 2"):
                await publisher.send(b"x")


@pytest.mark.parametrize("seed", range(20))
def test_each_index_is_given_once(seed: int) -> None:
    generator = random.Random(seed)
    history, given = TopicHistory(), set[int]()
    for _ in range(300):
        first = generator.randrange(400)
        rows = set(range(first, first + generator.randint(1, 4)))
        if rows & given:
            with pytest.raises(DataLossError) as raised:
                history.given(first, len(rows))
            assert int(raised.value.numbers["index"]) in rows & given
        else:
            history.given(first, len(rows))
            given |= rows
    assert sum(map(int.__sub__, history._next_indexes, history._first_indexes)) == len(given)
    assert all(map(int.__lt__, history._next_indexes, history._first_indexes[1:]))
