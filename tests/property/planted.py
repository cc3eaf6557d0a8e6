"""Bugs put into the code on purpose, each a mistake that somebody might make. The property must find every one.

Each function breaks the code through a `MonkeyPatch`.
"""

import asyncio
from functools import partial
from typing import Any

import numpy as np
import pytest

from seqdedupe import batch as batches
from seqdedupe.core import producers, recent, rule
from seqdedupe.core.producers import Activity, Producers
from seqdedupe.core.rule import ADMITTED, EPOCH, NOT_DUP, PERSISTED, PREDECESSOR_MISSING, PUSHED
from seqdedupe.errors import SeqdedupeError
from seqdedupe.format.headers import TOKEN_BYTES
from seqdedupe.format.layout import BASE_INDEX, EPOCHS, PRODUCER_INDEXES, PRODUCERS, ROWS, SEQUENCE_IDS, TERM, start
from seqdedupe.log.contract import Entries, Failure
from seqdedupe.message_id import MessageId, Position
from seqdedupe.store import snapshots
from seqdedupe.topic import control, judge, operations, owner
from seqdedupe.topic import topic as topic_module
from seqdedupe.topic.frame import Flight, NumbersCache, Refusal
from seqdedupe.topic.keeper import Snapshotter
from seqdedupe.topic.owner import Owner
from seqdedupe.topic.policy import Policy
from seqdedupe.topic.sessions import Sessions
from seqdedupe.topic.topic import Topic
from tests.log.faulty import FaultyLog
from tests.property.client import Session


def link_check_left_out(patch: pytest.MonkeyPatch) -> None:
    original = rule.refusal

    def refusal(*arguments: Any) -> int:
        why = original(*arguments)
        return ADMITTED if why == PREDECESSOR_MISSING else why

    patch.setattr(producers, "refusal", refusal)


def link_is_the_id_sent_before(patch: pytest.MonkeyPatch) -> None:
    original = Session.link

    def link(self: Session, first: int) -> int:
        return self.last_sent if 0 <= self.last_sent < first else original(self, first)

    patch.setattr(Session, "link", link)


def frame_admitted_in_part(patch: pytest.MonkeyPatch) -> None:
    original = Topic.admit

    def admit(self: Topic, encoded: bytes, frame: int, reply: Any, cache: NumbersCache, *, lone: bool = False) -> None:
        def in_part(answer: Any) -> None:
            whole = batches.decode(encoded)
            if isinstance(answer, Refusal):
                bad = {p.name for p in answer.producers}
                good = [p for p, name in enumerate(whole.names()) if name not in bad]
                rows = [row for row in range(len(whole)) if whole.producer_of(row) in good]
                if bad and rows:
                    rest = whole.take(np.array(rows, np.int64)).encode()
                    original(self, rest, frame, lambda _: None, NumbersCache(), lone=lone)
            reply(answer)

        original(self, encoded, frame, in_part, cache, lone=lone)

    patch.setattr(Topic, "admit", admit)


def position_of_the_last_admitted_message(patch: pytest.MonkeyPatch) -> None:
    def last_position(self: Topic) -> Position:
        index = self.next_index - 1
        message_id = MessageId.of(self.log.incarnation, index) if index >= 0 else None
        return Position(self.log.incarnation, message_id, index)

    patch.setattr(Topic, "last_position", property(last_position))


def snapshot_of_pushed(patch: pytest.MonkeyPatch) -> None:
    original = Producers.collect_dirty

    def collect_dirty(self: Producers, forgotten: Any = None) -> Any:
        changed, _, epochs, stated = original(self, forgotten)
        return changed, self.numbers[changed, PUSHED], epochs, stated

    patch.setattr(Producers, "collect_dirty", collect_dirty)


def pushed_not_reset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Producers, "fail_in_flight", lambda self: None)


