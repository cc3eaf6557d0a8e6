"""A topic of which this sidecar has no state, and another one does: its owner's snapshot is fetched and imported."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from seqdedupe.errors import SeqdedupeError
from seqdedupe.store.snapshots import Loaded
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.closed import Closed
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.renewing import renew

logger = logging.getLogger("seqdedupe.topics")

FETCH_SECONDS = 2.0
"""Between two tries."""
AT_ONCE = 8
"""Snapshots that are fetched at the same time: a new sidecar may need those of all topics."""

OwnerOf = Callable[[str], Awaitable[str]]
"""The address of the other sidecar that owns a topic; empty if there is none. Raises why it is not known now."""

SnapshotOf = Callable[[str, str], Awaitable[tuple[int, Loaded]]]
"""Given an owner's address and a topic: the incarnation that the snapshot is of, and the snapshot, which came whole and
can be one. Raises why there is none."""


class Fetching:
    """For all topics that answer NO_STATE: never is one taken without its state. `run` goes on for ever."""

    def __init__(self, topics: Topics[Any], owner_of: OwnerOf, snapshot_of: SnapshotOf) -> None:
        self._topics = topics
        self._owner_of = owner_of
        self._snapshot_of = snapshot_of
        self._at_once = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """Looks for such topics, and tries again for those that it could not help."""
        while True:
            await asyncio.sleep(FETCH_SECONDS)
            every = [entry.found for entry in self._topics.registry if entry.found is not None]
            await asyncio.gather(*(self._fetch(topic) for topic in every if _has_no_state(topic)))

    async def _fetch(self, topic: Closed | TopicBase) -> None:
        name = topic.record.name if isinstance(topic, Closed) else topic.name
        owner = ""
        async with self._at_once:
            try:
                if owner := await self._owner_of(name):
                    incarnation, loaded = await self._snapshot_of(owner, name)
                    await renew(self._topics, name, incarnation, loaded)
                    logger.warning("topic %s: the snapshot of its owner at %s was fetched and imported", name, owner)
                    return
                note = "nobody owns it now whose snapshot could be fetched"
            except SeqdedupeError as e:
                note = f"its owner's snapshot could not be fetched: {e.message}"
            except Exception as e:
                # Whatever it is: the other topics are fetched all the same, and this one is tried again.
                logger.error("the snapshot of topic %s could not be fetched", name, exc_info=e)
                note = f"its owner's snapshot could not be fetched: {type(e).__name__}: {e}"
        if isinstance(topic, Closed):
            if topic.note != note:
                logger.warning("topic %s has no state here: %s", name, note)
            topic.owner_address, topic.note = owner, note


def _has_no_state(topic: Closed | TopicBase) -> bool:
    why = topic.why if isinstance(topic, Closed) else topic.damage
    return topic.state is State.DAMAGED and isinstance(why, SeqdedupeError) and why.reason == "NO_STATE"
