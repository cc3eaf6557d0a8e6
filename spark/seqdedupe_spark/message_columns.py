"""The columns of messages: the names and types of the columns, and the conversion of the log's columns to Arrow
batches."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from seqdedupe.batch import Binary, Int32s, Int64s
from seqdedupe.client.message import StoredBatch
from seqdedupe_spark.ranges import partition_of
from seqdedupe_spark.stock import STOCK, StockBatch

# -- The encodings of many message IDs, as `MessageId.to_bytes` makes them, in one Arrow column.

_WHOLE_PARTS = [("ledger_tag", "u1"), ("ledger", "<i8"), ("entry_tag", "u1"), ("entry", "<i8"), ("batch_tag", "u1")]
_VARINT_BYTES = 5
_WHOLE_ID = np.dtype([*_WHOLE_PARTS, ("batch", "u1", _VARINT_BYTES)])
"""A whole encoding. A number that is 0 is omitted with its tag, and a varint has no more bytes than it needs."""

_WHOLE_LEDGER, _WHOLE_ENTRY, _WHOLE_BATCH = slice(0, 9), slice(9, 18), slice(18, None)

_SHIFTS = 7 * np.arange(_VARINT_BYTES)


def encoded(ledger_ids: Int64s, entry_ids: Int64s, batch_indexes: Int32s) -> pa.Array:
    """Return the encodings of these message IDs."""
    count = len(ledger_ids)
    ids, kept = np.empty(count, _WHOLE_ID), np.ones((count, _WHOLE_ID.itemsize), bool)
    ids["ledger_tag"], ids["entry_tag"], ids["batch_tag"] = 0x09, 0x11, 0x18
    ids["ledger"], ids["entry"] = ledger_ids, entry_ids
    signed = batch_indexes.astype(np.int64)
    zigzag = signed << 1 ^ signed >> 63
    left = zigzag[:, None] >> _SHIFTS
    ids["batch"] = left & 0x7F | np.where(left >> 7, 0x80, 0)
    kept[:, _WHOLE_BATCH][:, 1:] = left > 0
    kept[ledger_ids == 0, _WHOLE_LEDGER] = False
    kept[entry_ids == 0, _WHOLE_ENTRY] = False
    kept[zigzag == 0, _WHOLE_BATCH] = False
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(kept.sum(axis=1), out=offsets[1:])
    data = ids.view(np.uint8)[kept.ravel()]
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


TIME = pa.timestamp("us", "UTC")

SCHEMA = pa.schema(
    {
        "value": pa.binary(),
        "__key": pa.binary(),
        "__topic": pa.string(),
        "__messageId": pa.binary(),
        "__publishTime": TIME,
        "__eventTime": TIME,
        "__messageProperties": pa.map_(pa.string(), pa.string()),
        "__producerName": pa.string(),
        "__sequenceId": pa.int64(),
        "__index": pa.int64(),
        "__partition": pa.int32(),
        "__incarnation": pa.int64(),
        "__deduplicationId": pa.binary(),
    }
)
"""The columns. Where the Pulsar connector has the same column, the name is the same."""

OF_PULSAR = pa.schema({"__keyBytes": pa.binary(), "__orderingKey": pa.binary(), "__schemaVersion": pa.int64()})
"""Additional columns, on request. Tables that were created without these columns still accept the rows."""

_PROPERTIES = SCHEMA.field("__messageProperties").type

_MAX_TIME_MS = (2**63 - 1) // 1000
"""The last millisecond that can be expressed as microseconds in 64 bits; its negative is the first."""

_ID = np.dtype([("tag1", "u1"), ("ledger", "<i8"), ("tag2", "u1"), ("entry", "<i8"), ("tail", "u1", 2)])
"""The encoding of a message ID that follows from the index: ledger, entry (omitted if it is 0), batch index -1."""

_ENTRY = slice(_ID.fields["tag2"][1], _ID.fields["tail"][1])  # type: ignore[index]


def plain(schema: pa.Schema) -> pa.Schema:
    """Return the same columns, named without the leading `__`."""
    return pa.schema([field.with_name(_plain_name(field)) for field in schema])


def columns_of(with_pulsars: bool, with_plain_names: bool) -> pa.Schema:
    """Return the columns for these two options of the user."""
    schema = pa.schema([*SCHEMA, *OF_PULSAR]) if with_pulsars else SCHEMA
    return plain(schema) if with_plain_names else schema


def _plain_name(field: pa.Field) -> str:
    return str(field.name).removeprefix("__")


def column_of(batch: pa.RecordBatch | pa.Table, name: str) -> Any:
    """Return the column of messages with this name, with the leading `__` or without it. Raises KeyError if the
    messages have no such column."""
    return batch.column("__" + name if "__" + name in batch.schema.names else name)


def to_arrow(stored: Sequence[StoredBatch], topic: str, schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    """Return the rows of at least one stored batch of a topic (full name), in one RecordBatch, with the columns of
    `schema`.

    `schema` contains columns of SCHEMA and OF_PULSAR, or of `plain` of them, in any order. A value is null if there is
    no payload, key or event time (0), or if a time cannot be expressed as microseconds in 64 bits. Values of a single
    batch are not copied.
    """
    rows = _Rows(stored, topic, np.array([len(one) for one in stored]))
    columns = [_MAKERS[_plain_name(field)](rows) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@dataclass(frozen=True)
class _Rows:
    """The data from which a column is made."""

    stored: Sequence[StoredBatch]
    topic: str
    counts: Int64s

    def __len__(self) -> int:
        return int(self.counts.sum())

    @property
    def have_indexes(self) -> bool:
        """Whether a sidecar writes the topic, so that its messages have indexes."""
        return self.stored[0].incarnation != STOCK

    @property
    def have_ids(self) -> bool:
        """Whether the topic has deduplication IDs. Messages of such a topic have neither producers nor sequence IDs."""
        return bool(self.stored[0].batch.deduplication_ids)

    def of_pulsar(self) -> list[StockBatch]:
        """Return the batches, of a topic that no sidecar writes."""
        return [one for one in self.stored if isinstance(one, StockBatch)]

    def indexes(self) -> Int64s:
        first = np.array([one.base_index for one in self.stored])
        return np.repeat(first - np.cumsum(self.counts) + self.counts, self.counts) + np.arange(len(self))


def _array(kind: pa.DataType, column: Binary, count: int) -> pa.Array:
    """Return the column without copying it. If the batch omits the column, return a column of nulls."""
    if not column:
        return pa.nulls(count, kind)
    validity = pa.py_buffer(column.validity) if column.validity else None
    return pa.Array.from_buffers(kind, count, [validity, pa.py_buffer(column.offsets), pa.py_buffer(column.data)])


def _joined(arrays: list[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _joined_numbers(columns: list[Int64s]) -> Int64s:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _bytes(columns: Iterable[Binary], rows: _Rows) -> pa.Array:
    """Return the values of a column of all batches as one array; all null if all batches omit the column."""
    columns = list(columns)
    if not any(columns):
        return pa.nulls(len(rows), pa.binary())
    counts = rows.counts.tolist()
    return _joined([_array(pa.binary(), one, count) for one, count in zip(columns, counts, strict=True)])


def _values(rows: _Rows) -> pa.Array:
    return _bytes((one.batch.payloads for one in rows.stored), rows)


def _keys(rows: _Rows) -> pa.Array:
    return _bytes((one.batch.keys for one in rows.stored), rows)


def _topics(rows: _Rows) -> pa.Array:
    return _repeated(rows.topic, len(rows))


@lru_cache(4)
def _repeated(text: str, count: int) -> pa.Array:
    """Return an array that repeats the text. Results are cached, because most batches of a topic have the same size,
    and often the same producer."""
    return pa.repeat(text, count)


def _message_ids(rows: _Rows) -> pa.Array:
    if any(one.message_ids is not None for one in rows.stored):
        return _given_message_ids(rows)
    count, indexes = len(rows), rows.indexes()
    ids = np.empty(count, _ID)
    ids["tag1"], ids["tag2"], ids["tail"] = 0x09, 0x11, (0x18, 0x01)
    ids["ledger"] = np.repeat(np.array([one.incarnation for one in rows.stored]), rows.counts)
    ids["entry"] = indexes
    offsets = np.arange(0, (count + 1) * _ID.itemsize, _ID.itemsize, dtype=np.int32)
    data = ids.view(np.uint8)
    if not indexes.all():
        kept = np.ones((count, _ID.itemsize), bool)
        kept[indexes == 0, _ENTRY] = False
        offsets[1:], data = np.cumsum(kept.sum(axis=1)), data[kept.ravel()]
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _given_message_ids(rows: _Rows) -> pa.Array:
    columns = []
    for one in rows.stored:
        indexes = one.base_index + np.arange(len(one))
        of_indexes = np.full(len(one), one.incarnation), indexes, np.full(len(one), -1, np.int32)
        columns.append(of_indexes if one.message_ids is None else one.message_ids.columns())
    return encoded(*map(np.concatenate, zip(*columns, strict=True)))


def _times(times_ms: Int64s, are_there: "np.ndarray | None" = None) -> pa.Array:
    fit = (times_ms >= -_MAX_TIME_MS) & (times_ms <= _MAX_TIME_MS)
    missing = ~fit if are_there is None else ~(fit & are_there)
    return pa.array(times_ms * np.int64(1000), mask=missing if missing.any() else None).view(TIME)


def _publish_times(rows: _Rows) -> pa.Array:
    return _times(np.repeat(np.array([one.publish_time_ms for one in rows.stored]), rows.counts))


def _event_times(rows: _Rows) -> pa.Array:
    columns = [one.batch.event_times_ms for one in rows.stored]
    if not any(len(column) for column in columns):
        return pa.nulls(len(rows), TIME)
    times = _joined_numbers(
        [
            column if len(column) else np.zeros(len(one), np.int64)
            for one, column in zip(rows.stored, columns, strict=True)
        ]
    )
    return _times(times, times != 0)


def _properties(rows: _Rows) -> pa.Array:
    if not any(len(one.batch.property_offsets) for one in rows.stored):
        return _no_properties(len(rows))
    counts, names, values = [np.zeros(1, np.int32)], [], []
    for one in rows.stored:
        offsets = one.batch.property_offsets
        if not len(offsets):
            counts.append(np.zeros(len(one), np.int32))
            continue
        counts.append(np.diff(offsets))
        names.append(_array(pa.string(), one.batch.property_names, int(offsets[-1])))
        values.append(_array(pa.string(), one.batch.property_values, int(offsets[-1])))
    offsets = pa.array(np.cumsum(np.concatenate(counts), dtype=np.int32))
    return pa.MapArray.from_arrays(offsets, _joined(names), _joined(values), _PROPERTIES)


@lru_cache(4)
def _no_properties(count: int) -> pa.Array:
    nothing = pa.array([], pa.string())
    return pa.MapArray.from_arrays(pa.array(np.zeros(count + 1, np.int32)), nothing, nothing, _PROPERTIES)


def _producer_names(rows: _Rows) -> pa.Array:
    if rows.have_ids:
        return pa.nulls(len(rows), pa.string())
    alone = {one.batch.producer_names.data if len(one.batch.epochs) == 1 else b"" for one in rows.stored}
    if len(alone) == 1 and (name := alone.pop()):
        return _repeated(name.decode(), len(rows))
    producers = np.array([len(one.batch.epochs) for one in rows.stored])
    names = _joined(
        [
            _array(pa.string(), one.batch.producer_names, count)
            for one, count in zip(rows.stored, producers.tolist(), strict=True)
        ]
    )
    indexes = np.repeat(np.cumsum(producers) - producers, rows.counts)
    if producers.max() > 1:
        indexes += np.concatenate(
            [
                one.batch.producer_indexes if len(one.batch.producer_indexes) else np.zeros(len(one), np.int32)
                for one in rows.stored
            ]
        )
    return names.take(pa.array(indexes))


def _sequence_ids(rows: _Rows) -> pa.Array:
    if rows.have_ids:
        return pa.nulls(len(rows), pa.int64())
    return pa.array(_joined_numbers([one.batch.sequence_ids for one in rows.stored]))


def _indexes(rows: _Rows) -> pa.Array:
    return pa.array(rows.indexes()) if rows.have_indexes else pa.nulls(len(rows), pa.int64())


def _partitions(rows: _Rows) -> pa.Array:
    return pa.array(np.full(len(rows), partition_of(rows.topic), np.int32))


def _incarnations(rows: _Rows) -> pa.Array:
    if not rows.have_indexes:
        return pa.nulls(len(rows), pa.int64())
    return pa.array(np.repeat(np.array([one.incarnation for one in rows.stored]), rows.counts))


def _deduplication_ids(rows: _Rows) -> pa.Array:
    return _bytes((one.batch.deduplication_ids for one in rows.stored), rows)


def _key_bytes(rows: _Rows) -> pa.Array:
    return _keys(rows) if rows.have_indexes else _bytes((one.key_bytes for one in rows.of_pulsar()), rows)


def _ordering_keys(rows: _Rows) -> pa.Array:
    return _bytes((one.ordering_keys for one in rows.of_pulsar()), rows)


def _schema_versions(rows: _Rows) -> pa.Array:
    if rows.have_indexes:
        return pa.nulls(len(rows), pa.int64())
    versions = _joined_numbers([one.schema_versions for one in rows.of_pulsar()])
    return pa.array(versions, mask=versions < 0)


_MAKERS: dict[str, Callable[[_Rows], pa.Array]] = {
    "value": _values,
    "key": _keys,
    "topic": _topics,
    "messageId": _message_ids,
    "publishTime": _publish_times,
    "eventTime": _event_times,
    "messageProperties": _properties,
    "producerName": _producer_names,
    "sequenceId": _sequence_ids,
    "index": _indexes,
    "partition": _partitions,
    "incarnation": _incarnations,
    "deduplicationId": _deduplication_ids,
    "keyBytes": _key_bytes,
    "orderingKey": _ordering_keys,
    "schemaVersion": _schema_versions,
}
