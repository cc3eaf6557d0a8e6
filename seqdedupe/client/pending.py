"""A batch on its way: what its senders wait for, and what it ends in.

Begin with `PendingBatch`. Before it stand the columns of a receipt and of a result, after it the receipts that are
awaited, and what all senders know of a frame (`InFlightBatch`, `Breaks`).
"""

import asyncio
import itertools
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from seqdedupe.batch import NO_INT32S, NO_INT64S, Batch, Int32s, Int64s
from seqdedupe.errors import SeqdedupeError
from seqdedupe.message_id import MessageId, MessageIds

# -- What the sidecar answers to a frame: verdicts, and where its messages stand, in columns.

NO_INDEX = -1
"""In a column of indexes: not known."""

NO_ROWS: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)


class Verdict(IntEnum):
    """What the sidecar decided. `UNKNOWN` never ends a receipt: the client sends the message again."""

    NOT_DUP = 1
    """The message is new and is now in the log."""
    DUP = 2
    """The sequence ID is at or below the producer's highest persisted one; nothing was appended."""
    UNKNOWN = 3
    """A copy is in flight and its outcome is not known yet."""


@dataclass(slots=True)
class ReceiptColumns:
    """A receipt of the sidecar for one frame, see `Receipt` in `publish.proto`."""

    verdicts: npt.NDArray[np.uint8]
    """Empty: all rows are NOT_DUP."""
    first_index: int
    first_message_id: MessageId
    known_rows: npt.NDArray[np.uint32]
    known_indexes: Int64s
    known_ledger_ids: Int64s
    known_entry_ids: Int64s
    known_batch_indexes: Int32s
    run_rows: npt.NDArray[np.uint32]
    """Empty, as the next three: the rows that were stored are one run, from `first_message_id` on."""
    run_ledger_ids: Int64s
    run_entry_ids: Int64s
    run_batch_indexes: Int32s
    durable_at: int = 0
    """0: the rows are durable. Else they are when the topic is durable up to this index."""
    imported_rows: npt.NDArray[np.uint32] = field(default_factory=lambda: NO_ROWS)

    @staticmethod
    def all_stored(first_index: int, first_message_id: MessageId, durable_at: int = 0) -> "ReceiptColumns":
        """That of a frame whose rows are all new, and one run: the usual one."""
        return ReceiptColumns(_NO_VERDICTS, first_index, first_message_id, *_NOTHING_KNOWN, *_ONE_RUN, durable_at)

    @property
    def is_one_run(self) -> bool:
        """Whether all rows were stored, as one run."""
        return self.first_index >= 0 and not len(self.verdicts) and not len(self.run_rows)

    def message_ids(self, rows: int) -> tuple[Int64s, Int64s, Int32s]:
        """Ledgers, entries and batch indexes of the rows that were stored, of which there are so many."""
        if not len(self.run_rows):
            return ids_of_run(self.first_message_id, np.arange(rows, dtype=np.int64))
        return self._runs().columns()

    def cut(self, first: int, stop: int) -> "ReceiptColumns":
        """That of the rows from `first` to before `stop`, as if they had been a frame of their own."""
        verdicts = self.verdicts[first:stop]
        before, rows = first, stop - first  # of those that were stored
        if len(verdicts):
            before = int(np.count_nonzero(self.verdicts[:first] == Verdict.NOT_DUP))
            rows = int(np.count_nonzero(verdicts == Verdict.NOT_DUP))
        first_index = self.first_index + before if rows else NO_INDEX
        first_message_id = later(self.first_message_id, before) if rows else self.first_message_id
        runs = self.run_rows[:0], self.run_ledger_ids[:0], self.run_entry_ids[:0], self.run_batch_indexes[:0]
        if rows and len(self.run_rows):
            ids = self._runs().cut(before, before + rows)
            runs = ids.run_rows.astype(np.uint32), ids.ledger_ids, ids.entry_ids, ids.batch_indexes
        there = (self.known_rows >= first) & (self.known_rows < stop)
        return ReceiptColumns(
            verdicts,
            first_index,
            first_message_id,
            self.known_rows[there] - np.uint32(first),
            self.known_indexes[there],
            self.known_ledger_ids[there],
            self.known_entry_ids[there],
            self.known_batch_indexes[there] if len(self.known_batch_indexes) else self.known_batch_indexes,
            *runs,
            self.durable_at,
            self.imported_rows[(self.imported_rows >= first) & (self.imported_rows < stop)] - np.uint32(first),
        )

    def _runs(self) -> MessageIds:
        run_rows = self.run_rows.astype(np.int64)
        return MessageIds(run_rows, self.run_ledger_ids, self.run_entry_ids, self.run_batch_indexes)


