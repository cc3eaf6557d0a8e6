"""Logs that nobody can flood."""

import asyncio
import importlib
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from broker_sidecar import telemetry
from broker_sidecar.telemetry import (
    LINES,
    MAX_EXCEPTION_CHARACTERS,
    MAX_KINDS,
    MAX_TEXT_CHARACTERS,
    WINDOW_SECONDS,
    LastWarnings,
    Limit,
)
from seqdedupe.testing import Sidecar
from tests import warm
from tests.broker_sidecar import serve_command
from tests.broker_sidecar.calls import TIMEOUT_SECONDS, Client, batch
from tests.broker_sidecar.raw_http2 import RawConnection


class Clock:
    """A time that the test moves, and what is due then."""

    def __init__(self) -> None:
        self.now_seconds = 1000.0
        self._due: list[tuple[float, Callable[[], None]]] = []

    def later(self, seconds: float, tell: Callable[[], None]) -> None:
        self._due.append((self.now_seconds + seconds, tell))

    def move(self, seconds: float) -> None:
        self.now_seconds += seconds
        due = [tell for at, tell in self._due if at <= self.now_seconds]
        self._due = [item for item in self._due if item[0] > self.now_seconds]
        for tell in due:
            tell()


class Kept(logging.Handler):
    """What is logged, after a limit."""

    def __init__(self, *limits: Limit) -> None:
        super().__init__()
        for limit in limits:
            self.addFilter(limit)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("seqdedupe.tests.logs")
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    yield logger
    logger.handlers.clear()
    logger.propagate = True


@pytest.fixture
def kept(clock: Clock, logger: logging.Logger) -> Kept:
    kept = Kept(Limit(lambda: clock.now_seconds, clock.later))
    logger.addHandler(kept)
    return kept


def test_a_thousand_lines_of_a_kind_are_twenty_and_one(kept: Kept, clock: Clock, logger: logging.Logger) -> None:
    everything = Kept()
    logger.addHandler(everything)
    for k in range(1000):
        logger.warning("the log of topic %s failed", k)
    assert kept.lines == [f"the log of topic {k} failed" for k in range(LINES)]
    assert len(everything.lines) == 1000
    clock.move(WINDOW_SECONDS)
    assert kept.lines[LINES:] == [f"{1000 - LINES} lines like this one were omitted: the log of topic %s failed"]
    clock.move(WINDOW_SECONDS)
    assert len(kept.lines) == LINES + 1
    logger.warning("the log of topic %s failed", "again")
    assert kept.lines[-1] == "the log of topic again failed"


def test_another_kind_is_not_left_out(kept: Kept, logger: logging.Logger) -> None:
    for _ in range(1000):
        logger.info("topic %s is %s", "a", "SERVING")
    logger.error("topic %s is %s", "b", "DAMAGED")
    logger.info("something else")
    assert kept.lines[LINES:] == ["topic b is DAMAGED", "something else"]


def test_lines_over_a_long_time_are_all_there(kept: Kept, clock: Clock, logger: logging.Logger) -> None:
    for _ in range(10 * LINES):
        logger.info("now and then")
        clock.move(WINDOW_SECONDS / LINES)
    assert len(kept.lines) == 10 * LINES


def test_text_from_elsewhere_takes_no_memory(kept: Kept, clock: Clock, logger: logging.Logger) -> None:
    for k in range(10 * MAX_KINDS):
        logger.info(f"from {k}")  # as a library does that knows no better
    # Together they are one kind from there on.
    assert MAX_KINDS <= len(kept.lines) <= MAX_KINDS + LINES
    clock.move(WINDOW_SECONDS)
    logger.info("another")
    assert kept.lines[-1] == "another"


