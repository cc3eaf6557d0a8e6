"""What an operator may set per topic."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """A topic's policy. It changes as a whole, between two frames."""

    deduplication_enabled: bool = True
    """False: rows that would be DUP or UNKNOWN are NOT_DUP. Sessions, links, failures and numbers stay as they are."""
