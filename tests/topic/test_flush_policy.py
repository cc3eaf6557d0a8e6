"""A flush policy, a producer and power cuts: nothing is lost of one that lives, and the bound of one that has ended."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from broker_sidecar.services.publish_service import encode_receipt
from seqdedupe import wire
from seqdedupe.batch import Binary, single_producer
from seqdedupe.client.pending import PendingBatch, ReceiptColumns
from seqdedupe.client.publish_calls import receipt_columns
from seqdedupe.client.send_queue import SendQueue
from seqdedupe.errors import DataLossError
from seqdedupe.limits import Retention
from seqdedupe.log.embedded import commit
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.operations import open_sessions
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.topic import Topic
from tests.log.batches import SECRET
from tests.log.conformance import LIMIT_SECONDS, replayed
from tests.log.rounds import LosingDisk, put

INCARNATION = 5
NAME = "persistent://public/default/t"
MESSAGES = 20
WAITS = Applied(
    deduplication_entries_interval=2**31 - 1,
    deduplication_snapshot_interval_seconds=0,
    log_flush_interval_messages=MESSAGES,
    log_flush_interval_ms=2**31 - 1,
)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LosingDisk:
    """With the process that is to end on it."""
    (tmp_path / "before").mkdir()
    return LosingDisk(tmp_path / "before", monkeypatch)


@asynccontextmanager
async def served(folder: Path, applied: Applied = WAITS) -> AsyncIterator[Topic]:
    """A topic on the log in this folder, and on its own store."""
    logs = EmbeddedLogs(folder / "logs", clock_ms=lambda: 1_000, fatal=pytest.fail)
    store = Store.open(folder.parent / f"{folder.name}-store")
    if not (folder / "logs" / str(INCARNATION)).exists():
        await logs.create(INCARNATION, NAME, SECRET)
    log = await logs.open(INCARNATION, 0)
    topic = Topic(NAME, log, store, Snapshots(store, INCARNATION), None, applied=applied, random_bytes=os.urandom)
    await topic.recover()
    topic.check_serving()
    yield topic
    await topic.close("")
    await logs.close()
    store.close()


class Producer:
    """The client's duty, without a network: a send queue, whose frames go to a topic, and its answers back."""

    def __init__(self) -> None:
        self.queue = SendQueue()
        self.batches: list[PendingBatch] = []
        self._epochs: list[int] | None = None
        self._next_id = 0
        self._news = asyncio.Event()
        self.is_cut_off = False

    async def open(self, topic: Topic) -> None:
        opened = await open_sessions(topic, ["p"], self._epochs)
        self._epochs = opened.epochs
        self.is_cut_off = False
        self.queue.open(INCARNATION, topic.term, opened.epochs[0], opened.persisted[0])

    async def publish(self, topic: Topic, rows: int) -> None:
        """One batch of this many messages; returns when it has its receipts."""
        ids = np.arange(self._next_id, self._next_id + rows)
        self._next_id += rows
        pending = PendingBatch()
        pending.seal(single_producer(b"p", 0, -1, ids, Binary.of_all([b"%d" % i for i in ids])), 100)
        self.queue.add(pending)
        self.batches.append(pending)
        await self.send_again(topic)

    async def send_again(self, topic: Topic) -> None:
        """What there is to send; returns when it has its receipts."""
        cache = NumbersCache()
        while (frame := self.queue.next_frame()) is not None:
            encoded = b"".join(bytes(part) for part in frame.batch.encoded_parts())

            def reply(answer: FrameReceipt | Refusal) -> None:
                assert isinstance(answer, FrameReceipt), answer
                response = wire.PublishStreamResponse.FromString(encode_receipt(topic, answer))
                self.queue.receipt(answer.frame, self._columns(response.receipts[0]))
                self._news.set()

            def durable() -> None:
                if not self.is_cut_off:
                    self.queue.durable_up_to(topic.confirmed_index)

            topic.admit(encoded, frame.number, reply, cache, when_durable=durable)
        async with asyncio.timeout(LIMIT_SECONDS):
            while self.queue.without_receipt:
                self._news.clear()
                await self._news.wait()

    def _columns(self, receipt: Any) -> ReceiptColumns:
        return receipt_columns(receipt)

    @property
    def durable(self) -> list[bool]:
        """For each batch, whether it is known to be."""
        return [batch.durable for batch in self.batches]

    @property
    def sent(self) -> list[int]:
        return list(range(self._next_id))


