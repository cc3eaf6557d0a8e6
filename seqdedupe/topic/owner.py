"""Who owns a topic's log: it is taken over with what it says, followed while another sidecar owns it, and given away.

Begin with `Owner`; what becomes of messages is the topic's. To take over a log is to open it for writing, to mark it,
and to read up to one's own marker. Only then may anybody decide. At start the reading begins at the snapshot's
position; after an append with an unknown outcome, at the last confirmed message. Both are this procedure. `Replay`
reads.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import DURABLE_EPOCH, PERSISTED
from seqdedupe.errors import DamagedError, InvalidRequestError, SeqdedupeError, UnavailableError, error
from seqdedupe.format.columns import BASE_INDEX, ROWS, TERM
from seqdedupe.format.headers import TOKEN_BYTES, ownership_of
from seqdedupe.format.records import marker_token, ownership
from seqdedupe.limits import NO_EPOCH, NO_SEQUENCE_ID
from seqdedupe.log.contract import Entries, Failure, Log, Outcome, Runs
from seqdedupe.names import producer_name
from seqdedupe.tasks import Broadcast, again_until, retrieve
from seqdedupe.topic.base import State, TopicCounters
from seqdedupe.topic.control import STATED_A_RECORD, Change, Import
from seqdedupe.topic.frame import Flight
from seqdedupe.topic.keeper import Keeper
from seqdedupe.topic.sessions import RANDOM_BYTES, Sessions

logger = logging.getLogger("seqdedupe.topic")
recovery_logger = logging.getLogger("seqdedupe.topic.recovery")

SETTLE_SECONDS = 5.0
"""For what is in flight, before another sidecar gets a topic: what has not settled then, that one finds out."""

FIRST_REST_SECONDS = 0.25
LONGEST_REST_SECONDS = 4.0

TRY_AGAIN_SECONDS = 1.0
CATCH_UP_SECONDS = 300.0
"""What a sidecar does not know keeps the log's beginning from going: its snapshots say from where it needs the log."""


# -- Reading a log, to merge what is in it.

MAX_TERM = 2**31 - 1

Table = npt.NDArray[np.int64]
RunsOf = Callable[[int], Runs]
Merge = Callable[[bytes, Table, int, RunsOf], None]
"""Is given a chunk, the table of its scanned records, how many there are, and the message IDs of each one's rows.

Markers and control records have ROWS 0.
"""


def damaged(log: Log, why: str, index: int) -> SeqdedupeError:
    return error("LOG_DAMAGED", f"the log {log.place} cannot be replayed at index {index}: {why}", index=index)


class Replay:
    """Reads a log forward and hands its entries on to be merged."""

    def __init__(self, log: Log, next_index: int, merge: Merge, skip_below: int, last_ownership: int) -> None:
        self._log = log
        self.next_index = next_index
        self._merge = merge
        self._skip_below = skip_below
        self._last_ownership = last_ownership
        self.rows = 0
        self.tokens: dict[bytes, int] = {}

    async def run(self) -> None:
        """Reads up to the end there is; the next time, what has come since."""
        async for entries in self._log.replay(self.next_index):
            self._entries(entries)

    def _entries(self, entries: Entries) -> None:
        chunk, table = entries.raw, entries.table
        for k in np.flatnonzero(table[:, TERM] > 0):
            self.tokens[marker_token(chunk, table[k])] = int(table[k, TERM])
        self.next_index = entries.next_index
        self._check_history(table)
        # A batch that is known already must not enter the ring twice, nor may a reset before it come after it. Of
        # control records after the last message that is known it is not known which ones are; all of them once more
        # come to the same.
        ends = table[:, BASE_INDEX] + table[:, ROWS]
        new = np.flatnonzero(np.where(table[:, ROWS] == 0, ends >= self._skip_below, ends > self._skip_below))
        if len(new):
            some = table if len(new) == len(table) else table[new]
            self._merge(chunk, some, len(new), lambda k: entries.runs[int(new[k])])
        self.rows += int(table[new, ROWS].sum())

    def _check_history(self, table: Table) -> None:
        """The last message that is known must be the one that stands in the log."""
        last = self._skip_below - 1
        for places in table[(table[:, BASE_INDEX] <= last) & (last < table[:, BASE_INDEX] + table[:, ROWS])]:
            if self._last_ownership not in (0, ownership(places)):
                why = f"the message there was written under {ownership(places):016x}, the one that is known under "
                why += f"{self._last_ownership:016x}: this log has another history than the snapshot"
                raise damaged(self._log, why, last)


