"""Publishing native entries through a sidecar, against Pulsar's own clients at the same broker, which syncs.

A message has 100 bytes, and an entry of the sidecar at most 200. A stock reader reads all of them, and is not timed.
Pulsar's Python client sends without batching; `pulsar-perf` is Java's client with batching, in a new process, and
`Java` the same client in a warm process. Of 1,000 producers in turn, each sends one message or one batch of 200.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pulsar

from bench import pulsar_door, pulsar_publish, setup
from bench.figure import Figure, Ratio, over
from bench.many_names import round_robin
from bench.publish import PAYLOAD, rising
from bench.pulsar_publish import IN_FLIGHT
from bench.pulsar_setup import DURABLE, NAMESPACE, WarmBroker
from pulsar_broker.distribution import get
from seqdedupe.batch import Batch, Binary, single_producer
from seqdedupe.client import blocking
from seqdedupe.testing import LAST_RESORT_SECONDS, Patience, Sidecar
from tests.broker_sidecar.door.java_client import JavaClient

ROWS, BATCHES = 200, 1_250
PRODUCERS, TURNS = 1_000, 10
PERF_MESSAGES = 3_000_000
MARKER = "seqdedupe.kind"

_names = itertools.count()


def perf(home: Path, service_url: str, folder: Path) -> float:
    """Messages a second of `pulsar-perf produce`, with its defaults apart from the rate and the size."""
    given = ["-r", "100000000", "-s", str(len(PAYLOAD)), "-m", str(PERF_MESSAGES), "-u", service_url]
    command = [str(home / "bin" / "pulsar-perf"), "produce", *given, f"{NAMESPACE}/perf"]
    done = Patience("pulsar-perf").run(command, env=os.environ | {"PULSAR_LOG_DIR": str(folder)})
    found = re.search(r"Aggregated throughput stats --- \d+ records sent --- ([\d.]+) msg/s", done.stdout)
    if found is None:
        raise RuntimeError(f"pulsar-perf has printed no rate: {done.stdout.strip()[-1000:]}{done.stderr[-1000:]}")
    return float(found[1])


def taking_turns(names: list[str], rows: int) -> setup.MakeBatch:
    """Batches of one producer each. The producers take turns, and their sequence IDs rise from 0."""
    payloads, base = Binary.of_all([PAYLOAD] * rows), np.arange(rows, dtype=np.int64)

    def make(k: int, epochs: np.ndarray) -> Batch:
        turn, who = divmod(k, len(names))
        first = turn * rows
        return single_producer(names[who].encode(), int(epochs[who]), first - 1, base + first, payloads)

    return make


class Native:
    """A native topic, and a stock reader that has read all of it."""

    def __init__(self, address: str, client: pulsar.Client) -> None:
        self._address = address
        self._topic = f"{NAMESPACE}/native"
        with blocking.Client(address) as admin:
            admin.admin.create_topic(self._topic, entry_format="native")
        self._reader = client.create_reader(self._topic, pulsar.MessageId.earliest, receiver_queue_size=10_000)

    def published(self, producers: int, rows: int, batches: int, make: Callable[[list[str]], setup.MakeBatch]) -> float:
        """Messages a second of new producers, confirmed and read."""
        names = [f"run-{next(_names)}-{k}" for k in range(producers)]
        work = setup.publish(self._address, names, make(names), batches, IN_FLIGHT // rows, self._topic)
        seconds, _ = setup.run(work)
        left = rows * batches
        while left:
            message = self._reader.read_next(int(LAST_RESORT_SECONDS * 1000))
            left -= MARKER not in message.properties()
        return rows * batches / seconds


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    home = get()
    with (
        WarmBroker(home, **DURABLE) as broker,
        Sidecar(folder / "sidecar", **broker.sidecar_keys) as sidecar,
        JavaClient(home, "-Xmx1g") as java,
    ):
        client = pulsar.Client(broker.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
        native = Native(sidecar.address, client)
        java.connect(broker.service_url)
        java.open(f"{NAMESPACE}/java", how="batches")

        def warm_java() -> float:
            messages = pulsar_door.JAVA_MESSAGES
            return messages / float(java.ask("flood", "a", messages, len(PAYLOAD)))

        yield Figure(
            arms={
                "Python": lambda: pulsar_publish.stock(broker.service_url, len(PAYLOAD)),
                "pulsar-perf": lambda: perf(home, broker.service_url, folder),
                "Java": warm_java,
                "native": lambda: native.published(1, ROWS, BATCHES, lambda names: rising(names[0], ROWS)),
                "1,000 producers, batches": lambda: native.published(
                    PRODUCERS, ROWS, BATCHES, lambda names: taking_turns(names, ROWS)
                ),
                "1,000 producers, messages": lambda: native.published(PRODUCERS, PRODUCERS, TURNS, round_robin),
            },
            ratios=[
                Ratio("native ÷ Python", over("native", "Python"), at_least=10),
                Ratio("native ÷ pulsar-perf", over("native", "pulsar-perf"), at_least=0.25, aim=0.5),
                Ratio("native ÷ Java in a warm process", over("native", "Java")),
                Ratio("1,000 producers, a batch each ÷ one", over("1,000 producers, batches", "native")),
                Ratio("1,000 producers, a message each ÷ one", over("1,000 producers, messages", "native")),
            ],
            rounds=5,
            notes=["arms in messages a second"],
        )
        client.close()
