"""Unusual but legal encodings of a frame: accepted, stored canonically, read back as what was meant."""

import random
import struct
from collections.abc import Callable
from typing import Any

import pytest

from seqdedupe import wire
from seqdedupe.v1 import batch_pb2
from tests.broker_sidecar.calls import NOT_DUP, Client, batch, encoded, receipt_of, refusal_of, verdicts

ROWS = [("p", 0), ("q", 0), ("p", 3), ("q", 9)]

Fields = list[tuple[int, bytes]]
"""Field number and the field as encoded, tag included."""


def fields_of(message: batch_pb2.Batch) -> Fields:
    """A canonical encoding in parts."""
    data = encoded(message)
    fields, at = [], 0
    while at < len(data):
        start = at
        tag, at = varint(data, at)
        size, at = varint(data, at)
        at += size
        fields.append((tag >> 3, data[start:at]))
    return fields


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def value_of(field: bytes) -> bytes:
    _, at = varint(field, 0)
    _, at = varint(field, at)
    return field[at:]


SIZES = {1: 4, 3: 8, 4: 8, 5: 4, 6: 8, 7: 8, 8: 4, 11: 4, 12: 4, 14: 4, 16: 4}
"""The repeated fields, and how many bytes a value of theirs has."""


def split(fields: Fields) -> bytes:
    """Every packed field in two pieces."""
    out = []
    for number, field in fields:
        if number in SIZES:
            value = value_of(field)
            half = len(value) // SIZES[number] // 2 * SIZES[number]
            for piece in (value[:half], value[half:]):
                out += [wire.varint(number << 3 | 2) + wire.varint(len(piece)) + piece]
        else:
            out.append(field)
    return b"".join(out)


def unpacked(fields: Fields) -> bytes:
    """No field packed: a tag a value."""
    out = []
    for number, field in fields:
        if number in SIZES:
            size, value = SIZES[number], value_of(field)
            tag = wire.varint(number << 3 | (1 if size == 8 else 5))
            out += [tag + value[i : i + size] for i in range(0, len(value), size)]
        else:
            out.append(field)
    return b"".join(out)


def backwards(fields: Fields) -> bytes:
    return b"".join(field for _, field in reversed(fields))


def shuffled(fields: Fields) -> bytes:
    """Split, and the pieces of different fields mixed; those of one field stay in order."""
    pieces = [(number, [piece]) for number, piece in fields]
    random.Random(7).shuffle(pieces)
    return b"".join(b"".join(piece) for _, piece in pieces)


def with_unknown_fields(fields: Fields) -> bytes:
    number = b"\xa0\x06\x05"
    text = wire.varint(101 << 3 | 2) + b"\x03abc"
    fixed = wire.varint(102 << 3 | 1) + struct.pack("<q", 5)
    parts = [field for _, field in fields]
    return b"".join([number, *parts[:5], text, *parts[5:], fixed])


def long_lengths(fields: Fields) -> bytes:
    """Lengths in more bytes than they need."""
    out = []
    for number, field in fields:
        value = value_of(field)
        size = len(value)
        padded = bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14 & 0x7F])
        out.append(wire.varint(number << 3 | 2) + padded + value)
    return b"".join(out)


def bytes_given_twice(fields: Fields) -> bytes:
    """A field that is not repeated comes twice: the last one counts."""
    junk = wire.varint(33 << 3 | 2) + b"\x04junk"
    return junk + b"".join(field for _, field in fields)


def empty_fields(fields: Fields) -> bytes:
    """Empty columns said instead of omitted, and an empty piece before each that is there."""
    empty = [(number, wire.varint(number << 3 | 2) + b"\x00") for number in (*range(1, 19), 31, 32, 33)]
    return b"".join(field for _, field in sorted(empty + fields, key=lambda one: one[0]))


UNUSUAL: list[Callable[[Fields], bytes]] = [
    split,
    unpacked,
    backwards,
    shuffled,
    with_unknown_fields,
    long_lengths,
    bytes_given_twice,
    empty_fields,
]


@pytest.mark.parametrize("call", ["stream", "unary"])
@pytest.mark.parametrize("columns", ["plain", "all"])
@pytest.mark.parametrize("unusual", UNUSUAL, ids=lambda f: f.__name__)
def test_accepted_and_stored_canonically(
    client: Client, topic: str, unusual: Callable[[Fields], bytes], columns: str, call: str
) -> None:
    epochs = client.epochs(topic, "p", "q")
    extra: dict[str, Any] = {} if columns == "plain" else ALL_COLUMNS
    message = batch(ROWS, epochs, {"p": -1, "q": -1}, **extra)
    data = unusual(fields_of(message))
    assert data != encoded(message)
    receipt = client.stream(topic).receipt(data) if call == "stream" else client.publish_unary(topic, data)
    assert verdicts(receipt, 4) == [NOT_DUP] * 4
    [record] = client.records(topic)
    assert record.batch == message
    # Byte for byte: the next sidecar, or an auditor, need not know how it was sent.
    assert encoded(record).endswith(encoded(message))


ALL_COLUMNS: dict[str, Any] = {
    "event_times_ms": [1, 0, 3, 4],
    "key_offsets": [0, 1, 1, 1, 3],
    "key_validity": b"\x0b",
    "keys": b"abc",
    "property_offsets": [0, 0, 2, 2, 3],
    "property_name_offsets": [0, 1, 3, 4],
    "property_names": "néx".encode(),
    "property_value_offsets": [0, 0, 2, 3],
    "property_values": b"123",
    "payload_validity": b"\x0f",
}


def test_one_producer_with_a_producer_column_of_zeros(client: Client, topic: str) -> None:
    """Legal by the schema's words, and stored without the column."""
    epochs = client.epochs(topic, "p")
    message = batch([("p", 0), ("p", 1)], epochs)
    spoken = batch_pb2.Batch()
    spoken.CopyFrom(message)
    spoken.producer_indexes.extend([0, 0])
    spoken.event_times_ms.extend([0, 0])
    assert verdicts(client.stream(topic).receipt(spoken), 2) == [NOT_DUP] * 2
    [record] = client.records(topic)
    assert record.batch == message


def test_a_request_whose_batch_comes_in_two_pieces(client: Client, topic: str) -> None:
    """protobuf merges a message field that comes twice; so does the sidecar, or it would store half a batch."""
    epochs = client.epochs(topic, "p", "q")
    message = batch(ROWS, epochs, {"p": -1, "q": -1})
    fields = fields_of(message)
    pieces = [b"".join(f for _, f in part) for part in (fields[:4], fields[4:])]
    stream = client.stream(topic)
    frame = stream.send(b"", frame=77)
    assert refusal_of(stream.answer(frame)).reason == "INVALID_BATCH"
    request = b"".join(bytes(p) for piece in pieces for p in wire.length_delimited(15, piece))
    raw_frame = b"\x09" + (78).to_bytes(8, "little") + request
    stream.send_raw(b"".join(wire.length_delimited(2, raw_frame)))
    assert verdicts(receipt_of(stream.answer(78)), 4) == [NOT_DUP] * 4
    [record] = client.records(topic)
    assert record.batch == message
