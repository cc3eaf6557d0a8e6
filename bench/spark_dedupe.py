"""Dropping a topic's duplicates by watermark in a worker, rows a second and core, against Spark's stateful operator."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from bench.figure import Figure, Ratio, over
from bench.spark_setup import CORES, session
from seqdedupe.batch import NO_INT32S, Batch, Binary, Int64s, decode
from seqdedupe.client.message import StoredBatch
from seqdedupe_spark.dedupe import Deduplicator

ROWS = 500_000
PRODUCERS = 1000
RESENT = 0.05
"""Of the batches; each comes again right after itself."""

SMALL_ROWS = 16
LARGE_ROWS = 256
FILES = 5
"""Spark's operator takes one a micro-batch; the first, which warms it up, does not count."""

ROWS_PER_SECOND = 10_000
"""What the publish times say, for the operator's watermark."""


def batches(rows: int) -> list[StoredBatch]:
    """ROWS messages and some of them again, as stored, in batches of so many rows."""
    rng = np.random.default_rng(1)
    next_ids = np.zeros(PRODUCERS, np.int64)
    stored: list[StoredBatch] = []
    base_index = 0
    for _ in range(ROWS // rows):
        producers = np.sort(rng.integers(0, PRODUCERS, rows))
        numbers, firsts, indexes, counts = np.unique(
            producers, return_index=True, return_inverse=True, return_counts=True
        )
        ids = next_ids[producers] + np.arange(rows) - firsts[indexes]
        next_ids[numbers] += counts
        order = rng.permutation(rows)
        order = order[np.argsort(ids[order], kind="stable")]
        encoded = _batch(numbers, indexes[order].astype(np.int32), ids[order]).encode()
        for _ in range(2 if rng.random() < RESENT else 1):
            stored.append(StoredBatch(decode(encoded), base_index, 1000 * base_index // ROWS_PER_SECOND, 1))
            base_index += rows
    return stored


def _batch(numbers: Int64s, indexes: Any, ids: Int64s) -> Batch:
    return Batch(
        producer_names=Binary.of_all([b"producer-%06d" % number for number in numbers]),
        epochs=np.ones(len(numbers), np.int64),
        previous_sequence_ids=np.full(len(numbers), -1, np.int64),
        producer_indexes=indexes if len(numbers) > 1 else NO_INT32S,
        sequence_ids=ids,
        payloads=Binary.of_all([b""] * len(ids)),
    )


def in_a_worker(stored: Sequence[StoredBatch]) -> float:
    """Rows a second, on the one core that it uses."""
    deduplicator = Deduplicator({})
    kept = 0
    began = perf_counter()
    for one in stored:
        rows = deduplicator.keep(one)
        kept += len(one) if rows is None else len(rows)
    seconds = perf_counter() - began
    _check(kept, sum(map(len, stored)))
    return sum(map(len, stored)) / seconds


def _check(kept: int, rows: int) -> None:
    if not ROWS * 0.99 < kept <= ROWS < rows:
        raise RuntimeError(f"{kept} of {rows} rows were kept, {ROWS} are no duplicates")


def write_files(stored: Sequence[StoredBatch], folder: Path) -> None:
    """The same rows in Parquet, in order."""
    names = [np.array(one.batch.names())[one.batch.producer_indexes] for one in stored]
    times = np.repeat([one.publish_time_ms for one in stored], [len(one) for one in stored])
    table = pa.table(
        {
            "producer": np.concatenate(names),
            "sequence_id": np.concatenate([one.batch.sequence_ids for one in stored]),
            "publish_time": pa.array(times, pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC")),
        }
    )
    folder.mkdir()
    size = -(-len(table) // FILES)
    for number in range(FILES):
        path = folder / f"{number}.parquet"
        pq.write_table(table.slice(number * size, size), path)
        os.utime(path, (number, number))


def by_spark(spark: SparkSession, folder: Path, rows: int) -> float:
    """Rows a second and core, of the micro-batches after the first."""
    query = (
        spark.readStream.schema("producer string, sequence_id bigint, publish_time timestamp")
        .option("maxFilesPerTrigger", 1)
        .parquet(str(folder))
        .withWatermark("publish_time", "10 minutes")
        .dropDuplicatesWithinWatermark(["producer", "sequence_id"])
        .writeStream.format("noop")
        .trigger(availableNow=True)
        .option("checkpointLocation", str(folder.parent / uuid4().hex))
        .start()
    )
    query.awaitTermination()
    done = [one for one in query.recentProgress if one.numInputRows]
    _check(sum(one.stateOperators[0].numRowsUpdated for one in done), rows)
    seconds = sum(one.durationMs["addBatch"] for one in done[1:]) / 1000
    return sum(one.numInputRows for one in done[1:]) / seconds / CORES


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    large, small = batches(LARGE_ROWS), batches(SMALL_ROWS)
    write_files(large, folder / "rows")
    rows = sum(map(len, large))
    with session(**{"spark.driver.memory": "2g", "spark.sql.shuffle.partitions": str(CORES)}) as spark:
        yield Figure(
            arms={
                "worker, 256-row batches, 1,000 producers": lambda: in_a_worker(large),
                "worker, 16-row batches, 1,000 producers": lambda: in_a_worker(small),
                "dropDuplicatesWithinWatermark": lambda: by_spark(spark, folder / "rows", rows),
            },
            ratios=[
                Ratio(
                    "worker, 256-row batches",
                    lambda measured: measured["worker, 256-row batches, 1,000 producers"] / 1e6,
                    at_least=4,
                    unit="M/s",
                ),
                Ratio(
                    "worker, 256-row batches ÷ dropDuplicatesWithinWatermark",
                    over("worker, 256-row batches, 1,000 producers", "dropDuplicatesWithinWatermark"),
                    at_least=30,
                ),
            ],
            rounds=3,
            notes=["arms in rows a second and core; Spark's with its default state store"],
        )
