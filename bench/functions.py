"""A copying Pulsar Function in Pulsar's own runtime: wrapped, against the same one unwrapped."""

import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pulsar

from bench.figure import Figure, Ratio, over
from bench.pulsar_setup import WarmBroker
from pulsar_broker.distribution import get
from pulsar_broker.instance import FULL_NAME, Instance, details
from seqdedupe.client import blocking
from seqdedupe.functions.wheel import build
from seqdedupe.testing import Sidecar

MESSAGES = 30_000
STARTED = 3_000
"""From so many outputs on the time counts: before, the instance starts."""
PAYLOAD = b"x" * 100
INPUT = "persistent://public/default/in"
TIMEOUT_MS = 120_000

CODE = """
import pulsar

class Copy(pulsar.Function):
    def process(self, input, context):
        return input
"""

_numbers = itertools.count()


def _rate(outputs: Iterator[object]) -> float:
    """Outputs a second."""
    for _ in itertools.islice(outputs, STARTED):
        pass
    began = time.monotonic()
    for _ in itertools.islice(outputs, MESSAGES - STARTED):
        pass
    return (MESSAGES - STARTED) / (time.monotonic() - began)


def _messages(reader: Any) -> Iterator[object]:
    while True:
        yield reader.read_next(TIMEOUT_MS)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    home, wheel = get(), folder / "copy-1-py3-none-any.whl"
    (folder / "copying.py").write_text(CODE)
    build([folder / "copying.py"], wheel)
    with WarmBroker(home) as broker, Sidecar(folder / "sidecar") as sidecar:
        client = pulsar.Client(broker.service_url)
        producer = client.create_producer(INPUT, batching_enabled=True, block_if_queue_full=True)
        for _ in range(MESSAGES):
            producer.send_async(PAYLOAD, None)
        producer.flush()

        def run(name: str, function: dict[str, Any]) -> Instance:
            place = folder / name
            place.mkdir()
            return Instance(home, place, broker.service_url, wheel, function)

        def unwrapped() -> float:
            name = f"plain-{next(_numbers)}"
            output = f"persistent://public/default/{name}"
            function = details(
                name, INPUT, class_name="copying.Copy", output=output, processingGuarantees="ATLEAST_ONCE"
            )
            reader = client.create_reader(output, pulsar.MessageId.earliest)
            with run(name, function):
                rate = _rate(_messages(reader))
            reader.close()
            return rate

        def wrapped() -> float:
            name = f"wrapped-{next(_numbers)}"
            config = {"wrapped": "copying.Copy", "sidecar_address": sidecar.address, "output_topic": name}
            function = details(name, INPUT, class_name=FULL_NAME, userConfig=json.dumps(config))
            with run(name, function), blocking.Client(sidecar.address) as reading:
                reading.admin.create_topic(name)
                with reading.reader(name, follow=True) as reader:
                    return _rate(iter(reader))

        yield Figure(
            arms={"wrapped": wrapped, "unwrapped, at least once": unwrapped},
            ratios=[Ratio("wrapped ÷ unwrapped", over("wrapped", "unwrapped, at least once"), at_least=0.4)],
            rounds=3,
            notes=["arms in messages a second"],
        )
        client.close()
