"""One case: clients, wires, one topic and its process, a log and a store that fail; and what must hold all the time.

A case is a seed and a list of steps. Each step is an action and a number from which it draws all it needs, so steps
can be left out and the others do about the same.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from seqdedupe.admission import NumbersCache
from seqdedupe.core.decide import DUP, EPOCH, NOT_DUP, PERSISTED, PUSHED
from seqdedupe.errors import FencedError, SeqdedupeError, UnavailableError
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic import Opened, Receipt, Refusal, Topic
from seqdedupe.topic import State as TopicState
from tests.log.faulty import FaultyLog
from tests.property.client import Frame, Session, State, compose
from tests.property.disk import CheckedStorage, CrashableStore, Violation
from tests.property.loop import StepLoop

NAMES = "abc"
MAX_ROWS = 4
MAX_UNACKED = 24
LAST_ROUNDS = 60
"""After the last fault everything has its receipt within so many rounds."""

Answer = Receipt | Refusal
Step = tuple[str, int]


@dataclass(eq=False)
class Stream:
    """A publish stream: frames go one way in order, answers the other way. A broken one loses the answers."""

    client: int
    frames: deque[Frame] = field(default_factory=deque)
    answers: deque[tuple[Frame, Answer]] = field(default_factory=deque)
    cache: NumbersCache = field(default_factory=NumbersCache)
    is_broken: bool = False


@dataclass(eq=False)
class OpenRequest:
    """An Open on its way."""

    sessions: list[Session]
    epochs: list[int] | None


ACTIONS = {
    "send": 34,
    "deliver": 30,
    "answer": 20,
    "settle": 13,
    "job": 10,
    "burst": 3,
    "store": 5,
    "report": 5,
    "refuse": 2,
    "unknown": 4,
    "fence": 2,
    "two_failures": 2,
    "refuse_opens": 1,
    "hold_opening": 2,
    "time": 4,
    "snapshot": 5,
    "fail_sync": 1,
    "break_stream": 2,
    "open": 24,
    "timeout": 4,
    "send_old": 3,
    "rival": 1,
    "policy": 1,
    "crash": 2,
    "drain": 1,
}


def steps_of(seed: int) -> list[Step]:
    """The steps of a case."""
    random = Random(seed)
    weights = {action: weight * random.choice((0, 1, 1, 2)) for action, weight in ACTIONS.items()}
    for action in ("send", "deliver", "answer", "settle", "job", "open"):
        weights[action] = ACTIONS[action]
    if random.random() < 0.8:
        weights["policy"] = 0
    names = random.choices(list(weights), list(weights.values()), k=random.randint(30, 150))
    return [(name, random.getrandbits(48)) for name in names]


class World:
    """See the module. `run` raises `Violation`."""

    def __init__(self, store: CrashableStore, incarnation: int, seed: int, trace: list[str] | None):
        random = Random(seed)
        self.random = random
        self.store = store
        self.trace = trace
        self.violations: list[str] = []
        self.storage = CheckedStorage(incarnation, self.violations)
        self.log = FaultyLog(self.storage, retention=random.random() < 0.5, replay_records=random.choice((1, 3, 50)))
        self.entries_interval = random.choice((2, 5, 1000))
        self.with_threads = random.random() < 0.1
        self.deduplicate = True
        self.streams = [Stream(client) for client in (0, 1) for _ in range(2)]
        self.loose: list[tuple[Frame, Stream | None]] = []
        """Frames of broken streams and unary calls: they arrive in any order, or never."""
        self.unary_answers: list[tuple[Frame, Answer]] = []
        self.opens: list[OpenRequest] = []
        self.open_answers: list[tuple[OpenRequest, Opened | SeqdedupeError]] = []
        self.sessions: dict[tuple[int, str], Session] = {}
        for n, name in enumerate(NAMES[: random.randint(1, 3)]):
            self.new_session(n % 2, name)
        self.frames = 0
        self.sessions_ever = 0
        store.watch(incarnation)
        self.start_process()
        if random.random() < 0.9:
            for _ in range(3):
                self.round_without_faults()

    def say(self, text: Callable[[], str]) -> None:
        if self.trace is not None:
            self.trace.append(text())

    # -- the process -------------------------------------------------------------------------------------------

    def start_process(self) -> None:
        self.loop = StepLoop(with_threads=self.with_threads)
        asyncio._set_running_loop(self.loop)
        snapshots = Snapshots(self.store, self.storage.incarnation)
        self.topic = Topic(
            "persistent://public/default/t",
            self.log,
            self.store,
            snapshots,
            snapshots.load(),
            deduplicate=self.deduplicate,
            entries_interval=self.entries_interval,
            random_bytes=lambda n: self.random.getrandbits(8 * n).to_bytes(n, "little"),
            on_state=self.state_changed,
        )
        self.loop.create_task(self.topic.recover())

    def end_process(self, lands: int) -> None:
        self.loop.end()
        self.log = self.log.crash(lands)
        self.topic.admit = None  # type: ignore[method-assign,assignment]  # nobody may use it any more
        for stream in list(self.streams):
            self.break_stream(stream)
        self.opens = [request for request in self.opens if self.random.random() < 0.3]
        # An Open that was under way is given up.
        for session in self.sessions.values():
            session.request = None
            if session.state is State.OPEN:
                session.state = State.CLOSED

    def state_changed(self, topic: Topic) -> None:
        self.say(lambda: f"    the topic is {topic.state.name}, term {topic.term}: {topic.why}")
        if topic.state is not TopicState.SERVING or topic is not self.topic:
            return
        numbers = topic.producers.numbers
        if not (topic.next_index == topic.confirmed_index == len(self.storage.rows)):
            self.wrong(
                f"recovery ended at {topic.confirmed_index}, next {topic.next_index}; the log has "
                f"{len(self.storage.rows)} messages"
            )
        for name, promised in self.storage.promised.items():
            number = topic.producers.number(name.encode())
            if number is None:
                if promised.highest >= 0 or promised.epoch:
                    self.wrong(f"{name} is forgotten after recovery")
                continue
            if not (numbers[number, PERSISTED] == numbers[number, PUSHED] == promised.highest):
                self.wrong(
                    f"after recovery {name} has pushed {numbers[number, PUSHED]}, persisted "
                    f"{numbers[number, PERSISTED]}; in the log is {promised.highest}"
                )
            if numbers[number, EPOCH] < promised.epoch:
                self.wrong(f"after recovery {name} has epoch {numbers[number, EPOCH]}, answered was {promised.epoch}")

    # -- what must hold ----------------------------------------------------------------------------------------

    def wrong(self, what: str) -> None:
        self.violations.append(what)

    def check(self) -> None:
        """Raises `Violation` if something has been found that must not be."""
        for failure in self.loop.failures:
            if not isinstance(failure, UnavailableError):
                raise Violation(f"a task failed: {failure!r}") from failure
        self.loop.failures.clear()
        numbers = self.topic.producers.numbers
        for name, promised in self.storage.promised.items():
            number = self.topic.producers.number(name.encode())
            if number is not None and numbers[number, PERSISTED] > promised.highest:
                self.wrong(f"{name} has persisted {numbers[number, PERSISTED]}, in the log is {promised.highest}")
        if self.topic.snapshot_index > self.topic.confirmed_index:
            self.wrong(f"a snapshot covers {self.topic.snapshot_index}, confirmed is {self.topic.confirmed_index}")
        if self.violations:
            raise Violation("; ".join(self.violations))

    def check_receipt(self, frame: Frame, receipt: Receipt) -> None:
        verdicts = receipt.verdicts if receipt.verdicts is not None else [NOT_DUP] * len(frame.rows)
        known = dict(zip(receipt.known_rows.tolist(), receipt.known_indexes.tolist(), strict=True))
        index = receipt.first_index
        before = dict(frame.links)
        started: set[str] = set()
        for row, ((session, sequence_id), verdict) in enumerate(zip(frame.rows, verdicts, strict=True)):
            expected = session.name, sequence_id, session.payload(sequence_id)
            if verdict == NOT_DUP:
                if not 0 <= index < len(self.storage.rows) or self.storage.rows[index] != expected:
                    self.wrong(f"{frame}: NotDup, but {expected[:2]} is not at index {index}")
                elif session.name not in started and self.storage.links[index] != before[session.name]:
                    self.wrong(f"{frame}: {expected[:2]} is stored with another link: {self.storage.links[index]}")
                started.add(session.name)
                index += 1
            elif verdict == DUP and not self.storage.holds(*expected):
                self.wrong(f"{frame}: Dup, but the log does not hold {expected}")
            if row in known and (verdict != DUP or self.storage.rows[known[row]] != expected):
                self.wrong(f"{frame}: index {known[row]} is not that of {expected[:2]}")
            before[session.name] = sequence_id

    def check_refusal(self, frame: Frame, refusal: Refusal, pushed: dict[str, int]) -> None:
        """`pushed`: the numbers when the frame came. What was above has no other copy."""
        if refusal.error.reason == "INVALID_EPOCH":
            self.wrong(f"{frame} is refused with {refusal.error}, but Open had answered")
        for session, sequence_id in frame.rows:
            is_stored = sequence_id > pushed[session.name] and (session.name, sequence_id) in self.storage.indexes
            if is_stored and refusal.error.reason != "OUTCOME_UNKNOWN":
                self.wrong(f"{frame} is refused, but {session.name} {sequence_id} was stored")

    # -- frames and answers ------------------------------------------------------------------------------------

    def admit(self, frame: Frame, stream: Stream | None) -> None:
        """A frame arrives at the process; its answer goes where the client may hear it."""

        def reply(answer: Answer) -> None:
            self.say(lambda: f"    {frame} gets {shown(answer)}")
            if isinstance(answer, Receipt):
                self.check_receipt(frame, answer)
            elif was_serving:
                self.check_refusal(frame, answer, pushed)
            if stream is None:
                self.unary_answers.append((frame, answer))
            elif not stream.is_broken:
                stream.answers.append((frame, answer))
            answers.append(answer)

        answers: list[Answer] = []
        pushed = self.pushed()
        next_index = self.topic.next_index
        was_serving = self.topic.state is TopicState.SERVING
        if not self.topic.deduplicate:
            self.storage.may_double.update((session.name, sequence_id) for session, sequence_id in frame.rows)
        cache = stream.cache if stream is not None else NumbersCache()
        self.topic.admit(frame.encoded, frame.number, reply, cache, lone=frame.is_unary)
        is_same = (next_index, pushed) == (self.topic.next_index, self.pushed())
        if answers and isinstance(answers[0], Refusal) and not is_same:
            self.wrong(f"{frame} is refused, but a part of it was admitted")

    def pushed(self) -> dict[str, int]:
        producers = self.topic.producers
        numbers = {name: producers.number(name.encode()) for name in NAMES}
        return {name: -1 if n is None else int(producers.numbers[n, PUSHED]) for name, n in numbers.items()}

    def break_stream(self, stream: Stream) -> None:
        stream.is_broken = True
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

    def new_session(self, client: int, name: str) -> None:
        self.sessions_ever = getattr(self, "sessions_ever", 0) + 1
        self.sessions[client, name] = Session(name, self.sessions_ever)

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

    # -- actions: clients --------------------------------------------------------------------------------------

    def some_stream(self) -> Stream:
        """A stream of a client that can send, if there is one."""
        able = {client for (client, _), session in self.sessions.items() if session.state is State.OPEN}
        return self.random.choice([stream for stream in self.streams if stream.client in able] or self.streams)

    def do_send(self) -> None:
        stream = self.some_stream()
        is_unary = self.random.random() < 0.25
        taken = {}
        for session in self.mine(stream.client):
            if session.state is State.OPEN and self.random.random() < 0.7:
                may_be_new = len(session.unacked) < MAX_UNACKED and not session.must_resend
                was_resend = session.must_resend
                ids = session.take(self.random, self.random.randint(1, MAX_ROWS), may_be_new or not session.unacked)
                if ids:
                    taken[session] = ids
                if was_resend and session.sent and self.random.random() < 0.3:
                    # What was sent behind it may still arrive: it is not sent again for now.
                    session.cursor = max(session.cursor, session.sent[-1] + 1)
        if taken:
            self.post(stream, taken, is_unary=is_unary)
        elif self.open_answers or self.opens or not any(s.request for s in self.sessions.values()):
            self.do_open()

    def do_send_old(self) -> None:
        stream = self.some_stream()
        taken = {}
        for session in self.mine(stream.client):
            if session.state is State.OPEN and session.sent:
                taken[session] = session.take_old(self.random, self.random.randint(1, MAX_ROWS))
        if taken:
            self.post(stream, taken, is_unary=self.random.random() < 0.3)

    def do_timeout(self) -> None:
        for session in self.sessions.values():
            if self.random.random() < 0.5:
                session.must_resend = True

    def do_open(self) -> None:
        """What is next of an Open: a client hears the answer, or the topic gets it, or a client sends one."""
        if self.open_answers and self.random.random() < 0.9:
            self.answer_open(is_lost=self.random.random() < 0.1)
        elif self.opens and self.random.random() < 0.9:
            self.deliver_open()
        else:
            self.ask_open(self.random.randrange(2))

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
            request = OpenRequest(sessions, [session.epoch for session in sessions] if is_resume else None)
            for session in sessions:
                session.asks(request)
            self.opens.append(request)

    def do_rival(self) -> None:
        """The other client wants a name too."""
        client, name = self.random.choice(list(self.sessions))
        if (1 - client, name) not in self.sessions:
            self.new_session(1 - client, name)

    def do_break_stream(self) -> None:
        self.break_stream(self.random.choice(self.streams))

    # -- actions: the wires ------------------------------------------------------------------------------------

    def do_deliver(self) -> None:
        ways = [stream for stream in self.streams if stream.frames]
        if self.loose and (not ways or self.random.random() < 0.5):
            frame, stream = self.loose.pop(self.random.randrange(len(self.loose)))
            self.admit(frame, stream)
        elif ways:
            stream = self.random.choice(ways)
            self.admit(stream.frames.popleft(), stream)

    def do_answer(self) -> None:
        ways = [stream for stream in self.streams if stream.answers]
        if self.unary_answers and (not ways or self.random.random() < 0.5):
            frame, answer = self.unary_answers.pop(self.random.randrange(len(self.unary_answers)))
            if self.random.random() < 0.8:
                frame.answered(answer)
        elif ways:
            frame, answer = self.random.choice(ways).answers.popleft()
            frame.answered(answer)

    def do_burst(self) -> None:
        """All that is under way to the topic arrives."""
        for stream in list(self.streams):
            while stream.frames:
                self.admit(stream.frames.popleft(), stream)

    def deliver_open(self) -> None:
        request = self.opens.pop(self.random.randrange(len(self.opens)))
        self.loop.create_task(self.open(request))

    async def open(self, request: OpenRequest) -> None:
        names = [session.name for session in request.sessions]
        highest = [self.storage.promise(name).highest for name in names]
        try:
            opened = await self.topic.open_sessions(names, request.epochs)
        except SeqdedupeError as e:
            if not isinstance(e, UnavailableError | FencedError):
                self.wrong(f"Open of {names} with epochs {request.epochs} gets {e}")
            self.open_answers.append((request, e))
            return
        self.say(lambda: f"    Open of {names} gets epochs {opened.epochs}, persisted {opened.persisted}")
        for place, name in enumerate(names):
            promised = self.storage.promise(name)
            persisted, index = opened.persisted[place], opened.indexes[place]
            if not highest[place] <= persisted <= promised.highest:
                self.wrong(f"Open answers {persisted} for {name}, in the log was {highest[place]} when it came")
            if request.epochs is None and opened.epochs[place] > promised.epoch and persisted != promised.highest:
                self.wrong(f"a new session of {name} begins at {persisted}, but the log has {promised.highest}")
            if index >= 0 and self.storage.rows[index][:2] != (name, persisted):
                self.wrong(f"Open answers index {index} for {name} {persisted}")
            promised.epoch = max(promised.epoch, opened.epochs[place])
        self.open_answers.append((request, opened))

    def answer_open(self, *, is_lost: bool) -> None:
        request, answer = self.open_answers.pop(0)
        for place, session in enumerate(request.sessions):
            if session.request is not request:
                continue
            session.request = None
            if is_lost:
                continue
            if isinstance(answer, Opened):
                session.opened(answer.epochs[place], answer.persisted[place])
                for sequence_id in session.acked:
                    if not self.storage.holds(session.name, sequence_id, session.payload(sequence_id)):
                        self.wrong(f"{session.name} {sequence_id} is acknowledged and not in the log")
            elif isinstance(answer, FencedError) and answer.numbers["producer_name"] == session.name:
                session.state = State.FENCED

    # -- actions: the log, the store, the process --------------------------------------------------------------

    def some_in_flight(self) -> int:
        return self.random.randint(0, self.log.in_flight)

    def do_settle(self) -> None:
        self.log.settle(self.random.randint(1, max(self.log.in_flight, 1)))

    def do_store(self) -> None:
        self.log.store(self.some_in_flight())

    def do_report(self) -> None:
        self.log.report()

    def do_refuse(self) -> None:
        if not self.log.failed:
            self.log.refuse(report=self.random.random() < 0.6)

    def do_unknown(self) -> None:
        if not self.log.failed:
            self.log.unknown(self.some_in_flight(), report=self.random.random() < 0.6)

    def do_fence(self) -> None:
        term = max(1, self.topic.term + self.random.randint(-1, 3))
        self.log.fence(term, self.some_in_flight(), report=self.random.random() < 0.6)

    def do_two_failures(self) -> None:
        """The log fails again while the topic is getting over a failure, and frames come all the time."""
        self.do_unknown()
        self.log.report()
        self.loop.run(self.random.randint(0, 10))
        self.do_fence()
        for _ in range(self.random.randint(0, 4)):
            self.do_send()
            self.loop.run(self.random.randint(0, 4))
            self.do_burst()
            self.log.settle(self.some_in_flight())

    def do_refuse_opens(self) -> None:
        self.log.refuse_opens(self.random.randint(1, 2), marked=self.random.random() < 0.5)

    def do_hold_opening(self) -> None:
        if self.log.opening_allowed.is_set():
            self.log.opening_allowed.clear()
        else:
            self.log.opening_allowed.set()

    def do_time(self) -> None:
        self.loop.advance(self.random.choice((0.1, 3)))

    def do_snapshot(self) -> None:
        self.loop.create_task(self.topic.snapshot_in_background())

    def do_job(self) -> None:
        for _ in range(self.random.choice((1, 1, 5))):
            if self.loop.jobs:
                self.loop.run_job()
                self.loop.run()

    def do_fail_sync(self) -> None:
        self.store.fail_next_sync(self.random.randint(0, 3))

    def do_policy(self) -> None:
        self.deduplicate = self.topic.deduplicate = not self.deduplicate

    def do_crash(self) -> None:
        """kill -9, or a power cut, which also takes what the store had not synced."""
        self.end_process(self.some_in_flight())
        if self.random.random() < 0.5:
            self.store.cut_power(self.random.randint(0, 3))
        self.store.restart()
        self.start_process()

    def do_drain(self) -> None:
        """An orderly end, and a new process."""
        self.log.opening_allowed.set()
        drained = self.loop.create_task(self.topic.drain())
        for _ in range(LAST_ROUNDS):
            if drained.done():
                break
            self.calm_down()
        else:
            raise Violation(f"draining does not end: {self.topic.why}")
        self.end_process(0)
        self.store.restart()
        self.start_process()

    # -- running -----------------------------------------------------------------------------------------------

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

    def run(self, steps: list[Step]) -> None:
        try:
            for number, (action, seed) in enumerate(steps):
                self.say(lambda: f"{number} {action}")  # noqa: B023 (called at once)
                self.random.seed(seed)
                getattr(self, f"do_{action}")()
                # Sometimes the process does not get far before the next thing happens.
                self.loop.run(None if self.random.random() < 0.75 else self.random.randint(0, 3))
                self.check()
            self.finish()
        finally:
            self.loop.end()
            asyncio._set_running_loop(None)

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
            for sequence_id in session.acked:
                if not self.storage.holds(session.name, sequence_id, session.payload(sequence_id)):
                    self.wrong(f"{session.name} {sequence_id} has a receipt and is not in the log")
        self.end_process(0)
        self.store.cut_power(0)
        self.store.restart()
        self.start_process()
        self.calm_down()
        if self.topic.state is not TopicState.SERVING:
            self.wrong(f"the topic does not come back: {self.topic.why}")
        self.check()

    def round_without_faults(self) -> bool:
        """A round in which everybody does what is next; whether all messages have their receipts."""
        self.calm_down()
        while self.opens:
            self.deliver_open()
        while self.loose:
            self.admit(*self.loose.pop())
        self.do_burst()
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
        self.check()
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


def shown(answer: Answer) -> str:
    if isinstance(answer, Refusal):
        return f"{answer.error.reason}: {answer.error.message}"
    verdicts = "NotDup" if answer.verdicts is None else [".", "NotDup", "Dup", "Unknown"].__getitem__
    names = verdicts if isinstance(verdicts, str) else " ".join(verdicts(v) for v in answer.verdicts.tolist())  # type: ignore[union-attr]
    return f"{names} from index {answer.first_index}"
