"""A small HTTP server in threads, next to the event loop, for GET and HEAD with one request per connection.
`Exposition` is the server's route `/metrics`, which needs prometheus-client.

A client that sends or reads slowly, or is silent, occupies one of MAX_CONNECTIONS threads. If all these threads are in
use, the next client gets the thread of such a client. Threads that wait for the event loop end later. While MAX_THREADS
threads exist, the server accepts no further client. The event loop never waits for a client.
"""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from seqdedupe.address import SidecarAddress, cannot_listen, family_of

logger = logging.getLogger("seqdedupe.web")

MAX_CONNECTIONS = 16
"""The maximum number of connections. A further connection ends the oldest connection."""

MAX_THREADS = 2 * MAX_CONNECTIONS
"""The maximum number of threads, including threads whose connections have ended."""

MAX_HEAD_BYTES = 16 * 1024
"""The maximum size of a request in bytes, with its first line and headers. The server never reads a body."""

HEAD_SECONDS = 10.0
"""The time within which a client must send its request."""

SEND_SECONDS = 30.0
"""The time within which a client must read the answer."""

LOOP_SECONDS = 20.0
"""The maximum time that an answer waits for the event loop."""

FULL_SECONDS = 0.1
"""The pause after a connection could not be served."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """A request."""

    path: str
    query: Mapping[str, str]
    """The values of the query string by name. If a name occurs several times, the last value."""
    headers: "Message[str, str]"
    """By name; upper and lower case are equal."""
    client: tuple[str, int]
    """Its numeric address, and its port."""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer."""

    body: bytes
    content_type: str
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