_NO_VERDICTS = np.zeros(0, np.uint8)
_NOTHING_KNOWN = NO_ROWS, NO_INT64S, NO_INT64S, NO_INT64S, NO_INT32S
_ONE_RUN = NO_ROWS, NO_INT64S, NO_INT64S, NO_INT32S


def later(message_id: MessageId, rows: int) -> MessageId:
    """That of a message so many rows later in the same run."""
    ledger_id, entry_id, place = message_id
    return MessageId(ledger_id, entry_id + rows) if place < 0 else MessageId(ledger_id, entry_id, place + rows)


def ids_of_run(first_message_id: MessageId, steps: Int64s) -> tuple[Int64s, Int64s, Int32s]:
    """Ledgers, entries and batch indexes of messages so many rows later in the same run."""
    ledger_id, entry_id, place = first_message_id
    rows = len(steps)
    ledger_ids = np.full(rows, ledger_id, np.int64)
    if place < 0:
        return ledger_ids, entry_id + steps, np.full(rows, place, np.int32)
    return ledger_ids, np.full(rows, entry_id, np.int64), (place + steps).astype(np.int32)


# -- What became of the messages of a batch, of one by itself or of all in columns.

UNDECIDED = 0
"""In a column of verdicts: not answered yet."""

NO_PARTITION = -1
"""That of a message in a topic without partitions."""

# In columns: numpy takes five times as long with a member of an enumeration.
_NEW, _UNKNOWN = int(Verdict.NOT_DUP), int(Verdict.UNKNOWN)


@dataclass(slots=True)
class Published:
    """What became of a message: it is in the log, and durable unless the topic's flush policy lets receipts come before
    that (see `Receipt.until_durable`).

    With `DUP`, `message_id` and `index` are those of the original while the sidecar still knows them; otherwise
    None and -1. Only then is DUP a proof for that very sequence ID; for one that was sent for the first time at or
    below `persisted` it is none.
    """

    verdict: Verdict
    message_id: MessageId | None
    index: int
    sequence_id: int
    partition: int = NO_PARTITION
    """Of a partitioned topic, in which both count; -1 if it is none."""
    is_imported: bool = False
    """With DUP in a topic of deduplication IDs: the ID came with an imported window. The system before this one had the
    message; there is no index and no message ID."""


