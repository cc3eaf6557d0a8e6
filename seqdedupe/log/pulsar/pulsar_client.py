"""Pulsar's client for event loops, with readers that are released when they are closed."""

import asyncio
import ctypes
import json
import logging
import ssl
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import _pulsar
import pulsar
import pulsar.asyncio

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import read_named
from seqdedupe.log.pulsar.admin_url import HttpConnection

# -- The identity of the sidecar to Pulsar: the present token. No part of it is ever in an error or a log.

logger = logging.getLogger("seqdedupe.pulsar")

Token = Callable[[], str]
"""Returns the token; blocks if it must be fetched. Raises PULSAR_FORBIDS, LOG_UNREADABLE if there is none now."""

TIMEOUT_SECONDS = 10.0
RENEWED_AT_SHARE = 0.8
"""A new token is fetched after this part of the time for which the token is valid."""
USUAL_SECONDS = 300.0
"""The time for which a token is used if its issuer does not state how long it is valid."""


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
    """Tokens of an issuer for client credentials. Each is kept until it has nearly expired. A `Token`, for any
    thread."""

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
        return token, float(seconds)

    def _ask(self, url: str, form: bytes | None) -> dict[str, Any]:
        headers = {"Accept": "application/json"}
        if form is not None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        try:
            # The secret does not follow a redirect.
            with HttpConnection(url, self._tls, time.monotonic() + TIMEOUT_SECONDS) as connection:
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
    """Return a token function for Pulsar's client. The client calls it on its own thread, where nothing may be raised:
    on an error the client gets no token."""

    def asked() -> str:
        try:
            return token()
        except Exception as e:  # noqa: BLE001 (after any failure the client's thread must go on)
            logger.warning("no token for Pulsar: %s", e if isinstance(e, SeqdedupeError) else type(e).__name__)
            return ""

    return asked


# -- The messages of Pulsar's client, in addition to its exceptions.


def client_logger() -> pulsar.FileLogger:
    """Return a logger that writes the client's errors to standard error, in the client's own words.

    Never use a logger of Python's. The client calls it at every step, even for messages that are not shown, and holds
    its own locks meanwhile. A thread that has Python's lock and waits for one of those locks would wait for ever. Such
    a logger also takes longer than everything else about a message.
    """
    return pulsar.FileLogger(pulsar.LoggerLevel.Error, "/dev/stderr")


# -- The threads of Pulsar's client, which call back into Python.


_this = threading.local()


def keep_state() -> None:
    """Keep the Python thread state of the calling thread as long as the thread lives.

    Otherwise the interpreter makes a state whenever the client takes its lock on that thread: several times per answer.
    It also makes a stack for it, memory that the system must map, and then discards both. That takes longer than
    everything else about an answer.
    """
    if not hasattr(_this, "has_state"):
        _this.has_state = True
        # Never released: a state that is in use is not discarded.
        ctypes.pythonapi.PyGILState_Ensure()


class PulsarClient(pulsar.asyncio.Client):  # type: ignore[misc]  # the library has no types
    """Pulsar's own client with another `create_reader`. After Pulsar's own, a closed reader and a closed client's
    threads and descriptors stay for good: a reader keeps the callback of its opening, and the callback keeps the
    reader."""

    async def create_reader(
        self,
        topic: str,
        start_message_id: pulsar.MessageId,
        *,
        receiver_queue_size: int,
        start_message_id_inclusive: bool,
    ) -> pulsar.asyncio.Reader:
        """Return a reader of bytes from that place on. It fetches `receiver_queue_size` entries ahead. Raises
        PulsarException."""
        schema = pulsar.schema.BytesSchema()
        settings = _pulsar.ReaderConfiguration()
        settings.schema(schema.schema_info())
        settings.receiver_queue_size(receiver_queue_size)
        settings.start_message_id_inclusive(start_message_id_inclusive)
        # `earliest` and `latest` belong to the library below.
        is_own = isinstance(start_message_id, pulsar.MessageId)
        start = start_message_id._msg_id if is_own else start_message_id
        reader = asyncio.get_running_loop().create_future()
        self._client.create_reader_async_v2(topic, start, settings, partial(_hand_over, [reader]))
        return pulsar.asyncio.Reader(await reader, schema)


_LATER_RESULTS = {46: "Disconnected"}
"""Results of the client that its Python library has no names for."""


def name_of(result: Any) -> str:
    """Return the name of a result of the client."""
    if result.name in pulsar.Result.__members__:
        return str(result.name)
    return _LATER_RESULTS.get(result.value, f"result {result.value}")


def told(failure: pulsar.asyncio.PulsarException) -> str:
    """Return the client's text about a failure."""
    name = name_of(failure.error())
    more = str(failure).partition(": ")[2]
    return f"{name}: {more}" if more else name


def _hand_over(waiting: "list[asyncio.Future[Any]]", outcome: Any) -> None:
    """Pass an outcome to the event loop. Called on a thread of the client, once; keeps none of its arguments."""
    future = waiting.pop()
    future.get_loop().call_soon_threadsafe(_settle, future, outcome)


def _settle(future: "asyncio.Future[Any]", outcome: Any) -> None:
    if future.done():
        return
    if isinstance(outcome, _pulsar.Error):
        future.set_exception(pulsar.asyncio.PulsarException(outcome.error, outcome.message))
    else:
        future.set_result(outcome)


# -- Openings that the client ends in its own time, even if nobody waits for them any more.


async def opened(opening: Coroutine[Any, Any, Any], close: Callable[[Any], None]) -> Any:
    """Return the opened object. If this is cancelled, the object is closed once it is open: nobody else could close it,
    and it would stay."""
    task = asyncio.ensure_future(opening)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(partial(_close, close))
        raise


def _close(close: Callable[[Any], None], task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and task.exception() is None:
        close(task.result())
