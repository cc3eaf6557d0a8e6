"""Pulsar: a standalone broker from Maven Central, pulsar-client, broker deduplication with batching off."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.compare.broker import Broker, Mode, Server, Unavailable, free_port
from bench.compare.load import PAUSE_SECONDS, PRODUCER, Load, payload
from pulsar_broker import distribution, standalone

MOST_PENDING = 5_000
END_MS = 2_000
"""A reader that gets nothing for so long, and is told that there is nothing, is at the end."""


def _get(cache: Path) -> None:
    try:
        distribution.get(cache)
    except distribution.Unavailable as e:
        raise Unavailable(str(e)) from e


@contextmanager
def _serve(cache: Path, folder: Path, mode: Mode) -> Iterator[Server]:
    port, admin_port = free_port(), free_port()
    keys = {
        "brokerDeduplicationEnabled": "true",
        "defaultRetentionTimeInMinutes": -1,
        "defaultRetentionSizeInMB": -1,
        "journalSyncData": "true" if mode is Mode.SYNCED else "false",
    }
    (folder / "standalone.conf").write_text(standalone.configuration(port, admin_port, keys))
    admin_url = f"http://127.0.0.1:{admin_port}"
    with Server(
        f"127.0.0.1:{port}",
        folder,
        standalone.command(distribution.get(cache), folder),
        lambda: standalone.is_healthy(admin_url),
        **standalone.environment(folder),
    ).running() as server:
        yield server


BROKER = Broker(
    name="Pulsar",
    module="pulsar",
    version=distribution.VERSION,
    client="pulsar-client",
    modes={
        Mode.SYNCED: "`journalSyncData=true`, bookkeeper's default",
        Mode.PAGE_CACHE: "`journalSyncData=false`, standalone's default",
    },
    deduplication="`brokerDeduplicationEnabled`, one entry a message",
    get=_get,
    serve=_serve,
)


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    import pulsar

    client = pulsar.Client(f"pulsar://{address}", logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    try:
        yield client
    finally:
        client.close()


def _producer(client: Any, topic: str) -> Any:
    # Without a time-out, so that it sends again for as long as it takes. With batching, what is sent again doubles.
    return client.create_producer(
        topic,
        producer_name=f"{PRODUCER}-{topic}",
        batching_enabled=False,
        max_pending_messages=MOST_PENDING,
        block_if_queue_full=True,
        send_timeout_millis=0,
    )


def publish(address: str, topic: str, load: Load, confirm: Callable[[int], None] | None = None) -> None:
    import pulsar

    confirmed = 0
    failures = []

    def answered(result: Any, _: object) -> None:
        nonlocal confirmed
        if result == pulsar.Result.Ok:
            confirmed += 1
            if confirm is not None:
                confirm(confirmed)  # they are confirmed in order
        else:
            failures.append(result)

    load.confirmed = lambda: confirmed
    with _connected(address) as client:
        producer = _producer(client, topic)
        for number in load:
            if number is None:
                time.sleep(PAUSE_SECONDS)
            else:
                producer.send_async(payload(number), answered, sequence_id=number)
        producer.flush()
        if failures:
            raise RuntimeError(f"{len(failures)} not confirmed: {failures[0]}")
        load.finish()


def steady(address: str, topic: str, load: Load) -> None:
    publish(address, topic, load, load.confirm)


def one_in_flight(address: str, topic: str, load: Load) -> list[float]:
    seconds = []
    with _connected(address) as client:
        producer = _producer(client, topic)
        for number in load:
            began = time.perf_counter()
            producer.send(payload(number or 0), sequence_id=number)
            seconds.append(time.perf_counter() - began)
    return seconds


def read(address: str, topic: str) -> tuple[list[bytes], float]:
    import pulsar

    messages: list[bytes] = []
    began = last = time.perf_counter()
    with _connected(address) as client:
        reader = client.create_reader(topic, pulsar.MessageId.earliest, receiver_queue_size=MOST_PENDING)
        while True:
            try:
                messages.append(reader.read_next(timeout_millis=END_MS).data())
                last = time.perf_counter()
            except pulsar.Timeout:
                if not reader.has_message_available():
                    return messages, last - began