@dataclass(slots=True)
class BatchResult:
    """What became of the messages of a batch, in columns. `result[row]` is one of them."""

    sequence_ids: Int64s
    verdicts: npt.NDArray[np.uint8]
    indexes: Int64s
    """-1 where the verdict is DUP and the original's index is no longer known."""
    ledger_ids: Int64s
    entry_ids: Int64s
    batch_indexes: Int32s
    partitions: Int32s
    """-1 in a topic without partitions."""
    imported: npt.NDArray[np.bool_]
    """Which came with an imported window: see `Published.is_imported`."""

    @staticmethod
    def undecided(sequence_ids: Int64s, partition: int = NO_PARTITION) -> "BatchResult":
        rows = len(sequence_ids)
        return BatchResult(
            sequence_ids,
            np.full(rows, UNDECIDED, np.uint8),
            np.full(rows, NO_INDEX, np.int64),
            np.full(rows, NO_INDEX, np.int64),
            np.full(rows, NO_INDEX, np.int64),
            np.full(rows, NO_INDEX, np.int32),
            np.full(rows, partition, np.int32),
            np.zeros(rows, np.bool_),
        )

    @staticmethod
    def all_stored(
        sequence_ids: Int64s, first_index: int, first_message_id: MessageId, partition: int
    ) -> "BatchResult":
        """That of messages that are all new, and one run."""
        rows = len(sequence_ids)
        steps = np.arange(rows, dtype=np.int64)
        return BatchResult(
            sequence_ids,
            np.full(rows, _NEW, np.uint8),
            first_index + steps,
            *ids_of_run(first_message_id, steps),
            np.full(rows, partition, np.int32),
            np.zeros(rows, np.bool_),
        )

    @staticmethod
    def of(sequence_ids: Int64s, receipt: ReceiptColumns, partition: int = NO_PARTITION) -> "BatchResult":
        """What the first receipt of these rows decides."""
        if receipt.is_one_run:
            return BatchResult.all_stored(sequence_ids, receipt.first_index, receipt.first_message_id, partition)
        result = BatchResult.undecided(sequence_ids, partition)
        result._put(receipt)
        return result

    def put(self, rows: Int64s, other: "BatchResult") -> None:
        """These rows are those of another one, in its order."""
        for column in fields(self):
            getattr(self, column.name)[rows] = getattr(other, column.name)

    def __len__(self) -> int:
        return len(self.sequence_ids)

    def merge(self, receipt: ReceiptColumns) -> None:
        """Adds what the receipt decides. Rows that are decided already stay as they are."""
        new = BatchResult.of(self.sequence_ids, receipt)
        decided = (self.verdicts == UNDECIDED) & (new.verdicts != UNDECIDED)
        for mine, theirs in (
            (self.verdicts, new.verdicts),
            (self.indexes, new.indexes),
            (self.ledger_ids, new.ledger_ids),
            (self.entry_ids, new.entry_ids),
            (self.batch_indexes, new.batch_indexes),
            (self.imported, new.imported),
        ):
            mine[decided] = theirs[decided]

    def _put(self, receipt: ReceiptColumns) -> None:
        """What the receipt says, where nothing is decided yet."""
        stored: Int64s | slice = slice(None)
        count = len(self)
        if len(receipt.verdicts):
            self.verdicts[:] = receipt.verdicts
            stored = np.flatnonzero(self.verdicts == _NEW)
            count = len(stored)
            self.verdicts[self.verdicts == _UNKNOWN] = UNDECIDED
        else:
            self.verdicts[:] = _NEW
        self.indexes[stored] = np.arange(receipt.first_index, receipt.first_index + count)
        if count:
            ids = receipt.message_ids(count)
            self.ledger_ids[stored], self.entry_ids[stored], self.batch_indexes[stored] = ids
        if len(receipt.known_rows):
            self.indexes[receipt.known_rows] = receipt.known_indexes
            self.ledger_ids[receipt.known_rows] = receipt.known_ledger_ids
            self.entry_ids[receipt.known_rows] = receipt.known_entry_ids
            if len(receipt.known_batch_indexes):
                self.batch_indexes[receipt.known_rows] = receipt.known_batch_indexes
        self.imported[receipt.imported_rows] = True

    def __getitem__(self, row: int) -> Published:
        index = int(self.indexes[row])
        message_id = None
        if index != NO_INDEX:
            message_id = MessageId(int(self.ledger_ids[row]), int(self.entry_ids[row]), int(self.batch_indexes[row]))
        verdict, partition = Verdict(self.verdicts[row]), int(self.partitions[row])
        return Published(verdict, message_id, index, int(self.sequence_ids[row]), partition, bool(self.imported[row]))


_NOT_DUP = Verdict.NOT_DUP  # to look it up there takes a tenth of what a receipt does


