"""Sending to all partitions of a topic, with sequence IDs or IDs of their own: each partition has a producer."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Protocol

import numpy as np

from seqdedupe.batch import Batch, Int64s
from seqdedupe.client.builder import Builder, Keys, Numbers, Payloads, Properties, PropertyRows, key_bytes
from seqdedupe.client.pending import BatchReceipt, BatchResult, PendingBatch, Receipt, SpreadBatch
from seqdedupe.client.reader import Reader
from seqdedupe.client.route import Sidecars
from seqdedupe.client.session import ProducerConfig
from seqdedupe.errors import PositionError, SeqdedupeError, error
from seqdedupe.limits import NO_SEQUENCE_ID
from seqdedupe.message_id import Position
from seqdedupe.names import partition_of
from seqdedupe.v1 import admin_pb2

# -- From where the source of a partitioned topic's producer has to be sent again: its last messages say it.


class Persisted(NamedTuple):
    """The last message of a producer that a topic had when its session started."""

    topic: str
    """The full name; where the topic is partitioned, that of a partition."""
    sequence_id: int
    """-1 if there was none."""
    position: Position | None
    """None if it is no longer known, or there was none."""
    incarnation: int
    """Which creation of that topic it is."""


async def complete_up_to(sidecars: Sidecars, producer_name: str, last: Iterable[Persisted]) -> int:
    """The highest ID up to which the last messages of the producer say that everything is settled; -1 if none does.

    A message that retention has dropped says nothing: going on from an earlier ID only costs time.
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


# -- What a producer of a partitioned topic does over all partitions, for tasks and for threads alike.
#
# Sequence IDs rise over the whole producer, whichever partition each goes to. With every batch the producer says up
# to which ID everything is settled, in all partitions: after a crash that is from where its source has to be sent
# again.

_SWEEP_BATCHES = 1024


