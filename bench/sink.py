"""The Spark sink with Arrow batches of 1,000 rows, against the client that publishes the same batches ready-made.

First what a task does with the batches; then Spark's whole write of a frame of as many rows, JVM and workers included.
IDs of 16 bytes, payloads of 100, all new.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, StructType

from bench import spark_setup
from bench.figure import Figure, Ratio, over
from bench.window import ids_from
from seqdedupe.batch import Binary
from seqdedupe.client import Client
from seqdedupe.client.blocking import Client as BlockingClient
from seqdedupe.testing import Sidecar
from seqdedupe_spark import sink as task_module
from seqdedupe_spark.row_layout import layout_of
from seqdedupe_spark.sink import SinkTask

ROWS = 1_000
BATCHES = 1_000
"""Spark takes a tenth of a second for a write of nothing."""
PAYLOAD_BYTES = 100
REST_SECONDS = 1.0
IN_FLIGHT = 64
TOPIC = "persistent://public/default/bench"

_ID_BYTES = 16

Columns = tuple[Binary, Binary]
"""Payloads and IDs."""


def _ready(first: int) -> list[Columns]:
    """Batches of new IDs from this number on."""
    payloads = Binary(
        np.arange(0, ROWS * PAYLOAD_BYTES + 1, PAYLOAD_BYTES, dtype=np.int32), bytes(ROWS * PAYLOAD_BYTES)
    )
    offsets = np.arange(0, ROWS * _ID_BYTES + 1, _ID_BYTES, dtype=np.int32)
    return [(payloads, Binary(offsets, ids_from(first + n * ROWS))) for n in range(BATCHES)]


def _arrow(ready: list[Columns]) -> list[pa.RecordBatch]:
    def array(column: Binary) -> pa.Array:
        return pa.Array.from_buffers(pa.binary(), ROWS, [None, pa.py_buffer(column.offsets), pa.py_buffer(column.data)])

    return [pa.RecordBatch.from_arrays([array(p), array(i)], ["value", "deduplicationId"]) for p, i in ready]


async def _publish(address: str, ready: list[Columns]) -> None:
    async with Client(address) as client, client.publisher(TOPIC) as publisher:
        under_way: deque[asyncio.Task[object]] = deque()
        for payloads, ids in ready:
            if len(under_way) == IN_FLIGHT:
                await under_way.popleft()
            under_way.append(asyncio.ensure_future(publisher.send_batch(payloads, ids)))
        await asyncio.gather(*under_way)


def _frame(session: SparkSession, ready: list[Columns], folder: Path) -> DataFrame:
    """The rows as a frame of files: one that is made from Arrow would ship them with its plan."""
    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_batches(_arrow(ready)), path, row_group_size=ROWS * BATCHES // spark_setup.CORES)
    return session.read.parquet(path.as_uri())


def _rate(do: Callable[[], object]) -> float:
    """Rows a second. What the one before has left to be done, by Spark and by RocksDB, is not part of it."""
    time.sleep(REST_SECONDS)
    began = time.perf_counter()
    do()
    return ROWS * BATCHES / (time.perf_counter() - began)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    turns = count()
    schema = StructType().add("value", BinaryType()).add("deduplicationId", BinaryType())
    layout = layout_of(schema, TOPIC)

    def new() -> list[Columns]:
        return _ready(next(turns) * ROWS * BATCHES)

    with Sidecar(folder / "sidecar") as sidecar:
        with BlockingClient(sidecar.address) as client:
            client.admin.create_topic(TOPIC, deduplication_mode="deduplication-id")
        with spark_setup.session(**{"spark.sql.execution.arrow.maxRecordsPerBatch": str(ROWS)}) as session:
            given = {"service.url": sidecar.address, "topic": TOPIC}

            def client_arm() -> float:
                ready = new()
                return _rate(lambda: asyncio.run(_publish(sidecar.address, ready)))

            def task_arm() -> float:
                batches = _arrow(new())
                task = SinkTask(sidecar.address, layout, task_module.now())
                return _rate(lambda: task.run(batches))

            def spark_arm() -> float:
                frame = _frame(session, new(), folder)
                writer = frame.write.format("seqdedupe").options(**given).mode("append")
                return _rate(writer.save)

            yield Figure(
                arms={"client": client_arm, "task": task_arm, "spark": spark_arm},
                ratios=[
                    Ratio("sink's task ÷ client", over("task", "client"), at_least=0.5),
                    Ratio("Spark's whole write ÷ client", over("spark", "client"), at_least=0.5),
                ],
                rounds=5,
                notes=["arms in rows a second"],
            )
