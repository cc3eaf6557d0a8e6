"""The sequence IDs of a producer of a partitioned topic. The IDs rise over all partitions together.

Begin with `Numbering`. `SettledIds` tracks the ID up to which all messages are settled in all partitions. Each batch
carries this ID (`Partition.mark`). After a crash, the producer's source must be sent again from this ID on.
`complete_up_to` finds this ID in the producer's last messages.
"""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from seqdedupe.batch import Batch, Int64s
from seqdedupe.client.builder import Builder
from seqdedupe.client.pending import PendingBatch
from seqdedupe.client.producer_session import ProducerConfig
from seqdedupe.client.reader import Reader
from seqdedupe.client.route import Sidecars
from seqdedupe.errors import PositionError, error
from seqdedupe.limits import NO_SEQUENCE_ID
from seqdedupe.message_id import Position
from seqdedupe.names import partition_of

# -- The ID after which a producer's source must be sent again, read from the producer's last messages.


class Persisted(NamedTuple):
    """The last message of a producer in a topic or partition when the producer's session started."""

    topic: str
    """The full name of the topic, or of a partition."""
    sequence_id: int
    """The sequence ID of the message; -1 if there was no message."""
    position: Position | None
    """The position of the message. None if there was no message, or if its position is no longer known."""
    incarnation: int
    """The incarnation of the topic or partition."""


async def complete_up_to(sidecars: Sidecars, producer_name: str, last: Iterable[Persisted]) -> int:
    """Return the highest ID up to which everything is settled, according to the last messages of the producer in each
    partition. Return -1 if no message contains such an ID.

    Messages that retention has trimmed are ignored. The result may then be lower. In that case the source resends more
    messages than necessary, which does no harm.
    """
    highest = NO_SEQUENCE_ID
    for one in last:
        if one.position is None:
            continue
        index = one.position.index
        async with Reader(sidecars, one.topic, index, stop_index=index + 1) as reader:
            try:
                stored = await reader.next_batch()
            except PositionError as e:
                if e.reason != "POSITION_TRIMMED":
                    raise
                continue
        if stored is not None and len(stored.batch.complete_up_to):
            of_producer = stored.batch.names().index(producer_name)
            highest = max(highest, int(stored.batch.complete_up_to[of_producer]))
    return highest


# -- The ID up to which everything is settled in all partitions. The producer puts it into every batch.

_SWEEP_BATCHES = 1024


class SettledIds:
    """Tracks the ID up to which everything sent is settled in all partitions. Several threads may share this object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held only briefly
        self._begun: deque[tuple[int, PendingBatch]] = deque()
        self._sweep_at = _SWEEP_BATCHES
        self._last_sent = self._resumed_after = NO_SEQUENCE_ID

    def resume(self, sequence_id: int) -> None:
        """Start with this ID: everything up to it is already settled."""
        self._last_sent = self._resumed_after = sequence_id

    def sent(self, first_id: int, batches: Iterable[PendingBatch], last_id: int) -> None:
        """Record that messages with the IDs from `first_id` to `last_id` have begun these batches. IDs ascend from call
        to call."""
        with self._lock:
            self._begun.extend((first_id, pending) for pending in batches)
            self._last_sent = max(self._last_sent, last_id)
            if len(self._begun) >= self._sweep_at:
                # While one partition makes no progress, the settled batches of the other partitions are dropped here.
                self._begun = deque(begun for begun in self._begun if not begun[1].durable or begun[1].failed)
                self._sweep_at = 2 * len(self._begun) + _SWEEP_BATCHES

    def up_to(self) -> int:
        """Return the ID up to which everything sent is settled; -1 if there is none. Batches that failed without a
        receipt never count as settled."""
        with self._lock:
            begun = self._begun
            while begun and begun[0][1].durable and not begun[0][1].failed:
                begun.popleft()
            return max(begun[0][0] - 1 if begun else self._last_sent, self._resumed_after)


class Partition(NamedTuple):
    """One partition of a partitioned producer. `settled` are the settled IDs of all partitions."""

    number: int
    settled: SettledIds

    def mark(self, pending: PendingBatch) -> None:
        """Add the partition's number and the settled ID to a sealed batch."""
        pending.partition = self.number
        up_to = self.settled.up_to()
        if pending.batch is not None and up_to != NO_SEQUENCE_ID:
            pending.batch.complete_up_to = np.array([up_to], np.int64)


