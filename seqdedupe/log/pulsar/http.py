"""Calls of Pulsar's admin URL: JSON in, JSON out, each within its time and each failure with its reason."""

import asyncio
import json
import re
import ssl
import time
from collections.abc import Callable, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

from seqdedupe.errors import SeqdedupeError, error

TIMEOUT_SECONDS = 30.0
MAX_REDIRECTS = 5
"""A cluster sends a call on to the broker that has the topic: once, or twice while topics move."""
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""More than the names of half a million topics."""

JSON = "application/json"

_CHUNK_BYTES = 64 * 1024
_CHARACTERS_SHOWN = 300
_REDIRECTS = (301, 302, 307, 308)
_PASSING = (408, 409, 429)
"""Beside 500 and above: what may be answered otherwise the next time."""
_TITLE = re.compile(r"<title>([^<]+)")
_TOKEN = re.compile(r"[\x21-\x7e]+")


class Answer(NamedTuple):
    status: int
    raw: bytes
    headers: Mapping[str, str] = {}
    """By their names in lower case."""

    @property
    def why(self) -> str:
        """What Pulsar says of a failure, for a person."""
        try:
            said = json.loads(self.raw)["reason"]
        except (ValueError, KeyError, TypeError):
            text = self.raw.decode(errors="replace")
            # Some of it is a page for a browser.
            title = _TITLE.search(text)
            said = title[1] if title else text
        return " ".join(str(said).split())[:_CHARACTERS_SHOWN] or "without a word"


class AdminUrl:
    """Calls paths below an admin URL, as `http://pulsar:8080`, each in a thread and on a connection of its own."""

    def __init__(
        self,
        url: str,
        token: Callable[[], str] | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        pause_seconds: float = 0.0,
    ) -> None:
        """`token` is asked for every call, so that it may change; nothing of it is ever in an error. Between the
        beginnings of two calls there is at least the pause.

        Raises INVALID_CONFIGURATION if this is no URL of HTTP.
        """
        self._url = url.rstrip("/")
        self._token = token
        self._tls = tls
        self._timeout_seconds = timeout_seconds
        self._pause_seconds = pause_seconds
        self._next_seconds = 0.0
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise error(
                "INVALID_CONFIGURATION", "pulsar.admin_url is not like http://host:8080, or https, without a user"
            )

    async def get(self, path: str) -> Any:
        """What the path answers, None if that is nothing. Raises as `call`, LOG_UNREADABLE for what may pass."""
        answer = await self.call("GET", path)
        if not answer.raw.strip():
            return None
        try:
            return json.loads(answer.raw)
        except ValueError as e:
            raise error("PULSAR_REFUSES", f"GET {path} of pulsar.admin_url is not answered in JSON") from e

    async def call(
        self, method: str, path: str, body: object = None, conflict: str = "LOG_REFUSED", media_type: str = JSON
    ) -> Answer:
        """The answer of a call that succeeded, wherever in the cluster it was sent on to. `media_type` is the body's.

        Raises TOPIC_NOT_FOUND (404), `conflict` (409), TOPIC_IN_USE (412), PULSAR_FORBIDS (401, 403),
        PULSAR_REFUSES (other answers that do not pass by themselves), LOG_REFUSED (500 and above, no answer, none in
        time; for GET it is LOG_UNREADABLE). A call without an answer may have been carried out.
        """
        if self._pause_seconds:
            now = time.monotonic()
            begins = max(now, self._next_seconds)
            self._next_seconds = begins + self._pause_seconds
            await asyncio.sleep(begins - now)
        try:
            answer = await asyncio.to_thread(self._call, method, path, body, media_type)
        except (OSError, HTTPException, ValueError) as e:
            raise _unavailable(method, path, str(e) or type(e).__name__) from e
        if answer.status >= 300:
            raise _refusal(method, path, answer, conflict)
        return answer

    def _call(self, method: str, path: str, body: object, media_type: str) -> Answer:
        limit = time.monotonic() + self._timeout_seconds
        url = f"{self._url}/admin/v2/{path}"
        raw = None if body is None else json.dumps(body).encode()
        headers = {"Accept": JSON} | ({"Content-Type": media_type} if raw is not None else {})
        for _ in range(1 + MAX_REDIRECTS):
            with Connection(url, self._tls, limit) as connection:
                answer, location = connection.call(method, raw, headers | self._authorization())
            if answer.status not in _REDIRECTS or not location:
                return answer
            onward = urljoin(url, location)
            if urlsplit(onward).scheme != urlsplit(url).scheme:
                # A token never goes over a line that is not encrypted because somebody says so.
                raise HTTPException("sent on from https to http, or the other way")
            url = onward
        raise HTTPException(f"sent on more than {MAX_REDIRECTS} times")

    def _authorization(self) -> dict[str, str]:
        if self._token is None:
            return {}
        token = self._token().strip()
        if not _TOKEN.fullmatch(token):
            # What complains of it otherwise would show it.
            raise error("INVALID_CONFIGURATION", "the token for Pulsar is empty, or has characters that no token has")
        return {"Authorization": f"Bearer {token}"}


class Connection:
    """For one call, which ends at a limit of `time.monotonic()`. Raises OSError, HTTPException, ValueError."""

    def __init__(self, url: str, tls: ssl.SSLContext | None, limit: float) -> None:
        parts = urlsplit(url)
        self._target = parts.path + (f"?{parts.query}" if parts.query else "")
        self._limit = limit
        host, timeout = parts.hostname or "", self._left()
        self._connection: HTTPConnection = (
            HTTPSConnection(host, parts.port, timeout=timeout, context=tls)
            if parts.scheme == "https"
            else HTTPConnection(host, parts.port, timeout=timeout)
        )

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def call(self, method: str, body: bytes | None, headers: Mapping[str, str]) -> tuple[Answer, str | None]:
        """The answer, and where it sends on to."""
        self._connection.request(method, self._target, body, dict(headers))
        with self._connection.getresponse() as response:
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, self._read(response), headers), headers.get("location")

    def _read(self, response: HTTPResponse) -> bytes:
        read = bytearray()
        while chunk := response.read1(_CHUNK_BYTES):
            read += chunk
            if len(read) > MAX_ANSWER_BYTES:
                raise HTTPException(f"answered with more than {MAX_ANSWER_BYTES} bytes")
            self._left()
        if response.length:
            raise HTTPException(f"the answer ends {response.length} bytes too early")
        return bytes(read)

    def _left(self) -> float:
        left = self._limit - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        return left


def _unavailable(method: str, path: str, why: str) -> SeqdedupeError:
    return error(
        "LOG_UNREADABLE" if method == "GET" else "LOG_REFUSED",
        f"{method} {path} of pulsar.admin_url: {why}",
        hint="See whether the Pulsar cluster serves, and whether pulsar.admin_url is right; it is tried again.",
    )


def _refusal(method: str, path: str, answer: Answer, conflict: str) -> SeqdedupeError:
    what = f"{method} {path} of pulsar.admin_url: {answer.status}, {answer.why}"
    if answer.status == 409 and conflict != "LOG_REFUSED":
        return error(conflict, what)
    if answer.status >= 500 or answer.status in _PASSING:
        return _unavailable(method, path, f"{answer.status}, {answer.why}")
    if answer.status in (401, 403):
        return error("PULSAR_FORBIDS", what)
    if answer.status == 404:
        return error("TOPIC_NOT_FOUND", what)
    if answer.status == 412:
        return error("TOPIC_IN_USE", what, hint="Close its producers and consumers first.")
    return error("PULSAR_REFUSES", what)
