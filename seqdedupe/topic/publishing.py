"""One live topic: admit, append, confirm, snapshot.

Everything here runs on one event loop and decides in arrival order, so admission order, append order and
confirmation order are one order and nothing needs a lock. Confirming makes messages persisted and readable in one
step, before their receipt is given and before anything is called Dup because of them.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import DUP, NOT_DUP, PERSISTED
from seqdedupe.errors import SeqdedupeError, UnavailableError, error
from seqdedupe.format.columns import BASE_INDEX, ROWS
from seqdedupe.format.records import body_of
from seqdedupe.log.contract import Failure, Log, Outcome
from seqdedupe.message_id import Position
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.topic import admission, recovery
from seqdedupe.topic.admission import Frame, Int64s, NumbersCache, ProducerNumbers, Uint8s
from seqdedupe.topic.sessions import Sessions
from seqdedupe.topic.snapshotter import Snapshotter

logger = logging.getLogger("seqdedupe.topic")

MAX_IN_FLIGHT_BYTES = 64 * 1024 * 1024
"""Admitted and not settled, in one topic."""

MAX_IN_FLIGHT_FRAMES = 16_384

REOPEN_FIRST_DELAY_SECONDS = 0.05
REOPEN_LONGEST_DELAY_SECONDS = 2.0

_NO_INDEXES = np.zeros(0, np.int64)


class State(Enum):
    """What a topic does at the moment."""

    RECOVERING = 1
    SERVING = 2
    READ_ONLY = 3
    DRAINING = 4


@dataclass(frozen=True, slots=True)
class Receipt:
    """The outcome of a frame that was not refused, as `Receipt` in publish.proto has it."""

    frame: int
    verdicts: Uint8s | None
    """None: all rows are NOT_DUP."""
    first_index: int
    known_rows: Int64s = field(default_factory=lambda: _NO_INDEXES)
    known_indexes: Int64s = field(default_factory=lambda: _NO_INDEXES)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A frame of which nothing was admitted."""

    frame: int
    error: SeqdedupeError
    producers: list[ProducerNumbers] = field(default_factory=list)


Reply = Callable[[Receipt | Refusal], None]


@dataclass(slots=True, eq=False)
class _Admitted:
    """A frame whose new rows are in flight."""

    frame: Frame
    receipt: Receipt
    reply: Reply


@dataclass(slots=True)
class Counters:
    """Since this process opened the topic: rows by verdict, frames refused, log failures."""

    not_dup: int = 0
    dup: int = 0
    unknown: int = 0
    refused: int = 0
    log_failures: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """What `Open` answers, in the order of the names."""

    epochs: list[int]
    persisted: list[int]
    indexes: list[int]


