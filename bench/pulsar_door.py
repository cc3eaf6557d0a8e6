"""Stock producers of Java, Go and Python at the door of a sidecar, against the same producers directly at a broker.

Sidecar and broker keep what they acknowledge over a power cut. A message has 100 bytes. The clients batch, and have
their defaults otherwise. `door` is that of a sidecar with a log of its own; behind `door of native topics` is the
broker. The time of one message in flight is that of Java's client without batching.
"""

import itertools
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pulsar

from bench.figure import Arm, Figure, Ratio, over
from bench.pulsar_publish import flood
from bench.pulsar_setup import DURABLE, NAMESPACE, WarmBroker
from pulsar_broker.distribution import get
from seqdedupe.client import blocking
from seqdedupe.testing import Patience, Sidecar
from tests.broker_sidecar.door.java_client import JavaClient
from tests.broker_sidecar.door.wire import door_of
from tests.tiers import GO, ROOT

BYTES = 100
JAVA_MESSAGES, GO_MESSAGES, PYTHON_MESSAGES = 1_000_000, 500_000, 200_000
ONE_BY_ONE = 2_000
BROKER, DOOR, NATIVE = "broker", "door", "door of native topics"

_topics = itertools.count()

Measure = Callable[[str, str], dict[str, float]]
"""Publishes to a topic at a service URL, and measures that."""


def go_program(folder: Path) -> Path:
    """The program that publishes by Go's client. Its modules are fetched once."""
    program = folder / "flood"
    command = [GO.where("go") or "go", "build", "-o", str(program), "./flood"]
    subprocess.run(command, cwd=ROOT / "tests" / "pulsar" / "stock_go", check=True)
    return program


def java_flood(java: JavaClient, url: str, topic: str) -> dict[str, float]:
    java.connect(url)
    java.open(topic, how="batches")
    rate = JAVA_MESSAGES / float(java.ask("flood", "a", JAVA_MESSAGES, BYTES))
    java.ask("close", "a")
    java.open(topic, "one", how="single", label="b")
    wait_us = float(java.ask("pace", "b", ONE_BY_ONE, BYTES))
    java.ask("close", "b")
    return {"messages/s": rate, "one in flight, p50 in ms": wait_us / 1e3}


def go_flood(program: Path, url: str, topic: str) -> dict[str, float]:
    command = (str(program), url, topic, "p", str(GO_MESSAGES), str(BYTES))
    done = Patience("the producer of Go's client").run(command)
    if done.returncode:
        raise RuntimeError(f"the producer of Go's client has ended: {done.stderr.strip()[-1000:]}")
    return {"messages/s": GO_MESSAGES / float(done.stdout)}


def python_flood(url: str, topic: str) -> dict[str, float]:
    client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    try:
        # Otherwise it does not batch, and fails when it has as many messages in flight as it may.
        producer = client.create_producer(topic, "p", batching_enabled=True, block_if_queue_full=True)
        rate = flood(producer, PYTHON_MESSAGES, BYTES)
        producer.close()
        return {"messages/s": rate}
    finally:
        client.close()


def _arm(measure: Measure, url: str, sidecar: Sidecar | None) -> Arm:
    """Measures with a topic of its own, which is deleted at a sidecar, since nothing else trims it."""

    def measured() -> dict[str, float]:
        topic = f"{NAMESPACE}/flood-{next(_topics)}"
        found = measure(url, topic)
        if sidecar is not None:
            with blocking.Client(sidecar.address) as client:
                client.admin.delete_topic(topic)
        return found

    return measured


def _ratios() -> Iterator[Ratio]:
    for client in ("Java", "Go", "Python"):
        for place in (DOOR, NATIVE):
            at_least = (0.5 if client == "Java" else 1) if place == DOOR else None
            rates = (f"{client}, {at}, messages/s" for at in (place, BROKER))
            yield Ratio(f"{client}, {place} ÷ broker", over(*rates), at_least=at_least)
    for place in (DOOR, NATIVE):
        waits = (f"Java, {at}, one in flight, p50 in ms" for at in (place, BROKER))
        yield Ratio(f"Java, one in flight, p50, {place} ÷ broker", over(*waits), at_most=2)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    home, go = get(), go_program(folder)
    with (
        WarmBroker(home, **DURABLE) as broker,
        Sidecar(folder / "embedded", pulsar_listen="127.0.0.1:0") as embedded,
        Sidecar(
            folder / "native", pulsar_listen="127.0.0.1:0", pulsar_entry_format="native", **broker.sidecar_keys
        ) as native,
        JavaClient(home, "-Xmx1g") as java,
    ):
        measures: dict[str, Measure] = {
            "Java": lambda url, topic: java_flood(java, url, topic),
            "Go": lambda url, topic: go_flood(go, url, topic),
            "Python": python_flood,
        }
        arms: dict[str, Arm] = {}
        for client, measure in measures.items():
            arms[f"{client}, {BROKER}"] = _arm(measure, broker.service_url, None)
            for place, sidecar in ((DOOR, embedded), (NATIVE, native)):
                arms[f"{client}, {place}"] = _arm(measure, f"pulsar://{door_of(sidecar)}", sidecar)
        yield Figure(arms, list(_ratios()))
