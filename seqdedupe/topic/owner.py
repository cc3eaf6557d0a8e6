"""Ownership of a topic's log: this sidecar takes over the log with its contents, follows another owner, or hands the
log over.

Begin with `Owner`; the topic itself handles the outcomes of messages. Taking over a log has three steps: open it for
writing, write a marker, and read up to this marker. Only then may this process decide about frames. At start, reading
begins at the snapshot's position. After an append with an unknown outcome, reading begins at the last confirmed
message. `Replay` does the reading.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import DURABLE_EPOCH, PERSISTED
from seqdedupe.errors import DamagedError, InvalidRequestError, SeqdedupeError, UnavailableError, error
from seqdedupe.format.headers import TOKEN_BYTES, ownership_of
from seqdedupe.format.layout import BASE_INDEX, ROWS, TERM
from seqdedupe.format.records import marker_token, ownership
from seqdedupe.limits import NO_EPOCH, NO_SEQUENCE_ID
from seqdedupe.log.contract import Entries, Failure, Log, Outcome, Runs
from seqdedupe.names import is_producer_name
from seqdedupe.tasks import Broadcast, again_until, first_of, retrieve
from seqdedupe.topic.base import State, TopicCounters
from seqdedupe.topic.control import Change, Import, ProducerSessions
from seqdedupe.topic.frame import Flight
from seqdedupe.topic.keeper import Keeper
from seqdedupe.topic.sessions import RANDOM_BYTES, Sessions

logger = logging.getLogger("seqdedupe.topic")
recovery_logger = logging.getLogger("seqdedupe.topic.recovery")

SETTLE_SECONDS = 5.0
"""The time for appends in flight to settle before another sidecar gets a topic. That sidecar determines the outcome of
the other appends."""

PROVE_SECONDS = 1.0
"""The shortest time between two records that an owner writes only to find out whether it still is the owner. A client
that asks for positions after the end again and again cannot fill the log with them."""

FIRST_REST_SECONDS = 0.25
LONGEST_REST_SECONDS = 4.0
TRY_AGAIN_SECONDS = 1.0

CATCH_UP_SECONDS = 300.0
"""The interval at which a sidecar that does not own a log reads the new messages. Messages that this sidecar has not
read cannot be dropped from the log, because its snapshots state from where it needs the log."""


# -- Reading a log, to merge its contents.

MAX_TERM = 2**31 - 1

Table = npt.NDArray[np.int64]
RunsOf = Callable[[int], Runs]
Merge = Callable[[bytes, Table, int, RunsOf], None]
"""A function whose parameters are a chunk, the table of the chunk's scanned records, their number, and the message IDs
of each record's rows.

