"""Finds places in a topic that was not read completely, by reading few entries. Each entry states its own place.

The rule of terms judges entries in order. But in two cases an entry is known to be valid without reading all entries:

- An owner writes entries after its marker only when it has read the topic up to that marker, and found the marker
  valid. So the marker took ownership.
- An owner's entries are numbered without gaps. If the number of entries between two entries of an owner matches their
  numbers, no other owner's entry or marker is between them. So all these entries are valid.

After a hole, the owner's numbers are ahead of the places, so these entries are read one by one. A hole cannot be
detected if the number of foreign entries between the owner's entries equals the number of missing entries.

A valid entry stays valid, no matter which entries follow it.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from seqdedupe.entry_properties import BATCH, ENTRY, KIND, ROWS, EntryPlace
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.pulsar.entries import PulsarEntry, check_earlier
from seqdedupe.log.pulsar.ledgers import Ledgers
from seqdedupe.log.pulsar.places import begins_record
from seqdedupe.log.pulsar.terms import Terms, TermStanding, TermVerdict
from seqdedupe.message_id import NOWHERE, MessageId, Position

STEP_ENTRIES = 64
"""Up to this number of entries are read one after the other instead of searched."""

Read = Callable[[MessageId, MessageId], Awaitable[list[PulsarEntry]]]
"""Returns the entries that exist from the first of these places to the last. Payloads are not needed."""


class Known(NamedTuple):
    """The state of the topic after an entry."""

    at: int
    """The entry's number among the stored entries; -1 before the first entry."""
    standing: TermStanding
    last: Position | None = None
    """The position of the last message up to there; None if it was not read."""


