"""The rows of an entry as columns, and entries from columns. This module does no I/O.

Pulsar has two kinds of entries with rows. An unbatched entry is one row, whose key and properties are in the entry's
metadata. A batch is a sequence of rows, each with separate metadata. A batch may be compressed as a whole. In two other
kinds of entries, rows cannot be read: a chunk is a part of a large message, and an encrypted entry needs a key.

This module has kernels, so import it only after `kernels.prepare()`.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Self

import numpy as np

from seqdedupe.batch import NO_INT32S, NO_INT64S, Batch, Binary, bitmap, single_producer
from seqdedupe.entry_properties import ORDERING_KEY
from seqdedupe.errors import error
from seqdedupe.format.jit import Int64s, Uint8s
from seqdedupe.limits import MAX_SEQUENCE_ID, NO_SEQUENCE_ID
from seqdedupe.pulsar_wire import rows as kernels
from seqdedupe.pulsar_wire.frames import Buffer, WireEntry, compress, decompress, malformed, readable
from seqdedupe.pulsar_wire.pulsar_api_pb2 import NONE, CompressionType, MessageMetadata
from seqdedupe.pulsar_wire.rows import (
    HAS_KEY,
    HAS_ORDERING_KEY,
    HAS_SEQUENCE_ID,
    KEY_IS_BASE64,
    NULL_KEY,
    NULL_VALUE,
    PLACES,
)

_MIN_ROW_BYTES = 6
"""The bytes of the smallest row: the size of its metadata, and in them the size of its payload."""


class EntryKind(Enum):
    """What an entry's payload is."""

    SINGLE = "single"
    BATCH = "batch"
    CHUNK = "chunk"
    ENCRYPTED = "encrypted"
    MARKER = "marker"
    """A message that Pulsar itself has written, and that no consumer receives."""


class EntryRow(NamedTuple):
    """One row. For many, use the columns of `EntryRows`."""

    sequence_id: int
    payload: bytes = b""
    key: bytes | None = None
    ordering_key: bytes | None = None
    properties: tuple[tuple[bytes, bytes], ...] = ()
    event_time: int = 0
    flags: int = 0
    """KEY_IS_BASE64, NULL_VALUE, COMPACTED_OUT, NULL_KEY."""


@dataclass(frozen=True, slots=True)
class Values:
    """A column of byte strings in Arrow's layout: value K is `data[offsets[K]:offsets[K + 1]]`."""

    offsets: Int64s
    data: Buffer

    @classmethod
    def of(cls, values: Sequence[bytes]) -> Self:
        """Return the column of these values."""
        return cls(_offsets(np.fromiter(map(len, values), np.int64, len(values))), b"".join(values))

    def value(self, row: int) -> bytes:
        """Return one value. For many, use the offsets."""
        return bytes(memoryview(self.data)[int(self.offsets[row]) : int(self.offsets[row + 1])])

    def take(self, rows: Int64s) -> "Values":
        """Return the column of these rows."""
        offsets = _offsets(np.diff(self.offsets)[rows])
        out = np.empty(int(offsets[-1]), np.uint8)
        if len(out):
            kernels.gather(readable(self.data), self.offsets[rows], offsets, out)
        return Values(offsets, out.tobytes())

    def is_one_value(self) -> bool:
        """Return whether there are values, and all are the same."""
        sizes = np.diff(self.offsets)
        return (
            len(sizes) > 0
            and bool((sizes == sizes[0]).all())
            and self.value(0) == self.value(len(sizes) - 1)
            and self.value(0) * len(sizes) == self.data
        )


@dataclass(frozen=True, slots=True)
class Properties:
    """The properties of rows in Arrow's layout of maps: row K has the properties from `offsets[K]` to before `offsets[K
    + 1]`."""

    offsets: Int64s
    names: Values
    values: Values


