"""In which thread a pipe's function is called: one of its own, or that of whoever waits for a blocking pipe."""

import asyncio
import queue
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from seqdedupe.client.blocking.loop import event_loop

T = TypeVar("T")


class CallerThread(Executor):
    """Runs in the thread that waits in `run` whatever coroutines on the client's event loop submit meanwhile."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        future: Future[T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except Exception as e:  # noqa: BLE001 (it is for whoever waits for the future)
                    future.set_exception(e)

        self._work.put(work)
        return future

    def run(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Begins it on the client's event loop and waits for its end, working meanwhile. If it is interrupted, the work
        is cancelled, and has ended when this raises."""

        async def all_of_it() -> T:
            try:
                return await begin()
            finally:
                self._work.put(None)

        running = asyncio.run_coroutine_threadsafe(all_of_it(), event_loop())
        try:
            while (work := self._work.get()) is not None:
                work()
        except BaseException:
            running.cancel()
            while self._work.get() is not None:
                pass
            raise
        return running.result()
