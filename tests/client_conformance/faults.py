"""Faults planted in the Python client: clients that break one duty each, which the harness must reject."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from seqdedupe.address import SidecarAddress
from seqdedupe.client import Verdict, route
from seqdedupe.client.pending import InFlightBatch, PendingBatch, ReceiptColumns
from seqdedupe.client.producer_session import Session
from seqdedupe.client.publish_calls import Openings, StreamAnswer
from seqdedupe.client.publisher import _Call
from seqdedupe.client.reader import Reader
from seqdedupe.client.route import Route, Sidecars
from seqdedupe.client.send_queue import SendQueue
from seqdedupe.client.stream import PublishStream
from seqdedupe.errors import NEVER, SeqdedupeError
from seqdedupe.limits import NO_SEQUENCE_ID
from seqdedupe.v1 import read_pb2


def resends_without_link() -> None:
    """What is sent again has no predecessor."""
    sent: set[int] = set()

    def changed(frame: InFlightBatch | None) -> InFlightBatch | None:
        if frame is not None:
            first = int(frame.batch.sequence_ids[0])
            if first in sent:
                frame.batch.previous_sequence_ids = np.array([NO_SEQUENCE_ID], np.int64)
            sent.add(first)
        return frame

    _after(SendQueue, "next_frame", changed)


def ignores_unknown() -> None:
    """Unknown is taken for Dup."""
    record = PendingBatch.record

    def replaced(pending: PendingBatch, receipt: ReceiptColumns) -> None:
        verdicts = np.where(receipt.verdicts == Verdict.UNKNOWN, Verdict.DUP, receipt.verdicts)
        record(pending, receipt._replace(verdicts=verdicts))

    setattr(PendingBatch, "record", replaced)  # noqa: B010


def gives_up_on_recovering() -> None:
    """RECOVERING is final."""

    def before(_: SendQueue, __: int, refusal: SeqdedupeError) -> None:
        if refusal.reason == "RECOVERING":
            refusal.retry_delay_ms = NEVER

    _before(SendQueue, "refused", before)


def drops_a_resend() -> None:
    """A batch that was refused is passed over."""

    def before(queue: SendQueue, frame: int, refusal: SeqdedupeError) -> None:
        if frame in queue._unanswered and refusal.reason != "PREDECESSOR_MISSING":
            queue._unanswered[frame].has_receipts = True

    _before(SendQueue, "refused", before)


def renumbers_a_resend() -> None:
    """After a break, what has no receipt is sent again under other IDs."""

    def before(queue: SendQueue, *_: int) -> None:
        for entry in queue.entries:
            if entry.batch is not None and not entry.has_receipts and queue.counters.connections:
                entry.batch.sequence_ids = entry.batch.sequence_ids + 1000

    _before(SendQueue, "open", before)


def opens_without_epochs() -> None:
    """A resume is a new session."""
    open_name = Openings.open
    setattr(Openings, "open", lambda openings, name, _: open_name(openings, name, None))  # noqa: B010


def goes_on_after_data_loss() -> None:
    """What a resume says of earlier messages is not looked at."""
    SendQueue._check_resumed = lambda *_: None  # type: ignore[method-assign]


def believes_what_is_forgotten() -> None:
    """Whether a resume finds a shorter log is not looked at."""
    open_queue = SendQueue.open
    changed = lambda queue, *answer, durable_index, **more: open_queue(queue, *answer, **more)  # noqa: E731
    setattr(SendQueue, "open", changed)  # noqa: B010


def ignores_delays() -> None:
    """What was refused is sent again at once."""

    def before(_: SendQueue, __: int, refusal: SeqdedupeError) -> None:
        refusal.retry_delay_ms = min(refusal.retry_delay_ms, 0)

    _before(SendQueue, "refused", before)


def repeats_frame_numbers() -> None:
    """Every frame has the same number."""
    _after(SendQueue, "next_frame", lambda frame: frame and frame._replace(number=7))


def accepts_without_limit() -> None:
    """Any number of bytes may be in flight."""
    Session._update_room = lambda self: self.has_room.set()  # type: ignore[method-assign]


def follows_any_address() -> None:
    """Credentials go wherever a sidecar says."""
    Sidecars.allowed = lambda self, text: SidecarAddress.parse(text)  # type: ignore[method-assign]


def stays_where_a_topic_recovers() -> None:
    """Another sidecar is asked only if this one says so, or is away."""
    Route.has_lasted = lambda *_: False  # type: ignore[method-assign]


def leaves_where_a_topic_recovers() -> None:
    """Another sidecar is asked at once."""
    route.LONGEST_REFUSAL_SECONDS = 0.0


def heeds_lower_terms() -> None:
    """Answers of a sidecar that is not the owner any more count."""
    take = PublishStream._take

    def replaced(stream: PublishStream, answer: StreamAnswer) -> None:
        take(stream, answer._replace(term=max(answer.term, stream.openings.term)))

    setattr(PublishStream, "_take", replaced)  # noqa: B010


def believes_a_late_refusal() -> None:
    """What a frame with the same messages may have stored before is forgotten."""
    _before(_Call, "fail", lambda call, _: setattr(call, "is_uncertain", False))


def reads_a_message_again() -> None:
    """After a break, a reader begins with the message that it had last."""
    read_start = Reader._read_start

    def replaced(reader: Reader) -> read_pb2.ReadStart:
        start = read_start(reader)
        return read_pb2.ReadStart(index=start.after.index) if start.HasField("after") else start

    setattr(Reader, "_read_start", replaced)  # noqa: B010


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__.replace("_", "-"): fault
    for fault in (
        resends_without_link,
        ignores_unknown,
        gives_up_on_recovering,
        drops_a_resend,
        renumbers_a_resend,
        opens_without_epochs,
        goes_on_after_data_loss,
        believes_what_is_forgotten,
        ignores_delays,
        repeats_frame_numbers,
        accepts_without_limit,
        follows_any_address,
        stays_where_a_topic_recovers,
        leaves_where_a_topic_recovers,
        heeds_lower_terms,
        believes_a_late_refusal,
        reads_a_message_again,
    )
}


def _before(kind: type, name: str, act: Callable[..., None]) -> None:
    """`act` gets the arguments of this method first."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def replaced(*given: Any, **named: Any) -> Any:
        act(*given)
        return method(*given, **named)

    setattr(kind, name, replaced)


def _after(kind: type, name: str, change: Callable[[Any], Any]) -> None:
    """`change` makes the result of this method."""
    method = getattr(kind, name)
    setattr(kind, name, functools.wraps(method)(lambda *given: change(method(*given))))
