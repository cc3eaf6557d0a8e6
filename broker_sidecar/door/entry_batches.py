"""Convert an entry of a stock producer to batches of this sidecar, and a stored message to an entry for a stock
consumer. This module does no I/O.

This module has kernels, so import it only after `kernels.prepare()`.
"""

import base64
import binascii
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from seqdedupe.batch import Batch, Int64s
from seqdedupe.entry_properties import MAX_VERSION_BYTES, ORDERING_KEY, of_entry
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.limits import MAX_BATCH_BYTES, MAX_BATCH_ROWS, NO_SEQUENCE_ID
from seqdedupe.pulsar_wire.batches import (
    EntryKind,
    EntryRows,
    SentEntry,
    key_for_clients,
    kind_of,
    rows_of,
    stored_batch,
)
from seqdedupe.pulsar_wire.frames import WireEntry
from seqdedupe.pulsar_wire.pulsar_api_pb2 import NONE, MessageMetadata, Property
from seqdedupe.pulsar_wire.rows import KEY_IS_BASE64

SPLIT_BYTES = MAX_BATCH_BYTES * 3 // 4
"""The maximum size of payloads, keys and properties in one batch, in bytes as stored. The remaining bytes of the batch
have room for the other columns."""

SPLIT_ROWS = MAX_BATCH_ROWS // 2

INLINE_ROWS = 1_000
INLINE_BYTES = 256 * 1024
"""Entries up to this size are read in a few milliseconds."""

_NOT_TAKEN = {
    EntryKind.CHUNK: "is a chunk of a larger message",
    EntryKind.ENCRYPTED: "is encrypted",
    EntryKind.MARKER: "is a marker of Pulsar's own",
}


class ProducerSession(NamedTuple):
    """The session of a producer, as the topic knows it."""

    name: bytes
    epoch: int


def decoded_bytes(entry: WireEntry, metadata: MessageMetadata) -> int:
    """Return the size of the entry's decompressed payload, limited to the largest size that the sidecar accepts."""
    return min(max(len(entry.payload), metadata.uncompressed_size), MAX_BATCH_BYTES)


def is_large(entry: WireEntry, metadata: MessageMetadata) -> bool:
    """Return whether reading the entry takes long. An entry of a few kilobytes can have a million rows."""
    size = len(entry.metadata) + decoded_bytes(entry, metadata)
    return metadata.num_messages_in_batch > INLINE_ROWS or size > INLINE_BYTES


def is_followed(metadata: MessageMetadata) -> bool:
    """Return whether further chunks of the same message follow this one."""
    return kind_of(metadata) is EntryKind.CHUNK and metadata.chunk_id + 1 < metadata.num_chunks_from_msg


def rows_to_store(
    entry: WireEntry,
    metadata: MessageMetadata,
    schema_version: bytes | None = b"",
    *,
    delays: bool = False,
) -> EntryRows:
    """Return the rows of an entry. The decompressed payload has at most MAX_BATCH_BYTES.

    `schema_version` is the version of the schema with which the log labels messages; empty: no schema; None: each entry
    may have a different version. `delays` is true if the log can deliver messages at a later time.

    Raises INVALID_REQUEST if this sidecar does not accept such entries; MALFORMED_MESSAGE, MESSAGE_TOO_LARGE,
    INVALID_SEQUENCE_ID.
    """
    kind = kind_of(metadata)
    if (what := _NOT_TAKEN.get(kind)) is not None:
        hint = "Turn off chunking and encryption in the producer: a message has at most 5 MiB."
        raise error("INVALID_REQUEST", f"the entry with sequence ID {metadata.sequence_id} {what}", hint=hint)
    if metadata.deliver_at_time and not delays:
        raise _not_taken(metadata, "is to be delivered later", "Publish it when it is due: nothing is delayed here.")
    if metadata.HasField("txnid_most_bits"):
        raise _not_taken(metadata, "belongs to a transaction", "Publish outside of transactions.")
    if schema_version is not None and metadata.schema_version not in (b"", schema_version):
        raise _not_taken(metadata, "was made by another schema", "Use one schema in a producer: its topic has one.")
    if (size := len(metadata.schema_version)) > MAX_VERSION_BYTES:
        # Each row keeps the version. Without a limit, a small entry with many rows would need gigabytes.
        what = f"has a schema version of {size} bytes"
        raise _not_taken(metadata, what, f"A schema version has at most {MAX_VERSION_BYTES} bytes.")
    if metadata.num_messages_in_batch > MAX_BATCH_ROWS:
        what = f"has {metadata.num_messages_in_batch} messages"
        raise _not_taken(metadata, what, f"A batch has at most {MAX_BATCH_ROWS}: set the producer's limit.")
    return rows_of(entry, metadata, MAX_BATCH_BYTES)


