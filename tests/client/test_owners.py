"""A client of several sidecars, whose topics move from one to another while it publishes and reads."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from seqdedupe.client import (
    Client,
    Message,
    OutcomeUnknownError,
    ProducerConfig,
    Receipt,
    UnavailableError,
    blocking,
    connection,
)
from seqdedupe.client import route as route_module
from seqdedupe.client.route import Route
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.client.fake_sidecar import fake_sidecar
from tests.client.fronts import Front, addresses, fronts, in_order, move
from tests.client.helpers import ids_in_log, read_all, until
from tests.client.proxy import Proxy

ONE_BY_ONE = ProducerConfig(max_batch_rows=1)
FEW = ProducerConfig(max_batch_rows=10)

MOST_ROUNDS = 8


@pytest.fixture
async def three(shared_sidecar: Sidecar, topic: str) -> AsyncIterator[list[Front]]:
    """Three sidecars over one log, in the order in which clients try them for the test's topic."""
    async with fronts(shared_sidecar.address) as some, Client(shared_sidecar.address) as client:
        await client.admin.create_topic(topic)
        yield in_order(some, topic)


class Load:
    """A producer and a reader of each kind at work on a topic, until they are asked to end."""

    def __init__(self, where: str, topic: str) -> None:
        self.where, self.topic = where, topic
        self.sent = {"asyncio": 0, "threads": 0}
        self.read: dict[str, list[tuple[str, int, int]]] = {"asyncio": [], "threads": []}
        self.waited_for: list[UnavailableError] = []
        self._is_over = threading.Event()
        self._in_thread = blocking.Client(where).reader(topic, 0, follow=True)

    async def run(self, moves: "asyncio.Task[None]") -> None:
        """Works until the moves are made, then ends in order; raises what goes wrong in any of them."""
        async with asyncio.TaskGroup() as group:
            reading = [group.create_task(self._read()), group.create_task(asyncio.to_thread(self._read_in_thread))]
            sending = [group.create_task(self._send()), group.create_task(asyncio.to_thread(self._send_in_thread))]
            try:
                await moves
                self._is_over.set()
                await asyncio.gather(*sending)
                await until(lambda: all(len(read) == sum(self.sent.values()) for read in self.read.values()))
            finally:
                self._is_over.set()
                for task in reading:
                    task.cancel()
                self._in_thread.close()

    async def _send(self) -> None:
        async with (
            Client(self.where) as client,
            client.producer(self.topic, "asyncio", FEW, on_waiting=self.waited_for.append) as producer,
        ):
            while not self._is_over.is_set():
                await producer.send(b"%d" % self.sent["asyncio"])
                self.sent["asyncio"] += 1
                await asyncio.sleep(0.001)

    def _send_in_thread(self) -> None:
        with (
            blocking.Client(self.where) as client,
            client.producer(self.topic, "threads", FEW, on_waiting=self.waited_for.append) as producer,
        ):
            while not self._is_over.wait(0.001):
                producer.send(b"%d" % self.sent["threads"])
                self.sent["threads"] += 1

    async def _read(self) -> None:
        async with Client(self.where) as client, client.reader(self.topic, 0, follow=True) as reader:
            async for message in reader:
                self.read["asyncio"].append((message.producer_name, message.sequence_id, message.index))

    def _read_in_thread(self) -> None:
        for message in self._in_thread:
            self.read["threads"].append((message.producer_name, message.sequence_id, message.index))


def check_exactly_once(load: Load, log: list[Message]) -> None:
    stored = [(message.producer_name, message.sequence_id, message.index) for message in log]
    for name, count in load.sent.items():
        of_name = [(message.sequence_id, message.payload) for message in log if message.producer_name == name]
        assert of_name == [(number, b"%d" % number) for number in range(count)]
    assert load.read == {"asyncio": stored, "threads": stored}


async def test_a_topic_moves_under_load(three: list[Front], shared_sidecar: Sidecar, topic: str) -> None:
    """From one to the next, known and unknown to the others, over a time without owner, over ones that stop and come
    back, and with frames refused one by one."""
    first, second, third = three
    load = Load(addresses(three), topic)

    async def goes_on() -> None:
        """Both kinds of producers and readers have done something since."""
        before = dict(load.sent) | {f"read {kind}": len(read) for kind, read in load.read.items()}

        def has() -> bool:
            now = dict(load.sent) | {f"read {kind}": len(read) for kind, read in load.read.items()}
            return all(now[what] > count + 20 for what, count in before.items())

        await until(has)

    async def moves() -> None:
        move(three, first)
        await goes_on()
        move(three, third)
        await goes_on()
        move(three, second, knows=False)
        await goes_on()
        move(three, None)
        await until(lambda: len(load.waited_for) >= 2)
        move(three, first)
        await goes_on()
        await first.stop()
        move(three, third)
        await goes_on()
        third.refuses_frames = True
        await first.start()
        move(three, first)
        await goes_on()
        await asyncio.gather(*(front.stop() for front in three))
        for front in reversed(three):
            await front.start()
        await goes_on()

    await load.run(asyncio.create_task(moves()))
    check_exactly_once(load, await read_all(shared_sidecar, topic))
    assert {why.reason for why in load.waited_for} == {"NOT_OWNER"}
    for why in load.waited_for:
        assert all(f"{front.address}: persistent://public/default/{topic} is not" in why.message for front in three)


