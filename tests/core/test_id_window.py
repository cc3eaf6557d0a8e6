"""The window of deduplication IDs against a plain set of them. About 25 s, one process; the first time it compiles."""

import random
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from seqdedupe.batch import NO_INT64S, Batch, Binary
from seqdedupe.core import id_slots, id_window
from seqdedupe.core.growing import Growing
from seqdedupe.core.id_chunks import NO_LIMIT, WindowLimits
from seqdedupe.core.id_table import CONFIRMED
from seqdedupe.core.moment import Moment
from seqdedupe.core.rule import DUP, NOT_DUP, UNKNOWN
from seqdedupe.format import layout
from seqdedupe.format.columns import PLACES
from tests.plain import PLAIN

KEY = bytes(range(16))

ID_POOL = [
    b"a", b"a\0", b"a\0\0", b"ab", b"abc", b"\0", b"\0\0", bytes(16), bytes(15), bytes(17), b"x" * 16, b"x" * 17,
    b"x" * 18, b"y" * 255, b"y" * 254, b"y" * 254 + b"z", *(f"id-{k}".encode() for k in range(30)),
]  # fmt: skip
"""Prefixes of each other, NUL bytes, the ID of zeros alone, the shortest and the longest."""


def frame(ids: list[bytes]) -> tuple[Any, Any]:
    """A batch of these IDs, and where things stand in it."""
    columns = Binary.of_all(ids)
    payloads = Binary.of_all([b""] * len(ids))
    encoded = Batch(Binary(), NO_INT64S, NO_INT64S, NO_INT64S, payloads, deduplication_ids=columns).encode()
    view, places = np.frombuffer(encoded, np.uint8), np.empty(PLACES, np.int64)
    assert layout.layout(view, 0, len(encoded), places) == layout.CANONICAL
    return view, places


def pieces_of(window: Any, index: int) -> list[Any]:
    """What a snapshot has of a window from this index on."""
    found = []
    while (piece := window.piece(index, window.confirmed_index)) is not None:
        found.append(piece)
        index = piece.end_index
    assert index == window.confirmed_index
    return found


class Model:
    """What has to come of it: a list of the IDs of all messages, and where the window begins."""

    def __init__(self, window: Any) -> None:
        self.window = window
        self.ids: list[bytes] = []
        self.times: list[int] = []
        self.confirmed = 0
        self.frames: list[int] = []
        self.now_ms = 0
        self.doubt_ms = (0, 0)
        """So much earlier and later than it is it may be, as far as the window is told."""

    @property
    def now(self) -> Moment:
        before_ms, after_ms = self.doubt_ms
        return Moment(self.now_ms - before_ms, self.now_ms + after_ms)

    def decide(self, ids: list[bytes], deduplicate: bool, limits: WindowLimits) -> None:
        before = self.window.first_index
        new, verdicts, dups, originals = self.window.decide(*frame(ids), deduplicate, limits, self.now)
        first = self.window.first_index
        assert before <= first <= self.confirmed
        if first > before:
            self.check_reach(limits)
        frame_index = len(self.ids)
        found: dict[int, int] = {}
        for row, one in enumerate(ids):
            known = (
                [k for k in range(len(self.ids) - 1, first - 1, -1) if self.ids[k] == one][:1] if deduplicate else []
            )
            if not known:
                assert verdicts[row] == NOT_DUP, (row, one)
                self.ids.append(one)
                self.times.append(self.now_ms)
            elif known[0] < self.confirmed or known[0] >= frame_index:
                assert verdicts[row] == DUP, (row, one)
                found[row] = known[0]
            else:
                assert verdicts[row] == UNKNOWN, (row, one)
        assert dict(zip(dups.tolist(), originals.tolist(), strict=True)) == found
        assert new == len(self.ids) - frame_index
        if new:
            self.frames.append(new)
        self.check()

    def check_reach(self, limits: WindowLimits) -> None:
        """No more is forgotten than may be."""
        first = self.window.first_index
        rest = self.ids[first : self.confirmed]
        assert (
            len(rest) >= limits.messages
            or (limits.id_bytes != NO_LIMIT and sum(map(len, rest)) >= limits.id_bytes)
            or (limits.milliseconds != NO_LIMIT and self.times[first - 1] <= self.now_ms - limits.milliseconds)
        )

    def confirm(self) -> None:
        if self.frames:
            rows = self.frames.pop(0)
            self.window.confirm(rows)
            self.confirmed += rows
        self.check()

    def fail(self) -> None:
        self.window.fail()
        del self.ids[self.confirmed :], self.times[self.confirmed :]
        self.frames.clear()
        self.check()

    def restart(self, core: ModuleType) -> None:
        """From a snapshot up to here."""
        self.fail()
        pieces = pieces_of(self.window, self.window.first_index)
        assert all(piece.fits() for piece in pieces)
        self.window, before = core.IdWindow(KEY, self.window.first_index), self.window
        self.window.load(pieces)
        assert (self.window.first_index, self.window.next_index) == (before.first_index, len(self.ids))
        self.check()

    def replay(self, ids: list[bytes], limits: WindowLimits) -> None:
        """Read from the log. What is known already says nothing."""
        self.fail()
        before = self.window.first_index
        self.window.replay(*frame(ids), self.confirmed, self.now.latest_ms, limits)
        if self.window.first_index > before:
            self.check_reach(replace(limits, milliseconds=NO_LIMIT))
        self.ids += ids
        self.times += [self.now_ms] * len(ids)
        self.confirmed += len(ids)
        self.window.replay(*frame(ids), self.confirmed - len(ids), self.now.latest_ms, limits)
        self.check()

    def check(self) -> None:
        assert (self.window.confirmed_index, self.window.next_index) == (self.confirmed, len(self.ids))