def failure_does_not_take_what_is_behind(patch: pytest.MonkeyPatch) -> None:
    original = Topic.fail_in_flight

    def fail_in_flight(self: Topic, e: SeqdedupeError) -> None:
        waiting = [self.flight.take() for _ in range(len(self.flight))]
        for admitted in waiting[:1]:
            self.flight.add(admitted)
        original(self, e)
        for admitted in waiting[1:]:
            self.flight.add(admitted)

    patch.setattr(Topic, "fail_in_flight", fail_in_flight)


def append_accepted_after_a_refused_one(patch: pytest.MonkeyPatch) -> None:
    # The oldest is refused, and those after it are stored.
    def refuse(self: FaultyLog, *, report: bool = True, why: str = "no room") -> None:
        if self._in_flight:
            self._in_flight.popleft()
        while self._in_flight:
            self.storage.add(*self._in_flight.popleft())
        self._fail(Failure.REFUSED, why, report)

    patch.setattr(FaultyLog, "refuse", refuse)


def replay_from_one_too_late(patch: pytest.MonkeyPatch) -> None:
    original = owner.Replay.__init__

    def init(self: Any, log: Any, next_index: int, merge: Any, skip_below: int, last_ownership: int) -> None:
        original(self, log, next_index, merge, skip_below + 1, last_ownership=0)

    patch.setattr(owner.Replay, "__init__", init)


def no_marker_before_reading(patch: pytest.MonkeyPatch) -> None:
    async def marked(self: Any, replay: owner.Replay) -> tuple[int, bytes]:
        topic = self._topic
        await replay.run()
        term = max([topic.term + 1, *(earlier + 1 for earlier in replay.tokens.values())])
        token = self._random_bytes(TOKEN_BYTES)
        await topic.log.open_for_writing(term, token, partial(topic.settle, topic.opening))
        return term, token

    patch.setattr(Owner, "_marked", marked)


def merge_by_overwriting(patch: pytest.MonkeyPatch) -> None:
    original = recent.persist_all

    def persist_all(raw: Any, table: Any, count: int, slots: Any, first_name: Any, numbers: Any, *others: Any) -> int:
        entered = int(original(raw, table, count, slots, first_name, numbers, *others))
        for k in range(count):
            places = table[k]
            if not places[ROWS]:
                continue
            for p in range(places[PRODUCERS]):
                slot = slots[first_name[k] + p]
                numbers[slot, EPOCH] = _number(raw, start(places, EPOCHS) + 8 * p, 8)
            for row in range(places[ROWS]):
                p = _number(raw, start(places, PRODUCER_INDEXES) + 4 * row, 4) if places[PRODUCERS] > 1 else 0
                numbers[slots[first_name[k] + p], PERSISTED] = _number(raw, start(places, SEQUENCE_IDS) + 8 * row, 8)
        return entered

    patch.setattr(producers, "persist_all", persist_all)


def stale_epoch_accepted(patch: pytest.MonkeyPatch) -> None:
    original = rule.refusal

    def refusal(raw: Any, places: Any, slots: Any, numbers: Any, lone: bool, gapless: bool, reasons: Any) -> int:
        believed = numbers.copy()
        for p, slot in enumerate(slots):
            epoch = _number(raw, start(places, EPOCHS) + 8 * p, 8)
            believed[slot, EPOCH] = min(believed[slot, EPOCH], epoch)
        return original(raw, places, slots, believed, lone, gapless, reasons)

    patch.setattr(producers, "refusal", refusal)


def open_answered_before_its_epoch_is_durable(patch: pytest.MonkeyPatch) -> None:
    original = Topic.append_change

    def append_change(self: Topic, change: control.Change) -> Any:
        original(self, change)
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    patch.setattr(Topic, "append_change", append_change)


def open_fences_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(judge, "_may_be_in_force_again", lambda producer, producers: False)


def retention_forgets_what_is_in_force(patch: pytest.MonkeyPatch) -> None:
    async def state_nothing(topic: Topic, first_index: int) -> None:
        pass

    patch.setattr(topic_module, "state_again", state_nothing)


