"""For clients that leave it to their users to send again what was not confirmed: NATS and RabbitMQ Streams."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Protocol

from bench.compare.load import PAUSE_SECONDS, Load, payload

MOST_UNCONFIRMED = 4_000
RECONNECT_SECONDS = 0.2
ANSWER_SECONDS = 5.0


class Broken(Exception):
    """The connection ended, or something sent on it was refused: what has no confirmation is sent again."""


class Window:
    """The messages without a confirmation, oldest first."""

    def __init__(self, told: Callable[[int], None] | None = None) -> None:
        self.unconfirmed: dict[int, bytes] = {}
        self._told = told
        """Of each that is confirmed."""
        self._changed = asyncio.Event()
        self._broken: str | None = None

    def confirm(self, number: int) -> None:
        if self.unconfirmed.pop(number, None) is not None and self._told is not None:
            self._told(number)
        self._changed.set()

    def breaks(self, why: str) -> None:
        """Whoever sends or waits gets `Broken`."""
        self._broken = why
        self._changed.set()

    def mend(self) -> None:
        """There is a new connection."""
        self._broken = None

    def check(self) -> None:
        if self._broken is not None:
            raise Broken(self._broken)

    async def until(self, unconfirmed: int) -> None:
        """Until there are at most so many. Raises TimeoutError when nothing is confirmed any more."""
        while len(self.unconfirmed) > unconfirmed:
            self._changed.clear()
            self.check()
            await asyncio.wait_for(self._changed.wait(), ANSWER_SECONDS)


class Sender(Protocol):
    """One connection."""

    async def send(self, number: int, data: bytes) -> None: ...

    async def flush(self) -> None:
        """What `send` may have gathered goes out."""


async def publish(
    load: Load,
    window: Window,
    connect: Callable[[], AbstractAsyncContextManager[Sender]],
    breaks_with: tuple[type[Exception], ...],
) -> None:
    """Sends the load over one connection after the other until all is confirmed."""
    load.confirmed = lambda: load.sent - len(window.unconfirmed)
    numbers = iter(load)
    breaks: tuple[type[Exception], ...] = (Broken, OSError, TimeoutError, *breaks_with)
    done = False
    while not done:
        window.mend()
        connection = AsyncExitStack()
        try:
            sender = await asyncio.wait_for(connection.enter_async_context(connect()), ANSWER_SECONDS)
            await _send(numbers, window, sender)
            load.finish()
            done = True
        except breaks:
            await asyncio.sleep(RECONNECT_SECONDS)
        with contextlib.suppress(*breaks):
            await asyncio.wait_for(connection.aclose(), ANSWER_SECONDS)


async def _send(numbers: Iterator[int | None], window: Window, sender: Sender) -> None:
    for number, data in list(window.unconfirmed.items()):
        await sender.send(number, data)
    for given in numbers:
        if given is None:
            window.check()
            await sender.flush()
            await asyncio.sleep(PAUSE_SECONDS)
            continue
        data = window.unconfirmed[given] = payload(given)
        window.check()
        await sender.send(given, data)
        if len(window.unconfirmed) >= MOST_UNCONFIRMED:
            await sender.flush()
            await window.until(MOST_UNCONFIRMED * 3 // 4)
    await sender.flush()
    await window.until(0)
