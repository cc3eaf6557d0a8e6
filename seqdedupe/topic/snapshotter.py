"""When a topic's numbers go to the store: one snapshot at a time, shared by all that wait for it."""

import asyncio
import logging
from collections.abc import Callable

from seqdedupe.core.producers import Producers
from seqdedupe.errors import SeqdedupeError
from seqdedupe.message_id import Position
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Delta, Snapshots

logger = logging.getLogger("seqdedupe.snapshots")


class Snapshotter:
    """Takes snapshots of a topic's producers.

    `describe` gives the term and the position of the last confirmed message at that moment. It and the numbers are
    copied in one step of the event loop, so that position and state belong together; syncing happens beside serving.
    """

    def __init__(
        self,
        store: Store,
        snapshots: Snapshots,
        producers: Producers,
        describe: Callable[[], tuple[int, Position]],
        *,
        next_index: int,
    ) -> None:
        self.next_index = next_index
        """What the last durable snapshot covers: all messages below this index."""
        self._store = store
        self._snapshots = snapshots
        self._producers = producers
        self._describe = describe
        self._names_stored = len(producers)
        self._running = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None
        self._compaction: asyncio.Task[None] | None = None

    @property
    def is_due(self) -> bool:
        """Whether a snapshot has been asked for and not begun."""
        return self._next is not None

    async def take(self) -> None:
        """Returns when a snapshot that began after this call is durable. Raises STORE_UNAVAILABLE.

        After a failure nothing is lost: the next snapshot holds what this one would have.
        """
        if self._next is None:
            self._next = asyncio.ensure_future(self._take())
        await asyncio.shield(self._next)

    async def finish(self) -> None:
        """Returns when the snapshot that is being taken, if any, is durable or has failed."""
        async with self._running:
            pass

    async def _take(self) -> None:
        async with self._running:
            self._next = None
            term, position = self._describe()
            changed, persisted, epochs = self._producers.collect_dirty()
            known = len(self._producers)
            try:
                opening = self._snapshots.write_delta(
                    Delta(
                        term=term,
                        next_index=position.index + 1,
                        message_id=position.message_id,
                        first_name=self._names_stored,
                        names=self._producers.names_from(self._names_stored),
                        slots=changed,
                        persisted=persisted,
                        epochs=epochs,
                    )
                )
                await self._store.flush(opening)
            except SeqdedupeError:
                self._producers.mark_dirty(changed)
                raise
            self._names_stored = known
            self.next_index = position.index + 1
        if self._compaction is None or self._compaction.done():
            self._compaction = asyncio.ensure_future(self._compact())

    async def _compact(self) -> None:
        try:
            await self._snapshots.compact_if_due()
        except SeqdedupeError as e:
            logger.warning("snapshots were not compacted: %s", e)

    async def close(self) -> None:
        """Waits for what is under way."""
        await self.finish()
        if self._compaction is not None:
            await self._compaction
