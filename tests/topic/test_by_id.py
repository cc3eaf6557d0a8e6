"""A topic of deduplication IDs on a log that does what the test says: what fails, what nobody knows, what a crash
leaves.

About 20 s, one process.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rocksdict import WriteBatch

from seqdedupe import batch as batches
from seqdedupe.batch import Binary
from seqdedupe.core import id_slots
from seqdedupe.core.id_window import IdWindow, Moment
from seqdedupe.core.rule import DUP, NOT_DUP, UNKNOWN
from seqdedupe.errors import SeqdedupeError
from seqdedupe.format.layout import ROWS
from seqdedupe.format.records import body_of
from seqdedupe.message_id import MessageId
from seqdedupe.store import windows as stored_ids
from seqdedupe.store.db import Store
from seqdedupe.store.parts import IDS, part_key
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic.base import State
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal, check_by_id
from seqdedupe.topic.judge import ByDeduplicationId
from seqdedupe.topic.operations import open_sessions
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.topic import Topic
from tests.batches import batch
from tests.log.faulty import FaultyLog, Storage

INCARNATION = 5
APPLIED = Applied(deduplication_snapshot_interval_seconds=0)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_slots, "PIECE_BYTES", 32)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "store")
    yield store
    store.close()


class Place:
    """A topic of deduplication IDs, and what stands in its log."""

    def __init__(self, store: Store, **policy: Any) -> None:
        self.store = store
        self.storage = Storage(INCARNATION)
        self.log = FaultyLog(self.storage)
        self.policy = Policy(by_deduplication_id=True, **policy)
        self.now_ms = 1_000_000
        self.topic: Topic

    async def start(self) -> Topic:
        self.topic = self.opened(Snapshots(self.store, INCARNATION))
        self.topic.ids.now = self.now
        await self.topic.recover()
        if self.topic.window is None:
            setting = asyncio.ensure_future(self.topic.set_policy(self.policy))
            await asyncio.sleep(0)
            self.log.settle()
            await setting
        return self.topic

    def now(self) -> Moment:
        return Moment(self.now_ms, self.now_ms)

    def opened(self, snapshots: Snapshots) -> Topic:
        return self.topic_of(snapshots, snapshots.load())

    def topic_of(self, snapshots: Snapshots, loaded: Loaded | None, **more: Any) -> Topic:
        return Topic(
            "t", self.log, self.store, snapshots, loaded, applied=APPLIED, random_bytes=random.randbytes, **more
        )

    async def crash(self, lands: int | None = 0) -> Topic:
        self.log = self.log.crash(lands)
        await self.topic.close("crash")
        return await self.start()

    async def go_on(self) -> None:
        """Between two steps of a history."""
        await asyncio.sleep(0)

    def send(self, *ids: bytes) -> list[FrameReceipt | Refusal]:
        answers: list[FrameReceipt | Refusal] = []
        self.topic.admit(frame(*ids), 1, answers.append, NumbersCache())
        return answers

    def stored(self) -> list[bytes]:
        """The IDs of all messages, by index."""
        found: list[bytes] = []
        for record in self.storage.records:
            places = self.storage.places(record)
            if places[ROWS]:
                found += batches.decode(body_of(record, places)).deduplication_ids.values()
        return found


def frame(*ids: bytes) -> bytes:
    columns = Binary.of_all(list(ids))
    return batches.without_producers(columns, Binary.of_all([b"payload of " + one for one in ids])).encode()


@pytest.fixture
async def place(store: Store) -> Any:
    place = Place(store)
    await place.start()
    yield place
    await place.topic.close("")


def receipt(answers: list[FrameReceipt | Refusal]) -> FrameReceipt:
    (answer,) = answers
    assert isinstance(answer, FrameReceipt), answer
    return answer


def verdicts(answers: list[FrameReceipt | Refusal]) -> list[int]:
    one = receipt(answers)
    assert one.verdicts is not None
    return [int(verdict) for verdict in one.verdicts]


def originals(place: Place, answers: list[FrameReceipt | Refusal]) -> dict[int, int]:
    """The index of the original of each DUP, each of which must be known, message ID and all."""
    one = receipt(answers)
    assert one.verdicts is not None
    assert one.known_rows.tolist() == np.flatnonzero(one.verdicts == DUP).tolist()
    return dict(zip(one.known_rows.tolist(), one.known_indexes.tolist(), strict=True))


async def test_the_ids_alone_decide(place: Place) -> None:
    first, second = place.send(b"a", b"b"), place.send(b"b", b"c", b"c")
    assert (first, second) == ([], [])
    place.log.settle(1)
    assert receipt(first).verdicts is None
    assert place.send(b"c") != []
    place.log.settle()
    assert verdicts(second) == [UNKNOWN, NOT_DUP, DUP]
    assert originals(place, second) == {2: 2}
    assert originals(place, place.send(b"c", b"a")) == {0: 2, 1: 0}
    assert place.stored() == [b"a", b"b", b"c"]


async def test_what_is_in_flight_is_unknown_until_it_has_settled(place: Place) -> None:
    place.send(b"a")
    assert verdicts(place.send(b"a")) == [UNKNOWN]
    place.log.settle()
    assert verdicts(place.send(b"a")) == [DUP]


async def test_a_failed_append_takes_its_ids_out_again(place: Place) -> None:
    lost = place.send(b"a", b"b")
    place.log.refuse()
    assert isinstance(lost[0], Refusal)
    await until_serving(place.topic)
    again = place.send(b"b", b"a")
    place.log.settle()
    assert receipt(again).verdicts is None
    assert place.stored() == [b"b", b"a"]


@pytest.mark.parametrize("lands", [0, 1, 2])
async def test_an_unknown_outcome_is_settled_by_reading_the_log(place: Place, lands: int) -> None:
    answers = [place.send(b"a", b"a"), place.send(b"b")]
    place.log.unknown(lands)
    assert isinstance(place.send(b"a")[0], Refusal)
    await until_serving(place.topic)
    for k, (answer, ids) in enumerate(zip(answers, ([b"a", b"a"], [b"b"]), strict=True)):
        assert isinstance(answer[0], FrameReceipt if k < lands else Refusal)
        again = place.send(*ids)
        place.log.settle()
        assert (receipt(again).verdicts is None) == (k >= lands and len(ids) == 1)
    assert sorted(place.stored()) == [b"a", b"b"]


async def test_originals_have_the_indexes_at_which_they_stand(place: Place) -> None:
    """Somebody else has appended before what was in flight landed."""
    answers = place.send(b"a", b"b", b"a")
    foreign = check_by_id(frame(b"x", b"y"))
    place.storage.add_batch(foreign.encoded, foreign.rows, foreign.column_bytes)
    place.log.unknown(lands=1)
    await until_serving(place.topic)
    assert receipt(answers).first_index == 2
    assert originals(place, answers) == {2: 2}
    assert originals(place, place.send(b"b", b"x")) == {0: 3, 1: 0}


async def until_serving(topic: Topic) -> None:
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while topic.state is not State.SERVING:
            assert topic.state is not State.DAMAGED, topic.damage
            await topic.confirmed.wait()


async def test_bad_input_changes_nothing(place: Place) -> None:
    with_producer = batch([("p", 1)])
    both = batch([("p", 1)], deduplication_ids=Binary.of_all([b"a"]))
    for encoded, reason in (
        (frame(b""), "INVALID_DEDUPLICATION_ID"),
        (frame(b"a", b"x" * 256), "INVALID_DEDUPLICATION_ID"),
        (with_producer.encode(), "INVALID_BATCH"),
        (both.encode(), "INVALID_BATCH"),
        (batches.without_producers(Binary(), Binary.of_all([b"x"])).encode(), "INVALID_BATCH"),
        (frame(), "INVALID_BATCH"),
    ):
        answers: list[FrameReceipt | Refusal] = []
        place.topic.admit(encoded, 1, answers.append, NumbersCache())
        assert isinstance(answers[0], Refusal)
        assert answers[0].error.reason == reason
    with pytest.raises(SeqdedupeError, match="deduplication IDs"):
        await open_sessions(place.topic, ["p"], None)
    longest = place.send(b"x" * 255, b"a")
    place.log.settle()
    assert receipt(longest).verdicts is None


async def test_a_topic_of_sequence_ids_takes_no_deduplication_ids(store: Store) -> None:
    log = FaultyLog(Storage(INCARNATION))
    topic = Topic("t", log, store, Snapshots(store, INCARNATION), None, applied=APPLIED, random_bytes=bytes)
    await topic.recover()
    answers: list[FrameReceipt | Refusal] = []
    topic.admit(frame(b"a"), 1, answers.append, NumbersCache())
    assert isinstance(answers[0], Refusal)
    assert answers[0].error.reason == "INVALID_BATCH"
    assert topic.window is None
    await topic.close("")


async def test_the_mode_is_kept_whatever_becomes_of_the_policy(place: Place) -> None:
    for policy in (
        place.topic.newest_policy.with_values_of(Policy(deduplication_window_max_messages=7)),
        place.topic.newest_policy.without([]),
    ):
        setting = asyncio.ensure_future(place.topic.set_policy(policy))
        await asyncio.sleep(0)
        place.log.settle()
        await setting
        assert place.topic.policy.by_deduplication_id
    await place.crash()
    assert place.topic.policy == Policy(by_deduplication_id=True)


async def test_a_rebuilt_topic_knows_what_its_log_says(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Also where retention has dropped what said first that it is one of deduplication IDs."""
    for one in (b"a", b"b", b"c"):
        place.send(one)
        place.log.settle()
    await place.topic.keeper.snapshot()
    await place.topic.close("")
    await place.store.flush(Snapshots(place.store, INCARNATION).remove())
    del place.storage.records[: next(k for k, r in enumerate(place.storage.records) if b"payload of b" in r)]
    place.storage.first_index = 1
    place.log = FaultyLog(place.storage)
    await place.start()
    assert verdicts(place.send(b"b", b"c")) == [DUP, DUP]
    assert place.topic.window is not None
    assert place.topic.window.first_index == 1
    assert ["its first 1 message are lost" in one.message for one in caplog.records if one.levelname == "ERROR"] == [
        True
    ]
    again = place.send(b"a")
    place.log.settle()
    assert receipt(again).verdicts is None


