"""A topic's ledgers, as its broker lists them: which entries there are, without reading any."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from seqdedupe.message_id import MessageId


class Ledger(NamedTuple):
    """One of them, as far as it is written."""

    ledger_id: int
    entries: int
    size_bytes: int


class Ledgers:
    """Those that are left, up to the topic's last entry. Entries are counted from 0, the first one that is left."""

    def __init__(self, ledgers: Sequence[Ledger]) -> None:
        """In their order."""
        self._ledgers = [one for one in ledgers if one.entries]
        self._ids = [one.ledger_id for one in self._ledgers]
        self._starts = list(accumulate((one.entries for one in self._ledgers), initial=0))

    def __len__(self) -> int:
        """How many entries there are."""
        return self._starts[-1]

    @property
    def first_id(self) -> int | None:
        """The oldest ledger with an entry."""
        return self._ids[0] if self._ids else None

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self._ledgers)

    def ordinal(self, message_id: MessageId) -> int | None:
        """Which entry this is; None if it is not there (any more)."""
        at = bisect_right(self._ids, message_id.ledger_id) - 1
        if at < 0 or self._ids[at] != message_id.ledger_id or message_id.entry_id >= self._ledgers[at].entries:
            return None
        return self._starts[at] + message_id.entry_id

    def are_neighbours(self, before: MessageId, after: MessageId) -> bool:
        """Whether both are there, and no entry stands between."""
        first, second = self.ordinal(before), self.ordinal(after)
        return first is not None and second is not None and 0 <= second - first <= 1

    def is_last(self, message_id: MessageId) -> bool:
        """Whether nothing stands after an entry, which is there."""
        at = self.ordinal(message_id)
        return at is not None and at == len(self) - 1

    def before(self, message_id: MessageId) -> MessageId:
        """The entry before one; -1, -1 if none is left, or that one is not there."""
        at = self.ordinal(message_id)
        return self.message_id(at - 1) if at else MessageId(-1, -1)

    def entries_before(self, ledger_id: int) -> int:
        """How many there are in older ledgers than this one, which may be gone."""
        return self._starts[bisect_left(self._ids, ledger_id)]

    def message_id(self, ordinal: int) -> MessageId:
        """That of an entry that is there."""
        at = bisect_right(self._starts, ordinal) - 1
        return MessageId(self._ids[at], ordinal - self._starts[at])

    def after(self, ordinal: int, size_bytes: int) -> int:
        """The entry at which about so many bytes end that begin with this one: the last one if there are fewer."""
        while ordinal < len(self):
            at = bisect_right(self._starts, ordinal) - 1
            ledger, left = self._ledgers[at], self._starts[at + 1] - ordinal
            taken = size_bytes * ledger.entries // max(ledger.size_bytes, 1)
            if taken < left:
                return ordinal + taken
            size_bytes -= left * ledger.size_bytes // ledger.entries
            ordinal += left
        return len(self) - 1
