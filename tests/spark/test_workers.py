"""What Spark starts warm is a process as any other."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe_spark.session import workers_path
from tests.processes import running
from tests.spark.workers import REPOSITORY, launcher

SHOWS = """
import json, os, sys

print(json.dumps([sys.argv[1:], os.getcwd(), os.environ["OWN"], sys.stdin.read(), "pyspark.worker" in sys.modules]))
sys.exit(3)
"""
WAITS = """
import os, time

print(os.getpid(), flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with launcher(tmp_path_factory.mktemp("python"), workers_path(REPOSITORY)) as python:
        yield python


def test_it_has_its_own_arguments_folder_environment_streams_and_status(python: Path, tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text(SHOWS)
    ran = subprocess.run(
        [python, "-m", "shows", "a", "b"],
        cwd=tmp_path,
        env=os.environ | {"OWN": "c"},
        input="d",
        stdout=subprocess.PIPE,
        text=True,
        timeout=LAST_RESORT_SECONDS,
    )
    assert (ran.returncode, json.loads(ran.stdout)) == (3, [["a", "b"], str(tmp_path), "c", "d", True])


def test_it_ends_when_its_launcher_is_killed(python: Path, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    with running([python, "-m", "waits"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        forked = psutil.Process(int(process.stdout.readline()))
        process.kill()
        assert psutil.wait_procs([forked], timeout=LAST_RESORT_SECONDS)[0]
