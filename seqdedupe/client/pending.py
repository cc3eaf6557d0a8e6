"""A batch that is being sent, with the batch's receipts and result.

Begin with `PendingBatch`. The classes before it hold the columns of a receipt and of a result. The classes after it are
the receipts that senders await, and the state of a frame that all senders share (`InFlightBatch`, `Breaks`).
"""

import asyncio
import itertools
from collections.abc import Callable, Generator
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from seqdedupe.batch import NO_INT32S, NO_INT64S, Batch, Int32s, Int64s
from seqdedupe.errors import SeqdedupeError
from seqdedupe.message_id import MessageId, MessageIds

# -- The sidecar's answer to a frame, in columns: verdicts, and the indexes and IDs of its messages.

NO_INDEX = -1
"""In a column of indexes: the index is unknown."""

NO_ROWS: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)


class Verdict(IntEnum):
    """The sidecar's decision about a message. A sender never receives the verdict `UNKNOWN`: the client sends such a
    message again until the verdict is known."""

    NOT_DUP = 1
    """The message is new and is now in the log."""
    DUP = 2
    """The sequence ID is at or below the producer's highest persisted ID. Nothing was appended to the log."""
    UNKNOWN = 3
    """A copy of the message is in flight, and the outcome of that copy is not known yet."""


class ReceiptColumns(NamedTuple):
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
    """If this column and the next three are empty, the stored rows are one run that begins with `first_message_id`."""
    run_ledger_ids: Int64s
    run_entry_ids: Int64s
    run_batch_indexes: Int32s
    durable_at: int = 0
    """0: the rows are durable. Otherwise the rows are durable when the topic is durable up to this index."""
    imported_rows: npt.NDArray[np.uint32] = NO_ROWS

    @staticmethod
    def all_stored(first_index: int, first_message_id: MessageId, durable_at: int = 0) -> "ReceiptColumns":
        """Return the receipt of a frame in the most common case: all rows of the frame are new, and the stored rows
        form one run."""
        return ReceiptColumns(_NO_VERDICTS, first_index, first_message_id, *_NOTHING_KNOWN, *_ONE_RUN, durable_at)

    @property
    def is_one_run(self) -> bool:
        """Whether all rows were stored, as one run."""
        return self.first_index >= 0 and not len(self.verdicts) and not len(self.run_rows)

    def message_ids(self, rows: int) -> tuple[Int64s, Int64s, Int32s]:
        """Return ledgers, entries and batch indexes of the stored rows, whose number is `rows`."""
        if not len(self.run_rows):
            return ids_of_run(self.first_message_id, np.arange(rows, dtype=np.int64))
        return self._runs().columns()

    def cut(self, first: int, stop: int) -> "ReceiptColumns":
        """Return the receipt of the rows from `first` to before `stop`, as if these rows had been a separate frame."""
        verdicts = self.verdicts[first:stop]
        before, rows = first, stop - first  # stored rows only
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
    """Return the message ID of the message that is `rows` messages later in the same run."""
    ledger_id, entry_id, place = message_id
    return MessageId(ledger_id, entry_id + rows) if place < 0 else MessageId(ledger_id, entry_id, place + rows)


def ids_of_run(first_message_id: MessageId, steps: Int64s) -> tuple[Int64s, Int64s, Int32s]:
    """Return ledgers, entries and batch indexes of the messages that are `steps` messages later in the same run."""
    ledger_id, entry_id, place = first_message_id
    rows = len(steps)
    ledger_ids = np.full(rows, ledger_id, np.int64)
    if place < 0:
        return ledger_ids, entry_id + steps, np.full(rows, place, np.int32)
    return ledger_ids, np.full(rows, entry_id, np.int64), (place + steps).astype(np.int32)


# -- The outcome of the messages of a batch: of one message, or of all in columns.

UNDECIDED = 0
"""In a column of verdicts: not answered yet."""

NO_PARTITION = -1
"""The partition of a message in a topic without partitions."""

# For use in columns: numpy takes five times as long with a member of an enumeration.
_NEW, _UNKNOWN = int(Verdict.NOT_DUP), int(Verdict.UNKNOWN)


