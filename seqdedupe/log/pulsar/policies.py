"""The policies that a topic must have to be a log: no needed entry is deleted, and no entry is stored twice."""

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
from seqdedupe.log.pulsar.writer import EntryWriter, PendingAppends
from seqdedupe.names import namespace_of, whole_of

logger = logging.getLogger("seqdedupe.log")

IN_FORCE_TIMEOUT_SECONDS = 30.0
"""A policy is in force within a tenth of a second after it was set, unless the broker is in trouble."""
_POLL_SECONDS = 0.05
_SNAPSHOT_INTERVAL = "deduplicationSnapshotInterval"
_OF_DEDUPLICATION = ("deduplicationEnabled", _SNAPSHOT_INTERVAL)


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
    """The findings of a sidecar about the policies of the topics that it writes or will write."""

    def __init__(self) -> None:
        self.unsafe: set[str] = set()
        """Topics that take no messages because of their policies."""
        self.seen_at: dict[str, float] = {}
        """The time of the last look at each topic, in seconds since 1970."""

    async def why_unsafe(self, admin: PulsarAdmin, topic: str, *, may_change: bool, resends: bool = True) -> str:
        """Return the reason why nothing should be acknowledged in a topic; empty if its policies are safe.

        If the policies cannot be read now, they count as unchanged.
        """
        try:
            await check_takes_producers(admin, topic)
            await ensure_safe(admin, topic, may_change=may_change, resends=resends)
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
    """Raise UNSAFE_TOPIC_POLICY, with the command to run, if the topic's namespace requires encrypted messages. No
    sidecar encrypts. Pulsar's client does not report that: it times out."""
    namespace = namespace_of(topic)
    if await admin.namespace_policy(namespace, "encryptionRequired") is True:
        command = f"pulsar-admin namespaces set-encryption-required --disable {namespace}"
        raise error("UNSAFE_TOPIC_POLICY", f"{topic} cannot be written: messages must be encrypted there ({command})")


async def ensure_safe(
    admin: PulsarAdmin, topic: str, *, may_change: bool, is_new: bool = False, resends: bool = True
) -> None:
    """Return if the topic can be a log: its policies are safe and in force. With `may_change`, unsafe policies are set.
    A partition has the policies of its whole topic.

    Policies of the namespace are never set. Raises UNSAFE_TOPIC_POLICY with the commands to run, otherwise as
    `PulsarAdmin`. If the topic `is_new`, the commands are for the namespace, since the topic will be removed. Pulsar's
    deduplication must be in force if the topic's writer `resends`: Pulsar's client does, a native topic's writer never.
    """
    dangers = await _of_namespace(admin, topic)
    policies = [policy for policy in _POLICIES if resends or policy.name not in _OF_DEDUPLICATION]
    are_safe = await asyncio.gather(*(_is_safe(admin, topic, policy) for policy in policies))
    unsafe = [policy for policy, is_safe in zip(policies, are_safe, strict=True) if not is_safe]
    if may_change and not dangers:
        for policy in unsafe:
            path, value = policy.safe
            await admin.set_policy(_with_policies(topic), path, value)
        unsafe = await _still_unsafe(admin, topic, unsafe, resends=resends)
    dangers += [f"{policy.danger} (pulsar-admin {_command(policy, topic, is_new)})" for policy in unsafe]
    if dangers:
        raise error("UNSAFE_TOPIC_POLICY", f"{topic} cannot be a log: {'; '.join(dangers)}")
    if resends and not (await admin.stats(topic)).deduplicates:
        raise _not_in_force(topic)


def _command(policy: _Policy, topic: str, of_namespace: bool) -> str:
    if of_namespace:
        return f"namespaces {policy.namespace_command or policy.command} {namespace_of(topic)}"
    return f"topicPolicies {policy.command} {_with_policies(topic)}"


def _with_policies(topic: str) -> str:
    """Return the topic that has the policies: Pulsar has policies of whole topics, none of a partition."""
    return whole_of(topic) or topic


async def _is_safe(admin: PulsarAdmin, topic: str, policy: _Policy) -> bool:
    try:
        value = await admin.policy(_with_policies(topic), policy.name)
        if value is None and policy.name == _SNAPSHOT_INTERVAL:
            # Pulsar only returns the topic's own interval.
            value = await admin.namespace_policy(namespace_of(topic), policy.name)
        return policy.is_safe(value)
    except (KeyError, TypeError, AttributeError) as e:
        raise error("PULSAR_REFUSES", f"{policy.name} of {topic} is not answered as Pulsar does") from e


