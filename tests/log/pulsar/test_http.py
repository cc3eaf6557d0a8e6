"""An admin URL that does not answer as it should: each failure has its reason, in time, and shows no token."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.pulsar import admin_url as admin_module
from seqdedupe.log.pulsar import tokens
from seqdedupe.log.pulsar.admin_url import AdminUrl, PulsarAdmin
from seqdedupe.log.pulsar.policies import ensure_safe
from seqdedupe.log.pulsar.tokens import OAuth2
from seqdedupe.testing import LAST_RESORT_SECONDS

TOKEN = "eyJhbGciOi.SECRET.x-_y"
TOPIC = "persistent://public/default/a:b"


class Request(NamedTuple):
    method: str
    path: str
    token: str | None
    body: bytes


Respond = Callable[[BaseHTTPRequestHandler, Request], None]


class Server(ThreadingHTTPServer):
    """Answers every request by one function, and keeps the requests."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, respond: Respond) -> None:
        self.requests: list[Request] = []
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                requests.append(Request(self.command, self.path, self.headers.get("Authorization"), body))
                respond(self, requests[-1])

            do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815  # as the class it derives from wants them

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(respond: Respond) -> Iterator[Server]:
    with Server(respond) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def saying(status: int, body: bytes = b"", **headers: str) -> Respond:
    def respond(handler: BaseHTTPRequestHandler, _: Request) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return respond


def raw(text: bytes) -> Respond:
    def respond(handler: BaseHTTPRequestHandler, _: Request) -> None:
        handler.wfile.write(text)

    return respond


def admin(server: Server, timeout_seconds: float = 20.0) -> PulsarAdmin:
    return PulsarAdmin(AdminUrl(server.url, lambda: TOKEN, timeout_seconds=timeout_seconds))


async def failure(server: Server, timeout_seconds: float = 20.0) -> SeqdedupeError:
    with pytest.raises(SeqdedupeError) as e:
        await admin(server, timeout_seconds).stats(TOPIC)
    assert "SECRET" not in f"{e.value!r} {e.value} {e.value.hint} {e.value.__cause__!r}"
    return e.value


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (401, "PULSAR_FORBIDS"),
        (403, "PULSAR_FORBIDS"),
        (404, "TOPIC_NOT_FOUND"),
        (405, "PULSAR_REFUSES"),
        (409, "LOG_UNREADABLE"),
        (412, "TOPIC_IN_USE"),
        (429, "LOG_UNREADABLE"),
        (500, "LOG_UNREADABLE"),
        (503, "LOG_UNREADABLE"),
    ],
)
async def test_a_status_has_its_reason_and_pulsars_own_words(status: int, reason: str) -> None:
    with serving(saying(status, json.dumps({"reason": "such\nand such"}).encode())) as server:
        told = await failure(server)
        assert told.reason == reason
        assert f"{status}, such and such" in told.message
        assert server.requests == [
            Request("GET", "/admin/v2/persistent/public/default/a%3Ab/stats", f"Bearer {TOKEN}", b"")
        ]


async def test_what_may_pass_is_told_apart_for_calls_that_change_something() -> None:
    with serving(saying(500)) as server:
        for call in (admin(server).unload(TOPIC), admin(server).delete_topic(TOPIC)):
            with pytest.raises(SeqdedupeError, match="LOG_REFUSED"):
                await call
    with serving(saying(409)) as server:
        with pytest.raises(SeqdedupeError, match="LOG_REFUSED"):
            await admin(server).set_policy(TOPIC, "retention", {})
        with pytest.raises(SeqdedupeError, match="TOPIC_EXISTS"):
            await admin(server).create_topic(TOPIC, {})


@pytest.mark.parametrize(
    "body",
    [b"<html>it works</html>", b"[1, 2]", b"{}", b'"text"', b'{"publishers": 3}', b"\xff\xfe", b""],
)
async def test_what_is_no_answer_of_pulsar_is_no_answer(body: bytes) -> None:
    with serving(saying(200, body)) as server:
        assert (await failure(server)).reason == "PULSAR_REFUSES"
        with pytest.raises(SeqdedupeError, match="PULSAR_REFUSES"):
            await admin(server).topics("public/default")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.0 banana\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.0 200 OK\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
    ],
)
async def test_what_is_not_even_http_is_unreadable(text: bytes) -> None:
    with serving(raw(text)) as server:
        assert (await failure(server)).reason == "LOG_UNREADABLE"


async def test_nobody_there_is_unreadable() -> None:
    with serving(saying(200)) as server:
        pass
    assert (await failure(server)).reason == "LOG_UNREADABLE"


async def test_an_answer_that_does_not_come_is_given_up() -> None:
    over = threading.Event()

    def waits(*_: object) -> None:
        over.wait()

    with serving(waits) as server:
        assert (await failure(server, timeout_seconds=0.2)).reason == "LOG_UNREADABLE"
        over.set()


async def test_an_answer_that_never_ends_is_given_up() -> None:
    def drips(handler: BaseHTTPRequestHandler, _: Request) -> None:
        handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
        while True:
            try:
                handler.wfile.write(b"x")
            except OSError:
                return

    with serving(drips) as server:
        assert "in time" in (await failure(server, timeout_seconds=0.3)).message


