"""A topic that goes to another sidecar: what goes with it, and no matter what fails on the way. In one process."""

import asyncio
import copy
import errno
import itertools
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from broker_sidecar.cluster import departures
from broker_sidecar.cluster.departures import Giving
from broker_sidecar.services import arrival_calls
from seqdedupe.client import Client, Verdict
from seqdedupe.client.cursor import Kept
from seqdedupe.client.route import Sidecars
from seqdedupe.doctor.examine import examine
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.format import headers
from seqdedupe.format.headers import SECRET_BYTES
from seqdedupe.log.contract import Failure
from seqdedupe.log.embedded import log_folder
from seqdedupe.log.embedded.log_folder import ARRIVING, MOVE_BYTES, RECEIVER_BYTES, Arrival, receiver
from seqdedupe.message_id import Position
from seqdedupe.store import parts, rocksdb
from seqdedupe.topic.keeper import Keeper, RestoredState
from seqdedupe.topic.registry import Phase
from seqdedupe.topic.topic import Topic
from seqdedupe.transfer.stored_records import IncomingSnapshot, row_bytes
from seqdedupe.v1 import admin_pb2
from seqdedupe.v1.admin_pb2_grpc import AdminServiceStub
from tests.broker_sidecar.moving_messages import rows_in_store
from tests.broker_sidecar.moving_pair import LIMIT_SECONDS, TOPIC, One, Pair, answers_late, pair
from tests.log.power import Disk
from tests.records_of import record_of

BEFORE = 200
"""Messages that are there at first: several segments."""


@pytest.fixture
async def empty(tmp_path: Path) -> AsyncIterator[Pair]:
    async with pair(tmp_path, backup_directory=str(tmp_path)) as made:
        yield made


@pytest.fixture
async def two(empty: Pair) -> Pair:
    await empty.old.client.admin.create_topic(TOPIC)
    await empty.publish(empty.old, BEFORE)
    return empty


def incarnation(one: One) -> int:
    found: int = record_of(one.topics, TOPIC).incarnation
    return found


async def reason_of(call: Awaitable[Any]) -> str:
    """What a call is refused for."""
    with pytest.raises(SeqdedupeError) as raised:
        await call
    return raised.value.reason


def leftovers(one: One) -> list[str]:
    folder = one.folder / "logs" / ARRIVING
    try:
        return [str(path) for path in folder.rglob("*") if path.is_file()]
    except FileNotFoundError:
        # It is being removed, or there is none.
        return [str(folder)] if folder.exists() else []


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


# -- what goes with it -------------------------------------------------------------------------------------------


async def test_to_and_fro_under_load_with_readers_that_follow(two: Pair) -> None:
    sent = 0
    stopping = asyncio.Event()
    seen: list[int] = []

    async def send() -> None:
        nonlocal sent
        async with Client(two.both) as client, client.producer(TOPIC, "p") as producer:
            receipts = []
            while not stopping.is_set():
                receipts.append(await producer.send(b"under load"))
                sent += 1
                await asyncio.sleep(0.001)
            for receipt in receipts:
                await receipt

    async def follow() -> None:
        async with Client(two.both) as client, client.reader(TOPIC, follow=True) as reader:
            async for message in reader:
                seen.append(message.sequence_id)  # noqa: PERF401 (it is looked at meanwhile)

    made = incarnation(two.old)
    sending, following = asyncio.ensure_future(send()), asyncio.ensure_future(follow())
    for owner, other in ((two.old, two.new), (two.new, two.old), (two.old, two.new)):
        before = sent
        await until(lambda before=before: sent > before + 50)  # type: ignore[misc]
        await owner.client.admin.move_topic(TOPIC, other.address)
        assert await two.the_owner() is other
        # It may be said again.
        assert await owner.client.admin.move_topic(TOPIC, other.address) == other.address
        # Nothing of it takes room where it was, and it is not in the way there.
        assert (owner.segments(made), incarnation(other)) == ([], made)
        assert await reason_of(owner.client.admin.create_topic(TOPIC)) == "NOT_OWNER"
        # Anyone who knows the old one alone learns how to find it, and no path of the server.
        with pytest.raises(SeqdedupeError) as told:
            await owner.client.ends(TOPIC)
        assert f"topic {TOPIC}: it was moved: the sidecar at {other.address} has it" in told.value.message
        assert told.value.hint.endswith(f"…,{other.address}")
        assert not leftovers(other)
    stopping.set()
    await asyncio.wait_for(sending, LIMIT_SECONDS)
    total = BEFORE + sent
    assert await two.stored(two.new) == list(range(total))
    await until(lambda: len(seen) >= total)
    following.cancel()
    assert seen == list(range(total))
    # The way is known after a start, too, and messages are still nobody's but the owner's.
    for one in (two.old, two.new):
        await one.restart()
    assert await two.the_owner() is two.new
    assert await two.stored(two.new) == list(range(total))


