"""How each record of the store is encoded: a topic's, and the parts of a snapshot: header, names, pages, deltas.

All numbers are little-endian; keys are not (see `records`). Decoders raise STORE_DAMAGED, NEWER_FORMAT and
OLDER_FORMAT.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.message_id import MessageId

# -- Keys and the form of every value in the store. `docs/internals/formats-store.md` draws them.
#
# A value is sealed: CRC32C of the key and of all that follows it, version, body. So a damaged record, or one that
# stands under another's key, is never read as a good one.

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


PAGE_PRODUCERS = 4096
"""Producers in a full page, and names at which a record of names is full."""

COLUMNS = 3
"""Of numbers of a producer: persisted, epoch, stated."""

NOT_STATED = -1
"""`stated` of a producer of which no snapshot said anything."""

Numbers = NDArray[np.int64]
Slots = NDArray[np.int32]

_POSITION = struct.Struct("<QQQBqqqQHH")
_HAS_MESSAGE, _HAS_FORGOTTEN = 1, 2
"""Its flags."""

_HEADER = struct.Struct("<QQ")
_COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class StoredPosition:
    """Up to where a snapshot goes: term, the log's next index, number of producers, last message; and the policy.

    `ownership` is that of the last message's record, 0 if there is no message yet. `policy` is what is in force
    there, in the bytes of its control record; empty if none was ever set. `opaque` (at most 65,535 bytes) is the
    position in a broker's own log, empty for other logs and where there is no entry. `has_forgotten`: whether names
    were ever forgotten.
    """

    term: int
    next_index: int
    producers: int
    message_id: MessageId | None
    ownership: int = 0
    policy: bytes = b""
    opaque: bytes = b""
    has_forgotten: bool = False

    def encode(self) -> bytes:
        return (
            _POSITION.pack(
                self.term,
                self.next_index,
                self.producers,
                _HAS_MESSAGE * (self.message_id is not None) | _HAS_FORGOTTEN * self.has_forgotten,
                *(self.message_id or (0, 0, 0)),
                self.ownership,
                len(self.policy),
                len(self.opaque),
            )
            + self.policy
            + self.opaque
        )

    @staticmethod
    def decode(key: bytes, body: bytes, at: int) -> tuple["StoredPosition", int]:
        """The position that stands there, and the byte after it."""
        policy = at + _POSITION.size
        if len(body) < policy:
            raise damaged(key, "it is too short")
        term, next_index, producers, flags, *message_id, ownership, policy_bytes, opaque_bytes = _POSITION.unpack_from(
            body, at
        )
        opaque = policy + policy_bytes
        end = opaque + opaque_bytes
        return StoredPosition(
            term,
            next_index,
            producers,
            MessageId(*message_id) if flags & _HAS_MESSAGE else None,
            ownership,
            body[policy:opaque],
            body[opaque:end],
            bool(flags & _HAS_FORGOTTEN),
        ), end

    def falls_short_of(self, other: "StoredPosition") -> bool:
        """Whether it goes less far than the other one in anything. A later snapshot never does."""
        return self.term < other.term or self.next_index < other.next_index or self.producers < other.producers


@dataclass(frozen=True, slots=True)
class Header:
    """What compaction has done: the deltas up to number `through` are in the pages, and gone.

    `position` is that of the last of them, and every page of its producers is there. Names before number
    `packed_names` stand in full records.
    """

    through: int
    packed_names: int
    position: StoredPosition

    def encode(self) -> bytes:
        return _HEADER.pack(self.through, self.packed_names) + self.position.encode()

    @staticmethod
    def decode(key: bytes, value: bytes) -> "Header":
        body = unseal(key, value)
        position, end = StoredPosition.decode(key, body, _HEADER.size)
        if len(body) != end:
            raise damaged(key, "its length is wrong")
        through, packed_names = _HEADER.unpack_from(body)
        return Header(through, packed_names, position)


START = Header(0, 0, StoredPosition(0, 0, 0, None))
"""Stands for the header before the first compaction."""


@dataclass(frozen=True, slots=True)
class StoredDelta:
    """What changed from one snapshot to the next, names apart. Producer numbers (`slots`) rise strictly."""

    position: StoredPosition
    slots: Slots
    persisted: Numbers
    epochs: Numbers
    stated: Numbers

    def encode(self) -> bytes:
        return b"".join(
            (
                self.position.encode(),
                _COUNT.pack(len(self.slots)),
                self.slots.astype("<i4").tobytes(),
                self.persisted.astype("<i8").tobytes(),
                self.epochs.astype("<i8").tobytes(),
                self.stated.astype("<i8").tobytes(),
            )
        )

    @staticmethod
    def decode(key: bytes, value: bytes) -> "StoredDelta":
        body = unseal(key, value)
        position, count = StoredPosition.decode(key, body, 0)
        at = count + _COUNT.size
        if len(body) < at:
            raise damaged(key, "it is too short")
        (rows,) = _COUNT.unpack_from(body, count)
        if len(body) != at + 28 * rows:
            raise damaged(key, "its length is wrong")
        delta = StoredDelta(
            position,
            np.frombuffer(body, "<i4", rows, at),
            np.frombuffer(body, "<i8", rows, at + 4 * rows),
            np.frombuffer(body, "<i8", rows, at + 12 * rows),
            np.frombuffer(body, "<i8", rows, at + 20 * rows),
        )
        if not delta.is_sound():
            raise damaged(key, "its producer numbers do not rise or are out of range")
        return delta

    def is_sound(self) -> bool:
        """Whether its columns are of one length and its producer numbers rise, all of known producers."""
        slots = self.slots
        if not len(slots) == len(self.persisted) == len(self.epochs) == len(self.stated):
            return False
        if not len(slots):
            return True
        return bool(slots[0] >= 0 and slots[-1] < self.position.producers and (slots[1:] > slots[:-1]).all())


def encode_page(columns: Sequence[Numbers]) -> bytes:
    return b"".join(column.astype("<i8").tobytes() for column in columns)


def decode_page(key: bytes, value: bytes) -> list[Numbers]:
    """The columns of the producers from the page's number on: persisted, epochs, stated."""
    body = unseal(key, value)
    rows = len(body) // (8 * COLUMNS)
    if len(body) != 8 * COLUMNS * rows or not 1 <= rows <= PAGE_PRODUCERS or part_number(key) % PAGE_PRODUCERS:
        raise damaged(key, "its length or number is wrong")
    return [np.frombuffer(body, "<i8", rows, 8 * rows * column) for column in range(COLUMNS)]


