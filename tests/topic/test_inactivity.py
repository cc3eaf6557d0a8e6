"""Producers that nobody uses are forgotten, when the policy says so; and nobody else is."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from seqdedupe.core import producers as producers_module
from seqdedupe.core.producers import MAX_PERIODS, Bools, LettingGo, Producers
from seqdedupe.core.rule import DUP, DURABLE_EPOCH, PERSISTED
from seqdedupe.errors import UnavailableError, error
from seqdedupe.format.jit import Int64s
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import control, keeper
from seqdedupe.topic.base import State
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.keeper import DUE_PERIODS
from seqdedupe.topic.operations import open_sessions
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.sessions import OpenAnswer
from seqdedupe.topic.topic import Topic
from tests.batches import batch
from tests.log.faulty import FaultyLog, Storage

INCARNATION = 5
FORGETS = Applied(deduplication_producer_inactivity_timeout_minutes=60)


class Scene:
    """A topic on a log that does what the test says, looked through when the test says so."""

    def __init__(self, store: Store, storage: Storage, applied: Applied = FORGETS) -> None:
        self.store, self.storage, self.applied = store, storage, applied
        self.epochs: dict[str, int] = {}

    async def start(self) -> None:
        snapshots = Snapshots(self.store, INCARNATION)
        self.log = FaultyLog(self.storage, automatic=True)
        self.topic = Topic(
            "t", self.log, self.store, snapshots, snapshots.load(), applied=self.applied, random_bytes=bytes
        )
        await self.topic.recover()

    async def restart(self) -> None:
        await self.topic.close("")
        self.log = self.log.crash(0)
        await self.start()

    async def open(self, *names: str) -> OpenAnswer:
        opened = await open_sessions(self.topic, list(names), None)
        self.epochs.update(zip(names, opened.epochs, strict=True))
        return opened

    async def resume(self, *names: str) -> OpenAnswer:
        return await open_sessions(self.topic, list(names), [self.epochs[name] for name in names])

    async def send(
        self, *rows: tuple[str, int], link: int = -1, cache: NumbersCache | None = None
    ) -> FrameReceipt | Refusal:
        answers: list[FrameReceipt | Refusal] = []
        links = dict.fromkeys((name for name, _ in rows), link)
        encoded = batch(list(rows), epochs={name: self.epochs[name] for name in links}, links=links).encode()
        self.topic.admit(encoded, 1, answers.append, cache or NumbersCache())
        if not answers:
            await self.topic.flight.all_of_now()
        return answers[0]

    async def publish(self, *names: str) -> None:
        """Each of these names is opened, and has message 7."""
        await self.open(*names)
        for name in names:
            assert isinstance(await self.send((name, 7)), FrameReceipt)

    async def pass_timeout(self, looks: int = DUE_PERIODS) -> None:
        for _ in range(looks):
            await self.topic.keeper.inactivity.look()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            while not holds():  # noqa: ASYNC110 (the topic's tasks go on beside)
                await asyncio.sleep(0.001)

    def keep_rows(self) -> None:
        """Names and rows are not freed, for which a snapshot is taken."""

        async def nothing() -> None:
            pass

        self.topic.keeper.inactivity._let_go = nothing

    def known(self) -> dict[str, int]:
        return known(self.topic.producers)


def known(producers: Producers) -> dict[str, int]:
    """The persisted ID of each producer that is known."""
    return {
        name.decode(): int(producers.numbers[number, PERSISTED])
        for number, name in enumerate(producers.names_from(0))
        if producers.is_known(number)
    }


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture
async def scene(store: Store) -> AsyncIterator[Scene]:
    scene = Scene(store, Storage(INCARNATION))
    await scene.start()
    yield scene
    await scene.topic.close("")


async def test_who_is_idle_for_the_whole_timeout_is_forgotten_and_nobody_before(scene: Scene) -> None:
    await scene.publish("a", "b")
    await scene.pass_timeout(DUE_PERIODS - 1)
    assert scene.known() == {"a": 7, "b": 7}
    await scene.pass_timeout(1)
    assert scene.known() == {}
    assert (scene.topic.counters.purged, scene.topic.producers.known_count()) == (2, 0)
    # By the operator's choice what is sent again is new.
    assert (await scene.open("a")).persisted == [-1]
    answer = await scene.send(("a", 7))
    assert isinstance(answer, FrameReceipt)
    assert (answer.verdicts, answer.first_index, scene.known()) == (None, 2, {"a": 7})


@pytest.mark.parametrize("applied", [Applied(), Applied(deduplication_enabled=False)])
async def test_nobody_is_forgotten_unless_the_policy_says_so(store: Store, applied: Applied) -> None:
    scene = Scene(store, Storage(INCARNATION), applied)
    await scene.start()
    await scene.publish("a")
    await scene.pass_timeout(2 * MAX_PERIODS)
    assert scene.known() == {"a": 7}
    await scene.topic.close("")


async def test_a_new_policy_begins_with_a_full_timeout(scene: Scene) -> None:
    await scene.publish("a")
    await scene.pass_timeout(DUE_PERIODS - 1)
    await scene.topic.set_policy(Policy(deduplication_producer_inactivity_timeout_minutes=5))
    await scene.pass_timeout(DUE_PERIODS - 1)
    assert scene.known() == {"a": 7}
    # Off, as in Pulsar, it does not forget; and on again it begins again.
    await scene.topic.set_policy(scene.topic.policy.with_values_of(Policy(deduplication_enabled=False)))
    await scene.pass_timeout()
    await scene.topic.set_policy(scene.topic.policy.with_values_of(Policy(deduplication_enabled=True)))
    await scene.pass_timeout(DUE_PERIODS - 1)
    assert scene.known() == {"a": 7}
    await scene.pass_timeout(1)
    assert scene.known() == {}


async def test_after_a_restart_every_name_begins_with_a_full_timeout(scene: Scene) -> None:
    await scene.publish("a")
    await scene.pass_timeout(DUE_PERIODS - 1)
    await scene.restart()
    await scene.pass_timeout(DUE_PERIODS - 1)
    assert scene.known() == {"a": 7}
    await scene.pass_timeout(1)
    assert scene.known() == {}


async def test_time_counts_only_while_the_topic_takes_messages(scene: Scene) -> None:
    await scene.publish("a")
    scene.log.opening_allowed.clear()
    scene.log.refuse()
    await scene.until(lambda: scene.topic.state is State.READ_ONLY)
    await scene.pass_timeout(2 * DUE_PERIODS)
    scene.log.opening_allowed.set()
    await scene.until(lambda: scene.topic.state is State.SERVING)
    await scene.pass_timeout(DUE_PERIODS - 1)
    assert scene.known() == {"a": 7}


async def test_a_look_comes_three_times_a_timeout(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    await scene.publish("a")
    loop = asyncio.get_running_loop()
    delays: list[float] = []
    call_later = loop.call_later

    def soon(delay: float, *others: object) -> asyncio.TimerHandle:
        delays.append(delay)
        return call_later(0.001, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_later", soon)
    scene.topic.keeper.inactivity.apply(Applied(deduplication_producer_inactivity_timeout_minutes=6))
    await scene.until(lambda: not scene.known())
    monkeypatch.undo()
    assert len([delay for delay in delays if delay == 120.0]) >= DUE_PERIODS


# -- who is in use --------------------------------------------------------------------------------------------------


async def test_opening_resuming_and_publishing_are_uses(scene: Scene) -> None:
    await scene.publish("opens", "resumes", "publishes", "idles")
    await scene.pass_timeout(DUE_PERIODS - 1)
    await scene.open("opens")
    await scene.resume("resumes")
    assert isinstance(await scene.send(("publishes", 9), link=7), FrameReceipt)
    await scene.pass_timeout(DUE_PERIODS - 1)
    assert scene.known() == {"opens": 7, "resumes": 7, "publishes": 9}
    await scene.pass_timeout(1)
    assert scene.known() == {}


async def test_a_dup_is_a_use(scene: Scene) -> None:
    await scene.publish("a")
    await scene.pass_timeout(DUE_PERIODS - 1)
    answer = await scene.send(("a", 7))
    assert isinstance(answer, FrameReceipt)
    assert answer.verdicts is not None
    assert answer.verdicts.tolist() == [DUP]
    await scene.pass_timeout(DUE_PERIODS - 1)
    assert scene.known() == {"a": 7}


async def test_a_connected_stream_keeps_all_that_it_ever_used(scene: Scene) -> None:
    """Ten thousand names, each sent once: what a stream sends afterwards does not matter. It costs nothing more."""
    names = [f"n{i}" for i in range(10_000)]
    await scene.open(*names)
    await scene.open("other")
    cache = scene.topic.connect()
    for first in range(0, len(names), 1000):
        await scene.send(*[(name, 1) for name in names[first : first + 1000]], cache=cache)
    await scene.send((names[0], 2), link=1, cache=cache)
    await scene.pass_timeout(3 * DUE_PERIODS)
    assert scene.known().keys() == set(names)
    # It ends: from then on their time counts.
    scene.topic.disconnect(cache)
    await scene.pass_timeout(DUE_PERIODS - 1)
    assert scene.known().keys() == set(names)
    await scene.pass_timeout(1)
    assert scene.known() == {}
    assert len(scene.topic.producers) == 0


async def test_two_streams_of_a_name_keep_it_until_both_have_ended(scene: Scene) -> None:
    await scene.publish("a", "b", *(f"gone{i}" for i in range(5)))
    first, second = scene.topic.connect(), scene.topic.connect()
    await scene.send(("a", 8), link=7, cache=first)
    await scene.send(("a", 9), link=8, cache=second)
    # The first one goes on with others.
    await scene.send(("b", 8), link=7, cache=first)
    scene.topic.disconnect(second)
    await scene.pass_timeout()
    assert scene.known() == {"a": 9, "b": 8}
    # Also under their new numbers.
    assert scene.topic.producers.generation == 1
    await scene.pass_timeout()
    assert scene.known() == {"a": 9, "b": 8}
    scene.topic.disconnect(first)
    await scene.pass_timeout()
    assert scene.known() == {}


async def test_a_name_of_two_streams_has_a_full_timeout_from_the_end_of_the_last_one(scene: Scene) -> None:
    await scene.publish("a")
    first, second = scene.topic.connect(), scene.topic.connect()
    await scene.send(("a", 8), link=7, cache=first)
    await scene.send(("a", 9), link=8, cache=second)
    scene.topic.disconnect(second)
    await scene.pass_timeout(1)
    # As if just before the next look, which counts for nothing of the timeout.
    scene.topic.disconnect(first)
    await scene.pass_timeout(DUE_PERIODS - 1)
    assert scene.known() == {"a": 9}
    await scene.pass_timeout(1)
    assert scene.known() == {}


async def test_what_is_in_flight_is_not_forgotten(scene: Scene) -> None:
    await scene.publish("a", "b")
    scene.log.automatic = False
    answers: list[FrameReceipt | Refusal] = []
    encoded = batch([("a", 9)], epochs={"a": scene.epochs["a"]}, links={"a": 7}).encode()
    scene.topic.admit(encoded, 1, answers.append, NumbersCache())
    looking = asyncio.ensure_future(scene.pass_timeout())
    await asyncio.sleep(0.05)
    # That of b waits for its record, which stands after what is in flight.
    assert [type(item.change) for item in scene.topic.flight._admitted if hasattr(item, "change")] == [control.Purge]
    scene.log.settle()
    await looking
    scene.log.automatic = True
    assert isinstance(answers[0], FrameReceipt)
    assert scene.known() == {"a": 9}


async def test_what_was_in_flight_has_a_full_timeout_from_then_on(scene: Scene) -> None:
    await scene.publish("sends")
    scene.log.automatic = False
    answers: list[FrameReceipt | Refusal] = []
    encoded = batch([("sends", 9)], epochs=scene.epochs, links={"sends": 7}).encode()
    scene.topic.admit(encoded, 1, answers.append, NumbersCache())
    opening = asyncio.ensure_future(scene.open("opens"))
    await scene.pass_timeout(DUE_PERIODS - 1)
    scene.log.settle()
    scene.log.automatic = True
    await opening
    await scene.pass_timeout(DUE_PERIODS - 1)
    assert scene.known() == {"sends": 9, "opens": -1}
    await scene.pass_timeout(1)
    assert scene.known() == {}


async def test_a_row_with_something_in_flight_is_not_freed(scene: Scene) -> None:
    """Nothing is left of its producer, and a message of it that is no news is in flight: deduplication was off."""
    await scene.publish("a")
    await scene.pass_timeout(DUE_PERIODS - 1)
    scene.log.automatic = False
    looking = asyncio.ensure_future(scene.pass_timeout(1))
    await scene.until(lambda: scene.topic.flight.has(control.Purge))
    scene.topic.inherit(Applied(deduplication_enabled=False))
    answers: list[FrameReceipt | Refusal] = []
    encoded = batch([("a", 7)], epochs=scene.epochs, links={"a": -1}).encode()
    scene.topic.admit(encoded, 1, answers.append, NumbersCache())
    scene.log.settle(1)
    await looking
    assert scene.topic.producers.generation == 0
    scene.log.settle()
    scene.log.automatic = True
    assert isinstance(answers[0], FrameReceipt)
    assert scene.known() == {"a": 7}


# -- the record -----------------------------------------------------------------------------------------------------


async def test_it_is_durable_before_it_is_in_force(scene: Scene) -> None:
    scene.keep_rows()
    await scene.publish("a")
    await scene.pass_timeout(DUE_PERIODS - 1)
    scene.log.automatic = False
    looking = asyncio.ensure_future(scene.pass_timeout(1))
    await asyncio.sleep(0.01)
    answer = await scene.send(("a", 7))
    assert isinstance(answer, FrameReceipt)
    assert answer.verdicts is not None
    assert answer.verdicts.tolist() == [DUP]
    # The process dies before it is stored: nothing has changed. It dies after: it is in force.
    looking.cancel()
    await scene.topic.close("")
    scene.log = scene.log.crash(0)
    await scene.start()
    assert scene.known() == {"a": 7}
    await scene.pass_timeout(DUE_PERIODS - 1)
    scene.log.automatic = False
    looking = asyncio.ensure_future(scene.pass_timeout(1))
    await asyncio.sleep(0.01)
    await scene.topic.close("")
    looking.cancel()
    scene.log = scene.log.crash(1)
    await scene.start()
    assert scene.known() == {}


async def test_a_log_that_refuses_it_leaves_everything_as_it_was(scene: Scene) -> None:
    await scene.publish("a")
    await scene.pass_timeout(DUE_PERIODS - 1)
    scene.log.automatic = False
    looking = asyncio.ensure_future(scene.pass_timeout(1))
    await asyncio.sleep(0.01)
    scene.log.refuse()
    with pytest.raises(UnavailableError, match="no room"):
        await looking
    scene.log.automatic = True
    await scene.until(lambda: scene.topic.state is State.SERVING)
    assert scene.known() == {"a": 7}
    # The next look makes up for it.
    await scene.pass_timeout(1)
    assert scene.known() == {}


@pytest.mark.parametrize("when", ["before", "after", "never"])
async def test_a_snapshot_before_or_after_it_comes_to_the_same(scene: Scene, when: str) -> None:
    scene.keep_rows()
    await scene.publish("a", "b")
    if when == "before":
        await scene.topic.keeper.snapshot()
    cache = scene.topic.connect()
    await scene.send(("b", 8), link=7, cache=cache)
    await scene.pass_timeout()
    if when == "after":
        await scene.topic.keeper.snapshot()
    assert scene.known() == {"b": 8}
    await scene.restart()
    assert scene.known() == {"b": 8}


async def test_what_comes_after_it_counts_from_nothing_also_in_replay(scene: Scene) -> None:
    scene.keep_rows()
    await scene.publish("a")
    await scene.pass_timeout()
    await scene.open("a")
    await scene.send(("a", 2))
    assert scene.known() == {"a": 2}
    for _ in range(2):
        await scene.restart()
        assert scene.known() == {"a": 2}
        await scene.topic.keeper.snapshot()


async def test_replay_in_another_order_brings_it_back(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control arm of the one above: what merges by maximum may stand in any order, this may not."""
    scene.keep_rows()
    await scene.publish("a")
    await scene.pass_timeout()
    monkeypatch.setattr(control, "apply", lambda change, parts, producers, index: None)
    await scene.restart()
    assert scene.known() == {"a": 7}


