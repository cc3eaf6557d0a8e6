"""The judges. A judge decides about a frame before the frame is passed to the log, and tracks the outcome afterwards.

There are two judges: `BySequenceId` uses the rule, and the links and epochs of producers; `ByDeduplicationId` uses only
the IDs. A judge returns a refusal, or two things: the batch to append with its index, and the receipt to send once the
batch is stored.

Judges decide about frames in the order of arrival. After the decision, new rows count as in flight. New rows are
confirmed in the same order, or fail together.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from seqdedupe.core import rule
from seqdedupe.core.id_runs import ImportedIds
from seqdedupe.core.id_table import IMPORTED
from seqdedupe.core.id_window import NONE_OLDER, IdWindow, Moment
from seqdedupe.core.producers import Producers
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.figures import counted
from seqdedupe.format.headers import SECRET_BYTES
from seqdedupe.format.jit import Int64s, Int64s2, Uint8s
from seqdedupe.format.layout import (
    BASE_INDEX,
    EPOCHS,
    LINKS,
    PRODUCER_INDEXES,
    PRODUCERS,
    PUBLISH_TIME_MS,
    ROWS,
    SEQUENCE_IDS,
    size,
    start,
)
from seqdedupe.limits import NO_EPOCH, NO_LIMIT, NO_SEQUENCE_ID
from seqdedupe.store.db import Store
from seqdedupe.topic.clock import Clock
from seqdedupe.topic.frame import (
    NONE_KNOWN,
    Allowing,
    Frame,
    FrameReceipt,
    NumbersCache,
    OutOfStepError,
    Refusal,
    RefusedProducer,
    check,
    check_by_id,
    cut,
    names_of,
)
from seqdedupe.topic.policy import Applied, DeduplicationRoute, GapPolicy, Policy
from seqdedupe.topic.sessions import can_have_been_given
from seqdedupe.topic.window_runs import LookedUp, WindowImported, WindowMemory, WindowRuns

MAX_PRODUCERS_IN_REFUSAL = 16


class BySequenceId:
    """The judge that uses the numbers of producers: links, epochs, and the rule."""

    def __init__(self, producers: Producers) -> None:
        self._producers = producers

    def decide(
        self,
        encoded: bytes,
        number: int,
        cache: NumbersCache,
        *,
        next_index: int,
        applied: Applied,
        lone: bool,
        check_log: Callable[[bytes], None],
        looked_up: Any,
    ) -> tuple[Frame | None, FrameReceipt | Refusal]:
        """Return the batch to append (None: nothing to append), and the answer to send. If there is a batch, the answer
        is sent once the batch is stored. Otherwise it is sent immediately.

        New rows get indexes from `next_index`. `check_log` raises an error if the log cannot accept a batch. With
        `lone`, links may be omitted. `looked_up`: see `ByDeduplicationId.look_up`. An invalid frame causes a refusal,
        not an exception. Raises OutOfStepError.
        """
        producers = self._producers
        try:
            frame = check(encoded, producers, cache)
            check_log(frame.encoded)
        except SeqdedupeError as e:
            return None, Refusal(number, e)
        if cache.allowing is not None and len(cache.forbidden):
            return None, Refusal(number, *forbidden(cache.allowing, cache.forbidden))
        gapless = applied.gap is GapPolicy.REJECT
        why = producers.refusal(frame.view, frame.places, frame.producer_rows, lone, gapless)
        if why:
            return None, Refusal(number, *refused(frame, producers, why, lone, gapless))
        try:
            new, verdicts = producers.decide(
                frame.view, frame.places, frame.producer_rows, applied.deduplication_enabled
            )
            if new == frame.rows:
                frame.places[BASE_INDEX] = next_index
                return frame, FrameReceipt(number, None, next_index, (), *NONE_KNOWN)
            known = producers.originals(frame.view, frame.places, frame.producer_rows, verdicts)
            if not new:
                return None, FrameReceipt(number, verdicts, -1, (), *known)
            frame = cut(frame, verdicts)
            frame.places[BASE_INDEX] = next_index
            return frame, FrameReceipt(number, verdicts, next_index, (), *known)
        except Exception as e:
            raise OutOfStepError from e

    def confirm(self, frame: Frame) -> None:
        """Confirm the oldest frame in flight, which is in the log."""
        self._producers.persist(frame.view, frame.places, frame.producer_rows)

    def fail(self) -> None:
        """Fail everything in flight: these messages do not count as pushed any more."""
        self._producers.fail_in_flight()


# -- The reason why a frame is refused, and the numbers of the producers that caused it.


def forbidden(allowing: Allowing, numbers: Int64s) -> tuple[SeqdedupeError, list[RefusedProducer]]:
    """Return the error for a frame with producers that its client may not use, and the names of these producers. The
    producers' numbers are not shown."""
    names = [name.decode() for name in allowing.producers.names_of(numbers[:MAX_PRODUCERS_IN_REFUSAL])]
    unknown = NO_SEQUENCE_ID
    listed = [RefusedProducer(name, NO_EPOCH, NO_EPOCH, unknown, unknown, unknown, unknown) for name in names]
    return allowing.deny(names), listed


