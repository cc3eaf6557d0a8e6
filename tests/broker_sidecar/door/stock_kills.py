"""Stock producers of Pulsar's Python client, and a sidecar that is killed: what the log holds in the end.

`python -m tests.kernels tests.broker_sidecar.door.stock_kills --kills 100 --seed 1`
"""

import argparse
import random
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pulsar

from pulsar_broker.standalone import free_port
from seqdedupe.client.blocking import Client
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.broker_sidecar import calls
from tests.broker_sidecar.pausing import wait_for

TOPIC = "stock"
A_ROUND = 10
"""This many kills are of one load."""


class StockProducer(threading.Thread):
    """Sends rising IDs in batches, as fast as its queue takes them. The client resends; this never does."""

    def __init__(
        self, client: pulsar.Client, name: str, seed: int, topic: str = TOPIC, most_seconds: float = 0.003
    ) -> None:
        """Between two bursts it waits `most_seconds` at most."""
        super().__init__(daemon=True)
        self._producer = client.create_producer(
            topic,
            producer_name=name,
            batching_enabled=True,
            batching_max_publish_delay_ms=2,
            compression_type=pulsar.CompressionType.ZLib,
            block_if_queue_full=True,
            send_timeout_millis=0,
        )
        self.name_in_log = name
        self._rng = random.Random(seed)
        self._most_seconds = most_seconds
        self._stopping = threading.Event()
        self.sent = 0
        self.acknowledged: set[int] = set()
        self.failed: list[Any] = []

    def run(self) -> None:
        while not self._stopping.is_set():
            for _ in range(self._rng.randrange(1, 30)):
                number = self.sent
                self._producer.send_async(
                    b"%s/%d" % (self.name_in_log.encode(), number),
                    lambda result, _, number=number: self._answered(result, number),
                    sequence_id=number,
                )
                self.sent += 1
            time.sleep(self._rng.uniform(0, self._most_seconds))

    def _answered(self, result: Any, number: int) -> None:
        if result == pulsar.Result.Ok:
            self.acknowledged.add(number)
        else:
            self.failed.append(result)

    def wait_for_more(self, count: int) -> None:
        """Until this many more are acknowledged."""
        before = len(self.acknowledged)
        wait_for(lambda: len(self.acknowledged) > before + count)

    def finish(self) -> None:
        self._stopping.set()
        self.join(LAST_RESORT_SECONDS)
        wait_for(lambda: len(self.acknowledged) + len(self.failed) == self.sent)
        self._producer.close()


def round_(folder: Path, kills: int, seed: int, *, deduplicates: bool = True) -> tuple[int, int]:
    """Kills a sidecar under two producers. Returns how many messages were acknowledged, and how many copies too many
    the log has. Raises AssertionError if one is missing or out of order.
    """
    rng = random.Random(seed)
    address = f"127.0.0.1:{free_port()}"
    with Sidecar(folder, pulsar_listen=address, deduplication_entries_interval=50) as sidecar:
        with Client(sidecar.address) as operator:
            operator.admin.create_topic(TOPIC, deduplication_enabled=deduplicates)
        stock = pulsar.Client(f"pulsar://{address}", logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
        producers = [StockProducer(stock, name, seed + k) for k, name in enumerate(("a", "b"))]
        for producer in producers:
            producer.start()
        for _ in range(kills):
            for producer in producers:
                producer.wait_for_more(50)
            time.sleep(rng.uniform(0, 0.02))
            sidecar.restart()
        for producer in producers:
            producer.finish()
        with suppress(Exception):
            stock.close()
        log = calls.Client(sidecar.address)
        rows = log.rows(TOPIC)
        log.close()
    extra = 0
    for producer in producers:
        assert not producer.failed, producer.failed[:3]
        ids = [i for name, i in rows if name == producer.name_in_log]
        assert set(ids) >= producer.acknowledged, sorted(producer.acknowledged - set(ids))[:5]
        firsts = list(dict.fromkeys(ids))
        assert firsts == sorted(firsts)
        extra += len(ids) - len(firsts)
    return sum(len(producer.acknowledged) for producer in producers), extra


def campaign(kills: int, seed: int) -> None:
    """Round after round, until the sidecar was killed this often."""
    acknowledged = 0
    for first in range(0, kills, A_ROUND):
        with tempfile.TemporaryDirectory() as folder:
            some, extra = round_(Path(folder), min(A_ROUND, kills - first), seed + first)
        assert not extra
        acknowledged += some
        print(f"{min(first + A_ROUND, kills)} kills, {acknowledged} messages acknowledged", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    told = parser.parse_args()
    campaign(told.kills, told.seed)
