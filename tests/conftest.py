"""How the suite is run (its tiers, the order of its files), and the fixtures that every test may use: real sidecars.

Every test pays for what is imported here, so nothing of the sidecar is.
"""

import gc
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from broker_sidecar import kernels
from seqdedupe.testing import Sidecar
from tests import tiers, warm

# Before any test imports a kernel.
_KERNELS_ARE_MISSING = kernels.prepare()

warm.install()

# On a CI, pytest searches for every difference of what it compares. With large collections, that takes longer than a
# test may.
for _of_a_ci in ("CI", "BUILD_NUMBER"):
    os.environ.pop(_of_a_ci, None)

# A suite that is no test file of its own: it says what was compared when a test fails.
pytest.register_assert_rewrite("tests.log.conformance")

# How long an example takes is the machine's business. Each run of the suite has the same few examples of a property: no
# dice decide what it says. A campaign has many, and others each time.
_any_machine = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", _any_machine, max_examples=40, derandomize=True)
settings.register_profile("campaign", _any_machine, max_examples=1000, database=None, print_blob=True)
settings.load_profile("suite")

StartSidecar = Callable[..., Sidecar]

_topics = itertools.count()


# Each of these folders needs something that is dear to start and quick once it is warm: Spark, a Pulsar broker. So one
# worker runs such a folder, and first: begun last, it would keep the whole run waiting.
DEAR = ("tests/spark/", "tests/pulsar/")

# The longest files come next, for the same reason, the longest of all first. Those of a dear folder share little or
# nothing with its others, or are worth their own Spark session.
LONG = (
    "tests/backup/test_place_kills.py",
    "tests/backup/test_bucket.py",
    "tests/test_demo.py",
    "tests/format/test_fuzz.py",
    "tests/broker_sidecar/test_hostile.py",
    "tests/pulsar/test_functions.py",
    "tests/spark/test_job_command.py",
    "tests/spark/test_source_pipelines.py",
    "tests/test_pages.py",
    "tests/spark/test_job_cluster.py",
    "tests/pulsar/test_sidecar_kills.py",
    "tests/store/test_power_cut.py",
    "tests/pulsar/test_standby.py",
    "tests/spark/stores/test_kill.py",
    "tests/property/",
    "tests/cli/test_commands.py",
    "tests/client_conformance/test_sidecar.py",
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
    if nodeid.startswith("tests/pulsar/test_spark_job.py"):
        # It has its own broker, and needs the session.
        return "tests/spark/"
    return next((folder for folder in DEAR if nodeid.startswith(folder)), None)


def _turn(item: pytest.Item) -> tuple[bool, int]:
    """The smaller, the sooner a test is begun."""
    nodeid = item.nodeid  # pytest makes the string at each access
    long = next((turn for turn, prefix in enumerate(LONG) if nodeid.startswith(prefix)), len(LONG))
    return _dear_folder(nodeid) is None, long


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("seqdedupe")
    group.addoption("--tier", choices=tiers.TIERS, help="collect the tests of one tier alone, see tests/tiers.py")
    group.addoption("--campaign", action="store_true", help="run the cases that the suite leaves to `make campaign`")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--campaign"):
        settings.load_profile("campaign")
    for tier in tiers.TIERS:
        config.addinivalue_line("markers", f"{tier}: set by tests/tiers.py")
    if _KERNELS_ARE_MISSING and getattr(config.option, "numprocesses", None):
        # Once, and not in each worker.
        kernels.compile_first()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import the files of other tiers."""
    if (wanted := config.getoption("--tier")) is None or not collection_path.match("test_*.py"):
        return None
    return tiers.tier_of(collection_path.relative_to(tiers.ROOT).as_posix()) != wanted or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its tier, omit the campaign's cases, and begin with the longest; other order stays random."""
    for item in items:
        item.add_marker(tiers.tier_of(item.nodeid))
    suite, campaign = tiers.divide(items)
    if config.getoption("--campaign"):
        properties = [item for item in suite if getattr(getattr(item, "obj", None), "is_hypothesis_test", False)]
        items[:], others = campaign + properties, [item for item in suite if item not in properties]
    else:
        items[:], others = suite, campaign
    if others:
        config.hook.pytest_deselected(items=others)
    items.sort(key=_turn)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with tiers.no_processes(item.nodeid) if item.get_closest_marker(tiers.UNIT) else nullcontext():
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for service in tiers.needed_by(item):
        service.check()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name each reason for skipping once."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count} test{'s' * (count != 1)}: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Next to nothing of what is collected is garbage: looking for it takes a seventh of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What was imported and collected is there to the end: nobody looks again whether it is garbage."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What one worker runs: a file, or a folder of those."""
    from xdist.scheduler import LoadFileScheduling  # the suite also runs where xdist is not loaded

    class ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return _dear_folder(nodeid) or str(super()._split_scope(nodeid))

    return ByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Three more than there are cores: much of the time a worker waits for a process, a disk or a clock."""
    return (os.cpu_count() or 1) + 3


@pytest.fixture(scope="session")
def shared_sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar for all tests that do not harm it; each uses its own topics."""
    with Sidecar(tmp_path_factory.mktemp("shared-sidecar")) as sidecar:
        yield sidecar


@pytest.fixture
def topic() -> str:
    """The name of a topic that nobody else uses."""
    return f"topic-{next(_topics)}"


@pytest.fixture
def start_sidecar(tmp_path: Path) -> Iterator[StartSidecar]:
    """Starts sidecars, each with its own data directory; they are gone when the test ends."""
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