def encode_names(names: list[bytes]) -> bytes:
    offsets = np.zeros(len(names) + 1, "<u4")
    np.cumsum(np.fromiter(map(len, names), "<u4", len(names)), out=offsets[1:])
    return _COUNT.pack(len(names)) + offsets.tobytes() + b"".join(names)


def name_places(key: bytes, value: bytes) -> tuple[bytes, Numbers]:
    """The names from the record's number on: bytes, and from where to where in them each one stands."""
    body = unseal(key, value)
    count = _COUNT.unpack_from(body)[0] if len(body) >= _COUNT.size else 0
    start = _COUNT.size + 4 * (count + 1)
    if count < 1 or len(body) < start:
        raise damaged(key, "it is too short")
    offsets = np.frombuffer(body, "<u4", count + 1, _COUNT.size)
    if offsets[0] != 0 or offsets[-1] != len(body) - start or (offsets[1:] < offsets[:-1]).any():
        raise damaged(key, "its offsets do not run from 0 to its end")
    places = offsets.astype(np.int64) + start
    return body, np.column_stack((places[:-1], places[1:]))


def decode_names(key: bytes, value: bytes) -> list[bytes]:
    """The same, as a list."""
    body, places = name_places(key, value)
    return [body[start:end] for start, end in places.tolist()]


# -- The record of a topic, besides its snapshot.

_BODY = struct.Struct("<QBBBI")


class TopicState(Enum):
    """Where a topic is in its life. Start-up finishes what CREATING and DELETING left half done."""

    CREATING = 1
    """The record is there, the log perhaps not yet."""
    ACTIVE = 2
    DELETING = 3
    """The log is perhaps gone already, the record goes last."""


class LogKind(Enum):
    """What kind of log a topic is on. All topics of a store are on one kind."""

    EMBEDDED = 1
    BROKER = 2
    """A broker's own, of which the store has the numbers alone."""
    PULSAR = 3
    """Topics of a Pulsar cluster."""

    @property
    def is_shared(self) -> bool:
        """Whether the logs are a cluster's: which there are, it says, and it may not answer now."""
        return self is LogKind.PULSAR


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """A topic: full name, incarnation (creation time in µs, its id everywhere), state, secret, kind of log, partitions.

    `secret` are the 16 bytes that make the records of this incarnation's log its own, for nobody's eyes; empty where
    they are not known here. `partitions` is how many the partitioned topic has of which this is one, 0 if it is none.
    """

    name: str
    incarnation: int
    state: TopicState
    secret: bytes = field(default=b"", repr=False)
    log: LogKind = LogKind.EMBEDDED
    partitions: int = 0

    def encode(self) -> bytes:
        """The body of its record."""
        fixed = _BODY.pack(self.incarnation, self.state.value, self.log.value, len(self.secret), self.partitions)
        return fixed + self.secret + self.name.encode()

    @staticmethod
    def decode(key: bytes, value: bytes) -> "TopicRecord":
        """The topic in a sealed value. Raises STORE_DAMAGED, NEWER_FORMAT, OLDER_FORMAT."""
        body = unseal(key, value)
        try:
            incarnation, state, log, secret_bytes, partitions = _BODY.unpack_from(body)
            name = _BODY.size + secret_bytes
            secret = body[_BODY.size : name]
            return TopicRecord(body[name:].decode(), incarnation, TopicState(state), secret, LogKind(log), partitions)
        except (struct.error, ValueError) as e:
            raise damaged(key, str(e)) from e
