"""Tokens that were refused: who shows the same one again and again costs no signature check."""

import hashlib
from collections import OrderedDict
from typing import Any, NamedTuple

from broker_sidecar.security.subject import network_of
from seqdedupe.errors import SeqdedupeError, error

MAX_HOSTS = 1_024
"""Of which tokens are remembered; the one that showed none for the longest time makes room."""

MAX_TOKENS = 16
"""Remembered of one host: what it shows pushes out nothing that others have shown."""

MAX_WHY_LETTERS = 200
"""Kept of why a token was refused: some of it is what the token says."""


class _Refusal(NamedTuple):
    """Numbers and text alone. An error would hold, by its traceback, all that the refused call had."""

    reason: str
    why: str
    numbers: dict[str, Any]
    since_seconds: float
    until_seconds: float


class RefusedTokens:
    """Why tokens were refused, by who showed them and the token's digest. Bounded, whatever comes."""

    def __init__(self) -> None:
        self._of_hosts: OrderedDict[str, OrderedDict[bytes, _Refusal]] = OrderedDict()

    def check(self, token: bytes, address: str, now_seconds: float) -> None:
        """Raises what this token was refused with, when it was shown from there."""
        # Nearly always there is nothing: a digest is for those who have shown something bad.
        if (tokens := self._of_hosts.get(host := network_of(address))) is None:
            return
        if (refusal := tokens.get(digest := _digest(token))) is None:
            return
        if not refusal.since_seconds <= now_seconds < refusal.until_seconds:
            del tokens[digest]
            return
        tokens.move_to_end(digest)
        self._of_hosts.move_to_end(host)
        # Kept in a variable, it would keep what the refused call had.
        raise error(refusal.reason, refusal.why, **refusal.numbers)

    def add(self, token: bytes, address: str, e: SeqdedupeError, since_seconds: float, until_seconds: float) -> None:
        """From now on it is refused so. Where the clock says an earlier or a later time, it is looked at anew."""
        host = network_of(address)
        tokens = self._of_hosts.setdefault(host, OrderedDict())
        self._of_hosts.move_to_end(host)
        if len(self._of_hosts) > MAX_HOSTS:
            self._of_hosts.popitem(last=False)
        why = e.message[:MAX_WHY_LETTERS]
        tokens[_digest(token)] = _Refusal(e.reason, why, e.numbers, since_seconds, until_seconds)
        if len(tokens) > MAX_TOKENS:
            tokens.popitem(last=False)

    def clear(self) -> None:
        """Forgets all of them: other keys are taken."""
        self._of_hosts.clear()


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
