"""How long credentials are valid, for metrics and alerts; and whose tokens are shown after they have expired.

`Credential` is one of them: a certificate, a list of revoked certificates, a caller's token. `ExpiredTokens` counts and
logs the calls that show an expired token.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cryptography import x509

from broker_sidecar.security.subject import host_of
from seqdedupe.errors import SeqdedupeError

logger = logging.getLogger("seqdedupe.security")

MAX_SUBJECTS = 100
"""Subjects of tokens that have series of their own: of valid tokens, and of expired ones that are still shown."""

OTHER = "other"
"""The other subjects whose expired tokens are shown, together."""

REPEAT_SECONDS = 600.0
"""The log names a subject with an expired token once in this time."""


class Validity(NamedTuple):
    """From when to when something is valid. Unix time; `-inf` where the beginning is not known."""

    starts_seconds: float
    ends_seconds: float


def of_certificates(certificates: Iterable[x509.Certificate]) -> Validity:
    """The validity of the certificate that expires first. There has to be one."""
    return soonest(
        Validity(one.not_valid_before_utc.timestamp(), one.not_valid_after_utc.timestamp()) for one in certificates
    )


def soonest(validities: Iterable[Validity]) -> Validity:
    """The one that ends first. There has to be one."""
    return min(validities, key=lambda one: one.ends_seconds)


class Credential(NamedTuple):
    """Something that a sidecar shows or believes, and how long it is valid."""

    kind: str
    """`server_certificate`, `client_authority`, `revocation_list` or `token`."""
    subject: str
    """Whose token it is. Empty for all else."""
    validity: Validity


class ExpiredTokens:
    """Calls that showed a token after its end, by the token's subject.

    A subject counts only where the token's signature was verified, so a caller without a key writes nothing here. At
    most `MAX_SUBJECTS` are told apart; the others count as `OTHER`.
    """

    def __init__(self, now_seconds: Callable[[], float] = time.monotonic) -> None:
        self._now_seconds = now_seconds
        self.calls: dict[str, int] = {OTHER: 0}
        """By subject. Only ever rises."""
        self._logged: dict[str, tuple[float, int]] = {}
        """By subject: when the log may name it again, and how many calls there were when it did."""

    def add(self, e: SeqdedupeError, address: str) -> None:
        """Counts a refused call, if an expired token is why; the log names the subject, not each time."""
        if e.reason != "TOKEN_EXPIRED" or (subject := e.numbers.get("subject")) is None:
            return
        name = subject if subject in self.calls or len(self.calls) <= MAX_SUBJECTS else OTHER
        calls = self.calls[name] = self.calls.get(name, 0) + 1
        now_seconds = self._now_seconds()
        again_seconds, logged_calls = self._logged.get(name, (now_seconds, 0))
        if now_seconds >= again_seconds:
            self._logged[name] = now_seconds + REPEAT_SECONDS, calls
            told = {"subject": subject, "address": host_of(address), "calls": calls - logged_calls}
            logger.warning("calls are refused: %s [TOKEN_EXPIRED]", e.message, extra=told)
