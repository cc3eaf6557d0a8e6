"""Which window of deduplication IDs was imported into a topic. It is kept, and changes, with the topic's policy.

The log says which one it was, the store alone has the IDs.
"""

from dataclasses import dataclass
from typing import Any

from seqdedupe.exports import WINDOW_CHECKSUM_BYTES


@dataclass(frozen=True, slots=True)
class ImportedWindow:
    """Of which file, how many IDs, and when the last one was published, in milliseconds since 1970."""

    checksum: bytes
    ids: int
    last_time_ms: int

    def fill(self, message: Any) -> None:
        """Sets the fields of a `ControlImportedWindow`."""
        message.checksum, message.ids, message.last_publish_time_ms = self.checksum, self.ids, self.last_time_ms


def of(message: Any) -> ImportedWindow:
    """That of a message. Raises ValueError if it is none."""
    if len(message.checksum) != WINDOW_CHECKSUM_BYTES or min(message.ids, message.last_publish_time_ms) < 0:
        raise ValueError("it names an imported window that cannot be")
    return ImportedWindow(message.checksum, message.ids, message.last_publish_time_ms)
