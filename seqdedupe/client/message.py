"""What readers get: batches as the log stores them, and the messages in them; and what all readers have in common."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Self

import numpy as np

from seqdedupe.batch import Batch
from seqdedupe.client.pending import NO_PARTITION
from seqdedupe.limits import NO_SEQUENCE_ID
from seqdedupe.message_id import MessageId, MessageIds, Position


@dataclass(slots=True)
class StoredBatch:
    """A batch as the log stores it. Row i has index `base_index + i`."""

    batch: Batch
    base_index: int
    publish_time_ms: int
    incarnation: int
    ownership: int = 0
    """See `Position`."""
    message_ids: MessageIds | None = None
    """Those of the rows, where the log gives them; None where the index says them, as in the embedded log."""
    partition: int = NO_PARTITION
    """Where it was read as one of a partitioned topic; -1 otherwise."""
    _payloads: list[bytes | None] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def payloads(self) -> list[bytes | None]:
        """Those of all rows, cut out of the batch when they are first asked for: one by one it takes many times as
        long."""
        if self._payloads is None:
            self._payloads = self.batch.payloads.rows(len(self))
        return self._payloads

    def __len__(self) -> int:
        return len(self.batch)

    def position(self, row: int) -> Position:
        """The position of a row's message, from which to read on after it."""
        return Position(self.incarnation, self.message_id(row), self.base_index + row, self.ownership)

    def message_id(self, row: int) -> MessageId:
        """That of a row's message."""
        if self.message_ids is None:
            return MessageId.of(self.incarnation, self.base_index + row)
        return self.message_ids[row]

    def rest(self, row: int) -> "StoredBatch":
        """The rows from this one on."""
        if not row:
            return self
        rest = self.batch.take(np.arange(row, len(self)))
        ids = self.message_ids and self.message_ids.cut(row, len(self))
        return replace(self, batch=rest, base_index=self.base_index + row, message_ids=ids)


class Message:
    """One message. Its columns are looked at when they are asked for."""

    __slots__ = ("_row", "_stored")

    def __init__(self, stored: StoredBatch, row: int) -> None:
        self._stored = stored
        self._row = row

    @property
    def payload(self) -> bytes | None:
        return self._stored.payloads[self._row]

    @property
    def key(self) -> bytes | None:
        return self._stored.batch.keys[self._row]

    @property
    def properties(self) -> dict[str, str]:
        return self._stored.batch.properties_of(self._row)

    @property
    def event_time_ms(self) -> int:
        """Milliseconds since 1970 as the producer set them; 0 is none."""
        times = self._stored.batch.event_times_ms
        return int(times[self._row]) if len(times) else 0

    @property
    def event_time(self) -> datetime | None:
        """The event time in UTC. Raises OverflowError for one that `datetime` cannot hold."""
        return _EPOCH + timedelta(milliseconds=self.event_time_ms) if self.event_time_ms else None

    @property
    def publish_time_ms(self) -> int:
        """When the log took the message, in milliseconds since 1970. Never falls within a topic."""
        return self._stored.publish_time_ms

    @property
    def publish_time(self) -> datetime:
        """The publish time in UTC."""
        return _EPOCH + timedelta(milliseconds=self._stored.publish_time_ms)

    @property
    def producer_name(self) -> str:
        """Empty in a topic of deduplication IDs."""
        batch = self._stored.batch
        return (batch.producer_names[batch.producer_of(self._row)] or b"").decode()

    @property
    def sequence_id(self) -> int:
        """-1 in a topic of deduplication IDs."""
        ids = self._stored.batch.sequence_ids
        return int(ids[self._row]) if len(ids) else NO_SEQUENCE_ID

    @property
    def deduplication_id(self) -> bytes | None:
        """None in a topic of sequence IDs."""
        return self._stored.batch.deduplication_ids[self._row]

    @property
    def index(self) -> int:
        return self._stored.base_index + self._row

    @property
    def partition(self) -> int:
        """The partition that it is from, where a partitioned topic is read; -1 otherwise."""
        return self._stored.partition

    @property
    def message_id(self) -> MessageId:
        return self._stored.message_id(self._row)

    @property
    def position(self) -> Position:
        """From which to read on after this message."""
        return self._stored.position(self._row)

    def __repr__(self) -> str:
        if (deduplication_id := self.deduplication_id) is not None:
            return f"Message(deduplication_id={deduplication_id!r}, message_id={self.message_id})"
        return f"Message({self.producer_name!r}, sequence_id={self.sequence_id}, message_id={self.message_id})"


# -- What the readers of a topic and of a partitioned one have in common: a batch in hand, and then the next one.


class Messages(ABC):
    """Messages one by one, or as whole batches. `fetch` waits; what is in hand is handed out without waiting."""

    topic: str

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        while (message := self.next_in_hand()) is None:
            if not await self.fetch():
                raise StopAsyncIteration
        return message

    async def batches(self) -> AsyncIterator[StoredBatch]:
        """Whole batches as stored; the first and last, of each partition, are cut to what was asked for."""
        while (stored := await self.next_batch()) is not None:
            yield stored

    async def next_batch(self) -> StoredBatch | None:
        """The next whole batch, or what single messages have left of one; None at the end."""
        return self.rest_in_hand() if self.has_in_hand() or await self.fetch() else None

    @abstractmethod
    def has_in_hand(self) -> bool:
        """Whether the next message needs no waiting."""

    @abstractmethod
    def next_in_hand(self) -> Message | None:
        """The next message that needs no waiting; None if there is none."""

    @abstractmethod
    def rest_in_hand(self) -> StoredBatch | None:
        """What is left of the batch in hand, all of it handed out with this."""

    @abstractmethod
    async def fetch(self) -> bool:
        """Waits until another batch is in hand; false at the end and once closed. One task at a time."""

    @abstractmethod
    def take_record(self) -> bool:
        """Takes a batch in hand that was received already; false if there is none. Not while `fetch` is under way."""

    @abstractmethod
    async def close(self) -> None:
        """Ends it; a `fetch` under way ends too."""


_EPOCH = datetime.fromtimestamp(0, UTC)
