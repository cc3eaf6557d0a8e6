"""Entries of the format `native`: genuine Pulsar batches, which every consumer can read. Pure.

The sidecar's own field of the entry's metadata contains the data for recovery and readers
(`docs/internals/formats-pulsar.md`). A `PulsarMessage` in the form of the format `packed` is encoded to an entry, and
an entry is decoded to the same message. So the rest of the code treats both formats in the same way.

Kernels: import this module only after `kernels.prepare()`.
"""

import base64
import binascii
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np

from seqdedupe import batch as batches
from seqdedupe.batch import NO_INT64S, Batch, Binary
from seqdedupe.entry_properties import (
    ADDRESS,
    BATCH,
    CONTROL,
    DELIVER_AT,
    ENTRY,
    FORMAT,
    KIND,
    MARKER,
    MODE,
    ORDERING_KEY,
    PARTITIONS,
    PREFIX,
    SCHEMA_VERSION_OF,
    TOKEN,
    USER,
    EntryOwner,
    EntryPlace,
    deliver_at,
    of_entry,
)
from seqdedupe.entry_properties import schema_version as version_of
from seqdedupe.errors import DamagedError, SeqdedupeError, error
from seqdedupe.format.headers import HEADER_BYTES, TOKEN_BYTES
from seqdedupe.limits import MAX_SEQUENCE_ID, NO_SEQUENCE_ID
from seqdedupe.log.pulsar.entries import (
    INVALID,
    NO_LIMIT,
    EncodedBatch,
    EntryFormat,
    PulsarEntry,
    PulsarMessage,
    damaged,
    encoded_part,
    is_of_sidecar,
    packed_message,
    too_large,
)
from seqdedupe.message_id import MessageId
from seqdedupe.pulsar_wire.batches import (
    EntryKind,
    EntryRow,
    EntryRows,
    Properties,
    PulsarBatch,
    SentEntry,
    Values,
    batch_of,
    entry_as_sent,
    key_for_clients,
    kind_of,
    most_bytes,
    range_of,
    rows_of,
    stored_batch,
)
from seqdedupe.pulsar_wire.frames import WireEntry, decompress, metadata_of, stamped
from seqdedupe.pulsar_wire.pulsar_api_pb2 import NONE, CompressionType, MessageMetadata, Property
from seqdedupe.pulsar_wire.rows import HAS_KEY, HAS_ORDERING_KEY, HAS_SEQUENCE_ID, KEY_IS_BASE64, NULL_VALUE

NATIVE_VERSION = 1
"""The version of our field."""
MAX_ENTRY_ROWS = 1000
"""The most messages of an entry: as many as Java's client puts into one."""
MAX_DECODED_BYTES = 64 * 1024 * 1024
"""The most bytes of an entry's rows when decompressed: more than the sidecar writes."""

MAX_EARLIER_ROWS = 65_536
"""The most rows of another producer's batch that are looked at: a small compressed entry can have millions."""

_BATCH, _CONTROL, _MARKER = 0, 1, 2
_HEAD = struct.Struct("<BBQQQQq")
"""Version, kind, incarnation, term, ownership, number, index."""
_OF_BATCH = struct.Struct("<qqq")
"""Epoch, link, complete_up_to."""
_OF_MARKER = struct.Struct(f"<{TOKEN_BYTES}sIB")
"""Token, partitions, size of the mode. The mode and the address follow."""
_METADATA_BYTES = 1024
"""More than an entry's metadata take without keys: two names of at most 255 bytes, numbers, our field."""
_OF_ROWS = HAS_KEY | KEY_IS_BASE64 | HAS_ORDERING_KEY | NULL_VALUE | HAS_SEQUENCE_ID
_DELIVER_AT, _ORDERING_KEY, _SCHEMA_VERSION = DELIVER_AT.encode(), ORDERING_KEY.encode(), SCHEMA_VERSION_OF.encode()
_PREFIX, _USER = PREFIX.encode(), USER.encode()
_KINDS = {_BATCH: BATCH, _CONTROL: CONTROL, _MARKER: MARKER}


# -- From batches to entries.


