"""Two producers of one topic at once, both exclusive: Pulsar lets both in where each fences the other out."""

import asyncio
from contextlib import suppress
from typing import Any

import pulsar
import pulsar.asyncio
import pytest

from seqdedupe.log.pulsar import log, writer
from seqdedupe.testing import LAST_RESORT_SECONDS

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


class _Kept:
    """A producer that outlives the openings that use it."""

    def __init__(self, producer: Any) -> None:
        self._kept = producer
        self._producer = producer._producer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kept, name)

    async def close(self) -> None:
        pass
