"""Decisions by deduplication IDs with a full window of 10 million, beside RocksDB used as the known pipeline does.

That has a key an ID under a bloom filter, a second key by number for expiry, a multi-get and one write batch a frame.
Frames of 1,000 IDs of 16 bytes, 1 % of them copies, in one process; expiry is part of it. It is filled from sorted
files (`Rocks.fill`). Then a window of as many IDs
is taken from its pieces, as at a start; and one grows from nothing on. SEQDEDUPE_BENCH_WINDOW is another number of IDs.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rocksdict import AccessType, BlockBasedOptions, Cache, Options, Rdict, SstFileWriter, WriteBatch

from bench.figure import Figure, Ratio, over, percentiles_ms, shown
from seqdedupe.batch import Binary, without_producers
from seqdedupe.core.id_runs import Piece
from seqdedupe.core.id_window import IdWindow, Moment
from seqdedupe.format import layout
from seqdedupe.format.jit import Int64s, Uint8s
from seqdedupe.format.layout import PLACES
from seqdedupe.limits import WindowLimits

IDS = int(os.environ.get("SEQDEDUPE_BENCH_WINDOW", "10000000"))
ROWS = 1_000
COPIES = ROWS // 100
FRAMES = 500
KEY = bytes(range(16))

_ID_BYTES = 16
_A_FILE = 1_000_000
"""Keys."""


def ids_from(first: int, rows: int = ROWS) -> bytes:
    """IDs that nobody can tell from random ones."""
    return ids_of(np.arange(first, first + rows, dtype=np.uint64))


def ids_of(numbers: npt.NDArray[np.uint64]) -> bytes:
    """Those of these numbers."""
    columns = np.empty((len(numbers), 2), np.uint64)
    columns[:, 0] = numbers * np.uint64(0x9E3779B97F4A7C15) ^ (numbers >> np.uint64(7))
    columns[:, 1] = numbers
    return columns.tobytes()


def _keys(ids: bytes) -> Iterator[bytes]:
    """RocksDB's, of IDs that stand one after the other."""
    return (b"i" + ids[at : at + _ID_BYTES] for at in range(0, len(ids), _ID_BYTES))


def _big_endian(numbers: npt.NDArray[np.uint64]) -> Iterator[bytes]:
    blob = numbers.astype(">u8").tobytes()
    return (blob[at : at + 8] for at in range(0, len(blob), 8))


def frame(ids: bytes) -> tuple[Uint8s, Int64s]:
    offsets = np.arange(0, len(ids) + 1, _ID_BYTES, dtype=np.int32)
    rows = len(offsets) - 1
    encoded = without_producers(Binary(offsets, ids), Binary(np.zeros(rows + 1, np.int32))).encode()
    view, places = np.frombuffer(encoded, np.uint8), np.empty(PLACES, np.int64)
    if layout.layout(view, 0, len(encoded), places) != layout.CANONICAL:
        raise ValueError("the frame is not canonical")
    return view, places


def frames(first: int) -> list[bytes]:
    """New IDs from this number on, and copies of some that came shortly before."""
    new = ROWS - COPIES
    return [ids_from(first + k * new, new) + ids_from(first + k * new - 50_000, COPIES) for k in range(FRAMES)]


def pieces_of(window: IdWindow) -> list[Piece]:
    """What a snapshot has of it."""
    found: list[Piece] = []
    index = window.first_index
    while (piece := window.piece(index, window.confirmed_index)) is not None:
        found.append(piece)
        index = piece.end_index
    return found


