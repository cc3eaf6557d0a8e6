"""The identity of the sidecar to Pulsar: the present token. No part of a token is ever in an error or a log."""

import json
import ssl
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from seqdedupe.errors import error
from seqdedupe.files import read_named
from seqdedupe.log.pulsar.admin_url import HttpConnection

Token = Callable[[], str]
"""Returns the token; blocks if it must be fetched. Raises PULSAR_FORBIDS, LOG_UNREADABLE if there is none now."""

TIMEOUT_SECONDS = 10.0
RENEWED_AT_SHARE = 0.8
"""A new token is fetched after this part of the time for which the token is valid."""
USUAL_SECONDS = 300.0
"""The time for which a token is used if its issuer does not state how long it is valid."""
LONGEST_SECONDS = 86_400.0
"""The longest time for which a token is used. An issuer may state any number."""


def from_file(path: Path) -> Token:
    """Return the token in a file. Each call reads the file."""

    def token() -> str:
        try:
            return read_named(path).decode().strip()
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else "it is no text"
            raise error("PULSAR_FORBIDS", f"the token file {path} cannot be read: {why}") from None

    return token


class OAuth2:
    """Fetches tokens from an issuer with client credentials, and keeps each token until it has nearly expired. A
    `Token`, for any thread."""

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
            known = json.loads(read_named(self._credentials_file))
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
        # The secret is only sent over the same kind of connection as the issuer's.
        if not isinstance(url, str) or url.partition(":")[0] != self._issuer_url.partition(":")[0]:
            raise error("PULSAR_FORBIDS", f"the issuer {self._issuer_url} names no token_endpoint with the same scheme")
        answer = self._ask(url, urlencode(asked).encode())
        token, seconds = answer.get("access_token"), answer.get("expires_in", USUAL_SECONDS)
        if not isinstance(token, str) or not token or not isinstance(seconds, int | float):
            raise error("PULSAR_FORBIDS", f"{url} gives no access_token")
        # In this order also if an issuer states NaN.
        return token, float(min(LONGEST_SECONDS, seconds))

    def _ask(self, url: str, form: bytes | None) -> dict[str, Any]:
        headers = {"Accept": "application/json"}
        if form is not None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        try:
            # The secret does not follow a redirect.
            with HttpConnection(url, self._tls, time.monotonic() + TIMEOUT_SECONDS) as connection:
                answered, _ = connection.call("GET" if form is None else "POST", form, headers)
            answer = json.loads(answered.raw) if answered.status == HTTPStatus.OK else None
        except (OSError, HTTPException, ValueError, RecursionError) as e:
            why = "it is not answered in JSON" if isinstance(e, ValueError | RecursionError) else e
            raise error("LOG_UNREADABLE", f"{url} gives no token now: {why}", hint=_HINT) from None
        if answered.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise error("LOG_UNREADABLE", f"{url} gives no token now: it answers {answered.status}", hint=_HINT)
        if not isinstance(answer, dict):
            raise error("PULSAR_FORBIDS", f"{url} gives no token: it answers {answered.status}")
        return answer


_HINT = "See whether the issuer serves, and whether pulsar.oauth2_issuer_url is right; it is tried again."