async def test_frames_and_opens_while_it_is_in_flight(scene: Scene) -> None:
    """What arrives then is decided by what is in force, and stands after it in the log: live as in replay."""
    scene.keep_rows()
    await scene.publish("sends", "resumes", "opens")
    await scene.pass_timeout(DUE_PERIODS - 1)
    scene.log.automatic = False
    looking = asyncio.ensure_future(scene.pass_timeout(1))
    await asyncio.sleep(0.01)
    assert scene.topic.flight.has(control.Purge)
    answers: list[FrameReceipt | Refusal] = []
    encoded = batch([("sends", 8)], epochs={"sends": scene.epochs["sends"]}, links={"sends": 7}).encode()
    scene.topic.admit(encoded, 1, answers.append, NumbersCache())
    calls = [asyncio.ensure_future(scene.resume("resumes")), asyncio.ensure_future(scene.open("opens"))]
    await asyncio.sleep(0.01)
    scene.log.settle()
    scene.log.automatic = True
    while not all(call.done() for call in calls):
        await asyncio.sleep(0.001)
        scene.log.settle()
    await looking
    assert isinstance(answers[0], FrameReceipt)
    assert [call.result().persisted for call in calls] == [[-1], [-1]]
    assert calls[0].result().forgotten == [0]
    for name in ("resumes", "opens"):
        assert isinstance(await scene.send((name, 3)), FrameReceipt), name
    assert scene.known() == {"sends": 8, "resumes": 3, "opens": 3}
    epochs = [scene.topic.producers.numbers[n, DURABLE_EPOCH] for n in range(3)]
    await scene.restart()
    assert scene.known() == {"sends": 8, "resumes": 3, "opens": 3}
    assert sorted(scene.topic.producers.numbers[n, DURABLE_EPOCH] for n in range(3)) == sorted(epochs)