def replay_from(log: Log, confirmed_index: int, merge: Merge, last_ownership: int) -> Replay:
    """A replay of what stands in the log from this index on, and of the message before it, which must be there.

    Raises LOG_DAMAGED if it is gone already.
    """
    if confirmed_index < log.first_index:
        raise damaged(log, f"it begins with index {log.first_index}, what is between is gone", confirmed_index)
    next_index = max(confirmed_index - 1, log.first_index)
    return Replay(log, next_index, merge, skip_below=confirmed_index, last_ownership=last_ownership)


# -- Whose the log is.


class Owned(Protocol):
    """What an owner asks of its topic; `topic.Topic` and `base.TopicBase` say what each means."""

    name: str
    log: Log
    flight: Flight
    producers: Producers
    sessions: Sessions
    counters: TopicCounters
    keeper: Keeper
    state: State
    why: str
    knows_its_end: bool
    owner_address: str
    damage: SeqdedupeError | None
    terminated: SeqdedupeError | None
    asked: Broadcast
    confirmed: Broadcast
    term: int
    known_term: int
    ownership: int
    confirmed_index: int
    next_index: int
    opening: int
    last_ownership: int
    now_seconds: Callable[[], float]

    def change_state(self, state: State, why: str) -> None: ...

    def check_serving(self) -> None: ...

    def not_owner(self, what: str) -> SeqdedupeError: ...

    def hold(self, why: SeqdedupeError) -> None: ...

    def release(self, why: SeqdedupeError | None = None) -> None: ...

    def merge(self, chunk: bytes, table: Table, count: int, runs_of: RunsOf) -> None: ...

    def settle(self, opening: int, outcome: Outcome) -> None: ...

    def fail_in_flight(self, e: SeqdedupeError, *, of_changes: SeqdedupeError | None = None) -> None: ...

    def not_appended(self, reason: str, why: str) -> SeqdedupeError: ...

    def end_streams(self, why: SeqdedupeError) -> None: ...

    def begins_to_serve(self) -> None: ...

    def append_change(self, change: Change) -> "asyncio.Future[None]": ...

    async def all_settled(self) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]": ...


