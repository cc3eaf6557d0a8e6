"""Helpers for concurrent work: notifications to all waiting tasks, retries, and work that continues after its caller
has ended."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

FIRST_DELAY_SECONDS = 0.05
LONGEST_DELAY_SECONDS = 2.0

R = TypeVar("R")


class Broadcast:
    """A notification to all waiting tasks: each waiting task wakes once. A task that is cancelled while it waits is no
    longer in the list of waiting tasks."""

    def __init__(self) -> None:
        # A dict keeps the order: tasks continue in the order in which they came.
        self._waiting: dict[asyncio.Future[None], None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def tell(self) -> None:
        """Wake all waiting tasks."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self) -> None:
        """Wait for the next news."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        try:
            await future
        finally:
            self._waiting.pop(future, None)


async def again_until(
    done: Callable[[], Awaitable[bool]], pause: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Wait and retry, with growing delays, until `done` returns true. The caller has already tried once.

    `pause` receives the seconds that should pass before the next try.
    """
    delay = FIRST_DELAY_SECONDS
    await pause(delay)
    while not await done():
        delay = min(2 * delay, LONGEST_DELAY_SECONDS)
        await pause(delay)


async def first_of(*works: Coroutine[Any, Any, object]) -> None:
    """Wait until one of these coroutines has ended, and cancel the others. Raise the error of the ended coroutine."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def retrieve(done: asyncio.Future[Any]) -> None:
    """Retrieve the exception of finished work, so that asyncio does not report the exception as never retrieved. If the
    caller has stopped waiting for the work, no other code retrieves the exception. Pass this function to
    `add_done_callback`."""
    if not done.cancelled():
        done.exception()


async def shielded(tasks: dict[str, asyncio.Task[R]], name: str, work: Coroutine[Any, Any, R]) -> R:
    """Run `work` in a separate task, and return the result of the work. The task is in `tasks` while the work runs. If
    the caller is cancelled, the work continues."""

    async def run() -> R:
        try:
            return await work
        finally:
            del tasks[name]

    tasks[name] = task = asyncio.ensure_future(run())
    task.add_done_callback(retrieve)
    return await asyncio.shield(task)


async def shared(tasks: dict[str, asyncio.Task[R]], name: str, begin: Callable[[], Coroutine[Any, Any, R]]) -> R:
    """Return the result of the work in `tasks` with this name. If there is none, begin it, as `shielded` does."""
    running = tasks.get(name)
    return await (shielded(tasks, name, begin()) if running is None else asyncio.shield(running))
