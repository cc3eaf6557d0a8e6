"""`seqdedupe.testing.Sidecar`, as its documentation shows it."""

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from seqdedupe import testing
from seqdedupe.client.blocking import Client
from seqdedupe.testing import Patience, Sidecar, Stalled, all_stacks
from tests import warm
from tests.pages import programs
from tests.processes import running

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides" / "testing.md"

# For these only the one that has registered prints its stacks: to be asked would end the others.
HANG = "import time\ndef hang():\n    print('here', flush=True)\n    time.sleep(1e6)\n"
ENABLED = "import faulthandler\nfaulthandler.enable()\n" + HANG + "hang()"
REGISTERED = f"import faulthandler\nfaulthandler.register({testing.STACKS_SIGNAL:d})\n" + HANG + "hang()"
UNPREPARED = HANG + "hang()"


def test_the_example() -> None:
    [code] = programs(PAGE)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    names["test_what_was_sent_survives_a_crash"]()


def test_a_folder_stays_and_a_temporary_one_goes(tmp_path: Path) -> None:
    with Sidecar(tmp_path / "own") as sidecar, Client(sidecar.address) as client:
        client.admin.create_topic("t")
        address = sidecar.address
        assert sidecar.stop() == 0
        assert not sidecar.is_running
        host, _, port = address.rpartition(":")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))
        sidecar.start()
        assert sidecar.address == address
        assert [entry["event"] for entry in sidecar.log].count("serving") == 2
        assert len(client.admin.topics()) == 1
    assert sidecar.data.is_dir()
    assert not sidecar.is_running
    temporary = Sidecar()
    assert temporary.folder.is_dir()
    temporary.close()
    assert not temporary.folder.exists()


def test_a_sidecar_that_ends_by_itself_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="max_topics is 0"):
        Sidecar(tmp_path / "bad", max_topics=0).start()
    with Sidecar(tmp_path / "good", environment={"SEQDEDUPE_MAX_TOPICS": "1"}) as sidecar:
        sidecar.check_running()
        sidecar.signal(signal.SIGKILL)
        assert sidecar.wait() == -signal.SIGKILL
        with pytest.raises(RuntimeError, match="ended with -9"):
            sidecar.check_running()


def test_what_runs_is_not_started_again_and_a_key_that_is_none_is_refused(tmp_path: Path) -> None:
    with Sidecar(tmp_path / "first") as sidecar:
        pid = sidecar.pid
        for again in (sidecar.start, sidecar.spawn):
            with pytest.raises(RuntimeError, match="runs already"):
                again()
        assert (sidecar.pid, sidecar.is_running) == (pid, True)
    with pytest.raises(RuntimeError, match="--log-form"):
        Sidecar(tmp_path / "abbreviated", log_form="json").start()


def check_for_ever(patience: Patience, *seen: object) -> None:
    while True:
        patience.check(*seen)
        time.sleep(0.01)


def test_who_shows_nothing_new_is_named_with_the_stacks_of_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(testing, "STALL_SECONDS", 0.2)
    with (
        (tmp_path / "printed").open("w+") as printed,
        running([sys.executable, "-c", REGISTERED], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as to_pipe,
        running([sys.executable, "-c", REGISTERED], stdout=subprocess.PIPE, stderr=printed) as to_file,
        running([sys.executable, "-c", ENABLED], stdout=subprocess.PIPE, stderr=printed) as enabled,
        running([sys.executable, "-E", "-c", UNPREPARED], stdout=subprocess.PIPE, stderr=printed) as unprepared,
        running(["sh", "-c", "echo here; sleep 1000; true"], stdout=subprocess.PIPE, stderr=printed) as no_python,
    ):
        every = (to_pipe, to_file, enabled, unprepared, no_python)
        for process in every:
            assert process.stdout is not None
            assert process.stdout.readline() == b"here\n"
        patience = Patience("the reader job")
        with pytest.raises(Stalled) as e:
            check_for_ever(patience, 1234, "rows")
        said = str(e.value)
        assert said.startswith("the reader job has shown nothing new for 0.2 s, seen last: 1234, rows\n")
        assert "in test_who_shows_nothing_new_is_named_with_the_stacks_of_all" in said
        assert said.count("in hang") == 2, said
        programs = [sys.executable] * 4 + ["sh"]
        assert all(f"\n{process.pid}: {program}" in said for process, program in zip(every, programs, strict=True))
        for process in (enabled, unprepared, no_python):
            view = rf"\nProcess {process.pid}, which prints no stacks, by the kernel:\n{process.pid} comm: (python|sh)"
            assert re.search(view, said), said
        # None ends by what it was sent: another signal would come after that.
        for process in every:
            process.terminate()
            assert process.wait() == -signal.SIGTERM


def test_who_is_slow_goes_on_until_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "STALL_SECONDS", 0.05)
    patience, began, rows = Patience("the reader job"), time.monotonic(), 0
    while time.monotonic() < began + 0.5:
        time.sleep(0.1)
        patience.check(rows := rows + 1)
    monkeypatch.undo()
    patience = Patience("the reader job", 0.2)
    with pytest.raises(Stalled, match=rf"^the reader job has not ended after 0\.2 s, seen last: {rows}\n"):
        check_for_ever(patience, rows)
    patience = Patience("the audit", 0.2)
    with pytest.raises(Stalled, match=r"^the audit has not ended after 0\.2 s\n"):
        patience.run([sys.executable, "-c", HANG + "hang()"])


def test_what_a_process_prints_and_how_it_ends_is_returned() -> None:
    program = "import sys; print(1); print(2, file=sys.stderr); sys.exit(3)"
    done = Patience("it").run([sys.executable, "-c", program])
    assert (done.returncode, done.stdout, done.stderr) == (3, "1\n", "2\n")


@pytest.mark.parametrize("starting", [nullcontext, warm.cold])
def test_a_sidecar_says_where_it_is_and_goes_on(
    starting: Callable[[], AbstractContextManager[None]], tmp_path: Path
) -> None:
    with starting(), Sidecar(tmp_path) as sidecar:
        said = all_stacks()
        assert "asyncio" in said[said.index("The processes below it") :]
        assert sidecar.is_running


async def test_what_a_task_waits_for_is_told_from_the_outermost_call() -> None:
    async def inner() -> None:
        await asyncio.Event().wait()

    async def outer() -> None:
        await inner()

    task = asyncio.create_task(outer(), name="the one that waits")
    await asyncio.sleep(0)
    told = all_stacks()
    task.cancel()
    assert re.search(r"Task the one that waits.*\n.* in outer\n.* in inner\n.* in wait\n", told), told


HANGING_TEST = f"""
import asyncio, signal, subprocess, sys

from tests.processes import running


async def test_that_hangs():
    command = [sys.executable, "-c", {REGISTERED!r}]
    with running(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.readline()
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        await asyncio.Event().wait()
"""


def test_a_test_that_is_not_over_says_where_it_and_its_processes_wait(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING_TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\ntimeout = 900\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.last_resort", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    assert "test_that_hangs is not over after 900 s" in done.stdout
    assert re.search(r"Task Task-\d.*\n.* in test_that_hangs\n", done.stdout), done.stdout
    assert "in hang" in done.stdout, done.stdout
