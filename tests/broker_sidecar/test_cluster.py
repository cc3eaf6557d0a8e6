"""Which topics of a cluster a sidecar stands by for, before anything is asked of the cluster."""

from contextlib import closing
from pathlib import Path

from broker_sidecar.cluster.pulsar_cluster import LogCluster
from broker_sidecar.config import load
from seqdedupe.client.route import in_order
from seqdedupe.store.db import Store

ADDRESSES = ["host-0:6660", "host-1:6660", "host-2:6660", "host-3:6660"]
TOPICS = [f"persistent://public/default/topic-{number}" for number in range(200)]


async def near(folder: Path, own: str, sidecars: str) -> set[str]:
    """The topics for which it does."""
    keys = {
        "data_directory": str(folder),
        "log": "pulsar",
        "standby": True,
        "advertised_address": own,
        "peers": sidecars,
        "pulsar.service_url": "pulsar://127.0.0.1:1",
        "pulsar.admin_url": "http://127.0.0.1:1",
    }
    with closing(Store.open(folder)) as store:
        cluster = LogCluster(load(None, {}, keys), store)
        return {topic for topic in TOPICS if cluster.is_near(topic)}


async def test_the_two_that_clients_try_first_do(tmp_path: Path) -> None:
    for address in ADDRESSES:
        expected = {topic for topic in TOPICS if address in in_order(topic, ADDRESSES)[:2]}
        assert 50 < len(expected) < 150
        assert await near(tmp_path / address, address, ",".join(ADDRESSES)) == expected
        assert await near(tmp_path / address, address.upper(), ",".join([*ADDRESSES, "*.example.org"])) == expected


async def test_one_that_knows_no_others_does_for_all(tmp_path: Path) -> None:
    for sidecars in ("", ADDRESSES[0]):
        assert await near(tmp_path, ADDRESSES[0], sidecars) == set(TOPICS)
