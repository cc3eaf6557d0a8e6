"""The window of deduplication IDs against a plain set of them. About 25 s, one process; the first time it compiles."""

import random
import resource
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from seqdedupe.batch import NO_INT64S, Batch, Binary
from seqdedupe.core import id_slots, id_table, id_window
from seqdedupe.core.id_table import CONFIRMED, USED
from seqdedupe.core.id_window import Moment
from seqdedupe.core.name_table import Growing
from seqdedupe.core.rule import DUP, NOT_DUP, UNKNOWN
from seqdedupe.format import layout
from seqdedupe.format.layout import PLACES
from seqdedupe.limits import NO_LIMIT, WindowLimits
from tests.plain import PLAIN

KEY = bytes(range(16))
ALL = 1000
"""Rows, whose share of tidying goes over all slots of a small table."""

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
        """This much earlier and later than it is it may be, as far as the window is reported."""

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
            self.check_reach(limits._replace(milliseconds=NO_LIMIT))
        self.ids += ids
        self.times += [self.now_ms] * len(ids)
        self.confirmed += len(ids)
        self.window.replay(*frame(ids), self.confirmed - len(ids), self.now.latest_ms, limits)
        self.check()

    def tidy(self, rows: int) -> None:
        """Bit by bit, or until nothing is left to be done: then the table has what counts, and nothing else."""
        is_more = self.window.tidy(rows)
        if rows < ALL:
            return
        for _ in range(100):
            is_more = is_more and self.window.tidy(rows)
        assert not is_more
        state = self.window._state
        used = np.count_nonzero(self.window._slots.rows)
        assert used == state[USED] == len(set(self.ids[self.window.first_index :]))

    def check(self) -> None:
        assert (self.window.confirmed_index, self.window.next_index) == (self.confirmed, len(self.ids))
        slots = self.window._slots.rows
        places = (slots[slots != 0] & (1 << 36) - 1) >> 16
        assert not set(places.tolist()) & set(self.window._newer.free), "a place was given back that a slot leads to"


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
        st.tuples(st.just("tidy"), st.sampled_from([1, 10, ALL])),
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
            case "tidy":
                model.tidy(argument)


@given(HISTORIES)
def test_it_is_the_set_of_the_ids_from_an_index_on(history: Any) -> None:
    run(history, id_window)


HASHES: dict[str, Callable[..., int]] = {
    "all meet": lambda raw, begin, end, key: 5,
    "by length": lambda raw, begin, end, key: end - begin,
    "at the end of the table": lambda raw, begin, end, key: 1022 + (end - begin & 1),
    "negative": lambda raw, begin, end, key: -1 - int(raw[begin]),
}


FAR = "slots do not tell where homes are"


@pytest.fixture(params=[None, *HASHES, FAR])
def plain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if request.param == FAR:
        _is_far(monkeypatch)
    elif request.param is not None:
        monkeypatch.setattr(PLAIN["id_table"], "siphash", HASHES[request.param])
    return PLAIN["id_window"]


