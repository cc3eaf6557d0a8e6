"""Rounds of several logs, made for certain; and a disk that loses any page that was not synced."""

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from seqdedupe.log.contract import Log
from seqdedupe.log.embedded.commit import Committer, Work
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.log.embedded.writer import Writer, WrittenAppends
from tests.log.batches import SECRET, TOPIC
from tests.log.conformance import Owner, replayed
from tests.log.power import Disk

PAGE_BYTES = 512
SEGMENT_BYTES = 2_000


def gate_of_rounds(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is cleared, what is handed over to commit threads is for one round."""
    gate = threading.Event()
    gate.set()

    def wait(self: Committer) -> list[Work]:
        work = [self.queue.get()]
        gate.wait()
        return work + [self.queue.get() for _ in range(self.queue.qsize())]

    monkeypatch.setattr(Committer, "_wait", wait)
    return gate


class Rounds:
    """Logs of one sidecar, by incarnation, and what they hold: each append has one message, counted from 0.

    `together` has the commit thread take what is handed over in one round.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> None:
        self.folder = folder
        self.fatal: list[str] = []
        self.logs = logs_in(folder, self.fatal.append, **keys)
        self.owners: dict[int, Owner] = {}
        self.appended: dict[int, int] = {}
        self._acknowledged: dict[int, int] = {}
        """By those that are closed."""
        self._gate = gate_of_rounds(monkeypatch)

    async def begin(self, count: int = 3) -> "Rounds":
        """Makes this many logs, and opens them for writing in one round."""
        for incarnation in range(1, count + 1):
            await self.logs.create(incarnation, TOPIC, SECRET)
        await self.open(*range(1, count + 1))
        return self

    async def open(self, *incarnations: int, term: int = 1) -> None:
        made = [Owner(await self.logs.open(incarnation, 0), term) for incarnation in incarnations]
        for owner in made:
            self.appended[owner.log.incarnation] = len(await ids_in(owner.log))
        self._gate.clear()
        openings = [asyncio.ensure_future(owner.open()) for owner in made]
        for _ in range(3):
            await asyncio.sleep(0)
        self._gate.set()
        for owner in await asyncio.gather(*openings):
            self.owners[owner.log.incarnation] = owner

    def hand_over(self, *incarnations: int, size: int = 300) -> None:
        self._gate.clear()
        for incarnation in incarnations:
            self.owners[incarnation].append(self.appended[incarnation], 1, size)
            self.appended[incarnation] += 1
        self._gate.set()

    async def together(self, *incarnations: int, size: int = 300) -> None:
        before = {i: self.owners[i].stored for i in incarnations}
        self.hand_over(*incarnations, size=size)
        for incarnation, stored in before.items():
            await self.owners[incarnation].until_stored(stored + 1)

    async def forget(self) -> None:
        """The segments are synced, and the journal forgets."""
        self.logs.committer._tick()
        self.logs.committer._timer.cancel()
        # Anyone who comes after the tick is answered after it.
        await self.close(max(self.owners))

    async def close(self, *incarnations: int) -> None:
        for incarnation in incarnations:
            owner = self.owners.pop(incarnation)
            self._acknowledged[incarnation] = self._acknowledged.get(incarnation, 0) + owner.stored
            await owner.log.close()

    async def end(self) -> None:
        await self.close(*list(self.owners))
        await self.logs.close()

    def stored(self) -> dict[int, int]:
        """How many messages of each log were acknowledged."""
        before, now = dict(self._acknowledged), list(self.owners.items())
        return before | {incarnation: before.get(incarnation, 0) + owner.stored for incarnation, owner in now}


def path_of(fd: int) -> str:
    """That of an open file."""
    return os.readlink(f"/proc/self/fd/{fd}")


def failing_syncs(monkeypatch: pytest.MonkeyPatch, fails: Callable[[str], bool]) -> None:
    """From now on the sync of a file fails of whose path this is true."""
    really = os.fdatasync

    def sync(fd: int) -> None:
        if fails(path_of(fd)):
            raise OSError(errno.EIO, "the disk failed")
        really(fd)

    monkeypatch.setattr(os, "fdatasync", sync)


def naming_as_synced(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """From now on records name this place of their writer as what was synced before them."""
    really = Writer._pack

    def pack(self: Writer, *arguments: Any) -> WrittenAppends:
        synced, self._synced = self._synced, getattr(self, place)
        try:
            return really(self, *arguments)
        finally:
            self._synced = synced

    monkeypatch.setattr(Writer, "_pack", pack)


def logs_in(folder: Path, fatal: Callable[[str], None] = pytest.fail, **keys: Any) -> EmbeddedLogs:
    return EmbeddedLogs(folder, clock_ms=lambda: 1_000, fatal=fatal, segment_bytes=SEGMENT_BYTES, **keys)


async def ids_in(log: Log) -> list[int]:
    return [i for r in await replayed(log, log.first_index) if r.rows for i in r.batch.sequence_ids]


async def found_in(folder: Path, incarnations: list[int], **keys: Any) -> dict[int, list[int]]:
    """The sequence IDs that a start finds in each log; what cannot be opened raises."""
    logs = logs_in(folder, **keys)
    try:
        found = {}
        for incarnation in incarnations:
            log = await logs.open(incarnation, 0)
            found[incarnation] = await ids_in(log)
            await log.close()
        return found
    finally:
        await logs.close()


class LosingDisk(Disk):
    """At a power cut each page that was not synced may be there or not, at any length of the file, and so may what
    was done to a folder. Or all of that is there, for certain."""

    entries_survive = False

    def image(self, random: Random | None) -> dict[Path, bytes]:
        """What would be found below the folder; without dice nothing that was not synced."""
        files: dict[Path, bytes] = {}
        self._look(self.folder, Path(), files, random)
        return files

    def _look(self, folder: Path, at: Path, files: dict[Path, bytes], random: Random | None) -> None:
        entries = dict(self._entries.get(folder, {}))
        there = {entry.name: entry.inode() for entry in os.scandir(folder)} if folder.exists() else {}
        if self.entries_survive or (random and random.random() < 0.5):
            entries = there
        for name, inode in entries.items():
            path = folder / name
            if path in self._entries or path.is_dir():
                self._look(path, at / name, files, random)
                continue
            synced = self._contents.get(inode, b"")
            files[at / name] = synced
            if random and there.get(name) == inode:
                # Anyone who forgets may remove it meanwhile.
                with suppress(FileNotFoundError), path.open("rb") as file:
                    # Or another file has its name meanwhile.
                    if os.fstat(file.fileno()).st_ino == inode:
                        files[at / name] = self._survives(synced, file.read(), random)

    def _survives(self, synced: bytes, written: bytes, random: Random) -> bytes:
        size = random.choice((len(synced), len(written), random.randint(0, len(written))))
        left = bytearray(max(size, len(synced)))
        left[: len(synced)] = synced
        for page in range(0, len(left), PAGE_BYTES):
            new = written[page : min(page + PAGE_BYTES, len(left))]
            if random.random() < 0.5:
                left[page : page + len(new)] = new
        return bytes(left)


def put(image: dict[Path, bytes], to: Path) -> Path:
    """Makes the files of an image."""
    to.mkdir(parents=True)
    for path, raw in image.items():
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        (to / path).write_bytes(raw)
    return to


class Cuts:
    """Cuts the power before and after each sync: what is found then, and what had been acknowledged."""

    def __init__(self, disk: LosingDisk, rounds: Rounds, monkeypatch: pytest.MonkeyPatch, random: Random) -> None:
        self.images: list[tuple[dict[Path, bytes], dict[int, int]]] = []
        self._lock = threading.RLock()
        for name in ("fsync", "fdatasync"):
            really = getattr(os, name)

            def sync(fd: int, really: Callable[[int], Any] = really) -> None:
                with self._lock:
                    stored = rounds.stored()
                    self.images.append((disk.image(random), stored))
                    really(fd)
                    self.images.append((disk.image(None), stored))

            monkeypatch.setattr(os, name, sync)

    async def check(self, to: Path) -> None:
        """What was acknowledged is there, in each of them, and again after another start."""
        for number, (image, stored) in enumerate(self.images):
            folder = put(image, to / str(number)) / "logs"
            for _ in range(1 + (number % 4 == 0)):
                found = await found_in(folder, list(stored))
                for incarnation, ids in found.items():
                    assert ids == list(range(len(ids)))
                    assert len(ids) >= stored[incarnation], f"cut {number}, log {incarnation}"