def text(body: str, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """Return an answer in plain text."""
    return Response(f"{body}\n".encode(), "text/plain; charset=utf-8", status)


Route = Callable[[Request], Response]
"""A function that creates the answer. It runs in the connection's thread, and calls code on the event loop with
`on_loop`."""


def on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on the event loop for a route, and return the result. Raises TimeoutError; the server then
    answers 503."""
    asked = asyncio.run_coroutine_threadsafe(call(), loop)
    try:
        return asked.result(LOOP_SECONDS)
    finally:
        asked.cancel()


class WebServer:
    """The server. It listens as soon as it is created. After `begin`, it answers requests. `routes` contains a function
    for each path.

    If the address is loopback, a request's Host must be localhost or an IP address. Without this rule, a foreign web
    page could use a host name that points to this machine, and make a browser on this machine read the pages. Raises
    INVALID_CONFIGURATION if the server cannot listen.
    """

    def __init__(self, address: SidecarAddress, routes: Mapping[str, Route], key: str) -> None:
        """`key` is the configuration key with the address."""
        self.routes = routes
        self.is_local = address.is_local
        self._socket = socket.socket(family_of(address.host))
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((address.host.strip("[]"), address.port))
            self._socket.listen()
        except (OSError, OverflowError) as e:
            self._socket.close()
            raise cannot_listen(address, e, key) from e
        self.address = address._replace(port=self._socket.getsockname()[1])
        self._lock = threading.Lock()
        self._free = threading.Semaphore(MAX_THREADS)
        self._open: dict[socket.socket, None] = {}
        """The oldest connection comes first."""
        self._is_closed = False

    def begin(self) -> None:
        """Serve from now on, until `close`."""
        threading.Thread(target=self._accept_all, name="seqdedupe-web", daemon=True).start()

    def close(self) -> None:
        """End all connections. May be called from any thread, and more than once."""
        self._is_closed = True
        _end(self._socket)
        self._socket.close()
        with self._lock:
            for connection in self._open:
                _end(connection)

    def _accept_all(self) -> None:
        while not self._is_closed:
            self._free.acquire()
            try:
                connection, peer = self._socket.accept()
                self._make_room(connection)
                threading.Thread(target=self._serve, args=(connection, peer), name="seqdedupe-web", daemon=True).start()
            except (OSError, RuntimeError) as e:
                self._free.release()
                # No descriptor or no thread is left.
                if not self._is_closed:
                    logger.warning("a connection was not accepted: %s", e)
                    time.sleep(FULL_SECONDS)

    def _make_room(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                # Its thread notices this, and ends.
                oldest = next(iter(self._open))
                del self._open[oldest]
                _end(oldest)
            self._open[connection] = None

    def _serve(self, connection: socket.socket, peer: Any) -> None:
        try:
            # A client may go away, or be disconnected, in the middle of an answer.
            with connection, suppress(OSError, _NoRequest):
                _Handler(connection, peer, self)  # type: ignore[arg-type]  # it needs no more of a server than this
        finally:
            with self._lock:
                self._open.pop(connection, None)
            self._free.release()


class _NoRequest(Exception):
    """A client has not sent its request in time, or has sent a request that is too long."""


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: WebServer  # type: ignore[assignment]
    server_version = "seqdedupe"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile = BytesIO(_head_of(self.connection))
        # The limit for sending the whole answer.
        self.connection.settimeout(SEND_SECONDS)

    def do_GET(self) -> None:
        response = self._answer()
        self.send_response(response.status)
        headers = {"Content-Type": response.content_type, "Content-Length": str(len(response.body))}
        # The pages show the current state.
        headers |= {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", **response.headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    do_HEAD = do_GET  # noqa: N815 (the library's name)

    def _answer(self) -> Response:
        if self.server.is_local and not _is_local_name(self.headers.get("Host", "")):
            return text("This address is asked for by the name localhost, or by number.", HTTPStatus.FORBIDDEN)
        try:
            url = urlsplit(self.path)
        except ValueError:
            return text("That is no path.", HTTPStatus.BAD_REQUEST)
        route = self.server.routes.get(url.path)
        if route is None:
            return text(f"There is nothing here. There is: {' '.join(self.server.routes)}", HTTPStatus.NOT_FOUND)
        try:
            return route(Request(url.path, dict(parse_qsl(url.query)), self.headers, self.client_address[:2]))
        except TimeoutError:
            why = f"The sidecar's event loop has not answered for {LOOP_SECONDS:.0f} seconds."
            return text(why, HTTPStatus.SERVICE_UNAVAILABLE)
        except Exception as e:
            # The client gets an answer for any error.
            logger.error("a request failed", exc_info=e, extra={"path": url.path})
            return text(f"The request failed: {type(e).__name__}", HTTPStatus.INTERNAL_SERVER_ERROR)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing for requests."""


def _head_of(connection: socket.socket) -> bytes:
    """Return a request up to the empty line after its headers. Raises `_NoRequest`; OSError."""
    until = time.monotonic() + HEAD_SECONDS
    head = b""
    while b"\r\n\r\n" not in head and b"\n\n" not in head:
        connection.settimeout(max(until - time.monotonic(), 0.001))
        more = connection.recv(MAX_HEAD_BYTES)
        head += more
        if not more or len(head) > MAX_HEAD_BYTES:
            raise _NoRequest
    return head


def _is_local_name(host: str) -> bool:
    """Whether a Host header contains localhost or an IP address, and not a host name that somebody else may control."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name.lower() == "localhost":
        return True
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _end(connection: socket.socket) -> None:
    """End the socket, so that threads that read, write or wait for connections notice the end."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


# -- `/metrics`: metrics in the Prometheus text format, for a sidecar and for services.

FRESH_SECONDS = 0.5
"""Requests within this time get the same answer, so that many requests cost little."""


class Exposition(Collector):
    """The route `/metrics`: the metrics of `collect`, and the metrics of the process. The numbers may be some
    milliseconds apart."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self._one_at_a_time = threading.Lock()
        self._made: dict[str, tuple[float, bytes]] = {}
        """By content type: the time, and the answer."""

    def __call__(self, request: Request) -> Response:
        """Return the answer for `/metrics`. Raises TimeoutError if an event loop is stuck."""
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        if not self._one_at_a_time.acquire(timeout=LOOP_SECONDS):
            raise TimeoutError
        try:
            made_at, body = self._made.get(content_type, (-FRESH_SECONDS, b""))
            if time.monotonic() - made_at >= FRESH_SECONDS:
                body = encode(self._registry)
                self._made[content_type] = time.monotonic(), body
        finally:
            self._one_at_a_time.release()
        return Response(body, content_type)

    def collect(self) -> Iterator[Metric]:
        """Return all metrics except those of the process."""
        return self._collect()

    def describe(self) -> list[Metric]:
        """Return an empty list. Otherwise the registry would collect all metrics only to get their names."""
        return []
