"""The thread on whose event loop all network work of a process runs."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from seqdedupe.client.connection import check_not_forked

T = TypeVar("T")

_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def event_loop() -> asyncio.AbstractEventLoop:
    """Begins the thread when it is first needed. Raises INVALID_REQUEST in a forked process."""
    global _loop
    check_not_forked()
    with _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="seqdedupe-client", daemon=True).start()
        return _loop


def run(begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Begins the work on the loop and waits for it. If the wait is interrupted, so is the work."""

    async def work() -> T:
        return await begin()

    loop = event_loop()
    future = asyncio.run_coroutine_threadsafe(work(), loop)
    try:
        return future.result()
    finally:
        future.cancel()
