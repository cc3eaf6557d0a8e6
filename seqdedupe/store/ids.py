"""The window of deduplication IDs in a snapshot: a record of its own, and the IDs in pieces. docs/formats-store.md.

The record says up to which index pieces count, and which runs. It is written in the one write of its snapshot, and with
it that pieces are gone which lie before the window or in runs. Pieces that have come to the window are written before,
one after the other, as runs are (`id_runs`): what there is of them that no record names is left over, and goes.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rocksdict import WriteBatch

from seqdedupe.core.id_runs import Piece, Run
from seqdedupe.core.id_window import IdWindow
from seqdedupe.errors import error
from seqdedupe.format.headers import SECRET_BYTES
from seqdedupe.store import id_runs
from seqdedupe.store.db import Store
from seqdedupe.store.parts import (
    IDS,
    MAX_NUMBER,
    RUN,
    WINDOW,
    damaged,
    other_format,
    part_key,
    part_number,
    seal,
    unseal,
)

FORMAT_VERSION = 2
"""Of the two kinds of records."""

COPIED_AT_ONCE = 256 * 1024
"""Bytes, written to another store."""

_WINDOW = struct.Struct(f"<B{SECRET_BYTES}sQQI")
_NUMBER_BYTES = 4
"""Of a run that it names."""
_PIECE = struct.Struct("<BQqqI")


@dataclass(slots=True)
class StoredIds:
    """A window as of a snapshot: from `first_index` up to, not including, `next_index`.

    `runs` have the oldest, and pieces what follows. `last` is the last one of these, if it is not written yet.
    `moved_from` is where the pieces of that one began; None if they began where those of this one do.
    """

    key: bytes
    first_index: int
    next_index: int
    runs: tuple[Run, ...] = ()
    last: Piece | None = None
    moved_from: int | None = None

    @property
    def pieces_index(self) -> int:
        """Where its pieces begin."""
        return max(self.first_index, self.runs[-1].end_index if self.runs else 0)


class WrittenPieces:
    """How far the pieces of a topic's window are written: each begins where the one before it ends, or later, where
    what is between is forgotten. It belongs to the store's event loop."""

    def __init__(self, incarnation: int, end_index: int) -> None:
        """As it is found: up to where a snapshot names them."""
        self.end_index = end_index
        self._incarnation = incarnation
        self._has_left_over = True
        """Whether there may be more of an earlier attempt, which was cut otherwise."""

    def check_follows(self, ids: StoredIds) -> None:
        """Raises STORE_UNAVAILABLE if pieces before the last one of a window are to be written again."""
        index = max(self.end_index, ids.pieces_index)
        if index != (ids.next_index if ids.last is None else ids.last.first_index):
            raise error("STORE_UNAVAILABLE", f"the IDs from index {index} on were not written, or may be lost")

    def put(self, batch: WriteBatch, piece: Piece) -> None:
        """Adds the next one to a write, or the first one to what is there already."""
        if self._has_left_over:
            key = part_key(self._incarnation, IDS, self.end_index)
            batch.delete_range(key, part_key(self._incarnation, IDS, MAX_NUMBER))
        key = part_key(self._incarnation, IDS, piece.first_index)
        fixed = _PIECE.pack(
            FORMAT_VERSION, piece.chunk_index, piece.first_time_ms, piece.last_time_ms, len(piece.sizes)
        )
        batch.put(key, seal(key, fixed + piece.sizes.tobytes() + piece.ids.tobytes()))

    def written(self, piece: Piece) -> None:
        """That was written."""
        self.end_index = piece.end_index
        self._has_left_over = False


def put(batch: WriteBatch, incarnation: int, ids: StoredIds, pieces: WrittenPieces) -> None:
    """Adds a window to what a snapshot writes."""
    if ids.moved_from is not None:
        batch.delete_range(part_key(incarnation, IDS, ids.moved_from), part_key(incarnation, IDS, ids.pieces_index))
    key = part_key(incarnation, WINDOW, 0)
    fixed = _WINDOW.pack(FORMAT_VERSION, ids.key, ids.first_index, ids.next_index, len(ids.runs))
    batch.put(key, seal(key, fixed + b"".join(run.number.to_bytes(_NUMBER_BYTES, "little") for run in ids.runs)))
    if ids.last is not None:
        pieces.put(batch, ids.last)


async def copy(old: Store, new: Store, incarnation: int) -> None:
    """The new store has the topic's window as the old one has it, durable on return. Raises STORE_UNAVAILABLE, and
    STORE_DAMAGED for a record that is not what was written."""
    await write_all(new, _whole(old, incarnation))


