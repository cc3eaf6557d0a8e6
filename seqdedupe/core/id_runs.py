"""Runs of deduplication IDs: the IDs of consecutive messages, sorted by hash, in pages on disk.

Memory contains the first hash of each page, and a filter. The filter has blocks of FILTER_WORDS words; an ID sets one
bit in each word of one block. An ID that passes the filter is looked up in its page, where the bytes of the IDs are
compared.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from seqdedupe.core.id_table import NOWHERE, same
from seqdedupe.format.headers import key_of, siphash
from seqdedupe.format.jit import Bytes, Int64s, Int64s2, Uint8s, for_kernels, kernel, load32, shl64
from seqdedupe.format.layout import DEDUPLICATION_ID_OFFSETS, DEDUPLICATION_IDS, ROWS, start

# -- Pieces of a window's chunks, as snapshots keep them.

PIECE_BYTES = 64 * 1024
"""The maximum number of bytes of IDs and lengths that a snapshot writes in one step. The write blocks the whole
process."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The IDs of consecutive messages of one chunk."""

    chunk_index: int
    """The index of the chunk's first message. A chunk is forgotten as a whole."""
    first_index: int
    first_time_ms: int
    """When the chunk's first message was published, in milliseconds since 1970."""
    last_time_ms: int
    """When the last message of this piece was published, in milliseconds since 1970."""
    sizes: Uint8s
    """The size of each ID in bytes, 1 to 255."""
    ids: Uint8s
    """All IDs, one after the other."""

    @property
    def end_index(self) -> int:
        """The index after that of the last message."""
        return self.first_index + len(self.sizes)

    def fits(self) -> bool:
        """Whether the sizes add up to the number of bytes of the IDs, and the piece is inside its chunk."""
        whole = len(self.ids) == int(self.sizes.sum(dtype=np.int64)) and 0 <= self.chunk_index <= self.first_index
        return bool(whole and len(self.sizes) and self.sizes.min() > 0)


PAGE_BYTES = 4096
FILTER_WORDS = 8
FILTER_BITS_AN_ID = 14
MAX_ROWS = 2**31
"""The maximum number of messages in a run."""

PAGE_HEAD = 2
"""The bytes of a page before its columns. They contain the number of IDs."""
_OF_AN_ID = 5
"""Bytes of a page per ID, in addition to the ID: the distance of its index from the run's first one, and its length."""

# Columns of `IdRun.chunks`, one row per chunk from which the run was made.
CHUNK_FIRST_INDEX = 0
CHUNK_ROWS = 1
CHUNK_ID_BYTES = 2
CHUNK_FIRST_TIME_MS = 3
CHUNK_LAST_TIME_MS = 4
CHUNK_COLUMNS = 5


@dataclass(frozen=True, slots=True, eq=False)
class IdRun:
    """The part of a run that is in memory. It never changes."""

    number: int
    first_index: int
    end_index: int
    first_hashes: Int64s
    """The first hash of each page."""
    filter: Int64s
    chunks: Int64s2

    def __len__(self) -> int:
        """The number of indexes in the run."""
        return self.end_index - self.first_index

    @property
    def memory_bytes(self) -> int:
        return self.first_hashes.nbytes + self.filter.nbytes

    def covers(self, other: "IdRun") -> bool:
        """Return whether this run contains all indexes of the other run."""
        return self.first_index <= other.first_index and other.end_index <= self.end_index

    def pages_of(self, hashed: int) -> range:
        """Return the range of pages that can contain an ID with this hash."""
        first, end = (int(np.searchsorted(self.first_hashes, hashed, side)) for side in ("left", "right"))
        return range(max(first - 1, 0), end)

    def pages_between(self, low: int | None, high: int | None) -> range:
        """Return the range of pages that can contain hashes from `low` to before `high` (None: no bound)."""
        first = 0 if low is None else int(np.searchsorted(self.first_hashes, low, "left")) - 1
        end = len(self.first_hashes) if high is None else int(np.searchsorted(self.first_hashes, high, "left"))
        return range(max(first, 0), end)


@dataclass(frozen=True, slots=True)
class RunEntries:
    """IDs with their indexes, in any order."""

    hashes: Int64s
    deltas: Int64s
    """The distance of each index from the first index of the new run."""
    offsets: Int64s
    """The beginning of each ID, and the end of the last one."""
    ids: Uint8s

    def in_order(self, low: int | None, high: int | None) -> Int64s:
        """Return the rows with hashes from `low` to before `high` (None: no bound), sorted by hash, without rows whose
        index is before the run."""
        keep = self.deltas >= 0
        if low is not None:
            keep &= self.hashes >= low
        if high is not None:
            keep &= self.hashes < high
        rows = np.flatnonzero(keep)
        return rows[np.argsort(self.hashes[rows])]


