"""Two sidecars and one log: who does not own it says so, nothing is lost or doubled, and nobody fights for it."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from broker_sidecar.services import read_service
from broker_sidecar.services.read_service import ReadService
from seqdedupe.core.rule import PERSISTED
from seqdedupe.errors import OutcomeUnknownError, PositionError, SeqdedupeError, UnavailableError, error
from seqdedupe.format.headers import TOKEN_BYTES
from seqdedupe.message_id import Position
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import owner
from seqdedupe.topic import topic as topic_module
from seqdedupe.topic.base import State
from seqdedupe.topic.operations import message_state, open_sessions, reset_producer
from seqdedupe.topic.owner import FIRST_SECONDS, LONGEST_SECONDS, KeepingAway
from seqdedupe.topic.policy import Applied
from seqdedupe.topic.readers import check_index, end_index, index_after, read_on, shown_end
from seqdedupe.topic.topic import Topic, state_again
from seqdedupe.v1 import read_pb2
from tests.log.faulty import FaultyLog, Storage
from tests.topic.publisher import FRAME_ROWS, Publisher, stored

INCARNATION = 5
LIMIT_SECONDS = LAST_RESORT_SECONDS
ENTRIES_INTERVAL = 5


class Sidecar:
    """One that has the topic, or would like to."""

    def __init__(self, storage: Storage, folder: Path, address: str, *, is_standby: bool) -> None:
        self._store = Store.open(folder)
        self.log = FaultyLog(storage, automatic=True, takes_higher_terms_only=True, excludes=True, address=address)
        snapshots = Snapshots(self._store, INCARNATION)
        self.ended: list[SeqdedupeError] = []
        self.topic = Topic(
            "persistent://public/default/t",
            self.log,
            self._store,
            snapshots,
            snapshots.load(),
            applied=Applied(deduplication_snapshot_interval_seconds=0, deduplication_entries_interval=ENTRIES_INTERVAL),
            random_bytes=os.urandom,
            is_standby=is_standby,
        )
        self.topic.connect(self.ended.append)

    async def until(self, state: State) -> None:
        await until(lambda: self.topic.state is state)

    async def until_serving(self) -> None:
        """Meanwhile somebody wants the topic."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while self.topic.state is not State.SERVING:
                with suppress(UnavailableError):
                    self.topic.check_serving()
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        if self.topic.state is not State.DRAINING:
            await self.topic.close("")
            self._store.close()


class Two:
    """Two sidecars: `one` owns the topic at first."""

    def __init__(self, folder: Path, *, are_standbys: bool = False) -> None:
        self.storage = Storage(INCARNATION)
        self.one = Sidecar(self.storage, folder / "one", "one:6680", is_standby=are_standbys)
        self.other = Sidecar(self.storage, folder / "other", "other:6680", is_standby=are_standbys)
        self.publisher = Publisher("p", lambda: (self.one.topic, self.other.topic))

    async def start(self) -> None:
        await self.one.topic.recover()
        await self.other.topic.recover()

    def know_each_other(self) -> None:
        """What one has replayed is certain, as in a topic of Pulsar's."""
        self.one.log.replays_what_is_certain = self.other.log.replays_what_is_certain = True

    async def with_frames_in_flight(self) -> "asyncio.Task[None]":
        """The owner has at least ten frames in flight, of which nothing comes by itself; their publisher goes on."""
        publishing = asyncio.ensure_future(self.publisher.publish(1000))
        await until(lambda: self.publisher.acknowledged > 20)
        self.one.log.automatic = False
        await asyncio.sleep(0)
        await until(lambda: self.one.log.in_flight >= 10)
        return publishing

    async def with_a_message_that_its_owner_does_not_know(self) -> "tuple[asyncio.Task[None], Position]":
        """A standby has read it, and the owner has frames in flight; their publisher goes on."""
        self.know_each_other()
        publishing = await self.with_frames_in_flight()
        self.one.log.store(2)
        await until(lambda: self.other.topic.readable_index == self.one.topic.confirmed_index + 2 * FRAME_ROWS)
        return publishing, await self.other.topic.position_before(self.other.topic.readable_index)

    def go_on(self) -> None:
        """The owner's log reports everything, and goes on by itself."""
        self.one.log.automatic = True
        self.one.log.settle()

    async def hand_over(self, lands: int | None) -> None:
        """The owner loses its place, and hears of it only when the other one has it, who does not know what lands."""
        await until(lambda: self.other.topic.confirmed_index == self.one.topic.confirmed_index)
        self.other.log.hears_of_more = False
        self.one.log.lose_place(lands, report=False)
        await self.other.until(State.SERVING)
        self.one.log.automatic = True
        self.one.log.report()
        self.other.log.hears_of_more = True

    async def close(self) -> None:
        await self.one.close()
        await self.other.close()


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    two = Two(tmp_path)
    await two.start()
    yield two
    await two.close()