def _is_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ID counts as one that stands too far from its home, and many meet."""
    monkeypatch.setattr(PLAIN["id_table"], "_HOME", 0)
    monkeypatch.setattr(PLAIN["id_table"], "siphash", HASHES["by length"])


@given(HISTORIES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def _goes_on(first: int, end: int, key: Any, slots: Any, ids: Any, offsets: Any, chunks: Any, state: Any) -> int:
    """As the sweep, but it does not look at what it has just moved up."""
    table = PLAIN["id_table"]
    gone = 0
    for at in range(first, end):
        slot = int(slots[at])
        if slot and chunks[(slot & table._PLACE) >> table.ROW_BITS, table.FIRST_INDEX] < 0:
            table._close_far(slots, at, key, ids, offsets)
            gone += 1
    state[USED] -= gone
    return gone


def _sweeps_all(first: int, end: int, key: Any, slots: Any, ids: Any, offsets: Any, chunks: Any, state: Any) -> int:
    """Takes out what lies in the oldest chunk, too."""
    table = PLAIN["id_table"]
    lives = chunks[:, table.FIRST_INDEX] >= 0
    before = chunks[:, table.FIRST_INDEX].copy()
    if lives.any():
        chunks[np.argmax(lives), table.FIRST_INDEX] = table.GONE
    gone = table.__dict__["sweep"](first, end, key, slots, ids, offsets, chunks, state)
    chunks[:, table.FIRST_INDEX] = before
    return int(gone)


def _holes_are_left(slots: Any, hole: int, *_: Any) -> None:
    slots[hole] = 0


def _too_soon(self: Any, place: int) -> None:
    """Before the table was swept once."""
    self._newer.chunks[place, 0] = PLAIN["id_table"].GONE
    self._forgotten.append((place, self._swept + 1))


def _at_once_beyond(self: Any, limits: WindowLimits, now_ms: int) -> None:
    """Chunks with messages in flight are forgotten too."""
    newer = self._newer
    while len(newer.order) > 1 and self.next_index - self.first_index > limits.messages:
        place = newer.order.popleft()
        self._state[0] = newer.chunks[place, 0] + newer.chunks[place, 1]
        self._slots.forget(place)


PLANTED: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "a hash that meets is a copy": ("id_table", "same", lambda real: lambda *arguments: True),
    "a prefix is a copy": ("id_table", "_size", lambda real: lambda offsets, at: min(real(offsets, at), 2)),
    "what counts is swept out": ("id_slots", "sweep", lambda real: _sweeps_all),
    "a slot to which one was moved is left out": ("id_slots", "sweep", lambda real: _goes_on),
    "sweeping leaves holes": ("id_table", "_close", lambda real: _holes_are_left),
    "sweeping leaves holes where slots do not tell": ("id_table", "_close_far", lambda real: _holes_are_left),
    "a place is given back before all slots were swept": ("id_slots.Slots", "forget", lambda real: _too_soon),
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


MEETING = {
    "a hash that meets is a copy": "all meet",
    "a prefix is a copy": "all meet",
    "a slot to which one was moved is left out": "all meet",
    "sweeping leaves holes": "all meet",
}
"""The hashes with which some bugs show themselves."""


@pytest.mark.parametrize("bug", PLANTED)
def test_control_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, planted = PLANTED[bug]
    module, _, inner = where.partition(".")
    target = getattr(PLAIN[module], inner) if inner else PLAIN[module]
    monkeypatch.setattr(target, name, planted(getattr(target, name)))
    if bug.endswith("where slots do not tell"):
        _is_far(monkeypatch)
    if bug in MEETING:
        monkeypatch.setattr(PLAIN["id_table"], "siphash", HASHES[MEETING[bug]])
    find(
        HISTORIES,
        _failing,
        settings=settings(max_examples=3000, deadline=None, database=None, phases=[Phase.generate]),
    )


def _failed_before_the_sweep_has_gone_round(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Places that were returned, and that slots lead to. Taking out what failed moves a forgotten ID up, past where
    the sweep is."""
    monkeypatch.setattr(PLAIN["id_table"], "siphash", HASHES["all meet"])
    model, limits = Model(PLAIN["id_window"].IdWindow(KEY, 0)), WindowLimits(16)
    ids = [b"%d" % k for k in range(8)]
    for one in ids:  # each in its own chunk, in the slots from 5 on
        model.decide([one], True, limits)
        model.confirm()
    window = model.window
    window.move(WindowLimits(4), 0)
    monkeypatch.setattr(PLAIN["id_slots"], "_SWEPT_A_ROW", 0)
    monkeypatch.setattr(PLAIN["id_slots"], "_SWEPT_A_FRAME", 0)
    window.decide(*frame([ids[2]]), True, limits, Moment(0, 0))
    window.confirm(1)
    window.decide(*frame([ids[0]]), True, limits, Moment(0, 0))
    # For those from slot 5 on: 0 in flight, 1 forgotten, 2 again, 3 forgotten. 1 goes, and 3 is next.
    window._slots._sweep(7)
    assert window._slots.rows[:12].astype(bool).sum() == 7
    window.fail()
    while window._slots._forgotten:
        window._slots._sweep(100)
    slots = window._slots.rows
    return set(((slots[slots != 0] & (1 << 36) - 1) >> 16).tolist()) & set(window._newer.free)


def test_what_a_failure_moves_up_is_swept_out_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _failed_before_the_sweep_has_gone_round(monkeypatch)


def test_control_it_is_not_where_the_sweep_goes_on_as_if_nothing_had_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLAIN["id_slots"].Slots, "_sweep_anew", lambda self: None)
    assert _failed_before_the_sweep_has_gone_round(monkeypatch)


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
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many slots were swept, and how many rows put into a larger table."""
    counts = {"put": 0, "sweep": 0}

    def put(place: int, first: int, end: int, *rest: Any, real: Any = id_table.put) -> Any:
        counts["put"] += end - first
        return real(place, first, end, *rest)

    def sweep(first: int, end: int, *rest: Any, real: Any = id_table.sweep) -> Any:
        counts["sweep"] += end - first
        return real(first, end, *rest)

    monkeypatch.setattr(id_slots, "put", put)
    monkeypatch.setattr(id_slots, "sweep_beside", sweep)
    return counts


def test_it_grows_and_forgets_bit_by_bit(counted: dict[str, int]) -> None:
    window, limits = id_window.IdWindow(KEY, 0), WindowLimits(100_000)
    most_put = most_swept = 0
    for start in range(0, 400_000, 1000):
        counted.update(put=0, sweep=0)
        new, *_ = window.decide(*frame(_many(1000, start)), True, limits, Moment(0, 0))
        window.confirm(new)
        most_put, most_swept = max(most_put, counted["put"]), max(most_swept, counted["sweep"])
        assert new == 1000
    assert 0 < most_put <= id_slots._AT_ONCE
    assert 0 < most_swept <= id_slots._SWEPT_A_ROW * 1000 + id_slots._SWEPT_A_FRAME
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
