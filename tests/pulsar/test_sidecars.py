"""Several sidecars as processes in front of a real broker: who there is, who is gone, and topics that move."""

import asyncio
import itertools
import json
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pulsar_broker.standalone import Broker
from seqdedupe.client import Client
from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.pulsar.admin_url import AdminUrl, PulsarAdmin
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import admin_pb2
from tests.cli.conftest import COMMAND
from tests.pulsar.owners import until

LIMIT_SECONDS = LAST_RESORT_SECONDS
MESSAGES_BETWEEN = 200
"""At least, from one move to the next."""
BURST, BURST_SECONDS = 10, 0.01
"""This many messages are sent at once, and then none for this long: more would only take longer."""

Start = Callable[..., Awaitable[Sidecar]]

_namespaces = itertools.count()


@pytest.fixture
async def namespace(broker: Broker) -> str:
    """One that nobody else uses: a sidecar takes all topics of its namespaces."""
    name = f"public/moving-{os.getpid()}-{next(_namespaces)}"
    await AdminUrl(broker.admin_url).call(
        "PUT", f"namespaces/{name}", {"subscription_expiration_time_minutes": 0}, "TOPIC_EXISTS"
    )
    return name


@pytest.fixture
def started(tmp_path: Path, broker: Broker, namespace: str) -> Iterator[Start]:
    """Starts sidecars in front of the broker."""
    every: list[Sidecar] = []

    async def start(instance_name: str, **keys: Any) -> Sidecar:
        sidecar = Sidecar(
            tmp_path / f"sidecar-{len(every)}",
            pulsar_namespaces=namespace,
            instance_name=instance_name,
            **broker.sidecar_keys,
            **keys,
        )
        every.append(sidecar)
        await asyncio.to_thread(sidecar.start)
        return sidecar

    yield start
    for sidecar in every:
        sidecar.kill()


async def command(*arguments: str, address: str) -> tuple[int, Any]:
    """The command's status, and what it prints as JSON, be it an error."""
    whole = [COMMAND, *arguments, "--json", "--address", address]
    done = await asyncio.to_thread(subprocess.run, whole, capture_output=True, timeout=LIMIT_SECONDS, check=False)
    return done.returncode, json.loads(done.stdout or done.stderr)


