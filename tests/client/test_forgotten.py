"""A producer whose name the topic's policy has forgotten goes on; one whose data is lost does not."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from seqdedupe.client import Client, DataLossError, InvalidRequestError, ProducerConfig, Verdict
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.transfer.backup import restore
from seqdedupe.v1 import publish_pb2
from tests.broker_sidecar import with_constants
from tests.client.fake_sidecar import FakeSidecar, fake_sidecar
from tests.client.helpers import ids_in_log
from tests.client.proxy import Proxy

TOPIC = "t"
ONE_BY_ONE = ProducerConfig(max_batch_rows=1)


async def test_a_live_session_that_was_idle_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its connection is cut for longer than the policy allows; minutes are short here."""
    short = {with_constants.VARIABLE: json.dumps({"seqdedupe.topic.keeper.SECONDS_A_MINUTE": 0.3})}
    sidecar = Sidecar(
        tmp_path,
        module=with_constants.MODULE,
        environment=short,
        deduplication_producer_inactivity_timeout_minutes=1,
    )
    sidecar.start()
    async with (
        Proxy(sidecar.address) as proxy,
        Client(sidecar.address) as direct,
        Client(proxy.address) as client,
        client.producer(TOPIC, "p", ONE_BY_ONE) as producer,
    ):
        for _ in range(3):
            await (await producer.send(b"before"))
        assert [one.name for one in await direct.admin.producers(TOPIC)] == ["p"]
        proxy.refuses = True
        proxy.cut()

        async def is_forgotten() -> bool:
            return not await direct.admin.producers(TOPIC)

        async with asyncio.timeout(LAST_RESORT_SECONDS):
            while not await is_forgotten():
                pass
        receipts = [await producer.send(b"after") for _ in range(2)]
        proxy.refuses = False
        assert [(await receipt).verdict for receipt in receipts] == [Verdict.NOT_DUP, Verdict.NOT_DUP]
        assert (await (await producer.send(b"later"))).verdict is Verdict.NOT_DUP
        topic = await direct.admin.topic(TOPIC)
        assert (topic.purged, topic.resumed_after_purge, topic.producers) == (1, 1, 1)
    assert "has forgotten producer 'p'" in caplog.text
    assert await ids_in_log(sidecar, TOPIC) == list(range(6))
    sidecar.kill()


@pytest.mark.parametrize("is_older", [True, False])
async def test_an_older_copy_that_never_knew_the_name_is_data_loss(tmp_path: Path, is_older: bool) -> None:
    """The topic has forgotten another name, so it says that it has forgotten this one. The control arm restarts with
    the data that it had."""
    short = {with_constants.VARIABLE: json.dumps({"seqdedupe.topic.keeper.SECONDS_A_MINUTE": 0.3})}
    sidecar = Sidecar(
        tmp_path / "sidecar",
        module=with_constants.MODULE,
        environment=short,
        deduplication_producer_inactivity_timeout_minutes=1,
        backup_directory=tmp_path,
    )
    sidecar.start()
    async with Client(sidecar.address) as client:
        async with client.producer(TOPIC, "other") as other:
            await (await other.send(b"kept"))
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            while not (await client.admin.topic(TOPIC)).purged:
                pass
        await client.admin.backup("older")
        producer = client.producer(TOPIC, "p", ONE_BY_ONE)
        await producer.open()
        await (await producer.send(b"lost"))
        await asyncio.to_thread(sidecar.kill)
        if is_older:
            sidecar.data.rename(tmp_path / "newer")
            await asyncio.to_thread(restore, tmp_path / "older", sidecar.data)
        await asyncio.to_thread(sidecar.start)
        receipt = await producer.send(b"after")
        if is_older:
            with pytest.raises(DataLossError, match=r"durable index 1 \(2 before\)"):
                await receipt
        else:
            assert (await receipt).verdict is Verdict.NOT_DUP
        await producer.abort()
    assert await ids_in_log(sidecar, TOPIC) == ([0] if is_older else [0, 0, 1])
    sidecar.kill()


@pytest.fixture
async def fake() -> AsyncIterator[FakeSidecar]:
    async with fake_sidecar() as fake:
        yield fake


def forgets(fake: FakeSidecar, *, says_so: bool) -> None:
    """What was stored counts no more from the second Open on."""

    def on_open(request: publish_pb2.OpenRequest) -> publish_pb2.OpenResponse:
        return fake.opened(forgotten=[0] if request.epochs and says_so else [])

    fake.on_open = on_open


@pytest.mark.parametrize("says_so", [True, False])
async def test_only_who_says_that_it_forgot_is_believed(fake: FakeSidecar, says_so: bool) -> None:
    forgets(fake, says_so=says_so)
    refused: list[int] = []

    def on_frame(frame: publish_pb2.Frame) -> list[publish_pb2.PublishStreamResponse]:
        if frame.batch.sequence_ids[0] == 2 and len(fake.opens) == 1:
            refused.append(2)
            return [fake.refusal(frame, "INVALID_EPOCH", -1)]
        return [fake.stored(frame)]

    fake.on_frame = on_frame
    async with Client(fake.address) as client:
        producer = client.producer(TOPIC, "p", ONE_BY_ONE)
        await producer.open()
        for _ in range(2):
            await (await producer.send(b""))
        receipt = await producer.send(b"")
        if says_so:
            await receipt
            await (await producer.send(b""))
            links = [(f.batch.sequence_ids[0], f.batch.previous_sequence_ids[0]) for f in fake.frames]
            assert links == [(0, -1), (1, 0), (2, 1), (2, -1), (3, 2)]
        else:
            with pytest.raises(DataLossError):
                await receipt
        assert (refused, [list(request.epochs) for request in fake.opens]) == ([2], [[], [100]])
        await producer.abort()


async def test_what_is_not_sent_yet_links_to_nothing_from_before(fake: FakeSidecar) -> None:
    """Also what is queued after the resume; and a later resume is held against what it answered."""
    forgets(fake, says_so=True)
    async with Client(fake.address) as client:
        producer = client.producer(TOPIC, "p", ONE_BY_ONE)
        await producer.open()
        await (await producer.send(b""))
        fake.on_frame = lambda frame: (
            [fake.refusal(frame, "INVALID_EPOCH", -1)] if len(fake.opens) == 1 else [fake.stored(frame)]
        )
        receipts = [await producer.send(b"") for _ in range(3)]
        for receipt in receipts:
            await receipt
        after = [f for f in fake.frames if len(fake.opens) == 2][-3:]
        assert [(f.batch.sequence_ids[0], f.batch.previous_sequence_ids[0]) for f in after] == [(1, -1), (2, 1), (3, 2)]
        await producer.close()


async def test_a_session_that_is_refused_again_after_a_resume_is_at_its_end(fake: FakeSidecar) -> None:
    fake.on_frame = lambda frame: [fake.refusal(frame, "INVALID_EPOCH", -1)]
    async with Client(fake.address) as client:
        producer = client.producer(TOPIC, "p", ONE_BY_ONE)
        await producer.open()
        with pytest.raises(InvalidRequestError, match="INVALID_EPOCH"):
            await (await producer.send(b""))
        assert len(fake.opens) == 2
        await producer.abort()
