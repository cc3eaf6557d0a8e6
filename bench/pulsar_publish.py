"""Publishing to a sidecar in front of a Pulsar broker, against Pulsar's Python client, deduplication on for both.
Native entries need no deduplication of Pulsar's, and are written without it.

The client sends messages one by one, without batching, which its deduplication does not survive; the sidecar gets
batches. Both have as many messages in flight. The broker syncs before it confirms, and is on the same machine. Its
processor time is not counted.
"""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pulsar

from bench import setup
from bench.figure import Figure, Ratio, over
from bench.publish import rising
from bench.pulsar_setup import DURABLE, NAMESPACE, WarmBroker
from pulsar_broker.distribution import get
from seqdedupe.client import blocking
from seqdedupe.testing import Sidecar

IN_FLIGHT = 5_000
MESSAGES = 50_000
PLAIN_ROWS, PACKED_ROWS = 250, 1_000
PACKED_MESSAGES = 1_000_000
NATIVE_ROWS, NATIVE_MESSAGES = 200, 250_000

_names = itertools.count()


def stock(service_url: str, size: int) -> float:
    """Messages a second of Pulsar's own client, confirmed."""
    client = pulsar.Client(service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    try:
        producer = client.create_producer(
            f"{NAMESPACE}/stock",
            producer_name=f"p{next(_names)}",
            batching_enabled=False,
            max_pending_messages=IN_FLIGHT,
            block_if_queue_full=True,
            send_timeout_millis=0,
        )
        return flood(producer, MESSAGES, size)
    finally:
        client.close()


def flood(producer: pulsar.Producer, messages: int, size: int) -> float:
    """Messages a second of a stock producer, which numbers them itself. Raises RuntimeError unless all are
    confirmed."""
    payload, confirmed = b"x" * size, 0

    def answered(result: Any, _: object) -> None:
        nonlocal confirmed
        confirmed += result == pulsar.Result.Ok

    began = time.perf_counter()
    for _ in range(messages):
        producer.send_async(payload, answered)
    producer.flush()
    seconds = time.perf_counter() - began
    if confirmed != messages:
        raise RuntimeError(f"{messages - confirmed} of {messages} messages are not confirmed")
    return messages / seconds


def published(address: str, topic: str, size: int, rows: int, messages: int) -> float:
    """Messages a second through the sidecar, confirmed."""
    name, batches = f"p{next(_names)}", messages // rows
    work = setup.publish(address, [name], rising(name, rows, b"x" * size), batches, IN_FLIGHT // rows, topic)
    return messages / setup.run(work)[0]


def _create(address: str, name: str, entry_format: str) -> str:
    topic = f"{NAMESPACE}/{name}"
    with blocking.Client(address) as client:
        client.admin.create_topic(topic, entry_format=entry_format)
    return topic


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with (
        WarmBroker(get(), **DURABLE) as broker,
        Sidecar(folder / "sidecar", **broker.sidecar_keys) as sidecar,
    ):
        plain = _create(sidecar.address, "plain", "plain")
        packed = _create(sidecar.address, "packed", "packed")
        native = _create(sidecar.address, "native", "native")

        yield Figure(
            arms={
                "client, 100 B": lambda: stock(broker.service_url, 100),
                "plain, 100 B": lambda: published(sidecar.address, plain, 100, PLAIN_ROWS, MESSAGES),
                "client, 1 KiB": lambda: stock(broker.service_url, 1024),
                "plain, 1 KiB": lambda: published(sidecar.address, plain, 1024, PLAIN_ROWS, MESSAGES),
                "packed, 100 B": lambda: published(sidecar.address, packed, 100, PACKED_ROWS, PACKED_MESSAGES),
                "native, 100 B": lambda: published(sidecar.address, native, 100, NATIVE_ROWS, NATIVE_MESSAGES),
            },
            ratios=[
                Ratio("plain ÷ client, 100 B", over("plain, 100 B", "client, 100 B"), at_least=0.5),
                Ratio("plain ÷ client, 1 KiB", over("plain, 1 KiB", "client, 1 KiB"), at_least=0.8),
                Ratio("packed ÷ client, 100 B", over("packed, 100 B", "client, 100 B"), at_least=20),
                Ratio("native ÷ client, 100 B", over("native, 100 B", "client, 100 B"), at_least=10),
                Ratio("native ÷ plain, 100 B", over("native, 100 B", "plain, 100 B"), at_least=10),
            ],
            rounds=5,
            notes=["arms in messages a second"],
        )
