"""A start with very many topics does not wait for all: the others are opened by anyone who uses them, or in their
turn."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.errors import DamagedError, InvalidRequestError, SeqdedupeError, UnavailableError, error
from seqdedupe.names import partition_name
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import directory
from seqdedupe.topic.base import State
from seqdedupe.topic.directory import delete, find, find_or_create
from seqdedupe.topic.frame import FrameReceipt, NumbersCache
from seqdedupe.topic.listing import renew
from seqdedupe.topic.operations import open_sessions
from seqdedupe.topic.policy import Policy
from seqdedupe.topic.registry import Closed
from tests.batches import batch
from tests.records_of import record_of
from tests.topic.logs import MemoryLogs
from tests.topic.test_directory import Process

NAMES = [f"persistent://public/default/t{k}" for k in range(5)]
FIRST, *OTHERS = NAMES
LAST = OTHERS[-1]
NEVER_SECONDS = 10**6
DUP = 2


class Counted(Process):
    """A process that counts how often each log is opened; one can be held up in the middle of that."""

    opened: Counter[str]
    refuses = False

    async def start(self) -> None:
        self.opened = Counter()
        self.may_open = asyncio.Event()
        self.may_open.set()
        self.has_begun = asyncio.Event()
        await super().start()

    def kind(self, told: Callable[[Any], None]) -> Any:
        kind = super().kind(told)
        original = kind.open

        async def opened(record: Any, *arguments: Any, **keys: Any) -> Any:
            self.opened[record.name] += 1
            self.has_begun.set()
            await self.may_open.wait()
            if self.refuses:
                raise error("LOG_REFUSED", "a planned failure")
            return await original(record, *arguments, **keys)

        kind.open = opened  # type: ignore[method-assign]
        return kind

    def hold_up(self) -> None:
        """Everything that is opened from now on waits for `may_open`."""
        self.may_open.clear()
        self.has_begun.clear()

    def state(self, name: str) -> State:
        return self.topics.look_at(name).state


async def publish(process: Process, name: str, sequence_id: int) -> FrameReceipt:
    """A message of a producer that has an epoch from before, as a client that goes on sends it."""
    topic = await find(process.topics, name)
    epoch = (await open_sessions(topic, ["p"], None)).epochs[0]
    answers: list[Any] = []
    topic.admit(batch([("p", sequence_id)], epochs={"p": epoch}, links={"p": -1}).encode(), 1, answers.append,
                NumbersCache(), lone=True)  # fmt: skip
    await topic.flight.all_of_now()
    assert isinstance(answers[0], FrameReceipt)
    return answers[0]


def verdict(receipt: FrameReceipt) -> int:
    assert receipt.verdicts is not None
    return int(receipt.verdicts[0])


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One topic is opened at the start; no other one has its turn by itself."""
    monkeypatch.setattr(directory, "OPENED_AT_START", 1)
    monkeypatch.setattr(directory, "APART_SECONDS", NEVER_SECONDS)
    monkeypatch.setattr(directory, "USE_SECONDS", 120.0)


@pytest.fixture
async def process(tmp_path: Path, patient: None) -> AsyncIterator[Counted]:
    """Started again with five topics, a message in each."""
    process = Counted(tmp_path / "store")
    await process.start()
    for name in NAMES:
        await process.topics.create(name)
        await publish(process, name, 7)
    await process.restart()
    yield process
    await process.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while not condition():  # noqa: ASYNC110 (until others have had their turn)
            await asyncio.sleep(0.01)


async def test_a_start_opens_some_and_says_of_the_others_that_they_are_not_open(process: Counted) -> None:
    assert process.opened == {FIRST: 1}
    assert [topic.state for topic in process.topics.all()] == [State.SERVING] + [State.RECOVERING] * 4
    told = dict(process.states)
    assert told[FIRST] is State.SERVING
    assert {told[name] for name in OTHERS} == {State.RECOVERING}
    closed = process.topics.look_at(LAST)
    assert isinstance(closed, Closed)
    assert directory.WHY in closed.why.message


