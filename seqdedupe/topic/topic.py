"""A topic with its own log. Here frames are admitted, appended, settled and answered.

Begin with `Topic.admit`. The `owner` decides whether the log may be appended to. The `judge` decides which messages of
a frame are new. The `keeper` decides when snapshots are taken. The `trimmer`, at the end, drops the messages that
retention allows to drop.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from seqdedupe.core.id_runs import ImportedIds
from seqdedupe.core.id_window import IdWindow
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import STATED
from seqdedupe.errors import InvalidRequestError, SeqdedupeError, error
from seqdedupe.format.jit import Int64s
from seqdedupe.format.layout import BASE_INDEX, ROWS, TERM
from seqdedupe.format.records import body_of, ownership
from seqdedupe.limits import Retention
from seqdedupe.log.contract import DamageFound, Log, Outcome, Runs, Skipped, last_of
from seqdedupe.message_id import MessageId, Position
from seqdedupe.store import windows
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.topic import control
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.control import STATED_A_RECORD, Change, CursorChange, ProducerSessions, Purge, Reset
from seqdedupe.topic.frame import Admitted, Changing, Flight, FrameReceipt, NumbersCache, OutOfStepError, Refusal, Reply
from seqdedupe.topic.judge import ByDeduplicationId, BySequenceId
from seqdedupe.topic.keeper import Keeper, producers_of
from seqdedupe.topic.owner import Owner, RunsOf, Table
from seqdedupe.topic.policy import BYTES_A_MB, Applied, Policy
from seqdedupe.topic.window_runs import LookedUp, WindowMemory

if TYPE_CHECKING:
    from seqdedupe.pulsar_wire.batches import SentEntry

logger = logging.getLogger("seqdedupe.topic")


class Topic(TopicBase):
    """A topic of this process. It accepts messages once `recover` has returned.

    Everything here runs on one event loop and decides in arrival order. So admission, append and confirmation have the
    same order, and no lock is needed. A frame passes these steps:

    1. *admit*: the judge decides about the whole frame. Its new messages are in flight from then on.
    2. *append*: the topic passes the new messages to the log.
    3. *settle*: the log reports the outcome of the oldest appends. Confirmation makes messages persisted and readable
       in one step. Confirmation happens before the receipt of these messages is sent, and before a copy of them is
       answered DUP.

    4. *answer*: the sender gets the receipt, or the reason why there is no receipt.

    `on_state` is called at each change of state, which has a one-line reason. Topics of deduplication IDs share
    `window_memory`. Without `window_memory`, their windows stay in memory. `imported` is the window of an import in the
    store. `is_standby`: see `Owner`.
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
        imported: ImportedIds | None = None,
        producers: Producers | None = None,
    ) -> None:
        super().__init__(
            name,
            log.incarnation,
            producers_of(loaded) if producers is None else producers,
            loaded,
            # Without a snapshot, everything that is still in the log is read.
            first_index=log.first_index,
            applied=applied,
            on_state=on_state,
        )
        self.log = log
        self.store = store
        self.now_seconds: Callable[[], float] = asyncio.get_running_loop().time
        self.flight = Flight()
        self.next_index = self.confirmed_index
        """The index of the next message that is passed to the log."""
        self.opening = 0
        """The number of the log's current opening. Outcomes of earlier openings are ignored."""
        self.ownership = 0
        """The ownership of the messages that are currently appended."""
        self.known_term = 0
        """The highest term in a control record."""
        self.policy_stated = -1
        """The log states the policy from this index on; -1: not known."""
        self.import_parts = control.ImportParts()
        self._random_bytes = random_bytes
        self._streams: dict[int, Callable[[SeqdedupeError], None]] = {}
        self._forgetting_import: asyncio.Task[None] | None = None
        self.by_sequence_id = BySequenceId(self.producers)
        self.ids = ByDeduplicationId(
            name,
            log.incarnation,
            store,
            loaded.window if loaded is not None else None,
            imported,
            policy=lambda: self.policy,
            on_expired=self._import_has_expired,
            take_snapshot=lambda: self.keeper.snapshot(),
            memory=window_memory,
            random_bytes=lambda n: self._random_bytes(n),
        )
        self.trimmer = Trimmer(self)
        self.keeper = Keeper(self, store, snapshots)
        self.keeper.snapshotter.on_stored = self._window_may_have_grown
        self.owner = Owner(self, lambda n: self._random_bytes(n), is_standby=is_standby)
        log.flush_every(self.applied.flush_interval)
        if self.policy.by_deduplication_id:
            self.ids.begin(self.confirmed_index)

    # -- 1. admit ----------------------------------------------------------------------------------------------

    @property
    def judge(self) -> BySequenceId | ByDeduplicationId:
        """The judge that decides about a frame in this topic."""
        return self.by_sequence_id if self.ids.window is None else self.ids

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
        sent: "SentEntry | None" = None,
    ) -> None:
        """Decide about a frame and pass its new messages to the log. Call `reply` once: now, or when the messages
        settle.

        With `when_durable`, the receipt may be sent when the frame is written but not durable, if the policy allows it.
        The receipt states this, and `when_durable` is called once the frame is durable. If the log loses the frame, the
        streams are ended. With `lone`, links may be omitted, as in a unary call. `looked_up` is the result that
        `ids.look_up` has just returned. Without `looked_up`, this call may read from the disk, and block all clients
        meanwhile. `sent`: see `Log.append`. This method raises no errors: an error becomes a `Refusal`.
        """
        try:
            self.check_serving()
        except SeqdedupeError as e:
            self.counters.refused += 1
            reply(Refusal(frame, e))
            return
        try:
            new, answer = self.judge.decide(
                encoded,
                frame,
                cache,
                next_index=self.next_index,
                applied=self.applied,
                lone=lone,
                check_log=self.log.check,
                looked_up=looked_up,
            )
        except OutOfStepError as e:
            self.counters.refused += 1
            reply(Refusal(frame, self.owner.out_of_step(e.__cause__)))
            return
        if isinstance(answer, Refusal):
            self.counters.refused += 1
            reply(answer)
        elif new is None:
            self._count(answer, 0)
            reply(answer)
        else:
            self._append(Admitted(new, answer, reply, self.now_seconds(), when_durable), sent)
            if when_durable is None and not self.applied.flush_interval.is_every_commit:
                # A sender waits that accepts only a durable receipt.
                self.log.flush()

    def check_serving(self) -> None:
        """Raise the reason if the topic accepts no messages: RECOVERING, LOG_REFUSED, NOT_OWNER, DRAINING,
        TOPIC_NOT_FOUND, TOPIC_TERMINATED, LOG_DAMAGED."""
        if self.held is not None and self.state is not State.DRAINING:
            raise self.held
        if self.state is State.SERVING:
            return
        self.check_may_go_on()
        reason = {
            State.RECOVERING: "RECOVERING",
            State.READ_ONLY: "LOG_REFUSED",
            State.DRAINING: self.closed_because,
        }[self.state]
        raise error(reason, f"topic {self.name} accepts no messages now: {self.why}")

    # -- 2. append ---------------------------------------------------------------------------------------------

    def _append(self, item: Admitted, sent: "SentEntry | None") -> None:
        """Pass the new messages of a decided frame to the log."""
        try:
            # Do this first; otherwise the log might have messages that this process does not know.
            self.flight.add(item)
        except MemoryError as e:
            item.reply(Refusal(item.receipt.frame, self.owner.out_of_step(e)))
            return
        frame = item.frame
        try:
            self.log.append(frame.encoded, frame.rows, frame.column_bytes, sent)
        except Exception as e:  # noqa: BLE001 (any error: the owner then finds out whether the log has it)
            self.owner.out_of_step(e)
        self.next_index += frame.rows

    def append_change(self, change: Change) -> "asyncio.Future[None]":
        """Pass a control record to the log. The future is done when the record is durable and in force. If the record
        fails, the future raises the reason.

        Raises an error immediately, and does nothing, if the topic accepts no messages. Also raises MESSAGE_TOO_LARGE.
        """
        self.check_serving()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        body = control.encode(change, term=self.term, record_id=int.from_bytes(self._random_bytes(8), "little"))
        try:
            self.flight.add(Changing(body, change, done))
        except MemoryError as e:
            raise self.owner.out_of_step(e) from e
        try:
            self.log.append_control(body)
        except InvalidRequestError as e:
            # The log has accepted no part of the batch, and would refuse every repetition.
            self.flight.take_back()
            if isinstance(change, ProducerSessions | Reset):
                # These epochs are in force already, but must not be.
                self.owner.out_of_step(e)
            raise
        except Exception as e:  # noqa: BLE001 (as for a frame)
            self.owner.out_of_step(e)
        return done

    # -- 3. settle ---------------------------------------------------------------------------------------------

    def settle(self, opening: int, outcome: Outcome) -> None:
        """Handle the outcome of the oldest appends in flight, which the log reports."""
        if opening != self.opening:
            return
        confirmed: list[Admitted | Changing] = []
        failed: Exception | None = None
        last: Runs = ()
        try:
            for item, runs in zip(self.flight, outcome.runs, strict=False):
                self._confirm(item, runs)
                confirmed.append(item)
                last = runs or last
        except Exception as e:  # noqa: BLE001 (any error: the log has the later ones all the same)
            failed = e
        for _ in confirmed:
            self.flight.take()
        if last:
            self.last_ownership = self.ownership
            self.last_message_id = last_of(last)
            self.confirmed.tell()
        for item in confirmed:
            self._answer(item)
        if failed is not None:
            self.owner.out_of_step(failed)
            self.flight.tell()
            return
        if outcome.written:
            self._answer_early(outcome.written)
        if outcome.failure is not None:
            self.owner.log_failed(outcome.failure, outcome.why)
        self.flight.tell()
        self.keeper.snapshotter.stored(len(confirmed))

    def _confirm(self, item: Admitted | Changing, runs: Runs) -> None:
        """Confirm an append that is in the log."""
        if isinstance(item, Changing):
            self._apply(item.change, self.confirmed_index)
            return
        item.receipt.runs = runs
        self.judge.confirm(item.frame)
        self.confirmed_index += item.frame.rows

    def merge(self, chunk: bytes, table: Table, count: int, runs_of: RunsOf) -> None:
        """Put records that were found in the log in force. Confirm and answer the frames among them that are in
        flight."""
        # Do this before anything is put in force: a merge that fails is repeated as a whole.
        found = self._found(chunk, table[:count], runs_of)
        self._learn(chunk, table, count, runs_of)
        for _ in found:
            self.flight.take()
        self.confirmed.tell()
        for item in found:
            self._answer(item)
        self.flight.tell()

    def _found(self, chunk: bytes, table: Table, runs_of: RunsOf) -> list[Admitted | Changing]:
        """Return the appends in flight that are among these records."""
        found: list[Admitted | Changing] = []
        waiting = iter(self.flight)
        oldest = next(waiting, None)
        for k, places in enumerate(table if oldest is not None else ()):
            if oldest is None or places[TERM] or oldest.body != body_of(chunk, places):
                continue
            if isinstance(oldest, Admitted):
                # The index in the log, which may differ from the intended index.
                oldest.receipt.stands_at(int(places[BASE_INDEX]))
                oldest.receipt.runs = runs_of(k)
            found.append(oldest)
            oldest = next(waiting, None)
        return found

    def _learn(self, chunk: bytes, table: Table, count: int, runs_of: RunsOf) -> None:
        for batches, changes in control.runs(chunk, table[:count], self.log.place):
            if len(batches):
                self.producers.replay(chunk, batches, len(batches))
                self.ids.replay(chunk, batches, self.applied)
            for change, term, index in changes:
                self.known_term = max(self.known_term, term)
                self._apply(change, index)
        # Records that are merged again may be before the last known message in the log.
        self.confirmed_index = max(self.confirmed_index, int(table[count - 1, BASE_INDEX] + table[count - 1, ROWS]))
        for last in np.flatnonzero(table[:count, ROWS] > 0)[-1:].tolist():
            self.last_ownership = ownership(table[last])
            self.last_message_id = last_of(runs_of(last))

    def _apply(self, change: Change, index: int) -> None:
        """Apply a control record that is in the log, before the message with this index."""
        if isinstance(change, Policy):
            if change.by_deduplication_id:
                self.ids.begin(index)
            self.put_in_force(change)
            # The record may be at the end of a segment that is dropped with the message before it.
            self.policy_stated = index - 1
        elif isinstance(change, CursorChange):
            # Nothing else of the policy changes.
            self.policy = change.applied_to(self.policy)
        else:
            control.apply(change, self.import_parts, self.producers, index)

    def fail_in_flight(self, e: SeqdedupeError, *, of_changes: SeqdedupeError | None = None) -> None:
        """Fail all appends in flight: their messages do not count as pushed any more."""
        failed = [self.flight.take() for _ in range(len(self.flight))]
        self.by_sequence_id.fail()
        self.ids.fail()
        self.next_index = self.confirmed_index
        for item in failed:
            if isinstance(item, Changing):
                item.settled(of_changes or e)
                continue
            self.counters.refused += 1
            if not item.is_told:
                self._reply(item, Refusal(item.receipt.frame, e))
        if any(isinstance(item, Admitted) and item.is_told for item in failed):
            # A sender with an early receipt learns at its next resume that its frame is not written.
            self.end_streams(e)
        self.flight.tell()

    def not_appended(self, reason: str, why: str) -> SeqdedupeError:
        """Return the error for frames that were not appended."""
        return error(reason, f"topic {self.name} could not write it to its log: {why}")

    async def all_settled(self) -> None:
        """Wait until everything that is in flight now has settled, with any flush policy."""
        self.log.flush()
        await self.flight.all_of_now()

    # -- 4. answer ---------------------------------------------------------------------------------------------

    def _answer(self, item: Admitted | Changing) -> None:
        try:
            if isinstance(item, Changing):
                item.settled()
                if isinstance(item.change, Reset):
                    self.counters.resets += len(item.change.names)
                elif isinstance(item.change, Purge):
                    self.counters.purged += len(item.change.names)
                return
            if item.is_told and item.when_durable is not None:
                item.when_durable()
            else:
                item.reply(item.receipt)
            self._count(item.receipt, item.frame.rows)
            self.counters.stored_bytes += len(item.frame.encoded)
        except Exception:
            # Other senders wait for their answers, and the topic for the next steps.
            logger.exception("topic %s could not give an answer", self.name)

    def _count(self, receipt: FrameReceipt, new_rows: int) -> None:
        """Count a frame that has received its receipt. `new_rows` is the number of the frame's rows that were
        stored."""
        if receipt.verdicts is None:
            self.counters.not_dup += new_rows
        else:
            self.counters.count_verdicts(receipt.verdicts, new_rows)

    def _answer_early(self, written: Sequence[Runs]) -> None:
        """Send early receipts for frames that a power cut may still remove from the log, but only to senders that asked
        for early receipts."""
        for item, runs in zip(self.flight.written(len(written)), written, strict=True):
            if isinstance(item, Admitted) and item.when_durable is not None:
                item.receipt.runs = runs
                item.receipt.durable_at = item.receipt.first_index + item.frame.rows
                item.is_told = True
                self._reply(item, item.receipt)
            else:
                # The sender accepts only a durable receipt. No sync was requested before the policy was in force.
                self.log.flush()

    def _reply(self, item: Admitted, answer: FrameReceipt | Refusal) -> None:
        try:
            item.reply(answer)
        except Exception:
            # As in `_answer`.
            logger.exception("topic %s could not give an answer", self.name)

    def connect(self, end: Callable[[SeqdedupeError], None] = lambda e: None) -> NumbersCache:
        """Begin a stream and return its cache. The producers that the stream uses count as in use until `disconnect`.

        `end` is called if another sidecar has taken over the topic. Everything in flight has been answered before that.
        """
        cache = NumbersCache(stream=self.producers.activity.connect())
        self._streams[cache.stream] = end
        return cache

    def disconnect(self, cache: NumbersCache) -> None:
        """End the stream with this cache."""
        self.producers.activity.disconnect(cache.stream)
        self._streams.pop(cache.stream, None)

    def end_streams(self, why: SeqdedupeError) -> None:
        """End all streams with this reason. Their clients connect again."""
        for end in list(self._streams.values()):
            end(why)

    # -- contents ----------------------------------------------------------------------------------------------

    @property
    def window(self) -> IdWindow | None:
        return self.ids.window

    @property
    def first_index(self) -> int:
        return self.log.first_index

    @property
    def damage_found(self) -> DamageFound:
        return self.log.damage_found

    @property
    def skipped(self) -> Skipped:
        return self.log.skipped

    @property
    def not_durable(self) -> int:
        return self.flight.rows_told_early()

    def log_place(self) -> bytes:
        return self.log.place_at(self.confirmed_index)

    @property
    def entry_format(self) -> str:
        return self.log.entry_format

    @property
    def log_bytes(self) -> int:
        return self.log.size_bytes

    @property
    def last_position(self) -> Position:
        return Position(self.incarnation, self.last_message_id, self.confirmed_index - 1, self.last_ownership)

    @property
    def certain_position(self) -> Position:
        index = self.readable_index - 1
        known = MessageId(*(int(column[0]) for column in self.log.known_message_ids(np.array([index]))))
        if index < self.confirmed_index or known.ledger_id < 0:
            return self.last_position
        return Position(self.incarnation, known, index)

    async def position_before(self, index: int) -> Position:
        if index == self.confirmed_index:
            return self.last_position
        if index == 0:
            return Position.start(self.incarnation)
        location = await self.log.locate(index - 1)
        return Position(self.incarnation, location.message_id, index - 1, location.ownership)

    @property
    def readable_index(self) -> int:
        if self.knows_its_end:
            return self.confirmed_index
        return max(self.confirmed_index, self.log.certain_index)

    # -- policy, retention and import --------------------------------------------------------------------------

    async def set_policy(self, policy: Policy) -> None:
        """Replace the whole policy. When this returns, the new policy is durable, and has come into force between two
        frames.

        Raises the reason why the topic accepts nothing now, or LOG_REFUSED. After an error, the policy is unchanged. If
        the caller is cancelled, the outcome is unknown.
        """
        await self.append_change(policy)

    @property
    def newest_policy(self) -> Policy:
        return self.flight.newest_policy(self.policy)

    def put_in_force(self, policy: Policy) -> None:
        before = self.applied.retention
        self.policy = policy
        self.applied = self.inherited.under(policy)
        self.keeper.apply(self.applied)
        self.log.flush_every(self.applied.flush_interval)
        if self.knows_its_end and self.applied.retention != before:
            self.trimmer.look()

    def snapshot_is_durable(self) -> None:
        self.trimmer.look()

    def begins_to_serve(self) -> None:
        """Start to accept messages, after the log has been taken over."""
        # Loaded messages and replayed ones count even if no new ones come.
        self._window_may_have_grown()
        self.ids.imported.say_if_missing()

    def _window_may_have_grown(self) -> None:
        if self.ids.window is not None:
            self.ids.may_have_grown(self.ids.window, self.keeper.snapshotter.taken)

    def _import_has_expired(self) -> None:
        if self._forgetting_import is None or self._forgetting_import.done():
            self._forgetting_import = self.spawn(self._forget_import())

    async def _forget_import(self) -> None:
        """Remove the import from the policy. If that fails now, the next frame starts another attempt."""
        with suppress(SeqdedupeError):
            async with self.ids.imported.changing:
                await self.append_change(replace(self.newest_policy, imported=None))
                self.ids.imported.there = None
                # An import in progress may have written runs, and parts of them would be missing.
                self.newest_import = None
                windows.remove_import(self.store, self.incarnation)

    # -- its producers -----------------------------------------------------------------------------------------

    def in_use(self) -> list[Int64s]:
        return self.flight.producer_rows()

    async def purge(self, numbers: Int64s) -> int:
        names = self.producers.names_of(numbers)
        await self.append_change(Purge(names))
        self.sessions.forget(names)
        return len(names)

    def renumber(self, new_numbers: Int64s) -> None:
        self.flight.renumber(new_numbers)

    # -- its beginning and its end -----------------------------------------------------------------------------

    async def recover(self) -> None:
        """Recover the topic, see `Owner.recover`."""
        await self.owner.recover()

    async def drain(self) -> None:
        """Accept no more messages, settle appends in flight, take a last snapshot, and close the log."""
        self.change_state(State.DRAINING, "the sidecar is shutting down")
        await self.all_settled()
        if self.knows_its_end:
            await self.keeper.snapshot_in_background()
        await self.close("the sidecar is shutting down")

    async def delete(self) -> None:
        """Close the topic permanently. Callers that still use this object get the error that the topic does not
        exist."""
        self.closed_because = "TOPIC_NOT_FOUND"
        await self.close("it was deleted")

    async def close(self, why: str) -> None:
        """Close the log at once. Frames in flight are answered with OUTCOME_UNKNOWN."""
        self.change_state(State.DRAINING, why)
        # Do this first: a snapshot in progress, or an append that settles, would otherwise start another measurement of
        # the memory.
        await self.ids.close()
        await self.end_tasks()
        self.owner.close()
        await self.log.close()
        self.fail_in_flight(self.not_appended("OUTCOME_UNKNOWN", why))


