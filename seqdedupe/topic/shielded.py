"""Work that goes on when whoever asked for it is cancelled."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


async def shielded(tasks: dict[str, asyncio.Task[R]], name: str, work: Coroutine[Any, Any, R]) -> R:
    """Runs something in a task of its own, listed while it runs, which goes on when the caller is cancelled."""

    async def run() -> R:
        try:
            return await work
        finally:
            del tasks[name]

    tasks[name] = task = asyncio.ensure_future(run())
    # Whoever asked for it may have gone.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return await asyncio.shield(task)
