"""Random sequences of snapshots, compactions, restarts and crashes, against a plain dict model.

After a crash the store must have a state that was written, not older than the last durable one. Each planted bug
shows that the same sequences would find it.
"""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rocksdict import WriteBatch

from seqdedupe.errors import DamagedError, SeqdedupeError
from seqdedupe.store import snapshots
from seqdedupe.store.db import Store
from seqdedupe.store.parts import Header, StoredDelta, StoredPosition, encode_names
from seqdedupe.store.snapshots import Snapshots
from tests.store.copies import copy_of_live
from tests.store.model import INCARNATION, State, delta, fast_folder, state_of

pytestmark = pytest.mark.usefixtures("small_pages")

CASES = 60
PLANTED_CASES = 400

numbers = st.integers(-1, 40)
deltas = st.tuples(
    st.just("delta"),
    st.integers(0, 6),
    st.dictionaries(st.integers(0, 200), st.tuples(numbers, st.integers(0, 9)), max_size=6),
    st.booleans(),
)
steps = st.one_of(
    deltas,
    deltas,
    deltas,
    deltas,
    st.tuples(st.just("compact")),
    st.tuples(st.just("crash in compaction"), st.integers(1, 4)),
    st.tuples(st.just("restart")),
    st.tuples(st.just("crash"), st.integers(0, 100)),
)
sequences = st.lists(steps, min_size=8, max_size=40)


class Case:
    """One sequence. `states` are all that a crash may leave, the last durable one first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.crashes = 0
        self.states = [State()]
        self.open()

    def open(self) -> None:
        self.store = Store.open(self.folder)
        self.snapshots = Snapshots(self.store, INCARNATION)
        loaded = state_of(self.snapshots.load())
        found = [state for state in self.states if state == loaded]
        assert found, f"loaded {loaded}, but it was one of {self.states}"
        self.states = found

    async def run(self, sequence: list[tuple[Any, ...]]) -> None:
        try:
            for step in sequence:
                match step:
                    case ("delta", new, changes, flush):
                        await self.write(new, changes, flush)
                    case ("compact",):
                        if await self.snapshots.compact_if_due():
                            self.states = self.states[-1:]
                    case ("crash in compaction", writes):
                        await self.crash_in_compaction(writes)
                    case ("restart",):
                        self.store.close()
                        self.states = self.states[-1:]
                        self.open()
                    case ("crash", lost):
                        self.crash(lost)
                assert state_of(self.snapshots.load()) == self.states[-1]
        finally:
            self.store.close()

    async def write(self, new: int, changes: dict[int, tuple[int, int]], flush: bool) -> None:
        last = self.states[-1]
        known = len(last.names)
        # What was not flushed may be said again, as after a cancelled flush.
        first_name = len(self.states[0].names) if known % 2 else known
        names = (last.names + [b"name-%d" % (known + i) for i in range(new)])[first_name:]
        slots = {slot % (known + new): change for slot, change in changes.items()} if known + new else {}
        written = delta(last.next_index + 1, slots, first_name=first_name, names=names)
        opening = self.snapshots.write_delta(written)
        self.states.append(last.after(written))
        if flush:
            await self.store.flush(opening)
            self.states = self.states[-1:]

    async def crash_in_compaction(self, writes: int) -> None:
        write = self.store.write
        left = writes

        def crashing(batch: WriteBatch, only_in: int | None = None) -> int:
            nonlocal left
            left -= 1
            if left < 0:
                raise asyncio.CancelledError
            return write(batch, only_in)

        self.store.write = crashing  # type: ignore[method-assign]
        try:
            if await self.snapshots.compact_if_due():
                self.states = self.states[-1:]
        except asyncio.CancelledError:
            pass
        finally:
            del self.store.write
        self.crash(0)

    def crash(self, lost: int) -> None:
        """Goes on from a copy whose write-ahead log has lost some bytes at the end, if none of them was durable."""
        self.crashes += 1
        torn = self.folder.with_name(f"torn{self.crashes}")
        whole = self.folder.with_name(f"whole{self.crashes}")
        copy_of_live(self.folder, torn)
        shutil.copytree(torn, whole)
        self.store.close()
        log = max(torn.glob("*.log"))
        with log.open("r+b") as file:
            file.truncate(max(0, log.stat().st_size - lost))
        for self.folder in (torn, whole):
            try:
                self.open()
                return
            except DamagedError as e:
                if self.folder is whole or "has lost durable writes" not in e.message:
                    raise


def check(sequence: list[tuple[Any, ...]]) -> None:
    with fast_folder() as folder:
        asyncio.run(Case(folder / "store").run(sequence))


def run(cases: int, phases: tuple[Phase, ...]) -> None:
    """Runs the property; a failure prints the sequence and how to replay it."""
    settings(
        max_examples=cases,
        database=None,
        phases=phases,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )(given(sequences)(check))()


def test_loading_gives_what_was_written() -> None:
    run(CASES, (Phase.generate, Phase.shrink))


def _maximum(numbers: Any, where: Any, others: Any) -> None:
    numbers[where] = np.maximum(numbers[where], others)


class _FirstOfEachNumpy:
    """numpy, but of a producer's rows the first one counts."""

    @staticmethod
    def diff(slots: Any, **how: int) -> Any:
        return np.diff(slots, prepend=-1) if "append" in how else np.diff(slots, prepend=how["prepend"])

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def _the_first_delta_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    changes_of = snapshots._changes_of

    def without_first(deltas: list[tuple[StoredDelta, int]], header: Header) -> Any:
        (first, size), *rest = deltas
        empty = StoredDelta(first.position, first.slots[:0], first.persisted[:0], first.epochs[:0], first.stated[:0])
        return changes_of([(empty, size), *rest], header)

    monkeypatch.setattr(snapshots, "_changes_of", without_first)


