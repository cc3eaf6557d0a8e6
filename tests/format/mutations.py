"""Structured mutations of encoded batches: of values, columns, tags, lengths and order, and of bytes now and then."""

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

import numpy as np

from seqdedupe.batch import Batch, Binary
from seqdedupe.format import layout
from seqdedupe.format.layout import COLUMNS, FIELD_NUMBERS, PLACES, size, start
from seqdedupe.wire import varint
from tests.batches import batch

T = TypeVar("T")
Field = tuple[bytes, bytes, bytes, int]
"""Tag, length and value of a field, and how many bytes each of its values has."""

_EIGHT = ("EPOCHS", "LINKS", "SEQUENCE_IDS", "EVENT_TIMES", "COMPLETE_UP_TO")
_FOUR = ("OFFSETS", "INDEXES")
_NAMES = {value: name for name, value in vars(layout).items() if name.isupper() and type(value) is int}
WIDTHS = [
    8 if _NAMES[column] in _EIGHT else 4 if _NAMES[column].endswith(_FOUR) else 1
    # A place that is no column may have the same number, but not before all the columns.
    for column in range(COLUMNS)
]

SEEDS: list[Batch] = [
    batch([("a", 1)]),
    batch([("a", 0), ("a", 7), ("a", 2**62)]),
    batch([("a", 1), ("b", 1)], payloads=[None, b""]),
    batch([("ü", 3), ("b", 1), ("ü", 4), ("c", 0)], links={"ü": 2, "b": -2}, epochs={"c": 2**40}),
    batch([("a", 1), ("a", 2)], keys=[b"k", None], event_times_ms=np.array([5, 0])),
    batch([("a", 1), ("b", 2), ("a", 3)], row_properties=[{"x": "y", "z": ""}, {}, {"x": "1"}], keys=[b"", b"1", b"2"]),
    batch([("a", 1), ("b", 2)], complete_up_to=np.array([0, -1]), deduplication_ids=Binary.of_all([b"id", b""])),
    batch([("p" * 255, 5), ("q", 5)], payloads=[b"x" * 200, b"y"]),
    batch([(name, i) for i, name in enumerate("abcababab")], payloads=[None] * 9, event_times_ms=np.arange(1, 10)),
]


def fields_of(b: Batch) -> list[Field]:
    """The fields of a batch's canonical encoding."""
    encoded = b.encode()
    places = np.zeros(PLACES, np.int64)
    if layout.layout(np.frombuffer(encoded, np.uint8), 0, len(encoded), places) != layout.CANONICAL:
        raise ValueError("a seed is not canonical")
    return [
        (
            varint(FIELD_NUMBERS[column] << 3 | 2),
            varint(int(size(places, column))),
            encoded[int(start(places, column)) :][: int(size(places, column))],
            WIDTHS[column],
        )
        for column in range(COLUMNS)
        if size(places, column)
    ]


FIELDS = [fields_of(b) for b in SEEDS]


def below(random: Random, limit: int) -> int:
    """A number from 0 on. Random's own methods, which are exactly even, take four times as long."""
    return int(random.random() * limit)


def one_of(random: Random, several: Sequence[T]) -> T:
    return several[int(random.random() * len(several))]


def with_value(field: Field, value: bytes) -> Field:
    return field[0], varint(len(value)), value, field[3]


def change_number(random: Random, fields: list[Field]) -> None:
    at = below(random, len(fields))
    value, width = fields[at][2], fields[at][3]
    if len(value) < width:
        return
    i = below(random, len(value) // width) * width
    old = int.from_bytes(value[i : i + width], "little", signed=True)
    limit = 1 << (8 * width - 1)
    new = one_of(random, (old + 1, old - 1, 0, 1, -1, -2, -3, 2, 3, limit - 1, -limit, random.randrange(-limit, limit)))
    number = max(min(new, limit - 1), -limit).to_bytes(width, "little", signed=True)
    fields[at] = with_value(fields[at], value[:i] + number + value[i + width :])


def swap_numbers(random: Random, fields: list[Field]) -> None:
    at = below(random, len(fields))
    value, width = fields[at][2], fields[at][3]
    values = [value[i : i + width] for i in range(0, len(value), width)]
    random.shuffle(values)
    fields[at] = with_value(fields[at], b"".join(values))


def resize(random: Random, fields: list[Field]) -> None:
    at = below(random, len(fields))
    value, width = fields[at][2], fields[at][3]
    count = one_of(random, (1, width, 2 * width))
    value = one_of(random, (value[count:], value[:-count], value + value[-count:], value + bytes(count), b""))
    fields[at] = with_value(fields[at], value)


def drop(random: Random, fields: list[Field]) -> None:
    if len(fields) > 1:
        del fields[below(random, len(fields))]


def repeat(random: Random, fields: list[Field]) -> None:
    at = below(random, len(fields))
    fields.insert(one_of(random, (at, at + 1, len(fields))), fields[at])


def swap_fields(random: Random, fields: list[Field]) -> None:
    one, other = below(random, len(fields)), below(random, len(fields))
    fields[one], fields[other] = fields[other], fields[one]


def take_from_another(random: Random, fields: list[Field]) -> None:
    other = one_of(random, one_of(random, FIELDS))
    for at, field in enumerate(fields):
        if field[0] == other[0]:
            fields[at] = other
            return
    fields.insert(below(random, len(fields) + 1), other)


def change_tag(random: Random, fields: list[Field]) -> None:
    at = below(random, len(fields))
    tag, length, value, width = fields[at]
    number = one_of(random, (*FIELD_NUMBERS, 0, 19, 30, 40, 2**28))
    wire_type = one_of(random, (2, 2, 2, 0, 1, 5, 7))
    fields[at] = one_of(random, (varint(number << 3 | wire_type), padded(tag))), length, value, width


def change_length(random: Random, fields: list[Field]) -> None:
    at = below(random, len(fields))
    tag, length, value, width = fields[at]
    n = len(value)
    lengths = (varint(n + 1), varint(max(n - 1, 0)), varint(0), padded(length), varint(2**31), varint(2**35 - 1))
    fields[at] = tag, one_of(random, (*lengths, varint(2**62 + n), b"\xff" * (1 + below(random, 10)))), value, width


def padded(number: bytes) -> bytes:
    """The same varint in one byte more than needed."""
    return number[:-1] + bytes((number[-1] | 0x80, 0))


STRUCTURED: list[Callable[[Random, list[Field]], None]] = [
    *[change_number] * 6, *[swap_numbers] * 2, *[resize] * 2, drop, repeat, swap_fields, take_from_another, change_tag,
    change_length,
]  # fmt: skip


def mutated(random: Random) -> bytes:
    """The encoding of a batch that one to three mutations have made."""
    fields = list(one_of(random, FIELDS))
    for _ in range(one_of(random, (1, 1, 1, 2, 2, 3))):
        one_of(random, STRUCTURED)(random, fields)
    encoded = b"".join([part for tag, length, value, _ in fields for part in (tag, length, value)])
    return spoilt(random, encoded) if random.random() < 0.1 else encoded


def spoilt(random: Random, data: bytes) -> bytes:
    """The bytes with some of them cut off, omitted, put in, or other ones in their place."""
    at = below(random, len(data) + 1)
    few = 1 + below(random, 8)
    return one_of(random,
        (data[:at], data[at:], data[:at] + data[at + few :], data[:at] + random.randbytes(few) + data[at:],
         data[:at] + random.randbytes(1) + data[at + 1 :], data[:at] + data[at : at + few] + data[at:])
    )  # fmt: skip
