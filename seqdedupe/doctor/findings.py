"""The findings about a data directory, as values and in the documented JSON.

`Tally` computes the findings from the records of a log: the resulting state (the producers' numbers, the policy, the
term), and the messages that must have been lost.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from seqdedupe import batch as batches
from seqdedupe.core.producers import Producers
from seqdedupe.core.recent import list_names
from seqdedupe.core.rule import DURABLE_EPOCH, PERSISTED, confirm_batch
from seqdedupe.format.headers import HEADER_BYTES
from seqdedupe.format.jit import Bytes, Int64s, Int64s2, Uint8s, kernel
from seqdedupe.format.layout import COLUMNS_END, LINKS, PRODUCERS, RECORD_START, ROWS, TERM, int64_column
from seqdedupe.limits import NO_SEQUENCE_ID
from seqdedupe.log.embedded.inspection import Damage, Intact, TornEnd
from seqdedupe.store.snapshots import Loaded
from seqdedupe.topic import control
from seqdedupe.topic.policy import Policy
from seqdedupe.topic.sessions import highest_term


class StoreState(Enum):
    """The state in which a store was found."""

    WHOLE = "whole"
    DAMAGED = "damaged"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Missing:
    """A range of sequence IDs of a producer with missing messages. Gaps are legal, so some of these IDs may never have
    had a message."""

    producer: str
    first_sequence_id: int
    last_sequence_id: int
    messages: int | None
    """The number of messages; None if it is unknown."""

    is_perhaps_trimmed: bool = False
    """Whether retention may have removed some or all of these messages. This is possible if no earlier message of the
    producer is stored."""

    def to_json(self) -> dict[str, Any]:
        return {
            "producer_name": self.producer,
            "first_sequence_id": self.first_sequence_id,
            "last_sequence_id": self.last_sequence_id,
            "messages": self.messages,
            "perhaps_trimmed": self.is_perhaps_trimmed,
        }


@dataclass(slots=True)
class TopicFindings:
    """The findings about one topic: whole, damaged and missing parts, disagreements of store and log, and remedies."""

    name: str
    incarnation: int
    log: str = "embedded"
    first_index: int = 0
    next_index: int = 0
    messages: int = 0
    """The number of readable messages."""
    producers: int = 0
    log_bytes: int = 0
    partitions: int = 0
    """If the topic is a partition: the number of partitions of its partitioned topic; otherwise 0."""
    damage: list[Damage] = field(default_factory=list)
    torn_end: TornEnd | None = None
    missing: list[Missing] = field(default_factory=list)
    disagreements: list[str] = field(default_factory=list)
    """Why store and log do not belong together, or why one of them is missing."""
    imported_ids: int = 0
    """The number of imported deduplication IDs."""
    imported_why: str = ""
    """The reason why some imported IDs are missing; empty if no ID is missing."""
    notes: list[str] = field(default_factory=list)
    """Findings that are no damage."""
    cures: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return self.has_whole_log and not self.imported_why

    @property
    def has_whole_log(self) -> bool:
        """Whether log and snapshot are whole."""
        return not self.damage and not self.disagreements

    def to_json(self) -> dict[str, Any]:
        """Return the documented form: keep it stable."""
        return {
            "name": self.name,
            "incarnation": self.incarnation,
            "log": self.log,
            "whole": self.is_whole,
            "messages": self.messages,
            "first_index": self.first_index,
            "next_index": self.next_index,
            "producers": self.producers,
            "log_bytes": self.log_bytes,
            "partitions": self.partitions,
            "damage": [_damage_json(damage) for damage in self.damage],
            "torn_end": None if self.torn_end is None else _torn_json(self.torn_end),
            "missing": [missing.to_json() for missing in self.missing],
            "disagreements": self.disagreements,
            "imported_ids": self.imported_ids,
            "imported_why": self.imported_why or None,
            "notes": self.notes,
            "cures": self.cures,
        }


@dataclass(slots=True)
class Findings:
    """The findings about a data directory."""

    directory: str
    store: StoreState
    store_why: str = ""
    journal_why: str = ""
    """The missing or damaged parts of the logs' journal."""
    topics: list[TopicFindings] = field(default_factory=list)
    cures: list[str] = field(default_factory=list)
    namespace_policies: list[tuple[str, bytes]] = field(default_factory=list)
    """By name, in the bytes of control records. Only the store has them."""

    @property
    def is_whole(self) -> bool:
        return self.store is StoreState.WHOLE and not self.journal_why and all(topic.is_whole for topic in self.topics)

    def to_json(self) -> dict[str, Any]:
        """Return the documented form: keep it stable."""
        return {
            "directory": self.directory,
            "whole": self.is_whole,
            "store": self.store.value,
            "store_why": self.store_why or None,
            "journal_why": self.journal_why or None,
            "topics": [topic.to_json() for topic in self.topics],
            "cures": self.cures,
        }


