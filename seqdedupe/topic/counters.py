"""What a topic counts for operators."""

from dataclasses import dataclass

from seqdedupe.core.rule import DUP
from seqdedupe.format.jit import Uint8s
from seqdedupe.topic.answers import Receipt
from seqdedupe.topic.control import Change, Purge, Reset


@dataclass(slots=True)
class Counters:
    """Since this process opened the topic: rows by verdict, bytes stored, frames refused, failures of the log,
    recoveries, messages that were read for these, and their time, producers reset or forgotten, and sessions that were
    resumed after that."""

    not_dup: int = 0
    dup: int = 0
    unknown: int = 0
    refused: int = 0
    stored_bytes: int = 0
    log_failures: int = 0
    recoveries: int = 0
    replayed: int = 0
    recovery_seconds: float = 0.0
    resets: int = 0
    purged: int = 0
    resumed_after_purge: int = 0

    def count(self, receipt: Receipt, new_rows: int) -> None:
        """A frame has its receipt; so many of its rows were stored."""
        if receipt.verdicts is None:
            self.not_dup += new_rows
        else:
            self.count_verdicts(receipt.verdicts, new_rows)

    def count_change(self, change: Change) -> None:
        """A control record is in the log."""
        if isinstance(change, Reset):
            self.resets += len(change.names)
        elif isinstance(change, Purge):
            self.purged += len(change.names)

    def count_verdicts(self, verdicts: Uint8s, new_rows: int) -> None:
        """These verdicts were given, so many of them NOT_DUP."""
        old_rows = len(verdicts) - new_rows
        dup = verdicts.tobytes().count(DUP) if old_rows else 0
        self.not_dup += new_rows
        self.dup += dup
        self.unknown += old_rows - dup
