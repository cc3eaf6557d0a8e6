"""How long to keep away from a topic that others own: longer after each time that one was shut out of it."""

from collections.abc import Callable

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 60.0
"""Who has served for so long without having been shut out begins anew with the first delay."""

_RANDOM_BYTES = 4


class KeepingAway:
    """No I/O: it says how long, somebody else waits. `random_bytes` gives the jitter, so that not all come at once."""

    def __init__(self, now_seconds: Callable[[], float], random_bytes: Callable[[int], bytes]) -> None:
        self._now_seconds = now_seconds
        self._random_bytes = random_bytes
        self._until = now_seconds()
        self._shut_outs = 0
        self._served_since: float | None = None

    @property
    def left_seconds(self) -> float:
        """How long from now on; 0: not any more."""
        return max(0.0, self._until - self._now_seconds())

    def serves(self) -> None:
        """The topic is ours."""
        self._served_since = self._now_seconds()

    def gave_up(self, seconds: float) -> None:
        """The topic was ours, and another one shall have it: for so long."""
        self._served_since = None
        self._until = self._now_seconds() + seconds

    def found_owned(self) -> None:
        """The topic is another one's. If it was ours, we were shut out."""
        now, since = self._now_seconds(), self._served_since
        seconds = FIRST_SECONDS
        if since is not None:
            if now - since >= LONGEST_SECONDS:
                self._shut_outs = 0
            seconds = min(FIRST_SECONDS * 2**self._shut_outs, LONGEST_SECONDS)
            self._shut_outs += 1
            self._served_since = None
        jitter = int.from_bytes(self._random_bytes(_RANDOM_BYTES), "little") / 2 ** (8 * _RANDOM_BYTES)
        self._until = now + seconds * (1 + jitter) / 2
