"""Recovery of a topic of 200,000 messages after an unload: behind a sidecar, and by Pulsar's own deduplication.

All have all messages after their last snapshot. The sidecar reads 200 entries of 1,000 rows, or 200,000 entries in a
`plain` topic; a broker replays 200,000 entries before it lets a producer in. The sidecar's time is that of opening the
topic, its policies looked at, up to SERVING; the broker that it reads from is on the same machine.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pulsar

from bench.figure import Figure, Ratio, over
from bench.pulsar_setup import KEYS, NAMESPACE
from broker_sidecar.config import Config, PulsarConfig
from broker_sidecar.data import Data
from pulsar_broker.distribution import get
from pulsar_broker.standalone import Broker
from seqdedupe.batch import Binary, single_producer
from seqdedupe.log.pulsar.admin_url import AdminUrl, PulsarAdmin
from seqdedupe.topic.base import State
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.operations import open_sessions

TAIL = 200_000
ROWS = 1_000
IN_FLIGHT = 5_000
STOCK_TOPIC = f"{NAMESPACE}/stock"
FORMATS = ("packed", "native", "plain")
NO_SNAPSHOTS: dict[str, Any] = {
    "brokerDeduplicationEntriesInterval": 1_000_000_000,
    "brokerDeduplicationSnapshotIntervalSeconds": 0,
}
"""Of a broker that takes none by itself."""


def _config(broker: Broker, folder: Path, entry_format: str) -> Config:
    """That of a sidecar with a topic of this format."""
    asked = PulsarConfig(
        service_url=broker.service_url,
        admin_url=broker.admin_url,
        entry_format=entry_format,
        manage_topic_policies=True,
    )
    return Config(
        data_directory=str(folder / entry_format),
        log="pulsar",
        pulsar=asked,
        deduplication_entries_interval=2**62,
        deduplication_snapshot_interval_seconds=0,
    )


async def _fill(config: Config) -> None:
    """A topic with so many messages after its snapshot."""
    data = Data(config, lambda name, state: None)
    topic = await data.all_topics.create(config.pulsar.entry_format)
    opened = await open_sessions(topic, ["p"], None)
    await topic.keeper.snapshot()
    payloads, base = Binary.of_all([b"x" * 100] * ROWS), np.arange(ROWS, dtype=np.int64)

    def reply(answer: FrameReceipt | Refusal) -> None:
        if isinstance(answer, Refusal):
            raise answer.error

    for first in range(0, TAIL, ROWS):
        batch = single_producer(b"p", opened.epochs[0], first - 1, base + first, payloads)
        topic.admit(batch.encode(), first, reply, NumbersCache())
    await topic.flight.all_of_now()
    await topic.close("done")
    await data.close()


async def _recovered(config: Config, admin: PulsarAdmin) -> float:
    """The seconds that it takes to open the topic."""
    data = Data(config, lambda name, state: None)
    topics = data.all_topics
    (record,) = data.all_topics.store.topics()
    await admin.unload(record.name)
    began = time.perf_counter()
    topic = await topics.kind.open(record, topics.namespaces.applied("public/default"))
    await topic.recover()
    seconds = time.perf_counter() - began
    if topic.state is not State.SERVING or topic.confirmed_index != TAIL:
        raise RuntimeError(f"{topic.state.name}, {topic.confirmed_index} messages: {topic.why}")
    await topic.close("done")
    await data.close()
    return seconds


def _client(broker: Broker) -> pulsar.Client:
    return pulsar.Client(
        broker.service_url, operation_timeout_seconds=300, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    )


def _publish(broker: Broker) -> None:
    client = _client(broker)
    producer = client.create_producer(
        STOCK_TOPIC,
        producer_name="p",
        batching_enabled=False,
        max_pending_messages=IN_FLIGHT,
        block_if_queue_full=True,
        send_timeout_millis=0,
    )
    for sequence_id in range(TAIL):
        producer.send_async(b"x" * 100, lambda *_: None, sequence_id=sequence_id)
    producer.flush()
    client.close()


def _opened(broker: Broker, admin: PulsarAdmin) -> float:
    """The seconds that it takes to open a producer, which is when the broker has replayed the topic."""
    client = _client(broker)
    asyncio.run(admin.unload(STOCK_TOPIC))
    began = time.perf_counter()
    producer = client.create_producer(STOCK_TOPIC, producer_name="p", batching_enabled=False)
    seconds = time.perf_counter() - began
    if producer.last_sequence_id() != TAIL - 1:
        raise RuntimeError(f"Pulsar knows of {producer.last_sequence_id()}")
    client.close()
    return seconds


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with Broker(get(), **KEYS | NO_SNAPSHOTS) as broker:
        admin = PulsarAdmin(AdminUrl(broker.admin_url))
        configs = {entry_format: _config(broker, folder, entry_format) for entry_format in FORMATS}
        for config in configs.values():
            asyncio.run(_fill(config))
        _publish(broker)
        yield Figure(
            arms={
                "packed": lambda: asyncio.run(_recovered(configs["packed"], admin)),
                "native": lambda: asyncio.run(_recovered(configs["native"], admin)),
                "plain": lambda: asyncio.run(_recovered(configs["plain"], admin)),
                "Pulsar": lambda: _opened(broker, admin),
            },
            ratios=[
                Ratio("Pulsar ÷ packed", over("Pulsar", "packed"), at_least=5),
                Ratio("Pulsar ÷ native", over("Pulsar", "native"), at_least=5),
                Ratio("packed ÷ native", over("packed", "native")),
                Ratio("plain ÷ native", over("plain", "native"), at_least=0.97),
            ],
            rounds=3,
            notes=["arms in seconds"],
        )
