"""Rows that are an entry each, which every consumer of Pulsar can read: to messages, and to batches again.

Payload, key and event time are Pulsar's own. What else a row has is in properties, beside those of its producer.
"""

import base64
import binascii
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from seqdedupe import batch as batches
from seqdedupe.batch import NO_INT32S, NO_INT64S, Batch, Binary, Int64s
from seqdedupe.entry_properties import ENTRY, EVENT_TIME_MS, KEY_BASE64, MESSAGE, PREFIX, USER, VERSION, Owner
from seqdedupe.limits import NO_SEQUENCE_ID
from seqdedupe.log.pulsar.entries import MAX_ENTRY_BYTES, Message, checked, damaged, surely_taken_bytes


def messages_of(
    owner: Owner,
    number: int,
    index: int,
    encoded: bytes,
    limit_bytes: int = MAX_ENTRY_BYTES,
    version: int = VERSION,
) -> Iterator[Message]:
    """The entries of a batch's rows; the first one gets this number and index, the others count on from there.

    `encoded` was checked: its names and properties are UTF-8, and no row has two properties of one name. Raises
    MESSAGE_TOO_LARGE where a broker would not take one.
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
        message = Message(payload := payloads[row], properties, key, event_time_ms)
        if of_users or len(key) + len(payload or b"") > surely_taken:
            checked(message, limit_bytes)
        yield message


def _native_key(key: bytes, properties: dict[str, str]) -> str:
    """The partition key for a key. One that Pulsar cannot have as it is, is in a property too."""
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


def begins_batch(message: Message) -> bool:
    """Whether a row is the first of its batch, as far as it says."""
    return message.properties.get(MESSAGE, "").split(":", 5)[4:5] != ["0"]


class Rows:
    """Rows of one batch that were read one after the other: all of them, or from some row on, or up to some row."""

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

    def add(self, message: Message) -> bool:
        """Takes a row; False, and it is not taken, if another batch begins with it. Raises LOG_DAMAGED."""
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
        """The batch of all rows that were taken, of which there is at least one. Raises LOG_DAMAGED."""
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


def _own_key(message: Message) -> bytes | None:
    """The key as the producer gave it. Raises ValueError."""
    exact = message.properties.get(KEY_BASE64)
    if exact is None:
        return message.key.encode() if message.key else None
    try:
        return base64.b64decode(exact, validate=True)
    except binascii.Error as e:
        raise ValueError(f"a key in {KEY_BASE64}: {e}") from e


_OURS = frozenset((ENTRY, MESSAGE, KEY_BASE64, EVENT_TIME_MS))


def _of_user(properties: dict[str, str]) -> dict[str, str] | None:
    """The properties that the producer gave."""
    if len(properties) == 2:
        return None
    return {name.removeprefix(USER): value for name, value in properties.items() if name not in _OURS} or None
