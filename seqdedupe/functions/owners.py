"""Which entries of a sidecar's topic count for nobody; docs/formats-pulsar.md has the rule."""

from seqdedupe.entry_properties import Owner, Place


class Owners:
    """Of a topic or partition: tells entries that are void.

    An owner wrote them when another one had taken over, or after an entry of it that Pulsar had refused. Their producer
    was told of no success and sends again, so they count for nobody. Who starts within such entries cannot tell them,
    and a missing number at the border of two ledgers tells nothing here.
    """

    def __init__(self) -> None:
        self._last: Place | None = None
        """The owner's last entry before which none is missing."""
        self._since = self._at = -1, -1
        """Where the owner began; the last entry that came first."""
        self._is_whole = False
        """Whether every position was met since the owner's last entry."""
        self._hole: tuple[Owner, tuple[int, int]] | None = None
        """Whose the newest one is, and where what follows it begins."""

    def is_void(self, place: Place | None, ledger_id: int, entry_id: int) -> bool:
        """The verdict on an entry, which is not a sidecar's without a place. They come in order, and may come again."""
        at, is_new = (ledger_id, entry_id), (ledger_id, entry_id) > self._at
        if is_new:
            self._is_whole = self._is_whole and ledger_id == self._at[0] and entry_id == self._at[1] + 1
            self._at = at
        if place is None:
            return False
        last = self._last
        if last is None or place.owner.incarnation != last.owner.incarnation or place.owner.term > last.owner.term:
            self._last, self._since, self._is_whole = place, at, True
            return False
        if self._hole is not None and place.owner == self._hole[0] and at >= self._hole[1]:
            return True
        if place.owner != last.owner:
            return at > self._since
        if is_new and place.number > last.number + 1 and self._is_whole:
            self._hole = place.owner, at
            return True
        if is_new:
            self._last, self._is_whole = max(last, place, key=lambda one: one.number), True
        return False
