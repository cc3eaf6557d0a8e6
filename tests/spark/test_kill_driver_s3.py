"""kill -9 of a driver while its job commits to a Delta table on S3. The table has no key, so doubles would show."""

import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe_spark.rounds import ReaderJob
from tests.spark.jobs import delta_database, select
from tests.spark.killing import BOTH, all_are_there, config
from tests.spark.killing import address as address
from tests.spark.run_job import Driver
from tests.spark.s3 import Between, Requested, adds_rows
from tests.spark.s3 import between as between
from tests.spark.s3 import lake as lake
from tests.spark.s3 import s3 as s3

LIMIT_SECONDS = LAST_RESORT_SECONDS


def test_a_commit_of_a_killed_driver_comes_behind_its_successor(
    spark: SparkSession, address: str, tmp_path: Path, lake: str, between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers outlive it, and one has sent a commit, which the server gets when all is read."""
    database = delta_database(lake)
    arrived, go, landed = threading.Event(), threading.Event(), threading.Event()
    late: list[str] = []

    def before(requested: Requested) -> None:
        if adds_rows(requested) and not late:
            late.append(requested[1])
            arrived.set()
            assert go.wait(LIMIT_SECONDS)

    def loses(requested: Requested) -> bool:
        if requested[1] in late:
            landed.set()
        return False

    between.before, between.loses = before, loses
    with monkeypatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", between.url)
        driver = Driver(tmp_path / "job", config(address, database, 170))
        assert arrived.wait(LIMIT_SECONDS)
        driver.kill()
    successor = ReaderJob(spark, config(address, database, 1000), select)
    successor.run()
    assert successor.total.read <= sum(BOTH.values())
    all_are_there(database)
    go.set()
    assert landed.wait(LIMIT_SECONDS)
    all_are_there(database)
