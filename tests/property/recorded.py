"""Cases whose steps are written down as a trace, for the model: see model/trace.py.

`python -m tests.kernels tests.property.run --traces` follows many. The model has no policies, no
resets, and no resumes of forgotten names, so these cases have none.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from model.steps import Kind
from model.trace import (
    Appended,
    Confirmed,
    Dropped,
    Event,
    Fenced,
    Follower,
    Frame,
    Killed,
    Landed,
    Left,
    Lost,
    Marked,
    NotInTheModel,
    Numbers,
    Opened,
    Receipt,
    Row,
    Served,
)
from seqdedupe import batch as batches
from seqdedupe.core.rule import DUP, DURABLE_EPOCH, EPOCH, NOT_DUP, PERSISTED, PUSHED, UNKNOWN
from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.contract import Outcome
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic import control
from seqdedupe.topic.base import State
from seqdedupe.topic.frame import FrameReceipt, NumbersCache
from seqdedupe.topic.topic import Topic
from tests.log.faulty import OTHER_OWNERS_TOKEN
from tests.property import cases
from tests.property.actions import Case
from tests.property.cases import Step
from tests.property.disk import CrashableStore, Violation
from tests.property.wires import Answer
from tests.property.world import NAMES

NOT_MODELLED = ("policy", "reset")
VERDICTS = {NOT_DUP: "admit", DUP: "Dup", UNKNOWN: "Unknown"}


def _number(name: str | bytes) -> int:
    return NAMES.index(name.decode() if isinstance(name, bytes) else name)


def steps_of(seed: int) -> list[Step]:
    """The steps of a case, without what the model does not have."""
    return [step for step in cases.steps_of(seed) if step[0] not in NOT_MODELLED]


class RecordedCase(Case):
    """A case that writes down what the topic, the log and the store do, in `events`."""

    def __init__(self, store: CrashableStore, incarnation: int, seed: int, trace: list[str] | None = None) -> None:
        super().__init__(store, incarnation, seed, trace)
        self.applied = replace(self.applied, deduplication_producer_inactivity_timeout_minutes=0)
        for session in self.sessions.values():
            session.may_be_forgotten = False
        self.events: list[Event] = []
        self._was_serving = False
        self._records = 0
        self._dropped = 0
        storage, judge = self.judge.storage, self.judge
        self._before(storage, "add", lambda *_: self._landed())
        self._before(storage, "add_marker", self._marked)
        self._before(judge, "opened", lambda request, opened, _: self._opened(request, opened))
        self._before(judge, "open_refused", self._open_refused)

    @staticmethod
    def _before(owner: Any, method: str, note: Callable[..., None]) -> None:
        """Call this function before a method, with the method's arguments."""
        original = getattr(owner, method)

        def noted(*args: Any, **more: Any) -> Any:
            note(*args, **more)
            return original(*args, **more)

        setattr(owner, method, noted)

    # -- The process.

    def start_process(self) -> None:
        is_first = not self.events and not self._records
        self._watch_log()
        super().start_process()
        if not is_first:
            loaded = Snapshots(self.store, self.log.incarnation).load()
            numbers = {}
            if loaded is not None:
                columns = zip(loaded.names.some(), loaded.persisted.tolist(), loaded.epochs.tolist(), strict=True)
                numbers = {_number(name): (persisted + 1, epoch) for name, persisted, epoch in columns}
            self.events.append(Killed(self.log.first_index if loaded is None else loaded.next_index, numbers))
        self._was_serving = False
        self._watch_topic(self.topic)

    def state_changed(self, topic: Topic) -> None:
        is_serving = topic.state is State.SERVING
        if is_serving:
            self.events.append(Served(topic.term, dict(self._numbers(topic))))
        elif self._was_serving and topic.state is not State.DRAINING:
            self.events.append(Left())
        self._was_serving = is_serving or (self._was_serving and topic.state is State.DRAINING)
        super().state_changed(topic)

    @staticmethod
    def _numbers(topic: Topic) -> Any:
        for name in NAMES:
            number = topic.producers.number(name.encode())
            if number is not None:
                columns = topic.producers.numbers[number, [PUSHED, PERSISTED, EPOCH, DURABLE_EPOCH]].tolist()
                yield _number(name), Numbers(columns[0] + 1, columns[1] + 1, *columns[2:])

    def _watch_topic(self, topic: Topic) -> None:
        admit, settle = topic.admit, topic.settle

        def noted_admit(
            encoded: bytes, number: int, reply: Callable[[Answer], None], cache: NumbersCache, *, lone: bool
        ) -> None:
            at, answers = len(self.events), list[Answer]()

            def noted_reply(answer: Answer) -> None:
                answers.append(answer)
                if isinstance(answer, FrameReceipt):
                    verdicts = [NOT_DUP] * len(rows) if answer.verdicts is None else answer.verdicts.tolist()
                    self.events.append(Receipt(number, tuple(VERDICTS[verdict] for verdict in verdicts)))
                reply(answer)

            rows = _rows(encoded)
            admit(encoded, number, noted_reply, cache, lone=lone)
            refused = answers[0].error.reason if answers and not isinstance(answers[0], FrameReceipt) else ""
            self.events.insert(at, Frame(number, rows, refused))

        def noted_settle(opening: int, outcome: Outcome) -> None:
            if opening == topic.opening:
                self.events += [Confirmed()] * min(len(outcome.runs), len(topic.flight))
            settle(opening, outcome)

        topic.admit = noted_admit  # type: ignore[method-assign,assignment]
        topic.settle = noted_settle  # type: ignore[method-assign]

    # -- The log.

    def _watch_log(self) -> None:
        log = self.log
        open_for_writing, land, trim = log.open_for_writing, log._land, log.trim
        self._before(log, "append", lambda body, rows, *_: self.events.append(_appended(body, rows)))
        self._before(log, "refuse", lambda **_: self.events.append(Lost()))

        async def noted_open(*args: Any) -> int:
            records = self._records
            try:
                return await open_for_writing(*args)
            except SeqdedupeError:
                if self._records > records:
                    # Its marker is in the log, but the sidecar does not own the log.
                    self.events[-1] = self.events[-1]._replace(is_own=False)  # type: ignore[call-arg]
                raise

        def noted_land() -> None:
            land()
            self.events.append(Lost())

        async def noted_trim(below_index: int) -> None:
            await trim(below_index)
            dropped = self._records - len(self.judge.storage.records)
            if dropped > self._dropped:
                self.events.append(Dropped(dropped - self._dropped))
                self._dropped = dropped

        log.open_for_writing = noted_open  # type: ignore[method-assign,assignment]
        log._land = noted_land  # type: ignore[method-assign]
        log.trim = noted_trim  # type: ignore[method-assign]

    def _landed(self) -> None:
        self._records += 1
        self.events.append(Landed())

    def _marked(self, term: int, token: bytes) -> None:
        self._records += 1
        self.events.append(Marked(term, not token.startswith(OTHER_OWNERS_TOKEN[:-4])))

    # -- Answers of Open.

    def _opened(self, request: Any, opened: Any) -> None:
        for place, session in enumerate(request.sessions):
            if place not in opened.refusals:
                self.events.append(Opened(_number(session.name), opened.epochs[place], opened.persisted[place] + 1))

    def _open_refused(self, name: str, epochs: list[int] | None, place: int, e: SeqdedupeError) -> None:
        if epochs is not None and e.reason == "FENCED":
            self.events.append(Fenced(_number(name), epochs[place]))


