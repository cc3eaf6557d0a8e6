"""A job on a standalone cluster of two workers, of which one loses its executor."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pyspark
import pytest

from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe_spark.session import workers_path
from tests.processes import running
from tests.spark.jobs import Gate, postgres_database
from tests.spark.killing import BOTH, all_are_there, config, gated
from tests.spark.killing import address as address
from tests.spark.killing import gates as gates
from tests.spark.postgres import postgres_url as postgres_url
from tests.spark.run_job import QUICK_JVM, QUICK_PYTHON, Driver

REPOSITORY = Path(__file__).parents[2]


@contextmanager
def daemon(name: str, ready: str, *arguments: str) -> Iterator[str]:
    """A master or worker; gives what `ready` finds in its log. With it goes all that it has started."""
    home = Path(pyspark.__file__).parent
    process = subprocess.Popen(
        [home / "bin" / "spark-class", f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1", *arguments],
        env=os.environ
        | {"SPARK_HOME": str(home), "PYTHONPATH": workers_path(QUICK_PYTHON, REPOSITORY), "SPARK_NO_DAEMONIZE": "1"}
        | {"JAVA_TOOL_OPTIONS": QUICK_JVM, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(ready, line):
                break
        else:
            pytest.fail("".join(lines))
        # What else it says has to go somewhere.
        with running(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL):
            process.stderr.close()
            yield found[0]
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """The URL of a cluster of two workers, with a core each."""
    with ExitStack() as stack:
        url = stack.enter_context(
            daemon("master.Master", r"spark://[\d.]+:[1-9]\d*", "--port", "0", "--webui-port", "0")
        )
        for number in range(2):
            flags = ["--cores", "1", "--memory", "1g", "--webui-port", "0", "--work-dir", str(tmp_path / str(number))]
            stack.enter_context(daemon("worker.Worker", "Successfully registered", *flags, url))
        yield url


def test_an_executor_is_lost_and_each_message_is_written_once(
    master: str, address: str, tmp_path: Path, gates: Callable[[], Gate], postgres_url: str
) -> None:
    database = postgres_database(postgres_url)
    gate = gates()
    driver = Driver(tmp_path / "job", gated(config(address, database, 1000), gate, "in"), master=master)
    stalled = psutil.Process(gate.wait())
    executor = next(parent for parent in stalled.parents() if parent.name() == "java")
    executor.kill()
    read, written = map(int, driver.wait().split())
    assert read == written == sum(BOTH.values())
    all_are_there(database)
    gate.open()
    assert psutil.wait_procs([stalled], timeout=LAST_RESORT_SECONDS)[0]
    all_are_there(database)
    assert all(list((tmp_path / str(number)).glob("app-*/*")) for number in range(2))
