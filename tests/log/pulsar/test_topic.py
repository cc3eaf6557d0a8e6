"""A topic on the log over a Pulsar topic in memory: it takes over, no matter who was there, and settles what is
unknown."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Container, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from seqdedupe.entry_properties import CONTROL, KIND, MARKER
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.contract import Entries, Log, LogName
from seqdedupe.log.pulsar import log as log_module
from seqdedupe.log.pulsar.entries import EntryFormat
from seqdedupe.store.db import Store
from seqdedupe.store.parts import LogKind, TopicRecord, TopicState
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import listing, owner
from seqdedupe.topic.base import State
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.listing import Fetching
from seqdedupe.topic.lives import PublishedTopics
from seqdedupe.topic.operations import open_sessions
from seqdedupe.topic.policy import Applied
from seqdedupe.topic.readers import end_index, read_page
from seqdedupe.topic.registry import Closed
from seqdedupe.topic.topic import Topic
from seqdedupe.transfer.topic_state import saved
from tests.batches import batch
from tests.log.conformance import Owner, parsed
from tests.log.pulsar.test_log import BOTH, TOPIC, StandInHarness
from tests.log.pulsar.topics import INCARNATION, marker, stock

LIMIT_SECONDS = LAST_RESORT_SECONDS


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "store")
    yield store
    store.close()


async def recovered(harness: StandInHarness, store: Store) -> Topic:
    snapshots = Snapshots(store, INCARNATION)
    applied = Applied(deduplication_snapshot_interval_seconds=0)
    loaded = snapshots.load()
    log = await harness.open(loaded.next_index, loaded.opaque) if loaded else await harness.open()
    topic = Topic(log.place, log, store, snapshots, loaded, applied=applied, random_bytes=os.urandom)
    await topic.recover()
    assert topic.state is State.SERVING
    return topic


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while not condition():  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.001)


async def publish(topic: Topic, *ids: int, payload: bytes = b"") -> list[FrameReceipt | Refusal]:
    """One frame each; their answers, as they come."""
    opened = await open_sessions(topic, ["p"], None)
    answers: list[FrameReceipt | Refusal] = []
    link = opened.persisted[0]
    for sequence_id in ids:
        made = batch([("p", sequence_id)], epochs={"p": opened.epochs[0]}, links={"p": link}, payloads=[payload])
        encoded = made.encode()
        link = sequence_id
        topic.admit(encoded, sequence_id, answers.append, NumbersCache())
    return answers


@BOTH
async def test_a_topic_goes_on_from_its_snapshot_in_a_higher_term(entry_format: EntryFormat, store: Store) -> None:
    harness = StandInHarness(entry_format)
    topic = await recovered(harness, store)
    answers = await publish(topic, 1, 2, 3)
    await topic.flight.all_of_now()
    await topic.keeper.snapshot()
    answers += await publish(topic, 4, 5)
    await topic.flight.all_of_now()
    assert [type(answer) for answer in answers] == [FrameReceipt] * 3
    await topic.close("")
    # Another one had it meanwhile, of whom nobody here knows.
    harness.topic.add(marker(7, "other"))
    topic = await recovered(harness, store)
    assert (topic.term, end_index(topic)) == (8, 5)
    assert (await open_sessions(topic, ["p"], None)).persisted == [5]
    await topic.close("")


@BOTH
async def test_what_is_unknown_settles(entry_format: EntryFormat, store: Store) -> None:
    harness = StandInHarness(entry_format)
    topic = await recovered(harness, store)
    left = 4
    lost = asyncio.Event()

    def fail(_: object) -> None:
        nonlocal left
        left -= 1
        if left < 0 and not lost.is_set():
            harness.client.refuses = True
            lost.set()

    harness.client.before = fail
    answers = await publish(topic, 1, 2, 3, 4, 5)
    await lost.wait()
    await until(lambda: topic.state is not State.SERVING)
    harness.client.refuses = False
    await until(lambda: topic.state is State.SERVING and len(answers) == 5)
    stored = [answer for answer in answers if isinstance(answer, FrameReceipt)]
    assert 0 < len(stored) < 5
    assert end_index(topic) == len(stored)
    persisted = (await open_sessions(topic, ["p"], None)).persisted
    assert persisted == [len(stored)]
    await topic.close("")


async def test_a_crash_around_a_snapshot_and_the_move_of_the_subscription_loses_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two of its steps, with a broker that keeps nothing else."""
    monkeypatch.setattr(log_module, "MOVE_SECONDS", 0)
    harness = StandInHarness(EntryFormat.PLAIN)
    end = 0
    for turns in range(40):
        topic = await recovered(harness, store)
        assert end_index(topic) == end
        await publish(topic, *range(end, end + 12), payload=b"x" * 30_000)
        end += 12
        await topic.flight.all_of_now()
        snapshot = asyncio.ensure_future(topic.keeper.snapshot_in_background())
        if turns % 5 == 4:
            harness.admin.answers = False
        if turns % 4:
            await snapshot
        for _ in range(turns // 2):
            await asyncio.sleep(0)
        await topic.close("")
        await snapshot
        harness.admin.answers = True
        harness.topic.roll_over()
        harness.topic.retain_nothing()
    topic = await recovered(harness, store)
    assert (await open_sessions(topic, ["p"], None)).persisted == [end - 1]
    first = topic.first_index
    assert end - 200 < first < end, "nothing was trimmed, or too much"
    at, ids = first, []
    while at < end:
        page = await read_page(topic, at, end, 100_000)
        ids += [i for record in parsed(page.records) for i in record.batch.sequence_ids]
        at = page.next_index
    assert ids == list(range(first, end))
    await topic.close("")


def controls(harness: StandInHarness) -> int:
    """How many control records stand in the topic."""
    return sum(entry.message.properties.get(KIND) == CONTROL for entry in harness.topic.entries)


@BOTH
@pytest.mark.parametrize("crashes", [False, True])
async def test_the_first_owner_states_who_published_before(
    entry_format: EntryFormat, crashes: bool, tmp_path: Path, store: Store
) -> None:
    harness = StandInHarness(entry_format)
    for name, sequence_id in (("p", 3), ("p", 8), ("q", 5), ("\x01", 1)):
        harness.topic.add(stock(), name, sequence_id)
    if crashes:
        # The owner is gone before it could say anything but that it is one.
        log = await harness.open()
        await Owner(log, 1).open()
        await log.close()
    topic = await recovered(harness, store)
    assert topic.skipped.earlier == 4
    answers = await publish(topic, 9, 10)
    await topic.flight.all_of_now()
    assert [type(answer) for answer in answers] == [FrameReceipt] * 2
    await topic.close("")
    other = Store.open(tmp_path / "of-another-one")
    stated = controls(harness)
    topic = await recovered(harness, other)
    await topic.flight.all_of_now()
    assert controls(harness) == stated
    assert (await open_sessions(topic, ["p", "q", "r"], None)).persisted == [10, 5, -1]
    await topic.close("")
    other.close()


class StandInLogs:
    """Satisfies `seqdedupe.log.contract.Logs`: of one topic."""

    def __init__(self, harness: StandInHarness) -> None:
        self._harness = harness

    async def create(self, *_: object) -> None:
        """It is there."""

    async def open(self, _: int, covered_index: int, secret: bytes | None = None, place: bytes = b"") -> Log:
        return await self._harness.open(covered_index, place)

    async def list(self, without: Container[str] = ()) -> list[LogName]:
        return [LogName(INCARNATION, TOPIC)]

    async def take_over(self, *_: object) -> None: ...

    async def announce(self, whole: str) -> None: ...

    async def delete(self, *incarnations: int) -> None: ...

    async def close(self) -> None: ...


async def sidecar(harness: StandInHarness, store: Store, *, is_standby: bool = False) -> Topics[Topic]:
    """One that knows of the topic, and has begun."""
    await store.put_topics(TopicRecord(TOPIC, INCARNATION, TopicState.ACTIVE, log=LogKind.PULSAR))
    topics = Topics(
        store,
        lambda told: PublishedTopics(
            store, StandInLogs(harness), log=LogKind.PULSAR, on_state=told, stands_by=lambda topic: is_standby
        ),
        max_topics=1,
        allow_auto_topic_creation=False,
        on_state=lambda name, state: None,
    )
    await topics.open_all()
    await topics.recover_all()
    return topics


async def trimmed(harness: StandInHarness, store: Store, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """For the topic's 60 messages the first are gone; the snapshot of anyone who had it, who is gone too."""
    monkeypatch.setattr(log_module, "MOVE_SECONDS", 0)
    one = await sidecar(harness, store)
    for first in (0, 20, 40):
        await publish(one.get(TOPIC), *range(first, first + 20), payload=b"x" * 30_000)
        await one.get(TOPIC).keeper.snapshot()
        harness.topic.roll_over()
    await until(lambda: harness.topic.kept_from is not None)
    snapshot = saved(one.get(TOPIC))
    await one.drain()
    harness.topic.retain_nothing()
    assert len(harness.topic.entries) < 60
    return snapshot


async def without_state(harness: StandInHarness, store: Store) -> Topics[Topic]:
    """One whose store knows nothing of the topic."""
    two = await sidecar(harness, store)
    await until(lambda: two.look_at(TOPIC).state is State.DAMAGED)
    return two


async def test_a_sidecar_without_state_takes_nothing_until_a_snapshot_is_imported(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = StandInHarness(EntryFormat.PLAIN)
    snapshot = await trimmed(harness, store, monkeypatch)
    there = len(harness.topic.entries)
    with closing(Store.open(tmp_path / "of-another-one")) as other:
        two = await without_state(harness, other)
        with pytest.raises(SeqdedupeError, match="NO_STATE") as caught:
            two.get(TOPIC)
        assert "import" in caught.value.hint
        assert len(harness.topic.entries) == there
        topic = await listing.renew(two, TOPIC, INCARNATION, snapshot)
        assert isinstance(topic, Topic)
        assert topic.state is State.SERVING
        assert (await open_sessions(topic, ["p"], None)).persisted == [59]
        assert end_index(topic) == 60
        await two.drain()


class Elsewhere:
    """The other sidecars of the cluster, as `Fetching` has to do with them."""

    def __init__(self, snapshot: Loaded) -> None:
        self.owner = "owner:6680"
        self.incarnation = INCARNATION
        self.snapshot = snapshot
        self.failure: Exception | None = None
        self.tries = 0

    async def owner_of(self, topic: str) -> str:
        assert topic == TOPIC
        self.tries += 1
        return self.owner

    async def snapshot_of(self, address: str, topic: str) -> tuple[int, Loaded]:
        assert (address, topic) == ("owner:6680", TOPIC)
        if self.failure is not None:
            raise self.failure
        return self.incarnation, self.snapshot


def no_owner(elsewhere: Elsewhere) -> None:
    elsewhere.owner = ""


def owner_that_is_away(elsewhere: Elsewhere) -> None:
    elsewhere.failure = error("UNREACHABLE", "no connection to the sidecar at owner:6680")


def owner_that_nobody_understands(elsewhere: Elsewhere) -> None:
    elsewhere.failure = RuntimeError("a defect")


def snapshot_of_another_topic(elsewhere: Elsewhere) -> None:
    elsewhere.incarnation += 1


def snapshot_of_another_history(elsewhere: Elsewhere) -> None:
    elsewhere.snapshot = replace(elsewhere.snapshot, ownership=elsewhere.snapshot.ownership + 1)


def snapshot_that_is_too_old(elsewhere: Elsewhere) -> None:
    elsewhere.snapshot = replace(elsewhere.snapshot, next_index=1)


@pytest.mark.parametrize(
    ("what_is_wrong", "why"),
    [
        (no_owner, "nobody owns it"),
        (owner_that_is_away, "no connection"),
        (owner_that_nobody_understands, "a defect"),
        (snapshot_of_another_topic, "the snapshot is of the incarnation"),
        (snapshot_of_another_history, "has another message"),
        (snapshot_that_is_too_old, "the snapshot goes up to index 0"),
    ],
)
async def test_a_sidecar_without_state_fetches_that_of_the_owner_and_takes_nothing_before(
    what_is_wrong: Callable[[Elsewhere], None],
    why: str,
    tmp_path: Path,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listing, "FETCH_SECONDS", 0.01)
    harness = StandInHarness(EntryFormat.PLAIN)
    snapshot = await trimmed(harness, store, monkeypatch)
    elsewhere = Elsewhere(snapshot)
    what_is_wrong(elsewhere)
    there = len(harness.topic.entries)
    with closing(Store.open(tmp_path / "of-another-one")) as other:
        two = await without_state(harness, other)
        two.in_background(Fetching(two, elsewhere.owner_of, elsewhere.snapshot_of).run())
        await until(lambda: elsewhere.tries > 3)
        closed = two.look_at(TOPIC)
        assert isinstance(closed, Closed)
        assert (closed.state, closed.told.reason) == (State.DAMAGED, "NO_STATE")
        assert why in closed.told.message
        # Who asks is sent to anyone who knows more, if there is one.
        with pytest.raises(SeqdedupeError) as caught:
            two.get(TOPIC)
        assert caught.value.reason == ("NOT_OWNER" if elsewhere.owner else "NO_STATE")
        assert caught.value.numbers.get("owner_address", "") == elsewhere.owner
        assert len(harness.topic.entries) == there

        elsewhere.__dict__ |= Elsewhere(snapshot).__dict__
        await until(lambda: two.look_at(TOPIC).state is State.SERVING)
        tries = elsewhere.tries
        assert (await open_sessions(two.get(TOPIC), ["p"], None)).persisted == [59]
        await asyncio.sleep(0.1)
        assert elsewhere.tries == tries
        await two.drain()


@pytest.mark.parametrize("is_standby", [True, False])
async def test_a_standby_whose_subscription_was_removed_fetches_the_owners_snapshot(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, is_standby: bool
) -> None:
    """While there is an owner, and for good: what is missing is no damage, for the owner has read it."""
    monkeypatch.setattr(log_module, "MOVE_SECONDS", 0)
    monkeypatch.setattr(listing, "FETCH_SECONDS", 0.01)
    monkeypatch.setattr(owner, "CATCH_UP_SECONDS", 0.01)
    harness = StandInHarness(EntryFormat.PLAIN)
    one = await sidecar(harness, store)
    await publish(one.get(TOPIC), *range(20), payload=b"x" * 30_000)
    with closing(Store.open(tmp_path / "of-another-one")) as other:
        two = await sidecar(harness, other, is_standby=is_standby)
        behind = two.get(TOPIC)
        await until(lambda: behind.confirmed_index == 20)
        with monkeypatch.context() as stopped:
            # It reads nothing for a while, as one that is frozen.
            reading = asyncio.Event()
            stopped.setattr(behind.log, "replay", lambda _: reads_when(reading, behind.log))
            stopped.setattr(behind.log, "wait_for_more", reading.wait)
            for first in (20, 40, 60):
                harness.topic.roll_over()
                await publish(one.get(TOPIC), *range(first, first + 20), payload=b"x" * 30_000)
                await one.get(TOPIC).flight.all_of_now()
            _, unread, *_ = sorted({entry.message_id.ledger_id for entry in harness.topic.entries})
            while harness.topic.kept_from is None or harness.topic.kept_from.ledger_id <= unread:
                await one.get(TOPIC).keeper.snapshot()
            harness.topic.retain_nothing()
        markers = markers_in(harness)
        elsewhere = Elsewhere(saved(one.get(TOPIC)))
        reading.set()
        await until(lambda: behind.state is State.DAMAGED)
        with pytest.raises(SeqdedupeError, match="NO_STATE"):
            behind.check_serving()
        two.in_background(Fetching(two, elsewhere.owner_of, elsewhere.snapshot_of).run())
        await until(lambda: two.look_at(TOPIC) is not behind and two.look_at(TOPIC).state is State.STANDBY)
        assert markers_in(harness) == markers
        await publish(one.get(TOPIC), 80)
        await until(lambda: two.get(TOPIC).confirmed_index == 81)
        await two.drain()
        await one.drain()


def markers_in(harness: StandInHarness) -> int:
    return sum(entry.message.properties.get(KIND) == MARKER for entry in harness.topic.entries)


async def reads_when(reading: asyncio.Event, log: Log) -> AsyncGenerator[Entries, None]:
    await reading.wait()
    async for entries in type(log).replay(log, log.certain_index):
        yield entries


async def test_a_terminated_topic_takes_nothing_more_and_gives_all_it_has(store: Store) -> None:
    harness = StandInHarness(EntryFormat.PLAIN)
    topic = await recovered(harness, store)
    epoch = (await open_sessions(topic, ["p"], None)).epochs[0]
    answers: list[FrameReceipt | Refusal] = []

    def send(sequence_id: int) -> None:
        link = sequence_id - 1 if sequence_id else -1
        frame = batch([("p", sequence_id)], epochs={"p": epoch}, links={"p": link}).encode()
        topic.admit(frame, sequence_id, answers.append, NumbersCache())

    send(0)
    await until(lambda: len(answers) == 1)
    harness.topic.is_terminated = True
    send(1)
    await until(lambda: len(answers) == 2 and topic.state is State.TERMINATED)
    stored, refused = answers
    assert isinstance(stored, FrameReceipt)
    assert isinstance(refused, Refusal)
    assert refused.error.reason == "TOPIC_TERMINATED"
    for check in (topic.check_serving, topic.check_may_go_on):
        with pytest.raises(SeqdedupeError, match="TOPIC_TERMINATED"):
            check()
    assert topic.knows_its_end
    assert topic.confirmed_index == 1
    assert len(parsed((await read_page(topic, 0, 1, 1000)).records)) == 1
    await topic.wait_for_message(5)
    await topic.close("")
    # Another sidecar, or this one after a start, comes to the same.
    again = Topic(
        TOPIC, await harness.open(), store, Snapshots(store, INCARNATION), None,
        applied=Applied(deduplication_snapshot_interval_seconds=0), random_bytes=os.urandom,
    )  # fmt: skip
    await again.recover()
    assert (again.state, again.confirmed_index) == (State.TERMINATED, 1)
    await again.close("")
