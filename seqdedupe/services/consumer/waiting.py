"""What a consumer waits for: messages, time, and to be stopped. The waiting is done on the client's event loop."""

import asyncio

from seqdedupe.client.blocking.loop import event_loop, run
from seqdedupe.client.reader import Reader
from seqdedupe.client.stored import Message


class Stopped(Exception):
    """The consumer was told to stop."""


class Stop:
    """Told once, from any thread, or from a signal's handler: no lock is in it that the same thread may hold."""

    def __init__(self) -> None:
        self._loop = event_loop()
        self._event = asyncio.Event()
        self.is_told = False

    def tell(self) -> None:
        self.is_told = True
        self._loop.call_soon_threadsafe(self._event.set)

    def check(self) -> None:
        """Raises Stopped."""
        if self.is_told:
            raise Stopped

    def pause(self, seconds: float) -> None:
        """Raises Stopped, also when that is told meanwhile."""
        run(lambda: self.wait(None, seconds))
        self.check()

    async def wait(self, task: asyncio.Task[bool] | None, seconds: float) -> None:
        """Until the task is done, the time is over, or it is stopped. The task goes on."""
        told = asyncio.ensure_future(self._event.wait())
        tasks: set[asyncio.Task[bool]] = {told} if task is None else {told, task}
        try:
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            told.cancel()


class Arrivals:
    """A topic's messages as they come, over a reader whose work is on the client's loop: one thread uses it."""

    def __init__(self, reader: Reader, stop: Stop) -> None:
        self._reader = reader
        self._stop = stop
        self._fetching: asyncio.Task[bool] | None = None

    def take(self, most: int) -> list[Message]:
        taken: list[Message] = []
        while self._fetching is None and len(taken) < most:
            message = self._reader.next_in_hand()
            if message is not None:
                taken.append(message)
            elif not self._reader.take_record():
                break
        return taken

    def wait(self, seconds: float) -> bool:
        found = run(lambda: self._wait(seconds))
        self._stop.check()
        return found

    async def _wait(self, seconds: float) -> bool:
        if self._fetching is None:
            self._fetching = asyncio.ensure_future(self._reader.fetch())
        fetching = self._fetching
        await self._stop.wait(fetching, seconds)
        if not fetching.done():
            return True
        self._fetching = None
        return fetching.result()

    def close(self) -> None:
        run(self._close)

    async def _close(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)
        await self._reader.close()