def test_threads_lose_no_count(kept: Kept, clock: Clock, logger: logging.Logger) -> None:
    def log() -> None:
        for _ in range(500):
            logger.info("the same")

    threads = [threading.Thread(target=log) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    clock.move(WINDOW_SECONDS)
    assert kept.lines[LINES:] == [f"{2000 - LINES} lines like this one were omitted: the same"]


def test_what_is_configured_is_limited(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        telemetry.configure("info", "json")
        for _ in range(1000):
            logging.getLogger("seqdedupe.tests.others").info("the same")
    finally:
        root.handlers[:], root.level = before
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["the same"] * LINES


async def test_an_answer_that_comes_after_the_end_of_its_call_causes_no_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """gRPC writes the answer of a unary call after its handler has returned: whether the call has ended by then, and
    gRPC knows of it, is a race. What a handler raises is reported, as what gRPC itself raises there would be."""
    cygrpc: Any = importlib.import_module("grpc._cython.cygrpc")  # only some versions have types for it
    called = asyncio.Event()
    failures: dict[str, Exception] = {
        "/a/ended": cygrpc.ExecuteBatchError("the call has ended"),
        "/a/failed": RuntimeError("a defect"),
    }

    class Raising(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> Any:
            async def handle(request: bytes, context: Any) -> bytes:
                called.set()
                raise failures[details.method]

            return grpc.unary_unary_rpc_method_handler(handle)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Raising(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    root = logging.getLogger()
    handlers, level, grpc_logger = list(root.handlers), root.level, logging.getLogger("grpc._cython.cygrpc")
    filters = list(grpc_logger.filters)
    last = LastWarnings()
    try:
        telemetry.configure("info", "text")
        root.addHandler(last)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            method: Any = channel.unary_unary
            ended = method("/a/ended")(b"")
            await called.wait()
            ended.cancel()
            with pytest.raises(grpc.aio.AioRpcError):
                await method("/a/failed")(b"", timeout=TIMEOUT_SECONDS)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        grpc_logger.filters[:] = filters
        await server.stop(None)
    written = capsys.readouterr().err
    assert "RuntimeError" in written
    assert "ExecuteBatchError" not in written
    assert [one.message for one in last.newest_first() if "ExecuteBatchError" in one.message] == []


def test_a_hostile_client_causes_no_lines(sidecar: Sidecar) -> None:
    client = Client(sidecar.address)
    epochs = client.epochs("t", "a")
    stream = client.stream("t")
    stream.receipt(batch([("a", 0)], epochs))
    began = len(sidecar.log)
    for _ in range(300):
        with pytest.raises(grpc.RpcError):
            client.raw("/seqdedupe.v1.PublishService/Open", b"\xff\xff")
        stream.refusal(b"\xff\xff")
        stream.refusal(batch([("a", 1)], {"a": 7}))
    host, port = sidecar.address.split(":")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 50):
        for _ in range(50):
            with socket.create_connection((host, int(port)), TIMEOUT_SECONDS) as connection:
                connection.sendall(garbage)
    client.close()
    assert sidecar.stop() == 0
    assert {line["event"] for line in sidecar.log[began:] if "topic" not in line["event"]} == {"draining", "stopped"}
    assert len(sidecar.log) - began < LINES
    assert not sidecar.errors


def test_a_long_text_is_cut_in_both_forms() -> None:
    long, longer = "x" * (10 * MAX_TEXT_CHARACTERS), ValueError("y" * (10 * MAX_EXCEPTION_CHARACTERS))
    record = logging.getLogger("seqdedupe").makeRecord(
        "seqdedupe", logging.ERROR, "", 1, "%s", (long,), (ValueError, longer, None), extra={"path": long}
    )
    for form in (telemetry._Json(), telemetry._Text("%(message)s")):
        line = form.format(record)
        assert line.count("x") <= 2 * MAX_TEXT_CHARACTERS + 10
        assert line.count("y") <= MAX_EXCEPTION_CHARACTERS
        assert line.count("characters are omitted") == 3


@pytest.mark.parametrize("verbosity", ["NONE by default", "INFO"])
def test_grpc_itself_writes_nothing_for_callers_unless_somebody_wants_it(tmp_path: Path, verbosity: str) -> None:
    environment = {"GRPC_VERBOSITY": verbosity} if verbosity == "INFO" else {}
    # In a process that imports gRPC itself.
    with warm.cold(), Sidecar(tmp_path, module=serve_command.MODULE, environment=environment) as sidecar:
        connection = RawConnection(sidecar.address)
        for headers in ({"grpc-encoding": "gzip"}, {"grpc-encoding": "snappy"}, {"grpc-timeout": "abc"}):
            call = connection.begin("/seqdedupe.v1.AdminService/GetVersion", headers)
            assert connection.wait_ended([call], TIMEOUT_SECONDS)
        connection.close()
        assert sidecar.stop() == 0
        written = sum(len(line) for line in sidecar.errors)
        assert (written > 0) == (verbosity == "INFO")
