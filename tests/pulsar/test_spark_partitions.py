"""Spark has the partitions of a topic on a real broker, in packed entries, through a sidecar and straight."""

import asyncio
import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

from pulsar_broker.standalone import Broker
from seqdedupe.client import blocking
from seqdedupe.entry_properties import PARTITIONS as COUNT
from seqdedupe.errors import ConfigurationError, NotFoundError
from seqdedupe.log.pulsar import wholes
from seqdedupe.log.pulsar.admin_url import PulsarAdmin
from seqdedupe.log.pulsar.wholes import FIRST_INCARNATION, LIFE, MAKER, Life
from seqdedupe.names import partition_name
from seqdedupe.testing import Sidecar
from seqdedupe_spark.source import SeqdedupeDataSource
from tests.pulsar.owners import Cluster

PARTITIONS = 2
MESSAGES = 40

_numbers = itertools.count()


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory, broker: Broker) -> Iterator[Sidecar]:
    keys: dict[str, Any] = {
        "pulsar_service_url": broker.service_url,
        "pulsar_admin_url": broker.admin_url,
        "pulsar_manage_topic_policies": True,
    }
    with Sidecar(tmp_path_factory.mktemp("sidecar"), log="pulsar", **keys) as sidecar:
        yield sidecar


def new_name() -> str:
    return f"persistent://public/default/whole-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def whole(sidecar: Sidecar) -> str:
    """A topic of packed entries with some messages in each partition."""
    name = new_name()
    with blocking.Client(sidecar.address) as client:
        client.admin.create_topic(name, partitions=PARTITIONS, entry_format="packed")
        with client.producer(name, "p") as producer:
            for number in range(MESSAGES):
                producer.send(b"%d" % number, number, key=f"key {number}")
            producer.flush()
    return name


def rows(options: dict[str, str]) -> list[dict[str, Any]]:
    """All that is there, as a batch query reads it, in order."""
    made = SeqdedupeDataSource(options)
    reader = made.reader(made.schema())
    batches = [batch for task in reader.partitions() for batch in reader.read(task)]
    found = [row for batch in batches for row in batch.to_pylist()]
    return sorted(found, key=lambda row: (row["__topic"], row["__index"]))


@pytest.fixture
def straight(broker: Broker) -> dict[str, str]:
    return {"service.url": broker.service_url, "admin.url": broker.admin_url}


def add_partition(cluster: Cluster, whole: str) -> str:
    """Pulsar makes one more; its name."""
    asyncio.run(cluster.url.call("POST", f"{whole.replace('://', '/')}/partitions", PARTITIONS + 1))
    return partition_name(whole, PARTITIONS)


def test_partitions_are_read_straight_as_through_the_sidecar(
    sidecar: Sidecar, cluster: Cluster, straight: dict[str, str], whole: str
) -> None:
    """Also when Pulsar has more of them."""
    through = rows({"service.url": sidecar.address, "topic": whole})
    assert sorted(row["__sequenceId"] for row in through) == list(range(MESSAGES))
    assert {row["__partition"] for row in through} == set(range(PARTITIONS))
    assert rows(straight | {"topic": whole}) == through
    added = add_partition(cluster, whole)
    assert added in asyncio.run(cluster.admin.topics("public/default"))
    assert rows(straight | {"topic": whole}) == through
    assert rows(straight | {"topicspattern": f".*{whole.rpartition('/')[2]}"}) == through
    with pytest.raises(NotFoundError):
        rows(straight | {"topic": added})


def test_by_their_names_alone_it_would_be_read_what_pulsar_has_added(
    cluster: Cluster, straight: dict[str, str], whole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control arm."""
    added = add_partition(cluster, whole)

    async def says_nothing(admin: PulsarAdmin, topic: str) -> None:
        return

    monkeypatch.setattr(wholes, "look_at", says_nothing)
    with pytest.raises(ConfigurationError, match=f"no sidecar writes {added}"):
        rows(straight | {"topic": whole})


@pytest.mark.parametrize("life", Life)
def test_what_is_half_there_is_not_there(cluster: Cluster, straight: dict[str, str], life: Life) -> None:
    """While it is made and deleted, and where Pulsar has made the partitions again by itself."""
    name = new_name()
    said = {FIRST_INCARNATION: "1700000000000000", COUNT: str(PARTITIONS), LIFE: life.value, MAKER: "another"}
    asyncio.run(cluster.admin.create_partitioned(name, PARTITIONS, said))
    try:
        with pytest.raises(NotFoundError):
            rows(straight | {"topic": name, "failondataloss": "false"})
    finally:
        asyncio.run(cluster.admin.delete_partitioned(name))
