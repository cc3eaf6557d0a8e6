"""Which entries of a sidecar's topic count for nobody; docs/formats-pulsar.md has the rule."""

from seqdedupe.entry_properties import Place


class Owners:
    """Of a topic or partition: tells entries that are void, of an owner that wrote on when another one had taken over.

    Their producer was told of no success and sends again, to the new owner: so they count for nobody. Who starts
    within such entries, after the new owner's marker, cannot tell them.
    """

    def __init__(self) -> None:
        self._last: Place | None = None
        self._since = -1, -1

    def is_void(self, place: Place, ledger_id: int, entry_id: int) -> bool:
        """The verdict on an entry: entries come in their order, and may come again."""
        last, at = self._last, (ledger_id, entry_id)
        if last is None or place.owner.incarnation != last.owner.incarnation or place.owner.term > last.owner.term:
            self._last, self._since = place, at
            return False
        return place.owner != last.owner and at > self._since
