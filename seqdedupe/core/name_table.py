"""The names of a topic's producers, by name and by number. They are stored in arrays, without an object for each name
and without long pauses.

Names are stored one after the other, in the order of arrival. A hash table finds a name. A slot contains the upper half
of a name's hash, and the name's number plus one; 0 is an empty slot. If a slot contains another name, the search
continues at the next slot. A table that becomes full is replaced by a table of twice the size. Each new name moves a
few names into the larger table, so no caller waits until all names are moved. `Pattern`, at the end, finds the names
that match.
"""

import mmap
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from seqdedupe.format.headers import siphash
from seqdedupe.format.jit import Bytes, Int64s, Int64s2, Uint8s, kernel

# -- An array that grows without being copied.

MAPPED_BYTES = 1024 * 1024
"""From this size on an array has separate pages of memory. Copying a smaller array is faster than mapping its pages."""

_RELEASED_BYTES = 4 * 1024 * 1024
"""The memory that is released in one step. That takes the system about 0.3 ms."""

_GROWTH = 8
"""An array grows by 1/_GROWTH more than it needs. The extra rows use no memory before something is written to them."""


class Growing:
    """`rows` is an array whose first axis can grow. New rows are zero.

    Do not keep `rows`, or a view of it, while the array may grow: data written to an old array can be lost.
    """

    def __init__(self, rows: int, width: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._width = width
        self._row_bytes = self._dtype.itemsize * int(np.prod(width, dtype=np.int64))
        self._memory: mmap.mmap | None = None
        self.rows = self._new(rows)

    def reserve(self, rows: int) -> None:
        """Make room for this number of rows. On MemoryError the array is unchanged."""
        if rows > len(self.rows):
            self._resize(rows + rows // _GROWTH)

    def copy(self) -> "Growing":
        """Return a copy."""
        other = Growing(len(self.rows), self._width, self._dtype)
        other.rows[:] = self.rows
        return other

    def shrink(self, rows: int) -> None:
        """Keep only the first `rows` rows."""
        self._resize(rows)

    def release(self, row: int) -> None:
        """Release the memory of one row whose data is not needed. Memory pages that also contain other rows are
        kept."""
        if self._memory is not None:
            first = -(-row * self._row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (row + 1) * self._row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            if first < end:
                self._memory.madvise(mmap.MADV_DONTNEED, first, end - first)

    def clear(self) -> Iterator[None]:
        """Release all memory, some at each step."""
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
        # `frombuffer` exports the buffer, so the memory cannot be moved while a view of the array exists.
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
        """Move the pages, and return whether the move succeeded. The move fails if the system has no such call, or if a
        view exists."""
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
"""The names for which a new table has room."""

_EIGHTHS_TAKEN = 5
"""With more names than 5/8 of a table's slots, the next table is begun."""

_EIGHTHS_FULL = 7
"""With more names than 7/8 of the slots, the next table is finished at once: one call brought very many names."""

_MOVED_A_NAME = 4
"""Names moved into the next table per new name: enough to finish before the table in use is full."""

_RELEASED_SLOTS = 2**17
"""Slots of an old table that one call releases: 1 MiB, which takes the system 0.1 ms."""

_AT_ONCE = 64
"""The number of names that are looked up together. Their data fits into the processor's cache."""

_UPPER_HALF = -(2**32)
_LOWER_HALF = 2**32 - 1


@kernel()
def find_slot(raw: Bytes, begin: int, end: int, hashed: int, slots: Int64s, text: Uint8s, bounds: Int64s) -> int:
    """Return the slot of the name `raw[begin:end]`, or the empty slot that it would get."""
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
    """Hash the names at `spans` from `first` on, at most _AT_ONCE names. Return the number of hashed names.

    The function reads the slots of these names one right after the other. So the processor waits for all slots at the
    same time, which takes a fifth of the time.
    """
    count = min(spans.shape[0] - first, _AT_ONCE)
    for i in range(count):
        hashes[i] = siphash(raw, spans[first + i, 0], spans[first + i, 1], key)
    in_table = slots.shape[0] - 1
    seen = 0
    for i in range(count):
        seen ^= slots[hashes[i] & in_table]
    # Without a use of `seen`, the compiler would drop the reads.
    hashes[_AT_ONCE] = seen
    return int(count)


@kernel()
def find_names(
    raw: Bytes, spans: Int64s2, slots: Int64s, text: Uint8s, bounds: Int64s, key: Int64s, numbers: Int64s
) -> int:
    """Write the numbers of the names at `spans`, -1 for unknown names. Return the number of spans."""
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
    """Do the same as `find_names`, and assign numbers to new names. `known` is the number of known names before the
    call. Return the number of known names after the call.

    The table must have room for all names.
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
    """Put the names at `spans`, numbered from `number` on, into a table that does not contain these names yet.

    Return the number after the last name's number.
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


# Without knowledge of this key, nobody can choose names that all get the same slot. The key is random, because Python's
# hash seed is random.
_KEY: Int64s = np.array([hash(b"the first half"), hash(b"the second half")], np.int64)


class Names:
    """Names, numbered in the order in which they came."""

    def __init__(self, room: int = 0) -> None:
        """Make a table that need not grow before it has `room` names."""
        self._count = 0
        self._text = Growing(0, (), np.uint8)
        self._bounds = Growing(1, (), np.int64)
        """The beginning of each name in the text, and the end of the last one."""
        self._slots = _table(max(room, _FIRST_NAMES))
        self._next: Growing | None = None
        """The table that replaces `_slots` when it has all names. It has the first `_moved` names."""
        self._moved = 0
        self._old: Growing | None = None

    def copy(self) -> "Names":
        """Return a separate copy."""
        other = Names()
        other._count = self._count
        other._text, other._bounds, other._slots = self._text.copy(), self._bounds.copy(), self._slots.copy()
        return other

    @classmethod
    def of(cls, names: list[bytes]) -> "Names":
        """Number these names, all different, in this order."""
        self = cls()
        self.add_all(names)
        return self

    def __len__(self) -> int:
        return self._count

    def __contains__(self, name: bytes) -> bool:
        return self.number(name) is not None

    def number(self, name: bytes) -> int | None:
        """Return the name's number, or None if the name is unknown."""
        number = int(self.numbers(*joined([name]))[0])
        return number if number >= 0 else None

    def numbers(self, raw: Bytes, spans: Int64s2) -> Int64s:
        """Return the numbers of the names at `spans` (begin, end) of a buffer; -1 for unknown names."""
        numbers = np.empty(len(spans), np.int64)
        find_names(raw, spans, self._slots.rows, self._text.rows, self._bounds.rows, _KEY, numbers)
        return numbers

    def add_all(self, names: list[bytes]) -> Int64s:
        """Return the numbers of names, and number new names. After MemoryError no name is added."""
        return self.add(*joined(names))

    def add(self, raw: Bytes, spans: Int64s2) -> Int64s:
        """Do the same as `add_all` for names at `spans` (begin, end) of a buffer."""
        numbers = np.empty(len(spans), np.int64)
        self._reserve(len(spans), int((spans[:, 1] - spans[:, 0]).sum()))
        slots, text, bounds = self._slots.rows, self._text.rows, self._bounds.rows
        self._count = add_names(raw, spans, slots, text, bounds, _KEY, self._count, numbers)
        return numbers

    def _reserve(self, more: int, more_bytes: int) -> None:
        """Make room for further names. Move some names into the next table, or release some memory of the old table."""
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
        """Return the names from number `first` on, at most `count`."""
        end = self._count if count is None else min(first + count, self._count)
        if first >= end:
            return []
        bounds = self._bounds.rows[first : end + 1]
        text = self._text.rows[bounds[0] : bounds[-1]].tobytes()
        return [text[start:end] for start, end in pairwise((bounds - bounds[0]).tolist())]

    def listed(self) -> tuple[Bytes, Int64s2]:
        """Return a buffer with all names, and the begin and end of each."""
        bounds = self._bounds.rows[: self._count + 1]
        return self._text.rows, np.column_stack((bounds[:-1], bounds[1:]))

    def listed_some(self, numbers: Int64s) -> tuple[Bytes, Int64s2]:
        """Return a buffer, and the begin and end of the names with these numbers."""
        bounds = self._bounds.rows
        return self._text.rows, np.column_stack((bounds[numbers], bounds[numbers + 1]))

    def names(self, numbers: Int64s) -> list[bytes]:
        """Return the names with these numbers."""
        text, bounds = self._text.rows, self._bounds.rows
        places = zip(bounds[numbers].tolist(), bounds[numbers + 1].tolist(), strict=True)
        return [text[start:end].tobytes() for start, end in places]

    def clear(self) -> Iterator[None]:
        """Release all memory, a part at each step. Do not use the object afterwards."""
        for table in (self._text, self._bounds, self._slots, self._next, self._old):
            if table is not None:
                yield from table.clear()


def joined(names: list[bytes]) -> tuple[Bytes, Int64s2]:
    """Return a buffer with these names, and the begin and end of each."""
    spans = np.zeros((len(names), 2), np.int64)
    np.cumsum(np.fromiter(map(len, names), np.int64, len(names)), out=spans[:, 1])
    spans[1:, 0] = spans[:-1, 1]
    # The extra byte is for an empty list: `frombuffer` refuses an empty buffer.
    return np.frombuffer(b"".join([*names, b"\0"]), np.uint8), spans


def _table(names: int) -> Growing:
    """Make a table of empty slots for this number of names. The number of slots is a power of two."""
    return Growing(1 << (names * 8 // _EIGHTHS_TAKEN).bit_length(), (), np.int64)


def _has_room(slots: Growing, names: int) -> bool:
    return 8 * names <= _EIGHTHS_TAKEN * len(slots.rows)


# -- Patterns of names. `*` matches any bytes but `/`, `**` matches any bytes, and other bytes match themselves.
#
# A match is one pass over the name that tracks all partial matches at once. For any name it takes at most the product
# of both lengths.

_SLASH = ord("/")
_WITHIN = 1
_OVER = 2
_PARTS = re.compile(r"\$\{(?P<word>\w+)\}|(?P<stars>\*+)|[^*]", re.DOTALL)


@kernel()
def mark_matches(raw: Bytes, spans: Int64s2, literal: Bytes, gaps: Bytes, matched: Uint8s) -> int:
    """Set `matched` to 1 for each name at `spans` that the pattern matches. Return the number of names.

    `gaps[i]` defines which text may precede `literal[i]`. The last gap defines which text may follow all literals.
    """
    end = literal.shape[0]
    # reached[i]: whether the first i bytes of `literal`, with their gaps, match the bytes of the name so far.
    reached = np.zeros(end + 1, np.uint8)
    for k in range(spans.shape[0]):
        reached[:] = 0
        reached[0] = 1
        lowest = highest = 0
        for at in range(spans[k, 0], spans[k, 1]):
            byte = raw[at]
            first, last = end + 1, -1
            for i in range(min(highest + 1, end), lowest - 1, -1):
                stays = reached[i] != 0 and (gaps[i] == _OVER or (gaps[i] == _WITHIN and byte != _SLASH))
                goes_on = i > 0 and reached[i - 1] != 0 and literal[i - 1] == byte
                reached[i] = stays or goes_on
                if reached[i] != 0:
                    first, last = i, max(last, i)
            lowest, highest = first, last
            if last < 0:
                break
        if reached[end] != 0:
            matched[k] = 1
    return int(spans.shape[0])


class Pattern:
    """A compiled pattern. `${word}` is replaced by its text in `words`, in which a `*` matches only itself.

    The pattern `*` alone matches everything.
    """

    def __init__(self, text: str, words: Mapping[str, str] | None = None) -> None:
        literal, gaps = bytearray(), [0]
        for part, is_literal in _parts("**" if text == "*" else text, words or {}):
            if is_literal:
                literal += part
                gaps += [0] * len(part)
            else:
                gaps[-1] = max(gaps[-1], _WITHIN if len(part) == 1 else _OVER)
        self._literal = bytes(literal)
        self._is_literal = not any(gaps)
        self._columns = np.frombuffer(bytes(literal) + b"\0", np.uint8)[:-1], np.array(gaps, np.uint8)
        self.prefix = self._literal[: next((i for i, gap in enumerate(gaps) if gap), len(literal))]
        """The beginning of all names that the pattern matches."""
        self.work = len(literal) + 1
        """The most steps that one byte of a name can take."""

    def matches(self, name: bytes) -> bool:
        """Whether the pattern matches this whole name."""
        if self._is_literal:
            return name == self._literal
        if not name.startswith(self.prefix):
            return False
        matched = np.zeros(1, np.uint8)
        self.mark(*joined([name]), matched)
        return bool(matched[0])

    def mark(self, raw: Bytes, spans: Int64s2, matched: Uint8s) -> None:
        """Set `matched` to 1 for each name at `spans` of a buffer that the pattern matches."""
        mark_matches(raw, spans, *self._columns, matched)


def words_in(text: str) -> list[str]:
    """Return the words of `${word}` in a pattern."""
    return [found["word"] for found in _PARTS.finditer(text) if found["word"]]


def _parts(text: str, words: Mapping[str, str]) -> Iterator[tuple[bytes, bool]]:
    """Yield the parts of a pattern, and whether each is literal. Raises KeyError for an unknown word."""
    for found in _PARTS.finditer(text):
        if found["stars"]:
            yield found["stars"].encode(), False
        else:
            yield (words[found["word"]] if found["word"] else found[0]).encode(errors="surrogatepass"), True
