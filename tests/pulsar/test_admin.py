"""The admin calls and the policies of a topic, on a real broker."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import pulsar
import pulsar.asyncio
import pytest

from pulsar_broker.standalone import Broker
from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.pulsar.admin_url import AdminUrl, ConnectedProducer, PulsarAdmin, TopicStats
from seqdedupe.log.pulsar.policies import ensure_safe
from seqdedupe.testing import LAST_RESORT_SECONDS

LIMIT_SECONDS = LAST_RESORT_SECONDS

UNSAFE = [
    ("retention", {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}, "set-retention --time -1 --size -1"),
    ("messageTTL?messageTTL=60", None, "set-message-ttl --ttl 0"),
    (
        "backlogQuota?backlogQuotaType=destination_storage",
        {"limitSize": 1_000_000, "limitTime": -1, "policy": "consumer_backlog_eviction"},
        "set-backlog-quota --type destination_storage --limit -1 --policy producer_request_hold",
    ),
    (
        "backlogQuota?backlogQuotaType=message_age",
        {"limitSize": -1, "limitTime": 60, "policy": "consumer_backlog_eviction"},
        "set-backlog-quota --type message_age --limitTime -1 --policy producer_request_hold",
    ),
    (
        "inactiveTopicPolicies",
        {
            "inactiveTopicDeleteMode": "delete_when_subscriptions_caught_up",
            "maxInactiveDurationSeconds": 60,
            "deleteWhileInactive": True,
        },
        "set-inactive-topic-policies --disable-delete-while-inactive",
    ),
]
"""Each dangerous policy by itself, and what the error says to run."""


@pytest.fixture
def admin(broker: Broker) -> PulsarAdmin:
    return PulsarAdmin(AdminUrl(broker.admin_url))


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[pulsar.asyncio.Client]:
    client = pulsar.asyncio.Client(broker.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    yield client
    await client.close()


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while not await holds():  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.02)


async def refusal(admin: PulsarAdmin, topic: str) -> str:
    """What is reported when the topic is refused, as it will be: policies that were set are in force soon after."""

    async def is_unsafe() -> bool:
        try:
            await ensure_safe(admin, topic, may_change=False)
        except SeqdedupeError:
            return True
        return False

    await until(is_unsafe)
    with pytest.raises(SeqdedupeError, match="UNSAFE_TOPIC_POLICY") as e:
        await ensure_safe(admin, topic, may_change=False)
    return e.value.message


async def test_a_topic_is_made_listed_and_deleted_with_its_properties(admin: PulsarAdmin, topic: str) -> None:
    odd = f"{topic}:a=b.c"
    for name in (topic, odd):
        await admin.create_topic(name, {"seqdedupe.format": "plain"})
        assert await admin.properties(name) == {"seqdedupe.format": "plain"}
    with pytest.raises(SeqdedupeError, match="TOPIC_EXISTS"):
        await admin.create_topic(odd, {})
    assert {topic, odd} <= set(await admin.topics("public/default"))

    await admin.delete_topic(odd)
    names = await admin.topics("public/default")
    assert (topic in names, odd in names) == (True, False)
    for call in (admin.delete_topic(odd), admin.stats(odd), admin.unload(odd), admin.properties(odd)):
        with pytest.raises(SeqdedupeError, match="TOPIC_NOT_FOUND"):
            await call


async def test_a_namespace_that_is_not_there_is_no_empty_one(admin: PulsarAdmin) -> None:
    with pytest.raises(SeqdedupeError, match="INVALID_NAMESPACE"):
        await admin.topics("public/elsewhere")


async def test_who_writes_to_a_topic_is_seen(admin: PulsarAdmin, client: pulsar.asyncio.Client, topic: str) -> None:
    await admin.create_topic(topic, {})
    assert await admin.stats(topic) == TopicStats((), 0)
    producer = await client.create_producer(topic, producer_name="one", properties={"address": "here:1"})
    assert (await admin.stats(topic)).publishers == (ConnectedProducer("one", {"address": "here:1"}),)
    with pytest.raises(SeqdedupeError, match="TOPIC_IN_USE"):
        await admin.delete_topic(topic)
    await producer.close()
    assert (await admin.stats(topic)).publishers == ()


async def test_an_unloaded_topic_is_there_again(admin: PulsarAdmin, client: pulsar.asyncio.Client, topic: str) -> None:
    await admin.create_topic(topic, {})
    producer = await client.create_producer(topic, batching_enabled=False)
    before = await producer.send(b"1")
    await admin.unload(topic)
    after = await producer.send(b"2")
    assert before.ledger_id() < after.ledger_id()


async def test_a_new_topic_is_refused_with_all_commands_and_made_safe_if_that_is_wanted(
    admin: PulsarAdmin, topic: str
) -> None:
    await admin.create_topic(topic, {})
    told = await refusal(admin, topic)
    assert "(pulsar-admin topicPolicies set-retention" in told
    assert "ttl" not in told
    assert await refusal(admin, topic) == told, "a check has changed something"

    await ensure_safe(admin, topic, may_change=True)
    await ensure_safe(admin, topic, may_change=False)


async def test_a_topic_that_is_being_made_is_refused_with_commands_for_its_namespace(
    broker: Broker, admin: PulsarAdmin
) -> None:
    """It is gone when they are run. Run, they make it safe."""
    url = AdminUrl(broker.admin_url)
    namespace = "public/by-hand"
    await url.call("PUT", f"namespaces/{namespace}", {"subscription_expiration_time_minutes": 0})
    topic = f"persistent://{namespace}/topic"
    await admin.create_topic(topic, {})
    await url.call("POST", f"namespaces/{namespace}/messageTTL", 60)

    async def expires() -> bool:
        return bool(await admin.policy(topic, "messageTTL") == 60)

    await until(expires)
    with pytest.raises(SeqdedupeError, match="UNSAFE_TOPIC_POLICY") as e:
        await ensure_safe(admin, topic, may_change=False, is_new=True)
    assert re.findall(r"\(pulsar-admin (.*?)\)", e.value.message) == [
        f"namespaces {command} {namespace}"
        for command in (
            "set-retention --time -1 --size -1",
            "set-message-ttl --messageTTL 0",
        )
    ]
    for path, value in (
        ("retention", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}),
        ("messageTTL", 0),
    ):
        await url.call("POST", f"namespaces/{namespace}/{path}", value)

    async def is_safe() -> bool:
        try:
            await ensure_safe(admin, topic, may_change=False)
        except SeqdedupeError:
            return False
        return True

    await until(is_safe)


@pytest.mark.parametrize(("path", "value", "command"), UNSAFE)
async def test_one_dangerous_policy_is_enough(
    admin: PulsarAdmin, topic: str, path: str, value: object, command: str
) -> None:
    await admin.create_topic(topic, {})
    await ensure_safe(admin, topic, may_change=True)
    await admin.set_policy(topic, path, value)
    told = await refusal(admin, topic)
    assert f"(pulsar-admin topicPolicies {command}" in told
    assert told.count("pulsar-admin") == 1
    await ensure_safe(admin, topic, may_change=True)
    await ensure_safe(admin, topic, may_change=False)


async def test_subscriptions_that_expire_are_for_an_operator_to_change(broker: Broker, admin: PulsarAdmin) -> None:
    url = AdminUrl(broker.admin_url)
    await url.call("PUT", "namespaces/public/expiring")
    topic = "persistent://public/expiring/topic"
    await admin.create_topic(topic, {})
    await ensure_safe(admin, topic, may_change=True)

    await url.call("POST", "namespaces/public/expiring/subscriptionExpirationTime", 5)
    told = await refusal(admin, topic)
    assert "(pulsar-admin namespaces set-subscription-expiration-time --time 0 public/expiring)" in told
    with pytest.raises(SeqdedupeError, match="UNSAFE_TOPIC_POLICY"):
        await ensure_safe(admin, topic, may_change=True)
    assert await admin.subscription_expiration_minutes("public/expiring") == 5, "it is not the topic's own"

    await url.call("POST", "namespaces/public/expiring/subscriptionExpirationTime", 0)

    async def never_expire() -> bool:
        return await admin.subscription_expiration_minutes("public/expiring") == 0

    await until(never_expire)
    await ensure_safe(admin, topic, may_change=False)
