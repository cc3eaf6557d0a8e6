"""What became of the messages of a batch, of one by itself or of all in columns."""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from seqdedupe.batch import Int32s, Int64s
from seqdedupe.client.receipts import NO_INDEX, ReceiptColumns, Verdict, ids_of_run
from seqdedupe.message_id import MessageId

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
        """What the first receipt of these rows decides. Raises INTERNAL, IndexError, ValueError for one that is not of
        them."""
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
        """Adds what the receipt decides. Rows that are decided already stay as they are.

        Raises INTERNAL, IndexError, ValueError for one that is not of these rows; nothing is added then.
        """
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