def filter_of(ids: int) -> Int64s:
    """Make an empty filter for this number of IDs."""
    blocks = max(1, -(-ids * FILTER_BITS_AN_ID // (64 * FILTER_WORDS)))
    return np.zeros(blocks * FILTER_WORDS, np.int64)


def entries_of(pieces: list[Piece], first_index: int, key: Int64s) -> RunEntries:
    """Return the IDs of consecutive pieces. The call takes a long time, and may run in any thread."""
    sizes = np.concatenate([piece.sizes for piece in pieces])
    deltas = np.arange(len(sizes), dtype=np.int64) + (pieces[0].first_index - first_index)
    return entries_with(sizes, deltas, np.concatenate([piece.ids for piece in pieces]), key)


def entries_in(pages: list[tuple[bytes, int]], key: Int64s) -> RunEntries:
    """Return the IDs in pages. Each item of `pages` is a page, and the distance from the new run's first index to the
    first index of the page's run."""
    sizes, deltas, ids = [], [], []
    for page, base in pages:
        rows = int.from_bytes(page[:PAGE_HEAD], "little")
        deltas.append(np.frombuffer(page, "<u4", rows, PAGE_HEAD).astype(np.int64) + base)
        sizes.append(np.frombuffer(page, np.uint8, rows, PAGE_HEAD + 4 * rows))
        ids.append(np.frombuffer(page, np.uint8, -1, PAGE_HEAD + _OF_AN_ID * rows))
    return entries_with(np.concatenate(sizes), np.concatenate(deltas), np.concatenate(ids), key)


def entries_with(sizes: Uint8s, deltas: Int64s, ids: Uint8s, key: Int64s) -> RunEntries:
    """Return the entries of IDs that are stored contiguously. The call takes a long time, and may run in any thread."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, dtype=np.int64, out=offsets[1:])
    hashes = np.empty(len(sizes), np.int64)
    hash_all(ids, offsets, key, hashes)
    return RunEntries(hashes, deltas, offsets, ids)


def page_fits(page: bytes) -> bool:
    """Return whether the columns of a page add up to the page's size."""
    rows = int.from_bytes(page[:PAGE_HEAD], "little")
    if not rows or len(page) < PAGE_HEAD + _OF_AN_ID * rows:
        return False
    sizes = np.frombuffer(page, np.uint8, rows, PAGE_HEAD + 4 * rows)
    return bool(sizes.min() > 0) and len(page) == PAGE_HEAD + _OF_AN_ID * rows + int(sizes.sum(dtype=np.int64))


@kernel(nogil=True, bare=True)
def hash_all(ids: Uint8s, offsets: Int64s, key: Int64s, hashes: Int64s) -> int:
    """Hash all IDs into `hashes`."""
    for row in range(len(hashes)):
        hashes[row] = siphash(ids, int(offsets[row]), int(offsets[row + 1]), key)
    return len(hashes)


@for_kernels
def _block(hashed: int, words: int) -> int:
    """Return where the block of a hash begins in a filter."""
    return (((hashed >> 32) & 0xFFFFFFFF) * (words // FILTER_WORDS) >> 32) * FILTER_WORDS


@kernel(nogil=True, bare=True)
def add_to_filter(hashes: Int64s, words: Int64s) -> int:
    """Add hashes to a filter."""
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
    """Write the IDs in this order, from place `first` on, as pages into `out`.

    The number of pages is at most the number of elements of `ends` and `first_hashes`. No page is empty. `ends`
    receives the end of each page, and 0 after the last page. Return the place before which all IDs are in pages.
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
    """Hash the IDs of a batch into `hashes`."""
    offsets = start(places, DEDUPLICATION_ID_OFFSETS)
    blob = start(places, DEDUPLICATION_IDS)
    for row in range(len(hashes)):
        begin, end = load32(raw, offsets + 4 * row), load32(raw, offsets + 4 * row + 4)
        hashes[row] = siphash(raw, blob + begin, blob + end, key)
    return len(hashes)


@kernel(bare=True)
def probe(hashes: Int64s, words: Int64s, rows: Int64s) -> int:
    """Write to `rows` the rows of a batch that pass the filter. Return the number of these rows."""
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
    """Find a row's ID in the page. Return the ID's index minus the run's first index, or NOWHERE if the page does not
    contain exactly the ID's bytes. If the page has the ID more than once, the highest index counts."""
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
    """Divide the hashes into ranges from `low` to before `high` (None: no bound). Each range has at most about `pages`
    pages of each run."""
    cuts = np.unique(np.concatenate([run.first_hashes[pages::pages] for run in runs])).tolist()
    return iter(zip([None, *cuts], [*cuts, None], strict=True))


# -- A window of deduplication IDs that was imported: one run that has times in place of indexes.

MILLISECONDS_A_SECOND = 1000


@dataclass(frozen=True, slots=True, eq=False)
class ImportedIds:
    """The part of an imported window that is in memory.

    The run of an imported window begins with the index 0, and `end_index` is the number of IDs. Instead of an index,
    each ID has a publish time in seconds since 1970. The ID was published at this time or earlier.
    """

    run: IdRun
    key: bytes
    """The hash key, SECRET_BYTES long. It belongs to this run: after the next start, the topic may have a different
    key."""
    checksum: bytes
    """The checksum of the file."""

    @property
    def first_time_ms(self) -> int:
        """When the first message was published, in milliseconds since 1970."""
        return int(self.run.chunks[0, CHUNK_FIRST_TIME_MS])

    @property
    def last_time_ms(self) -> int:
        return int(self.run.chunks[-1, CHUNK_LAST_TIME_MS])

    def candidates(self, view: Uint8s, places: Int64s) -> list[tuple[int, range]]:
        """Return the rows of a batch whose IDs may be in the run, each row with the pages that may contain the ID."""
        hashes, rows = np.empty(int(places[ROWS]), np.int64), np.empty(int(places[ROWS]), np.int64)
        hash_rows(view, places, key_of(self.key), hashes)
        through = rows[: probe(hashes, self.run.filter, rows)].tolist()
        return [(row, pages) for row in through if (pages := self.run.pages_of(int(hashes[row])))]


def seconds_of(times_ms: Int64s) -> Int64s:
    """Round times up to whole seconds."""
    return -(-times_ms // MILLISECONDS_A_SECOND)


@kernel(nogil=True)
def first_not_above(ids: Bytes, offsets: Int64s) -> int:
    """Return the first ID that is not above the previous ID, compared as bytes. Return -1 if all IDs are in ascending
    order."""
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
