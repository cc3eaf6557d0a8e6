"""Topics with a schema on a real broker: typed consumers of Pulsar's own client read what a sidecar writes there."""

import asyncio
import json
from collections.abc import Iterator

import pulsar
import pytest
from pulsar.schema import JsonSchema

from seqdedupe.core.rule import DUP
from seqdedupe.errors import InvalidRequestError
from seqdedupe.log.contract import Layout
from seqdedupe.names import whole_of
from seqdedupe.topic import directory
from seqdedupe.topic.operations import open_sessions
from seqdedupe.topic.policy import Policy
from tests.pulsar.members import MakeMember, Member, reason_of
from tests.pulsar.owners import Cluster, quiet

TIMEOUT_MS = 60_000


class Order(pulsar.schema.Record):  # type: ignore[misc]  # the library has no types
    number = pulsar.schema.Integer()


SCHEMA = json.dumps({"type": "JSON", "schema": json.dumps(Order.schema()), "properties": {}})
WITH_SCHEMA = Layout(schema=SCHEMA)


@pytest.fixture
def stock(cluster: Cluster) -> Iterator[pulsar.Client]:
    client = pulsar.Client(cluster.service_url, logger=quiet())
    yield client
    client.close()


def subscribe(stock: pulsar.Client, topic: str) -> pulsar.Consumer:
    first = pulsar.InitialPosition.Earliest
    return stock.subscribe(topic, "typed", schema=JsonSchema(Order), initial_position=first)


def orders(consumer: pulsar.Consumer, count: int) -> tuple[list[int], list[str]]:
    """This many orders, as the consumer decodes them, and of what kind the entries between are that it passes over."""
    found, others = list[int](), list[str]()
    while len(found) < count:
        message = consumer.receive(TIMEOUT_MS)
        consumer.acknowledge(message)
        if (kind := message.properties().get("seqdedupe.kind")) is not None:
            assert message._message.has_null_value()
            others.append(kind)
        else:
            found.append(message.value().number)
    return found, others


async def publish(member: Member, topic: str, *numbers: int) -> None:
    for number in numbers:
        assert await member.publish(topic, number, json.dumps({"number": number}).encode()) == number


async def is_dup(member: Member, topic: str, number: int) -> bool:
    verdicts = (await member.ask(topic, number)).verdicts
    return verdicts is not None and verdicts.tolist() == [DUP]


async def epoch_of(member: Member, topic: str) -> int:
    """For a session that is opened now."""
    return int((await member.run(open_sessions(member.topics.get(topic), ["p"], None))).epochs[0])


async def test_a_typed_consumer_reads_what_a_sidecar_writes(
    member: MakeMember, namespace: str, cluster: Cluster, stock: pulsar.Client
) -> None:
    """While it writes, after a restart, and after another one without any state has taken over; also where nobody may
    write without naming the schema."""
    topic = f"persistent://{namespace}/typed"
    await cluster.url.call("POST", f"namespaces/{namespace}/schemaValidationEnforced", True)
    first, second = member(), member(is_standby=True)
    await first.start()
    await first.run(first.topics.create(topic, layout=WITH_SCHEMA))
    await publish(first, topic, 0, 1)
    consumer = await asyncio.to_thread(subscribe, stock, topic)
    found, others = await asyncio.to_thread(orders, consumer, 2)
    assert found == [0, 1]
    assert others[0] == "marker"
    assert "control" in others

    await first.kill()
    await first.start()
    await publish(first, topic, 2, 3)
    assert await is_dup(first, topic, 1)
    epoch = await epoch_of(first, topic)

    await second.start()
    await first.stop()
    await second.take(topic)
    assert await is_dup(second, topic, 3)
    await publish(second, topic, 4)
    # Sessions learn by control records alone.
    assert await epoch_of(second, topic) > epoch
    found, others = await asyncio.to_thread(orders, consumer, 3)
    assert found == [2, 3, 4]
    assert others.count("marker") >= 2
    assert "control" in others


async def test_a_topic_without_a_schema_stays_as_it_is(
    member: MakeMember, namespace: str, stock: pulsar.Client
) -> None:
    topic = f"persistent://{namespace}/untyped"
    one = member()
    await one.start()
    await one.run(one.topics.create(topic))
    await publish(one, topic, 0)
    with pytest.raises(pulsar.IncompatibleSchema):
        await asyncio.to_thread(subscribe, stock, topic)
    reader = stock.create_reader(topic, pulsar.MessageId.earliest)
    while reader.has_message_available():
        message = reader.read_next(TIMEOUT_MS)
        properties = message.properties()
        assert properties["seqdedupe.entry"].startswith("1:")
        assert "seqdedupe.control_base64" not in properties
        assert not message._message.has_null_value()


async def test_partitions_have_the_schema_of_their_topic(
    member: MakeMember, namespace: str, cluster: Cluster, stock: pulsar.Client
) -> None:
    whole = f"persistent://{namespace}/parts"
    one = member()
    await one.start()
    await one.run(directory.create_partitioned(one.topics, whole, 2, Policy(), WITH_SCHEMA))
    for name in one.topics.partitions.names(whole):
        assert whole_of(name) == whole
        assert await cluster.admin.schema(name) == ("JSON", json.dumps(Order.schema()), 0)
        await publish(one, name, 0)
    consumer = await asyncio.to_thread(subscribe, stock, whole)
    assert (await asyncio.to_thread(orders, consumer, 2))[0] == [0, 0]


async def test_a_schema_that_pulsar_does_not_take_leaves_no_topic(
    member: MakeMember, namespace: str, cluster: Cluster
) -> None:
    topic = f"persistent://{namespace}/none"
    one = member()
    await one.start()
    bad = Layout(schema=json.dumps({"type": "AVRO", "schema": "{"}))
    with pytest.raises(InvalidRequestError, match="Invalid schema definition") as e:
        await one.run(one.topics.create(topic, layout=bad))
    assert e.value.reason == "INVALID_REQUEST"
    assert topic not in await cluster.admin.topics(namespace)
    assert one.topics.registry.record(topic) is None


async def test_without_its_schema_a_topic_takes_nothing_until_it_has_one(
    member: MakeMember, namespace: str, cluster: Cluster
) -> None:
    topic = f"persistent://{namespace}/lost"
    path = f"schemas/{namespace}/lost/schema"
    one = member()
    await one.start()
    await one.run(one.topics.create(topic, layout=WITH_SCHEMA))
    await publish(one, topic, 0)
    await one.kill()
    await cluster.url.call("DELETE", path)
    await one.start()
    assert await reason_of(one.publish(topic, 1)) in ("LOG_REFUSED", "RECOVERING")
    await cluster.url.call("POST", path, json.loads(SCHEMA))
    await one.take(topic)
    await publish(one, topic, 1)
