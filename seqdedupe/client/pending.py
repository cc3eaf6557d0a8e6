"""A batch on its way: what its senders wait for, and what it ends in."""

import asyncio
from collections.abc import Callable

import numpy as np

from seqdedupe.batch import NO_INT64S, Batch, Int64s
from seqdedupe.client.receipts import ReceiptColumns, Verdict, later
from seqdedupe.client.results import NO_PARTITION, BatchResult, Published
from seqdedupe.errors import SeqdedupeError

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
