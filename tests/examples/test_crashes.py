"""The brokers of `examples/` under load, everything killed with -9: their logs hold each message once, in order."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import redis

from examples.broker.broker import FileLog
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.conftest import StartSidecar
from tests.examples.brokers import BrokerProcess, Producer, RedisServer, Stored, each_once

MESSAGES = 1500
PRODUCERS = 3
FINISH_SECONDS = LAST_RESORT_SECONDS

TEST_SECONDS = LAST_RESORT_SECONDS


Fault = Callable[[], None]


async def publish_under(faults: Sequence[Fault], address: str) -> list[Producer]:
    """Publishes, and lets each of these faults happen at its own moment, while messages are under way."""
    producers = [Producer(address, f"p{k}", MESSAGES) for k in range(PRODUCERS)]
    everything = asyncio.gather(*(producer.run() for producer in producers))
    async with asyncio.timeout(FINISH_SECONDS):
        for k, fault in enumerate(faults):
            await producers[0].reached(int((k + random.random()) / len(faults) * 0.9 * MESSAGES))
            await asyncio.to_thread(fault)
        await everything
    return producers


def in_file(path: Path) -> Stored:
    found: Stored = {}
    for record in FileLog(path).records():
        found.setdefault(record.producer_name, []).append((record.sequence_id, record.payload))
    return found


def in_stream(url: str, stream: str) -> Stored:
    found: Stored = {}
    with redis.Redis.from_url(url) as client:
        for _, fields in client.xrange(stream):
            entry = int(fields[b"sequence_id"]), fields[b"payload"]
            found.setdefault(fields[b"producer_name"].decode(), []).append(entry)
    return found


@pytest.fixture
def start_broker() -> Iterator[Callable[..., BrokerProcess]]:
    """Starts brokers; they are gone when the test ends."""
    started: list[BrokerProcess] = []

    def start(module: str, *arguments: object) -> BrokerProcess:
        broker = BrokerProcess(module, *map(str, arguments))
        started.append(broker)
        broker.start()
        return broker

    yield start
    for broker in started:
        broker.close()


def faults_of(broker: BrokerProcess, sidecar: Sidecar) -> dict[str, Fault]:
    def restart_broker() -> None:
        broker.kill()
        broker.start()

    def restart_both() -> None:
        broker.kill()
        sidecar.kill()
        sidecar.start()
        broker.start()

    return {"broker": restart_broker, "sidecar": sidecar.restart, "both": restart_both}


def brokers_sidecar(start_sidecar: StartSidecar, **keys: object) -> Sidecar:
    """One that takes a snapshot often, so that replays begin at any place."""
    return start_sidecar(log="broker", **({"deduplication_entries_interval": 100} | keys))


async def test_a_file(start_sidecar: StartSidecar, start_broker: Callable[..., BrokerProcess], tmp_path: Path) -> None:
    sidecar = await asyncio.to_thread(brokers_sidecar, start_sidecar)
    broker = start_broker("examples.broker.broker", tmp_path / "log", "--sidecar", sidecar.address)
    faults = faults_of(broker, sidecar)
    producers = await publish_under([*faults.values(), faults["broker"]], broker.address)
    broker.kill()
    assert in_file(tmp_path / "log") == each_once(producers)
    assert sum(producer.answers["dup"] for producer in producers) > 0


async def test_a_disk_that_is_full_now_and_then(
    start_sidecar: StartSidecar, start_broker: Callable[..., BrokerProcess], tmp_path: Path
) -> None:
    sidecar = await asyncio.to_thread(brokers_sidecar, start_sidecar)
    broker = start_broker("tests.examples.full_disk", tmp_path / "log", "--sidecar", sidecar.address)
    producers = await publish_under([], broker.address)
    broker.kill()
    assert in_file(tmp_path / "log") == each_once(producers)
    assert sum(line.startswith("not written: ") for line in broker.lines) > 1
    # It was never detached for that.
    assert sum(line.startswith("attached: ") for line in broker.lines) == 1


async def test_a_file_without_the_sidecar(start_broker: Callable[..., BrokerProcess], tmp_path: Path) -> None:
    """The control arm: the same load, the same fault, and messages are doubled."""
    broker = start_broker("tests.examples.always_new", tmp_path / "log")
    producers = await publish_and_kill(broker, broker.start)
    assert_doubled(in_file(tmp_path / "log"), producers)


async def test_a_file_and_a_sidecar_that_forgets_the_replay(
    start_broker: Callable[..., BrokerProcess], tmp_path: Path
) -> None:
    """The control arm of the replay: what was stored since the last snapshot is doubled."""
    # No snapshot is taken while messages come: what the sidecar knows after the fault is what is replayed.
    sidecar = Sidecar(
        tmp_path / "sidecar",
        module="tests.examples.forgetful_sidecar",
        log="broker",
        deduplication_entries_interval=100 * MESSAGES,
        deduplication_snapshot_interval_seconds=0,
    )

    def restart() -> None:
        sidecar.restart()
        broker.start()

    try:
        await asyncio.to_thread(sidecar.start)
        broker = start_broker("examples.broker.broker", tmp_path / "log", "--sidecar", sidecar.address)
        producers = await publish_and_kill(broker, restart)
    finally:
        sidecar.kill()
    assert_doubled(in_file(tmp_path / "log"), producers)


async def publish_and_kill(broker: BrokerProcess, restart: Fault) -> list[Producer]:
    """Publishes; the broker is killed once, when messages are stored for certain that are sent again afterwards."""
    producers = [Producer(broker.address, f"p{k}", MESSAGES) for k in range(PRODUCERS)]
    everything = asyncio.gather(*(producer.run() for producer in producers))
    async with asyncio.timeout(FINISH_SECONDS):
        await producers[0].reached(MESSAGES // 2)
        # Without a thread: no producer hears of its last messages before the broker is gone.
        broker.kill()
        await asyncio.to_thread(restart)
        await everything
    broker.kill()
    return producers


def assert_doubled(found: Stored, producers: list[Producer]) -> None:
    """Something is there twice, and nothing is missing."""
    wanted = each_once(producers)
    assert {name: sorted(set(entries)) for name, entries in found.items()} == wanted
    assert found != wanted


async def test_a_redis_stream(
    start_sidecar: StartSidecar, start_broker: Callable[..., BrokerProcess], tmp_path: Path
) -> None:
    sidecar = await asyncio.to_thread(brokers_sidecar, start_sidecar)
    server = RedisServer(tmp_path)
    try:
        server.start()
        arguments = ["--redis", server.url, "--stream", "s", "--sidecar", sidecar.address]
        broker = start_broker("examples.redis.broker", *arguments)
        faults = faults_of(broker, sidecar)

        def restart_store() -> None:
            server.kill()
            server.start()

        order = [faults["broker"], restart_store, faults["both"], restart_store]
        producers = await publish_under(order, broker.address)
        assert in_stream(server.url, "s") == each_once(producers)
        assert sum(producer.answers["dup"] for producer in producers) > 0
    finally:
        server.kill()


async def test_a_second_broker_takes_a_stream_for_good(
    start_sidecar: StartSidecar, start_broker: Callable[..., BrokerProcess], tmp_path: Path
) -> None:
    sidecar = await asyncio.to_thread(brokers_sidecar, start_sidecar)
    server = RedisServer(tmp_path)
    try:
        server.start()
        arguments = ["--redis", server.url, "--stream", "s", "--sidecar", sidecar.address]
        first = start_broker("examples.redis.broker", *arguments)
        producers = [Producer(first.address, f"p{k}", MESSAGES) for k in range(PRODUCERS)]
        everything = [asyncio.ensure_future(producer.run()) for producer in producers]
        await producers[0].reached(MESSAGES // 3)
        second = await asyncio.to_thread(start_broker, "examples.redis.broker", *arguments)
        # The first one ends by itself: it never takes the stream back.
        assert await asyncio.to_thread(first.wait) != 0
        assert "Fenced" in "".join(first.lines)
        for producer in producers:
            producer.move_to(second.address)
        async with asyncio.timeout(FINISH_SECONDS):
            await asyncio.gather(*everything)
        assert in_stream(server.url, "s") == each_once(producers)
    finally:
        server.kill()
