"""Runs of deduplication IDs: those of messages that follow one another, sorted by hash, in pages that lie elsewhere.

Memory has the hash with which each page begins, and a filter: blocks of FILTER_WORDS words, in one of which an ID sets
a bit of each word. What the filter lets through is looked for in the page, where the bytes of the ID decide.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from seqdedupe.core.id_table import NOWHERE, same
from seqdedupe.format.columns import DEDUPLICATION_ID_OFFSETS, DEDUPLICATION_IDS, ROWS, load32, start
from seqdedupe.format.headers import key_of, siphash
from seqdedupe.format.jit import Bytes, Int64s, Int64s2, Uint8s, for_kernels, kernel, shl64

# -- Pieces of a window's chunks, as snapshots keep them.

PIECE_BYTES = 64 * 1024
"""Of IDs with their lengths, that a snapshot writes at once: what writes them holds the whole process."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The IDs of messages that follow one another, of one chunk."""

    chunk_index: int
    """The index of the chunk's first message: a chunk is forgotten as a whole."""
    first_index: int
    first_time_ms: int
    """When the chunk's first message was published, in milliseconds since 1970."""
    last_time_ms: int
    """And the last one of this piece."""
    sizes: Uint8s
    """Of each ID how many bytes it has, 1 to 255."""
    ids: Uint8s
    """One after the other."""

    @property
    def end_index(self) -> int:
        """The index after its last message's."""
        return self.first_index + len(self.sizes)

    def fits(self) -> bool:
        """Whether the sizes cut the IDs, and it lies in its chunk."""
        whole = len(self.ids) == int(self.sizes.sum(dtype=np.int64)) and 0 <= self.chunk_index <= self.first_index
        return bool(whole and len(self.sizes) and self.sizes.min() > 0)


PAGE_BYTES = 4096
FILTER_WORDS = 8
FILTER_BITS_AN_ID = 14
MAX_ROWS = 2**31
"""From the first message of a run to its last one."""

PAGE_HEAD = 2
"""Bytes of a page before its columns: how many IDs it has."""
_OF_AN_ID = 5
"""Bytes of a page for an ID, beside its own: how far its index is from the run's first one, and its length."""

# Columns of `IdRun.chunks`, one row a chunk that the run was made of.
CHUNK_FIRST_INDEX = 0
CHUNK_ROWS = 1
CHUNK_ID_BYTES = 2
CHUNK_FIRST_TIME_MS = 3
CHUNK_LAST_TIME_MS = 4
CHUNK_COLUMNS = 5


@dataclass(frozen=True, slots=True, eq=False)
class IdRun:
    """What memory has of a run. It never changes."""

    number: int
    first_index: int
    end_index: int
    first_hashes: Int64s
    """Of each page."""
    filter: Int64s
    chunks: Int64s2

    def __len__(self) -> int:
        """The IDs in it, as far as it was made of them."""
        return self.end_index - self.first_index

    @property
    def memory_bytes(self) -> int:
        return self.first_hashes.nbytes + self.filter.nbytes

    def covers(self, other: "IdRun") -> bool:
        """Whether it has all that the other one has."""
        return self.first_index <= other.first_index and other.end_index <= self.end_index

    def pages_of(self, hashed: int) -> range:
        """The pages where an ID of this hash can be."""
        first, end = (int(np.searchsorted(self.first_hashes, hashed, side)) for side in ("left", "right"))
        return range(max(first - 1, 0), end)

    def pages_between(self, low: int | None, high: int | None) -> range:
        """The pages where hashes from one to before the other can be."""
        first = 0 if low is None else int(np.searchsorted(self.first_hashes, low, "left")) - 1
        end = len(self.first_hashes) if high is None else int(np.searchsorted(self.first_hashes, high, "left"))
        return range(max(first, 0), end)


@dataclass(frozen=True, slots=True)
class RunEntries:
    """IDs with their indexes, in any order."""

    hashes: Int64s
    deltas: Int64s
    """How far each index is from the first one of the run that is made."""
    offsets: Int64s
    """Where each ID begins, and where the last one ends."""
    ids: Uint8s

    def in_order(self, low: int | None, high: int | None) -> Int64s:
        """Its rows by hash, but for those before the run: from this hash on, before that one (None: all)."""
        keep = self.deltas >= 0
        if low is not None:
            keep &= self.hashes >= low
        if high is not None:
            keep &= self.hashes < high
        rows = np.flatnonzero(keep)
        return rows[np.argsort(self.hashes[rows])]