Markers and control records have ROWS 0.
"""


def damaged(log: Log, why: str, index: int) -> SeqdedupeError:
    return error("LOG_DAMAGED", f"the log {log.place} cannot be replayed at index {index}: {why}", index=index)


class Replay:
    """Reads forward through a log and passes its entries to `merge`."""

    def __init__(self, log: Log, next_index: int, merge: Merge, skip_below: int, last_ownership: int) -> None:
        self._log = log
        self.next_index = next_index
        self._merge = merge
        self._skip_below = skip_below
        self._last_ownership = last_ownership
        self.rows = 0
        self.tokens: dict[bytes, int] = {}

    async def run(self) -> None:
        """Read up to the current end of the log. The next call reads the entries that were added later."""
        async for entries in self._log.replay(self.next_index):
            self._entries(entries)

    def _entries(self, entries: Entries) -> None:
        chunk, table = entries.raw, entries.table
        for k in np.flatnonzero(table[:, TERM] > 0):
            self.tokens[marker_token(chunk, table[k])] = int(table[k, TERM])
        self.next_index = entries.next_index
        self._check_history(table)
        # A known batch must not enter the ring twice, and a reset before the batch must not be merged after it. It is
        # not known which control records after the last known message were merged. Merging all of them again gives the
        # same result.
        ends = table[:, BASE_INDEX] + table[:, ROWS]
        new = np.flatnonzero(np.where(table[:, ROWS] == 0, ends >= self._skip_below, ends > self._skip_below))
        if len(new):
            some = table if len(new) == len(table) else table[new]
            self._merge(chunk, some, len(new), lambda k: entries.runs[int(new[k])])
        self.rows += int(table[new, ROWS].sum())

    def _check_history(self, table: Table) -> None:
        """Raise LOG_DAMAGED unless the log contains the last known message at its place."""
        last = self._skip_below - 1
        for places in table[(table[:, BASE_INDEX] <= last) & (last < table[:, BASE_INDEX] + table[:, ROWS])]:
            if self._last_ownership not in (0, ownership(places)):
                why = f"the message there was written under {ownership(places):016x}, the one that is known under "
                why += f"{self._last_ownership:016x}: this log has another history than the snapshot"
                raise damaged(self._log, why, last)


def replay_from(log: Log, confirmed_index: int, merge: Merge, last_ownership: int) -> Replay:
    """Return a replay of the log that begins with the message before this index. This message must exist.

    Raises LOG_DAMAGED if the message before the index is missing.
    """
    if confirmed_index < log.first_index:
        raise damaged(log, f"it begins with index {log.first_index}, what is between is gone", confirmed_index)
    next_index = max(confirmed_index - 1, log.first_index)
    return Replay(log, next_index, merge, skip_below=confirmed_index, last_ownership=last_ownership)


# -- The ownership of the log.


class Owned(Protocol):
    """The members of a topic that the topic's owner uses. `topic.Topic` and `base.TopicBase` describe each member."""

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

    def check_knows_its_end(self) -> None: ...

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
    """Tracks whether this process owns the log of a topic. The state is in `base.TopicBase`, with a drawing.

    While another sidecar owns the log, this sidecar tries to take over the topic when a client asks for it. With
    `is_standby`, this sidecar takes over the topic as soon as the topic has no owner, and until then reads all new
    messages.

    1. This process *takes over* a log (`_took_over`): it opens the log, writes a marker, and reads up to the marker. If
       that is not possible now, it tries again (`_pause`).
    2. While this process owns the log, a failed append ends the ownership (`log_failed`). The process then takes over
       the log again, which shows the outcome of everything in flight.
    3. The ownership *moves* to another sidecar. That sidecar has taken over the log, or this sidecar hands it over
       (`hand_over`).
    """

    def __init__(
        self,
        topic: Owned,
        random_bytes: Callable[[int], bytes],
        *,
        is_standby: bool,
    ) -> None:
        self.wanted = asyncio.Event()
        """An event: this sidecar must try to take over the topic now, unless it already owns the topic."""
        self._topic = topic
        self._random_bytes = random_bytes
        self._is_standby = is_standby
        self._keeping_away = KeepingAway(lambda: topic.now_seconds(), random_bytes)
        self._tried = Broadcast()
        """A signal that an attempt to take over the log has ended."""
        self._is_recovering = False
        """Whether a takeover is in progress, or a further attempt is scheduled."""
        self._failed_meanwhile = False
        self._seems_damaged = False
        self._merged = 0
        """The number of records found in the log since this process last owned it. They count towards the next
        snapshot."""
        self._rest_seconds = 0.0
        """The delay before a log that has refused a write is opened again. The delay grows as long as the topic accepts
        no message between two refusals."""
        self._refused_index = 0
        """The end of the topic at the last refusal."""
        self._proving = asyncio.Lock()
        self._proves_at = -math.inf
        """The earliest time of the next record that is written as a proof."""

    # -- 1. taking over ----------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Take over the log, and read the entries that the snapshot does not cover. Then the topic serves.

        If that is not possible now, attempts continue in the background without a limit. Meanwhile readers get the
        messages that are certain. If another sidecar has fenced this one, this sidecar waits before the next attempt.
        After damage the log is read once more before the topic is permanently DAMAGED.
        """
        if not self._is_recovering and not self._topic.knows_its_end:
            self._is_recovering = True
            # Run this in a separate task of the topic, which ends if the topic is closed meanwhile.
            await asyncio.wait({self._topic.spawn(self._recover())})

    async def _recover(self, rest_seconds: float = 0.0) -> None:
        self._is_recovering = True
        if rest_seconds:
            await asyncio.sleep(rest_seconds)
        if not await self._has_recovered():
            self._topic.spawn(again_until(self._has_recovered, self._pause))

    async def _pause(self, delay_seconds: float) -> None:
        """Wait before the next attempt."""
        self._tried.tell()
        if self._topic.state is State.STANDBY:
            until = self._until_free if self._is_standby else self._until_asked
            await first_of(self.wanted.wait(), until())
            self.wanted.clear()
        else:
            await asyncio.sleep(delay_seconds)

    async def _has_recovered(self) -> bool:
        """Make one attempt. Return whether no further attempt is needed."""
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
        except Exception as e:  # noqa: BLE001 (any error: only damage ends recovery)
            self._seems_damaged = False
            if isinstance(e, UnavailableError) and e.reason == "NOT_OWNER":
                # The appends in flight may be in the log, and the other sidecar can determine their outcome.
                self._keeping_away.found_owned()
                self._step_back(e)
            else:
                self._not_now(e)
            return False
        self._keeping_away.serves()
        # Otherwise this sidecar would take over the topic again at once after handing it over.
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
        try:
            state_earlier(topic)
        except Exception as e:  # noqa: BLE001 (any error: without these watermarks it would store copies)
            if topic.state is State.SERVING:
                self.log_failed(Failure.REFUSED, f"the watermarks from before cannot be written: {e}")
        return True

    async def _took_over(self) -> bool:
        """Make this process the owner of the log and merge the log's contents. Return whether the log now accepts
        messages."""
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
            # No more data is stored: this read returns everything that there is.
            await replay_from(topic.log, topic.confirmed_index, self._merge, topic.last_ownership).run()
            topic.fail_in_flight(e)
            topic.terminated = e
            topic.next_index = topic.confirmed_index
            return True
        # A frame in flight that is not in the log by now will never be there.
        topic.fail_in_flight(topic.not_appended("LOG_REFUSED", "the append failed"))
        topic.term = term
        topic.ownership = ownership_of(token)
        topic.sessions.begin_term(term, self._random_bytes(RANDOM_BYTES))
        topic.next_index = topic.confirmed_index = replay.next_index
        topic.confirmed.tell()
        topic.counters.recoveries += 1
        topic.counters.replayed += replay.rows
        topic.counters.recovery_seconds += topic.now_seconds() - began
        # The contents of the log are known now. But if the log has failed again meanwhile, it accepts nothing yet.
        return not self._failed_meanwhile

    async def _marked(self, replay: Replay) -> tuple[int, bytes]:
        """Open the log for writing and merge it up to this process's marker. Return the marker's term, which is above
        all known terms, and its token.

        If the log contains a marker whose term is not lower, or a merged record names such a term, another marker with
        a higher term is written. Raises LOG_DAMAGED if the record of the topic's last confirmed message is missing,
        because the log has then lost its end. Also raises LOG_DAMAGED if that record was not written under the topic's
        `last_ownership` (0: not known). Raises `UnavailableError` (LOG_REFUSED) if the log cannot be written.
        """
        topic, log = self._topic, self._topic.log
        term, confirmed_index = topic.term + 1, topic.confirmed_index
        settle = partial(topic.settle, topic.opening)
        if log.replays_what_is_certain:
            # The log may be long. But the marker is near its end, and nothing is read twice.
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
        """Merge records of the log that is being taken over."""
        self._topic.merge(chunk, table, count, runs_of)
        self._merged += count

    def _not_now(self, e: Exception) -> None:
        """Record that a takeover has failed, and will be tried again."""
        topic = self._topic
        if not isinstance(e, SeqdedupeError | OSError):
            logger.error("topic %s could not be recovered", topic.name, exc_info=e)
        why = e.message if isinstance(e, SeqdedupeError) else f"{type(e).__name__}: {e}"
        if not isinstance(e, UnavailableError) or e.reason != "LOG_REFUSED":
            topic.change_state(State.RECOVERING, f"the log cannot be read now: {why}")
        elif topic.state is not State.RECOVERING or not len(topic.flight):
            topic.change_state(State.READ_ONLY, why)

    def _give_up(self, e: DamagedError) -> None:
        """Give up a log that is damaged permanently."""
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
        """Take over the log again after an append failed or has an unknown outcome."""
        topic = self._topic
        topic.counters.log_failures += 1
        logger.warning("the log of topic %s failed (%s): %s", topic.name, failure.value, why)
        if self._is_recovering:
            # Nothing was appended since the takeover began: this says nothing about the appends in flight.
            self._failed_meanwhile = True
            return
        if failure is Failure.REFUSED:
            topic.fail_in_flight(topic.not_appended("LOG_REFUSED", why))
            topic.change_state(State.READ_ONLY, why)
            # A full disk often has room for the data that opening the log writes. The topic would then serve and refuse
            # in alternation.
            if topic.confirmed_index > self._refused_index:
                self._rest_seconds, self._refused_index = 0.0, topic.confirmed_index
            topic.spawn(self._recover(self._rest_seconds))
            self._rest_seconds = min(max(2 * self._rest_seconds, FIRST_REST_SECONDS), LONGEST_REST_SECONDS)
            return
        self._take_over_again(f"what became of the last appends is being found out: {why}")

    def _take_over_again(self, why: str) -> None:
        topic = self._topic
        # Another sidecar may own the log and show later messages, unless only this process can write the log.
        topic.knows_its_end = topic.knows_its_end and not topic.log.replays_what_is_certain
        topic.change_state(State.RECOVERING, why)
        self._is_recovering = True
        topic.spawn(self._recover())
        topic.flight.tell()

    def out_of_step(self, e: BaseException | None) -> SeqdedupeError:
        """Determine the outcome of appends in flight, because this process and the log may disagree about them.

        Otherwise IDs would stay in flight forever. Return the reason why the topic accepts no messages meanwhile.
        """
        topic = self._topic
        # The outcomes of these appends would be mistaken for the outcomes of other appends.
        topic.opening += 1
        logger.error("topic %s and its log are out of step", topic.name, exc_info=e)
        self.log_failed(Failure.UNKNOWN, f"{type(e).__name__} in the sidecar")
        return error("RECOVERING", f"topic {topic.name} accepts no messages now: {topic.why}")

    def begin_another_term(self) -> None:
        """Begin another term, because this term has no epoch left for new sessions. First determine the outcome of
        appends in flight. Raises RECOVERING."""
        topic = self._topic
        self._take_over_again(f"it was opened as often as it can be in term {topic.term}")
        topic.check_serving()

    async def prove(self) -> None:
        """Wait until an append that began after this call is stored. This proves that this sidecar owned the log at the
        time of the call: its appends are not stored after another owner's marker.

        If nothing else is appended, this writes a record without content, at most one in PROVE_SECONDS. A log that only
        this process can write, or that accepts nothing from anybody, needs no proof. Raises the reason why the topic
        accepts no messages now, as soon as its end is not known.
        """
        topic, flight = self._topic, self._topic.flight
        if topic.terminated is not None or not topic.log.replays_what_is_certain:
            return
        begun = flight.ever
        async with self._proving:
            if flight.ever == begun:
                await asyncio.sleep(self._proves_at - topic.now_seconds())
            if flight.ever == begun and topic.terminated is None:
                self._proves_at = topic.now_seconds() + PROVE_SECONDS
                topic.append_change(ProducerSessions([], np.zeros(0, np.int64))).add_done_callback(retrieve)
            await flight.all_of_now(topic.check_knows_its_end)
        if topic.terminated is None:
            # After a failed append, only another takeover makes the topic serve.
            topic.check_serving()

    # -- 3. while another sidecar owns it ----------------------------------------------------------------------

    def _step_back(self, e: SeqdedupeError) -> None:
        """Become a standby: another sidecar owns the log."""
        topic = self._topic
        topic.owner_address = e.numbers.get("owner_address", "")
        topic.knows_its_end = False
        # A frame may be sent again to the new owner. But a change must not be repeated by a caller that takes this
        # error to mean that nothing was done.
        what = f"another sidecar owns topic {topic.name}, and knows there whether it is in force"
        topic.fail_in_flight(
            topic.not_owner(": what became of what was in flight is known there"),
            of_changes=error("OUTCOME_UNKNOWN", what),
        )
        topic.change_state(State.STANDBY, e.message)
        topic.end_streams(topic.not_owner(""))

    async def hand_over(self, to: str, away_seconds: float) -> None:
        """Hand the topic over to the sidecar at this address (empty: any), and do not take it over again for
        `away_seconds`.

        Takes a snapshot first. Then the topic accepts nothing while appends in flight settle, for at most
        SETTLE_SECONDS. If the topic does not serve, this raises the reason, and this sidecar keeps the topic. If
        `Log.let_go` fails, this raises its errors, and this sidecar takes over the topic again.
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
                # A part of the log may be released. Appends in flight settle as after a failed append.
                self._is_recovering = False
                self.log_failed(Failure.UNKNOWN, "the log could not be released")
                raise
        finally:
            topic.release(moving)
        self._keeping_away.gave_up(away_seconds)
        topic.owner_address = to
        self._step_back(topic.not_owner(": it was moved there"))
        if topic.state is State.STANDBY:
            topic.spawn(again_until(self._has_recovered, self._pause))

    async def take(self) -> None:
        """Try at once to take over a topic that has no owner. Raises NOT_OWNER if the topic has an owner, and other
        reasons for a failure."""
        topic = self._topic
        if topic.state in (State.STANDBY, State.RECOVERING):
            self.wanted.set()
            await self._tried.wait()
        topic.check_serving()

    def close(self) -> None:
        """End all attempts. Callers that wait for an attempt find that the topic is closed."""
        self._tried.tell()

    async def _until_free(self) -> None:
        """Wait until no sidecar seems to own the log, and the delay before this sidecar's next takeover has passed.

        When this returns, the contents of the log are merged, except for the most recent entries.
        """
        async with self._beside(self._tail()):
            await asyncio.sleep(self._keeping_away.left_seconds)
            await self._topic.log.wait_until_free()

    async def _until_asked(self) -> None:
        """Wait until a client asks for the topic, and the delay before this sidecar's next takeover has passed. The log
        may still have an owner.

        When this returns, the contents of the log are merged, except for entries of the last CATCH_UP_SECONDS.
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
        """Read and merge what the owner has appended, at intervals."""
        while True:
            await asyncio.sleep(CATCH_UP_SECONDS)
            await self._tail(until_end=True)

    async def _tail(self, *, until_end: bool = False) -> None:
        """Read and merge the entries that the owner appends, either without end, or once up to the current end. After a
        read error, try again."""
        topic, replay = self._topic, None
        while True:
            try:
                replay = replay or replay_from(topic.log, topic.confirmed_index, self._follow, topic.last_ownership)
                await replay.run()
                if until_end:
                    return
                await topic.log.wait_for_more()
            except DamagedError as e:
                # The sidecar that takes over the log reads it again, and reports the final result.
                logger.error("topic %s is read no further by this standby: %s", topic.name, e)
                if e.reason == "NO_STATE":
                    # Try now, not when the owner is gone: only the owner has the missing state.
                    self.wanted.set()
                return
            except (UnavailableError, OSError) as e:
                logger.warning("the log of topic %s cannot be read on now: %s", topic.name, e)
                await asyncio.sleep(TRY_AGAIN_SECONDS)

    def _follow(self, chunk: bytes, table: Table, count: int, runs_of: RunsOf) -> None:
        """Merge records that the log's owner has appended."""
        topic = self._topic
        topic.merge(chunk, table, count, runs_of)
        topic.known_term = max(topic.known_term, int(table[:count, TERM].max()))
        topic.keeper.snapshotter.stored(count)


