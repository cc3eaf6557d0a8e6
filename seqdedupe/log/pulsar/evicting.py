"""An owner that is frozen, and that its broker does not let go of: it is evicted by unloading the topic."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.pulsar.admin import Admin
from seqdedupe.log.pulsar.owner import ADDRESS
from seqdedupe.log.pulsar.waiting import publishers_of

logger = logging.getLogger("seqdedupe.log")

ASK_SECONDS = 5.0
"""Between two questions to an owner whether it is alive."""
FROZEN_SECONDS = 60.0
"""Within that time a broker should have let go by itself of one that answers nothing: twice its keep-alive interval,
which is 30 seconds by default."""
LONGEST_SECONDS = 960.0
"""Between two unloads, each of which an owner that is well, and cannot be reached from here, has to bear."""

Answers = Callable[[str], Awaitable[bool]]
"""Whether the sidecar at this address gives any answer."""


@asynccontextmanager
async def evicting(topic: str, admin: Admin, answers: Answers) -> AsyncIterator[None]:
    """Meanwhile the topic is unloaded when its owner has answered nothing for FROZEN_SECONDS; longer each time.

    An owner that is well has the topic again in a fraction of a second, because nobody waits for one that was just
    unloaded; one that is frozen has not. Who does not say where it can be reached is no sidecar, and left alone.
    """
    looking = asyncio.ensure_future(_evict_when_frozen(topic, admin, answers))
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.wait([looking])


async def _evict_when_frozen(topic: str, admin: Admin, answers: Answers) -> None:
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


async def _unload(topic: str, admin: Admin) -> None:
    try:
        await admin.unload(topic)
    except SeqdedupeError as e:
        logger.warning("%s could not be unloaded: %s", topic, e)
