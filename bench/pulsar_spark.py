"""Spark reads `packed` topics, rows a second of a whole query: from the broker, against through the sidecar.

Both in a session on two cores; the broker is on the same machine, and the sidecar reads from it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from bench import spark_setup
from bench.figure import Figure, Ratio, over
from bench.pulsar_setup import KEYS, WarmBroker
from pulsar_broker.distribution import get
from seqdedupe.testing import Sidecar

ROWS = 1_000_000
"""In each of the two topics."""
TOPICS = ("bench-0", "bench-1")


def _query(session: SparkSession, **options: str) -> float:
    """Rows a second."""
    began = time.perf_counter()
    read = session.read.format("seqdedupe").options(topics=",".join(TOPICS), **options).load()
    read.write.format("noop").mode("overwrite").save()
    return len(TOPICS) * ROWS / (time.perf_counter() - began)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with (
        WarmBroker(get(), **KEYS) as broker,
        Sidecar(folder / "sidecar", pulsar_entry_format="packed", **broker.sidecar_keys) as sidecar,
    ):
        spark_setup.publish(sidecar.address, ROWS, TOPICS)
        with spark_setup.session(**{"spark.driver.memory": "3g"}) as session:
            of_broker = {"service.url": broker.service_url, "admin.url": broker.admin_url}
            yield Figure(
                arms={
                    "from the broker": lambda: _query(session, **of_broker),
                    "through the sidecar": lambda: _query(session, **{"service.url": sidecar.address}),
                },
                ratios=[Ratio("broker ÷ sidecar", over("from the broker", "through the sidecar"), at_least=1.0)],
                rounds=5,
                notes=["arms in rows a second"],
            )
