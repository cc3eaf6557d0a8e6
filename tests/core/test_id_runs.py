"""The window of deduplication IDs with its older part in runs, against the same plain set. About 25 s, one process.

Pages lie in a dictionary here: how they get to the store and back is in tests/topic/test_window_runs.py.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from seqdedupe.core import id_runs, id_window
from seqdedupe.core.id_window import Moment
from seqdedupe.core.rule import DUP, NOT_DUP
from seqdedupe.limits import NO_LIMIT, WindowLimits
from tests.core.test_id_window import HASHES, ID_POOL, KEY, Model, frame, pieces_of
from tests.plain import PLAIN

MOST_RUNS = 1
NOWHERE = -1


class Core:
    """The modules, compiled or plain."""

    def __init__(self, window: ModuleType, older: ModuleType, runs: ModuleType) -> None:
        self.window, self.older, self.runs = window, older, runs


COMPILED = Core(id_window, id_window, id_runs)
AS_PLAIN = Core(PLAIN["id_window"], PLAIN["id_window"], PLAIN["id_runs"])


class WithRuns:
    """A window whose runs lie in a dictionary. `looked_up` is of a frame that comes later, perhaps."""

    def __init__(self, core: Core, window: Any, pages: dict[tuple[int, int], bytes]) -> None:
        self.core, self.inner, self.pages = core, window, pages
        self.looked_up: tuple[bytes, int, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def decide(self, view: Any, places: Any, deduplicate: bool, limits: WindowLimits, now: Moment) -> Any:
        older = np.zeros(0, np.int64)
        if deduplicate and self.inner.older.runs:
            known = self.looked_up
            is_current = known is not None and known[:2] == (view.tobytes(), self.inner.older.generation)
            older = known[2] if known is not None and is_current else self.found(view, places)
        return self.inner.decide(view, places, deduplicate, limits, now, older)

    def look_up(self, ids: list[bytes]) -> None:
        view, places = frame(ids)
        self.looked_up = (view.tobytes(), self.inner.older.generation, self.found(view, places))

    def found(self, view: Any, places: Any) -> Any:
        indexes = np.full(int(places[self.core.older.ROWS_OF_BATCH]), NOWHERE, np.int64)
        window = self.inner
        for run, row, pages in window.older.candidates(view, places, window.hash_key, window.first_index):
            for page in pages:
                body = np.frombuffer(self.pages[run.number, page], np.uint8)
                if (delta := self.core.runs.find(body, view, places, row)) != NOWHERE:
                    indexes[row] = max(indexes[row], run.first_index + delta)
        return indexes

    def move_out(self) -> None:
        firsts = self.inner.oldest_chunks(3)
        pieces = [self.inner.whole_chunk(first) for first in firsts]
        if self.inner.older.offered is not None or not pieces:
            return
        first, end = pieces[0].first_index, pieces[-1].end_index
        chunks = [(p.first_index, len(p.sizes), len(p.ids), p.first_time_ms, p.last_time_ms) for p in pieces]
        parts = [(self.core.runs.entries_of(pieces, first, self.inner.hash_key), None, None)]
        self.offer(parts, first, end, np.array(chunks, np.int64))

    def merge(self) -> None:
        pair = self.inner.older.smallest_pair(MOST_RUNS)
        if self.inner.older.offered is not None or pair is None:
            return
        chunks = np.concatenate([run.chunks for run in pair])
        chunks = chunks[chunks[:, 0] + chunks[:, 1] > self.inner.first_index]
        if not len(chunks):
            return
        first, end = int(chunks[0, 0]), pair[-1].end_index
        parts = []
        for low, high in self.core.runs.parts_of(list(pair), 1):
            pages = [
                (self.pages[run.number, page], run.first_index - first)
                for run in pair
                for page in run.pages_between(low, high)
            ]
            parts.append((self.core.runs.entries_in(pages, self.inner.hash_key), low, high))
        self.offer(parts, first, end, chunks)

    def offer(self, parts: list[Any], first: int, end: int, chunks: Any) -> None:
        number = self.inner.older.next_number
        words, firsts, count = self.core.runs.filter_of(end - first), [], 0
        for entries, low, high in parts:
            order = entries.in_order(low, high)
            self.core.runs.add_to_filter(entries.hashes[order], words)
            at = 0
            while at < len(order):
                out, ends, of_pages = np.empty(2 * 4096, np.uint8), np.zeros(2, np.int64), np.zeros(2, np.int64)
                at = self.core.runs.fill_pages(
                    order, at, entries.hashes, entries.deltas, entries.offsets, entries.ids, out, ends, of_pages
                )
                begin = 0
                for stop, first_hash in zip(ends.tolist(), of_pages.tolist(), strict=True):
                    if stop:
                        page = out[begin:stop].tobytes()
                        assert self.core.runs.page_fits(page)
                        self.pages[number, count] = page
                        firsts.append(first_hash)
                        begin, count = stop, count + 1
        run = self.core.runs.IdRun(number, first, end, np.array(firsts, np.int64), words, chunks)
        self.inner.older.offer(run)

    def name(self) -> None:
        self.inner.named(self.inner.older.to_name(self.inner.first_index))
        named = set(self.inner.older.numbers)
        for key in [key for key in self.pages if key[0] not in named]:
            del self.pages[key]


class ModelWithRuns(Model):
    def __init__(self, core: Core) -> None:
        self.core = core
        super().__init__(WithRuns(core, core.window.IdWindow(KEY, 0), {}))

    def restart(self, _core: Any) -> None:
        """From a snapshot up to here: it names what is offered, too."""
        self.fail()
        before = self.window
        runs = before.older.to_name(before.first_index)
        pieces_index = max(before.first_index, runs[-1].end_index if runs else 0)
        pieces = pieces_of(before, pieces_index)
        window = self.core.window.IdWindow(KEY, before.first_index)
        window.load(pieces, runs)
        assert window.first_time_ms == before.first_time_ms
        assert window._id_bytes == before._id_bytes
        self.window = WithRuns(self.core, window, before.pages)
        assert (window.first_index, window.next_index) == (before.first_index, len(self.ids))
        self.check()

    def check(self) -> None:
        super().check()
        window = self.window
        assert window.first_index <= window.memory_index <= self.confirmed
        in_memory = [k for chunk in window._chunks_of_all() for k in range(chunk.first_index, chunk.end_index)]
        assert in_memory == list(range(window.first_index, len(self.ids)))


LIMITS = st.builds(
    WindowLimits,
    messages=st.sampled_from([1, 5, 16, 40, 1000]),
    id_bytes=st.sampled_from([NO_LIMIT, NO_LIMIT, 30, 1000]),
    milliseconds=st.sampled_from([NO_LIMIT, NO_LIMIT, 10, 100]),
)
HOT = ID_POOL[:3]
IDS = st.one_of([st.lists(st.sampled_from(pool), min_size=1, max_size=6) for pool in (HOT, HOT, ID_POOL)])
FRAME = st.tuples(st.sampled_from(["decide", "decide", "always new", "replay", "look up", "look up"]), IDS)
STEP = st.tuples(
    st.sampled_from(
        [
            "confirm",
            "all to a run",
            "all to a run",
            "all to a run",
            "fail",
            "restart",
            "move out",
            "merge",
            "name",
            "tidy",
        ]
    ),
    st.none(),
)
WAIT = st.tuples(st.just("wait"), st.integers(1, 60))
HISTORIES = st.tuples(LIMITS, st.lists(st.one_of(FRAME, STEP, STEP, WAIT), max_size=40))


TO_A_RUN: list[Any] = [("all to a run", None), ("tidy", None), ("tidy", None), ("tidy", None)]
MERGED: list[Any] = [("merge", None), ("name", None)]
SOME, OTHERS, REST = ID_POOL[:12], ID_POOL[12:24], ID_POOL[24:36]


def _decided(*frames: list[bytes]) -> list[Any]:
    return [("decide", ids) for ids in frames]


AIMED: dict[str, tuple[WindowLimits, list[Any]]] = {
    "an ID in two runs": (
        WindowLimits(1000),
        [("always new", SOME), *TO_A_RUN, ("always new", SOME), *TO_A_RUN, *_decided(SOME), *MERGED, *_decided(SOME)],
    ),
    "runs are merged": (
        WindowLimits(1000),
        [
            *(step for ids in (SOME, OTHERS, REST) for step in (*_decided(ids), *TO_A_RUN)),
            *MERGED,
            *_decided(SOME, OTHERS, REST),
            ("restart", None),
            *MERGED,
            *_decided(SOME, OTHERS, REST),
        ],
    ),
    "runs are forgotten": (
        WindowLimits(16),
        [
            *(step for ids in (SOME, OTHERS, REST, SOME) for step in (*_decided(ids), *TO_A_RUN, *MERGED)),
            *_decided(OTHERS, REST, SOME),
        ],
    ),
    "a look-up, and then a run": (
        WindowLimits(1000),
        [*_decided(SOME), *TO_A_RUN, *_decided(OTHERS), ("look up", OTHERS), *TO_A_RUN, ("look up", OTHERS)],
    ),
}


@pytest.mark.parametrize("core", [COMPILED, AS_PLAIN], ids=["compiled", "plain"])
@pytest.mark.parametrize("aim", AIMED)
def test_aimed_histories(core: Core, aim: str) -> None:
    run(AIMED[aim], core)


def run(history: Any, core: Core) -> ModelWithRuns:
    limits, actions = history
    model = ModelWithRuns(core)
    looked_up: list[bytes] = []
    for action, argument in actions:
        window = model.window
        match action:
            case "decide":
                model.decide(argument, True, limits)
            case "always new":
                model.decide(argument, False, limits)
            case "replay":
                model.replay(argument, limits)
            case "look up" if looked_up:
                model.decide(looked_up, True, limits)
                looked_up = []
            case "look up":
                looked_up = argument
                window.look_up(argument)
            case "confirm":
                model.confirm()
            case "fail":
                model.fail()
            case "restart":
                model.restart(core)
            case "all to a run":
                while model.frames:
                    model.confirm()
                window.move_out()
                window.name()
            case "move out":
                window.move_out()
            case "merge":
                window.merge()
            case "name":
                window.name()
            case "tidy":
                window.tidy(3)
            case "wait":
                model.now_ms += argument
        model.check()
    return model


@given(HISTORIES)
def test_it_is_the_set_of_the_ids_from_an_index_on(history: Any) -> None:
    run(history, COMPILED)


@pytest.fixture(params=[None, *HASHES])
def plain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Core:
    if request.param is not None:
        for module in ("id_table", "id_runs"):
            monkeypatch.setattr(PLAIN[module], "siphash", HASHES[request.param])
    return AS_PLAIN


@given(HISTORIES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_whose_hashes_meet_are_told_from_each_other(plain: Core, history: Any) -> None:
    run(history, plain)


def test_many_pages_and_runs_are_looked_through_and_merged() -> None:
    model = ModelWithRuns(COMPILED)
    limits = WindowLimits(20_000)
    numbers = [k.to_bytes(16, "big") + b"x" * (k % 100) for k in range(30_000)]
    for first in range(0, len(numbers), 1000):
        view, places = frame(numbers[first : first + 1000])
        assert model.window.decide(view, places, True, limits, Moment(0, 0))[0] == 1000
        model.window.confirm(1000)
        for step in (model.window.move_out, model.window.name, model.window.merge, model.window.name):
            step()
        while model.window.tidy(1000):
            pass
    window = model.window
    assert len(window.older.runs) <= MOST_RUNS
    assert window.on_disk > 15_000
    assert max(page for _, page in window.pages) > 100
    window.inner.move(limits, 0)
    first = window.first_index
    assert first >= 30_000 - 20_000 * 17 // 16 - 1000
    for begin in range(first, 30_000, 1000):
        ids = numbers[begin : begin + 1000]
        assert window.decide(*frame(ids), True, limits, Moment(0, 0))[3].tolist() == list(
            range(begin, begin + len(ids))
        )
    assert window.decide(*frame(numbers[first - 1000 : first]), True, limits, Moment(0, 0))[0] == 1000


def test_filters_are_small_and_let_little_through() -> None:
    rng = np.random.default_rng(7)
    hashes = rng.integers(-(2**63), 2**63, 100_000)
    words = id_runs.filter_of(len(hashes))
    id_runs.add_to_filter(hashes, words)
    rows = np.empty(100_000, np.int64)
    assert id_runs.probe(hashes, words, rows) == 100_000, "none is missed"
    assert words.nbytes / len(hashes) < 1.8
    others = rng.integers(-(2**63), 2**63, 100_000)
    assert id_runs.probe(others, words, rows) < 500


def test_nothing_is_decided_without_a_look_into_the_runs() -> None:
    model = ModelWithRuns(COMPILED)
    limits = WindowLimits(100)
    model.decide([b"a"], True, limits)
    model.confirm()
    model.window.move_out()
    model.window.name()
    with pytest.raises(ValueError, match="runs"):
        model.window.inner.decide(*frame([b"a"]), True, limits, Moment(0, 0))


def _failing(history: Any) -> bool:
    try:
        run(history, AS_PLAIN)
    except (AssertionError, IndexError, ValueError, KeyError):
        return True
    return False


def _oldest_only(real: Any) -> Any:
    def candidates(self: Any, *arguments: Any) -> Any:
        found: dict[int, Any] = {}
        for one in real(self, *arguments):
            found.setdefault(one[1], one)
        return list(found.values())

    return candidates


def _whatever_generation(self: Any, *arguments: Any) -> Any:
    view, places, deduplicate, limits, now = arguments
    known = self.looked_up
    is_of_it = known is not None and known[0] == view.tobytes()
    older = known[2] if known is not None and is_of_it else self.found(view, places)
    return self.inner.decide(view, places, deduplicate, limits, now, older)


def _beyond_the_window(real: Any) -> Any:
    def decide(*arguments: Any) -> Any:
        verdicts, found, older = arguments[12], arguments[13], arguments[15]
        new = real(*arguments[:15], np.zeros(0, np.int64))
        for row in range(arguments[2], arguments[3]):
            if arguments[5] and len(older) and older[row] >= 0 and verdicts[row] == NOT_DUP:
                verdicts[row], found[row] = DUP, older[row]
        return new

    return decide


PLANTED: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "the hash decides": ("id_runs", "same", lambda real: lambda *arguments: True),
    "filters lose IDs": ("id_runs", "add_to_filter", lambda real: lambda hashes, words: real(hashes[1:], words)),
    "the oldest copy counts": ("id_window.Older", "candidates", _oldest_only),
    "runs that were looked up before count": (WithRuns, "decide", lambda real: _whatever_generation),
    "what is in a run is known for ever": ("id_window", "decide", _beyond_the_window),
    "only the newest run is named": ("id_window.Older", "to_name", lambda real: lambda *a: real(*a)[-1:]),
    "a merged run is only its newer half": (
        "id_window.Older",
        "smallest_pair",
        lambda real: lambda self, most: pair and (pair[1], pair[1]) if (pair := real(self, most)) else None,
    ),
    "the first of a run is left out": ("id_runs.RunEntries", "in_order", lambda real: lambda *a: real(*a)[1:]),
    "indexes count from the wrong run": (
        "id_runs",
        "entries_in",
        lambda real: lambda pages, key: real([(page, max(base, 0) // 2) for page, base in pages], key),
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_control_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, planted = PLANTED[bug]
    target = where
    if isinstance(where, str):
        module, _, inner = where.partition(".")
        target = getattr(PLAIN[module], inner) if inner else PLAIN[module]
    monkeypatch.setattr(target, name, planted(getattr(target, name)))
    if bug == "the hash decides":
        for module in ("id_table", "id_runs"):
            monkeypatch.setattr(PLAIN[module], "siphash", HASHES["all meet"])
    if not any(map(_failing, AIMED.values())):
        find(
            HISTORIES,
            _failing,
            settings=settings(max_examples=1000, deadline=None, database=None, phases=[Phase.generate]),
        )
