"""The encoding of each record of the store: topics, and the parts of a snapshot, which are header, names, pages and
deltas.

All numbers are little-endian, except in keys, which are defined below. Decoders raise STORE_DAMAGED, NEWER_FORMAT and
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

# -- The keys and the form of every value in the store. `docs/internals/formats-store.md` draws them.
# A value is sealed: it begins with the CRC32C of the key and of everything after the checksum, followed by version and
# body. So a damaged record, or a record stored under another record's key, is never accepted.

FORMAT_VERSION = 5
"""The format version of the store as a whole and of every record in it."""

LAST_INCARNATION = b"I"
"""The key of the highest incarnation with which a topic was written."""

INSTANCE_NAME = b"A"
"""The key of the sidecar's name in a cluster that stores the sidecar's logs."""

LAST_OPENING = b"O"
"""The key of the number of the sidecar's last opening of a topic in such a cluster."""

LAST_BACKUP = b"B"
"""The key of the time of the newest verified backup, in µs since 1970."""

BELIEVED_TIME = b"C"
"""The key of the latest time that the sidecar's clock was believed to have reached, in ms since 1970."""

NAMESPACES = (b"N", b"O")
"""The range of the keys of namespaces' policies: from the first to before the second."""

# Parts of a topic's snapshot.
HEADER = b"H"
NAMES = b"N"
PAGE = b"P"
DELTA = b"D"
WINDOW = b"W"
IDS = b"I"
RUN = b"R"
IMPORTED = b"X"
"""This part sorts after all other parts, so that a new snapshot can keep it unchanged."""

MAX_NUMBER = 2**64 - 1

_TOPIC = struct.Struct(">cQ")
_PART = struct.Struct(">cQcQ")
_SEAL = struct.Struct("<IB")


def topic_key(incarnation: int) -> bytes:
    """Return the key of a topic's record."""
    return _TOPIC.pack(b"T", incarnation)


def namespace_key(namespace: str) -> bytes:
    """Return the key of a namespace's policy."""
    return NAMESPACES[0] + namespace.encode()


def part_key(incarnation: int, part: bytes, number: int) -> bytes:
    """Return the key of a part of a snapshot. The meaning of `number` depends on the part. For the header and the
    window, `number` is 0. For names and pages, it is the number of the first producer. For deltas, it is the delta's
    number. For IDs, it is the index of the first ID. For runs, including imported runs, it contains the run's number
    and the part of the run."""
    return _PART.pack(b"S", incarnation, part, number)


def part_number(key: bytes) -> int:
    """Return the last element of a `part_key`."""
    return int.from_bytes(key[-8:], "big")


def snapshot_range(incarnation: int) -> tuple[bytes, bytes]:
    """Return the range of the keys of a topic's whole snapshot: the first key, and the key before which the range
    ends."""
    return _TOPIC.pack(b"S", incarnation), _TOPIC.pack(b"S", incarnation + 1)


def seal(key: bytes, body: bytes) -> bytes:
    """Return the sealed value of a record."""
    checked = bytes((FORMAT_VERSION,)) + body
    crc: int = google_crc32c.extend(google_crc32c.value(key), checked)
    return crc.to_bytes(4, "little") + checked


def incarnation_of(key: bytes) -> int | None:
    """Return the incarnation of the topic to which a record belongs; None if the record belongs to no topic."""
    return int.from_bytes(key[1 : _TOPIC.size], "big") if key[:1] in (b"T", b"S") else None


def unseal(key: bytes, value: bytes) -> bytes:
    """Return the body of a sealed value. Raises STORE_DAMAGED, NEWER_FORMAT, OLDER_FORMAT."""
    if len(value) < _SEAL.size:
        raise damaged(key, f"it is {len(value)} bytes long")
    crc, version = _SEAL.unpack_from(value)
    if google_crc32c.extend(google_crc32c.value(key), value[4:]) != crc:
        raise damaged(key, "its checksum is wrong")
    if version != FORMAT_VERSION:
        raise other_format(f"the record {key.hex()}", version)
    return value[_SEAL.size :]


def damaged(key: bytes, what: str) -> SeqdedupeError:
    """Return the error for a record with invalid contents."""
    return error("STORE_DAMAGED", f"the store's record {key.hex()} is damaged: {what}")


_HINT_OLDER = (
    "Start the version that wrote the store. Or, if the logs can be read, move the folder `store` away, and "
    "start once with --rebuild-store. This option recreates the records from the logs. Policies of "
    "namespaces, and topics whose log is a broker's own, are lost."
)


def other_format(what: str, version: int, known_version: int = FORMAT_VERSION) -> SeqdedupeError:
    """Return the error for data whose format version differs from the version that this code reads."""
    is_newer = version > known_version
    return error(
        "NEWER_FORMAT" if is_newer else "OLDER_FORMAT",
        f"{what} has format version {version}, read is {known_version}",
        hint=None if is_newer else _HINT_OLDER,
        version=version,
        known_version=known_version,
    )


