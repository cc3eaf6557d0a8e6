"""A job that an environment's Python runs while the environment is not activated: Spark's own choice, the `python3` of
the PATH, does not have the package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from seqdedupe.client import blocking
from seqdedupe.errors import ConfigurationError
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe_spark.session import register
from tests.spark.conftest import SPARK

JOB = """
import json, sys
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession
from seqdedupe_spark.session import register
keys, address, topic = json.loads(sys.argv[1]), *sys.argv[2:]
spark = SparkSession.builder.master("local[1]").config(map=keys).getOrCreate()
reader = spark.read.format("seqdedupe").option("service.url", address).option("topic", topic)
try:
    reader.load()
except Py4JJavaError as e:
    print(e)
register(spark)
print(sorted(bytes(row.value).decode() for row in reader.load().select("value").collect()))
"""


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A `python3` without this package: it has only what Python brings."""
    folder = tmp_path / "bin"
    folder.mkdir()
    python = folder / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return python


def run(sidecar: Sidecar, topic: str, foreign: Path) -> tuple[int, str, str]:
    removed = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    environment["PATH"] = f"{foreign.parent}{os.pathsep}{environment['PATH']}"
    keys = SPARK | {"spark.log.level": "ERROR", "spark.local.dir": str(foreign.parent)}
    keys["spark.sql.warehouse.dir"] = str(foreign.parent)
    done = subprocess.run(
        [sys.executable, "-c", JOB, json.dumps(keys), sidecar.address, topic],
        env=environment,
        cwd=foreign.parent,
        capture_output=True,
        text=True,
        timeout=LAST_RESORT_SECONDS,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def published(shared_sidecar: Sidecar, topic: str) -> str:
    with blocking.Client(shared_sidecar.address) as client, client.producer(topic, "p") as producer:
        producer.send_batch([b"one", b"two"], [0, 1]).result()
    return topic


def test_a_job_finds_the_source_if_it_registers_it(shared_sidecar: Sidecar, published: str, foreign: Path) -> None:
    status, printed, said = run(shared_sidecar, published, foreign)
    assert status == 0, said
    # The control arm: until then Spark alone looks, with the wrong Python.
    without, _, rows = printed.rstrip("\n").rpartition("\n")
    assert "DATA_SOURCE_NOT_FOUND" in without
    assert rows == "['one', 'two']"


def test_a_python_that_was_chosen_is_used_and_one_without_the_package_is_named(
    spark: SparkSession,
    shared_sidecar: Sidecar,
    published: str,
    foreign: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the session of all tests, as if it had been created with them."""
    used, chosen = tmp_path / "used", tmp_path / "chosen"
    chosen.write_text(f'#!/bin/sh\ntouch {used}\nexec {sys.executable} "$@"\n')
    chosen.chmod(0o755)
    try:
        with monkeypatch.context() as patch:
            patch.setenv("PYSPARK_PYTHON", str(chosen))
            patch.setattr(spark.sparkContext, "pythonExec", str(chosen))
            register(spark)
            used.unlink()
            rows = spark.read.format("seqdedupe").options(**{"service.url": shared_sidecar.address, "topic": published})
            assert sorted(bytes(row.value) for row in rows.load().select("value").collect()) == [b"one", b"two"]
            assert used.exists()
            patch.delenv("PYTHONPATH")  # the session's, which has this repository
            patch.setattr(spark.sparkContext, "pythonExec", str(foreign))
            with pytest.raises(ConfigurationError) as raised:
                register(spark)
    finally:
        register(spark)
    named = f"Spark starts '{foreign}' for its Python processes, which cannot import seqdedupe_spark: "
    assert raised.value.message.startswith(named)
    assert f"On this machine {sys.executable} has it." in raised.value.hint