# -- The time for which this sidecar does not try to take another sidecar's topic.

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 60.0
"""After serving for this time without being fenced, a sidecar restarts with the first delay."""

_RANDOM_BYTES = 4


class KeepingAway:
    """Computes the delays before a takeover, without I/O; the callers wait. `random_bytes` gives jitter, so that the
    sidecars do not all try at the same time."""

    def __init__(self, now_seconds: Callable[[], float], random_bytes: Callable[[int], bytes]) -> None:
        self._now_seconds = now_seconds
        self._random_bytes = random_bytes
        self._until = now_seconds()
        self._shut_outs = 0
        self._served_since: float | None = None

    @property
    def left_seconds(self) -> float:
        """The time that remains; 0: this sidecar need not wait."""
        return max(0.0, self._until - self._now_seconds())

    def serves(self) -> None:
        """Record that this sidecar owns the topic."""
        self._served_since = self._now_seconds()

    def gave_up(self, seconds: float) -> None:
        """Record that this sidecar has handed the topic over to another sidecar. Do not take over the topic for
        `seconds`."""
        self._served_since = None
        self._until = self._now_seconds() + seconds

    def found_owned(self) -> None:
        """Record that another sidecar owns the topic. If this sidecar owned the topic before, the other sidecar has
        fenced it."""
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