async def test_a_session_resumes_and_is_told(scene: Scene) -> None:
    await scene.publish("a", "b", "new")
    cache = scene.topic.connect()
    await scene.send(("b", 8), link=7, cache=cache)
    await scene.pass_timeout()
    refusal = await scene.send(("a", 8), link=7)
    assert isinstance(refusal, Refusal)
    assert refusal.error.reason == "INVALID_EPOCH"
    opened = await scene.resume("b", "a")
    assert (opened.persisted, opened.forgotten, opened.refusals) == ([8, -1], [1], {})
    assert scene.topic.counters.resumed_after_purge == 1
    # The answer may be lost: the next one says the same, and it counts once.
    assert (await scene.resume("a")).forgotten == [0]
    assert scene.topic.counters.resumed_after_purge == 1
    # A link that reaches back misses its predecessor; from nothing it goes on.
    refusal = await scene.send(("a", 8), link=7)
    assert isinstance(refusal, Refusal)
    assert refusal.error.reason == "PREDECESSOR_MISSING"
    assert isinstance(await scene.send(("a", 8)), FrameReceipt)
    # Whether its sender had heard that, or sent it long before, nobody knows.
    assert (await scene.resume("a")).forgotten == [0]


async def test_without_the_policy_nothing_is_said_to_be_forgotten(store: Store) -> None:
    scene = Scene(store, Storage(INCARNATION), Applied())
    await scene.start()
    await scene.open("a")
    assert (await scene.resume("a")).forgotten == []
    await scene.topic.close("")


