"""The kernels of a window's table for many rows: other threads run meanwhile.

The commit thread waited for the interpreter while a thousand IDs were looked up. For a few rows it costs more to let go
of it than it gains. Nobody else may use the window meanwhile.
"""

from typing import Any

from seqdedupe.core import id_table
from seqdedupe.format.jit import Bytes, Int32s, Int64s, Int64s2, Uint8s, kernel

MANY_ROWS = 256
_MANY_SLOTS = 4096


@kernel(nogil=True, bare=True)
def decide(
    raw: Bytes,
    places: Int64s,
    first_row: int,
    end_row: int,
    frame_index: int,
    deduplicate: bool,
    key: Int64s,
    slots: Int64s,
    ids: Uint8s,
    offsets: Int32s,
    chunks: Int64s2,
    state: Int64s,
    verdicts: Uint8s,
    found: Int64s,
    replaced: Int64s2,
    older: Int64s,
) -> int:
    """As `id_table.decide`, for MANY_ROWS or more."""
    return id_table.decide(
        raw, places, first_row, end_row, frame_index, deduplicate, key, slots, ids, offsets, chunks, state, verdicts,
        found, replaced, older,
    )  # fmt: skip


@kernel(nogil=True, bare=True)
def _sweep(first: int, end: int, key: Int64s, slots: Int64s, ids: Uint8s, offsets: Int32s, chunks: Int64s2,
           state: Int64s) -> int:  # fmt: skip
    return id_table.sweep(first, end, key, slots, ids, offsets, chunks, state)


def sweep(first: int, end: int, *rest: Any) -> int:
    """As `id_table.sweep`."""
    return (_sweep if end - first >= _MANY_SLOTS else id_table.sweep)(first, end, *rest)
