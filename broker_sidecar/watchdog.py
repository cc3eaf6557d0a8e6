"""A process whose event loop stands still ends. The threads of Pulsar's client go on answering the broker's pings, so
that it would hold its topics for ever, and no other sidecar could have them."""

import asyncio
import faulthandler
import signal
import threading
import time
from collections.abc import Callable

STANDS_STILL_SECONDS = 30.0
"""As long as a broker waits for a ping, by default. No step of the event loop takes a second."""
LOOKS = 10
"""So many looks in a row must find the event loop where it was. A process that was stopped as a whole, or had no
processor, has not looked either, and goes on."""
TELL_SECONDS = 2


class Watchdog:
    """Watches the event loop it is made on, by a thread, until the process ends. `end` is called there, and ends it.

    A loop that is kept by something that never lets go of the interpreter's lock is not noticed.
    """

    def __init__(self, end: Callable[[str], None], limit_seconds: float = STANDS_STILL_SECONDS) -> None:
        self._end = end
        self._limit_seconds = limit_seconds
        self._loop = asyncio.get_running_loop()
        self._beats = 0
        self._beat()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _beat(self) -> None:
        self._beats += 1
        self._loop.call_later(self._limit_seconds / LOOKS / 2, self._beat)

    def _watch(self) -> None:
        seen = looks = 0
        while True:
            time.sleep(self._limit_seconds / LOOKS)
            seen, looks = (seen, looks + 1) if self._beats == seen else (self._beats, 0)
            if looks == LOOKS:
                # Should telling why not end, because nobody takes what is told.
                signal.alarm(TELL_SECONDS)
                faulthandler.dump_traceback()
                self._end(f"its event loop has stood still for {self._limit_seconds:.0f} s")
