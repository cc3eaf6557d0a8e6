"""What is set for topics, namespaces and the sidecar, and what is in force of it."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.errors import InvalidRequestError, SeqdedupeError, UnavailableError, error
from seqdedupe.limits import Retention
from seqdedupe.store.db import Store
from seqdedupe.store.parts import LogKind
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic.directory import Namespaces
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.operations import open_sessions
from seqdedupe.topic.policy import LEAST, MOST, NAMES, WINDOW, Applied, GapPolicy, OverlapPolicy, Policy
from seqdedupe.topic.topic import Topic, state_again
from seqdedupe.v1 import admin_pb2
from tests.batches import batch
from tests.log.faulty import FaultyLog, Storage

INCARNATION = 5
NAMESPACE = "public/default"
NEVER_BY_ITSELF = Applied(deduplication_entries_interval=2**31 - 1, deduplication_snapshot_interval_seconds=0)

EVERY: dict[str, Any] = {
    "deduplication_enabled": False,
    "overlap": OverlapPolicy.PULSAR,
    "deduplication_entries_interval": 7,
    "deduplication_snapshot_interval_seconds": 8,
    "retention_size_in_mb": 9,
    "retention_time_in_minutes": 10,
    "gap": GapPolicy.REJECT,
    "deduplication_producer_inactivity_timeout_minutes": 11,
    "log_flush_interval_messages": 12,
    "log_flush_interval_ms": 13,
    "deduplication_window_max_messages": 14,
    "deduplication_window_max_bytes": 15,
    "deduplication_window_max_minutes": 16,
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "store")
    yield store
    store.close()


class TrimmingLog(FaultyLog):
    """Tells with which retention it was asked."""

    def __init__(self, storage: Storage, **keys: Any) -> None:
        super().__init__(storage, **keys)
        self.asked: list[Retention] = []

    async def may_trim_to(self, covered_index: int, retention: Retention) -> int:
        self.asked.append(retention)
        return await super().may_trim_to(covered_index, retention)


@pytest.fixture
async def topic(store: Store) -> AsyncIterator[Topic]:
    topic = new_topic(store, TrimmingLog(Storage(INCARNATION), automatic=True))
    await topic.recover()
    yield topic
    await topic.close("")


def new_topic(store: Store, log: FaultyLog) -> Topic:
    snapshots = Snapshots(store, INCARNATION)
    loaded = snapshots.load()
    name = "persistent://public/default/t"
    return Topic(name, log, store, snapshots, loaded, applied=NEVER_BY_ITSELF, random_bytes=os.urandom)


async def publish(topic: Topic, *ids: int, name: str = "p") -> FrameReceipt | Refusal:
    """One frame of a new session."""
    opened = await open_sessions(topic, [name], None)
    answers: list[FrameReceipt | Refusal] = []
    link = min(opened.persisted[0], ids[0] - 1)
    rows = batch([(name, i) for i in ids], epochs={name: opened.epochs[0]}, links={name: link})
    topic.admit(rows.encode(), 1, answers.append, NumbersCache())
    await topic.flight.all_of_now()
    return answers[0]


def one(name: str, value: Any) -> Policy:
    """With one value."""
    return Policy(**{name: value})


async def until(condition: Any) -> None:
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("name", NAMES)
def test_what_no_topic_would_heed_cannot_be_set(name: str) -> None:
    """Retention and syncs of a broker's log are the broker's, and only a broker's ranges overlap."""
    is_own = name.startswith(("retention", "log_flush", "deduplication_window"))
    for log, is_heeded in (
        (LogKind.EMBEDDED, name != "overlap"),
        (LogKind.BROKER, not is_own),
        (LogKind.PULSAR, not is_own and name != "overlap"),
    ):
        policy = one(name, EVERY[name])
        if is_heeded:
            assert policy.check_has_effect(log) is policy
        else:
            with pytest.raises(InvalidRequestError, match=f"{name} has an effect only on"):
                policy.check_has_effect(log)


# -- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_topics_value_counts_before_its_namespaces_and_that_before_the_sidecars(name: str) -> None:
    set_, sidecar = one(name, EVERY[name]), Applied()
    before = getattr(sidecar, name)
    assert before != EVERY[name]
    over = sidecar.under(set_)
    assert getattr(over, name) == EVERY[name]
    assert [getattr(over, other) == getattr(sidecar, other) for other in NAMES] == [other != name for other in NAMES]
    assert over.under(Policy()) == over
    assert over.under(one(name, before)) == sidecar
    # What is set stays set when something else is; what is removed is inherited again.
    others = Policy(**{other: value for other, value in EVERY.items() if other != name})
    assert set_.with_values_of(others) == others.with_values_of(set_) == Policy(**EVERY)
    assert Policy(**EVERY).without([name]) == others
    assert Policy(**EVERY).without([]) == Policy()
    with pytest.raises(InvalidRequestError, match="no policy is named 'nix'"):
        Policy().without(["nix"])


