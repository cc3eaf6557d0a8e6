"""The rule of terms: it decides which entries of a Pulsar topic are valid entries of sidecars, no matter who else
writes to the topic.

Pulsar's exclusion of other writers can admit two writers at the same time (both get receipts), and its deduplication
can be disabled. So the rule relies on neither. All readers that read the topic in order reach the same verdicts from
the entries alone. An owner confirms only entries that every such reading is certain to find.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from seqdedupe.entry_properties import (
    BATCH,
    CONTROL,
    ENTRY,
    KIND,
    MARKER,
    ROWS,
    SCHEMA_VERSION,
    VERSION,
    EntryOwner,
    EntryPlace,
)
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.figures import counted
from seqdedupe.log.pulsar.entries import INVALID, Marker, PulsarMessage, damaged, read_marker
from seqdedupe.message_id import NOWHERE, MessageId

REMEMBERED_ENTRIES = 16_384
"""A repeat is compared with this number of the newest entries. A client resends only entries in flight, and an owner
never has more entries in flight than this."""


_NOTHING = "\0"
"""No place begins with this."""


class TermVerdict(Enum):
    """The verdict on an entry."""

    VALID = "valid"
    """Written by a sidecar and valid: a message, a batch, a control record, or a marker that takes ownership."""

    VOID = "void"
    """Written by an owner that was not the last to take ownership, or a marker whose term is not higher. All readers
    ignore the entry."""

    REPEAT = "repeat"
    """Identical to an earlier valid entry, because it was sent twice."""

    EARLIER = "earlier"
    """Not written by a sidecar, and before the first marker: from the time before the topic had an owner."""

    FOREIGN = "foreign"
    """Not written by a sidecar, and after the first marker."""


class TermStanding(NamedTuple):
    """The point up to which a topic was read, with the state that is needed to continue reading."""

    owner: EntryOwner
    """The last owner that took ownership. Before the first marker, this is an owner with term 0."""
    next_number: int = 0
    """The number of the owner's next entry."""
    next_index: int = 0
    has_hole: bool = False
    """Whether the owner has left a hole after its last valid entry. If so, its later entries are void."""

    @staticmethod
    def start(incarnation: int) -> "TermStanding":
        """Return the standing before all entries."""
        return TermStanding(EntryOwner(incarnation, 0, 0))


@dataclass
class Counts:
    """The numbers of invalid entries that were read."""

    void: int = 0
    repeats: int = 0
    earlier: int = 0
    foreign: int = 0
    holes: int = 0
    """Holes left by owners; an owner's entries after its hole are void."""

    def add(self, verdict: TermVerdict) -> None:
        """Count one more entry."""
        match verdict:
            case TermVerdict.VOID:
                self.void += 1
            case TermVerdict.REPEAT:
                self.repeats += 1
            case TermVerdict.EARLIER:
                self.earlier += 1
            case TermVerdict.FOREIGN:
                self.foreign += 1


class Border(NamedTuple):
    """Two consecutive entries as they were read. Other entries may be between them."""

    before: MessageId
    after: MessageId


