"""What an entry that a sidecar wrote into a Pulsar topic says of itself: properties, which any client can read.

`docs/internals/formats-pulsar.md` lists them.
"""

import re
from typing import NamedTuple

from seqdedupe.errors import error

VERSION = 1
"""Of the format, as it stands in a topic without a schema."""
SCHEMA_VERSION = 2
"""As it stands in a topic with one: a control record is in a property, and its payload is Pulsar's null value."""

PREFIX = "seqdedupe."
"""Of our properties' names."""
ENTRY = PREFIX + "entry"
KIND = PREFIX + "kind"
ROWS = PREFIX + "rows"
TOKEN = PREFIX + "token"
INCARNATION = PREFIX + "incarnation"
FORMAT = PREFIX + "format"
MODE = PREFIX + "mode"
PARTITIONS = PREFIX + "partitions"
ADDRESS = PREFIX + "address"
MESSAGE = PREFIX + "message"
KEY_BASE64 = PREFIX + "key_base64"
EVENT_TIME_MS = PREFIX + "event_time_ms"
CONTROL_BASE64 = PREFIX + "control_base64"
FORMAT_VERSION = PREFIX + "version"
"""Of a topic: which version its owners write; 1 if it is omitted."""
USER = PREFIX + "user."
"""Before the name of a property of the producer's that begins with PREFIX itself."""

# What KIND says; without it the entry is one message.
MARKER = "marker"
CONTROL = "control"
BATCH = "batch"

_MAX_INT64 = 2**63 - 1

_PLACE = re.compile(r"(\d{1,9}):(\d{1,19}):(\d{1,19}):([0-9a-f]{16}):(\d{1,19}):(-1|\d{1,19})", re.ASCII)
_VERSION = re.compile(r"(\d{1,9}):", re.ASCII)


class EntryOwner(NamedTuple):
    """Under which marker an entry was written, in which incarnation of the topic."""

    incarnation: int
    term: int
    ownership: int
    """The first eight bytes of the marker's token, as an unsigned number."""

    def prefix(self, version: int = VERSION) -> str:
        """What ENTRY begins with: the version of the format, and these."""
        return f"{version}:{self.incarnation}:{self.term}:{self.ownership:016x}:"


class EntryPlace(NamedTuple):
    """What ENTRY says."""

    owner: EntryOwner
    number: int
    index: int  # type: ignore[assignment]  # a field, where a tuple has a method nobody needs here
    version: int = VERSION

    def __str__(self) -> str:
        return f"{self.owner.prefix(self.version)}{self.number}:{self.index}"

    @staticmethod
    def parse(text: str, topic: str = "the topic") -> "EntryPlace | None":
        """What `str()` gave; None if this is something else. Raises NEWER_FORMAT."""
        version = _VERSION.match(text)
        if version:
            check_version(int(version[1]), f"an entry of {topic}")
        parts = _PLACE.fullmatch(text)
        if not parts or int(parts[1]) < VERSION:
            return None
        owner = EntryOwner(int(parts[2]), int(parts[3]), int(parts[4], 16))
        if not owner.term or max(owner.incarnation, owner.term) > _MAX_INT64:
            return None
        return EntryPlace(owner, int(parts[5]), int(parts[6]), int(parts[1]))


def check_version(version: int, what: str) -> None:
    """Raises NEWER_FORMAT if this has a version that is not known here."""
    if version > SCHEMA_VERSION:
        raise error("NEWER_FORMAT", f"{what} has format version {version}; this one reads up to {SCHEMA_VERSION}")
