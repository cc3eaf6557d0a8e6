"""What the sidecar answers to a frame: verdicts, and where its messages stand, in columns."""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from seqdedupe.batch import NO_INT32S, NO_INT64S, Int32s, Int64s
from seqdedupe.errors import error
from seqdedupe.message_id import MessageId
from seqdedupe.message_ids import MessageIds

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
        """Ledgers, entries and batch indexes of the rows that were stored, of which there are so many.

        Raises INTERNAL if the runs are of another number of rows.
        """
        if not len(self.run_rows):
            return ids_of_run(self.first_message_id, np.arange(rows, dtype=np.int64))
        ids = self._runs()
        if len(ids) != rows:
            raise error("INTERNAL", f"a receipt has message IDs for {len(ids)} rows, and {rows} were stored")
        return ids.columns()

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
