"""The thread on whose event loop all network work of a process runs, and what need not go there.

Begin with `run`. Readers iterate over what was received already in their caller's thread (`Messages`).
"""

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from seqdedupe.client import message as _message
from seqdedupe.client.connection import check_not_forked
from seqdedupe.client.message import Message, StoredBatch
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


# -- How messages are iterated over in threads: what was received already needs no hop to the loop's thread.


class Messages:
    """What readers for threads have in common."""

    on_loop: _message.Messages

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def topic(self) -> str:
        return self.on_loop.topic

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        while (message := self.on_loop.next_in_hand()) is None:
            if not self._fetch():
                raise StopIteration
        return message

    def _fetch(self) -> bool:
        # The hop costs more than the batch.
        return self.on_loop.take_record() or run(self.on_loop.fetch)

    def batches(self) -> Iterator[StoredBatch]:
        """Whole batches as stored; the first and last, of each partition, are cut to what was asked for."""
        while (stored := self.next_batch()) is not None:
            yield stored

    def next_batch(self) -> StoredBatch | None:
        """The next whole batch, or what single messages have left of one; None at the end."""
        return self.on_loop.rest_in_hand() if self.on_loop.has_in_hand() or self._fetch() else None

    def close(self) -> None:
        """Ends it; another thread that waits in it gets the end."""
        run(self.on_loop.close)
