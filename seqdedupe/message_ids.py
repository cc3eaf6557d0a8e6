"""The message IDs of rows that stand one after the other, as runs in columns."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seqdedupe import wire
from seqdedupe.batch import Int32s, Int64s
from seqdedupe.message_id import MessageId

_MAX_INT64 = 2**63 - 1
_MAX_INT32 = 2**31 - 1


@dataclass(slots=True, eq=False)
class MessageIds:
    """Those of the rows of a batch, or of some of them; `ids[row]` is one, `len(ids)` how many there are.

    The first row of run k has (`ledger_ids[k]`, `entry_ids[k]`, `batch_indexes[k]`). In the other rows of the run the
    entry counts up where the batch index is -1 (an entry is one message), else the batch index does.
    """

    run_rows: Int64s
    ledger_ids: Int64s
    entry_ids: Int64s
    batch_indexes: Int32s
    _ends: Int64s = field(init=False)

    def __post_init__(self) -> None:
        self._ends = np.cumsum(self.run_rows, dtype=np.int64)

    @staticmethod
    def of(runs: Iterable[tuple[int, int, int, int]]) -> "MessageIds":
        """Those of at least one run: rows, ledger, entry and batch index of each."""
        rows, ledger_ids, entry_ids, batch_indexes = zip(*runs, strict=True)
        return MessageIds(
            np.array(rows, np.int64),
            np.array(ledger_ids, np.int64),
            np.array(entry_ids, np.int64),
            np.array(batch_indexes, np.int32),
        )

    @staticmethod
    def of_record(record: Any) -> "MessageIds | None":
        """Those that a `Record`, as `wire` reads it, brings for its rows; None where it leaves them to the index.

        Raises ValueError, which says what is wrong, if they cannot be those of its rows.
        """
        columns = record.run_rows, record.run_ledger_ids, record.run_entry_ids, record.run_batch_indexes
        if not any(columns):
            return None
        run_rows, ledger_ids, entry_ids, batch_indexes = columns
        runs = len(run_rows) // 4
        if not len(run_rows) == len(batch_indexes) == 4 * runs or not len(ledger_ids) == len(entry_ids) == 8 * runs:
            raise ValueError("the columns of runs have different lengths")
        ids = MessageIds(
            np.frombuffer(run_rows, "<u4").astype(np.int64),
            np.frombuffer(ledger_ids, "<i8"),
            np.frombuffer(entry_ids, "<i8"),
            np.frombuffer(batch_indexes, "<i4"),
        )
        ids._check()
        if len(ids) != record.rows:
            raise ValueError(f"there are {len(ids)} for {record.rows} rows")
        return ids

    def encode(self) -> bytes:
        """As fields of a `Record`, which stand after all others."""
        record = wire.Record(
            run_rows=self.run_rows.astype("<u4").tobytes(),
            run_ledger_ids=self.ledger_ids.tobytes(),
            run_entry_ids=self.entry_ids.tobytes(),
            run_batch_indexes=self.batch_indexes.tobytes(),
        )
        encoded: bytes = record.SerializeToString()
        return encoded

    def _check(self) -> None:
        """Raises ValueError unless every run has rows, and the IDs are some, and rise."""
        if not self.run_rows.all():
            raise ValueError(f"run {int(np.argmin(self.run_rows))} has no rows")
        ledgers, entries, places = self.ledger_ids, self.entry_ids, self.batch_indexes.astype(np.int64)
        alone, steps = places < 0, self.run_rows - 1
        wrong = (ledgers < 0) | (entries < 0) | (places < -1)
        wrong |= np.where(alone, entries > _MAX_INT64 - steps, places > _MAX_INT32 - steps)
        if wrong.any():
            raise ValueError(f"run {int(np.argmax(wrong))} has no message IDs: a number is negative or too large")
        last_entries, last_places = entries + np.where(alone, steps, 0), places + np.where(alone, 0, steps)
        same_ledger, same_entry = ledgers[:-1] == ledgers[1:], last_entries[:-1] == entries[1:]
        rises = (last_entries[:-1] < entries[1:]) | (same_entry & (last_places[:-1] < places[1:]))
        falls = ~((ledgers[:-1] < ledgers[1:]) | (same_ledger & rises))
        if falls.any():
            raise ValueError(f"the message IDs do not rise at run {int(np.argmax(falls)) + 1}")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, row: int) -> MessageId:
        run = int(np.searchsorted(self._ends, row, "right"))
        step = row - int(self._ends[run] - self.run_rows[run])
        ledger_id, entry_id, place = int(self.ledger_ids[run]), int(self.entry_ids[run]), int(self.batch_indexes[run])
        return MessageId(ledger_id, entry_id + step) if place < 0 else MessageId(ledger_id, entry_id, place + step)

    def columns(self) -> tuple[Int64s, Int64s, Int32s]:
        """Ledgers, entries and batch indexes of all rows."""
        run_of = np.repeat(np.arange(len(self.run_rows)), self.run_rows)
        steps = np.arange(len(self)) - (self._ends - self.run_rows)[run_of]
        places = self.batch_indexes[run_of]
        return (
            self.ledger_ids[run_of],
            self.entry_ids[run_of] + np.where(places < 0, steps, 0),
            np.where(places < 0, places, places + steps).astype(np.int32),
        )

    def cut(self, first: int, stop: int) -> "MessageIds":
        """Those of the rows from `first` to before `stop`, of which there is at least one."""
        begin = int(np.searchsorted(self._ends, first, "right"))
        end = int(np.searchsorted(self._ends, stop)) + 1
        rows = np.diff(np.minimum(self._ends[begin:end], stop), prepend=first)
        ids = MessageIds(
            rows,
            self.ledger_ids[begin:end].copy(),
            self.entry_ids[begin:end].copy(),
            self.batch_indexes[begin:end].copy(),
        )
        _, ids.entry_ids[0], ids.batch_indexes[0] = self[first]
        return ids
