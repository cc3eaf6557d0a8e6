"""Markers, control records and packed batches as entries of a Pulsar topic. At the end of the file are plain rows, with
one entry for each row.

No I/O: `broker_wire` sends a `PulsarMessage`, and reads a `PulsarEntry`.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from seqdedupe import batch as batches
from seqdedupe.batch import NO_INT32S, NO_INT64S, Batch, Binary, Int64s
from seqdedupe.entry_properties import (
    ADDRESS,
    BATCH,
    CONTROL,
    CONTROL_BASE64,
    ENTRY,
    EVENT_TIME_MS,
    FORMAT,
    KEY_BASE64,
    KIND,
    MARKER,
    MESSAGE,
    MODE,
    PARTITIONS,
    PREFIX,
    ROWS,
    SCHEMA_VERSION,
    TOKEN,
    USER,
    VERSION,
    EntryOwner,
    EntryPlace,
)
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.format.headers import BATCH_TAG, HEADER_BYTES, NO_KEY, TOKEN_BYTES, header, ownership_of
from seqdedupe.format.layout import COLUMNS_END, PLACES, layout_columns
from seqdedupe.limits import NO_SEQUENCE_ID
from seqdedupe.message_id import MessageId
from seqdedupe.pulsar_wire.pulsar_api_pb2 import NONE, CompressionType

if TYPE_CHECKING:
    from seqdedupe.pulsar_wire.frames import WireEntry

MAX_ENTRY_BYTES = 5 * 1024 * 1024
"""The default `maxMessageSize` of a broker: the limit for payload, key, properties and the client's additions together.
`log` learns the actual limit of a broker and a topic."""
_CLIENT_BYTES = 1024
"""The most that the client adds to an entry: the name of its producer, IDs, times."""
_PROPERTY_BYTES = 16
"""The bytes that the client adds to a property."""
_SLACK_BYTES = 16 * 1024
"""More than our own properties have, not counting the producer's name."""

NO_LIMIT = 2**40
"""For what is not an entry yet, or has been stored: no size is too large."""
INVALID = "\0invalid"
"""In place of the properties of an entry whose field of ours is invalid: the reason. No entry has it."""
SIDECARS_PRODUCER = re.compile("seqdedupe-(.+)-\x1f?[0-7]")
"""The name of a sidecar's exclusive producer."""


class PulsarMessage(NamedTuple):
    """A Pulsar message as it is sent and read. If it is sent again, it has the same content.

    The last two fields are only for sending native entries. Messages that are read do not have these fields.
    """

    payload: bytes | None
    """The payload. None is Pulsar's null value."""
    properties: dict[str, str]
    key: str = ""
    """The partition key; empty if there is none."""
    event_time_ms: int = 0
    """The event time; 0 if there is none."""
    compression: CompressionType.ValueType = NONE
    """The compression of the entry."""
    wire: "WireEntry | None" = None
    """The entry as a broker gets it; None if it must be made of the rest."""


class PulsarEntry(NamedTuple):
    """A message as a topic holds it."""

    message: PulsarMessage
    message_id: MessageId
    publish_time_ms: int
    """The time by the clock of the client that sent it."""
    producer_name: str = ""
    """The name in Pulsar. This and the following fields are not used for our own entries."""
    sequence_id: int = -1
    """The sequence ID in Pulsar; -1 if the client does not show it."""
    of_batch: int = 0
    """The number of messages in Pulsar's entry, if it is a batch that its client made."""
    ordering_key: bytes = b""
    """The ordering key; empty if there is none."""
    schema_version: int = -1
    """The version of the schema that the message was made by; -1 if there is none."""
    first_chunk: MessageId | None = None
    """The entry in which a message of several entries begins. It ends in the entry of `message_id`."""


def is_of_sidecar(producer_name: str) -> bool:
    """Return whether this is the name of a sidecar's exclusive producer."""
    return SIDECARS_PRODUCER.fullmatch(producer_name) is not None


def check_earlier(entry: PulsarEntry) -> None:
    """Raise LOG_DAMAGED if an earlier entry was written by a sidecar: the producers' IDs in that sidecar's log are
    unknown."""
    if is_of_sidecar(entry.producer_name) and EntryPlace.parse(entry.message.properties.get(ENTRY, "")) is not None:
        raise damaged(f"the entry at {entry.message_id} is a sidecar's, of another incarnation of the topic")


class EntryFormat(Enum):
    """The form of messages in the topic. It is chosen when the topic is created, and is permanent."""

    PLAIN = "plain"
    """Each message is an entry that every consumer can read."""
    PACKED = "packed"
    """A batch is an entry."""
    NATIVE = "native"
    """Messages of one producer are an entry: a batch of Pulsar's, which every consumer can read."""