def batches_of(
    rows: EntryRows,
    session: ProducerSession,
    last: int,
    deliver_at: int = 0,
    schema_version: bytes = b"",
    *,
    deduplicates: bool = True,
) -> Iterator[Batch]:
    """Yield the batches that store these rows, in order. `last` is the highest sequence ID that the session has sent,
    or that the topic had before. `deliver_at` is the delivery time of the rows (0: now). The rows keep
    `schema_version`, unless it is empty.

    Rows with an ID up to `last` come first, in separate batches: their verdict is DUP or UNKNOWN. If a row's ID is not
    above the IDs of all earlier rows of the entry, the row is omitted, because the topic has that ID when the entry is
    stored. A topic without deduplication receives all rows in their order. The IDs ascend within each batch.
    """
    ids = rows.sequence_ids
    if deduplicates:
        before = np.concatenate(([NO_SEQUENCE_ID], np.maximum.accumulate(ids)[:-1]))
        rising = np.flatnonzero(ids > before)
        is_old = ids[rising] <= last
        groups = [(rising[is_old], NO_SEQUENCE_ID), (rising[~is_old], last)]
    else:
        runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(ids) <= 0) + 1)
        groups = [(run, last if ids[run[0]] > last else NO_SEQUENCE_ID) for run in runs]
    whole = stored_batch(rows, session.name, session.epoch, NO_SEQUENCE_ID, of_entry(deliver_at, schema_version))
    for some, link in groups:
        for part in _parts(whole, some):
            batch = whole if len(part) == len(rows) else whole.take(part)
            # A link is the previously sent ID. For a row that is old or not judged, any lower ID is sufficient.
            batch.previous_sequence_ids = np.array([link], np.int64)
            yield batch
            link = int(ids[part[-1]])


def sent_form(entry: WireEntry, metadata: MessageMetadata, rows: EntryRows, batches: Sequence[Batch]) -> SentEntry:
    """Return the form in which a producer has sent the rows that were converted to these batches. The form has a
    payload if the entry is a Pulsar batch and was converted to one batch."""
    is_whole = kind_of(metadata) is EntryKind.BATCH and [len(batch) for batch in batches] == [len(rows)]
    if not is_whole:
        return SentEntry(metadata.compression, b"", 0, None)
    # A view would keep all data that was received together with it in memory.
    payload = bytes(entry.payload)
    size = metadata.uncompressed_size if metadata.compression != NONE else len(payload)
    return SentEntry(metadata.compression, payload, size, rows, metadata.deliver_at_time, metadata.schema_version)


def _parts(whole: Batch, some: Int64s) -> Iterator[Int64s]:
    """Yield these rows in groups that fit into a batch."""
    if not len(some):
        return
    ends = np.cumsum(_row_bytes(whole)[some])
    first = 0
    while first < len(some):
        limit = (int(ends[first - 1]) if first else 0) + SPLIT_BYTES
        stop = max(int(np.searchsorted(ends, limit, "right")), first + 1)
        stop = min(stop, first + SPLIT_ROWS)
        yield some[first:stop]
        first = stop


def _row_bytes(batch: Batch) -> Int64s:
    """Return the size of each row's payload, key and properties in bytes. A property also has two offsets."""
    sizes = np.diff(batch.payloads.offsets).astype(np.int64)
    if batch.keys:
        sizes += np.diff(batch.keys.offsets)
    if len(of_rows := batch.property_offsets):
        names, values = (column.offsets[of_rows] for column in (batch.property_names, batch.property_values))
        sizes += np.diff(names) + np.diff(values) + 8 * np.diff(of_rows)
    return sizes


def _not_taken(metadata: MessageMetadata, what: str, hint: str) -> SeqdedupeError:
    return error("INVALID_REQUEST", f"the entry with sequence ID {metadata.sequence_id} {what}", hint=hint)


# -- Stored messages for consumers -----------------------------------------------------------------------------

_MAX_UINT64 = 2**64 - 1


def entry_of_row(batch: Batch, row: int, publish_time_ms: int) -> WireEntry:
    """Return a stored message as an entry of one message, with the values that the message's producer has set.

    A key that is not UTF-8 is in base64, as stock clients write such keys. In a topic of deduplication IDs a message
    has no producer: the producer name is empty, and the sequence ID is -1.
    """
    payload, key = batch.payloads[row], batch.keys[row]
    producer = batch.producer_names[batch.producer_of(row)] if batch.producer_names else None
    sequence_id = int(batch.sequence_ids[row]) if len(batch.sequence_ids) else NO_SEQUENCE_ID
    # Clients require the first three, also if they are empty.
    metadata = MessageMetadata(
        producer_name=producer or b"",
        sequence_id=sequence_id & _MAX_UINT64,
        publish_time=publish_time_ms,
        uncompressed_size=len(payload or b""),
    )
    if payload is None:
        metadata.null_value = True
    if key is not None:
        metadata.partition_key, flags = key_for_clients(key)
        if flags & KEY_IS_BASE64:
            metadata.partition_key_b64_encoded = True
    if len(batch.event_times_ms) and (event_time := int(batch.event_times_ms[row])):
        metadata.event_time = event_time & _MAX_UINT64
    if len(batch.property_offsets):
        for k in range(int(batch.property_offsets[row]), int(batch.property_offsets[row + 1])):
            _put_property(metadata, batch.property_names[k] or b"", batch.property_values[k] or b"")
    return WireEntry(metadata.SerializeToString(), payload or b"")


def _put_property(metadata: MessageMetadata, name: bytes, value: bytes) -> None:
    if name == ORDERING_KEY.encode():
        try:
            metadata.ordering_key = base64.b64decode(value, validate=True)
        except binascii.Error:
            # A gRPC client has used the name for different messages.
            pass
        else:
            return
    metadata.properties.append(Property(key=name, value=value))
