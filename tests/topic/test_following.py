"""Followers at the end of a topic get the same pages, take turns, and each gets every message once, in order."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from seqdedupe.errors import DamagedError
from seqdedupe.log.contract import Records
from seqdedupe.store.db import Store
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import readers
from seqdedupe.topic.readers import PAGE_BYTES, TURNS_AT_ONCE, Followers, Page, Turns, read_on
from seqdedupe.topic.topic import Topic
from tests.log.conformance import parsed
from tests.log.faulty import FaultyLog, Storage
from tests.topic.test_originals import Process
from tests.topic.test_recovery import INCARNATION, make_topic, store
from tests.topic.test_recovery import publish as publish_unsettled
from tests.topic.test_skip_damaged import damage

__all__ = ["store"]

WAIT_SECONDS = LAST_RESORT_SECONDS
ROWS = 3
FOLLOWERS = 20


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[Process]:
    process = Process(tmp_path)
    await process.start()
    await process.open("a")
    yield process
    await process.stop()


async def publish(process: Process, commits: int = 1, rows: int = ROWS) -> None:
    for _ in range(commits):
        first = process.last["a"] + 1
        await process.publish([("a", i) for i in range(first, first + rows)])


def sharing(encodings: list[Page] | None = None) -> Followers:
    """What followers share; `encodings` gets the pages that were encoded."""

    def encode(_: Topic, page: Page) -> bytes:
        if encodings is not None:
            encodings.append(page)
        return b"".join((page.records, b"end"))

    return Followers(encode)


class Follower:
    """Reads on in a task, and keeps what it was given: each message must be the next one."""

    def __init__(
        self,
        topic: Topic,
        shared: Followers | None,
        start: int,
        stop: int | None = None,
        room: Callable[[int], Awaitable[int]] | None = None,
        *,
        skip: bool = False,
    ) -> None:
        self.next_index, self.stop_index = start, stop
        self.pages: list[Page] = []
        self.skipped: list[range] = []
        self._news = asyncio.Event()
        options = {} if room is None else {"room": room}
        self._read = read_on(topic, start, stop, skip_damaged=skip, followers=shared, **options)
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        async for page in self._read:
            self.pages.append(page)
            if page.encoded:
                assert page.encoded == bytes(page.records) + b"end"
            if page.skipped:
                self.skipped.append(page.skipped)
                self.next_index = page.skipped.stop
            for record in parsed(page.records):
                assert record.base_index == self.next_index
                assert list(record.batch.sequence_ids) == list(
                    range(record.base_index, record.base_index + record.rows)
                )
                self.next_index += record.rows
            assert self.next_index == page.next_index
            self._news.set()

    async def has(self, index: int) -> None:
        """Returns when it has all messages below that index; raises what it failed with."""
        async with asyncio.timeout(WAIT_SECONDS):
            while self.next_index < index:
                if self.task.done():
                    self.task.result()
                    pytest.fail(f"it ended at {self.next_index}")
                news = asyncio.ensure_future(self._news.wait())
                await asyncio.wait({news, self.task}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                self._news.clear()

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})
        if not self.task.cancelled():
            self.task.result()


class Reads:
    """Stands before a log's `read`: counts, and holds those back that it is asked to."""

    def __init__(self, process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        self.began = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.before: Callable[[], None] = lambda: None
        really = process.topic.log.read

        async def read(from_index: int, *others: int) -> Records:
            self.asked.append(from_index)
            self.began.set()
            await self.may_go_on.wait()
            self.before()
            return await really(from_index, *others)

        monkeypatch.setattr(process.topic.log, "read", read)


@pytest.mark.parametrize("shares", [True, False])
async def test_each_commit_is_read_and_encoded_once_for_all(
    process: Process, monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    reads = Reads(process, monkeypatch)
    encodings: list[Page] = []
    shared = sharing(encodings) if shares else None
    followers = [Follower(process.topic, shared, 0) for _ in range(FOLLOWERS)]
    commits = 4
    for k in range(commits):
        await publish(process)
        await asyncio.gather(*(follower.has((k + 1) * ROWS) for follower in followers))
    # The control: without it, each reads for itself.
    assert len(reads.asked) == (commits if shares else commits * FOLLOWERS)
    assert len(encodings) == (commits if shares else 0)
    for k in range(commits):
        assert len({id(follower.pages[k].records) for follower in followers}) == (1 if shares else FOLLOWERS)
    for follower in followers:
        await follower.leave()


async def test_those_who_come_at_other_places_soon_get_the_same_pages(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(process, 4)
    shared = sharing()
    # Within batches, at the beginning, and at the end.
    followers = [Follower(process.topic, shared, start) for start in (0, 1, 5, 6, 11, 12)]
    for commit in (5, 6):
        await publish(process)
        await asyncio.gather(*(follower.has(commit * ROWS) for follower in followers))
    reads = Reads(process, monkeypatch)
    await publish(process)
    await asyncio.gather(*(follower.has(7 * ROWS) for follower in followers))
    assert len(reads.asked) == 1
    for follower in followers:
        await follower.leave()


async def test_a_topic_that_was_opened_anew_has_pages_of_its_own(process: Process, tmp_path: Path) -> None:
    """Its log may have been restored meanwhile: the same incarnation and indexes, and other messages."""
    other = Process(tmp_path / "restored")
    await other.start()
    await other.open("b")
    assert other.topic.incarnation == process.topic.incarnation
    shared = sharing()
    for one, name in ((process, "a"), (other, "b")):
        await one.publish([(name, i) for i in range(ROWS)])
        page = await shared.page(one.topic, 0, ROWS, PAGE_BYTES)
        assert page is not None
        assert [record.batch.producer_names for record in parsed(page.records)] == [name.encode()]
    await other.stop()


class LastPage(Followers):
    """A planted bug: anyone who is at the end gets the newest page, wherever it was."""

    last: Page | None = None

    async def page(self, topic: Topic, from_index: int, stop_index: int, max_bytes: int) -> Page | None:
        self.last = self.last or await super().page(topic, from_index, stop_index, max_bytes)
        return self.last


async def test_the_control_a_page_for_another_place_is_noticed(process: Process) -> None:
    shared = LastPage(lambda _, page: b"".join((page.records, b"end")))
    follower = Follower(process.topic, shared, 0)
    await publish(process)
    await follower.has(ROWS)
    await publish(process)
    with pytest.raises(AssertionError):
        await follower.has(2 * ROWS)


@pytest.mark.parametrize("seed", range(6))
async def test_each_gets_every_message_once_in_order_whoever_comes_goes_and_lags(process: Process, seed: int) -> None:
    rng = random.Random(seed)
    shared = sharing()
    open_ones: list[Follower] = []

    def join() -> Follower:
        end = process.topic.readable_index
        start = rng.choice((0, end, rng.randint(0, end)))
        stop = rng.choice((None, None, start + rng.randint(1, 30)))
        is_slow, sizes = rng.random() < 0.3, rng.choice(((1, 200), (1, 1_000_000), (1_000_000, 1_000_000)))
        # One of its own: rooms are asked for in no certain order.
        own = random.Random(rng.random())

        async def room(least: int) -> int:
            for _ in range(own.randint(0, 60) if is_slow else 0):
                await asyncio.sleep(0)
            return max(least, own.randint(*sizes))

        return Follower(process.topic, shared, start, stop, room)

    left = 0
    for _ in range(80):
        await publish(process, rows=rng.randint(1, 5))
        open_ones += [join() for _ in range(rng.randint(0, 2))]
        if open_ones and rng.random() < 0.4:
            await open_ones.pop(rng.randrange(len(open_ones))).leave()
            left += 1
        for _ in range(rng.randint(0, 10)):
            await asyncio.sleep(0)
    # Those whose stop is after the end get there, too.
    await publish(process, rows=40)
    assert left > 5
    assert len(open_ones) > 5
    end = process.topic.readable_index
    for follower in open_ones:
        goal = end if follower.stop_index is None else follower.stop_index
        await follower.has(goal)
        assert follower.next_index == goal
        await follower.leave()


async def test_what_is_not_confirmed_is_shown_to_nobody(store: Store) -> None:
    log = FaultyLog(Storage(INCARNATION))
    topic = make_topic(store, log)
    await topic.recover()
    shared = sharing()
    followers = [Follower(topic, shared, 0) for _ in range(3)]
    await publish_unsettled(topic, *range(3))
    log.settle(1)
    for follower in followers:
        await follower.has(1)
    # The others are in the log, too, and nobody has said so.
    log.store()
    for _ in range(50):
        await asyncio.sleep(0)
    assert [follower.next_index for follower in followers] == [1] * 3
    log.report()
    for follower in followers:
        await follower.has(3)
        await follower.leave()
    await topic.close("")


async def test_whoever_goes_away_while_it_reads_for_all_takes_nobody_along(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(process, monkeypatch)
    shared = sharing()
    reads.may_go_on.clear()
    reading = [asyncio.ensure_future(shared.page(process.topic, 0, ROWS, PAGE_BYTES))]
    await publish(process)
    await reads.began.wait()
    reading += [asyncio.ensure_future(shared.page(process.topic, 0, ROWS, PAGE_BYTES)) for _ in range(2)]
    await asyncio.sleep(0)
    # One that waits for the page, then the one that reads it.
    for gone in (reading[1], reading[0]):
        gone.cancel()
        await asyncio.wait({gone})
        assert gone.cancelled()
    reads.may_go_on.set()
    assert await asyncio.wait_for(reading[2], WAIT_SECONDS) is None, "each reads for itself"
    followers = [Follower(process.topic, shared, ROWS) for _ in range(3)]
    await publish(process)
    await asyncio.gather(*(follower.has(2 * ROWS) for follower in followers))
    for follower in followers:
        await follower.leave()


async def test_one_that_has_no_room_holds_up_nobody(process: Process) -> None:
    shared = sharing()
    never: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def no_room(_: int) -> int:
        return await asyncio.shield(never)

    stuck = [Follower(process.topic, shared, 0, room=no_room) for _ in range(TURNS_AT_ONCE + 1)]
    others = [Follower(process.topic, shared, 0) for _ in range(3)]
    for k in range(5):
        await publish(process)
        await asyncio.gather(*(follower.has((k + 1) * ROWS) for follower in others))
    assert not any(follower.pages for follower in stuck)
    never.set_result(1_000_000)
    await publish(process)
    for follower in stuck + others:
        await follower.has(6 * ROWS)
        await follower.leave()


async def test_a_page_that_is_larger_than_the_room_is_read_alone(process: Process) -> None:
    shared = sharing()

    async def little(least: int) -> int:
        return max(1, least)

    small, large = Follower(process.topic, shared, 0, room=little), Follower(process.topic, shared, 0)
    await publish(process)
    await asyncio.gather(small.has(ROWS), large.has(ROWS))
    assert small.pages[0].encoded is not large.pages[0].encoded
    for follower in (small, large):
        await follower.leave()


async def test_each_stops_where_it_was_to_stop(process: Process) -> None:
    shared = sharing()
    stops = [1, 2, 3, 4, 5, 5, 6]
    followers = [Follower(process.topic, shared, 0, stop) for stop in stops]
    goes_on = Follower(process.topic, shared, 0)
    for _ in range(2):
        await publish(process)
    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.gather(*(follower.task for follower in followers))
    assert [follower.next_index for follower in followers] == stops
    await goes_on.has(2 * ROWS)
    await goes_on.leave()


async def test_each_hears_of_damage_at_the_end(
    process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(process, rows=10)
    shared = sharing()
    reads = Reads(process, monkeypatch)

    def damage_once() -> None:
        reads.before = lambda: None
        damage(tmp_path, 10)

    reads.before = damage_once
    plain = [Follower(process.topic, shared, 10) for _ in range(3)]
    skipping = [Follower(process.topic, shared, 10, skip=True) for _ in range(3)]
    await publish(process, rows=10)
    for follower in plain:
        with pytest.raises(DamagedError) as caught:
            await follower.has(20)
        assert "skip_damaged" in caught.value.hint
    await asyncio.gather(*(follower.has(20) for follower in skipping))
    assert [follower.skipped for follower in skipping] == [[range(10, 20)]] * 3
    await publish(process, rows=10)
    for follower in skipping:
        await follower.has(30)
        assert follower.skipped == [range(10, 20)]
        await follower.leave()


NEVER_SECONDS = 1e6


async def test_those_who_wait_for_their_turn_when_the_topic_closes_end(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with what is wrong with a log that is gone by then."""
    monkeypatch.setattr(readers, "TURN_SECONDS", NEVER_SECONDS)
    shared = sharing()
    followers = [Follower(process.topic, shared, 0) for _ in range(TURNS_AT_ONCE + 3)]
    await asyncio.sleep(0)
    await publish(process)
    await asyncio.gather(*(follower.has(ROWS) for follower in followers[:TURNS_AT_ONCE]))
    late = followers[TURNS_AT_ONCE:]
    assert [follower.next_index for follower in late] == [0, 0, 0]
    await process.topic.delete()
    for _ in late:
        shared.turns._go_on()
    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.gather(*(follower.task for follower in followers))
    assert [follower.next_index for follower in late] == [0, 0, 0]


async def test_turns_are_taken_in_order_a_few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "TURN_SECONDS", NEVER_SECONDS)
    turns = Turns()
    went: list[int] = []

    async def take(k: int) -> None:
        await turns.take()
        went.append(k)

    async def settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    count = 4 * TURNS_AT_ONCE - 1
    tasks = [asyncio.ensure_future(take(k)) for k in range(count)]
    await settle()
    assert went == list(range(TURNS_AT_ONCE))
    # One that goes away takes no turn.
    gone = TURNS_AT_ONCE
    tasks[gone].cancel()
    await settle()
    expected = [k for k in range(count) if k != gone]
    for done in range(2, 5):
        turns._go_on()
        await settle()
        assert went == expected[: done * TURNS_AT_ONCE]
    assert went == expected


async def goes_on_after_two_who_leave(monkeypatch: pytest.MonkeyPatch) -> bool:
    """They leave in the very step of the event loop in which it was their turn."""
    timers: list[Callable[[], None]] = []
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda _, function: timers.append(function))
    turns = Turns()
    for _ in range(TURNS_AT_ONCE):
        await turns.take()
    tasks = [asyncio.ensure_future(turns.take()) for _ in range(TURNS_AT_ONCE + 1)]
    await asyncio.sleep(0)
    *leaving, last = tasks
    for one in leaving:
        one.cancel()
    while timers:
        timers.pop()()
    await asyncio.wait(leaving)
    for _ in range(5):
        await asyncio.sleep(0)
        while timers:
            timers.pop()()
    has_gone_on = last.done()
    last.cancel()
    await asyncio.wait({last})
    return has_gone_on


async def test_who_leaves_at_its_turn_keeps_it_from_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await goes_on_after_two_who_leave(monkeypatch)


async def test_control_a_turn_that_is_given_to_who_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def go_on(self: Turns) -> None:
        self._left = TURNS_AT_ONCE
        for turn in list(self._waiting)[:TURNS_AT_ONCE]:
            del self._waiting[turn]
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        if self._left < TURNS_AT_ONCE:
            asyncio.get_running_loop().call_later(readers.TURN_SECONDS, self._go_on)

    monkeypatch.setattr(Turns, "_go_on", go_on)
    assert not await goes_on_after_two_who_leave(monkeypatch)


async def test_time_brings_the_next_turns() -> None:
    turns = Turns()
    async with asyncio.timeout(WAIT_SECONDS):
        for _ in range(3):
            await asyncio.gather(*(turns.take() for _ in range(3 * TURNS_AT_ONCE)))
