"""What an operator learns of messages and producers, and a producer that is set back."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from seqdedupe.core.recent import RECENT_MESSAGES
from seqdedupe.errors import FencedError, InvalidRequestError, UnavailableError
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import control, readers
from seqdedupe.topic.base import State
from seqdedupe.topic.frame import LISTED_AT_ONCE, Flight, FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.operations import MessageState, in_flight, message_state, open_sessions, reset_producer
from seqdedupe.topic.policy import Applied
from seqdedupe.topic.topic import Topic, state_again
from tests.batches import batch
from tests.topic.scene import INCARNATION, Scene


async def test_a_message_goes_from_not_seen_over_in_flight_to_stored(scene: Scene) -> None:
    await scene.open("a", "b")
    assert await scene.state("a", 5) is MessageState.NOT_SEEN
    scene.send(("b", 1), ("a", 2), ("a", 5))
    scene.now_seconds += 2.5
    found = await message_state(scene.topic, "a", 5)
    assert (found.state, found.in_flight_ms, found.pushed, found.persisted) == (MessageState.IN_FLIGHT, 2500, 5, -1)
    assert await scene.state("a", 4) is MessageState.PASSED_OVER
    assert await scene.state("b", 5) is MessageState.NOT_SEEN
    scene.log.settle()
    found = await message_state(scene.topic, "a", 5)
    assert (found.state, found.position) == (MessageState.STORED, await scene.topic.position_before(3))
    assert found.publish_time_ms > 0
    assert await scene.state("a", 4) is MessageState.BELOW_WATERMARK


async def test_nothing_is_said_while_it_is_not_certain(scene: Scene) -> None:
    await scene.open("a")
    scene.send(("a", 5))
    scene.log.opening_allowed.clear()
    scene.log.unknown(lands=1)
    assert scene.topic.state is State.RECOVERING
    with pytest.raises(UnavailableError, match="RECOVERING"):
        await message_state(scene.topic, "a", 5)
    # What is in flight is known all the time.
    assert [one.name for one in await in_flight(scene.topic, 0)] == [b"a"]
    with pytest.raises(UnavailableError, match="RECOVERING"):
        await reset_producer(scene.topic, "a", -1)
    scene.log.opening_allowed.set()


async def test_who_has_been_in_flight_for_long(scene: Scene) -> None:
    await scene.open("a", "b", "c")
    scene.send(("b", 3), ("a", 0), ("b", 9))
    scene.now_seconds += 1
    scene.send(("b", 11), ("b", 12), link=9)
    scene.now_seconds += 1
    scene.send(("c", 4))
    listed = await in_flight(scene.topic, 0)
    assert sorted(listed) == [(b"a", 0, 0, 2000), (b"b", 3, 12, 2000), (b"c", 4, 4, 0)]
    assert listed[-1].name == b"c"
    assert sorted(await in_flight(scene.topic, 1500)) == [(b"a", 0, 0, 2000), (b"b", 3, 9, 2000)]
    assert await in_flight(scene.topic, 2001) == []
    scene.log.settle()
    assert await in_flight(scene.topic, 0) == []
    with pytest.raises(InvalidRequestError, match="longer_than_ms"):
        await in_flight(scene.topic, -1)


async def test_who_is_in_flight_is_looked_through_while_others_go_on(scene: Scene) -> None:
    """What settles meanwhile, and what comes, is omitted."""
    await scene.open("a", "b")
    for i in range(3 * LISTED_AT_ONCE):
        scene.send(("a", i), ("b", i), link=i - 1)
    listing = asyncio.ensure_future(in_flight(scene.topic, 0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not listing.done()
    scene.log.settle(2 * LISTED_AT_ONCE)
    scene.send(("a", 10**6), link=3 * LISTED_AT_ONCE - 1)
    assert {(one.name, one.first_id, one.last_id) for one in await listing} == {
        (name, 0, 3 * LISTED_AT_ONCE - 1) for name in (b"a", b"b")
    }
    assert [one.first_id for one in await in_flight(scene.topic, 0)] == [2 * LISTED_AT_ONCE] * 2


async def test_a_reset_fences_at_once_and_waits_for_what_is_in_flight(scene: Scene) -> None:
    await scene.open("a")
    first = scene.send(("a", 4), ("a", 9))
    resetting = asyncio.ensure_future(reset_producer(scene.topic, "a", 4))
    await asyncio.sleep(0)
    [late] = scene.send(("a", 10), link=9)
    assert isinstance(late, Refusal)
    scene.log.settle(1)
    await asyncio.sleep(0)
    assert isinstance(first[0], FrameReceipt)
    assert not resetting.done()
    assert await scene.state("a", 9) is MessageState.STORED
    scene.log.settle(1)
    assert await resetting == 9
    assert await scene.state("a", 9) is MessageState.NOT_SEEN
    [fenced] = scene.send(("a", 10), link=9)
    assert isinstance(fenced, Refusal)
    assert isinstance(fenced.error, FencedError)
    await scene.open("a")
    answers = scene.send(("a", 9), link=4)
    scene.log.settle()
    assert isinstance(answers[0], FrameReceipt)
    assert (answers[0].verdicts, answers[0].first_index) == (None, 2)


async def test_a_reset_that_the_log_refuses_has_done_nothing(scene: Scene) -> None:
    await scene.open("a")
    scene.send(("a", 9))
    scene.log.settle()
    resetting = asyncio.ensure_future(reset_producer(scene.topic, "a", 4))
    await asyncio.sleep(0)
    scene.log.refuse()
    with pytest.raises(UnavailableError, match="no room"):
        await resetting
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while scene.topic.state is not State.SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    answers = scene.send(("a", 10), link=9)
    scene.log.settle()
    assert isinstance(answers[0], FrameReceipt)
    assert scene.topic.counters.resets == 0


async def test_a_resume_that_waits_while_its_name_is_reset_is_fenced(scene: Scene) -> None:
    """It must not learn the lower number: to a client that has receipts above it that is lost data."""
    await scene.open("a", "b")
    scene.send(("a", 9))
    scene.log.settle()
    scene.send(("b", 1))
    resuming = asyncio.ensure_future(open_sessions(scene.topic, ["a"], [scene.epochs["a"]]))
    await asyncio.sleep(0)
    resetting = asyncio.ensure_future(reset_producer(scene.topic, "a", 4))
    await asyncio.sleep(0)
    scene.log.settle()
    await resetting
    opened = await resuming
    assert [e.reason for e in opened.refusals.values()] == ["FENCED"]
    assert (opened.epochs, opened.persisted, opened.indexes) == ([0], [-1], [-1])


@pytest.mark.parametrize("is_careful", [True, False])
async def test_retention_takes_no_reset_back_that_is_on_its_way(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, is_careful: bool
) -> None:
    if not is_careful:
        monkeypatch.setattr(Flight, "has", lambda self, kind: False)
    await scene.open("a")
    scene.send(("a", 9))
    scene.log.settle()
    # What the policy is need not be stated, which would take as long as the reset.
    scene.topic.policy_stated = 2**62
    resetting = asyncio.ensure_future(reset_producer(scene.topic, "a", 4))
    await asyncio.sleep(0)
    stating = asyncio.ensure_future(state_again(scene.topic, 2**62))
    while not (stating.done() and resetting.done()):
        await asyncio.sleep(0)
        scene.log.settle()
    await stating
    assert ((await message_state(scene.topic, "a", 5)).persisted == 4) == is_careful


async def test_after_a_restart_a_message_is_looked_for_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(tmp_path / "store")
    logs = EmbeddedLogs(tmp_path / "logs", clock_ms=lambda: 77, fatal=pytest.fail)
    await logs.create(INCARNATION, "persistent://public/default/t", bytes(16))

    async def start() -> Topic:
        snapshots = Snapshots(store, INCARNATION)
        loaded = snapshots.load()
        log = await logs.open(INCARNATION, loaded.next_index if loaded else 0)
        topic = Topic("t", log, store, snapshots, loaded, applied=Applied(), random_bytes=bytes)
        await topic.recover()
        return topic

    topic = await start()
    epochs = dict(zip("ab", (await open_sessions(topic, ["a", "b"], None)).epochs, strict=True))
    for rows, link in (([("b", 0), ("a", 7), ("b", 2)], -1), ([("b", 3)], 2), ([("b", 5), ("b", 6)], 3)):
        topic.admit(batch(rows, epochs=epochs, links={"a": -1, "b": link}).encode(), 1, lambda _: None, NumbersCache())
    await topic.flight.all_of_now()
    await topic.drain()
    topic = await start()
    number = topic.producers.number(b"b")
    assert number is not None
    assert topic.producers.index_of(number, 2) == -1, "the ring is empty"
    for name, sequence_id, index in (("a", 7, 1), ("b", 0, 0), ("b", 2, 2), ("b", 6, 5)):
        found = await message_state(topic, name, sequence_id)
        assert (found.state, found.position, found.publish_time_ms) == (
            MessageState.STORED,
            await topic.position_before(index + 1),
            77,
        )
    for sequence_id in (1, 4):
        assert (await message_state(topic, "b", sequence_id)).state is MessageState.BELOW_WATERMARK
    assert readers.LOOKED_THROUGH_MESSAGES >= RECENT_MESSAGES
    # No more is looked through than that.
    for limit, value in (("LOOKED_THROUGH_MESSAGES", 3), ("LOOKED_THROUGH_BYTES", 100)):
        with monkeypatch.context() as patch:
            patch.setattr(readers, limit, value)
            assert (await message_state(topic, "b", 5)).state is MessageState.STORED
            assert (await message_state(topic, "a", 7)).state is MessageState.BELOW_WATERMARK
    await topic.close("")
    await logs.close()
    store.close()


def test_a_reset_is_read_as_it_was_written() -> None:
    numbers = np.array([-1, 2**63 - 3])
    names = [b"a", "ü".encode()]
    change, term = control.decode(control.encode(control.Reset(names, numbers + 2, numbers), term=7))
    assert isinstance(change, control.Reset)
    assert (change.names, change.persisted.tolist(), term) == (names, numbers.tolist(), 7)