@dataclass(frozen=True, slots=True)
class EntryRows:
    """The rows of an entry as columns. For a row without a key, the key is empty, and HAS_KEY is not set in the flags.
    The same applies to ordering keys."""

    sequence_ids: Int64s
    event_times: Int64s
    """0 is none."""
    flags: Int64s
    keys: Values
    ordering_keys: Values
    properties: Properties
    payloads: Values

    def __len__(self) -> int:
        return len(self.sequence_ids)

    @classmethod
    def of(cls, rows: Sequence[EntryRow]) -> Self:
        """Return the columns of these rows."""
        pairs = [pair for row in rows for pair in row.properties]
        return cls(
            np.array([row.sequence_id for row in rows], np.int64),
            np.array([row.event_time for row in rows], np.int64),
            np.array([_flags_of(row) for row in rows], np.int64),
            Values.of([row.key or b"" for row in rows]),
            Values.of([row.ordering_key or b"" for row in rows]),
            Properties(
                _offsets(np.array([len(row.properties) for row in rows], np.int64)),
                Values.of([name for name, _ in pairs]),
                Values.of([value for _, value in pairs]),
            ),
            Values.of([row.payload for row in rows]),
        )

    def row(self, k: int) -> EntryRow:
        """Return one row."""
        flags = int(self.flags[k])
        own = range(int(self.properties.offsets[k]), int(self.properties.offsets[k + 1]))
        return EntryRow(
            int(self.sequence_ids[k]),
            self.payloads.value(k),
            self.keys.value(k) if flags & HAS_KEY else None,
            self.ordering_keys.value(k) if flags & HAS_ORDERING_KEY else None,
            tuple((self.properties.names.value(p), self.properties.values.value(p)) for p in own),
            int(self.event_times[k]),
            flags & ~(HAS_KEY | HAS_ORDERING_KEY | HAS_SEQUENCE_ID),
        )


class SentEntry(NamedTuple):
    """The form in which a stock producer has sent rows."""

    compression: CompressionType.ValueType
    payload: Buffer
    """As it came: compressed, if the producer compresses."""
    uncompressed_size: int
    rows: EntryRows | None
    """The rows of the payload, if it is a batch."""
    deliver_at_time: int = 0
    schema_version: bytes = b""


def kind_of(metadata: MessageMetadata) -> EntryKind:
    """Return what an entry's payload is."""
    if metadata.HasField("marker_type"):
        return EntryKind.MARKER
    if metadata.encryption_keys:
        return EntryKind.ENCRYPTED
    if metadata.num_chunks_from_msg > 1:
        return EntryKind.CHUNK
    return EntryKind.BATCH if metadata.HasField("num_messages_in_batch") else EntryKind.SINGLE


def range_of(metadata: MessageMetadata) -> tuple[int, int]:
    """Return the lowest and highest sequence ID in an entry's metadata.

    A broker judges these IDs. C++ and Go clients do not set the highest ID. For batches of these clients, the function
    returns the lowest ID as the highest ID. Only the rows contain the true highest ID. Raises INVALID_SEQUENCE_ID.
    """
    first = metadata.sequence_id
    return _valid(first), _valid(max(first, metadata.highest_sequence_id))