async def test_a_session_of_a_name_that_was_forgotten_and_opened_anew_is_fenced(scene: Scene) -> None:
    await scene.publish("a")
    old = dict(scene.epochs)
    await scene.pass_timeout()
    await scene.publish("a")
    scene.epochs = old
    [why] = (await scene.resume("a")).refusals.values()
    assert why.reason == "FENCED"


# -- memory ---------------------------------------------------------------------------------------------------------


async def test_names_and_rows_are_freed_in_memory_and_in_the_store(scene: Scene) -> None:
    names = [f"p{i}" for i in range(5000)]
    await scene.open(*names, "kept")
    cache = scene.topic.connect()
    await scene.send(("kept", 1), cache=cache)
    for first in range(0, len(names), 1000):
        await scene.send(*[(name, 1) for name in names[first : first + 1000]])
    await scene.topic.keeper.snapshot()
    stored = sum(len(key) + len(value) for key, value in scene.store.scan(b"S", b"T"))
    assert len(scene.topic.producers) == 5001
    assert len(scene.topic.producers.numbers) >= 5001
    await scene.pass_timeout()
    assert len(scene.topic.producers) == 1
    assert len(scene.topic.producers.numbers) < 100
    assert sum(len(key) + len(value) for key, value in scene.store.scan(b"S", b"T")) < stored / 100
    # The stream and its cache go on, and so does everything after a restart.
    answer = await scene.send(("kept", 2), link=1, cache=cache)
    assert isinstance(answer, FrameReceipt)
    await scene.publish("later")
    await scene.topic.keeper.snapshot()
    assert scene.known() == {"kept": 2, "later": 7}
    await scene.restart()
    assert scene.known() == {"kept": 2, "later": 7}
    assert len(scene.topic.producers) == 2


