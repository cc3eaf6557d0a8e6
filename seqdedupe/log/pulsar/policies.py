"""What a topic must be to be a log: nothing in it deleted that is still needed, and nothing stored twice."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from seqdedupe.errors import ConfigurationError, SeqdedupeError, error
from seqdedupe.log.pulsar.admin import Admin
from seqdedupe.names import namespace_of, whole_of

logger = logging.getLogger("seqdedupe.log")

IN_FORCE_TIMEOUT_SECONDS = 30.0
"""A policy that was set is in force within a tenth of a second, unless the broker is in trouble."""
_POLL_SECONDS = 0.05
_SNAPSHOT_INTERVAL = "deduplicationSnapshotInterval"


class _Policy(NamedTuple):
    name: str
    """As the admin URL calls it."""
    is_safe: Callable[[Any], bool]
    """By the value in force."""
    safe: tuple[str, object]
    """What is set, and to which path."""
    danger: str
    command: str
    """Of `pulsar-admin topicPolicies`, and of `pulsar-admin namespaces` unless that has another one."""
    namespace_command: str = ""


def _keeps(retention: Any) -> bool:
    return bool(retention) and retention["retentionTimeInMinutes"] != 0 and retention["retentionSizeInMB"] != 0


def _quota(kind: str, limit: str) -> "_Policy":
    def evicts_nothing(quotas: Any) -> bool:
        return not quotas or kind not in quotas or quotas[kind]["policy"] != "consumer_backlog_eviction"

    return _Policy(
        "backlogQuotaMap",
        evicts_nothing,
        (
            f"backlogQuota?backlogQuotaType={kind}",
            {"limitSize": -1, "limitTime": -1, "policy": "producer_request_hold"},
        ),
        "a backlog quota evicts messages, also those of the sidecar's own subscription",
        f"set-backlog-quota --type {kind} {limit} --policy producer_request_hold",
    )


def _stays(inactive: Any) -> bool:
    if not inactive or not inactive["deleteWhileInactive"]:
        return True
    return bool(inactive["inactiveTopicDeleteMode"] == "delete_when_no_subscriptions")


_POLICIES = (
    _Policy(
        "deduplicationEnabled",
        lambda value: value is True,
        ("deduplicationEnabled", True),
        "Pulsar's deduplication is off, so that what its client sends again is stored twice",
        "set-deduplication --enable",
    ),
    _Policy(
        _SNAPSHOT_INTERVAL,
        lambda value: value == 0,
        (_SNAPSHOT_INTERVAL, 0),
        "Pulsar's deduplication takes snapshots by time",
        "set-deduplication-snapshot-interval --interval 0",
    ),
    _Policy(
        "retention",
        _keeps,
        ("retention", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}),
        "there is no retention, so that messages go before anybody has read them",
        "set-retention --time -1 --size -1",
    ),
    _Policy(
        "messageTTL",
        lambda value: not value,
        ("messageTTL?messageTTL=0", None),
        "messages expire, also for the sidecar's own subscription",
        "set-message-ttl --ttl 0",
        "set-message-ttl --messageTTL 0",
    ),
    _quota("destination_storage", "--limit -1"),
    _quota("message_age", "--limitTime -1"),
    _Policy(
        "inactiveTopicPolicies",
        _stays,
        (
            "inactiveTopicPolicies",
            {
                "inactiveTopicDeleteMode": "delete_when_no_subscriptions",
                "maxInactiveDurationSeconds": 60,
                "deleteWhileInactive": False,
            },
        ),
        "the topic is deleted when all have read it",
        "set-inactive-topic-policies --disable-delete-while-inactive --delete-mode delete_when_no_subscriptions "
        "--max-inactive-duration 60s",
    ),
)


class Looks:
    """What a sidecar has seen of the policies of the topics that it writes or is to write."""

    def __init__(self) -> None:
        self.unsafe: set[str] = set()
        """Topics that take nothing because of their policies."""
        self.seen_at: dict[str, float] = {}
        """When each was last seen, in seconds since 1970."""

    async def why_unsafe(self, admin: Admin, topic: str, *, may_change: bool) -> str:
        """Why nothing should be acknowledged in a topic; empty if its policies are safe, or cannot be looked at now.

        Then they are taken to be as they were.
        """
        try:
            await check_takes_producers(admin, topic)
            await ensure_safe(admin, topic, may_change=may_change)
            why = ""
        except SeqdedupeError as e:
            if e.reason != "UNSAFE_TOPIC_POLICY":
                logger.warning("the policies of %s cannot be looked at now, and count as they were: %s", topic, e)
                return ""
            why = e.message
            if topic not in self.unsafe:
                logger.error("%s", why)
        self.seen_at[topic] = time.time()
        (self.unsafe.add if why else self.unsafe.discard)(topic)
        return why

    def forget(self, topic: str) -> None:
        """It is not this sidecar's any more."""
        self.unsafe.discard(topic)
        self.seen_at.pop(topic, None)


