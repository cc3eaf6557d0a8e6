"""The queue of a producer's batches and their receipts. This module fulfils the client's duties (`publish.proto`)
without any I/O.

A batch keeps its place in the queue, its messages and its link until the batch is durable. A batch is always resent
completely, in a new frame. Rows that already have a receipt are then answered DUP, which changes nothing. A batch that
has receipts but is not durable yet is resent only after a resume that does not find the batch's messages.
"""

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from seqdedupe.batch import NO_INT64S
from seqdedupe.client.pending import (
    FRAME_NUMBERS,
    Breaks,
    InFlightBatch,
    PendingBatch,
    ReceiptColumns,
    Verdict,
)
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.figures import counted
from seqdedupe.limits import NO_SEQUENCE_ID


@dataclass(slots=True)
class Counters:
    """The counters of a producer. Rows that are sent again are counted again."""

    rows_sent: int = 0
    not_dup: int = 0
    dup: int = 0
    unknown: int = 0
    frames_refused: int = 0
    connections: int = 0


class SendQueue:
    """The batches of a session that are not durable, oldest first, and the frames in flight on the stream.

    After a refusal or an UNKNOWN, the queue sends nothing (`must_rewind`) until all frames in flight have been
    answered. After the delay, `rewind` restarts from the oldest batch without a receipt.
    """

    def __init__(self) -> None:
        self.counters = Counters()
        self.failure: SeqdedupeError | None = None
        """The failure after which the queue accepts no more batches."""
        self.must_rewind = False
        self.retry_delay_ms = 0
        """With `must_rewind`: the longest delay that a refusal asked for."""
        self.rewinds_at_once = False
        """With `must_rewind`: whether the only cause is a refusal of other producers in a shared frame."""
        self.last_refusal: SeqdedupeError | None = None
        """The reason why nothing has become durable lately; None as soon as something does."""
        self.breaks = Breaks()
        self.size_bytes = 0
        self.without_receipt = 0
        """The number of batches that wait for a receipt."""
        self._not_durable = 0  # the number of batches with receipts that are not durable yet
        self._durable_index = 0  # the highest durable index in an answer
        self._entries: deque[PendingBatch] = deque()
        self._out = 0  # the number of entries from the left sent since the last rewind
        self._unanswered: dict[int, PendingBatch] = {}  # by frame
        self._incarnation = self._term = 0
        self._epochs = NO_INT64S  # the column of every frame
        self._opened = NO_SEQUENCE_ID  # the persisted ID in the last answer to Open
        self._last_queued = NO_SEQUENCE_ID
        self._highest_sent = NO_SEQUENCE_ID
        self._highest_receipt = NO_SEQUENCE_ID
        self._settled_up_to = NO_SEQUENCE_ID  # everything sent up to here has its receipt
        self._gave_up = False  # a batch without a receipt was dropped

    def __len__(self) -> int:
        """Return the number of batches in the queue. A batch leaves the queue when this batch and all earlier batches
        are durable."""
        return len(self._entries)

    @property
    def entries(self) -> Iterable[PendingBatch]:
        """The batches in the queue, oldest first."""
        return tuple(self._entries)

    @property
    def is_all_durable(self) -> bool:
        """Whether all batches with receipts are durable, so that none can be lost."""
        return not self._not_durable

    @property
    def has_unsent(self) -> bool:
        """Whether there are batches that have not been sent."""
        return self._out < len(self._entries)

    @property
    def unanswered(self) -> int:
        """The number of frames on this stream that wait for an answer."""
        return len(self._unanswered)

    @property
    def term(self) -> int:
        """The highest term in any answer."""
        return self._term

    @property
    def incarnation(self) -> int:
        """The topic's incarnation in the answer to Open; 0 before this answer."""
        return self._incarnation

    @property
    def durable_sequence_id(self) -> int:
        """The ID up to which everything sent is durable; -1 if nothing is durable."""
        return max(self._opened, self._settled_up_to)

    @property
    def rows_without_receipt(self) -> int:
        """The number of messages in batches that wait for a receipt."""
        return sum(len(entry.sequence_ids) for entry in self._entries if not entry.has_receipts)

    @property
    def rows_not_durable(self) -> int:
        """The number of messages in batches with receipts that are not durable yet."""
        return sum(len(entry.sequence_ids) for entry in self._entries if entry.has_receipts and not entry.durable)

    def add(self, pending: PendingBatch) -> None:
        """Queue a sealed batch. Its IDs are above the IDs of all batches queued earlier. If the session has failed,
        fail the batch at once."""
        pending.last_refusal = self.last_refusal
        if self.failure is not None:
            pending.fail(self.failure)
            return
        pending.previous_sequence_id = self._last_queued
        if self._last_queued < self._opened < pending.first_sequence_id:
            pending.previous_sequence_id = self._opened
        self._last_queued = pending.last_sequence_id
        self._entries.append(pending)
        self.size_bytes += pending.size_bytes
        self.without_receipt += 1

    def open(
        self,
        incarnation: int,
        term: int,
        epoch: int,
        persisted: int,
        *,
        is_forgotten: bool = False,
        durable_index: int | None = None,
    ) -> bool:
        """Handle an answer to Open, which started or resumed the session. Frames of the old stream are no longer in
        flight. `durable_index` is None if the sidecar has not sent it.

        Return whether the topic once had messages of this producer and has forgotten them by the topic's policy
        (`is_forgotten`). Raises FencedError, DataLossError.
        """
        has_forgotten = is_forgotten and max(self._opened, self._highest_receipt) > persisted
        if has_forgotten:
            self._forget_history(persisted)
        if self.counters.connections:
            self._check_resumed(incarnation, term, persisted, durable_index)
        self._incarnation, self._term, self._opened = incarnation, term, persisted
        self._epochs = np.array([epoch], np.int64)
        self._unanswered.clear()
        self._durable_index = durable_index or 0
        self._settle_after_resume(persisted)
        self.rewind()
        self.counters.connections += 1
        return has_forgotten

    def _settle_after_resume(self, persisted: int) -> None:
        """Settle the batches that have receipts. A batch is durable if Open has found its messages; otherwise the batch
        waits for new receipts."""
        for entry in self._entries:
            if entry.has_receipts and not entry.durable:
                if entry.last_sequence_id <= persisted:
                    self._is_durable(entry)
                else:
                    entry.prepare_resend()
                    self._not_durable -= 1
                    self.without_receipt += 1
        self._let_go()

    def _is_durable(self, entry: PendingBatch) -> None:
        entry.become_durable()
        self._not_durable -= 1
        self._highest_receipt = max(self._highest_receipt, entry.last_sequence_id)

    def _forget_history(self, persisted: int) -> None:
        """Forget earlier messages and answers. The first batch above `persisted` then has the link `persisted`."""
        self._opened, self._highest_receipt, self._last_queued = persisted, NO_SEQUENCE_ID, NO_SEQUENCE_ID
        for entry in self._entries:
            if not entry.durable:
                is_above = self._last_queued < persisted < entry.first_sequence_id
                entry.previous_sequence_id = persisted if is_above else self._last_queued
                self._last_queued = entry.last_sequence_id

    def _check_resumed(self, incarnation: int, term: int, persisted: int, durable_index: int | None) -> None:
        floor = max(self._opened, self._highest_receipt)
        # If the topic has forgotten the name, only this index shows that messages with receipts are gone.
        durable_index = self._durable_index if durable_index is None else durable_index
        is_shorter = durable_index < self._durable_index
        if incarnation != self._incarnation or term < self._term or persisted < floor or is_shorter:
            now_and_before = {
                "term": (term, self._term),
                "incarnation": (incarnation, self._incarnation),
                "durable index": (durable_index, self._durable_index),
            }
            others = (
                f", {name} {now} ({before} before)" for name, (now, before) in now_and_before.items() if now != before
            )
            raise error(
                "DATA_LOSS",
                "the sidecar answers with an older state than before, or with the state of another topic: "
                f"persisted sequence ID {persisted} (at least {floor} before){''.join(others)}",
                persisted=persisted,
                persisted_before=floor,
                term=term,
                term_before=self._term,
                incarnation=incarnation,
                incarnation_before=self._incarnation,
                durable_index=durable_index,
                durable_index_before=self._durable_index,
            )
        if persisted > max(self._opened, self._highest_sent):
            raise error(
                "FENCED",
                f"another process has published under this name: sequence ID {persisted} is persisted, this one has "
                f"sent none above {max(self._opened, self._highest_sent)}",
                persisted=persisted,
                highest_sent=self._highest_sent,
            )

    def next_frame(self) -> InFlightBatch | None:
        """Return the next frame to send; None if there is nothing to send now."""
        if self.must_rewind:
            return None
        while self._out < len(self._entries):
            pending = self._entries[self._out]
            self._out += 1
            batch = pending.batch
            if batch is None or pending.has_receipts:
                continue
            batch.epochs = self._epochs
            batch.previous_sequence_ids = np.array([pending.previous_sequence_id], np.int64)
            number = next(FRAME_NUMBERS)
            self._unanswered[number] = pending
            self._highest_sent = max(self._highest_sent, pending.last_sequence_id)
            self.counters.rows_sent += len(pending.sequence_ids)
            return InFlightBatch(number, batch, pending.size_bytes)
        return None

    def rewind(self) -> None:
        """Send again from the oldest batch without a receipt."""
        self._out = 0
        self.must_rewind = self.rewinds_at_once = False
        self.retry_delay_ms = 0

    def counts(self, incarnation: int, term: int) -> bool:
        """Return whether to accept an answer on the stream: its term must not be lower than the highest term. Raises
        DataLossError."""
        if incarnation != self._incarnation:
            raise error(
                "DATA_LOSS",
                f"the topic was recreated: its incarnation is {incarnation}, and was {self._incarnation} before",
                incarnation=incarnation,
                incarnation_before=self._incarnation,
            )
        if term < self._term:
            return False
        self._term = term
        return True

    def rows_of(self, frame: int) -> int | None:
        """Return the number of rows of a frame that waits for its answer; None for any other frame."""
        pending = self._unanswered.get(frame)
        return None if pending is None else len(pending.sequence_ids)

    def receipt(self, frame: int, receipt: ReceiptColumns) -> None:
        """Record a receipt. A receipt of a frame that is not in flight changes nothing."""
        pending = self._unanswered.pop(frame, None)
        if pending is None:
            return
        self.breaks.clear()
        self._count(receipt, len(pending.sequence_ids))
        pending.record(receipt)
        if pending.durable_at <= self._durable_index:
            self._highest_receipt = max(self._highest_receipt, pending.decided_up_to)
        if not pending.has_receipts:
            self.must_rewind = True
            self.rewinds_at_once = False
            return
        self.without_receipt -= 1
        if pending.durable_at > self._durable_index:
            self._not_durable += 1
        else:
            pending.become_durable()
            self._let_go()

    def durable_up_to(self, index: int) -> None:
        """Record that all messages of the topic below this index are durable."""
        self._durable_index = max(self._durable_index, index)
        if self.is_all_durable:
            return
        for entry in self._entries:
            if entry.has_receipts and not entry.durable and entry.durable_at <= index:
                self._is_durable(entry)
        self._let_go()

    def _count(self, receipt: ReceiptColumns, rows: int) -> None:
        if not len(receipt.verdicts):
            self.counters.not_dup += rows
            return
        by_verdict = np.bincount(receipt.verdicts, minlength=4)
        self.counters.not_dup += int(by_verdict[Verdict.NOT_DUP])
        self.counters.dup += int(by_verdict[Verdict.DUP])
        self.counters.unknown += int(by_verdict[Verdict.UNKNOWN])

    def asks_for_resume(self, frame: int, refusal: SeqdedupeError) -> bool:
        """Return whether this refusal may mean that the topic has forgotten the producer. Only a resume shows whether
        the topic has done so.

        The refusal has this meaning in two cases. The topic does not know the session's epoch. Or the topic lacks the
        predecessor of the first message without a receipt, although that predecessor had a receipt.
        """
        pending = self._unanswered.get(frame)
        if pending is None:
            return False
        is_first = pending is next((entry for entry in self._entries if not entry.has_receipts), None)
        return refusal.reason == "INVALID_EPOCH" or (refusal.reason == "PREDECESSOR_MISSING" and is_first)

    def refused(self, frame: int, refusal: SeqdedupeError) -> None:
        """Handle a refusal. A refusal of a frame that is not in flight changes nothing.

        If sending again cannot help, this batch and all later batches fail. Earlier batches continue.
        """
        pending = self._unanswered.pop(frame, None)
        if pending is None:
            return
        self.counters.frames_refused += 1
        if refusal.retry_delay_ms >= 0:
            self.must_rewind = True
            self.retry_delay_ms = max(self.retry_delay_ms, refusal.retry_delay_ms)
            if refusal.reason != "PREDECESSOR_MISSING":  # that reason only follows from another refusal
                self.rewinds_at_once = False
                self.held_up(refusal)
            return
        self.fail(refusal, pending)

    def broke(self, why: SeqdedupeError, now_seconds: float, *, is_alone: bool) -> None:
        """Count a broken connection. `is_alone` is true if the only frame in flight was a frame of this producer. If a
        frame was alone on too many broken connections, its batch and all later batches fail."""
        if self._unanswered and self.breaks.add(why, now_seconds, is_alone=is_alone):
            (pending,) = self._unanswered.values()
            self.held_up(why)
            what = f"the frame with sequence IDs {pending.first_sequence_id} to {pending.last_sequence_id}"
            self.fail(self.outcome_unknown(self.breaks.why(what, pending.size_bytes)), pending)

    def put_back(self, frame: int) -> None:
        """Return a frame to the queue: the sidecar refused the combined frame because of other producers. A frame that
        is not in flight is ignored."""
        if self._unanswered.pop(frame, None) is None:
            return
        self.counters.frames_refused += 1
        self.rewinds_at_once = self.rewinds_at_once or not self.must_rewind
        self.must_rewind = True

    def held_up(self, why: SeqdedupeError | None) -> None:
        """Record the reason why no batch becomes durable, for callers that wait. None means that batches become durable
        again."""
        if why is not self.last_refusal:
            self.last_refusal = why
            for entry in self._entries:
                entry.last_refusal = why

    def fail(self, failure: SeqdedupeError, first: PendingBatch | None = None) -> None:
        """Fail the batches from `first` on (None: all batches), and all batches that are added later."""
        self.failure = self.failure or failure
        kept = list(itertools.takewhile(lambda entry: entry is not first, self._entries)) if first else []
        failed = [entry for entry in itertools.islice(self._entries, len(kept), None) if not entry.durable]
        for entry in failed:
            if entry.has_receipts:
                self._not_durable -= 1
            else:
                self.without_receipt -= 1
            entry.fail(failure)
        self._unanswered = {frame: entry for frame, entry in self._unanswered.items() if not entry.durable}
        self._let_go()

    def outcome_unknown(self, what: str) -> SeqdedupeError:
        """Return the error of batches that are given up. The error contains the reason, the durable ID, and the number
        of messages without a receipt."""
        why, durable, left = self.last_refusal, self.durable_sequence_id, self.rows_without_receipt
        because = "" if why is None else f": {why}"
        up_to = f"everything up to sequence ID {durable} is durable" if durable >= 0 else "nothing is durable yet"
        if late := self.rows_not_durable:
            up_to += f", {late:,} with a receipt {'is' if late == 1 else 'are'} not known to be"
        given_up = error(
            "OUTCOME_UNKNOWN",
            f"{what}{because}; {up_to}, {counted(left, 'message has', 'messages have')} no receipt",
            hint=None if why is None else why.hint,
            durable_sequence_id=durable,
            messages_without_receipt=left,
        )
        if why is not None:
            given_up.numbers["last_refusal"] = why.reason
        return given_up

    def _let_go(self) -> None:
        while self._entries and self._entries[0].durable:
            pending = self._entries.popleft()
            self.size_bytes -= pending.size_bytes
            self._gave_up = self._gave_up or pending.failed
            if not self._gave_up:
                self._settled_up_to = pending.last_sequence_id
            self._out = max(0, self._out - 1)