async def test_the_window_moves_and_says_so(store: Store) -> None:
    place = Place(store, deduplication_window_max_messages=32, deduplication_window_max_minutes=1)
    await place.start()
    window = place.topic.window
    assert window is not None
    for k in range(100):
        place.send(b"%d" % k)
        place.log.settle()
    assert 32 <= len(window) <= 34
    assert verdicts(place.send(b"70", b"99")) == [DUP, DUP]
    await place.topic.keeper.snapshot()
    first = window.first_index
    await place.crash()
    assert place.topic.window is not None
    assert (place.topic.window.first_index, place.topic.window.key) == (first, window.key)
    assert verdicts(place.send(b"%d" % first, b"99")) == [DUP, DUP]
    assert place.topic.window.first_time_ms == place.now_ms
    place.now_ms += 61_000
    again = place.send(b"99")
    place.log.settle()
    assert receipt(again).verdicts is None
    await place.topic.keeper.snapshot()
    await place.crash()
    assert place.topic.window.first_index == 100
    await place.topic.close("")


async def test_after_a_crash_the_window_reaches_as_far_back_as_before(store: Store) -> None:
    """The limit is a policy: where it stands in the log says for which messages it counts."""
    place = Place(store, deduplication_window_max_messages=16)
    topic = await place.start()
    for k in range(100):
        place.send(b"%d" % k)
        place.log.settle()
    assert topic.window is not None
    before = topic.window.first_index
    assert before == 100 - 17
    # All of it comes in one read.
    place.log.replay_records = 1000
    topic = await place.crash()
    assert topic.window is not None
    assert topic.window.first_index == before
    again = place.send(b"0", b"90")
    place.log.settle()
    assert verdicts(again) == [NOT_DUP, DUP]
    await topic.close("")


