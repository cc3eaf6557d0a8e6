"""A job that an environment's Python runs while the environment is not activated: Spark's own choice, the `python3` of
the PATH, does not have the package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from seqdedupe.client import blocking
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.spark.conftest import SPARK

JOB = """
import json, sys
from pyspark.sql import SparkSession
from seqdedupe.errors import SeqdedupeError
from seqdedupe_spark.session import register
keys, address, topic, registers = json.loads(sys.argv[1]), *sys.argv[2:]
spark = SparkSession.builder.master("local[1]").config(map=keys).getOrCreate()
if registers == "yes":
    try:
        register(spark)
    except SeqdedupeError as e:
        sys.exit(f"{e} {e.hint}")
rows = spark.read.format("seqdedupe").option("service.url", address).option("topic", topic).load()
print(sorted(bytes(row.value).decode() for row in rows.select("value").collect()))
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


def run(sidecar: Sidecar, topic: str, foreign: Path, registers: str, **more: str) -> tuple[int, str, str]:
    removed = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    environment["PATH"] = f"{foreign.parent}{os.pathsep}{environment['PATH']}"
    keys = SPARK | {"spark.log.level": "ERROR", "spark.local.dir": str(foreign.parent)}
    keys["spark.sql.warehouse.dir"] = str(foreign.parent)
    done = subprocess.run(
        [sys.executable, "-c", JOB, json.dumps(keys), sidecar.address, topic, registers],
        env=environment | more,
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
    status, rows, said = run(shared_sidecar, published, foreign, "yes")
    assert (status, rows) == (0, "['one', 'two']\n"), said
    # The control arm: Spark alone looks with the wrong Python.
    status, _, said = run(shared_sidecar, published, foreign, "no")
    assert status != 0
    assert "DATA_SOURCE_NOT_FOUND" in said


def test_a_python_that_was_chosen_is_used_and_one_without_the_package_is_named(
    shared_sidecar: Sidecar, published: str, foreign: Path
) -> None:
    status, rows, said = run(shared_sidecar, published, foreign, "yes", PYSPARK_PYTHON=sys.executable)
    assert (status, rows) == (0, "['one', 'two']\n"), said
    status, _, said = run(shared_sidecar, published, foreign, "yes", PYSPARK_PYTHON=str(foreign))
    assert status != 0
    last = said.strip().splitlines()[-1]
    assert last.startswith(f"Spark starts '{foreign}' for its Python processes, which cannot import seqdedupe_spark: ")
    assert f"On this machine {sys.executable} has it." in last
