"""A batch of messages in columns. Clients, logs and readers use the same form of a batch (`batch.proto`)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from seqdedupe import wire
from seqdedupe.errors import error
from seqdedupe.limits import MAX_BATCH_ROWS, MAX_NAMES_AT_ONCE, NO_SEQUENCE_ID
from seqdedupe.v1 import batch_pb2

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

_TAGS = tuple(wire.varint(number << 3 | 2) for number in (*range(1, 19), 31, 32, 33))
"""The tags of the columns in `Batch` (batch.proto), in its canonical order."""

NO_INT64S: Int64s = np.zeros(0, np.int64)
NO_INT32S: Int32s = np.zeros(0, np.int32)


@dataclass(slots=True)
class Binary:
    """A column of byte strings as Arrow lays it out: value i is `data[offsets[i]:offsets[i + 1]]`.

    `validity` is Arrow's bitmap of the values that exist. An empty bitmap means that all values exist. A column without
    offsets is omitted from the batch.
    """

    offsets: Int32s = field(default_factory=lambda: NO_INT32S)
    data: bytes = b""
    validity: bytes = b""

    @staticmethod
    def of(values: Sequence[bytes | None]) -> "Binary":
        """Return the column of these values, omitted if all are None."""
        present = [value is not None for value in values]
        if not any(present):
            return Binary()
        return Binary.of_all([value or b"" for value in values], b"" if all(present) else bitmap(present))

    @staticmethod
    def of_all(values: Sequence[bytes], validity: bytes = b"") -> "Binary":
        """Return the column of these values. Without `validity`, all values exist."""
        offsets = np.zeros(len(values) + 1, np.int32)
        np.fromiter(map(len, values), np.int32, len(values)).cumsum(out=offsets[1:])
        return Binary(offsets, b"".join(values), validity)

    def __bool__(self) -> bool:
        return len(self.offsets) > 0

    def is_there(self, row: int) -> bool:
        return bool(self) and (not self.validity or bool(self.validity[row >> 3] >> (row & 7) & 1))

    def __getitem__(self, row: int) -> bytes | None:
        return self.data[self.offsets[row] : self.offsets[row + 1]] if self.is_there(row) else None

    def values(self) -> list[bytes]:
        """Return all values, if all exist."""
        return [self.data[start:end] for start, end in pairwise(self.offsets.tolist())]

    def rows(self, count: int) -> "list[bytes | None]":
        """Return the values of all `count` rows, None for a missing one."""
        if not self:
            return [None] * count
        values: list[bytes | None] = list(self.values())
        if self.validity:
            for row in range(count):
                if not self.validity[row >> 3] >> (row & 7) & 1:
                    values[row] = None
        return values

    def cuts_into(self, count: int) -> bool:
        """Whether the offsets cut the data into `count` values, with no bytes before, between or after them."""
        offsets = self.offsets
        if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != len(self.data):
            return False
        return not (offsets[1:] < offsets[:-1]).any()

    def take(self, rows: Int64s) -> "Binary":
        """Return the column of these rows, which must be in ascending order."""
        if not self:
            return self
        first, last = (int(rows[0]), int(rows[-1])) if len(rows) else (0, -1)
        validity = self.validity
        if validity:
            bits = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")
            validity = np.packbits(bits[rows], bitorder="little").tobytes()
        if last - first + 1 == len(rows):
            start, end = int(self.offsets[first]), int(self.offsets[last + 1])
            return Binary(self.offsets[first : last + 2] - np.int32(start), self.data[start:end], validity)
        return Binary.of_all([self.data[self.offsets[r] : self.offsets[r + 1]] for r in rows], validity)


def bitmap(present: Sequence[bool] | npt.NDArray[np.bool_]) -> bytes:
    """Return Arrow's validity bitmap: bit `i % 8` of byte `i / 8` is 1 if value i exists."""
    return np.packbits(np.array(present, np.uint8), bitorder="little").tobytes()


