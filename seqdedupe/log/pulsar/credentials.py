"""Who the sidecar is to Pulsar: a token, as it is now. Nothing of it is ever in an error or a log."""

import json
import logging
import ssl
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.pulsar.http import Connection

logger = logging.getLogger("seqdedupe.pulsar")

Token = Callable[[], str]
"""Answers the token, blocking if it has to be fetched. Raises PULSAR_FORBIDS, LOG_UNREADABLE if there is none now."""

TIMEOUT_SECONDS = 10.0
RENEWED_AT_SHARE = 0.8
"""Of the time for which a token is good, a new one is fetched after this part."""
USUAL_SECONDS = 300.0
"""For which a token is used whose issuer does not say how long it is good."""


def from_file(path: Path) -> Token:
    """The token in a file, as it is whenever it is asked for."""

    def token() -> str:
        try:
            return path.read_text().strip()
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else "it is no text"
            raise error("PULSAR_FORBIDS", f"the token file {path} cannot be read: {why}") from None

    return token


class OAuth2:
    """Tokens of an issuer for client credentials, each kept until it is nearly over. A `Token`, for any thread."""

    def __init__(
        self, issuer_url: str, credentials_file: Path, audience: str, tls: ssl.SSLContext | None = None
    ) -> None:
        self._issuer_url = issuer_url.rstrip("/")
        self._credentials_file = credentials_file
        self._audience = audience
        self._tls = tls
        self._lock = threading.Lock()
        self._token = ""
        self._renewed_at = 0.0

    def __call__(self) -> str:
        with self._lock:
            if time.monotonic() >= self._renewed_at:
                self._token, seconds = self._fetched()
                self._renewed_at = time.monotonic() + seconds * RENEWED_AT_SHARE
            return self._token

    def _fetched(self) -> tuple[str, float]:
        try:
            known = json.loads(self._credentials_file.read_text())
            asked = {
                "grant_type": "client_credentials",
                "client_id": str(known["client_id"]),
                "client_secret": str(known["client_secret"]),
            }
        except (OSError, ValueError, KeyError, TypeError) as e:
            why = e.strerror if isinstance(e, OSError) else "it is not JSON with client_id and client_secret"
            raise error("PULSAR_FORBIDS", f"the credentials file {self._credentials_file}: {why}") from None
        if self._audience:
            asked["audience"] = self._audience
        url = self._ask(f"{self._issuer_url}/.well-known/openid-configuration", None).get("token_endpoint")
        # The secret goes over no other kind of line than the issuer's.
        if not isinstance(url, str) or url.partition(":")[0] != self._issuer_url.partition(":")[0]:
            raise error("PULSAR_FORBIDS", f"the issuer {self._issuer_url} names no token_endpoint of its own scheme")
        answer = self._ask(url, urlencode(asked).encode())
        token, seconds = answer.get("access_token"), answer.get("expires_in", USUAL_SECONDS)
        if not isinstance(token, str) or not token or not isinstance(seconds, int | float):
            raise error("PULSAR_FORBIDS", f"{url} gives no access_token")
        return token, float(seconds)

    def _ask(self, url: str, form: bytes | None) -> dict[str, Any]:
        headers = {"Accept": "application/json"}
        if form is not None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        try:
            # Where it sends on to, the secret does not follow.
            with Connection(url, self._tls, time.monotonic() + TIMEOUT_SECONDS) as connection:
                answered, _ = connection.call("GET" if form is None else "POST", form, headers)
            answer = json.loads(answered.raw) if answered.status == HTTPStatus.OK else None
        except (OSError, HTTPException, ValueError) as e:
            why = "it is not answered in JSON" if isinstance(e, ValueError) else e
            raise error("LOG_UNREADABLE", f"{url} gives no token now: {why}", hint=_HINT) from None
        if answered.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise error("LOG_UNREADABLE", f"{url} gives no token now: it answers {answered.status}", hint=_HINT)
        if not isinstance(answer, dict):
            raise error("PULSAR_FORBIDS", f"{url} gives no token: it answers {answered.status}")
        return answer


_HINT = "See whether the issuer serves, and whether pulsar.oauth2_issuer_url is right; it is tried again."


def never_raises(token: Token) -> Token:
    """For Pulsar's client, which calls it on a thread of its own where nothing may be raised: then it gets none."""

    def asked() -> str:
        try:
            return token()
        except Exception as e:  # noqa: BLE001 (whatever it is, the client's thread must go on)
            logger.warning("no token for Pulsar: %s", e if isinstance(e, SeqdedupeError) else type(e).__name__)
            return ""

    return asked
