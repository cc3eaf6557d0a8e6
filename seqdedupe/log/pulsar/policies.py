"""The policies that a topic must have to be a log: no needed entry is deleted."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple

from seqdedupe.entry_properties import INCARNATION
from seqdedupe.errors import ConfigurationError, SeqdedupeError, error
from seqdedupe.log.pulsar.admin_url import PulsarAdmin
from seqdedupe.log.pulsar.wholes import is_going
from seqdedupe.log.pulsar.writer import PendingAppends
from seqdedupe.names import namespace_of, whole_of

logger = logging.getLogger("seqdedupe.log")

IN_FORCE_TIMEOUT_SECONDS = 30.0
"""A policy is in force within a tenth of a second after it was set, unless the broker is in trouble."""
_POLL_SECONDS = 0.05


class _Policy(NamedTuple):
    name: str
    """The name in the admin URL."""
    is_safe: Callable[[Any], bool]
    """Whether the value in force is safe."""
    safe: tuple[str, object]
    """The path and the value to set."""
    danger: str
    command: str
    """The command of `pulsar-admin topicPolicies`, and of `pulsar-admin namespaces` unless that has another one."""
    namespace_command: str = ""


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


_POLICIES = (
    _Policy(
        "retention",
        lambda kept: bool(kept) and kept["retentionTimeInMinutes"] != 0 and kept["retentionSizeInMB"] != 0,
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
        lambda inactive: (
            not inactive
            or not inactive["deleteWhileInactive"]
            or inactive["inactiveTopicDeleteMode"] == "delete_when_no_subscriptions"
        ),
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
    """The results of the policy checks for all topics that this sidecar writes or will write."""

    def __init__(self) -> None:
        self.unsafe: set[str] = set()
        """Topics that take no messages because of their policies."""
        self.seen_at: dict[str, float] = {}
        """The time of the last look at each topic, in seconds since 1970."""

    async def why_unsafe(self, admin: PulsarAdmin, topic: str, *, may_change: bool) -> str:
        """Return the reason why nothing should be acknowledged in a topic; empty if its policies are safe.

        If the policies cannot be read now, they count as unchanged.
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
        """Forget a topic that no longer belongs to this sidecar."""
        self.unsafe.discard(topic)
        self.seen_at.pop(topic, None)


async def check_takes_producers(admin: PulsarAdmin, topic: str) -> None:
    """Raise UNSAFE_TOPIC_POLICY, with the command to run, if the topic's namespace requires encrypted messages, because
    sidecars do not encrypt. Brokers do not report this reason."""
    namespace = namespace_of(topic)
    if await admin.namespace_policy(namespace, "encryptionRequired") is True:
        command = f"pulsar-admin namespaces set-encryption-required --disable {namespace}"
        raise error("UNSAFE_TOPIC_POLICY", f"{topic} cannot be written: messages must be encrypted there ({command})")


async def ensure_safe(admin: PulsarAdmin, topic: str, *, may_change: bool, is_new: bool = False) -> None:
    """Return if the topic can be a log: its policies are safe and in force. With `may_change`, unsafe policies are set.
    A partition has the policies of its whole topic.

    Policies of the namespace are never set. Raises UNSAFE_TOPIC_POLICY with the commands to run, and the errors of
    `PulsarAdmin`. If the topic `is_new`, the commands are for the namespace, because the topic will be removed.
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


def _command(policy: _Policy, topic: str, of_namespace: bool) -> str:
    if of_namespace:
        return f"namespaces {policy.namespace_command or policy.command} {namespace_of(topic)}"
    return f"topicPolicies {policy.command} {_with_policies(topic)}"


def _with_policies(topic: str) -> str:
    """Return the topic whose policies apply. In Pulsar, a partition has the policies of its partitioned topic."""
    return whole_of(topic) or topic


async def _is_safe(admin: PulsarAdmin, topic: str, policy: _Policy) -> bool:
    try:
        return policy.is_safe(await admin.policy(_with_policies(topic), policy.name))
    except (KeyError, TypeError, AttributeError) as e:
        raise error("PULSAR_REFUSES", f"{policy.name} of {topic} is not answered as Pulsar does") from e


async def _still_unsafe(admin: PulsarAdmin, topic: str, changed: list[_Policy]) -> list[_Policy]:
    """Return the policies that are not in force in time."""
    limit = time.monotonic() + IN_FORCE_TIMEOUT_SECONDS
    while True:
        changed = [policy for policy in changed if not await _is_safe(admin, topic, policy)]
        if not changed:
            return []
        if time.monotonic() > limit:
            return changed
        await asyncio.sleep(_POLL_SECONDS)


async def _of_namespace(admin: PulsarAdmin, topic: str) -> list[str]:
    """Return the dangers that policies of the namespace cause. A sidecar's subscription must stay while the sidecar is
    down."""
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


# -- Checks while a topic is owned: nobody else writes to it or deletes it.

ALONE_SECONDS = 5.0
"""Statistics follow a hand-over within a tenth of a second, unless the broker is in trouble."""
LOOK_SECONDS = 60.0
"""The time between two checks of the policies, and whether somebody deletes the topic."""


async def check_alone(topic: str, admin: PulsarAdmin, producer_name: str) -> None:
    """Raise NOT_OWNER unless the topic's statistics show this producer as the only producer. The statistics alone do
    not prove ownership."""
    until = asyncio.get_running_loop().time() + ALONE_SECONDS
    while (names := {each.name for each in (await admin.stats(topic)).publishers}) != {producer_name}:
        if asyncio.get_running_loop().time() >= until:
            others = ", ".join(sorted(names - {producer_name})) or "nobody"
            raise error("NOT_OWNER", f"{topic} was opened by {producer_name}, but its statistics show {others} there")
        await asyncio.sleep(_POLL_SECONDS)


async def check_stays(topic: str, incarnation: int, admin: PulsarAdmin) -> None:
    """Raise NOT_OWNER if any sidecar is deleting the topic, or if the topic was recreated. No sidecar may then take
    over this topic."""
    properties = await admin.properties(topic)
    if is_going(properties):
        raise error("NOT_OWNER", f"{topic} is being deleted")
    if (now := properties.get(INCARNATION, str(incarnation))) != str(incarnation):
        raise error("NOT_OWNER", f"{topic} was deleted and created again: it is {now}, not {incarnation}")


async def guard(topic: str, admin: PulsarAdmin, opening: PendingAppends, look: Callable[[], Awaitable[str]]) -> None:
    """End an opening if the topic is being deleted, or if `look` returns a reason. Both are checked regularly."""
    # This spreads the looks at topics that were opened together.
    pause_seconds, why = LOOK_SECONDS * (1 - random.random() / 2), ""
    while not why:
        await asyncio.sleep(pause_seconds)
        pause_seconds, why = LOOK_SECONDS, await _why_not(topic, admin) or await look()
    opening.fail(why)


async def _why_not(topic: str, admin: PulsarAdmin) -> str:
    """Return the reason why no sidecar should own the topic any more; empty if there is no reason."""
    # An admin URL that does not answer ends no ownership.
    with suppress(SeqdedupeError):
        if is_going(await admin.properties(topic)):
            return f"{topic} is being deleted"
    return ""
