"""Three sidecars as processes in front of a broker, producers as processes, and what ends or stops any of them.

`python -m tests.kernels tests.pulsar.crashes --faults 60 --seed 1` is a campaign of them, at random.
"""

import argparse
import asyncio
import itertools
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pulsar_broker.distribution import get
from pulsar_broker.standalone import Broker
from seqdedupe.client import Client, ProducerConfig, Verdict
from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.pulsar.topic_owner import ADDRESS
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.pulsar.owners import Cluster, kill_and_start, until
from tests.pulsar.producing import FORGETS
from tests.pulsar.publishers import Found, Publisher, check, found_by_a_stock_client

KEEP_ALIVE_SECONDS = 5
"""The broker's own: one that answers nothing is out after twice as long."""
TOPICS = ("plain", "packed", "native", "native-deduplicated")
"""In the last one Pulsar deduplicates too: it need not, for native entries."""
SIDECARS = 3
PRODUCERS = ("a", "b")
LIMIT_SECONDS = LAST_RESORT_SECONDS
FAULTS_A_SCENE = 15
SHORTER_THAN_KEEP_ALIVE_SECONDS = 1.0

LINES_SHOWN = 200

_scenes = itertools.count()


class ProducerProcess:
    """One that publishes to all topics, and what it has told of."""

    def __init__(self, name: str, addresses: str, topics: list[str]) -> None:
        self.name = name
        self.acknowledged = dict.fromkeys(topics, -1)
        self.receipts: list[tuple[float, str]] = []
        """When, and for which topic."""
        self._command = [sys.executable, "-m", "tests.pulsar.producing", addresses, name, *topics]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        self._hearing = threading.Thread(target=self._hear, args=(self._process,), daemon=True)
        self._hearing.start()

    def _hear(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                topic, _, sequence_id = line.partition(" ")
                # What is printed when it is killed may lack its end.
                if line.endswith("\n"):
                    self.acknowledged[topic] = max(self.acknowledged[topic], int(sequence_id))
                    self.receipts.append((time.monotonic(), topic))

    def check_running(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, f"producer {self.name} has ended by itself"

    def kill(self) -> None:
        """kill -9, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._hearing.join()

    async def finish(self) -> None:
        """When all that it has sent is acknowledged."""
        assert self._process is not None
        self._process.terminate()
        assert await asyncio.to_thread(self._process.wait, LIMIT_SECONDS) == 0
        self._hearing.join()


async def make_namespace(cluster: Cluster, name: str) -> None:
    """As a sidecar wants it. A broker that has just started may need a while."""

    async def is_made() -> bool:
        try:
            await cluster.url.call(
                "PUT", f"namespaces/{name}", {"subscription_expiration_time_minutes": 0}, "TOPIC_EXISTS"
            )
        except SeqdedupeError as e:
            return e.reason == "TOPIC_EXISTS"
        return True

    await until(is_made)


def sidecar_of(broker: Broker, namespace: str, folder: Path, **keys: Any) -> Sidecar:
    """A standby for the topics of the namespace, not started yet."""
    return Sidecar(folder, standby=True, pulsar_namespaces=namespace, **broker.sidecar_keys, **keys)


class Scene:
    """The processes, their topics, and one that does not deduplicate: the control.

    `are_listed`: each sidecar learns of the others, and two stand by for a topic; else all three do.
    """

    def __init__(self, broker: Broker, folder: Path, *, are_listed: bool) -> None:
        self.broker = broker
        self.cluster = Cluster(broker.service_url, broker.admin_url)
        self._namespace = f"public/crashes-{next(_scenes)}"
        self.topics = [f"persistent://{self._namespace}/{name}" for name in TOPICS]
        self.control = f"persistent://{self._namespace}/control"
        self.sidecars = [
            sidecar_of(broker, self._namespace, folder / f"sidecar-{k}", deduplication_entries_interval=100)
            for k in range(SIDECARS)
        ]
        for sidecar in self.sidecars if are_listed else ():
            sidecar.keys["peers"] = self.addresses
        self.producers: list[ProducerProcess] = []
        self.doubled = 0
        """Messages of the control that stand there again, when it has ended."""

    async def __aenter__(self) -> "Scene":
        try:
            await self._begin()
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._tell()
        self._end()

    def _tell(self) -> None:
        """What the sidecars have logged, for anyone who wants to know what went wrong."""
        for sidecar in self.sidecars:
            print(sidecar.address)
            for entry in sidecar.log[-LINES_SHOWN:]:
                print(" ", entry["timestamp"], entry["level"], entry["event"], entry.get("exception", ""))

    async def _begin(self) -> None:
        await make_namespace(self.cluster, self._namespace)
        first, *others = self.sidecars
        start(first)
        async with Client(first.address) as client:
            for topic in self.every_topic:
                is_control = topic == self.control
                form = "plain" if is_control else topic.rpartition("/")[2].partition("-")[0]
                await client.admin.create_topic(topic, entry_format=form, deduplication_enabled=not is_control)
                if topic.endswith("-deduplicated"):
                    await self.cluster.admin.set_policy(topic, "deduplicationEnabled", True)
                    await self.cluster.until_deduplicating(topic)
        # Who starts now knows all topics, and stands by.
        start(*others)
        self.producers = [ProducerProcess(name, self.addresses, self.every_topic) for name in PRODUCERS]
        for producer in self.producers:
            producer.start()
        await self.goes_on()

    def _end(self) -> None:
        for producer in self.producers:
            producer.kill()
        for sidecar in self.sidecars:
            # One that is stopped is ended by this too.
            sidecar.kill()

    @property
    def addresses(self) -> str:
        return ",".join(sidecar.address for sidecar in self.sidecars)

    @property
    def every_topic(self) -> list[str]:
        return [*self.topics, self.control]

    async def owner(self, topic: str) -> Sidecar:
        """The sidecar that holds the topic's producer."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                publishers = (await self.cluster.admin.stats(topic)).publishers
                addresses = [publisher.metadata.get(ADDRESS) for publisher in publishers]
                for sidecar in self.sidecars:
                    if sidecar.address in addresses:
                        return sidecar
                await asyncio.sleep(0.05)

    async def goes_on(self) -> None:
        """Until each producer has had receipts for what it did not know of before, in every topic."""
        before = [dict(producer.acknowledged) for producer in self.producers]
        limit = time.monotonic() + LIMIT_SECONDS
        while left := [
            f"{producer.name} in {topic}"
            for producer, had in zip(self.producers, before, strict=True)
            for topic in self.every_topic
            if producer.acknowledged[topic] < had[topic] + 3 * FORGETS
        ]:
            for producer in self.producers:
                producer.check_running()
            assert time.monotonic() < limit, f"no receipts any more: {', '.join(left)}"
            await asyncio.sleep(0.02)

    @contextmanager
    def timed(self) -> Iterator[dict[str, float]]:
        """The longest time without any receipt, by topic, in the block."""
        for producer in self.producers:
            producer.receipts.clear()
        longest: dict[str, float] = {}
        begun = time.monotonic()
        yield longest
        ended = time.monotonic()
        for topic in self.every_topic:
            every = sorted(at for producer in self.producers for at, where in list(producer.receipts) if where == topic)
            longest[topic] = max(after - at for at, after in itertools.pairwise([begun, *every, ended]))

    async def finish(self) -> dict[str, Found]:
        """Ends the load, and looks at what is there: by topic what a stock client finds."""
        await self.goes_on()
        for producer in self.producers:
            await producer.finish()
        found = {topic: await found_by_a_stock_client(self.cluster, topic) for topic in self.every_topic}
        async with Client(self.addresses) as client:
            for topic in self.topics:
                self._check(found[topic], topic)
                await self._check_read(client, topic, found[topic])
                for producer in self.producers:
                    await self._check_sent_again(client, topic, producer)
        self._check_control(found[self.control])
        for sidecar in self.sidecars:
            sidecar.check_running()
            assert not [entry for entry in sidecar.log if "exception" in entry]
        return found

    def _check(self, found: Found, topic: str) -> None:
        publishers = []
        for producer in self.producers:
            publishers.append(Publisher(producer.name))
            publishers[-1].acknowledged = producer.acknowledged[topic]
        check(found, publishers)
        if not topic.endswith("packed") and not found.void:
            # For those who do nothing but leave out what has a kind.
            assert found.payloads == [one.message.payload for one in found.standing]

    async def _check_read(self, client: Client, topic: str, found: Found) -> None:
        expected = [(one.message.index, one.message.producer, one.message.sequence_id) for one in found.standing]
        async with client.reader(topic) as reader:
            read = [(message.index, message.producer_name, message.sequence_id) async for message in reader]
        assert read == expected

    async def _check_sent_again(self, client: Client, topic: str, producer: ProducerProcess) -> None:
        config = ProducerConfig(delivery_timeout_seconds=None)
        async with client.producer(topic, producer.name, config) as again:
            last = producer.acknowledged[topic]
            assert again.persisted_sequence_id == last
            receipts = [await again.send(b"again", sequence_id) for sequence_id in range(last + 1)]
            assert {(await receipt).verdict for receipt in receipts} == {Verdict.DUP}

    def _check_control(self, found: Found) -> None:
        """The same load leaves doubles where nobody deduplicates, if a producer was killed."""
        for producer in self.producers:
            own = [one.message.sequence_id for one in found.standing if one.message.producer == producer.name]
            assert set(own) == set(range(producer.acknowledged[self.control] + 1))
            self.doubled += len(own) - len(set(own))


def start(*sidecars: Sidecar) -> None:
    """All at once; returns when they serve."""
    for sidecar in sidecars:
        sidecar.spawn()
    for sidecar in sidecars:
        sidecar.wait_until_serving()


class Faults:
    """What can happen. Each fault is over, and all go on, when its method returns."""

    def __init__(self, scene: Scene, dice: random.Random) -> None:
        self._scene = scene
        self._dice = dice

    def _topic(self) -> str:
        return self._dice.choice(self._scene.every_topic)

    async def kill_owner(self) -> None:
        owner = await self._scene.owner(self._topic())
        owner.kill()
        await self._go_on_without(owner)

    async def freeze_owner(self) -> None:
        """For longer than the broker waits for a ping."""
        owner = await self._scene.owner(self._topic())
        owner.signal(signal.SIGSTOP)
        await self._scene.goes_on()
        owner.signal(signal.SIGCONT)
        await self._scene.goes_on()

    async def freeze_owner_for_a_moment(self) -> None:
        owner = await self._scene.owner(self._topic())
        owner.signal(signal.SIGSTOP)
        await asyncio.sleep(SHORTER_THAN_KEEP_ALIVE_SECONDS)
        owner.signal(signal.SIGCONT)
        await self._scene.goes_on()

    async def kill_frozen_owner(self) -> None:
        owner = await self._scene.owner(self._topic())
        owner.signal(signal.SIGSTOP)
        await asyncio.sleep(SHORTER_THAN_KEEP_ALIVE_SECONDS)
        owner.kill()
        await self._go_on_without(owner)

    async def kill_two(self) -> None:
        some = self._dice.sample(self._scene.sidecars, 2)
        for sidecar in some:
            sidecar.kill()
        await self._go_on_without(*some)

    async def kill_all(self) -> None:
        for sidecar in self._scene.sidecars:
            sidecar.kill()
        start(*self._scene.sidecars)
        await self._scene.goes_on()

    async def _go_on_without(self, *gone: Sidecar) -> None:
        """The rest does; then these come back."""
        await self._scene.goes_on()
        start(*gone)

    async def kill_producer(self) -> None:
        producer = self._dice.choice(self._scene.producers)
        producer.kill()
        producer.start()
        await self._scene.goes_on()

    async def unload(self) -> None:
        await self._scene.cluster.admin.unload(self._topic())
        await self._scene.goes_on()

    async def move(self) -> None:
        """As an operator does, to anyone who takes it."""
        topic = self._topic()
        before = await self._scene.owner(topic)
        async with Client(self._scene.addresses) as client:
            assert await client.admin.move_topic(topic) != before.address
        await self._scene.goes_on()

    async def freeze_broker(self) -> None:
        """For longer than an owner waits for what it has sent."""
        before = self._failures()
        self._scene.broker.freeze()
        try:
            await until(lambda: all(now > had for now, had in zip(self._failures(), before, strict=True)))
        finally:
            self._scene.broker.thaw()
        await self._scene.goes_on()

    def _failures(self) -> list[int]:
        """How often an owner was not certain what became of what it had sent, by topic."""
        events = [entry["event"] for sidecar in self._scene.sidecars for entry in list(sidecar.log)]
        starts = [f"the log of topic {topic} failed" for topic in self._scene.every_topic]
        return [sum(event.startswith(start) for event in events) for start in starts]

    async def kill_broker(self) -> None:
        await kill_and_start(self._scene.broker)
        await self._scene.goes_on()

    async def kill_broker_and_owner(self) -> None:
        owner = await self._scene.owner(self._topic())
        owner.kill()
        await kill_and_start(self._scene.broker)
        await self._go_on_without(owner)

    def any(self) -> Callable[[], Coroutine[Any, Any, None]]:
        """What takes half a minute is rarer."""
        often = [self.kill_owner, self.kill_frozen_owner, self.freeze_owner, self.freeze_owner_for_a_moment]
        often += [self.kill_two, self.kill_all, self.kill_producer, self.unload, self.move]
        seldom = [self.kill_broker, self.kill_broker_and_owner, self.freeze_broker]
        return self._dice.choice(often * 2 + seldom)


Outages = defaultdict[str, list[float]]
"""Seconds without service by fault."""


async def attack(broker: Broker, dice: random.Random, count: int, folder: Path, outages: Outages) -> int:
    """A scene and this many faults; how many messages were published. The first one kills a producer, for the
    control."""
    async with Scene(broker, folder, are_listed=dice.random() < 0.5) as scene:
        faults = Faults(scene, dice)
        for fault in [faults.kill_producer, *(faults.any() for _ in range(count - 1))]:
            with scene.timed() as seconds:
                await fault()
            longest = max(seconds.values())
            outages[fault.__name__].append(longest)
            print(f"  {fault.__name__}: {longest:.1f} s without service", flush=True)
            for sidecar in scene.sidecars:
                sidecar.check_running()
        found = await scene.finish()
        assert scene.doubled, "the control shows nothing"
        void = sum(one.void for one in found.values())
        messages = sum(len(one.standing) for one in found.values())
        print(f"  {messages} messages, {void} void entries; the control has {scene.doubled} doubles", flush=True)
        return messages


def main() -> None:
    parser = argparse.ArgumentParser(description="Ends with an error where something was lost or doubled, or hangs.")
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice, outages, messages = random.Random(options.seed), Outages(list), 0
    with Broker(get(), keepAliveIntervalSeconds=KEEP_ALIVE_SECONDS) as broker, tempfile.TemporaryDirectory() as folder:
        for first in range(0, options.faults, FAULTS_A_SCENE):
            count = min(FAULTS_A_SCENE, options.faults - first)
            messages += asyncio.run(attack(broker, dice, count, Path(folder) / str(first), outages))
    for name, seconds in sorted(outages.items()):
        middle, most = statistics.median(seconds), max(seconds)
        print(f"{name}: {len(seconds)} times, {middle:.1f} s without service, at most {most:.1f} s")
    print(f"{options.faults} faults from seed {options.seed}: {messages} messages, none lost, none doubled")


if __name__ == "__main__":
    main()