def native_parts(part: EncodedBatch, limit_bytes: int) -> Iterator[EncodedBatch]:
    """Divide the rows into batches that are one entry each: of one producer, with at most MAX_ENTRY_ROWS rows and at
    most `limit_bytes`. The batches are encoded as a reader encodes them. Raises MESSAGE_TOO_LARGE."""
    whole = batches.decode(part.encoded)
    for first, stop in _runs(whole):
        yield from _parts(whole, first, stop, limit_bytes)


def _runs(batch: Batch) -> Iterator[tuple[int, int]]:
    """Yield the longest ranges of rows with the same producer, delivery time and schema version."""
    changes = np.flatnonzero(np.diff(batch.producer_indexes)) + 1 if len(batch.producer_indexes) else NO_INT64S
    if _has_entry_fields(batch):
        fields = _entry_fields(batch)
        changes = np.union1d(changes, [k for k in range(1, len(fields)) if fields[k] != fields[k - 1]])
    borders = [0, *changes.tolist(), len(batch)]
    yield from pairwise(borders)


def _parts(whole: Batch, first: int, stop: int, limit_bytes: int) -> Iterator[EncodedBatch]:
    rows = stop - first
    if rows <= MAX_ENTRY_ROWS:
        part = whole if rows == len(whole) else whole.take(np.arange(first, stop))
        columns = _rows_of_batch(part)
        size = most_bytes(columns) + _METADATA_BYTES + _most_key_bytes(columns)
        if rows == 1 and size > limit_bytes:
            raise too_large(size, limit_bytes)
        if size <= limit_bytes:
            yield encoded_part(_batch_of_rows(columns, part.producer_names.data, *_numbers(part)))
            return
    middle = first + (rows // 2 if rows <= MAX_ENTRY_ROWS else MAX_ENTRY_ROWS)
    yield from _parts(whole, first, middle, limit_bytes)
    yield from _parts(whole, middle, stop, limit_bytes)


def _most_key_bytes(rows: EntryRows) -> int:
    """Return the most bytes of the keys that stand on the entry too."""
    return sum(int(np.diff(column.offsets).max(initial=0)) for column in (rows.keys, rows.ordering_keys))


def passed_entry(
    part: EncodedBatch, sent: SentEntry, place: EntryPlace, publish_time_ms: int, limit_bytes: int
) -> WireEntry | None:
    """Return the entry with the payload that the batch's producer has sent, byte for byte.

    Return None if a reader would not decode the entry to exactly this batch, or if the entry is too large. The sidecar
    then encodes the batch.
    """
    rows = sent.rows
    if rows is None or len(rows) != part.rows or len(rows) > MAX_ENTRY_ROWS:
        return None
    if len(sent.payload) + _METADATA_BYTES + _most_key_bytes(rows) > limit_bytes:
        return None
    # Consumers skip messages with a property of ours, and others set fields of the entry.
    names = bytes(rows.properties.names.data)
    if any(name in names for name in (_PREFIX, _DELIVER_AT, _SCHEMA_VERSION)):
        return None
    if not (rows.flags & HAS_SEQUENCE_ID).all():
        return None
    batch = batches.decode(part.encoded)
    name, numbers = batch.producer_names.data, _numbers(batch)
    entry = entry_as_sent(sent, rows, name, publish_time_ms)
    try:
        read = _batch_of_rows(rows, name, *numbers, _entry_properties(metadata_of(entry), rows))
    except SeqdedupeError:
        return None
    return stamped(entry, _head(_BATCH, place) + _OF_BATCH.pack(*numbers)) if read.encode() == part.encoded else None


def _numbers(batch: Batch) -> tuple[int, int, int]:
    """Return the epoch, the link and `complete_up_to` of a batch of one producer."""
    complete_up_to = int(batch.complete_up_to[0]) if len(batch.complete_up_to) else NO_SEQUENCE_ID
    return int(batch.epochs[0]), int(batch.previous_sequence_ids[0]), complete_up_to


def wire_entry(
    message: PulsarMessage,
    producer_name: str,
    sequence_id: int,
    compression: CompressionType.ValueType = NONE,
    schema_version: bytes | None = None,
) -> WireEntry:
    """Return the entry of a batch, control record or marker. The event time of the given message is the publish time.

    An entry without messages has the given producer name and sequence ID, which belong to the sidecar's own producer.
    """
    properties = message.properties
    place = EntryPlace.parse(properties[ENTRY])
    if place is None:
        raise error("INTERNAL", f"{properties[ENTRY]!r} is no place of an entry")
    kind = properties[KIND]
    if kind == BATCH:
        batch = batches.decode((message.payload or b"")[HEADER_BYTES:])
        field = _head(_BATCH, place) + _OF_BATCH.pack(*_numbers(batch))
        name, rows = batch.producer_names.data, _rows_of_batch(batch)
    elif kind == CONTROL:
        field = _head(_CONTROL, place) + (message.payload or b"")
        name, rows = producer_name.encode(), _no_message(kind, sequence_id)
    else:
        mode = properties[MODE].encode()
        more = _OF_MARKER.pack(bytes.fromhex(properties[TOKEN]), int(properties[PARTITIONS]), len(mode))
        field = _head(_MARKER, place) + more + mode + properties[ADDRESS].encode()
        name, rows = producer_name.encode(), _no_message(kind, sequence_id)
    time_ms = 0
    if kind == BATCH and _has_entry_fields(batch):
        time_ms, version = _entry_fields(batch)[0]
        schema_version = version or schema_version
    entry = batch_of(rows, name, message.event_time_ms, compression, schema_version)
    if time_ms:
        metadata = metadata_of(entry)
        metadata.deliver_at_time = time_ms
        entry = entry._replace(metadata=metadata.SerializeToString())
    return stamped(entry, field)


def _has_entry_fields(batch: Batch) -> bool:
    """Return whether an entry of these rows may have a delivery time or a schema version."""
    names = batch.property_names.data
    return _DELIVER_AT in names or _SCHEMA_VERSION in names


def _entry_fields(batch: Batch) -> list[tuple[int, bytes]]:
    """Return the delivery time (0: none) and the schema version (empty: none) of each row."""
    times, versions = (_texts(batch, name) for name in (_DELIVER_AT, _SCHEMA_VERSION))
    return [(deliver_at(time_ms), version_of(version)) for time_ms, version in zip(times, versions, strict=True)]


def _texts(batch: Batch, name: bytes) -> list[str]:
    """Return the value of the property with this name in each row; empty if the row has no such property. The batch may
    have a million other properties."""
    found = [""] * len(batch)
    places = np.flatnonzero(np.diff(batch.property_names.offsets) == len(name))
    rows = np.searchsorted(batch.property_offsets, places, "right") - 1
    for place, row in zip(places.tolist(), rows.tolist(), strict=True):
        if batch.property_names[place] == name:
            found[row] = (batch.property_values[place] or b"").decode(errors="replace")
    return found


def _head(kind: int, place: EntryPlace) -> bytes:
    (incarnation, term, ownership), number, index, _ = place
    return _HEAD.pack(NATIVE_VERSION, kind, incarnation, term, ownership, number, index)


def _no_message(kind: str, sequence_id: int) -> EntryRows:
    """Return the row of an entry without messages: a null value with a property that states the kind. Consumers see
    this row and acknowledge it. A hidden row would stay in their backlog."""
    return EntryRows.of([EntryRow(sequence_id, properties=((KIND.encode(), kind.encode()),), flags=NULL_VALUE)])


def _rows_of_batch(batch: Batch) -> EntryRows:
    rows = len(batch)
    flags = np.zeros(rows, np.int64)
    if batch.payloads and not batch.payloads.validity:
        payloads = _values(batch.payloads)
    else:
        given = batch.payloads.rows(rows)
        flags |= np.array([0 if payload is not None else NULL_VALUE for payload in given], np.int64)
        payloads = Values.of([payload or b"" for payload in given])
    if not batch.keys:
        keys = Values(np.zeros(rows + 1, np.int64), b"")
    elif not batch.keys.validity and batch.keys.data.isascii():
        flags |= HAS_KEY
        keys = _values(batch.keys)
    else:
        told = [(b"", 0) if key is None else key_for_clients(key) for key in batch.keys.rows(rows)]
        flags |= np.array([flag for _, flag in told], np.int64)
        keys = Values.of([key for key, _ in told])
    offsets = batch.property_offsets if len(batch.property_offsets) else np.zeros(rows + 1, np.int32)
    properties = Properties(offsets.astype(np.int64), _values(batch.property_names), _values(batch.property_values))
    ordering_keys = Values(np.zeros(rows + 1, np.int64), b"")
    if _ORDERING_KEY in batch.property_names.data:
        properties, each = _split(properties)
        flags |= np.array([HAS_ORDERING_KEY if key else 0 for key in each], np.int64)
        ordering_keys = Values.of(each)
    return EntryRows(
        # Copies: kernels take no read-only columns of numbers.
        batch.sequence_ids.copy(),
        batch.event_times_ms.copy() if len(batch.event_times_ms) else np.zeros(rows, np.int64),
        flags,
        keys,
        ordering_keys,
        # Consumers skip messages with our property KIND: none may have one of that name by its producer.
        _renamed(properties, lambda name: _USER + name if name.startswith(_PREFIX) else name),
        payloads,
    )


def _renamed(properties: Properties, rename: Callable[[bytes], bytes]) -> Properties:
    """Return the properties with other names. `rename` changes only names with our prefix."""
    names = properties.names
    if _PREFIX not in bytes(names.data):
        return properties
    new_names = [rename(names.value(k)) for k in range(len(names.offsets) - 1)]
    return Properties(properties.offsets, Values.of(new_names), properties.values)


def _split(properties: Properties) -> tuple[Properties, list[bytes]]:
    """Return the properties without ordering keys, and the ordering key of each row (empty: none)."""
    names, ends = properties.names, properties.offsets[1:]
    counts = np.diff(properties.offsets)
    keys, stays = [b""] * len(counts), np.ones(len(names.offsets) - 1, np.bool_)
    for row in np.flatnonzero(counts).tolist():
        place = int(ends[row]) - 1
        if names.value(place) != _ORDERING_KEY:
            continue
        value = properties.values.value(place)
        with suppress(binascii.Error):
            key = base64.b64decode(value, validate=True)
            # A reader makes the property again.
            if key and base64.b64encode(key) == value:
                keys[row], stays[place] = key, False
                counts[row] -= 1
    offsets, places = np.concatenate(([0], np.cumsum(counts))), np.flatnonzero(stays)
    return Properties(offsets, names.take(places), properties.values.take(places)), keys


def _values(column: Binary) -> Values:
    offsets = column.offsets if column else np.zeros(1, np.int32)
    return Values(offsets.astype(np.int64), column.data)


# -- From entries to batches.


def native_entry(place: MessageId, entry: WireEntry, metadata: MessageMetadata) -> PulsarEntry:
    """Return an entry of a topic. If the entry lacks the sidecar's field, another producer wrote the entry. Then only
    the producer's name and highest sequence ID are decoded.

    Raises LOG_DAMAGED, NEWER_FORMAT.
    """
    name = metadata.producer_name.decode(errors="replace")
    if not metadata.HasField("seqdedupe"):
        return PulsarEntry(PulsarMessage(b"", {}), place, metadata.publish_time, name, highest_id(entry, metadata))
    try:
        message = _message(entry, metadata)
    except (SeqdedupeError, struct.error, ValueError, OverflowError) as e:
        if isinstance(e, SeqdedupeError) and e.reason in ("NEWER_FORMAT", "LOG_DAMAGED"):
            raise
        raise damaged(f"the entry at {place} is not as a sidecar writes it: {e}") from e
    return PulsarEntry(message, place, message.event_time_ms, name, highest_id(entry, metadata))


def single_entry(place: MessageId, entry: WireEntry, metadata: MessageMetadata) -> PulsarEntry:
    """Return an entry of a topic whose format is not `native`: there a sidecar's entry is one message, not in a batch.
    Of all other entries, only the producer's name and highest sequence ID are decoded.

    If the payload of a sidecar's entry is invalid, the entry has the property INVALID.
    """
    name, message = metadata.producer_name.decode(errors="replace"), PulsarMessage(b"", {})
    try:
        properties = {pair.key.decode(): pair.value.decode() for pair in metadata.properties}
    except UnicodeDecodeError:
        # Those of our own entries are UTF-8.
        properties = {}
    if ENTRY in properties and kind_of(metadata) is EntryKind.SINGLE:
        is_ours = is_of_sidecar(name)
        try:
            payload = decompress(metadata.compression, entry.payload, metadata.uncompressed_size, MAX_DECODED_BYTES)
            key = metadata.partition_key.decode(errors="replace")
            message = PulsarMessage(
                None if metadata.null_value else bytes(payload), properties, key, metadata.event_time
            )
            if is_ours:
                return PulsarEntry(message, place, metadata.publish_time, name)
        except SeqdedupeError as e:
            # Anybody may write properties of ours. Only under a sidecar's name is such an entry damage.
            if is_ours:
                message = PulsarMessage(b"", {INVALID: str(e)})
    return PulsarEntry(message, place, metadata.publish_time, name, highest_id(entry, metadata))


def stock_entry(place: MessageId, entry: WireEntry, metadata: MessageMetadata) -> PulsarEntry:
    """Return an entry of a topic that no sidecar writes, by the more careful rule of both: of an entry that a sidecar
    has written in any format, the property ENTRY is decoded. Of all other entries, only the producer's name and highest
    sequence ID are decoded. Raises NEWER_FORMAT."""
    if metadata.HasField("seqdedupe"):
        try:
            return native_entry(place, entry, metadata)
        except DamagedError as e:
            # Anybody may write such a field.
            if e.reason != "LOG_DAMAGED":
                raise
    return single_entry(place, entry, metadata)


def single_wire_entry(
    message: PulsarMessage, producer_name: str, sequence_id: int, publish_time_ms: int, schema_version: bytes = b""
) -> WireEntry:
    """Return the message as an entry of its own, not in a batch and not compressed, as `single_entry` reads it. The
    entry has the version of the topic's schema, unless `schema_version` is empty."""
    payload = message.payload or b""
    metadata = MessageMetadata(
        producer_name=producer_name.encode(),
        sequence_id=sequence_id,
        publish_time=publish_time_ms,
        uncompressed_size=len(payload),
        properties=[Property(key=key.encode(), value=value.encode()) for key, value in message.properties.items()],
        partition_key=message.key.encode() or None,
        event_time=message.event_time_ms or None,
        deliver_at_time=deliver_at(message.properties.get(DELIVER_AT, "")) or None,
        schema_version=schema_version or None,
        null_value=message.payload is None or None,
    )
    return WireEntry(metadata.SerializeToString(), payload)


def highest_id(entry: WireEntry, metadata: MessageMetadata) -> int:
    """Return the highest sequence ID of an entry that another producer wrote; -1 if the entry does not complete a
    message.

    The last chunk completes a chunked message. If a batch's metadata do not state the highest ID, the rows are read. If
    the rows cannot be read (for example because they are encrypted), or are more than any client sends, the function
    assumes consecutive IDs. The result is then at least the ID that a broker would record.
    """
    kind, chunks = kind_of(metadata), metadata.num_chunks_from_msg
    if kind is EntryKind.MARKER or (chunks > 1 and metadata.chunk_id != chunks - 1):
        return -1
    try:
        first, last = range_of(metadata)
    except SeqdedupeError:
        return -1
    if not metadata.HasField("num_messages_in_batch") or metadata.HasField("highest_sequence_id"):
        return last
    with suppress(SeqdedupeError):
        if kind is EntryKind.BATCH and metadata.num_messages_in_batch <= MAX_EARLIER_ROWS:
            return int(PulsarBatch.of(entry, metadata, MAX_DECODED_BYTES).sequence_ids.max(initial=-1))
    return min(first + max(metadata.num_messages_in_batch, 1) - 1, MAX_SEQUENCE_ID)


def _message(entry: WireEntry, metadata: MessageMetadata) -> PulsarMessage:
    field = metadata.seqdedupe
    if field[:1] and field[0] > NATIVE_VERSION:
        raise error("NEWER_FORMAT", f"an entry has format version {field[0]}; this one reads up to {NATIVE_VERSION}")
    version, code, incarnation, term, ownership, number, index = _HEAD.unpack_from(field)
    more, kind = field[_HEAD.size :], _KINDS.get(code)
    if version != NATIVE_VERSION or kind is None:
        raise damaged(f"an entry of version {version} has the kind {code}")
    # A reader parses this text again.
    owner = EntryOwner(incarnation, term, ownership)
    if EntryPlace.parse(str(EntryPlace(owner, number, index))) is None:
        raise damaged(f"an entry says that it is number {number}, with index {index}, of term {term}")
    if kind == BATCH:
        return _batch_message(entry, metadata, owner, number, index, more)
    rows = rows_of(entry, metadata, MAX_DECODED_BYTES)
    if len(rows) != 1 or not int(rows.flags[0]) & NULL_VALUE:
        raise damaged(f"an entry of the kind {kind} has messages")
    properties = {ENTRY: str(EntryPlace(owner, number, index)), KIND: kind}
    if kind == CONTROL:
        return PulsarMessage(more, properties, "", _time_ms(metadata))
    token, partitions, mode_bytes = _OF_MARKER.unpack_from(more)
    texts = more[_OF_MARKER.size :]
    properties |= {
        TOKEN: token.hex(),
        FORMAT: EntryFormat.NATIVE.value,
        MODE: texts[:mode_bytes].decode(),
        PARTITIONS: str(partitions),
        ADDRESS: texts[mode_bytes:].decode(),
    }
    return PulsarMessage(b"", properties, "", _time_ms(metadata))


def _batch_message(
    entry: WireEntry, metadata: MessageMetadata, owner: EntryOwner, number: int, index: int, more: bytes
) -> PulsarMessage:
    epoch, link, complete_up_to = _OF_BATCH.unpack(more)
    rows = rows_of(entry, metadata, MAX_DECODED_BYTES)
    name = metadata.producer_name
    name.decode()
    ids = rows.sequence_ids
    if not len(rows) or index < 0 or (int(ids[0]), int(ids[-1])) != range_of(metadata) or (np.diff(ids) <= 0).any():
        raise damaged(f"entry {number} of term {owner.term} has other sequence IDs than its metadata")
    properties = _entry_properties(metadata, rows)
    part = encoded_part(_batch_of_rows(rows, name, epoch, link, complete_up_to, properties))
    message = packed_message(owner, number, index, _time_ms(metadata), part, NO_LIMIT)
    return message._replace(event_time_ms=_time_ms(metadata))


def _time_ms(metadata: MessageMetadata) -> int:
    if metadata.publish_time >= 2**63:
        raise damaged("an entry's publish time is too large")
    return metadata.publish_time


def _entry_properties(metadata: MessageMetadata, rows: EntryRows) -> list[tuple[bytes, bytes]]:
    """Return the properties that a reader adds to each message. They are the fields of the entry that no message has as
    a property, because the producer has set only the field."""
    names = bytes(rows.properties.names.data)
    return [pair for pair in of_entry(metadata.deliver_at_time, metadata.schema_version) if pair[0] not in names]


def _batch_of_rows(
    rows: EntryRows,
    name: bytes,
    epoch: int,
    link: int,
    complete_up_to: int,
    more: Sequence[tuple[bytes, bytes]] = (),
) -> Batch:
    """Return the rows as a batch in the canonical encoding. Each row gets the additional properties `more`. Raises
    LOG_DAMAGED, MALFORMED_MESSAGE."""
    if (rows.flags & ~_OF_ROWS).any():
        raise damaged(f"a message of {name!r} has what no sidecar writes")
    is_null = (rows.flags & NULL_VALUE) != 0
    if np.diff(rows.payloads.offsets)[is_null].any():
        raise damaged("a null value has a payload")
    properties = _renamed(
        rows.properties, lambda name: name.removeprefix(_USER) if name.startswith(_USER + _PREFIX) else name
    )
    return stored_batch(replace(rows, properties=properties), name, epoch, link, more, complete_up_to)
