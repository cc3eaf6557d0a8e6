"""What docs/reference/pulsar-differences.md says that no scenario has: this project's side of some of its rows."""

import pytest

from seqdedupe.client import Client, InvalidRequestError, Range, Verdict
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.conformance.broker import ListBroker, Stored
from tests.conformance.cases import table

ROWS = [row[0] for row in table("What no scenario has")]


async def attached(sidecar: Sidecar, topic: str, *stored: Stored) -> ListBroker:
    broker = ListBroker(sidecar.address, topic)
    broker.log.extend(stored)
    await broker.attach()
    return broker


async def test_a_system_topic_is_judged_like_any_other(for_brokers: Sidecar) -> None:
    assert any("`__change_events`" in row for row in ROWS)
    broker = await attached(for_brokers, "persistent://public/default/__change_events")
    entry = Stored(Range("p", 1))
    assert [await broker.publish(entry) for _ in range(2)] == [Verdict.NOT_DUP, Verdict.DUP]
    async with Client(for_brokers.address) as client:
        await client.admin.set_policy(broker.topic, admin_pb2.TopicPolicy(deduplication_enabled=False))
    assert await broker.publish(entry) is Verdict.NOT_DUP
    await broker.close()


async def test_a_reset_with_writes_in_flight_is_refused(for_brokers: Sidecar, topic: str) -> None:
    assert any("reset while writes are in flight" in row for row in ROWS)
    broker = await attached(for_brokers, topic)
    entry = Stored(Range("p", 1))
    assert await broker.check(entry) is Verdict.NOT_DUP
    with pytest.raises(InvalidRequestError, match="in flight"):
        broker.attached.reset()
    assert await broker.check(entry) is Verdict.UNKNOWN
    broker.settle()
    assert await broker.check(entry) is Verdict.DUP
    await broker.close()


async def test_a_replay_counts_the_highest_id(for_brokers: Sidecar, topic: str) -> None:
    assert any("in a replay has a lower ID" in row for row in ROWS)
    broker = await attached(for_brokers, topic, Stored(Range("p", 9)), Stored(Range("p", 3)))
    assert broker.replayed == 2
    assert (await broker.numbers("p")).persisted == 9
    assert await broker.publish(Stored(Range("p", 5))) is Verdict.DUP
    await broker.close()