LIMITS = st.builds(
    WindowLimits,
    messages=st.sampled_from([1, 2, 5, 16, 40, 1000]),
    id_bytes=st.sampled_from([NO_LIMIT, NO_LIMIT, 1, 30, 1000]),
    milliseconds=st.sampled_from([NO_LIMIT, NO_LIMIT, 1, 10, 100]),
)
IDS = st.lists(st.sampled_from(ID_POOL), min_size=1, max_size=12)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("decide"), IDS),
        st.tuples(st.just("decide"), IDS),
        st.tuples(st.just("always new"), IDS),
        st.tuples(st.just("confirm"), st.none()),
        st.tuples(st.just("confirm"), st.none()),
        st.tuples(st.just("fail"), st.none()),
        st.tuples(st.just("restart"), st.none()),
        st.tuples(st.just("replay"), IDS),
        st.tuples(st.just("wait"), st.integers(1, 60)),
        st.tuples(st.just("doubt"), st.sampled_from([(0, 0), (0, 0), (50, 0), (0, 50), (1000, 1000)])),
    ),
    max_size=30,
)
HISTORIES = st.tuples(LIMITS, ACTIONS)


def run(history: tuple[WindowLimits, list[tuple[str, Any]]], core: ModuleType) -> None:
    limits, actions = history
    model = Model(core.IdWindow(KEY, 0))
    for action, argument in actions:
        match action:
            case "decide":
                model.decide(argument, True, limits)
            case "always new":
                model.decide(argument, False, limits)
            case "confirm":
                model.confirm()
            case "fail":
                model.fail()
            case "restart":
                model.restart(core)
            case "replay":
                model.replay(argument, limits)
            case "wait":
                model.now_ms += argument
            case "doubt":
                model.doubt_ms = argument


@given(HISTORIES)
@settings(max_examples=150, deadline=None)
def test_it_is_the_set_of_the_ids_from_an_index_on(history: Any) -> None:
    run(history, id_window)


HASHES: dict[str, Callable[..., int]] = {
    "all meet": lambda raw, begin, end, key: 5,
    "by length": lambda raw, begin, end, key: end - begin,
    "at the end of the table": lambda raw, begin, end, key: 1022 + (end - begin & 1),
    "negative": lambda raw, begin, end, key: -1 - int(raw[begin]),
}


@pytest.fixture(params=[None, *HASHES])
def plain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if request.param is not None:
        monkeypatch.setattr(PLAIN["id_table"], "siphash", HASHES[request.param])
    return PLAIN["id_window"]


