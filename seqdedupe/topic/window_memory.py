"""What the windows of deduplication IDs of all topics of a sidecar may take in memory; what is more goes to runs."""

import asyncio
import logging

from seqdedupe.core.id_window import IdWindow
from seqdedupe.errors import SeqdedupeError
from seqdedupe.topic.broadcast import Broadcast
from seqdedupe.topic.window_runs import WindowRuns

EXCESS = 4
"""One in so many of the limit may be taken more before publishers wait."""

logger = logging.getLogger("seqdedupe.exports")


class WindowMemory:
    """Has the largest window move its oldest IDs to a run while all together take more than `limit_bytes`.

    One run is made at a time. What comes meanwhile may take a part more (`EXCESS`); a window that is read from the log
    takes what it needs. While the store cannot be written all stays in memory.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._bytes: dict[WindowRuns, int] = {}
        self._windows: dict[WindowRuns, IdWindow] = {}
        self._total = 0
        self._moving: asyncio.Task[None] | None = None
        self._progress = Broadcast()

    async def room(self) -> None:
        """Returns when more may come: memory has room, or will not get any now."""
        while self._moving is not None and self._total > self.limit_bytes + self.limit_bytes // EXCESS:
            await self._progress.wait()

    def measure(self, runs: WindowRuns, window: IdWindow) -> None:
        """This window may have grown. That of a topic which is closed counts no more."""
        if runs.is_closed:
            return
        self._windows[runs] = window
        self._total -= self._bytes.get(runs, 0)
        self._bytes[runs] = window.needed_bytes + runs.imported.memory_bytes
        self._total += self._bytes[runs]
        if self._total > self.limit_bytes and self._moving is None:
            self._moving = asyncio.ensure_future(self._make_room())
            self._moving.add_done_callback(self._moved)

    async def forget(self, runs: WindowRuns) -> None:
        """The topic of this window is closed: nothing of it is moved or measured any more."""
        self._windows.pop(runs, None)
        self._total -= self._bytes.pop(runs, 0)
        if self._moving is not None:
            self._moving.cancel()
            await asyncio.wait({self._moving})

    async def _make_room(self) -> None:
        failed: set[WindowRuns] = set()
        while self._total > self.limit_bytes:
            left = [runs for runs in self._bytes if runs not in failed]
            for runs in sorted(left, key=lambda runs: self._bytes[runs], reverse=True):
                try:
                    if await runs.move_out():
                        break
                except SeqdedupeError as e:
                    # A topic that takes no snapshot now does not hold up others.
                    failed.add(runs)
                    logger.warning("deduplication IDs stay in memory for now: %s", e)
            else:
                return
            self._measure_again(runs)
            self._progress.tell()
            await self._merge(runs)

    async def _merge(self, runs: WindowRuns) -> None:
        try:
            while await runs.merge():
                self._measure_again(runs)
        except SeqdedupeError as e:
            logger.warning("runs of deduplication IDs are not merged for now: %s", e)

    def _measure_again(self, runs: WindowRuns) -> None:
        if (window := self._windows.get(runs)) is not None:
            needed_bytes = window.needed_bytes + runs.imported.memory_bytes
            self._total += needed_bytes - self._bytes[runs]
            self._bytes[runs] = needed_bytes

    def _moved(self, task: "asyncio.Task[None]") -> None:
        self._moving = None
        self._progress.tell()
        if not task.cancelled() and (e := task.exception()) is not None:
            logger.error("deduplication IDs stay in memory", exc_info=e)
