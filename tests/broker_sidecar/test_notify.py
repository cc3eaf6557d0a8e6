"""What a service manager learns: that it serves, once it does; how far it is; that it runs; that it stops."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from broker_sidecar import telemetry
from broker_sidecar.telemetry import Listener, Manager, patience_seconds
from seqdedupe.testing import Sidecar
from tests.broker_sidecar.calls import Client, batch
from tests.broker_sidecar.gate import Gate
from tests.broker_sidecar.manager import managing
from tests.client.helpers import until

StartSidecar = Callable[..., Sidecar]
PATIENCE = {"WATCHDOG_USEC": "2000000"}
LONG_PATIENCE = {"WATCHDOG_USEC": "8000000"}
"""Where somebody ends what is silent for this long."""


def is_ready(line: str) -> bool:
    return line == "READY=1"


@pytest.mark.parametrize("is_abstract", [False, True])
def test_it_is_told_that_it_serves_that_it_runs_and_that_it_stops(tmp_path: Path, is_abstract: bool) -> None:
    with managing(is_abstract=is_abstract) as told, Sidecar(tmp_path, environment=told.environment | PATIENCE) as one:
        told.until(is_ready)
        assert "STATUS=Serving: 0 of 0 topics ready" in told.lines
        for _ in range(3):
            told.until(lambda line: line == "WATCHDOG=1")
        client = Client(one.address)
        client.epochs("t", "p")
        client.close()
        told.until(lambda line: line == "STATUS=Serving: 1 of 1 topic ready")
        assert one.stop() == 0
        told.until(lambda line: line == "STOPPING=1")
        assert told.lines.count("READY=1") == 1


def test_while_it_recovers_it_is_not_ready_and_says_how_far_it_is(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    with managing() as told, Sidecar(tmp_path / "sidecar", environment=told.environment) as sidecar:
        client = Client(sidecar.address)
        client.publish_unary("t", batch([("p", 0)], client.epochs("t", "p")))
        client.close()
        told.until(is_ready)
        sidecar.kill()
        told.lines.clear()
        gate.close()
        started = threading.Thread(target=gate.start, args=(sidecar,))
        started.start()
        told.until(lambda line: line == "STATUS=Recovering: 0 of 1 topic ready")
        assert "READY=1" not in told.lines
        gate.open()
        told.until(is_ready)
        started.join()


def test_nobody_who_wants_to_know_and_one_who_is_gone(tmp_path: Path) -> None:
    with Sidecar(tmp_path, environment={"NOTIFY_SOCKET": str(tmp_path / "nobody")}) as sidecar:
        assert sidecar.stop() == 0
        assert not sidecar.errors
    nobody = Manager({})
    assert not nobody.is_there
    nobody.tell(READY="1")


def test_what_the_manager_cannot_take_now_it_is_told_later() -> None:
    with managing() as told:
        manager = Manager(told.environment)
        # Until its queue is full.
        for _ in range(10_000):
            manager.tell(STATUS="x")
            if manager._owed:
                break
        manager.tell(READY="1")
        told.until(lambda line: line == "STATUS=x")
        manager.tell(STATUS="y")
        told.until(is_ready)
        assert told.lines[-1] == "READY=1" or "STATUS=y" in told.lines


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_whose_patience_it_is(environment: dict[str, str], seconds: float | None) -> None:
    assert patience_seconds(environment) == seconds


async def test_a_loop_that_stands_still_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the event loop's own steps says that it runs."""
    monkeypatch.setattr(telemetry, "BEAT_SECONDS", 0.01)
    with managing() as told:
        telling = asyncio.ensure_future(Manager(told.environment | PATIENCE).keep_telling(lambda: "here"))
        await asyncio.sleep(0)
        told.until(lambda line: line == "WATCHDOG=1")
        told._socket.settimeout(0.5)
        with pytest.raises(TimeoutError):  # this blocks the loop
            told.until(lambda line: line == "WATCHDOG=1")
        told._socket.settimeout(0)
        while told.lines.count("WATCHDOG=1") < 2:  # the control arm: it goes on
            await asyncio.sleep(0.01)
            try:
                told.until(lambda line: line == "WATCHDOG=1")
            except BlockingIOError:
                continue
        telling.cancel()


async def test_the_kernel_says_who_speaks() -> None:
    heard: list[tuple[int, dict[str, str]]] = []
    listener = Listener(lambda pid, values: heard.append((pid, values)))
    name = listener.environment()["NOTIFY_SOCKET"]
    Manager({"NOTIFY_SOCKET": name}).tell(READY="1", STATUS="a=b")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hostile:
        for said in (b"", b"\xff=\xff\n", b"x" * 10_000, b"READY"):
            hostile.sendto(said, f"\0{name[1:]}")
    await until(lambda: len(heard) == 5)
    assert {pid for pid, _ in heard} == {os.getpid()}
    assert heard[0][1] == {"READY": "1", "STATUS": "a=b"}
    assert heard[-1][1] == {}
    listener.close()


def test_the_parent_of_workers_is_ready_when_all_serve_and_one_that_stands_still_is_started_again(
    tmp_path: Path,
) -> None:
    with managing() as told, Sidecar(tmp_path, workers=2, environment=told.environment | LONG_PATIENCE) as sidecar:
        told.until(is_ready)
        assert "STATUS=2 of 2 workers serve" in told.lines
        # Only the parent speaks.
        assert not any("topics" in line for line in told.lines)
        before = sidecar.worker_pids[1]
        os.kill(before, signal.SIGSTOP)
        told.until(lambda line: line == "STATUS=1 of 2 workers serve")
        told.until(lambda line: line == "STATUS=2 of 2 workers serve")
        # Nobody else has ended it: stopped, it would have stayed.
        assert sidecar.worker_pids[1] != before
        assert any(entry["event"] == "worker does not respond" and entry["worker"] == 1 for entry in sidecar.log)
        assert sidecar.stop() == 0
        assert told.lines.count("READY=1") == 1