@pytest.fixture
async def standbys(tmp_path: Path) -> AsyncIterator[Two]:
    two = Two(tmp_path, are_standbys=True)
    await two.start()
    yield two
    await two.close()


@contextmanager
def not_owner(address: str) -> Iterator[None]:
    with pytest.raises(UnavailableError, match="NOT_OWNER") as caught:
        yield
    assert caught.value.numbers.get("owner_address") == address


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while not condition():  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0)


async def follow(topic: Topic) -> None:
    """Reads for ever."""
    async for _ in read_on(topic, 0, None):
        pass


async def test_who_does_not_own_a_topic_says_who_does_and_serves_what_is_certain(two: Two) -> None:
    await two.publisher.publish(20)
    assert {(e.reason, e.numbers["owner_address"]) for e in two.publisher.heard} <= {("NOT_OWNER", "one:6680")}
    topic = two.other.topic
    assert topic.state is State.STANDBY
    with not_owner("one:6680"):
        topic.check_serving()
    with not_owner("one:6680"):
        end_index(topic)
    with not_owner("one:6680"):
        await check_index(topic, 21)
    with pytest.raises(UnavailableError, match="NOT_OWNER"):
        await message_state(topic, "p", 3)
    with pytest.raises(UnavailableError, match="NOT_OWNER"):
        await topic.keeper.snapshot()
    pages = read_on(topic, 0, None)
    while (await anext(pages)).next_index < 20:
        pass
    with pytest.raises(UnavailableError, match="NOT_OWNER"):
        await anext(pages)


async def test_an_owner_does_not_refuse_the_position_of_a_message_that_it_does_not_know_to_be_stored(
    standbys: Two,
) -> None:
    """A standby, which reads the log, has already shown it."""
    publishing, position = await standbys.with_a_message_that_its_owner_does_not_know()
    one = standbys.one.topic
    asked = [
        asyncio.ensure_future(index_after(one, position)),
        asyncio.ensure_future(index_after(one, position._replace(ownership=0, message_id=None))),
        asyncio.ensure_future(check_index(one, position.index + 1)),
    ]
    beyond = asyncio.ensure_future(check_index(one, 2000))
    await asyncio.sleep(0)
    assert not any(each.done() for each in (*asked, beyond))
    standbys.go_on()
    assert await asyncio.gather(*asked) == [position.index + 1, position.index + 1, None]
    with pytest.raises(PositionError, match="POSITION_AFTER_END"):
        await beyond
    await publishing


@pytest.fixture
def reading(standbys: Two, monkeypatch: pytest.MonkeyPatch) -> ReadService:
    """The service of `one`."""

    async def topic_of_one(*_: object) -> Topic:
        return standbys.one.topic

    monkeypatch.setattr(read_service, "find", topic_of_one)
    nothing: Any = None
    return ReadService(nothing, nothing, nothing)


