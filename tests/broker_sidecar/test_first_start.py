"""A first start serves while another process compiles. That one has the kernels of this suite, and nothing says so: it
is quick, and looks like the first on a machine."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_sidecar import kernels
from seqdedupe.client import Verdict
from seqdedupe.client.blocking import Client
from seqdedupe.testing import Patience, Sidecar, _below, _command
from tests import warm
from tests.broker_sidecar import failing_kernels, no_more_processes, with_constants
from tests.broker_sidecar.metrics.scraping import scrape

COMPILED = "compiled for this machine"
ROWS = 300
PAYLOAD = b"x" * 1000


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    there = kernels._folder("")
    assert there is not None
    home = tmp_path / "home"
    shutil.copytree(there, home / "seqdedupe" / there.name)
    for folder in (home, home / "seqdedupe", home / "seqdedupe" / there.name):
        folder.chmod(0o700)
    (home / "seqdedupe" / there.name / kernels._COMPLETE).unlink(missing_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    # In a process that imports kernels itself.
    with warm.cold():
        yield home


@pytest.fixture
def sidecar(home: Path, tmp_path: Path) -> Iterator[Sidecar]:
    with compiling_stopped(Sidecar(tmp_path / "sidecar", metrics_listen="127.0.0.1:0"), home) as sidecar:
        yield sidecar


@contextlib.contextmanager
def compiling_stopped(sidecar: Sidecar, home: Path) -> Iterator[Sidecar]:
    """A sidecar whose compiling process is stopped as soon as it exists. The sidecar serves with plain functions until
    that process continues."""
    with contextlib.closing(sidecar):
        sidecar.spawn()
        patience = Patience("a process that compiles")
        while not (pids := compiling(sidecar)):
            sidecar.check_running()
            patience.check()
            time.sleep(0.001)
        os.kill(pids[0], signal.SIGSTOP)
        sidecar.wait_until_serving()
        assert not has_said(sidecar, COMPILED)
        assert not list(home.rglob(kernels._COMPLETE))
        try:
            yield sidecar
        finally:
            # One that stands still does not notice that the sidecar has gone.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[0], signal.SIGCONT)


def compiling(sidecar: Sidecar) -> list[int]:
    """The processes that compile."""
    return [pid for pid in _below(sidecar.pid) if "broker_sidecar.kernels" in _command(pid)]


def has_said(sidecar: Sidecar, text: str) -> bool:
    return any(text in str(entry["event"]) for entry in sidecar.log)


def wait_until_said(sidecar: Sidecar, text: str) -> None:
    patience = Patience(text)
    while not has_said(sidecar, text):
        sidecar.check_running()
        patience.check()
        time.sleep(0.01)


def publish(client: Client, first: int) -> None:
    """These messages, those before them once more, and half of these again: to a topic of either kind."""
    half = first + ROWS // 2
    for start, stop, known_up_to in ((max(first - ROWS, 0), first + ROWS, first), (half, first + ROWS, first + ROWS)):
        ids = list(range(start, stop))
        wanted = [Verdict.DUP if k < known_up_to else Verdict.NOT_DUP for k in ids]
        with client.producer("by-sequence-id", "p") as producer:
            result = producer.send_batch([PAYLOAD] * len(ids), ids).result()
            assert result.verdicts.tolist() == wanted
        with client.publisher("by-id") as publisher:
            deduplication_ids = [b"%d" % k for k in ids]
            assert publisher.send_batch([PAYLOAD] * len(ids), deduplication_ids).verdicts.tolist() == wanted


def check_all(client: Client, rows: int) -> None:
    """Each message is there once."""
    for topic in ("by-sequence-id", "by-id"):
        with client.reader(topic) as reader:
            batches = list(reader.batches())
        assert sum(map(len, batches)) == rows
    ids = [int(k or b"") for batch in batches for k in batch.batch.deduplication_ids.rows(len(batch))]
    assert ids == list(range(rows))


def test_it_serves_at_once_and_judges_the_same_before_and_after(sidecar: Sidecar) -> None:
    [pid] = compiling(sidecar)
    assert any("until then the sidecar serves slowly" in line for line in sidecar.errors)
    with Client(sidecar.address) as client:
        client.admin.create_topic("by-id", deduplication_mode="deduplication-id")
        publish(client, 0)
        assert kernels_compiled(sidecar) == 0
        os.kill(pid, signal.SIGCONT)
        wait_until_said(sidecar, COMPILED)
        assert kernels_compiled(sidecar) == 1
        publish(client, ROWS)
        check_all(client, 2 * ROWS)
    assert not [line for line in sidecar.errors if "Warning" in line]
    sidecar.kill()
    sidecar.start()
    # The control: it has all that it needs.
    assert not compiling(sidecar)
    with Client(sidecar.address) as client:
        publish(client, 2 * ROWS)
        check_all(client, 3 * ROWS)


def test_where_something_is_to_be_recovered_it_compiles_first(sidecar: Sidecar, home: Path) -> None:
    with Client(sidecar.address) as client:
        client.admin.create_topic("by-id", deduplication_mode="deduplication-id")
        publish(client, 0)
    sidecar.kill()
    before = len(sidecar.errors)
    sidecar.start()
    assert not compiling(sidecar)
    compiling_lines = [line for line in sidecar.errors[before:] if "compiling" in line]
    assert compiling_lines[0] == "seqdedupe: compiling for this machine, which can take a minute"
    assert not [line for line in compiling_lines if "until then the sidecar serves" in line]
    assert list(home.rglob(kernels._COMPLETE))
    with Client(sidecar.address) as client:
        publish(client, ROWS)
        check_all(client, 2 * ROWS)


def kernels_compiled(sidecar: Sidecar) -> float:
    return scrape(sidecar).value("seqdedupe_kernels_compiled")


def goes_on_without_kernels(sidecar: Sidecar) -> None:
    """It publishes and reads with plain functions, says so, and stops as it should."""
    assert kernels_compiled(sidecar) == 0
    with Client(sidecar.address) as client:
        client.admin.create_topic("by-id", deduplication_mode="deduplication-id")
        publish(client, 0)
        check_all(client, ROWS)
    assert kernels_compiled(sidecar) == 0
    assert sidecar.stop() == 0


@pytest.mark.parametrize(
    ("ends_with", "said", "level"),
    [
        (signal.SIGKILL, "compiling for this machine has failed (status -9", "warning"),
        (signal.SIGTERM, "compiling for this machine was ended (SIGTERM)", "info"),
    ],
)
def test_the_sidecar_goes_on_without_it(sidecar: Sidecar, ends_with: signal.Signals, said: str, level: str) -> None:
    [pid] = compiling(sidecar)
    os.kill(pid, ends_with)
    # A process that stands still is killed all the same, and may be gone by now; SIGTERM waits for it to go on.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    wait_until_said(sidecar, said)
    assert [entry["level"] for entry in sidecar.log if said in str(entry["event"])] == [level]
    assert not [line for line in sidecar.errors if "Traceback" in line]
    goes_on_without_kernels(sidecar)


@pytest.mark.parametrize("ends", [Sidecar.stop, Sidecar.kill])
def test_it_does_not_outlive_the_sidecar(sidecar: Sidecar, ends: object) -> None:
    [pid] = compiling(sidecar)
    if ends is Sidecar.stop:
        assert sidecar.stop() == 0
        assert not has_said(sidecar, "has failed")
    else:
        sidecar.kill()
        os.kill(pid, signal.SIGCONT)
    patience = Patience("the end of what compiles")
    while Path(f"/proc/{pid}").exists() and _command(pid):
        patience.check()
        time.sleep(0.01)


def test_a_process_that_hangs_is_ended_and_the_log_says_so(home: Path, tmp_path: Path) -> None:
    environment = with_constants.environment(kernels__COMPILE_LIMIT_SECONDS=0.001)
    hanging = Sidecar(
        tmp_path / "sidecar", module=with_constants.MODULE, environment=environment, metrics_listen="127.0.0.1:0"
    )
    with compiling_stopped(hanging, home) as sidecar:
        wait_until_said(sidecar, "compiling for this machine was ended: it took more than 0.001 s")
        goes_on_without_kernels(sidecar)


def test_kernels_that_cannot_be_compiled_stay_plain_and_one_line_says_why(home: Path, tmp_path: Path) -> None:
    with Sidecar(tmp_path / "sidecar", module=failing_kernels.MODULE, metrics_listen="127.0.0.1:0") as sidecar:
        wait_until_said(sidecar, "kernels cannot be compiled (ValueError: the third one fails)")
        [entry] = [entry for entry in sidecar.log if "cannot be compiled" in str(entry["event"])]
        assert entry["level"] == "error"
        assert "Traceback" not in json.dumps(entry)
        assert not [line for line in sidecar.errors if "Traceback" in line]
        assert not has_said(sidecar, COMPILED)
        goes_on_without_kernels(sidecar)


def test_where_no_process_can_be_started_it_compiles_first(home: Path, tmp_path: Path) -> None:
    with Sidecar(tmp_path / "sidecar", module=no_more_processes.MODULE) as sidecar:
        assert not compiling(sidecar)
        assert "seqdedupe: compiling for this machine, which can take a minute" in sidecar.errors
        assert list(home.rglob(kernels._COMPLETE))
        assert sidecar.stop() == 0


@pytest.mark.parametrize("fails", ["nice", "complete"])
def test_what_compiles_where_it_may_not_be_nice_and_where_it_leaves_nothing(
    home: Path, tmp_path: Path, fails: str
) -> None:
    """As under the systemd unit, which allows no `setpriority`; and as one that compiles for another installation."""
    program = "import os\nfrom broker_sidecar import kernels\n"
    if fails == "nice":
        program += "def nice(by): raise PermissionError(1, 'Operation not permitted')\nos.nice = nice\n"
    else:
        program += "kernels.compiled = lambda directory: None\n"
    command = [sys.executable, "-c", f"{program}kernels.main()", str(tmp_path / "data")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert Patience("what compiles").wait(process) == 0
    assert bool(list(home.rglob(kernels._COMPLETE))) == (fails == "nice")