class Terms:
    """Judges the entries of a topic. The caller passes all entries, in the topic's order.

    An owner numbers its entries from 0, the number of its marker. Messages have indexes without gaps over all owners.
    So a missing entry is noticed. If Pulsar refuses an entry and stores later entries, there is a *hole*: a number is
    missing although every position was read. The owner confirms nothing after a hole, so its later entries are void. If
    a position was not read, a missing number is LOG_GAP.

    After an error, `standing` is the state after the last valid entry. The caller must stop, with one exception: after
    LOG_GAP the caller may pass the same entry again, once it has verified that no entry is missing and cleared
    `borders`.
    """

    def __init__(self, standing: TermStanding, after: MessageId = NOWHERE) -> None:
        """Begin after this standing. `after` is the place of the previous entry, if known."""
        self.counts = Counts()
        self.marker: Marker | None = None
        """The marker that last took ownership, if it was read here."""
        self.owner, self._next_number, self.next_index, self._has_hole = standing
        self._texts = _texts(self.owner) if self.owner.term else (_NOTHING,)
        self._unseen_below = self._next_number
        self._remembered: deque[int] = deque(maxlen=REMEMBERED_ENTRIES)
        self.borders: list[Border] = []
        """The borders since the last valid entry."""
        self._last = after

    @property
    def standing(self) -> TermStanding:
        """The state that is needed to read on after the last entry."""
        return TermStanding(self.owner, self._next_number, self.next_index, self._has_hole)

    def judge(self, message: PulsarMessage, message_id: MessageId) -> TermVerdict:
        """Return the verdict on the next entry, and count it.

        Raises `DamagedError`: LOG_GAP if entries before this entry are missing, LOG_DAMAGED if this entry cannot be at
        this place, NEWER_FORMAT.
        """
        if message_id != self._last:
            if not _follows(self._last, message_id):
                self.borders.append(Border(self._last, message_id))
            self._last = message_id
        verdict = self._judge(message)
        self.counts.add(verdict)
        if verdict in (TermVerdict.VALID, TermVerdict.EARLIER):
            # Before the first marker nothing can be missing.
            self.borders.clear()
        return verdict

    def _judge(self, message: PulsarMessage) -> TermVerdict:
        properties = message.properties
        text = properties.get(ENTRY, "")
        if not text.startswith(self._texts):
            return self._of_another(message, text)
        try:
            number, index = map(int, text[len(self._texts[0]) :].split(":"))
            kind = properties.get(KIND)
            rows = 1 if kind is None else int(properties[ROWS]) if kind == BATCH else 0
        except (KeyError, ValueError) as e:
            raise damaged(f"an entry of term {self.owner.term} does not say what it should: {e}") from e
        if self._has_hole:
            return TermVerdict.VOID
        if number < self._next_number:
            return self._repeat(number, message)
        if number > self._next_number and not self.borders:
            self._has_hole = True
            self.counts.holes += 1
            return TermVerdict.VOID
        if number > self._next_number or index > self.next_index:
            raise gap(
                f"in term {self.owner.term} entry {self._next_number} with index {self.next_index} should be where "
                f"entry {number} with index {index} is",
                self.next_index,
            )
        if index < self.next_index or rows < 0 or (kind == BATCH and rows == 0) or kind == MARKER:
            raise damaged(f"entry {number} of term {self.owner.term} has index {index}, {self.next_index} is the next")
        if kind not in (None, BATCH, CONTROL):
            raise error(
                "NEWER_FORMAT", f"entry {number} of term {self.owner.term} is of a kind unknown here: {kind[:40]!r}"
            )
        self._remembered.append(_fingerprint(message))
        self._next_number += 1
        self.next_index += rows
        return TermVerdict.VALID

    def _of_another(self, message: PulsarMessage, text: str) -> TermVerdict:
        place = EntryPlace.parse(text)
        if place is None:
            if self.owner.term and INVALID in message.properties:
                raise damaged(message.properties[INVALID])
            return TermVerdict.FOREIGN if self.owner.term else TermVerdict.EARLIER
        owner = place.owner
        if owner.incarnation != self.owner.incarnation:
            if not self.owner.term:
                # A copy of a message, with all its properties, from another topic of sidecars.
                return TermVerdict.EARLIER
            raise damaged(f"an entry of incarnation {owner.incarnation} stands in that of {self.owner.incarnation}")
        if owner.term <= self.owner.term:
            return TermVerdict.VOID
        if message.properties.get(KIND) != MARKER:
            raise gap(f"the marker of term {owner.term} is missing", self.next_index)
        if place.number:
            raise damaged(f"the marker of term {owner.term} is not the first entry of its owner")
        if place.index > self.next_index:
            raise gap(
                f"the writer of the marker of term {owner.term} knew of {counted(place.index, 'message')}",
                self.next_index,
            )
        self.marker = read_marker(message, owner)
        self.owner, self._texts = owner, _texts(owner)
        self._next_number, self._unseen_below, self._has_hole = 1, 0, False
        self._remembered.append(_fingerprint(message))
        return TermVerdict.VALID

    def _repeat(self, number: int, message: PulsarMessage) -> TermVerdict:
        back = self._next_number - number
        if back <= len(self._remembered):
            if self._remembered[-back] != _fingerprint(message):
                raise damaged(
                    f"entry {number} of term {self.owner.term} stands there twice, and the two are not the same"
                )
        elif number >= self._unseen_below:
            raise damaged(
                f"entry {number} of term {self.owner.term} comes again after {counted(back, 'other')}: "
                "no sidecar sends that late"
            )
        return TermVerdict.REPEAT


class Receipts:
    """The rule by which an owner may confirm appends, from their receipts in order.

    A receipt proves that an entry was stored, but not that the entry is valid: another owner's marker may be before the
    entry. If the entry directly follows the last confirmed entry in the same ledger, nothing is between them. Then the
    receipt also proves that the entry is valid.
    """

    def __init__(self, confirmed: MessageId) -> None:
        """Begin after `confirmed`, the ID of the last entry that was read and is valid. At first, this is the owner's
        own marker."""
        self._confirmed = confirmed

    def confirms(self, receipt: MessageId) -> bool:
        """Return whether this receipt confirms its append, which directly follows the last confirmed append.

        A receipt does not confirm the append after a gap or in a new ledger. The caller must then read the topic up to
        that append, and call `was_read`.
        """
        last = self._confirmed
        if receipt != MessageId(last.ledger_id, last.entry_id + 1):
            return False
        self._confirmed = receipt
        return True

    def was_read(self, message_id: MessageId) -> None:
        """Record that the topic was read and judged up to the append after the last confirmed append. This append is
        valid and has this ID."""
        self._confirmed = message_id


def _texts(owner: EntryOwner) -> tuple[str, ...]:
    """Return the possible beginnings of the property ENTRY in an owner's entries, one for each version. All have the
    same length."""
    return tuple(owner.prefix(version) for version in range(VERSION, SCHEMA_VERSION + 1))


def _follows(before: MessageId, after: MessageId) -> bool:
    """Return whether no other entry can be between, except messages of the same batch."""
    return before.ledger_id == after.ledger_id and after.entry_id - before.entry_id <= 1


def _fingerprint(message: PulsarMessage) -> int:
    """Return a number that is the same for equal messages. Compare such numbers only within this process."""
    payload, properties, key, event_time_ms = message[:4]
    return hash((payload, frozenset(properties.items()), key, event_time_ms))


def gap(what: str, next_index: int) -> SeqdedupeError:
    """Return the error for entries that are missing where this index was the next."""
    return error("LOG_GAP", f"entries of the Pulsar topic are missing: {what}", index=next_index)
