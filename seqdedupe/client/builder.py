"""The builder checks a producer's messages, and gathers the messages into sealed batches."""

import operator
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import numpy as np
import numpy.typing as npt

from seqdedupe.batch import NO_INT64S, Batch, Binary, Int64s, PropertyColumns
from seqdedupe.batch import properties as property_columns
from seqdedupe.client.pending import PendingBatch
from seqdedupe.client.producer_session import ProducerConfig
from seqdedupe.errors import error
from seqdedupe.figures import counted
from seqdedupe.limits import (
    MAX_BATCH_BYTES,
    MAX_BATCH_ROWS,
    MAX_EVENT_TIME_MS,
    MAX_PAYLOAD_BYTES,
    MAX_SEQUENCE_ID,
    MIN_EVENT_TIME_MS,
    NO_SEQUENCE_ID,
)

BATCH_OVERHEAD_BYTES = 512
"""The maximum size of the parts of an encoded batch other than rows, in bytes: the producer, and the tags and lengths
of the columns."""

ROW_OVERHEAD_BYTES = 33
"""The maximum size of the parts of a row other than payload, key and properties, in bytes: ID, times, offsets and bits.
"""

PROPERTY_OVERHEAD_BYTES = 8
"""The bytes of a property in addition to its name and value."""

_NO_EPOCHS = np.zeros(1, np.int64)
_NO_LINKS = np.full(1, NO_SEQUENCE_ID)
"""The columns of a batch before it is sent. The send queue replaces them, and does not change these arrays."""

_EPOCH = datetime.fromtimestamp(0, UTC)
_MILLISECOND = timedelta(milliseconds=1)

Payloads = Binary | Sequence[bytes | None]
Keys = Binary | Sequence[bytes | str | None]
Numbers = npt.NDArray[np.int64] | Sequence[int]
Properties = Mapping[str, str]
PropertyRows = PropertyColumns | Sequence[Properties | None]