class PulsarBatch:
    """A batch that was decoded only as far as a verdict needs: up to the rows' sequence IDs."""

    def __init__(self, metadata: MessageMetadata, body: Buffer) -> None:
        """Find the rows. `body` is the payload, decompressed. Raises MALFORMED_MESSAGE, INVALID_SEQUENCE_ID."""
        count = metadata.num_messages_in_batch
        if not 0 <= count <= len(body) // _MIN_ROW_BYTES:
            raise malformed(f"a batch of {len(body)} bytes says that it has {count} rows")
        self.metadata = metadata
        self._body = readable(body)
        self._flat = np.empty(count * PLACES, np.int64)
        self._property_count = kernels.scan(self._body, count, self._flat)
        if self._property_count < 0:
            raise malformed(f"row {-1 - self._property_count} of a batch of {count} rows is none of Pulsar's")
        self._places = self._flat.reshape(count, PLACES)
        has_own = (self._places[:, kernels.FLAGS] & HAS_SEQUENCE_ID) != 0
        following = np.int64(range_of(metadata)[0]) + np.arange(count)
        self.sequence_ids: Int64s = np.where(has_own, self._places[:, kernels.SEQUENCE_ID], following)
        """The sequence ID of each row. If a client omitted the row's ID, the ID is the entry's sequence ID plus the
        row's number."""
        if count and int(self.sequence_ids.min()) < 0:
            raise error("INVALID_SEQUENCE_ID", "a row's sequence ID is above 2^63 - 1")

    @classmethod
    def of(cls, entry: WireEntry, metadata: MessageMetadata, max_bytes: int) -> Self:
        """Decode an entry of the kind BATCH. `max_bytes` limits the size of the decompressed payload.

        Raises the errors of `decompress` and of the constructor.
        """
        return cls(metadata, _body(entry, metadata, max_bytes))

    def __len__(self) -> int:
        return len(self.sequence_ids)

    def rows(self) -> EntryRows:
        """Return all columns. Raises MALFORMED_MESSAGE."""
        spans = np.empty(4 * self._property_count, np.int64)
        if not kernels.find_properties(self._body, len(self), self._flat, spans):
            raise malformed("a property of a batch is none of Pulsar's")
        pairs = spans.reshape(-1, 4)
        return EntryRows(
            self.sequence_ids,
            self._column(kernels.EVENT_TIME),
            self._column(kernels.FLAGS),
            self._values(self._column(kernels.KEY), self._column(kernels.KEY_END)),
            self._values(self._column(kernels.ORDERING_KEY), self._column(kernels.ORDERING_KEY_END)),
            Properties(
                _offsets(self._column(kernels.PROPERTIES)),
                self._values(pairs[:, 0], pairs[:, 1]),
                self._values(pairs[:, 2], pairs[:, 3]),
            ),
            self._values(self._column(kernels.PAYLOAD), self._column(kernels.END)),
        )

    def take(self, marks: Uint8s) -> WireEntry:
        """Return an entry with the rows whose mark is not 0; at least one row must have such a mark. The rows keep
        their bytes.

        The entry has the metadata of the batch, except for values that depend on the rows: IDs, counts, sizes, shared
        keys.
        """
        ids = self.sequence_ids[marks != 0]
        out = np.empty(len(self._body) + len(ids) * kernels.SEQUENCE_ID_BYTES, np.uint8)
        size = kernels.take(self._body, len(self), self._flat, self.sequence_ids, marks, out)
        metadata = MessageMetadata()
        metadata.CopyFrom(self.metadata)
        flags = self._column(kernels.FLAGS)[marks != 0]
        keys, ordering_keys = (
            self._values(*(self._column(place)[marks != 0] for place in places))
            for places in ((kernels.KEY, kernels.KEY_END), (kernels.ORDERING_KEY, kernels.ORDERING_KEY_END))
        )
        return _entry(metadata, ids, flags, keys, ordering_keys, out[:size].data)

    def _column(self, place: int) -> Int64s:
        return np.ascontiguousarray(self._places[:, place])

    def _values(self, begins: Int64s, ends: Int64s) -> Values:
        offsets = _offsets(ends - begins)
        out = np.empty(int(offsets[-1]), np.uint8)
        if len(out):
            kernels.gather(self._body, np.ascontiguousarray(begins), offsets, out)
        return Values(offsets, out.tobytes())


def rows_of(entry: WireEntry, metadata: MessageMetadata, max_bytes: int) -> EntryRows:
    """Return the rows of an entry of the kind SINGLE or BATCH.

    Raises the errors of `PulsarBatch.of`, and INVALID_REQUEST for an entry of another kind.
    """
    kind = kind_of(metadata)
    if kind is EntryKind.BATCH:
        return PulsarBatch.of(entry, metadata, max_bytes).rows()
    if kind is not EntryKind.SINGLE:
        raise error("INVALID_REQUEST", f"an entry has no rows that can be read: it is a {kind.value} entry")
    flags = (
        KEY_IS_BASE64 * metadata.partition_key_b64_encoded
        | NULL_VALUE * metadata.null_value
        | NULL_KEY * metadata.null_partition_key
    )
    return EntryRows.of(
        [
            EntryRow(
                range_of(metadata)[0],
                bytes(_body(entry, metadata, max_bytes)),
                metadata.partition_key if metadata.HasField("partition_key") else None,
                metadata.ordering_key if metadata.HasField("ordering_key") else None,
                tuple((pair.key, pair.value) for pair in metadata.properties),
                int(np.uint64(metadata.event_time).view(np.int64)),
                flags,
            )
        ]
    )


