"""Several workers on one data directory: whose a topic is, what they say together, and the end of one of them."""

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from broker_sidecar.workers import Worker, run_all
from seqdedupe.client import Client, NotFoundError, SeqdedupeError
from seqdedupe.files import DIRECTORY_LOCK, Lock
from seqdedupe.names import SHARDS, from_text, shard_of, shards_of_worker
from seqdedupe.store.directories import SHARDS_FILE, of_worker
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar import calls
from tests.broker_sidecar.calls import refused
from tests.broker_sidecar.health import health_of
from tests.client.helpers import ids_in_log, until, wait_for

StartSidecar = Callable[..., Sidecar]

TWO = 2
FOUR = 4


def topics_of(worker: int, workers: int, count: int, stem: str = "t") -> list[str]:
    """Names of this many topics that this worker has."""
    names = (f"persistent://public/default/{stem}{number}" for number in itertools.count())
    mine = (name for name in names if shard_of(name) in shards_of_worker(worker, workers))
    return list(itertools.islice(mine, count))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """Two workers that no test may kill."""
    with Sidecar(tmp_path_factory.mktemp("two"), workers=TWO) as sidecar:
        yield sidecar


def addresses(sidecar: Sidecar) -> list[str]:
    return sidecar.address.split(",")


@pytest.fixture
def each(two: Sidecar) -> Iterator[list[calls.Client]]:
    """A plain client of each of the two."""
    clients = [calls.Client(address) for address in addresses(two)]
    yield clients
    for client in clients:
        client.close()


async def found_at(client: Client, topic: str) -> None:
    async with client.producer(topic, "p") as producer:
        await (await producer.send(b"x"))


async def test_clients_find_each_topic_at_its_worker_and_a_listing_has_all(two: Sidecar) -> None:
    names = [name for worker in range(TWO) for name in topics_of(worker, TWO, 3, "found")]
    async with Client(two.address) as client:
        for name in names:
            await found_at(client, name)
        assert set(names) <= {topic.name for topic in await client.admin.topics()}
        for name in names:
            assert await ids_in_log(two, name) == [0]
        listed = await client.admin.sidecars()
    assert [(one.name, from_text(one.shards)) for one in listed] == [
        (address, shards_of_worker(worker, TWO)) for worker, address in enumerate(addresses(two))
    ]


async def test_whoever_has_not_the_shard_names_who_has(two: Sidecar, each: list[calls.Client]) -> None:
    there, _ = each
    (name,) = topics_of(1, TWO, 1, "elsewhere")
    owner = addresses(two)[1]
    asked: list[Callable[[], object]] = [
        lambda: there.open(name, "p"),
        lambda: there.topic(name),
        lambda: there.end_index(name),
        lambda: there.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=name)),
        lambda: there.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(topic=name)),
        lambda: there.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=name, partitions=3)),
        lambda: there.open(f"{name}-partition-2", "p"),
    ]
    # They may have begun just now, and not know each other yet.
    await until(lambda: bool(refused(asked[0]).numbers["owner_address"]))
    for ask in asked:
        why = refused(ask)
        assert (why.reason, why.numbers["owner_address"]) == ("NOT_OWNER", owner)
    health = health_of(there.channel)
    why = refused(lambda: health.Check(health_pb2.HealthCheckRequest(service=name)))
    assert why.reason == "NOT_OWNER"


async def test_a_topic_that_is_not_there_is_known_to_be_none(two: Sidecar) -> None:
    async with Client(two.address) as client:
        for worker in range(TWO):
            with pytest.raises(NotFoundError, match="there is no topic"):
                await client.admin.topic(topics_of(worker, TWO, 1, "none")[0])


async def test_a_partitioned_topic_is_with_one_worker(two: Sidecar) -> None:
    async with Client(two.address) as client:
        made = await client.admin.create_topic("whole", partitions=5)
        assert made.partitions == 5
        async with client.producer("whole", "p") as producer:
            for k in range(20):
                await producer.send(b"x", key=b"%d" % k)
            await producer.flush()
        listed = [topic.name for topic in await client.admin.topics() if topic.name.endswith("/whole")]
        assert len(listed) == 1