class Settled:
    """Up to which ID everything that was sent is settled in all partitions. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for moments only
        self._begun: deque[tuple[int, PendingBatch]] = deque()
        self._sweep_at = _SWEEP_BATCHES
        self._last_sent = self._resumed_after = NO_SEQUENCE_ID

    def resume(self, sequence_id: int) -> None:
        """Everything up to this ID is settled already."""
        self._last_sent = self._resumed_after = sequence_id

    def sent(self, first_id: int, batches: Iterable[PendingBatch], last_id: int) -> None:
        """These batches were begun with messages from `first_id` to `last_id`; IDs rise from call to call."""
        with self._lock:
            self._begun.extend((first_id, pending) for pending in batches)
            self._last_sent = max(self._last_sent, last_id)
            if len(self._begun) >= self._sweep_at:
                # While one partition stands still, what is settled in the others is let go of.
                self._begun = deque(begun for begun in self._begun if not begun[1].durable or begun[1].failed)
                self._sweep_at = 2 * len(self._begun) + _SWEEP_BATCHES

    def up_to(self) -> int:
        """That ID; -1 if there is none. What was given up without a receipt is never settled."""
        with self._lock:
            begun = self._begun
            while begun and begun[0][1].durable and not begun[0][1].failed:
                begun.popleft()
            return max(begun[0][0] - 1 if begun else self._last_sent, self._resumed_after)


class Partition(NamedTuple):
    """Which one a producer of a single partition has, and what is settled in all of them."""

    number: int
    settled: Settled

    def mark(self, pending: PendingBatch) -> None:
        """Gives a sealed batch what goes with every batch of a partition."""
        pending.partition = self.number
        up_to = self.settled.up_to()
        if pending.batch is not None and up_to != NO_SEQUENCE_ID:
            pending.batch.complete_up_to = np.array([up_to], np.int64)


class Numbering:
    """The sequence IDs of a producer over all partitions, and the partitions of its messages."""

    def __init__(self, name: str, encoded_name: bytes, partitions: int, config: ProducerConfig) -> None:
        self.settled = Settled()
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
        """The producer goes on after the first ID; IDs up to the second one may be there or not."""
        self.resumed_after = complete_up_to
        self._highest_persisted = highest_persisted
        self._ids.last_sequence_id = complete_up_to
        self.settled.resume(complete_up_to)

    def next_id(self, sequence_id: int | None) -> int:
        """The ID of the next message. Raises INVALID_SEQUENCE_ID, NOT_ASCENDING; INVALID_REQUEST if it has to be
        given, and is not."""
        if sequence_id is None:
            self._check_may_be_left_out()
        return self._ids.next_id(sequence_id)

    def _check_may_be_left_out(self) -> None:
        # Counted on from here, the IDs of new messages would be those of others that are stored: they would be lost.
        if self.last_sequence_id < self._highest_persisted:
            raise error(
                "INVALID_REQUEST",
                f"producer {self._name!r} goes on after sequence ID {self.resumed_after}, and some messages up to "
                f"{self._highest_persisted} are stored already: these have to be sent again with their sequence IDs",
                hint=f"Give sequence IDs until {self._highest_persisted} is passed. To leave out what was not stored, "
                "begin above it.",
                resumed_after=self.resumed_after,
                highest_persisted=self._highest_persisted,
            )

    def partition(self, key: bytes | None) -> int:
        """That of a message with this key, or none."""
        return partition_of(key, self._encoded_name, self._partitions)

    def sent(self, sequence_id: int, begun: Sequence[PendingBatch]) -> None:
        """A message was sent with this ID, the first one of a batch unless `begun` is empty."""
        self._ids.sent(sequence_id)
        self.settled.sent(sequence_id, begun, sequence_id)

    def check_columns(self, payloads: object, sequence_ids: object, *columns: object) -> Batch:
        """See `Builder.check_columns`."""
        if sequence_ids is None:
            self._check_may_be_left_out()
        return self._ids.check_columns(payloads, sequence_ids, *columns)  # type: ignore[arg-type]

    def rows_by_partition(self, batch: Batch) -> list[tuple[int, Int64s]]:
        """The rows of a batch, by the partitions that they go to."""
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
        """These batches were sent, which are the rows of this one."""
        first, last = int(batch.sequence_ids[0]), int(batch.sequence_ids[-1])
        self._ids.sent(last)
        self.settled.sent(first, begun, last)


class Part(Protocol):
    """The producer of a partition."""

    _must_pause: bool

    async def _pause(self) -> None: ...

    def _check_open(self) -> None: ...

    async def send(
        self,
        payload: bytes | None,
        sequence_id: int | None = None,
        *,
        key: bytes | str | None = None,
        event_time: datetime | int | None = None,
        properties: Properties | None = None,
    ) -> Receipt: ...

    def _add_batch(self, batch: Batch) -> PendingBatch: ...

    async def flush(self) -> None: ...

    async def close(self) -> None: ...

    async def abort(self) -> None: ...


class Spread:
    """The calls of a producer over its parts, which were opened. They mean what they mean there."""

    def __init__(self, numbers: Numbering, parts: Sequence[Part]) -> None:
        self._numbers = numbers
        self._parts = parts
        self._turn = asyncio.Lock()

    async def send(
        self,
        payload: bytes | None,
        sequence_id: int | None,
        key: bytes | str | None,
        event_time: datetime | int | None,
        properties: Properties | None,
    ) -> Receipt:
        async with self._turn:  # in the order of the calls
            sequence_id, key = self._numbers.next_id(sequence_id), key_bytes(key)
            part = self._parts[self._numbers.partition(key)]
            await self._room(part)
            receipt = await part.send(payload, sequence_id, key=key, event_time=event_time, properties=properties)
            self._numbers.sent(sequence_id, () if receipt._row else (receipt._pending,))
            return receipt

    async def send_batch(
        self,
        payloads: Payloads,
        sequence_ids: Numbers | None,
        keys: Keys | None,
        event_times_ms: Numbers | None,
        properties: PropertyRows | None,
    ) -> BatchReceipt:
        async with self._turn:
            batch = self._numbers.check_columns(payloads, sequence_ids, keys, event_times_ms, properties)
            some = [(self._parts[k], rows) for k, rows in self._numbers.rows_by_partition(batch)]
            for part, _ in some:
                await self._room(part)
            sent = [(rows, part._add_batch(batch.take(rows))) for part, rows in some]
            self._numbers.sent_batch(batch, [pending for _, pending in sent])
            return BatchReceipt(SpreadBatch(batch.sequence_ids, sent))

    async def _room(self, part: Part) -> None:
        if part._must_pause:  # once a batch
            await part._pause()
            part._must_pause = True
            for other in self._parts:
                other._check_open()
            part._must_pause = False

    async def flush(self) -> None:
        await self._all(lambda part: part.flush())

    async def close(self) -> None:
        await self._all(lambda part: part.close())

    async def abort(self) -> None:
        await self._all(lambda part: part.abort())

    async def _all(self, call: Callable[[Part], Coroutine[Any, Any, None]]) -> None:
        """Does it to all, and raises what the first one that failed has raised."""
        ends = await asyncio.gather(*(call(part) for part in self._parts), return_exceptions=True)
        for end in ends:
            if end is not None:
                raise end


# -- Sending messages with IDs of their own to all partitions of a topic: each has a delivery.


class PartById(Protocol):
    """The delivery to a partition."""

    async def close(self) -> None: ...

    def abandon(self) -> None: ...

    async def send(self, batch: Batch) -> BatchResult: ...


def check_route_is_known(whole: admin_pb2.Topic) -> None:
    """Raises RECOVERING while the sidecar does not know by what messages find their partitions."""
    if whole.deduplication_mode == admin_pb2.DEDUPLICATION_MODE_UNSPECIFIED:
        raise error("RECOVERING", f"by what messages of topic {whole.name} find their partitions is not known yet")


class SpreadById:
    """The batches of a publisher over the deliveries to the partitions, in order, which are open."""

    def __init__(self, parts: Sequence[PartById], route: int) -> None:
        self._parts = parts
        self._by_key = route == admin_pb2.DEDUPLICATION_ROUTE_KEY

    async def send(self, batch: Batch) -> BatchResult:
        """Returns when all of a batch is in the log; raises what the first partition has raised that failed: some of it
        may be in the others, and is DUP when it is sent again. Raises INVALID_BATCH where a key is missing."""
        if self._by_key:
            self._check_keys(batch)
        some = self._rows_by_partition(batch)
        sent = await asyncio.gather(
            *(self._parts[k].send(batch.take(rows)) for k, rows in some), return_exceptions=True
        )
        result = BatchResult.undecided(np.full(len(batch), NO_SEQUENCE_ID, np.int64))
        for (k, rows), outcome in zip(some, sent, strict=True):
            if isinstance(outcome, SeqdedupeError) and outcome.reason == "INVALID_REQUEST" and len(some) > 1:
                # Closed meanwhile: of this partition alone it is certain that nothing was sent.
                raise error("OUTCOME_UNKNOWN", f"nothing went to partition {k}: {outcome.message}") from outcome
            if isinstance(outcome, BaseException):
                raise outcome
            result.put(rows, outcome)
            result.partitions[rows] = k
        return result

    def _check_keys(self, batch: Batch) -> None:
        for row in range(len(batch)):
            if not batch.keys.is_there(row):
                why = f"row {row} has no key, by which messages find their partitions in this topic"
                raise error("INVALID_BATCH", why)

    def _rows_by_partition(self, batch: Batch) -> list[tuple[int, Int64s]]:
        column = batch.keys if self._by_key else batch.deduplication_ids
        of_rows = np.array([partition_of(value, b"", len(self._parts)) for value in column.values()], np.int64)
        return [(int(k), np.flatnonzero(of_rows == k)) for k in np.unique(of_rows)]

    def abandon(self) -> None:
        """As of each of them."""
        for part in self._parts:
            part.abandon()

    async def close(self) -> None:
        """Ends all of them."""
        await asyncio.gather(*(part.close() for part in self._parts))
