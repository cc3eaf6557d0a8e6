"""The owner of a topic: the writer in the topic's statistics, else the address in its last marker."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from seqdedupe.errors import NotFoundError, SeqdedupeError, error
from seqdedupe.figures import counted
from seqdedupe.log.pulsar.admin_url import ConnectedProducer, PulsarAdmin, TopicStats
from seqdedupe.log.pulsar.broker_wire import Brokers
from seqdedupe.log.pulsar.entries import SIDECARS_PRODUCER
from seqdedupe.log.pulsar.wholes import schema_of
from seqdedupe.pulsar_wire.pulsar_api_pb2 import WaitForExclusive
from seqdedupe.tasks import retrieve

logger = logging.getLogger("seqdedupe.log")

ADDRESS = "address"
"""The property of a sidecar's producer that holds the sidecar's address."""


async def not_owner(
    e: SeqdedupeError, admin: PulsarAdmin, topic: str, own_address: str, own_name: str, marked_address: str
) -> SeqdedupeError:
    """Return a NOT_OWNER error. It has `owner_address` if the address is known and is not this sidecar's address: a
    lost producer of this sidecar may still be listed. A writer with this sidecar's name at another address is logged as
    an error. Two such sidecars would move the same subscription, which keeps the entries that both need. If a writer
    has the same name and address, the message states this, because the writer may be this sidecar or another
    sidecar."""
    try:
        writer = await _writer(topic, admin)
        name, address = (writer.name.rpartition("-")[0], writer.metadata.get(ADDRESS, "")) if writer else ("", "")
    except SeqdedupeError:
        name, address = "", marked_address
    is_named_as_this = name == f"seqdedupe-{own_name}"
    if address == own_address and is_named_as_this:
        whose = "its earlier producer, which Pulsar will release, or another process with the same name and address"
        return error("NOT_OWNER", f"{e.message}; it has the name {own_name} and the address of this sidecar: {whose}")
    if not address or address == own_address:
        return e
    message = f"{e.message}; it is the sidecar at {address}"
    if is_named_as_this:
        message += (
            f", which has this one's instance name {own_name}: stop one of the two, and start it with another "
            "instance_name and an empty data directory"
        )
        logger.error("%s", message)
    return error("NOT_OWNER", message, owner_address=address)


async def owner_of(topic: str, admin: PulsarAdmin) -> str:
    """Return the address of the sidecar that writes to the topic; empty if no sidecar does. Raises an error if the
    address cannot be determined now."""
    writer = await _writer(topic, admin)
    return writer.metadata.get(ADDRESS, "") if writer else ""


async def _writer(topic: str, admin: PulsarAdmin) -> ConnectedProducer | None:
    publishers = (await admin.stats(topic)).publishers
    return publishers[0] if publishers else None


# -- Waiting until nobody has a topic. It is only a hint: the caller then opens the topic like every other sidecar.

POLL_SECONDS = 0.5
"""The time between two looks at the statistics of a topic that somebody has: the load of a wait on a cluster."""
FREE_SECONDS = 0.5
"""The time for which nobody must have had the topic: an owner that was unloaded with it is back in half of that."""
FREE_POLL_SECONDS = 0.1


async def wait_until_free(topic: str, admin: PulsarAdmin, brokers: Brokers, *, has_schema: bool = False) -> None:
    """Wait until the broker has assigned the topic to a waiting producer of this process, which then releases the
    topic. If the topic `has_schema`, the broker assigns the topic only to a producer that names the schema.

    Failures are retried. Even when a topic is unloaded, the broker assigns it to a waiting producer. So this function
    waits at the broker only while the topic has no other producer.
    """
    while True:
        await _until_nobody_writes(topic, admin)
        if await is_terminated(topic, admin) or await _was_given(topic, admin, brokers, has_schema):
            return


async def _until_nobody_writes(topic: str, admin: PulsarAdmin) -> None:
    now = asyncio.get_running_loop().time
    free_since: float | None = None
    while True:
        publishers = await publishers_of(topic, admin)
        if publishers is None or publishers:
            free_since = None
        elif free_since is None:
            free_since = now()
        elif now() - free_since >= FREE_SECONDS:
            return
        await asyncio.sleep(POLL_SECONDS if free_since is None else FREE_POLL_SECONDS)


async def _was_given(topic: str, admin: PulsarAdmin, brokers: Brokers, has_schema: bool) -> bool:
    """Wait at the broker, which notifies a waiting producer at once. Return whether the broker assigned the topic to
    this producer."""
    try:
        schema = (await schema_of(topic, admin)).of_wire() if has_schema else None
        connection = await brokers.connection(topic)
    except SeqdedupeError as e:
        logger.warning("this sidecar cannot wait for %s now: %s", topic, e)
        await asyncio.sleep(POLL_SECONDS)
        return False
    waiting = asyncio.ensure_future(
        connection.producer(topic, _ignore, _ignore, access_mode=WaitForExclusive, schema=schema, timeout=None)
    )
    waiting.add_done_callback(retrieve)
    try:
        is_written = False
        while True:
            await asyncio.wait([waiting], timeout=FREE_POLL_SECONDS)
            if waiting.done():
                return waiting.exception() is None
            if is_written:
                return False
            # The publisher may be this producer itself: its notification arrives in a moment.
            is_written = bool(await publishers_of(topic, admin))
    finally:
        # Otherwise the producer stays queued, and the broker gives the topic to nobody. The closing is not cancelled
        # with the wait.
        await asyncio.shield(connection.close())


def _ignore(*_: object) -> None:
    """A producer that only waits sends nothing."""


async def is_terminated(topic: str, admin: PulsarAdmin) -> bool:
    """Return whether the topic is certainly terminated. A broker assigns a terminated topic to no producer, and reports
    no error."""
    try:
        return await admin.is_terminated(topic)
    except SeqdedupeError:
        return False


async def publishers_of(topic: str, admin: PulsarAdmin) -> tuple[ConnectedProducer, ...] | None:
    """Return the publishers in the topic's statistics; None if the statistics are unavailable now."""
    try:
        return (await admin.stats(topic)).publishers
    except SeqdedupeError as e:
        logger.warning("who has %s is not known now: %s", topic, e)
        return None