def batch_of(
    rows: EntryRows,
    producer_name: bytes,
    publish_time_ms: int,
    compression: CompressionType.ValueType = NONE,
    schema_version: bytes | None = None,
) -> WireEntry:
    """Return a batch of at least one row, for `stamped`. Every stock consumer can read the batch. Rows are compressed
    only if they get smaller.

    Each row has a sequence ID. The entry has no event time, because Java would show this time for rows without an event
    time. If all rows have the same key, the entry has this key, because Key_Shared uses only the entry's key.
    """
    out = np.empty(most_bytes(rows), np.uint8)
    names, values = rows.properties.names, rows.properties.values
    size = kernels.put_rows(
        rows.sequence_ids,
        rows.event_times,
        rows.flags,
        rows.keys.offsets,
        readable(rows.keys.data),
        rows.ordering_keys.offsets,
        readable(rows.ordering_keys.data),
        rows.properties.offsets,
        names.offsets,
        readable(names.data),
        values.offsets,
        readable(values.data),
        rows.payloads.offsets,
        readable(rows.payloads.data),
        out,
    )
    metadata = MessageMetadata(
        producer_name=producer_name,
        publish_time=publish_time_ms,
        compression=compression,
        schema_version=schema_version,
    )
    return _entry(metadata, rows.sequence_ids, rows.flags, rows.keys, rows.ordering_keys, out[:size].data)


def _entry(
    metadata: MessageMetadata, ids: Int64s, flags: Int64s, keys: Values, ordering_keys: Values, body: Buffer
) -> WireEntry:
    """Return a batch of these rows, and complete the batch's metadata."""
    # Also if nothing is compressed: Go's client needs it.
    metadata.uncompressed_size = len(body)
    payload = compress(metadata.compression, body)
    if len(payload) >= len(body):
        metadata.compression, payload = NONE, body
    return WireEntry(_described(metadata, ids, flags, keys, ordering_keys), payload)


def entry_as_sent(sent: SentEntry, rows: EntryRows, producer_name: bytes, publish_time_ms: int) -> WireEntry:
    """Return a batch with the payload that the producer has sent, for `stamped`. `rows` are the rows of the payload;
    each row must have a sequence ID. The metadata are the same as in `batch_of`."""
    metadata = MessageMetadata(
        producer_name=producer_name,
        publish_time=publish_time_ms,
        compression=sent.compression,
        uncompressed_size=sent.uncompressed_size,
        deliver_at_time=sent.deliver_at_time or None,
        schema_version=sent.schema_version or None,
    )
    described = _described(metadata, rows.sequence_ids, rows.flags, rows.keys, rows.ordering_keys)
    return WireEntry(described, sent.payload)


def _described(metadata: MessageMetadata, ids: Int64s, flags: Int64s, keys: Values, ordering_keys: Values) -> bytes:
    """Add the values that depend on the rows to the metadata of a batch, and return the metadata."""
    metadata.sequence_id = int(ids[0])
    metadata.highest_sequence_id = int(ids[-1])
    metadata.num_messages_in_batch = len(ids)
    for field in ("partition_key", "partition_key_b64_encoded", "ordering_key", "event_time"):
        metadata.ClearField(field)
    shared = int(np.bitwise_and.reduce(flags))
    if shared & HAS_KEY and not ((flags ^ flags[0]) & KEY_IS_BASE64).any() and keys.is_one_value():
        metadata.partition_key = keys.value(0)
        if shared & KEY_IS_BASE64:
            metadata.partition_key_b64_encoded = True
    if shared & HAS_ORDERING_KEY and ordering_keys.is_one_value():
        metadata.ordering_key = ordering_keys.value(0)
    return metadata.SerializeToString()


def _body(entry: WireEntry, metadata: MessageMetadata, max_bytes: int) -> Buffer:
    return decompress(metadata.compression, entry.payload, metadata.uncompressed_size, max_bytes)


def most_bytes(rows: EntryRows) -> int:
    """Return what the rows have room in."""
    names, values = rows.properties.names, rows.properties.values
    data = sum(int(column.offsets[-1]) for column in (rows.keys, rows.ordering_keys, names, values, rows.payloads))
    return data + len(rows) * kernels.ROW_BYTES + (len(names.offsets) - 1) * kernels.PROPERTY_BYTES


def _flags_of(row: EntryRow) -> int:
    key = 0 if row.key is None else HAS_KEY
    return row.flags | key | (0 if row.ordering_key is None else HAS_ORDERING_KEY) | HAS_SEQUENCE_ID


def _offsets(sizes: Int64s) -> Int64s:
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _valid(sequence_id: int) -> int:
    if sequence_id > MAX_SEQUENCE_ID:
        raise error("INVALID_SEQUENCE_ID", f"sequence ID {sequence_id} is above 2^63 - 1")
    return sequence_id