class Owner:
    """Whether this process owns the log of a topic; its state is `base.TopicBase`'s, which draws it.

    While another sidecar owns the log, the topic is taken when somebody asks for it; with `is_standby` as soon as
    nobody owns it, and meanwhile it learns all that comes.

    1. A log is *taken over* (`_took_over`): opened, marked, and read up to the marker. If that cannot be now it is
       tried again (`_pause`).
    2. While it is owned, what cannot be appended ends that (`log_failed`): it is taken over anew, and what is in
       flight is found out.
    3. It is *given away*: to another sidecar that took it, or that shall have it (`hand_over`).
    """

    def __init__(
        self,
        topic: Owned,
        random_bytes: Callable[[int], bytes],
        *,
        is_standby: bool,
    ) -> None:
        self.wanted = asyncio.Event()
        """This sidecar is to try to take the topic now, if it has it not."""
        self._topic = topic
        self._random_bytes = random_bytes
        self._is_standby = is_standby
        self._keeping_away = KeepingAway(lambda: topic.now_seconds(), random_bytes)
        self._tried = Broadcast()
        """Tells that it was tried to take over the log."""
        self._is_recovering = False
        """Whether it is being taken over, or tried again."""
        self._failed_meanwhile = False
        self._seems_damaged = False
        self._merged = 0
        """Records that were found in the log since it was last owned: they count towards the next snapshot then."""
        self._rest_seconds = 0.0
        """Before a log that has refused is opened again: more each time that it takes no message in between."""
        self._refused_index = 0
        """Where the topic ended then."""

    # -- 1. taking over ----------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Takes over the log and reads what the snapshot does not cover; then the topic serves.

        If that cannot be now, it is tried again beside this, for as long as it takes, and readers find what is
        certain meanwhile. Where another sidecar owns the log it is not tried soon after this one was shut out. Damage
        is looked at twice, then the topic is DAMAGED for good.
        """
        if not self._is_recovering and not self._topic.knows_its_end:
            self._is_recovering = True
            # In a task of the topic's own, which ends when the topic is closed meanwhile.
            await asyncio.wait({self._topic.spawn(self._recover())})

    async def _recover(self, rest_seconds: float = 0.0) -> None:
        self._is_recovering = True
        if rest_seconds:
            await asyncio.sleep(rest_seconds)
        if not await self._has_recovered():
            self._topic.spawn(again_until(self._has_recovered, self._pause))

    async def _pause(self, delay_seconds: float) -> None:
        """Before it is tried again."""
        self._tried.tell()
        if self._topic.state is State.STANDBY:
            until = self._until_free if self._is_standby else self._until_asked
            await _first_of(self.wanted.wait(), until())
            self.wanted.clear()
        else:
            await asyncio.sleep(delay_seconds)

    async def _has_recovered(self) -> bool:
        """Tries once. Whether there is nothing left to try."""
        topic = self._topic
        try:
            took_over = await self._took_over()
            self._seems_damaged = False
            if not took_over:
                return False
        except DamagedError as e:
            if self._seems_damaged:
                self._give_up(e)
                return True
            # A disk that fails for a moment can look like damage.
            self._seems_damaged = True
            logger.warning("topic %s seems to be damaged, it will be read once more: %s", topic.name, e)
            topic.change_state(State.RECOVERING, e.message)
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
        self._keeping_away.serves()
        # Else it would be taken back at once when it is given up.
        self.wanted.clear()
        self._is_recovering = False
        topic.knows_its_end = True
        merged, self._merged = self._merged, 0
        topic.keeper.snapshotter.stored(merged)
        if topic.terminated is not None:
            topic.change_state(State.TERMINATED, topic.terminated.message)
            self._tried.tell()
            return True
        topic.change_state(State.SERVING, "")
        topic.begins_to_serve()
        self._tried.tell()
        state_earlier(topic)
        return True

    async def _took_over(self) -> bool:
        """Makes this process the owner of the log, with what is in it; whether the log takes messages then."""
        topic = self._topic
        self._failed_meanwhile = False
        topic.opening += 1
        began = topic.now_seconds()
        replay = replay_from(topic.log, topic.confirmed_index, self._merge, topic.last_ownership)
        try:
            term, token = await self._marked(replay)
        except InvalidRequestError as e:
            if e.reason != "TOPIC_TERMINATED":
                raise
            # Nothing lands any more: what is read now is all there is.
            await replay_from(topic.log, topic.confirmed_index, self._merge, topic.last_ownership).run()
            topic.fail_in_flight(e)
            topic.terminated = e
            topic.next_index = topic.confirmed_index
            return True
        # Whatever of the frames in flight the log does not hold by now it never will.
        topic.fail_in_flight(topic.not_appended("LOG_REFUSED", "the append failed"))
        topic.term = term
        topic.ownership = ownership_of(token)
        topic.sessions.begin_term(term, self._random_bytes(RANDOM_BYTES))
        topic.next_index = topic.confirmed_index = replay.next_index
        topic.confirmed.tell()
        topic.counters.recoveries += 1
        topic.counters.replayed += replay.rows
        topic.counters.recovery_seconds += topic.now_seconds() - began
        # What the log held is known now; but if it failed again meanwhile, it takes nothing yet.
        return not self._failed_meanwhile

    async def _marked(self, replay: Replay) -> tuple[int, bytes]:
        """Opens the log for writing, and merges what is in it up to a marker of this process's own: that one's term,
        which is above all known, and its token.

        Where the log holds a marker of a term that is not lower, or what was merged names one, another marker is
        written with a higher term. If the topic has confirmed messages, the record of the last one must be there: if it
        is not, the end of the log is gone, which is LOG_DAMAGED; so is a record that was not written under the topic's
        `last_ownership` (0: not known). Raises `UnavailableError` (LOG_REFUSED) if the log cannot be written.
        """
        topic, log = self._topic, self._topic.log
        term, confirmed_index = topic.term + 1, topic.confirmed_index
        settle = partial(topic.settle, topic.opening)
        if log.replays_what_is_certain:
            # However much it is, the marker stands near the end then, and nothing is read twice.
            await replay.run()
        while True:
            if term > MAX_TERM:
                raise error("INTERNAL", f"the topic {topic.name} has had {MAX_TERM} owners: that is the last term")
            token = self._random_bytes(TOKEN_BYTES)
            standing_term = await log.open_for_writing(term, token, settle)
            await replay.run()
            if replay.next_index < confirmed_index:
                raise error(
                    "LOG_DAMAGED",
                    f"the log of {topic.name} ends before index {replay.next_index}, but a snapshot covers it up to "
                    f"{confirmed_index}: its end is gone",
                    index=replay.next_index,
                    covered_index=confirmed_index,
                )
            if token not in replay.tokens and not standing_term:
                raise damaged(log, "the marker that was just written is not in it", replay.next_index)
            others = max((t for other, t in replay.tokens.items() if other != token), default=0)
            highest = max(others, topic.known_term, standing_term)
            if highest < term:
                recovery_logger.info(
                    "recovered topic %s in term %d: %d messages read, up to index %d",
                    topic.name,
                    term,
                    replay.rows,
                    replay.next_index,
                )
                return term, token
            term = highest + 1

    def _merge(self, chunk: bytes, table: Table, count: int, runs_of: RunsOf) -> None:
        """Records that stand in the log that is taken over are merged."""
        self._topic.merge(chunk, table, count, runs_of)
        self._merged += count

    def _not_now(self, e: Exception) -> None:
        """Taking over has failed, and is tried again."""
        topic = self._topic
        if not isinstance(e, SeqdedupeError | OSError):
            logger.error("topic %s could not be recovered", topic.name, exc_info=e)
        why = e.message if isinstance(e, SeqdedupeError) else f"{type(e).__name__}: {e}"
        if not isinstance(e, UnavailableError) or e.reason != "LOG_REFUSED":
            topic.change_state(State.RECOVERING, f"the log cannot be read now: {why}")
        elif topic.state is not State.RECOVERING or not len(topic.flight):
            topic.change_state(State.READ_ONLY, why)

    def _give_up(self, e: DamagedError) -> None:
        """The log is damaged, and stays so."""
        topic = self._topic
        topic.damage = e
        self._is_recovering = False
        topic.knows_its_end = False
        self._tried.tell()
        topic.fail_in_flight(topic.not_appended("OUTCOME_UNKNOWN", e.message))
        topic.change_state(State.DAMAGED, f"{e} {e.hint}")
        topic.confirmed.tell()

    # -- 2. while it is owned ----------------------------------------------------------------------------------

    def log_failed(self, failure: Failure, why: str) -> None:
        """What was handed to the log has failed, or nobody knows: it is taken over anew."""
        topic = self._topic
        topic.counters.log_failures += 1
        logger.warning("the log of topic %s failed (%s): %s", topic.name, failure.value, why)
        if self._is_recovering:
            # Nothing was handed over since that began, so this says nothing of what is in flight; it tries again.
            self._failed_meanwhile = True
            return
        if failure is Failure.REFUSED:
            topic.fail_in_flight(topic.not_appended("LOG_REFUSED", why))
            topic.change_state(State.READ_ONLY, why)
            # A full disk often has room for what opening the log writes: it would serve, and refuse, again and again.
            if topic.confirmed_index > self._refused_index:
                self._rest_seconds, self._refused_index = 0.0, topic.confirmed_index
            topic.spawn(self._recover(self._rest_seconds))
            self._rest_seconds = min(max(2 * self._rest_seconds, FIRST_REST_SECONDS), LONGEST_REST_SECONDS)
            return
        topic.change_state(State.RECOVERING, f"what became of the last appends is being found out: {why}")
        topic.spawn(self._recover())

    def out_of_step(self, e: BaseException | None) -> SeqdedupeError:
        """What counts as in flight may not be what the log was handed: that is found out, as an unknown outcome is.

        Else IDs would be in flight for ever. Returns why nothing is taken meanwhile.
        """
        topic = self._topic
        # Its outcomes would be taken for those of others.
        topic.opening += 1
        logger.error("topic %s and its log are out of step", topic.name, exc_info=e)
        self.log_failed(Failure.UNKNOWN, f"{type(e).__name__} in the sidecar")
        return error("RECOVERING", f"topic {topic.name} takes no messages now: {topic.why}")

    def begin_another_term(self) -> None:
        """This term has no epoch left for new sessions: another one begins, and what is in flight is found out before.
        Raises RECOVERING."""
        topic = self._topic
        topic.change_state(State.RECOVERING, f"it was opened as often as it can be in term {topic.term}")
        topic.spawn(self._recover())
        topic.check_serving()

    # -- 3. while another sidecar owns it ----------------------------------------------------------------------

    def _step_back(self, e: SeqdedupeError) -> None:
        """Another sidecar owns the log."""
        topic = self._topic
        topic.owner_address = e.numbers.get("owner_address", "")
        topic.knows_its_end = False
        # A frame may be sent again there. A change may not be made again by whoever takes this for "nothing was done".
        what = f"somebody else owns topic {topic.name}, and knows there whether it is in force"
        topic.fail_in_flight(
            topic.not_owner(": what became of what was in flight is known there"),
            of_changes=error("OUTCOME_UNKNOWN", what),
        )
        topic.change_state(State.STANDBY, e.message)
        topic.end_streams(topic.not_owner(""))

    async def hand_over(self, to: str, away_seconds: float) -> None:
        """Lets the sidecar at this address (empty: whichever) have the topic, and keeps away from it for so long.

        Nothing is taken while what is in flight settles, for SETTLE_SECONDS at most; a snapshot was taken before.
        Raises why the topic does not serve: then this sidecar has it as before. Whatever `Log.let_go` raises: then it
        takes it again.
        """
        topic = self._topic
        topic.check_serving()
        await topic.keeper.snapshot_in_background()
        topic.check_serving()
        moving = error("RECOVERING", f"topic {topic.name} is being moved to another sidecar")
        topic.hold(moving)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(topic.all_settled(), SETTLE_SECONDS)
            if topic.state is not State.SERVING:
                topic.check_serving()
            self._is_recovering = True
            try:
                await topic.log.let_go()
            except BaseException:
                # Some of it may be let go of. What is in flight settles as after any append that failed.
                self._is_recovering = False
                self.log_failed(Failure.UNKNOWN, "the log could not be let go of")
                raise
        finally:
            topic.release(moving)
        self._keeping_away.gave_up(away_seconds)
        topic.owner_address = to
        self._step_back(topic.not_owner(": it was moved there"))
        if topic.state is State.STANDBY:
            topic.spawn(again_until(self._has_recovered, self._pause))

    async def take(self) -> None:
        """Tries at once to take a topic that nobody owns. Raises NOT_OWNER if somebody does, and why it is not ours."""
        topic = self._topic
        if topic.state in (State.STANDBY, State.RECOVERING):
            self.wanted.set()
            await self._tried.wait()
        topic.check_serving()

    def close(self) -> None:
        """Nothing is tried any more: whoever waits for that finds that the topic is closed."""
        self._tried.tell()

    async def _until_free(self) -> None:
        """Returns when it need not be kept away any more from a log that nobody seems to own.

        What is in the log by then is merged, but for what came just now.
        """
        async with self._beside(self._tail()):
            await asyncio.sleep(self._keeping_away.left_seconds)
            await self._topic.log.wait_until_free()

    async def _until_asked(self) -> None:
        """Returns when it need not be kept away any more and somebody asks for the topic, whoever owns it.

        What is in the log by then is merged, but for what came in the last CATCH_UP_SECONDS.
        """
        async with self._beside(self._catch_up()):
            await asyncio.sleep(self._keeping_away.left_seconds)
            await self._topic.asked.wait()

    @asynccontextmanager
    async def _beside(self, reading: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        task = asyncio.ensure_future(reading)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and (e := task.exception()) is not None:
                logger.error("the log of topic %s was not read on", self._topic.name, exc_info=e)

    async def _catch_up(self) -> None:
        """Reads and merges what the owner has appended, again and again."""
        while True:
            await asyncio.sleep(CATCH_UP_SECONDS)
            await self._tail(until_end=True)

    async def _tail(self, *, until_end: bool = False) -> None:
        """Reads and merges what the owner appends, for ever or once. What cannot be read now is tried again."""
        topic, replay = self._topic, None
        while True:
            try:
                replay = replay or replay_from(topic.log, topic.confirmed_index, self._follow, topic.last_ownership)
                await replay.run()
                if until_end:
                    return
                await topic.log.wait_for_more()
            except DamagedError as e:
                # Whoever takes the log over looks at it again, and says so for good.
                logger.error("topic %s is read no further by this standby: %s", topic.name, e)
                if e.reason == "NO_STATE":
                    # Not when its owner is gone, who alone has what is missing here.
                    self.wanted.set()
                return
            except (UnavailableError, OSError) as e:
                logger.warning("the log of topic %s cannot be read on now: %s", topic.name, e)
                await asyncio.sleep(TRY_AGAIN_SECONDS)

    def _follow(self, chunk: bytes, table: Table, count: int, runs_of: RunsOf) -> None:
        """Records that the log's owner has appended are merged."""
        topic = self._topic
        topic.merge(chunk, table, count, runs_of)
        topic.known_term = max(topic.known_term, int(table[:count, TERM].max()))
        topic.keeper.snapshotter.stored(count)


