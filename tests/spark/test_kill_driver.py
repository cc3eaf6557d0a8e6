"""kill -9 of Spark's drivers while a job works, and drivers that stall. The table has no key, so doubles would show."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from pyspark.sql import SparkSession

from spark.job import ReaderJob
from tests.spark.jobs import Database, Gate, postgres_database, select, sqlite_database
from tests.spark.killing import BOTH, all_are_there, config, gated
from tests.spark.killing import address as address
from tests.spark.killing import gates as gates
from tests.spark.postgres import postgres_url as postgres_url
from tests.spark.run_job import Driver, run_with_checkpoint


def _kill_drivers(
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


def _wake(zombies: Sequence[tuple[Gate, int]]) -> None:
    """Returns when these workers have done what they still do."""
    for gate, pid in zombies:
        gate.open()
        if psutil.pid_exists(pid):
            assert psutil.wait_procs([psutil.Process(pid)], timeout=30)[0]


def test_killed_with_a_checkpoint_and_started_again_with_it(
    spark: SparkSession, address: str, tmp_path: Path, gates: Callable[[], Gate]
) -> None:
    database = sqlite_database(tmp_path / "out.db")
    checkpoint = tmp_path / "checkpoint"
    zombies = _kill_drivers(address, database, tmp_path, gates, [("before", 170), ("after", 250)], checkpoint)
    assert checkpoint.exists()
    successor = ReaderJob(spark, config(address, database, 110), select)
    run_with_checkpoint(spark, successor, checkpoint)
    assert 0 < successor.total.read < sum(BOTH.values())
    all_are_there(database)
    _wake(zombies)
    all_are_there(database)


def test_killed_again_and_again_without_a_checkpoint(
    spark: SparkSession, address: str, tmp_path: Path, gates: Callable[[], Gate], postgres_url: str
) -> None:
    database = postgres_database(postgres_url)
    zombies = _kill_drivers(address, database, tmp_path, gates, [("in", 250), ("before", 90), ("after", 170)])
    total = ReaderJob(spark, config(address, database, 110), select).run()
    assert 0 < total.read < sum(BOTH.values())
    all_are_there(database)
    _wake(zombies)
    all_are_there(database)


def test_a_zombie_driver_wakes_beside_its_successor(
    spark: SparkSession, address: str, tmp_path: Path, gates: Callable[[], Gate], postgres_url: str
) -> None:
    database = postgres_database(postgres_url)
    gate = gates()
    zombie = Driver(tmp_path / "job", gated(config(address, database), gate, "before"))
    gate.wait()
    os.killpg(zombie.process.pid, signal.SIGSTOP)
    ReaderJob(spark, config(address, database, 1000), select).run()
    os.killpg(zombie.process.pid, signal.SIGCONT)
    gate.open()
    read, written = map(int, zombie.wait().split())
    assert read == written
    assert read < 250
    all_are_there(database)
