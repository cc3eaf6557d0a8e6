"""The reader job's fast route into PostgreSQL, rows a second, against psycopg's binary COPY alone of the same rows."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from pyspark.sql import SparkSession

from bench import spark_setup
from bench.figure import Figure, Ratio, over
from seqdedupe.testing import Sidecar
from seqdedupe_spark.message_columns import SCHEMA
from seqdedupe_spark.options import Options, ReadLimits
from seqdedupe_spark.range_reader import read_range
from seqdedupe_spark.rounds import JobConfig, ReaderJob
from seqdedupe_spark.stores.postgresql import PostgresStore
from tests.spark.postgres import PostgresServer

ROWS = 500_000
"""In each of the two topics."""

COLUMNS = (
    "value",
    "__topic",
    "__messageId",
    "__publishTime",
    "__producerName",
    "__sequenceId",
    "__index",
    "__partition",
)
TYPES = ("bytea", "text", "bytea", "timestamptz", "text", "int8", "int8", "int4")

_jobs = itertools.count()


def pick(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The job's transformation."""
    return batch.select(list(COLUMNS))


def _tuples(address: str) -> list[tuple[Any, ...]]:
    """The rows as Python has them, ready to be sent."""
    schema = pa.schema([SCHEMA.field(name) for name in COLUMNS])
    batches = (batch for one in spark_setup.ranges(address) for batch in read_range(address, one, schema))
    return [row for batch in batches for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)]


@contextmanager
def _postgres() -> Iterator[str]:
    """A server with its defaults: what it commits is on the disk."""
    server = PostgresServer()
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


def _job(session: SparkSession, address: str, url: str) -> float:
    """A job that starts for the first time and reads all in one round, into an empty table."""
    source = Options(spark_setup.SELECTION, address, limits=ReadLimits(2 * ROWS, 2**40))
    config = JobConfig(f"job-{next(_jobs)}", source, partial(PostgresStore, url), "by_job")
    job = ReaderJob(session, config, pick)
    _empty(url, "by_job")
    began = time.perf_counter()
    done = job.run_round()
    seconds = time.perf_counter() - began
    assert (done.written, done.lag) == (2 * ROWS, 0)
    return 2 * ROWS / seconds


def _copy(url: str, rows: list[tuple[Any, ...]]) -> float:
    """One COPY in one transaction."""
    _empty(url, "by_copy")
    began = time.perf_counter()
    with (
        psycopg.connect(url) as connection,
        connection.cursor() as cursor,
        cursor.copy("COPY by_copy FROM STDIN (FORMAT BINARY)") as copy,
    ):
        copy.set_types(TYPES)
        for row in rows:
            copy.write_row(row)
    return len(rows) / (time.perf_counter() - began)


def _empty(url: str, table: str) -> None:
    declared = ", ".join(f'"{name}" {kind}' for name, kind in zip(COLUMNS, TYPES, strict=True))
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE IF NOT EXISTS {table} ({declared})".encode())
        connection.execute(f"TRUNCATE {table}".encode())
        connection.execute("CHECKPOINT")


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with Sidecar(folder / "sidecar") as sidecar, _postgres() as url, spark_setup.session() as session:
        spark_setup.publish(sidecar.address, ROWS)
        rows = _tuples(sidecar.address)
        yield Figure(
            arms={
                "fast route": lambda: _job(session, sidecar.address, url),
                "COPY alone": lambda: _copy(url, rows),
            },
            ratios=[Ratio("fast route ÷ binary COPY alone", over("fast route", "COPY alone"), at_least=0.6)],
            rounds=3,
            notes=["arms in rows a second"],
        )
