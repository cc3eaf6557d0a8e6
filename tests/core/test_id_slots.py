"""The tables of a window of deduplication IDs, which grow and shrink bit by bit, against a plain dictionary.

Their parts are so small here that some of it is always under way: growth while chunks are swept out, fail, move to
runs or are loaded again, and memory may be gone at any allocation. After each step all IDs are looked for. About 20 s,
one process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from seqdedupe.core import id_runs, id_slots, id_table, id_window
from seqdedupe.core.id_slots import Newer, Slots
from seqdedupe.core.id_window import IdWindow, Moment
from seqdedupe.core.rule import DUP, NOT_DUP, UNKNOWN
from seqdedupe.limits import NO_LIMIT, WindowLimits
from tests.core.test_id_window import HASHES, ID_POOL, KEY, frame, pieces_of
from tests.plain import PLAIN

IDS = [*ID_POOL, *(b"%d" % k for k in range(300))]
"""Prefixes of each other, NUL bytes, the ID of zeros alone; and enough for tables to grow many times."""

SEEDS = 16
NOWHERE = id_table.NOWHERE
SMALL = {
    "_FIRST_SLOTS": 8,
    "_AT_ONCE": 8,
    "_PAGE_SLOTS": 1,
    "_TOUCHED_A_ROW": 4,
    "_MOVED_A_ROW": 2,
    "_SWEPT_A_ROW": 4,
    "_SWEPT_A_FRAME": 1,
    "_SWEPT_AT_ONCE": 1,
}


class Core(NamedTuple):
    """The modules, compiled or plain."""

    window: ModuleType
    newer: ModuleType
    slots: ModuleType
    runs: ModuleType


COMPILED = Core(id_window, id_slots, id_slots, id_runs)
AS_PLAIN = Core(*(PLAIN[name] for name in ("id_window", "id_slots", "id_slots", "id_runs")))


class Memory:
    """For what the modules ask of the system, `left` allocations succeed, and then one does not; None: all do."""

    def __init__(self, core: Core, patch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        self.failures = 0
        new, is_remapped = core.newer.Growing._new, core.newer.Growing._is_remapped

        def new_rows(table: Any, rows: int) -> Any:
            self.taken()
            return new(table, rows)

        patch.setattr(core.newer.Growing, "_new", new_rows)
        patch.setattr(core.newer.Growing, "_is_remapped", lambda *of: self.left != 0 and is_remapped(*of))
        for module in (core.newer, core.window):
            patch.setattr(module, "np", _Numpy(self))

    def taken(self) -> None:
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0:
            self.left = None
            self.failures += 1
            raise MemoryError("planned")


class _Numpy:
    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def __getattr__(self, name: str) -> Any:
        if name in ("zeros", "empty"):
            self._memory.taken()
        return getattr(np, name)


class History:
    """A window, and what has to come of it: the IDs of all messages by index."""

    def __init__(self, core: Core, memory: Memory, seed: int) -> None:
        self.core, self.memory, self.random = core, memory, Random(seed)
        self.window = core.window.IdWindow(KEY, 0)
        self.ids: list[bytes] = []
        self.confirmed = self.now_ms = 0
        self.frames: list[int] = []
        self.limits = WindowLimits(100)
        self.views = {one: frame([one]) for one in IDS}

    # -- steps ---------------------------------------------------------------------------------------------------

    def decide(self) -> None:
        some = self.random.sample(IDS, k=self.random.choice((1, 5, len(IDS))))
        ids = self.random.choices(some, k=self.random.choice((1, 3, 20, 40)))
        deduplicate = self.random.random() < 0.7
        highest = self.highest()
        older = np.array([self.in_runs(one) for one in ids], np.int64)
        with self.may_lack_memory():
            new, verdicts, dups, originals = self.window.decide(
                *frame(ids), deduplicate, self.limits, Moment(self.now_ms, self.now_ms), older
            )
            found = dict(zip(dups.tolist(), originals.tolist(), strict=True))
            first, first_new = self.window.first_index, len(self.ids)
            for row, one in enumerate(ids):
                known = highest.get(one, NOWHERE)
                if not deduplicate or known < first:
                    assert verdicts[row] == NOT_DUP, one
                    highest[one] = len(self.ids)
                    self.ids.append(one)
                elif self.confirmed <= known < first_new:
                    assert verdicts[row] == UNKNOWN, one
                else:
                    assert (verdicts[row], found[row]) == (DUP, known), one
            assert new == len(self.ids) - first_new
            self.frames += [new] if new else []

    def confirm(self) -> None:
        for _ in range(self.random.randint(1, 3)):
            if self.frames:
                rows = self.frames.pop(0)
                self.window.confirm(rows)
                self.confirmed += rows

    def confirm_all(self) -> None:
        while self.frames:
            self.confirm()

    def fail(self) -> None:
        self.window.fail()
        del self.ids[self.confirmed :]
        self.frames.clear()

    def other_limits(self) -> None:
        self.limits = WindowLimits(
            self.random.choice((1, 20, 100, 1000, 1000)),
            self.random.choice((NO_LIMIT, NO_LIMIT, NO_LIMIT, 1, 1000)),
            self.random.choice((NO_LIMIT, NO_LIMIT, NO_LIMIT, 16, 400)),
        )

    def wait(self) -> None:
        self.now_ms += self.random.choice((1, 5, 50))

    def tidy(self) -> None:
        with self.may_lack_memory(fails=False):
            self.window.tidy(self.random.choice((1, 3, 40)))

    def to_runs(self) -> None:
        """The oldest chunks lie in a run from now on."""
        pieces = [self.window.whole_chunk(index) for index in self.window.oldest_chunks(self.random.choice((2, 8)))]
        if pieces:
            chunks = [(p.first_index, len(p.sizes), len(p.ids), p.first_time_ms, p.last_time_ms) for p in pieces]
            first, end, none = pieces[0].first_index, pieces[-1].end_index, np.zeros(0, np.int64)
            run = self.core.runs.IdRun(
                self.window.older.next_number, first, end, none, none, np.array(chunks, np.int64)
            )
            self.window.older.offer(run)
            self.window.named(self.window.older.to_name(self.window.first_index))

    def restart(self) -> None:
        self.fail()
        before = self.window
        pieces, runs = pieces_of(before, before.memory_index), before.older.to_name(before.first_index)
        with self.may_lack_memory(fails=False):
            window = self.core.window.IdWindow(KEY, before.first_index)
            window.load(pieces, runs)
            self.window = window

    @contextmanager
    def may_lack_memory(self, *, fails: bool = True) -> Iterator[None]:
        """In some steps an allocation fails, no matter which; all that is in flight is given up then."""
        if self.random.random() < 0.3:
            self.memory.left = self.random.choice((0, 0, 1, 2, 3, 5))
        try:
            yield
        except MemoryError:
            if fails:
                self.fail()
        finally:
            self.memory.left = None

    # -- what has to come of it ----------------------------------------------------------------------------------

    def highest(self) -> dict[bytes, int]:
        return {one: index for index, one in enumerate(self.ids)}

    def in_runs(self, one: bytes) -> int:
        """As a look into the runs finds it, forgotten or not."""
        end = self.window.older.end_index
        return next((index for index in range(end - 1, -1, -1) if self.ids[index] == one), NOWHERE)

    def check(self) -> None:
        window, highest = self.window, self.highest()
        assert (window.confirmed_index, window.next_index) == (self.confirmed, len(self.ids))
        for one, view in self.views.items():
            index, known = window.index_of(*view), highest.get(one, NOWHERE)
            # What is in a run may not be swept out yet.
            allowed = (known,) if known >= window.memory_index else (NOWHERE, known)
            assert index in allowed if known >= window.first_index else index == NOWHERE, one
        slots, newer = window._slots, window._newer
        assert window._state[id_table.USED] == np.count_nonzero(slots.rows) < len(slots.rows)
        for table in (slots.rows, slots._larger.rows if slots._larger is not None else slots.rows):
            used = table[table != id_table.EMPTY]
            assert not set(((used & id_table._PLACE) >> id_table.ROW_BITS).tolist()) & set(newer.free)
        places = [*newer.order, *(place for place, _ in slots._forgotten), *newer.free]
        assert sorted(places) == list(range(len(newer.chunks)))


STEPS: dict[Callable[[History], None], int] = {
    History.decide: 40,
    History.confirm: 12,
    History.confirm_all: 2,
    History.fail: 2,
    History.other_limits: 3,
    History.wait: 4,
    History.tidy: 12,
    History.to_runs: 4,
    History.restart: 2,
}


def run(core: Core, seed: int, patch: pytest.MonkeyPatch, *, steps: int = 200) -> History:
    for name, value in SMALL.items():
        patch.setattr(core.slots, name, value)
    history = History(core, Memory(core, patch), seed)
    for step in history.random.choices(list(STEPS), list(STEPS.values()), k=steps):
        step(history)
        history.check()
    return history


@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_id_is_found_where_it_was_accepted_last(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run(COMPILED, seed, monkeypatch)


def test_the_histories_are_not_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = dict.fromkeys(("growth in growth", "given up in growth", "swept in growth", "smaller", "no memory"), 0)
    begin, give_up, sweep = Slots._begin_larger, Slots.give_up_larger, Slots._sweep

    def count_begun(self: Slots, needed: int) -> None:
        counts["growth in growth"] += self._larger is not None
        begin(self, needed)
        counts["smaller"] += self._larger is not None and len(self._larger.rows) < len(self.rows)

    def count_given_up(self: Slots) -> None:
        counts["given up in growth"] += self._larger is not None and bool(self._larger_state[id_table.USED])
        give_up(self)

    def count_swept(self: Slots, slots: int) -> None:
        counts["swept in growth"] += self._larger is not None and bool(self._forgotten)
        sweep(self, slots)

    monkeypatch.setattr(Slots, "_begin_larger", count_begun)
    monkeypatch.setattr(Slots, "give_up_larger", count_given_up)
    monkeypatch.setattr(Slots, "_sweep", count_swept)
    for seed in range(SEEDS):
        with monkeypatch.context() as patch:
            counts["no memory"] += run(COMPILED, seed, patch).memory.failures
    assert all(counts.values()), counts


@pytest.fixture(params=[None, *HASHES, "far from home"])
def plain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Core:
    if request.param in HASHES:
        monkeypatch.setattr(PLAIN["id_table"], "siphash", HASHES[request.param])
    elif request.param:
        far_from_home(monkeypatch)
    return AS_PLAIN


def far_from_home(patch: pytest.MonkeyPatch) -> None:
    """A slot tells only of IDs up to two slots from their homes where these are."""
    patch.setattr(PLAIN["id_table"], "_HOME_BITS", 2)
    patch.setattr(PLAIN["id_table"], "_HOME", 3)


@pytest.mark.parametrize("seed", range(2))
def test_ids_whose_hashes_meet_are_told_from_each_other(
    plain: Core, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(plain, seed, monkeypatch, steps=60)


def places_to_which_the_larger_table_leads_are_used_again(patch: pytest.MonkeyPatch) -> None:
    def sweep(self: Slots, slots: int) -> None:
        larger, self._larger = self._larger, None
        real(self, slots)
        self._larger = larger

    real = Slots._sweep
    patch.setattr(Slots, "_sweep", sweep)


def what_a_larger_table_brings_counts_as_swept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slots, "_sweep_anew", lambda self: None)


def what_fails_is_put_back_into_one_table(patch: pytest.MonkeyPatch) -> None:
    def fail(self: IdWindow) -> None:
        larger, self._slots._larger = self._slots._larger, None
        real(self)
        self._slots._larger = larger

    real = IdWindow.fail
    patch.setattr(IdWindow, "fail", fail)


def places_are_used_again_before_they_are_swept_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slots, "forget", lambda self, place: self._newer.give_back(place))


def what_was_known_is_noted_with_the_whole_frame(patch: pytest.MonkeyPatch) -> None:
    def decide(self: IdWindow, *frame: Any) -> Any:
        before = len(self._replaced)
        try:
            return real(self, *frame)
        except MemoryError:
            while len(self._replaced) > before:
                self._replaced.pop()
            raise

    real = IdWindow.decide
    patch.setattr(IdWindow, "decide", decide)


BUGS = [
    places_to_which_the_larger_table_leads_are_used_again,
    what_a_larger_table_brings_counts_as_swept,
    what_fails_is_put_back_into_one_table,
    places_are_used_again_before_they_are_swept_out,
    what_was_known_is_noted_with_the_whole_frame,
]


def _fails(core: Core, seed: int, monkeypatch: pytest.MonkeyPatch, *, steps: int = 200) -> bool:
    try:
        with monkeypatch.context() as patch:
            run(core, seed, patch, steps=steps)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_control_a_planted_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    assert any(_fails(COMPILED, seed, monkeypatch) for seed in range(SEEDS))


def test_control_an_id_far_from_home_that_is_taken_for_a_near_one_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(slots: Any, at: int, hashed: int, row: int, state: Any) -> None:
        real(slots, at, hashed, row, state)
        state[id_table.IS_FAR] = 0

    real = PLAIN["id_table"]._fill
    far_from_home(monkeypatch)
    monkeypatch.setattr(PLAIN["id_table"], "_fill", fill)
    assert any(_fails(AS_PLAIN, seed, monkeypatch, steps=60) for seed in range(SEEDS))


def test_what_was_known_is_known_again_after_a_frame_that_found_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is new, a part of a frame is in its chunk, and there is none for the next part: its IDs count where they
    did."""
    limits, window = WindowLimits(48), IdWindow(KEY, 0)
    ids = [b"a", b"b", b"c", b"d", b"e"]
    window.decide(*frame(ids), True, limits, Moment(0, 0))
    window.confirm(len(ids))
    opened = Newer.open

    def open_(self: Newer, first_index: int, time_ms: int) -> None:
        if first_index > len(ids):
            raise MemoryError
        opened(self, first_index, time_ms)

    with monkeypatch.context() as patch:
        patch.setattr(Newer, "open", open_)
        with pytest.raises(MemoryError):
            window.decide(*frame(ids), False, limits, Moment(0, 0))
    window.fail()
    assert window.decide(*frame(ids), True, limits, Moment(0, 0))[3].tolist() == [0, 1, 2, 3, 4]
