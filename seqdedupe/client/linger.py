"""How long a batch that is not full waits for more messages."""

from seqdedupe.client.pending import PendingBatch

MANY_A_SECOND = 5_000
"""While so many messages come, a batch waits for more of them: each frame costs both sides as much as a hundred."""

LONGEST_LINGERS = 5
"""So many times `linger_ms`, at most."""


class Linger:
    """Whether a batch has waited long enough; to be asked every `seconds`."""

    def __init__(self, linger_ms: float) -> None:
        self.seconds = linger_ms / 1000
        self._many = MANY_A_SECOND * self.seconds
        self._batch: PendingBatch | None = None
        self._rows = 0
        self._lingers = 0

    def is_over(self, batch: PendingBatch, rows: int) -> bool:
        """Whether this batch, which has so many messages by now, waits no more: few have come since it was last asked,
        or it has waited for longest."""
        if batch is not self._batch:
            self._batch, self._rows, self._lingers = batch, 0, 0
        came, self._rows = rows - self._rows, rows
        self._lingers += 1
        return came < self._many or self._lingers >= LONGEST_LINGERS
