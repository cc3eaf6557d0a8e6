"""The findings about a data directory, as values and in the documented JSON."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from seqdedupe.log.embedded.inspection import Damage, TornEnd


class StoreState(Enum):
    """The state in which a store was found."""

    WHOLE = "whole"
    DAMAGED = "damaged"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Missing:
    """A range of sequence IDs of a producer with missing messages. Gaps are legal, so not every ID need be a
    message."""

    producer: str
    first_sequence_id: int
    last_sequence_id: int
    messages: int | None
    """The number of messages; None if it is unknown."""

    is_perhaps_trimmed: bool = False
    """Whether retention may have removed some or all: no earlier message of this producer is stored."""

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
    """One topic: what is whole, damaged, or missing, where store and log disagree, and what to do."""

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
    """The number of partitions of the topic that it is a partition of; 0 if it is none."""
    damage: list[Damage] = field(default_factory=list)
    torn_end: TornEnd | None = None
    missing: list[Missing] = field(default_factory=list)
    disagreements: list[str] = field(default_factory=list)
    """Why store and log do not belong together, or why one of them is missing."""
    imported_ids: int = 0
    """The number of imported deduplication IDs."""
    imported_why: str = ""
    """Why some of these are missing; empty if all are there."""
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