def _rows(encoded: bytes) -> tuple[Row, ...]:
    batch = batches.decode(encoded)
    names = [_number(name) for name in batch.names()]
    producers = [batch.producer_of(row) for row in range(len(batch.sequence_ids))]
    links = batch.previous_sequence_ids
    return tuple(
        Row(names[p], int(batch.epochs[p]), int(sequence_id) + 1, int(links[p]) + 1)
        for p, sequence_id in zip(producers, batch.sequence_ids, strict=True)
    )


def _appended(body: bytes, rows: int) -> Appended:
    if rows:
        return Appended(Kind.MESSAGE, tuple((row.name, row.id, row.epoch) for row in _rows(body)))
    change, _ = control.decode(body)
    if not isinstance(change, control.ProducerSessions):
        return Appended(Kind.BARE, ())
    kind = Kind.SESSION if change.persisted is None else Kind.STATEMENT
    persisted = np.full(len(change.names), -1) if change.persisted is None else change.persisted
    columns = zip(change.names, persisted.tolist(), change.epochs.tolist(), strict=True)
    return Appended(kind, tuple((_number(name), one + 1, epoch) for name, one, epoch in columns))


def recorded(store: CrashableStore, seed: int) -> list[Event]:
    """Run a case. Return its trace, which ends where the case finds a violation."""
    case = RecordedCase(store, store.next_incarnation(1), seed)
    with suppress(Violation):
        case.run(steps_of(seed))
    return case.events


def follow(events: list[Event]) -> None:
    """Follow a trace in the model. Raises NotInTheModel, with the number of the event."""
    follower = Follower(len(NAMES))
    for number, event in enumerate(events):
        try:
            follower.follow(event)
        except NotInTheModel as e:
            raise NotInTheModel(f"event {number}, {e}") from e


def run_and_follow(store: CrashableStore, seed: int, steps: list[Step], trace: list[str] | None = None) -> None:
    """Run a case, and follow its trace. Raises `Violation`, NotInTheModel."""
    case = RecordedCase(store, store.next_incarnation(1), seed, trace)
    case.run(steps)
    follow(case.events)