async def moved(topic: str, *arguments: str, address: str) -> str:
    """The new owner's address. On a machine that has much else to do one may not have the topic in time."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            status, answer = await command("topics", "move", topic, *arguments, address=address)
            if status == 0:
                assert answer.keys() == {"topic", "owner_address"}
                return str(answer["owner_address"])
            assert answer["error"]["reason"] in ("MOVE_FAILED", "OUTCOME_UNKNOWN"), answer


async def refused(call: Awaitable[object]) -> SeqdedupeError:
    try:
        await call
    except SeqdedupeError as e:
        return e
    raise AssertionError("it was not refused")


class Load:
    """A producer and a reader at work, no matter who has the topic."""

    def __init__(self, client: Client, topic: str) -> None:
        self._client = client
        self._topic = topic
        self._ends = asyncio.Event()
        self.sent = 0
        self.acknowledged = 0
        self.read: list[bytes | None] = []
        self._tasks = [asyncio.ensure_future(work) for work in (self._publish(), self._follow())]

    async def _publish(self) -> None:
        async with self._client.producer(self._topic, "p") as producer:
            receipts = []
            while not self._ends.is_set():
                receipts.append(asyncio.ensure_future(self._receipt(await producer.send(b"%d" % self.sent))))
                self.sent += 1
                if self.sent % BURST == 0:
                    await asyncio.sleep(BURST_SECONDS)
            await asyncio.gather(*receipts)

    async def _receipt(self, receipt: Any) -> None:
        await receipt
        self.acknowledged += 1

    async def _follow(self) -> None:
        async with self._client.reader(self._topic, follow=True) as reader:
            async for message in reader:
                self.read.append(message.payload)

    async def more(self) -> None:
        """Returns when both have come further."""
        acknowledged, read = self.acknowledged, len(self.read)
        await self._until(lambda: min(self.acknowledged - acknowledged, len(self.read) - read) >= MESSAGES_BETWEEN)

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_SECONDS):
            while not holds():
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.01)

    async def finish(self) -> None:
        """Returns when all that was sent is acknowledged and read."""
        self._ends.set()
        await asyncio.wait_for(self._tasks[0], LIMIT_SECONDS)
        del self._tasks[0]
        await self._until(lambda: len(self.read) >= self.sent)
        self._tasks[0].cancel()
        await asyncio.wait(self._tasks)


async def test_a_topic_that_is_moved_under_load_holds_each_message_once(started: Start, namespace: str) -> None:
    topic = f"persistent://{namespace}/t"
    one = await started("one")
    async with Client(one.address) as client:
        await client.admin.create_topic(topic)
    # It knows the topic when it has begun, and would take it by itself.
    other = await started("other", standby=True)
    addresses = f"{one.address},{other.address}"
    async with Client(addresses) as client:
        load = Load(client, topic)
        await load.more()
        assert await moved(topic, "--to", other.address, address=addresses) == other.address
        await load.more()
        # To anyone who is asked for it, which is the only other one.
        await moved(topic, address=addresses)
        await load.more()
        assert await moved(topic, "--to", one.address, address=addresses) == one.address
        [found] = [seen for seen in await client.admin.sidecars() if seen.topics_owned]
        assert (found.name, list(found.addresses)) == ("one", [one.address])
        # Where it cannot go it stays, and goes on.
        assert await client.admin.move_topic(topic, one.address) == one.address
        for where, reason in (("127.0.0.1:1", "MOVE_FAILED"), ("nowhere", "INVALID_ADDRESS")):
            assert (await refused(client.admin.move_topic(topic, where))).reason == reason
        assert (await refused(client.admin.move_topic(topic + "-other"))).reason == "TOPIC_NOT_FOUND"
        await load.more()
        await load.finish()
        payloads = [message.payload async for message in client.reader(topic)]
    assert load.acknowledged == load.sent
    assert payloads == load.read == [b"%d" % number for number in range(load.sent)]
    assert one.stop() == other.stop() == 0


async def test_who_there_is_and_who_is_forgotten_and_a_topic_that_is_gone(
    started: Start, broker: Broker, namespace: str
) -> None:
    topic = f"persistent://{namespace}/t"
    left = await started("left")
    async with Client(left.address) as client:
        async with client.producer(topic, "p") as producer:
            for number in range(3):
                await (await producer.send(b"%d" % number))
        gone = await started("gone")
        status, found = await command("sidecars", address=left.address)
        assert status == 0
        assert {one["name"]: (one["addresses"], one["topics_owned"], one["subscriptions"]) for one in found} == {
            "gone": ([gone.address], 0, 1),
            "left": ([left.address], 1, 1),
        }
        assert [one["is_this"] for one in found] == [False, True]
        assert all(one["kept_entries"] >= 3 and one["kept_bytes"] > 0 for one in found)

        for alive in ("gone", "left"):
            assert (await refused(client.admin.forget_sidecar(alive))).reason == "SIDECAR_ALIVE"
        assert await asyncio.to_thread(gone.stop) == 0
        assert await command("sidecars", "forget", "gone", address=left.address) == (
            0,
            {"forgotten": "gone", "topics": [topic]},
        )
        assert [one.name for one in await client.admin.sidecars()] == ["left"]
        assert (await refused(client.admin.forget_sidecar("gone"))).reason == "SIDECAR_NOT_FOUND"

        # A second one with its name.
        copy = await started("left")
        async with Client(copy.address) as other:
            assert "this one's instance name left" in (await other.admin.topic(topic)).why
        assert any("this one's instance name left" in entry["event"] for entry in copy.log if entry["level"] == "error")
        [one] = await client.admin.sidecars()
        assert set(one.addresses) == {left.address, copy.address}
        copy.kill()

    await asyncio.to_thread(left.stop)
    await PulsarAdmin(AdminUrl(broker.admin_url)).delete_topic(topic)
    await asyncio.to_thread(left.start)
    async with Client(left.address) as client:

        async def is_damaged() -> bool:
            return (await client.admin.topic(topic)).state == admin_pb2.TOPIC_STATE_DAMAGED

        await until(is_damaged)
        assert (await refused(client.admin.create_topic(topic))).reason == "LOG_DAMAGED"
        await client.admin.delete_topic(topic)
        assert (await refused(client.admin.topic(topic))).reason == "TOPIC_NOT_FOUND"
        async with client.producer(topic, "p") as producer:
            await (await producer.send(b"anew"))
        assert [message.payload async for message in client.reader(topic)] == [b"anew"]
    assert await asyncio.to_thread(left.stop) == 0
