"""kill -9 while the sidecar starts and recovers: however often, the next start gives the same verdicts."""

import random
import time
from collections.abc import Callable

import pytest

from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.broker_sidecar.calls import DUP, NOT_DUP, Client, batch

KILLS = 14
ROWS = 400
LONGEST_START_SECONDS = 1.0


def wait_for(sidecar: Sidecar, begin: int, words: str, seconds: float) -> None:
    """Returns when the sidecar logs this, counted from an entry on, or after a time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not any(words in entry["event"] for entry in sidecar.log[begin:]):
        time.sleep(0.001)


def test_kill_during_start_and_recovery(start_sidecar: Callable[..., Sidecar], pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("randomly_seed", 1)
    print("seed", seed)
    rng = random.Random(seed)
    sidecar = start_sidecar(deduplication_entries_interval=1_000_000, deduplication_snapshot_interval_seconds=0)
    client = Client(sidecar.address)
    epochs = client.epochs("t", "p", "q")
    stream = client.stream("t")
    for i in range(ROWS):
        stream.send(batch([("p", i), ("q", 2 * i)], epochs, {"q": 2 * i - 2 if i else -1}))
    stream.end()
    before = client.topic("t")
    sidecar.kill()
    for kill in range(KILLS):
        begin = len(sidecar.log)
        sidecar.spawn()
        if kill % 3 == 0:
            time.sleep(rng.uniform(0.0, LONGEST_START_SECONDS))
        elif kill % 3 == 1:
            wait_for(sidecar, begin, "is RECOVERING", LAST_RESORT_SECONDS)
            time.sleep(rng.uniform(0.0, 0.03))
        else:
            wait_for(sidecar, begin, "is SERVING", LAST_RESORT_SECONDS)
        sidecar.kill()
    sidecar.start()
    after = client.topic("t")
    assert after.last == before.last
    assert after.incarnation == before.incarnation
    assert after.term > before.term
    assert list(client.open("t", "p", "q", epochs=list(epochs.values())).persisted) == [ROWS - 1, 2 * ROWS - 2]
    again = batch([("p", ROWS - 1), ("p", ROWS), ("q", 0), ("q", 2 * ROWS)], epochs, {"q": -1})
    assert list(client.publish_unary("t", again).verdicts) == [DUP, NOT_DUP, DUP, NOT_DUP]
    expected = [row for i in range(ROWS) for row in (("p", i), ("q", 2 * i))]
    assert client.rows("t") == [*expected, ("p", ROWS), ("q", 2 * ROWS)]
    client.close()
