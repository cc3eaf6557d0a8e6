"""The names of a topic's producers, by name and by number, in arrays: without an object a name, and without a pause.

Names stand one after the other, in the order in which they came. A hash table says where: a slot holds the upper half
of a name's hash and the name's number plus one, 0 is an empty slot, and who finds another name in its slot goes on to
the next one. A table that becomes full is replaced by one of twice the size, which is filled beside it, some names for
each that comes: nobody waits for all of them.
"""

import mmap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from seqdedupe.format.headers import siphash
from seqdedupe.format.jit import Bytes, Int64s, Int64s2, Uint8s, kernel

# -- An array that grows without being copied.

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


_FIRST_NAMES = 32
"""There is room for these."""

_EIGHTHS_TAKEN = 5
"""Of a table's slots: with more names the next one is begun."""

_EIGHTHS_FULL = 7
"""With more than these the next one is finished at once, which takes very many names in one call."""

_MOVED_A_NAME = 4
"""Into the next table, for each name that comes: it has them all before the other one is full."""

_RELEASED_SLOTS = 2**17
"""Of an old table, at each call: to give back a mebibyte takes the system 0.1 ms."""

_AT_ONCE = 64
"""Names are looked for at once: what the processor finds again in its cache."""

_UPPER_HALF = -(2**32)
_LOWER_HALF = 2**32 - 1


@kernel()
def find_slot(raw: Bytes, begin: int, end: int, hashed: int, slots: Int64s, text: Uint8s, bounds: Int64s) -> int:
    """The slot of the name `raw[begin:end]`, or the empty one that it would get."""
    in_table = slots.shape[0] - 1
    at = hashed & in_table
    while slots[at] != 0:
        if (slots[at] ^ hashed) & _UPPER_HALF == 0:
            number = (slots[at] & _LOWER_HALF) - 1
            start = bounds[number]
            size = bounds[number + 1] - start
            same = 0
            while size == end - begin and same < size and text[start + same] == raw[begin + same]:
                same += 1
            if size == end - begin and same == size:
                break
        at = at + 1 & in_table
    return int(at)


@kernel(inline=True)
def hash_some(raw: Bytes, spans: Int64s2, first: int, slots: Int64s, key: Int64s, hashes: Int64s) -> int:
    """The hashes of the names at these places from the `first` on, as many as there is room for. Returns how many.

    Their slots are looked at one right after the other: the processor then waits for the memory of all of them at once,
    which takes a fifth of the time.
    """
    count = min(spans.shape[0] - first, _AT_ONCE)
    for i in range(count):
        hashes[i] = siphash(raw, spans[first + i, 0], spans[first + i, 1], key)
    in_table = slots.shape[0] - 1
    seen = 0
    for i in range(count):
        seen ^= slots[hashes[i] & in_table]
    # A look from which nothing comes would be left out.
    hashes[_AT_ONCE] = seen
    return int(count)


@kernel()
def find_names(
    raw: Bytes, spans: Int64s2, slots: Int64s, text: Uint8s, bounds: Int64s, key: Int64s, numbers: Int64s
) -> int:
    """The numbers of the names at these places, -1 for those that never came. Returns how many names there are."""
    hashes = np.empty(_AT_ONCE + 1, np.int64)
    first = 0
    while first < spans.shape[0]:
        count = hash_some(raw, spans, first, slots, key, hashes)
        for i in range(count):
            slot = slots[find_slot(raw, spans[first + i, 0], spans[first + i, 1], hashes[i], slots, text, bounds)]
            numbers[first + i] = (slot & _LOWER_HALF) - 1
        first += count
    return first


@kernel()
def add_names(
    raw: Bytes, spans: Int64s2, slots: Int64s, text: Uint8s, bounds: Int64s, key: Int64s, known: int, numbers: Int64s
) -> int:
    """As `find_names`, with new numbers for names that are new. Returns how many there are by now, of `known` before.

    There is room for all of them.
    """
    hashes = np.empty(_AT_ONCE + 1, np.int64)
    first = 0
    while first < spans.shape[0]:
        count = hash_some(raw, spans, first, slots, key, hashes)
        for i in range(count):
            begin, end = spans[first + i, 0], spans[first + i, 1]
            at = find_slot(raw, begin, end, hashes[i], slots, text, bounds)
            if slots[at] == 0:
                start = bounds[known]
                for k in range(end - begin):
                    text[start + k] = raw[begin + k]
                bounds[known + 1] = start + end - begin
                slots[at] = hashes[i] & _UPPER_HALF | known + 1
                known += 1
            numbers[first + i] = (slots[at] & _LOWER_HALF) - 1
        first += count
    return known


@kernel()
def move_names(raw: Bytes, spans: Int64s2, number: int, slots: Int64s, key: Int64s) -> int:
    """The names at these places, which have the numbers from `number` on, enter a table in which none of them is.

    Returns the number after them.
    """
    hashes = np.empty(_AT_ONCE + 1, np.int64)
    in_table = slots.shape[0] - 1
    first = 0
    while first < spans.shape[0]:
        count = hash_some(raw, spans, first, slots, key, hashes)
        for i in range(count):
            at = hashes[i] & in_table
            while slots[at] != 0:
                at = at + 1 & in_table
            number += 1
            slots[at] = hashes[i] & _UPPER_HALF | number
        first += count
    return number


# Who does not know it cannot make names that all get the same slot. Python draws what its hashes begin with.
_KEY: Int64s = np.array([hash(b"the first half"), hash(b"the second half")], np.int64)


