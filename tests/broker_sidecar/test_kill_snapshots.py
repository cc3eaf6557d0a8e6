"""kill -9 under load while snapshots are taken all the time, on several topics."""

from collections.abc import Callable

import pytest

from seqdedupe.testing import Sidecar
from tests.broker_sidecar.load import Publisher, compare, kill_at_random_moments, stored_ids

KILLS = 9


def test_snapshots_every_few_batches_on_several_topics(
    start_sidecar: Callable[..., Sidecar], pytestconfig: pytest.Config
) -> None:
    seed = pytestconfig.getoption("randomly_seed", 1)
    print("seed", seed)
    sidecar = start_sidecar(deduplication_entries_interval=3, deduplication_snapshot_interval_seconds=1)
    publishers = [Publisher(sidecar.address, f"t{k}", [f"p{i}" for i in range(3)], seed + k) for k in range(3)]
    for publisher in publishers:
        publisher.start()
    kill_at_random_moments(sidecar, publishers, KILLS, seed)
    for publisher in publishers:
        publisher.finish()
    for k, publisher in enumerate(publishers):
        compare(stored_ids(sidecar.address, f"t{k}"), publisher.ids)