def _position_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Header.encode

    def ahead(self: Header) -> bytes:
        at = self.position
        later = StoredPosition(at.term, at.next_index + 1, at.producers, at.message_id)
        return encode(Header(self.through, self.packed_names, later))

    monkeypatch.setattr(Header, "encode", ahead)


def _header_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deltas go before the pages are there."""
    flush = Store.flush
    compact = snapshots.compact

    async def early(store: Store, incarnation: int, header: Header) -> snapshots.Compacted:
        found = snapshots._next_deltas(store, incarnation, header.through)
        position = found[-1][0].position
        last = Header(header.through + len(found), header.packed_names, position)
        merged = [
            snapshots._merged_page(store, incarnation, snapshots._changes_of(found, header), first)
            for first in snapshots._changes_of(found, header).pages
        ]
        store.write(snapshots._last_write(incarnation, last))
        for batch in merged:
            store.write(batch)
        await flush(store, store.opening)
        return snapshots.Compacted(last, sum(size for _, size in found))

    assert compact is vars(snapshots)["compact"]
    monkeypatch.setattr(snapshots, "compact", early)


def _names_are_deleted_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "encode_names", lambda names: encode_names(names[:1]))


def _no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqdedupe.store.rocksdb.Mark.move", lambda self, sequence: None)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "loading merges by maximum": lambda m: m.setattr(snapshots, "overwrite", _maximum),
    "compaction takes the first delta of a producer": lambda m: m.setattr(snapshots, "np", _FirstOfEachNumpy()),
    "compaction leaves a delta out": _the_first_delta_is_left_out,
    "the position is ahead of the state": _position_is_ahead,
    "deltas go before their pages are there": _header_first,
    "names get lost when packed": _names_are_deleted_unpacked,
    "lost durable writes are not noticed": _no_mark,
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[bug](monkeypatch)
    with pytest.raises((AssertionError, SeqdedupeError, ExceptionGroup)):
        run(PLANTED_CASES, (Phase.generate,))