def refused(
    frame: Frame, producers: Producers, why: int, lone: bool, gapless: bool
) -> tuple[SeqdedupeError, list[RefusedProducer]]:
    """Return the error for a result of `Producers.refusal`, and the numbers of the producers that caused the
    refusal."""
    epochs, links, first = _of_producers(frame)
    names = names_of(frame.encoded, frame.places)
    reasons = producers.reasons(frame.view, frame.places, frame.producer_rows, lone, gapless)
    expected = producers.expected_ids(frame.view, frame.places, frame.producer_rows).tolist()
    listed = []
    for p in np.flatnonzero(reasons == why).tolist():
        numbers_of = producers.numbers[frame.producer_rows[p]].tolist()
        listed.append(
            RefusedProducer(
                names[p].decode(),
                epochs[p],
                numbers_of[rule.EPOCH],
                first[p],
                links[p],
                numbers_of[rule.PUSHED],
                numbers_of[rule.PERSISTED],
                expected[p] if why == rule.GAP else None,
            )
        )
    in_force_again: list[RefusedProducer] = []
    unknown: list[RefusedProducer] = []
    if why == rule.FENCED:
        in_force_again = [p for p in listed if _may_be_in_force_again(p, producers)]
        unknown = [p for p in listed if not _is_stale(p)]
    one = (in_force_again or unknown or listed)[0]
    numbers: dict[str, Any] = {
        "producer_name": one.name,
        "sequence_id": one.sequence_id,
        "previous_sequence_id": one.previous_sequence_id,
        "pushed": one.pushed,
        "persisted": one.persisted,
    }
    if why == rule.INVALID_PREDECESSOR:
        e = error(
            "INVALID_PREDECESSOR",
            f"producer {one.name!r} links sequence ID {one.sequence_id} to {one.previous_sequence_id}, which is not "
            "below it",
            **numbers,
        )
    elif in_force_again:
        e = error(
            "RECOVERING",
            f"producer {one.name!r} is being opened by another session: the outcome will be known in a moment",
            **numbers,
        )
    elif why == rule.FENCED and not unknown:
        e = error(
            "FENCED",
            f"producer {one.name!r} has been opened by another session: its epoch is {one.current_epoch}, not "
            f"{one.epoch}",
            **numbers,
            epoch=one.epoch,
            current_epoch=one.current_epoch,
        )
    elif why == rule.FENCED:
        given = ", which this topic did not give it" if one.current_epoch else ", and has no session (any more)"
        e = error(
            "INVALID_EPOCH",
            f"producer {one.name!r} sends with epoch {one.epoch}{given}",
            **numbers,
            epoch=one.epoch,
            current_epoch=one.current_epoch,
        )
    elif why == rule.LINK_REQUIRED:
        e = error(
            "LINK_REQUIRED",
            f"producer {one.name!r} omits its previous sequence ID: only a unary call without other frames may",
            **numbers,
        )
    elif why == rule.GAP:
        e = error(
            "GAP",
            f"producer {one.name!r} leaves sequence ID {one.expected_sequence_id} out, and the topic's policy rejects "
            "gaps",
            **numbers,
            expected_sequence_id=one.expected_sequence_id,
        )
    else:
        e = error(
            "PREDECESSOR_MISSING",
            f"producer {one.name!r} sends {one.sequence_id} after {one.previous_sequence_id}, but only "
            f"{one.pushed} has arrived: resend the messages between them",
            **numbers,
        )
    return e, listed[:MAX_PRODUCERS_IN_REFUSAL]


