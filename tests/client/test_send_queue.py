"""The send queue against a model of the sidecar: everything that is refused, lost or overtaken, all is stored once."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.batch import Binary, single_producer
from seqdedupe.client.pending import InFlightBatch, PendingBatch, ReceiptColumns, Verdict
from seqdedupe.client.send_queue import SendQueue
from seqdedupe.errors import DataLossError, FencedError, InvalidRequestError, SeqdedupeError, error
from seqdedupe.message_id import MessageId

INCARNATION = 77
EPOCH = 1 << 32
NO_ID = MessageId(-1, -1, -1)


def pending_batch(*sequence_ids: int) -> PendingBatch:
    pending = PendingBatch()
    ids = np.array(sequence_ids, np.int64)
    pending.seal(single_producer(b"p", 0, -1, ids, Binary.of_all([b""] * len(ids))), 100)
    return pending


def receipt(verdicts: list[int], first_index: int = -1, known: dict[int, int] | None = None) -> ReceiptColumns:
    first = MessageId(INCARNATION, first_index) if first_index >= 0 else NO_ID
    known = known or {}
    indexes = np.array(list(known.values()), np.int64)
    return ReceiptColumns(
        np.array(verdicts, np.uint8),
        first_index,
        first,
        np.array(list(known), np.uint32),
        indexes,
        np.full(len(known), INCARNATION, np.int64),
        indexes,
        np.zeros(0, np.int32),
        np.zeros(0, np.uint32),
        np.zeros(0, np.int64),
        np.zeros(0, np.int64),
        np.zeros(0, np.int32),
    )


def opened(persisted: int = -1, queue_class: type[SendQueue] = SendQueue) -> SendQueue:
    queue = queue_class()
    queue.open(INCARNATION, 1, EPOCH, persisted)
    return queue


def send(queue: SendQueue) -> InFlightBatch:
    frame = queue.next_frame()
    assert frame is not None
    return frame


class Model:
    """A sidecar and its log for one producer, as plain as can be."""

    def __init__(self) -> None:
        self.log: list[int] = []
        self.pushed = self.persisted = -1
        self.in_flight: list[tuple[int, list[int], list[int]]] = []  # frame, verdicts, new ids
        self.answers: list[tuple[int, ReceiptColumns | SeqdedupeError]] = []

    def admit(self, frame: int, ids: list[int], link: int) -> None:
        assert link < ids[0]
        if ids[0] > self.pushed and link > self.pushed:
            self.answers.append((frame, error("PREDECESSOR_MISSING", "a predecessor is missing")))
            return
        verdicts, new = [], []
        for sequence_id in ids:
            if sequence_id > self.pushed:
                verdicts.append(Verdict.NOT_DUP)
                new.append(sequence_id)
                self.pushed = sequence_id
            else:
                verdicts.append(Verdict.DUP if sequence_id <= self.persisted else Verdict.UNKNOWN)
        if new:
            self.in_flight.append((frame, [int(v) for v in verdicts], new))
        else:
            self.answers.append((frame, receipt([int(v) for v in verdicts], known=self.known(ids, verdicts))))

    def known(self, ids: list[int], verdicts: list[Verdict]) -> dict[int, int]:
        return {
            row: self.log.index(sequence_id)
            for row, (sequence_id, verdict) in enumerate(zip(ids, verdicts, strict=True))
            if verdict == Verdict.DUP and sequence_id in self.log
        }

    def commit(self, frames: int, is_heard: bool = True) -> None:
        for frame, verdicts, new in self.in_flight[:frames]:
            first_index = len(self.log)
            self.log += new
            self.persisted = new[-1]
            if is_heard:
                verdicts = [] if len(new) == len(verdicts) else verdicts
                self.answers.append((frame, receipt(verdicts, first_index)))
        del self.in_flight[:frames]

    def fail(self) -> None:
        """The log refuses what is in flight."""
        for frame, _, _ in self.in_flight:
            self.answers.append((frame, error("LOG_REFUSED", "the disk is full")))
        self.in_flight.clear()
        self.pushed = self.persisted

    def crash(self, stored: int) -> None:
        """kill -9: this much of what is in flight reached the disk."""
        self.commit(stored, is_heard=False)
        self.in_flight.clear()
        self.answers.clear()
        self.pushed = self.persisted


class Run:
    """A queue, a stream that keeps its order, and the model."""

    def __init__(self, seed: int, queue_class: type[SendQueue]) -> None:
        self.random = random.Random(seed)
        self.model = Model()
        self.queue = opened(queue_class=queue_class)
        self.wire: list[tuple[int, list[int], int]] = []
        self.old_wires: list[list[tuple[int, list[int], int]]] = []  # of broken streams: they may still arrive
        self.sent: list[PendingBatch] = []
        self.next_id = 0

    def add(self) -> None:
        ids = []
        for _ in range(self.random.randint(1, 4)):
            self.next_id += self.random.choice((0, 0, 0, 5))
            ids.append(self.next_id)
            self.next_id += 1
        pending = pending_batch(*ids)
        self.sent.append(pending)
        self.queue.add(pending)

    def transmit(self) -> None:
        if self.queue.must_rewind and not self.queue.unanswered:
            self.queue.rewind()
        frame = self.queue.next_frame()
        if frame is not None:
            batch = frame.batch
            self.wire.append((frame.number, batch.sequence_ids.tolist(), int(batch.previous_sequence_ids[0])))

    def deliver(self) -> None:
        if self.wire:
            self.model.admit(*self.wire.pop(0))

    def deliver_late(self) -> None:
        for wire in self.old_wires:
            if wire and self.random.random() < 0.5:
                self.model.admit(*wire.pop(0))

    def commit(self) -> None:
        self.model.commit(self.random.randint(0, len(self.model.in_flight)))

    def answer(self) -> None:
        if self.model.answers:
            frame, answer = self.model.answers.pop(self.random.randrange(len(self.model.answers)))
            if isinstance(answer, ReceiptColumns):
                self.queue.receipt(frame, answer)
            else:
                self.queue.refused(frame, answer)

    def fail(self) -> None:
        self.model.fail()

    def reconnect(self) -> None:
        """Open answers when what is in flight has settled; what is on the wire may arrive later."""
        self.old_wires.append(self.wire)
        self.wire = []
        if self.random.random() < 0.5:
            self.model.crash(self.random.randint(0, len(self.model.in_flight)))
            self.old_wires.clear()
        self.model.commit(len(self.model.in_flight))
        self.model.answers.clear()
        self.queue.open(INCARNATION, 1, EPOCH, self.model.persisted)

    def play(self, steps: int) -> None:
        usual = [self.add, self.transmit, self.transmit, self.deliver, self.deliver, self.commit, self.answer]
        rare = [self.fail, self.reconnect, self.deliver_late, self.deliver_late]
        for _ in range(steps):
            self.random.choice(usual * 3 + rare)()

    def finish(self) -> None:
        for _ in range(20 * len(self.sent) + 20):
            for act in (self.transmit, self.deliver, self.answer):
                act()
            self.model.commit(len(self.model.in_flight))
        assert not len(self.queue), "something never gets its receipt"

    def check(self) -> None:
        ids = [sequence_id for pending in self.sent for sequence_id in pending.sequence_ids.tolist()]
        assert self.model.log == ids
        for pending in self.sent:
            result = pending.result()
            for row in range(len(result)):
                published = result[row]
                assert published.verdict in (Verdict.NOT_DUP, Verdict.DUP)
                assert published.index >= 0
                assert self.model.log[published.index] == published.sequence_id
                assert published.message_id == MessageId(INCARNATION, published.index)


def simulate(seed: int, queue_class: type[SendQueue] = SendQueue) -> None:
    run = Run(seed, queue_class)
    run.play(120)
    run.finish()
    run.check()


@given(st.integers(0, 2**63))
def test_everything_is_stored_once_and_in_order(seed: int) -> None:
    simulate(seed)


class LinkLeftOut(SendQueue):
    def add(self, pending: PendingBatch) -> None:
        super().add(pending)
        pending.previous_sequence_id = -1


class NotSentAgain(SendQueue):
    def refused(self, frame: int, refusal: SeqdedupeError) -> None:
        super().refused(frame, refusal)
        self.must_rewind = False


class UnknownTakenForAnEnd(SendQueue):
    def receipt(self, frame: int, receipt: ReceiptColumns) -> None:
        receipt.verdicts[receipt.verdicts == Verdict.UNKNOWN] = Verdict.DUP
        super().receipt(frame, receipt)


class StaysAfterTheBreak(SendQueue):
    def open(self, *answer: int, **more: Any) -> bool:
        out = self._out
        begins_anew = super().open(*answer, **more)
        self._out = out
        return begins_anew


class RefusalTakenForReceipt(SendQueue):
    def refused(self, frame: int, refusal: SeqdedupeError) -> None:
        self.receipt(frame, receipt([], 0))


@pytest.mark.parametrize(
    "planted",
    [LinkLeftOut, NotSentAgain, UnknownTakenForAnEnd, StaysAfterTheBreak, RefusalTakenForReceipt],
)
def test_the_simulation_finds_a_planted_bug(planted: type[SendQueue]) -> None:
    for seed in range(1000):
        try:
            simulate(seed, planted)
        except (AssertionError, SeqdedupeError):
            return
    pytest.fail(f"1,000 runs have not found {planted.__name__}")


def test_the_link_is_the_highest_lower_id_sent_or_opened() -> None:
    queue = opened(persisted=100)
    batches = [pending_batch(50, 60), pending_batch(61, 62), pending_batch(101), pending_batch(105)]
    for batch in batches:
        queue.add(batch)
    assert [batch.previous_sequence_id for batch in batches] == [-1, 60, 100, 101]


def test_a_frame_leaves_with_its_epoch_and_its_link() -> None:
    queue = opened(persisted=100)
    for sequence_id in (101, 105):
        queue.add(pending_batch(sequence_id))
    frames = [send(queue) for _ in range(2)]
    assert [frame.batch.epochs.tolist() for frame in frames] == [[EPOCH], [EPOCH]]
    assert [frame.batch.previous_sequence_ids.tolist() for frame in frames] == [[100], [101]]
    queue.open(INCARNATION, 1, EPOCH + 1, 100)
    assert send(queue).batch.epochs.tolist() == [EPOCH + 1]


def test_what_is_given_up_says_why_and_what_is_durable() -> None:
    queue = opened(persisted=4)
    batches = [pending_batch(5, 6), pending_batch(7), pending_batch(8, 9)]
    for batch in batches:
        queue.add(batch)
    frames = [send(queue).number for _ in range(3)]
    assert "nothing" not in str(queue.outcome_unknown("closed"))
    queue.receipt(frames[2], receipt([], 9))  # an answer out of order does not make 7 durable
    queue.receipt(frames[0], receipt([], 7))
    assert queue.durable_sequence_id == 6
    queue.refused(frames[1], error("LOG_REFUSED", "no space left on device"))
    late = pending_batch(10)
    queue.add(late)
    assert batches[1].last_refusal is late.last_refusal is queue.last_refusal is not None
    given_up = queue.outcome_unknown("no receipt within 2 seconds")
    assert str(given_up) == (
        "no receipt within 2 seconds: no space left on device [LOG_REFUSED]; everything up to sequence ID 6 is "
        "durable, 2 messages have no receipt [OUTCOME_UNKNOWN]"
    )
    assert given_up.numbers == {
        "durable_sequence_id": "6", "messages_without_receipt": "2", "last_refusal": "LOG_REFUSED"
    }  # fmt: skip
    assert "disk" in given_up.hint
    queue.fail(given_up)
    assert queue.durable_sequence_id == 6
    # Control: what has its receipt is not held up any more.
    fine = opened()
    fine.held_up(error("LOG_REFUSED", "no space left on device"))
    fine.held_up(None)
    assert fine.outcome_unknown("closed").numbers == {"durable_sequence_id": "-1", "messages_without_receipt": "0"}


def test_nothing_goes_out_between_a_refusal_and_the_last_answer() -> None:
    queue = opened()
    for sequence_id in range(4):
        queue.add(pending_batch(sequence_id))
    frames = [send(queue).number for _ in range(3)]
    queue.refused(frames[0], error("LOG_REFUSED", "full", retry_delay_ms=250))
    assert queue.next_frame() is None
    queue.refused(frames[1], error("PREDECESSOR_MISSING", "missing"))
    assert queue.must_rewind
    assert queue.unanswered == 1
    assert queue.retry_delay_ms == 250
    queue.refused(frames[2], error("PREDECESSOR_MISSING", "missing"))
    assert queue.unanswered == 0
    queue.rewind()
    again = [send(queue) for _ in range(4)]
    assert [frame.batch.sequence_ids[0] for frame in again] == [0, 1, 2, 3]
    assert not {frame.number for frame in again} & set(frames)


def test_answers_of_frames_that_are_not_out_change_nothing() -> None:
    queue = opened()
    queue.add(pending_batch(0))
    frame = send(queue).number
    queue.open(INCARNATION, 1, EPOCH, -1)
    queue.refused(frame, error("FENCED", "an epoch no longer used"))
    queue.receipt(frame, receipt([], 0))
    assert queue.failure is None
    assert len(queue) == 1
    assert not queue.must_rewind
    # Control: the answer of the frame that is out counts.
    frame = send(queue).number
    queue.refused(frame, error("FENCED", "another one"))
    assert isinstance(queue.failure, FencedError)


def test_rows_with_a_receipt_keep_it_when_the_rest_is_sent_again() -> None:
    queue = opened()
    pending = pending_batch(3, 4, 5)
    queue.add(pending)
    frame = send(queue).number
    queue.receipt(frame, receipt([3, 1, 1], 7))
    assert not pending.settled
    assert pending.decided_up_to == 5
    assert queue.must_rewind
    queue.rewind()
    frame = send(queue).number
    queue.receipt(frame, receipt([2, 2, 2], known={0: 6}))
    result = pending.result()
    assert [result[row].verdict for row in range(3)] == [Verdict.DUP, Verdict.NOT_DUP, Verdict.NOT_DUP]
    assert [result[row].index for row in range(3)] == [6, 7, 8]
    assert result[1].message_id == MessageId(INCARNATION, 7)


def test_a_dup_of_unknown_place_has_no_message_id() -> None:
    queue = opened(persisted=9)
    pending = pending_batch(3, 4)
    queue.add(pending)
    queue.receipt(send(queue).number, receipt([2, 2]))
    published = pending.result()[0]
    assert (published.verdict, published.message_id, published.index) == (Verdict.DUP, None, -1)


def test_message_ids_within_an_entry_count_its_batch_index() -> None:
    queue = opened()
    pending = pending_batch(0, 1)
    queue.add(pending)
    columns = receipt([], 40)._replace(first_message_id=MessageId(5, 6, 2))
    queue.receipt(send(queue).number, columns)
    assert [pending.result()[row].message_id for row in range(2)] == [MessageId(5, 6, 2), MessageId(5, 6, 3)]


def test_a_batch_refused_for_its_content_fails_with_all_after_it() -> None:
    queue = opened()
    batches = [pending_batch(sequence_id) for sequence_id in range(3)]
    for batch in batches:
        queue.add(batch)
    frames = [send(queue).number for _ in range(3)]
    queue.refused(frames[1], error("INVALID_BATCH", "bad offsets"))
    assert [batch.settled for batch in batches] == [False, True, True]
    queue.refused(frames[2], error("PREDECESSOR_MISSING", "missing"))
    assert not queue.must_rewind
    late = pending_batch(3)
    queue.add(late)
    for batch in (*batches[1:], late):
        with pytest.raises(InvalidRequestError, match="bad offsets"):
            batch.result()
    queue.receipt(frames[0], receipt([], 0))
    assert batches[0].result()[0].verdict is Verdict.NOT_DUP
    assert len(queue) == 0
    assert queue.size_bytes == 0


def sent_up_to_9(receipts_up_to: int) -> SendQueue:
    """Open answered 4; 5 to 9 were sent, 10 is queued."""
    queue = opened(persisted=4)
    for sequence_id in range(5, 11):
        queue.add(pending_batch(sequence_id))
    frames = [send(queue).number for _ in range(5)]
    for place, frame in enumerate(frames[: receipts_up_to - 4]):
        queue.receipt(frame, receipt([], place))
    return queue


@pytest.mark.parametrize("persisted", [6, 7, 9])
def test_a_resume_may_answer_what_was_sent(persisted: int) -> None:
    queue = sent_up_to_9(receipts_up_to=6)
    queue.open(INCARNATION, 2, EPOCH, persisted)
    assert send(queue).batch.sequence_ids[0] == 7


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((INCARNATION, 1, 10), FencedError),  # queued, but never sent: it cannot have been this process
        ((INCARNATION, 1, 5), DataLossError),  # 6 has a receipt
        ((INCARNATION, 1, 3), DataLossError),
        ((INCARNATION + 1, 1, 6), DataLossError),
        ((INCARNATION, 0, 6), DataLossError),
    ],
)
def test_a_resume_that_cannot_be_right_is_an_error(answer: tuple[int, int, int], kind: type[Exception]) -> None:
    queue = sent_up_to_9(receipts_up_to=6)
    incarnation, term, persisted = answer
    with pytest.raises(kind):
        queue.open(incarnation, term, EPOCH, persisted)


def test_a_resume_below_what_open_answered_is_data_loss_without_any_receipt() -> None:
    queue = opened(persisted=4)
    with pytest.raises(DataLossError, match=r"persisted sequence ID 3 \(at least 4 before\) \["):
        queue.open(INCARNATION, 1, EPOCH, 3)


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_a_log_that_is_shorter_than_before_is_data_loss(is_forgotten: bool) -> None:
    """Reported by a stream or by Open. A sidecar that omits the index is believed, and the next one is compared."""
    answer = INCARNATION, 2, EPOCH
    persisted = -1 if is_forgotten else 6
    for known in ("stream", "open", "earlier version"):
        queue = sent_up_to_9(receipts_up_to=6)
        if known == "open":
            queue.open(INCARNATION, 1, EPOCH, 6, durable_index=40)
        else:
            queue.durable_up_to(40)
        if known == "earlier version":
            queue.open(*answer, persisted, is_forgotten=is_forgotten)
            queue.open(*answer, persisted, durable_index=39, is_forgotten=is_forgotten)
            continue
        with pytest.raises(DataLossError, match=r"durable index 39 \(40 before\)"):
            queue.open(*answer, persisted, durable_index=39, is_forgotten=is_forgotten)
        queue = sent_up_to_9(receipts_up_to=6)
        queue.durable_up_to(40)
        assert queue.open(*answer, persisted, durable_index=40, is_forgotten=is_forgotten) is is_forgotten


def test_a_lower_id_than_persisted_is_no_reason_to_see_a_loss_or_a_stranger() -> None:
    queue = opened(persisted=100)
    queue.add(pending_batch(50))
    queue.receipt(send(queue).number, receipt([2]))
    queue.open(INCARNATION, 1, EPOCH, 100)
    with pytest.raises(FencedError):
        queue.open(INCARNATION, 1, EPOCH, 101)


def test_answers_of_a_lower_term_do_not_count() -> None:
    queue = opened()
    assert queue.counts(INCARNATION, 3)
    assert not queue.counts(INCARNATION, 2)
    assert queue.counts(INCARNATION, 3)
    with pytest.raises(DataLossError):
        queue.counts(INCARNATION + 1, 3)


def test_a_waiter_is_called_for_a_receipt_and_for_a_failure() -> None:
    ends: list[Callable[[SendQueue, int], None]] = [
        lambda queue, frame: queue.receipt(frame, receipt([], 0)),
        lambda queue, frame: queue.fail(error("OUTCOME_UNKNOWN", "closed")),
    ]
    for end in ends:
        queue = opened()
        pending = pending_batch(0)
        calls: list[int] = []
        pending.when_settled(partial(calls.append, 1))
        queue.add(pending)
        frame = send(queue).number
        assert not calls
        end(queue, frame)
        assert calls == [1]
        pending.when_settled(partial(calls.append, 2))
        assert calls[1] == 2