async def check_takes_producers(admin: Admin, topic: str) -> None:
    """Raises UNSAFE_TOPIC_POLICY, with the command to run, if Pulsar takes messages in the topic's namespace only from
    those who encrypt, which no sidecar does. Its client says nothing of that: its time is up."""
    namespace = namespace_of(topic)
    if await admin.namespace_policy(namespace, "encryptionRequired") is True:
        command = f"pulsar-admin namespaces set-encryption-required --disable {namespace}"
        raise error("UNSAFE_TOPIC_POLICY", f"{topic} cannot be written: messages must be encrypted there ({command})")


async def ensure_safe(admin: Admin, topic: str, *, may_change: bool, is_new: bool = False) -> None:
    """Returns if the topic can be a log: what its policies are is in force. With `may_change` they are set if need be.
    Those of a partition are the whole topic's.

    Never set is what belongs to the namespace. Raises UNSAFE_TOPIC_POLICY with the commands to run, otherwise as
    `Admin`. They are commands for the namespace where the topic `is_new`, so that it will be gone.
    """
    dangers = await _of_namespace(admin, topic)
    are_safe = await asyncio.gather(*(_is_safe(admin, topic, policy) for policy in _POLICIES))
    unsafe = [policy for policy, is_safe in zip(_POLICIES, are_safe, strict=True) if not is_safe]
    if may_change and not dangers:
        for policy in unsafe:
            path, value = policy.safe
            await admin.set_policy(_with_policies(topic), path, value)
        unsafe = await _still_unsafe(admin, topic, unsafe)
    dangers += [f"{policy.danger} (pulsar-admin {_command(policy, topic, is_new)})" for policy in unsafe]
    if dangers:
        raise error("UNSAFE_TOPIC_POLICY", f"{topic} cannot be a log: {'; '.join(dangers)}")
    if not (await admin.stats(topic)).deduplicates:
        raise _not_in_force(topic)


def _command(policy: _Policy, topic: str, of_namespace: bool) -> str:
    if of_namespace:
        return f"namespaces {policy.namespace_command or policy.command} {namespace_of(topic)}"
    return f"topicPolicies {policy.command} {_with_policies(topic)}"


def _with_policies(topic: str) -> str:
    """Pulsar has policies of whole topics, none of a partition."""
    return whole_of(topic) or topic


async def _is_safe(admin: Admin, topic: str, policy: _Policy) -> bool:
    try:
        value = await admin.policy(_with_policies(topic), policy.name)
        if value is None and policy.name == _SNAPSHOT_INTERVAL:
            # Pulsar answers the topic's own interval only.
            value = await admin.namespace_policy(namespace_of(topic), policy.name)
        return policy.is_safe(value)
    except (KeyError, TypeError, AttributeError) as e:
        raise error("PULSAR_REFUSES", f"{policy.name} of {topic} is not answered as Pulsar does") from e


async def _still_unsafe(admin: Admin, topic: str, changed: list[_Policy]) -> list[_Policy]:
    """Those that are not in force in time."""
    limit = time.monotonic() + IN_FORCE_TIMEOUT_SECONDS
    while True:
        changed = [policy for policy in changed if not await _is_safe(admin, topic, policy)]
        if not changed and (await admin.stats(topic)).deduplicates:
            return []
        if time.monotonic() > limit:
            return changed
        await asyncio.sleep(_POLL_SECONDS)


async def _of_namespace(admin: Admin, topic: str) -> list[str]:
    """A sidecar's subscription must outlive the time for which the sidecar is down."""
    namespace = namespace_of(topic)
    minutes = await admin.subscription_expiration_minutes(namespace)
    if minutes is None:
        try:
            keys = await admin.broker_keys()
            minutes = int(keys["subscriptionExpirationTimeMinutes"])
        except (ConfigurationError, KeyError, ValueError):
            # Only a superuser may look.
            minutes = -1
    if minutes == 0:
        return []
    expire = "expire" if minutes > 0 else "may expire, which this sidecar is not allowed to look up"
    command = f"pulsar-admin namespaces set-subscription-expiration-time --time 0 {namespace}"
    return [f"unused subscriptions {expire}: the sidecar's own, when it is down ({command})"]


def _not_in_force(topic: str) -> SeqdedupeError:
    return error(
        "LOG_REFUSED",
        f"Pulsar's deduplication of {topic} is switched on, but not in force",
        hint="It should be within a second; see what the broker logs. It is tried again.",
    )
