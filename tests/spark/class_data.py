"""An archive of the classes that Spark's JVMs load: `python -m tests.spark.class_data` makes it, if it is missing."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pyspark

from pulsar_broker.quick import Archive
from seqdedupe.testing import LAST_RESORT_SECONDS

ARCHIVE = Archive(Path(pyspark.__file__).parent / "jars")
TIMEOUT_SECONDS = LAST_RESORT_SECONDS

SESSION = """
import tempfile
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2]").getOrCreate()
rows = spark.createDataFrame([(1, "a")], "id long, text string")
rows.mapInArrow(lambda batches: batches, rows.schema).collect()
with tempfile.TemporaryDirectory() as folder:
    rows.select("text").write.text(f"{folder}/in")
    stream = spark.readStream.schema("text string").text(f"{folder}/in").writeStream
    stream = stream.foreachBatch(lambda batch, _: batch.foreachPartition(list)).option("checkpointLocation", folder)
    stream.trigger(availableNow=True).start().awaitTermination()
spark.stop()
"""
"""A little of what the tests' jobs do."""


def options() -> str:
    """For a JVM: none without an archive for the Java and the Spark of this environment."""
    archive = ARCHIVE.file
    # Java is to say nothing about one that does not fit.
    return f' "-XX:SharedArchiveFile={archive}" -Xlog:disable' if archive else ""


def write(archive: Path) -> None:
    """Runs a session whose JVM writes it when it ends."""
    java = f'-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "-XX:ArchiveClassesAtExit={archive}"'
    spark = shlex.join(["--driver-java-options", java, "--conf", "spark.ui.enabled=false", "pyspark-shell"])
    environment = os.environ | {"PYSPARK_SUBMIT_ARGS": spark, "PYSPARK_PYTHON": sys.executable}
    # The JVM outlives its session, and has the same output: what is read until its end has the archive written.
    subprocess.run(
        [sys.executable, "-"],
        input=SESSION.encode(),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_SECONDS,
        check=True,
    )


if __name__ == "__main__":
    try:
        ARCHIVE.make(write)
    except (OSError, subprocess.SubprocessError) as e:
        print(f"Spark's JVMs start without an archive of their classes: {e}")
