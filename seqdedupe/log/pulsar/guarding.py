"""What is looked at while a topic is owned: that nobody else writes to it or deletes it, and that it deduplicates."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

from seqdedupe.entry_properties import INCARNATION
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.pulsar.admin import Admin
from seqdedupe.log.pulsar.opening import Opening
from seqdedupe.log.pulsar.wholes import is_going
from seqdedupe.log.pulsar.writer import Writer

ALONE_SECONDS = 5.0
"""Statistics follow a hand-over within a tenth of a second, unless the broker is in trouble."""
LOOK_SECONDS = 60.0
"""Between two looks at Pulsar's deduplication, and whether somebody deletes the topic."""
CONNECTED_POLL_SECONDS = 0.25
DISCONNECTED_SECONDS = 2.0
"""After an unload the client connects again in a tenth of that; else it may wait for half a minute, and a new producer
does not."""

_POLL_SECONDS = 0.05


async def check_alone(topic: str, admin: Admin, producer_name: str) -> None:
    """Raises NOT_OWNER if the topic's statistics do not show this producer, alone. That they do is no proof."""
    until = asyncio.get_running_loop().time() + ALONE_SECONDS
    while (names := {each.name for each in (await admin.stats(topic)).publishers}) != {producer_name}:
        if asyncio.get_running_loop().time() >= until:
            others = ", ".join(sorted(names - {producer_name})) or "nobody"
            raise error("NOT_OWNER", f"{topic} was opened by {producer_name}, but its statistics show {others} there")
        await asyncio.sleep(_POLL_SECONDS)


async def check_deduplicates(topic: str, admin: Admin) -> None:
    """Raises LOG_REFUSED if Pulsar's deduplication is not in force."""
    if not (await admin.stats(topic)).deduplicates:
        raise error("LOG_REFUSED", _not_deduplicated(topic))


async def check_stays(topic: str, incarnation: int, admin: Admin) -> None:
    """Raises NOT_OWNER if the topic is being deleted, by whomever, or made anew already: nobody takes it any more."""
    properties = await admin.properties(topic)
    if is_going(properties):
        raise error("NOT_OWNER", f"{topic} is being deleted")
    if (now := properties.get(INCARNATION, str(incarnation))) != str(incarnation):
        raise error("NOT_OWNER", f"{topic} was deleted and made anew: it is {now}, not {incarnation}")


async def guard(topic: str, admin: Admin, opening: Opening, look: Callable[[], Awaitable[str]]) -> None:
    """Ends an opening when its producer is not connected any more, so that somebody else may have the topic, which one
    that sends nothing would not notice; when somebody deletes the topic; or when Pulsar's deduplication is off.
    `look` is called at the same intervals, and says why the opening should end, if it should.
    """
    opening.fail(await _why_lost(topic, admin, opening.writer, look))


async def _why_lost(topic: str, admin: Admin, writer: Writer, look: Callable[[], Awaitable[str]]) -> str:
    now = asyncio.get_running_loop().time
    # Topics that were opened together are not looked at together.
    connected_at, looked_at = now(), now() - LOOK_SECONDS * random.random() / 2
    while True:
        await asyncio.sleep(CONNECTED_POLL_SECONDS)
        if writer.is_connected:
            connected_at = now()
        elif now() - connected_at >= DISCONNECTED_SECONDS:
            return f"the producer of {topic} has lost its connection"
        if now() - looked_at >= LOOK_SECONDS:
            looked_at = now()
            if why := await _why_not(topic, admin) or await look():
                return why


async def _why_not(topic: str, admin: Admin) -> str:
    """Why nobody should own the topic any more; empty if there is no reason."""
    # An admin URL that does not answer ends no owner.
    with suppress(SeqdedupeError):
        if is_going(await admin.properties(topic)):
            return f"{topic} is being deleted"
        if not (await admin.stats(topic)).deduplicates:
            return _not_deduplicated(topic)
    return ""


def _not_deduplicated(topic: str) -> str:
    return (
        f"Pulsar's deduplication of {topic} is off, so that what its client sends again would be stored twice; switch "
        f"it on: pulsar-admin topicPolicies set-deduplication --enable {topic}"
    )