async def test_what_is_in_flight_while_numbers_change_is_confirmed(scene: Scene) -> None:
    await scene.publish("gone1", "gone2", "stays", "opens")
    cache = scene.topic.connect()
    await scene.send(("stays", 8), link=7, cache=cache)
    await scene.pass_timeout(DUE_PERIODS - 1)
    await scene.open("opens")
    answers: list[FrameReceipt | Refusal] = []
    producers_module = scene.topic.keeper.inactivity._let_go

    async def in_flight_meanwhile() -> None:
        scene.log.automatic = False
        encoded = batch([("stays", 9)], epochs={"stays": scene.epochs["stays"]}, links={"stays": 8}).encode()
        scene.topic.admit(encoded, 1, answers.append, cache)
        resuming.append(asyncio.ensure_future(scene.resume("opens", "stays")))
        await asyncio.sleep(0.01)
        await producers_module()

    resuming: list[asyncio.Future[OpenAnswer]] = []
    scene.topic.keeper.inactivity._let_go = in_flight_meanwhile
    await scene.pass_timeout(1)
    assert (scene.topic.producers.generation, len(scene.topic.producers), answers) == (1, 2, [])
    scene.log.settle()
    scene.log.automatic = True
    assert (await resuming[0]).persisted == [7, 9]
    assert scene.known() == {"stays": 9, "opens": 7}
    assert isinstance(await scene.send(("stays", 10), link=9, cache=cache), FrameReceipt)
    assert scene.known() == {"stays": 10, "opens": 7}