def filter_of(ids: int) -> Int64s:
    """An empty one for so many."""
    blocks = max(1, -(-ids * FILTER_BITS_AN_ID // (64 * FILTER_WORDS)))
    return np.zeros(blocks * FILTER_WORDS, np.int64)


def entries_of(pieces: list[Piece], first_index: int, key: Int64s) -> RunEntries:
    """The IDs of pieces that follow one another. Takes long, in any thread."""
    sizes = np.concatenate([piece.sizes for piece in pieces])
    deltas = np.arange(len(sizes), dtype=np.int64) + (pieces[0].first_index - first_index)
    return entries_with(sizes, deltas, np.concatenate([piece.ids for piece in pieces]), key)


def entries_in(pages: list[tuple[bytes, int]], key: Int64s) -> RunEntries:
    """The IDs in pages; with each how far its run's first index is from that of the run that is made."""
    sizes, deltas, ids = [], [], []
    for page, base in pages:
        rows = int.from_bytes(page[:PAGE_HEAD], "little")
        deltas.append(np.frombuffer(page, "<u4", rows, PAGE_HEAD).astype(np.int64) + base)
        sizes.append(np.frombuffer(page, np.uint8, rows, PAGE_HEAD + 4 * rows))
        ids.append(np.frombuffer(page, np.uint8, -1, PAGE_HEAD + _OF_AN_ID * rows))
    return entries_with(np.concatenate(sizes), np.concatenate(deltas), np.concatenate(ids), key)


def entries_with(sizes: Uint8s, deltas: Int64s, ids: Uint8s, key: Int64s) -> RunEntries:
    """IDs that lie one after the other. Takes long, in any thread."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, dtype=np.int64, out=offsets[1:])
    hashes = np.empty(len(sizes), np.int64)
    hash_all(ids, offsets, key, hashes)
    return RunEntries(hashes, deltas, offsets, ids)


def page_fits(page: bytes) -> bool:
    """Whether its columns cut its bytes."""
    rows = int.from_bytes(page[:PAGE_HEAD], "little")
    if not rows or len(page) < PAGE_HEAD + _OF_AN_ID * rows:
        return False
    sizes = np.frombuffer(page, np.uint8, rows, PAGE_HEAD + 4 * rows)
    return bool(sizes.min() > 0) and len(page) == PAGE_HEAD + _OF_AN_ID * rows + int(sizes.sum(dtype=np.int64))


@kernel(nogil=True, bare=True)
def hash_all(ids: Uint8s, offsets: Int64s, key: Int64s, hashes: Int64s) -> int:
    """The hashes of all IDs."""
    for row in range(len(hashes)):
        hashes[row] = siphash(ids, int(offsets[row]), int(offsets[row + 1]), key)
    return len(hashes)


@for_kernels
def _block(hashed: int, words: int) -> int:
    """Where the block of a hash begins in a filter."""
    return (((hashed >> 32) & 0xFFFFFFFF) * (words // FILTER_WORDS) >> 32) * FILTER_WORDS


@kernel(nogil=True, bare=True)
def add_to_filter(hashes: Int64s, words: Int64s) -> int:
    """The filter lets these through from now on."""
    for row in range(len(hashes)):
        hashed = int(hashes[row])
        block = _block(hashed, len(words))
        for k in range(FILTER_WORDS):
            words[block + k] |= shl64(1, (hashed >> (6 * k)) & 63)
    return len(hashes)


@kernel(nogil=True, bare=True)
def fill_pages(
    order: Int64s,
    first: int,
    hashes: Int64s,
    deltas: Int64s,
    offsets: Int64s,
    ids: Uint8s,
    out: Uint8s,
    ends: Int64s,
    first_hashes: Int64s,
) -> int:
    """Pages of the IDs in this order from place `first` on, one after the other in `out`, up to as many as `ends` and
    `first_hashes` have room for; no page is empty. `ends` is where each one ends; 0 behind the last one.

    Returns the place up to which they are in pages.
    """
    at = first
    begin = 0
    for page in range(len(ends)):
        ends[page] = 0
        if at == len(order):
            continue
        rows = 0
        size_bytes = PAGE_HEAD
        while at + rows < len(order):
            row = int(order[at + rows])
            more = _OF_AN_ID + int(offsets[row + 1]) - int(offsets[row])
            if size_bytes + more > PAGE_BYTES:
                break
            size_bytes += more
            rows += 1
        first_hashes[page] = hashes[order[at]]
        out[begin] = rows & 0xFF
        out[begin + 1] = rows >> 8
        blob = begin + PAGE_HEAD + _OF_AN_ID * rows
        for k in range(rows):
            row = int(order[at + k])
            delta = int(deltas[row])
            for byte in range(4):
                out[begin + PAGE_HEAD + 4 * k + byte] = (delta >> (8 * byte)) & 0xFF
            size = int(offsets[row + 1]) - int(offsets[row])
            out[begin + PAGE_HEAD + 4 * rows + k] = size
            for byte in range(size):
                out[blob + byte] = ids[int(offsets[row]) + byte]
            blob += size
        begin = blob
        ends[page] = blob
        at += rows
    return at


@kernel(bare=True)
def hash_rows(raw: Bytes, places: Int64s, key: Int64s, hashes: Int64s) -> int:
    """The hashes of the IDs of a batch."""
    offsets = start(places, DEDUPLICATION_ID_OFFSETS)
    blob = start(places, DEDUPLICATION_IDS)
    for row in range(len(hashes)):
        begin, end = load32(raw, offsets + 4 * row), load32(raw, offsets + 4 * row + 4)
        hashes[row] = siphash(raw, blob + begin, blob + end, key)
    return len(hashes)


@kernel(bare=True)
def probe(hashes: Int64s, words: Int64s, rows: Int64s) -> int:
    """The rows of a batch that a filter lets through; how many."""
    count = 0
    for row in range(len(hashes)):
        hashed = int(hashes[row])
        block = _block(hashed, len(words))
        through = 1
        for k in range(FILTER_WORDS):
            through &= int(words[block + k]) >> ((hashed >> (6 * k)) & 63)
        if through & 1:
            rows[count] = row
            count += 1
    return count


@kernel(bare=True)
def find(page: Bytes, raw: Bytes, places: Int64s, row: int) -> int:
    """How far the index of this row's ID is from the run's first one, the highest in this page; NOWHERE if it has none
    with these very bytes."""
    offsets = start(places, DEDUPLICATION_ID_OFFSETS)
    begin = start(places, DEDUPLICATION_IDS) + load32(raw, offsets + 4 * row)
    size = load32(raw, offsets + 4 * row + 4) - load32(raw, offsets + 4 * row)
    rows = int(page[0]) | int(page[1]) << 8
    at = PAGE_HEAD + _OF_AN_ID * rows
    found = NOWHERE
    for k in range(rows):
        other = int(page[PAGE_HEAD + 4 * rows + k])
        if other == size and same(raw, begin, page, at, size):
            found = max(found, load32(page, PAGE_HEAD + 4 * k) & 0xFFFFFFFF)
        at += other
    return found


def parts_of(runs: list[IdRun], pages: int) -> Iterator[tuple[int | None, int | None]]:
    """Ranges of hashes, from one to before the next (None: all), in which no run has more than about so many pages."""
    cuts = np.unique(np.concatenate([run.first_hashes[pages::pages] for run in runs])).tolist()
    return iter(zip([None, *cuts], [*cuts, None], strict=True))


# -- A window of deduplication IDs that was imported: one run, which has times where others have indexes.

MILLISECONDS_A_SECOND = 1000


@dataclass(frozen=True, slots=True, eq=False)
class ImportedIds:
    """What memory has of it. Its run begins with 0 and has as many IDs as its `end_index` says; how far an ID is from
    the first one is the second since 1970 up to which it was published."""

    run: IdRun
    key: bytes
    """Of the hash, SECRET_BYTES of them. It is the run's own: the topic's may be another one by the next start."""
    checksum: bytes
    """That of the file."""

    @property
    def first_time_ms(self) -> int:
        """When the first one was published, in milliseconds since 1970."""
        return int(self.run.chunks[0, CHUNK_FIRST_TIME_MS])

    @property
    def last_time_ms(self) -> int:
        return int(self.run.chunks[-1, CHUNK_LAST_TIME_MS])

    def candidates(self, view: Uint8s, places: Int64s) -> list[tuple[int, range]]:
        """The rows of a batch whose IDs may be there, and in which of its pages."""
        hashes, rows = np.empty(int(places[ROWS]), np.int64), np.empty(int(places[ROWS]), np.int64)
        hash_rows(view, places, key_of(self.key), hashes)
        through = rows[: probe(hashes, self.run.filter, rows)].tolist()
        return [(row, pages) for row in through if (pages := self.run.pages_of(int(hashes[row])))]


def seconds_of(times_ms: Int64s) -> Int64s:
    """The seconds that count for these times: none ends before its time."""
    return -(-times_ms // MILLISECONDS_A_SECOND)


@kernel(nogil=True)
def first_not_above(ids: Bytes, offsets: Int64s) -> int:
    """The first ID, of such as lie one after the other, that is not above the one before it, compared as bytes; -1 if
    there is none."""
    for row in range(1, len(offsets) - 1):
        before, here, end = int(offsets[row - 1]), int(offsets[row]), int(offsets[row + 1])
        size = min(here - before, end - here)
        at = 0
        while at < size and ids[before + at] == ids[here + at]:
            at += 1
        is_above = end - here > here - before if at == size else ids[before + at] < ids[here + at]
        if not is_above:
            return row
    return -1
