"""What a sidecar that wrote an input says of it in properties, and which entries of its topic count for nobody.

docs/formats-pulsar.md has both.
"""

import re
from typing import NamedTuple

from seqdedupe.errors import error

PREFIX = "seqdedupe."
"""Of the names of a sidecar's properties."""
ENTRY = PREFIX + "entry"
KIND = PREFIX + "kind"
KEY_BASE64 = PREFIX + "key_base64"
EVENT_TIME_MS = PREFIX + "event_time_ms"
USER = PREFIX + "user."
"""Before the name of a property of a producer's that begins with PREFIX itself."""

MARKER, CONTROL, BATCH = "marker", "control", "batch"
"""What KIND says of an entry that is no message."""

FORMAT_VERSION = 1

_PLACE = re.compile(r"1:(\d{1,19}):(\d{1,19}):([0-9a-f]{16}):\d{1,19}:(-1|\d{1,19})", re.ASCII)
_VERSION = re.compile(r"(\d{1,9}):", re.ASCII)


class Place(NamedTuple):
    """What ENTRY says."""

    incarnation: int
    term: int
    ownership: str
    message_index: int


def place_of(entry: str, topic: str) -> Place | None:
    """What ENTRY says, which a message of this topic has; None if no sidecar has written it. Raises NEWER_FORMAT."""
    version = _VERSION.match(entry)
    if version and int(version[1]) > FORMAT_VERSION:
        raise error("NEWER_FORMAT", f"a message of {topic} has format version {version[1]}; this is {FORMAT_VERSION}")
    found = _PLACE.fullmatch(entry)
    return Place(int(found[1]), int(found[2]), found[3], int(found[4])) if found else None


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
        if last is None or place.incarnation != last.incarnation or place.term > last.term:
            self._last, self._since = place, at
            return False
        return (place.term, place.ownership) != (last.term, last.ownership) and at > self._since
