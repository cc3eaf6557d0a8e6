"""Windows and imports that are bounded by time, where the clock jumps. About 10 s, one process."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.core import id_window
from seqdedupe.core.id_window import Moment
from seqdedupe.core.rule import DUP, NOT_DUP
from seqdedupe.exports import KnownId
from seqdedupe.store.db import Store
from seqdedupe.topic.clock import LOOK_SECONDS, LOOKS, Clock, Steadied
from seqdedupe.topic.topic import Topic
from tests.log.faulty import FaultyLog, Storage
from tests.topic.test_by_id import INCARNATION
from tests.topic.test_window_import import ImportPlace

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
LOOK_MS = int(1000 * LOOK_SECONDS)
BEGAN_MS = 1_700_000_000_000
OLD = [KnownId(b"old %d" % k, BEGAN_MS - 10 * MINUTE_MS + k * MINUTE_MS) for k in range(1, 5)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "store")
    yield store
    store.close()


class ClockPlace(ImportPlace):
    """Its clock may be wrong, in the log too; it has been right for long. Copies are known for two hours."""

    def __init__(self, store: Store, **policy: Any) -> None:
        super().__init__(store, **{"deduplication_window_max_minutes": 120} | policy)
        self.true_ms, self.wrong_ms = BEGAN_MS, 0
        self.storage = Storage(INCARNATION, self.clock_ms)
        self.log = FaultyLog(self.storage)

    def clock_ms(self) -> int:
        return self.true_ms + self.wrong_ms

    def steady_ms(self) -> int:
        return self.true_ms - BEGAN_MS + 12_345

    def now(self) -> Moment:
        return self.steadied.now(self.clock_ms(), self.steady_ms())

    async def start(self) -> Topic:
        self.steadied = Steadied()
        self.steadied.look(self.clock_ms(), self.steady_ms())
        return await super().start()

    def goes_on(self, minutes: float) -> None:
        """The process looks at its clock meanwhile."""
        for _ in range(int(minutes * MINUTE_MS / LOOK_MS)):
            self.true_ms += LOOK_MS
            self.steadied.look(self.clock_ms(), self.steady_ms())

    @property
    def found(self) -> Any:
        assert self.topic.window is not None
        return self.topic.window


@pytest.fixture
async def place(store: Store) -> Any:
    place = ClockPlace(store)
    await place.start()
    yield place
    await place.topic.close("")


async def settled(place: ClockPlace) -> None:
    """What was begun by a frame that found all of an import expired is in the log."""
    for _ in range(4):
        await asyncio.sleep(0)
        place.log.settle()


async def a_clock_ahead_for_a_frame(place: ClockPlace, tmp_path: Path) -> None:
    await place.bring(OLD, tmp_path / "window")
    assert place.new(b"a", b"b") == [NOT_DUP] * 2
    await place.to_a_run()
    assert place.new(b"c") == [NOT_DUP]
    place.goes_on(50)
    place.wrong_ms = DAY_MS
    assert place.new(b"a", b"c", b"old 1") == [DUP] * 3
    assert place.new(b"d") == [NOT_DUP]
    await settled(place)
    place.wrong_ms = 0
    assert place.new(b"a", b"b", b"c", b"d", b"old 1", b"old 4") == [DUP] * 6
    assert place.topic.policy.imported is not None


async def a_clock_ahead_for_half_an_hour(place: ClockPlace, tmp_path: Path) -> None:
    await place.bring(OLD, tmp_path / "window")
    assert place.new(b"a") == [NOT_DUP]
    place.goes_on(45)
    for k in range(6):
        place.wrong_ms = DAY_MS + k * 7
        place.goes_on(5)
        assert place.new(b"a", b"old 2", b"%d" % k) == [DUP, DUP, NOT_DUP]
        await settled(place)
    place.wrong_ms = 0
    assert place.new(b"a", b"0", b"5", b"old 2") == [DUP] * 4


async def a_restart_while_the_clock_is_ahead(place: ClockPlace, tmp_path: Path) -> None:
    """The log has the wrong time from the jump on, and replay meets it before what counts."""
    await place.bring(OLD, tmp_path / "window")
    assert place.new(b"a") == [NOT_DUP]
    await place.topic.keeper.snapshot()
    assert place.new(b"b") == [NOT_DUP]
    place.goes_on(50)
    place.wrong_ms = DAY_MS
    assert place.new(b"c") == [NOT_DUP]
    await place.crash()
    assert place.new(b"a", b"b", b"c", b"old 1") == [DUP] * 4
    place.goes_on(20)
    assert place.new(b"a", b"old 1", b"d") == [DUP, DUP, NOT_DUP]
    await place.topic.keeper.snapshot()
    await settled(place)
    place.wrong_ms = 0
    await place.crash()
    assert place.new(b"a", b"b", b"c", b"d", b"old 4") == [DUP] * 5


async def a_clock_behind_for_a_frame(place: ClockPlace, tmp_path: Path) -> None:
    place.goes_on(50)
    assert place.new(b"a") == [NOT_DUP]
    place.goes_on(100)
    place.wrong_ms = -DAY_MS
    assert place.new(b"b") == [NOT_DUP]
    place.wrong_ms = 0
    place.goes_on(110)
    assert place.new(b"b") == [DUP]
    place.goes_on(10)
    assert place.new(b"a", b"b") == [NOT_DUP] * 2


JUMPS = [
    a_clock_ahead_for_a_frame,
    a_clock_ahead_for_half_an_hour,
    a_restart_while_the_clock_is_ahead,
    a_clock_behind_for_a_frame,
]


@pytest.mark.parametrize("history", JUMPS)
async def test_a_clock_that_jumps_and_comes_back_has_nothing_forgotten(
    place: ClockPlace, tmp_path: Path, history: Callable[..., Any]
) -> None:
    await history(place, tmp_path)


@pytest.mark.parametrize("history", JUMPS)
async def test_control_a_clock_that_is_believed_at_once(
    place: ClockPlace, tmp_path: Path, history: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Steadied, "now", lambda self, clock_ms, steady_ms: Moment(clock_ms, clock_ms))
    with pytest.raises(AssertionError):
        await history(place, tmp_path)


async def test_control_what_is_read_from_the_log_is_forgotten_by_its_time(
    place: ClockPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(id_window, "Moment", lambda earliest_ms, latest_ms: Moment(latest_ms, latest_ms))
    with pytest.raises(AssertionError):
        await a_restart_while_the_clock_is_ahead(place, tmp_path)


async def test_what_has_expired_is_forgotten_on_time_once_the_clock_is_known(place: ClockPlace, tmp_path: Path) -> None:
    await place.bring(OLD, tmp_path / "window")
    assert place.new(b"a") == [NOT_DUP]
    place.goes_on(119)
    assert place.new(b"a", b"old 4") == [DUP, NOT_DUP], "old 4 is of 6 minutes before"
    place.goes_on(1)
    assert place.new(b"a") == [NOT_DUP]
    await settled(place)
    assert place.topic.policy.imported is None


async def test_a_clock_that_stays_ahead_is_right_in_the_end(place: ClockPlace, tmp_path: Path) -> None:
    """As after a machine was asleep: what remains possible, where the clock is wrong for this long."""
    await place.bring(OLD, tmp_path / "window")
    assert place.new(b"a") == [NOT_DUP]
    place.goes_on(45)
    place.wrong_ms = DAY_MS
    place.goes_on(LOOKS - 1)
    assert place.new(b"a", b"old 1") == [DUP, DUP]
    place.goes_on(1)
    assert place.new(b"a", b"old 1") == [NOT_DUP, NOT_DUP]


@pytest.mark.parametrize("bound", [{"max_messages": 32}, {"max_bytes": 64}])
async def test_while_the_time_is_not_known_the_other_bounds_hold(store: Store, bound: dict[str, int]) -> None:
    place = ClockPlace(store, **{f"deduplication_window_{name}": most for name, most in bound.items()})
    await place.start()
    for k in range(100):
        assert place.new(b"%02d" % k) == [NOT_DUP]
        assert len(place.found) <= 34
    await place.crash()
    assert 32 <= len(place.found) <= 34
    await place.topic.close("")


async def test_the_process_looks_at_its_clock_as_long_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    enough = asyncio.Event()

    async def sleep(seconds: float) -> None:
        nonlocal looks
        assert seconds == LOOK_SECONDS
        looks += 1
        assert (clock.now().earliest_ms == 0) == (looks < LOOKS)
        if looks == 2 * LOOKS:
            enough.set()
            await asyncio.Event().wait()

    clock = Clock()
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        looking = asyncio.create_task(clock.keep_looking())
        await enough.wait()
    looking.cancel()
    moment = clock.now()
    assert moment.earliest_ms <= moment.latest_ms < moment.earliest_ms + HOUR_MS


class Times:
    """What the clock and the steady one say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock_ms, self.steady_ms = BEGAN_MS, 12_345
        monkeypatch.setattr("seqdedupe.topic.clock._both_ms", lambda: (self.clock_ms, self.steady_ms))

    def go_on(self, passed_ms: int, jump_ms: int = 0) -> None:
        self.clock_ms += passed_ms + jump_ms
        self.steady_ms += passed_ms