async def _first_of(*works: Coroutine[Any, Any, object]) -> None:
    """Returns when one of them has ended, and no other goes on. Raises what that one raises."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


# -- How long another sidecar's topic is left alone.

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 60.0
"""Who has served for so long without having been shut out begins anew with the first delay."""

_RANDOM_BYTES = 4


class KeepingAway:
    """No I/O: it says how long, somebody else waits. `random_bytes` gives the jitter, so that not all come at once."""

    def __init__(self, now_seconds: Callable[[], float], random_bytes: Callable[[int], bytes]) -> None:
        self._now_seconds = now_seconds
        self._random_bytes = random_bytes
        self._until = now_seconds()
        self._shut_outs = 0
        self._served_since: float | None = None

    @property
    def left_seconds(self) -> float:
        """How long from now on; 0: not any more."""
        return max(0.0, self._until - self._now_seconds())

    def serves(self) -> None:
        """The topic is ours."""
        self._served_since = self._now_seconds()

    def gave_up(self, seconds: float) -> None:
        """The topic was ours, and another one shall have it: for so long."""
        self._served_since = None
        self._until = self._now_seconds() + seconds

    def found_owned(self) -> None:
        """The topic is another one's. If it was ours, we were shut out."""
        now, since = self._now_seconds(), self._served_since
        seconds = FIRST_SECONDS
        if since is not None:
            if now - since >= LONGEST_SECONDS:
                self._shut_outs = 0
            seconds = min(FIRST_SECONDS * 2**self._shut_outs, LONGEST_SECONDS)
            self._shut_outs += 1
            self._served_since = None
        jitter = int.from_bytes(self._random_bytes(_RANDOM_BYTES), "little") / 2 ** (8 * _RANDOM_BYTES)
        self._until = now + seconds * (1 + jitter) / 2


