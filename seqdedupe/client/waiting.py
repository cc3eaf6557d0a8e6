"""Who waits for the sidecar says so, once each time."""

import asyncio
import logging
import math
from collections.abc import Callable

from seqdedupe.errors import UnavailableError

OnWaiting = Callable[[UnavailableError], None]

SAY_WAITING_SECONDS = 1.0

_log = logging.getLogger("seqdedupe")


def logged(on_waiting: OnWaiting) -> OnWaiting:
    """The same, where no event loop calls it: what it raises is logged, and ends nobody's work."""

    def call(why: UnavailableError) -> None:
        try:
            on_waiting(why)
        except Exception:  # noqa: BLE001 (whatever it is, it is logged)
            _log.exception("on_waiting has failed when it was told: %s", why)

    return call


class Waiting:
    """Calls `on_waiting`, on the event loop, once each time that something has waited for SAY_WAITING_SECONDS.

    What it raises ends nobody's work: the loop's exception handler is given it, which logs it.
    """

    def __init__(self, on_waiting: OnWaiting | None) -> None:
        self._on_waiting = on_waiting
        self._since: float | None = None

    def waits(self, why: UnavailableError) -> None:
        """It waits, or waits on."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._since is None:
            self._since = now
        if self._on_waiting is not None and now - self._since >= SAY_WAITING_SECONDS:
            self._since = math.inf  # said
            loop.call_soon(self._on_waiting, why)

    def goes_on(self) -> None:
        """What it waited for is there."""
        self._since = None
