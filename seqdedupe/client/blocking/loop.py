"""The thread whose event loop runs all network work of a process.

Begin with `run`. Readers iterate over messages already received in their caller's thread (`Messages`).
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
    """Raise INVALID_REQUEST if the loop's thread does not exist, because a call would then never return. The thread
    does not exist in a forked process, and when the interpreter shuts down."""
    check_not_forked()
    if sys.is_finalizing():
        raise error(
            "INVALID_REQUEST",
            "the interpreter has ended, so the client's thread has ended too",
            hint="Close producers and readers before: in a `with` block, or by atexit.",
        )


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop. The first call starts its thread. Raises INVALID_REQUEST if the thread cannot exist."""
    global _loop, _thread
    check_is_there()
    with _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_loop.run_forever, name="seqdedupe-client", daemon=True)
            _thread.start()
        return _loop


def run(begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on the loop, and return its result. If the wait is interrupted, the coroutine is cancelled.

    Raises INVALID_REQUEST if no thread would run it.
    """

    async def work() -> T:
        return await begin()

    loop = event_loop()
    if threading.current_thread() is _thread:
        raise error(
            "INVALID_REQUEST",
            "a call that blocks was made in the client's own thread, so the thread would wait for itself forever",
            hint="The garbage collector may run a `__del__` there: close producers and readers before they are lost.",
        )
    future = asyncio.run_coroutine_threadsafe(work(), loop)
    try:
        return future.result()
    finally:
        future.cancel()


# -- Iteration over messages in threads. Messages already received need no call to the loop's thread.


class Messages:
    """The base of all readers for threads."""

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
        # Switching to the loop's thread for each message would cost more than reading a whole batch there.
        return self.on_loop.take_record() or run(self.on_loop.fetch)

    def batches(self) -> Iterator[StoredBatch]:
        """Iterate over whole batches as stored. The first and the last batch of each partition are cut to the requested
        range."""
        while (stored := self.next_batch()) is not None:
            yield stored

    def next_batch(self) -> StoredBatch | None:
        """Return the next whole batch; None at the end. If messages of the current batch were read one by one, return
        the rest of that batch."""
        return self.on_loop.rest_in_hand() if self.on_loop.has_in_hand() or self._fetch() else None

    def close(self) -> None:
        """End the reader. Another thread that waits for a message of this reader receives the end of the messages."""
        run(self.on_loop.close)
