"""Partitioned topics on a real broker as clients, commands and Pulsar's own clients have them."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pulsar
import pytest

from pulsar_broker.standalone import Broker
from seqdedupe.client import Client, ProducerConfig, Verdict
from seqdedupe.names import partition_name, partition_of
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests import warm
from tests.pulsar.owners import Cluster, quiet

PARTITIONS = 3
MESSAGES = 60
FEW = ProducerConfig(max_batch_rows=5)


@pytest.fixture
def sidecars(broker: Broker, namespace: str, tmp_path: Path) -> Iterator[list[Sidecar]]:
    """Two, not started yet."""
    keys: dict[str, Any] = {
        "log": "pulsar",
        "pulsar_service_url": broker.service_url,
        "pulsar_admin_url": broker.admin_url,
        "pulsar_namespaces": namespace,
    }
    two = [Sidecar(tmp_path / name, **keys) for name in ("one", "other")]
    yield two
    for sidecar in two:
        sidecar.kill()


def key_of(number: int) -> str:
    return f"key {number * 7 % 23}"


def command(*arguments: str) -> str:
    ended = subprocess.run(
        (warm.COMMAND, *arguments), capture_output=True, text=True, check=False, timeout=LAST_RESORT_SECONDS
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def stock_keys(service_url: str, whole: str) -> list[list[str]]:
    """The keys of what is in each partition and is a message, read with Pulsar's own client."""
    client = pulsar.Client(service_url, logger=quiet())
    try:
        found: list[list[str]] = []
        for k in range(PARTITIONS):
            reader = client.create_reader(partition_name(whole, k), pulsar.MessageId.earliest)
            found.append([])
            while reader.has_message_available():
                entry = reader.read_next(timeout_millis=int(LAST_RESORT_SECONDS * 1000))
                if "seqdedupe.kind" not in entry.properties():
                    found[-1].append(entry.partition_key())
        return found
    finally:
        client.close()


async def publish_all(
    sidecars: list[Sidecar], whole: str, before: Callable[[int], object] = lambda number: None
) -> list[Verdict]:
    """Sends everything, and says what each message's verdict was. `before` is called before each one."""
    async with (
        Client(",".join(one.address for one in sidecars)) as client,
        client.producer(whole, "p", FEW) as producer,
    ):
        receipts = []
        for number in range(MESSAGES):
            before(number)
            receipts.append(await producer.send(b"%d" % number, number, key=key_of(number)))
        published = [await receipt for receipt in receipts]
    for number, one in enumerate(published):
        assert one.partition == partition_of(key_of(number).encode(), b"p", PARTITIONS)
    return [one.verdict for one in published]


async def test_it_is_published_read_found_again_and_deleted(
    sidecars: list[Sidecar], broker: Broker, namespace: str
) -> None:
    """While a sidecar is killed, after its data directory is lost, and when Pulsar has more partitions."""
    one, other = sidecars
    whole = f"persistent://{namespace}/w"
    for sidecar in sidecars:
        await asyncio.to_thread(sidecar.start)
    made = command("topics", "create", whole, "--partitions", str(PARTITIONS), "--address", one.address)
    assert f"partitions    {PARTITIONS}, {whole}-partition-0 and on" in made

    def kill_in_the_middle(number: int) -> None:
        if number == MESSAGES // 2:
            one.kill()

    verdicts = await publish_all(sidecars, whole, kill_in_the_middle)
    assert len(verdicts) == MESSAGES
    await asyncio.to_thread(one.start)
    assert set(await publish_all(sidecars, whole)) == {Verdict.DUP}

    # Two messages of a key stand in its partition, in order, for Pulsar's own clients too.
    keys = await asyncio.to_thread(stock_keys, broker.service_url, whole)
    expected: list[list[str]] = [[] for _ in range(PARTITIONS)]
    for number in range(MESSAGES):
        expected[partition_of(key_of(number).encode(), b"p", PARTITIONS)].append(key_of(number))
    assert keys == expected

    cluster = Cluster(broker.service_url, broker.admin_url)
    await cluster.url.call("POST", f"{whole.replace('://', '/')}/partitions", PARTITIONS + 1)
    for sidecar in sidecars:
        assert await asyncio.to_thread(sidecar.stop) == 0
        shutil.rmtree(sidecar.data)
    await asyncio.to_thread(other.start)
    assert set(await publish_all([other], whole)) == {Verdict.DUP}
    read = [json.loads(line) for line in command("read", whole, "--json", "--address", other.address).splitlines()]
    assert sorted(line["sequence_id"] for line in read) == list(range(MESSAGES))
    shown = json.loads(command("topics", "show", whole, "--json", "--address", other.address))
    assert (shown["state"], shown["partitions"], shown["unused_partitions"]) == ("SERVING", PARTITIONS, 1)
    assert shown["entry_format"] == "native"
    assert "1 that Pulsar has added" in command("topics", "show", whole, "--address", other.address)
    assert f"w ({PARTITIONS} partitions)" in command("topics", "--address", other.address)
    command("topics", "delete", whole, "--address", other.address)
    assert await cluster.admin.topics(namespace) == await cluster.admin.partitioned_topics(namespace) == []
    assert await asyncio.to_thread(other.stop) == 0
    assert command("doctor", str(other.data))


@pytest.mark.skipif(shutil.which("javac") is None, reason="without a JDK no producer of Pulsar's own can be built")
async def test_a_key_has_the_partition_that_pulsars_own_producer_gives_it(
    broker: Broker, pulsar_home: Path, namespace: str
) -> None:
    whole = f"persistent://{namespace}/stock"
    await Cluster(broker.service_url, broker.admin_url).admin.create_partitioned(whole, PARTITIONS, {})
    keys = ["", "k", "ä", "クリック", *(f"key {number}" for number in range(20))]
    source = Path(__file__).with_name("Route.java")
    java = ["java", "-XX:TieredStopAtLevel=1", "-cp", f"{pulsar_home}/lib/*", str(source)]
    process = await asyncio.create_subprocess_exec(*java, broker.service_url, whole, *keys)
    assert await process.wait() == 0
    found = await asyncio.to_thread(stock_keys, broker.service_url, whole)
    expected: list[list[str]] = [[] for _ in range(PARTITIONS)]
    for key in keys:
        expected[partition_of(key.encode(), b"", PARTITIONS)].append(key)
    assert found == expected
    assert all(found)