def _damage_json(damage: Damage) -> dict[str, Any]:
    return {
        "file": str(damage.file),
        "offset": damage.offset,
        "what": damage.what,
        "first_index": damage.first_index,
        "next_index": damage.next_index,
        "messages": None if damage.next_index is None else damage.next_index - damage.first_index,
    }


def _torn_json(torn: TornEnd) -> dict[str, Any]:
    return {"file": str(torn.file), "offset": torn.offset, "bytes": torn.size_bytes, "records": torn.records}


# -- The messages missing where a log was damaged: a later batch names the ID that its producer had sent before.
#
# In an undamaged log, a link is never above the producer's highest ID that the log has confirmed before the link.

HOLE_VALUES = 3
"""The values of a hole: the producer row, the highest known ID before the hole (-1: none), and the link, which is the
highest ID in the hole."""

NO_HOLES = np.zeros((0, HOLE_VALUES), np.int64)


@kernel()
def confirm_all(
    raw: Bytes,
    table: Int64s2,
    producer_rows: Int64s,
    first_name: Int64s,
    numbers: Int64s2,
    dirty: Uint8s,
    holes: Int64s2,
) -> int:
    """Call `rule.confirm_batch` for every batch among scanned records. `producer_rows` are the rows of the listed
    names.

    Write a link to `holes` if the link is above the producer's confirmed ID at that point, and `holes` has room. Return
    the number of links written.
    """
    found = 0
    for k in range(table.shape[0]):
        places = table[k]
        if places[ROWS] == 0 or places[PRODUCERS] == 0:
            continue
        rows_of_batch = producer_rows[first_name[k] : first_name[k] + places[PRODUCERS]]
        if found < holes.shape[0]:
            links = int64_column(raw, places, LINKS)
            for p in range(places[PRODUCERS]):
                known = numbers[rows_of_batch[p], PERSISTED]
                if links[p] > known and found < holes.shape[0]:
                    holes[found, 0] = rows_of_batch[p]
                    holes[found, 1] = known
                    holes[found, 2] = links[p]
                    found += 1
        confirm_batch(raw, places, rows_of_batch, numbers, dirty)
    return found


