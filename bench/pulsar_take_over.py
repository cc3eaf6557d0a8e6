"""Reading what stock producers have written before a topic is taken over: messages a second, by format and entries.

Read is a topic of 200,000 messages of 100 bytes of 10 producers, one a entry and in batches of 100 (LZ4), as the Python
client writes them. That is the work of an opening without a snapshot; the broker is on the same machine. The Spark job
reads the same in two tasks, in a session that has begun.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pulsar
import pulsar.asyncio
from pyspark.sql import SparkSession

from bench import spark_setup
from bench.figure import Figure, Ratio, over
from bench.pulsar_setup import KEYS, NAMESPACE
from pulsar_broker.distribution import get
from pulsar_broker.standalone import Broker
from seqdedupe.log.pulsar.admin_url import AdminUrl, PulsarAdmin
from seqdedupe.log.pulsar.broker_wire import Brokers
from seqdedupe.log.pulsar.entries import EntryFormat, EntrySettings
from seqdedupe.log.pulsar.log import PulsarLog, PulsarResources
from seqdedupe_spark.bootstrap_job import bootstrap_from_stock_topic
from seqdedupe_spark.service import PulsarCluster

MESSAGES = 200_000
PRODUCERS = 10
ROWS = 100


def _quiet() -> pulsar.ConsoleLogger:
    return pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)


def _fill(broker: Broker, topic: str, **options: Any) -> None:
    client = pulsar.Client(broker.service_url, operation_timeout_seconds=300, logger=_quiet())
    for number in range(PRODUCERS):
        producer = client.create_producer(
            topic, producer_name=f"p{number}", block_if_queue_full=True, send_timeout_millis=0, **options
        )
        for sequence_id in range(MESSAGES // PRODUCERS):
            producer.send_async(b"x" * 100, None, sequence_id=sequence_id)
        producer.flush()
        producer.close()
    client.close()


async def _read(broker: Broker, topic: str, entry_format: EntryFormat) -> float:
    """The messages a second."""

    async def nobody(*_: object) -> Any:
        raise NotImplementedError

    admin = PulsarAdmin(AdminUrl(broker.admin_url))
    shared = PulsarResources(
        "one",
        "host:6680",
        lambda: time.time_ns() // 1_000_000,
        nobody,
        admin,
        nobody,
        Brokers(broker.service_url),
    )
    log = PulsarLog(shared, topic, 1, EntrySettings(entry_format, "SEQUENCE_ID", 0, "host:6680"))
    began = time.perf_counter()
    await log.begin(0)
    seconds = time.perf_counter() - began
    if list(log.earlier.values()) != [MESSAGES // PRODUCERS - 1] * PRODUCERS:
        raise RuntimeError(f"found: {log.earlier}")
    await log.close()
    return MESSAGES / seconds


def _run(broker: Broker, topic: str, entry_format: EntryFormat) -> float:
    return asyncio.run(_read(broker, topic, entry_format))


def _by_job(session: SparkSession, broker: Broker, topic: str, output: Path) -> float:
    service = PulsarCluster(broker.service_url, broker.admin_url)
    began = time.perf_counter()
    if bootstrap_from_stock_topic(session, service, topic, output) != PRODUCERS:
        raise RuntimeError("the job has not found all producers")
    return MESSAGES / (time.perf_counter() - began)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with Broker(get(), **KEYS) as broker, spark_setup.session() as session:
        batched, single = f"{NAMESPACE}/batched", f"{NAMESPACE}/single"
        _fill(
            broker,
            batched,
            batching_enabled=True,
            batching_max_messages=ROWS,
            batching_max_publish_delay_ms=1_000,
            compression_type=pulsar.CompressionType.LZ4,
        )
        _fill(broker, single, batching_enabled=False)
        arms: dict[str, Callable[[], float | Mapping[str, float]]] = {}
        for name, topic in (("batches", batched), ("single messages", single)):
            for entry_format in (EntryFormat.NATIVE, EntryFormat.PLAIN):
                arms[f"{entry_format.value}, {name}"] = partial(_run, broker, topic, entry_format)
            arms[f"job, {name}"] = partial(_by_job, session, broker, topic, folder / "marks")
        yield Figure(
            arms=arms,
            ratios=[
                Ratio(f"{one} ÷ plain, {name}", over(f"{one}, {name}", f"plain, {name}"))
                for one in ("native", "job")
                for name in ("batches", "single messages")
            ],
            rounds=3,
            notes=["arms in messages a second"],
        )
