"""A topic whose log belongs to a broker: the producers' numbers, and the snapshots of these numbers.

Begin with `AttachedTopic`. A `BrokerAttachment` represents one broker that is attached to the topic over one stream.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seqdedupe.batch import Binary
from seqdedupe.core import rule
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import NOT_DUP, PERSISTED, PUSHED, UNKNOWN
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.format.jit import Int64s, Uint8s
from seqdedupe.limits import MAX_BATCH_ROWS, MAX_POSITION_BYTES
from seqdedupe.message_id import Position
from seqdedupe.names import decoded_producer_name, new_producer_name, producer_name
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Loaded, Snapshots
from seqdedupe.tasks import again_until
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.keeper import DUE_PERIODS, Keeper, producers_of
from seqdedupe.topic.policy import Applied, GapPolicy, OverlapPolicy, Policy

# -- A broker's hold on its topic: the replay of its log, then checks, and reports of their outcomes.
#
# Nothing here waits, and no change is half made: if a function raises, it has changed nothing. The rules for the broker
# are in dedupe.proto.

NO_ADMISSION = -1
NO_ROW = -1
"""The row of a handle that was released because its producer no longer exists."""
FIRST_HANDLES = 64
"""The number of handles for which there is room at first. The room grows by an eighth."""
ADMISSION_TIMEOUT_SECONDS = 30.0
"""If a broker does not report the outcome of a new message within this time, the broker is detached."""
ADMISSION_BYTES = 24
"""The approximate size of one admission in flight: handle, IDs, and whether it passes."""
CHECK_BYTES = 704
"""The additional size of the column objects for the admissions of one check."""
_NO_PASSES: Uint8s = np.zeros(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of messages or entries: handle (int32), lowest and highest sequence ID (int64), and whether the row
    passes.

    `highest` may be the same array as `lowest`, and `passes` may be empty. Otherwise all must have the same length, or
    `check` raises INVALID_REQUEST.
    """

    handles: np.ndarray
    lowest: np.ndarray
    highest: np.ndarray
    passes: np.ndarray = field(default_factory=lambda: _NO_PASSES)

    def __len__(self) -> int:
        return len(self.lowest)

    def __getitem__(self, rows: Any) -> "Columns":
        """Return some of the rows, selected as in numpy."""
        passes = self.passes[rows] if len(self.passes) else self.passes
        return Columns(self.handles[rows], self.lowest[rows], self.highest[rows], passes)

    def of_messages(self) -> np.ndarray:
        """Return the handles of the rows that are messages (rows without `passes`)."""
        return self.handles[self.passes == 0] if len(self.passes) else self.handles

    def check(self) -> None:
        """Raise INVALID_REQUEST if there are no rows or too many, or if a column has no value for a row."""
        rows = len(self)
        if not 1 <= rows <= MAX_BATCH_ROWS:
            raise error("INVALID_REQUEST", f"there are {rows} sequence IDs: 1 to {MAX_BATCH_ROWS} are taken at once")
        if len(self.handles) != rows or len(self.highest) != rows or len(self.passes) not in (0, rows):
            raise error("INVALID_REQUEST", f"the columns do not have one value for each of the {rows} sequence IDs")


@dataclass(frozen=True, slots=True)
class Checked:
    """The verdicts of a check, the count of its admissions, and the number of the first admission (NO_ADMISSION if
    there is none)."""

    verdicts: Uint8s
    admissions: int
    first_admission: int


@dataclass(slots=True)
class _Admitted:
    """The admissions of one check that are in flight."""

    columns: Columns
    at_seconds: float


