"""Policies that change while a topic is written: what is unsafe is taken no more, and what is not seen is no change."""

import asyncio
from typing import Any

import pytest

from seqdedupe.errors import UnavailableError
from seqdedupe.log.contract import Failure
from seqdedupe.log.pulsar import policies
from seqdedupe.log.pulsar.admin_url import AdminUrl
from seqdedupe.log.pulsar.entries import MAX_ENTRY_BYTES, EntryFormat
from seqdedupe.log.pulsar.policies import Looks
from tests.log.batches import encoded_batch
from tests.log.conformance import LIMIT_SECONDS, Owner
from tests.log.pulsar.client import StandInAdmin
from tests.log.pulsar.test_log import TOPIC, StandInHarness

EVICTS = {"policy": "consumer_backlog_eviction", "limitSize": 1, "limitTime": -1}
UNSAFE: list[tuple[str, Any]] = [
    ("retention", {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}),
    ("messageTTL", 1),
    ("backlogQuotaMap", {"destination_storage": EVICTS}),
    ("backlogQuotaMap", {"message_age": EVICTS}),
    (
        "inactiveTopicPolicies",
        {"deleteWhileInactive": True, "inactiveTopicDeleteMode": "delete_when_subscriptions_caught_up"},
    ),
    ("subscriptionExpirationTime", 5),
]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> StandInHarness:
    monkeypatch.setattr(policies, "LOOK_SECONDS", 0.02)
    return StandInHarness(EntryFormat.PLAIN)


async def until_looked(admin: StandInAdmin, times: int = 3) -> None:
    """Until the policies were asked for this many times more."""
    wanted = admin.looked + times
    async with asyncio.timeout(LIMIT_SECONDS):
        while admin.looked < wanted:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(("name", "value"), UNSAFE)
async def test_what_becomes_unsafe_is_written_no_more_until_it_is_safe(
    harness: StandInHarness, name: str, value: object
) -> None:
    log = await harness.open()
    owner = await Owner(log, 1).open()
    owner.append(0, 1)
    await owner.until_stored(1)
    safe = harness.admin.policies.get(name)
    harness.admin.policies[name] = value
    assert await owner.until_failed() is Failure.UNKNOWN
    assert "pulsar-admin" in owner.why
    with pytest.raises(UnavailableError, match="LOG_REFUSED") as caught:
        await Owner(log, 2).open()
    assert "pulsar-admin" in caught.value.message
    assert log._shared.looks.unsafe == {TOPIC}
    harness.admin.policies[name] = safe
    again = await Owner(log, 2).open()
    again.append(1, 1)
    await again.until_stored(1)
    assert not log._shared.looks.unsafe
    await log.close()
    assert not log._shared.looks.seen_at


async def test_a_look_that_fails_is_no_change(harness: StandInHarness) -> None:
    log = await harness.open()
    owner = await Owner(log, 1).open()
    looks = log._shared.looks
    await until_looked(harness.admin)
    harness.admin.answers_policies = False
    harness.admin.policies["messageTTL"] = 1
    await until_looked(harness.admin)
    seen_at = dict(looks.seen_at)
    owner.append(0, 1)
    await owner.until_stored(1)
    await until_looked(harness.admin)
    assert (owner.failure, looks.seen_at, looks.unsafe) == (None, seen_at, set())
    harness.admin.answers_policies = True
    assert await owner.until_failed() is Failure.UNKNOWN
    await log.close()


async def test_what_may_be_changed_is_changed(harness: StandInHarness) -> None:
    admin = harness.admin
    admin.policies["messageTTL"] = 1
    assert "messages expire" in await Looks().why_unsafe(admin, TOPIC, may_change=False)
    assert not await Looks().why_unsafe(admin, TOPIC, may_change=True)
    assert admin.policies["messageTTL"] is None


async def test_a_topics_limit_of_size_is_known_within_a_look(harness: StandInHarness) -> None:
    log = await harness.open()
    await Owner(log, 1).open()
    large = encoded_batch(0, 1, MAX_ENTRY_BYTES // 2)[0]
    log.check(large)
    harness.admin.policies["maxMessageSize"] = MAX_ENTRY_BYTES // 4
    await until_looked(harness.admin)
    with pytest.raises(Exception, match="MESSAGE_TOO_LARGE"):
        log.check(large)
    del harness.admin.policies["maxMessageSize"]
    await until_looked(harness.admin)
    log.check(large)
    await log.close()


async def test_looks_are_spread_over_time() -> None:
    """Everything that comes of them: between two there is the pause."""
    url = AdminUrl("http://127.0.0.1:1", pause_seconds=0.05)
    loop = asyncio.get_running_loop()
    start = loop.time()
    outcomes = await asyncio.gather(*(url.get("x") for _ in range(5)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [UnavailableError] * 5
    assert loop.time() - start >= 4 * 0.05
