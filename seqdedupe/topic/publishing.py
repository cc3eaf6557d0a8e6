"""One live topic with a log: admit, append, confirm.

Everything here runs on one event loop and decides in arrival order, so admission order, append order and
confirmation order are one order and nothing needs a lock. Confirming makes messages persisted and readable in one
step, before their receipt is given and before anything is called Dup because of them.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from seqdedupe.errors import DamagedError, SeqdedupeError, UnavailableError, error
from seqdedupe.format.columns import BASE_INDEX, TERM
from seqdedupe.format.records import body_of
from seqdedupe.log.contract import Failure, Log, Outcome, Runs, last_of
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.topic import admission, by_id, earlier, recovery, trimming
from seqdedupe.topic.answers import OutOfStepError, Receipt, Refusal, Reply
from seqdedupe.topic.broadcast import Broadcast
from seqdedupe.topic.flight import Admitted, Changing
from seqdedupe.topic.frame import Frame, NumbersCache
from seqdedupe.topic.keeping_away import KeepingAway
from seqdedupe.topic.logged import LoggedTopic
from seqdedupe.topic.policy import Applied, Policy, Route
from seqdedupe.topic.retry import again_until
from seqdedupe.topic.sessions import RANDOM_BYTES
from seqdedupe.topic.standby import first_of, until_asked, until_free
from seqdedupe.topic.state import State
from seqdedupe.topic.window_memory import WindowMemory
from seqdedupe.topic.window_runs import LookedUp

logger = logging.getLogger("seqdedupe.topic")

SETTLE_SECONDS = 5.0
"""For what is in flight, before another sidecar gets a topic: what has not settled then, that one finds out."""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Topic(LoggedTopic):
    """A topic of this process. It takes messages once `recover` has returned.

    `on_state` is told each change of state, with one line why. While another sidecar owns the log, the topic is taken
    when somebody asks for it; with `is_standby` as soon as nobody owns it, and meanwhile it learns all that comes.
    `window_memory` is shared by topics of deduplication IDs; without it their windows stay in memory.
    """

    def __init__(
        self,
        name: str,
        log: Log,
        store: Store,
        snapshots: Snapshots,
        loaded: Loaded | None,
        *,
        applied: Applied,
        random_bytes: Callable[[int], bytes],
        on_state: Callable[[Any], None] = lambda topic: None,
        is_standby: bool = False,
        window_memory: WindowMemory | None = None,
    ) -> None:
        super().__init__(
            name,
            log,
            store,
            snapshots,
            loaded,
            applied=applied,
            random_bytes=random_bytes,
            on_state=on_state,
            window_memory=window_memory,
        )
        self.next_index = self.confirmed_index
        log.flush_every(self.applied.flush_interval)
        self.now_seconds = asyncio.get_running_loop().time
        self.now_ms = _now_ms
        """When messages of a topic of deduplication IDs are published."""
        self._is_standby = is_standby
        self._keeping_away = KeepingAway(lambda: self.now_seconds(), random_bytes)
        self._is_recovering = False
        self._failed_meanwhile = False
        self._seems_damaged = False
        self._own_ownership = 0
        """Of what is appended now."""
        self._opening = 0
        """The outcomes of earlier openings of the log are not heard any more."""
        self._trimming: asyncio.Task[None] | None = None
        self._tried = Broadcast()
        """Tells that it was tried to take over the log."""

    # -- recovery ----------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Takes over the log and reads what the snapshot does not cover; then the topic serves.

        If that cannot be now, it is tried again beside this, for as long as it takes, and readers find what is
        certain meanwhile. Where another sidecar owns the log it is not tried soon after this one was shut out. Damage
        is looked at twice, then the topic is DAMAGED for good.
        """
        if not self._is_recovering and not self.knows_its_end:
            self._is_recovering = True
            # In a task of the topic's own, which ends when the topic is closed meanwhile.
            await asyncio.wait({self._spawn(self._recover())})

    async def _recover(self) -> None:
        self._is_recovering = True
        if not await self._has_recovered():
            self._spawn(again_until(self._has_recovered, self._pause))

    async def _pause(self, delay_seconds: float) -> None:
        """Before it is tried again."""
        self._tried.tell()
        if self.state is State.STANDBY:
            until = until_free if self._is_standby else until_asked
            await first_of(self.wanted.wait(), until(self, self._follow, self._keeping_away))
            self.wanted.clear()
        else:
            await asyncio.sleep(delay_seconds)

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
            if isinstance(e, UnavailableError) and e.reason == "NOT_OWNER":
                # What was in flight may be in its log, and is the other one's to say.
                self._keeping_away.found_owned()
                self._step_back(e)
            else:
                self._not_now(e)
            return False
        self._seems_damaged = False
        self._keeping_away.serves()
        # Else it would be taken back at once when it is given up.
        self.wanted.clear()
        self._is_recovering = False
        self.knows_its_end = True
        self._set_state(State.SERVING, "")
        # What was loaded, or read from the log, counts whether anything comes or not.
        self._window_may_have_grown()
        self._tried.tell()
        earlier.state(self)
        return True

    def _not_now(self, e: Exception) -> None:
        """Taking over has failed, and is tried again."""
        if not isinstance(e, SeqdedupeError | OSError):
            logger.error("topic %s could not be recovered", self.name, exc_info=e)
        why = e.message if isinstance(e, SeqdedupeError) else f"{type(e).__name__}: {e}"
        if not isinstance(e, UnavailableError) or e.reason != "LOG_REFUSED":
            self._set_state(State.RECOVERING, f"the log cannot be read now: {why}")
        elif self.state is not State.RECOVERING or not len(self.flight):
            self._set_state(State.READ_ONLY, why)

    def _step_back(self, e: SeqdedupeError) -> None:
        """Another sidecar owns the log."""
        self.owner_address = e.numbers.get("owner_address", "")
        self.knows_its_end = False
        # A frame may be sent again there. A change may not be made again by whoever takes this for "nothing was done".
        what = f"somebody else owns topic {self.name}, and knows there whether it is in force"
        self._fail_in_flight(
            self.not_owner(": what became of what was in flight is known there"),
            of_changes=error("OUTCOME_UNKNOWN", what),
        )
        self._set_state(State.STANDBY, e.message)
        for end in list(self._streams.values()):
            end(self.not_owner(""))

    async def hand_over(self, to: str, away_seconds: float) -> None:
        """Lets the sidecar at this address (empty: whichever) have the topic, and keeps away from it for so long.

        Nothing is taken while what is in flight settles, for SETTLE_SECONDS at most; a snapshot was taken before.
        Raises why the topic does not serve: then this sidecar has it as before. Whatever `Log.let_go` raises: then it
        takes it again.
        """
        self.check_serving()
        await self.snapshot_in_background()
        self.check_serving()
        moving = error("RECOVERING", f"topic {self.name} is being moved to another sidecar")
        self.hold(moving)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.all_settled(), SETTLE_SECONDS)
            if self.state is not State.SERVING:
                self.check_serving()
            self._is_recovering = True
            try:
                await self.log.let_go()
            except BaseException:
                # Some of it may be let go of. What is in flight settles as after any append that failed.
                self._is_recovering = False
                self._log_failed(Failure.UNKNOWN, "the log could not be let go of")
                raise
        finally:
            if self._held is moving:
                self.release()
        self._keeping_away.gave_up(away_seconds)
        self.owner_address = to
        self._step_back(self.not_owner(": it was moved there"))
        if self.state is State.STANDBY:
            self._spawn(again_until(self._has_recovered, self._pause))

    async def take(self) -> None:
        """Tries at once to take a topic that nobody owns. Raises NOT_OWNER if somebody does, and why it is not ours."""
        if self.state in (State.STANDBY, State.RECOVERING):
            self.wanted.set()
            await self._tried.wait()
        self.check_serving()

    def _give_up(self, e: DamagedError) -> None:
        """The log is damaged, and stays so."""
        self.damage = e
        self._is_recovering = False
        self.knows_its_end = False
        self._tried.tell()
        self._fail_in_flight(self._not_appended("OUTCOME_UNKNOWN", e.message))
        self._set_state(State.DAMAGED, f"{e} {e.hint}")
        self.confirmed.tell()

    async def _took_over(self) -> bool:
        self._failed_meanwhile = False
        self._opening += 1
        opening = self._opening
        began = self.now_seconds()
        owner = await recovery.take_over(
            self.log,
            term=self.term + 1,
            confirmed_index=self.confirmed_index,
            last_ownership=self.last_ownership,
            merge=self._merge,
            settle=lambda outcome: self._settle(outcome) if opening == self._opening else None,
            random_bytes=self._random_bytes,
            known_term=lambda: self._known_term,
            name=self.name,
        )
        # Whatever of the frames in flight the log does not hold by now it never will.
        self._fail_in_flight(self._not_appended("LOG_REFUSED", "the append failed"))
        self.term = owner.term
        self._own_ownership = owner.ownership
        self.sessions.begin_term(owner.term, self._random_bytes(RANDOM_BYTES))
        self.next_index = self.confirmed_index = owner.next_index
        self.confirmed.tell()
        self.counters.recoveries += 1
        self.counters.replayed += owner.replayed
        self.counters.recovery_seconds += self.now_seconds() - began
        # What the log held is known now; but if it failed again meanwhile, it takes nothing yet.
        return not self._failed_meanwhile

    def _merge(self, chunk: bytes, table: recovery.Table, count: int, runs_of: recovery.RunsOf) -> None:
        """Records found in the log are merged; what is in flight and among them is confirmed and answered."""
        # Before anything counts: what fails is done again as a whole.
        found = self._found(chunk, table[:count], runs_of)
        self._learn(chunk, table, count, runs_of)
        for _ in found:
            self.flight.take()
        self.confirmed.tell()
        for item in found:
            self._answer(item)

    def _found(self, chunk: bytes, table: recovery.Table, runs_of: recovery.RunsOf) -> list[Admitted | Changing]:
        """Those in flight that are among these records."""
        found: list[Admitted | Changing] = []
        waiting = iter(self.flight)
        oldest = next(waiting, None)
        for k, places in enumerate(table if oldest is not None else ()):
            if oldest is None or places[TERM] or oldest.body != body_of(chunk, places):
                continue
            if isinstance(oldest, Admitted):
                # Where it stands, which need not be where it was to stand.
                oldest.receipt.stands_at(int(places[BASE_INDEX]))
                oldest.receipt.runs = runs_of(k)
            found.append(oldest)
            oldest = next(waiting, None)
        return found

    def _follow(self, chunk: bytes, table: recovery.Table, count: int, runs_of: recovery.RunsOf) -> None:
        """Records that the log's owner has appended are merged."""
        self._merge(chunk, table, count, runs_of)
        self._known_term = max(self._known_term, int(table[:count, TERM].max()))
        self.snapshotter.stored(count)

    # -- publishing --------------------------------------------------------------------------------------------

    def admit(
        self,
        encoded: bytes,
        frame: int,
        reply: Reply,
        cache: NumbersCache,
        *,
        lone: bool = False,
        when_durable: Callable[[], None] | None = None,
        looked_up: LookedUp | None = None,
    ) -> None:
        """Decides about a frame and hands what is new to the log. `reply` is called once, now or when that settles.

        With `when_durable` the receipt may be given before that, when it is written, where the policy is so. It says
        so, and this is called when it is durable. Should the log lose it, the streams are ended.
        `lone`: links may be left out, as in a unary call. `looked_up` is what `look_up` has just answered; without it
        everybody may have to wait for a disk. Nothing is raised: what is wrong is a `Refusal`.
        """
        try:
            self.check_serving()
        except SeqdedupeError as e:
            self.counters.refused += 1
            reply(Refusal(frame, e))
            return
        try:
            new, answer = self._decided(encoded, frame, cache, lone, looked_up)
        except OutOfStepError as e:
            self.counters.refused += 1
            reply(Refusal(frame, self._out_of_step(e.__cause__)))
            return
        if isinstance(answer, Refusal):
            self.counters.refused += 1
            reply(answer)
        elif new is None:
            self.counters.count(answer, 0)
            reply(answer)
        else:
            self._hand_over(Admitted(new, answer, reply, self.now_seconds(), when_durable))
            if when_durable is None and not self.applied.flush_interval.is_every_commit:
                # Somebody waits who takes nothing less.
                self.log.flush()

    def _decided(
        self, encoded: bytes, number: int, cache: NumbersCache, lone: bool, looked_up: LookedUp | None
    ) -> tuple[Frame | None, Receipt | Refusal]:
        """By sequence IDs or by deduplication IDs."""
        check_log = self.log.check
        if self.window is not None:
            return by_id.admit(
                encoded,
                number,
                self.window,
                applied=self.applied,
                wants_keys=self.policy.route is Route.KEY,
                now_ms=self.now_ms(),
                check_log=check_log,
                older=lambda frame: self.window_runs.older(frame, looked_up),
            )
        return admission.admit(
            encoded,
            number,
            self.producers,
            cache,
            next_index=self.next_index,
            applied=self.applied,
            lone=lone,
            check_log=check_log,
        )

    def _hand_over(self, item: Admitted) -> None:
        """Hands to the log what was decided."""
        try:
            # First, or the log might have what nobody here knows of.
            self.flight.add(item)
        except MemoryError as e:
            item.reply(Refusal(item.receipt.frame, self._out_of_step(e)))
            return
        frame = item.frame
        try:
            self.log.append(frame.encoded, frame.rows, frame.column_bytes)
        except Exception as e:  # noqa: BLE001 (whatever it is: whether the log has it is found out)
            self._out_of_step(e)
        self.next_index += frame.rows

    def _hand_over_change(self, item: Changing) -> None:
        self.flight.add(item)
        try:
            self.log.append_control(item.body)
        except Exception as e:  # noqa: BLE001 (as of a frame)
            self._out_of_step(e)

    def _out_of_step(self, e: BaseException | None) -> SeqdedupeError:
        """What counts as in flight may not be what the log was handed: that is found out, as an unknown outcome is.

        Else IDs would be in flight for ever. Returns why nothing is taken meanwhile.
        """
        # Its outcomes would be taken for those of others.
        self._opening += 1
        logger.error("topic %s and its log are out of step", self.name, exc_info=e)
        self._log_failed(Failure.UNKNOWN, f"{type(e).__name__} in the sidecar")
        return error("RECOVERING", f"topic {self.name} takes no messages now: {self.why}")

    # -- outcomes ----------------------------------------------------------------------------------------------

    def _settle(self, outcome: Outcome) -> None:
        """The log tells what became of the oldest appends in flight."""
        confirmed: list[Admitted | Changing] = []
        failed: Exception | None = None
        last: Runs = ()
        try:
            for item, runs in zip(self.flight, outcome.runs, strict=False):
                self._confirm(item, runs)
                confirmed.append(item)
                last = runs or last
        except Exception as e:  # noqa: BLE001 (whatever it is: the log has those behind it all the same)
            failed = e
        for _ in confirmed:
            self.flight.take()
        if last:
            self.last_ownership = self._own_ownership
            self.last_message_id = last_of(last)
            self.confirmed.tell()
        for item in confirmed:
            self._answer(item)
        if failed is not None:
            self._out_of_step(failed)
            self.flight.tell()
            return
        if outcome.written:
            self._answer_early(outcome.written)
        if outcome.failure is not None:
            self._log_failed(outcome.failure, outcome.why)
        self.flight.tell()
        self.snapshotter.stored(len(confirmed))

    def _confirm(self, item: Admitted | Changing, runs: Runs) -> None:
        """It is in the log."""
        if isinstance(item, Changing):
            self._apply(item.change, self.confirmed_index)
            return
        item.receipt.runs = runs
        frame = item.frame
        if self.window is None:
            self.producers.persist(frame.view, frame.places, frame.producer_rows)
        else:
            self.window.confirm(frame.rows)
        self.confirmed_index += frame.rows

    def _log_failed(self, failure: Failure, why: str) -> None:
        self.counters.log_failures += 1
        logger.warning("the log of topic %s failed (%s): %s", self.name, failure.value, why)
        if self._is_recovering:
            # Nothing was handed over since that began, so this says nothing of what is in flight; it tries again.
            self._failed_meanwhile = True
            return
        if failure is Failure.REFUSED:
            self._fail_in_flight(self._not_appended("LOG_REFUSED", why))
            self._set_state(State.READ_ONLY, why)
        else:
            self._set_state(State.RECOVERING, f"what became of the last appends is being found out: {why}")
        self._spawn(self._recover())

    def _not_appended(self, reason: str, why: str) -> SeqdedupeError:
        return error(reason, f"topic {self.name} could not write it to its log: {why}")

    def _fail_in_flight(self, e: SeqdedupeError, *, of_changes: SeqdedupeError | None = None) -> None:
        """What is in flight is given up: nothing of it counts as pushed any more."""
        failed = [self.flight.take() for _ in range(len(self.flight))]
        self.producers.fail_in_flight()
        if self.window is not None:
            self.window.fail()
        self.next_index = self.confirmed_index
        for item in failed:
            if isinstance(item, Changing):
                item.settled(of_changes or e)
                continue
            self.counters.refused += 1
            if not item.is_told:
                item.reply(Refusal(item.receipt.frame, e))
        if any(isinstance(item, Admitted) and item.is_told for item in failed):
            # Whoever was told that it is written learns by a resume that it is not.
            for end in list(self._streams.values()):
                end(e)
        self.flight.tell()

    # -- policy and retention -----------------------------------------------------------------------------------

    def _put_in_force(self, policy: Policy) -> None:
        before = self.applied.retention
        super()._put_in_force(policy)
        self.log.flush_every(self.applied.flush_interval)
        if self.knows_its_end and self.applied.retention != before:
            self._snapshot_is_durable()

    def _snapshot_is_durable(self) -> None:
        if self.state is not State.DRAINING and (self._trimming is None or self._trimming.done()):
            self._trimming = self._spawn(trimming.trim(self))

    # -- the end -----------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Takes nothing more, settles what is in flight, takes a last snapshot, lets go of the log."""
        self._set_state(State.DRAINING, "the sidecar is shutting down")
        await self.all_settled()
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
        self._fail_in_flight(self._not_appended("OUTCOME_UNKNOWN", why))
