"""Batches read and written with protobuf alone, row by row: what the kernels must agree with."""

import struct
from collections.abc import Sequence

from seqdedupe.pulsar_wire.batches import EntryRow
from seqdedupe.pulsar_wire.pulsar_api_pb2 import Property, SingleMessageMetadata
from seqdedupe.pulsar_wire.rows import COMPACTED_OUT, KEY_IS_BASE64, NULL_KEY, NULL_VALUE

_FLAGS = {
    "partition_key_b64_encoded": KEY_IS_BASE64,
    "null_value": NULL_VALUE,
    "compacted_out": COMPACTED_OUT,
    "null_partition_key": NULL_KEY,
}


def written(rows: Sequence[EntryRow], *, with_ids: bool = True) -> bytes:
    """The payload of a batch of these rows."""
    parts = []
    for row in rows:
        metadata = SingleMessageMetadata(
            payload_size=len(row.payload), partition_key=row.key, ordering_key=row.ordering_key
        )
        metadata.properties.extend(Property(key=name, value=value) for name, value in row.properties)
        if row.event_time:
            metadata.event_time = row.event_time % 2**64
        if with_ids:
            metadata.sequence_id = row.sequence_id
        for field, flag in _FLAGS.items():
            if row.flags & flag:
                setattr(metadata, field, True)
        raw = metadata.SerializeToString()
        parts += [struct.pack(">I", len(raw)), raw, row.payload]
    return b"".join(parts)


def read(payload: bytes, count: int, first: int) -> list[EntryRow]:
    """The rows of a batch's payload. Raises ValueError, struct.error or DecodeError if it is malformed."""
    rows = []
    at = 0
    for k in range(count):
        (size,) = struct.unpack_from(">I", payload, at)
        end = at + 4 + size
        metadata = SingleMessageMetadata.FromString(payload[at + 4 : end])
        size = metadata.payload_size
        if not metadata.HasField("payload_size") or size < 0 or end + size > len(payload):
            raise ValueError("payload size")
        at = end + size
        rows.append(
            EntryRow(
                metadata.sequence_id if metadata.HasField("sequence_id") else first + k,
                payload[end:at],
                metadata.partition_key if metadata.HasField("partition_key") else None,
                metadata.ordering_key if metadata.HasField("ordering_key") else None,
                tuple((pair.key, pair.value) for pair in metadata.properties),
                (metadata.event_time + 2**63) % 2**64 - 2**63,
                sum(flag for field, flag in _FLAGS.items() if getattr(metadata, field)),
            )
        )
    if at != len(payload):
        raise ValueError("bytes after the last row")
    if any(row.sequence_id >= 2**63 for row in rows):
        raise ValueError("sequence ID")
    return rows
