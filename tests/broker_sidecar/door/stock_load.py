"""A producer of Pulsar's Python client as a thread, under load."""

import random
import threading
import time
from typing import Any

import pulsar

from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.broker_sidecar.pausing import wait_for

TOPIC = "stock"


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
