"""What the tests that kill jobs share: two topics, gates, and a job that writes both into a table."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe_spark.rounds import JobConfig, ReaderJob
from tests.spark.jobs import JOB, TABLE, Database, Gate, GatedStore, each_once, publish, select, source
from tests.spark.run_job import Driver, run_with_checkpoint

BOTH = {"persistent://public/default/a": 600, "persistent://public/default/b": 400}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Sidecar(tmp_path_factory.mktemp("sidecar")) as sidecar:
        for topic, count in BOTH.items():
            publish(sidecar.address, topic, count)
        yield sidecar.address


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Callable[[], Gate]]:
    """New gates; all of them are open when the test ends, so that nobody stays behind."""
    made: list[Gate] = []

    def make() -> Gate:
        made.append(Gate(tmp_path / f"gate-{len(made)}"))
        return made[-1]

    yield make
    for gate in made:
        gate.open()


def config(address: str, database: Database, rows: int = 250) -> JobConfig:
    return JobConfig(JOB, source(address, topics=",".join(BOTH), maxOffsetsPerTrigger=rows), database.store, TABLE)


def gated(given: JobConfig, gate: Gate, where: str) -> JobConfig:
    return replace(given, store=partial(GatedStore, given.store, gate, where))


def all_are_there(database: Database) -> None:
    for topic, count in BOTH.items():
        each_once(database.indexes(topic), count)


def kill_drivers(
    address: str,
    database: Database,
    folder: Path,
    gates: Callable[[], Gate],
    moments: Sequence[tuple[str, int]],
    checkpoint: Path | None = None,
) -> list[tuple[Gate, int]]:
    """Starts drivers, each with another batch size, and kills them at these moments. Their workers outlive them,
    stalled where they were: these gates let them go on."""
    zombies = []
    for where, rows in moments:
        gate = gates()
        driver = Driver(folder / "job", gated(config(address, database, rows), gate, where), checkpoint)
        zombies.append((gate, gate.wait()))
        driver.kill()
    return zombies


def a_successor_finishes(
    spark: SparkSession, address: str, database: Database, checkpoint: Path, zombies: Sequence[tuple[Gate, int]]
) -> None:
    """It reads what those before it left, and nothing changes when their workers wake."""
    successor = ReaderJob(spark, config(address, database, 110), select)
    run_with_checkpoint(spark, successor, checkpoint)
    assert 0 < successor.total.read < sum(BOTH.values())
    all_are_there(database)
    wake(zombies)
    all_are_there(database)


def wake(zombies: Sequence[tuple[Gate, int]]) -> None:
    """Returns when these workers have done what they still do."""
    for gate, pid in zombies:
        gate.open()
        if psutil.pid_exists(pid):
            assert psutil.wait_procs([psutil.Process(pid)], timeout=LAST_RESORT_SECONDS)[0]
