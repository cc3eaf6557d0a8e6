"""The HTTP server, alone: what it answers, and whom it does not let hold anything."""

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from seqdedupe import http_server
from seqdedupe.address import SidecarAddress
from seqdedupe.errors import ConfigurationError
from seqdedupe.http_server import (
    MAX_CONNECTIONS,
    MAX_HEAD_BYTES,
    MAX_THREADS,
    Request,
    Response,
    WebServer,
    text,
)
from seqdedupe.testing import LAST_RESORT_SECONDS

WAIT_SECONDS = LAST_RESORT_SECONDS
LOOPBACK = SidecarAddress("127.0.0.1", 0)


def _echo(request: Request) -> Response:
    return text(f"{request.path} {dict(request.query)}")


def _fails(request: Request) -> Response:
    raise ValueError("a secret")


def _large(request: Request) -> Response:
    return Response(bytes(32 * 1024 * 1024), "application/octet-stream")


@pytest.fixture
def web() -> Iterator[WebServer]:
    web = WebServer(LOOPBACK, {"/": _echo, "/fails": _fails, "/large": _large}, "metrics_listen")
    web.begin()
    yield web
    web.close()


def _connect(web: WebServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", web.address.port), WAIT_SECONDS)


def _ask(web: WebServer, what: str, path: str, host: str = "localhost") -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", web.address.port, timeout=WAIT_SECONDS)) as connection:
        connection.request(what, path, headers={"Host": host})
        response = connection.getresponse()
        return response.status, response.read()


def _say(web: WebServer, data: bytes) -> bytes:
    """What is answered until the server ends the connection."""
    with _connect(web) as connection:
        connection.sendall(data)
        answer = b""
        while more := connection.recv(65_536):
            answer += more
        return answer


def _threads() -> int:
    return sum(thread.name == "seqdedupe-web" for thread in threading.enumerate())


def test_get_and_head(web: WebServer) -> None:
    assert _ask(web, "GET", "/?a=1&b=%2F") == (200, b"/ {'a': '1', 'b': '/'}\n")
    assert _ask(web, "HEAD", "/") == (200, b"")
    assert _ask(web, "GET", "/elsewhere")[0] == 404


@pytest.mark.parametrize("what", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
def test_nothing_else(web: WebServer, what: str) -> None:
    assert _ask(web, what, "/")[0] == 501


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", "", "127.0.0.1.evil"])
def test_another_name_for_loopback(web: WebServer, host: str) -> None:
    assert _ask(web, "GET", "/", host)[0] == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]:1", "[::1]"])
def test_names_of_loopback(web: WebServer, host: str) -> None:
    assert _ask(web, "GET", "/", host)[0] == 200


def test_what_fails_tells_nothing_of_its_inside(web: WebServer) -> None:
    status, body = _ask(web, "GET", "/fails")
    assert status == 500
    assert b"secret" not in body


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET //[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        b"\r\n\r\n",
    ],
)
def test_nonsense(web: WebServer, data: bytes) -> None:
    assert b" 200 " not in _say(web, data)[:20]
    assert _ask(web, "GET", "/")[0] == 200


def test_a_head_that_is_too_long_is_not_read_on(web: WebServer) -> None:
    def send() -> None:
        with _connect(web) as connection:
            # The server has ended the connection long before.
            for _ in range(10_000):
                connection.sendall(b"a" * MAX_HEAD_BYTES)

    with pytest.raises(OSError):
        send()
    assert _ask(web, "GET", "/")[0] == 200


def test_who_sends_a_byte_now_and_then_is_ended_in_time(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.5)
    with _connect(web) as connection:
        connection.settimeout(0.05)
        ended = False
        for _ in range(int(WAIT_SECONDS / 0.05)):
            try:
                connection.send(b"a")
                ended = connection.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True
            if ended:
                break
        assert ended


def test_clients_that_say_nothing_or_read_nothing_keep_nobody_away(web: WebServer) -> None:
    with ExitStack() as stack:
        for k in range(3 * MAX_CONNECTIONS):
            connection = stack.enter_context(_connect(web))
            if k % 2:
                connection.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert _ask(web, "GET", "/")[0] == 200
        # Those that were ended are ending.
        until = time.monotonic() + WAIT_SECONDS
        while _threads() > MAX_CONNECTIONS + 1 and time.monotonic() < until:
            time.sleep(0.01)
        assert _threads() <= MAX_CONNECTIONS + 1


def test_those_that_wait_for_the_event_loop_are_not_more_and_more() -> None:
    """Their connections give way to others; but each has a thread until the event loop answers."""
    goes_on = threading.Event()

    def waits(_: Request) -> Response:
        goes_on.wait(WAIT_SECONDS)
        return text("")

    web = WebServer(LOOPBACK, {"/": _echo, "/waits": waits}, "metrics_listen")
    web.begin()
    with closing(web), ExitStack() as clients:
        for _ in range(2 * MAX_THREADS):
            clients.enter_context(_connect(web)).sendall(b"GET /waits HTTP/1.1\r\nHost: localhost\r\n\r\n")
        # And the one that accepts.
        until = time.monotonic() + WAIT_SECONDS
        while _threads() < MAX_THREADS + 1:
            assert time.monotonic() < until
            time.sleep(0.01)
        for _ in range(50):
            assert _threads() == MAX_THREADS + 1
            time.sleep(0.01)
        goes_on.set()
        assert _ask(web, "GET", "/")[0] == 200


def test_closing_ends_those_that_wait(web: WebServer) -> None:
    with _connect(web) as waiting:
        _ = _ask(web, "GET", "/")
        web.close()
        assert waiting.recv(1) == b""
        with pytest.raises(OSError):
            _connect(web)
        web.close()


def test_an_address_that_is_taken(web: WebServer) -> None:
    with pytest.raises(ConfigurationError) as e:
        WebServer(web.address, {}, "metrics_listen")
    assert f"metrics_listen = '{web.address}': cannot listen there: Address already in use" in str(e.value)
