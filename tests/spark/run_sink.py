"""Runs a pickled query into the sink in its own driver, to be killed: `python -m tests.spark.run_sink FILE`."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from seqdedupe.client import blocking
from seqdedupe_spark.session import start_session
from seqdedupe_spark.sink import BatchWriter, SinkTask, StreamWriter
from seqdedupe_spark.source import SeqdedupeDataSource
from tests.spark.jobs import Gate
from tests.spark.run_job import QUICK
from tests.spark.streams import run_stream

BATCHES = 2
"""After this many a task stops."""


class _Gated:
    """Stops one task at the gate when the topic has rows of it."""

    task: SinkTask
    gate: Path

    def gated(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        assert self.task.layout.topic is not None
        with blocking.Client(str(self.task.service)) as client:
            for number, batch in enumerate(batches):
                if number == BATCHES:
                    while client.ends(self.task.layout.topic).last.index < 0:
                        time.sleep(0.01)
                    Gate(self.gate).stop_once()
                yield batch


class GatedBatchWriter(_Gated, BatchWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return super().write(self.gated(iterator))


class GatedStreamWriter(_Gated, StreamWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return super().write(self.gated(iterator))


class GatedSink(SeqdedupeDataSource):
    """The sink, with a gate in its tasks: the option `gate` is its folder."""

    @classmethod
    def name(cls) -> str:
        return "gated"

    def _plain(self) -> tuple[SeqdedupeDataSource, Path]:
        given = dict(self.options)
        folder = Path(given.pop("gate"))
        return SeqdedupeDataSource(given), folder

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        sink, gate = self._plain()
        made = GatedBatchWriter(sink.writer(schema, overwrite).task)
        made.gate = gate
        return made

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        sink, gate = self._plain()
        made = GatedStreamWriter(sink.streamWriter(schema, overwrite).task)
        made.gate = gate
        return made


@dataclass(frozen=True)
class SinkQuery:
    """A stream from a topic into another one."""

    source: dict[str, str]
    target: dict[str, str]
    checkpoint: str
    rows: int
    """A trigger's."""
    gate: Path


class Driver:
    """A driver with its JVM: one process group, which its Python workers are not of."""

    def __init__(self, file: Path, query: SinkQuery) -> None:
        file.write_bytes(pickle.dumps(query))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.run_sink", str(file)],
            env=os.environ | QUICK,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        """kill -9 of the driver and its JVM."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def main(file: Path) -> None:
    query: SinkQuery = pickle.loads(file.read_bytes())
    spark = start_session("sink", "local[2,4]")
    spark.dataSource.register(SeqdedupeDataSource)
    spark.dataSource.register(GatedSink)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "40")
    reader = spark.readStream.format("seqdedupe").options(**query.source)
    rows = reader.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", str(query.rows)).load()
    writer = rows.writeStream.format("gated").options(**query.target).option("gate", str(query.gate))
    run_stream(writer.option("checkpointLocation", query.checkpoint).trigger(availableNow=True))
    spark.stop()


if __name__ == "__main__":
    # As the module that its workers import by name.
    from tests.spark import run_sink

    run_sink.main(Path(sys.argv[1]))
