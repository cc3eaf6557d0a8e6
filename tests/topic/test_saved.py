"""A topic that is opened again, from a saved snapshot or from its log alone: its verdicts stay what they were."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rocksdict import WriteBatch

from seqdedupe.core.rule import DURABLE_EPOCH, PERSISTED
from seqdedupe.errors import PositionError, SeqdedupeError, UnavailableError
from seqdedupe.limits import MAX_PLACE_BYTES
from seqdedupe.message_id import MessageId, Position
from seqdedupe.store.parts import DELTA, part_key
from seqdedupe.store.snapshots import Loaded
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import listing
from seqdedupe.topic.attached import AttachedTopic, Columns
from seqdedupe.topic.base import State
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.lives import BrokersTopics
from seqdedupe.topic.operations import open_sessions, reset_producer
from seqdedupe.topic.policy import GapPolicy, Policy
from seqdedupe.topic.sessions import LAST_OPEN
from seqdedupe.topic.topic import Topic, state_again
from seqdedupe.transfer.topic_state import SAVED_AT_ONCE, SavedParts, parts, saved
from tests.batches import batch
from tests.topic.test_directory import NAME, FailingStore, Process

DUP = 2


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[Process]:
    process = Process(tmp_path / "store")
    await process.start()
    await process.topics.create(NAME)
    yield process
    await process.stop()


def live(process: Process) -> Topic:
    topic = process.topics.get(NAME)
    assert isinstance(topic, Topic)
    return topic


async def send(process: Process, name: str, *ids: int) -> int:
    """Opens the name again and sends; returns its epoch."""
    topic = live(process)
    opened = await open_sessions(topic, [name], None)
    answers: list[FrameReceipt | Refusal] = []
    link = min(opened.persisted[0], ids[0] - 1)
    rows = batch([(name, i) for i in ids], epochs={name: opened.epochs[0]}, links={name: link}).encode()
    topic.admit(rows, 1, answers.append, NumbersCache())
    await topic.flight.all_of_now()
    assert isinstance(answers[0], FrameReceipt), answers
    return opened.epochs[0]


def known(process: Process) -> tuple[dict[bytes, tuple[int, int]], Policy, int]:
    """All that verdicts and fences come from."""
    topic = live(process)
    names = topic.producers.names_from(0)
    rows = topic.producers.numbers[: len(names), [PERSISTED, DURABLE_EPOCH]].tolist()
    return {name: tuple(row) for name, row in zip(names, rows, strict=True)}, topic.policy, topic.confirmed_index


async def history(process: Process) -> Loaded:
    """A topic with a past; the snapshot is of its middle."""
    await send(process, "early", 1)
    await send(process, "a", 3, 9)
    await send(process, "b", 0)
    await live(process).set_policy(Policy(gap=GapPolicy.ALLOW))
    await reset_producer(live(process), "b", -1)
    await send(process, "b", 4)
    snapshot = saved(live(process))
    await send(process, "a", 11)
    await reset_producer(live(process), "a", 5)
    await send(process, "c", 2**40)
    await live(process).set_policy(Policy(deduplication_enabled=True))
    await send(process, "b", 7)
    return snapshot


async def renew(process: Process, loaded: Loaded | None) -> None:
    incarnation = None if loaded is None else live(process).incarnation
    topic = await listing.renew(process.topics, NAME, incarnation, loaded)
    assert topic.state is State.SERVING


async def test_a_term_whose_opens_are_used_up_ends_while_the_topic_is_used(process: Process) -> None:
    topic = live(process)
    topic.sessions._opens = LAST_OPEN - 1
    opened = await open_sessions(topic, ["a"], None)
    answers: list[FrameReceipt | Refusal] = []
    cache = NumbersCache()
    for i in range(20):
        rows = batch([("a", i)], epochs={"a": opened.epochs[0]}, links={"a": i - 1}).encode()
        topic.admit(rows, i, answers.append, cache)
    with pytest.raises(SeqdedupeError, match="RECOVERING"):
        await open_sessions(topic, ["b"], None)
    while topic.state is not State.SERVING:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert len(answers) == 20
    stored = sum(isinstance(answer, FrameReceipt) for answer in answers)
    assert await send(process, "b", 1) >> 32 == topic.term == (opened.epochs[0] >> 32) + 1
    again = await open_sessions(topic, ["a"], opened.epochs)
    assert (again.persisted, topic.confirmed_index) == ([stored - 1], stored + 1)


# -- what it does --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["the middle", "the beginning", "now", "the log"])
async def test_a_topic_that_is_opened_again_is_what_it_was(process: Process, start: str) -> None:
    empty = saved(live(process))
    loaded: Loaded | None = await history(process)
    if start == "the beginning":
        loaded = empty
    elif start == "now":
        loaded = saved(live(process))
    elif start == "the log":
        loaded = None
    before, old = known(process), live(process)
    await renew(process, loaded)
    assert known(process) == before
    assert live(process) is not old
    assert (old.state, old.has_successor) == (State.DRAINING, True)
    assert live(process).term > old.term
    for _ in range(2):
        await process.restart()
        assert known(process) == before
    # The session in force goes on, and an older one stays out.
    owner = before[0][b"b"][1]
    opened = await open_sessions(live(process), ["b", "b-new"], [owner, owner - 1])
    assert (opened.persisted[0], 1 in opened.refusals) == (7, False)
    assert (await open_sessions(live(process), ["b"], [owner - 1])).refusals[0].reason == "FENCED"
    answers: list[FrameReceipt | Refusal] = []
    rows = batch([("b", 4), ("b", 7), ("b", 8)], epochs={"b": owner}, links={"b": -1}).encode()
    live(process).admit(rows, 1, answers.append, NumbersCache())
    await live(process).flight.all_of_now()
    assert isinstance(answers[0], FrameReceipt)
    assert answers[0].verdicts is not None
    assert answers[0].verdicts.tolist() == [DUP, DUP, 1]


async def test_without_the_replay_it_would_not_be(process: Process) -> None:
    """The control arm: the same numbers at the log's end, where nothing is left to be replayed."""
    middle = await history(process)
    before, now = known(process), saved(live(process))
    at_the_end = replace(
        middle, next_index=now.next_index, message_id=now.message_id, ownership=now.ownership, term=now.term
    )
    await renew(process, at_the_end)
    assert known(process)[0] != before[0]


