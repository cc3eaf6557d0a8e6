"""The thread on whose event loop all network work of a process runs."""

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from seqdedupe.client.connection import check_not_forked
from seqdedupe.errors import error

T = TypeVar("T")

_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
_loop_lock = threading.Lock()


def check_is_there() -> None:
    """Raises INVALID_REQUEST where the thread is not, or not any more, and would be waited for for ever: in a forked
    process, and at the end of the interpreter."""
    check_not_forked()
    if sys.is_finalizing():
        raise error(
            "INVALID_REQUEST",
            "the interpreter has ended, and with it the client's thread",
            hint="Close producers and readers before: in a `with` block, or by atexit.",
        )


def event_loop() -> asyncio.AbstractEventLoop:
    """Begins the thread when it is first needed. Raises INVALID_REQUEST where it cannot be."""
    global _loop, _thread
    check_is_there()
    with _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_loop.run_forever, name="seqdedupe-client", daemon=True)
            _thread.start()
        return _loop


def run(begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Begins the work on the loop and waits for it. If the wait is interrupted, so is the work.

    Raises INVALID_REQUEST where nobody would do the work.
    """

    async def work() -> T:
        return await begin()

    loop = event_loop()
    if threading.current_thread() is _thread:
        raise error(
            "INVALID_REQUEST",
            "a call that blocks was made in the client's own thread, which would wait for itself",
            hint="The garbage collector may run a `__del__` there: close producers and readers before they are lost.",
        )
    future = asyncio.run_coroutine_threadsafe(work(), loop)
    try:
        return future.result()
    finally:
        future.cancel()