def _whole(store: Store, incarnation: int) -> Iterator[tuple[bytes, bytes]]:
    for part in (RUN, IDS, WINDOW):
        for key, value in store.scan(part_key(incarnation, part, 0), part_key(incarnation, part, MAX_NUMBER)):
            unseal(key, value)
            yield key, value


async def write_all(store: Store, records: Iterator[tuple[bytes, bytes]]) -> None:
    """Writes these bit by bit, durable on return. Raises STORE_UNAVAILABLE, and what `records` raises."""
    # All of it is to go to one opening of RocksDB: what is written before another one may be lost.
    opening = store.opening
    batch = WriteBatch(raw_mode=True)
    for key, value in records:
        batch.put(key, value)
        if batch.size_in_bytes() >= COPIED_AT_ONCE:
            await store.write_when_idle(batch)
            batch = WriteBatch(raw_mode=True)
    await store.write_when_idle(batch)
    await store.flush(opening)


def end_index(store: Store, incarnation: int) -> int:
    """Up to where the stored snapshot of a topic names IDs; 0 if it has no window. Blocks. Raises as `load`."""
    at = part_key(incarnation, WINDOW, 0)
    for key, value in store.scan(at, at + b"\0"):
        _, _, _, index, _ = _WINDOW.unpack_from(_checked(key, value, _WINDOW))
        return int(index)
    return 0


def load(store: Store, incarnation: int, next_index: int) -> IdWindow | None:
    """The window in the snapshot that goes up to this index; None if the topic has none. Takes long, in any thread.

    Raises STORE_DAMAGED, NEWER_FORMAT, OLDER_FORMAT, STORE_UNAVAILABLE.
    """
    at = part_key(incarnation, WINDOW, 0)
    for key, value in store.scan(at, at + b"\0"):
        body = _checked(key, value, _WINDOW)
        _, secret, first_index, end_index, count = _WINDOW.unpack_from(body)
        if len(body) != _WINDOW.size + _NUMBER_BYTES * count:
            raise damaged(key, f"it is {len(body)} bytes long, and names {count} runs")
        if end_index != next_index or first_index > end_index:
            raise damaged(key, f"the window goes from {first_index} to {end_index}, and the snapshot to {next_index}")
        numbers = np.frombuffer(body, "<u4", count, _WINDOW.size).tolist()
        runs = tuple(id_runs.load(store, incarnation, number) for number in numbers)
        pieces_index = _checked_end(key, runs, first_index, end_index)
        window = IdWindow(secret, first_index)
        try:
            window.load(_pieces(store, incarnation, pieces_index, end_index), runs)
        except ValueError as e:
            raise damaged(key, str(e)) from e
        return window
    return None


def _checked_end(key: bytes, runs: tuple[Run, ...], first_index: int, end_index: int) -> int:
    """Where the pieces begin that follow on these runs of a window."""
    index = None
    for run in runs:
        if index not in (None, run.first_index) or not max(first_index, run.first_index) < run.end_index <= end_index:
            raise damaged(key, f"the run {run.number}, from {run.first_index} to {run.end_index}, is not of its window")
        index = run.end_index
    if runs and runs[0].first_index > first_index:
        raise damaged(key, f"the IDs from index {first_index} on are in no run")
    return first_index if index is None else index


def _pieces(store: Store, incarnation: int, first_index: int, end_index: int) -> Iterator[Piece]:
    """All of them, which have to follow each other from the first index up to the end."""
    index = first_index
    for key, value in store.scan(part_key(incarnation, IDS, first_index), part_key(incarnation, IDS, end_index)):
        piece = _piece(key, value)
        if piece.first_index != index or piece.end_index > end_index:
            raise damaged(key, f"the IDs from index {index} on, up to {end_index}, should be there")
        index = piece.end_index
        yield piece
    if index != end_index:
        why = f"the IDs from index {index} on, up to {end_index}, are missing"
        raise damaged(part_key(incarnation, IDS, index), why)


def _piece(key: bytes, value: bytes) -> Piece:
    body = _checked(key, value, _PIECE)
    _, chunk_index, first_time_ms, last_time_ms, count = _PIECE.unpack_from(body)
    raw = np.frombuffer(body, np.uint8, offset=_PIECE.size)
    piece = Piece(chunk_index, part_number(key), first_time_ms, last_time_ms, raw[:count], raw[count:])
    if len(piece.sizes) != count or not piece.fits():
        raise damaged(key, f"its {count} IDs do not fit")
    return piece


def _checked(key: bytes, value: bytes, form: struct.Struct) -> bytes:
    """The body of a record of either kind."""
    body = unseal(key, value)
    if body and body[0] != FORMAT_VERSION:
        raise other_format(f"the record {key.hex()}", body[0], FORMAT_VERSION)
    if len(body) < form.size:
        raise damaged(key, f"it is {len(body)} bytes long")
    return body
