"""Owning a topic's log: taking it over, with what it says, following whoever else owns it, and giving it away."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from seqdedupe.core.id_runs import Imported
from seqdedupe.core.producers import Producers
from seqdedupe.errors import DamagedError, InvalidRequestError, SeqdedupeError, UnavailableError, error
from seqdedupe.format.layout import BASE_INDEX, TERM
from seqdedupe.format.records import body_of
from seqdedupe.log.contract import Failure, Log
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.topic import earlier, recovery
from seqdedupe.topic.broadcast import Broadcast
from seqdedupe.topic.flight import Admitted, Changing
from seqdedupe.topic.keeping_away import KeepingAway
from seqdedupe.topic.policy import Applied
from seqdedupe.topic.retry import again_until
from seqdedupe.topic.sessions import RANDOM_BYTES
from seqdedupe.topic.settling import SettlingTopic
from seqdedupe.topic.standby import first_of, until_asked, until_free
from seqdedupe.topic.state import State
from seqdedupe.topic.window_memory import WindowMemory

logger = logging.getLogger("seqdedupe.topic")

SETTLE_SECONDS = 5.0
"""For what is in flight, before another sidecar gets a topic: what has not settled then, that one finds out."""


class OwnedTopic(SettlingTopic):
    """A topic that this process owns, or is to own, while its log is there.

    While another sidecar owns the log, the topic is taken when somebody asks for it; with `is_standby` as soon as
    nobody owns it, and meanwhile it learns all that comes.
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
        imported: Imported | None = None,
        producers: Producers | None = None,
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
            imported=imported,
            producers=producers,
        )
        self.now_seconds = asyncio.get_running_loop().time
        self._is_standby = is_standby
        self._keeping_away = KeepingAway(lambda: self.now_seconds(), random_bytes)
        self._seems_damaged = False
        self._tried = Broadcast()
        """Tells that it was tried to take over the log."""

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

    async def _recover(self, rest_seconds: float = 0.0) -> None:
        self._is_recovering = True
        if rest_seconds:
            await asyncio.sleep(rest_seconds)
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
        if self.terminated is not None:
            self._set_state(State.TERMINATED, self.terminated.message)
            self._tried.tell()
            return True
        self._set_state(State.SERVING, "")
        # What was loaded, or read from the log, counts whether anything comes or not.
        self._window_may_have_grown()
        self.imported.say_if_missing()
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
        try:
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
        except InvalidRequestError as e:
            if e.reason != "TOPIC_TERMINATED":
                raise
            # Nothing lands any more: what is read now is all there is.
            await recovery.replay_from(self.log, self.confirmed_index, self._merge, self.last_ownership).run()
            self._fail_in_flight(e)
            self.terminated = e
            self.next_index = self.confirmed_index
            return True
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
