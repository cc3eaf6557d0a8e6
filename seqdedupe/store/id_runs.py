"""Runs of deduplication IDs in the store: written beside serving, read page by page. docs/formats-store.md.

A run counts from the moment on that a snapshot names it. What there is of others is left over from a build that did not
end, or from a run that was dropped, and goes.
"""

import asyncio
import struct
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from rocksdict import WriteBatch

from seqdedupe.core.id_runs import (
    CHUNK_COLUMNS,
    FILTER_WORDS,
    PAGE_BYTES,
    Entries,
    Run,
    add_to_filter,
    fill_pages,
    filter_of,
    page_fits,
)
from seqdedupe.format.jit import Int64s, Int64s2
from seqdedupe.store.db import Store
from seqdedupe.store.parts import IMPORTED, RUN, damaged, part_key, seal, unseal

MAX_RUN = 2**31 - 1
"""Runs from here on are imported ones: a part of the snapshot of their own."""

PAGES_A_WRITE = 16
"""RocksDB holds the whole process while it writes."""
PAGES_AT_ONCE = 128
"""Made in a thread, before they are written."""
PIECE_BYTES = 64 * 1024
"""Of what memory has of a run, in one record."""

_HEAD = 0
_PIECES = 1
_PAGES = 1 << 31

_RUN = struct.Struct("<QQIQI")
"""Its first index, the one after its last one, pages, words of the filter, and chunks."""


def key_of(incarnation: int, run: int, of_run: int) -> bytes:
    """Where a part of a run is."""
    return part_key(incarnation, RUN if run <= MAX_RUN else IMPORTED, run << 32 | of_run)


def put_gaps(batch: WriteBatch, incarnation: int, named: Iterable[int], end: int) -> None:
    """Nothing is left of runs below `end` that are not among these, which rise."""
    first = 0
    for number in (*named, end):
        if number > first:
            batch.delete_range(key_of(incarnation, first, 0), key_of(incarnation, number, 0))
        first = number + 1


def has_gaps(store: Store, incarnation: int, named: list[int]) -> bool:
    """Whether something is left of a run that is not among these, which rise. Blocks, in any thread."""
    first = 0
    for number in (*named, MAX_RUN):
        for _ in store.scan(key_of(incarnation, first, 0), key_of(incarnation, number, 0)):
            return True
        first = number + 1
    return False