class PendingBatch:
    """A batch from its first message to its last receipt. Receipts point to it and their row.

    It is changed by the event loop's thread only; `settled`, `durable` and `when_…` may be used from any.
    """

    __slots__ = (
        "_collected",
        "_error",
        "_outcome",
        "_waiters",
        "_waiters_until_durable",
        "batch",
        "decided_up_to",
        "durable",
        "durable_at",
        "failed",
        "first_sequence_id",
        "has_receipts",
        "last_refusal",
        "last_sequence_id",
        "partition",
        "previous_sequence_id",
        "queued_at",
        "sequence_ids",
        "settled",
        "size_bytes",
    )

    def __init__(self) -> None:
        self.batch: Batch | None = None
        """Set when the batch is sealed, let go of when it is durable."""
        self.sequence_ids: Int64s = NO_INT64S
        self.first_sequence_id = self.last_sequence_id = -1
        self.previous_sequence_id = -1
        """The link: the highest ID below the first one that was sent in this session or that Open answered."""
        self.partition = NO_PARTITION
        self.size_bytes = 0
        self.queued_at = 0.0
        """Since when it waits for its receipt, by the event loop's clock."""
        self.settled = False
        """Whether it has had receipts for all of its messages, or has failed."""
        self.has_receipts = False
        """Whether it has had them all, and need not be sent again since."""
        self.durable = False
        """Whether they say what is durable, or it has failed (`failed`): nothing of it is kept any more."""
        self.durable_at = 0
        """0: what has a receipt is durable. Else it is when the topic is durable up to this index."""
        self.decided_up_to = -1
        """The highest sequence ID with a receipt; -1 if there is none."""
        self.failed = False
        """Given up before all of its messages were known to be durable."""
        self.last_refusal: SeqdedupeError | None = None
        """While it is not settled: why it is not, if that is known."""
        self._collected: BatchResult | None = None
        """What is known while some rows have no receipt."""
        self._outcome: ReceiptColumns | BatchResult | None = None
        self._error: SeqdedupeError | None = None
        self._waiters: list[Callable[[], None]] = []
        self._waiters_until_durable: list[Callable[[], None]] = []

    def seal(self, batch: Batch, size_bytes: int) -> None:
        """Gives it its messages."""
        self.batch = batch
        self.sequence_ids = batch.sequence_ids
        self.first_sequence_id = int(batch.sequence_ids[0])
        self.last_sequence_id = int(batch.sequence_ids[-1])
        self.size_bytes = size_bytes

    def record(self, receipt: ReceiptColumns) -> None:
        """Takes a receipt. Rows that have one already keep it. Settles the batch unless a row is left."""
        self.durable_at = max(self.durable_at, receipt.durable_at)
        if not len(receipt.verdicts) and self._collected is None:
            self.decided_up_to = self.last_sequence_id
            self._settle(receipt)
            return
        if self._collected is None:
            self._collected = BatchResult.of(self.sequence_ids, receipt, self.partition)
        else:
            self._collected.merge(receipt)
        decided = np.flatnonzero(self._collected.verdicts)
        if len(decided):
            self.decided_up_to = int(self.sequence_ids[decided[-1]])
        if len(decided) == len(self.sequence_ids):
            self._settle(self._collected)

    def begin_anew(self) -> None:
        """What is not known to be durable may be lost: it is sent again. Whoever was told keeps what it was told."""
        self.has_receipts = False
        self.durable_at, self.decided_up_to = 0, -1
        self._collected = None

    def fail(self, failure: SeqdedupeError) -> None:
        """No more receipts will come, nor that what they said is durable."""
        self.failed = True
        self._error = failure
        self._settle(self._outcome)
        self.become_durable()

    def _settle(self, outcome: ReceiptColumns | BatchResult | None) -> None:
        self._outcome = outcome
        self.settled = self.has_receipts = True
        _tell(self._waiters)

    def become_durable(self) -> None:
        """What its receipts said is durable, or it has failed."""
        self.batch = self._collected = None
        self.durable = True
        _tell(self._waiters_until_durable)

    def when_settled(self, waiter: Callable[[], None]) -> None:
        """Calls it once or twice when the batch is settled, from the event loop's thread or at once."""
        self._waiters.append(waiter)
        # It may have been settled meanwhile by the other thread, which then may have seen this waiter or not.
        if self.settled:
            waiter()

    def when_durable(self, waiter: Callable[[], None]) -> None:
        """As `when_settled`, when it is durable or has failed."""
        self._waiters_until_durable.append(waiter)
        if self.durable:
            waiter()

    async def wait(self) -> None:
        """Until it is settled."""
        if not self.settled:
            await _called_by(self.when_settled)

    async def wait_until_durable(self) -> None:
        """Until it is durable or has failed."""
        if not self.durable:
            await _called_by(self.when_durable)

    def result(self) -> BatchResult:
        """The receipts of a settled batch. Raises what it failed with before it had them."""
        outcome = self._outcome
        if outcome is None:
            self._raise_failure()
        if isinstance(outcome, ReceiptColumns) and outcome.is_one_run:
            first = outcome.first_index, outcome.first_message_id
            self._outcome = outcome = BatchResult.all_stored(self.sequence_ids, *first, self.partition)
        if not isinstance(outcome, BatchResult):
            if outcome is None:
                outcome = BatchResult.undecided(self.sequence_ids, self.partition)
            else:
                outcome = BatchResult.of(self.sequence_ids, outcome, self.partition)
            self._outcome = outcome
        return outcome

    def durable_result(self) -> BatchResult:
        """The receipts of a batch that is durable. Raises what it failed with."""
        self._raise_failure()
        return self.result()

    def durable_published(self, row: int) -> Published:
        """`durable_result()[row]`, as `published`."""
        self._raise_failure()
        return self.published(row)

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)

    def published(self, row: int) -> Published:
        """`result()[row]`. Where all rows were stored in one run the columns of the others need not be made."""
        stored = self._outcome
        if not isinstance(stored, ReceiptColumns) or not stored.is_one_run:
            return self.result()[row]
        message_id, index = later(stored.first_message_id, row), stored.first_index + row
        return Published(_NOT_DUP, message_id, index, self.sequence_ids.item(row), self.partition)


