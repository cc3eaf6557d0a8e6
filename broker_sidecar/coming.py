"""A topic that comes from another sidecar: what has come of it, until it is a topic of this one, or nothing is left."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from broker_sidecar.streams import Stream
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.embedded.arrival import Arrival
from seqdedupe.store.db import Store
from seqdedupe.store.incoming import IncomingSnapshot
from seqdedupe.store.topics import TopicRecord
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.kind import TopicKind
from seqdedupe.topic.publishing import Topic
from seqdedupe.topic.retry import again_until
from seqdedupe.topic.stored import Stored

T = TypeVar("T")

logger = logging.getLogger("seqdedupe.server")


@dataclass(eq=False)
class Coming:
    """One that comes. What writes it is done by one thread, in order, whoever waits for it."""

    record: TopicRecord
    arrival: Arrival
    snapshot: IncomingSnapshot
    stream: Stream
    receiver: bytes = b""
    """What whoever gives it was answered: which data directory this is, and which move."""
    stored: Stored | None = None
    """The snapshot, once all of it has come."""
    is_taken: bool = False
    """It is being made this sidecar's, whatever becomes of the call."""
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "seqdedupe-arriving"))

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Raises MOVE_FAILED where that raises OSError: the disk is full, for example."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        except OSError as e:
            raise error("MOVE_FAILED", f"topic {self.record.name} cannot be written here: {e}") from e

    async def read(self, kind: TopicKind[Topic]) -> Stored:
        """All of the snapshot has come, unless it was said before. Raises what is wrong with it, STORE_UNAVAILABLE."""
        if self.stored is None:
            await self.snapshot.finish()
            self.stored = await kind.load(self.record)
        return self.stored

    def end(self, topics: Topics[Topic]) -> None:
        """Nothing more is written. Unless it is a topic by now nothing is left of it, soon, or after the next start."""
        if self.arrival.has_begun and not topics.is_draining:
            topics.in_background(self._drop(topics.store))
        else:
            self._thread.shutdown(wait=False)

    async def _drop(self, store: Store) -> None:
        try:
            if not await self._is_dropped(store):
                await again_until(lambda: self._is_dropped(store))
        finally:
            self._thread.shutdown(wait=False)

    async def _is_dropped(self, store: Store) -> bool:
        try:
            # First what takes room: a full disk takes no removal from the store. The folder goes last, for it says that
            # there is something; while it is there none of this incarnation comes.
            await self.run(self.arrival.remove_messages)
            await store.remove_snapshot(self.record.incarnation)
            await self.run(self.arrival.remove)
        except SeqdedupeError as e:
            logger.warning("what has come of topic %s cannot be removed now: %s", self.record.name, e)
            return False
        return True
