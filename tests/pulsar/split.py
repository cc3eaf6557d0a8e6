"""Two producers of one topic at once, both exclusive: Pulsar lets both in where each fences the other out."""

import asyncio
import itertools
from contextlib import suppress
from typing import Any

import pulsar
import pulsar.asyncio
import pytest

from seqdedupe.log.pulsar import log, native_topic, writer
from seqdedupe.log.pulsar.entries import PulsarMessage
from seqdedupe.log.pulsar.entry_limit import Brokers
from seqdedupe.log.pulsar.native_topic import NativeProducer
from seqdedupe.message_id import MessageId
from seqdedupe.pulsar_wire.pulsar_api_pb2 import Shared
from seqdedupe.testing import LAST_RESORT_SECONDS

_names = itertools.count()

RACES = 200
"""About every second one lets both in."""


async def split(
    monkeypatch: pytest.MonkeyPatch,
    topic: str,
    *clients: pulsar.asyncio.Client,
    mode: pulsar.ProducerAccessMode = pulsar.ProducerAccessMode.ExclusiveWithFencing,
    openings: tuple[int, ...] = (),
) -> dict[pulsar.asyncio.Client, int]:
    """From now on each client's openings of the topic get its producer, and all of these producers live.

    Client k gets it `openings[k]` times, else as often as it likes; after that it opens as it would. In the mode
    `PulsarResources` they live for certain, with fencing after some races. Returns how often each client still gets it.
    """
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        producers = await _living(topic, clients, mode)
    kept = {client: _Kept(producer) for client, producer in zip(clients, producers, strict=True)}
    left = dict(zip(clients, openings or [2**30] * len(clients), strict=True))
    opened = writer._opened

    async def hand_out(client: pulsar.asyncio.Client, topic: str, *others: Any) -> Any:
        if not left.get(client):
            return await opened(client, topic, *others)
        left[client] -= 1
        return kept[client]

    async def believed(*_: object) -> None:
        """The statistics show both."""

    monkeypatch.setattr(writer, "_opened", hand_out)
    monkeypatch.setattr(log, "check_alone", believed)
    return left


async def _living(topic: str, clients: tuple[pulsar.asyncio.Client, ...], mode: pulsar.ProducerAccessMode) -> list[Any]:
    for race in range(RACES):
        opening = [_open(client, topic, f"{race}-{k}", mode) for k, client in enumerate(clients)]
        results = await asyncio.gather(*opening, return_exceptions=True)
        producers: list[Any] = [one for one in results if not isinstance(one, BaseException)]
        if len(producers) == len(clients) and await _take(producers):
            return producers
        for producer in producers:
            with suppress(pulsar.asyncio.PulsarException):
                await producer.close()
    raise AssertionError(f"in {RACES} races only one producer was let in")


async def _open(client: pulsar.asyncio.Client, topic: str, name: str, mode: pulsar.ProducerAccessMode) -> Any:
    return await client.create_producer(
        topic,
        producer_name=name,
        access_mode=mode,
        batching_enabled=False,
        max_pending_messages=writer.MAX_IN_FLIGHT_ENTRIES,
        block_if_queue_full=False,
        send_timeout_millis=0,
    )


async def _take(producers: list[Any]) -> bool:
    """Whether each is answered that its message is stored, after all have been let in, and twice."""
    try:
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            for producer in producers * 2:
                await producer.send(b"who lives?")
    except (pulsar.asyncio.PulsarException, TimeoutError):
        return False
    return True


async def split_native(
    monkeypatch: pytest.MonkeyPatch, topic: str, *brokers: Brokers, openings: tuple[int, ...] = ()
) -> dict[Brokers, int]:
    """The same for native entries, with producers in the mode Shared: `Exclusive` never lets two in."""
    kept = {each: await _kept_native(each, topic) for each in brokers}
    left = dict(zip(brokers, openings or [2**30] * len(brokers), strict=True))
    opened = native_topic.open_native_producer

    async def hand_out(brokers: Any, *others: Any) -> Any:
        if not left.get(brokers):
            return await opened(brokers, *others)
        left[brokers] -= 1
        return kept[brokers]

    async def believed(*_: object) -> None:
        """The statistics show both."""

    monkeypatch.setattr(writer, "open_native_producer", hand_out)
    monkeypatch.setattr(log, "check_alone", believed)
    return left


async def _kept_native(brokers: Brokers, topic: str) -> "_KeptNative":
    connection = await brokers.connection(topic)
    name = f"seqdedupe-kept-{next(_names)}"
    kept = _KeptNative(connection, name)
    await kept.open_shared(topic)
    return kept


class _KeptNative(NativeProducer):
    """One that outlives the openings that use it, each of which hears of its own entries."""

    async def open_shared(self, topic: str) -> None:
        self._answers: dict[int, Any] = {}
        self._producer = await self._connection.producer(
            topic, self._receive, self._end, name=self._name, access_mode=Shared
        )

    def send(self, message: PulsarMessage, number: int, answer: Any) -> None:
        self._answers[number] = answer
        super().send(message, number, self._hand_on)

    def _hand_on(self, number: int, failure: Any, place: MessageId) -> None:
        for one in [number] if failure is None else list(self._answers):
            self._answers.pop(one)(number, failure, place)

    async def close(self) -> None:
        pass


class _Kept:
    """A producer that outlives the openings that use it."""

    def __init__(self, producer: Any) -> None:
        self._kept = producer
        self._producer = producer._producer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kept, name)

    async def close(self) -> None:
        pass
