"""Up to which number all rows of an outbox in PostgreSQL are there that ever will be.

A row takes its number from a sequence when it is inserted, and its transaction commits later: 7 may be committed while
6 is not. Who has read 7 never sees 6, unless it knows that nobody has 6 any more.

A transaction has an ID before it takes a number. So if first the last number is read that was taken, and then the next
ID that will be given, all transactions which have taken a number up to that one have IDs below that one. Once all
transactions with such IDs have ended, what is committed of these numbers can be read, and nothing comes later.

The next ID is not what a snapshot calls its `xmax`: that is the one after the highest ID that has ended, and
transactions above it may run.
"""

from collections import deque

NOTHING = -(2**63)
"""Below all numbers."""

MOST_NOTES = 1000
"""While a transaction stays open for hours, the last note stands for all that would come after these."""


class Horizon:
    """What a relay has noted so far. It begins anew with every connection: another server has another history."""

    def __init__(self) -> None:
        self.bound = NOTHING
        """All rows up to this number can be read."""
        self._notes: deque[tuple[int, int]] = deque()

    def is_at(self, last_number: int) -> bool:
        """Whether nothing can become readable that is not yet."""
        return last_number <= self.bound

    def note(self, last_number: int, next_transaction: int, oldest_running: int) -> bool:
        """Notes numbers that were read in this order, the first one before the statement that read the others.

        `oldest_running` is the lowest ID of a transaction that runs, or the next one. Answers whether the bound rose.
        """
        before = self.bound
        if last_number > (self._notes[-1][0] if self._notes else before):
            if len(self._notes) == MOST_NOTES:
                self._notes.pop()
            self._notes.append((last_number, next_transaction))
        while self._notes and self._notes[0][1] <= oldest_running:
            self.bound, _ = self._notes.popleft()
        return self.bound > before