@given(HISTORIES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_whose_hashes_meet_are_told_from_each_other(plain: ModuleType, history: Any) -> None:
    run(history, plain)


def _failing(history: Any) -> bool:
    try:
        run(history, PLAIN["id_window"])
    except AssertionError:
        return True
    except (IndexError, ValueError):
        return True
    return False


def _taken_out_whatever_lies_there(real: Any) -> Any:
    def take_out(place: int, first: int, end: int, key: Any, slots: Any, ids: Any, offsets: Any, state: Any) -> int:
        table = PLAIN["id_table"]
        for row in range(first, end):
            lies = place << table.ROW_BITS | row
            begin, size = table._begin(offsets, lies), table._size(offsets, lies)
            at = table._find(slots, table.siphash(ids, begin, begin + size, key), ids, begin, size, ids, offsets)
            if slots[at] != table.EMPTY:
                other = int(slots[at]) & table._PLACE
                real(other >> table.ROW_BITS, other & 0xFFFF, (other & 0xFFFF) + 1, key, slots, ids, offsets, state)
        return 0

    return take_out


def _hole_is_left(place: int, first: int, end: int, key: Any, slots: Any, ids: Any, offsets: Any, state: Any) -> int:
    table = PLAIN["id_table"]
    for row in range(first, end):
        slots[(slots & table._PLACE) == (place << table.ROW_BITS | row)] = table.EMPTY
    return 0


def _at_once_beyond(self: Any, limits: WindowLimits, now_ms: int) -> None:
    """Chunks with messages in flight are forgotten too."""
    newer = self._newer
    while len(newer.order) > 1 and self.next_index - self.first_index > limits.messages:
        place = newer.order.popleft()
        self._slots.forget(place)
        self._state[0] = newer.chunks[place, 0] + newer.chunks[place, 1]


PLANTED: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "a hash that meets is a copy": ("id_table", "same", lambda real: lambda *arguments: True),
    "a prefix is a copy": ("id_table", "_size", lambda real: lambda offsets, at: min(real(offsets, at), 2)),
    "what is accepted again goes with its old chunk": ("id_slots", "take_out", _taken_out_whatever_lies_there),
    "clearing leaves holes": ("id_slots", "take_out", lambda real: _hole_is_left),
    "what fails stays": ("id_slots", "take_out", lambda real: lambda *arguments: 0),
    "what failed takes the one before it along": ("id_window.IdWindow", "_restore", lambda real: lambda self: None),
    "forgets what is in flight": ("id_window.IdWindow", "move", lambda real: _at_once_beyond),
    "confirms the newest": (
        "id_window.IdWindow",
        "confirm",
        lambda real: lambda self, rows: real(self, self.next_index - self.confirmed_index),
    ),
    "forgets by the latest time": (
        "id_window.IdWindow",
        "decide",
        lambda real: lambda self, *args: real(self, *args[:4], Moment(args[4].latest_ms, args[4].latest_ms), *args[5:]),
    ),
    "what comes has the earliest time": (
        "id_window.IdWindow",
        "decide",
        lambda real: (
            lambda self, *args: real(self, *args[:4], Moment(args[4].earliest_ms, args[4].earliest_ms), *args[5:])
        ),
    ),
    "what is read from the log is forgotten by its time": (
        "id_window",
        "Moment",
        lambda real: lambda earliest_ms, latest_ms: real(latest_ms, latest_ms),
    ),
    "never forgets, and says so": (
        "id_window.IdWindow",
        "_is_beyond",
        lambda real: lambda self, chunk, *_: chunk.end_index > 0,
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_control_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, planted = PLANTED[bug]
    module, _, inner = where.partition(".")
    target = getattr(PLAIN[module], inner) if inner else PLAIN[module]
    monkeypatch.setattr(target, name, planted(getattr(target, name)))
    if bug in ("a hash that meets is a copy", "clearing leaves holes", "a prefix is a copy"):
        monkeypatch.setattr(PLAIN["id_table"], "siphash", HASHES["all meet"])
    find(
        HISTORIES,
        _failing,
        settings=settings(max_examples=3000, deadline=None, database=None, phases=[Phase.generate]),
    )


@pytest.mark.parametrize("seed", range(8))
def test_what_fails_behind_a_pipeline_that_is_never_empty(seed: int) -> None:
    _never_empty(seed)


def test_control_what_is_in_the_log_is_restored_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def confirm(self: Any, rows: int) -> None:
        self._state[CONFIRMED] += rows

    monkeypatch.setattr(id_window.IdWindow, "confirm", confirm)
    with pytest.raises(AssertionError):
        _never_empty(0)


def _never_empty(seed: int) -> None:
    """Places of chunks are used again many times between two failures."""
    chosen = random.Random(seed)
    model = Model(id_window.IdWindow(KEY, 0))
    for _ in range(30):
        limits = WindowLimits(chosen.randint(2, 40))
        for _ in range(chosen.randint(5, 60)):
            model.decide([b"%d" % chosen.randrange(12)], chosen.random() < 0.2, limits)
            while len(model.frames) > chosen.randint(2, 4):
                model.confirm()
        model.fail()
        model.decide([b"%d" % k for k in range(12)], True, limits)
        model.decide([b"%d" % k for k in range(12)], True, limits)


def test_what_was_known_of_messages_in_the_log_is_not_kept() -> None:
    window, limits = id_window.IdWindow(KEY, 0), WindowLimits(10_000_000)
    ids = _many(100)
    window.decide(*frame(ids), False, limits, Moment(0, 0))
    for _ in range(50):
        window.decide(*frame(ids), False, limits, Moment(0, 0))
        window.confirm(100)
    assert [end for end, _ in window._replaced] == [window.next_index]
    window.confirm(100)
    assert not window._replaced


def _many(count: int, start: int = 0) -> list[bytes]:
    return [k.to_bytes(16, "big") for k in range(start, start + count)]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call cleared away, or put into a larger table."""
    rows: list[int] = []
    for name in ("put", "take_out"):
        real = getattr(id_slots, name)

        def call(place: int, first: int, end: int, *rest: Any, real: Any = real) -> Any:
            rows.append(end - first)
            return real(place, first, end, *rest)

        monkeypatch.setattr(id_slots, name, call)
    return rows


def test_it_grows_and_forgets_bit_by_bit(counted: list[int]) -> None:
    window, limits = id_window.IdWindow(KEY, 0), WindowLimits(100_000)
    most = 0
    for start in range(0, 400_000, 1000):
        counted.clear()
        new, *_ = window.decide(*frame(_many(1000, start)), True, limits, Moment(0, 0))
        window.confirm(new)
        most = max(most, sum(counted))
        assert new == 1000
    assert most <= id_slots._AT_ONCE
    assert 100_000 <= len(window) <= 100_000 * 17 // 16 + 1000
    assert window.memory_bytes / len(window) < 45
    assert _free_with_memory(window) <= 1
    first = window.first_index + 10_000
    new, _, _, originals = window.decide(*frame(_many(1000, first)), True, limits, Moment(0, 0))
    assert new == 0
    assert originals.tolist() == list(range(first, first + 1000))
    assert window.decide(*frame(_many(1000, window.first_index - 1000)), True, limits, Moment(0, 0))[0] == 1000


def _free_with_memory(window: Any) -> int:
    """How many places that are free have something in their pages."""
    newer = window._newer
    assert newer.free
    return sum(newer.ids.rows[place].any() or newer.offsets.rows[place, 1024:-1024].any() for place in newer.free)


def _tidied() -> Any:
    """A window of which nearly all was forgotten at once."""
    window = id_window.IdWindow(KEY, 0)
    for start in range(0, 300_000, 10_000):
        window.decide(*frame(_many(10_000, start)), True, WindowLimits(10**7), Moment(0, 0))
        window.confirm(10_000)
    window.move(WindowLimits(16), 0)
    while window.tidy(10_000):
        pass
    assert len(window._newer.free) > 3
    return window


def test_memory_of_what_is_forgotten_is_given_back() -> None:
    assert _free_with_memory(_tidied()) == 0


def test_control_memory_that_is_kept_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Growing, "release", lambda self, row: None)
    assert _free_with_memory(_tidied()) > 3


def _most_faults_of_a_frame() -> int:
    """Pages that the system had to give at once while the table grew to 16 MiB and the one before it went."""
    window, limits = id_window.IdWindow(KEY, 0), WindowLimits(10_000_000)
    columns = frame(_many(1000))
    ids = columns[0].copy(), columns[1]
    at = bytes(ids[0]).index(_many(2)[1]) - 16
    numbers = ids[0][at : at + 16_000].view(">u8").reshape(1000, 2)
    faults = []
    for start in range(0, 900_000, 1000):
        numbers[:, 1] = np.arange(start, start + 1000)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        new, *_ = window.decide(*ids, True, limits, Moment(0, 0))
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
        assert new == 1000
        window.confirm(new)
    assert window.memory_bytes > 1 << 24
    return max(faults)


def test_a_frame_does_not_wait_for_the_memory_of_a_larger_table() -> None:
    assert _most_faults_of_a_frame() < 500


def test_control_a_frame_that_gets_all_of_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    if "[always]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("pages are too large to be counted")
    monkeypatch.setattr(id_slots, "_TOUCHED_A_ROW", 1 << 20)
    assert _most_faults_of_a_frame() > 1000


def test_the_largest_ids_and_frames_fit() -> None:
    window, limits = id_window.IdWindow(KEY, 7), WindowLimits(1_000_000)
    longest = [k.to_bytes(255, "big") for k in range(30_000)]
    new, *_ = window.decide(*frame(longest), True, limits, Moment(0, 0))
    assert new == 30_000
    assert window.decide(*frame([b"a", *longest[:10]]), True, limits, Moment(0, 0))[1].tolist() == [NOT_DUP] + 10 * [
        UNKNOWN
    ]
    window.confirm(30_000)
    assert window.decide(*frame(longest), True, limits, Moment(0, 0))[3].tolist() == list(range(7, 30_007))