def control_records_after_the_last_message_not_replayed(patch: pytest.MonkeyPatch) -> None:
    original = owner.Replay._entries

    def entries_of(self: Any, entries: Entries) -> None:
        table = entries.table
        known = (table[:, ROWS] == 0) & (table[:, TERM] == 0) & (table[:, BASE_INDEX] <= self._skip_below)
        if self._skip_below and known.any():
            runs = [entries.runs[int(k)] for k in np.flatnonzero(~known)]
            entries = Entries(entries.raw, np.ascontiguousarray(table[~known]), runs)
        if len(entries.table):
            original(self, entries)

    patch.setattr(owner.Replay, "_entries", entries_of)


def policy_not_replayed(patch: pytest.MonkeyPatch) -> None:
    original = Topic._apply

    def apply(self: Topic, change: control.Change, index: int) -> None:
        if not self.owner._is_recovering or not isinstance(change, Policy):
            original(self, change, index)

    patch.setattr(Topic, "_apply", apply)


def log_trimmed_before_the_snapshot_is_durable(patch: pytest.MonkeyPatch) -> None:
    original = Snapshotter._take

    async def take(self: Snapshotter) -> None:
        self.next_index = self._describe()[1].index + 1
        self._on_durable()
        await original(self)

    patch.setattr(Snapshotter, "_take", take)


def failed_snapshot_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Producers, "mark_dirty", lambda self, numbers: None)


def cut_batch_keeps_its_link(patch: pytest.MonkeyPatch) -> None:
    original = batches.Batch.take

    def take(self: batches.Batch, rows: Any) -> batches.Batch:
        taken = original(self, rows)
        names = self.names()
        taken.previous_sequence_ids = np.array(
            [self.previous_sequence_ids[names.index(name)] for name in taken.names()], np.int64
        )
        return taken

    patch.setattr(batches.Batch, "take", take)


def frame_judged_as_a_whole(patch: pytest.MonkeyPatch) -> None:
    original = Producers.decide

    def decide(self: Producers, *arguments: Any) -> tuple[int, Any]:
        _, verdicts = original(self, *arguments)
        verdicts[:] = verdicts[0]
        return int((verdicts == NOT_DUP).sum()), verdicts

    patch.setattr(Producers, "decide", decide)


def failure_during_recovery_overlooked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Owner, "_failed_meanwhile", property(lambda self: False, lambda self, value: None), raising=False)


def second_recovery_beside_the_first(patch: pytest.MonkeyPatch) -> None:
    failure_during_recovery_overlooked(patch)
    patch.setattr(Owner, "_is_recovering", property(lambda self: False, lambda self, value: None), raising=False)


def landed_frames_answered_as_refused(patch: pytest.MonkeyPatch) -> None:
    def merge(self: Topic, chunk: bytes, table: Any, count: int, runs_of: Any) -> None:
        self.producers.replay(chunk, table, count)
        self.confirmed_index = int(table[count - 1, BASE_INDEX] + table[count - 1, ROWS])

    patch.setattr(Topic, "merge", merge)


def epoch_of_an_earlier_term_taken_for_newer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sessions, "begin_term", lambda self, term, random: None)


def reset_does_not_outlast_a_snapshot(patch: pytest.MonkeyPatch) -> None:
    def maximum(numbers: Any, where: Any, others: Any) -> None:
        numbers[where] = np.maximum(numbers[where], others)

    patch.setattr(snapshots, "overwrite", maximum)


def reset_before_the_last_message_replayed_after_it(patch: pytest.MonkeyPatch) -> None:
    original = owner.Replay._entries

    def entries_of(self: Any, entries: Entries) -> None:
        table = entries.table
        resets = (table[:, ROWS] == 0) & (table[:, TERM] == 0) & (table[:, BASE_INDEX] < self._skip_below)
        if resets.any():
            self._merge(entries.raw, np.ascontiguousarray(table[resets]), int(resets.sum()), lambda k: ())
        original(self, entries)

    patch.setattr(owner.Replay, "_entries", entries_of)


