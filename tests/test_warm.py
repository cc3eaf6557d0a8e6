"""What starts warm is a process as any other."""

import os
import signal
import subprocess
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests import tiers, warm
from tests.processes import running

TIMEOUT_SECONDS = LAST_RESORT_SECONDS
SERVE = [*warm.SIDECAR, "--listen", "127.0.0.1:0", "--data-directory", "data"]


def is_warm(process: "subprocess.Popen[bytes]") -> bool:
    return b"tests.warm" in Path(f"/proc/{process.pid}/cmdline").read_bytes()


@pytest.mark.parametrize("is_cold", [False, True])
def test_it_has_its_own_arguments_streams_folder_and_environment(is_cold: bool, tmp_path: Path) -> None:
    environment = os.environ | {"SEQDEDUPE_MAX_TOPICS": "1"}
    with (
        warm.cold() if is_cold else nullcontext(),
        running(SERVE, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as process,
    ):
        assert is_warm(process) is not is_cold
        assert process.stderr is not None
        while b'"serving"' not in (line := process.stderr.readline()):
            assert line
        assert (tmp_path / "data").is_dir()
        refused = subprocess.run(
            SERVE,
            cwd=tmp_path,
            env=environment | {"SEQDEDUPE_MAX_TOPICS": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_SECONDS,
        )
        assert refused.returncode == 2
        assert b"max_topics is 0" in refused.stdout
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_SECONDS) == 0


def test_it_is_a_child_of_this_process(tmp_path: Path) -> None:
    with running(SERVE, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        assert is_warm(process)
        process.kill()
        assert os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT) is not None
        assert process.wait() == -signal.SIGKILL


def test_a_refused_start_leaves_nothing_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_server", warm._Server())
    command = [warm.PYTHON, "-c", f"{warm.MAY_BE_WARM}import sys\nprint('broker_sidecar.server' in sys.modules)"]
    with tiers.no_processes("test_x"), pytest.raises(RuntimeError, match="test_x starts a process"):
        subprocess.run(command)
    assert subprocess.run(command, stdout=subprocess.PIPE).stdout == b"True\n"


@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_program_that_says_that_it_may_starts_warm(is_allowed: bool) -> None:
    program = "import sys\nprint('broker_sidecar.server' in sys.modules, __name__, *sys.argv)\nsys.exit(3)"
    command = [warm.PYTHON, "-c", warm.MAY_BE_WARM * is_allowed + program, "word"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_SECONDS)
    assert (done.returncode, done.stdout) == (3, f"{is_allowed} __main__ -c word\n")


def test_workers_start_warm_and_are_children_of_their_parent(tmp_path: Path) -> None:
    with Sidecar(tmp_path, workers=2) as sidecar:
        workers = [psutil.Process(pid) for pid in sidecar.worker_pids.values()]
        assert [(worker.ppid(), "tests.warm" in worker.cmdline()) for worker in workers] == [(sidecar.pid, True)] * 2
        sidecar.signal(signal.SIGKILL)  # they end with their parent
        psutil.wait_procs(workers, TIMEOUT_SECONDS)
        assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)


@pytest.mark.parametrize("place", ["elsewhere", str(warm.ROOT / "spark")])
def test_where_something_else_may_be_imported_it_starts_cold(place: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([place, os.environ.get("PYTHONPATH", "")])}
    with running(SERVE, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) as process:
        assert is_warm(process) is (place != "elsewhere")
