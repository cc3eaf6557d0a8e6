"""What outlives a process: the store with power cuts, and the log's storage, which checks what it is given."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rocksdict import WriteBatch

from seqdedupe import batch as batches
from seqdedupe.errors import error
from seqdedupe.limits import MAX_SEQUENCE_ID
from seqdedupe.log.contract import Runs
from seqdedupe.store.db import BEHIND_SECONDS, Store, _Opening
from seqdedupe.store.parts import snapshot_range
from seqdedupe.topic import control
from seqdedupe.topic.policy import Policy
from tests.log.faulty import Storage


class Violation(AssertionError):
    """Something that was promised does not hold."""


Rows = list[tuple[bytes, bytes]]


class Left:
    """What a power cut may leave of a store, to be read as one."""

    opening = 1

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def scan(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        return (row for row in self._rows if start <= row[0] < stop)


class CrashableStore(Store):
    """The real store, of which a power cut loses what was not synced: in some topics, as if they were alone in it.

    `states` are what it may leave: what is durable, and what each write since then made of it.
    """

    @staticmethod
    def open_crashable(folder: Path) -> "CrashableStore":
        store = Store.open(folder)
        # `Store.open` makes a Store; nothing but methods is different.
        store.__class__ = CrashableStore
        assert isinstance(store, CrashableStore)
        return store

    fails: int | None = None
    """Set: the next sync fails, and this many of the writes that it would have synced are there all the same."""

    calls_left: int | None = None
    """Set: this many calls of any kind succeed, and all others fail."""

    @staticmethod
    def is_behind() -> bool:
        """Whether RocksDB has more to do than it should before the next write."""
        return False

    def watch(self, *incarnations: int) -> None:
        """These topics' records are those that matter from now on; they have none yet."""
        self._ranges = [snapshot_range(incarnation) for incarnation in incarnations]
        self.states: list[Rows] = [[]]
        self.restart()

    def watch_instead(self, incarnation: int, other: int) -> None:
        """The other topic's records matter from now on and not this one's, which are gone."""
        self._ranges = [snapshot_range(other) if r == snapshot_range(incarnation) else r for r in self._ranges]

    def write(self, batch: WriteBatch, only_in: int | None = None) -> int:
        self._called()
        opening = super().write(batch, only_in)
        self.states.append([row for bounds in self._ranges for row in super(CrashableStore, self).scan(*bounds)])
        return opening

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        self._called()
        return super().get(keys)

    def scan(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        self._called()
        return super().scan(start, stop)

    async def wait_until_idle(self, at_most_seconds: float | None = None) -> None:
        """What RocksDB's threads have before them is a matter of the case's seed here."""
        self._current()
        if self.is_behind():
            await asyncio.sleep(BEHIND_SECONDS)

    def fail_next_sync(self, survives: int) -> None:
        """The next sync fails, and RocksDB is opened again, as after a failure of the disk."""
        self.fails = survives

    def fail_after(self, calls: int, survives: int) -> None:
        """This many calls succeed, no matter what they are; then all fail, and RocksDB has been opened again when they
        do not (`restart`)."""
        self.calls_left, self._survives = calls, survives

    def _called(self) -> None:
        if self.calls_left is None:
            return
        if self.calls_left == 0:
            self._opened_again(self._survives)
        self.calls_left -= 1
        if self.calls_left < 0:
            raise error("STORE_UNAVAILABLE", "a planned failure")

    def _opened_again(self, survives: int) -> None:
        self.cut_power(survives)
        self._openings += 1
        self._opening = _Opening(self._openings, self._current().db)

    def _sync(self, opening: _Opening) -> None:
        self._called()
        if self.fails is not None:
            survives, self.fails = self.fails, None
            self._opened_again(survives)
            raise error("STORE_UNAVAILABLE", "a planned failure")
        if opening.number != self._openings:
            raise error("STORE_UNAVAILABLE", "it was opened again meanwhile")
        super()._sync(opening)
        self.states = self.states[-1:]

    def cut_power(self, survives: int) -> None:
        """All is lost that was written after the first this many unsynced writes."""
        self._put_back(self.states[min(survives, len(self.states) - 1)])

    def lose(self) -> None:
        """All that the store knew of the topics is gone."""
        self._put_back([])

    def _put_back(self, rows: Rows) -> None:
        batch = WriteBatch(raw_mode=True)
        for bounds in self._ranges:
            batch.delete_range(*bounds)
        for key, value in rows:
            batch.put(key, value)
        super().write(batch)
        self.states = [rows]

    def restart(self) -> None:
        """The process ended: what it had written and still finds is durable once RocksDB is open again."""
        self._this_flush = self._next_flush = None
        self.fails = self.calls_left = None
        self.states = self.states[-1:]


class Row(NamedTuple):
    """A message in the log."""

    name: str
    sequence_id: int
    payload: bytes


@dataclass(slots=True)
class Promised:
    """What the log may hold, by producer name."""

    epoch: int = 0
    """The newest session that Open answered: nothing of an earlier one comes any more."""

    highest: int = -1
    """The highest sequence ID in the log."""

    stored_epoch: int = 0
    """The newest session that the log names."""

    reset_epoch: int = 0
    """That of the last reset in the log."""

    purges: int = 0
    """How often the log says that it is forgotten."""

    forgotten: int = -1
    """The highest sequence ID that was in the log when it was forgotten."""


class CheckedStorage(Storage):
    """The log's storage. Each batch that becomes durable is held against what was promised.

    `rows` are all messages ever, by index. `links` has the stored link of each batch's first row of each producer, by
    that row's index. `may_double` are those sent while deduplication was off.
    """

    def __init__(self, incarnation: int, violations: list[str]) -> None:
        super().__init__(incarnation)
        self.rows: list[Row] = []
        self.indexes: dict[tuple[str, int], list[int]] = {}
        self.links: dict[int, int] = {}
        self.promised: dict[str, Promised] = {}
        self.may_double: set[tuple[str, int]] = set()
        self.policy = Policy()
        self._violations = violations
        self._places: dict[bytes, np.ndarray] = {}

    def places(self, record: bytes) -> np.ndarray:
        found = self._places.get(record)
        if found is None:
            found = self._places[record] = super().places(record)
        return found

    def promise(self, name: str) -> Promised:
        return self.promised.setdefault(name, Promised())

    def add_batch(self, batch: bytes, rows: int, column_bytes: int) -> Runs:
        runs = super().add_batch(batch, rows, column_bytes)
        decoded = batches.decode(batch)
        names = decoded.names()
        for p, name in enumerate(names):
            if decoded.epochs[p] < self.promise(name).epoch:
                self._violations.append(f"a batch of an earlier session of {name} is stored after Open answered")
        started: set[int] = set()
        for row, sequence_id in enumerate(decoded.sequence_ids.tolist()):
            p = decoded.producer_of(row)
            name = names[p]
            if p not in started:
                started.add(p)
                self.links[len(self.rows)] = int(decoded.previous_sequence_ids[p])
                self._check_link(name, sequence_id, self.links[len(self.rows)])
            self._add_row(Row(name, sequence_id, decoded.payloads[row] or b""))
        return runs

    def add_control(self, body: bytes) -> Runs:
        runs = super().add_control(body)
        change, _ = control.decode(body)
        if isinstance(change, Policy):
            self.policy = change
            return runs
        if isinstance(change, control.CursorChange):
            self.policy = change.applied_to(self.policy)
            return runs
        if isinstance(change, control.Purge):
            for name in change.names:
                self._purged(name.decode())
            return runs
        if isinstance(change, control.Import):
            return runs
        for name, epoch in zip(change.names, change.epochs.tolist(), strict=True):
            durable = self.promise(name.decode())
            durable.stored_epoch = max(durable.stored_epoch, epoch)
        if isinstance(change, control.Reset):
            for name, epoch, persisted in zip(change.names, change.epochs, change.persisted, strict=True):
                promised = self.promise(name.decode())
                promised.highest, promised.reset_epoch = int(persisted), int(epoch)
        return runs

    def _purged(self, name: str) -> None:
        promised = self.promise(name)
        promised.forgotten = max(promised.forgotten, promised.highest)
        promised.purges += 1
        promised.highest, promised.epoch, promised.reset_epoch = -1, 0, 0

    def _check_link(self, name: str, sequence_id: int, link: int) -> None:
        promised = self.promise(name)
        highest = promised.highest
        # A message may have been on its way to the log when its producer was forgotten.
        if link > max(highest, promised.forgotten):
            self._violations.append(f"{name} {sequence_id} is linked to {link}, but the log has only {highest}")
        if link == -1 and highest >= 0 and not promised.purges and (name, sequence_id) not in self.may_double:
            self._violations.append(f"{name} {sequence_id} is linked to nothing, but the log has {highest}")

    def _add_row(self, row: Row) -> None:
        key = row.name, row.sequence_id
        promised = self.promise(row.name)
        if row.sequence_id <= promised.highest and key not in self.may_double:
            what = "doubled" if key in self.indexes else f"stored after {promised.highest}"
            self._violations.append(f"{row.name} {row.sequence_id} is {what}")
        promised.highest = max(promised.highest, row.sequence_id)
        self.indexes.setdefault(key, []).append(len(self.rows))
        self.rows.append(row)

    def holds(self, name: str, sequence_id: int, payload: bytes, *, below_index: int = MAX_SEQUENCE_ID) -> bool:
        """Whether the log has this very message, below an index."""
        indexes = self.indexes.get((name, sequence_id), ())
        return any(self.rows[index].payload == payload for index in indexes if index < below_index)