async def test_everything_goes_on_while_names_are_freed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two steps: a stream that has its numbers, a name that comes back, new names, what is in flight."""
    monkeypatch.setattr(producers_module, "NAMES_A_STEP", 2)
    names = [f"gone{i}" for i in range(20)]
    await scene.publish(*names, "stays", "flies")
    cache = scene.topic.connect()
    await scene.send(("stays", 8), ("flies", 8), link=7, cache=cache)
    expected = {"stays": 8, "flies": 8}
    finish, prepare, clear, steps = LettingGo.finish, LettingGo.prepare, LettingGo.clear, 0
    answers: list[FrameReceipt | Refusal] = []

    def admit(name: str, sequence_id: int, link: int, cache: NumbersCache) -> None:
        encoded = batch([(name, sequence_id)], epochs={name: scene.epochs[name]}, links={name: link}).encode()
        scene.topic.admit(encoded, 1, answers.append, cache)

    def meanwhile(self: LettingGo) -> Iterator[None]:
        nonlocal steps
        scene.topic.producers.activity.renew_all()
        for _ in prepare(self):
            steps += 1
            if steps % 5 == 0:
                come = f"gone{steps}" if steps % 2 else f"new{steps}"
                number = np.array([scene.topic.producers.add(come.encode())])
                epoch = scene.epochs[come] = 2**32 * scene.topic.term + 1000 + steps
                scene.topic.producers.open(number, np.array([epoch]))
                scene.topic.producers.confirm_sessions(number, np.array([epoch]), None, scene.topic.confirmed_index)
                admit(come, 1, -1, NumbersCache())
                expected[come] = 1
            admit("stays", 8 + steps, 7 + steps, cache)
            expected["stays"] = 8 + steps
            yield

    def in_flight(self: LettingGo, is_free: Bools) -> Int64s:
        scene.log.automatic = False
        admit("flies", 9, 8, NumbersCache())
        expected["flies"] = 9
        return finish(self, is_free)

    def settle(self: LettingGo) -> Iterator[None]:
        scene.log.settle()
        scene.log.automatic = True
        return clear(self)

    monkeypatch.setattr(LettingGo, "prepare", meanwhile)
    monkeypatch.setattr(LettingGo, "finish", in_flight)
    monkeypatch.setattr(LettingGo, "clear", settle)
    await scene.pass_timeout()
    await scene.topic.flight.all_of_now()
    assert steps > 10
    assert scene.topic.producers.generation == 1
    assert [answer for answer in answers if not isinstance(answer, FrameReceipt)] == []
    assert len(answers) == steps + len(expected) - 1
    assert scene.known() == expected
    assert len(scene.topic.producers) == len(expected)
    assert isinstance(await scene.send(("stays", 100), link=expected["stays"], cache=cache), FrameReceipt)
    await scene.topic.keeper.snapshot()
    await scene.restart()
    assert scene.known() == {**expected, "stays": 100}


async def test_the_store_fails_when_numbers_have_changed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a snapshot with the new numbers is durable the store has the old ones, and is right by itself."""
    await scene.publish("gone", "a", "b")
    await scene.topic.keeper.snapshot()
    cache = scene.topic.connect()
    await scene.send(("a", 8), ("b", 8), link=7, cache=cache)
    sync = scene.store._sync
    monkeypatch.setattr(scene.store, "_sync", _fails)
    with pytest.raises(UnavailableError, match="STORE_UNAVAILABLE"):
        await scene.pass_timeout()
    monkeypatch.setattr(scene.store, "_sync", sync)
    assert scene.known() == {"a": 8, "b": 8}
    await scene.publish("new")
    await scene.topic.keeper.snapshot()
    await scene.restart()
    assert scene.known() == {"a": 8, "b": 8, "new": 7}
    assert len(scene.topic.producers) == 3


