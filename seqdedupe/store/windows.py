"""The window of deduplication IDs in the store: runs, pieces, the window's record in a snapshot, and imports.

docs/internals/formats-store.md describes the layout of these records.

The record states the index up to which pieces are valid, and which runs are valid. The record is part of the atomic
write of its snapshot. The same write removes pieces that are before the window or already in runs. New pieces of the
window are written before the record, one after the other, and so are runs. Pieces and runs that no record names are
left over, and are removed.
"""

import asyncio
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from rocksdict import WriteBatch

from seqdedupe.core.id_runs import (
    CHUNK_COLUMNS,
    FILTER_WORDS,
    PAGE_BYTES,
    IdRun,
    ImportedIds,
    Piece,
    RunEntries,
    add_to_filter,
    fill_pages,
    filter_of,
    page_fits,
)
from seqdedupe.core.id_window import IdWindow
from seqdedupe.errors import error
from seqdedupe.exports import WINDOW_CHECKSUM_BYTES
from seqdedupe.format.headers import SECRET_BYTES
from seqdedupe.format.jit import Int64s, Int64s2
from seqdedupe.store.db import Store
from seqdedupe.store.parts import (
    IDS,
    IMPORTED,
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

# -- Runs: written in the background, read page by page.
#
# A run is valid once a snapshot names the run. Data of any other run is left over from an interrupted build, or from a
# run that was dropped, and is removed.

MAX_RUN = 2**31 - 1
"""The highest number of a run that is not imported. Imported runs are in a separate part of the snapshot."""

PAGES_A_WRITE = 16
"""The number of pages in one write: RocksDB blocks the whole process during a write."""
PAGES_AT_ONCE = 128
"""The number of pages that a thread prepares before they are written."""
PIECE_BYTES = 64 * 1024
"""The size of one record of the part of a run that is loaded into memory."""

_HEAD = 0
_PIECES = 1
_PAGES = 1 << 31

_RUN = struct.Struct("<QQIQI")
"""The index of the first ID, the index after the last ID, and the numbers of pages, words of the filter, and chunks."""


def run_key(incarnation: int, run: int, of_run: int) -> bytes:
    """Return the key of a part of a run."""
    return part_key(incarnation, RUN if run <= MAX_RUN else IMPORTED, run << 32 | of_run)


def put_gaps(batch: WriteBatch, incarnation: int, named: Iterable[int], end: int) -> None:
    """Remove all runs below number `end` that are not in `named`. `named` must be in ascending order."""
    first = 0
    for number in (*named, end):
        if number > first:
            batch.delete_range(run_key(incarnation, first, 0), run_key(incarnation, number, 0))
        first = number + 1


def has_gaps(store: Store, incarnation: int, named: list[int]) -> bool:
    """Return whether the store has data of a run that is not in `named`. `named` must be in ascending order. The call
    blocks, and any thread may make it."""
    first = 0
    for number in (*named, MAX_RUN):
        for _ in store.scan(run_key(incarnation, first, 0), run_key(incarnation, number, 0)):
            return True
        first = number + 1
    return False


class RunWriter:
    """Writes a run part by part, with the IDs sorted by hash. Use this object on the store's event loop.

    Raises STORE_UNAVAILABLE and, before each write, the errors of `check`. After an error the run is not completed.
    """

    def __init__(
        self, store: Store, incarnation: int, number: int, first_index: int, ids: int, check: Callable[[], None]
    ) -> None:
        self.first_index = first_index
        self._store = store
        self._incarnation = incarnation
        self._number = number
        self._check = check
        self._filter = filter_of(ids)
        self._first_hashes: list[Int64s] = []
        self._pages = 0
        self._opening = 0

    async def begin(self) -> None:
        """Remove the data of an earlier attempt."""
        batch = WriteBatch(raw_mode=True)
        first, end = (run_key(self._incarnation, number, 0) for number in (self._number, self._number + 1))
        batch.delete_range(first, end)
        self._check()
        self._opening = self._store.write(batch)

    async def add(self, entries: RunEntries, low: int | None = None, high: int | None = None) -> None:
        """Add the IDs with the next hashes: the IDs of `entries` from `low` to before `high`, except forgotten IDs."""
        order = await asyncio.to_thread(self._ordered, entries, low, high)
        at = 0
        while at < len(order):
            at, batches = await asyncio.to_thread(self._filled, entries, order, at)
            for batch in batches:
                await self._write(batch)

    async def finish(self, end_index: int, chunks: Int64s2) -> IdRun:
        """Return the run. It is durable, but no snapshot names it yet."""
        firsts = np.concatenate(self._first_hashes) if self._first_hashes else np.zeros(0, np.int64)
        run = IdRun(self._number, self.first_index, end_index, firsts, self._filter, chunks)
        for batch in await asyncio.to_thread(lambda: list(self._described(run))):
            await self._write(batch)
        # The opening of the first write: if RocksDB was opened again since, a page may be missing.
        await self._store.flush(self._opening)
        return run

    async def _write(self, batch: WriteBatch) -> None:
        await self._store.wait_until_idle()
        self._check()
        self._store.write(batch)
        await asyncio.sleep(0)

    def _ordered(self, entries: RunEntries, low: int | None, high: int | None) -> Int64s:
        order = entries.in_order(low, high)
        add_to_filter(entries.hashes[order], self._filter)
        return order

    def _filled(self, entries: RunEntries, order: Int64s, at: int) -> tuple[int, list[WriteBatch]]:
        out = np.empty(PAGES_AT_ONCE * PAGE_BYTES, np.uint8)
        ends, firsts = np.zeros(PAGES_AT_ONCE, np.int64), np.zeros(PAGES_AT_ONCE, np.int64)
        at = fill_pages(
            order, at, entries.hashes, entries.deltas, entries.offsets, entries.ids, out, ends, firsts
        )  # fmt: skip
        pages = int(np.count_nonzero(ends))
        self._first_hashes.append(firsts[:pages])
        begins = [0, *ends[:pages].tolist()]
        batches: list[WriteBatch] = []
        for page in range(pages):
            if page % PAGES_A_WRITE == 0:
                batches.append(WriteBatch(raw_mode=True))
            key = run_key(self._incarnation, self._number, _PAGES | self._pages + page)
            batches[-1].put(key, seal(key, out[begins[page] : begins[page + 1]].tobytes()))
        self._pages += pages
        return at, batches

    def _described(self, run: IdRun) -> Iterator[WriteBatch]:
        """Yield the writes of the part of the run that memory keeps later. The last write contains the run's sizes."""
        raw = run.first_hashes.astype("<i8").tobytes() + run.filter.astype("<i8").tobytes()
        head = _RUN.pack(run.first_index, run.end_index, len(run.first_hashes), len(run.filter), len(run.chunks))
        bodies = [(k, raw[at : at + PIECE_BYTES]) for k, at in enumerate(range(0, len(raw), PIECE_BYTES), _PIECES)]
        for of_run, body in (*bodies, (_HEAD, head + run.chunks.astype("<i8").tobytes())):
            batch = WriteBatch(raw_mode=True)
            key = run_key(self._incarnation, run.number, of_run)
            batch.put(key, seal(key, body))
            yield batch


def load_run(store: Store, incarnation: int, number: int) -> IdRun:
    """Load the part of a run that is kept in memory. The call blocks, and any thread may make it. Raises STORE_DAMAGED,
    STORE_UNAVAILABLE."""
    head_key = run_key(incarnation, number, _HEAD)
    parts = store.scan(head_key, run_key(incarnation, number, _PAGES))
    key, value = next(parts, (b"", b""))
    if key != head_key:
        raise damaged(head_key, "it is missing, and with it a run of deduplication IDs")
    head = unseal(key, value)
    if len(head) < _RUN.size:
        raise damaged(key, f"it is {len(head)} bytes long")
    first_index, end_index, pages, words, chunks = _RUN.unpack_from(head)
    raw = bytearray()
    for count, (other, piece) in enumerate(parts, _PIECES):
        if other != run_key(incarnation, number, count):
            raise damaged(run_key(incarnation, number, count), "it is missing, and with it a part of a run")
        raw += unseal(other, piece)
    if len(raw) != 8 * (pages + words) or len(head) != _RUN.size + 8 * CHUNK_COLUMNS * chunks:
        raise damaged(key, f"its {pages} pages, {words} words of a filter and {chunks} chunks do not fit")
    numbers = np.frombuffer(raw, "<i8").astype(np.int64)
    table = np.frombuffer(head, "<i8", offset=_RUN.size).astype(np.int64).reshape(chunks, CHUNK_COLUMNS)
    run = IdRun(number, first_index, end_index, numbers[:pages].copy(), numbers[pages:].copy(), table)
    if not _fits(run):
        raise damaged(key, "its pages, filter or chunks cannot be")
    return run


def _fits(run: IdRun) -> bool:
    ends = [run.first_index, *(run.chunks[:, 0] + run.chunks[:, 1]).tolist()]
    follow = len(run.chunks) > 0 and run.chunks[:, 0].tolist() == ends[:-1] and ends[-1] == run.end_index
    filter_fits = len(run.filter) > 0 and len(run.filter) % FILTER_WORDS == 0
    return follow and filter_fits and bool((run.first_hashes[1:] >= run.first_hashes[:-1]).all())


def read_pages(store: Store, incarnation: int, wanted: list[tuple[int, int]]) -> list[bytes]:
    """Return pages. Each requested page is given by the run's number and the page's number. The call blocks, and any
    thread may make it.

    Raises STORE_DAMAGED, STORE_UNAVAILABLE.
    """
    keys = [run_key(incarnation, run, _PAGES | page) for run, page in wanted]
    return [_page(key, value) for key, value in zip(keys, store.get(keys), strict=True)]


def _page(key: bytes, value: bytes | None) -> bytes:
    if value is None:
        raise damaged(key, "it is missing, and with it a page of a run of deduplication IDs")
    page = unseal(key, value)
    if not page_fits(page):
        raise damaged(key, "its IDs do not fit")
    return page


# -- Pieces, and the record.

FORMAT_VERSION = 2
"""The format version of the two kinds of records."""

_WINDOW = struct.Struct(f"<B{SECRET_BYTES}sQQI")
_NUMBER_BYTES = 4
"""The number of bytes of a run's number in the record of a window."""
_PIECE = struct.Struct("<BQqqI")


@dataclass(slots=True)
class StoredIds:
    """A window in the layout of a snapshot: the IDs from `first_index` to before `next_index`.

    `runs` contain the oldest IDs; pieces contain the IDs that follow. `last` is the last piece, if it is not written
    yet. `moved_from` is the index where the pieces of the last durable snapshot began; None if the pieces of this
    window begin at the same index.
    """

    key: bytes
    first_index: int
    next_index: int
    runs: tuple[IdRun, ...] = ()
    last: Piece | None = None
    moved_from: int | None = None

    @property
    def pieces_index(self) -> int:
        """The index where the pieces of this window begin."""
        return max(self.first_index, self.runs[-1].end_index if self.runs else 0)


class WrittenPieces:
    """The written pieces of a topic's window. Each piece begins where the previous piece ends, or later if the IDs
    between them are forgotten. It belongs to the store's event loop."""

    def __init__(self, incarnation: int, end_index: int) -> None:
        """Begin at `end_index`, the index up to which a snapshot names pieces."""
        self.end_index = end_index
        self._incarnation = incarnation
        self._has_left_over = True
        """Whether the store may contain more pieces of an earlier attempt, which was divided differently."""

    def check_follows(self, ids: StoredIds) -> None:
        """Raise STORE_UNAVAILABLE if pieces before the last piece of a window must be written again."""
        index = max(self.end_index, ids.pieces_index)
        if index != (ids.next_index if ids.last is None else ids.last.first_index):
            raise error("STORE_UNAVAILABLE", f"the IDs from index {index} on were not written, or may be lost")

    def put(self, batch: WriteBatch, piece: Piece) -> None:
        """Add the next piece to a write. The first piece follows the stored pieces."""
        if self._has_left_over:
            key = part_key(self._incarnation, IDS, self.end_index)
            batch.delete_range(key, part_key(self._incarnation, IDS, MAX_NUMBER))
        key = part_key(self._incarnation, IDS, piece.first_index)
        fixed = _PIECE.pack(
            FORMAT_VERSION, piece.chunk_index, piece.first_time_ms, piece.last_time_ms, len(piece.sizes)
        )
        batch.put(key, seal(key, fixed + piece.sizes.tobytes() + piece.ids.tobytes()))

    def written(self, piece: Piece) -> None:
        """Record that this piece is written."""
        self.end_index = piece.end_index
        self._has_left_over = False


def put(batch: WriteBatch, incarnation: int, ids: StoredIds, pieces: WrittenPieces) -> None:
    """Add the record of a window to a snapshot's write."""
    if ids.moved_from is not None:
        batch.delete_range(part_key(incarnation, IDS, ids.moved_from), part_key(incarnation, IDS, ids.pieces_index))
    key = part_key(incarnation, WINDOW, 0)
    fixed = _WINDOW.pack(FORMAT_VERSION, ids.key, ids.first_index, ids.next_index, len(ids.runs))
    batch.put(key, seal(key, fixed + b"".join(run.number.to_bytes(_NUMBER_BYTES, "little") for run in ids.runs)))
    if ids.last is not None:
        pieces.put(batch, ids.last)


def end_index(store: Store, incarnation: int) -> int:
    """Return the index up to which the stored snapshot of a topic names IDs; 0 without a window. The call blocks.
    Raises the errors of `load`."""
    at = part_key(incarnation, WINDOW, 0)
    for key, value in store.scan(at, at + b"\0"):
        _, _, _, index, _ = _WINDOW.unpack_from(_checked(key, value, _WINDOW))
        return int(index)
    return 0


def load(store: Store, incarnation: int, next_index: int) -> IdWindow | None:
    """Return the window in the snapshot that ends at this index; None if the topic has none. The call takes long, and
    any thread may make it.

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
        runs = tuple(load_run(store, incarnation, number) for number in numbers)
        pieces_index = _checked_end(key, runs, first_index, end_index)
        window = IdWindow(secret, first_index)
        try:
            window.load(_pieces(store, incarnation, pieces_index, end_index), runs)
        except ValueError as e:
            raise damaged(key, str(e)) from e
        return window
    return None


def _checked_end(key: bytes, runs: tuple[IdRun, ...], first_index: int, end_index: int) -> int:
    """Return the index where the pieces after these runs of a window begin."""
    index = None
    for run in runs:
        if index not in (None, run.first_index) or not max(first_index, run.first_index) < run.end_index <= end_index:
            raise damaged(key, f"the run {run.number}, from {run.first_index} to {run.end_index}, is not of its window")
        index = run.end_index
    if runs and runs[0].first_index > first_index:
        raise damaged(key, f"the IDs from index {first_index} on are in no run")
    return first_index if index is None else index


def _pieces(store: Store, incarnation: int, first_index: int, end_index: int) -> Iterator[Piece]:
    """Yield all pieces. Raises an error unless they follow one another from `first_index` to `end_index`."""
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
    """Return the body of a record of one of the two kinds."""
    body = unseal(key, value)
    if body and body[0] != FORMAT_VERSION:
        raise other_format(f"the record {key.hex()}", body[0], FORMAT_VERSION)
    if len(body) < form.size:
        raise damaged(key, f"it is {len(body)} bytes long")
    return body


# -- The imported window of a topic of deduplication IDs in the store: one run, and the file that it came in.
#
# An import is not a part of the snapshots: the log states whether the import is valid. So the import is written before
# the log states this. It is kept when a complete snapshot is written, or when all snapshots are removed.

IMPORT_FORMAT_VERSION = 1

FIRST_RUN = MAX_RUN + 1
"""The lowest number of an imported run."""

_IMPORTED = struct.Struct(f"<BI{SECRET_BYTES}s{WINDOW_CHECKSUM_BYTES}s")


def _key(incarnation: int) -> bytes:
    return part_key(incarnation, IMPORTED, 0)


def put_import(store: Store, incarnation: int, imported: ImportedIds) -> int:
    """Write this import in one unsynced write. Then call `await store.flush()` with the returned number. Raises
    STORE_UNAVAILABLE."""
    batch = WriteBatch(raw_mode=True)
    _put_import(batch, incarnation, imported)
    return store.write(batch)


def _put_import(batch: WriteBatch, incarnation: int, imported: ImportedIds) -> None:
    key = _key(incarnation)
    body = _IMPORTED.pack(IMPORT_FORMAT_VERSION, imported.run.number, imported.key, imported.checksum)
    batch.put(key, seal(key, body))


def remove_import(store: Store, incarnation: int) -> None:
    """Remove all imports. Raises STORE_UNAVAILABLE."""
    batch = WriteBatch(raw_mode=True)
    batch.delete_range(_key(incarnation), part_key(incarnation, IMPORTED, MAX_NUMBER))
    store.write(batch)


def keep_only_import(store: Store, incarnation: int, imported: ImportedIds | None) -> None:
    """Restore the record of this import, replacing any later import, and remove all other imported runs, in one write.
    Raises STORE_UNAVAILABLE."""
    if imported is None:
        remove_import(store, incarnation)
        return
    batch = WriteBatch(raw_mode=True)
    for start, end in _around(incarnation, imported):
        batch.delete_range(start, end)
    _put_import(batch, incarnation, imported)
    store.write(batch)


def has_other_imports(store: Store, incarnation: int, imported: ImportedIds | None) -> bool:
    """Whether the store has data of other imported runs. This blocks, and any thread may call it."""
    return any(True for start, end in _around(incarnation, imported) for _ in store.scan(start, end))


def _around(incarnation: int, imported: ImportedIds | None) -> list[tuple[bytes, bytes]]:
    """Return the keys of all imported runs except the runs of this import."""
    first, end = run_key(incarnation, FIRST_RUN, 0), part_key(incarnation, IMPORTED, MAX_NUMBER)
    if imported is None:
        return [(first, end)]
    number = imported.run.number
    return [(first, run_key(incarnation, number, 0)), (run_key(incarnation, number + 1, 0), end)]


def load_import(store: Store, incarnation: int) -> ImportedIds | None:
    """Return the import, even if the log does not state that it is valid. The call blocks, and any thread may make it.
    Raises STORE_DAMAGED, NEWER_FORMAT, STORE_UNAVAILABLE."""
    key = _key(incarnation)
    [value] = store.get([key])
    if value is None:
        return None
    body = unseal(key, value)
    if body and body[0] != IMPORT_FORMAT_VERSION:
        raise other_format(f"the record {key.hex()}", body[0], IMPORT_FORMAT_VERSION)
    if len(body) != _IMPORTED.size:
        raise damaged(key, f"it is {len(body)} bytes long")
    _, number, secret, checksum = _IMPORTED.unpack(body)
    run: IdRun = load_run(store, incarnation, number)
    if run.first_index != 0:
        raise damaged(key, f"the run {number} is none that was imported")
    return ImportedIds(run, secret, checksum)
