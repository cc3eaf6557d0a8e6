"""The entries of a log: message IDs of their rows, what became of those that were appended, and how they are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from seqdedupe.batch import Int64s
from seqdedupe.format.columns import BASE_INDEX, ROWS
from seqdedupe.message_id import MessageId


class Run(NamedTuple):
    """The message IDs of rows that stand one after the other.

    The first row has (`ledger_id`, `entry_id`, `batch_index`). In the following rows the entry counts up where
    `batch_index` is -1 (an entry is one message), else the batch index does.
    """

    rows: int
    ledger_id: int
    entry_id: int
    batch_index: int = -1

    def message_id(self, row: int) -> MessageId:
        """That of a row of the run."""
        if self.batch_index < 0:
            return MessageId(self.ledger_id, self.entry_id + row, -1)
        return MessageId(self.ledger_id, self.entry_id, self.batch_index + row)


Runs = tuple[Run, ...]
"""The message IDs of a stored entry's rows: usually one run, more where a ledger rolled over within the batch, none
for a marker or a control record."""


def last_of(runs: Runs) -> MessageId:
    """The message ID of an entry's last row, where it has any."""
    return runs[-1].message_id(runs[-1].rows - 1)


class LargerRecordError(Exception):
    """A record is larger than whoever reads has room for: it has so many bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(f"a record of {size} bytes")
        self.size = size


class Failure(Enum):
    """Why nothing more is taken until the log is opened for writing again."""

    REFUSED = "refused"
    """Nothing of what is not settled as stored is in the log, or ever will be."""

    UNKNOWN = "unknown"
    """What is not settled as stored may be in the log: a prefix of it. Opening again and reading tells."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the oldest unsettled appends, of batches and control records, since the log was opened."""

    runs: Sequence[Runs]
    """So many more of them are durable, and these are the message IDs of each one's rows."""

    failure: Failure | None = None
    """Set once, and last: all that are left have failed."""

    why: str = ""
    """With a failure, one line for a person."""

    written: Sequence[Runs] = ()
    """After those, so many of which it was not said before are written, in this order, and not durable yet. As long as
    the machine does not stop they are there; nobody but their senders may learn of them."""

    @property
    def stored(self) -> int:
        """How many more of the appends are durable."""
        return len(self.runs)


@dataclass(frozen=True, slots=True)
class Entries:
    """Stored entries of a log in their order, read, checked and contiguous."""

    raw: bytes
    """The records. What `table` says of places is within this buffer."""

    table: Int64s
    """A place row (`format.columns`) for each entry: BASE_INDEX, ROWS (0 in a marker and in a control record),
    PUBLISH_TIME_MS, TERM (above 0 in a marker only), OWNERSHIP, and where the columns of a batch stand. What has
    neither rows nor a term is a control record; `records.body_of` gives it. Payloads were not looked at.
    C-contiguous; nobody changes it."""

    runs: Sequence[Runs]
    """For each entry the message IDs of its rows."""

    @property
    def next_index(self) -> int:
        """The index after these entries."""
        return int(self.table[-1, BASE_INDEX] + self.table[-1, ROWS])


class Records(NamedTuple):
    """Records of batches as they are stored, one after the other, whole."""

    raw: bytes | memoryview
    runs: Sequence[Runs] | None = None
    """Of each record the message IDs of its rows; None where the index says them (ledger the incarnation, entry the
    index, batch index -1)."""


class Location(NamedTuple):
    """Where a message stands."""

    message_id: MessageId
    ownership: int
    """The first eight bytes of the token of the marker under which it was written, as an unsigned number."""
