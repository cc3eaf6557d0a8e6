"""kill -9 at random moments under load: nothing is missing, nothing doubled, every producer's order is kept."""

from collections.abc import Callable

import pytest

from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar.calls import DUP, Client
from tests.broker_sidecar.load import Publisher, compare, kill_at_random_moments, stored_ids


@pytest.mark.parametrize(("deduplicate", "kills"), [(True, 10), (False, 2)])
def test_two_streams_of_several_producers(
    start_sidecar: Callable[..., Sidecar], pytestconfig: pytest.Config, deduplicate: bool, kills: int
) -> None:
    """The arm without deduplication is the control: the same load and the same faults leave duplicates there."""
    seed = pytestconfig.getoption("randomly_seed", 1)
    print("seed", seed)
    sidecar = start_sidecar()
    client = Client(sidecar.address)
    policy = admin_pb2.TopicPolicy(deduplication_enabled=deduplicate)
    client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic="t", policy=policy))
    client.close()
    publishers = [Publisher(sidecar.address, "t", [f"{k}-{i}" for i in range(4)], seed + k) for k in range(2)]
    for publisher in publishers:
        publisher.start()
    kill_at_random_moments(sidecar, publishers, kills, seed)
    for publisher in publishers:
        publisher.finish()
    sent = {name: ids for publisher in publishers for name, ids in publisher.ids.items()}
    found = stored_ids(sidecar.address, "t", check_links=deduplicate)
    dups = sum(publisher.verdicts[DUP] for publisher in publishers)
    if deduplicate:
        compare(found, sent)
        assert dups > 0
    else:
        assert dups == 0
        assert sum(len(ids) for ids in found.values()) > sum(len(ids) for ids in sent.values())
        assert all(set(found[name]) == set(ids) for name, ids in sent.items())
