"""Frames of several producers as one: a message of a topic costs less in company."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from seqdedupe.batch import NO_INT32S, NO_INT64S, Batch, Binary, Int32s, Int64s
from seqdedupe.client.outbox import Frame
from seqdedupe.limits import MAX_BATCH_ROWS, NO_SEQUENCE_ID

SMALL_BATCH_BYTES = 16 * 1024
"""A batch above this goes in a frame of its own: copying it would cost more than its company saves."""

S = TypeVar("S")


@dataclass(slots=True)
class Part(Generic[S]):
    """A producer's frame, on its way alone or as a part of another."""

    sender: S
    frame: Frame
    goes_alone: bool

    def __len__(self) -> int:
        """How many rows it has."""
        return len(self.frame.batch)


def parts_of(parts: Sequence[Part[S]]) -> list[list[Part[S]]]:
    """The frames to be sent, in this order: parts that stand together may be one, no producer twice in it."""
    if len(parts) == 1:
        return [[*parts]]
    frames: list[list[Part[S]]] = []
    names: set[bytes] = set()
    rows = 0
    is_open = False
    for part in parts:
        name, is_small = part.frame.batch.producer_names.data, part.frame.size_bytes <= SMALL_BATCH_BYTES
        is_small = is_small and not part.goes_alone
        if is_open and is_small and name not in names and rows + len(part) <= MAX_BATCH_ROWS:
            frames[-1].append(part)
        else:
            frames.append([part])
            names.clear()
            rows = 0
        names.add(name)
        rows += len(part)
        is_open = is_small
    return frames


def whole(frames: Sequence[Frame]) -> Frame:
    """The frame of several producers, each with one of these; with the number of the first."""
    if len(frames) == 1:
        return frames[0]
    return Frame(frames[0].number, _whole([frame.batch for frame in frames]), sum(frame.size_bytes for frame in frames))


def _whole(batches: Sequence[Batch]) -> Batch:
    rows = [len(batch) for batch in batches]
    pairs = [max(len(batch.property_names.offsets) - 1, 0) for batch in batches]
    return Batch(
        producer_names=_joined([batch.producer_names for batch in batches], [1] * len(batches)),
        epochs=np.concatenate([batch.epochs for batch in batches]),
        previous_sequence_ids=np.concatenate([batch.previous_sequence_ids for batch in batches]),
        producer_indexes=np.repeat(np.arange(len(batches), dtype=np.int32), rows),
        sequence_ids=np.concatenate([batch.sequence_ids for batch in batches]),
        payloads=_joined([batch.payloads for batch in batches], rows),
        event_times_ms=_filled([batch.event_times_ms for batch in batches], rows, 0),
        keys=_joined([batch.keys for batch in batches], rows),
        property_offsets=_offsets([batch.property_offsets for batch in batches], rows, pairs),
        property_names=_joined([batch.property_names for batch in batches], pairs),
        property_values=_joined([batch.property_values for batch in batches], pairs),
        complete_up_to=_filled([batch.complete_up_to for batch in batches], [1] * len(batches), NO_SEQUENCE_ID),
    )


def _filled(columns: Sequence[Int64s], rows: Sequence[int], none: int) -> Int64s:
    """The column of all, with `none` where one leaves it out; left out if all do."""
    if not any(map(len, columns)):
        return NO_INT64S
    return np.concatenate(
        [column if len(column) else np.full(n, none, np.int64) for column, n in zip(columns, rows, strict=True)]
    )


def _offsets(columns: Sequence[Int32s], rows: Sequence[int], ends: Sequence[int]) -> Int32s:
    """The offsets of all, one after the other; left out if all leave them out. `ends`: the last one of each."""
    if not any(map(len, columns)):
        return NO_INT32S
    parts: list[Int32s] = [np.zeros(1, np.int32)]
    end = 0
    for column, n, last in zip(columns, rows, ends, strict=True):
        parts.append((column[1:] if len(column) else np.zeros(n, np.int32)) + np.int32(end))
        end += last
    return np.concatenate(parts)


def _joined(columns: Sequence[Binary], rows: Sequence[int]) -> Binary:
    """The column of all, with nothing where one leaves it out; left out if all do."""
    if not any(columns):
        return Binary()
    offsets = _offsets([column.offsets for column in columns], rows, [len(column.data) for column in columns])
    validity = b""
    if not all(columns) or any(column.validity for column in columns):
        there = np.concatenate([_there(column, n) for column, n in zip(columns, rows, strict=True)])
        validity = b"" if there.all() else np.packbits(there, bitorder="little").tobytes()
    return Binary(offsets, b"".join([column.data for column in columns]), validity)


def _there(column: Binary, rows: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """For each row whether it is there."""
    if not column or not column.validity:
        return np.full(rows, bool(column), np.uint8)
    return np.unpackbits(np.frombuffer(column.validity, np.uint8), count=rows, bitorder="little")