def _of_producers(frame: Frame) -> tuple[list[int], list[int], list[int]]:
    """Return epoch, link and first sequence ID of each producer."""

    def column(kind: type[np.int32 | np.int64], which: int) -> Any:
        values = size(frame.places, which) // np.dtype(kind).itemsize
        return np.frombuffer(frame.encoded, kind, values, start(frame.places, which)) if values else np.zeros(0, kind)

    ids = column(np.int64, SEQUENCE_IDS)
    first = rule.first_ids(column(np.int32, PRODUCER_INDEXES), ids, len(frame.producer_rows))
    return column(np.int64, EPOCHS).tolist(), column(np.int64, LINKS).tolist(), first.tolist()


def _may_be_in_force_again(producer: RefusedProducer, producers: Producers) -> bool:
    """Return whether the producer's earlier session may become valid again because the record of the newer session may
    fail.

    If there is then no durable session, the producer was forgotten, and an earlier session of the producer may be
    resumed.
    """
    number = producers.number(producer.name.encode())
    durable_epoch = NO_EPOCH if number is None else producers.numbers[number, rule.DURABLE_EPOCH]
    return producer.epoch == durable_epoch or (durable_epoch == NO_EPOCH and _is_stale(producer))


def _is_stale(producer: RefusedProducer) -> bool:
    return can_have_been_given(producer.epoch) and producer.epoch < producer.current_epoch


# -- The judge of a topic of deduplication IDs: only the IDs decide. No session, epoch or link is needed.
#
# `ByDeduplicationId` holds everything that a topic knows of them: the window in memory, its runs in the store
# (`window_runs`), and the import.

logger = logging.getLogger("seqdedupe.topic")


