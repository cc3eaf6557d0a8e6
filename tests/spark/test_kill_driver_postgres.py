"""kill -9 of Spark's drivers while a job writes into PostgreSQL, and drivers that stall. The table has no key, so
doubles would show."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe_spark.rounds import ReaderJob
from tests.spark.jobs import Gate, postgres_database, select
from tests.spark.killing import a_successor_finishes, all_are_there, config, gated, kill_drivers
from tests.spark.killing import address as address
from tests.spark.killing import gates as gates
from tests.spark.postgres import postgres_url as postgres_url
from tests.spark.run_job import Driver

pytestmark = pytest.mark.timeout(2 * LAST_RESORT_SECONDS)  # several drivers start one after the other


@pytest.mark.parametrize("moments", [[("in", 250)], [("in", 250), ("before", 90)]], ids=["once", "twice"])
def test_killed_without_a_checkpoint_and_with_one_that_is_deleted(
    spark: SparkSession,
    address: str,
    tmp_path: Path,
    gates: Callable[[], Gate],
    postgres_url: str,
    moments: list[tuple[str, int]],
) -> None:
    database = postgres_database(postgres_url)
    checkpoint = tmp_path / "checkpoint"
    zombies = kill_drivers(address, database, tmp_path, gates, moments)
    zombies += kill_drivers(address, database, tmp_path, gates, [("after", 170)], checkpoint)
    shutil.rmtree(checkpoint)
    a_successor_finishes(spark, address, database, checkpoint, zombies)


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
