"""Openings that the client ends in its own time, whoever still waits for them."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any


async def opened(opening: Coroutine[Any, Any, Any], close: Callable[[Any], None]) -> Any:
    """What is opened. If this is cancelled it is closed, should it come to be: nobody else could, and it would stay."""
    task = asyncio.ensure_future(opening)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(partial(_close, close))
        raise


def _close(close: Callable[[Any], None], task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and task.exception() is None:
        close(task.result())