def test_every_value_has_its_field_and_goes_there_and_back() -> None:
    assert [field.name for field in admin_pb2.TopicPolicy.DESCRIPTOR.fields] == list(NAMES) == list(EVERY)
    for names in itertools.chain.from_iterable(itertools.combinations(NAMES, n) for n in range(3)):
        policy = Policy(**{name: EVERY[name] for name in names})
        message = admin_pb2.TopicPolicy()
        policy.fill(message)
        assert Policy.of(admin_pb2.TopicPolicy.FromString(message.SerializeToString())) == policy
    for number in (2, 7):
        for value in (0, 3):
            with pytest.raises(ValueError, match=str(value)):
                Policy.of(admin_pb2.TopicPolicy.FromString(bytes((number << 3, value))))


@pytest.mark.parametrize("name", WINDOW)
def test_a_window_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} is 0"):
        one(name, 0).check()


@pytest.mark.parametrize("name", LEAST)
def test_numbers_out_of_their_range_are_refused(name: str) -> None:
    most = MOST.get(name, 2**31 - 1)
    for value in (LEAST[name], most):
        one(name, value).check()
    for value in (LEAST[name] - 1, most + 1):
        with pytest.raises(InvalidRequestError, match=f"{name} is {value}"):
            one(name, value).check()


# -- in force at once ----------------------------------------------------------------------------------------------


async def test_gaps_are_refused_from_the_next_frame_on(topic: Topic) -> None:
    assert isinstance(await publish(topic, 3, 5), FrameReceipt)
    await topic.set_policy(Policy(gap=GapPolicy.REJECT))
    refused = await publish(topic, 6, 8)
    assert isinstance(refused, Refusal)
    assert (refused.error.reason, refused.error.retry_delay_ms) == ("GAP", -1)
    assert refused.error.numbers["expected_sequence_id"] == "7"
    assert [p.expected_sequence_id for p in refused.producers] == [7]
    assert isinstance(refused.error, InvalidRequestError)
    assert topic.confirmed_index == 2
    assert isinstance(await publish(topic, 5, 6, 7), FrameReceipt)
    assert isinstance(await publish(topic, 40, name="new"), FrameReceipt)
    await topic.set_policy(Policy())
    assert isinstance(await publish(topic, 70), FrameReceipt)
    topic.inherit(Applied(gap=GapPolicy.REJECT))
    assert isinstance(await publish(topic, 90), Refusal)


async def test_snapshots_are_taken_as_the_newest_policy_says(topic: Topic) -> None:
    await publish(topic, 0)
    await publish(topic, 1)
    assert topic.keeper.snapshot_index == 0
    # There is enough for one already.
    await topic.set_policy(Policy(deduplication_entries_interval=2))
    await until(lambda: topic.keeper.snapshot_index == 2)
    await topic.set_policy(Policy())
    await publish(topic, 2)
    topic.inherit(Applied(deduplication_entries_interval=2**31 - 1, deduplication_snapshot_interval_seconds=0.01))
    await until(lambda: topic.keeper.snapshot_index == 3)


async def test_a_timer_that_runs_is_replaced(topic: Topic) -> None:
    topic.inherit(Applied(deduplication_entries_interval=2**31 - 1, deduplication_snapshot_interval_seconds=1000))
    await publish(topic, 0)
    topic.inherit(Applied(deduplication_entries_interval=2**31 - 1, deduplication_snapshot_interval_seconds=0.01))
    await until(lambda: topic.keeper.snapshot_index == 1)


async def test_retention_is_asked_for_at_once(topic: Topic) -> None:
    log = topic.log
    assert isinstance(log, TrimmingLog)
    assert log.asked == []
    await topic.set_policy(Policy(retention_size_in_mb=3))
    await until(lambda: log.asked == [Retention(3 * 1024 * 1024)])
    topic.inherit(Applied(retention_time_in_minutes=2))
    await until(lambda: log.asked[1:] == [Retention(3 * 1024 * 1024, 120_000)])
    await topic.set_policy(Policy(retention_size_in_mb=3, deduplication_enabled=False))
    await publish(topic, 1)
    assert len(log.asked) == 2


async def test_two_changes_at_once_are_both_in_force(store: Store) -> None:
    log = FaultyLog(Storage(INCARNATION))
    topic = new_topic(store, log)
    await topic.recover()
    changes = []
    for policy in (Policy(gap=GapPolicy.REJECT), Policy(deduplication_enabled=False)):
        changes.append(asyncio.ensure_future(topic.set_policy(topic.newest_policy.with_values_of(policy))))
        await asyncio.sleep(0)
    # Anyone who gives up does not take it back.
    changes[0].cancel()
    await asyncio.sleep(0)
    log.settle()
    await changes[1]
    assert topic.policy == Policy(deduplication_enabled=False, gap=GapPolicy.REJECT)
    await topic.close("")


async def test_retention_does_not_put_an_old_policy_in_force_again(store: Store) -> None:
    """It writes again what is in force; a change that is under way comes before that."""
    log = FaultyLog(Storage(INCARNATION), retention=True)
    topic = new_topic(store, log)
    await topic.recover()
    changing = asyncio.ensure_future(topic.set_policy(Policy(deduplication_enabled=False)))
    await asyncio.sleep(0)
    again = asyncio.ensure_future(state_again(topic, 1))
    await asyncio.sleep(0)
    log.settle()
    await asyncio.gather(changing, again)
    assert topic.policy == Policy(deduplication_enabled=False)
    await topic.close("")


