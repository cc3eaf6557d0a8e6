"""A sidecar whose data directory is empty, and a topic on a real broker whose beginning is gone."""

import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pulsar_broker.standalone import Broker
from seqdedupe.client import Client, Verdict
from seqdedupe.errors import SeqdedupeError
from seqdedupe.message_id import MessageId
from seqdedupe.names import namespace_of
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.pulsar.crashes import make_namespace, sidecar_of
from tests.pulsar.owners import Cluster, until

_namespaces = itertools.count()

LEDGER_MESSAGES = 1_100
"""For more than 1000 Pulsar's deduplication needs none any more for its own recovery."""


@pytest.fixture
def topic() -> str:
    """The full name of one in a namespace that nobody else uses."""
    return f"persistent://public/no-state-{next(_namespaces)}/t"


@pytest.fixture
def three(broker: Broker, topic: str, tmp_path: Path) -> Iterator[list[Sidecar]]:
    """Sidecars, not started yet."""
    names = ("first", "second", "third")
    keys = {"deduplication_snapshot_interval_seconds": 0}
    three = [sidecar_of(broker, namespace_of(topic), tmp_path / name, **keys) for name in names]
    yield three
    for sidecar in three:
        sidecar.kill()


@pytest.fixture
async def trimmed(cluster: Cluster, topic: str, three: list[Sidecar]) -> int:
    """The first sidecar owns the topic, of which the beginning is gone; the last sequence ID of the producer p."""
    await make_namespace(cluster, namespace_of(topic))
    owner = three[0]
    owner.start()
    async with Client(owner.address) as client:
        await client.admin.create_topic(topic)
        first_ledger = await cluster.admin.first_ledger(topic)
        async with client.producer(topic, "p") as producer:
            for _ in range(2):
                for _ in range(LEDGER_MESSAGES):
                    await producer.send(b"x")
                await producer.flush()
                await cluster.admin.unload(topic)

            async def is_trimmed() -> bool:
                # The subscription follows the snapshots, every ten seconds at most.
                await producer.send(b"x")
                await producer.flush()
                await client.admin.snapshot(topic)
                await cluster.trim(topic)
                return await cluster.admin.first_ledger(topic) > first_ledger

            await until(is_trimmed)
            return producer.last_sequence_id


async def state_at(sidecar: Sidecar, topic: str, state: int, why: str = "") -> None:
    """Waits until the topic is so there."""
    async with Client(sidecar.address) as client:

        async def is_so() -> bool:
            with suppress(SeqdedupeError):
                found = await client.admin.topic(topic)
                return found.state == state and why in found.why
            return False

        await until(is_so)


async def check_goes_on(addresses: str, topic: str, last: int) -> None:
    """What was stored is known, and what comes next is new."""
    async with Client(addresses) as client, client.producer(topic, "p") as producer:
        assert producer.persisted_sequence_id == last
        receipts = [await producer.send(b"x", sequence_id) for sequence_id in (last, last + 1)]
        assert [(await receipt).verdict for receipt in receipts] == [Verdict.DUP, Verdict.NOT_DUP]


async def test_the_owners_snapshot_is_fetched_and_without_an_owner_nothing_is_taken(
    cluster: Cluster, topic: str, three: list[Sidecar], trimmed: int, tmp_path: Path
) -> None:
    owner, second, third = three
    second.start()
    await state_at(second, topic, admin_pb2.TOPIC_STATE_STANDBY)
    await until(lambda: any("was fetched and imported" in entry["event"] for entry in second.log))
    owner.kill()
    await state_at(second, topic, admin_pb2.TOPIC_STATE_SERVING)
    await check_goes_on(f"{owner.address},{second.address}", topic, trimmed)

    async with Client(second.address) as client:
        await client.admin.export_snapshot(topic, tmp_path / "saved")
    second.kill()
    await cluster.until_nobody_writes(topic)
    before = await last_entry(cluster, topic)
    third.start()
    await state_at(third, topic, admin_pb2.TOPIC_STATE_DAMAGED, "nobody owns it now")
    async with Client(third.address) as client:
        with pytest.raises(SeqdedupeError, match="NO_STATE"):
            await client.producer(topic, "p").open()
        assert await last_entry(cluster, topic) == before
        await client.admin.import_snapshot(topic, tmp_path / "saved")
    await state_at(third, topic, admin_pb2.TOPIC_STATE_SERVING)
    await check_goes_on(third.address, topic, trimmed + 1)


async def last_entry(cluster: Cluster, topic: str) -> MessageId:
    ledgers = await cluster.admin.ledgers(topic)
    return ledgers.message_id(len(ledgers) - 1)