async def test_a_start_with_room_opens_all(process: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "OPENED_AT_START", len(NAMES))
    await process.restart()
    assert process.opened == dict.fromkeys(NAMES, 1)
    assert {topic.state for topic in process.topics.all()} == {State.SERVING}


async def test_one_of_which_a_crash_has_left_something_does_not_wait(
    process: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = record_of(process.topics, LAST).incarnation
    monkeypatch.setattr(MemoryLogs, "unfinished", frozenset({left}))
    await process.restart()
    assert process.opened == {FIRST: 1, LAST: 1}
    assert (process.state(LAST), process.state(OTHERS[0])) == (State.SERVING, State.RECOVERING)


async def test_who_uses_one_has_it_and_its_first_verdict_knows_its_log(process: Counted) -> None:
    receipt = await publish(process, LAST, 7)
    assert verdict(receipt) == DUP
    assert process.opened == {FIRST: 1, LAST: 1}
    assert process.states[-1] == (LAST, State.SERVING)


async def test_many_who_use_one_open_it_once_and_who_gives_up_does_so_alone(process: Counted) -> None:
    process.hold_up()
    users = [asyncio.ensure_future(find(process.topics, LAST)) for _ in range(5)]
    await process.has_begun.wait()
    users[0].cancel()
    await asyncio.wait({users[0]})
    process.may_open.set()
    topics = await asyncio.gather(*users[1:])
    assert {id(topic) for topic in topics} == {id(process.topics.get(LAST))}
    assert process.opened[LAST] == 1
    assert process.state(LAST) is State.SERVING


async def test_who_uses_one_that_takes_long_is_told_so(process: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "USE_SECONDS", 0.01)
    process.hold_up()
    with pytest.raises(UnavailableError, match="is being opened") as caught:
        await find(process.topics, LAST)
    assert caught.value.reason == "RECOVERING"
    process.may_open.set()
    await until(lambda: process.state(LAST) is State.SERVING)
    assert process.opened[LAST] == 1


async def test_all_are_opened_in_their_turn(process: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that policies act on topics that nobody uses, and damage is found."""
    monkeypatch.setattr(directory, "APART_SECONDS", 0.0)
    await process.restart()
    await until(lambda: {topic.state for topic in process.topics.all()} == {State.SERVING})
    assert process.opened == dict.fromkeys(NAMES, 1)


async def test_one_that_cannot_be_opened_holds_up_no_other(process: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "APART_SECONDS", 0.0)
    monkeypatch.setattr(directory, "USE_SECONDS", 0.01)
    await process.stop()
    lost = record_of(process.topics, OTHERS[0]).incarnation
    there = process.storages.pop(lost)
    await process.start()
    await until(lambda: process.state(LAST) is State.SERVING and process.state(OTHERS[0]) is State.DAMAGED)
    assert {process.state(name) for name in OTHERS[1:]} == {State.SERVING}
    process.storages[lost] = there


async def test_nobody_waits_for_one_that_is_tried_again_and_again(
    process: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "USE_SECONDS", 0.01)
    process.refuses = True
    with pytest.raises(UnavailableError):
        await find(process.topics, LAST)
    await until(lambda: process.topics.waiting.begin(LAST) is None)
    with pytest.raises(UnavailableError, match="a planned failure"):
        await find(process.topics, LAST)
    process.refuses = False
    await until(lambda: process.state(LAST) is State.SERVING)


async def test_damage_is_told_when_somebody_looks_and_not_before(process: Counted) -> None:
    await process.stop()
    lost = record_of(process.topics, LAST).incarnation
    there = process.storages.pop(lost)
    await process.start()
    assert process.state(LAST) is State.RECOVERING
    with pytest.raises(DamagedError):
        await find(process.topics, LAST)
    assert process.states[-1] == (LAST, State.DAMAGED)
    await publish(process, OTHERS[0], 8)
    process.storages[lost] = there


async def test_it_is_there_for_whoever_would_make_it(process: Counted) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await process.topics.create(OTHERS[0])
    assert caught.value.reason == "TOPIC_EXISTS"
    assert (await process.topics.create(OTHERS[1], exists_ok=True)).confirmed_index == 1
    assert (await find_or_create(process.topics, OTHERS[2])).confirmed_index == 1


async def test_it_is_deleted_and_made_anew(process: Counted) -> None:
    await delete(process.topics, LAST)
    assert process.states[-1] == (LAST, None)
    topic = await process.topics.create(LAST)
    assert topic.confirmed_index == 0
    await process.restart()
    assert (await find(process.topics, LAST)).confirmed_index == 0


async def test_one_that_was_deleted_while_it_waited_does_not_come_back(
    process: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record that waits is of a topic that another one has taken the place of."""
    await process.topics.remove([LAST], LAST)
    made = await process.topics.create(LAST)
    await process.topics.waiting.use(*NAMES)
    assert process.topics.get(LAST) is made
    assert process.state(LAST) is State.SERVING


async def test_a_partitioned_topic_is_deleted_as_a_whole(process: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    await directory.create_partitioned(process.topics, "w", 3, Policy())
    whole = "persistent://public/default/w"
    await process.restart()
    assert [one.state for one in directory.partitions_of(process.topics, whole) if one] == [State.RECOVERING] * 3
    with pytest.raises(SeqdedupeError):
        await process.topics.create(partition_name(whole, 1))
    await directory.delete_partitioned(process.topics, whole)
    assert len(process.storages) == len(NAMES)
    await process.restart()
    assert [topic.state for topic in process.topics.all()] == [State.SERVING] + [State.RECOVERING] * 4


async def test_what_a_namespace_says_meanwhile_is_in_force_when_it_is_opened(process: Counted) -> None:
    policy = Policy(deduplication_entries_interval=77)
    await process.topics.namespaces.change("public/default", lambda _: policy)
    assert (await find(process.topics, LAST)).applied.deduplication_entries_interval == 77


async def test_it_begins_anew_from_its_log(process: Counted) -> None:
    topic = await renew(process.topics, LAST, None, None)
    assert topic is process.topics.get(LAST)
    await process.topics.waiting.use(LAST)
    assert process.topics.get(LAST) is topic
    assert (process.state(LAST), process.opened[LAST]) == (State.SERVING, 1)


async def test_an_end_lets_them_wait_and_leaves_none_half_open(process: Counted) -> None:
    process.hold_up()
    user = asyncio.ensure_future(find(process.topics, LAST))
    await process.has_begun.wait()
    end = asyncio.ensure_future(process.topics.drain())
    await asyncio.sleep(0)
    assert not end.done()
    process.may_open.set()
    await end
    await asyncio.wait({user})
    assert {topic.state for topic in process.topics.registry.open_topics()} == {State.DRAINING}
    assert {topic.name for topic in process.topics.registry.open_topics()} == {FIRST, LAST}
    assert process.opened == {FIRST: 1, LAST: 1}
    await process.restart()
    for name in NAMES:
        assert verdict(await publish(process, name, 7)) == DUP


async def test_a_store_that_is_made_anew_waits_for_all(process: Counted, tmp_path: Path) -> None:
    await process.stop()
    process.folder = tmp_path / "another"
    with pytest.raises(SeqdedupeError):
        await process.start()
    process.topics.rebuild_store = True
    process.opened.clear()
    assert isinstance(process.logs, MemoryLogs)
    await process.topics.open_all()
    await process.topics.recover_all()
    assert process.opened == dict.fromkeys(NAMES, 1)
    assert {topic.keeper.snapshot_index for topic in process.topics.registry.open_topics()} == {1}
