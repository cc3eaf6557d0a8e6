"""The sidecars of a cluster, as its topics show them: by durable subscriptions and exclusive producers."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from seqdedupe.errors import NotFoundError, SeqdedupeError, error
from seqdedupe.log.pulsar.admin import Admin, TopicStats
from seqdedupe.log.pulsar.owner import ADDRESS

TOPICS_AT_ONCE = 8
"""That are asked for their statistics."""

_SUBSCRIPTION = re.compile("seqdedupe-(.+)")
_PRODUCER = re.compile("seqdedupe-(.+)-[0-7]")

NameAt = Callable[[str], Awaitable[str | None]]
"""The instance name of the sidecar at an address; None if none answers there."""


@dataclass(slots=True)
class Seen:
    """What the topics of a cluster show of one sidecar."""

    name: str
    """Its instance name."""
    addresses: set[str] = field(default_factory=set)
    """That its producers have, or that it had when it opened a topic last. Two may be two sidecars with one name."""
    is_connected: bool = False
    """Whether it has a producer, or consumes by a subscription of its own."""
    topics_owned: int = 0
    subscribed: list[str] = field(default_factory=list)
    """The topics on which it has a subscription."""
    kept_entries: int = 0
    """What its subscriptions keep, in all topics."""
    kept_bytes: int = 0


async def sidecars(admin: Admin, namespaces: Sequence[str]) -> list[Seen]:
    """The sidecars that have a subscription or a producer in these namespaces, by name. All or an error: raises as
    `Admin`."""
    seen: dict[str, Seen] = {}

    def of(name: str, address: str | None) -> Seen:
        one = seen.setdefault(name, Seen(name))
        one.addresses.update([address] if address else [])
        return one

    for topic, stats in (await _stats(admin, namespaces)).items():
        for publisher in stats.publishers:
            if ADDRESS in publisher.metadata and (name := _PRODUCER.fullmatch(publisher.name)):
                one = of(name[1], publisher.metadata[ADDRESS])
                one.is_connected = True
                one.topics_owned += 1
        for subscription in stats.subscriptions:
            if name := _SUBSCRIPTION.fullmatch(subscription.name):
                one = of(name[1], subscription.properties.get(ADDRESS))
                one.is_connected |= subscription.consumers > 0
                one.subscribed.append(topic)
                one.kept_entries += subscription.backlog_entries
                one.kept_bytes += subscription.backlog_bytes
    # A job's subscription is named like one of theirs, but has no address.
    return [seen[name] for name in sorted(seen) if seen[name].addresses]


async def _stats(admin: Admin, namespaces: Sequence[str]) -> dict[str, TopicStats]:
    topics = [topic for namespace in namespaces for topic in await admin.topics(namespace)]
    found: dict[str, TopicStats] = {}
    left = iter(topics)

    async def look() -> None:
        for topic in left:
            # It may have been deleted meanwhile.
            with suppress(NotFoundError):
                found[topic] = await admin.stats(topic)

    await asyncio.gather(*(look() for _ in range(TOPICS_AT_ONCE)))
    return {topic: found[topic] for topic in topics if topic in found}


async def forget(admin: Admin, namespaces: Sequence[str], name: str, name_at: NameAt) -> list[str]:
    """Removes all subscriptions of a sidecar that is gone for good; answers on which topics it had one.

    Raises SIDECAR_ALIVE if it is connected to a topic or answers at an address, and SIDECAR_NOT_FOUND if it has no
    subscription: then nothing was done. LOG_REFUSED if some could not be removed: the others are, and it can be done
    again.
    """
    one = next((seen for seen in await sidecars(admin, namespaces) if seen.name == name), None)
    if one is None:
        raise error("SIDECAR_NOT_FOUND", f"no topic of {', '.join(namespaces)} has a subscription of {name!r}")
    if one.is_connected:
        raise error("SIDECAR_ALIVE", f"the sidecar {name} is connected to topics of {', '.join(namespaces)}")
    for address in sorted(one.addresses):
        if await name_at(address) == name:
            raise error("SIDECAR_ALIVE", f"the sidecar {name} answers at {address}")
    left: list[str] = []
    why: SeqdedupeError | None = None
    for topic in one.subscribed:
        try:
            with suppress(NotFoundError):
                await admin.delete_subscription(topic, f"seqdedupe-{name}")
        except SeqdedupeError as e:
            left, why = [*left, topic], e
    if why is not None:
        done = f"{len(one.subscribed) - len(left)} of {len(one.subscribed)} subscriptions of the sidecar {name}"
        raise error(
            "LOG_REFUSED",
            f"{done} are removed, and not those on {', '.join(left)}: {why.message}",
            hint="See why; the same command removes what is left.",
        ) from why
    return one.subscribed
