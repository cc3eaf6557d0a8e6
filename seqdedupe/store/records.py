"""Keys and the form of every value in the store. `docs/formats-store.md` draws them.

A value is sealed: CRC32C of the key and of all that follows it, version, body. So a damaged record, or one
that stands under another's key, is never read as a good one.
"""

import struct

import google_crc32c

from seqdedupe.errors import SeqdedupeError, error

FORMAT_VERSION = 5
"""Of the store as a whole and of every record in it."""

LAST_INCARNATION = b"I"
"""The key of the last incarnation that a topic was written with."""

INSTANCE_NAME = b"A"
"""The key of the sidecar's name in a cluster that holds its logs."""

LAST_OPENING = b"O"
"""The key of the number of its last opening of a topic there."""

BELIEVED_TIME = b"C"
"""The key of the time that the sidecar's clock was last believed to be past, in ms since 1970."""

NAMESPACES = (b"N", b"O")
"""The keys of namespaces' policies, from the first to before the second."""

# Parts of a topic's snapshot.
HEADER = b"H"
NAMES = b"N"
PAGE = b"P"
DELTA = b"D"
WINDOW = b"W"
IDS = b"I"
RUN = b"R"
IMPORTED = b"X"
"""After all others in the order of the keys: what makes a snapshot anew leaves it alone."""

MAX_NUMBER = 2**64 - 1

_TOPIC = struct.Struct(">cQ")
_PART = struct.Struct(">cQcQ")
_SEAL = struct.Struct("<IB")


def topic_key(incarnation: int) -> bytes:
    """Where the record of a topic is."""
    return _TOPIC.pack(b"T", incarnation)


def namespace_key(namespace: str) -> bytes:
    """Where a namespace's policy is."""
    return NAMESPACES[0] + namespace.encode()


def part_key(incarnation: int, part: bytes, number: int) -> bytes:
    """Where a part of a snapshot is: header and window (0), names and pages by producer number, deltas by theirs, IDs
    by the index of the first, runs, imported ones too, by their number and what it is of it."""
    return _PART.pack(b"S", incarnation, part, number)


def part_number(key: bytes) -> int:
    """The last element of a `part_key`."""
    return int.from_bytes(key[-8:], "big")


def snapshot_range(incarnation: int) -> tuple[bytes, bytes]:
    """The keys of a topic's whole snapshot, from the first to before the second."""
    return _TOPIC.pack(b"S", incarnation), _TOPIC.pack(b"S", incarnation + 1)


def seal(key: bytes, body: bytes) -> bytes:
    """The value of a record."""
    checked = bytes((FORMAT_VERSION,)) + body
    crc: int = google_crc32c.extend(google_crc32c.value(key), checked)
    return crc.to_bytes(4, "little") + checked


def incarnation_of(key: bytes) -> int | None:
    """The incarnation of the topic that a record is of; None if it is none's."""
    return int.from_bytes(key[1 : _TOPIC.size], "big") if key[:1] in (b"T", b"S") else None


def unseal(key: bytes, value: bytes) -> bytes:
    """The body of a sealed value. Raises STORE_DAMAGED, NEWER_FORMAT, OLDER_FORMAT."""
    if len(value) < _SEAL.size:
        raise damaged(key, f"it is {len(value)} bytes long")
    crc, version = _SEAL.unpack_from(value)
    if google_crc32c.extend(google_crc32c.value(key), value[4:]) != crc:
        raise damaged(key, "its checksum is wrong")
    if version != FORMAT_VERSION:
        raise other_format(f"the record {key.hex()}", version)
    return value[_SEAL.size :]


def damaged(key: bytes, what: str) -> SeqdedupeError:
    """The error of a record that cannot be right."""
    return error("STORE_DAMAGED", f"the store's record {key.hex()} is damaged: {what}")


_HINT_OLDER = (
    "Start the version that wrote it. Or move the store folder away and start once with --rebuild-store, which makes "
    "its records anew from the logs, if those can be read; what the store alone has is lost then: policies of "
    "namespaces, and topics whose log is a broker's own."
)


def other_format(what: str, version: int, known_version: int = FORMAT_VERSION) -> SeqdedupeError:
    """The error of something of another format version than this code reads."""
    is_newer = version > known_version
    return error(
        "NEWER_FORMAT" if is_newer else "OLDER_FORMAT",
        f"{what} has format version {version}, read is {known_version}",
        hint=None if is_newer else _HINT_OLDER,
        version=version,
        known_version=known_version,
    )