class Numbering:
    """The sequence IDs of a producer over all partitions, and the partitions of its messages."""

    def __init__(self, name: str, encoded_name: bytes, partitions: int, config: ProducerConfig) -> None:
        self.settled = SettledIds()
        self.resumed_after = NO_SEQUENCE_ID
        self._name = name
        self._encoded_name = encoded_name
        self._partitions = partitions
        self._ids = Builder(encoded_name, NO_SEQUENCE_ID, config, lambda pending: None)
        self._highest_persisted = NO_SEQUENCE_ID

    @property
    def last_sequence_id(self) -> int:
        return self._ids.last_sequence_id

    def resume(self, complete_up_to: int, highest_persisted: int) -> None:
        """Continue after the ID `complete_up_to`. The IDs above it, up to `highest_persisted`, may or may not be
        stored."""
        self.resumed_after = complete_up_to
        self._highest_persisted = highest_persisted
        self._ids.last_sequence_id = complete_up_to
        self.settled.resume(complete_up_to)

    def next_id(self, sequence_id: int | None) -> int:
        """Return the ID of the next message. Raises INVALID_SEQUENCE_ID, NOT_ASCENDING. Raises INVALID_REQUEST if
        `sequence_id` is None but the ID must be given."""
        if sequence_id is None:
            self._check_may_be_left_out()
        return self._ids.next_id(sequence_id)

    def _check_may_be_left_out(self) -> None:
        # The next IDs may belong to stored messages: new messages with these IDs would be lost as duplicates.
        if self.last_sequence_id < self._highest_persisted:
            raise error(
                "INVALID_REQUEST",
                f"producer {self._name!r} goes on after sequence ID {self.resumed_after}, and some messages up to "
                f"{self._highest_persisted} are stored already: send these messages again with their sequence IDs",
                hint=f"Give sequence IDs until {self._highest_persisted} is passed. To skip what was not stored, "
                "begin above it.",
                resumed_after=self.resumed_after,
                highest_persisted=self._highest_persisted,
            )

    def partition(self, key: bytes | None) -> int:
        """Return the partition of a message with this key, or without a key."""
        return partition_of(key, self._encoded_name, self._partitions)

    def sent(self, sequence_id: int, begun: Sequence[PendingBatch]) -> None:
        """Record that a message with this ID was sent. If the message has begun a new batch, `begun` contains that
        batch."""
        self._ids.sent(sequence_id)
        self.settled.sent(sequence_id, begun, sequence_id)

    def check_columns(self, payloads: object, sequence_ids: object, *columns: object) -> Batch:
        """Return the batch of these columns, see `Builder.check_columns`."""
        if sequence_ids is None:
            self._check_may_be_left_out()
        return self._ids.check_columns(payloads, sequence_ids, *columns)  # type: ignore[arg-type]

    def rows_by_partition(self, batch: Batch) -> list[tuple[int, Int64s]]:
        """Return the rows of a batch by partition."""
        if not batch.keys:
            return [(self.partition(None), np.arange(len(batch)))]
        known: dict[bytes | None, int] = {}
        of_rows = np.empty(len(batch), np.int64)
        for row in range(len(batch)):
            key = batch.keys[row]
            if key not in known:
                known[key] = self.partition(key)
            of_rows[row] = known[key]
        return [(int(k), np.flatnonzero(of_rows == k)) for k in np.unique(of_rows)]

    def sent_batch(self, batch: Batch, begun: Sequence[PendingBatch]) -> None:
        """Record that a batch was sent. The batch was divided into the batches `begun`."""
        first, last = int(batch.sequence_ids[0]), int(batch.sequence_ids[-1])
        self._ids.sent(last)
        self.settled.sent(first, begun, last)
