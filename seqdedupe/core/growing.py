"""An array that grows without being copied."""

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

MAPPED_BYTES = 1024 * 1024
"""From this size on an array has pages of memory of its own. A smaller one is copied sooner than it is mapped anew."""

_RELEASED_BYTES = 4 * 1024 * 1024
"""Given back at each step: it takes the system some 0.3 ms."""

_GROWTH = 8
"""There is room for one in so many more than are there. It takes no memory before it is written to."""


class Growing:
    """`rows`: an array whose first axis gets longer. What is new in it is zero.

    Nobody may keep `rows`, nor a view of it, while it may grow: what is written to an old one can be lost.
    """

    def __init__(self, rows: int, width: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._width = width
        self._row_bytes = self._dtype.itemsize * int(np.prod(width, dtype=np.int64))
        self._memory: mmap.mmap | None = None
        self.rows = self._new(rows)

    def reserve(self, rows: int) -> None:
        """Has room for so many. Raises MemoryError, and is as it was."""
        if rows > len(self.rows):
            self._resize(rows + rows // _GROWTH)

    def copy(self) -> "Growing":
        """Another one, with the same in it."""
        other = Growing(len(self.rows), self._width, self._dtype)
        other.rows[:] = self.rows
        return other

    def shrink(self, rows: int) -> None:
        """Has room for no more than these, the first ones."""
        self._resize(rows)

    def release(self, row: int) -> None:
        """Gives the memory of one row back, as far as no other row has a part of it: what the row has is not needed."""
        if self._memory is not None:
            first = -(-row * self._row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (row + 1) * self._row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            if first < end:
                self._memory.madvise(mmap.MADV_DONTNEED, first, end - first)

    def clear(self) -> Iterator[None]:
        """Gives all of it back, some at each step."""
        while len(self.rows):
            self._resize(max(len(self.rows) - _RELEASED_BYTES // self._row_bytes, 0))
            yield

    def _new(self, rows: int) -> npt.NDArray[Any]:
        if (size_bytes := rows * self._row_bytes) < MAPPED_BYTES:
            self._memory = None
            return np.zeros((rows, *self._width), self._dtype)
        self._memory = _mapped(size_bytes)
        return self._view(self._memory, rows)

    def _view(self, memory: mmap.mmap, rows: int) -> npt.NDArray[Any]:
        # Unlike an array made of a buffer, this one keeps the memory where it is as long as there is a view of it.
        flat = np.frombuffer(memory, self._dtype, rows * self._row_bytes // self._dtype.itemsize)
        return flat.reshape(rows, *self._width)

    def _resize(self, rows: int) -> None:
        memory = self._memory
        if memory is not None and rows * self._row_bytes >= MAPPED_BYTES and self._is_remapped(memory, rows):
            return
        old, there = self.rows, min(rows, len(self.rows))
        new = self._new(rows)
        new[:there] = old[:there]
        self.rows = new

    def _is_remapped(self, memory: mmap.mmap, rows: int) -> bool:
        """Whether the system could move the pages: not where it has no such call, or somebody does keep a view."""
        before = len(self.rows)
        self.rows = self.rows[:0].copy()
        try:
            memory.resize(rows * self._row_bytes)
        except (BufferError, SystemError, OSError):
            self.rows = self._view(memory, before)
            return False
        self.rows = self._view(memory, rows)
        return True


def _mapped(size_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise MemoryError(f"{size_bytes} bytes cannot be had: {e}") from e