class ByDeduplicationId:
    """The judge of a topic of deduplication IDs. It can decide as soon as the topic has a `window`.

    `policy` returns the policy set for the topic. `imported` is the stored data of an import; `on_expired` is called
    when all imported IDs have expired. `take_snapshot`: see `WindowRuns`. `memory` is shared with other topics. Without
    `memory`, the whole window stays in memory.
    """

    def __init__(
        self,
        topic: str,
        incarnation: int,
        store: Store,
        window: IdWindow | None,
        imported: ImportedIds | None,
        *,
        policy: Callable[[], Policy],
        on_expired: Callable[[], None],
        take_snapshot: Callable[[], Awaitable[None]],
        memory: WindowMemory | None,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self.window = window
        """None in a topic of sequence IDs, and until the log has shown that the topic is one of deduplication IDs."""
        self.now: Callable[[], Moment] = Clock().now
        """The clock for the publish times of new messages, and for the age of stored messages."""
        self.imported = WindowImported(topic, imported, policy, on_expired)
        self.runs = WindowRuns(store, incarnation, lambda: self.window, self.imported, take_snapshot)
        self.memory = memory
        self._topic = topic
        self._policy = policy
        self._random_bytes = random_bytes
        self._measured = (-1, -1)

    def begin(self, index: int) -> IdWindow:
        """Return the window of the topic, which is a topic of deduplication IDs. If there is no window, begin a window
        at this index.

        Retention may have dropped the record that first stated the mode. In this case the first batch shows the mode.
        """
        if self.window is None:
            self.window = IdWindow(self._random_bytes(SECRET_BYTES), index)
            if index:
                logger.error(
                    "topic %s: the deduplication IDs of its first %s are lost: retention has dropped the "
                    "messages, and the store has lost the IDs. Copies of them count as new",
                    self._topic,
                    counted(index, "message"),
                )
        return self.window

    # -- frames ------------------------------------------------------------------------------------------------

    async def look_up(self, encoded: bytes) -> LookedUp | None:
        """Prepare a decision: wait for memory, and read the data that the decision needs. Await this if there is a
        `window`.

        The frame must be decided in the following step of the event loop. This waits while all windows together exceed
        their memory limit.
        """
        if self.memory is not None:
            await self.memory.room()
        return await self.runs.look_up(encoded)

    def decide(
        self,
        encoded: bytes,
        number: int,
        cache: NumbersCache,
        *,
        next_index: int,
        applied: Applied,
        lone: bool,
        check_log: Callable[[bytes], None],
        looked_up: LookedUp | None,
    ) -> tuple[Frame | None, FrameReceipt | Refusal]:
        """See `BySequenceId.decide`. DUP always has the index of the original message, except for an imported original.
        The original may be a new row of the same frame. In this case the receipt is sent when the new row is
        stored."""
        window, now = self.begin(next_index), self.now()
        try:
            frame = check_by_id(encoded, wants_keys=self._policy().route is DeduplicationRoute.KEY)
            check_log(frame.encoded)
            in_runs = NONE_OLDER
            if applied.deduplication_enabled:
                # IDs that have just been forgotten must be looked for in the import.
                window.move(applied.window, now.earliest_ms)
                in_runs = self.runs.older(frame, since_ms(applied, now), looked_up)
        except SeqdedupeError as e:
            return None, Refusal(number, e)
        next_index = window.next_index
        try:
            new, verdicts, dups, originals = window.decide(
                frame.view, frame.places, applied.deduplication_enabled, applied.window, now, in_runs
            )
            if not new:
                return None, _receipt(number, verdicts, -1, dups, originals)
            if new == frame.rows:
                frame.places[BASE_INDEX] = next_index
                return frame, FrameReceipt(number, None, next_index, (), *NONE_KNOWN)
            frame = cut(frame, verdicts)
            frame.places[BASE_INDEX] = next_index
            return frame, _receipt(number, verdicts, next_index, dups, originals)
        except Exception as e:
            raise OutOfStepError from e

    def confirm(self, frame: Frame) -> None:
        """See `BySequenceId.confirm`."""
        if self.window is not None:
            self.window.confirm(frame.rows)

    def fail(self) -> None:
        """See `BySequenceId.fail`."""
        if self.window is not None:
            self.window.fail()

    def replay(self, chunk: bytes, batches: Int64s2, applied: Applied) -> None:
        """Put the IDs in these records in force, with their indexes in the log. Messages in flight may have been
        planned for other indexes."""
        view = np.frombuffer(chunk, np.uint8)
        for places in batches[(batches[:, ROWS] > 0) & (batches[:, PRODUCERS] == 0)]:
            index = int(places[BASE_INDEX])
            window = self.begin(index)
            window.fail()
            window.replay(view, places, index, int(places[PUBLISH_TIME_MS]), applied.window)

    # -- memory ------------------------------------------------------------------------------------------------

    def may_have_grown(self, window: IdWindow, snapshots_taken: int) -> None:
        """Measure the window's memory if the window has another chunk, or if a snapshot was taken."""
        if self.memory is None:
            return
        seen = (window.chunks_opened, snapshots_taken)
        if seen != self._measured:
            self._measured = seen
            self.memory.measure(self.runs, window)

    async def close(self) -> None:
        """Stop moving and measuring the window."""
        self.runs.close()
        if self.memory is not None:
            await self.memory.forget(self.runs)


def since_ms(applied: Applied, now: Moment) -> int:
    """Return the publish time up to which IDs have expired; negative: no ID has expired."""
    milliseconds = applied.window.milliseconds
    return -1 if milliseconds == NO_LIMIT else now.earliest_ms - milliseconds


def _receipt(number: int, verdicts: Uint8s, first_index: int, dups: Int64s, originals: Int64s) -> FrameReceipt:
    if not (is_imported := originals == IMPORTED).any():
        return FrameReceipt(number, verdicts, first_index, (), dups, originals)
    known, imported = np.flatnonzero(~is_imported), np.flatnonzero(is_imported)
    return FrameReceipt(number, verdicts, first_index, (), dups[known], originals[known], imported_rows=dups[imported])
