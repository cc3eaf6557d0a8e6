"""Rates and waiting times of Pulsar's Java client at the door, and directly at a broker.

`python -m tests.kernels tests.broker_sidecar.door.java_rates --pairs 3`

Both keep what they acknowledge over a power cut. A message has 100 bytes, and the client's batching is on, as it is by
default. The first flood of each, which warms up, is not shown.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from pulsar_broker.distribution import home
from pulsar_broker.standalone import Broker
from seqdedupe.testing import Sidecar
from tests.broker_sidecar.door.java_client import JavaClient
from tests.broker_sidecar.door.wire import door_of

BYTES = 100
MESSAGES = 1_000_000
ONE_BY_ONE = 2_000


def measure(java: JavaClient, url: str, topic: str) -> tuple[float, float]:
    """Messages a second, and the median wait in milliseconds with one message in flight."""
    java.connect(url)
    java.open(topic, how="batches")
    rate = MESSAGES / float(java.ask("flood", "a", MESSAGES, BYTES))
    java.open(f"{topic}-one", how="single", label="b")
    return rate, float(java.ask("pace", "b", ONE_BY_ONE, BYTES)) / 1e3


def main(pairs: int) -> None:
    pulsar_home = home()
    with (
        tempfile.TemporaryDirectory() as folder,
        Sidecar(Path(folder), pulsar_listen="127.0.0.1:0") as sidecar,
        Broker(pulsar_home, brokerDeduplicationEnabled="true", journalSyncData="true") as broker,
        JavaClient(pulsar_home, "-Xmx1g") as java,
    ):
        urls = {"door": f"pulsar://{door_of(sidecar)}", "broker": broker.service_url}
        ratios = []
        for pair in range(pairs + 1):
            rates = {}
            for where, url in urls.items():
                rates[where], wait = measure(java, url, f"t{pair}")
                if pair:
                    print(f"{where:8}{rates[where]:10.0f} messages/s{wait:8.3f} ms", flush=True)
            if pair:
                ratios.append(rates["door"] / rates["broker"])
        print(f"door / broker: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=3)
    main(parser.parse_args().pairs)