async def looked(clock: Clock, times: Times, looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has it look this many times, each time a minute later."""

    async def sleep(seconds: float) -> None:
        nonlocal looks
        times.go_on(int(1000 * seconds))
        looks -= 1
        if not looks:
            raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr("seqdedupe.topic.clock.asyncio.sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            await clock.keep_looking()


@pytest.mark.parametrize(("away_ms", "is_suspicious"), [(HOUR_MS, False), (8 * DAY_MS, True)])
async def test_a_start_far_ahead_of_the_last_believed_time_says_so(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    away_ms: int,
    is_suspicious: bool,
) -> None:
    times = Times(monkeypatch)
    first = Clock(store)
    assert first.ahead_ms == 0
    await looked(first, times, LOOKS, monkeypatch)
    times.go_on(0, away_ms)
    again = Clock(store)
    assert (again.ahead_ms > DAY_MS) == ("ahead of the time" in caplog.text) == is_suspicious
    await looked(again, times, LOOKS - 1, monkeypatch)
    assert (again.ahead_ms > 0) == is_suspicious
    assert again.now().earliest_ms == 0
    await looked(again, times, 2, monkeypatch)
    assert again.ahead_ms == 0


async def test_a_time_that_was_not_believed_is_not_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ran for less than 40 minutes by a clock that is ahead leaves nothing behind."""
    times = Times(monkeypatch)
    await looked(Clock(store), times, LOOKS, monkeypatch)
    times.go_on(0, 8 * DAY_MS)
    await looked(Clock(store), times, LOOKS - 1, monkeypatch)
    assert Clock(store).ahead_ms > 7 * DAY_MS
