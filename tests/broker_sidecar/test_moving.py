"""A topic that is moved to any sidecar that takes it: what the one that gives it up hears of the others meanwhile."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker_sidecar.cluster import pulsar_cluster
from broker_sidecar.cluster.peers import Neighbours
from broker_sidecar.cluster.pulsar_cluster import Moves
from seqdedupe.errors import UnavailableError, error
from seqdedupe.topic.base import State
from tests.topic.test_standby import Two

SHARED: Any = SimpleNamespace(address="one:6680", admin=None)


class Others(Neighbours):
    """The other sidecars, as they are reached. Each of `owners` has the topic by the next look, in the end the last."""

    def __init__(self, two: Two) -> None:
        super().__init__()
        self._two = two
        self.owners = ["other:6680"]
        self.refused: dict[str, str] = {}
        """Why the sidecar at an address does not take the topic, by address."""
        self.asked: list[str] = []
        self.neighbours = self
        self.shared = SHARED

    async def owner_of(self, topic: str) -> str:
        address = self.owners.pop(0) if len(self.owners) > 1 else self.owners[0]
        return "" if address == self.shared.address else address

    async def take(self, address: str, _name: str) -> None:
        self.asked.append(address)
        if address in self.refused:
            raise error(self.refused[address], "it has not got it")
        await self._two.other.topic.owner.take()


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    two = Two(tmp_path)
    await two.start()
    yield two
    await two.close()


@pytest.mark.parametrize("reason", ["NOT_OWNER", "RECOVERING", "UNREACHABLE", "TOPIC_NOT_FOUND"])
async def test_whoever_has_it_in_the_end_serves_it(two: Two, reason: str) -> None:
    others = Others(two)
    others.owners = ["", "third:6680", "one:6680", "other:6680"]
    others.refused = {"third:6680": reason}
    assert await Moves().move(two.one.topic, "", others) == "other:6680"  # type: ignore[arg-type]
    assert others.asked == ["third:6680", "other:6680"]
    assert (two.one.topic.state, two.other.topic.state) == (State.STANDBY, State.SERVING)


async def test_if_nobody_takes_it_it_is_served_again_and_told_why(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulsar_cluster, "TAKE_SECONDS", 0.3)
    others = Others(two)
    others.refused = {"other:6680": "RECOVERING"}
    with pytest.raises(UnavailableError, match=r"no sidecar has taken it within 0 s; .*it has not got it"):
        await Moves().move(two.one.topic, "", others)  # type: ignore[arg-type]
    await two.one.until(State.SERVING)
    assert two.other.topic.state is State.STANDBY