async def test_partitions_have_owners_of_their_own(shared_sidecar: Sidecar, topic: str) -> None:
    """Each moves to the next sidecar while its producer, one name over all of them, publishes by keys."""
    count = 4
    parts = {f"persistent://public/default/{topic}-partition-{k}": k for k in range(count)}
    async with fronts(shared_sidecar.address) as some, Client(addresses(some)) as client:

        def share_out(turn: int) -> None:
            for number, front in enumerate(some):

                def owner_of(name: str, number: int = number) -> str | None:
                    owner = (parts[name] + turn) % len(some) if name in parts else number
                    return None if owner == number else some[owner].address

                front.disown(owner_of)

        await client.admin.create_topic(topic, partitions=count)
        share_out(0)
        sent = 0
        async with client.producer(topic, "p", FEW) as producer:
            for turn in range(1, 4):
                receipts = []
                for _ in range(100):
                    receipts.append(await producer.send(b"%d" % sent, key=b"%d" % (sent % 17)))
                    sent += 1
                share_out(turn)
                for receipt in receipts:
                    await receipt
        assert all({"Open", "PublishStream"} <= set(front.calls) for front in some)
        async with client.partitioned_reader(topic) as reader:
            read = [(message.partition, message.sequence_id, message.payload) async for message in reader]
    assert sorted((number, payload) for _, number, payload in read) == [(n, b"%d" % n) for n in range(sent)]
    for k in range(count):
        of_partition = [number for partition, number, _ in read if partition == k]
        assert of_partition
        assert of_partition == sorted(of_partition)


async def unanswered_then_moved(three: list[Front], sidecar: Sidecar, topic: str, producer_name: str) -> None:
    """Two messages are stored of which nobody learns; then the topic has another owner."""
    first, second, _ = three
    move(three, first)
    first.swallows_receipts = True
    async with Client(addresses(three)) as client:
        producer = client.producer(topic, producer_name, ONE_BY_ONE)
        await producer.open()
        receipts = [await producer.send(b"%d" % number) for number in range(2)]
        async with Client(sidecar.address) as direct:
            await until_index(direct, topic, 1)
        move(three, second)
        receipts.append(await producer.send(b"2"))
        published = [await receipt for receipt in receipts]
        assert [one.verdict.name for one in published] == ["DUP", "DUP", "NOT_DUP"]
        assert [one.index for one in published] == [0, 1, 2]
        await producer.close()


async def until_index(client: Client, topic: str, index: int) -> None:
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while (await client.ends(topic)).last.index < index:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_what_nobody_was_told_of_is_resumed_with_its_epoch(
    three: list[Front], shared_sidecar: Sidecar, topic: str
) -> None:
    await unanswered_then_moved(three, shared_sidecar, topic, "p")
    assert [message.payload for message in await read_all(shared_sidecar, topic)] == [b"0", b"1", b"2"]


@pytest.mark.parametrize("sends_again", [True, False])
async def test_a_client_that_begins_anew_at_the_new_owner_doubles_or_loses(
    three: list[Front], shared_sidecar: Sidecar, topic: str, sends_again: bool
) -> None:
    """The control arm: a session without the old one's epoch and sequence IDs, as of a client that knows of none.
    For the two messages without a receipt one is stored and one is not: each assumption is wrong."""
    first, second, _ = three
    move(three, first)
    async with Client(first.address) as client:
        producer = client.producer(topic, "p", ONE_BY_ONE)
        await producer.open()
        first.swallows_receipts = True
        receipts: list[Receipt] = [await producer.send(b"0")]
        async with Client(shared_sidecar.address) as direct:
            await until_index(direct, topic, 0)
        first.refuses_frames = True
        move(three, second)
        receipts.append(await producer.send(b"1"))
        await producer.abort()
    for receipt in receipts:
        with pytest.raises(OutcomeUnknownError):
            await receipt
    async with Client(second.address) as client, client.producer(topic, "p", ONE_BY_ONE) as anew:
        for payload in (b"0", b"1") if sends_again else ():
            await anew.send(payload)
    stored = [message.payload for message in await read_all(shared_sidecar, topic)]
    assert stored == ([b"0", b"0", b"1"] if sends_again else [b"0"])