# -- Rows as a sidecar stores them.


def stored_batch(
    rows: EntryRows,
    name: bytes,
    epoch: int,
    link: int,
    more: Sequence[tuple[bytes, bytes]] = (),
    complete_up_to: int = NO_SEQUENCE_ID,
) -> Batch:
    """Return the rows as a batch of one producer. After its own properties, each row gets the properties `more`, and
    then its ordering key as a property. Raises MALFORMED_MESSAGE."""
    properties = _stored_properties(rows, more)
    has_properties = int(properties.offsets[-1]) > 0
    return single_producer(
        name,
        epoch,
        link,
        rows.sequence_ids,
        _binary(rows.payloads, (rows.flags & NULL_VALUE) == 0),
        event_times_ms=rows.event_times if rows.event_times.any() else NO_INT64S,
        keys=_stored_keys(rows),
        property_offsets=properties.offsets.astype(np.int32) if has_properties else NO_INT32S,
        property_names=_binary(properties.names) if has_properties else Binary(),
        property_values=_binary(properties.values) if has_properties else Binary(),
        complete_up_to=np.array([complete_up_to], np.int64) if complete_up_to != NO_SEQUENCE_ID else NO_INT64S,
    )


def _stored_properties(rows: EntryRows, more: Sequence[tuple[bytes, bytes]]) -> Properties:
    has_ordering_key = (rows.flags & HAS_ORDERING_KEY) != 0
    if not more and not has_ordering_key.any():
        return rows.properties
    own, ordered = rows.properties, np.flatnonzero(has_ordering_key)
    keys = [base64.b64encode(rows.ordering_keys.value(k)) for k in ordered.tolist()]
    counts, first = np.diff(own.offsets), int(own.offsets[-1])
    offsets = _offsets(counts + len(more) + has_ordering_key)
    # Where each property comes from: the rows' own ones, and after them `more` and the ordering keys.
    sources = np.empty(int(offsets[-1]), np.int64)
    sources[np.arange(first) + np.repeat(offsets[:-1] - own.offsets[:-1], counts)] = np.arange(first)
    for k in range(len(more)):
        sources[offsets[:-1] + counts + k] = first + k
    sources[offsets[ordered + 1] - 1] = first + len(more) + np.arange(len(ordered))
    names = [*(name for name, _ in more), *[ORDERING_KEY.encode()] * len(ordered)]
    values = [*(value for _, value in more), *keys]
    return Properties(offsets, _picked(own.names, names, sources), _picked(own.values, values, sources))


def _picked(column: Values, more: Sequence[bytes], sources: Int64s) -> Values:
    """Return the values at these places. A place counts the column's values first, then the values in `more`."""
    whole = _offsets(np.concatenate((np.diff(column.offsets), [len(value) for value in more])))
    return Values(whole, b"".join((column.data, *more))).take(sources)


def _stored_keys(rows: EntryRows) -> Binary:
    has_key = (rows.flags & HAS_KEY) != 0
    if not has_key.any():
        return Binary()
    if not (rows.flags & KEY_IS_BASE64).any():
        return _binary(rows.keys, has_key)
    return Binary.of([_stored_key(rows, k) if has_key[k] else None for k in range(len(rows))])


def _stored_key(rows: EntryRows, k: int) -> bytes:
    key = rows.keys.value(k)
    if not rows.flags[k] & KEY_IS_BASE64:
        return key
    try:
        return base64.b64decode(key, validate=True)
    except binascii.Error as e:
        raise error("MALFORMED_MESSAGE", f"the key of row {k} is not base64, although its entry says so") from e


def key_for_clients(key: bytes) -> tuple[bytes, int]:
    """Return a stored key in the form that clients write (in base64 if the key is not UTF-8), and the flags for its
    row."""
    try:
        key.decode()
    except UnicodeDecodeError:
        return base64.b64encode(key), HAS_KEY | KEY_IS_BASE64
    return key, HAS_KEY


def _binary(values: Values, is_there: "np.ndarray[tuple[int], np.dtype[np.bool_]] | None" = None) -> Binary:
    validity = b"" if is_there is None or is_there.all() else bitmap(is_there)
    return Binary(values.offsets.astype(np.int32), bytes(values.data), validity)
