"""Receipts as a sender has them, to be awaited: of a message, and of a batch."""

from collections.abc import Callable, Generator
from typing import Any

from seqdedupe.batch import Int64s
from seqdedupe.client.pending import PendingBatch
from seqdedupe.client.results import BatchResult, Published
from seqdedupe.errors import SeqdedupeError


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
