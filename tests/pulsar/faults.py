"""Load on a topic, and what goes wrong beneath it: line, topic and broker fail in every way."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Self

import pulsar

from pulsar_broker.standalone import Broker
from seqdedupe.log.pulsar.entries import EntryFormat
from tests.pulsar.line import Line
from tests.pulsar.owners import Cluster, kill_and_start, quiet, until
from tests.pulsar.publishers import FRAMES_IN_FLIGHT, Process, Publisher, check, found_by_a_stock_client, send_again

SEND_TIMEOUT_SECONDS = 2.0
MANY = 1_000_000
"""More than are published."""


class Load:
    """A producer that publishes all the time to a topic, no matter what happens."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.publisher = Publisher("p")

    async def begin(self) -> None:
        topic = await self.process.start()
        self._publishing = asyncio.ensure_future(self.publisher.publish(topic, MANY))

    async def goes_on(self) -> None:
        """Until more was acknowledged, by far, than was in flight."""
        before = self.publisher.acknowledged
        await until(lambda: self._publishing.done() or self.publisher.acknowledged > before + 200)
        if self._publishing.done():
            await self._publishing

    async def end(self) -> None:
        """When all that it has sent is acknowledged."""
        self.publisher.finish()
        await self._publishing

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if hasattr(self, "_publishing"):
            self._publishing.cancel()
            await asyncio.wait([self._publishing])
        await self.process.close()

    async def is_full(self) -> None:
        """Until as much is in flight as may be."""
        await until(lambda: len(self.process.topic.flight) >= FRAMES_IN_FLIGHT)

    @property
    def failures(self) -> int:
        """How often the log has said that an outcome is unknown."""
        return self.process.topic.counters.log_failures

    async def has_failed(self, before: int) -> None:
        """Until there are more failures than before the fault: the log may say so at once."""
        await until(lambda: self.failures > before)


async def check_all(cluster: Cluster, topic: str, load: Load, other: Process, entry_format: EntryFormat) -> None:
    """What stands there, and what a process answers that knows nothing but the log."""
    found = await found_by_a_stock_client(cluster, topic)
    check(found, [load.publisher])
    if entry_format is EntryFormat.PLAIN or (entry_format is EntryFormat.NATIVE and not found.void):
        # For those who do nothing but leave out what has a kind.
        assert found.payloads == [one.message.payload for one in found.standing]
    await load.process.close()
    async with other:
        await send_again(await other.start(), load.publisher)


class Faults:
    """What can happen to a load that reaches its broker over a line. Each fault is over when its method returns."""

    def __init__(self, broker: Broker, cluster: Cluster, topic: str, line: Line, load: Load) -> None:
        self._broker, self._cluster, self._topic = broker, cluster, topic
        self._line, self._load = line, load

    async def cut(self) -> None:
        """All that is in flight has no answer, and is sent again."""
        self._line.hold_answers()
        await self._load.is_full()
        self._line.cut()

    async def no_answer(self) -> None:
        """For longer than the time-out."""
        before = self._load.failures
        self._line.hold_answers()
        await self._load.has_failed(before)
        self._line.let_answers_through()

    async def unload(self) -> None:
        for _ in range(3):
            await self._cluster.admin.unload(self._topic)

    async def freeze(self) -> None:
        """The broker, for longer than the time-out."""
        before = self._load.failures
        self._broker.freeze()
        try:
            await self._load.has_failed(before)
        finally:
            self._broker.thaw()

    async def throw_out(self) -> None:
        """By somebody who goes again."""
        client = pulsar.Client(self._cluster.service_url, logger=quiet())
        mode = pulsar.ProducerAccessMode.ExclusiveWithFencing
        before = self._load.failures
        await asyncio.to_thread(client.create_producer, self._topic, access_mode=mode)
        await self._load.has_failed(before)
        await asyncio.to_thread(client.close)

    async def kill(self) -> None:
        await kill_and_start(self._broker)

    async def stop(self) -> None:
        """As an operator does."""
        await asyncio.to_thread(self._broker.stop)
        self._broker.spawn()
        await asyncio.to_thread(self._broker.wait_until_healthy)

    def all(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """Every fault."""
        return [self.cut, self.no_answer, self.unload, self.throw_out, self.freeze, self.kill, self.stop]
