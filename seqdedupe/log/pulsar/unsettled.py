"""Which appends of an owner are confirmed, by the receipts of Pulsar. No I/O."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from seqdedupe.log.pulsar.terms import Receipts
from seqdedupe.message_id import MessageId


class Confirmed(NamedTuple):
    """So many of the oldest appends, which stand one after the other in one ledger."""

    entries: int
    first: MessageId


class Unsettled:
    """The appends of one opening that are not confirmed yet, in their order.

    A receipt confirms its append only where `Receipts` says so. Where it does not, at the first append and after a
    gap, a new ledger or no place, all later ones wait until the topic was read up to that append.
    """

    def __init__(self) -> None:
        self._rule: Receipts | None = None
        self._receipts: deque[MessageId] = deque()
        self._read_ahead = 0

    def add(self, receipt: MessageId) -> None:
        """The receipt of the append after the last one that had a receipt."""
        if self._read_ahead:
            self._read_ahead -= 1
        else:
            self._receipts.append(receipt)

    def confirm(self) -> Confirmed | None:
        """Takes out what is confirmed now."""
        receipts, rule = self._receipts, self._rule
        if rule is None or not receipts:
            return None
        first, entries = receipts[0], 0
        while receipts and rule.confirms(receipts[0]):
            receipts.popleft()
            entries += 1
        return Confirmed(entries, first) if entries else None

    @property
    def doubtful(self) -> MessageId | None:
        """After `confirm`: the receipt of the oldest append, which proves nothing, if it has one."""
        return self._receipts[0] if self._receipts else None

    def was_read(self, message_ids: Sequence[MessageId]) -> None:
        """The topic was read: so many of the oldest appends are valid, and stand there. Not all need have a receipt."""
        for _ in message_ids:
            if self._receipts:
                self._receipts.popleft()
            else:
                self._read_ahead += 1
        last = message_ids[-1]
        if self._rule is None:
            self._rule = Receipts(last)
        else:
            self._rule.was_read(last)
