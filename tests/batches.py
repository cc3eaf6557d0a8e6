"""Batches for tests."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.message import Message

from seqdedupe.batch import Batch, Binary, properties

Row = tuple[str, int]


def batch(
    rows: Sequence[Row],
    *,
    epochs: dict[str, int] | None = None,
    links: dict[str, int] | None = None,
    payloads: Sequence[bytes | None] | None = None,
    **columns: Any,
) -> Batch:
    """A batch of (producer name, sequence ID) rows. Epochs are 1 and links -1 unless given."""
    names = list(dict.fromkeys(name for name, _ in rows))
    if payloads is None:
        payloads = [f"{name}-{sequence_id}".encode() for name, sequence_id in rows]
    payload_column = Binary.of_all([p or b"" for p in payloads])
    if any(p is None for p in payloads):
        payload_column.validity = np.packbits([p is not None for p in payloads], bitorder="little").tobytes()
    keys = columns.pop("keys", None)
    row_properties = columns.pop("row_properties", None)
    if row_properties is not None:
        columns["property_offsets"], columns["property_names"], columns["property_values"] = properties(row_properties)
    return Batch(
        producer_names=Binary.of_all([name.encode() for name in names]),
        epochs=np.array([(epochs or {}).get(name, 1) for name in names], np.int64),
        previous_sequence_ids=np.array([(links or {}).get(name, -1) for name in names], np.int64),
        producer_indexes=np.array([names.index(name) for name, _ in rows] if len(names) > 1 else [], np.int32),
        sequence_ids=np.array([sequence_id for _, sequence_id in rows], np.int64),
        payloads=payload_column,
        keys=Binary.of(keys) if keys is not None else Binary(),
        **columns,
    )


def put_columns(message: Message, columns: dict[str, Any]) -> None:
    """Puts columns in the place of others, in a batch as the schema has it."""
    for name, value in columns.items():
        message.ClearField(name)
        if isinstance(value, bytes):
            setattr(message, name, value)
        else:
            getattr(message, name).extend(value)
