"""The data source and the sink over Spark Connect: in a declarative pipeline, and in a session of the user.

The server of Spark Connect has the token and the certificate of a sidecar's authority in its environment; its clients
have nothing.
"""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pyspark
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.connect.session import SparkSession

from seqdedupe.client import Credentials, blocking
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar, reserved_port
from seqdedupe_spark.session import workers_path
from tests.certificates import Authority
from tests.processes import running
from tests.spark.conftest import REPOSITORY
from tests.spark.run_job import QUICK_JVM, QUICK_PYTHON
from tests.spark.test_credentials import authority as authority
from tests.spark.test_credentials import guarded as guarded
from tests.spark.workers import launcher

TIMEOUT_SECONDS = LAST_RESORT_SECONDS
COUNT = 100
PAYLOADS = [b"%d" % i for i in range(COUNT)]
ONCE: Counter[bytes | None] = Counter(PAYLOADS)

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server of Spark Connect has its tables."""
    return tmp_path_factory.mktemp("connect")


@pytest.fixture(scope="module")
def connect(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, guarded: Sidecar, authority: Authority
) -> Iterator[str]:
    """The URL of a server of Spark Connect."""
    reserved = reserved_port()
    port = reserved.getsockname()[1]
    keys = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
        "spark.driver.memory": "1g",
        "spark.local.dir": folder,
        "spark.python.authenticate.socketTimeout": "120s",
        "spark.sql.shuffle.partitions": 2,
        "spark.sql.warehouse.dir": folder,
        "spark.ui.enabled": "false",
    }
    submit = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", "local[2]"]
    submit += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    environment = {
        "JAVA_TOOL_OPTIONS": QUICK_JVM,
        "PYTHONPATH": workers_path(QUICK_PYTHON, REPOSITORY),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SEQDEDUPE_TLS_CA_FILE": str(authority.ca_file),
        "SEQDEDUPE_TOKEN_FILE": str(guarded.token_file),
    }
    flags = [part for name, value in keys.items() for part in ("--conf", f"{name}={value}")]
    with (
        reserved,
        (folder / "log").open("wb") as log,
        launcher(tmp_path_factory.mktemp("python"), environment["PYTHONPATH"]) as python,
        running(
            [*submit, *flags],
            stdout=log,
            stderr=log,
            cwd=folder,
            env=os.environ | environment | {"PYSPARK_PYTHON": str(python)},
        ) as process,
    ):
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while b"Spark Connect server started" not in (folder / "log").read_bytes():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield f"sc://127.0.0.1:{port}"


@pytest.fixture
def client(guarded: Sidecar, authority: Authority) -> Iterator[blocking.Client]:
    shows = Credentials(token_file=guarded.token_file, tls_ca_file=authority.ca_file)
    with blocking.Client(guarded.address, shows) as client:
        yield client


@pytest.fixture
def target(client: blocking.Client, topic: str) -> str:
    return client.admin.create_topic(f"{topic}-target", deduplication_mode="deduplication-id").name


def fill(client: blocking.Client, topic: str) -> None:
    with client.producer(topic, "p") as producer:
        producer.send_batch(PAYLOADS)


def counted(client: blocking.Client, topic: str) -> Counter[bytes | None]:
    with client.reader(topic) as reader:
        return Counter(message.payload for message in reader)


def test_the_sink_in_a_session_of_spark_connect(
    connect: str,
    guarded: Sidecar,
    authority: Authority,
    client: blocking.Client,
    topic: str,
    target: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A batch with what the server's environment says, and a stream with files that options name."""
    fill(client, topic)
    given = {"service.url": guarded.address, "topic": target}
    files = {"authParams": guarded.token_file.as_uri(), "tlsTrustCertsFilePath": str(authority.ca_file)}
    session = SparkSession.builder.remote(connect).create()
    try:
        batch = session.range(COUNT).selectExpr("string(id) AS value", "concat('id-', id) AS deduplicationId")
        for _ in range(2):
            batch.write.format("seqdedupe").options(**given).mode("append").save()
        assert counted(client, target) == ONCE

        (tmp_path / "token").write_text("another")
        wrong = files | {"authParams": (tmp_path / "token").as_uri()}
        with pytest.raises(PySparkException, match="UNAUTHENTICATED"):
            batch.write.format("seqdedupe").options(**given, **wrong).mode("append").save()

        reader = session.readStream.format("seqdedupe").option("startingOffsets", "earliest")
        rows = reader.options(**(given | {"topic": topic}), **files).load()
        for checkpoint in ("first", "first", "second"):
            writer = rows.writeStream.format("seqdedupe").options(**given, **files)
            writer = writer.option("checkpointLocation", str(tmp_path / checkpoint))
            query = writer.trigger(availableNow=True).start()
            query.awaitTermination()
            assert query.exception() is None
        assert counted(client, target) == ONCE + ONCE
        rows.explain("extended")
    finally:
        session.stop()
    said = capsys.readouterr()
    assert topic in said.out
    assert guarded.token_file.read_text().strip() not in said.out + said.err


def rows(folder: Path, table: str) -> list[dict[str, Any]]:
    files = [str(path) for path in folder.rglob(f"{table}/*.parquet")]
    found: list[dict[str, Any]] = pyarrow.dataset.dataset(files).to_table().to_pylist()
    return found


def test_a_pipeline_follows_a_topic_and_copies_it(
    connect: str, folder: Path, guarded: Sidecar, client: blocking.Client, topic: str, target: str, tmp_path: Path
) -> None:
    fill(client, topic)
    (tmp_path / "spark-pipeline.yml").write_text(SPEC.format(folder=tmp_path.as_uri()))
    (tmp_path / "transformations").mkdir()
    (tmp_path / "transformations" / "all.py").write_text(
        TRANSFORMATIONS.format(address=guarded.address, topic=topic, target=target)
    )
    scripts = Path(sys.executable).parent
    done = subprocess.run(
        [scripts / "spark-pipelines", "--remote", connect, "run"],
        cwd=tmp_path,
        env=os.environ
        | {
            "JAVA_TOOL_OPTIONS": QUICK_JVM,
            "PATH": os.pathsep.join([str(scripts), os.environ["PATH"]]),
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "PYSPARK_PYTHON": sys.executable,
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(row["value"] for row in rows(folder, "followed")) == sorted(PAYLOADS)
    assert counted(client, target) == ONCE
    assert rows(folder, "counted") == [{"__producerName": "p", "count": COUNT}]