@pytest.mark.parametrize("waits", [True, False])
async def test_two_that_name_each_other_are_not_asked_without_end(
    three: list[Front], topic: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control arm forgets whom it has asked, and so follows everything that it learns."""
    first, second, third = three
    first.disown(second.address)
    second.disown(first.address)
    third.disown("")
    if not waits:
        moves_on = Route.moves_on

        def forgetful(route: Route, why: UnavailableError) -> bool:
            route.goes_well()
            return moves_on(route, why)

        monkeypatch.setattr(Route, "moves_on", forgetful)
        # Time for a slow machine to ask too often.
        monkeypatch.setattr(route_module, "SAY_WAITING_SECONDS", 5 * route_module.SAY_WAITING_SECONDS)
    asked: list[int] = []
    async with Client(addresses(three)) as client:
        producer = client.producer(topic, "p", on_waiting=lambda _: asked.append(_opens(three)))
        opening = asyncio.create_task(producer.open())
        await until(lambda: bool(asked))
        second.own()
        await opening
        assert (await (await producer.send(b""))).index == 0
        await producer.close()
    # Within a second there is time for this many rounds of three, with pauses that double from 10 ms on.
    assert (asked[0] <= MOST_ROUNDS * 3) is waits


def _opens(some: list[Front]) -> int:
    return sum(front.calls.count("Open") for front in some)


@pytest.mark.parametrize("named", ["a trap", "not an address", "", "evil.example.org#.127.0.0.1:1"])
async def test_nobody_is_sent_where_the_list_does_not_say(
    three: list[Front], shared_sidecar: Sidecar, topic: str, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not a producer, not a reader, not a call: a sidecar must not be able to send credentials anywhere."""
    first, second, third = three
    async with fake_sidecar() as trap:
        move(three, third, knows=False)
        first.disown(trap.address if named == "a trap" else named)
        async with Client(addresses(three)) as client:
            async with client.producer(topic, "p") as producer:
                assert (await (await producer.send(b""))).index == 0
            assert [message.index async for message in client.reader(topic)] == [0]
            assert (await client.ends(topic)).last.index == 0
        assert not trap.opens
        assert {"Open", "GetLastMessageId"} <= set(first.calls) & set(second.calls) & set(third.calls)
    warnings = [record.getMessage() for record in caplog.records if record.name == "seqdedupe.client"]
    assert len(warnings) == (3 if named else 0), "one each of producer, reader and call"
    assert all("does not go there" in warning for warning in warnings)


async def test_a_trap_that_is_listed_is_gone_to(three: list[Front], topic: str) -> None:
    """The control arm of the test before."""
    first, *_ = three
    async with fake_sidecar() as trap:
        move(three, None)
        first.disown(trap.address)
        async with Client([*(front.address for front in three), trap.address]) as client:
            await client.producer(topic, "p").open()
        assert trap.opens


async def test_when_all_are_away_it_is_as_with_one(
    three: list[Front], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Client(addresses(three)) as client, client.producer(topic, "p") as producer:
        await (await producer.send(b""))
        reader = client.reader(topic, 0, follow=True)
        assert (await anext(reader)).index == 0
        for front in three:
            await front.stop()
        with pytest.raises(UnavailableError) as caught:
            await client.ends(topic)
        assert caught.value.reason == "UNREACHABLE"
        assert all(front.address in caught.value.message for front in three)
        with pytest.raises(UnavailableError, match="UNREACHABLE"):
            await client.admin.topics()
        with pytest.raises(UnavailableError, match="not ready"):
            await client.wait_ready(0.3)
        with monkeypatch.context() as patch:
            patch.setattr("seqdedupe.client.producer_session.OPEN_TIMEOUT_SECONDS", 0.2)
            with pytest.raises(UnavailableError) as caught:
                await client.producer(topic, "q").open()
        assert caught.value.reason == "UNREACHABLE"
        receipt, message = await producer.send(b""), asyncio.create_task(anext(reader))
        await three[-1].start()
        assert (await receipt).index == (await message).index == 1
        await client.wait_ready(LAST_RESORT_SECONDS)
        await reader.close()


async def test_one_that_stands_still_is_left(
    three: list[Front], shared_sidecar: Sidecar, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes connections, and says nothing on them: a new one, and one that was in use."""
    monkeypatch.setattr(connection, "_IMPATIENT", tuple((name, 1000) for name, _ in connection._IMPATIENT))
    async with Proxy(three[0].address) as frozen:
        monkeypatch.setattr(
            "seqdedupe.client.route.in_order", lambda _, texts: sorted(texts, key=frozen.address.__ne__)
        )
        async with (
            Client(f"{frozen.address},{three[1].address}") as client,
            client.producer(topic, "p") as producer,
        ):
            assert (await (await producer.send(b""))).index == 0
            assert frozen.connections
            frozen.stall()
            assert (await (await producer.send(b""))).index == 1
            assert (await client.ends(topic)).last.index == 1
            frozen.go_on()
    assert await ids_in_log(shared_sidecar, topic) == [0, 1]
