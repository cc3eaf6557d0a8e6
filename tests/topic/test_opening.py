"""Open, while something is in flight and when it fails; with the bugs that each of these finds."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import EPOCH, PERSISTED, PUSHED
from seqdedupe.errors import UnavailableError
from seqdedupe.topic.base import State
from seqdedupe.topic.frame import Flight, FrameReceipt
from seqdedupe.topic.operations import open_sessions, reset_producer
from seqdedupe.topic.sessions import LAST_OPEN
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
    assert isinstance(answers[0], FrameReceipt) is is_careful


@pytest.mark.parametrize(
    "open_again",
    [lambda topic: open_sessions(topic, ["b"], None), lambda topic: reset_producer(topic, "a", 5)],
    ids=["open", "reset"],
)
async def test_a_new_term_begins_when_the_opens_of_one_are_used_up(
    scene: Scene, open_again: Callable[[Any], Any]
) -> None:
    topic = scene.topic
    term = topic.term
    topic.sessions._opens = LAST_OPEN - 1
    await scene.open("a")
    assert scene.epochs["a"] == term << 32 | LAST_OPEN
    in_flight = scene.send(("a", 5))
    for _ in range(2):
        # Nobody is fenced by what is refused.
        with pytest.raises(UnavailableError, match="RECOVERING") as refused:
            await open_again(topic)
        assert refused.value.retry_delay_ms >= 0
    while topic.state is not State.SERVING:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert topic.term == term + 1
    # What was in flight is sent again, in its session.
    assert len(in_flight) == 1
    answers = scene.send(("a", 5))
    scene.log.settle()
    assert isinstance(answers[0], FrameReceipt)
    opening = asyncio.ensure_future(open_again(topic))
    await asyncio.sleep(0)
    scene.log.settle()
    await opening
    assert topic.producers.numbers[: len(topic.producers), EPOCH].max() == topic.term << 32 | 1
