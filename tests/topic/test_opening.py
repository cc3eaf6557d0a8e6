"""Open, while something is in flight and when it fails; with the bugs that each of these finds."""

import asyncio

import pytest

from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import PERSISTED, PUSHED
from seqdedupe.topic.answers import Receipt
from seqdedupe.topic.flight import Flight
from seqdedupe.topic.opening import open_sessions
from seqdedupe.topic.state import State
from tests.topic.scene import Scene


@pytest.mark.parametrize("is_careful", [True, False])
async def test_a_resume_is_answered_when_what_is_in_flight_has_settled(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, is_careful: bool
) -> None:
    async def at_once(self: Flight) -> None:
        pass

    if not is_careful:
        monkeypatch.setattr(Flight, "all_of_now", at_once)
    await scene.open("a")
    scene.send(("a", 5))
    resuming = asyncio.ensure_future(open_sessions(scene.topic, ["a"], [scene.epochs["a"]]))
    for _ in range(10):
        await asyncio.sleep(0)
    assert resuming.done() is not is_careful
    scene.log.settle()
    assert (await resuming).persisted == [5 if is_careful else -1]


@pytest.mark.parametrize("is_careful", [True, False])
async def test_an_open_that_failed_has_fenced_nobody(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, is_careful: bool
) -> None:
    def fail_in_flight(self: Producers) -> None:
        self.numbers[: len(self), PUSHED] = self.numbers[: len(self), PERSISTED]

    if not is_careful:
        monkeypatch.setattr(Producers, "fail_in_flight", fail_in_flight)
    await scene.open("a")
    opening = asyncio.ensure_future(open_sessions(scene.topic, ["a"], None))
    await asyncio.sleep(0)
    scene.log.refuse()
    await asyncio.wait([opening])
    assert opening.exception() is not None
    while scene.topic.state is not State.SERVING:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    answers = scene.send(("a", 5))
    scene.log.settle()
    assert isinstance(answers[0], Receipt) is is_careful
