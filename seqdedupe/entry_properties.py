"""The properties of an entry that a sidecar wrote into a Pulsar topic. Any client can read them.

`docs/internals/formats-pulsar.md` lists them.
"""

import re
from typing import NamedTuple

from seqdedupe.errors import error

VERSION = 1
"""The format's version in a topic without a schema."""
SCHEMA_VERSION = 2
"""The format's version in a topic with a schema. Such a topic has control records in a property, and the entry's
payload is Pulsar's null value."""

PREFIX = "seqdedupe."
"""The prefix of our properties' names."""
ENTRY = PREFIX + "entry"
KIND = PREFIX + "kind"
ROWS = PREFIX + "rows"
TOKEN = PREFIX + "token"
BEGUN = PREFIX + "begun"
"""A property of a topic: the topic's incarnation. It is set after the first owner's marker was stored."""
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
"""A property of a topic: the format version that the topic's owners write. If the property is missing, the version is
1."""
USER = PREFIX + "user."
"""The prefix for properties whose producer-defined name itself begins with PREFIX."""

DELIVER_AT = "pulsar.deliver_at_time"
"""A property of a message: the time at which Pulsar delivers the message to shared subscriptions, in milliseconds since
1970. In the formats `plain` and `native`, the entry also contains this time."""
ORDERING_KEY = "pulsar.ordering_key"
"""A property of a message: the ordering key, in base64. In the format `native`, the ordering key itself replaces this
property if the property is the message's last one."""
SCHEMA_VERSION_OF = "pulsar.schema_version"
"""A property of a message: the version of the producer's schema, in hexadecimal. In the format `native`, the entry also
contains this version."""
_MOST_DIGITS = 18
MAX_VERSION_BYTES = 16
"""The maximum size of a schema version in bytes. The versions of Pulsar's registry have 8 bytes."""

# The values of KIND. Without it, the entry is one message.
MARKER = "marker"
CONTROL = "control"
BATCH = "batch"

_MAX_INT64 = 2**63 - 1

_PLACE = re.compile(r"(\d{1,9}):(\d{1,19}):(\d{1,19}):([0-9a-f]{16}):(\d{1,19}):(-1|\d{1,19})", re.ASCII)
_VERSION = re.compile(r"(\d{1,9}):", re.ASCII)


def deliver_at(value: str) -> int:
    """Return the time in a property DELIVER_AT; 0 if the property's value is not a time."""
    return int(value) if value.isascii() and value.isdecimal() and len(value) <= _MOST_DIGITS else 0


def schema_version(value: str) -> bytes:
    """Return the version in a property SCHEMA_VERSION_OF; empty if the property's value is not a version."""
    if len(value) > 2 * MAX_VERSION_BYTES:
        return b""
    try:
        return bytes.fromhex(value)
    except ValueError:
        return b""


def of_entry(deliver_at_time: int, schema_version: bytes) -> list[tuple[bytes, bytes]]:
    """Return the properties that each message of an entry with these fields receives. A field that is 0 or empty does
    not exist."""
    fields = [
        (DELIVER_AT.encode(), b"%d" % deliver_at_time if deliver_at_time else b""),
        (SCHEMA_VERSION_OF.encode(), schema_version.hex().encode()),
    ]
    return [(name, value) for name, value in fields if value]


class EntryOwner(NamedTuple):
    """The marker under which an entry was written, and the incarnation of the topic."""

    incarnation: int
    term: int
    ownership: int
    """The first eight bytes of the marker's token, as an unsigned number."""

    def prefix(self, version: int = VERSION) -> str:
        """Return the beginning of ENTRY: the version of the format, and these values."""
        return f"{version}:{self.incarnation}:{self.term}:{self.ownership:016x}:"


class EntryPlace(NamedTuple):
    """The values of ENTRY."""

    owner: EntryOwner
    number: int
    index: int  # type: ignore[assignment]  # a field, where a tuple has a method that nobody needs here
    version: int = VERSION

    def __str__(self) -> str:
        return f"{self.owner.prefix(self.version)}{self.number}:{self.index}"

    @staticmethod
    def parse(text: str, topic: str = "the topic") -> "EntryPlace | None":
        """Parse the text that `str()` returns for a place. Return None for any other text. Raises NEWER_FORMAT."""
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
    """Raise NEWER_FORMAT for a version that is not known here."""
    if version > SCHEMA_VERSION:
        raise error("NEWER_FORMAT", f"{what} has format version {version}; this one reads up to {SCHEMA_VERSION}")