_LEFT_OUT = Binary()
"""Columns are never changed, so all omitted columns can share this object."""


@dataclass(slots=True)
class Batch:
    """A batch with P producers and N rows. The columns are defined by the message `Batch` in `batch.proto`.

    This class checks no values: the sidecar checks all data that it receives.
    """

    producer_names: Binary
    epochs: Int64s
    previous_sequence_ids: Int64s
    sequence_ids: Int64s
    payloads: Binary
    producer_indexes: Int32s = field(default_factory=lambda: NO_INT32S)
    event_times_ms: Int64s = field(default_factory=lambda: NO_INT64S)
    keys: Binary = field(default_factory=lambda: _LEFT_OUT)
    property_offsets: Int32s = field(default_factory=lambda: NO_INT32S)
    property_names: Binary = field(default_factory=lambda: _LEFT_OUT)
    property_values: Binary = field(default_factory=lambda: _LEFT_OUT)
    complete_up_to: Int64s = field(default_factory=lambda: NO_INT64S)
    deduplication_ids: Binary = field(default_factory=lambda: _LEFT_OUT)

    def __len__(self) -> int:
        return len(self.sequence_ids) or max(len(self.deduplication_ids.offsets) - 1, 0)

    def producer_of(self, row: int) -> int:
        """Return the position of the row's producer in the list of producers."""
        return int(self.producer_indexes[row]) if len(self.producer_indexes) else 0

    def names(self) -> list[str]:
        """Return the producers' names."""
        names = self.producer_names
        return [names.data[names.offsets[p] : names.offsets[p + 1]].decode() for p in range(len(self.epochs))]

    def properties_of(self, row: int) -> dict[str, str]:
        """Return the row's properties."""
        if not len(self.property_offsets):
            return {}
        start, end = int(self.property_offsets[row]), int(self.property_offsets[row + 1])
        return {
            (self.property_names[i] or b"").decode(): (self.property_values[i] or b"").decode()
            for i in range(start, end)
        }

    def encode(self) -> bytes:
        """Return the canonical encoding."""
        return b"".join(self.encoded_parts())

    def encoded_parts(self) -> list[bytes | memoryview]:
        """Return the canonical encoding in parts, so that the caller can join it with other bytes in one step."""
        names, values = self.property_names, self.property_values
        columns = (
            self.producer_names.offsets.tobytes(),
            self.producer_names.data,
            self.epochs.tobytes(),
            self.previous_sequence_ids.tobytes(),
            self.producer_indexes.tobytes(),
            self.sequence_ids.tobytes(),
            self.event_times_ms.tobytes(),
            self.keys.offsets.tobytes(),
            self.keys.validity,
            self.keys.data,
            self.property_offsets.tobytes(),
            names.offsets.tobytes(),
            names.data,
            values.offsets.tobytes(),
            values.data,
            self.complete_up_to.tobytes(),
            self.deduplication_ids.offsets.tobytes(),
            self.deduplication_ids.data,
            self.payloads.offsets.tobytes(),
            self.payloads.validity,
            self.payloads.data,
        )
        parts: list[bytes | memoryview] = []
        for tag, column in zip(_TAGS, columns, strict=True):
            if column:
                parts += (tag + wire.varint(len(column)), column)
        return parts

    def take(self, rows: Int64s) -> "Batch":
        """Return a batch of these rows. The rows must be in ascending order.

        For each producer, `link` becomes the sequence ID of the producer's last row before the producer's first kept
        row.
        """
        names, epochs, links, indexes, complete = self._take_producers(rows)
        property_offsets, picked = NO_INT32S, NO_INT64S
        if len(self.property_offsets):
            starts, ends = self.property_offsets[:-1][rows], self.property_offsets[1:][rows]
            property_offsets = np.concatenate(([0], np.cumsum(ends - starts))).astype(np.int32)
            picked = np.concatenate([np.arange(s, e) for s, e in zip(starts, ends, strict=True)]).astype(np.int64)
        return Batch(
            producer_names=names,
            epochs=epochs,
            previous_sequence_ids=links,
            producer_indexes=indexes,
            sequence_ids=self.sequence_ids[rows] if len(self.sequence_ids) else NO_INT64S,
            event_times_ms=self.event_times_ms[rows] if len(self.event_times_ms) else NO_INT64S,
            keys=self.keys.take(rows),
            property_offsets=property_offsets if len(picked) else NO_INT32S,
            property_names=self.property_names.take(picked) if len(picked) else Binary(),
            property_values=self.property_values.take(picked) if len(picked) else Binary(),
            complete_up_to=complete,
            deduplication_ids=self.deduplication_ids.take(rows),
            payloads=self.payloads.take(rows),
        )

    def _take_producers(self, rows: Int64s) -> tuple[Binary, Int64s, Int64s, Int32s, Int64s]:
        """Return the producer columns for these rows."""
        if not len(self.epochs):
            return self.producer_names, self.epochs, self.previous_sequence_ids, NO_INT32S, self.complete_up_to
        if len(self.epochs) == 1:
            first = rows[0]
            links = self.sequence_ids[first - 1 : first] if first else self.previous_sequence_ids
            return self.producer_names, self.epochs, links, NO_INT32S, self.complete_up_to
        indexes = self.producer_indexes
        kept, first_kept, new_indexes = np.unique(indexes[rows], return_index=True, return_inverse=True)
        links = self.previous_sequence_ids[kept].copy()
        for place, producer in enumerate(kept):
            before = np.flatnonzero(indexes[: rows[first_kept[place]]] == producer)
            if len(before):
                links[place] = self.sequence_ids[before[-1]]
        column = new_indexes.astype(np.int32) if len(kept) > 1 else NO_INT32S
        complete = self.complete_up_to[kept] if len(self.complete_up_to) else NO_INT64S
        return self.producer_names.take(kept.astype(np.int64)), self.epochs[kept], links, column, complete