class Builder:
    """Gathers a producer's messages, and passes each sealed batch to `emit`.

    Sequence IDs rise strictly. The first ID may have any value. `last_sequence_id` is the highest ID sent. Before the
    first message, `last_sequence_id` is the ID that Open returned. A message without an ID gets `last_sequence_id + 1`.
    """

    def __init__(
        self,
        name: bytes,
        persisted: int,
        config: ProducerConfig,
        emit: Callable[[PendingBatch], None],
    ) -> None:
        self._names = Binary.of_all([name])
        self._emit = emit
        self._last_row = config.max_batch_rows - 1
        self._max_batch_bytes = config.max_batch_bytes
        self.last_sequence_id = persisted
        self._last_sent = NO_SEQUENCE_ID
        self.leaving: PendingBatch | None = None
        """The batch that is being passed to `emit`."""
        self._start()

    def _start(self) -> None:
        self.pending = PendingBatch()
        """The batch that the next message joins, unless that message seals it."""
        self._sequence_ids: list[int] = []
        self._payloads: list[bytes | None] = []
        self._some_without_payload = False
        self._keys: dict[int, bytes] = {}
        self._event_times_ms: dict[int, int] = {}
        self._properties: dict[int, Properties] = {}
        self._size_bytes = BATCH_OVERHEAD_BYTES

    @property
    def is_empty(self) -> bool:
        return not self._payloads

    @property
    def rows(self) -> int:
        """The number of gathered messages."""
        return len(self._payloads)

    def append(
        self,
        payload: bytes | None,
        sequence_id: int | None,
        key: bytes | str | None,
        event_time: datetime | int | None,
        properties: Properties | None,
    ) -> tuple[PendingBatch, int]:
        """Add a message. Return the batch and the row of the message. An invalid message raises an error before
        anything is changed."""
        if type(payload) is bytes and key is None and event_time is None and not properties:
            # The fast path for a common message that fits into the batch: it combines the checks of `_append`.
            next_id = self.last_sequence_id + 1 if sequence_id is None else sequence_id
            payloads = self._payloads
            row = len(payloads)
            size_bytes = self._size_bytes + ROW_OVERHEAD_BYTES + len(payload)
            is_next = type(next_id) is int and self._last_sent < next_id <= MAX_SEQUENCE_ID
            if is_next and size_bytes < self._max_batch_bytes and row < self._last_row:
                payloads.append(payload)
                self._size_bytes = size_bytes
                self._last_sent = next_id
                if next_id > self.last_sequence_id:
                    self.last_sequence_id = next_id
                self._sequence_ids.append(next_id)
                return self.pending, row
        return self._append(payload, sequence_id, key, event_time, properties)

    def _append(
        self,
        payload: bytes | None,
        sequence_id: int | None,
        key: bytes | str | None,
        event_time: datetime | int | None,
        properties: Properties | None,
    ) -> tuple[PendingBatch, int]:
        sequence_id = self.next_id(sequence_id)
        if type(payload) is not bytes and payload is not None:
            payload = _bytes_of("payload", payload)
        size = len(payload or b"")
        if size > MAX_PAYLOAD_BYTES:
            raise _payload_too_large(size)
        key = key_bytes(key)
        event_time_ms = milliseconds(event_time)
        properties = _copy(properties)
        size += len(key or b"") + ROW_OVERHEAD_BYTES
        for name, value in properties.items():
            size += len(_utf8("property", name)) + len(_utf8("property", value)) + PROPERTY_OVERHEAD_BYTES
        if BATCH_OVERHEAD_BYTES + size > MAX_BATCH_BYTES:
            raise _batch_too_large(BATCH_OVERHEAD_BYTES + size)
        if self._size_bytes + size > MAX_BATCH_BYTES:
            self.seal()
        row = len(self._payloads)
        if key is not None:
            self._keys[row] = key
        if event_time_ms:
            self._event_times_ms[row] = event_time_ms
        if properties:
            self._properties[row] = properties
        self._some_without_payload |= payload is None
        pending = self.pending
        self._payloads.append(payload)
        self._sequence_ids.append(sequence_id)
        self.sent(sequence_id)
        self._size_bytes += size
        if row >= self._last_row or self._size_bytes >= self._max_batch_bytes:
            self.seal()
        return pending, row

    def seal(self) -> None:
        """Seal the gathered messages, if there are any, and pass the batch to `emit`."""
        rows = len(self._payloads)
        if not rows:
            return
        pending = self.pending
        batch = self._batch(
            _id_column(self._sequence_ids),
            _payload_column(self._payloads) if self._some_without_payload else Binary.of_all(self._payloads),  # type: ignore[arg-type]
        )
        if self._keys:
            batch.keys = Binary.of([self._keys.get(row) for row in range(rows)])
        if self._event_times_ms:
            batch.event_times_ms = np.zeros(rows, np.int64)
            batch.event_times_ms[list(self._event_times_ms)] = list(self._event_times_ms.values())
        if self._properties:
            _set_properties(batch, [self._properties.get(row) for row in range(rows)])
        pending.seal(batch, self._size_bytes)
        self.leaving = pending
        self._start()
        self._emit(pending)
        self.leaving = None

    def next_id(self, sequence_id: int | None) -> int:
        """Return the ID of the next message: `sequence_id`, or `last_sequence_id + 1` if `sequence_id` is None. Raises
        INVALID_SEQUENCE_ID, NOT_ASCENDING."""
        try:
            sequence_id = self.last_sequence_id + 1 if sequence_id is None else operator.index(sequence_id)
        except TypeError as e:
            raise error("INVALID_SEQUENCE_ID", f"a sequence ID is an int, not {type(sequence_id).__name__}") from e
        if not self._last_sent < sequence_id <= MAX_SEQUENCE_ID:
            raise self._bad_sequence_id(sequence_id)
        return sequence_id

    def sent(self, sequence_id: int) -> None:
        """Record that a message with this ID is sent. Later messages must have higher IDs."""
        self._last_sent = sequence_id
        self.last_sequence_id = max(self.last_sequence_id, sequence_id)

    def add_columns(
        self,
        payloads: Payloads,
        sequence_ids: Numbers | None,
        keys: Keys | None,
        event_times_ms: Numbers | None,
        properties: PropertyRows | None,
    ) -> PendingBatch:
        """Pass a complete batch to `emit`, after the gathered messages. Invalid columns raise an error before anything
        is changed."""
        return self.add_batch(self.check_columns(payloads, sequence_ids, keys, event_times_ms, properties))

    def check_columns(
        self,
        payloads: Payloads,
        sequence_ids: Numbers | None,
        keys: Keys | None,
        event_times_ms: Numbers | None,
        properties: PropertyRows | None,
    ) -> Batch:
        """Return the batch of these columns. Raises an error if they cannot be sent."""
        batch = self._batch(NO_INT64S, payloads if isinstance(payloads, Binary) else _payload_column(payloads))
        rows = len(batch.payloads.offsets) - 1
        if not 1 <= rows <= MAX_BATCH_ROWS:
            raise error("INVALID_BATCH", f"a batch has {max(rows, 0)} rows: it should have 1 to {MAX_BATCH_ROWS}")
        batch.sequence_ids = self._check_ids(sequence_ids, rows)
        if keys is not None:
            batch.keys = keys if isinstance(keys, Binary) else Binary.of([key_bytes(key) for key in keys])
        if event_times_ms is not None:
            times = np.ascontiguousarray(event_times_ms, np.int64)
            batch.event_times_ms = times if times.any() else NO_INT64S
        if properties is not None:
            if not isinstance(properties, PropertyColumns):
                properties = [_copy(row) for row in properties]
            _set_properties(batch, properties)
        _check_columns(batch, rows)
        return batch

    def _batch(self, sequence_ids: Int64s, payloads: Binary) -> Batch:
        return Batch(self._names, _NO_EPOCHS, _NO_LINKS, sequence_ids, payloads)

    def add_batch(self, batch: Batch) -> PendingBatch:
        """Pass a checked batch to `emit`, after the gathered messages."""
        self.seal()
        pending = PendingBatch()
        pending.seal(batch, _size_bytes(batch))
        self.sent(pending.last_sequence_id)
        self.leaving = pending
        self._emit(pending)
        self.leaving = None
        return pending

    def _check_ids(self, sequence_ids: Numbers | None, rows: int) -> Int64s:
        if sequence_ids is None:
            if self.last_sequence_id > MAX_SEQUENCE_ID - rows:
                raise self._bad_sequence_id(self.last_sequence_id + rows)
            return self.last_sequence_id + 1 + np.arange(rows, dtype=np.int64)
        column: Int64s = np.ascontiguousarray(sequence_ids)
        if column.dtype != np.int64:
            raise error("INVALID_SEQUENCE_ID", f"sequence IDs are 64-bit signed integers, not {column.dtype}")
        if column.shape != (rows,):
            raise error(
                "INVALID_BATCH", f"the batch has {counted(len(column), 'sequence ID')} for {counted(rows, 'payload')}"
            )
        if int(column[0]) <= self._last_sent:
            raise self._bad_sequence_id(int(column[0]))
        if not (column[1:] > column[:-1]).all():
            bad = 1 + int(np.argmin(column[1:] > column[:-1]))
            raise error(
                "NOT_ASCENDING",
                f"sequence ID {column[bad]} comes after {column[bad - 1]} in a batch",
                sequence_id=column[bad],
            )
        return column

    def _bad_sequence_id(self, sequence_id: int) -> Exception:
        if not 0 <= sequence_id <= MAX_SEQUENCE_ID:
            return error("INVALID_SEQUENCE_ID", f"{sequence_id} is not a sequence ID: they are 0 to 2^63 - 1")
        return error(
            "NOT_ASCENDING",
            f"sequence ID {sequence_id} is not above {self._last_sent}, which this producer has sent before",
            hint="The client resends messages without a receipt. Send only rising sequence IDs.",
            sequence_id=sequence_id,
            last_sequence_id=self._last_sent,
        )