def _tell(waiters: list[Callable[[], None]]) -> None:
    for waiter in waiters:
        waiter()
    waiters.clear()


async def _called_by(when: Callable[[Callable[[], None]], None]) -> None:
    # One future for each that waits: cancelling one of them must not cancel the others.
    future = asyncio.get_running_loop().create_future()
    when(lambda: None if future.done() else future.set_result(None))
    await future


# -- Receipts as a sender has them, to be awaited: of a message, and of a batch.


class SpreadBatch:
    """Batches that were one, each in a partition of its own: what a `PendingBatch` is to receipts."""

    def __init__(self, sequence_ids: Int64s, parts: list[tuple[Int64s, PendingBatch]]) -> None:
        self._sequence_ids = sequence_ids
        self._parts = parts

    @property
    def settled(self) -> bool:
        return all(pending.settled for _, pending in self._parts)

    @property
    def durable(self) -> bool:
        return all(pending.durable for _, pending in self._parts)

    @property
    def failed(self) -> bool:
        return any(pending.failed for _, pending in self._parts)

    @property
    def last_refusal(self) -> SeqdedupeError | None:
        return next((p.last_refusal for _, p in self._parts if not p.settled and p.last_refusal is not None), None)

    def when_settled(self, waiter: Callable[[], None]) -> None:
        """As `PendingBatch.when_settled`; it may be called more often, and before all is settled."""
        for _, pending in self._parts:
            pending.when_settled(lambda: waiter() if self.settled else None)

    def when_durable(self, waiter: Callable[[], None]) -> None:
        """As `PendingBatch.when_durable`, and as above."""
        for _, pending in self._parts:
            pending.when_durable(lambda: waiter() if self.durable else None)

    async def wait(self) -> None:
        for _, pending in self._parts:
            await pending.wait()

    async def wait_until_durable(self) -> None:
        for _, pending in self._parts:
            await pending.wait_until_durable()

    def result(self) -> BatchResult:
        """The receipts of all rows. Raises what one of them failed with."""
        return self._of_all([(rows, pending.result()) for rows, pending in self._parts])

    def durable_result(self) -> BatchResult:
        """As `PendingBatch.durable_result`."""
        return self._of_all([(rows, pending.durable_result()) for rows, pending in self._parts])

    def _of_all(self, results: list[tuple[Int64s, BatchResult]]) -> BatchResult:
        result = BatchResult.undecided(self._sequence_ids)
        for rows, of_part in results:
            result.put(rows, of_part)
        return result