class BrokerAttachment:
    """The replay, checks and reports of one broker. `position` is the position of the last entry that is known to be
    stored."""

    def __init__(self, producers: Producers, position: bytes) -> None:
        self.position = position
        self.replayed = 0
        self.is_ready = False
        """Whether the replay has ended, so that checks are answered."""
        self.has_failed = False
        """Whether an admission has failed, and the broker has not called reset since."""
        self._producers = producers
        self._rows_of: Int64s = np.zeros(FIRST_HANDLES, np.int64)
        """The producer row of each handle."""
        self._is_live: Uint8s = np.zeros(FIRST_HANDLES, np.uint8)
        """A flag for each handle: 1 if it may be used, 0 if it was released or is not assigned yet."""
        self._handles = 0
        self._found: Int64s = np.zeros(2, np.int64)
        """The row that cannot be judged. For a gap, also the missing ID."""
        self._in_flight: deque[_Admitted] = deque()
        self._admitted = 0
        self._settled = 0

    @property
    def in_flight(self) -> int:
        """The number of admissions that have no report yet."""
        return self._admitted - self._settled

    @property
    def held_bytes(self) -> int:
        """The bytes of the admissions in flight."""
        return self.in_flight * ADMISSION_BYTES + len(self._in_flight) * CHECK_BYTES

    @property
    def waits_since(self) -> float | None:
        """The time of the oldest admission in flight; None if there is none."""
        return self._in_flight[0].at_seconds if self._in_flight else None

    # -- names -------------------------------------------------------------------------------------------------

    def check_names(self, names: list[bytes]) -> None:
        """Raise INVALID_NAME for the first name that no producer can have."""
        for name in names:
            shown = decoded_producer_name(name)
            if producer_name(shown) not in self._producers:
                new_producer_name(shown)

    def register(self, first_handle: int, names: list[bytes]) -> None:
        """Assign the next handles to these names. Raises INVALID_REQUEST, INVALID_NAME."""
        if first_handle != self._handles:
            raise error(
                "INVALID_REQUEST", f"first_handle is {first_handle}: the next handle is {self._handles}",
                next_handle=self._handles,
            )  # fmt: skip
        self.check_names(names)
        end = self._handles + len(names)
        if end > (room := len(self._rows_of)):
            # The array grows in place, like `Producers`, because there may be millions of handles. No view of the array
            # may be kept.
            self._rows_of.resize(max(end, room + room // 8), refcheck=False)
            self._is_live.resize(len(self._rows_of), refcheck=False)
        self._rows_of[self._handles : end] = numbers = self._producers.add_all(names)
        self._producers.activity.use(numbers)
        self._is_live[self._handles : end] = 1
        self._handles = end

    def release(self, handles: np.ndarray) -> None:
        """Release these handles. Raises INVALID_REQUEST."""
        is_live = self._is_live
        if len(handles) and (handles.min() < 0 or handles.max() >= len(is_live) or not is_live[handles].all()):
            raise error("INVALID_REQUEST", "the request releases handles that are not registered")
        is_live[handles] = 0

    def in_use(self) -> list[Int64s]:
        """Return, in parts, the producers that have a handle, or had a handle when their messages in flight were
        admitted."""
        is_used = self._is_live[: self._handles] != 0
        for admitted in self._in_flight:
            is_used[admitted.columns.of_messages()] = True
        rows = self._rows_of[: self._handles][is_used]
        return [rows[first : first + MAX_BATCH_ROWS] for first in range(0, len(rows), MAX_BATCH_ROWS)]

    def renumber(self, new_numbers: Int64s) -> None:
        """Give the producers new numbers, indexed by the old number. NO_ROW: the producer is removed, with its
        handles."""
        rows = self._rows_of[: self._handles]
        has_row = rows != NO_ROW
        rows[has_row] = new_numbers[rows[has_row]]

    # -- replay ------------------------------------------------------------------------------------------------

    def replay(self, columns: Columns, positions: Binary, previous: Binary) -> None:
        """Replay entries that follow `position` in the log. Each entry has the position of the previous entry.

        Raises REPLAY_GAP if the entries do not follow; INVALID_REQUEST, INVALID_SEQUENCE_ID.
        """
        if self.is_ready:
            raise error("INVALID_REQUEST", "the replay has ended already")
        columns.check()
        self._check_sound(columns, overlap=False)
        if not positions.cuts_into(len(columns)) or not previous.cuts_into(len(columns)):
            raise error("INVALID_REQUEST", f"the offsets of the positions do not fit {len(columns)} entries")
        lengths = np.diff(positions.offsets)
        if lengths.min() < 1 or lengths.max() > MAX_POSITION_BYTES:
            raise error("INVALID_REQUEST", f"a position has 1 to {MAX_POSITION_BYTES} bytes")
        if not _follow(self.position, positions, previous):
            raise error(
                "REPLAY_GAP",
                f"after {self.replayed} entries, the last of which is at {_shown(self.position)}, comes one that was "
                "not written right after it: entries are missing",
                replayed=self.replayed,
            )
        self._confirm(columns)
        self.replayed += len(columns)
        self.position = positions.data[int(positions.offsets[-2]) :]

    def end_replay(self, last_position: bytes) -> None:
        """End the replay. `last_position` is the position of the log's last entry (empty: no entry). Raises REPLAY_GAP
        if the replay ended elsewhere."""
        if self.is_ready:
            raise error("INVALID_REQUEST", "the replay has ended already")
        if last_position != self.position:
            raise error(
                "REPLAY_GAP",
                f"the log ends with {_shown(last_position)}, but the last entry known is {_shown(self.position)}",
                replayed=self.replayed,
            )
        self.is_ready = True

    # -- verdicts ----------------------------------------------------------------------------------------------

    def check(self, columns: Columns, policy: Applied, now_seconds: float) -> Checked:
        """Return the verdicts. New messages count as in flight from now on.

        Raises NOT_ATTACHED before the replay has ended, INVALID_REQUEST, INVALID_SEQUENCE_ID, OVERLAP, GAP.
        """
        if not self.is_ready:
            raise error("NOT_ATTACHED", "the replay has not ended yet")
        columns.check()
        rows = len(columns)
        overlap = policy.deduplication_enabled and policy.overlap is OverlapPolicy.REJECT
        if self.has_failed:
            self._check_sound(columns, overlap=overlap)
            return Checked(np.full(rows, UNKNOWN, np.uint8), 0, NO_ADMISSION)
        verdicts = np.empty(rows, np.uint8)
        new = rule.judge_ranges(
            columns.handles,
            columns.lowest,
            columns.highest,
            columns.passes,
            self._rows_of,
            self._is_live,
            self._producers.numbers,
            overlap,
            policy.gap is GapPolicy.REJECT,
            policy.deduplication_enabled,
            self._found,
            verdicts,
        )
        if new < 0:
            raise self._unsound(columns, -new, int(self._found[0]))
        if not new:
            return Checked(verdicts, 0, NO_ADMISSION)
        first = self._admitted
        admitted = columns if new == rows else columns[verdicts == NOT_DUP]
        self._in_flight.append(_Admitted(admitted, now_seconds))
        self._admitted += new
        return Checked(verdicts, new, first)

    def _check_sound(self, columns: Columns, *, overlap: bool) -> None:
        found, numbers = self._found, self._producers.numbers
        wrong = rule.check_ranges(
            columns.handles,
            columns.lowest,
            columns.highest,
            columns.passes,
            self._rows_of,
            self._is_live,
            numbers,
            overlap,
            found,
        )
        if wrong != rule.SOUND:
            raise self._unsound(columns, wrong, int(found[0]))

    def _unsound(self, columns: Columns, wrong: int, row: int) -> SeqdedupeError:
        handle, lowest, highest = (int(column[row]) for column in (columns.handles, columns.lowest, columns.highest))
        if wrong == rule.BAD_HANDLE:
            return error("INVALID_REQUEST", f"message {row} has the handle {handle}, which is not registered", row=row)
        if wrong == rule.BAD_ID:
            return error(
                "INVALID_SEQUENCE_ID",
                f"message {row} has the sequence IDs {lowest} to {highest}: they should be 0 or higher, and rise",
                hint="Begin each range at 0 or higher, and end the range at or above its begin.",
                row=row,
            )
        numbers = self._producers.numbers[self._rows_of[handle]]
        pushed, persisted = int(numbers[PUSHED]), int(numbers[PERSISTED])
        if wrong == rule.RANGE_GAP:
            expected = int(self._found[1])
            return error(
                "GAP",
                f"message {row} has sequence ID {lowest}, but its producer has not sent {expected}, and the topic's "
                "policy rejects gaps",
                row=row,
                pushed=pushed,
                persisted=persisted,
                expected_sequence_id=expected,
            )
        return error(
            "OVERLAP",
            f"message {row} has the sequence IDs {lowest} to {highest}, of which those up to {persisted} are "
            "persisted: split it",
            row=row,
            pushed=pushed,
            persisted=persisted,
        )

    # -- outcomes ----------------------------------------------------------------------------------------------

    def report(self, first_admission: int, persisted: int, position: bytes, failed: int) -> None:
        """Settle the oldest admissions: the first `persisted` admissions are stored, the last of them at `position`;
        the next `failed` admissions have failed.

        Raises NOT_ATTACHED if the report is out of order, or reports an entry as stored after a failure;
        INVALID_REQUEST.
        """
        if bool(persisted) != bool(position) or len(position) > MAX_POSITION_BYTES:
            raise error(
                "INVALID_REQUEST", f"the last of {persisted} persisted admissions needs a position of 1 to "
                f"{MAX_POSITION_BYTES} bytes",
            )  # fmt: skip
        if first_admission != self._settled or persisted + failed > self.in_flight:
            raise error(
                "NOT_ATTACHED",
                f"{persisted + failed} admissions are reported from number {first_admission} on, but "
                f"{self.in_flight} are in flight from number {self._settled} on",
                first_admission=self._settled,
                in_flight=self.in_flight,
            )
        if persisted and self.has_failed:
            raise error("NOT_ATTACHED", "an admission is reported persisted after one that failed: the log has a hole")
        for columns in self._take(persisted):
            self._confirm(columns)
        if persisted:
            self.position = position
        for _ in self._take(failed):
            self.has_failed = True

    def _confirm(self, columns: Columns) -> None:
        producers = self._producers
        rule.confirm_ranges(
            columns.handles, columns.highest, columns.passes, self._rows_of, producers.numbers, producers.dirty
        )

    def _take(self, count: int) -> Iterator[Columns]:
        """Remove and yield the oldest `count` admissions, which have settled, one check at a time."""
        self._settled += count
        while count:
            oldest = self._in_flight[0]
            settled, oldest.columns = oldest.columns[:count], oldest.columns[count:]
            if not oldest.columns:
                self._in_flight.popleft()
            count -= len(settled)
            yield settled

    def reset(self) -> None:
        """Revoke pushed IDs that are not persisted. Raises INVALID_REQUEST while an admission is in flight."""
        if self.in_flight:
            raise error(
                "INVALID_REQUEST", f"{self.in_flight} admissions are in flight: report them as failed before the reset"
            )
        self._producers.fail_in_flight()
        self.has_failed = False


def _follow(last: bytes, positions: Binary, previous: Binary) -> bool:
    """Return whether each entry names the previous entry as its predecessor, and the first entry names `last`."""
    before = np.concatenate((np.zeros(1, np.int32), positions.offsets[:-1] + np.int32(len(last))))
    if not np.array_equal(previous.offsets, before):
        return False
    return previous.data == last + positions.data[: int(positions.offsets[-2])]


def _shown(position: bytes) -> str:
    return repr(position) if position else "its start"


logger = logging.getLogger("seqdedupe.topic")

NOBODY = "no broker is attached"

COUNT_SECONDS = 0.05
"""Stored entries are collected for this time, and then counted together towards the next snapshot. Otherwise a log that
grows by millions of entries a second would be snapshotted without a pause."""


class AttachedTopic(TopicBase):
    """The numbers of a broker's topic. `confirmed_index` counts the entries that are known to be in the log.

    The contents of the snapshot are certain, whether or not a broker is attached. The next broker that attaches reports
    all later entries again. `now_seconds` is a clock that never goes back.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        store: Store,
        snapshots: Snapshots,
        loaded: Loaded | None,
        *,
        applied: Applied,
        now_seconds: Callable[[], float],
        on_state: Callable[["AttachedTopic"], None],
        producers: Producers | None = None,
    ) -> None:
        super().__init__(
            name,
            incarnation,
            producers_of(loaded) if producers is None else producers,
            loaded,
            first_index=0,
            applied=applied,
            on_state=on_state,
        )
        self.position = loaded.opaque if loaded else b""
        """The position of the last entry that is known to be in the log; empty if there is none."""
        self.trim_position = self.position
        """A durable snapshot covers all entries up to this position, inclusive."""
        self.why = NOBODY
        self.knows_its_end = True
        self._now_seconds = now_seconds
        self._attachment: BrokerAttachment | None = None
        self._end: Callable[[SeqdedupeError], None] | None = None
        self._trim_moved: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._uncounted = 0
        self._counting: asyncio.TimerHandle | None = None
        self.keeper = Keeper(self, store, snapshots)

    @property
    def window(self) -> None:
        """None: there are no deduplication IDs."""
        return None

    @property
    def first_index(self) -> int:
        return 0

    @property
    def log_bytes(self) -> int:
        return 0

    @property
    def last_position(self) -> Position:
        """The number of entries, as a position. The broker's own positions state where the last entry is."""
        return Position(self.incarnation, None, self.confirmed_index - 1)

    async def position_before(self, index: int) -> Position:
        return Position(self.incarnation, None, index - 1)

    def check_serving(self) -> None:
        """Raise DRAINING, TOPIC_NOT_FOUND. The numbers are available with or without a broker."""
        if self.state is State.DRAINING:
            raise error(self.closed_because, f"topic {self.name}: {self.why}")

    def log_place(self) -> bytes:
        return self.position

    def snapshot_is_durable(self) -> None:
        if self.trim_position != self.keeper.snapshotter.opaque:
            self.trim_position = self.keeper.snapshotter.opaque
            if self._trim_moved is not None:
                self._trim_moved()

    # -- who is attached ---------------------------------------------------------------------------------------

    def attach(self, end: Callable[[SeqdedupeError], None], trim_moved: Callable[[], None]) -> BrokerAttachment:
        """Attach a broker to the topic. A broker that was attached before is notified of the end of its attachment.
        Forget appends in flight: the replay restores them.

        `end` is called once, with the reason, if something other than `detach` ends the attachment. `trim_moved` is
        called when `trim_position` has changed. Raises DRAINING, TOPIC_NOT_FOUND.
        """
        if self.held is not None:
            raise self.held
        if self.state is State.DRAINING:
            raise error(self.closed_because, f"topic {self.name} is closed")
        self._detach(error("NOT_ATTACHED", f"another broker has attached topic {self.name}"))
        self.producers.fail_in_flight()
        self._attachment = attachment = BrokerAttachment(self.producers, self.position)
        self._end, self._trim_moved = end, trim_moved
        self.change_state(State.RECOVERING, "the broker replays its log")
        return attachment

    @property
    def is_attached(self) -> bool:
        """Whether a broker is attached."""
        return self._attachment is not None

    def detach(self, attachment: BrokerAttachment) -> None:
        """Detach a broker whose stream has ended, if it is still the attached broker."""
        if attachment is self._attachment:
            self._end = None
            self._detach(error("NOT_ATTACHED", NOBODY))
            self.change_state(State.RECOVERING, NOBODY)

    def _detach(self, why: SeqdedupeError) -> None:
        end, self._end = self._end, None
        self._attachment = self._trim_moved = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if end is not None:
            end(why)

    # -- reports of the broker ---------------------------------------------------------------------------------

    def replayed(self, attachment: BrokerAttachment, entries: int) -> None:
        """Record that `entries` entries were replayed, up to `attachment.position`."""
        self.position = attachment.position
        self._stored(entries)

    def ready(self) -> None:
        """Start to serve after the end of the replay."""
        self.change_state(State.SERVING, "")

    def check(self, attachment: BrokerAttachment, columns: Columns) -> Checked:
        """See `BrokerAttachment.check`. Also raises the reason why the topic is on hold."""
        try:
            if self.held is not None:
                raise self.held
            checked = attachment.check(columns, self.applied, self._now_seconds())
        except SeqdedupeError:
            self.counters.refused += 1
            raise
        self.counters.count_verdicts(checked.verdicts, checked.admissions)
        if self._timer is None and attachment.in_flight:
            self._watch(attachment)
        return checked

    def report(
        self, attachment: BrokerAttachment, first_admission: int, persisted: int, position: bytes, failed: int
    ) -> None:
        """See `BrokerAttachment.report`."""
        attachment.report(first_admission, persisted, position, failed)
        if persisted:
            self.position = attachment.position
            self._stored(persisted)
        self.counters.log_failures += bool(failed)

    def _stored(self, entries: int) -> None:
        self.confirmed_index += entries
        self._uncounted += entries
        if self._counting is None:
            self._count()

    def _count(self) -> None:
        self._counting = None
        if self._uncounted:
            self.keeper.snapshotter.stored(self._uncounted)
            self._uncounted = 0
            self._counting = asyncio.get_running_loop().call_later(COUNT_SECONDS, self._count)

    def _watch(self, attachment: BrokerAttachment) -> None:
        """Detach the broker if the oldest admission in flight has waited too long. Otherwise set a timer that checks
        this admission again."""
        self._timer = None
        since = attachment.waits_since
        if since is None:
            return
        left = since + ADMISSION_TIMEOUT_SECONDS - self._now_seconds()
        if left > 0:
            self._timer = asyncio.get_running_loop().call_later(left, self._watch, attachment)
            return
        why = f"an admission was not reported for {ADMISSION_TIMEOUT_SECONDS:g} seconds"
        logger.warning("topic %s: %s", self.name, why)
        self._detach(error("NOT_ATTACHED", why))
        self.change_state(State.RECOVERING, NOBODY)

    # -- requests of others ------------------------------------------------------------------------------------

    def numbers_of(self, name: str) -> tuple[int, int]:
        """Return the pushed and the persisted ID of a producer. Raises NOT_ATTACHED while the IDs are not known,
        PRODUCER_NOT_FOUND."""
        if self.state is not State.SERVING:
            raise error("NOT_ATTACHED", f"topic {self.name}: {self.why}")
        number = self.producers.number(producer_name(name))
        if number is None or not self.producers.is_known(number):
            raise error("PRODUCER_NOT_FOUND", f"topic {self.name} knows no producer {name!r}", topic=self.name)
        numbers = self.producers.numbers[number]
        return int(numbers[PUSHED]), int(numbers[PERSISTED])

    def put_in_force(self, policy: Policy) -> None:
        self.policy = policy
        self.applied = self.inherited.under(policy)
        self.keeper.apply(self.applied)

    async def set_policy(self, policy: Policy) -> None:
        """Replace the whole policy. The new policy is in force at once. When this returns, the new policy is durable.
        After STORE_UNAVAILABLE the policy is in force, and the topic tries later to make it durable."""
        self.put_in_force(policy)
        try:
            await self.keeper.snapshot()
        except SeqdedupeError:
            self.spawn(again_until(self._is_durable))
            raise

    async def _is_durable(self) -> bool:
        try:
            await self.keeper.snapshot()
        except SeqdedupeError:
            return False
        return True

    # -- unused producers --------------------------------------------------------------------------------------

    def in_use(self) -> list[Int64s]:
        """Return the producers that the broker has registered, or that have something in flight."""
        return [] if self._attachment is None else self._attachment.in_use()

    async def purge(self, numbers: Int64s) -> int:
        """Forget producers after a durable snapshot without them. A replay begins after this snapshot, so the replay
        does not contain these producers."""
        producers, before = self.producers, self.counters.purged

        def due() -> Int64s:
            return np.intersect1d(numbers, producers.due(DUE_PERIODS, int(numbers[0]), int(numbers[-1]) + 1))

        def forget(forgotten: Int64s) -> None:
            if not len(forgotten):
                return
            still = due()
            producers.purge(still, self.confirmed_index)
            self.counters.purged += len(still)
            producers.mark_dirty(forgotten)
            if len(still) < len(forgotten):
                # The store needs another snapshot that contains the producers that came back meanwhile.
                self.spawn(self.keeper.snapshot_in_background())

        await self.keeper.snapshotter.forget(due, forget)
        return self.counters.purged - before

    def renumber(self, new_numbers: Int64s) -> None:
        if self._attachment is not None:
            self._attachment.renumber(new_numbers)

    # -- the end -----------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Do nothing, because there is no log to read. The broker that attaches reports its log."""

    async def drain(self) -> None:
        """Accept no more messages, and take a last snapshot."""
        self._closing("the sidecar is shutting down")
        await self.keeper.snapshot_in_background()
        await self.end_tasks()

    async def close(self, why: str) -> None:
        self._closing(why)
        await self.end_tasks()

    async def delete(self) -> None:
        """Close the topic permanently. Callers that still use this object get the error that the topic does not
        exist."""
        self.closed_because = "TOPIC_NOT_FOUND"
        self._closing("it was deleted")
        await self.end_tasks()

    def _closing(self, why: str) -> None:
        self.change_state(State.DRAINING, why)
        self._detach(error(self.closed_because, f"topic {self.name}: {why}"))