async def test_the_end_is_not_before_what_a_standby_has_shown(standbys: Two, reading: ReadService) -> None:
    """By the answer, clients that read up to the end judge whether it is lost. A wait that is cancelled leaves nothing;
    what is appended after the question is not waited for."""
    publishing, position = await standbys.with_a_message_that_its_owner_does_not_know()
    log, request = standbys.one.log, read_pb2.GetLastMessageIdRequest(topic="t")
    asking = [asyncio.ensure_future(reading._get_last_message_id(request)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(one.done() for one in asking)
    asking[1].cancel()
    await asyncio.wait([asking[1]])
    then = log.in_flight
    log.report()
    await until(lambda: log.in_flight > then)
    log.settle(then - 1)
    await asyncio.sleep(0)
    assert not asking[0].done()
    log.settle(1)
    last = Position.from_proto((await asking[0]).last)
    assert log.in_flight > 0
    assert last.index >= position.index
    standbys.go_on()
    await publishing


@pytest.mark.parametrize("ends", ["moves", "fails", "closes"])
async def test_nobody_says_where_a_topic_ends_if_what_was_in_flight_has_no_outcome(standbys: Two, ends: str) -> None:
    publishing, position = await standbys.with_a_message_that_its_owner_does_not_know()
    one = standbys.one
    asking = [asyncio.ensure_future(shown_end(one.topic)), asyncio.ensure_future(index_after(one.topic, position))]
    await asyncio.sleep(0)
    if ends == "moves":
        standbys.other.log.hears_of_more = False
        one.log.lose_place(0, report=False)
        await standbys.other.until(State.SERVING)
        one.log.automatic = True
        one.log.report()
    elif ends == "fails":
        one.log.opening_allowed.clear()
        one.log.unknown(None)
        assert one.topic.state is State.RECOVERING
        one.log.automatic = True
        one.log.opening_allowed.set()
    else:
        await one.topic.close("")
    found = await asyncio.gather(*asking, return_exceptions=True)
    reason = {"moves": "RECOVERING", "fails": "RECOVERING", "closes": "DRAINING"}[ends]
    assert [getattr(e, "reason", e) for e in found] == [reason, reason]
    if ends == "closes":
        publishing.cancel()
        await asyncio.wait([publishing])
    else:
        await publishing


async def refusal(asked: Awaitable[object]) -> str:
    with pytest.raises(SeqdedupeError) as caught:
        await asked
    return caught.value.reason


@pytest.mark.parametrize("is_standby_again", [False, True])
async def test_a_former_owner_does_not_refuse_the_position_of_its_successors_message(
    standbys: Two, is_standby_again: bool
) -> None:
    """It does not know that there is one, as long as it appends nothing."""
    standbys.know_each_other()
    one, other = standbys.one, standbys.other
    await standbys.publisher.publish(20)
    one.log.lose_place(0, report=False)
    await other.until(State.SERVING)
    await Publisher("q", lambda: (other.topic,)).publish(5)
    position = await other.topic.position_before(other.topic.readable_index)
    assert one.topic.state is State.SERVING
    asked = [asyncio.ensure_future(work) for work in (index_after(one.topic, position), check_index(one.topic, 24))]
    await until(lambda: one.log.dropped == 1)
    assert not any(each.done() for each in asked)
    if not is_standby_again:
        # It has the topic again before it learns that it had lost it.
        await other.close()
    one.log.report()
    assert [await refusal(each) for each in asked] == ["RECOVERING", "RECOVERING"]
    await one.until(State.STANDBY if is_standby_again else State.SERVING)
    assert await index_after(one.topic, position) == position.index + 1
    if not is_standby_again:
        await check_index(one.topic, 24)


async def asked_beyond_the_end(standbys: Two, times: int) -> tuple[Position, list[asyncio.Task[int]]]:
    """The owner is asked so often for the same position after its end, and its proof is in flight. Returns the position
    and the calls."""
    standbys.know_each_other()
    await standbys.publisher.publish(20)
    topic, log = standbys.one.topic, standbys.one.log
    log.automatic = False
    position = topic.last_position
    beyond = Position(position.incarnation, position.message_id, position.index + 1)
    asking = [asyncio.create_task(index_after(topic, beyond)) for _ in range(times)]
    await until(lambda: log.in_flight == 1)
    return beyond, asking


async def test_nobody_waits_for_a_proof_while_the_log_cannot_be_taken_over(standbys: Two) -> None:
    """The outcome of the proof is unknown for as long as that: who asked hears that the end is not known."""
    one = standbys.one
    _, asking = await asked_beyond_the_end(standbys, 3)
    one.log.refuse_opens(10**9)
    one.log.unknown(0)
    for call in asking:
        with pytest.raises(UnavailableError, match="RECOVERING"):
            await call
    assert len(one.topic.flight) == 1  # what waits for its outcome has not settled
    one.log.refuse_opens(0)


async def test_a_topic_that_turns_out_to_be_terminated_is_read_on(standbys: Two) -> None:
    """The proof fails, because nobody may write any more. Then the end is known."""
    one = standbys.one
    beyond, [call] = await asked_beyond_the_end(standbys, 1)

    async def terminated(*_: object) -> int:
        raise error("TOPIC_TERMINATED", "an operator has done so")

    one.log.open_for_writing = terminated  # type: ignore[method-assign,assignment]
    one.log.unknown(0)
    with pytest.raises(SeqdedupeError) as caught:
        await call
    assert caught.value.reason in ("RECOVERING", "POSITION_AFTER_END")
    await one.until(State.TERMINATED)
    with pytest.raises(SeqdedupeError, match="POSITION_AFTER_END"):
        await index_after(one.topic, beyond)
    one.topic.change_state(State.DRAINING, "it ends")
    with pytest.raises(UnavailableError, match="DRAINING"):
        await shown_end(one.topic)


async def test_another_term_begins_with_one_takeover_and_without_an_end(standbys: Two) -> None:
    standbys.know_each_other()
    one = standbys.one
    await standbys.publisher.publish(20)
    opened = one.log.opened
    with pytest.raises(UnavailableError, match="RECOVERING"):
        one.topic.owner.begin_another_term()
    with pytest.raises(UnavailableError, match="RECOVERING"):
        end_index(one.topic)
    one.log.unknown(0)
    await one.until(State.SERVING)
    assert one.log.opened == opened + 1


async def test_an_owner_proves_that_it_is_one_with_few_records(standbys: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "PROVE_SECONDS", 0.2)
    standbys.know_each_other()
    topic, log, storage = standbys.one.topic, standbys.one.log, standbys.storage
    await standbys.publisher.publish(20)
    await topic.flight.all_of_now()
    log.automatic = False
    await asyncio.sleep(0)
    stored = len(storage.records)
    # All who ask before the record is written share it.
    asked = [asyncio.ensure_future(check_index(topic, index)) for index in range(21, 40)]
    await until(lambda: log.in_flight == 1)
    late = asyncio.ensure_future(check_index(topic, 21))
    await asyncio.sleep(0)
    log.settle()
    assert {await refusal(each) for each in asked} == {"POSITION_AFTER_END"}
    assert len(storage.records) == stored + 1
    # Who asks later needs another one, which is not due. What is published serves as well.
    await asyncio.sleep(0)
    assert not late.done()
    assert log.in_flight == 0
    log.automatic = True
    await Publisher("q", lambda: (topic,)).publish(1)
    assert topic.confirmed_index == 21
    await late
    assert len(storage.records) == stored + 3
    # Who reads the log goes on behind it.
    await until(lambda: standbys.other.topic.confirmed_index == 21)


async def test_who_is_shut_out_ends_what_is_under_way_and_the_other_one_goes_on(two: Two) -> None:
    await two.publisher.publish(10)
    publishing = await two.with_frames_in_flight()
    following = asyncio.ensure_future(follow(two.one.topic))
    # For the frames four are stored, of which nobody learns.
    two.one.log.lose_place(lands=4, report=False)
    await two.other.until_serving()
    two.one.log.automatic = True
    two.one.log.report()
    with pytest.raises(UnavailableError, match="NOT_OWNER"):
        await following
    assert two.one.topic.state is State.STANDBY
    assert [e.numbers["owner_address"] for e in two.one.ended] == ["other:6680"]
    assert not len(two.one.topic.flight)
    await publishing
    assert "NOT_OWNER" in {e.reason for e in two.publisher.heard}
    assert await stored(two.other.topic) == {"p": list(range(1000))}
    assert two.other.topic.term > two.one.topic.term


@pytest.mark.parametrize("lands", [0, 1])
async def test_of_a_change_that_is_under_way_nobody_is_told_that_nothing_was_done(two: Two, lands: int) -> None:
    """Or a client would make it again at the new owner, and reset a producer that was opened since once more."""
    await two.publisher.publish(10)
    two.one.log.automatic = False
    await asyncio.sleep(0)
    resetting = asyncio.ensure_future(reset_producer(two.one.topic, "p", 4))
    await until(lambda: two.one.log.in_flight == 1)
    two.one.log.lose_place(lands=lands, report=False)
    await two.other.until_serving()
    two.one.log.automatic = True
    two.one.log.report()
    with pytest.raises(OutcomeUnknownError):
        await resetting
    await two.one.until(State.STANDBY)
    number = two.other.topic.producers.number(b"p")
    assert number is not None
    assert two.other.topic.producers.numbers[number, PERSISTED] == (4 if lands else 9)
    with pytest.raises(UnavailableError, match="NOT_OWNER"):
        await reset_producer(two.one.topic, "p", 4)


async def test_a_topic_without_an_owner_is_taken_by_who_is_asked_and_by_nobody_else(two: Two) -> None:
    tried = two.other.log.opened
    await two.one.close()
    for _ in range(1000):
        await asyncio.sleep(0)
    assert two.other.log.opened == tried
    await two.other.until_serving()
    await two.publisher.publish(5)


async def test_asking_does_not_make_it_try_all_the_time(two: Two) -> None:
    tried = two.other.log.opened
    loop = asyncio.get_running_loop()
    until = loop.time() + 2 * FIRST_SECONDS
    asked = 0
    while loop.time() < until:
        with pytest.raises(UnavailableError, match="NOT_OWNER"):
            two.other.topic.check_serving()
        asked += 1
        await asyncio.sleep(0)
    assert asked > 100
    assert two.other.log.opened - tried <= 2 * FIRST_SECONDS / (FIRST_SECONDS / 2)
    assert two.one.topic.state is State.SERVING


async def test_a_standby_knows_all_that_the_owner_has_and_keeps_it(standbys: Two) -> None:
    topic = standbys.other.topic
    await standbys.publisher.publish(60)
    await open_sessions(standbys.one.topic, ["q"], None)
    await until(lambda: topic.confirmed_index == 60 and topic.producers.number(b"q") is not None)
    number = topic.producers.number(b"p")
    assert number is not None
    assert topic.producers.numbers[number, PERSISTED] == 59
    assert topic.state is State.STANDBY
    assert topic.readable_index == 60
    with not_owner("one:6680"):
        end_index(topic)
    await until(lambda: topic.keeper.snapshot_index >= 60 - 3 * ENTRIES_INTERVAL)


@pytest.mark.parametrize("lands", [0, 4, None])
async def test_a_standby_takes_over_by_itself_and_nothing_is_lost_or_doubled(standbys: Two, lands: int | None) -> None:
    publishing = await standbys.with_frames_in_flight()
    await standbys.hand_over(lands)
    await publishing
    assert standbys.one.topic.state is State.STANDBY
    # And back: the old one has learned all that came meanwhile.
    await until(lambda: standbys.one.topic.confirmed_index == 1000)
    await standbys.other.close()
    await standbys.one.until(State.SERVING)
    await standbys.publisher.publish(1010)
    assert await stored(standbys.one.topic) == {"p": list(range(1010))}


async def test_a_hand_over_that_does_not_read_up_to_its_own_marker_doubles(
    standbys: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def trusting(self: Any, replay: owner.Replay) -> tuple[int, bytes]:
        topic, token = self._topic, os.urandom(TOKEN_BYTES)
        term, settle = topic.term + 1, partial(topic.settle, topic.opening)
        while standing := await topic.log.open_for_writing(term, token, settle):
            term = standing + 1
        replay.next_index = topic.log.certain_index
        return term, token

    publishing = await standbys.with_frames_in_flight()
    monkeypatch.setattr(owner.Owner, "_marked", trusting)
    await standbys.hand_over(lands=4)
    monkeypatch.undo()
    await publishing
    ids = (await stored(standbys.other.topic))["p"]
    assert sorted(set(ids)) == list(range(1000))
    assert len(ids) == 1000 + 4 * FRAME_ROWS


async def test_a_topic_that_is_closed_does_not_wait_any_more(standbys: Two) -> None:
    await standbys.other.close()
    tried = standbys.other.log.opened
    await standbys.one.close()
    for _ in range(1000):
        await asyncio.sleep(0)
    assert standbys.other.log.opened == tried


async def test_one_that_does_not_stand_by_catches_up_now_and_then(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what it does not know would keep the log's beginning for ever."""
    topic = two.other.topic
    publisher = Publisher("p", lambda: (two.one.topic,))
    await publisher.publish(60)
    # It has begun to wait with the time as it is.
    assert (topic.confirmed_index, topic.keeper.snapshot_index) == (0, 0)
    monkeypatch.setattr(owner, "CATCH_UP_SECONDS", 0.001)
    tried = two.other.log.opened

    def is_tried_again() -> bool:
        with pytest.raises(UnavailableError, match="NOT_OWNER"):
            topic.check_serving()
        return two.other.log.opened > tried

    await until(is_tried_again)
    await until(lambda: topic.confirmed_index == 60 and topic.keeper.snapshot_index > 0)
    tried = two.other.log.opened
    await publisher.publish(120)
    await until(lambda: topic.confirmed_index == 120)
    assert topic.state is State.STANDBY
    # Nobody has asked it since.
    assert two.other.log.opened == tried


async def with_one_that_is_silent(two: Two) -> None:
    """The producer "old" has published, and does not any more; the standby's retention drops what it may."""
    await Publisher("old", lambda: (two.one.topic,)).publish(FRAME_ROWS)
    two.other.log.retention = True
    await two.publisher.publish(60)
    await until(lambda: two.other.topic.keeper.snapshot_index >= 60 - 3 * ENTRIES_INTERVAL)


async def known_from_the_log(two: Two, folder: Path) -> dict[str, int]:
    """The highest persisted IDs, for one that has nothing but what is left in the log."""
    third = Sidecar(two.storage, folder / "third", "third:6680", is_standby=True)
    await third.topic.recover()
    await until(lambda: third.topic.confirmed_index == two.one.topic.confirmed_index)
    producers = third.topic.producers
    numbers = {name.decode(): producers.number(name) for name in (b"old", b"p")}
    known = {name: int(producers.numbers[k, PERSISTED]) for name, k in numbers.items() if k is not None}
    await third.close()
    return known


async def test_a_standby_lets_nothing_go_that_is_stated_nowhere_else(standbys: Two, tmp_path: Path) -> None:
    await with_one_that_is_silent(standbys)
    await topic_module.trim(standbys.other.topic)
    assert standbys.storage.first_index == 0
    # To say it again is the owner's, who does so before it releases anything itself.
    await state_again(standbys.one.topic, 40)
    await standbys.publisher.publish(120)
    await until(lambda: standbys.other.topic.keeper.snapshot_index >= 120 - 3 * ENTRIES_INTERVAL)
    await topic_module.trim(standbys.other.topic)
    assert standbys.storage.first_index > 0
    assert await known_from_the_log(standbys, tmp_path) == {"old": FRAME_ROWS - 1, "p": 119}


async def test_a_standby_that_lets_go_of_what_its_snapshot_covers_loses_what_is_in_force(
    standbys: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def whatever_is_stated(topic: object, first_index: int) -> int:
        return first_index

    monkeypatch.setattr(topic_module, "_stated_from", whatever_is_stated)
    await with_one_that_is_silent(standbys)
    await topic_module.trim(standbys.other.topic)
    assert standbys.storage.first_index > 0
    # It would release more while the third one reads.
    await standbys.other.close()
    assert await known_from_the_log(standbys, tmp_path) == {"p": 59}


async def times_served(two: Two, until_seconds: float, most: int) -> int:
    """How often a topic was taken that everybody loses as soon as he has it."""
    loop = asyncio.get_running_loop()
    limit, times = loop.time() + until_seconds, 0
    while loop.time() < limit and times < most:
        for each in (two.one, two.other):
            if each.topic.state is State.SERVING:
                times += 1
                each.log.lose_place(report=False)
                other = two.other if each is two.one else two.one
                await until(lambda other=other: other.topic.state is State.SERVING or loop.time() >= limit)  # type: ignore[misc]
                each.log.report()
        await asyncio.sleep(0.001)
    return times


async def test_two_that_lose_a_topic_again_and_again_do_not_take_it_in_turns(
    standbys: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await times_served(standbys, 3.0, 1000) <= 12
    monkeypatch.setattr(KeepingAway, "left_seconds", 0)
    assert await times_served(standbys, LIMIT_SECONDS, 40) >= 40


def test_the_delay_grows_with_each_shut_out_and_has_a_jitter() -> None:
    now = 100.0
    noise = b"\0\0\0\0"
    away = KeepingAway(lambda: now, lambda count: noise[:count])
    assert away.left_seconds == 0
    # It never was ours: no more than the first delay, however often.
    for _ in range(20):
        away.found_owned()
        assert away.left_seconds == FIRST_SECONDS / 2
    delays = []
    for _ in range(10):
        away.serves()
        now += 1
        away.found_owned()
        delays.append(away.left_seconds)
    assert delays[:4] == [FIRST_SECONDS / 2, FIRST_SECONDS, FIRST_SECONDS * 2, FIRST_SECONDS * 4]
    assert delays[-1] == LONGEST_SECONDS / 2
    noise = b"\xff\xff\xff\xff"
    away.found_owned()
    assert FIRST_SECONDS * 0.99 < away.left_seconds < FIRST_SECONDS
    now += LONGEST_SECONDS
    assert away.left_seconds == 0
    away.serves()
    now += LONGEST_SECONDS
    away.found_owned()
    assert away.left_seconds < FIRST_SECONDS
