"""What readers get: batches as the log stores them, and the messages in them."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import numpy as np

from seqdedupe.batch import Batch
from seqdedupe.client.results import NO_PARTITION
from seqdedupe.limits import NO_SEQUENCE_ID
from seqdedupe.message_id import MessageId, Position
from seqdedupe.message_ids import MessageIds

_EPOCH = datetime.fromtimestamp(0, UTC)


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
