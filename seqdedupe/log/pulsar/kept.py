"""What is kept of a topic for whoever reads on: cursors where somebody stopped, and the newest steps."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pulsar.asyncio

from seqdedupe.errors import UnavailableError
from seqdedupe.log.pulsar.cursor import KEPT_TIMEOUT_SECONDS, Cursor, Step
from seqdedupe.log.pulsar.ledgers import Ledgers
from seqdedupe.log.pulsar.places import Point
from seqdedupe.log.pulsar.reader import open_reader

KEPT_CURSORS = 4
"""That nobody uses."""
IDLE_SECONDS = 30.0
"""One that nobody has used for so long is closed."""
MAX_READING = 8
"""Cursors in use; who wants more waits for a step of another one."""
KEPT_STEPS = 64
KEPT_BYTES = 4 * 1024 * 1024
"""Of steps, together; the newest is kept whatever its size."""


class Kept:
    """The readers of one topic. So many entries are fetched ahead by each."""

    def __init__(
        self,
        client: pulsar.asyncio.Client,
        topic: str,
        queue_entries: Callable[[], int],
        ledgers: Callable[[], Awaitable[Ledgers]],
    ) -> None:
        self._client = client
        self._topic = topic
        self._queue_entries = queue_entries
        self._ledgers = ledgers
        self._idle: deque[Cursor] = deque()
        self._steps: deque[Step] = deque(maxlen=KEPT_STEPS)
        self._reading = asyncio.Semaphore(MAX_READING)
        self._closing: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def nearest(self, index: int, point: Point) -> Point:
        """The last place from which one can read on that is not before this point, and has not the message with this
        index before it; one whose step is kept, if there is one that holds it."""
        for step in reversed(self._steps):
            if step.start.next_index <= index < step.end.next_index:
                return step.start
        points = [point, *(step.end for step in self._steps), *(cursor.here for cursor in self._idle)]
        return max((one for one in points if one.next_index <= index), key=lambda one: one.size_bytes, default=point)

    async def step(self, here: Point, limit: Point) -> Step:
        """The step that begins here. Raises what `Cursor.step` does."""
        for step in self._steps:
            if step.start.size_bytes == here.size_bytes:
                return step
        if any(cursor.here.size_bytes == here.size_bytes for cursor in self._idle):
            try:
                return await self._read(here, limit)
            except UnavailableError:
                # Its connection may be gone, and is not there again yet.
                pass
        return await self._read(here, limit)

    async def _read(self, here: Point, limit: Point) -> Step:
        async with self.cursor(here) as cursor:
            return self.keep(await cursor.step(limit))

    def keep(self, step: Step) -> Step:
        """Keeps a step."""
        if step.entries is not None:
            self._steps.append(step)
            size_bytes = sum(len(each.entries.raw) for each in self._steps if each.entries)
            while size_bytes > KEPT_BYTES and len(self._steps) > 1:
                oldest = self._steps.popleft().entries
                size_bytes -= len(oldest.raw) if oldest else 0
        return step

    @asynccontextmanager
    async def cursor(self, here: Point, *, keeps: bool = True) -> AsyncIterator[Cursor]:
        """A cursor that stands here: one that was kept, else a new one. With `keeps` it is kept, unless this raises."""
        async with self._reading:
            cursor = await self._taken(here)
            try:
                yield cursor
            except BaseException:
                self._close(cursor)
                raise
            if keeps:
                self._put_back(cursor)
            else:
                self._close(cursor)

    async def _taken(self, here: Point) -> Cursor:
        cursor = next((each for each in self._idle if each.here.size_bytes == here.size_bytes), None)
        if cursor is not None:
            self._idle.remove(cursor)
            return cursor
        start = here.message_id if here.message_id.entry_id >= 0 else None
        reader = await open_reader(self._client, self._topic, start, self._queue_entries())
        return Cursor(reader, self._topic, here, self._ledgers)

    async def wait_for_more(self, here: Point) -> None:
        """Returns when an entry stands after this place. Whoever is cancelled leaves the reader to the next one.

        Raises LOG_UNREADABLE.
        """
        cursor = await self._taken(here)
        try:
            await cursor.wait_for_more()
        except UnavailableError:
            self._close(cursor)
            raise
        except BaseException:
            self._put_back(cursor)
            raise
        self._put_back(cursor)

    def _put_back(self, cursor: Cursor) -> None:
        now = asyncio.get_running_loop().time()
        cursor.timeout_seconds, cursor.idle_since = KEPT_TIMEOUT_SECONDS, now
        self._idle.append(cursor)
        if len(self._idle) > KEPT_CURSORS or self._is_closed:
            self._close(self._idle.popleft())
        self._start_timer(now)

    def _start_timer(self, now: float) -> None:
        if self._timer is None and self._idle:
            left = self._idle[0].idle_since + IDLE_SECONDS - now
            self._timer = asyncio.get_running_loop().call_later(max(left, 0.0), self._close_idle)

    def _close_idle(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._idle and self._idle[0].idle_since + IDLE_SECONDS <= now:
            self._close(self._idle.popleft())
        self._start_timer(now)

    def _close(self, cursor: Cursor) -> None:
        task = asyncio.get_running_loop().create_task(cursor.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Lets go of all readers; one that is in use is closed when its step ends."""
        self._is_closed = True
        self._steps.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._idle:
            self._close(self._idle.popleft())
        if self._closing:
            await asyncio.wait(self._closing)
