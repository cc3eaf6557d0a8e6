"""A store on a machine whose power may be cut at any moment: what of its files the disk has then.

For bytes that were written and not synced, a power cut leaves any sectors or pages, with zeros or old bytes in place of
the others, and any length of the file; of new files any; removed ones may be back. What was synced stays.
"""

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest
from rocksdict import Rdict, WriteBatch

from seqdedupe.errors import SeqdedupeError
from seqdedupe.store import rocksdb
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Delta, Snapshots
from tests.store.model import INCARNATION, State, state_of, topic

SECTOR_BYTES = 512
PAGE_BYTES = 4096

Files = dict[str, bytes]


class LostError(AssertionError):
    """What was durable is gone, or the store does not open."""


def files_of(folder: Path) -> Files:
    """All files that a store needs; nothing may change them meanwhile."""
    unneeded = ("LOG", "LOCK", "IDENTITY", "OPTIONS-", "rocksdict")
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(unneeded)}


def torn(synced: bytes, written: bytes, rng: random.Random) -> bytes:
    """A file that was appended to, with some of what was not synced lost."""
    end = rng.choice((len(written), len(written), rng.randint(len(synced), len(written))))
    block_bytes = rng.choice((SECTOR_BYTES, PAGE_BYTES))
    lost = rng.choice((0.1, 0.5, 0.9))
    # Old bytes are what a log had elsewhere: whole records of it, in the wrong place; or anything.
    old = rng.choice((written[: len(synced)] or b"\xff", rng.randbytes(3 * PAGE_BYTES)))
    left = bytearray(written[:end])
    for start, stop in blocks(len(synced), end, block_bytes):
        if rng.random() < lost:
            # For the block that holds the synced end too, the disk has what it had then: nothing after that.
            is_new = start > len(synced) or start % block_bytes == 0
            left[start:stop] = piece(old, start, stop) if is_new and rng.random() < 0.5 else bytes(stop - start)
    return bytes(left)


def every_loss(synced: bytes, written: bytes) -> Iterator[bytes]:
    """The same, with each sector that was not synced whole, zeros or old, in every combination."""
    sectors = list(blocks(len(synced), len(written), SECTOR_BYTES))
    for fates in product(range(2), *[range(3)] * (len(sectors) - 1)):
        left = bytearray(written)
        for fate, (start, stop) in zip(fates, sectors, strict=True):
            if fate:
                left[start:stop] = (
                    bytes(stop - start) if fate == 1 else piece(synced, start - SECTOR_BYTES, stop - SECTOR_BYTES)
                )
        yield bytes(left)


def blocks(start: int, end: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Where the disk's blocks between two bytes begin and end."""
    first = start // block_bytes * block_bytes
    for block in range(first, end if end > start else first, block_bytes):
        yield max(start, block), min(end, block + block_bytes)


def piece(of: bytes, start: int, stop: int) -> bytes:
    """The bytes from one place to another of something that is repeated for ever."""
    first = max(0, start) % len(of)
    return (of[first:] + of * ((stop - start) // len(of) + 1))[: stop - start]


@dataclass
class Moment:
    """What had been synced and what written; `states` are those that a power cut may leave."""

    what: str
    synced: Files
    written: Files
    marks: set[bytes]
    states: list[State]

    def cut(self, rng: random.Random) -> Files:
        """What the disk has after a power cut."""
        left = dict(self.written)
        for name in self.written:
            if name == "DURABLE":
                left[name] = rng.choice(sorted(self.marks))
            elif name not in self.synced and rng.random() < 0.2:
                del left[name]
            else:
                left[name] = torn(self.synced.get(name, b""), self.written[name], rng)
        return left


@dataclass
class Machine:
    """Runs a store and keeps every moment of it: after each write, before and after each sync."""

    folder: Path
    states: list[State] = field(default_factory=lambda: [State()])
    moments: list[Moment] = field(default_factory=list)
    fails: bool = False

    def plug_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on the store's writes and syncs are watched."""
        write, sync = rocksdb.write, rocksdb.sync

        def watched_write(to: Rdict, batch: WriteBatch) -> None:
            write(to, batch)
            self.keep("written")

        def watched_sync(to: Rdict) -> int:
            self.keep("before the sync")
            if self.fails:
                self.fails = False
                raise OSError(5, "Input/output error")
            while True:
                first = to.latest_sequence_number()
                before = self.logs()
                sequence = sync(to)
                # The event loop may have written meanwhile: what the mark then calls durable is more than `before`.
                if sequence == first:
                    break
            self._synced = before
            self.keep("synced, but not marked")
            return sequence

        monkeypatch.setattr(rocksdb, "write", watched_write)
        monkeypatch.setattr(rocksdb, "sync", watched_sync)

    async def open(self) -> None:
        self.store = Store.open(self.folder)
        self.snapshots = Snapshots(self.store, INCARNATION)
        self._synced = self.logs()
        self._mark = (self.folder / "DURABLE").read_bytes()
        await self.store.put_topics(topic())
        self.marked()

    def logs(self) -> Files:
        return {name: data for name, data in files_of(self.folder).items() if name.endswith(".log")}

    def keep(self, what: str) -> None:
        written = files_of(self.folder)
        # Nothing but logs is written now: all else is synced.
        synced = written | self._synced
        self.moments.append(Moment(what, synced, written, {self._mark, written["DURABLE"]}, list(self.states)))

    def marked(self) -> None:
        """A flush has answered: the last state is durable."""
        self._mark = (self.folder / "DURABLE").read_bytes()
        self.states = self.states[-1:]
        self.keep("marked")

    async def write(self, delta: Delta, *, flush: bool) -> None:
        self.states.append(self.states[-1].after(delta))
        opening = self.snapshots.write_delta(delta)
        if flush:
            await self.store.flush(opening)
            self.marked()

    async def compact(self) -> None:
        if await self.snapshots.compact_if_due():
            self.marked()

    def reopened(self) -> None:
        """RocksDB is open again: what it found is in table files, which it syncs."""
        found = state_of(self.snapshots.load())
        assert found in self.states
        self._synced = self.logs()
        self.states = [found]
        self.keep("open again")


def opens(files: Files, folder: Path) -> State:
    """What a store that is made of these files has; it can be written to, and opens again. Raises LostError."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    try:
        for _ in range(2):
            store = Store.open(folder)
            try:
                if store.topics() not in ([], [topic()]):
                    raise LostError("a topic is not what it was")
                state = state_of(Snapshots(store, INCARNATION).load())
            finally:
                store.close()
    except SeqdedupeError as e:
        raise LostError(f"refused: {e}") from e
    finally:
        shutil.rmtree(folder)
    return state


def check(moment: Moment, left: Files, folder: Path) -> None:
    """Raises LostError if the store has not what it must have after a power cut at this moment left this."""
    found = opens(left, folder)
    if found not in moment.states:
        raise LostError(f"{moment.what}: {found.next_index}, not one of {[s.next_index for s in moment.states]}")
