"""What fails within the sidecar, at any step of a frame: no ID is in flight for ever, and nothing is mistaken.

Memory may be gone anywhere. About 10 s, one process.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.core import id_window
from seqdedupe.core.id_slots import Newer, Slots
from seqdedupe.core.id_window import IdWindow
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import DUP
from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.contract import Failure
from seqdedupe.store.db import Store
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import judge
from seqdedupe.topic.base import State
from seqdedupe.topic.frame import Flight, FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.judge import ByDeduplicationId
from seqdedupe.topic.operations import open_sessions
from seqdedupe.topic.owner import Owner
from seqdedupe.topic.policy import Policy
from seqdedupe.topic.topic import Topic
from tests.log.faulty import FaultyLog
from tests.topic.scene import Scene
from tests.topic.test_by_id import Place, frame


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "store")
    yield store
    store.close()


class Fails:
    """A call that fails once, at its k-th time, before or after it did what it should."""

    def __init__(self, real: Callable[..., Any], at: int, *, afterwards: bool) -> None:
        self.real, self.at, self.afterwards = real, at, afterwards
        self.calls = 0

    def method(self) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            self.calls += 1
            if self.calls != self.at:
                return self.real(*arguments, **more)
            if self.afterwards:
                self.real(*arguments, **more)
            raise MemoryError

        return call


BY_ID = {
    "deciding": (IdWindow, "decide"),
    "deciding a part": (id_window, "decide"),
    "the work of a frame on the table": (Slots, "go_on"),
    "a chunk": (Newer, "open"),
    "cutting": (judge, "cut"),
    "its receipt": (judge, "FrameReceipt"),
    "noting it": (Flight, "add"),
    "handing it over": (FaultyLog, "append"),
    "confirming": (IdWindow, "confirm"),
    "settling": (Topic, "_confirm"),
    "counting": (Topic, "_count"),
}


MOST_TURNS = 100_000
"""For the event loop, until what is in flight is settled. A few are enough: nothing of it waits for a disk."""


async def until_serving(topic: Topic) -> None:
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while topic.state is not State.SERVING:
            assert topic.state is not State.DAMAGED, topic.damage
            await topic.confirmed.wait()


@pytest.mark.parametrize("afterwards", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("where", BY_ID)
async def test_no_id_is_in_flight_for_ever(
    store: Store, where: str, afterwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(store, deduplication_window_max_messages=64)
    await place.start()
    place.send(b"old")
    place.log.settle()
    holder, name = BY_ID[where]
    fails = Fails(getattr(holder, name), 2, afterwards=afterwards)
    monkeypatch.setattr(holder, name, fails.method())
    frames = [[b"%d-%d" % (k, i) for i in range(6)] + [b"old"] for k in range(4)]
    for ids in frames:
        place.send(*ids)
    await settled(place.log, place.topic)
    assert fails.calls >= 2, "it has failed"
    again = [place.send(*ids) for ids in frames]
    await settled(place.log, place.topic)
    for ids, one in zip(frames, again, strict=True):
        (answer,) = one
        assert isinstance(answer, FrameReceipt), answer
        if answer.verdicts is None or not (answer.verdicts == DUP).all():
            (answer,) = place.send(*ids)
        assert isinstance(answer, FrameReceipt)
        assert answer.verdicts is not None
        assert (answer.verdicts == DUP).all(), "it is in the log, and known to be"
        stored = place.stored()
        assert [stored[index] for index in answer.known_indexes.tolist()] == ids
    assert sorted(place.stored()) == sorted({one for ids in frames for one in ids})
    assert place.topic.window is not None
    assert place.topic.window.next_index == place.topic.confirmed_index == len(place.stored())
    await place.topic.close("")


async def settled(log: FaultyLog, topic: Topic) -> None:
    """All that was handed over is in the log, and the topic serves."""
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        for _ in range(3):
            log.settle()
            await asyncio.sleep(0)
            await until_serving(topic)
        turns = 0
        while len(topic.flight):
            turns += 1
            assert turns < MOST_TURNS, "it stays in flight"
            log.settle()
            await asyncio.sleep(0)
    await until_serving(topic)


IN_SEQUENCE = {
    "cutting": (judge, "cut"),
    "originals": (Producers, "originals"),
    "its receipt": (judge, "FrameReceipt"),
    "noting it": (Flight, "add"),
    "handing it over": (FaultyLog, "append"),
    "persisting": (Producers, "persist"),
}


@pytest.mark.parametrize("afterwards", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("where", IN_SEQUENCE)
async def test_nor_is_a_sequence_id(
    store: Store, where: str, afterwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(store)
    await scene.start()
    await scene.open("p")
    scene.send(("p", 0))
    scene.log.settle()
    holder, name = IN_SEQUENCE[where]
    fails = Fails(getattr(holder, name), 1, afterwards=afterwards)
    monkeypatch.setattr(holder, name, fails.method())
    for k in range(3):
        scene.send(("p", 0), ("p", 3 * k + 1), ("p", 3 * k + 2))
    await settled(scene.log, scene.topic)
    assert fails.calls >= 1, "it has failed"
    for k in range(3):
        scene.send(("p", 3 * k + 1), ("p", 3 * k + 2), link=3 * k - 1)
        await settled(scene.log, scene.topic)
    again = scene.send(*(("p", i) for k in range(3) for i in (3 * k + 1, 3 * k + 2)))
    assert isinstance(again[0], FrameReceipt)
    assert again[0].verdicts is not None
    assert (again[0].verdicts == DUP).all()
    assert scene.topic.confirmed_index == scene.storage.next_index == 7
    await scene.topic.close("")


@pytest.mark.parametrize(
    ("name", "afterwards"),
    [("_found", False), ("_found", True), ("_learn", False), ("replay", False), ("replay", True),
     ("_apply", False), ("_apply", True)],
)  # fmt: skip
async def test_a_replay_that_fails_is_done_again(
    store: Store, name: str, afterwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(store)
    await place.start()
    frames = [[b"%d" % k, b"%d'" % k] for k in range(3)]
    answers = [place.send(*ids) for ids in frames]
    setting = asyncio.ensure_future(place.topic.set_policy(Policy(by_deduplication_id=True, retention_size_in_mb=7)))
    await asyncio.sleep(0)
    holder = ByDeduplicationId if name == "replay" else Topic
    fails = Fails(getattr(holder, name), 1, afterwards=afterwards)
    monkeypatch.setattr(holder, name, fails.method())
    place.log.unknown(lands=None)
    await until_serving(place.topic)
    assert fails.calls > 1, "it has failed, and was done again"
    await setting
    assert place.topic.policy.retention_size_in_mb == 7
    for ids, (answer,) in zip(frames, answers, strict=True):
        assert isinstance(answer, FrameReceipt)
        (again,) = place.send(*ids)
        assert isinstance(again, FrameReceipt)
        assert again.verdicts is not None
        assert (again.verdicts == DUP).all()
        assert again.known_indexes.tolist() == [answer.first_index, answer.first_index + 1]
    assert place.stored() == [one for ids in frames for one in ids]
    await place.topic.close("")


async def test_an_answer_that_cannot_be_given_loses_no_other(store: Store) -> None:
    place = Place(store)
    await place.start()
    answers: list[FrameReceipt | Refusal] = []

    def cannot(answer: FrameReceipt | Refusal) -> None:
        raise MemoryError

    for one, reply in ((b"a", cannot), (b"b", answers.append)):
        place.topic.admit(frame(one), 1, reply, NumbersCache())
    place.log.settle()
    assert [isinstance(answer, FrameReceipt) for answer in answers] == [True]
    assert place.topic.state is State.SERVING
    await place.topic.close("")


async def test_nor_one_that_refuses_it(store: Store) -> None:
    """What is in flight is given up: one that cannot hear it keeps no other from hearing it."""
    place = Place(store)
    await place.start()
    answers: list[FrameReceipt | Refusal] = []

    def cannot(answer: FrameReceipt | Refusal) -> None:
        raise MemoryError

    for one, reply in ((b"a", cannot), (b"b", answers.append)):
        place.topic.admit(frame(one), 1, reply, NumbersCache())
    place.log.refuse()
    assert [isinstance(answer, Refusal) for answer in answers] == [True]
    await settled(place.log, place.topic)
    await place.topic.close("")


async def test_a_session_whose_record_finds_no_memory_is_found_out(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be in flight for ever, and anyone who resumes it would hold the event loop."""
    scene = Scene(store)
    await scene.start()
    with monkeypatch.context() as patch:
        patch.setattr(Flight, "add", Fails(Flight.add, 1, afterwards=False).method())
        with pytest.raises(SeqdedupeError) as raised:
            await open_sessions(scene.topic, ["p"], None)
    assert raised.value.reason == "RECOVERING"
    await settled(scene.log, scene.topic)
    assert not scene.topic.sessions.are_in_flight(["p"])
    await scene.open("p")
    await scene.topic.close("")


async def test_nothing_begins_on_a_topic_that_is_closed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An append fails while it is being closed: nobody would end what is begun then."""
    place = Place(store)
    await place.start()
    topic, opened = place.topic, place.log.opened
    close = topic.keeper.snapshotter.close

    async def fails_meanwhile() -> None:
        topic.owner.log_failed(Failure.UNKNOWN, "planted")
        await close()

    monkeypatch.setattr(topic.keeper.snapshotter, "close", fails_meanwhile)
    await topic.close("")
    for _ in range(10):
        await asyncio.sleep(0)
    assert not topic._tasks
    assert place.log.opened == opened


async def test_control_out_of_step_nothing_is_found_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without finding it out what was decided stays in flight."""
    monkeypatch.setattr(Owner, "log_failed", lambda self, failure, why: None)
    with pytest.raises((AssertionError, TimeoutError)):
        await test_no_id_is_in_flight_for_ever(store, "its receipt", False, monkeypatch)
