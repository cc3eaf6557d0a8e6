"""One case: clients, wires, one topic and its process, and a log and a store that fail."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from seqdedupe.core.rule import PUSHED
from seqdedupe.errors import InvalidRequestError, SeqdedupeError, UnavailableError
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic.base import State as TopicState
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.operations import open_sessions, reset_producer
from seqdedupe.topic.policy import Applied, Policy
from seqdedupe.topic.sessions import OpenAnswer
from seqdedupe.topic.topic import Topic
from tests.log.faulty import FaultyLog
from tests.property.client import MAX_UNACKED, Frame, Session, State, compose
from tests.property.disk import CrashableStore, Violation
from tests.property.judge import Judge
from tests.property.loop import StepLoop
from tests.property.wires import Answer, OpenRequest, Stream, shown

NAMES = "abc"
LAST_ROUNDS = 8
ROUNDING_SECONDS = 1e-6
"""The loop's time is a sum of thirds."""

"""After the last fault everything has its receipt within this many rounds."""

FORGETTING = 0.4
"""The share of topics that forget producers that nobody uses."""


class World:
    """See the module. What is found wrong is raised as `Violation`."""

    def __init__(self, store: CrashableStore, incarnation: int, seed: int, trace: list[str] | None):
        random = Random(seed)
        self.random = random
        self.store = store
        self.trace = trace
        self.judge = Judge(incarnation)
        self.log = FaultyLog(
            self.judge.storage, retention=random.random() < 0.5, replay_records=random.choice((1, 3, 50))
        )
        self.applied = Applied(
            deduplication_entries_interval=random.choice((2, 5, 1000)),
            deduplication_snapshot_interval_seconds=random.choice((0, 0, 3)),
            deduplication_producer_inactivity_timeout_minutes=1 if random.random() < FORGETTING else 0,
        )
        self.with_threads = random.random() < 0.1
        self.streams = [Stream(client) for client in (0, 1) for _ in range(2)]
        self.loose: list[tuple[Frame, Stream | None]] = []
        """Frames of broken streams and unary calls: they arrive in any order, or never."""
        self.unary_answers: list[tuple[Frame, Answer]] = []
        self.opens: list[OpenRequest] = []
        self.open_answers: list[tuple[OpenRequest, OpenAnswer | SeqdedupeError]] = []
        self.sessions: dict[tuple[int, str], Session] = {}
        self.sessions_ever = 0
        for n, name in enumerate(NAMES[: random.randint(1, 3)]):
            self.new_session(n % 2, name)
        self.frames = 0
        self.begins_calmly = random.random() < 0.9
        store.watch(incarnation)

    def say(self, text: Callable[[], str]) -> None:
        if self.trace is not None:
            self.trace.append(text())

    # -- the process ------------------------------------------------------------------------------------------------

    def start_process(self) -> None:
        self.loop = StepLoop(with_threads=self.with_threads)  # type: ignore[abstract]  # abstract in its types only
        asyncio._set_running_loop(self.loop)
        snapshots = Snapshots(self.store, self.log.incarnation)
        self.topic = Topic(
            "persistent://public/default/t",
            self.log,
            self.store,
            snapshots,
            snapshots.load(),
            applied=self.applied,
            random_bytes=lambda n: self.random.getrandbits(8 * n).to_bytes(n, "little"),
            on_state=self.state_changed,
        )
        self.used_at: dict[str, float] = {}
        """When this process was last asked for a name."""
        purge = self.topic.purge

        async def checked_purge(numbers: Any) -> int:
            self.purges(numbers)
            return await purge(numbers)

        self.topic.keeper.inactivity._purge = checked_purge
        self.judge.process_started(self.topic)
        self.loop.create_task(self.topic.recover())

    def purges(self, numbers: Any) -> None:
        """The topic is about to forget these producers: it must not, of one that is used."""
        used = {name for stream in self.streams if stream.cache is not None for name in stream.used}
        for encoded in self.topic.producers.names_of(numbers):
            name = encoded.decode()
            self.say(lambda: f"    {name} is being forgotten")  # noqa: B023 (called at once)
            idle_seconds = self.loop.time() - self.used_at.get(name, 0)
            if name in used or idle_seconds < 60 - ROUNDING_SECONDS:
                self.judge.wrong(f"{name} is forgotten after {idle_seconds} s; it is used by streams: {name in used}")

    def end_process(self, lands: int) -> None:
        self.loop.end()
        self.log = self.log.crash(lands)
        self.topic.admit = None  # type: ignore[method-assign,assignment]  # nobody may use it any more
        for stream in list(self.streams):
            self.break_stream(stream)
        self.opens = [request for request in self.opens if self.random.random() < 0.3]
        # An Open that was under way is given up, and so is what was answered to one.
        for request, answer in self.open_answers:
            for place in answer.forgotten if isinstance(answer, OpenAnswer) else ():
                request.sessions[place].missed_that_forgotten = True
        for session in self.sessions.values():
            session.request = None
            session.is_told_no_more |= session.missed_that_forgotten
            if session.state is State.OPEN:
                session.state = State.CLOSED

    def state_changed(self, topic: Topic) -> None:
        self.say(lambda: f"    the topic is {topic.state.name}, term {topic.term}: {topic.why}")
        if topic.state is TopicState.SERVING:
            self.judge.recovered()

    # -- frames and answers -----------------------------------------------------------------------------------------

    def new_session(self, client: int, name: str) -> None:
        self.sessions_ever += 1
        self.sessions[client, name] = Session(
            name,
            self.sessions_ever,
            may_be_forgotten=self.applied.deduplication_producer_inactivity_timeout_minutes > 0,
        )

    def mine(self, client: int) -> list[Session]:
        return [session for (owner, _), session in self.sessions.items() if owner == client]

    def post(self, stream: Stream, taken: dict[Session, list[int]], *, is_unary: bool) -> None:
        self.frames += 1
        frame = compose(self.frames, taken, self.random, is_unary)
        self.say(lambda: f"    {frame} is sent, links {frame.links}")
        if is_unary:
            self.loose.append((frame, None))
        else:
            stream.frames.append(frame)

    def admit(self, frame: Frame, stream: Stream | None) -> None:
        """A frame arrives at the process; its answer goes where the client may hear it."""

        def reply(answer: Answer) -> None:
            self.say(lambda: f"    {frame} gets {shown(answer)}")
            if isinstance(answer, FrameReceipt):
                self.judge.receipt(frame, answer)
            elif was_serving:
                self.judge.refusal(frame, answer, pushed)
            if stream is None:
                self.unary_answers.append((frame, answer))
            elif not stream.is_broken:
                stream.answers.append((frame, answer))
            answers.append(answer)

        answers: list[Answer] = []
        pushed = self.pushed()
        next_index = self.topic.next_index
        was_serving = self.topic.state is TopicState.SERVING
        if not self.topic.applied.deduplication_enabled:
            self.judge.storage.may_double.update((session.name, sequence_id) for session, sequence_id in frame.rows)
        if stream is None or stream.is_broken:
            cache = NumbersCache()
        elif stream.cache is None:
            cache = stream.cache = self.topic.connect()
        else:
            cache = stream.cache
        self.topic.admit(frame.encoded, frame.number, reply, cache, lone=frame.is_unary)
        is_refused = bool(answers) and isinstance(answers[0], Refusal)
        if not is_refused:
            names = {session.name for session, _ in frame.rows}
            self.used_at |= dict.fromkeys(names, self.loop.time())
            if stream is not None:
                stream.used |= names
        is_same = (next_index, pushed) == (self.topic.next_index, self.pushed())
        if is_refused and not is_same:
            self.judge.wrong(f"{frame} is refused, but a part of it was admitted")

    def pushed(self) -> dict[str, int]:
        producers = self.topic.producers
        numbers = {name: producers.number(name.encode()) for name in NAMES}
        return {name: -1 if n is None else int(producers.numbers[n, PUSHED]) for name, n in numbers.items()}

    def break_stream(self, stream: Stream) -> None:
        stream.is_broken = True
        if stream.cache is not None:
            self.topic.disconnect(stream.cache)
            self.used_at |= dict.fromkeys(stream.used, self.loop.time())
        dead = Stream(stream.client, is_broken=True)
        self.loose += [(frame, dead) for frame in stream.frames if self.random.random() < 0.5]
        if self.random.random() < 0.5:
            stream.answers.clear()
        for frame, answer in stream.answers:
            frame.answered(answer)
        self.streams[self.streams.index(stream)] = Stream(stream.client)
        for (client, _), session in self.sessions.items():
            if client == stream.client:
                session.must_resend = True

    def deliver_all(self) -> None:
        """All that is under way to the topic arrives."""
        for stream in list(self.streams):
            while stream.frames:
                self.admit(stream.frames.popleft(), stream)

    # -- sessions ---------------------------------------------------------------------------------------------------

    def ask_open(self, client: int) -> None:
        """A client opens what it has to, or resumes, or gives an Open up and tries again."""
        by_kind: dict[bool, list[Session]] = {}
        for session in self.mine(client):
            if session.state is State.FENCED:
                self.new_session(client, session.name)
                session = self.sessions[client, session.name]
            if (session.state is State.CLOSED and not session.request) or self.random.random() < 0.1:
                by_kind.setdefault(session.epoch > 0, []).append(session)
        for is_resume, sessions in by_kind.items():
            if is_resume and sessions[0].may_be_forgotten:
                # Nothing of an earlier connection is under way for as long as it takes to be forgotten.
                for stream in [stream for stream in self.streams if stream.client == client]:
                    self.break_stream(stream)
                self.loose = [(f, way) for f, way in self.loose if not any(s in sessions for s, _ in f.rows)]
            request = OpenRequest(sessions, [session.epoch for session in sessions] if is_resume else None)
            for session in sessions:
                session.asks(request)
            self.opens.append(request)

    def deliver_open(self) -> None:
        request = self.opens.pop(self.random.randrange(len(self.opens)))
        self.loop.create_task(self.open(request))

    async def open(self, request: OpenRequest) -> None:
        names = [session.name for session in request.sessions]
        stored = self.judge.stored(request)
        asked_at = self.loop.time()
        try:
            opened = await open_sessions(self.topic, names, request.epochs)
        except SeqdedupeError as e:
            if not isinstance(e, UnavailableError):
                self.judge.wrong(f"Open of {names} with epochs {request.epochs} gets {e}")
            self.open_answers.append((request, e))
            return
        self.say(lambda: f"    Open of {names} gets epochs {opened.epochs}, persisted {opened.persisted}")
        accepted = [name for place, name in enumerate(names) if place not in opened.refusals]
        self.used_at |= {name: max(asked_at, self.used_at.get(name, 0)) for name in accepted}
        for place, why in opened.refusals.items():
            self.judge.open_refused(names[place], request.epochs, place, why)
        self.judge.opened(request, opened, stored)
        self.open_answers.append((request, opened))

    async def set_policy(self, policy: Policy) -> None:
        try:
            await self.topic.set_policy(policy)
        except UnavailableError:
            return
        self.judge.policy_answered(policy)

    async def reset(self, name: str, persisted: int) -> None:
        try:
            before = await reset_producer(self.topic, name, persisted)
        except (UnavailableError, InvalidRequestError):
            # The log took nothing; or the producer is not known, or has been reset meanwhile.
            return
        self.say(lambda: f"    {name} is reset from {before} to {persisted}")
        self.judge.reset_answered(name)

    def answer_open(self, *, is_lost: bool) -> None:
        request, answer = self.open_answers.pop(0)
        for place, session in enumerate(request.sessions):
            says_forgotten = isinstance(answer, OpenAnswer) and place in answer.forgotten
            if session.request is not request:
                session.missed_that_forgotten |= says_forgotten
                continue
            session.request = None
            if is_lost:
                session.missed_that_forgotten |= says_forgotten
                continue
            if isinstance(answer, OpenAnswer) and place in answer.refusals:
                session.state = State.FENCED
            elif isinstance(answer, OpenAnswer):
                session.opened(answer.epochs[place], answer.persisted[place], is_forgotten=place in answer.forgotten)
                self.judge.acknowledged(session)

    # -- the end ----------------------------------------------------------------------------------------------------

    def calm_down(self) -> None:
        """No faults; a round of everything that goes on by itself."""
        self.log.opening_allowed.set()
        self.log.refuse_opens(0)
        self.store.fails = None
        self.log.settle()
        self.loop.run()
        while self.loop.jobs:
            self.loop.run_job()
            self.loop.run()
        self.loop.advance(3)
        self.loop.run()

    def round_without_faults(self) -> bool:
        """A round in which everybody does what is next; whether all messages have their receipts."""
        self.calm_down()
        while self.opens:
            self.deliver_open()
        while self.loose:
            self.admit(*self.loose.pop())
        self.deliver_all()
        self.calm_down()
        for stream in self.streams:
            while stream.answers:
                frame, answer = stream.answers.popleft()
                frame.answered(answer)
        while self.unary_answers:
            frame, answer = self.unary_answers.pop()
            frame.answered(answer)
        while self.open_answers:
            self.answer_open(is_lost=False)
        self.judge.check(self.loop.failures)
        done = True
        for (client, _), session in self.sessions.items():
            if session.state is State.CLOSED and (session.epoch or not session.request):
                request = OpenRequest([session], [session.epoch] if session.epoch else None)
                session.asks(request)
                self.opens.append(request)
                done = False
            elif session.state is State.OPEN and session.unacked:
                session.resend()
                taken = {session: session.take(self.random, 2 * MAX_UNACKED, False)}
                self.post(self.streams[2 * client], taken, is_unary=False)
                done = False
        return done and self.topic.state is TopicState.SERVING

    def finish(self) -> None:
        """The faults are over: every message gets its receipt. Then a last crash, and nothing has changed."""
        self.say(lambda: "no faults any more")
        self.random.shuffle(self.loose)
        for _ in range(LAST_ROUNDS):
            if self.round_without_faults():
                break
        else:
            left = {f"{s.name}{s.number}": (s.state.name, s.unacked) for s in self.sessions.values()}
            raise Violation(f"it does not end: {left}; the topic is {self.topic.state.name}: {self.topic.why}")
        for session in self.sessions.values():
            self.judge.acknowledged(session)
        self.end_process(0)
        self.store.cut_power(0)
        self.store.restart()
        self.start_process()
        self.calm_down()
        if self.topic.state is not TopicState.SERVING:
            self.judge.wrong(f"the topic does not come back: {self.topic.why}")
        self.judge.check(self.loop.failures)
