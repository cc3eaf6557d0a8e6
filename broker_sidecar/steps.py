"""The messages of `DedupeService.Attach` as bytes: what a broker says, and its columns."""

from typing import Any

import numpy as np

from broker_sidecar.rpc import parse_columns
from seqdedupe import wire
from seqdedupe.batch import Binary
from seqdedupe.errors import error
from seqdedupe.limits import MAX_BATCH_ROWS, MAX_NAMES_AT_ONCE
from seqdedupe.topic.attachment import Columns
from seqdedupe.v1 import dedupe_pb2

INT32, INT64 = np.dtype("<i4"), np.dtype("<i8")

MAX_CHECKS = 256
"""In one message."""

MAX_FIELDS = 2 * MAX_CHECKS
"""In one message, other steps and fields of newer brokers among them."""

SMALL_BYTES = 64 * 1024
"""Whatever a message of this size holds, it can be parsed."""


def parse_steps(data: bytes) -> Any:
    """The steps in a message, of the alias schema. Raises MALFORMED_MESSAGE, INVALID_REQUEST."""
    if len(data) > SMALL_BYTES:
        _check_number_of_fields(data)
    request = parse_columns(wire.AttachRequest, dedupe_pb2.AttachRequest, data)
    if len(request.checks) > MAX_CHECKS:
        raise error("INVALID_REQUEST", f"a message has more than {MAX_CHECKS} checks")
    return request


def _check_number_of_fields(data: bytes) -> None:
    """Raises INVALID_REQUEST if there are too many to make objects of, MALFORMED_MESSAGE.

    16 MiB hold millions of empty checks; parsed, they are half a gigabyte.
    """
    at = 0
    for _ in range(MAX_FIELDS):
        if at >= len(data):
            return
        at = wire.skip_field(data, at)
        if at < 0:
            raise error("MALFORMED_MESSAGE", "the request is not an AttachRequest")
    if at < len(data):
        raise error("INVALID_REQUEST", f"a message has more than {MAX_FIELDS} fields")


def columns_of(message: Any) -> Columns:
    """The columns of a `Check` or `Replay`. Raises INVALID_REQUEST."""
    lowest = values(message.sequence_ids, INT64, "sequence_ids")
    highest = lowest
    if message.highest_sequence_ids:
        highest = values(message.highest_sequence_ids, INT64, "highest_sequence_ids")
    return Columns(values(message.handles, INT32, "handles"), lowest, highest, np.frombuffer(message.passes, np.uint8))


def binary(offsets: bytes, data: bytes, name: str) -> Binary:
    """A column of byte strings, whose offsets have this name; whether they fit is not looked at. As `values`."""
    return Binary(values(offsets, INT32, name), data)


def values(column: bytes, kind: Any, name: str) -> np.ndarray:
    """The values of a column, or of offsets, of which there is one more. Raises INVALID_REQUEST."""
    size = kind.itemsize
    if len(column) % size or len(column) // size > MAX_BATCH_ROWS + 1:
        raise error(
            "INVALID_REQUEST", f"{name} has {len(column)} bytes: values of {size} bytes are needed, and at most "
            f"{MAX_BATCH_ROWS} rows",
        )  # fmt: skip
    return np.frombuffer(column, kind)


def names_of(message: Any) -> list[bytes]:
    """The names in a message's columns, not checked. Raises INVALID_REQUEST."""
    return column_of_names(message).values()


def column_of_names(message: Any) -> Binary:
    """The same as a column."""
    names = binary(message.producer_name_offsets, message.producer_names, "producer_name_offsets")
    count = len(names.offsets) - 1
    if not 1 <= count <= MAX_NAMES_AT_ONCE:
        raise error("INVALID_REQUEST", f"producer_names takes 1 to {MAX_NAMES_AT_ONCE} names at once")
    if not names.cuts_into(count):
        raise error("INVALID_REQUEST", "the offsets of producer_names do not fit")
    return names