# -- Who published into a topic before it had an owner: its first owner states it, so that its log tells it for good.


def state_earlier(topic: Owned) -> None:
    """Hands the watermarks of those to the log of whom it says nothing yet. Whoever opens the topic comes after that.

    If that fails, the topic recovers, and it is done again. The topic serves.
    """
    unsaid = {
        name.encode(): sequence_id
        for name, sequence_id in topic.log.earlier.items()
        if _may_come(name) and not _is_known(topic, name.encode())
    }
    names, persisted = list(unsaid), np.array(list(unsaid.values()), np.int64)
    for start in range(0, len(names), STATED_A_RECORD):
        stop = start + STATED_A_RECORD
        part = Import(names[start:stop], persisted[start:stop], start // STATED_A_RECORD, stop >= len(names))
        topic.append_change(part).add_done_callback(retrieve)
    if names:
        logger.info("topic %s: the watermarks of %d producers from before it had an owner", topic.name, len(names))


def _may_come(name: str) -> bool:
    """Whether a producer of that name can ever open the topic."""
    try:
        producer_name(name)
    except SeqdedupeError:
        return False
    return True


def _is_known(topic: Owned, name: bytes) -> bool:
    number = topic.producers.number(name)
    if number is None:
        return False
    row = topic.producers.numbers[number]
    return bool(row[PERSISTED] > NO_SEQUENCE_ID or row[DURABLE_EPOCH] > NO_EPOCH)
