"""The window of deduplication IDs in a snapshot: a record of its own, and the IDs in pieces. docs/formats-store.md.

All of them are written in the one write of the snapshot that they belong to: pieces that have come to the window since
the one before, and that those before the window are gone.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rocksdict import WriteBatch

from seqdedupe.core.id_chunks import Piece
from seqdedupe.core.id_window import IdWindow
from seqdedupe.format.tag import SECRET_BYTES
from seqdedupe.store.db import Store
from seqdedupe.store.records import IDS, MAX_NUMBER, WINDOW, damaged, other_format, part_key, part_number, seal, unseal

FORMAT_VERSION = 1
"""Of the two kinds of records."""

_WINDOW = struct.Struct(f"<B{SECRET_BYTES}sQQ")
_PIECE = struct.Struct("<BQqqI")


@dataclass(frozen=True, slots=True)
class StoredIds:
    """A window as of a snapshot: from `first_index` up to, not including, `next_index`.

    `pieces` are those that the durable snapshot before it lacks. `moved_from` is where that one began; None if it began
    where this one does.
    """

    key: bytes
    first_index: int
    next_index: int
    pieces: list[Piece]
    moved_from: int | None = None


def whole(window: IdWindow) -> StoredIds:
    """All of a window, for a store that has nothing of it."""
    first_index = window.first_index
    return StoredIds(window.key, first_index, window.confirmed_index, window.pieces(first_index))


def put(batch: WriteBatch, incarnation: int, ids: StoredIds) -> int:
    """Adds a window to what a snapshot writes. Returns the bytes of its pieces."""
    if ids.moved_from is not None:
        batch.delete_range(part_key(incarnation, IDS, ids.moved_from), part_key(incarnation, IDS, ids.first_index))
    key = part_key(incarnation, WINDOW, 0)
    batch.put(key, seal(key, _WINDOW.pack(FORMAT_VERSION, ids.key, ids.first_index, ids.next_index)))
    size_bytes = 0
    for piece in ids.pieces:
        key = part_key(incarnation, IDS, piece.first_index)
        fixed = _PIECE.pack(
            FORMAT_VERSION, piece.chunk_index, piece.first_time_ms, piece.last_time_ms, len(piece.sizes)
        )
        value = seal(key, fixed + piece.sizes.tobytes() + piece.ids.tobytes())
        batch.put(key, value)
        size_bytes += len(value)
    return size_bytes


def load(store: Store, incarnation: int, next_index: int) -> IdWindow | None:
    """The window in the snapshot that goes up to this index; None if the topic has none. Takes long, in any thread.

    Raises STORE_DAMAGED, NEWER_FORMAT, OLDER_FORMAT, STORE_UNAVAILABLE.
    """
    at = part_key(incarnation, WINDOW, 0)
    for key, value in store.scan(at, at + b"\0"):
        body = _checked(key, value, _WINDOW)
        if len(body) != _WINDOW.size:
            raise damaged(key, f"it is {len(body)} bytes long")
        _, secret, first_index, end_index = _WINDOW.unpack(body)
        if end_index != next_index or first_index > end_index:
            raise damaged(key, f"the window goes from {first_index} to {end_index}, and the snapshot to {next_index}")
        window = IdWindow(secret, first_index)
        try:
            window.load(_pieces(store, incarnation, first_index, end_index))
        except ValueError as e:
            raise damaged(key, str(e)) from e
        return window
    return None


def _pieces(store: Store, incarnation: int, first_index: int, end_index: int) -> Iterator[Piece]:
    """All of them, which have to follow each other from the first index up to the end."""
    index = first_index
    first_key = part_key(incarnation, IDS, first_index)
    for key, value in store.scan(first_key, part_key(incarnation, IDS, MAX_NUMBER)):
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
    if len(body) < form.size:
        raise damaged(key, f"it is {len(body)} bytes long")
    if body[0] != FORMAT_VERSION:
        raise other_format(f"the record {key.hex()}", body[0], FORMAT_VERSION)
    return body
