"""Runs a pickled job in its own Spark driver, to be killed at will: `python -m tests.spark.run_job FILE`."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from seqdedupe.errors import SeqdedupeError
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe_spark.rounds import JobConfig, ReaderJob
from seqdedupe_spark.session import start_session
from tests.spark import class_data
from tests.spark.jobs import select
from tests.spark.streams import run_stream

QUICK_JVM = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC{class_data.options()}"
"""For a JVM that lives for seconds."""

QUICK_PYTHON = Path(__file__).with_name("site")
"""A folder for PYTHONPATH, with which Spark's Python processes start in half the time."""

QUICK = {
    "JAVA_TOOL_OPTIONS": QUICK_JVM,
    "PYTHONPATH": str(QUICK_PYTHON),
    "PYSPARK_SUBMIT_ARGS": "--conf spark.ui.enabled=false --conf spark.sql.shuffle.partitions=2 pyspark-shell",
}
"""The environment of a session that lives for seconds."""


class Driver:
    """A driver with its JVM: one process group, which its Python workers are not of."""

    def __init__(
        self, file: Path, config: JobConfig, checkpoint: Path | None = None, master: str = "local[2,4]"
    ) -> None:
        file.write_bytes(pickle.dumps((config, checkpoint, master)))
        command = [sys.executable, "-m", __name__, str(file)]
        self.process = subprocess.Popen(
            command,
            env=os.environ | QUICK,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def kill(self) -> None:
        """kill -9 of the driver and its JVM."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def wait(self) -> str:
        """What it has printed when it has ended: how many messages it read and rows it wrote, or an error's reason."""
        return self.process.communicate(timeout=LAST_RESORT_SECONDS)[0].strip()


def run_with_checkpoint(spark: SparkSession, job: ReaderJob, checkpoint: Path) -> None:
    """Runs the job as a streaming query, until all is read."""
    source = job.config.source
    clock = {"service.url": str(source.service), "topics": ",".join(source.selection.names)}
    stream = spark.readStream.format("seqdedupe").options(**clock, startingOffsets="earliest").load()

    def tick(frame: DataFrame, batch: int) -> None:
        job.run()

    writer = stream.writeStream.foreachBatch(tick).option("checkpointLocation", str(checkpoint))
    run_stream(writer.trigger(availableNow=True))


def main(file: Path) -> None:
    config, checkpoint, master = pickle.loads(file.read_bytes())
    spark = start_session("job", master)
    job = ReaderJob(spark, config, select)
    try:
        if checkpoint is None:
            job.run()
        else:
            run_with_checkpoint(spark, job, checkpoint)
        print(job.total.read, job.total.written)
    except SeqdedupeError as e:
        print(e.reason)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
