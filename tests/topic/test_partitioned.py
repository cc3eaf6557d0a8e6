"""Partitioned topics: all partitions are there or none is, no matter what call of the store or of the logs fails, and
wherever the process ends. The control arm, a record at a time, leaves halves."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.errors import InvalidRequestError, SeqdedupeError, UnavailableError, error
from seqdedupe.names import partition_name
from seqdedupe.store.db import Store
from seqdedupe.store.parts import TopicRecord
from seqdedupe.topic import directory
from seqdedupe.topic.base import State
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.policy import GapPolicy, Policy
from tests.records_of import record_of
from tests.topic.test_directory import TURNS, Process, cancelled_after

WHOLE = "persistent://public/default/w"
PARTS = [f"{WHOLE}-partition-{k}" for k in range(3)]


class Kill(BaseException):
    """The process ends here."""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path / "store")
    yield process
    process.store.close()


def there(process: Process) -> list[str]:
    """The names of the topics, sorted: several are made at once. All serve."""
    topics = process.topics.all()
    assert {topic.state for topic in topics} <= {State.SERVING}
    return sorted(topic.name for topic in process.topics.registry.open_topics())


def is_whole(process: Process) -> bool:
    """Whether all partitions are there. Otherwise nothing is, and nothing is left over."""
    names = there(process)
    assert names in ([], PARTS), names
    assert list(process.topics.partitions) == ([WHOLE] if names else [])
    assert len(process.storages) == len(names) == len(process.store.topics())
    return bool(names)


async def make(process: Process, policy: Policy = Policy()) -> None:  # noqa: B008
    await directory.create_partitioned(process.topics, "w", 3, policy)


async def delete(process: Process) -> None:
    await directory.delete_partitioned(process.topics, WHOLE)


async def test_partitions_are_topics_of_their_own(process: Process) -> None:
    await process.start()
    await make(process, Policy(deduplication_entries_interval=7))
    assert is_whole(process)
    topics = [process.topics.get(name) for name in PARTS]
    assert {topic.policy.deduplication_entries_interval for topic in topics} == {7}
    assert len({topic.incarnation for topic in topics}) == 3
    with pytest.raises(InvalidRequestError) as caught:
        process.topics.get("w")
    assert (caught.value.reason, caught.value.numbers["partitions"]) == ("TOPIC_IS_PARTITIONED", "3")
    await process.restart()
    assert is_whole(process)
    assert {topic.partitions for topic in process.store.topics()} == {3}
    await directory.delete_partitioned(process.topics, WHOLE)
    assert not is_whole(process)
    await process.restart()
    assert not is_whole(process)


async def test_a_store_that_is_made_anew_knows_the_partitions(process: Process, tmp_path: Path) -> None:
    await process.start()
    await make(process)
    await process.stop()
    process.folder = tmp_path / "another"
    with pytest.raises(SeqdedupeError) as caught:
        await process.start()
    assert caught.value.reason == "STORE_MISSING"
    process.topics = Topics(
        process.store,
        process.kind,
        max_topics=10,
        allow_auto_topic_creation=True,
        on_state=lambda name, state: None,
        rebuild_store=True,
    )
    await process.topics.open_all()
    await process.topics.recover_all()
    assert is_whole(process)
    assert {topic.partitions for topic in process.store.topics()} == {3}


@pytest.mark.parametrize("name", [WHOLE, PARTS[1], "w-partition-3", "w-partition-007"])
async def test_no_topic_is_made_that_would_be_mistaken_for_it(process: Process, name: str) -> None:
    await process.start()
    await make(process)
    for work in (process.topics.create, process.topics.get_or_create):
        if name in PARTS and work == process.topics.get_or_create:
            continue
        with pytest.raises(InvalidRequestError) as caught:
            await work(name)
        reasons = {"TOPIC_EXISTS", "TOPIC_IS_PARTITIONED"} if name in (WHOLE, *PARTS) else {"INVALID_TOPIC_NAME"}
        assert caught.value.reason in reasons
    assert is_whole(process)


@pytest.mark.parametrize("name", ["w", "w-partition-0", "w-partition-99"])
async def test_it_is_not_made_where_a_topic_would_be_mistaken_for_it(process: Process, name: str) -> None:
    await process.start()
    await process.topics.create(name)
    with pytest.raises(InvalidRequestError) as caught:
        await make(process)
    assert caught.value.reason == "TOPIC_EXISTS"
    assert len(there(process)) == 1
    # A name that only looks like one is no hindrance.
    await directory.create_partitioned(process.topics, "w-partition", 1, Policy())
    assert len(there(process)) == 2


async def test_what_cannot_be_made(process: Process) -> None:
    await process.start()
    impossible: list[tuple[str, int, Policy, str]] = [
        ("w", -1, Policy(), "INVALID_REQUEST"),
        ("w", 1025, Policy(), "INVALID_REQUEST"),
        ("w", 3, Policy(gap=GapPolicy.REJECT), "INVALID_REQUEST"),
        ("w", 11, Policy(), "TOO_MANY_TOPICS"),
        ("w-partition-1", 3, Policy(), "INVALID_TOPIC_NAME"),
        ("n" * 220, 3, Policy(), "INVALID_TOPIC_NAME"),
    ]
    for name, partitions, policy, reason in impossible:
        with pytest.raises(InvalidRequestError) as caught:
            await directory.create_partitioned(process.topics, name, partitions, policy)
        assert caught.value.reason == reason
    assert not is_whole(process)
    await make(process)
    for again in (make(process), directory.create_partitioned(process.topics, "w", 2, Policy())):
        with pytest.raises(InvalidRequestError, match="with 3 partitions"):
            await again
    with pytest.raises(InvalidRequestError, match="is a partition of"):
        await process.topics.delete(PARTS[0])
    assert is_whole(process)


async def test_a_creation_and_a_deletion_that_are_given_up_at_any_await_are_done(process: Process) -> None:
    await process.start()
    for steps in TURNS[::4]:
        under_way = await cancelled_after(steps, lambda: make(process))
        if steps:
            while change := process.topics.registry.changes(WHOLE):
                await asyncio.wait({change})
            assert is_whole(process)
            deleting = await cancelled_after(steps, lambda: directory.delete_partitioned(process.topics, WHOLE))
            # Anyone who makes it again waits for the deletion, and finds nothing of it.
            await make(process) if deleting else None
            while change := process.topics.registry.changes(WHOLE):
                await asyncio.wait({change})
            await process.restart()
            assert is_whole(process) == deleting
            if deleting:
                await directory.delete_partitioned(process.topics, WHOLE)
        if not under_way:
            break
    assert steps > 3


@pytest.mark.parametrize("call", range(1, 4))
async def test_a_creation_whose_store_fails(process: Process, call: int) -> None:
    await process.start()
    process.store.fail_at = process.store.syncs + call
    made = True
    try:
        await make(process)
    except UnavailableError:
        made = False
    assert made == (call > 2)
    await process.restart()
    assert is_whole(process) == made


@pytest.mark.parametrize("call", range(1, 6))
async def test_a_deletion_whose_store_fails(process: Process, call: int) -> None:
    """All of it lives on, or it is gone; an answer says which."""
    await process.start()
    await make(process)
    process.store.fail_at = process.store.syncs + call
    answered = True
    try:
        await directory.delete_partitioned(process.topics, WHOLE)
    except UnavailableError:
        answered = False
        # Nothing is taken until that is certain.
        with pytest.raises(UnavailableError):
            process.topics.get(PARTS[2]).check_serving()
    assert answered == (call > 1)
    await process.restart()
    assert is_whole(process) in ([False] if answered else [False, True])


@pytest.mark.parametrize("at", range(1, 4))
@pytest.mark.parametrize("call", ["create", "open"])
async def test_a_creation_whose_log_fails(process: Process, call: str, at: int) -> None:
    await process.start()
    calls = 0

    def fail(name: str) -> None:
        nonlocal calls
        calls += name == call
        if name == "delete" or (name == call and calls == at):
            raise error("LOG_REFUSED", "no room")

    process.logs.before = fail
    with pytest.raises(UnavailableError, match="no room"):
        await make(process)
    assert there(process) == []
    await process.restart()
    assert not is_whole(process)
    await make(process)
    assert is_whole(process)


async def _ended_at(process: Process, at: int, one_by_one: bool, monkeypatch: pytest.MonkeyPatch, work: Any) -> bool:
    """Ends the process just after the so-manieth write of records; whether it came to that."""
    writes = 0
    put = Store.put_topics

    async def ending(store: Store, *records: TopicRecord) -> None:
        nonlocal writes
        for some in [(record,) for record in records] if one_by_one else [records]:
            await put(store, *some)
            writes += 1
            if writes == at:
                raise Kill

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put_topics", ending)
        try:
            await work
        except Kill:
            pass
        else:
            return False
    # Nothing of this process goes on: the next one finds its files.
    process.store.close()
    for _, storage in process.storages.values():
        if storage.writer is not None:
            storage.writer.crash(None)
    await process.start()
    return True


@pytest.mark.parametrize("one_by_one", [False, True], ids=["in-one-write", "control-one-by-one"])
async def test_a_process_that_ends_after_any_write_leaves_all_or_nothing(
    process: Process, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await process.start()
    halves = 0
    for begin, work in ((None, make), (make, delete)):
        for at in range(1, 20):
            if begin is not None and not process.topics.registry.open_topics():
                await begin(process)
            ended = await _ended_at(process, at, one_by_one, monkeypatch, work(process))
            halves += len(there(process)) not in (0, 3)
            if halves or not ended:
                break
            if begin is None and process.topics.registry.open_topics():
                await delete(process)
        if halves:
            break
        if begin is None:
            await delete(process)
    assert (halves > 0) == one_by_one
    if not one_by_one:
        assert not is_whole(process)


async def test_a_partition_that_is_not_there_is_said(process: Process) -> None:
    await process.start()
    await make(process)
    lost = record_of(process.topics, PARTS[1]).incarnation
    await process.stop()
    process.store = type(process.store).open_failing(process.folder)
    await process.store.remove_topic(lost)
    process.store.close()
    del process.storages[lost]
    await process.start()
    assert there(process) == [PARTS[0], PARTS[2]]
    found = directory.partitions_of(process.topics, WHOLE)
    assert [topic is None for topic in found] == [False, True, False]
    # It is not made again in silence.
    with pytest.raises(InvalidRequestError, match="would be taken for a partition"):
        await process.topics.get_or_create(partition_name("w", 1))
    await directory.delete_partitioned(process.topics, WHOLE)
    assert not is_whole(process)