def reset_replayed_after_the_batches_that_follow_it(patch: pytest.MonkeyPatch) -> None:
    original = control.runs

    def runs(chunk: bytes, table: Any, place: str) -> Any:
        found = list(original(chunk, table, place))
        yield table, [change for _, changes in found for change in changes]

    patch.setattr(control, "runs", runs)


def reset_does_not_fence(patch: pytest.MonkeyPatch) -> None:
    original = control.Reset

    def reset(names: Any, epochs: Any, persisted: Any) -> Any:
        return original(names, np.zeros_like(epochs), persisted)

    patch.setattr(operations, "Reset", reset)


def reset_answered_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    original = Topic.append_change

    def append_change(self: Topic, change: control.Change) -> Any:
        done = original(self, change)
        if isinstance(change, control.Reset):
            done = asyncio.get_running_loop().create_future()
            done.set_result(None)
        return done

    patch.setattr(Topic, "append_change", append_change)


def purge_not_replayed(patch: pytest.MonkeyPatch) -> None:
    original = control.apply

    def apply(change: Any, parts: Any, producers: Producers, index: int) -> None:
        if not isinstance(change, control.Purge) or producers.activity._connected:
            original(change, parts, producers, index)

    patch.setattr(control, "apply", apply)


def purge_in_force_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    original = Topic.purge

    async def purge(self: Topic, numbers: Any) -> int:
        self.producers.purge(numbers, self.confirmed_index)
        return await original(self, numbers)

    patch.setattr(Topic, "purge", purge)


def purge_of_what_a_connected_stream_has_used(patch: pytest.MonkeyPatch) -> None:
    def connect(self: Activity) -> int:
        return 1

    patch.setattr(Activity, "connect", connect)


def purge_of_what_another_stream_has_used_since(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Activity, "use_shared", lambda self: iter(()))


def open_does_not_wait_for_a_purge(patch: pytest.MonkeyPatch) -> None:
    original = Flight.has
    patch.setattr(Flight, "has", lambda self, kind: kind is not control.Purge and original(self, kind))


def new_numbers_in_an_old_snapshot(patch: pytest.MonkeyPatch) -> None:
    def renumbered(self: Snapshotter) -> None:
        self._names_stored = min(self._names_stored, len(self._producers))

    patch.setattr(Snapshotter, "renumbered", renumbered)


def _number(raw: Any, at: int, size: int) -> int:
    return int.from_bytes(bytes(raw[at : at + size]), "little", signed=True)


ALL = [
    link_check_left_out,
    link_is_the_id_sent_before,
    frame_admitted_in_part,
    position_of_the_last_admitted_message,
    snapshot_of_pushed,
    pushed_not_reset,
    failure_does_not_take_what_is_behind,
    append_accepted_after_a_refused_one,
    replay_from_one_too_late,
    no_marker_before_reading,
    merge_by_overwriting,
    stale_epoch_accepted,
    open_answered_before_its_epoch_is_durable,
    open_fences_before_it_is_durable,
    retention_forgets_what_is_in_force,
    control_records_after_the_last_message_not_replayed,
    policy_not_replayed,
    log_trimmed_before_the_snapshot_is_durable,
    failed_snapshot_forgotten,
    cut_batch_keeps_its_link,
    frame_judged_as_a_whole,
    second_recovery_beside_the_first,
    failure_during_recovery_overlooked,
    landed_frames_answered_as_refused,
    epoch_of_an_earlier_term_taken_for_newer,
    reset_does_not_outlast_a_snapshot,
    reset_before_the_last_message_replayed_after_it,
    reset_replayed_after_the_batches_that_follow_it,
    reset_does_not_fence,
    reset_answered_before_it_is_durable,
    purge_not_replayed,
    purge_in_force_before_it_is_durable,
    purge_of_what_a_connected_stream_has_used,
    purge_of_what_another_stream_has_used_since,
    open_does_not_wait_for_a_purge,
    new_numbers_in_an_old_snapshot,
]
