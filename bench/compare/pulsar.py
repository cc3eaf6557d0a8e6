"""Pulsar: a standalone broker from Maven Central, pulsar-client, broker deduplication with batching off."""

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.compare.broker import Broker, Mode, Server, free_port, run
from bench.compare.load import PAUSE_SECONDS, PRODUCER, Load, payload

VERSION = "4.0.8"
MOST_PENDING = 5_000
END_MS = 2_000
"""A reader that gets nothing for so long, and is told that there is nothing, is at the end."""

_CONFIGURATION = """clusterName=bench
bindAddress=127.0.0.1
advertisedAddress=127.0.0.1
managedLedgerDefaultEnsembleSize=1
managedLedgerDefaultWriteQuorum=1
managedLedgerDefaultAckQuorum=1
brokerDeduplicationEnabled=true
defaultRetentionTimeInMinutes=-1
defaultRetentionSizeInMB=-1
brokerDeleteInactiveTopicsEnabled=false
loadBalancerEnabled=false
numHttpServerThreads=4
ledgerStorageClass=org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage
journalMaxGroupWaitMSec=1
allowLoopback=true
nettyMaxFrameSizeBytes=5253120
diskUsageThreshold=0.99
diskUsageWarnThreshold=0.98
bookkeeperClientHealthCheckEnabled=false
"""


def _home(cache: Path) -> Path:
    return cache / f"apache-pulsar-{VERSION}"


def _get(cache: Path) -> None:
    run("java", "-version")
    done = _home(cache) / "complete"
    if not done.exists():
        artifact = f"org.apache.pulsar:pulsar-server-distribution:{VERSION}:tar.gz:bin"
        run("mvn", "-q", "-B", "dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={cache}")
        archive = cache / f"pulsar-server-distribution-{VERSION}-bin.tar.gz"
        run("tar", "-xzf", archive, "-C", cache)
        archive.unlink()
        done.touch()


def _is_ready(admin: str) -> bool:
    try:
        with urllib.request.urlopen(f"{admin}/namespaces/public", timeout=5) as answer:
            has_namespace = "public/default" in json.load(answer)
        with urllib.request.urlopen(f"{admin}/brokers/health", timeout=5) as answer:
            return has_namespace and answer.read() == b"ok"
    except OSError:
        return False


@contextmanager
def _serve(cache: Path, folder: Path, mode: Mode) -> Iterator[Server]:
    port, web = free_port(), free_port()
    configuration = folder / "standalone.conf"
    configuration.write_text(
        f"{_CONFIGURATION}brokerServicePort={port}\nwebServicePort={web}\n"
        f"journalSyncData={'true' if mode is Mode.SYNCED else 'false'}\n"
    )
    command: list[str | Path] = [
        "bash",
        _home(cache) / "bin" / "pulsar",
        "standalone",
        "-nfw",
        "-nss",
        "-a",
        "127.0.0.1",
    ]
    command += ["--metadata-dir", folder / "metadata", "--bookkeeper-dir", folder / "bookkeeper"]
    environment = {
        "PULSAR_STANDALONE_CONF": str(configuration),
        "PULSAR_LOG_DIR": str(folder / "logs"),
        "PULSAR_MEM": "-Xms256m -Xmx1g -XX:MaxDirectMemorySize=512m",
        "PULSAR_GC_LOG": "-Xlog:disable",
        "PULSAR_LOG_APPENDER": "Console",
        "PULSAR_LOG_LEVEL": "warn",
        "PULSAR_LOG_ROOT_LEVEL": "warn",
    }
    admin = f"http://127.0.0.1:{web}/admin/v2"
    with Server(f"127.0.0.1:{port}", folder, command, lambda: _is_ready(admin), **environment).running() as server:
        yield server


BROKER = Broker(
    name="Pulsar",
    module="pulsar",
    version=VERSION,
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


def publish(address: str, topic: str, load: Load) -> None:
    import pulsar

    confirmed = 0
    failures = []

    def answered(result: Any, _: object) -> None:
        nonlocal confirmed
        if result == pulsar.Result.Ok:
            confirmed += 1
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