# -- A frozen owner that its broker does not disconnect: unloading the topic evicts it.

ASK_SECONDS = 5.0
"""The time between two requests that check whether an owner is alive."""
FROZEN_SECONDS = 60.0
"""The time within which a broker should have disconnected an owner that answers nothing: twice its keep-alive interval,
which is 30 seconds by default."""
LONGEST_SECONDS = 960.0
"""The longest time between two unloads. A healthy owner that cannot be reached from here has to bear each of them."""

Answers = Callable[[str], Awaitable[bool]]
"""Whether the sidecar at this address gives any answer."""


@asynccontextmanager
async def evicting(topic: str, admin: PulsarAdmin, answers: Answers) -> AsyncIterator[None]:
    """While the block runs, unload the topic if the owner has not answered for FROZEN_SECONDS. The time gets longer
    with each unloading.

    After an unloading, a healthy owner opens the topic again in a fraction of a second, because no other producer waits
    at that moment. A frozen owner does not. A publisher without an address is not a sidecar, and is not unloaded.
    """
    looking = asyncio.ensure_future(_evict_when_frozen(topic, admin, answers))
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.wait([looking])


async def _evict_when_frozen(topic: str, admin: PulsarAdmin, answers: Answers) -> None:
    now = asyncio.get_running_loop().time
    owner, silent_since, patience_seconds = "", now(), FROZEN_SECONDS
    while True:
        await asyncio.sleep(ASK_SECONDS)
        publishers = await publishers_of(topic, admin)
        address = publishers[0].metadata.get(ADDRESS, "") if publishers else ""
        if not address or address != owner or await answers(address):
            owner, silent_since, patience_seconds = address, now(), FROZEN_SECONDS
        elif now() - silent_since >= patience_seconds:
            logger.warning("%s is unloaded: its owner at %s has been silent for %.0f s", topic, owner, patience_seconds)
            await _unload(topic, admin)
            silent_since, patience_seconds = now(), min(2 * patience_seconds, LONGEST_SECONDS)