class Topic:
    """A topic of this process. It takes messages once `recover` has returned.

    `on_state` is told each change of state, with one line why.
    """

    def __init__(
        self,
        name: str,
        log: Log,
        store: Store,
        snapshots: Snapshots,
        loaded: Loaded | None,
        *,
        deduplicate: bool,
        entries_interval: int,
        random_bytes: Callable[[int], bytes],
        on_state: Callable[["Topic"], None] = lambda topic: None,
    ) -> None:
        self.name = name
        self.log = log
        self.deduplicate = deduplicate
        self.counters = Counters()
        self.state = State.RECOVERING
        self.why = "the log is being read"
        self.term = 0
        self.next_index = 0
        self.confirmed_index = 0
        self.producers = Producers()
        self._entries_interval = entries_interval
        self._entries = 0
        self._random_bytes = random_bytes
        self._on_state = on_state
        self._in_flight: deque[_Admitted] = deque()
        self._in_flight_bytes = 0
        self._admitted_frames = 0
        self._settled_frames = 0
        self._is_recovering = False
        self._settled = _Broadcast()
        self._confirmed = _Broadcast()
        self._tasks: set[asyncio.Task[None]] = set()
        # Without a snapshot everything that is left in the log is read.
        self.confirmed_index = self.next_index = log.first_index
        self._closed_because = "DRAINING"
        if loaded is not None:
            self.producers.load(loaded.names, loaded.persisted, loaded.epochs)
            self.term = loaded.term
            self.confirmed_index = self.next_index = loaded.next_index
        self._sessions = Sessions(self.producers)
        self._snapshotter = Snapshotter(
            store,
            snapshots,
            self.producers,
            lambda: (self.term, self.last_position),
            next_index=self.confirmed_index,
        )

    # -- state -------------------------------------------------------------------------------------------------

    def _set_state(self, state: State, why: str) -> None:
        if self.state is State.DRAINING and state is not State.DRAINING:
            return
        if (state, why) != (self.state, self.why):
            self.state, self.why = state, why
            self._on_state(self)
            self._settled.tell()

    @property
    def last_position(self) -> Position:
        """The position of the last confirmed message."""
        return self.position_before(self.confirmed_index)

    def position_before(self, index: int) -> Position:
        """The position after which reading begins at this index."""
        if index == 0:
            return Position.start(self.log.incarnation)
        return Position(self.log.incarnation, self.log.message_id(index - 1), index - 1)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task of topic %s failed", self.name, exc_info=task.exception())

    def check_serving(self) -> None:
        """Raises RECOVERING, LOG_REFUSED, DRAINING or TOPIC_NOT_FOUND unless the topic takes messages."""
        if self.state is not State.SERVING:
            reason = {
                State.RECOVERING: "RECOVERING",
                State.READ_ONLY: "LOG_REFUSED",
                State.DRAINING: self._closed_because,
            }[self.state]
            raise error(reason, f"topic {self.name} takes no messages now: {self.why}")

    # -- recovery ----------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Takes over the log and reads what the snapshot does not cover; then the topic serves.

        If the log cannot be written now the topic is READ_ONLY on return, readers find all that is in it, and it is
        tried again beside this. Raises `DamagedError` for damage; the topic then stays as it is.
        """
        self._is_recovering = True
        if await self._took_over():
            self._recovered()
        else:
            self._spawn(self._recover_later())

    async def _recover_later(self) -> None:
        delay = REOPEN_FIRST_DELAY_SECONDS
        await asyncio.sleep(delay)
        while not await self._took_over():
            delay = min(2 * delay, REOPEN_LONGEST_DELAY_SECONDS)
            await asyncio.sleep(delay)
        self._recovered()

    def _recovered(self) -> None:
        self._is_recovering = False
        self._set_state(State.SERVING, "")

    async def _took_over(self) -> bool:
        failures = self.counters.log_failures
        try:
            owner = await recovery.take_over(
                self.log,
                term=self.term + 1,
                confirmed_index=self.confirmed_index,
                merge=self._merge,
                settle=self._settle,
                random_bytes=self._random_bytes,
                name=self.name,
            )
        except UnavailableError as e:
            if self.state is State.RECOVERING and not self._in_flight:
                await self._read_only()
            if self.state is not State.RECOVERING or not self._in_flight:
                self._set_state(State.READ_ONLY, e.message)
            return False
        except SeqdedupeError as e:
            self._set_state(State.RECOVERING, f"{e.message}. {e.hint}")
            raise
        # Whatever of the frames in flight the log does not hold by now it never will.
        self._fail_in_flight("LOG_REFUSED", "the append failed")
        self.term = owner.term
        self._sessions.begin_term(owner.term)
        self.next_index = self.confirmed_index = owner.next_index
        self._confirmed.tell()
        # What the log held is known now; but if it failed again meanwhile, it takes nothing yet.
        return self.counters.log_failures == failures

    async def _read_only(self) -> None:
        """For readers, what the log holds that the snapshot does not cover; who owns it is decided later."""
        self.next_index = self.confirmed_index = await recovery.catch_up(
            self.log, confirmed_index=self.confirmed_index, merge=self._merge, name=self.name
        )
        self._confirmed.tell()

    def _merge(self, chunk: bytes, table: recovery.Table, count: int) -> None:
        """Records found in the log; frames in flight that are among them are confirmed and answered."""
        self.producers.replay(chunk, table, count)
        self.confirmed_index = int(table[count - 1, BASE_INDEX] + table[count - 1, ROWS])
        if not self._in_flight:
            return
        for places in table[:count]:
            if places[ROWS] and self._in_flight and self._in_flight[0].frame.encoded == body_of(chunk, places):
                self._answer(self._take_from_flight())

    # -- publishing --------------------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """Whether another frame may be admitted now."""
        return self._in_flight_bytes < MAX_IN_FLIGHT_BYTES and len(self._in_flight) < MAX_IN_FLIGHT_FRAMES

    async def wait_for_room(self) -> None:
        """Returns when another frame may be admitted."""
        while not self.has_room():
            await self._settled.wait()

    def admit(self, encoded: bytes, frame: int, reply: Reply, cache: NumbersCache, *, lone: bool = False) -> None:
        """Decides about a frame and hands what is new to the log. `reply` is called once, now or when that settles.

        `lone`: links may be left out, as in a unary call. Nothing is raised: what is wrong is a `Refusal`.
        """
        try:
            self.check_serving()
            checked = admission.check(encoded, self.producers, cache)
        except SeqdedupeError as e:
            self.counters.refused += 1
            reply(Refusal(frame, e))
            return
        why = self.producers.refusal(checked.view, checked.places, checked.slots, lone)
        if why:
            self.counters.refused += 1
            reply(Refusal(frame, *admission.refused(checked, self.producers, why)))
            return
        new, verdicts = self.producers.decide(checked.view, checked.places, checked.slots, self.deduplicate)
        if new == checked.rows:
            self._append(checked, Receipt(frame, None, self.next_index), reply)
            return
        known = self.producers.originals(checked.view, checked.places, checked.slots, verdicts)
        receipt = Receipt(frame, verdicts, self.next_index if new else -1, *known)
        if new:
            self._append(admission.cut(checked, verdicts), receipt, reply)
        else:
            self._count(receipt, 0)
            reply(receipt)

    def _append(self, frame: Frame, receipt: Receipt, reply: Reply) -> None:
        frame.places[BASE_INDEX] = self.next_index
        self.log.append(frame.encoded, frame.rows, frame.column_bytes)
        self.next_index += frame.rows
        self._in_flight.append(_Admitted(frame, receipt, reply))
        self._in_flight_bytes += len(frame.encoded)
        self._admitted_frames += 1

    def _count(self, receipt: Receipt, rows: int) -> None:
        if receipt.verdicts is None:
            self.counters.not_dup += rows
            return
        verdicts = receipt.verdicts.tobytes()
        new, dup = verdicts.count(NOT_DUP), verdicts.count(DUP)
        self.counters.not_dup += new
        self.counters.dup += dup
        self.counters.unknown += len(verdicts) - new - dup

    # -- outcomes ----------------------------------------------------------------------------------------------

    def _settle(self, outcome: Outcome) -> None:
        """The log tells what became of the oldest appends in flight."""
        confirmed = [self._take_from_flight() for _ in range(outcome.stored)]
        for admitted in confirmed:
            frame = admitted.frame
            self.producers.persist(frame.view, frame.places, frame.slots)
            self.confirmed_index += frame.rows
        if confirmed:
            self._confirmed.tell()
        for admitted in confirmed:
            self._answer(admitted)
        if outcome.failure is not None:
            self._log_failed(outcome.failure, outcome.why)
        self._settled.tell()
        self._entries += len(confirmed)
        if self._entries >= self._entries_interval and not self._snapshotter.is_due:
            self._entries = 0
            self._spawn(self.snapshot_in_background())

    def _take_from_flight(self) -> _Admitted:
        admitted = self._in_flight.popleft()
        self._in_flight_bytes -= len(admitted.frame.encoded)
        self._settled_frames += 1
        return admitted

    def _answer(self, admitted: _Admitted) -> None:
        self._count(admitted.receipt, admitted.frame.rows)
        admitted.reply(admitted.receipt)

    def _log_failed(self, failure: Failure, why: str) -> None:
        self.counters.log_failures += 1
        logger.warning("the log of topic %s failed (%s): %s", self.name, failure.value, why)
        if self._is_recovering:
            # Nothing was handed over since that began, so this says nothing of what is in flight; it tries again.
            return
        if failure is Failure.REFUSED:
            self._fail_in_flight("LOG_REFUSED", why)
            self._set_state(State.READ_ONLY, why)
        else:
            self._set_state(State.RECOVERING, f"what became of the last appends is being found out: {why}")
        self._spawn(self.recover())

    def _fail_in_flight(self, reason: str, why: str) -> None:
        """What is in flight is given up: nothing of it counts as pushed any more."""
        failed = [self._take_from_flight() for _ in range(len(self._in_flight))]
        self.producers.fail_in_flight()
        self.next_index = self.confirmed_index
        self.counters.refused += len(failed)
        for admitted in failed:
            e = error(reason, f"topic {self.name} could not append the batch: {why}")
            admitted.reply(Refusal(admitted.receipt.frame, e))
        self._settled.tell()

    async def in_flight_now(self) -> None:
        """Returns when all that is in flight now has settled."""
        last = self._admitted_frames
        while self._settled_frames < last:
            await self._settled.wait()

    # -- sessions and snapshots --------------------------------------------------------------------------------

    async def open_sessions(self, names: list[str], epochs: list[int] | None) -> Opened:
        """Starts sessions (`epochs` None), or resumes these. Older sessions are fenced at once.

        Returns when what the names have in flight has settled and their epochs are durable. Raises what
        `Sessions.open` raises, STORE_UNAVAILABLE, or why the topic takes nothing now.
        """
        self.check_serving()
        numbers, given = self._sessions.open(names, epochs)
        await self.in_flight_now()
        # One that is being taken may have the epochs, and may fail: then they are new again.
        await self._snapshotter.finish()
        if self.producers.have_new_epoch(numbers):
            await self.snapshot()
        persisted = [int(self.producers.numbers[number, PERSISTED]) for number in numbers]
        indexes = [
            self.producers.index_of(number, last) if last >= 0 else -1
            for number, last in zip(numbers, persisted, strict=True)
        ]
        return Opened(given, persisted, indexes)

    async def snapshot(self) -> None:
        """Takes a snapshot; returns when it is durable. Raises STORE_UNAVAILABLE: the next one makes up for it."""
        await self._snapshotter.take()
        await self.log.trim(await self.log.may_trim_to(self._snapshotter.next_index))

    async def snapshot_in_background(self) -> None:
        """`snapshot`, with a warning in the log instead of an error."""
        try:
            await self.snapshot()
        except SeqdedupeError as e:
            logger.warning("no snapshot of topic %s: %s", self.name, e)

    @property
    def snapshot_index(self) -> int:
        """What the last durable snapshot covers: all messages below this index."""
        return self._snapshotter.next_index

    # -- reading and the rest ----------------------------------------------------------------------------------

    async def wait_for_message(self, index: int) -> None:
        """Returns when the message with this index can be read, or the topic is closing."""
        while self.confirmed_index <= index and self.state is not State.DRAINING:
            await self._confirmed.wait()

    async def drain(self) -> None:
        """Takes nothing more, settles what is in flight, takes a last snapshot, lets go of the log."""
        was_owner = self.state is not State.RECOVERING
        self._set_state(State.DRAINING, "the sidecar is shutting down")
        await self.in_flight_now()
        if was_owner:
            await self.snapshot_in_background()
        await self.close("the sidecar is shutting down")

    async def delete(self) -> None:
        """`close`, for good: whoever still uses the topic is told that it is not there."""
        self._closed_because = "TOPIC_NOT_FOUND"
        await self.close("it was deleted")

    async def close(self, why: str) -> None:
        """Lets go of the log at once. Frames in flight are answered with OUTCOME_UNKNOWN."""
        self._set_state(State.DRAINING, why)
        self._confirmed.tell()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._snapshotter.close()
        await self.log.close()
        self._fail_in_flight("OUTCOME_UNKNOWN", why)


class _Broadcast:
    """Wakes all that wait, once."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def tell(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future
