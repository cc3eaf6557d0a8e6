"""When may whoever stands by take over? When nothing has changed for long of what the one that works would change."""

import time


class Stillness:
    """Of something that is looked at from time to time, measured by this process's own clock."""

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