async def _unload(topic: str, admin: PulsarAdmin) -> None:
    try:
        await admin.unload(topic)
    except SeqdedupeError as e:
        logger.warning("%s could not be unloaded: %s", topic, e)


# -- The sidecars of a cluster, as its topics show them: by durable subscriptions and exclusive producers.

TOPICS_AT_ONCE = 8
"""The number of topics that are asked for their statistics at the same time."""

_SUBSCRIPTION = re.compile("seqdedupe-(.+)")

NameAt = Callable[[str], Awaitable[str | None]]
"""Returns the instance name of the sidecar at an address; None if none answers there."""


@dataclass(slots=True)
class SeenOwner:
    """The information about one sidecar in the topics of a cluster."""

    name: str
    """Its instance name."""
    addresses: set[str] = field(default_factory=set)
    """The addresses of its producers, and its addresses when it last opened topics. Two addresses may be two sidecars
    with one name."""
    is_connected: bool = False
    """Whether it has a producer, or a consumer on its own subscription."""
    topics_owned: int = 0
    subscribed: list[str] = field(default_factory=list)
    """The topics on which it has a subscription."""
    kept_entries: int = 0
    """The entries that its subscriptions keep, in all topics."""
    kept_bytes: int = 0


async def sidecars(admin: PulsarAdmin, namespaces: Sequence[str]) -> list[SeenOwner]:
    """Return the sidecars that have a subscription or a producer in these namespaces, by name. Raises the errors of
    `PulsarAdmin` if the list would be incomplete."""
    seen: dict[str, SeenOwner] = {}

    def of(name: str, address: str | None) -> SeenOwner:
        one = seen.setdefault(name, SeenOwner(name))
        one.addresses.update([address] if address else [])
        return one

    for topic, stats in (await _stats(admin, namespaces)).items():
        for publisher in stats.publishers:
            if ADDRESS in publisher.metadata and (name := SIDECARS_PRODUCER.fullmatch(publisher.name)):
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
    # A job's subscription has a name of the same form, but no address.
    return [seen[name] for name in sorted(seen) if seen[name].addresses]


async def _stats(admin: PulsarAdmin, namespaces: Sequence[str]) -> dict[str, TopicStats]:
    topics = [topic for namespace in namespaces for topic in await admin.topics(namespace)]
    found: dict[str, TopicStats] = {}
    left = iter(topics)

    async def look() -> None:
        for topic in left:
            # The topic may have been deleted meanwhile.
            with suppress(NotFoundError):
                found[topic] = await admin.stats(topic)

    await asyncio.gather(*(look() for _ in range(TOPICS_AT_ONCE)))
    return {topic: found[topic] for topic in topics if topic in found}


async def forget(admin: PulsarAdmin, namespaces: Sequence[str], name: str, name_at: NameAt) -> list[str]:
    """Remove all subscriptions of a sidecar that never runs again. Return the topics on which the sidecar had a
    subscription.

    Raises SIDECAR_ALIVE if the sidecar is connected to a topic or answers at an address, and SIDECAR_NOT_FOUND if the
    sidecar has no subscription. After these errors nothing was changed. Raises LOG_REFUSED if some subscriptions could
    not be removed. The other subscriptions are then removed, and the call can be repeated.
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
        done = (
            f"{len(one.subscribed) - len(left)} of {counted(len(one.subscribed), 'subscription')} of the sidecar {name}"
        )
        raise error(
            "LOG_REFUSED",
            f"{done} are removed, but not those on {', '.join(left)}: {why.message}",
            hint="Correct the cause. The same command then removes the remaining subscriptions.",
        ) from why
    return one.subscribed