@dataclass(slots=True)
class Published:
    """The outcome of a message that is in the log. The message is also durable, unless the topic's flush policy allows
    earlier receipts (see `Receipt.until_durable`).

    With `DUP`, `message_id` and `index` identify the original message. If the sidecar no longer knows the original
    message, `message_id` is None and `index` is -1. DUP with an index proves that this sequence ID was stored. DUP
    without an index proves only that the ID is at or below `persisted`: a message with this ID may never have been sent
    before.
    """

    verdict: Verdict
    message_id: MessageId | None
    index: int
    sequence_id: int
    partition: int = NO_PARTITION
    """The partition to which index and message ID belong; -1 if the topic has no partitions."""
    is_imported: bool = False
    """With DUP in a topic of deduplication IDs: whether the ID was part of an imported window. Then the message is in
    the previous system, and has no index and no message ID here."""


@dataclass(slots=True)
class BatchResult:
    """The outcome of the messages of a batch, in columns. `result[row]` is the outcome of one message."""

    sequence_ids: Int64s
    verdicts: npt.NDArray[np.uint8]
    indexes: Int64s
    """-1 if the verdict is DUP and the original's index is no longer known."""
    ledger_ids: Int64s
    entry_ids: Int64s
    batch_indexes: Int32s
    partitions: Int32s
    """-1 in a topic without partitions."""
    imported: npt.NDArray[np.bool_]
    """Whether each ID came with an imported window: see `Published.is_imported`."""

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
        """Return the result of a batch whose messages are all new and form one run."""
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
        """Return the result of the first receipt for these rows."""
        if receipt.is_one_run:
            return BatchResult.all_stored(sequence_ids, receipt.first_index, receipt.first_message_id, partition)
        result = BatchResult.undecided(sequence_ids, partition)
        result._put(receipt)
        return result

    def put(self, rows: Int64s, other: "BatchResult") -> None:
        """Copy another result into these rows, in the same order."""
        for column in fields(self):
            getattr(self, column.name)[rows] = getattr(other, column.name)

    def __len__(self) -> int:
        return len(self.sequence_ids)

    def merge(self, receipt: ReceiptColumns) -> None:
        """Add the decisions of a receipt. Rows that already have a decision stay unchanged."""
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
        """Fill the columns from the receipt. The caller ensures that no row has a decision yet."""
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


_NOT_DUP = Verdict.NOT_DUP  # a local name, because looking up the attribute would take a tenth of the time of a receipt


