"""Two sidecars and a topic on a real broker: it changes hands no matter what ends its owner; nothing is lost or
doubled."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pulsar
import pytest

from pulsar_broker.standalone import Broker
from seqdedupe.errors import PositionError, UnavailableError
from seqdedupe.log.pulsar import topic_owner as owner_module
from seqdedupe.log.pulsar.admin_url import PulsarAdmin, TopicStats
from seqdedupe.log.pulsar.broker_wire import Brokers
from seqdedupe.log.pulsar.entries import EntryFormat
from seqdedupe.pulsar_wire.connection import Connection
from seqdedupe.topic.base import State
from seqdedupe.topic.readers import check_index, index_after, shown_end
from tests.pulsar.crashes import KEEP_ALIVE_SECONDS, Faults, Scene
from tests.pulsar.line import Line
from tests.pulsar.owners import Cluster, until
from tests.pulsar.producing import FORGETS
from tests.pulsar.publishers import Process
from tests.topic.publisher import Publisher, stored

BOTH = pytest.mark.parametrize("entry_format", EntryFormat, ids=lambda entry_format: entry_format.value)

MANY = 1_000_000
SLOW_MACHINE = 10


@pytest.fixture(scope="module")
def broker(pulsar_home: Path) -> Iterator[Broker]:
    with Broker(pulsar_home, keepAliveIntervalSeconds=KEEP_ALIVE_SECONDS) as broker:
        yield broker


class Two:
    """`one` owns the topic, over a line; `other` is its standby. Their publisher goes to anyone who is left."""

    def __init__(self, one: Process, other: Process, line: Line) -> None:
        self.one, self.other, self.line = one, other, line
        self.left = [one, other]
        self.publisher = Publisher("p", lambda: [each.topic for each in self.left])
        self.publishing: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """The publisher has begun, and does not end by itself."""
        self.publishing = asyncio.ensure_future(self.publisher.publish(MANY))
        await until(lambda: self.publisher.acknowledged > 500)

    def leave(self, gone: Process) -> None:
        """As a client does that hears nothing any more, or whose connection has ended."""
        self.left.remove(gone)
        self.publisher.leave(gone.topic)

    async def finish(self) -> dict[str, list[int]]:
        """A hundred more; then what stands in the topic, by the sequence IDs that were acknowledged."""
        await until(lambda: self.other.topic.state is State.SERVING or self.one.topic.state is State.SERVING)
        count = self.publisher.acknowledged + 100
        await until(lambda: self.publisher.acknowledged >= count)
        assert self.publishing
        self.publishing.cancel()
        await asyncio.wait([self.publishing])
        owner = next(each.topic for each in (self.other, self.one) if each.topic.state is State.SERVING)
        await owner.flight.all_of_now()
        found = (await stored(owner))["p"]
        assert found == list(range(len(found)))
        assert len(found) > self.publisher.acknowledged
        return {"p": found}


@pytest.fixture
async def two(
    request: pytest.FixtureRequest, broker: Broker, cluster: Cluster, topic: str, tmp_path: Path
) -> AsyncIterator[Two]:
    entry_format = getattr(request, "param", EntryFormat.PLAIN)
    await cluster.create(topic)
    async with (
        Line(broker) as line,
        Process(cluster, topic, entry_format, tmp_path, "one", line, is_standby=True) as one,
        Process(cluster, topic, entry_format, tmp_path, "other", is_standby=True) as other,
    ):
        await one.start()
        await other.start()
        assert (one.topic.state, other.topic.state) == (State.SERVING, State.STANDBY)
        assert other.topic.owner_address == "one"
        two = Two(one, other, line)
        yield two
        line.mend()
        line.let_answers_through()
        if two.publishing is not None:
            two.publishing.cancel()
            await asyncio.wait([two.publishing])


def print_outage(what: str, seconds: float, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\nwithout service after {what}: {seconds:.2f} s")


def told(what: str, seconds: float, goal_seconds: float, capsys: pytest.CaptureFixture[str]) -> None:
    print_outage(f"{what} (goal: {goal_seconds} s)", seconds, capsys)
    assert seconds < SLOW_MACHINE * goal_seconds


@pytest.mark.parametrize("two", EntryFormat, indirect=True, ids=lambda entry_format: entry_format.value)
async def test_after_its_owner_was_killed_a_standby_has_the_topic_and_the_old_one_is_a_standby(
    two: Two, capsys: pytest.CaptureFixture[str]
) -> None:
    await two.load()
    two.line.cut(and_stay_down=True)
    two.leave(two.one)
    await until(lambda: two.other.topic.state is State.SERVING)
    receipts = two.publisher.receipts
    await until(lambda: two.publisher.receipts > receipts)
    told("kill -9", two.publisher.longest_gap_seconds, 2.0, capsys)
    await two.finish()
    two.line.mend()
    await until(lambda: two.one.topic.state is State.STANDBY)
    assert two.one.topic.owner_address == "other"
    await until(lambda: two.one.topic.confirmed_index == two.other.topic.confirmed_index)
    # And back.
    await two.other.topic.close("")
    await until(lambda: two.one.topic.state is State.SERVING)
    assert two.one.topic.term > two.other.topic.term


async def test_an_owner_that_is_frozen_is_let_go_of_by_the_broker(
    two: Two, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    await two.load()
    two.line.hold_answers()
    two.leave(two.one)
    await until(lambda: two.other.topic.state is State.SERVING)
    receipts = two.publisher.receipts
    await until(lambda: two.publisher.receipts > receipts)
    told(f"a freeze, keep-alive {KEEP_ALIVE_SECONDS} s", two.publisher.longest_gap_seconds, 12.0, capsys)
    assert "has been silent" not in caplog.text
    two.line.let_answers_through()
    await until(lambda: two.one.topic.state is State.STANDBY)
    assert not len(two.one.topic.flight)
    await two.finish()


async def test_an_owner_that_is_frozen_and_that_the_broker_keeps_is_evicted(
    two: Two,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, seconds in (("ASK_SECONDS", 0.1), ("FROZEN_SECONDS", 0.5)):
        monkeypatch.setattr(owner_module, name, seconds)
    # Its waiting began with the constants as they are.
    await two.other.topic.close("")
    await two.other.start()
    await two.load()
    began = time.monotonic()
    two.line.hold_answers()
    two.leave(two.one)
    cluster.silent.add("one")
    await until(lambda: two.other.topic.state is State.SERVING)
    told("an eviction", time.monotonic() - began, 2.0, capsys)
    assert "has been silent" in caplog.text
    two.line.let_answers_through()
    await until(lambda: two.one.topic.state is State.STANDBY)
    await two.finish()


async def test_a_position_that_a_standby_or_a_successor_has_given_is_never_refused(two: Two) -> None:
    """Neither by an owner that does not know yet what is stored, nor by one that does not know of its successor.

    The controls of both are in tests/topic/test_standby.py.
    """
    one, other = two.one.topic, two.other.topic
    await two.load()
    assert two.publishing
    two.line.hold_answers()
    await until(lambda: other.readable_index > one.confirmed_index)
    position = await other.position_before(other.readable_index)
    asked = [
        asyncio.ensure_future(shown_end(one)),
        asyncio.ensure_future(index_after(one, position)),
    ]
    await asyncio.sleep(0)
    assert not any(each.done() for each in asked)
    two.line.let_answers_through()
    end, after = await asyncio.gather(*asked)
    assert end > position.index
    assert after == position.index + 1
    two.publishing.cancel()
    await asyncio.wait([two.publishing])
    await one.flight.all_of_now()
    # It is the owner, and proves that.
    with pytest.raises(PositionError, match="POSITION_AFTER_END"):
        await check_index(one, one.confirmed_index + 1)
    # From here on it hears nothing, and has nothing in flight.
    two.line.hold_answers()
    two.leave(two.one)
    await until(lambda: other.state is State.SERVING)
    index = other.confirmed_index + 30
    await two.publisher.publish(index)
    position = await other.position_before(index)
    assert one.is_serving
    asking = asyncio.ensure_future(index_after(one, position))
    await until(lambda: len(one.flight) == 1)
    assert not asking.done()
    two.line.let_answers_through()
    with pytest.raises(UnavailableError):
        await asking
    await until(lambda: one.state is State.STANDBY)
    assert await index_after(other, position) == index


async def test_an_owner_that_is_well_keeps_a_topic_that_is_unloaded(two: Two, cluster: Cluster, topic: str) -> None:
    await two.load()
    for _ in range(3):
        acknowledged = two.publisher.acknowledged
        await cluster.admin.unload(topic)
        await until(lambda acknowledged=acknowledged: two.publisher.acknowledged > acknowledged + 500)
    await two.finish()


class Blind(PulsarAdmin):
    """Sees nobody."""

    async def stats(self, topic: str) -> TopicStats:
        return TopicStats((), 0)


class Watched(Brokers):
    """Keeps its last connection, which only this test closes unless it `closes`."""

    made: Connection

    def __init__(self, service_url: str, *, closes: bool) -> None:
        super().__init__(service_url)
        self._closes = closes

    async def connection(self, topic: str) -> Connection:
        self.made = await super().connection(topic)
        if not self._closes:

            async def stay() -> None:
                pass

            self.made.close = stay  # type: ignore[method-assign]
        return self.made


@pytest.mark.parametrize("is_closed", [True, False])
async def test_a_wait_that_is_cancelled_never_gets_the_topic(cluster: Cluster, topic: str, is_closed: bool) -> None:
    """One whose connection is not closed does, and keeps it from all others."""
    await cluster.create(topic)
    client = cluster.connect()
    holder = await client.create_producer(topic, access_mode=pulsar.ProducerAccessMode.Exclusive)
    brokers = Watched(cluster.service_url, closes=is_closed)
    waits = asyncio.ensure_future(owner_module.wait_until_free(topic, Blind(cluster.url), brokers))

    async def is_waited_for() -> bool:
        return (await cluster.admin.stats(topic)).waiting_publishers == 1

    await until(is_waited_for)
    waits.cancel()
    await asyncio.wait([waits])
    await holder.close()
    if is_closed:

        async def is_taken() -> bool:
            try:
                again = await client.create_producer(topic, access_mode=pulsar.ProducerAccessMode.Exclusive)
            except pulsar.asyncio.PulsarException:
                return False
            await again.close()
            return True

        # The broker may give it to the one that has gone, for as long as it has not heard of that.
        await until(is_taken)
        await cluster.until_nobody_writes(topic)
    else:

        async def is_held() -> bool:
            return bool((await cluster.admin.stats(topic)).publishers)

        await until(is_held)
    await client.close()
    await Connection.close(brokers.made)


async def test_three_processes_and_what_ends_or_stops_them(
    broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The control, a topic that does not deduplicate, has doubles afterwards."""
    async with Scene(broker, tmp_path, are_listed=True) as scene:
        faults = Faults(scene, random.Random(1))
        for fault in (faults.kill_producer, faults.kill_owner, faults.unload, faults.freeze_owner):
            with scene.timed() as seconds:
                await fault()
            print_outage(fault.__name__, max(seconds.values()), capsys)
        await scene.finish()
    assert scene.doubled >= FORGETS