class Told:
    """What a receipt, of whichever kind, tells without waiting."""

    __slots__ = ("_pending",)

    def __init__(self, pending: PendingBatch | SpreadBatch) -> None:
        self._pending = pending

    def done(self) -> bool:
        """Whether it is there, or what came instead: nobody would wait for it."""
        return self._pending.settled

    def is_durable(self) -> bool:
        """Whether all that it is of is known to be durable: `until_durable` would answer at once. Never, if its
        producer has ended before that."""
        return self._pending.durable and not self._pending.failed

    def is_over(self) -> bool:
        """Whether `until_durable` would not wait: all is durable, or has failed."""
        return self._pending.durable


class Receipt(Told):
    """The receipt of one message. Await it for `Published`; it raises what the message failed with.

    Where the topic's flush policy is not to sync every commit, it comes when the message is written: the producer keeps
    the message until it is durable, and sends it again if a power cut has taken it. Only if the producer ends before
    that can it be lost. `until_durable` waits for more.
    """

    __slots__ = ("_row",)
    _pending: PendingBatch

    def __init__(self, pending: PendingBatch, row: int) -> None:
        self._pending = pending  # one is made for each message
        self._row = row

    def __await__(self) -> Generator[Any, None, Published]:
        if not self._pending.settled:
            yield from self._pending.wait().__await__()
        return self._pending.published(self._row)

    async def until_durable(self) -> Published:
        """Waits until the message is durable. If it had to be sent again meanwhile, its index and message ID may be
        others than before. Raises what the message failed with, also if its producer has ended since the receipt."""
        await self._pending.wait_until_durable()
        return self._pending.durable_published(self._row)


class BatchReceipt(Told):
    """The receipt of a batch. Await it for `BatchResult`; it raises what the batch failed with. See `Receipt`."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, BatchResult]:
        if not self._pending.settled:
            yield from self._pending.wait().__await__()
        return self._pending.result()

    async def until_durable(self) -> BatchResult:
        """As `Receipt.until_durable`, for all messages."""
        await self._pending.wait_until_durable()
        return self._pending.durable_result()


# -- Batches as frames on a stream, and the connections that break while one is out.

FRAME_NUMBERS = itertools.count(1)
"""Unique in the process, as the contract wants them: whoever sends frames takes the next one."""


class InFlightBatch(NamedTuple):
    """A batch on its way, with its epoch and its link."""

    number: int
    batch: Batch
    size_bytes: int


MAX_BREAKS = 10
BREAKS_SECONDS = 60.0
"""A frame that was alone on so many connections in a row, for so long, each of which broke, is given up: something on
the way does not let it pass. Proxies that let nothing pass for some seconds are waited for."""

HINT_OF_BREAKS = (
    "A proxy on the way may limit how large a request may be (nginx: client_max_body_size), or refuse this one for "
    "another reason: its log says so. What was sent may be in the log or not: send it again with the same IDs."
)

SUSPECT_BREAKS = 2
"""After so many connections in a row broke, frames go alone: else nobody knows which one it was."""


class Breaks:
    """The connections in a row that broke while a frame was out which has no receipt."""

    __slots__ = ("_alone", "_alone_since", "_count")

    def __init__(self) -> None:
        self._count = self._alone = 0
        self._alone_since = 0.0

    def clear(self) -> None:
        """There is a receipt."""
        self._count = self._alone = 0

    @property
    def is_suspect(self) -> bool:
        """Whether the frame goes alone from now on: it may be what breaks connections."""
        return self._count >= SUSPECT_BREAKS

    def add(self, why: SeqdedupeError, now_seconds: float, *, is_alone: bool) -> bool:
        """Another one; `is_alone` if the sidecar had taken the stream and nothing else was out. Whether the frame is
        to be given up. Before that the hint of `why` tells those who give up earlier, if it is likely to be the frame:
        it was alone on the last ones."""
        self._count += 1
        if not is_alone:
            self._alone = 0
            return False
        if not self._alone:
            self._alone_since = now_seconds
        self._alone += 1
        if self._alone >= SUSPECT_BREAKS:
            why.hint = HINT_OF_BREAKS
        return self._alone >= MAX_BREAKS and now_seconds - self._alone_since >= BREAKS_SECONDS

    def why(self, what: str, size_bytes: int) -> str:
        """Why the frame is given up."""
        return (
            f"{what}, of {size_bytes:,} bytes, was alone on {self._alone} connections in a row, and each of them broke"
        )