async def test_an_answer_that_is_too_large_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_module, "MAX_ANSWER_BYTES", 1000)
    with serving(saying(200, json.dumps(["x" * 990]).encode())) as server:
        assert await admin(server).topics("public/default") == ["x" * 990]
    with serving(saying(200, json.dumps(["x" * 1000]).encode())) as server:
        assert "more than 1000 bytes" in (await failure(server)).message


async def test_a_call_goes_on_to_the_broker_that_has_the_topic() -> None:
    with serving(saying(204)) as owner:
        with serving(saying(307, Location=f"{owner.url}/admin/v2/elsewhere?a=b")) as server:
            await admin(server).set_policy(TOPIC, "retention", {"x": 1})
        assert owner.requests == [Request("POST", "/admin/v2/elsewhere?a=b", f"Bearer {TOKEN}", b'{"x": 1}')]


async def test_it_does_not_go_on_for_ever_nor_to_another_protocol() -> None:
    with serving(saying(307, Location="/admin/v2/again")) as server:
        assert "sent on more than" in (await failure(server)).message
        assert len(server.requests) == 1 + admin_module.MAX_REDIRECTS
    with serving(saying(307, Location="https://127.0.0.1/admin/v2/x")) as server:
        assert "from https to http" in (await failure(server)).message
        assert len(server.requests) == 1
    with serving(saying(307, Location="http://127.0.0.1:none/")) as server:
        assert (await failure(server)).reason == "LOG_UNREADABLE"
    with serving(saying(307)) as server:
        assert (await failure(server)).reason == "PULSAR_REFUSES"


@pytest.mark.parametrize("token", ["", "two words", f"{TOKEN}\nHost: else", "nö"])
async def test_a_token_that_is_none_is_not_shown(token: str) -> None:
    with serving(saying(200)) as server:
        with pytest.raises(SeqdedupeError, match="INVALID_CONFIGURATION") as e:
            await PulsarAdmin(AdminUrl(server.url, lambda: token)).stats(TOPIC)
        assert "SECRET" not in f"{e.value!r} {e.value.__cause__!r} {e.value.__context__!r}"
        assert not server.requests


async def test_a_token_may_change_and_end_with_a_newline() -> None:
    tokens = iter(["one\n", "two\n"])
    with serving(saying(200, b"[]")) as server:
        changing = PulsarAdmin(AdminUrl(server.url, lambda: next(tokens)))
        for _ in range(2):
            await changing.topics("public/default")
        assert [request.token for request in server.requests] == ["Bearer one", "Bearer two"]


@pytest.mark.parametrize("url", ["pulsar:8080", "ftp://pulsar", "http://", "http://user:SECRET@pulsar:8080", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(SeqdedupeError, match="INVALID_CONFIGURATION") as e:
        AdminUrl(url)
    assert "SECRET" not in f"{e.value!r}"


async def test_calls_do_not_hold_the_event_loop() -> None:
    asked, over = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def waits(handler: BaseHTTPRequestHandler, request: Request) -> None:
        loop.call_soon_threadsafe(asked.set)
        over.wait()
        saying(200, b"[]")(handler, request)

    with serving(waits) as server:
        call = asyncio.ensure_future(admin(server).topics("public/default"))
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            await asked.wait()
        assert not call.done()
        over.set()
        assert await call == []


async def test_what_may_not_be_looked_up_counts_as_unsafe() -> None:
    def respond(handler: BaseHTTPRequestHandler, request: Request) -> None:
        if request.path.endswith("/brokers/configuration/runtime"):
            saying(403)(handler, request)
        elif request.path.endswith("/subscriptionExpirationTime"):
            saying(204)(handler, request)
        else:
            saying(200, b"true" if "deduplicationEnabled" in request.path else b"0")(handler, request)

    with serving(respond) as server:
        with pytest.raises(SeqdedupeError, match="UNSAFE_TOPIC_POLICY") as e:
            await ensure_safe(admin(server), TOPIC, may_change=False)
        assert "may expire" in e.value.message


def issuing(answer: str) -> Respond:
    def respond(handler: BaseHTTPRequestHandler, request: Request) -> None:
        host = handler.headers["Host"]
        said = f'{{"token_endpoint": "http://{host}/token"}}' if request.method == "GET" else answer
        saying(200, said.encode())(handler, request)

    return respond


@pytest.fixture
def credentials_file(tmp_path: Path) -> Path:
    file = tmp_path / "credentials.json"
    file.write_text('{"client_id": "us", "client_secret": "SECRET"}')
    return file


@pytest.mark.parametrize("seconds", ["Infinity", "NaN", "1e999", "9" * 400, str(tokens.LONGEST_SECONDS)])
def test_a_token_is_renewed_whatever_its_issuer_says(
    credentials_file: Path, monkeypatch: pytest.MonkeyPatch, seconds: str
) -> None:
    later_seconds = 0.0
    monkeypatch.setattr(tokens, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later_seconds))
    with serving(issuing(f'{{"access_token": "{TOKEN}", "expires_in": {seconds}}}')) as server:
        token = OAuth2(server.url, credentials_file, "")
        assert [token(), token()] == [TOKEN] * 2
        assert len(server.requests) == 2
        later_seconds = tokens.LONGEST_SECONDS
        assert token() == TOKEN
        assert len(server.requests) == 4


def test_an_issuer_that_answers_too_deeply_gives_no_token_now(credentials_file: Path) -> None:
    with serving(saying(200, b"[" * 100_000)) as server, pytest.raises(SeqdedupeError, match="LOG_UNREADABLE"):
        OAuth2(server.url, credentials_file, "")()
