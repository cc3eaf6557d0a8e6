"""The data source and the sink in a declarative pipeline, whose session is one of Spark Connect."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.dataset

from seqdedupe.client import blocking
from seqdedupe_spark.session import workers_path
from tests.spark.conftest import REPOSITORY
from tests.spark.run_job import QUICK_JVM

TIMEOUT_SECONDS = 400

SPEC = """
name: check
storage: {folder}/storage
libraries:
  - glob:
      include: transformations/**
"""

TRANSFORMATIONS = """
from pyspark import pipelines
from pyspark.sql import SparkSession

spark = SparkSession.active()
options = {{"service.url": "{address}", "topic": "{topic}", "startingOffsets": "earliest"}}


@pipelines.table
def followed():
    return spark.readStream.format("seqdedupe").options(**options).load()


@pipelines.materialized_view
def counted():
    return spark.read.format("seqdedupe").options(**options).load().groupBy("__producerName").count()


pipelines.create_sink("copies", "seqdedupe", {{"service.url": "{address}", "topic": "{target}"}})


@pipelines.append_flow(target="copies")
def copied():
    return spark.readStream.format("seqdedupe").options(**options).load()
"""


def rows(folder: Path, table: str) -> list[dict[str, Any]]:
    files = [str(path) for path in folder.rglob(f"{table}/*.parquet")]
    found: list[dict[str, Any]] = pyarrow.dataset.dataset(files).to_table().to_pylist()
    return found


def test_a_pipeline_follows_a_topic_and_copies_it(client: blocking.Client, topic: str, tmp_path: Path) -> None:
    with client.producer(topic, "p") as producer:
        producer.send_batch([b"%d" % i for i in range(100)])
    target = client.admin.create_topic(f"{topic}-target", deduplication_mode="deduplication-id").name
    (tmp_path / "spark-pipeline.yml").write_text(SPEC.format(folder=tmp_path.as_uri()))
    (tmp_path / "transformations").mkdir()
    (tmp_path / "transformations" / "all.py").write_text(
        TRANSFORMATIONS.format(address=client.address, topic=topic, target=target)
    )
    scripts = Path(sys.executable).parent
    done = subprocess.run(
        [scripts / "spark-pipelines", "run"],
        cwd=tmp_path,
        env=os.environ
        | {
            "JAVA_TOOL_OPTIONS": QUICK_JVM,
            "PATH": os.pathsep.join([str(scripts), os.environ["PATH"]]),
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": workers_path(REPOSITORY),
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(row["value"] for row in rows(tmp_path, "followed")) == sorted(b"%d" % i for i in range(100))
    with client.reader(target) as reader:
        assert sorted(message.payload or b"" for message in reader) == sorted(b"%d" % i for i in range(100))
    assert rows(tmp_path, "counted") == [{"__producerName": "p", "count": 100}]
