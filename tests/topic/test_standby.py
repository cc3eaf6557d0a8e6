"""Two sidecars and one log: who does not own it says so, nothing is lost or doubled, and nobody fights for it."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from seqdedupe.core.rule import PERSISTED
from seqdedupe.errors import OutcomeUnknownError, SeqdedupeError, UnavailableError
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic.keeping_away import FIRST_SECONDS, LONGEST_SECONDS, KeepingAway
from seqdedupe.topic.operating import message_state, reset_producer
from seqdedupe.topic.policy import Applied
from seqdedupe.topic.publishing import Topic
from seqdedupe.topic.reading import check_index, end_index, read_on
from seqdedupe.topic.state import State
from tests.log.faulty import FaultyLog, Storage
from tests.topic.publisher import Publisher, stored

INCARNATION = 5
LIMIT_SECONDS = 30


class Sidecar:
    """One that has the topic, or would like to."""

    def __init__(self, storage: Storage, folder: Path, address: str) -> None:
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
            applied=Applied(deduplication_snapshot_interval_seconds=0),
            random_bytes=os.urandom,
        )
        self.topic.connect(self.ended.append)

    async def until(self, state: State) -> None:
        """Meanwhile somebody wants the topic."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while self.topic.state is not state:
                with suppress(UnavailableError):
                    self.topic.check_serving()
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        await self.topic.close("")
        self._store.close()


class Two:
    """Two sidecars: `one` owns the topic at first."""

    def __init__(self, folder: Path) -> None:
        self.storage = Storage(INCARNATION)
        self.one = Sidecar(self.storage, folder / "one", "one:6680")
        self.other = Sidecar(self.storage, folder / "other", "other:6680")
        self.publisher = Publisher("p", lambda: (self.one.topic, self.other.topic))


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    two = Two(tmp_path)
    await two.one.topic.recover()
    await two.other.topic.recover()
    yield two
    await two.one.close()
    await two.other.close()


def not_owner(call: Callable[[], object], address: str) -> None:
    with pytest.raises(UnavailableError, match="NOT_OWNER") as caught:
        call()
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
    not_owner(topic.check_serving, "one:6680")
    not_owner(lambda: end_index(topic), "one:6680")
    not_owner(lambda: check_index(topic, 21), "one:6680")
    with pytest.raises(UnavailableError, match="NOT_OWNER"):
        await message_state(topic, "p", 3)
    with pytest.raises(UnavailableError, match="NOT_OWNER"):
        await topic.snapshot()
    pages = read_on(topic, 0, None)
    while (await anext(pages)).next_index < 20:
        pass
    with pytest.raises(UnavailableError, match="NOT_OWNER"):
        await anext(pages)


async def test_who_is_shut_out_ends_what_is_under_way_and_the_other_one_goes_on(two: Two) -> None:
    await two.publisher.publish(10)
    publishing = asyncio.ensure_future(two.publisher.publish(1000))
    await until(lambda: two.publisher.acknowledged > 20)
    two.one.log.automatic = False
    await asyncio.sleep(0)
    await until(lambda: two.one.log.in_flight >= 10)
    following = asyncio.ensure_future(follow(two.one.topic))
    # Of the frames four are stored, of which nobody is told.
    two.one.log.lose_place(lands=4, report=False)
    await two.other.until(State.SERVING)
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
    await two.other.until(State.SERVING)
    two.one.log.automatic = True
    two.one.log.report()
    if lands:
        assert await resetting == 9
    else:
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
    await two.other.until(State.SERVING)
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
