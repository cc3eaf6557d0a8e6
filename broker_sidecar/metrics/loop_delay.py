"""How late the event loop comes to what is due."""

import asyncio

from seqdedupe.buckets import Buckets

LOOK_SECONDS = 0.1
DELAY_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class LoopDelay:
    """Looks every LOOK_SECONDS, from now on until `close`, on the event loop that runs."""

    def __init__(self) -> None:
        self.seconds = Buckets(DELAY_SECONDS)
        self._loop = asyncio.get_running_loop()
        self._wait()

    def _wait(self) -> None:
        self._due = self._loop.time() + LOOK_SECONDS
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self.seconds.add(max(0.0, self._loop.time() - self._due))
        self._wait()

    def close(self) -> None:
        self._timer.cancel()