class Rocks:
    """Copies known by RocksDB, of the newest `messages`."""

    def __init__(self, folder: Path, messages: int, cache_bytes: int = 512 * 1024 * 1024) -> None:
        self._messages = messages
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        tables = BlockBasedOptions()
        tables.set_bloom_filter(10, False)
        tables.set_block_cache(Cache(cache_bytes))
        options.set_block_based_table_factory(tables)
        options.set_write_buffer_size(64 * 1024 * 1024)
        self._options = options
        self._folder = folder
        self.db: Any = Rdict(str(folder), options, access_type=AccessType.read_write())
        self.first = self.next = 0

    def fill(self) -> None:
        """Has all IDs from 0 on that it may have, from sorted files: as if all had been compacted to RocksDB's lowest
        level, where it finds them the soonest. To take them frame by frame lasts half an hour for 50M."""
        order = np.concatenate(
            [np.frombuffer(ids_from(first, ROWS), ">u8")[::2] for first in range(0, self._messages, ROWS)]
        ).argsort()
        files: list[str] = []
        for begin in range(0, self._messages, _A_FILE):
            numbers = order[begin : begin + _A_FILE].astype(np.uint64)
            ids = ids_of(numbers)
            files.append(self._file(len(files), zip(_keys(ids), _big_endian(numbers), strict=True)))
        for first in range(0, self._messages, _A_FILE):
            numbers = np.arange(first, min(first + _A_FILE, self._messages), dtype=np.uint64)
            ids = ids_of(numbers)
            by_number = ((b"n" + number, key) for number, key in zip(_big_endian(numbers), _keys(ids), strict=True))
            files.append(self._file(len(files), by_number))
        self.db.ingest_external_file(files)
        for file in files:
            Path(file).unlink()
        self.next = self._messages

    def _file(self, number: int, pairs: Iterator[tuple[bytes, bytes]]) -> str:
        path = f"{self._folder}-{number}.sst"
        writer = SstFileWriter(self._options)
        writer.open(path)
        for key, value in pairs:
            writer[key] = value
        writer.finish()
        return path

    def take(self, ids: bytes) -> int:
        keys = list(_keys(ids))
        batch = WriteBatch(raw_mode=True)
        before = self.next
        for key, found in zip(keys, self.db[keys], strict=True):
            if found is None:
                number = self.next.to_bytes(8, "big")
                batch.put(key, number)
                batch.put(b"n" + number, key)
                self.next += 1
        left = self.next - self._messages - self.first
        if left > 0:
            from_key = b"n" + self.first.to_bytes(8, "big")
            expired = 0
            for number, key in self.db.items(from_key=from_key):
                if expired >= left:
                    break
                batch.delete(number)
                batch.delete(key)
                expired += 1
            self.first += expired
        self.db.write(batch)
        return self.next - before


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    limits = WindowLimits(IDS)
    window, rocks = IdWindow(KEY, 0), Rocks(folder / "rocks", IDS)
    for first in range(0, IDS, 50_000):
        new, *_ = window.decide(*frame(ids_from(first, 50_000)), True, limits, Moment(0, 0))
        window.confirm(new)
    rocks.fill()
    begins = [IDS, IDS]

    def ours() -> dict[str, float]:
        made = [frame(ids) for ids in frames(begins[0])]
        begins[0] += FRAMES * (ROWS - COPIES)
        each = []
        for one in made:
            began = time.perf_counter()
            new, *_ = window.decide(*one, True, limits, Moment(0, 0))
            window.confirm(new)
            each.append(time.perf_counter() - began)
        p99_ms = float(np.percentile(each, 99)) * 1000
        return {"IDs/s": FRAMES * ROWS / sum(each), "p99": p99_ms, "bytes": window.memory_bytes / len(window)}

    def rocksdb() -> dict[str, float]:
        made = frames(begins[1])
        begins[1] += FRAMES * (ROWS - COPIES)
        began = time.perf_counter()
        for one in made:
            rocks.take(one)
        return {"IDs/s": FRAMES * ROWS / (time.perf_counter() - began)}

    def recovered() -> dict[str, float]:
        pieces = pieces_of(window)
        began = time.perf_counter()
        IdWindow(KEY, window.first_index).load(pieces)
        return {"seconds": time.perf_counter() - began}

    def growing() -> dict[str, float]:
        new_one, (view, places) = IdWindow(KEY, 0), frame(ids_from(0))
        view = view.copy()
        ids = view[bytes(view).index(ids_from(0)) :][: ROWS * _ID_BYTES]
        each = []
        for first in range(0, IDS, ROWS):
            ids[:] = np.frombuffer(ids_from(first), np.uint8)
            # Not what other processes take in between: it is the longest one that counts.
            began = time.thread_time()
            new, *_ = new_one.decide(view, places, True, limits, Moment(0, 0))
            each.append(time.thread_time() - began)
            new_one.confirm(new)
        return percentiles_ms(each) | {"longest": max(each) * 1000}

    try:
        yield Figure(
            {"window": ours, "RocksDB": rocksdb, "recovery": recovered, "growing": growing},
            ratios=[
                Ratio("decided ÷ the RocksDB way", over("window, IDs/s", "RocksDB, IDs/s"), at_least=12),
                Ratio("a frame of 1,000, p99", lambda m: m["window, p99"], at_most=5, unit="ms"),
                Ratio("the longest of a window that grows", lambda m: m["growing, longest"], at_most=5, unit="ms"),
                Ratio("memory an ID", lambda m: m["window, bytes"], at_most=45, unit="B"),
                Ratio("recovery from pieces", lambda m: m["recovery, seconds"], at_most=2, unit="s"),
                shown("RocksDB, IDs/s", unit="IDs/s"),
            ],
            rounds=3,
            notes=[f"a window of {IDS:,} IDs"],
        )
    finally:
        rocks.db.close()