class PendingBatch:
    """A batch from its first message to its last receipt. The `Receipt` of a message refers to the batch and the row of
    the message.

    Only the event loop's thread changes a batch. Any thread may use `settled`, `durable` and `when_…`.
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
        """The messages. Set when the batch is sealed, and released when the batch is durable."""
        self.sequence_ids: Int64s = NO_INT64S
        self.first_sequence_id = self.last_sequence_id = -1
        self.previous_sequence_id = -1
        """The link: the highest ID below the batch's first ID that this session sent or that Open returned."""
        self.partition = NO_PARTITION
        self.size_bytes = 0
        self.queued_at = 0.0
        """The time since which the batch has waited for its receipt, by the event loop's clock."""
        self.settled = False
        """Whether the batch has received receipts for all of its messages, or has failed."""
        self.has_receipts = False
        """Whether the batch has all receipts, and has not had to be sent again since."""
        self.durable = False
        """Whether the messages are durable, or the batch has failed (`failed`). In both cases the send queue no longer
        keeps the batch."""
        self.durable_at = 0
        """0: messages with a receipt are durable. Otherwise they are durable when the topic is durable up to this
        index."""
        self.decided_up_to = -1
        """The highest sequence ID with a receipt; -1 if there is none."""
        self.failed = False
        """Whether the batch was given up before all of its messages were known to be durable."""
        self.last_refusal: SeqdedupeError | None = None
        """The reason why the batch is not settled yet, if the reason is known."""
        self._collected: BatchResult | None = None
        """The result so far, while some rows have no receipt."""
        self._outcome: ReceiptColumns | BatchResult | None = None
        self._error: SeqdedupeError | None = None
        self._waiters: list[Callable[[], None]] = []
        self._waiters_until_durable: list[Callable[[], None]] = []

    def seal(self, batch: Batch, size_bytes: int) -> None:
        """Set the batch's messages."""
        self.batch = batch
        self.sequence_ids = batch.sequence_ids
        self.first_sequence_id = int(batch.sequence_ids[0])
        self.last_sequence_id = int(batch.sequence_ids[-1])
        self.size_bytes = size_bytes

    def record(self, receipt: ReceiptColumns) -> None:
        """Record a receipt. Rows that already have a receipt keep it. When all rows have a receipt, the batch is
        settled."""
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

    def prepare_resend(self) -> None:
        """Prepare to send the batch again: messages not known to be durable may be lost. Receipts already delivered to
        their waiters stay valid."""
        self.has_receipts = False
        self.durable_at, self.decided_up_to = 0, -1
        self._collected = None

    def fail(self, failure: SeqdedupeError) -> None:
        """Fail the batch. No more receipts are recorded, and the batch is never reported durable."""
        self.failed = True
        self._error = failure
        self._settle(self._outcome)
        self.become_durable()

    def _settle(self, outcome: ReceiptColumns | BatchResult | None) -> None:
        self._outcome = outcome
        self.settled = self.has_receipts = True
        _tell(self._waiters)

    def become_durable(self) -> None:
        """Record that the messages of the batch are durable, or that the batch has failed."""
        self.batch = self._collected = None
        self.durable = True
        _tell(self._waiters_until_durable)

    def when_settled(self, waiter: Callable[[], None]) -> None:
        """Call `waiter` when the batch is settled: from the event loop's thread, or at once if the batch is settled
        already. `waiter` may be called twice."""
        self._waiters.append(waiter)
        # The other thread may have settled the batch meanwhile, with or without having seen this waiter.
        if self.settled:
            waiter()

    def when_durable(self, waiter: Callable[[], None]) -> None:
        """Call `waiter` when the batch is durable or has failed. Otherwise the same as `when_settled`."""
        self._waiters_until_durable.append(waiter)
        if self.durable:
            waiter()

    async def wait(self) -> None:
        """Wait until the batch is settled."""
        if not self.settled:
            await _called_by(self.when_settled)

    async def wait_until_durable(self) -> None:
        """Wait until the batch is durable or has failed."""
        if not self.durable:
            await _called_by(self.when_durable)

    def result(self) -> BatchResult:
        """Return the receipts of a settled batch. Raises the batch's failure if the batch failed before all receipts
        had arrived."""
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
        """Return the receipts of a durable batch. Raises the batch's failure if the batch failed."""
        self._raise_failure()
        return self.result()

    def durable_published(self, row: int) -> Published:
        """Return `durable_result()[row]` without computing columns for the other rows if possible, as `published`
        does."""
        self._raise_failure()
        return self.published(row)

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)

    def published(self, row: int) -> Published:
        """Return `result()[row]`. If all rows were stored in one run, no columns are computed for the other rows."""
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
    # Each waiter has a separate future: cancelling one must not cancel the others.
    future = asyncio.get_running_loop().create_future()
    when(lambda: None if future.done() else future.set_result(None))
    await future


# -- The receipts that a sender awaits: of one message, and of a batch.


class SpreadBatch:
    """One batch that was split over partitions. A receipt of such a batch refers to a `SpreadBatch` instead of a
    `PendingBatch`."""

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
        """Call `waiter` when all parts are settled; `waiter` may be called several times. See
        `PendingBatch.when_settled`."""
        for _, pending in self._parts:
            pending.when_settled(lambda: waiter() if self.settled else None)

    def when_durable(self, waiter: Callable[[], None]) -> None:
        """Call `waiter` when each part is durable or has failed; `waiter` may be called several times. See
        `when_settled`."""
        for _, pending in self._parts:
            pending.when_durable(lambda: waiter() if self.durable else None)

    async def wait(self) -> None:
        for _, pending in self._parts:
            await pending.wait()

    async def wait_until_durable(self) -> None:
        for _, pending in self._parts:
            await pending.wait_until_durable()

    def result(self) -> BatchResult:
        """Return the receipts of all rows. Raises the failure of a part that failed."""
        return self._of_all([(rows, pending.result()) for rows, pending in self._parts])

    def durable_result(self) -> BatchResult:
        """Return the receipts of all rows, which are durable. See `PendingBatch.durable_result`."""
        return self._of_all([(rows, pending.durable_result()) for rows, pending in self._parts])

    def _of_all(self, results: list[tuple[Int64s, BatchResult]]) -> BatchResult:
        result = BatchResult.undecided(self._sequence_ids)
        for rows, of_part in results:
            result.put(rows, of_part)
        return result


