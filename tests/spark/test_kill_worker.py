"""kill -9 of Spark's workers while a job works. The table has no key, so doubles would show."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from seqdedupe_spark.rounds import ReaderJob
from tests.spark.jobs import (
    CarelessSqliteStore,
    Database,
    Gate,
    postgres_database,
    select,
    source,
    sqlite_database,
    whole,
)
from tests.spark.killing import BOTH, all_are_there, config, gated
from tests.spark.killing import address as address
from tests.spark.killing import gates as gates
from tests.spark.postgres import postgres_url as postgres_url


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    if request.param == "sqlite":
        return sqlite_database(tmp_path / "out.db")
    return postgres_database(request.getfixturevalue("postgres_url"))


def kill_who_comes(gate: Gate) -> threading.Thread:
    thread = threading.Thread(target=lambda: os.kill(gate.wait(), signal.SIGKILL))
    thread.start()
    return thread


@pytest.mark.parametrize("where", ["before", "in", "after"])
def test_a_worker_is_killed_and_spark_tries_its_task_again(
    spark: SparkSession, address: str, database: Database, gates: Callable[[], Gate], where: str
) -> None:
    gate = gates()
    killer = kill_who_comes(gate)
    ReaderJob(spark, gated(config(address, database), gate, where), select).run()
    killer.join()
    all_are_there(database)


def test_without_the_compare_the_task_tried_again_doubles_its_rows(
    spark: SparkSession, address: str, tmp_path: Path, gates: Callable[[], Gate]
) -> None:
    database = sqlite_database(tmp_path / "out.db")
    gate = gates()
    topic = "persistent://public/default/b"
    believed = whole(address, topic).range.start
    careless = replace(
        config(address, database, 1000), store=partial(CarelessSqliteStore, str(tmp_path / "out.db"), believed)
    )
    careless = replace(careless, source=source(address, topic=topic))
    killer = kill_who_comes(gate)
    ReaderJob(spark, gated(careless, gate, "after"), select).run()
    killer.join()
    assert len(database.indexes(topic)) == 2 * BOTH[topic]
