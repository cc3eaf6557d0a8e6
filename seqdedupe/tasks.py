"""What goes on beside others: news for all that wait, work that is tried again, work that outlasts who asked for it."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

FIRST_DELAY_SECONDS = 0.05
LONGEST_DELAY_SECONDS = 2.0

R = TypeVar("R")


class Broadcast:
    """Wakes all that wait, once. Whoever is cancelled while waiting leaves nothing behind."""

    def __init__(self) -> None:
        # A dict, for its order: they go on in the order in which they came.
        self._waiting: dict[asyncio.Future[None], None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def tell(self) -> None:
        """There is news."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self) -> None:
        """Returns at the next news."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        try:
            await future
        finally:
            self._waiting.pop(future, None)


async def again_until(
    done: Callable[[], Awaitable[bool]], pause: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Waits and tries, with growing delays, until it is done. It was tried once already.

    `pause` is given the seconds that should pass before it is tried again.
    """
    delay = FIRST_DELAY_SECONDS
    await pause(delay)
    while not await done():
        delay = min(2 * delay, LONGEST_DELAY_SECONDS)
        await pause(delay)


def retrieve(done: asyncio.Future[Any]) -> None:
    """For `add_done_callback`, of what may fail when whoever asked for it has gone: asyncio would report that."""
    if not done.cancelled():
        done.exception()


async def shielded(tasks: dict[str, asyncio.Task[R]], name: str, work: Coroutine[Any, Any, R]) -> R:
    """Runs something in a task of its own, listed while it runs, which goes on when the caller is cancelled."""

    async def run() -> R:
        try:
            return await work
        finally:
            del tasks[name]

    tasks[name] = task = asyncio.ensure_future(run())
    task.add_done_callback(retrieve)
    return await asyncio.shield(task)
