"""kill -9 of Spark's drivers while a job writes into SQLite. The table has no key, so doubles would show."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.spark.jobs import Gate, sqlite_database
from tests.spark.killing import a_successor_finishes, kill_drivers
from tests.spark.killing import address as address
from tests.spark.killing import gates as gates

pytestmark = pytest.mark.timeout(2 * LAST_RESORT_SECONDS)  # several drivers start one after the other


@pytest.mark.parametrize(
    "moments", [[("after", 250)], [("before", 170), ("in", 90), ("after", 250)]], ids=["once", "thrice"]
)
def test_killed_with_a_checkpoint_and_started_again_with_it(
    spark: SparkSession,
    address: str,
    tmp_path: Path,
    gates: Callable[[], Gate],
    moments: list[tuple[str, int]],
) -> None:
    database = sqlite_database(tmp_path / "out.db")
    checkpoint = tmp_path / "checkpoint"
    zombies = kill_drivers(address, database, tmp_path, gates, moments, checkpoint)
    assert checkpoint.exists()
    a_successor_finishes(spark, address, database, checkpoint, zombies)