async def test_a_window_that_the_store_has_lost_in_part_is_damage(place: Place, store: Store) -> None:
    place.send(b"a", b"b")
    place.log.settle()
    await place.topic.keeper.snapshot()
    change = WriteBatch(raw_mode=True)
    change.delete(part_key(INCARNATION, IDS, 0))
    store.write(change)
    with pytest.raises(SeqdedupeError, match="are missing"):
        Snapshots(store, INCARNATION).load()


# -- histories -------------------------------------------------------------------------------------------------------


class Sender:
    """Sends each ID until it has a receipt for it, over no matter what becomes of the topic."""

    def __init__(self, place: Place, count: int, seed: int) -> None:
        self.place = place
        self.random = random.Random(seed)
        self.left = {b"id-%d" % k * self.random.randint(1, 5) for k in range(count)}
        self.all = set(self.left)
        self.done: dict[bytes, int] = {}

    def send(self) -> None:
        ids = self.random.choices(sorted(self.left or self.all), k=self.random.randint(1, 6))
        self.place.topic.admit(frame(*ids), 1, lambda answer: self.take(ids, answer), NumbersCache())

    def take(self, ids: list[bytes], answer: FrameReceipt | Refusal) -> None:
        if isinstance(answer, Refusal):
            assert answer.error.retry_delay_ms >= 0, answer.error
            return
        known = dict(zip(answer.known_rows.tolist(), answer.known_indexes.tolist(), strict=True))
        index = answer.first_index
        stored = self.place.stored()
        for row, one in enumerate(ids):
            verdict = NOT_DUP if answer.verdicts is None else answer.verdicts[row]
            if verdict == UNKNOWN:
                continue
            here = known[row] if verdict == DUP else index
            index += verdict == NOT_DUP
            assert stored[here] == one, "what has a receipt stands in the log, where it says"
            message_id = MessageId(*(int(column[0]) for column in self.place.log.known_message_ids(np.array([here]))))
            assert message_id.ledger_id < 0 or message_id == self.place.storage.message_id(here)
            self.done[one] = here
            self.left.discard(one)


