"""A topic's ledgers, as the topic's broker lists them. The ledgers show which entries exist, without reading
entries."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from seqdedupe.message_id import NOWHERE, MessageId


class Ledger(NamedTuple):
    """One ledger, as far as it is written."""

    ledger_id: int
    entries: int
    size_bytes: int


class Ledgers:
    """The stored ledgers, up to the topic's last entry. Entries are counted from 0, the first stored entry."""

    def __init__(self, ledgers: Sequence[Ledger]) -> None:
        """Make it from the ledgers in order."""
        self._ledgers = [one for one in ledgers if one.entries]
        self._ids = [one.ledger_id for one in self._ledgers]
        self._starts = list(accumulate((one.entries for one in self._ledgers), initial=0))

    def __len__(self) -> int:
        """Return the number of entries."""
        return self._starts[-1]

    @property
    def first_id(self) -> int | None:
        """The oldest ledger with an entry."""
        return self._ids[0] if self._ids else None

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self._ledgers)

    def ordinal(self, message_id: MessageId) -> int | None:
        """Return the entry's number; None if it does not exist (any more)."""
        at = bisect_right(self._ids, message_id.ledger_id) - 1
        if at < 0 or self._ids[at] != message_id.ledger_id or message_id.entry_id >= self._ledgers[at].entries:
            return None
        return self._starts[at] + message_id.entry_id

    def up_to(self, last: MessageId) -> list[tuple[int, int]]:
        """Return the ledgers up to this entry, each with the number of its entries up to this entry."""
        at = bisect_right(self._ids, last.ledger_id)
        found = [(one.ledger_id, one.entries) for one in self._ledgers[:at]]
        if found and found[-1][0] == last.ledger_id:
            found[-1] = last.ledger_id, min(last.entry_id + 1, found[-1][1])
        return found

    def are_neighbours(self, before: MessageId, after: MessageId) -> bool:
        """Return whether both exist, and no entry is between."""
        first, second = self.ordinal(before), self.ordinal(after)
        return first is not None and second is not None and 0 <= second - first <= 1

    def before(self, message_id: MessageId) -> MessageId:
        """Return the entry before this entry; -1, -1 if no earlier entry is stored, or if this entry does not exist."""
        at = self.ordinal(message_id)
        return self.message_id(at - 1) if at else NOWHERE

    def entries_before(self, ledger_id: int) -> int:
        """Return the number of entries in ledgers that are older than this ledger, which may be removed."""
        return self._starts[bisect_left(self._ids, ledger_id)]

    def message_id(self, ordinal: int) -> MessageId:
        """Return the ID of an existing entry."""
        at = bisect_right(self._starts, ordinal) - 1
        return MessageId(self._ids[at], ordinal - self._starts[at])

    def after(self, ordinal: int, size_bytes: int) -> int:
        """Return the entry that ends about `size_bytes` after the beginning of this entry. If there are fewer bytes,
        return the last entry."""
        while ordinal < len(self):
            at = bisect_right(self._starts, ordinal) - 1
            ledger, left = self._ledgers[at], self._starts[at + 1] - ordinal
            taken = size_bytes * ledger.entries // max(ledger.size_bytes, 1)
            if taken < left:
                return ordinal + taken
            size_bytes -= left * ledger.size_bytes // ledger.entries
            ordinal += left
        return len(self) - 1
