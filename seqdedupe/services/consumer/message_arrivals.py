"""The waits of a consumer: for messages, for a period of time, and for the request to stop. A consumer always waits on
the client's event loop."""

import asyncio
from collections.abc import Sequence

from seqdedupe.client.blocking.loop import event_loop, run
from seqdedupe.client.message import Message
from seqdedupe.client.reader import Reader
from seqdedupe.message_id import Position

LOOK_SECONDS = 0.5
"""The interval of checks. A standby process checks whether the owner is alive. A process that shares a topic checks
which processes are alive, and which partitions each of them has."""


class Stopped(Exception):
    """The exception raised when the consumer has been asked to stop."""


class Stop:
    """The request to stop, made once from any thread or signal handler. It uses no lock, because the same thread might
    already hold that lock."""

    def __init__(self) -> None:
        self._loop = event_loop()
        self._event = asyncio.Event()
        self.is_told = False

    def tell(self) -> None:
        self.is_told = True
        self._loop.call_soon_threadsafe(self._event.set)

    def check(self) -> None:
        """Raise Stopped if the stop has been requested."""
        if self.is_told:
            raise Stopped

    def pause(self, seconds: float) -> None:
        """Wait for this time. Raises Stopped if a stop was requested before, or is requested meanwhile."""
        run(lambda: self.wait((), seconds))
        self.check()

    async def wait(self, tasks: Sequence[asyncio.Task[bool]], seconds: float) -> None:
        """Wait until one of the tasks is done, the time has passed, or a stop is requested. The tasks continue to
        run."""
        told = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({told, *tasks}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            told.cancel()


class Arrivals:
    """The messages of a topic as they arrive. A reader on the client's event loop receives them. Only one thread may
    use this object."""

    def __init__(self, reader: Reader) -> None:
        self.is_over = False
        """Whether the reader has reached its end."""
        self._reader = reader
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

    def take_more(self, most: int, stop: Stop, seconds: float) -> list[Message]:
        """Return the messages that have arrived or arrive within this time. Raises Stopped."""
        if not self.is_over:
            wait_for_any([self], stop, seconds)
        return self.take(most)

    def fetching(self) -> asyncio.Task[bool] | None:
        """Return the task that fetches the next messages; None if no more messages will arrive. Call this on the event
        loop."""
        if self._fetching is None and not self.is_over:
            self._fetching = asyncio.ensure_future(self._reader.fetch())
        return self._fetching

    def look(self) -> None:
        """Check whether the task has received messages. Raises the errors of the reader. Call this on the event
        loop."""
        fetching = self._fetching
        if fetching is not None and fetching.done():
            self._fetching = None
            self.is_over = not fetching.result()

    def close(self) -> None:
        run(self._close)

    async def _close(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)
        await self._reader.close()


def wait_for_any(arrivals: Sequence[Arrivals], stop: Stop, seconds: float) -> None:
    """Wait until one of the arrivals has messages or has ended, or until the time has passed. Raises Stopped if a stop
    is requested."""

    async def wait() -> None:
        tasks = [task for one in arrivals if (task := one.fetching()) is not None]
        await stop.wait(tasks, seconds)
        for one in arrivals:
            one.look()

    run(wait)
    stop.check()


def is_there(position: str, until: Position) -> bool:
    """Return whether a position in the consumer's row is at `until`, or after `until`."""
    now = Position.parse(position)
    return now.incarnation == until.incarnation and now.index >= until.index
