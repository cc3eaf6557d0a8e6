"""Two producers of one topic at once. They are in the mode Shared: `Exclusive` never lets two in."""

import itertools
from typing import Any

import pytest

from seqdedupe.log.pulsar import broker_wire, log, writer
from seqdedupe.log.pulsar.broker_wire import Brokers, ExclusiveProducer
from seqdedupe.log.pulsar.entries import EntryFormat, PulsarMessage
from seqdedupe.message_id import MessageId
from seqdedupe.pulsar_wire.pulsar_api_pb2 import Shared

_names = itertools.count()


async def split(
    monkeypatch: pytest.MonkeyPatch,
    topic: str,
    entry_format: EntryFormat,
    *brokers: Brokers,
    openings: tuple[int, ...] = (),
) -> dict[Brokers, int]:
    """From now on the openings of the topic by way of each of these get its producer, and all these producers live.

    By way of number k they get it `openings[k]` times, else as often as they like; after that they open as they would.
    Returns how often they still get it.
    """
    kept = {each: await _kept(each, topic, entry_format) for each in brokers}
    left = dict(zip(brokers, openings or [2**30] * len(brokers), strict=True))
    opened = broker_wire.open_producer

    async def hand_out(brokers: Any, *others: Any) -> Any:
        if not left.get(brokers):
            return await opened(brokers, *others)
        left[brokers] -= 1
        return kept[brokers]

    async def believed(*_: object) -> None:
        """The statistics show both."""

    monkeypatch.setattr(writer, "open_producer", hand_out)
    monkeypatch.setattr(log, "check_alone", believed)
    return left


async def _kept(brokers: Brokers, topic: str, entry_format: EntryFormat) -> "_Kept":
    connection = await brokers.connection(topic)
    kept = _Kept(connection, f"seqdedupe-kept-{next(_names)}", entry_format)
    await kept.open_shared(topic)
    return kept


class _Kept(ExclusiveProducer):
    """One that outlives the openings that use it, each of which hears of its own entries."""

    async def open_shared(self, topic: str) -> None:
        self._answers: dict[int, Any] = {}
        self._producer = await self._connection.producer(
            topic, self._receive, self._end, name=self._name, access_mode=Shared, max_outstanding=self.max_in_flight
        )

    def send(self, message: PulsarMessage, number: int, answer: Any) -> None:
        self._answers[number] = answer
        super().send(message, number, self._hand_on)

    def _hand_on(self, number: int, failure: Any, place: MessageId) -> None:
        for one in [number] if failure is None else list(self._answers):
            self._answers.pop(one)(number, failure, place)

    async def close(self) -> None:
        pass
