"""kill -9 of Spark's drivers while a job writes into SQLite. The table has no key, so doubles would show."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark.job import ReaderJob
from tests.spark.jobs import Gate, select, sqlite_database
from tests.spark.killing import BOTH, all_are_there, config, kill_drivers, wake
from tests.spark.killing import address as address
from tests.spark.killing import gates as gates
from tests.spark.run_job import run_with_checkpoint

pytestmark = pytest.mark.timeout(240)  # several drivers start one after the other


def test_killed_with_a_checkpoint_and_started_again_with_it(
    spark: SparkSession, address: str, tmp_path: Path, gates: Callable[[], Gate]
) -> None:
    database = sqlite_database(tmp_path / "out.db")
    checkpoint = tmp_path / "checkpoint"
    moments = [("before", 170), ("in", 90), ("after", 250)]
    zombies = kill_drivers(address, database, tmp_path, gates, moments, checkpoint)
    assert checkpoint.exists()
    successor = ReaderJob(spark, config(address, database, 110), select)
    run_with_checkpoint(spark, successor, checkpoint)
    assert 0 < successor.total.read < sum(BOTH.values())
    all_are_there(database)
    wake(zombies)
    all_are_there(database)