PAGE_PRODUCERS = 4096
"""The number of producers in a full page, and of names in a full record of names."""

COLUMNS = 3
"""The number of values per producer: persisted, epoch, stated."""

NOT_STATED = -1
"""The `stated` value of a producer for which no snapshot contains this value."""

Numbers = NDArray[np.int64]
Slots = NDArray[np.int32]

_POSITION = struct.Struct("<QQQBqqqQHH")
_HAS_MESSAGE, _HAS_FORGOTTEN = 1, 2
"""The flags of a position."""

_HEADER = struct.Struct("<QQ")
_COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class StoredPosition:
    """The end of a snapshot: term, the log's next index, the number of producers, the last message, and the policy.

    `ownership` belongs to the last message's record, and is 0 if the topic has no message yet. `policy` is the policy
    in force at this point, in the encoding of a control record. `policy` is empty if no policy was ever set. `opaque`
    (at most 65,535 bytes) is the position in a broker's own log, empty for other logs and if there is no entry.
    `has_forgotten` states whether the topic has ever forgotten a producer name.
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
        """Return the position stored at `at`, and the index of the byte after it."""
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
        """Return whether any number of this position is lower than in the other position. No number of a later snapshot
        is lower."""
        return self.term < other.term or self.next_index < other.next_index or self.producers < other.producers


@dataclass(frozen=True, slots=True)
class Header:
    """The result of compaction: the deltas up to number `through` are merged into the pages, and removed.

    `position` belongs to the last of these deltas, and every page of its producers exists. Names before number
    `packed_names` are in full records.
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
"""The header before the first compaction."""


@dataclass(frozen=True, slots=True)
class StoredDelta:
    """The changes from one snapshot to the next, without names. The producer numbers (`slots`) are strictly
    ascending."""

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
        """Return whether all columns have the same length, and the producer numbers rise and belong to known
        producers."""
        slots = self.slots
        if not len(slots) == len(self.persisted) == len(self.epochs) == len(self.stated):
            return False
        if not len(slots):
            return True
        return bool(slots[0] >= 0 and slots[-1] < self.position.producers and (slots[1:] > slots[:-1]).all())


def encode_page(columns: Sequence[Numbers]) -> bytes:
    return b"".join(column.astype("<i8").tobytes() for column in columns)


def decode_page(key: bytes, value: bytes) -> list[Numbers]:
    """Return the columns of the producers from the page's number on: persisted, epochs, stated."""
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
    """Return the names from the record's number on: their bytes, and the begin and end of each name in these bytes."""
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
    """Return the names of `name_places` as a list."""
    body, places = name_places(key, value)
    return [body[start:end] for start, end in places.tolist()]


# -- The record of a topic, in addition to its snapshot.

_BODY = struct.Struct("<QBBBI")


class TopicState(Enum):
    """The stage of a topic's life. After a crash, the next start finishes an interrupted creation or deletion."""

    CREATING = 1
    """The record exists; the log may not exist yet."""
    ACTIVE = 2
    DELETING = 3
    """The log may be deleted already; the record is removed last."""


class LogKind(Enum):
    """The kind of log of a topic. All topics of a store have logs of the same kind."""

    EMBEDDED = 1
    BROKER = 2
    """A broker's own log. The store has only the producers' numbers."""
    PULSAR = 3
    """Topics of a Pulsar cluster."""

    @property
    def is_shared(self) -> bool:
        """Whether the logs are in a cluster. The cluster lists such logs, and the cluster may be unreachable."""
        return self is LogKind.PULSAR


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """A topic: full name, incarnation (creation time in µs, which identifies the topic everywhere), state, secret, kind
    of log, partitions.

    `secret` has 16 bytes that identify the records of this incarnation's log, and must not be shown; the field is empty
    if this sidecar does not know the secret. If the topic is a partition, `partitions` is the number of partitions of
    its partitioned topic; otherwise 0.
    """

    name: str
    incarnation: int
    state: TopicState
    secret: bytes = field(default=b"", repr=False)
    log: LogKind = LogKind.EMBEDDED
    partitions: int = 0

    def encode(self) -> bytes:
        """Return the body of the record."""
        fixed = _BODY.pack(self.incarnation, self.state.value, self.log.value, len(self.secret), self.partitions)
        return fixed + self.secret + self.name.encode()

    @staticmethod
    def decode(key: bytes, value: bytes) -> "TopicRecord":
        """Return the topic in a sealed value. Raises STORE_DAMAGED, NEWER_FORMAT, OLDER_FORMAT."""
        body = unseal(key, value)
        try:
            incarnation, state, log, secret_bytes, partitions = _BODY.unpack_from(body)
            name = _BODY.size + secret_bytes
            secret = body[_BODY.size : name]
            return TopicRecord(body[name:].decode(), incarnation, TopicState(state), secret, LogKind(log), partitions)
        except (struct.error, ValueError) as e:
            raise damaged(key, str(e)) from e