def _id_column(sequence_ids: list[int]) -> Int64s:
    rows = len(sequence_ids)
    if rows == 1:
        return np.array(sequence_ids, np.int64)
    if sequence_ids[-1] - sequence_ids[0] == rows - 1:  # the IDs rise, so there is no gap
        return sequence_ids[0] + np.arange(rows, dtype=np.int64)
    return np.array(sequence_ids, np.int64)


def _payload_column(payloads: Sequence[bytes | None]) -> Binary:
    """Return the column of these payloads. The payload column is never omitted, because rows without a payload must be
    marked. (A key column is omitted if no row has a key.)"""
    values = [payload if payload is None else _bytes_of("payload", payload) for payload in payloads]
    present = np.array([value is not None for value in values], np.uint8)
    validity = b"" if present.all() else np.packbits(present, bitorder="little").tobytes()
    return Binary.of_all([value or b"" for value in values], validity)


def _set_properties(batch: Batch, rows: PropertyRows) -> None:
    count = len(rows.offsets) - 1 if isinstance(rows, PropertyColumns) else len(rows)
    if count != len(batch.payloads.offsets) - 1:
        raise error("INVALID_BATCH", f"there are properties for {count} of {counted(len(batch), 'row')}")
    if isinstance(rows, PropertyColumns):
        batch.property_offsets, batch.property_names, batch.property_values = rows
        return
    try:
        batch.property_offsets, batch.property_names, batch.property_values = property_columns(
            None if row is None else dict(row) for row in rows
        )
    except (UnicodeEncodeError, AttributeError) as e:
        raise error("INVALID_BATCH", f"a property is not valid Unicode text: {e}") from e