class Finder:
    """Searches one topic, with the list of the topic's ledgers at one moment.

    Raises DamagedError as `Terms` does, also if Pulsar has trimmed the wanted entries meanwhile.
    """

    def __init__(
        self, topic: str, incarnation: int, ledgers: Ledgers, read: Read, earlier: MessageId = NOWHERE
    ) -> None:
        """Make a finder. `earlier` is the topic's last entry from the time before a sidecar took over the topic. The
        finder reads neither this entry nor earlier entries, because there may be very many."""
        self.topic = topic
        self.incarnation = incarnation
        self.ledgers = ledgers
        self._read = read
        last_earlier = ledgers.ordinal(earlier)
        self._first = 0 if last_earlier is None else last_earlier + 1
        """The number of the first entry that a sidecar may have written."""
        self._looked_at: dict[int, PulsarEntry | None] = {}
        self._beginning: Known | None = None

    async def end(self) -> Known:
        """Return the state after the last entry. The state includes the last message, if any message is still
        stored."""
        known = await self.known_at(len(self.ledgers) - 1)
        index = known.standing.next_index - 1
        if known.last is None and index >= (await self.beginning()).standing.next_index:
            known = known._replace(last=(await self.around(index))[1].last)
        return known

    async def beginning(self) -> Known:
        """Return the state before the first entry left, without earlier ones."""
        if self._beginning is None:
            self._beginning = Known(self._first - 1, await self._first_standing())
        return self._beginning

    async def _first_standing(self) -> TermStanding:
        nothing = TermStanding.start(self.incarnation)
        marker: EntryPlace | None = None
        first, count = self._first, 1
        while first < len(self.ledgers):
            for entry in await self._entries(first, first + count - 1):
                place = _place(entry)
                if place is None or (marker and place.owner.term < marker.owner.term):
                    continue
                if marker is None and place.number:
                    return TermStanding(*place[:3])
                if place.number == 1:
                    # A marker states the next index only as far as its writer knew it. The entry after it knows.
                    return nothing._replace(next_index=place.index)
                # The entries after a hole are void, and know nothing.
                marker = marker if place.number else place
            first, count = first + count, min(2 * count, STEP_ENTRIES)
        return nothing._replace(next_index=max(marker.index, 0)) if marker else nothing

    async def known_at(self, at: int) -> Known:
        """Return the state after this entry."""
        beginning, back = await self.beginning(), 0
        while at - back > beginning.at + 1:
            known = await self._by_its_marker(at - back) or await self._directly(beginning, at - back)
            if known is not None:
                return await self._after(known, at)
            back = 2 * back or STEP_ENTRIES
        return await self._after(beginning, at)

    async def around(self, index: int) -> tuple[Known, Known]:
        """Return the states before and after the entry that contains this message. Raises POSITION_TRIMMED,
        POSITION_AFTER_END."""
        low, high = await self.beginning(), await self.known_at(len(self.ledgers) - 1)
        first, stop = low.standing.next_index, high.standing.next_index
        if index < first:
            raise trimmed(self.topic, index, first)
        if index >= stop:
            raise error("POSITION_AFTER_END", f"{self.topic} has no index {index}, {stop} is the next", index=index)
        while high.at - low.at > STEP_ENTRIES:
            first, stop = low.standing.next_index, high.standing.next_index
            guess = low.at + (high.at - low.at) * (index - first) // (stop - first)
            for at in (guess - STEP_ENTRIES // 2, guess + STEP_ENTRIES // 2, (low.at + high.at) // 2):
                if low.at < at < high.at:
                    known = await self.known_at(at)
                    if known.standing.next_index <= index:
                        low = known
                    else:
                        high = known
        for known in await self._judged(low, high.at):
            if known.standing.next_index > index:
                return low, known
            low = known
        raise error("LOG_GAP", f"message {index} is not where its topic says", index=index)

    async def position_of(self, index: int) -> Position:
        """Return the position of this message. Raises as `around`."""
        before, after = await self.around(index)
        if after.last is None or after.last.message_id is None:
            raise error("INTERNAL", f"an entry of {self.topic} without messages holds {index}")
        message_id = after.last.message_id
        if message_id.batch_index >= 0:
            message_id = message_id._replace(batch_index=index - before.standing.next_index)
        return after.last._replace(message_id=message_id, index=index)

    async def first_at(self, publish_time_ms: int) -> int:
        """Return the index of the first message published at that time or later; the next index if there is no such
        message.

        The result is exact only if publish times never fall. Publish times may fall if two owners use two clocks.
        """
        low, high = self._first - 1, len(self.ledgers)
        while high - low > 1:
            middle = (low + high) // 2
            entry = await self._entry(middle)
            if entry is not None and _time_ms(entry) >= publish_time_ms:
                high = middle
            else:
                low = middle
        # Rows of a batch that began before are as old as its first one.
        for first in range(high, len(self.ledgers), STEP_ENTRIES):
            for entry in await self._entries(first, first + STEP_ENTRIES - 1):
                if begins_record(entry.message):
                    return (await self.known_at(self._at(entry) - 1)).standing.next_index
        return (await self.known_at(len(self.ledgers) - 1)).standing.next_index

    async def _by_its_marker(self, at: int) -> Known | None:
        """Return the state after this entry, if the entry and its marker prove it."""
        entry = await self._entry(at)
        place = entry and _place(entry)
        if entry is None or place is None or not 0 < place.number <= at:
            return None
        marker = await self._entry(at - place.number)
        of_marker = marker and _place(marker)
        if of_marker is None or of_marker[:2] != (place.owner, 0) or self._is_of_another(place):
            return None
        return _after_valid(entry, place, at)

    def _is_of_another(self, place: EntryPlace) -> bool:
        return place.owner.incarnation != self.incarnation

    async def _after(self, known: Known, at: int) -> Known:
        """Return the state after this entry, starting from a known state before it."""
        while known.at < at:
            found = await self._directly(known, at)
            if found is not None:
                return found
            entry, count = await self._entry(at), at - known.at
            if count <= STEP_ENTRIES:
                return (await self._judged(known, at))[-1]
            place = entry and _place(entry)
            between = known.at + count // 2
            if place and place.owner.term > known.standing.owner.term and place.number < count - 1:
                # The owner's marker, and the entries before it.
                between = max(at - place.number - 1, known.at + 1)
            known = await self._after(known, between)
        return known

    async def _directly(self, known: Known, at: int) -> Known | None:
        """Return the state after this entry, if entries of one owner fill the whole range from the known entry to this
        entry."""
        entry = await self._entry(at)
        place = entry and _place(entry)
        owner, number, index, has_hole = known.standing
        if entry is None or place is None or has_hole or place.owner != owner:
            return None
        if place.number - number + 1 != at - known.at:
            return None
        found = _after_valid(entry, place, at)
        is_last = found.last is None and found.standing.next_index == index
        return found._replace(last=known.last) if is_last else found

    async def _judged(self, known: Known, last: int) -> list[Known]:
        """Return the states after each valid entry up to this one, and after the last entry."""
        # Each entry's number among all those left: then nothing is between two of them, even over the end of a ledger.
        terms, found = Terms(known.standing, MessageId(0, known.at)), list[Known]()
        for entry in await self._entries(known.at + 1, last):
            at = self._at(entry)
            verdict = terms.judge(entry.message, MessageId(0, at))
            if verdict is TermVerdict.EARLIER:
                check_earlier(entry)
            if verdict is TermVerdict.VALID:
                known = Known(at, terms.standing, last_of(entry, terms.standing) or known.last)
                found.append(known)
        return [*found, known._replace(at=last, standing=terms.standing)]

    def _at(self, entry: PulsarEntry) -> int:
        at = self.ledgers.ordinal(entry.message_id)
        if at is None:
            raise error("INTERNAL", f"an entry at {entry.message_id} is in no ledger")
        return at

    async def _entry(self, at: int) -> PulsarEntry | None:
        """Return one entry; None if Pulsar returns none, because it is not for readers."""
        if at not in self._looked_at:
            found = await self._entries(at, at)
            self._looked_at[at] = found[0] if found else None
        return self._looked_at[at]

    async def _entries(self, first: int, last: int) -> list[PulsarEntry]:
        last = min(last, len(self.ledgers) - 1)
        return await self._read(self.ledgers.message_id(first), self.ledgers.message_id(last))


def trimmed(topic: str, index: int, first_index: int) -> SeqdedupeError:
    """Return the error for a removed message. The topic now begins with a later message."""
    return error(
        "POSITION_TRIMMED", f"{topic} begins with index {first_index}: {index} is gone", first_index=first_index
    )


def _place(entry: PulsarEntry) -> EntryPlace | None:
    return EntryPlace.parse(entry.message.properties.get(ENTRY, ""))


def _time_ms(entry: PulsarEntry) -> int:
    """Return the publish time, according to its record."""
    message = entry.message
    return (KIND in message.properties and message.event_time_ms) or entry.publish_time_ms


def _after_valid(entry: PulsarEntry, place: EntryPlace, at: int) -> Known:
    terms = Terms(TermStanding(*place[:3]))
    terms.judge(entry.message, entry.message_id)
    return Known(at, terms.standing, last_of(entry, terms.standing))


def last_of(entry: PulsarEntry, after: TermStanding) -> Position | None:
    """Return the position of the last message of a valid entry; None if the entry has no message. `standing` is the
    state after the entry."""
    message, (ledger_id, entry_id, _) = entry.message, entry.message_id
    kind = message.properties.get(KIND)
    if kind not in (None, BATCH):
        return None
    row = int(message.properties[ROWS]) - 1 if kind == BATCH else -1
    owner = after.owner
    return Position(owner.incarnation, MessageId(ledger_id, entry_id, row), after.next_index - 1, owner.ownership)