# -- Producers that published before the topic had an owner. Its first owner states them in the log, permanently.

EARLIER_A_RECORD = 1024
"""The number of producers in a record: at most 300 KiB, so that a broker with a low limit takes it."""


def state_earlier(topic: Owned) -> None:
    """Write the watermarks of producers that published before the log had an owner into the log. Do nothing if the log
    already contains these watermarks. Later opens wait for this.

    If the write fails, the topic recovers, and the write is repeated. The topic must be serving. In the log, the
    watermarks are before all messages. So if the log has messages and lacks a watermark, the watermark was reset or
    forgotten later.
    """
    if topic.confirmed_index:
        return
    given = [(name.encode(), number) for name, number in topic.log.earlier.items() if is_producer_name(name)]
    # All at once: there may be a million.
    found = topic.producers.find_all([name for name, _ in given])
    rows = topic.producers.numbers[found]
    is_said = (found >= 0) & ((rows[:, PERSISTED] > NO_SEQUENCE_ID) | (rows[:, DURABLE_EPOCH] > NO_EPOCH))
    unsaid = [given[k] for k in np.flatnonzero(~is_said).tolist()]
    names, persisted = [name for name, _ in unsaid], np.array([number for _, number in unsaid], np.int64)
    for start in range(0, len(names), EARLIER_A_RECORD):
        stop = start + EARLIER_A_RECORD
        part = Import(names[start:stop], persisted[start:stop], start // EARLIER_A_RECORD, stop >= len(names))
        topic.append_change(part).add_done_callback(retrieve)
    if names:
        logger.info("topic %s: the watermarks of %d producers from before it had an owner", topic.name, len(names))