class EntrySettings(NamedTuple):
    """The information about topic and owner in every marker."""

    format: EntryFormat
    mode: str
    """The deduplication mode: SEQUENCE_ID."""
    partitions: int
    """The number of partitions that the topic was created with, this one included; 0 if it is not partitioned."""
    address: str
    """The address of the owner."""
    version: int = VERSION
    """The version of the format."""


class Marker(NamedTuple):
    """The start of an ownership."""

    term: int
    token: bytes
    settings: EntrySettings


class EncodedBatch(NamedTuple):
    """A batch in its canonical encoding."""

    encoded: bytes
    rows: int
    column_bytes: int


def marker_message(
    incarnation: int, term: int, token: bytes, settings: EntrySettings, known_index: int = -1
) -> PulsarMessage:
    """Return the entry with which an ownership begins. The entry's number is 0. The entry's index is the next message's
    index, as far as the writer has read the topic. The true index is not lower."""
    return PulsarMessage(
        b"" if settings.version < SCHEMA_VERSION else None,
        {
            ENTRY: str(
                EntryPlace(EntryOwner(incarnation, term, ownership_of(token)), 0, known_index, settings.version)
            ),
            KIND: MARKER,
            TOKEN: token.hex(),
            FORMAT: settings.format.value,
            MODE: settings.mode,
            PARTITIONS: str(settings.partitions),
            ADDRESS: settings.address,
        },
    )


def control_message(
    owner: EntryOwner,
    number: int,
    next_index: int,
    body: bytes,
    limit_bytes: int = MAX_ENTRY_BYTES,
    version: int = VERSION,
) -> PulsarMessage:
    """Return the entry of a control record, an encoded `Control`. Raises MESSAGE_TOO_LARGE."""
    properties = {ENTRY: str(EntryPlace(owner, number, next_index, version)), KIND: CONTROL}
    if version < SCHEMA_VERSION:
        return checked(PulsarMessage(body, properties), limit_bytes)
    properties[CONTROL_BASE64] = base64.b64encode(body).decode()
    return checked(PulsarMessage(None, properties), limit_bytes)


def control_body(message: PulsarMessage) -> bytes:
    """Return the encoded `Control` of a control record, in any version. Raises LOG_DAMAGED."""
    encoded = message.properties.get(CONTROL_BASE64)
    if encoded is None and message.payload is not None:
        return message.payload
    try:
        return base64.b64decode(message.properties[CONTROL_BASE64], validate=True)
    except (KeyError, binascii.Error, ValueError) as e:
        raise damaged(f"the control record {message.properties[ENTRY]} does not say what it should: {e}") from e


def content_bytes(message: PulsarMessage) -> int:
    """Return the size of a message's payload, or of the property in its place."""
    return len(message.payload or message.properties.get(CONTROL_BASE64, ""))


def packed_message(
    owner: EntryOwner,
    number: int,
    index: int,
    publish_time_ms: int,
    part: EncodedBatch,
    limit_bytes: int = MAX_ENTRY_BYTES,
) -> PulsarMessage:
    """Return the entry for a batch. The entry contains a stored record, whose first message has this index. Raises
    MESSAGE_TOO_LARGE."""
    record = header(
        part.encoded,
        BATCH_TAG,
        rows=part.rows,
        column_bytes=part.column_bytes,
        incarnation=owner.incarnation,
        file_offset=0,
        base_index=index,
        publish_time_ms=publish_time_ms,
        synced_offset=0,
        ownership=owner.ownership,
        key=NO_KEY,
    )
    properties = {
        ENTRY: str(EntryPlace(owner, number, index)),
        KIND: BATCH,
        ROWS: str(part.rows),
    }
    return checked(PulsarMessage(record + part.encoded, properties), limit_bytes)


def split_part(part: EncodedBatch, limit_bytes: int = MAX_ENTRY_BYTES) -> list[EncodedBatch]:
    """Divide the rows into batches that each fit into one entry. A single row that is too large stays too large."""
    if HEADER_BYTES + len(part.encoded) + 2 * _CLIENT_BYTES <= limit_bytes or part.rows == 1:
        return [part]
    whole = batches.decode(part.encoded)
    middle = part.rows // 2
    halves = (whole.take(np.arange(middle)), whole.take(np.arange(middle, part.rows)))
    return [small for half in halves for small in split_part(encoded_part(half), limit_bytes)]


def encoded_part(batch: Batch) -> EncodedBatch:
    """Return the batch as it is stored."""
    raw = batch.encode()
    places = np.zeros(PLACES, np.int64)
    layout_columns(np.frombuffer(raw, np.uint8), 0, len(raw), places)
    return EncodedBatch(raw, len(batch), int(places[COLUMNS_END]))


