"""What an operator may set per topic."""

from dataclasses import dataclass
from enum import Enum


class OverlapPolicy(Enum):
    """What becomes of a range of a broker's log of which only the first IDs are persisted. Values as on the wire."""

    REJECT = 0
    """It is refused: retrying it never helps, its sender has to split it."""
    PULSAR = 1
    """Pulsar's answer: DUP, and the IDs that are new are lost."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A topic's policy. It changes as a whole, between two frames."""

    deduplication_enabled: bool = True
    """False: rows that would be DUP or UNKNOWN are NOT_DUP. Sessions, links, failures and numbers stay as they are."""
    overlap: OverlapPolicy = OverlapPolicy.REJECT
    """Only where the log is a broker's own."""