class Tally:
    """Receives the records of a log in order, and merges the records in the same way as recovery. `place` is the
    location of the log, as text for people."""

    def __init__(self, place: str) -> None:
        self._place = place
        self.producers = Producers()
        self.policy: Policy | None = None
        self.term = 0
        """The highest term in any record."""
        self.messages = 0
        self.missing: list[Missing] = []
        self._has_damage = False
        self._is_trimmed = False
        self._import_parts = control.ImportParts()
        self.reset_at: dict[int, int] = {}
        """By producer number, the index before which the last reset or purge is."""

    def begin(self, first_index: int) -> None:
        """Begin a log whose first message should have this index."""
        self._is_trimmed = first_index > 0

    def add(self, part: Intact) -> None:
        """Add whole records. Raises NEWER_FORMAT for an unknown control record, LOG_DAMAGED."""
        raw, table = part.raw, part.table
        self.messages += int(table[:, ROWS].sum())
        self.term = max(self.term, int(table[:, TERM].max()))
        for batches_of_run, changes in control.runs(raw, table, self._place):
            if len(batches_of_run):
                self._confirm(raw, batches_of_run)
            for change, term, index in changes:
                self.term = max(self.term, term)
                self._apply(change, index)

    def _apply(self, change: control.Change, index: int) -> None:
        if isinstance(change, Policy):
            self.policy = change
            return
        if isinstance(change, control.CursorChange):
            self.policy = change.applied_to(self.policy or Policy())
            return
        if isinstance(change, control.Reset | control.Purge):
            # A snapshot may know a name that the log only resets or purges.
            self.reset_at |= dict.fromkeys(self.producers.add_all(change.names).tolist(), index)
        control.apply(change, self._import_parts, self.producers, index)
        if isinstance(change, control.ProducerSessions | control.Reset):
            self.term = max(self.term, highest_term(change.epochs))

    def add_damage(self, damage: Damage) -> None:
        """Add unreadable records. If the columns of such a record are intact, merge the columns: the record had been
        stored."""
        self._has_damage = True
        if damage.record is None:
            return
        raw, places = damage.record
        self._confirm(raw, places.reshape(1, -1))
        columns = batches.decode(raw[places[RECORD_START] + HEADER_BYTES : places[COLUMNS_END]])
        for p, name in enumerate(columns.names()):
            ids = (
                columns.sequence_ids[columns.producer_indexes == p] if len(columns.epochs) > 1 else columns.sequence_ids
            )
            self.missing.append(Missing(name, int(ids[0]), int(ids[-1]), len(ids)))

    def _confirm(self, raw: bytes, table: Int64s) -> None:
        """Merge batches. After damage, a link above the known ID shows that messages up to the linked ID were lost."""
        view = np.frombuffer(raw, np.uint8)
        spans, first_name = list_names(view, table, len(table))
        rows = self.producers.add_listed(view, spans)
        holes = NO_HOLES
        if self._has_damage:
            holes = np.zeros((int(table[:, PRODUCERS].sum()), HOLE_VALUES), np.int64)
        numbers, dirty = self.producers.numbers, self.producers.dirty
        found = confirm_all(view, table, rows, first_name, numbers, dirty, holes)
        for number, known, link in holes[:found].tolist():
            self._lose(number, known, link)

    def add_snapshot(self, loaded: Loaded) -> None:
        """Merge the store's snapshot. If the snapshot has a higher ID of a producer than the log, the log has lost
        messages."""
        self.term = max(self.term, loaded.term)
        if self.policy is None and loaded.policy:
            self.policy = control.decode_policy(loaded.policy)
        self.producers.has_forgotten |= loaded.has_forgotten
        numbers, known_there = self.known_to(loaded)
        persisted, epochs = loaded.persisted[known_there], loaded.epochs[known_there]
        known = self.producers.numbers[numbers, PERSISTED]
        for k in np.flatnonzero(persisted > known):
            self._lose(int(numbers[k]), int(known[k]), int(persisted[k]))
        self.producers.confirm_sessions(numbers, epochs, persisted, loaded.next_index)
        self.term = max(self.term, highest_term(epochs))

    def known_to(self, loaded: Loaded) -> tuple[Int64s, Int64s]:
        """Return the numbers, in this tally and in the snapshot, of the producers whose state the snapshot contains.

        Producers that were reset or forgotten after the snapshot are omitted: only the log has their present state.
        """
        numbers = self.producers.add_listed(*loaded.names.listed())
        there = np.flatnonzero(
            np.array([self.reset_at.get(number, -1) < loaded.next_index for number in numbers.tolist()], bool)
        )
        return numbers[there], there

    def epochs(self) -> Int64s:
        """Return the epochs by producer number."""
        return self.producers.numbers[: len(self.producers), DURABLE_EPOCH]

    def persisted(self) -> Int64s:
        """Return the persisted IDs by producer number."""
        return self.producers.numbers[: len(self.producers), PERSISTED]

    def _lose(self, number: int, known: int, last: int) -> None:
        name = self.producers.names_from(number, 1)[0]
        trimmed = self._is_trimmed and known == NO_SEQUENCE_ID
        self.missing.append(Missing(_text(name), known + 1, last, None, trimmed))


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")