class RunWriter:
    """A run on its way to the store: its IDs by hash, part after part. It belongs to the store's event loop.

    Raises STORE_UNAVAILABLE, and before each write what `check` raises; then nothing comes of it.
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
        """Nothing is left of an earlier attempt."""
        batch = WriteBatch(raw_mode=True)
        first, end = (key_of(self._incarnation, number, 0) for number in (self._number, self._number + 1))
        batch.delete_range(first, end)
        self._check()
        self._opening = self._store.write(batch)

    async def add(self, entries: Entries, low: int | None = None, high: int | None = None) -> None:
        """The IDs whose hashes come next: of these the ones from `low` on and before `high`, but for forgotten ones."""
        order = await asyncio.to_thread(self._ordered, entries, low, high)
        at = 0
        while at < len(order):
            at, batches = await asyncio.to_thread(self._filled, entries, order, at)
            for batch in batches:
                await self._write(batch)

    async def finish(self, end_index: int, chunks: Int64s2) -> Run:
        """The run, durable on return, but named by none yet."""
        firsts = np.concatenate(self._first_hashes) if self._first_hashes else np.zeros(0, np.int64)
        run = Run(self._number, self.first_index, end_index, firsts, self._filter, chunks)
        for batch in await asyncio.to_thread(lambda: list(self._described(run))):
            await self._write(batch)
        # That of the first write: if RocksDB was opened again since, a page may be missing.
        await self._store.flush(self._opening)
        return run

    async def _write(self, batch: WriteBatch) -> None:
        await self._store.wait_until_idle()
        self._check()
        self._store.write(batch)
        await asyncio.sleep(0)

    def _ordered(self, entries: Entries, low: int | None, high: int | None) -> Int64s:
        order = entries.in_order(low, high)
        add_to_filter(entries.hashes[order], self._filter)
        return order

    def _filled(self, entries: Entries, order: Int64s, at: int) -> tuple[int, list[WriteBatch]]:
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
            key = key_of(self._incarnation, self._number, _PAGES | self._pages + page)
            batches[-1].put(key, seal(key, out[begins[page] : begins[page + 1]].tobytes()))
        self._pages += pages
        return at, batches

    def _described(self, run: Run) -> Iterator[WriteBatch]:
        """What memory has of it, and at last how much that is."""
        raw = run.first_hashes.astype("<i8").tobytes() + run.filter.astype("<i8").tobytes()
        head = _RUN.pack(run.first_index, run.end_index, len(run.first_hashes), len(run.filter), len(run.chunks))
        bodies = [(k, raw[at : at + PIECE_BYTES]) for k, at in enumerate(range(0, len(raw), PIECE_BYTES), _PIECES)]
        for of_run, body in (*bodies, (_HEAD, head + run.chunks.astype("<i8").tobytes())):
            batch = WriteBatch(raw_mode=True)
            key = key_of(self._incarnation, run.number, of_run)
            batch.put(key, seal(key, body))
            yield batch


def load(store: Store, incarnation: int, number: int) -> Run:
    """What memory has of a run. Blocks, in any thread. Raises STORE_DAMAGED, STORE_UNAVAILABLE."""
    head_key = key_of(incarnation, number, _HEAD)
    parts = store.scan(head_key, key_of(incarnation, number, _PAGES))
    key, value = next(parts, (b"", b""))
    if key != head_key:
        raise damaged(head_key, "it is missing, and with it a run of deduplication IDs")
    head = unseal(key, value)
    if len(head) < _RUN.size:
        raise damaged(key, f"it is {len(head)} bytes long")
    first_index, end_index, pages, words, chunks = _RUN.unpack_from(head)
    raw = bytearray()
    for count, (other, piece) in enumerate(parts, _PIECES):
        if other != key_of(incarnation, number, count):
            raise damaged(key_of(incarnation, number, count), "it is missing, and with it a part of a run")
        raw += unseal(other, piece)
    if len(raw) != 8 * (pages + words) or len(head) != _RUN.size + 8 * CHUNK_COLUMNS * chunks:
        raise damaged(key, f"its {pages} pages, {words} words of a filter and {chunks} chunks do not fit")
    numbers = np.frombuffer(raw, "<i8").astype(np.int64)
    table = np.frombuffer(head, "<i8", offset=_RUN.size).astype(np.int64).reshape(chunks, CHUNK_COLUMNS)
    run = Run(number, first_index, end_index, numbers[:pages].copy(), numbers[pages:].copy(), table)
    if not _fits(run):
        raise damaged(key, "its pages, filter or chunks cannot be")
    return run


def _fits(run: Run) -> bool:
    ends = [run.first_index, *(run.chunks[:, 0] + run.chunks[:, 1]).tolist()]
    follow = len(run.chunks) > 0 and run.chunks[:, 0].tolist() == ends[:-1] and ends[-1] == run.end_index
    filter_fits = len(run.filter) > 0 and len(run.filter) % FILTER_WORDS == 0
    return follow and filter_fits and bool((run.first_hashes[1:] >= run.first_hashes[:-1]).all())


def read_pages(store: Store, incarnation: int, wanted: list[tuple[int, int]]) -> list[bytes]:
    """Pages, by the numbers of their runs and their own. Blocks, in any thread.

    Raises STORE_DAMAGED, STORE_UNAVAILABLE.
    """
    keys = [key_of(incarnation, run, _PAGES | page) for run, page in wanted]
    return [_page(key, value) for key, value in zip(keys, store.get(keys), strict=True)]


def _page(key: bytes, value: bytes | None) -> bytes:
    if value is None:
        raise damaged(key, "it is missing, and with it a page of a run of deduplication IDs")
    page = unseal(key, value)
    if not page_fits(page):
        raise damaged(key, "its IDs do not fit")
    return page
