"""Fixtures of the tests of Spark jobs: a session, a sidecar, topics; most tests need no session."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from seqdedupe.client import blocking
from seqdedupe.testing import Sidecar
from seqdedupe_spark.session import workers_path
from tests.spark import class_data, workers
from tests.spark.run_job import QUICK_PYTHON
from tests.spark.s3 import server

REPOSITORY = Path(__file__).parents[2]

SPARK = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": f"-XX:TieredStopAtLevel=1{class_data.options()}",
    "spark.driver.memory": "1g",
    "spark.log.level": "OFF",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
"""What a session for tests is reported: quick to start, silent, and of little memory."""


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session with two cores, and four tries of each task. Its workers find the modules of this repository."""
    if session := SparkSession.getActiveSession():
        # Where another folder imports this fixture, pytest takes it for another one.
        yield session
        return
    os.environ["PYTHONPATH"] = path = workers_path(QUICK_PYTHON, REPOSITORY)
    # Workers get the environment of now; the server is started by who needs it.
    os.environ |= server().environment
    folder = str(tmp_path_factory.mktemp("spark"))
    keys = SPARK | {"spark.local.dir": folder, "spark.sql.warehouse.dir": folder}
    with workers.launcher(tmp_path_factory.mktemp("python"), path) as python:
        os.environ["PYSPARK_PYTHON"] = str(python)
        session = SparkSession.builder.master("local[2,4]").config(map=dict(keys)).getOrCreate()
        # Anyone who starts a driver from here has Python as it is.
        os.environ["PYSPARK_PYTHON"] = sys.executable
        try:
            yield session
        finally:
            session.stop()


@pytest.fixture
def client(shared_sidecar: Sidecar) -> Iterator[blocking.Client]:
    with blocking.Client(shared_sidecar.address) as client:
        yield client