def _fails(*_: object) -> None:
    raise error("STORE_UNAVAILABLE", "a planned failure")


async def test_retention_states_again_what_is_in_force_and_nothing_that_was_forgotten(
    tmp_path: Path, store: Store
) -> None:
    """On a real log, of which retention drops the record, and what was before it: a store made again knows the same."""
    logs = EmbeddedLogs(tmp_path / "logs", clock_ms=lambda: 1, fatal=pytest.fail, segment_bytes=4000)
    await logs.create(INCARNATION, "t", bytes(16))

    async def start(store: Store) -> Topic:
        snapshots = Snapshots(store, INCARNATION)
        loaded = snapshots.load()
        log = await logs.open(INCARNATION, loaded.next_index if loaded else 0)
        applied = Applied(retention_size_in_mb=0, deduplication_producer_inactivity_timeout_minutes=minutes)
        topic = Topic("t", log, store, snapshots, loaded, applied=applied, random_bytes=secrets.token_bytes)
        await topic.recover()
        return topic

    async def send(name: str, epoch: int, first: int, count: int, cache: NumbersCache) -> None:
        for i in range(first, first + count):
            encoded = batch([(name, i)], epochs={name: epoch}, links={name: i - 1}, payloads=[bytes(500)]).encode()
            topic.admit(encoded, 1, lambda _: None, cache)
        await topic.flight.all_of_now()

    minutes = 60
    topic = await start(store)
    filler, again, gone, old = (await open_sessions(topic, ["filler", "again", "gone", "old"], None)).epochs
    stream, of_old = topic.connect(), topic.connect()
    await send("filler", filler, 0, 1, stream)
    await send("old", old, 0, 3, of_old)
    for name, epoch in (("again", again), ("gone", gone)):
        await send(name, epoch, 0, 3, NumbersCache())
    for _ in range(DUE_PERIODS):
        await topic.keeper.inactivity.look()
    assert known(topic.producers) == {"filler": 0, "old": 2}
    # That names were forgotten stays known without the policy, and without the record.
    minutes = 0
    again = (await open_sessions(topic, ["again"], None)).epochs[0]
    await send("again", again, 0, 2, NumbersCache())
    for part in range(4):
        await send("filler", filler, 1 + 10 * part, 10, stream)
        await topic.keeper.snapshot()
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            while topic.log.first_index < 10 * part:  # noqa: ASYNC110 (retention goes on beside the snapshot)
                await asyncio.sleep(0.01)
        expected = {"filler": 10 * part + 10, "old": 2, "again": 1}
        assert known(topic.producers) == expected
        await topic.close("")
        # From the snapshot, then from what is left of the log alone.
        topic = await start(store)
        assert known(topic.producers) == expected
        await topic.close("")
        rebuilt = Store.open(tmp_path / f"rebuilt{part}")
        topic = await start(rebuilt)
        assert known(topic.producers) == expected
        if part == 3:
            assert (await open_sessions(topic, ["gone"], [gone])).forgotten == [0]
        await topic.close("")
        rebuilt.close()
        topic = await start(store)
        stream = topic.connect()
    await topic.close("")
    await logs.close()


