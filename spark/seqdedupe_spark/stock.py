"""Positions in topics that no sidecar writes. Messages there have no indexes, so a position is a place in Pulsar's log.

The incarnation of such a position is STOCK. Its index does not count messages, but orders places. `ledger << 31 |
entry` is the place after the last message of an entry. An entry may contain several messages. If some of them are still
to be read, the index is the index of the previous entry, and the message ID is the last message read.
`docs/guides/spark-pulsar.md` describes these positions.
"""

from dataclasses import dataclass, field

from seqdedupe.batch import NO_INT64S, Binary, Int64s
from seqdedupe.client.message import StoredBatch
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.pulsar.ledgers import Ledgers
from seqdedupe.message_id import MessageId, Position

STOCK = 0
"""The incarnation in these positions: no topic of a sidecar has it."""

_ENTRY_BITS = 31
_NO_ENTRY = (1 << _ENTRY_BITS) - 1
"""The entry in the place before a ledger's first entry: no ledger has this number of entries."""


def index_of(entry: MessageId) -> int:
    """Return the index of the position after this entry. Raises INVALID_POSITION for an entry that Pulsar cannot
    have."""
    if entry.ledger_id >= 1 << 32 or entry.entry_id >= _NO_ENTRY:
        hint = "Give the message ID of a message that the topic has."
        raise error("INVALID_POSITION", f"{entry} is too large for a position", hint=hint)
    return entry.ledger_id << _ENTRY_BITS | entry.entry_id


def after(message_id: MessageId) -> Position:
    """Return the position after this message. If the message ID does not select a message of its entry, return the
    position after all messages of the entry."""
    is_whole = message_id.batch_index < 0
    return Position(STOCK, message_id, index_of(message_id) if is_whole else index_of(message_id) - 1)


def before(entry: MessageId) -> Position:
    """Return the position before this entry, which need not exist."""
    return Position(STOCK, None, index_of(entry) - 1)


def parse(text: str) -> Position:
    """Return the position. Unlike `Position.parse`, this accepts the ID of one message of an entry. Raises
    INVALID_POSITION."""
    if text.count(":") == 2 and "@" not in text:
        return after(MessageId.parse(text))
    return Position.parse(text)


def given(position: Position) -> Position:
    """Convert a position that a user has entered, which may be a message ID, to a position in such a topic. Raises
    INVALID_POSITION."""
    message_id = position.message_id
    if message_id is None:
        return position
    is_message_id = message_id[:2] == (position.incarnation, position.index)
    if not is_message_id and position.incarnation != STOCK:
        return position
    found = after(message_id)
    if not is_message_id and position != found:
        raise error("INVALID_POSITION", f"{position} is not a position: its parts do not fit together")
    return found


def entry_before(position: Position) -> MessageId:
    """Return the last entry that was read completely; entry -1 before the first entry of a ledger."""
    ledger_id, entry_id = position.index >> _ENTRY_BITS, position.index & _NO_ENTRY
    return MessageId(ledger_id + 1, -1) if entry_id == _NO_ENTRY else MessageId(ledger_id, entry_id)


def rows_read(position: Position) -> int:
    """Return the number of messages that were read of the entry after `entry_before`."""
    message_id = position.message_id
    return 0 if message_id is None else message_id.batch_index + 1


@dataclass(slots=True)
class StockBatch(StoredBatch):
    """Messages of one publish time, in which the sequence IDs of each producer rise. They have no indexes."""

    end: Position = field(default_factory=lambda: Position.start(STOCK))
    """The position after the last message."""
    key_bytes: Binary = field(default_factory=Binary)
    """The keys as the producers set them. In `batch`, keys of bytes are in base64, and empty keys are omitted."""
    ordering_keys: Binary = field(default_factory=Binary)
    schema_versions: Int64s = field(default_factory=lambda: NO_INT64S)
    """-1 if there is none."""

    def position(self, row: int) -> Position:
        return self.end if row == len(self) - 1 else after(self.message_id(row))


@dataclass(frozen=True)
class StockEnds:
    """The stored entries of a topic that no sidecar writes, at one moment."""

    ledgers: Ledgers
    first_ledger: int
    """The oldest ledger that still exists; it may have no entry."""
    let_go: MessageId | None
    """The last entry that the job's subscription no longer needs; entry -1 before a ledger's first entry. None: there
    is no subscription."""
    readable: int
    """The number of entries that readers receive. Entries after them belong to a transaction that has not ended."""

    @property
    def first_index(self) -> int:
        """The index of the first entry left."""
        return index_of(MessageId(self.first_ledger, 0))

    @property
    def last(self) -> Position:
        """The position after the last entry that a reader receives."""
        if not self.readable:
            return before(MessageId(self.first_ledger, 0))
        return after(self.ledgers.message_id(self.readable - 1))

    def entries_up_to(self, position: Position) -> int | None:
        """Return the number of stored entries before a position; None if some entries after the position may be lost.

        Pulsar removes only the oldest ledgers. So if the entry before the position still exists, all later entries
        exist.
        """
        entry = entry_before(position)
        ordinal = self.ledgers.ordinal(entry)
        if ordinal is not None:
            return ordinal + 1
        if entry.entry_id < 0 and self._kept_from(entry.ledger_id):
            return self.ledgers.entries_before(entry.ledger_id)
        return None

    def _kept_from(self, ledger_id: int) -> bool:
        """Return whether all entries from the beginning of this ledger on still exist. The ledger itself is empty or
        was removed."""
        if ledger_id >= self.first_ledger:
            return True
        # Pulsar removes a ledger without entries when the topic is loaded again. A subscription that has released no
        # entry shows this.
        let_go = self.let_go
        return let_go is not None and let_go.entry_id < 0 and let_go.ledger_id <= self.first_ledger

    def count(self, start: Position, end: Position) -> int:
        """Return the number of entries to read between two positions."""
        return max((self.entries_up_to(end) or 0) - (self.entries_up_to(start) or 0), 0)

    def advanced(self, start: Position, entries: int) -> Position:
        """Return the position that is this number of entries after `start`. The caller ensures that these entries
        exist."""
        return after(self.ledgers.message_id((self.entries_up_to(start) or 0) + entries - 1))

    def entries_in(self, start: Position, size_bytes: int) -> int:
        """Return the number of entries after a position that have about this size; at least one."""
        first = self.entries_up_to(start) or 0
        return max(self.ledgers.after(first, size_bytes) - first, 1)


def trimmed(topic: str, first_missing: str) -> SeqdedupeError:
    """Return the error for messages after a position that are lost, or may be lost."""
    return error("POSITION_TRIMMED", f"{topic} has lost its messages {first_missing}")
