"""Patterns of services over the sidecar, each one object: needs the extra `services`.

Each has a folder or file: `outbox`, `consumer`, `inbox`, `pipe`. This file has what they share: the test when a process
that stands by may take over.
"""

import time


class Stillness:
    """Whether the working process has shown no change for long enough. Then a process that stands by takes over.

    The process that stands by looks from time to time, and measures by its own clock.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: object = self  # equal to nothing else
        self._since = 0.0

    def has_lasted(self, seen: object) -> bool:
        """Return whether the state has been the same for that number of seconds. `seen` is the state now."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since >= self._seconds