async def _still_unsafe(admin: PulsarAdmin, topic: str, changed: list[_Policy], *, resends: bool) -> list[_Policy]:
    """Return the policies that are not in force in time."""
    limit = time.monotonic() + IN_FORCE_TIMEOUT_SECONDS
    while True:
        changed = [policy for policy in changed if not await _is_safe(admin, topic, policy)]
        if not changed and (not resends or (await admin.stats(topic)).deduplicates):
            return []
        if time.monotonic() > limit:
            return changed
        await asyncio.sleep(_POLL_SECONDS)


async def _of_namespace(admin: PulsarAdmin, topic: str) -> list[str]:
    """Return the dangers from the namespace: a sidecar's subscription must stay while the sidecar is down."""
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


# -- Checks while a topic is owned: nobody else writes to it or deletes it, and Pulsar deduplicates it.

ALONE_SECONDS = 5.0
"""Statistics follow a hand-over within a tenth of a second, unless the broker is in trouble."""
LOOK_SECONDS = 60.0
"""The time between two checks of Pulsar's deduplication, and whether somebody deletes the topic."""
CONNECTED_POLL_SECONDS = 0.25
DISCONNECTED_SECONDS = 2.0
"""The most time without a connection. After an unload the client reconnects in a tenth of that. Otherwise it may wait
for half a minute, and a new producer does not."""


async def check_alone(topic: str, admin: PulsarAdmin, producer_name: str) -> None:
    """Raise NOT_OWNER if the topic's statistics do not show this producer as the only producer. If they do, that is not
    a proof of ownership."""
    until = asyncio.get_running_loop().time() + ALONE_SECONDS
    while (names := {each.name for each in (await admin.stats(topic)).publishers}) != {producer_name}:
        if asyncio.get_running_loop().time() >= until:
            others = ", ".join(sorted(names - {producer_name})) or "nobody"
            raise error("NOT_OWNER", f"{topic} was opened by {producer_name}, but its statistics show {others} there")
        await asyncio.sleep(_POLL_SECONDS)


async def check_deduplicates(topic: str, admin: PulsarAdmin) -> None:
    """Raise LOG_REFUSED if Pulsar's deduplication is not in force."""
    if not (await admin.stats(topic)).deduplicates:
        raise error("LOG_REFUSED", _not_deduplicated(topic))


async def check_stays(topic: str, incarnation: int, admin: PulsarAdmin) -> None:
    """Raise NOT_OWNER if the topic is being deleted, by any sidecar, or was recreated: no sidecar may take it over any
    more."""
    properties = await admin.properties(topic)
    if is_going(properties):
        raise error("NOT_OWNER", f"{topic} is being deleted")
    if (now := properties.get(INCARNATION, str(incarnation))) != str(incarnation):
        raise error("NOT_OWNER", f"{topic} was deleted and created again: it is {now}, not {incarnation}")


async def guard(
    topic: str, admin: PulsarAdmin, opening: PendingAppends, look: Callable[[], Awaitable[str]], *, resends: bool = True
) -> None:
    """End an opening in three cases. First, its producer has lost the connection: another sidecar may have the
    topic, and a producer that sends nothing would not notice. Second, the topic is being deleted. Third, its writer
    `resends`, and Pulsar's deduplication is disabled. `look` is called at the same intervals, and returns the reason if
    the opening should end."""
    opening.fail(await _why_lost(topic, admin, opening.writer, look, resends=resends))


async def _why_lost(
    topic: str, admin: PulsarAdmin, writer: EntryWriter, look: Callable[[], Awaitable[str]], *, resends: bool
) -> str:
    now = asyncio.get_running_loop().time
    # This spreads the looks at topics that were opened together.
    connected_at, looked_at = now(), now() - LOOK_SECONDS * random.random() / 2
    while True:
        await asyncio.sleep(CONNECTED_POLL_SECONDS)
        if writer.is_connected:
            connected_at = now()
        elif now() - connected_at >= DISCONNECTED_SECONDS:
            return f"the producer of {topic} has lost its connection"
        if now() - looked_at >= LOOK_SECONDS:
            looked_at = now()
            if why := await _why_not(topic, admin, resends=resends) or await look():
                return why


async def _why_not(topic: str, admin: PulsarAdmin, *, resends: bool) -> str:
    """Return why nobody should own the topic any more; empty if there is no reason."""
    # An admin URL that does not answer ends no ownership.
    with suppress(SeqdedupeError):
        if is_going(await admin.properties(topic)):
            return f"{topic} is being deleted"
        if resends and not (await admin.stats(topic)).deduplicates:
            return _not_deduplicated(topic)
    return ""


def _not_deduplicated(topic: str) -> str:
    return (
        f"Pulsar's deduplication of {topic} is off, so that what its client sends again would be stored twice; switch "
        f"it on: pulsar-admin topicPolicies set-deduplication --enable {topic}"
    )
