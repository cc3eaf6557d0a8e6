"""One message in flight through the client: every commit synced, against a flush policy of 1,000 messages or 100 ms."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import by_client, setup
from bench.figure import Arm, Figure, Ratio, over
from bench.publish import PAYLOAD
from seqdedupe.client import blocking
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2

MESSAGES = 1_500
EVERY_COMMIT = "every commit"
POLICY = "1,000 messages or 100 ms"
SYNC = "append + fdatasync"


def _p50_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1000


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with Sidecar(folder / "sidecar") as sidecar:
        with blocking.Client(sidecar.address) as client:
            client.admin.create_topic("every-commit")
            client.admin.create_topic("policy")
            policy = admin_pb2.TopicPolicy(log_flush_interval_messages=1_000, log_flush_interval_ms=100)
            client.admin.set_policy("policy", policy)

        def one_in_flight(topic: str) -> Arm:
            return lambda: _p50_ms(setup.run(by_client.one_in_flight(sidecar.address, topic, PAYLOAD, MESSAGES)))

        yield Figure(
            arms={
                EVERY_COMMIT: one_in_flight("every-commit"),
                POLICY: one_in_flight("policy"),
                SYNC: lambda: _p50_ms(setup.serial_append(folder, len(PAYLOAD), MESSAGES)),
            },
            ratios=[Ratio(f"{POLICY} ÷ {EVERY_COMMIT}", over(POLICY, EVERY_COMMIT))],
            notes=["arms in milliseconds, p50"],
        )