# -- namespaces ----------------------------------------------------------------------------------------------------


class FailingStore(Store):
    """Writes all that it is given, and says so or not."""

    failures = 0

    async def flush(self, opening: int) -> None:
        await super().flush(opening)
        if self.failures:
            self.failures -= 1
            raise error("STORE_UNAVAILABLE", "a planned failure")


@pytest.fixture
def failing(store: Store) -> FailingStore:
    store.__class__ = FailingStore
    assert isinstance(store, FailingStore)
    return store


def reject(policy: Policy) -> Policy:
    return policy.with_values_of(Policy(gap=GapPolicy.REJECT))


def stored(store: Store) -> dict[str, Policy]:
    """What the next start finds."""
    found = Namespaces(store, Applied(), lambda name: None)
    found.load()
    return dict(found._policies)


async def test_a_namespaces_policy_is_durable_before_it_is_answered(store: Store) -> None:
    changed: list[str] = []
    namespaces = Namespaces(store, Applied(retention_size_in_mb=4), changed.append)
    namespaces.load()
    await namespaces.change(NAMESPACE, reject)
    assert stored(store) == {NAMESPACE: Policy(gap=GapPolicy.REJECT)}
    assert changed == [NAMESPACE]
    assert namespaces.applied(NAMESPACE) == Applied(gap=GapPolicy.REJECT, retention_size_in_mb=4)
    assert namespaces.applied("public/other") == Applied(retention_size_in_mb=4)
    await namespaces.change(NAMESPACE, lambda policy: Policy())
    assert stored(store) == {}
    await namespaces.close()


async def test_one_that_could_not_be_written_is_taken_back_in_the_store_too(failing: FailingStore) -> None:
    namespaces = Namespaces(failing, Applied(), lambda name: None)
    await namespaces.change(NAMESPACE, lambda policy: Policy(retention_size_in_mb=1))
    failing.failures = 2
    with pytest.raises(UnavailableError, match="planned"):
        await namespaces.change(NAMESPACE, reject)
    assert namespaces.policy(NAMESPACE) == Policy(retention_size_in_mb=1)
    # The control: it is in the store although it was refused.
    assert stored(failing) == {NAMESPACE: Policy(gap=GapPolicy.REJECT, retention_size_in_mb=1)}
    await until(lambda: stored(failing) == {NAMESPACE: Policy(retention_size_in_mb=1)})
    await namespaces.close()


async def test_what_is_taken_back_does_not_undo_a_later_change(failing: FailingStore) -> None:
    namespaces = Namespaces(failing, Applied(), lambda name: None)
    failing.failures = 1
    with pytest.raises(UnavailableError):
        await namespaces.change(NAMESPACE, reject)
    await namespaces.change(NAMESPACE, lambda policy: Policy(retention_size_in_mb=2))
    await until(lambda: not namespaces._background)
    assert stored(failing) == {NAMESPACE: Policy(retention_size_in_mb=2)}
    await namespaces.close()


async def test_whoever_gives_up_does_not_take_it_back(store: Store) -> None:
    namespaces = Namespaces(store, Applied(), lambda name: None)
    changing = asyncio.ensure_future(namespaces.change(NAMESPACE, reject))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    changing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await changing
    await namespaces.change(NAMESPACE, lambda policy: policy.with_values_of(Policy(retention_size_in_mb=2)))
    assert stored(store) == {NAMESPACE: Policy(gap=GapPolicy.REJECT, retention_size_in_mb=2)}
    await namespaces.close()


async def test_what_is_under_way_at_the_end_is_finished_and_nothing_more_is_taken(store: Store) -> None:
    namespaces = Namespaces(store, Applied(), lambda name: None)
    changing = asyncio.ensure_future(namespaces.change(NAMESPACE, reject))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await namespaces.close()
    await changing
    assert stored(store) == {NAMESPACE: Policy(gap=GapPolicy.REJECT)}
    with pytest.raises(UnavailableError, match="DRAINING"):
        await namespaces.change(NAMESPACE, lambda policy: Policy())


async def test_there_are_not_too_many_of_them(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqdedupe.topic.directory.MAX_NAMESPACE_POLICIES", 1)
    namespaces = Namespaces(store, Applied(), lambda name: None)
    await namespaces.change("a/a", reject)
    with pytest.raises(InvalidRequestError, match="1 namespaces have a policy"):
        await namespaces.change("b/b", reject)
    await namespaces.change("a/a", lambda policy: Policy(retention_size_in_mb=1))
    await namespaces.change("a/a", lambda policy: Policy())
    await namespaces.change("b/b", reject)
    assert stored(store) == {"b/b": Policy(gap=GapPolicy.REJECT)}
    await namespaces.close()


async def test_a_damaged_record_of_a_namespace_is_said(store: Store) -> None:
    await store.put_namespace_policy(NAMESPACE, b"\xff\xff")
    with pytest.raises(SeqdedupeError, match="DAMAGED"):
        stored(store)
