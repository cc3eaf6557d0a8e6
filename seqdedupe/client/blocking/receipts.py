"""The receipts of the producer for threads."""

import threading

from seqdedupe.client.blocking.loop import check_is_there
from seqdedupe.client.receipts import BatchResult, PendingBatch, Published, SpreadBatch
from seqdedupe.errors import error


def _wait(pending: PendingBatch | SpreadBatch, timeout_seconds: float | None) -> None:
    if pending.settled:
        return
    check_is_there()
    event = threading.Event()
    pending.when_settled(event.set)
    if not event.wait(timeout_seconds):
        why = pending.last_refusal
        because = "" if why is None else f": {why}"
        raise error(
            "OUTCOME_UNKNOWN",
            f"no receipt within {timeout_seconds:g} seconds{because}; the client goes on sending",
            hint=None if why is None else why.hint,
        )


class Receipt:
    """The receipt of one message."""

    __slots__ = ("_pending", "_row")

    def __init__(self, pending: PendingBatch, row: int) -> None:
        self._pending = pending
        self._row = row

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._pending.settled

    def result(self, timeout_seconds: float | None = None) -> Published:
        """Waits for it. Raises what the message failed with, or OutcomeUnknownError if there is nothing yet."""
        _wait(self._pending, timeout_seconds)
        return self._pending.published(self._row)


class BatchReceipt:
    """The receipt of a batch."""

    __slots__ = ("_pending",)

    def __init__(self, pending: PendingBatch | SpreadBatch) -> None:
        self._pending = pending

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._pending.settled

    def result(self, timeout_seconds: float | None = None) -> BatchResult:
        """Waits for it. Raises what the batch failed with, or OutcomeUnknownError if there is nothing yet."""
        _wait(self._pending, timeout_seconds)
        return self._pending.result()
