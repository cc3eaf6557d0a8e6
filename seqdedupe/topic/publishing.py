"""One live topic with a log: admit, append, confirm.

Everything here runs on one event loop and decides in arrival order, so admission order, append order and
confirmation order are one order and nothing needs a lock. Confirming makes messages persisted and readable in one
step, before their receipt is given and before anything is called Dup because of them.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from seqdedupe.core.rule import PERSISTED
from seqdedupe.errors import DamagedError, SeqdedupeError, UnavailableError, error
from seqdedupe.format.columns import BASE_INDEX, ROWS
from seqdedupe.format.records import body_of
from seqdedupe.log.contract import Failure, Log, Outcome
from seqdedupe.message_id import Position
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.topic import admission, recovery
from seqdedupe.topic.admission import NumbersCache
from seqdedupe.topic.answers import Refusal, Reply
from seqdedupe.topic.flight import Admitted, Flight
from seqdedupe.topic.policy import Policy
from seqdedupe.topic.retry import again_until
from seqdedupe.topic.snapshotter import Intervals
from seqdedupe.topic.state import State, TopicBase

logger = logging.getLogger("seqdedupe.topic")


@dataclass(frozen=True, slots=True)
class Opened:
    """What `Open` answers, in the order of the names."""

    epochs: list[int]
    persisted: list[int]
    indexes: list[int]


class Topic(TopicBase):
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
        policy: Policy,
        intervals: Intervals,
        random_bytes: Callable[[int], bytes],
        on_state: Callable[["Topic"], None] = lambda topic: None,
    ) -> None:
        self.log = log
        super().__init__(
            name,
            log.incarnation,
            store,
            snapshots,
            loaded,
            # Without a snapshot everything that is left in the log is read.
            first_index=log.first_index,
            policy=policy,
            intervals=intervals,
            on_state=on_state,
        )
        self.next_index = self.confirmed_index
        self._random_bytes = random_bytes
        self._flight = Flight()
        self.has_room = self._flight.has_room
        self.wait_for_room = self._flight.wait_for_room
        self.in_flight_now = self._flight.all_of_now
        self._is_recovering = False
        self._failed_meanwhile = False
        self._seems_damaged = False
        self._retention: asyncio.Task[None] | None = None

    @property
    def last_position(self) -> Position:
        return self.position_before(self.confirmed_index)

    def position_before(self, index: int) -> Position:
        """The position after which reading begins at this index."""
        if index == 0:
            return Position.start(self.log.incarnation)
        return Position(self.log.incarnation, self.log.message_id(index - 1), index - 1)

    @property
    def readable_index(self) -> int:
        if self.knows_its_end:
            return self.confirmed_index
        return max(self.confirmed_index, self.log.certain_index)

    # -- recovery ----------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Takes over the log and reads what the snapshot does not cover; then the topic serves.

        If that cannot be now, it is tried again beside this, for as long as it takes, and readers find what is
        certain meanwhile. Damage is looked at twice, then the topic is DAMAGED for good.
        """
        self._is_recovering = True
        if not await self._has_recovered():
            self._spawn(again_until(self._has_recovered))

    async def _has_recovered(self) -> bool:
        """Tries once. Whether there is nothing left to try."""
        try:
            if not await self._took_over():
                return False
        except DamagedError as e:
            if self._seems_damaged:
                self._give_up(e)
                return True
            # A disk that fails for a moment can look like damage.
            self._seems_damaged = True
            logger.warning("topic %s seems to be damaged, it will be read once more: %s", self.name, e)
            self._set_state(State.RECOVERING, e.message)
            return False
        except Exception as e:  # noqa: BLE001 (whatever it is: nothing but damage ends recovery)
            self._seems_damaged = False
            self._not_now(e)
            return False
        self._seems_damaged = False
        self._is_recovering = False
        self.knows_its_end = True
        self._set_state(State.SERVING, "")
        return True

    def _not_now(self, e: Exception) -> None:
        """Taking over has failed, and is tried again."""
        if not isinstance(e, SeqdedupeError | OSError):
            logger.error("topic %s could not be recovered", self.name, exc_info=e)
        why = e.message if isinstance(e, SeqdedupeError) else f"{type(e).__name__}: {e}"
        if not isinstance(e, UnavailableError) or e.reason != "LOG_REFUSED":
            self._set_state(State.RECOVERING, f"the log cannot be read now: {why}")
        elif self.state is not State.RECOVERING or not len(self._flight):
            self._set_state(State.READ_ONLY, why)

    def _give_up(self, e: DamagedError) -> None:
        """The log is damaged, and stays so."""
        self.damage = e
        self._is_recovering = False
        self.knows_its_end = False
        self._fail_in_flight("OUTCOME_UNKNOWN", e.message)
        self._set_state(State.DAMAGED, f"{e} {e.hint}")
        self.confirmed.tell()

    async def _took_over(self) -> bool:
        self._failed_meanwhile = False
        owner = await recovery.take_over(
            self.log,
            term=self.term + 1,
            confirmed_index=self.confirmed_index,
            merge=self._merge,
            settle=self._settle,
            random_bytes=self._random_bytes,
            name=self.name,
        )
        # Whatever of the frames in flight the log does not hold by now it never will.
        self._fail_in_flight("LOG_REFUSED", "the append failed")
        self.term = owner.term
        self.sessions.begin_term(owner.term)
        self.next_index = self.confirmed_index = owner.next_index
        self.confirmed.tell()
        # What the log held is known now; but if it failed again meanwhile, it takes nothing yet.
        return not self._failed_meanwhile

    def _merge(self, chunk: bytes, table: recovery.Table, count: int) -> None:
        """Records found in the log; frames in flight that are among them are confirmed and answered."""
        self.producers.replay(chunk, table, count)
        self.confirmed_index = int(table[count - 1, BASE_INDEX] + table[count - 1, ROWS])
        found = []
        for places in table[:count] if len(self._flight) else ():
            oldest = self._flight.oldest
            if oldest is not None and places[ROWS] and oldest.frame.encoded == body_of(chunk, places):
                admitted = self._flight.take()
                # Where it stands, which need not be where it was to stand.
                admitted.receipt = replace(admitted.receipt, first_index=int(places[BASE_INDEX]))
                found.append(admitted)
        self.confirmed.tell()
        for admitted in found:
            self._answer(admitted)

    # -- publishing --------------------------------------------------------------------------------------------

    def admit(self, encoded: bytes, frame: int, reply: Reply, cache: NumbersCache, *, lone: bool = False) -> None:
        """Decides about a frame and hands what is new to the log. `reply` is called once, now or when that settles.

        `lone`: links may be left out, as in a unary call. Nothing is raised: what is wrong is a `Refusal`.
        """
        try:
            self.check_serving()
        except SeqdedupeError as e:
            self.counters.refused += 1
            reply(Refusal(frame, e))
            return
        new, answer = admission.admit(
            encoded,
            frame,
            self.producers,
            cache,
            next_index=self.next_index,
            deduplicate=self.policy.deduplication_enabled,
            lone=lone,
        )
        if isinstance(answer, Refusal):
            self.counters.refused += 1
            reply(answer)
        elif new is None:
            self.counters.count(answer, 0)
            reply(answer)
        else:
            self.log.append(new.encoded, new.rows, new.column_bytes)
            self.next_index += new.rows
            self._flight.add(Admitted(new, answer, reply))

    # -- outcomes ----------------------------------------------------------------------------------------------

    def _settle(self, outcome: Outcome) -> None:
        """The log tells what became of the oldest appends in flight."""
        confirmed = [self._flight.take() for _ in range(outcome.stored)]
        for admitted in confirmed:
            frame = admitted.frame
            self.producers.persist(frame.view, frame.places, frame.slots)
            self.confirmed_index += frame.rows
        if confirmed:
            self.confirmed.tell()
        for admitted in confirmed:
            self._answer(admitted)
        if outcome.failure is not None:
            self._log_failed(outcome.failure, outcome.why)
        self._flight.tell()
        self.snapshotter.stored(len(confirmed))

    def _answer(self, admitted: Admitted) -> None:
        self.counters.count(admitted.receipt, admitted.frame.rows)
        admitted.answer()

    def _log_failed(self, failure: Failure, why: str) -> None:
        self.counters.log_failures += 1
        logger.warning("the log of topic %s failed (%s): %s", self.name, failure.value, why)
        if self._is_recovering:
            # Nothing was handed over since that began, so this says nothing of what is in flight; it tries again.
            self._failed_meanwhile = True
            return
        if failure is Failure.REFUSED:
            self._fail_in_flight("LOG_REFUSED", why)
            self._set_state(State.READ_ONLY, why)
        else:
            self._set_state(State.RECOVERING, f"what became of the last appends is being found out: {why}")
        self._spawn(self.recover())

    def _fail_in_flight(self, reason: str, why: str) -> None:
        """What is in flight is given up: nothing of it counts as pushed any more."""
        failed = [self._flight.take() for _ in range(len(self._flight))]
        self.producers.fail_in_flight()
        self.next_index = self.confirmed_index
        self.counters.refused += len(failed)
        for admitted in failed:
            e = error(reason, f"topic {self.name} could not append the batch: {why}")
            admitted.reply(Refusal(admitted.receipt.frame, e))
        self._flight.tell()

    # -- sessions and snapshots --------------------------------------------------------------------------------

    async def open_sessions(self, names: list[str], epochs: list[int] | None) -> Opened:
        """Starts sessions (`epochs` None), or resumes these. Older sessions are fenced at once.

        Returns when what the names have in flight has settled and their epochs are durable. Raises what
        `Sessions.open` raises, STORE_UNAVAILABLE, or why the topic takes nothing now.
        """
        self.check_serving()
        numbers, given = self.sessions.open(names, epochs)
        await self.in_flight_now()
        # One that is being taken may have the epochs, and may fail: then they are new again.
        await self.snapshotter.finish()
        if self.producers.have_new_epoch(numbers):
            await self.snapshot()
        persisted = [int(self.producers.numbers[number, PERSISTED]) for number in numbers]
        indexes = [
            self.producers.index_of(number, last) if last >= 0 else -1
            for number, last in zip(numbers, persisted, strict=True)
        ]
        return Opened(given, persisted, indexes)

    def _snapshot_is_durable(self, next_index: int) -> None:
        if self._retention is None or self._retention.done():
            self._retention = self._spawn(self._trim())

    async def _trim(self) -> None:
        """Retention drops what it may; what is covered after this has begun waits for the next snapshot."""
        try:
            await self.log.trim(await self.log.may_trim_to(self.snapshot_index))
        except SeqdedupeError as e:
            logger.warning("topic %s: retention has stopped: %s", self.name, e)

    # -- the end -----------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Takes nothing more, settles what is in flight, takes a last snapshot, lets go of the log."""
        self._set_state(State.DRAINING, "the sidecar is shutting down")
        await self.in_flight_now()
        if self.knows_its_end:
            await self.snapshot_in_background()
        await self.close("the sidecar is shutting down")

    async def delete(self) -> None:
        """`close`, for good: whoever still uses the topic is told that it is not there."""
        self._closed_because = "TOPIC_NOT_FOUND"
        await self.close("it was deleted")

    async def close(self, why: str) -> None:
        """Lets go of the log at once. Frames in flight are answered with OUTCOME_UNKNOWN."""
        self._set_state(State.DRAINING, why)
        await self._end_tasks()
        await self.log.close()
        self._fail_in_flight("OUTCOME_UNKNOWN", why)
