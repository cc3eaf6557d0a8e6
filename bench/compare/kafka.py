"""Kafka: a KRaft broker of jars from Maven Central, confluent-kafka, the idempotent producer."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.compare.broker import Broker, Mode, Server, free_port, listens, run
from bench.compare.load import BATCH_MESSAGES, PAUSE_SECONDS, PRODUCER, Load, payload

VERSION = "3.9.1"
CLUSTER = "c2VxZGVkdXBlYmVuY2gAAA"
POLL_EVERY = 256
FETCH = 10_000
MOST_QUEUED = 90_000
"""A batch fits beside it into what the client queues by default."""
_POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>bench</groupId><artifactId>kafka</artifactId><version>1</version><packaging>pom</packaging><dependencies>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{VERSION}</version></dependency>
</dependencies></project>
"""


def _jars(cache: Path) -> Path:
    return cache / f"kafka-{VERSION}"


def _get(cache: Path) -> None:
    run("java", "-version")
    done = _jars(cache) / "complete"
    if not done.exists():
        _jars(cache).mkdir(parents=True, exist_ok=True)
        (_jars(cache) / "pom.xml").write_text(_POM)
        run("mvn", "-q", "-B", "-f", _jars(cache) / "pom.xml", "dependency:copy-dependencies", "-DoutputDirectory=jars")
        done.touch()


@contextmanager
def _serve(cache: Path, folder: Path, mode: Mode) -> Iterator[Server]:
    address, controller = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    configuration = folder / "server.properties"
    configuration.write_text(
        "process.roles=broker,controller\nnode.id=1\ncontroller.listener.names=CONTROLLER\n"
        f"controller.quorum.voters=1@{controller}\nlisteners=PLAINTEXT://{address},CONTROLLER://{controller}\n"
        f"advertised.listeners=PLAINTEXT://{address}\nlog.dirs={folder / 'data'}\n"
        "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT\n"
        + ("log.flush.interval.messages=1\n" if mode is Mode.SYNCED else "")
    )
    java = ["java", "-Xms256m", "-Xmx1g", "-cp", f"{_jars(cache) / 'jars'}/*"]
    run(*java, "kafka.tools.StorageTool", "format", "-t", CLUSTER, "-c", configuration)
    with Server(address, folder, [*java, "kafka.Kafka", configuration], lambda: listens(address)).running() as server:
        yield server


BROKER = Broker(
    name="Kafka",
    module="kafka",
    version=VERSION,
    client="confluent-kafka",
    modes={Mode.SYNCED: "`log.flush.interval.messages=1`", Mode.PAGE_CACHE: "its default, no flush of its own"},
    deduplication="`enable.idempotence`",
    get=_get,
    serve=_serve,
    takes_batches=True,
)


def _producer(address: str, topic: str, **more: object) -> Any:
    from confluent_kafka import Producer

    settings = {"bootstrap.servers": address, "enable.idempotence": True, "message.timeout.ms": 300_000}
    producer = Producer(settings | {"reconnect.backoff.max.ms": 500} | more)
    # It opens its session with the first message, which takes a second at a new broker.
    producer.produce("opened", b"")
    producer.flush()
    producer.list_topics(topic)
    return producer


def _finish(producer: Any, failures: list[str], load: Load) -> None:
    """Raises RuntimeError unless all is confirmed."""
    if producer.flush(300) or failures:
        raise RuntimeError(f"not all was confirmed: {failures[:1]}")
    load.finish()


def publish(address: str, topic: str, load: Load) -> None:
    failures: list[str] = []

    def failed(error: object, _: object) -> None:
        failures.append(str(error))

    # What was confirmed is not told message by message, which costs: the queue is empty when all is.
    producer = _producer(address, topic, **{"delivery.report.only.error": True})
    load.confirmed = lambda: load.sent - len(producer)
    for number in load:
        if number is None:
            producer.poll(PAUSE_SECONDS)
            continue
        data = payload(number)
        while True:
            try:
                producer.produce(topic, data, on_delivery=failed)
                break
            except BufferError:
                producer.poll(PAUSE_SECONDS)
        if number % POLL_EVERY == 0:
            producer.poll(0)
    _finish(producer, failures, load)


def ready(address: str, topic: str, load: Load) -> None:
    failures: list[str] = []
    messages = [{"value": payload(number)} for number in range(BATCH_MESSAGES)]
    producer = _producer(address, topic, **{"delivery.report.only.error": True})
    for _ in load.batches():
        while len(producer) > MOST_QUEUED:
            producer.poll(PAUSE_SECONDS)
        queued = producer.produce_batch(topic, messages, on_delivery=lambda error, _: failures.append(str(error)))
        if queued != BATCH_MESSAGES:
            raise RuntimeError(f"{queued} of a batch were queued")
        producer.poll(0)
    _finish(producer, failures, load)


def steady(address: str, topic: str, load: Load) -> None:
    failures: list[str] = []
    numbers = itertools.count(1)  # they are confirmed in order

    def answered(error: object, _: object) -> None:
        load.confirm(next(numbers))
        if error is not None:
            failures.append(str(error))

    producer = _producer(address, topic)
    for number in load:
        if number is None:
            producer.poll(PAUSE_SECONDS)
        else:
            producer.produce(topic, payload(number), on_delivery=answered)
    _finish(producer, failures, load)


def one_in_flight(address: str, topic: str, load: Load) -> list[float]:
    confirmed: list[object] = []
    seconds = []
    producer = _producer(address, topic, **{"linger.ms": 0})
    for number in load:
        confirmed.clear()
        began = time.perf_counter()
        producer.produce(topic, payload(number or 0), on_delivery=lambda error, _: confirmed.append(error))
        while not confirmed:
            producer.poll(1)
        seconds.append(time.perf_counter() - began)
        if confirmed[0] is not None:
            raise RuntimeError(str(confirmed[0]))
    return seconds


def read(address: str, topic: str) -> tuple[list[bytes], float]:
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    began = time.perf_counter()
    consumer = Consumer({"bootstrap.servers": address, "group.id": PRODUCER, "enable.auto.commit": False})
    _, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=30)
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    messages: list[bytes] = []
    while len(messages) < end:
        records = consumer.consume(min(FETCH, end - len(messages)), timeout=30)
        if not records:
            raise RuntimeError(f"nothing in 30 seconds after {len(messages)} of {end} messages")
        messages += [record.value() for record in records]
    seconds = time.perf_counter() - began
    consumer.close()
    return messages, seconds