class ForgetsAtTheReceipt(Producer):
    """Takes every receipt for one of what is durable."""

    def _columns(self, receipt: Any) -> ReceiptColumns:
        receipt.durable_at = 0
        return receipt_columns(receipt)


async def stored_ids(topic: Topic) -> list[int]:
    records = await replayed(topic.log, 0)
    return [i for record in records if record.rows for i in record.batch.sequence_ids]


async def over_a_power_cut(producer: Producer, disk: LosingDisk, after: Path, random: Random | None) -> list[int]:
    """The producer publishes, the power is cut, it goes on with what the disk has. The IDs that are stored then."""
    async with served(disk.folder) as topic:
        await producer.open(topic)
        for rows in (3, 5, MESSAGES, 1, 4, 2):
            await producer.publish(topic, rows)
        with disk._lock:
            image = disk.image(random)
        # What becomes of the process whose power it was nobody hears.
        producer.is_cut_off = True
    async with served(put(image, after)) as topic:
        await producer.open(topic)
        await producer.send_again(topic)
        await producer.publish(topic, 3)
        await topic.all_settled()
        assert all(batch.durable for batch in producer.batches)
        assert not len(producer.queue)
        return await stored_ids(topic)


async def test_a_power_cut_takes_nothing_of_a_producer_that_lives(disk: LosingDisk, tmp_path: Path) -> None:
    producer = Producer()
    assert await over_a_power_cut(producer, disk, tmp_path / "after", None) == producer.sent
    assert producer.queue.counters.dup == 0


@pytest.mark.parametrize("part", range(3))
async def test_whatever_the_disk_has_of_it(
    disk: LosingDisk, tmp_path: Path, pytestconfig: pytest.Config, part: int
) -> None:
    seed = pytestconfig.getoption("randomly_seed", 1) * 3 + part
    producer = Producer()
    found = await over_a_power_cut(producer, disk, tmp_path / "after", Random(seed))
    assert found == producer.sent, f"seed {seed}"


async def test_control_who_forgets_at_the_receipt_loses(disk: LosingDisk, tmp_path: Path) -> None:
    """And learns so: what was called durable is gone."""
    producer = ForgetsAtTheReceipt()
    with pytest.raises(DataLossError):
        await over_a_power_cut(producer, disk, tmp_path / "after", None)
    assert not len(producer.queue), "nothing was kept that could be sent again"


async def test_of_a_producer_that_has_ended_no_more_is_lost_than_is_said(disk: LosingDisk, tmp_path: Path) -> None:
    lost_most = 0
    async with served(disk.folder) as topic:
        producer = Producer()
        await producer.open(topic)
        for step in range(12):
            await producer.publish(topic, 1 + step % 4)
            # For which it has receipts, and ends.
            with disk._lock:
                image = disk.image(None)
            async with served(put(image, tmp_path / f"after-{step}")) as left:
                ids = await stored_ids(left)
            assert ids == producer.sent[: len(ids)]
            lost = len(producer.sent) - len(ids)
            assert lost <= WAITS.flush_interval.messages - 1
            assert lost == topic.not_durable
            lost_most = max(lost_most, lost)
    assert lost_most > MESSAGES / 2, "nothing waited: this proves nothing"


async def test_what_is_called_durable_and_gone_is_data_loss(disk: LosingDisk, tmp_path: Path) -> None:
    """A disk that lies about its syncs."""
    producer = Producer()
    async with served(disk.folder) as topic:
        await producer.open(topic)
        with disk._lock:
            image = disk.image(None)
        await producer.publish(topic, 4)
        await topic.all_settled()
        assert producer.batches[0].durable
        await producer.publish(topic, 4)
    async with served(put(image, tmp_path / "after")) as topic:
        with pytest.raises(DataLossError):
            await producer.open(topic)


async def test_numbers_snapshots_and_retention_know_only_what_is_durable(disk: LosingDisk) -> None:
    async with served(disk.folder) as topic:
        producer = Producer()
        await producer.open(topic)
        await producer.publish(topic, 4)
        await topic.all_settled()
        await producer.publish(topic, 3)
        await topic.keeper.snapshot()
        assert (topic.keeper.snapshot_index, topic.confirmed_index, topic.readable_index) == (4, 4, 4)
        assert topic.last_position.index == 3
        assert await topic.log.may_trim_to(topic.keeper.snapshot_index, Retention(0, 0)) == 0
        assert not producer.batches[1].durable
        await topic.drain()
        assert (topic.keeper.snapshot_index, producer.batches[1].durable) == (7, True)


