"""One case: two topics of deduplication IDs in a process with memory for a few, logs and a store that fail."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from random import Random

from seqdedupe.core import id_slots
from seqdedupe.core.id_window import Moment
from seqdedupe.errors import UnavailableError
from seqdedupe.log.contract import Log
from seqdedupe.store.parts import IDS, MAX_NUMBER, RUN, part_key, part_number
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic.base import State
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.lives import PublishedTopics
from seqdedupe.topic.policy import NO_LIMIT, Applied, Policy
from seqdedupe.topic.topic import Topic
from seqdedupe.topic.window_runs import WindowMemory
from tests.log.faulty import FaultyLog
from tests.property.disk import CrashableStore, Left, Violation
from tests.property.loop import StepLoop
from tests.property.windows.model import Frame, Model
from tests.property.wires import shown
from tests.store.model import topic as topic_record

TOPICS = ("persistent://public/default/one", "persistent://public/default/other")
SMALLEST_TABLES_BYTES = len(TOPICS) * 8 * 1024
ROUNDS = 12
"""Without faults everything has its receipt within this many."""

MOST_ROUNDS = 400
MAX_ROWS = 8
SENT = [
    *(b"id-%d" % k for k in range(24)),
    *(b"%d" % k + b"x" * 250 for k in range(12)),
    b"a", b"a\0", b"a\0\0", b"\0", bytes(16), bytes(15), b"y" * 254, b"y" * 255,
]  # fmt: skip


class Place:
    """A topic, its log, and what has to come of it."""

    def __init__(self, model: Model, policy: Policy, *, retention: bool, replay_records: int) -> None:
        self.model, self.policy = model, policy
        self.log = FaultyLog(model, retention=retention, replay_records=replay_records)
        self.topic: Topic
        self.calls: list[Frame] = []
        """Those that have no receipt yet."""
        self.sending: set[asyncio.Task[None]] = set()


def some_policy(random: Random) -> Policy:
    return Policy(
        by_deduplication_id=True,
        deduplication_window_max_messages=random.choice((1, 16, 48, 48, 200)),
        deduplication_window_max_bytes=random.choice((NO_LIMIT, NO_LIMIT, 1, 400, 3000)),
        deduplication_window_max_minutes=random.choice((NO_LIMIT, NO_LIMIT, 1, 3)),
    )


class WindowWorld:
    """See the module. What is found wrong is raised as `Violation`."""

    def __init__(self, store: CrashableStore, seed: int, trace: list[str] | None) -> None:
        self.random = random = Random(seed)
        self.store, self.trace = store, trace
        self.violations: list[str] = []
        self.now_ms = 1_000_000
        self.frames = 0
        self.memory_bytes = SMALLEST_TABLES_BYTES + random.choice((1, 300, 1500, 6000, 20_000))
        self.applied = Applied(
            deduplication_entries_interval=random.choice((2, 5, 1000)),
            deduplication_snapshot_interval_seconds=random.choice((0, 0, 3)),
        )
        self.places = [self.new_place(name) for name in TOPICS]
        store.watch(*(place.model.incarnation for place in self.places))

    def new_place(self, name: str) -> Place:
        incarnation = self.store.next_incarnation(1)
        model = Model(incarnation, name, self.violations, lambda: self.now_ms, self.applied)
        return Place(
            model,
            some_policy(self.random),
            retention=self.random.random() < 0.6,
            replay_records=self.random.choice((1, 3, 50)),
        )

    def say(self, text: Callable[[], str]) -> None:
        if self.trace is not None:
            self.trace.append(text())

    # -- the process ---------------------------------------------------------------------------------------------

    def start_process(self) -> None:
        self.loop = StepLoop(with_threads=False)  # type: ignore[abstract]  # abstract in its types only
        asyncio._set_running_loop(self.loop)
        # Pieces that another process has left are cut otherwise.
        id_slots.PIECE_BYTES = self.random.choice((30, 60, 600))  # type: ignore[attr-defined]
        behind = self.random.choice((0, 0.1, 0.3))
        self.store.is_behind = lambda: self.random.random() < behind  # type: ignore[method-assign]
        self.memory = WindowMemory(self.memory_bytes)
        self.published = PublishedTopics(
            self.store,
            self,  # type: ignore[arg-type]  # of its logs it asks for `open` alone
            on_state=self.state_changed,
            rebuild_store=True,
            window_memory=self.memory,
        )
        for place in self.places:
            self.open_topic(place)

    async def open(self, incarnation: int, *_: object) -> Log:
        """As `Logs`."""
        return next(place.log for place in self.places if place.model.incarnation == incarnation)

    def open_topic(self, place: Place) -> None:
        """Opens a topic, and says what it is if it is new. It recovers by and by."""
        record = replace(topic_record(place.model.incarnation), name=place.model.name)
        opening = self.loop.create_task(self.published.open(record, self.applied))
        self.run_until(opening.done)
        topic = place.topic = opening.result()
        topic._random_bytes = lambda n: self.random.getrandbits(8 * n).to_bytes(n, "little")
        topic.now = lambda: Moment(self.now_ms, self.now_ms)
        self.check_store(place)
        recovering = self.loop.create_task(topic.recover())
        if topic.window is None and not place.model.records:
            self.run_until(recovering.done)
            setting = self.loop.create_task(topic.set_policy(place.policy))
            self.loop.run()
            place.log.settle()
            self.run_until(setting.done)

    def stored(self, place: Place, part: bytes) -> list[int]:
        """The numbers of all records of a kind that the store has of a topic."""
        first, end = (part_key(place.model.incarnation, part, number) for number in (0, MAX_NUMBER))
        return [part_number(key) for key, _ in super(CrashableStore, self.store).scan(first, end)]

    def run_numbers(self, place: Place) -> set[int]:
        return {number >> 32 for number in self.stored(place, RUN)}

    def check_store(self, place: Place) -> None:
        """It has the runs that are in use, and pieces of what comes after them; nothing is under way."""
        window, left = place.topic.window, self.run_numbers(place)
        # Without a snapshot nothing tells of runs that were begun: they are written over, or go at a start with one.
        named = set(window.older.numbers) if window is not None else left
        if left != named:
            place.model.wrong(f"the store has the runs {left}, in use are {named}")
        pieces = self.stored(place, IDS)
        if window is not None and pieces and pieces[0] < window.older.end_index:
            place.model.wrong(f"the store has pieces from {pieces[0]} on, runs go up to {window.older.end_index}")

    def check_left(self, place: Place) -> None:
        """Everything that a power cut leaves now is a whole snapshot. Raises DamagedError."""
        left = Left(self.random.choice(self.store.states))
        Snapshots(left, place.model.incarnation).load()  # type: ignore[arg-type]  # it is read alone

    def run_some_job(self) -> None:
        """A pool of threads does what comes in any order, its own thread in this one."""
        jobs = self.loop.jobs
        own = next((at for at, (executor, *_) in enumerate(jobs) if executor is not None), 0)
        self.loop.run_job(self.random.choice([own, *(at for at, job in enumerate(jobs) if job[0] is None)]))

    def run_until(self, done: Callable[[], bool]) -> None:
        for _ in range(MOST_ROUNDS):
            self.loop.run()
            if done():
                return
            if self.loop.jobs:
                self.loop.run_job()
            else:
                self.loop.advance(0.5)
        raise Violation("it does not end")

    def end_process(self, lands: Callable[[Place], int]) -> None:
        self.loop.end()
        for place in self.places:
            place.log = place.log.crash(lands(place))
            self.forget_calls(place)

    def forget_calls(self, place: Place) -> None:
        """Nobody will answer what is under way."""
        place.sending.clear()
        place.model.flying.clear()

    def state_changed(self, topic: Topic) -> None:
        self.say(lambda: f"    {topic.name} is {topic.state.name}, term {topic.term}: {topic.why}")

    # -- calls ---------------------------------------------------------------------------------------------------

    def send(self, place: Place, ids: list[bytes], *, waits: int = 0) -> None:
        """A call is on its way to a topic; between looking up and admission it may wait this many steps, or (below 0)
        until time passes."""
        self.frames += 1
        frame = Frame(self.frames, ids)
        place.calls.append(frame)
        task = self.loop.create_task(self.call(place, frame, waits))
        place.sending.add(task)
        task.add_done_callback(place.sending.discard)

    async def call(self, place: Place, frame: Frame, waits: int) -> None:
        topic, model = place.topic, place.model
        encoded = frame.encoded()
        looked_up = await topic.ids.look_up(encoded)
        for _ in range(waits):
            await asyncio.sleep(0)
        if waits < 0:
            await asyncio.sleep(0.05)

        def reply(answer: FrameReceipt | Refusal) -> None:
            self.say(lambda: f"    {frame} gets {shown(answer)}")
            model.answered(frame, answer, topic)
            if isinstance(answer, FrameReceipt) and frame in place.calls:
                place.calls.remove(frame)

        self.say(lambda: f"    {frame} is decided, looked up {looked_up}")
        if topic.state is State.SERVING:
            model.decided(frame, topic)
        topic.admit(encoded, frame.number, reply, NumbersCache(), looked_up=looked_up)
        if frame.answer is None or isinstance(frame.answer, FrameReceipt):
            model.check_has_moved(topic)

    def send_again(self, place: Place) -> None:
        """Everything that has no receipt: its own call."""
        waiting = [frame for frame in place.calls if frame not in place.model.flying]
        place.calls = [frame for frame in place.calls if frame in place.model.flying]
        for frame in waiting:
            self.send(place, frame.ids)

    async def set_policy(self, topic: Topic, policy: Policy) -> None:
        """That it cannot be set now is no news."""
        with suppress(UnavailableError):
            await topic.set_policy(policy)

    # -- checks --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        for failure in self.loop.failures:
            if not isinstance(failure, UnavailableError):
                raise Violation(f"a task failed: {failure!r}") from failure
        self.loop.failures.clear()
        for place in self.places:
            place.model.check(place.topic)
        if self.violations:
            raise Violation("; ".join(self.violations))

    def calm_down(self) -> None:
        """No faults; a round of everything that goes on by itself."""
        self.store.fails = self.store.calls_left = None
        self.store.is_behind = lambda: False  # type: ignore[method-assign]
        for place in self.places:
            place.log.opening_allowed.set()
            place.log.refuse_opens(0)
            place.log.settle()
        self.loop.run()
        while self.loop.jobs:
            self.loop.run_job()
            self.loop.run()
        self.loop.advance(3)
        self.loop.run()
        self.check()

    def check_runs(self, place: Place) -> None:
        """The store has all runs that are in use; and no others but what was given up since the last naming, which goes
        at a start (`check_store`)."""
        window = place.topic.window
        if window is not None and not set(window.older.numbers) <= self.run_numbers(place):
            place.model.wrong(f"the store has the runs {self.run_numbers(place)}, in use are {window.older.numbers}")

    def finish(self) -> None:
        """The faults are over: every call gets its receipt. Then a last crash, and nothing has changed."""
        self.say(lambda: "no faults any more")
        self.all_answered()
        for _ in range(2):
            self.end_process(lambda place: 0)
            self.store.cut_power(0)
            self.store.restart()
            self.start_process()
            # All that there is, and all that is still known, is asked for.
            for place in self.places:
                for at in range(0, len(SENT), MAX_ROWS):
                    self.send(place, SENT[at : at + MAX_ROWS])
            self.all_answered()

    def all_answered(self) -> None:
        for _ in range(ROUNDS):
            self.calm_down()
            if not any(place.calls for place in self.places) and self.memory._moving is None:
                for place in self.places:
                    self.check_runs(place)
                self.check()
                return
            for place in self.places:
                if place.topic.state is State.SERVING:
                    self.send_again(place)
        states = {place.model.name: (place.topic.state.name, len(place.calls)) for place in self.places}
        raise Violation(f"it does not end: {states}, moving {self.memory._moving}")