async def test_a_namespaces_policy_is_in_force_at_all(two: Sidecar) -> None:
    names = [f"persistent://shop/eu/t{number}" for number in range(20)]
    async with Client(two.address) as client:
        for name in names:
            await client.admin.create_topic(name)
        owners = {shard_of(name) // (SHARDS // TWO) for name in names}
        assert len(owners) == TWO
        state = await client.admin.set_policy("shop/eu", admin_pb2.TopicPolicy(retention_size_in_mb=300))
        assert state.set.retention_size_in_mb == 300
        assert {(await client.admin.topic(name)).policy.retention_size_in_mb for name in names} == {300}
        await client.admin.remove_policy("shop/eu")
        assert {(await client.admin.topic(name)).policy.retention_size_in_mb for name in names} == {-1}
        assert not (await client.admin.policy("shop/eu")).set.HasField("retention_size_in_mb")


async def test_pages_of_a_listing_leave_out_nothing(two: Sidecar, each: list[calls.Client]) -> None:
    """By one name a page, at the one and at the other."""
    async with Client(two.address) as client:
        for worker in range(TWO):
            for name in topics_of(worker, TWO, 3, "listed"):
                await found_at(client, name)
        every = [topic.name for topic in await client.admin.topics()]
    for one in each:
        for after, following in zip(["", *every], [*every, None], strict=True):
            page = one.admin.ListTopics(admin_pb2.ListTopicsRequest(after=after))
            assert [topic.name for topic in page.topics][:1] == ([following] if following else [])


def test_who_claims_a_shard_that_another_has_is_refused(two: Sidecar, start_sidecar: StartSidecar) -> None:
    """The control arms: with its own shard set, or where it cannot see the other, it serves."""
    with pytest.raises(RuntimeError, match="SHARD_CLAIMED_TWICE"):
        start_sidecar(shards="31-32", peers=two.address, cluster_id=cluster_of(two))
    with pytest.raises(RuntimeError, match="INVALID_CONFIGURATION"):
        start_sidecar(shards="31-32", peers=two.address, cluster_id="another")
    lone = start_sidecar(shards="31-32", cluster_id=cluster_of(two))
    client = calls.Client(lone.address)
    assert refused(lambda: client.admin.ListTopics(admin_pb2.ListTopicsRequest())).reason == "SHARDS_INCOMPLETE"
    client.close()


def cluster_of(sidecar: Sidecar) -> str:
    return next(str(entry["cluster_id"]) for entry in sidecar.log if entry["event"] == "workers")


def test_who_sees_another_claim_its_shard_ends(start_sidecar: StartSidecar, tmp_path: Path) -> None:
    later = f"unix:{tmp_path}/later"
    first = start_sidecar(shards="0-31", peers=later, cluster_id="c")
    assert first.is_running
    start_sidecar(shards="31-63", cluster_id="c", listen=later)
    assert first.wait() == 70
    assert any("SHARD_CLAIMED_TWICE" in str(entry["event"]) for entry in first.log)


class Load:
    """A producer that publishes to a topic, one message after the other."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.acknowledged = 0
        self.sent = 0

    async def run(self, address: str, over: asyncio.Event) -> None:
        async with Client(address) as client, client.producer(self.topic, "p") as producer:
            while not over.is_set():
                receipts = []
                for _ in range(8):
                    receipts.append(await producer.send(b"%d" % self.sent))
                    self.sent += 1
                for receipt in receipts:
                    await receipt
                    self.acknowledged += 1


async def test_the_end_of_one_worker_is_nothing_to_the_others(start_sidecar: StartSidecar) -> None:
    """kill -9 of one of four under load, and it cannot come back at once. Nothing is lost, doubled or out of order.

    The control arm of what is not doubled is a topic without deduplication: what is sent again is there twice.
    """
    sidecar = start_sidecar(workers=FOUR)
    resending = Resending(addresses(sidecar)[0], *topics_of(0, FOUR, 3)[1:])
    loads = [Load(topics_of(worker, FOUR, 1)[0]) for worker in range(FOUR)]
    victim, others = loads[0], loads[1:]
    over = asyncio.Event()
    running = [asyncio.ensure_future(load.run(sidecar.address, over)) for load in loads]
    shards_file = of_worker(sidecar.data, 0) / SHARDS_FILE
    said = shards_file.read_bytes()
    try:
        await until(lambda: all(load.acknowledged > 16 for load in loads))
        shards_file.write_bytes(b"?")
        os.kill(sidecar.worker_pids[0], signal.SIGKILL)
        await until(lambda: any(entry["event"] == "worker ended" for entry in sidecar.log))
        before = [load.acknowledged for load in others]
        await until(lambda: all(load.acknowledged > b + 16 for load, b in zip(others, before, strict=True)))
        at_the_end = victim.acknowledged
        # Half of the topics never look like all.
        async with Client(addresses(sidecar)[1]) as client:
            with pytest.raises(SeqdedupeError, match="SHARDS_INCOMPLETE"):
                await client.admin.topics()
        assert health_at(addresses(sidecar)[1], "shards") == health_pb2.HealthCheckResponse.NOT_SERVING
        assert health_at(addresses(sidecar)[1], "") == health_pb2.HealthCheckResponse.SERVING
        assert victim.acknowledged == at_the_end
        shards_file.write_bytes(said)
        await until(lambda: victim.acknowledged > at_the_end + 16)
    finally:
        shards_file.write_bytes(said)
        over.set()
        await asyncio.gather(*running)
    async with Client(addresses(sidecar)[1]) as client:
        listed = {topic.name for topic in await client.admin.topics()}
    assert listed == {load.topic for load in loads} | set(resending.batches)
    assert health_at(addresses(sidecar)[1], "shards") == health_pb2.HealthCheckResponse.SERVING
    for load in loads:
        assert await ids_in_log(sidecar, load.topic) == list(range(load.sent))
    assert resending.ids_after_that() == [[0, 1, 2], [0, 1, 2] * 2]
    assert sidecar.stop() == 0


class Resending:
    """Publishes the same batch twice, in one session, to a topic and to one that does not deduplicate."""

    def __init__(self, address: str, once: str, twice: str) -> None:
        self.address = address
        off = admin_pb2.TopicPolicy(deduplication_enabled=False)
        client = calls.Client(address)
        client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=twice, policy=off))
        self._epochs = {name: client.epochs(name, "p") for name in (once, twice)}
        self.batches = {
            name: calls.batch([("p", k) for k in range(3)], epochs, {"p": -1}) for name, epochs in self._epochs.items()
        }
        for name, batch in self.batches.items():
            client.publish_unary(name, batch)
        client.close()

    def ids_after_that(self) -> list[list[int]]:
        """Sends all again; the IDs in both topics."""
        client = calls.Client(self.address)
        for name, batch in self.batches.items():
            client.open(name, "p", epochs=[self._epochs[name]["p"]])
            client.publish_unary(name, batch)
        found = [[sequence_id for _, sequence_id in client.rows(name)] for name in self.batches]
        client.close()
        return found


def health_at(address: str, service: str) -> int:
    with grpc.insecure_channel(address) as channel:
        return int(health_of(channel).Check(health_pb2.HealthCheckRequest(service=service)).status)


async def test_in_one_process_its_end_is_the_end_of_all(start_sidecar: StartSidecar) -> None:
    """The control arm of the test before: the same topics, without workers, and the same end."""
    sidecar = start_sidecar()
    names = [topics_of(worker, FOUR, 1)[0] for worker in range(FOUR)]
    async with Client(sidecar.address) as client, AsyncExitStack() as opened:
        producers = [await opened.enter_async_context(client.producer(name, "p")) for name in names]
        for producer in producers:
            await (await producer.send(b"x"))
        sidecar.kill()
        receipts = [await producer.send(b"y") for producer in producers]
        _, pending = await asyncio.wait(map(asyncio.ensure_future, map(wait_for, receipts)), timeout=1)
        assert len(pending) == FOUR
        sidecar.start()
        await asyncio.gather(*pending)


async def test_a_worker_of_which_there_can_be_no_process_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An upgrade in place, or no memory for one more: the parent goes on, and the other workers with it."""
    program = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(program))
    stopping = asyncio.Event()
    worker = Worker(0, [])
    with pytest.raises(FileNotFoundError):  # the control arm: it cannot be started
        await worker._run_once(stopping)
    running = asyncio.ensure_future(worker.run(stopping))
    await until(lambda: "worker not started" in caplog.text)
    assert not running.done()
    new = tmp_path / "new"
    new.write_text("#!/bin/sh\nexec sleep 600\n")
    new.chmod(0o700)
    new.rename(program)
    await until(lambda: worker._process is not None)
    # It has no handler for signals yet, as a sidecar that is still importing what it needs.
    stopping.set()
    worker.send(signal.SIGTERM)
    assert await running == 0


async def test_a_worker_that_is_killed_while_all_are_to_stop_has_not_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status of all is one that the documentation has."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    workers = [Worker(0, []), Worker(1, [])]
    lock = Lock.take(tmp_path / DIRECTORY_LOCK)
    running = asyncio.ensure_future(run_all(workers, lock))
    await until(lambda: all(worker._process is not None for worker in workers))
    monkeypatch.setattr(workers[1], "send", lambda _: Worker.send(workers[1], signal.SIGKILL))
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 1
    lock.close()
