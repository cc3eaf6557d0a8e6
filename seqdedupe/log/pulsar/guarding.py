"""What is looked at while a topic is owned: that nobody else writes to it, and that Pulsar's deduplication is on."""

import asyncio

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.pulsar.admin import Admin

ALONE_SECONDS = 5.0
"""Statistics follow a hand-over within a tenth of a second, unless the broker is in trouble."""
LOOK_SECONDS = 60.0

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
        raise error("LOG_REFUSED", not_deduplicated(topic))


async def until_not_deduplicated(topic: str, admin: Admin) -> None:
    """Returns when Pulsar's deduplication is not in force any more."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            if not (await admin.stats(topic)).deduplicates:
                return
        except SeqdedupeError:
            # An admin URL that does not answer ends no owner.
            continue


def not_deduplicated(topic: str) -> str:
    """For a person."""
    return (
        f"Pulsar's deduplication of {topic} is off, so that what its client sends again would be stored twice; switch "
        f"it on: pulsar-admin topicPolicies set-deduplication --enable {topic}"
    )
