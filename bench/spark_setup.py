"""What the benchmarks of Spark jobs share: a session, and two topics of small messages."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from seqdedupe.client import ProducerConfig, blocking
from seqdedupe.message_id import Position
from seqdedupe_spark.options import Selection
from seqdedupe_spark.planning import TopicListing
from seqdedupe_spark.ranges import TopicRange
from seqdedupe_spark.session import workers_path

CORES = 2
BATCH_ROWS = 256
PAYLOAD_BYTES = 100
PARTITIONS = ("bench-partition-0", "bench-partition-1")
SELECTION = Selection("topic", ("persistent://public/default/bench",))
"""The two partitions that `publish` fills."""

_REPOSITORY = Path(__file__).parents[1]


@contextmanager
def session(**keys: str) -> Iterator[SparkSession]:
    """A session on CORES cores, whose workers find the modules of this repository."""
    os.environ |= {"PYTHONPATH": workers_path(_REPOSITORY), "PYSPARK_PYTHON": sys.executable}
    quiet = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}
    spark = SparkSession.builder.master(f"local[{CORES}]").config(map=dict(quiet | keys)).getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def publish(address: str, rows: int, topics: Sequence[str] = PARTITIONS) -> None:
    """Publishes so many messages to each of the topics."""
    payloads = [bytes(PAYLOAD_BYTES)] * BATCH_ROWS
    config = ProducerConfig(max_in_flight_batches=256, max_batch_rows=BATCH_ROWS)
    with blocking.Client(address) as client:
        for topic in topics:
            with client.producer(topic, "p", config) as producer:
                for first in range(0, rows, BATCH_ROWS):
                    producer.send_batch(payloads[: rows - first])


def ranges(address: str) -> list[TopicRange]:
    """All that the two partitions hold."""
    with blocking.Client(address) as client:
        listing = TopicListing(client)
        names = listing.select(SELECTION)
        return listing.plan({name: Position.before(client.ends(name).last.incarnation, 0) for name in names})