class Names:
    """Names, each with its number: its place in the order in which they came."""

    def __init__(self, room: int = 0) -> None:
        """It takes no time to grow before there are as many as it has room for."""
        self._count = 0
        self._text = Growing(0, (), np.uint8)
        self._bounds = Growing(1, (), np.int64)
        """Where each name begins in the text; and where the last one ends."""
        self._slots = _table(max(room, _FIRST_NAMES))
        self._next: Growing | None = None
        """What the slots are replaced by when `_moved`, the number of names that it has, is that of all."""
        self._moved = 0
        self._old: Growing | None = None

    def copy(self) -> "Names":
        """The same names, apart from these."""
        other = Names()
        other._count = self._count
        other._text, other._bounds, other._slots = self._text.copy(), self._bounds.copy(), self._slots.copy()
        return other

    @classmethod
    def of(cls, names: list[bytes]) -> "Names":
        """These names, which are different, in this order."""
        self = cls()
        self.add_all(names)
        return self

    def __len__(self) -> int:
        return self._count

    def __contains__(self, name: bytes) -> bool:
        return self.number(name) is not None

    def number(self, name: bytes) -> int | None:
        """The name's number, None if it never came."""
        number = int(self.numbers(*joined([name]))[0])
        return number if number >= 0 else None

    def numbers(self, raw: Bytes, spans: Int64s2) -> Int64s:
        """The numbers of names that stand in a buffer, from a place up to another; -1 for those that never came."""
        numbers = np.empty(len(spans), np.int64)
        find_names(raw, spans, self._slots.rows, self._text.rows, self._bounds.rows, _KEY, numbers)
        return numbers

    def add_all(self, names: list[bytes]) -> Int64s:
        """Their numbers, new ones for names that are new. Raises MemoryError, and nothing has come then."""
        return self.add(*joined(names))

    def add(self, raw: Bytes, spans: Int64s2) -> Int64s:
        """The same, for names that stand in a buffer."""
        numbers = np.empty(len(spans), np.int64)
        self._reserve(len(spans), int((spans[:, 1] - spans[:, 0]).sum()))
        slots, text, bounds = self._slots.rows, self._text.rows, self._bounds.rows
        self._count = add_names(raw, spans, slots, text, bounds, _KEY, self._count, numbers)
        return numbers

    def _reserve(self, more: int, more_bytes: int) -> None:
        """There is room for so many more."""
        self._text.reserve(int(self._bounds.rows[self._count]) + more_bytes)
        self._bounds.reserve(self._count + more + 1)
        names = self._count + more
        if not _has_room(self._slots, names) and (self._next is None or not _has_room(self._next, names)):
            self._next, self._moved = _table(names), 0
        if self._next is not None:
            is_full = 8 * names > _EIGHTHS_FULL * len(self._slots.rows)
            end = self._count if is_full else min(self._moved + _MOVED_A_NAME * more, self._count)
            bounds = self._bounds.rows[self._moved : end + 1]
            spans = np.column_stack((bounds[:-1], bounds[1:]))
            self._moved = move_names(self._text.rows, spans, self._moved, self._next.rows, _KEY)
            if end == self._count:
                self._old, self._slots, self._next = self._slots, self._next, None
        elif self._old is not None:
            self._old.shrink(max(len(self._old.rows) - _RELEASED_SLOTS, 0))
            self._old = self._old if len(self._old.rows) else None

    def some(self, first: int = 0, count: int | None = None) -> list[bytes]:
        """The names from this number on, at most `count`."""
        end = self._count if count is None else min(first + count, self._count)
        if first >= end:
            return []
        bounds = self._bounds.rows[first : end + 1]
        text = self._text.rows[bounds[0] : bounds[-1]].tobytes()
        return [text[start:end] for start, end in pairwise((bounds - bounds[0]).tolist())]

    def listed(self) -> tuple[Bytes, Int64s2]:
        """All names in a buffer, and from where to where each stands in it."""
        bounds = self._bounds.rows[: self._count + 1]
        return self._text.rows, np.column_stack((bounds[:-1], bounds[1:]))

    def listed_some(self, numbers: Int64s) -> tuple[Bytes, Int64s2]:
        """The same, for the names with these numbers."""
        bounds = self._bounds.rows
        return self._text.rows, np.column_stack((bounds[numbers], bounds[numbers + 1]))

    def names(self, numbers: Int64s) -> list[bytes]:
        """The names with these numbers."""
        text, bounds = self._text.rows, self._bounds.rows
        places = zip(bounds[numbers].tolist(), bounds[numbers + 1].tolist(), strict=True)
        return [text[start:end].tobytes() for start, end in places]

    def clear(self) -> Iterator[None]:
        """Gives all of it back, some at each step. Nothing may be asked of it afterwards."""
        for table in (self._text, self._bounds, self._slots, self._next, self._old):
            if table is not None:
                yield from table.clear()


def joined(names: list[bytes]) -> tuple[Bytes, Int64s2]:
    """Names in a buffer, and from where to where each stands in it."""
    spans = np.zeros((len(names), 2), np.int64)
    np.cumsum(np.fromiter(map(len, names), np.int64, len(names)), out=spans[:, 1])
    spans[1:, 0] = spans[:-1, 1]
    # There is something in a buffer of no names, too.
    return np.frombuffer(b"".join([*names, b"\0"]), np.uint8), spans


def _table(names: int) -> Growing:
    """Slots for so many names, all empty: a power of two."""
    return Growing(1 << (names * 8 // _EIGHTHS_TAKEN).bit_length(), (), np.int64)


def _has_room(slots: Growing, names: int) -> bool:
    return 8 * names <= _EIGHTHS_TAKEN * len(slots.rows)