async def test_a_producer_in_parts_and_an_end_in_the_middle(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records hold this many names; who comes back between two of them stays; a policy that ends it, ends it."""
    monkeypatch.setattr(keeper, "STATED_A_RECORD", 2)
    await scene.publish(*"abcdefgh")
    await scene.pass_timeout(DUE_PERIODS - 1)
    purge = scene.topic.keeper.inactivity._purge
    parts: list[int] = []

    async def some(numbers: object) -> int:
        parts.append(len(numbers))  # type: ignore[arg-type]
        forgotten = await purge(numbers)  # type: ignore[arg-type]
        if len(parts) == 1:
            await scene.resume("d")
        if len(parts) == 3:
            await scene.topic.set_policy(Policy(deduplication_producer_inactivity_timeout_minutes=0))
        return forgotten

    scene.topic.keeper.inactivity._purge = some
    await scene.pass_timeout(1)
    assert parts == [2, 1, 2]
    assert scene.known() == {"d": 7, "g": 7, "h": 7}


async def test_nobody_is_looked_for_in_a_topic_that_is_closed(store: Store) -> None:
    """A policy may come into force while it is being closed."""
    scene = Scene(store, Storage(INCARNATION))
    await scene.start()
    await scene.topic.close("")
    scene.topic.keeper.inactivity.apply(FORGETS)
    assert scene.topic.keeper.inactivity._timer is None
