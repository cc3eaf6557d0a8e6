"""Patterns of services over the sidecar, each one object: needs the extra `services`.

Each has a folder or file: `outbox`, `consumer`, `inbox`, `pipe`. Here is what they share: when one that stands by may
take over.
"""

import time


class Stillness:
    """Whether nothing has changed for long of what the one that works would change: then who stands by takes over.

    It is looked at from time to time, and measured by this process's own clock.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: object = self  # equal to nothing else
        self._since = 0.0

    def has_lasted(self, seen: object) -> bool:
        """This is what is seen now: whether it has been the same for so long."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since >= self._seconds
