"""The validity of credentials, for metrics and alerts, and the subjects that still send expired tokens.

A `Credential` is a certificate, a list of revoked certificates, or a caller's token. `ExpiredTokens` counts and logs
the calls with an expired token.
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
"""The most subjects of tokens with separate metric series. The limit applies once to valid tokens, and once to expired
tokens that are still sent."""

OTHER = "other"
"""The name under which all other subjects with expired tokens are counted together."""

REPEAT_SECONDS = 600.0
"""The least time between two log lines about the same subject with an expired token."""


class Validity(NamedTuple):
    """The beginning and end of a validity, in Unix time. The beginning is `-inf` if it is unknown."""

    starts_seconds: float
    ends_seconds: float


def of_certificates(certificates: Iterable[x509.Certificate]) -> Validity:
    """Return the validity of the certificate that expires first. There must be at least one certificate."""
    return soonest(
        Validity(one.not_valid_before_utc.timestamp(), one.not_valid_after_utc.timestamp()) for one in certificates
    )


def soonest(validities: Iterable[Validity]) -> Validity:
    """Return the validity that ends first. There must be at least one validity."""
    return min(validities, key=lambda one: one.ends_seconds)


class Credential(NamedTuple):
    """A credential that a sidecar presents or trusts, and the credential's validity."""

    kind: str
    """`server_certificate`, `client_authority`, `revocation_list` or `token`."""
    subject: str
    """The subject of a token. Empty for other kinds."""
    validity: Validity


class ExpiredTokens:
    """Calls with an expired token, by the token's subject.

    A subject counts only if the token's signature was verified. So a caller without a signing key cannot add entries.
    At most `MAX_SUBJECTS` subjects are counted separately. All other subjects are counted as `OTHER`.
    """

    def __init__(self, now_seconds: Callable[[], float] = time.monotonic) -> None:
        self._now_seconds = now_seconds
        self.calls: dict[str, int] = {OTHER: 0}
        """The number of calls by subject. The numbers never decrease."""
        self._logged: dict[str, tuple[float, int]] = {}
        """By subject: the time from which the subject may be logged again, and the number of its calls when it was last
        logged."""

    def add(self, e: SeqdedupeError, address: str) -> None:
        """Count a call that was refused because of an expired token. Log the subject, at most once per
        REPEAT_SECONDS."""
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