def _array(column: bytes, kind: type[np.generic]) -> Any:
    if not column:
        return NO_INT64S if kind is np.int64 else NO_INT32S
    size = np.dtype(kind).itemsize
    return np.frombuffer(column, kind, len(column) // size)


def decode(encoded: bytes) -> Batch:
    """Return the batch of a canonical encoding. Its columns are read-only. Raises MALFORMED_MESSAGE."""
    try:
        message = wire.Batch.FromString(encoded)
    except DecodeError as e:
        raise error("MALFORMED_MESSAGE", "these bytes are not a Batch") from e
    return Batch(
        producer_names=Binary(_array(message.producer_name_offsets, np.int32), message.producer_names),
        epochs=_array(message.epochs, np.int64),
        previous_sequence_ids=_array(message.previous_sequence_ids, np.int64),
        producer_indexes=_array(message.producer_indexes, np.int32),
        sequence_ids=_array(message.sequence_ids, np.int64),
        event_times_ms=_array(message.event_times_ms, np.int64),
        keys=Binary(_array(message.key_offsets, np.int32), message.keys, message.key_validity),
        property_offsets=_array(message.property_offsets, np.int32),
        property_names=Binary(_array(message.property_name_offsets, np.int32), message.property_names),
        property_values=Binary(_array(message.property_value_offsets, np.int32), message.property_values),
        complete_up_to=_array(message.complete_up_to, np.int64),
        deduplication_ids=Binary(_array(message.deduplication_id_offsets, np.int32), message.deduplication_ids),
        payloads=Binary(_array(message.payload_offsets, np.int32), message.payloads, message.payload_validity),
    )


def canonical(encoded: bytes) -> bytes:
    """Return the canonical encoding of any legal one. Raises MALFORMED_MESSAGE."""
    try:
        message = batch_pb2.Batch.FromString(encoded)
    except DecodeError as e:
        raise error("MALFORMED_MESSAGE", "these bytes are not a Batch") from e
    message.DiscardUnknownFields()
    # With one producer, the column of producer indexes is omitted.
    if len(message.epochs) == 1 and not any(message.producer_indexes):
        message.ClearField("producer_indexes")
    if not any(message.event_times_ms):
        message.ClearField("event_times_ms")
    if all(up_to == NO_SEQUENCE_ID for up_to in message.complete_up_to):
        message.ClearField("complete_up_to")
    return message.SerializeToString(deterministic=True)


def single_producer(
    name: bytes,
    epoch: int,
    previous_sequence_id: int,
    sequence_ids: Int64s,
    payloads: Binary,
    **columns: Any,
) -> Batch:
    """Return a batch of one producer's messages."""
    return Batch(
        producer_names=Binary.of_all([name]),
        epochs=np.array([epoch], np.int64),
        previous_sequence_ids=np.array([previous_sequence_id], np.int64),
        sequence_ids=sequence_ids,
        payloads=payloads,
        **columns,
    )


def without_producers(deduplication_ids: Binary, payloads: Binary, **columns: Any) -> Batch:
    """Return a batch for a topic of deduplication IDs."""
    return Batch(Binary(), NO_INT64S, NO_INT64S, NO_INT64S, payloads, deduplication_ids=deduplication_ids, **columns)


class PropertyColumns(NamedTuple):
    """Properties in the layout of a batch: row i has the names and values from `offsets[i]` to before `offsets[i +
    1]`."""

    offsets: Int32s
    names: Binary
    values: Binary


def properties(rows: Iterable[dict[str, str] | None]) -> PropertyColumns:
    """Return the three property columns of these rows. All three are omitted if no row has a property."""
    names: list[bytes] = []
    values: list[bytes] = []
    offsets = [0]
    for row in rows:
        for name, value in (row or {}).items():
            names.append(name.encode())
            values.append(value.encode())
        offsets.append(len(names))
    if not names:
        return PropertyColumns(NO_INT32S, Binary(), Binary())
    return PropertyColumns(np.array(offsets, np.int32), Binary.of_all(names), Binary.of_all(values))


# -- Columns of a request: names and numbers, of many producers at once.

INT32, INT64 = np.dtype("<i4"), np.dtype("<i8")


def binary(offsets: bytes, data: bytes, name: str) -> Binary:
    """Return a column of byte strings; `name` is the name of the offsets. Offsets are not compared with the data.

    Raises the errors of `values`."""
    return Binary(values(offsets, INT32, name), data)


def values(column: bytes, kind: Any, name: str) -> np.ndarray:
    """Return the values of a column, or the offsets of a column. Raises INVALID_REQUEST."""
    size = kind.itemsize
    if len(column) % size or len(column) // size > MAX_BATCH_ROWS + 1:
        raise error(
            "INVALID_REQUEST", f"{name} has {len(column)} bytes: values of {size} bytes are needed, and at most "
            f"{MAX_BATCH_ROWS} rows",
        )  # fmt: skip
    return np.frombuffer(column, kind)


def names_of(message: Any) -> list[bytes]:
    """Return the names in a message's columns, without checking the names. Raises INVALID_REQUEST."""
    return column_of_names(message).values()


def column_of_names(message: Any) -> Binary:
    """Return the same as a column."""
    names = binary(message.producer_name_offsets, message.producer_names, "producer_name_offsets")
    count = len(names.offsets) - 1
    if not 1 <= count <= MAX_NAMES_AT_ONCE:
        raise error("INVALID_REQUEST", f"producer_names takes 1 to {MAX_NAMES_AT_ONCE} names at once")
    if not names.cuts_into(count):
        raise error("INVALID_REQUEST", "the offsets of producer_names do not fit")
    return names
