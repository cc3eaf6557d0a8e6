"""Waiting until nobody has a topic: an alarm, no more. Who is told opens the topic as everybody else does."""

import asyncio
import logging
from collections.abc import Callable

import pulsar
import pulsar.asyncio

from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.pulsar.admin import Admin, Publisher
from seqdedupe.log.pulsar.client import told
from seqdedupe.log.pulsar.schemas import schema_of

logger = logging.getLogger("seqdedupe.log")

POLL_SECONDS = 0.5
"""Between two looks at the statistics of a topic that somebody has: what waiting costs a cluster."""
FREE_SECONDS = 0.5
"""So long nobody must have had it: who was unloaded with it is back in half of that."""
FREE_POLL_SECONDS = 0.1

Connect = Callable[[], pulsar.asyncio.Client]
"""Makes a client of its own, as all of the sidecar's are."""


async def wait_until_free(topic: str, admin: Admin, connect: Connect, *, has_schema: bool = False) -> None:
    """Returns when the broker has given the topic to whoever waits for it, who has let go of it again. Where the topic
    `has_schema`, it may be given only to those who name it.

    Whatever fails is tried again. A broker gives a topic, also when it is unloaded, to who waits for it: so nobody
    waits there before the topic is free, or when somebody has it again.
    """
    while True:
        await _until_nobody_writes(topic, admin)
        if await is_terminated(topic, admin) or await _was_given(topic, admin, connect, has_schema):
            return


async def _until_nobody_writes(topic: str, admin: Admin) -> None:
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


async def _was_given(topic: str, admin: Admin, connect: Connect, has_schema: bool) -> bool:
    """Waits at the broker, which tells at once. Whether it gave the topic, and nobody else has it."""
    try:
        schema = (await schema_of(topic, admin)).of_client() if has_schema else None
    except SeqdedupeError as e:
        logger.warning("the schema of %s is not known now: %s", topic, e)
        await asyncio.sleep(POLL_SECONDS)
        return False
    client = connect()
    waiting = asyncio.ensure_future(
        client.create_producer(topic, access_mode=pulsar.ProducerAccessMode.WaitForExclusive, schema=schema)
    )
    # Nobody may ask any more when it ends.
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        is_written = False
        while True:
            await asyncio.wait([waiting], timeout=FREE_POLL_SECONDS)
            if waiting.done():
                return waiting.exception() is None
            if is_written:
                return False
            # It may be this one itself, which is told of it in a moment.
            is_written = bool(await publishers_of(topic, admin))
    finally:
        # Else it stays queued, and the broker gives the topic to nobody. That is not cancelled with the wait.
        await asyncio.shield(_closed(client))


async def is_terminated(topic: str, admin: Admin) -> bool:
    """Whether it is, for certain: then a broker gives it to nobody, and does not say so."""
    try:
        return await admin.is_terminated(topic)
    except SeqdedupeError:
        return False


async def _closed(client: pulsar.asyncio.Client) -> None:
    try:
        await client.close()
    except pulsar.asyncio.PulsarException as e:
        logger.warning("a client that waited for a topic could not be closed: %s", told(e))


async def publishers_of(topic: str, admin: Admin) -> tuple[Publisher, ...] | None:
    """Who writes to the topic, by its statistics; None if they cannot be had now."""
    try:
        return (await admin.stats(topic)).publishers
    except SeqdedupeError as e:
        logger.warning("who has %s is not known now: %s", topic, e)
        return None
