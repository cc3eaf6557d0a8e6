"""The types of the batches and messages that readers receive, and the base class of all readers."""

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
    """The message IDs of the rows, if the log returns them. None if the IDs follow from the index (embedded log)."""
    partition: int = NO_PARTITION
    """The partition, if a partitioned topic is read; -1 otherwise."""
    _payloads: list[bytes | None] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def payloads(self) -> list[bytes | None]:
        """The payloads of all rows, cut out of the batch at the first use. Cutting out one payload at a time would take
        several times as long."""
        if self._payloads is None:
            self._payloads = self.batch.payloads.rows(len(self))
        return self._payloads

    def __len__(self) -> int:
        return len(self.batch)

    def position(self, row: int) -> Position:
        """Return the position of a row's message. A reader that starts at this position continues after the message."""
        return Position(self.incarnation, self.message_id(row), self.base_index + row, self.ownership)

    def message_id(self, row: int) -> MessageId:
        """Return the message ID of a row."""
        if self.message_ids is None:
            return MessageId.of(self.incarnation, self.base_index + row)
        return self.message_ids[row]

    def rest(self, row: int) -> "StoredBatch":
        """Return a batch of the rows from this row on."""
        if not row:
            return self
        rest = self.batch.take(np.arange(row, len(self)))
        ids = self.message_ids and self.message_ids.cut(row, len(self))
        return replace(self, batch=rest, base_index=self.base_index + row, message_ids=ids)


class Message:
    """One message. Its columns are decoded at their first use."""

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
        """The event time that the producer set, in milliseconds since 1970; 0 if the producer set no event time."""
        times = self._stored.batch.event_times_ms
        return int(times[self._row]) if len(times) else 0

    @property
    def event_time(self) -> datetime | None:
        """The event time in UTC. Raises OverflowError if `datetime` cannot hold it."""
        return _EPOCH + timedelta(milliseconds=self.event_time_ms) if self.event_time_ms else None

    @property
    def publish_time_ms(self) -> int:
        """The time when the log stored the message, in milliseconds since 1970. The publish time never decreases within
        a topic."""
        return self._stored.publish_time_ms

    @property
    def publish_time(self) -> datetime:
        """The publish time in UTC."""
        return _EPOCH + timedelta(milliseconds=self._stored.publish_time_ms)

    @property
    def producer_name(self) -> str:
        """The name of the producer; empty in a topic of deduplication IDs."""
        batch = self._stored.batch
        return (batch.producer_names[batch.producer_of(self._row)] or b"").decode()

    @property
    def sequence_id(self) -> int:
        """The sequence ID; -1 in a topic of deduplication IDs."""
        ids = self._stored.batch.sequence_ids
        return int(ids[self._row]) if len(ids) else NO_SEQUENCE_ID

    @property
    def deduplication_id(self) -> bytes | None:
        """The deduplication ID; None in a topic of sequence IDs."""
        return self._stored.batch.deduplication_ids[self._row]

    @property
    def index(self) -> int:
        return self._stored.base_index + self._row

    @property
    def partition(self) -> int:
        """The message's partition, if a partitioned topic is read; -1 otherwise."""
        return self._stored.partition

    @property
    def message_id(self) -> MessageId:
        return self._stored.message_id(self._row)

    @property
    def position(self) -> Position:
        """The position of this message. A reader that starts at this position continues after the message."""
        return self._stored.position(self._row)

    def __repr__(self) -> str:
        if (deduplication_id := self.deduplication_id) is not None:
            return f"Message(deduplication_id={deduplication_id!r}, message_id={self.message_id})"
        return f"Message({self.producer_name!r}, sequence_id={self.sequence_id}, message_id={self.message_id})"


# -- The base of readers of a topic and of a partitioned topic: a batch in hand, and then the next one.


class Messages(ABC):
    """The base class of readers: returns messages one by one, or as whole batches. `fetch` waits for a batch. Messages
    of a batch that was already received are returned without waiting."""

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
        """Yield whole stored batches. The first and last batch of each partition are cut to the requested range."""
        while (stored := await self.next_batch()) is not None:
            yield stored

    async def next_batch(self) -> StoredBatch | None:
        """Return the next batch; None at the end. If messages of the current batch were read one by one, return the
        rest of that batch."""
        return self.rest_in_hand() if self.has_in_hand() or await self.fetch() else None

    @abstractmethod
    def has_in_hand(self) -> bool:
        """Whether the next message can be read without waiting."""

    @abstractmethod
    def next_in_hand(self) -> Message | None:
        """Return the next message that was already received; None if a `fetch` is needed first."""

    @abstractmethod
    def rest_in_hand(self) -> StoredBatch | None:
        """Return the rest of the current batch."""

    @abstractmethod
    async def fetch(self) -> bool:
        """Wait for the next batch, and make it the current batch. Return false at the end and after `close`. Only one
        task may call this at a time."""

    @abstractmethod
    def take_record(self) -> bool:
        """Make a batch that was already received the current batch. Return false if no batch was received. Do not call
        this during `fetch`."""

    @abstractmethod
    async def close(self) -> None:
        """End the reader, and any `fetch` in progress."""


_EPOCH = datetime.fromtimestamp(0, UTC)