# -- Retention: the beginning of the log is dropped once a durable snapshot covers it. First, statements that are still
# in force and that only this part of the log contains are written again.


class Trimmer:
    """The retention of a topic. The trimmer drops messages that the policy allows to drop, in one background task at a
    time."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._looking: asyncio.Task[None] | None = None

    def look(self) -> None:
        """After a durable snapshot or a change of the policy, drop the messages that retention allows to drop. This
        runs in the background."""
        if self._topic.state is not State.DRAINING and (self._looking is None or self._looking.done()):
            self._looking = self._topic.spawn(trim(self._topic))

    def look_by_time(self) -> None:
        """Drop messages that have become too old, even if no snapshot is taken. Call this at intervals."""
        if self._topic.knows_its_end and self._topic.applied.retention.age_ms is not None:
            self.look()


async def trim(topic: Topic) -> None:
    """Drop the messages that the topic's policy allows to drop. Messages that a snapshot covers only after the start of
    this call wait for the next snapshot."""
    retention = None
    try:
        await topic.log.snapshot_is_durable(topic.keeper.snapshotter.opaque)
        while retention != (retention := topic.applied.retention):
            first = await _may_trim_to(topic, retention)
            if topic.state in (State.STANDBY, State.READ_ONLY):
                # Nothing can be written again on a full disk, so something must be dropped.
                await topic.log.trim(await _stated_from(topic, first))
            elif first > topic.log.first_index:
                await state_again(topic, first)
                await topic.log.trim(first)
    except SeqdedupeError as e:
        logger.warning("topic %s: retention waits for the next snapshot: %s", topic.name, e)


async def _may_trim_to(topic: Topic, retention: Retention) -> int:
    """Return the same as `Log.may_trim_to`, but keep messages for cursors with a hold on retention, up to the cursor's
    limit."""
    covered = topic.keeper.snapshot_index
    first = await topic.log.may_trim_to(covered, retention)
    for cursor in topic.policy.cursors:
        mb, position = cursor.hold_retention_in_mb, cursor.position
        if mb and position.incarnation == topic.incarnation:
            passed = await topic.log.may_trim_to(min(covered, position.index + 1), retention)
            beyond = await topic.log.may_trim_to(covered, Retention(mb * BYTES_A_MB, None))
            first = min(first, max(passed, beyond))
    return first


async def _stated_from(topic: Topic, first_index: int) -> int:
    """Find how far the log can be trimmed without a new append. Return the highest index, up to `first_index`, from
    which on the log contains all state that is in force."""
    producers = topic.producers
    stated = [first_index, topic.policy_stated]
    if producers.has_forgotten:
        stated.append(producers.forgotten_stated)
    generation = producers.generation
    for first in range(0, len(producers), STATED_A_RECORD):
        if len(below := producers.stated_below(first_index, first, first + STATED_A_RECORD)):
            stated.append(int(producers.numbers[below, STATED].min()))
        await asyncio.sleep(0)
    if generation != producers.generation:
        # Some producers have new numbers, and were examined before the renumbering.
        return topic.log.first_index
    return max(min(stated), topic.log.first_index)


async def state_again(topic: Topic, first_index: int) -> None:
    """Write again all state that is in force and that the log states only below this index. The log alone must be
    sufficient for recovery.

    The policy is always in force. The term is written with it, because the markers are dropped too, and no term may
    occur twice.
    """
    if topic.policy_stated < first_index:
        await topic.append_change(topic.newest_policy)
    if topic.producers.has_forgotten and topic.producers.forgotten_stated < first_index:
        await topic.append_change(Purge([]))
    parts = control.stated_again(topic.producers, first_index)
    while True:
        while topic.flight.has(Reset) or topic.flight.has(Purge):
            # The current state would be written after the change in flight, and undo that change.
            await topic.flight.all_of_now()
        if (part := next(parts, None)) is None:
            return
        if part.names:
            await topic.append_change(part)
        else:
            await asyncio.sleep(0)
