"""Stock clients in Python, Java and Go that are killed, like what they publish through: a share of `stock_kills`."""

from pathlib import Path

import pytest

from pulsar_broker.distribution import Unavailable
from pulsar_broker.standalone import Broker
from tests.broker_sidecar.door.stock_kills import (
    Commands,
    round_at_broker,
    round_at_sidecar,
    round_at_two_sidecars,
    round_at_workers,
)
from tests.broker_sidecar.door.stock_processes import RIGHT, command_of
from tests.tiers import JAVA, PULSAR_GO


@pytest.fixture(scope="module")
def commands(pulsar_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    JAVA.check()
    folder = tmp_path_factory.mktemp("programs")
    return {client: command_of(client, folder) for client in ("python", "java")}


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    try:
        return {"go": command_of("go", tmp_path_factory.mktemp("programs"))}
    except Unavailable:
        PULSAR_GO.missing()


def test_go_loses_and_doubles_nothing_at_a_sidecar(go: Commands, tmp_path: Path) -> None:
    found = round_at_sidecar(tmp_path, go, 1, ("kill_client", "kill_sidecar"))
    assert found.verdicts == {"go": RIGHT}


def test_nothing_is_lost_or_doubled_at_workers(commands: Commands, go: Commands, tmp_path: Path) -> None:
    plan = ("kill_worker", "kill_client", "kill_client", "kill_worker", "kill_client", "kill_worker")
    found = round_at_workers(tmp_path, commands | go, 1, plan)
    assert found.faults == {"worker": 3, "python": 1, "java": 1, "go": 1}
    assert found.verdicts == dict.fromkeys(found.verdicts, RIGHT)


def test_nothing_is_lost_or_doubled_at_two_sidecars(
    commands: Commands, go: Commands, broker: Broker, tmp_path: Path
) -> None:
    plan = ("kill_client", "unload", "kill_client_and_sidecar", "kill_owner_for_long", "kill_client")
    found = round_at_two_sidecars(tmp_path, commands | go, 1, broker, plan)
    assert found.faults == {"python": 1, "java": 1, "go": 1, "sidecar": 3, "unload": 1}
    assert found.verdicts == dict.fromkeys(found.verdicts, RIGHT)


def test_control_a_broker_loses_what_is_new_in_a_batch(go: Commands, broker: Broker, tmp_path: Path) -> None:
    """The same oracle finds it. The broker may double messages too: it knows only the first ID of a batch."""
    left = go | {"python": command_of("python", tmp_path)}
    for seed in range(10):
        found = round_at_broker(tmp_path / f"{seed}", left, seed, broker, 3 * len(left))
        left = {client: command for client, command in left.items() if not found.verdicts[client].lost}
        if not left:
            return
    pytest.fail(f"{', '.join(left)} lost nothing: this shows nothing")