async def test_numbers_sessions_policy_cursors_and_what_retention_dropped_go_with_it(two: Pair) -> None:
    old, new = two.old.client, two.new.client
    async with old.producer(TOPIC, "rare") as producer:
        await (await producer.send(b"x", 7))
    policy = admin_pb2.TopicPolicy(retention_size_in_mb=0, deduplication_entries_interval=10)
    await old.admin.set_policy(TOPIC, policy)
    cursor = old.cursor(TOPIC, "mine")
    await cursor.compare_and_set(None, (await kept_at_end(two)))
    async with Client(two.both) as client:
        gateway = [client.producer(TOPIC, f"p{k}") for k in range(50)]
        for producer in gateway:
            await producer.__aenter__()
            await (await producer.send(b"1"))
        await two.publish(two.old, BEFORE, "q")
        await old.admin.snapshot(TOPIC)
        await until(lambda: two.old.topics.get(TOPIC).first_index > BEFORE // 2)
        before = await old.admin.topic(TOPIC)
        await old.admin.move_topic(TOPIC, two.new.address)
        # Their sessions go on.
        for producer in gateway:
            await (await producer.send(b"2"))
            await producer.__aexit__(None, None, None)
    after = await new.admin.topic(TOPIC)
    assert after.set_policy == before.set_policy
    assert (after.incarnation, after.producers) == (before.incarnation, before.producers)
    assert after.first_index >= before.first_index > 0
    assert after.last.index == before.last.index + 50
    assert (await new.admin.producer(TOPIC, "rare")).persisted == 7
    assert [one.name for one in await new.admin.cursors(TOPIC)] == ["mine"]
    assert await new.cursor(TOPIC, "mine").read() is not None
    async with new.producer(TOPIC, "rare") as producer:
        assert (await (await producer.send(b"x", 7))).verdict is Verdict.DUP


async def kept_at_end(two: Pair) -> Kept:
    return Kept(Position.from_proto((await two.old.client.admin.topic(TOPIC)).last))


async def test_the_window_of_deduplication_ids_goes_with_it(empty: Pair) -> None:
    old, new = empty.old.client, empty.new.client
    await old.admin.create_topic(TOPIC, deduplication_mode="deduplication-id")
    await old.admin.set_policy(TOPIC, admin_pb2.TopicPolicy(retention_size_in_mb=0, deduplication_entries_interval=10))
    ids = [f"id {k}" for k in range(300)]
    async with Client(empty.both) as client, client.publisher(TOPIC) as publisher:
        for start in range(0, 300, 50):
            await asyncio.gather(*(publisher.send(b"x" * 60, deduplication_id=one) for one in ids[start : start + 50]))
        await old.admin.snapshot(TOPIC)
        await until(lambda: empty.old.topics.get(TOPIC).first_index > 100)
        last = asyncio.gather(*(publisher.send(b"y", deduplication_id=f"last {k}") for k in range(20)))
        await old.admin.move_topic(TOPIC, empty.new.address)
        await last
        # The oldest are in no log any more.
        again = await asyncio.gather(*(publisher.send(b"z", deduplication_id=one) for one in ids))
        assert {one.verdict for one in again} == {Verdict.DUP}
        assert sorted(one.index for one in again) == list(range(300))
    found = await new.admin.topic(TOPIC)
    assert (found.window_first_index, found.window_messages) == (0, 320)


async def test_a_secret_that_only_the_log_knows_goes_with_it(two: Pair) -> None:
    """As after a start that has made the store's records again."""
    topics = two.old.topics
    record = record_of(topics, TOPIC)
    topics.registry.entry(TOPIC).record = type(record)(record.name, record.incarnation, record.state)
    await two.old.client.admin.move_topic(TOPIC, two.new.address)
    assert await two.stored(two.new) == list(range(BEFORE))


async def test_a_topic_without_a_message_goes_too(empty: Pair) -> None:
    await empty.old.client.admin.create_topic(TOPIC)
    await empty.old.client.admin.move_topic(TOPIC, empty.new.address)
    await empty.publish(empty.new, 5)
    assert await empty.stored(empty.new) == list(range(5))


# -- what is refused ---------------------------------------------------------------------------------------------


async def stays(two: Pair, to: str | None = None) -> SeqdedupeError:
    """It cannot be moved: why; the old one goes on as if nothing had been."""
    with pytest.raises(SeqdedupeError) as raised:
        await two.old.client.admin.move_topic(TOPIC, two.new.address if to is None else to)
    assert await two.the_owner() is two.old
    await until(lambda: not leftovers(two.new))
    await two.publish(two.old, 1)
    stored = await two.stored(two.old)
    assert stored == list(range(len(stored)))
    return raised.value


async def test_who_cannot_have_it(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for to in ("", "127.0.0.1:1", "unix:/elsewhere", "no address"):
        assert (await stays(two, to)).reason == "INVALID_ADDRESS"
    # Itself has it already.
    await two.old.client.admin.move_topic(TOPIC, two.old.address)
    assert await two.the_owner() is two.old
    with monkeypatch.context() as m:
        m.setattr(two.new.topics, "_max_topics", 0)
        assert "max_topics" in (await stays(two)).message
    for field in ("log_format_version", "store_format_version"):
        for version in (1, 99):
            with monkeypatch.context() as m:
                m.setattr(Giving, "begin", with_version(Giving.begin, field, version))
                assert "format version" in (await stays(two)).message
    with monkeypatch.context() as m:
        m.setattr(two.new.arriving, "_logs", None)
        assert "without shards" in (await stays(two)).message
    with monkeypatch.context() as m:
        m.setattr(two.old.topics, "partitions_beside", lambda name: 3)
        assert "partition" in (await stays(two)).message
    await two.new.client.admin.create_topic(TOPIC)
    with pytest.raises(SeqdedupeError, match="exists already"):
        await two.old.client.admin.move_topic(TOPIC, two.new.address)
    assert two.old.serves()
    await two.new.client.admin.delete_topic(TOPIC)
    await two.new.stop()
    assert (await stays(two)).reason == "MOVE_FAILED"
    await two.new.start()


def with_version(begin: Any, field: str, version: int) -> Any:
    async def other(self: Giving) -> str:
        send = self._send

        async def changed(**fields: Any) -> None:
            if "head" in fields:
                setattr(fields["head"], field, version)
            await send(**fields)

        self._send = changed  # type: ignore[method-assign]
        said: str = await begin(self)
        return said

    return other


async def test_what_is_damaged_is_not_moved(two: Pair) -> None:
    folder = two.old.log_folder(incarnation(two.old))
    first = sorted(folder.glob("*.log"))[0]
    raw = first.read_bytes()
    first.write_bytes(raw[:3000] + bytes([raw[3000] ^ 1]) + raw[3001:])
    with pytest.raises(SeqdedupeError, match="byte"):
        await two.old.client.admin.move_topic(TOPIC, two.new.address)
    first.write_bytes(raw)
    await stays(two, "")


async def test_one_that_grows_faster_than_it_is_copied_is_never_held(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ROUNDS", 1), ("REST_BYTES", -1), ("MAX_REST_BYTES", -1)):
        monkeypatch.setattr(departures, name, value)
    held: list[object] = []
    hold = Topic.hold

    def told(self: Topic, why: SeqdedupeError) -> None:
        held.append(why)
        hold(self, why)

    monkeypatch.setattr(Topic, "hold", told)
    assert "faster" in (await stays(two)).message
    assert not held
    # Before it is given up those who publish wait in turns; afterwards nobody does.
    turns = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(turns) * departures.TURN_SECONDS)
    monkeypatch.setattr(departures, "time", clock)
    monkeypatch.setattr(departures, "SLOW_ROUND", 0)
    assert "faster" in (await stays(two)).message
    assert 0 < len(held) < next(turns)


async def test_one_that_does_not_go_on_keeps_nobody_waiting_for_longer_than_a_turn(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(departures, "SLOW_ROUND", 0)
    monkeypatch.setattr(departures, "time", SimpleNamespace(monotonic=lambda: 1.5 * departures.TURN_SECONDS))
    stuck, go_on = asyncio.Event(), asyncio.Event()
    send = Giving._send

    async def sending(self: Giving, **fields: Any) -> None:
        if "log" in fields and not stuck.is_set():
            assert not two.old.serves()
            stuck.set()
            await go_on.wait()
        await send(self, **fields)

    monkeypatch.setattr(Giving, "_send", sending)
    moving = asyncio.ensure_future(two.old.client.admin.move_topic(TOPIC, two.new.address))
    await asyncio.wait({moving, asyncio.ensure_future(stuck.wait())}, return_when=asyncio.FIRST_COMPLETED)
    await until(two.old.serves)
    assert not moving.done()
    go_on.set()
    await moving
    assert await two.stored(two.new) == list(range(BEFORE))


# -- what fails --------------------------------------------------------------------------------------------------


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def lost(*_: object) -> None:
    raise error("STORE_UNAVAILABLE", "planted")


def defect(*_: object) -> None:
    raise ZeroDivisionError("planted")


def in_store(name: str, number: int) -> Callable[[pytest.MonkeyPatch, Pair], None]:
    """This call of the new one's store fails."""

    def plant(m: pytest.MonkeyPatch, two: Pair) -> None:
        store = two.new.topics.store
        planted = at_await if name == "put_topics" else at_call
        m.setattr(store, name, planted(getattr(store, name), number, lost))

    return plant


def in_opening(m: pytest.MonkeyPatch, two: Pair) -> None:
    m.setattr(two.new.topics.kind, "open", at_await(two.new.topics.kind.open, 1, lost))


def opened_again(m: pytest.MonkeyPatch, two: Pair) -> None:
    """The new one's store fails and is there again, before all of the snapshot has come: what it had may be lost."""
    store = two.new.topics.store
    add = IncomingSnapshot.add

    async def broken(self: IncomingSnapshot, data: bytes) -> None:
        await add(self, data)
        store._opening = replace(store._opening, number=store.opening + 1)

    m.setattr(IncomingSnapshot, "add", broken)


FAILURES: dict[str, Callable[[pytest.MonkeyPatch, Pair], None]] = {
    "the new disk at the beginning": lambda m, two: m.setattr(Arrival, "begin", full),
    "the new disk in the log": lambda m, two: m.setattr(Arrival, "write", at_call(Arrival.write, 2, full)),
    "the new disk at the end": lambda m, two: m.setattr(Arrival, "finish", full),
    "the new store at the beginning": in_store("put_topics", 1),
    "the new store in the snapshot": in_store("write", 1),
    "the new store at the snapshot's end": in_store("flush", 1),
    "the new store is opened again": opened_again,
    "the new store's reading": lambda m, two: m.setattr(RestoredState, "load", lost),
    "the new store at the end": in_store("put_topics", 2),
    "the new log's opening": in_opening,
    "the old disk": lambda m, two: m.setattr(log_folder, "leave", full),
    "the old store's snapshot": lambda m, two: m.setattr(Keeper, "snapshot", at_await(Keeper.snapshot, 1, lost)),
    "the old log's reading": lambda m, two: m.setattr(departures, "_read", full),
    "a defect": lambda m, two: m.setattr(departures, "_read", lambda *_: 1 // 0),
    "a defect at the end": lambda m, two: m.setattr(Giving, "end", lambda *_: 1 // 0),
}


def at_call(function: Any, number: int, fails: Callable[..., None]) -> Any:
    calls = iter(range(1, 1_000_000))

    def called(*arguments: Any) -> Any:
        if next(calls) == number:
            fails()
        return function(*arguments)

    return called


def at_await(function: Any, number: int, fails: Callable[..., None]) -> Any:
    calls = iter(range(1, 1_000_000))

    async def called(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            fails()
        return await function(*arguments, **named)

    return called


async def test_whatever_fails_the_old_one_goes_on_and_it_can_be_moved_afterwards(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for what, plant in FAILURES.items():
        with monkeypatch.context() as m:
            plant(m, two)
            try:
                why = await stays(two)
            except AssertionError as e:
                raise AssertionError(f"{what}: {e}") from e
            assert why.reason == "MOVE_FAILED", what
        assert not two.new.arriving._under_way, what
        assert two.new.topics.registry.record(TOPIC) is None, what
        assert not two.new.topics.store.topics(), what
        assert not rows_in_store(two.new, incarnation(two.old)), what
    await two.old.client.admin.move_topic(TOPIC, two.new.address)
    assert await two.stored(two.new) == list(range(BEFORE + len(FAILURES)))


def removed_half(m: pytest.MonkeyPatch, two: Pair) -> None:
    """What is left of the topic where it was before cannot be removed at once: only where it has gone."""

    def cut_short(folder: Path) -> None:
        m.undo()
        (folder / log_folder.MOVED_FILE).unlink()
        full()

    m.setattr(shutil, "rmtree", cut_short)


BACK = {**FAILURES, "what was here is removed half": removed_half}
"""For one that comes back, what is left of it goes first."""


async def test_whatever_fails_on_the_way_back_nothing_is_lost(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was before it is known by name, and by incarnation: that must not be taken for having it."""
    back = copy.copy(two)
    back.old, back.new = two.new, two.old
    total = BEFORE
    for what, plant in BACK.items():
        if two.old.topics.registry.record(TOPIC) is None:
            if await two.the_owner() is back.old:
                await until(lambda: not two.old.topics.store.topics())
                await back.old.client.admin.move_topic(TOPIC, back.new.address)
            await two.old.client.admin.move_topic(TOPIC, two.new.address)
        elif two.old.serves():
            await two.old.client.admin.move_topic(TOPIC, two.new.address)
        with monkeypatch.context() as m:
            plant(m, back)
            try:
                assert (await stays(back)).reason == "MOVE_FAILED"
            except AssertionError as e:
                raise AssertionError(f"{what}: {e}") from e
        total += 1
        assert await two.stored(two.new) == list(range(total)), what
    await until(lambda: two.old.topics.registry.record(TOPIC) is not None or not two.old.topics.store.topics())
    await two.new.client.admin.move_topic(TOPIC, two.old.address)
    assert await two.stored(two.old) == list(range(total))


@pytest.mark.parametrize("fails_at", ["before it is sent", "in the store", "in the removal"])
async def test_one_that_comes_back_is_in_doubt_and_both_start_again(
    two: Pair, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    await two.old.client.admin.move_topic(TOPIC, two.new.address)
    back = copy.copy(two)
    back.old, back.new = two.new, two.old
    with monkeypatch.context() as m:
        m.setattr(departures, "TAKE_SECONDS", 0.5)

        async def nothing(*_: Any) -> Any:
            raise error("UNREACHABLE", "planted")

        m.setattr(two.new.leaving.others, "ask", nothing)
        if fails_at == "before it is sent":
            m.setattr(Giving, "end", at_await(Giving.end, 1, lost))
        elif fails_at == "in the store":
            in_store("put_topics", 1)(m, back)
        else:
            # Nothing is put right before the process ends.
            m.setattr(two.old.topics.stored, "undo", nothing)
            removed = two.old.topics.kind.delete

            async def cut_short(*incarnations: int) -> None:
                (two.old.log_folder(*incarnations) / log_folder.MOVED_FILE).unlink()
                await nothing()
                await removed(*incarnations)

            m.setattr(two.old.topics.kind, "delete", cut_short)
        assert await reason_of(two.new.client.admin.move_topic(TOPIC, two.old.address)) == "MOVE_FAILED"
        assert not two.new.serves()
        for one in (two.old, two.new):
            await one.stop()
    for one in (two.new, two.old):
        await one.start()
    assert await two.the_owner() is two.new
    await two.publish(two.new, 1)
    assert await two.stored(two.new) == list(range(BEFORE + 1))
    await two.new.client.admin.move_topic(TOPIC, two.old.address)
    assert await two.stored(two.old) == list(range(BEFORE + 1))


async def test_an_answer_that_comes_when_the_topic_has_come_back_removes_nothing(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, heard = answers_late(two.old, monkeypatch)
    monkeypatch.setattr(departures, "TAKE_SECONDS", 0.1)
    await two.old.client.admin.move_topic(TOPIC, two.new.address)
    await answered.wait()
    await two.new.client.admin.move_topic(TOPIC, two.old.address)
    assert await two.the_owner() is two.old
    held = two.old.segments(incarnation(two.old))
    heard.set()
    await until(lambda: not any("_settle" in str(task) for task in two.old.topics._background))
    assert two.old.segments(incarnation(two.old)) == held != []
    await two.old.restart()
    assert await two.the_owner() is two.old
    assert await two.stored(two.old) == list(range(BEFORE))


async def test_a_defect_in_asking_ends_nothing(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = two.old.leaving.others.ask
    monkeypatch.setattr(two.old.leaving.others, "ask", at_await(ask, 1, defect))
    await two.old.client.admin.move_topic(TOPIC, two.new.address)
    assert await two.the_owner() is two.new


async def test_a_store_that_is_behind_is_waited_for(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot that is written as fast as it is read stops the store of all topics."""
    store = two.new.topics.store
    asked = 0
    is_behind = rocksdb.is_behind

    def behind(db: Any) -> bool:
        nonlocal asked
        if db is not store._opening.db or asked == 20:
            return is_behind(db)
        asked += 1
        return True

    monkeypatch.setattr(rocksdb, "is_behind", behind)
    await two.old.client.admin.move_topic(TOPIC, two.new.address)
    assert asked == 20
    assert await two.stored(two.new) == list(range(BEFORE))


async def test_one_that_somebody_else_holds_stays_held(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    why = error("STORE_UNAVAILABLE", "planted")
    snapshot = Keeper.snapshot

    async def held(self: Keeper) -> None:
        await snapshot(self)
        self._topic.hold(why)  # type: ignore[attr-defined]

    with monkeypatch.context() as m:
        m.setattr(Keeper, "snapshot", held)
        assert await reason_of(two.old.client.admin.move_topic(TOPIC, two.new.address)) == "MOVE_FAILED"
    assert not two.old.serves()
    two.old.topics.get(TOPIC).release(why)
    assert two.old.serves()
    two.old.topics.registry.entry(TOPIC).change_to(Phase.DELETING)
    assert await reason_of(two.old.client.admin.move_topic(TOPIC, two.new.address)) == "MOVE_FAILED"
    two.old.topics.registry.entry(TOPIC).ended(Phase.DELETING)


def test_who_gave_it_long_ago_says_nothing_of_the_last_move(tmp_path: Path) -> None:
    (tmp_path / log_folder.ARRIVED_FILE).write_text("the last")
    log_folder.is_known(tmp_path, "one before")
    assert (tmp_path / log_folder.ARRIVED_FILE).exists()
    for _ in range(2):
        log_folder.is_known(tmp_path, "the last")
        assert not (tmp_path / log_folder.ARRIVED_FILE).exists()


async def test_the_log_fails_while_the_topic_is_held(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = Giving.copy_rest

    async def failing(self: Giving, topic: Topic) -> None:
        await rest(self, topic)
        # What becomes of it is found out, in another term.
        topic.owner.log_failed(Failure.UNKNOWN, "planted")
        await until(lambda: topic.state.name == "SERVING" and topic.term > 1)

    monkeypatch.setattr(Giving, "copy_rest", failing)
    assert "failed meanwhile" in (await stays(two)).message


async def test_a_sidecar_that_drains_at_any_moment(two: Pair) -> None:
    """It gives the move up wherever it is; after the next start one of the two has the topic."""
    total = BEFORE
    for k in range(24):
        owner = await two.the_owner()
        other = two.new if owner is two.old else two.old
        moving = asyncio.ensure_future(owner.leaving.move(TOPIC, other.address))
        for _ in range(3 * k):
            await asyncio.sleep(0)
        await (owner if k % 3 else other).restart()
        await asyncio.gather(moving, return_exceptions=True)
        now = await two.the_owner()
        await two.publish(now, 1)
        total += 1
        assert await two.stored(now) == list(range(total)), k
        await until(lambda: not (leftovers(two.old) or leftovers(two.new)))


async def test_one_that_is_broken_off_while_its_folder_is_made_leaves_nothing(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread makes the folder when the call is over."""
    begin, has_come, may_go_on, is_made = Arrival.begin, threading.Event(), threading.Event(), threading.Event()

    def late(self: Arrival, *arguments: Any) -> None:
        has_come.set()
        may_go_on.wait(LIMIT_SECONDS)
        begin(self, *arguments)
        is_made.set()

    with monkeypatch.context() as m:
        m.setattr(Arrival, "begin", late)
        moving = asyncio.ensure_future(two.old.leaving.move(TOPIC, two.new.address))
        await until(has_come.is_set)
        await two.old.restart()
        await asyncio.gather(moving, return_exceptions=True)
        await until(lambda: not two.new.arriving._under_way)
        may_go_on.set()
        await until(is_made.is_set)
        await until(lambda: not leftovers(two.new))
    # And it can come.
    await until(lambda: two.old.serves())
    await two.old.client.admin.move_topic(TOPIC, two.new.address)
    assert await two.stored(two.new) == list(range(BEFORE))


async def test_who_asked_for_it_may_go(two: Pair) -> None:
    for k in (0, 1, 5, 20, 60):
        owner = await two.the_owner()
        other = two.new if owner is two.old else two.old
        asking = asyncio.ensure_future(owner.client.admin.move_topic(TOPIC, other.address))
        for _ in range(k):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda owner=owner: owner.topics.registry.phase(TOPIC) is not Phase.MOVING)  # type: ignore[misc]
        await two.the_owner()
    assert await two.stored(await two.the_owner()) == list(range(BEFORE))


# -- what is done with it meanwhile --------------------------------------------------------------------------------


@pytest.fixture
def halfway(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """A move stops before the topic takes nothing any more: an event that tells so, and one that lets it go on."""
    there, go_on = asyncio.Event(), asyncio.Event()
    copy = Giving.copy_while_it_serves

    async def waiting(self: Giving, topic: Topic) -> None:
        await copy(self, topic)
        there.set()
        await go_on.wait()

    monkeypatch.setattr(Giving, "copy_while_it_serves", waiting)
    yield there, go_on
    go_on.set()


async def test_what_is_asked_for_in_the_middle(
    two: Pair, halfway: tuple[asyncio.Event, asyncio.Event], tmp_path: Path
) -> None:
    old = two.old.client
    moving = asyncio.ensure_future(old.admin.move_topic(TOPIC, two.new.address))
    await halfway[0].wait()
    assert await reason_of(old.admin.move_topic(TOPIC, two.new.address)) == "MOVE_FAILED"
    for call in (old.admin.delete_topic, old.admin.rebuild_topic):
        assert await soon(call(TOPIC)) == "RECOVERING"
    await old.admin.export_snapshot(TOPIC, tmp_path / "snapshot")
    assert await soon(old.admin.import_snapshot(TOPIC, tmp_path / "snapshot")) == "RECOVERING"
    # What is changed now goes along, and nothing is dropped that is still to be copied.
    await old.admin.set_policy(TOPIC, admin_pb2.TopicPolicy(retention_size_in_mb=0))
    await two.publish(two.old, 10)
    await old.admin.snapshot(TOPIC)
    assert two.old.topics.get(TOPIC).first_index == 0
    assert [one.topics for one in await old.admin.backup("meanwhile")] == [1]
    halfway[1].set()
    await moving
    assert await two.stored(two.new) == list(range(BEFORE + 10))
    assert (await two.new.client.admin.topic(TOPIC)).set_policy.retention_size_in_mb == 0
    # It is no part of the old one's backups any more, which are whole.
    [made] = await old.admin.backup("afterwards")
    assert (made.topics, len(made.left_out), len(made.damaged)) == (0, 0, 0)
    assert [one.topics for one in await two.new.client.admin.backup("there")] == [1]
    assert examine(tmp_path / "there").is_whole


async def soon(call: Awaitable[Any]) -> str:
    """Why it is refused, also where that would be tried again for long."""
    try:
        async with asyncio.timeout(1):
            await call
    except TimeoutError:
        return "RECOVERING"
    except SeqdedupeError as e:
        return e.reason
    return ""


async def test_another_of_that_name_is_made_meanwhile(two: Pair, halfway: tuple[asyncio.Event, asyncio.Event]) -> None:
    moving = asyncio.ensure_future(two.old.client.admin.move_topic(TOPIC, two.new.address))
    await halfway[0].wait()
    await two.new.client.admin.create_topic(TOPIC)
    halfway[1].set()
    assert await reason_of(moving) == "MOVE_FAILED"
    await until(two.old.serves)
    assert await two.stored(two.old) == list(range(BEFORE))
    assert await two.stored(two.new) == []


# -- who knows of it ----------------------------------------------------------------------------------------------


async def test_whoever_publishes_is_told_where_the_topic_went(two: Pair) -> None:
    """It need not look for it at a third sidecar, which may not answer."""
    first, second = (
        two.old if str(address) == two.old.address else two.new for address in Sidecars.parse(two.both).in_order(TOPIC)
    )
    if first is two.new:
        await two.old.client.admin.move_topic(TOPIC, first.address)
    folder = Path(two.old.address.removeprefix("unix:")).parent
    third = next(
        address
        for address in (f"unix:{folder}/{number}" for number in range(1000))
        if [str(one) for one in Sidecars.parse(f"{two.both},{address}").in_order(TOPIC)]
        == [first.address, address, second.address]
    )
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(third.removeprefix("unix:"))
        silent.listen()
        silent.setblocking(False)
        async with Client(f"{two.both},{third}") as client, client.producer(TOPIC, "one that stays") as producer:
            await (await producer.send(b"before"))
            await first.client.admin.move_topic(TOPIC, second.address)
            await (await producer.send(b"after"))
        with pytest.raises(BlockingIOError):
            silent.accept()
    assert second.serves()


async def test_one_that_has_come_stays_until_the_old_one_has_heard(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = asyncio.Event()
    ask = two.old.leaving.others.ask

    async def late(*arguments: Any) -> Any:
        await heard.wait()
        return await ask(*arguments)

    monkeypatch.setattr(two.old.leaving.others, "ask", late)
    moving = asyncio.ensure_future(two.old.client.admin.move_topic(TOPIC, two.new.address))
    await until(two.new.serves)
    made = incarnation(two.new)
    assert await soon(two.new.client.admin.delete_topic(TOPIC)) == "RECOVERING"
    # Or given on: the old one would get the answer no, and take it again.
    assert await soon(two.new.client.admin.move_topic(TOPIC, two.old.address)) == "RECOVERING"
    # Nor is anything removed at the old one, whose next backup says what it lacks.
    assert two.old.segments(made)
    await until(lambda: two.old.topics.registry.entry(TOPIC).closed is not None)
    [made_then] = await two.old.client.admin.backup("in-doubt")
    assert [one.topic for one in made_then.left_out] == [TOPIC]
    heard.set()
    await moving
    await until(lambda: not two.old.segments(made))
    await two.new.client.admin.delete_topic(TOPIC)
    # Its name is still the new one's, there.
    assert await reason_of(two.old.client.admin.create_topic(TOPIC)) == "NOT_OWNER"
    await two.new.client.admin.create_topic(TOPIC)
    await two.new.client.admin.move_topic(TOPIC, two.old.address)
    assert await two.the_owner() is two.old


async def test_the_old_copy_goes_when_the_new_one_serves_and_not_before(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = incarnation(two.old)
    with monkeypatch.context() as m:
        m.setattr(departures, "TAKE_SECONDS", 1.0)
        ask = two.old.leaving.others.ask

        async def told(address: str, name: str, request: Any, seconds: float) -> Any:
            answer = await ask(address, name, request, seconds)
            answer.is_serving = False
            return answer

        m.setattr(two.old.leaving.others, "ask", told)
        await two.old.client.admin.move_topic(TOPIC, two.new.address)
        assert two.old.segments(made)
        await two.old.stop()
        # The doctor says what lies there.
        [found] = examine(two.old.folder).topics
        assert (found.is_whole, found.log_bytes > 1000) == (True, True)
        assert two.new.address in found.notes[0]
    await two.old.start()
    await until(lambda: not two.old.segments(made))
    assert await two.the_owner() is two.new


async def test_another_data_directory_at_that_address_says_nothing(
    two: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as m:
        m.setattr(departures, "TAKE_SECONDS", 0.2)
        ask = two.old.leaving.others.ask
        asked = asyncio.Event()

        async def late(*arguments: Any) -> Any:
            await asked.wait()
            return await ask(*arguments)

        m.setattr(two.old.leaving.others, "ask", late)
        assert await reason_of(two.old.client.admin.move_topic(TOPIC, two.new.address)) == "MOVE_FAILED"
        assert two.new.serves()
        await two.new.stop()
        shutil.move(two.new.folder, tmp_path / "away")
        await two.new.start()
        asked.set()
        for _ in range(200):
            await asyncio.sleep(0.001)
        # It has it not: but it is none that was given it.
        assert (two.old.serves(), two.new.serves()) == (False, False)
    await two.old.stop()
    [found] = examine(two.old.folder).topics
    assert two.new.address in found.notes[0]
    assert found.messages == BEFORE
    await two.old.start()
    await two.new.stop()
    shutil.rmtree(two.new.folder)
    shutil.move(tmp_path / "away", two.new.folder)
    await two.new.start()
    assert await two.the_owner() is two.new
    await until(lambda: not two.old.segments(incarnation(two.old)))
    assert await two.stored(two.new) == list(range(BEFORE))


async def test_the_doctor_names_what_was_on_its_way(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for removal in ("remove", "remove_messages"):
        monkeypatch.setattr(Arrival, removal, lambda self: None)
    with monkeypatch.context() as m:
        m.setattr(Giving, "end", at_await(Giving.end, 1, lost))
        await reason_of(two.old.client.admin.move_topic(TOPIC, two.new.address))
    await two.new.stop()
    [found] = examine(two.new.folder).topics
    assert (found.name, found.is_whole) == (TOPIC, True)
    assert found.log_bytes > 1000
    assert "on its way" in found.notes[0]
    await two.new.start()
    assert not leftovers(two.new)


def test_one_that_ends_late_removes_nothing_of_the_next(tmp_path: Path) -> None:
    first, second = Arrival(tmp_path, 7), Arrival(tmp_path, 7)
    first.begin("t", b"s")
    with pytest.raises(FileExistsError):
        second.begin("t", b"s")
    second.remove()
    first.write(0, 0, b"x")
    first.remove()
    second.begin("t", b"s")
    second.write(0, 0, b"x")
    first.remove()
    second.finish("")
    assert (tmp_path / "7" / "00000000000000000000.log").read_bytes() == b"x"
    third = Arrival(tmp_path, 7)
    third.begin("t", b"s")
    second.remove()
    assert (tmp_path / ARRIVING / "7" / "topic").exists()


def test_a_data_directory_is_one_receiver(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        said = set(threads.map(receiver, [tmp_path] * 64))
    assert len(said) == 1
    (tmp_path / "receiver").write_bytes(b"")
    assert receiver(tmp_path) not in said


def test_a_receiver_that_is_found_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process before was killed when it had written the file and synced nothing."""
    disk = Disk(tmp_path / "logs", monkeypatch)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "receiver").write_text("ab" * RECEIVER_BYTES)
    said = receiver(tmp_path / "logs")
    assert said == "ab" * RECEIVER_BYTES
    assert receiver(disk.after_a_power_cut(tmp_path / "cut")) == said


# -- who lies ------------------------------------------------------------------------------------------------------


def head(**fields: Any) -> admin_pb2.ReceiveTopicRequest:
    made = admin_pb2.MovedTopic(
        topic=TOPIC,
        incarnation=5,
        secret=bytes(SECRET_BYTES),
        log_format_version=headers.FORMAT_VERSION,
        store_format_version=parts.FORMAT_VERSION,
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return admin_pb2.ReceiveTopicRequest(head=made)


def log(base_index: int = 0, offset: int = 0, data: bytes = b"x") -> admin_pb2.ReceiveTopicRequest:
    return admin_pb2.ReceiveTopicRequest(log=admin_pb2.LogPart(base_index=base_index, offset=offset, data=data))


def rows(data: bytes) -> admin_pb2.ReceiveTopicRequest:
    return admin_pb2.ReceiveTopicRequest(snapshot=data)


def end(next_index: int) -> admin_pb2.ReceiveTopicRequest:
    return admin_pb2.ReceiveTopicRequest(end=admin_pb2.MovedEnd(next_index=next_index))


ALL = end(0)
HEADER = b"S" + (5).to_bytes(8, "big") + b"H" + bytes(8)
LIES: dict[str, list[admin_pb2.ReceiveTopicRequest]] = {
    "no head": [log()],
    "a short secret": [head(secret=b"x")],
    "an incarnation of tomorrow": [head(incarnation=2**62)],
    "no topic": [head(topic="")],
    "a hole in the log": [head(), log(), log(offset=2)],
    "an earlier segment": [head(), log(5), log(0)],
    "a segment from its middle": [head(), log(offset=7)],
    "nothing": [head(), ALL],
    "a log of another": [head(), log(data=bytes(5000)), ALL],
    "less than was said": [head(), log(data=b""), end(1)],
    "half a record of the store": [head(), log(data=b""), rows(b"\x12\0\0\0\xff\xff\0\0S"), ALL],
    "another topic's record": [head(), log(data=b""), rows(row_bytes(b"T" + bytes(8), b"x")), ALL],
    "a record that is none": [head(), log(data=b""), rows(row_bytes(HEADER, b"x")), ALL],
    "a huge record": [head(), log(data=b""), rows(b"\x12\0\0\0\xff\xff\xff\xff"), ALL],
    "a part that is too large": [head(), log(data=bytes(1024 * 1024))],
    "an end in the middle": [head(), log()],
}  # fmt: skip


async def test_a_peer_that_lies_leaves_nothing(empty: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    two = empty
    monkeypatch.setattr(arrival_calls, "SILENT_SECONDS", 0.3)
    await two.new.client.admin.create_topic("another")
    async with grpc.aio.insecure_channel(two.new.address) as channel:
        stub: Any = AdminServiceStub(channel)
        for what, said in {**LIES, "silence": [head(), log()]}.items():
            call = stub.ReceiveTopic()
            await said_all(call, said, ends=what != "silence")
            assert await call.code() not in (grpc.StatusCode.OK, grpc.StatusCode.INTERNAL), (what, await call.details())
            await until(lambda: not two.new.arriving._under_way)
            assert two.new.topics.registry.record(TOPIC) is None, what
            await until(lambda: not leftovers(two.new))
        # Anyone who gives it in earnest has it taken in one piece; a second one at the same time has not.
        first, second = stub.ReceiveTopic(), stub.ReceiveTopic()
        await first.write(head())
        await first.read()
        await second.write(head())
        with pytest.raises(grpc.aio.AioRpcError, match="already"):
            await second.read()
        first.cancel()
    assert len(two.new.topics.store.topics()) == 1


async def said_all(call: Any, said: list[admin_pb2.ReceiveTopicRequest], *, ends: bool) -> None:
    """Says all that it can before the call is over."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for message in said:
            await call.write(message)
        if ends:
            await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass


class Deaf(grpc.GenericRpcHandler):
    """A peer that takes the head, and then hears nothing; or not even that."""

    def __init__(self, answers: bool) -> None:
        self._answers = answers

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        async def hold(_request: Any, context: Any) -> None:
            await context.read()
            if self._answers:
                said = admin_pb2.ReceiveTopicResponse(receiver=bytes(RECEIVER_BYTES + MOVE_BYTES))
                await context.write(said.SerializeToString())
            await asyncio.Event().wait()

        return grpc.stream_stream_rpc_method_handler(hold)


@pytest.mark.parametrize("answers", [True, False])
async def test_a_peer_that_stands_still_holds_up_nobody_for_ever(
    two: Pair, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    await two.new.stop()
    monkeypatch.setattr(departures, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(departures, "TAKE_SECONDS", 0.3)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([Deaf(answers)])
    server.add_insecure_port(two.new.address)
    await server.start()
    await two.publish(two.old, 500)
    if answers:
        # It is not even told that this is all: the rest does not fit into what may wait on the way.
        async with two.old.client.producer(TOPIC, "large") as producer:
            for receipt in [await producer.send(bytes(1_000_000)) for _ in range(20)]:
                await receipt
    assert "did not continue" in (await stays_alone(two)).message
    await server.stop(None)
    await two.new.start()


async def stays_alone(two: Pair) -> SeqdedupeError:
    with pytest.raises(SeqdedupeError) as raised:
        await two.old.client.admin.move_topic(TOPIC, two.new.address)
    assert two.old.serves()
    return raised.value