def surely_taken_bytes(limit_bytes: int) -> int:
    """Return a size that always fits into an entry together with the sidecar's properties. It is the size of a payload
    and a key, or of all rows of a batch."""
    return max(0, limit_bytes // 5 - _SLACK_BYTES)


def checked(message: PulsarMessage, limit_bytes: int = MAX_ENTRY_BYTES) -> PulsarMessage:
    """Return the message, if a broker accepts its size. Raises MESSAGE_TOO_LARGE."""
    size = len(message.payload or b"") + len(message.key.encode()) + _CLIENT_BYTES
    for name, value in message.properties.items():
        size += len(name.encode()) + len(value.encode()) + _PROPERTY_BYTES
    if size > limit_bytes:
        raise too_large(size, limit_bytes)
    return message


def too_large(size: int, limit_bytes: int) -> SeqdedupeError:
    """Return the error for an entry of this size."""
    return error(
        "MESSAGE_TOO_LARGE",
        f"an entry of the Pulsar topic takes {size} bytes with key and properties: its brokers and policies allow "
        f"{limit_bytes}",
    )


def read_marker(message: PulsarMessage, owner: EntryOwner) -> Marker:
    """Return the content of a marker of this owner. Raises LOG_DAMAGED, NEWER_FORMAT."""
    properties = message.properties
    try:
        token = bytes.fromhex(properties[TOKEN])
        entry_format, partitions = EntryFormat(properties[FORMAT]), int(properties[PARTITIONS])
        version = int(properties[ENTRY].partition(":")[0])
        settings = EntrySettings(entry_format, properties[MODE], partitions, properties[ADDRESS], version)
    except (KeyError, ValueError) as e:
        raise damaged(f"the marker of term {owner.term} does not say {e}") from e
    if len(token) != TOKEN_BYTES or ownership_of(token) != owner.ownership:
        raise damaged(f"the marker of term {owner.term} does not fit its owner")
    return Marker(owner.term, token, settings)


def damaged(what: str) -> SeqdedupeError:
    """Return the error for an entry that differs from what was written."""
    return error(
        "LOG_DAMAGED",
        f"the Pulsar topic is damaged: {what}",
        hint="Nothing was changed, and other topics serve. Has something else written into the topic as if it were the "
        "sidecar? Look at the entry with Pulsar's own tools, and read the topic from a replica if there is one.",
    )


# -- Rows that are an entry each, which every consumer of Pulsar can read: converted to messages, and back to batches.
#
# Payload, key and event time are Pulsar's own. The other values of a row are in properties, next to the producer's own
# properties.


def messages_of_part(
    owner: EntryOwner,
    number: int,
    index: int,
    encoded: bytes,
    limit_bytes: int = MAX_ENTRY_BYTES,
    version: int = VERSION,
) -> Iterator[PulsarMessage]:
    """Yield the entries of a batch's rows. The first entry has this number and index. In later entries both count up.

    `encoded` was checked: its names and properties are UTF-8, and no row has two properties with the same name. Raises
    MESSAGE_TOO_LARGE if a broker would refuse an entry.
    """
    batch = batches.decode(encoded)
    rows = len(batch)
    producers = batch.producer_indexes.tolist() or [0] * rows
    before = batch.previous_sequence_ids.tolist()
    names, epochs = batch.names(), batch.epochs.tolist()
    complete = batch.complete_up_to.tolist() or [NO_SEQUENCE_ID] * len(names)
    owner_text = owner.prefix(version)
    payloads, keys = _values(batch.payloads, rows), _values(batch.keys, rows)
    times = batch.event_times_ms.tolist() or [0] * rows
    of_users = _properties(batch)
    surely_taken = surely_taken_bytes(limit_bytes)
    for row, (producer, sequence_id) in enumerate(zip(producers, batch.sequence_ids.tolist(), strict=True)):
        properties = {
            ENTRY: f"{owner_text}{number + row}:{index + row}",
            MESSAGE: f"{sequence_id}:{epochs[producer]}:{before[producer]}:{complete[producer]}:{0 if row else rows}:"
            f"{names[producer]}",
        }
        before[producer] = sequence_id
        key, event_time_ms = "", times[row]
        if (given := keys[row]) is not None:
            key = _native_key(given, properties)
        if event_time_ms < 0:
            properties[EVENT_TIME_MS], event_time_ms = str(event_time_ms), 0
        if of_users:
            for name, value in of_users[row]:
                properties[USER + name if name.startswith(PREFIX) else name] = value
        message = PulsarMessage(payload := payloads[row], properties, key, event_time_ms)
        if of_users or len(key) + len(payload or b"") > surely_taken:
            checked(message, limit_bytes)
        yield message


def _native_key(key: bytes, properties: dict[str, str]) -> str:
    """Return the partition key for a key. If Pulsar cannot store the key unchanged, the key is also stored in a
    property."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        text = ""
    if not text:
        text = properties[KEY_BASE64] = base64.b64encode(key).decode()
    return text


def _values(column: Binary, rows: int) -> Sequence[bytes | None]:
    if not column:
        return [None] * rows
    values = column.values()
    if not column.validity:
        return values
    present = np.unpackbits(np.frombuffer(column.validity, np.uint8), count=rows, bitorder="little").tolist()
    return [value if there else None for value, there in zip(values, present, strict=True)]


def _properties(batch: Batch) -> list[list[tuple[str, str]]]:
    if not len(batch.property_offsets):
        return []
    names = [name.decode() for name in batch.property_names.values()]
    values = [value.decode() for value in batch.property_values.values()]
    pairs = list(zip(names, values, strict=True))
    offsets = batch.property_offsets.tolist()
    return [pairs[start:end] for start, end in pairwise(offsets)]


def begins_batch(message: PulsarMessage) -> bool:
    """Return whether a row is the first of its batch, according to its properties."""
    return message.properties.get(MESSAGE, "").split(":", 5)[4:5] != ["0"]


class Rows:
    """Rows of one batch that were read one after the other: all rows, or only the first or the last rows."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._said: list[tuple[int, int]] = []
        self._links: list[int] = []
        self._last: list[int] = []
        self._indexes: list[int] = []
        self._sequence_ids: list[int] = []
        self._payloads: list[bytes | None] = []
        self._keys: list[bytes | None] = []
        self._times: list[int] = []
        self._properties: list[dict[str, str] | None] = []

    def __len__(self) -> int:
        return len(self._sequence_ids)

    def add(self, message: PulsarMessage) -> bool:
        """Add a row. If the row begins another batch, return False, and do not add the row. Raises LOG_DAMAGED."""
        properties = message.properties
        try:
            *numbers, name = properties[MESSAGE].split(":", 5)
            sequence_id, epoch, link, complete_up_to, rows = map(int, numbers)
            key, event_time_ms = _own_key(message), int(properties.get(EVENT_TIME_MS, message.event_time_ms))
        except (KeyError, ValueError) as e:
            raise damaged(f"the message {properties[ENTRY]} does not say what it should: {e}") from e
        if rows and self._sequence_ids:
            return False
        said = epoch, complete_up_to
        producer = self._names.get(name)
        if producer is None:
            producer = self._names[name] = len(self._names)
            self._said.append(said)
            self._links.append(link)
            self._last.append(sequence_id)
        elif said != self._said[producer] or link != self._last[producer]:
            raise damaged(f"the message {properties[ENTRY]} does not go on with its batch")
        else:
            self._last[producer] = sequence_id
        self._indexes.append(producer)
        self._sequence_ids.append(sequence_id)
        self._payloads.append(message.payload)
        self._keys.append(key)
        self._times.append(event_time_ms)
        self._properties.append(_of_user(properties))
        return True

    def batch(self) -> Batch:
        """Return the batch of all rows that were added, at least one. Raises LOG_DAMAGED."""
        epochs, complete = zip(*self._said, strict=True)
        offsets, names, values = batches.properties(self._properties)
        payloads = Binary.of(self._payloads)
        if not payloads:
            payloads = Binary.of_all([b""] * len(self), bytes((len(self) + 7) // 8))
        return Batch(
            producer_names=Binary.of_all([name.encode() for name in self._names]),
            epochs=_int64s(epochs),
            previous_sequence_ids=_int64s(self._links),
            sequence_ids=_int64s(self._sequence_ids),
            payloads=payloads,
            producer_indexes=np.array(self._indexes, np.int32) if len(epochs) > 1 else NO_INT32S,
            event_times_ms=_int64s(self._times) if any(self._times) else NO_INT64S,
            keys=Binary.of(self._keys),
            property_offsets=offsets,
            property_names=names,
            property_values=values,
            complete_up_to=NO_INT64S if set(complete) == {NO_SEQUENCE_ID} else _int64s(complete),
        )


def _int64s(numbers: Sequence[int]) -> Int64s:
    try:
        return np.array(numbers, np.int64)
    except OverflowError as e:
        raise damaged("a number of a message is too large") from e


def _own_key(message: PulsarMessage) -> bytes | None:
    """Return the key as the producer gave it. Raises ValueError."""
    exact = message.properties.get(KEY_BASE64)
    if exact is None:
        return message.key.encode() if message.key else None
    try:
        return base64.b64decode(exact, validate=True)
    except binascii.Error as e:
        raise ValueError(f"a key in {KEY_BASE64}: {e}") from e


_OURS = frozenset((ENTRY, MESSAGE, KEY_BASE64, EVENT_TIME_MS))


def _of_user(properties: dict[str, str]) -> dict[str, str] | None:
    """Return the properties that the producer gave."""
    if len(properties) == 2:
        return None
    return {name.removeprefix(USER): value for name, value in properties.items() if name not in _OURS} or None
