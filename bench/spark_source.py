"""The Spark data source's whole query, rows a second, against ready Arrow batches from memory and against tuples."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from bench import spark_setup
from bench.figure import Figure, Ratio, over
from seqdedupe.testing import Sidecar
from seqdedupe_spark.message_columns import SCHEMA
from seqdedupe_spark.range_reader import read_range

ROWS = 1_000_000
"""In each of the two partitions."""


class _Source(DataSource):
    """A source with the same columns."""

    def schema(self) -> StructType:
        return from_arrow_schema(SCHEMA)


class _ReadyReader(DataSourceReader):
    def __init__(self, folder: str) -> None:
        self._folder = folder

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(str(path)) for path in sorted(Path(self._folder).glob("*.arrow"))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        reader = pa.ipc.open_file(pa.memory_map(partition.value))
        return (reader.get_batch(i) for i in range(reader.num_record_batches))


class ReadySource(_Source):
    """Yields the batches that the source would, from files mapped into memory."""

    @classmethod
    def name(cls) -> str:
        return "ready"

    def reader(self, schema: StructType) -> DataSourceReader:
        return _ReadyReader(self.options["folder"])


class _TupleReader(DataSourceReader):
    def __init__(self, address: str) -> None:
        self._address = address

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(one) for one in spark_setup.ranges(self._address)]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        for batch in read_range(self._address, partition.value):
            yield from zip(*_as_python(batch), strict=True)


def _as_python(batch: pa.RecordBatch) -> Iterator[list[Any]]:
    for column in batch.columns:
        values = column.to_pylist()
        yield [dict(value) for value in values] if pa.types.is_map(column.type) else values


class TupleSource(_Source):
    """Reads the same messages and yields them as tuples."""

    @classmethod
    def name(cls) -> str:
        return "tuples"

    def reader(self, schema: StructType) -> DataSourceReader:
        return _TupleReader(self.options["address"])


def _keep_ready(address: str, folder: Path) -> None:
    for number, one in enumerate(spark_setup.ranges(address)):
        with pa.OSFile(str(folder / f"{number}.arrow"), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
            for batch in read_range(address, one):
                writer.write_batch(batch)


def _query(session: SparkSession, source: str, **options: str) -> float:
    """Rows a second of a whole query."""
    began = time.perf_counter()
    session.read.format(source).options(**options).load().write.format("noop").mode("overwrite").save()
    return 2 * ROWS / (time.perf_counter() - began)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with Sidecar(folder / "sidecar") as sidecar:
        spark_setup.publish(sidecar.address, ROWS)
        _keep_ready(sidecar.address, folder)
        with spark_setup.session(**{"spark.driver.memory": "3g"}) as session:
            session.dataSource.register(ReadySource)
            session.dataSource.register(TupleSource)
            yield Figure(
                arms={
                    "source": lambda: _query(
                        session, "seqdedupe", **{"service.url": sidecar.address, "topic": "bench"}
                    ),
                    "ready batches": lambda: _query(session, "ready", folder=str(folder)),
                    "tuples": lambda: _query(session, "tuples", address=sidecar.address),
                },
                ratios=[
                    Ratio("source ÷ ready batches", over("source", "ready batches"), at_least=0.6),
                    Ratio("source ÷ tuples", over("source", "tuples"), at_least=6),
                ],
                rounds=5,
                notes=["arms in rows a second"],
            )