async def history(place: Place, seed: int) -> None:
    """Random faults, until all is acknowledged; then each ID stands in the log once."""
    rng = random.Random(seed)
    await place.start()
    sender = Sender(place, 30, seed)
    for step in range(400):
        if not sender.left and step > 200:
            break
        match rng.choices(range(7), weights=[60, 30, 4, 5, 4, 4, 3])[0]:
            case 0:
                sender.send()
            case 1:
                place.log.settle(rng.randint(0, 3))
            case 2:
                place.log.refuse()
            case 3:
                place.log.unknown(rng.choice([0, 1, 2, None]))
            case 4:
                await place.crash(rng.choice([0, 1, 2, None]))
            case 5:
                if place.topic.state is State.SERVING:
                    await place.topic.keeper.snapshot()
            case 6:
                place.log.store(1)
        await place.go_on()
        if place.topic.state is not State.SERVING:
            await until_serving(place.topic)
    while sender.left:
        sender.send()
        place.log.settle()
        if place.topic.state is not State.SERVING:
            await until_serving(place.topic)
    place.log.settle()
    await place.crash()
    counts = Counter(place.stored())
    assert set(counts) == sender.all, "nothing is lost"
    assert max(counts.values()) == 1, "nothing is there twice"
    assert place.topic.window is not None
    assert place.topic.window.next_index == place.topic.next_index == len(place.stored())
    assert verdicts(place.send(*sorted(sender.all))) == [DUP] * len(sender.all)
    await place.topic.close("")


@pytest.mark.parametrize("seed", range(25))
async def test_each_message_stands_there_once_whatever_fails(store: Store, seed: int) -> None:
    await history(Place(store), seed)


def _nothing(*arguments: Any, **more: Any) -> None:
    return None


def _confirmed_at_once(real: Callable[..., Any]) -> Callable[..., Any]:
    def decide(self: IdWindow, *arguments: Any) -> Any:
        answer = real(self, *arguments)
        self._state[1] = self._state[2]
        return answer

    return decide


def _keeps_indexes(self: FrameReceipt, first_index: int) -> None:
    self.first_index = first_index


def _without_deduplication(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, view, places, deduplicate, *rest: real(self, view, places, False, *rest)


PLANTED: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "what fails is still known": (IdWindow, "fail", lambda real: _nothing),
    "replay leaves IDs out": (ByDeduplicationId, "replay", lambda real: _nothing),
    "snapshots lack IDs": (stored_ids.WrittenPieces, "put", lambda real: _nothing),
    "it counts before it is stored": (IdWindow, "decide", _confirmed_at_once),
    "snapshots have no window": (stored_ids, "put", lambda real: lambda *a: 0),
    "deduplication is off": (IdWindow, "decide", _without_deduplication),
}


@pytest.mark.parametrize("bug", PLANTED)
async def test_control_a_planted_bug_doubles_or_loses(store: Store, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, planted = PLANTED[bug]
    monkeypatch.setattr(where, name, planted(getattr(where, name)))
    with pytest.raises((AssertionError, SeqdedupeError, IndexError, ValueError, TimeoutError)):
        await _histories(store)


async def _histories(store: Store) -> None:
    for seed in range(20):
        await asyncio.wait_for(history(Place(store), seed), LAST_RESORT_SECONDS)
        await store.flush(Snapshots(store, INCARNATION).remove())
