"""Patterns of services that use the sidecar. Each pattern is one class; all of them need the extra `services`.

Each pattern has a folder or file: `outbox`, `consumer`, `inbox`, `pipe`. This file contains the shared test that
decides when a standby process may take over.
"""

import time


class Stillness:
    """Decides whether the working process has shown no change for long enough, so that a standby process may take over.

    The standby process looks at the state at intervals, and measures the time with its own clock.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: object = self  # an object that is equal to nothing else
        self._since = 0.0

    def has_lasted(self, seen: object) -> bool:
        """Return whether the state has not changed for the configured number of seconds. `seen` is the current
        state."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since >= self._seconds