async def test_what_is_in_flight_is_sent_again_and_once_there(process: Process) -> None:
    snapshot = await history(process)
    topic = live(process)
    opened = await open_sessions(topic, ["d"], None)
    answers: list[FrameReceipt | Refusal] = []
    rows = batch([("d", 1)], epochs={"d": opened.epochs[0]}, links={"d": -1}).encode()
    topic.admit(rows, 1, answers.append, NumbersCache())
    await renew(process, snapshot)
    assert len(answers) == 1
    again: list[FrameReceipt | Refusal] = []
    live(process).admit(rows, 2, again.append, NumbersCache())
    await live(process).flight.all_of_now()
    assert isinstance(again[0], FrameReceipt)
    assert known(process)[2] == 9
    late: list[FrameReceipt | Refusal] = []
    topic.admit(rows, 3, late.append, NumbersCache())
    assert isinstance(late[0], Refusal)
    assert late[0].error.reason == "DRAINING"


def damage(process: Process) -> None:
    """The topic's snapshot in the store cannot be read any more."""
    incarnation = live(process).incarnation
    garbage = WriteBatch(raw_mode=True)
    garbage.put(part_key(incarnation, DELTA, 2**30), b"no record")
    process.store.write(garbage)


@pytest.mark.parametrize("from_log", [False, True])
@pytest.mark.parametrize("is_given_up", [False, True])
async def test_a_topic_whose_records_are_damaged_is_mended(
    process: Process, from_log: bool, is_given_up: bool, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = await history(process)
    before, incarnation = known(process), live(process).incarnation
    damage(process)
    await process.restart()
    if is_given_up:
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            while process.topics.look_at(NAME).state is not State.DAMAGED:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    with pytest.raises(SeqdedupeError):
        process.topics.get(NAME)
    await listing.renew(process.topics, NAME, incarnation, None if from_log else snapshot)
    assert known(process) == before
    await process.restart()
    assert known(process) == before
    # Nobody has opened it a second time next to this.
    assert sum("recovered topic" in record.message for record in caplog.records) <= 4


async def test_a_topic_that_is_recovering_begins_anew_from_the_snapshot(process: Process) -> None:
    snapshot = await history(process)
    before, incarnation = known(process), live(process).incarnation
    await process.stop()
    recovering = Process(process.folder.with_name("made-anew"), process.storages)
    recovering.store = FailingStore.open_failing(recovering.folder)
    process.folder = recovering.folder
    # As a start with a store that was lost does; the log cannot be read to its end.
    recovering.logs = process.logs
    blocked = asyncio.Event()
    original = process.logs.open

    async def open_blocked(*arguments: Any) -> Any:
        log = await original(*arguments)
        if not blocked.is_set():
            blocked.set()
            log.opening_allowed.clear()
        return log

    process.logs.open = open_blocked  # type: ignore[method-assign, assignment]
    topics = process.topics = Topics(
        recovering.store, recovering.kind, max_topics=10, allow_auto_topic_creation=True,
        on_state=lambda name, state: None, rebuild_store=True,
    )  # fmt: skip
    process.store = recovering.store
    await topics.open_all()
    running = asyncio.ensure_future(topics.recover_all())
    await asyncio.sleep(0.05)
    assert live(process).state is State.RECOVERING
    await listing.renew(topics, NAME, incarnation, snapshot)
    await running
    assert known(process) == before
    assert live(process).state is State.SERVING


# -- refusals ------------------------------------------------------------------------------------------------------


async def refused(process: Process, incarnation: int | None, loaded: Loaded | None) -> str:
    """Why it was refused; nothing has changed."""
    topic, before = live(process), known(process)
    with pytest.raises(SeqdedupeError) as caught:
        await listing.renew(process.topics, NAME, incarnation, loaded)
    assert live(process) is topic
    assert (known(process), topic.state) == (before, State.SERVING)
    await send(process, "after", len(topic.producers) + topic.confirmed_index)
    return caught.value.reason


async def test_a_snapshot_that_is_not_of_this_log_is_refused(process: Process) -> None:
    snapshot = await history(process)
    incarnation = live(process).incarnation
    assert await refused(process, incarnation + 1, snapshot) == "POSITION_OF_ANOTHER_INCARNATION"
    assert await refused(process, incarnation, replace(snapshot, next_index=100)) == "POSITION_AFTER_END"
    for other in (
        replace(snapshot, ownership=snapshot.ownership ^ 1),
        replace(snapshot, next_index=snapshot.next_index + 1),
        replace(snapshot, message_id=MessageId(1, 2, 3)),
    ):
        assert await refused(process, incarnation, other) == "POSITION_DIVERGED"
    with pytest.raises(SeqdedupeError, match="TOPIC_NOT_FOUND"):
        await listing.renew(process.topics, "another", incarnation, snapshot)


async def test_a_snapshot_of_what_is_trimmed_is_refused(process: Process) -> None:
    snapshot = await history(process)
    incarnation = live(process).incarnation
    log = live(process).log
    await log.trim(snapshot.next_index)
    assert await refused(process, incarnation, snapshot) == "POSITION_TRIMMED"
    empty = replace(snapshot, next_index=0, message_id=None, ownership=0)
    assert await refused(process, incarnation, empty) == "POSITION_TRIMMED"
    # Here retention has not said again what is in force.
    assert await refused(process, None, None) == "LOG_INCOMPLETE"
    await state_again(live(process), log.first_index)
    before = known(process)
    await renew(process, None)
    assert known(process) == before
    await process.restart()
    assert known(process) == before


@pytest.mark.parametrize("fail_at", [1, 2])
@pytest.mark.parametrize("from_log", [False, True])
async def test_a_store_that_fails(process: Process, fail_at: int, from_log: bool) -> None:
    snapshot = None if from_log else await history(process)
    before, incarnation = known(process), live(process).incarnation
    await live(process).keeper.snapshot()
    process.store.syncs, process.store.fail_at = 0, fail_at
    if fail_at == 1:
        with pytest.raises(UnavailableError, match="STORE_UNAVAILABLE"):
            await listing.renew(process.topics, NAME, incarnation, snapshot)
    else:
        # It was durable; the snapshot after it was not.
        await renew(process, snapshot)
    process.store.fail_at, process.store.is_broken = 0, False
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while process.topics.look_at(NAME).state is not State.SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert known(process) == before
    await process.restart()
    assert known(process) == before
    await renew(process, snapshot)
    assert known(process) == before


# -- what comes over the wire ----------------------------------------------------------------------------------------


async def test_it_goes_there_and_back_in_parts(process: Process) -> None:
    await history(process)
    topic = live(process)
    topic.producers.add_all([b"p%06d" % i for i in range(2 * SAVED_AT_ONCE)])
    topic.producers.has_forgotten = True
    snapshot = saved(topic)
    taken = SavedParts(
        snapshot.term,
        topic.last_position,
        topic.policy,
        snapshot.opaque,
        producers=len(snapshot.names),
        has_forgotten=snapshot.has_forgotten,
    )
    for part in parts(snapshot):
        taken.add(*part)
    again = taken.finish()
    assert again.has_forgotten
    assert snapshot.names.some() == again.names.some()
    for name in Loaded.__dataclass_fields__.keys() - {"names"}:
        one, other = getattr(snapshot, name), getattr(again, name)
        assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


def columns(persisted: int = 1, epoch: int = 0, stated: int = -1) -> tuple[Any, Any, Any]:
    return np.array([persisted]), np.array([epoch]), np.array([stated])


@pytest.mark.parametrize(
    ("names", "values", "reason"),
    [
        ([b"a"], columns(persisted=-2), "INVALID_REQUEST"),
        ([b"a"], columns(epoch=-1), "INVALID_REQUEST"),
        ([b"a"], columns(epoch=4 << 32), "INVALID_REQUEST"),
        ([b"a"], columns(stated=-2), "INVALID_REQUEST"),
        ([b"a"], columns(stated=11), "INVALID_REQUEST"),
        ([b"first"], columns(), "INVALID_REQUEST"),
        ([b""], columns(), "INVALID_NAME"),
        ([b"\xff"], columns(), "INVALID_NAME"),
        ([b"x" * 256], columns(), "INVALID_NAME"),
        ([b"a", b"b"], columns(), "INVALID_REQUEST"),
    ],
)
def test_numbers_that_cannot_be_are_refused(names: list[bytes], values: Any, reason: str) -> None:
    taken = SavedParts(3, Position(5, MessageId(5, 9, -1), 9), Policy(), b"", producers=2)
    taken.add([b"first"], *columns(epoch=3 << 32 | 1, stated=10))
    with pytest.raises(SeqdedupeError) as caught:
        taken.add(names, *values)
    assert caught.value.reason == reason


def test_a_snapshot_that_is_not_whole_is_refused() -> None:
    for producers in (0, 2):
        taken = SavedParts(3, Position(5, MessageId(5, 9, -1), 9), Policy(), b"", producers)
        taken.add([b"first"], *columns())
        with pytest.raises(SeqdedupeError, match="INVALID_REQUEST"):
            taken.finish()
    for term, index, opaque in ((-1, 9, b""), (2**31, 9, b""), (3, -2, b""), (3, 9, bytes(MAX_PLACE_BYTES + 1))):
        with pytest.raises(SeqdedupeError, match="INVALID_"):
            SavedParts(term, Position(5, MessageId(5, 9, -1), index), Policy(), opaque, 0)


# -- a broker's own log --------------------------------------------------------------------------------------------


async def brokers(store: Any) -> Topics[AttachedTopic]:
    topics = Topics(
        store,
        lambda told: BrokersTopics(store, on_state=told),
        max_topics=10,
        allow_auto_topic_creation=True,
        on_state=lambda name, state: None,
    )
    await topics.open_all()
    return topics


def attach(topic: AttachedTopic) -> tuple[Any, list[SeqdedupeError]]:
    ended: list[SeqdedupeError] = []
    attachment = topic.attach(ended.append, lambda: None)
    attachment.register(0, [b"a"])
    return attachment, ended


def append(topic: AttachedTopic, attachment: Any, sequence_id: int, position: bytes) -> None:
    ids = np.array([sequence_id])
    checked = topic.check(attachment, Columns(np.zeros(1, np.int32), ids, ids))
    assert checked.verdicts.tolist() == [1]
    topic.report(attachment, checked.first_admission, 1, position, 0)


async def begun(topics: Topics[AttachedTopic]) -> tuple[AttachedTopic, Any, list[SeqdedupeError]]:
    """A topic with an entry, who holds it, and why that has ended."""
    topic = await topics.create("t")
    attachment, ended = attach(topic)
    attachment.end_replay(b"")
    topic.ready()
    append(topic, attachment, 4, b"one")
    return topic, attachment, ended


async def test_a_brokers_topic_goes_on_from_where_the_snapshot_is(tmp_path: Path) -> None:
    store = FailingStore.open(tmp_path / "store")
    topics = await brokers(store)
    topic, attachment, ended = await begun(topics)
    early = saved(topic)
    append(topic, attachment, 5, b"two")
    snapshot = saved(topic)
    await topic.keeper.snapshot()
    with pytest.raises(PositionError, match="POSITION_TRIMMED"):
        await listing.renew(topics, "t", topic.incarnation, early)
    with pytest.raises(SeqdedupeError, match="INVALID_REQUEST"):
        await listing.renew(topics, "t", None, None)
    assert ended == []
    await listing.renew(topics, "t", topic.incarnation, snapshot)
    assert [e.reason for e in ended] == ["DRAINING"]
    assert attach(topics.get("t"))[0].position == b"two"
    await topics.drain()
    store.close()

    # The store is lost, and with it the topic: it is made again as what it was.
    store = FailingStore.open(tmp_path / "anew")
    topics = await brokers(store)
    for incarnation in (0, 2**62):
        with pytest.raises(SeqdedupeError, match="INVALID_REQUEST"):
            await listing.renew(topics, "t", incarnation, snapshot)
    await listing.renew(topics, "t", topic.incarnation, snapshot)
    with pytest.raises(SeqdedupeError, match="TOPIC_EXISTS"):
        await listing.renew(topics, "u", topic.incarnation, snapshot)
    await topics.drain()
    topics = await brokers(store)
    again = topics.get("t")
    assert (again.incarnation, again.confirmed_index) == (topic.incarnation, 2)
    attachment, _ = attach(again)
    assert attachment.position == b"two"
    attachment.end_replay(b"two")
    again.ready()
    assert again.numbers_of("a") == (5, 5)
    await topics.drain()
    store.close()
