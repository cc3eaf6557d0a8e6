"""The receipts of the producer for threads."""

import threading

from seqdedupe.client.blocking.loop import check_is_there
from seqdedupe.client.pending import BatchResult, PendingBatch, Published, SpreadBatch, Told
from seqdedupe.errors import error


def _wait(pending: PendingBatch | SpreadBatch, timeout_seconds: float | None, *, until_durable: bool = False) -> None:
    if pending.durable or (pending.settled and not until_durable):
        return
    check_is_there()
    event = threading.Event()
    when = pending.when_durable if until_durable else pending.when_settled
    when(event.set)
    if not event.wait(timeout_seconds):
        why = pending.last_refusal
        because = "" if why is None else f": {why}"
        what = "not durable" if pending.settled else "no receipt"
        raise error(
            "OUTCOME_UNKNOWN",
            f"{what} within {timeout_seconds:g} seconds{because}; the client goes on sending",
            hint=None if why is None else why.hint,
        )


class Receipt(Told):
    """The receipt of one message."""

    __slots__ = ("_row",)
    _pending: PendingBatch

    def __init__(self, pending: PendingBatch, row: int) -> None:
        self._pending = pending  # one is made for each message
        self._row = row

    def result(self, timeout_seconds: float | None = None) -> Published:
        """Waits for it. Raises what the message failed with, or OutcomeUnknownError if there is nothing yet."""
        _wait(self._pending, timeout_seconds)
        return self._pending.published(self._row)

    def until_durable(self, timeout_seconds: float | None = None) -> Published:
        """As `result`, when the message is durable: see `Receipt.until_durable` of the producer for asyncio."""
        _wait(self._pending, timeout_seconds, until_durable=True)
        return self._pending.durable_published(self._row)


class BatchReceipt(Told):
    """The receipt of a batch."""

    __slots__ = ()

    def result(self, timeout_seconds: float | None = None) -> BatchResult:
        """Waits for it. Raises what the batch failed with, or OutcomeUnknownError if there is nothing yet."""
        _wait(self._pending, timeout_seconds)
        return self._pending.result()

    def until_durable(self, timeout_seconds: float | None = None) -> BatchResult:
        """As `Receipt.until_durable`, for all messages."""
        _wait(self._pending, timeout_seconds, until_durable=True)
        return self._pending.durable_result()
