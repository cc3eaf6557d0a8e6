"""What starts warm is a process as any other."""

import os
import signal
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from seqdedupe.testing import LAST_RESORT_SECONDS
from tests import warm
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


@pytest.mark.parametrize("place", ["elsewhere", str(warm.ROOT / "spark")])
def test_where_something_else_may_be_imported_it_starts_cold(place: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([place, os.environ.get("PYTHONPATH", "")])}
    with running(SERVE, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) as process:
        assert is_warm(process) is (place != "elsewhere")
