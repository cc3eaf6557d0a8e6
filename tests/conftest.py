"""Fixtures that every test may use: real sidecars, as processes of their own."""

import gc
import importlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from broker_sidecar import kernels
from seqdedupe.testing import Sidecar
from tests import warm

# Before any test imports what is compiled; and once, not in each worker.
if kernels.prepare() and "PYTEST_XDIST_WORKER" not in os.environ:
    importlib.import_module("broker_sidecar.server")
    kernels.compiled()

warm.install()

# A suite that is no test file of its own: it says what was compared when a test fails.
pytest.register_assert_rewrite("tests.log.conformance")

# How long an example takes is the machine's business. Each run has the same examples: no dice decide what it says.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

StartSidecar = Callable[..., Sidecar]

_topics = itertools.count()


# Each of these folders needs something that is dear to start and quick once it is warm: Spark, a Pulsar broker. So one
# worker runs such a folder, and first: begun last, it would keep the whole run waiting.
DEAR = ("tests/spark/", "tests/pulsar/")

# The longest files come next, for the same reason, the longest of all first. Those of a dear folder share little or
# nothing with its others, or are worth a Spark session of their own.
LONG = (
    "tests/test_demo.py",
    "tests/format/test_fuzz.py",
    "tests/broker_sidecar/test_hostile.py",
    "tests/deploy/test_install.py",
    "tests/spark/test_kill_driver_postgres.py",
    "tests/pulsar/test_functions.py",
    "tests/spark/test_job_command.py",
    "tests/spark/test_source_pipelines.py",
    "tests/test_readme.py",
    "tests/spark/test_job_cluster.py",
    "tests/pulsar/test_sidecar_kills.py",
    "tests/store/test_power_cut.py",
    "tests/pulsar/test_standby.py",
    "tests/spark/stores/test_kill.py",
    "tests/property/",
    "tests/cli/test_commands.py",
    "tests/cli/test_docs.py",
    "tests/log/test_damage.py",
    "tests/broker_sidecar/test_descriptors.py",
    "tests/broker_sidecar/test_kernels.py",
    "tests/cli/test_bench.py",
    "tests/store/",
)


def _dear_folder(nodeid: str) -> str | None:
    """The one whose tests go to one worker, this one among them."""
    if nodeid.startswith(LONG):
        return None
    return next((folder for folder in DEAR if nodeid.startswith(folder)), None)


def _turn(item: pytest.Item) -> tuple[bool, int]:
    """The smaller, the sooner a test is begun."""
    long = next((turn for turn, prefix in enumerate(LONG) if item.nodeid.startswith(prefix)), len(LONG))
    return _dear_folder(item.nodeid) is None, long


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with those folders and files; what is random about the order stays so."""
    items.sort(key=_turn)


def pytest_collection_finish() -> None:
    """What was imported and collected is there to the end: nobody looks again whether it is garbage."""
    gc.freeze()


class _ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """What one worker runs: a file, or a folder of those."""

    def _split_scope(self, nodeid: str) -> str:
        return _dear_folder(nodeid) or str(super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile:
    return _ByFile(config, log)


def pytest_xdist_auto_num_workers() -> int:
    """Three more than there are cores: much of the time a worker waits for a process, a disk or a clock."""
    return (os.cpu_count() or 1) + 3


@pytest.fixture(scope="session")
def shared_sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar for all tests that do not harm it; each uses topics of its own."""
    with Sidecar(tmp_path_factory.mktemp("shared-sidecar")) as sidecar:
        yield sidecar


@pytest.fixture
def topic() -> str:
    """The name of a topic that nobody else uses."""
    return f"topic-{next(_topics)}"


@pytest.fixture
def start_sidecar(tmp_path: Path) -> Iterator[StartSidecar]:
    """Starts sidecars, each with a data directory of its own; they are gone when the test ends."""
    started: list[Sidecar] = []

    def start(**keys: Any) -> Sidecar:
        sidecar = Sidecar(tmp_path / f"sidecar-{len(started)}", **keys)
        started.append(sidecar)
        sidecar.start()
        return sidecar

    yield start
    for sidecar in started:
        sidecar.kill()


@pytest.fixture
def sidecar(start_sidecar: StartSidecar) -> Sidecar:
    """A sidecar that serves."""
    return start_sidecar()