def _check_columns(batch: Batch, rows: int) -> None:
    """Check the limits that the sidecar enforces."""
    for name, column in (("payloads", batch.payloads), ("keys", batch.keys)):
        if column:
            _check_binary(name, column, rows)
    if len(batch.event_times_ms) not in (0, rows):
        raise error(
            "INVALID_BATCH",
            f"the batch has {counted(len(batch.event_times_ms), 'event time')} for {counted(rows, 'row')}",
        )
    if len(batch.payloads.data) > MAX_PAYLOAD_BYTES:
        longest = int(np.diff(batch.payloads.offsets).max())
        if longest > MAX_PAYLOAD_BYTES:
            raise _payload_too_large(longest)
    size_bytes = _size_bytes(batch)
    if size_bytes > MAX_BATCH_BYTES:
        raise _batch_too_large(size_bytes)


def _size_bytes(batch: Batch) -> int:
    """Return an upper bound for the size of the encoded batch in bytes."""
    return (
        BATCH_OVERHEAD_BYTES
        + ROW_OVERHEAD_BYTES * len(batch)
        + PROPERTY_OVERHEAD_BYTES * max(len(batch.property_names.offsets) - 1, 0)
        + len(batch.payloads.data)
        + len(batch.keys.data)
        + len(batch.property_names.data)
        + len(batch.property_values.data)
    )


def _check_binary(name: str, column: Binary, rows: int) -> None:
    offsets, validity = column.offsets, column.validity
    if offsets.dtype != np.int32 or len(offsets) != rows + 1 or len(validity) not in (0, (rows + 7) // 8):
        raise error("INVALID_BATCH", f"the column of {name} does not have {rows} rows with offsets of 32 bits")
    if offsets[0] != 0 or offsets[-1] != len(column.data) or (offsets[1:] < offsets[:-1]).any():
        raise error(
            "INVALID_BATCH", f"the offsets of {name} do not rise from 0 to the {len(column.data)} bytes there are"
        )


def _bytes_of(what: str, value: object) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise error("INVALID_REQUEST", f"a {what} is bytes, not {type(value).__name__}")


def key_bytes(key: bytes | str | None) -> bytes | None:
    if isinstance(key, str):
        return _utf8("key", key)
    return None if key is None else _bytes_of("key", key)


def _utf8(what: str, value: object) -> bytes:
    if not isinstance(value, str):
        raise error("INVALID_REQUEST", f"a {what} is text, not {type(value).__name__}")
    try:
        return value.encode()
    except UnicodeEncodeError as e:
        raise error("INVALID_REQUEST", f"a {what} is not valid Unicode: {value[:80]!r}") from e


def _copy(row: Properties | None) -> dict[str, str]:
    return dict(row) if row else {}


def milliseconds(event_time: datetime | int | None) -> int:
    """Return the event time in milliseconds since 1970; 0 if there is none."""
    if isinstance(event_time, datetime):
        if event_time.tzinfo is None:
            raise error("INVALID_REQUEST", f"the event time {event_time} has no time zone")
        return (event_time - _EPOCH) // _MILLISECOND
    milliseconds = operator.index(event_time or 0)
    if not MIN_EVENT_TIME_MS <= milliseconds <= MAX_EVENT_TIME_MS:
        raise error("INVALID_REQUEST", f"the event time {milliseconds} ms is out of range")
    return milliseconds


def _payload_too_large(size_bytes: int) -> Exception:
    return error(
        "MESSAGE_TOO_LARGE",
        f"a payload of {size_bytes} bytes: at most {MAX_PAYLOAD_BYTES} are taken",
        size_bytes=size_bytes,
        limit_bytes=MAX_PAYLOAD_BYTES,
    )


def _batch_too_large(size_bytes: int) -> Exception:
    return error(
        "BATCH_TOO_LARGE",
        f"a batch of up to {size_bytes} bytes: at most {MAX_BATCH_BYTES} are taken",
        size_bytes=size_bytes,
        limit_bytes=MAX_BATCH_BYTES,
    )