class Told:
    """The base class of all receipts. Its methods return the current state without waiting."""

    __slots__ = ("_pending",)

    def __init__(self, pending: PendingBatch | SpreadBatch) -> None:
        self._pending = pending

    def done(self) -> bool:
        """Return whether the receipt or the failure has arrived. If so, awaiting the receipt does not wait."""
        return self._pending.settled

    def is_durable(self) -> bool:
        """Return whether all messages of the receipt are known to be durable, so that `until_durable` returns at once.
        The value stays false if the producer ended before the messages were known to be durable."""
        return self._pending.durable and not self._pending.failed

    def is_over(self) -> bool:
        """Return whether `until_durable` would return or raise at once: all messages are durable, or have failed."""
        return self._pending.durable


class Receipt(Told):
    """The receipt of one message. Await the receipt to get a `Published`. If the message failed, awaiting raises the
    failure.

    If the topic's flush policy does not sync every commit, the receipt arrives when the message is written. The
    producer keeps the message until it is durable, and sends it again if the sidecar has lost it in a power cut. The
    message can be lost only if the producer ends before the message is durable. To wait for durability, use
    `until_durable`.
    """

    __slots__ = ("_row",)
    _pending: PendingBatch

    def __init__(self, pending: PendingBatch, row: int) -> None:
        self._pending = pending  # set here without super(): a receipt is made for each message
        self._row = row

    def __await__(self) -> Generator[Any, None, Published]:
        if not self._pending.settled:
            yield from self._pending.wait().__await__()
        return self._pending.published(self._row)

    async def until_durable(self) -> Published:
        """Wait until the message is durable, and return the message's outcome. If the producer has sent the message
        again since the receipt, the outcome's index and message ID may differ from the receipt. Raises the failure of
        the message, also if the producer has ended since the receipt."""
        await self._pending.wait_until_durable()
        return self._pending.durable_published(self._row)


class BatchReceipt(Told):
    """The receipt of a batch. Await the receipt to get a `BatchResult`. If the batch failed, awaiting raises the
    failure. See `Receipt`."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, BatchResult]:
        if not self._pending.settled:
            yield from self._pending.wait().__await__()
        return self._pending.result()

    async def until_durable(self) -> BatchResult:
        """Wait until all messages are durable, and return their outcome. See `Receipt.until_durable`."""
        await self._pending.wait_until_durable()
        return self._pending.durable_result()


# -- Batches as frames on a stream, and the connections that break while one is in flight.

FRAME_NUMBERS = itertools.count(1)
"""The frame numbers. All senders take their numbers from this counter, so that they are unique in the process, as the
contract requires."""


class InFlightBatch(NamedTuple):
    """A batch in flight, with the epoch of its session and its link."""

    number: int
    batch: Batch
    size_bytes: int


MAX_BREAKS = 10
BREAKS_SECONDS = 60.0
"""The limits after which a frame is given up. A frame is given up if it was alone on MAX_BREAKS consecutive connections
that broke, over at least BREAKS_SECONDS. Then a component between client and sidecar does not let the frame pass. If a
proxy fails only for some seconds, the client waits for the proxy."""

HINT_OF_BREAKS = (
    "A proxy on the way may limit how large a request may be (nginx: client_max_body_size), or refuse this one for "
    "another reason: its log says so. What was sent may be in the log or not: send it again with the same IDs."
)

SUSPECT_BREAKS = 2
"""After this number of consecutive broken connections, frames are sent alone, to find the frame that breaks them."""


class Breaks:
    """Counts the consecutive connections that broke while a frame without a receipt was in flight."""

    __slots__ = ("_alone", "_alone_since", "_count")

    def __init__(self) -> None:
        self._count = self._alone = 0
        self._alone_since = 0.0

    def clear(self) -> None:
        """Restart the count: the frame has a receipt."""
        self._count = self._alone = 0

    @property
    def is_suspect(self) -> bool:
        """Whether the frame must be sent alone from now on, because it may be the cause of the broken connections."""
        return self._count >= SUSPECT_BREAKS

    def add(self, why: SeqdedupeError, now_seconds: float, *, is_alone: bool) -> bool:
        """Count another broken connection, and return whether to give up the frame. `is_alone` is true if the sidecar
        had accepted the stream, and no other frame was in flight. If the frame was alone on the last connections, the
        frame is the likely cause. Then the method adds a hint to `why`, for callers that give up before this limit."""
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
        """Return the reason why the frame is given up."""
        return (
            f"{what}, of {size_bytes:,} bytes, was alone on {self._alone} connections in a row, and each of them broke"
        )