async def test_a_resume_waits_until_all_is_durable(disk: LosingDisk) -> None:
    async with served(disk.folder) as topic:
        producer = Producer()
        await producer.open(topic)
        await producer.publish(topic, 3)
        assert producer.durable == [False]
        await producer.open(topic)
        assert producer.durable == [True]
        assert producer.queue.durable_sequence_id == 2


async def test_the_policy_is_in_force_between_two_frames_and_a_way_back_syncs(disk: LosingDisk) -> None:
    async with served(disk.folder, Applied()) as topic:
        producer = Producer()
        await producer.open(topic)
        await producer.publish(topic, 1)
        assert all(producer.durable[-1:])
        await topic.set_policy(Policy(log_flush_interval_messages=50, log_flush_interval_ms=10_000))
        await producer.publish(topic, 1)
        assert not any(producer.durable[-1:])
        changing = asyncio.ensure_future(topic.set_policy(Policy()))
        await asyncio.sleep(0)
        changing.cancel()
        await asyncio.gather(changing, return_exceptions=True)
        await topic.all_settled()
        assert topic.applied.flush_interval.is_every_commit
        assert all(producer.durable[-1:])
        await producer.publish(topic, 1)
        assert all(producer.durable[-1:])


async def test_the_policy_is_in_force_after_a_start(disk: LosingDisk, tmp_path: Path) -> None:
    async with served(disk.folder, Applied()) as topic:
        await topic.set_policy(Policy(log_flush_interval_messages=50, log_flush_interval_ms=10_000))
        with disk._lock:
            image = disk.image(None)
    async with served(put(image, tmp_path / "after"), Applied()) as topic:
        producer = Producer()
        await producer.open(topic)
        await producer.publish(topic, 1)
        assert not any(producer.durable[-1:])


async def test_who_does_not_ask_for_an_early_receipt_gets_none(disk: LosingDisk) -> None:
    async with served(disk.folder) as topic:
        opened = await open_sessions(topic, ["q"], None)
        rows = single_producer(b"q", opened.epochs[0], -1, np.arange(3), Binary.of_all([b"x"] * 3))
        answer: asyncio.Future[FrameReceipt | Refusal] = asyncio.get_running_loop().create_future()
        topic.admit(b"".join(bytes(part) for part in rows.encoded_parts()), 1, answer.set_result, NumbersCache())
        async with asyncio.timeout(LIMIT_SECONDS):
            receipt = await answer
        assert isinstance(receipt, FrameReceipt)
        assert (receipt.durable_at, topic.confirmed_index) == (0, 3)


@pytest.mark.parametrize("asks", [False, True], ids=["takes nothing less", "control, takes an early receipt"])
async def test_a_policy_that_comes_into_force_meanwhile_keeps_nobody_waiting(
    disk: LosingDisk, monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    """A frame is handed over while every commit is synced, and written when the policy lets it wait."""
    # Everything that is idle is synced too.
    monkeypatch.setattr(commit, "IDLE_SECONDS", 2**31)
    goes_on, is_syncing = threading.Event(), threading.Event()
    really = os.fdatasync

    def sync(fd: int) -> None:
        is_syncing.set()
        goes_on.wait(LIMIT_SECONDS)
        really(fd)

    async with served(disk.folder, Applied()) as topic:
        opened = await open_sessions(topic, ["q"], None)
        answers: list[Any] = []
        durable: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", sync)
            try:
                for i in range(2):
                    rows = single_producer(b"q", opened.epochs[0], i - 1, np.array([i]), Binary.of_all([b"x"]))
                    encoded = b"".join(bytes(part) for part in rows.encoded_parts())
                    when_durable = partial(durable.append, i) if asks else None
                    topic.admit(encoded, i, answers.append, NumbersCache(), when_durable=when_durable)
                    await asyncio.to_thread(is_syncing.wait, LIMIT_SECONDS)
                topic.log.flush_every(WAITS.flush_interval)
            finally:
                goes_on.set()
            async with asyncio.timeout(LIMIT_SECONDS):
                while len(answers) < 2:  # noqa: ASYNC110 (whoever answers tells nobody else)
                    await asyncio.sleep(0.001)
        assert [answer.durable_at for answer in answers] == ([0, 2] if asks else [0, 0])
        assert (topic.confirmed_index, durable) == ((1, []) if asks else (2, []))
