"""What decides about a frame before it goes to the log, and what of it counts afterwards.

There are two judges: by sequence ID (here), where the links and epochs of producers and the rule count, and by
deduplication ID (`judge_by_id`). What leaves a judge is finished: the batch to append, with the index that it gets, and
the receipt to give once it is stored; or a refusal.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from seqdedupe.core import rule
from seqdedupe.core.producers import Producers
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.format.columns import BASE_INDEX, EPOCHS, LINKS, PRODUCER_INDEXES, SEQUENCE_IDS, size, start
from seqdedupe.format.jit import Int64s
from seqdedupe.limits import NO_EPOCH, NO_SEQUENCE_ID
from seqdedupe.topic.frame import (
    Allowing,
    Frame,
    NumbersCache,
    OutOfStepError,
    ProducerNumbers,
    Receipt,
    Refusal,
    check,
    cut,
    names_of,
)
from seqdedupe.topic.policy import Applied, GapPolicy
from seqdedupe.topic.sessions import can_have_been_given

MAX_PRODUCERS_IN_REFUSAL = 16


class Judge(Protocol):
    """Decides about frames in the order of their arrival. What is new counts as in flight from then on, until it is
    confirmed, in the same order, or all that is in flight has failed."""

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
    ) -> tuple[Frame | None, Receipt | Refusal]:
        """What is to be appended of a frame (None: nothing) and what to answer once that is stored, or at once.

        New rows get indexes from `next_index`. `check_log` raises if the log cannot take a batch. `lone`: links may be
        left out. `looked_up`: see `ByDeduplicationId.look_up`. Nothing is raised for what is wrong with the frame.
        Raises OutOfStepError.
        """

    def confirm(self, frame: Frame) -> None:
        """The oldest in flight is in the log."""

    def fail(self) -> None:
        """Nothing that is in flight counts as pushed any more."""


class BySequenceId:
    """Judges by the numbers of producers: links, epochs, and the rule."""

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
    ) -> tuple[Frame | None, Receipt | Refusal]:
        """See `Judge.decide`."""
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
                return frame, Receipt(number, None, next_index)
            known = producers.originals(frame.view, frame.places, frame.producer_rows, verdicts)
            if not new:
                return None, Receipt(number, verdicts, -1, (), *known)
            frame = cut(frame, verdicts)
            frame.places[BASE_INDEX] = next_index
            return frame, Receipt(number, verdicts, next_index, (), *known)
        except Exception as e:
            raise OutOfStepError from e

    def confirm(self, frame: Frame) -> None:
        """See `Judge.confirm`."""
        self._producers.persist(frame.view, frame.places, frame.producer_rows)

    def fail(self) -> None:
        """See `Judge.fail`."""
        self._producers.fail_in_flight()


# -- Why a frame is refused, and the numbers of the producers that were the cause.


def forbidden(allowing: Allowing, numbers: Int64s) -> tuple[SeqdedupeError, list[ProducerNumbers]]:
    """The error for a frame with producers that its client may not publish as, and their names. Their numbers are told
    to nobody who may not know them."""
    names = [name.decode() for name in allowing.producers.names_of(numbers[:MAX_PRODUCERS_IN_REFUSAL])]
    unknown = NO_SEQUENCE_ID
    listed = [ProducerNumbers(name, NO_EPOCH, NO_EPOCH, unknown, unknown, unknown, unknown) for name in names]
    return allowing.deny(names), listed


def refused(
    frame: Frame, producers: Producers, why: int, lone: bool, gapless: bool
) -> tuple[SeqdedupeError, list[ProducerNumbers]]:
    """The error for what `Producers.refusal` answered, and the numbers of the producers that were the cause."""
    epochs, links, first = _of_producers(frame)
    names = names_of(frame.encoded, frame.places)
    reasons = producers.reasons(frame.view, frame.places, frame.producer_rows, lone, gapless)
    expected = producers.expected_ids(frame.view, frame.places, frame.producer_rows).tolist()
    listed = []
    for p in np.flatnonzero(reasons == why).tolist():
        numbers_of = producers.numbers[frame.producer_rows[p]].tolist()
        listed.append(
            ProducerNumbers(
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
    one = listed[0]
    in_force_again = [p for p in listed if _may_be_in_force_again(p, producers)] if why == rule.FENCED else []
    unknown = [p for p in listed if not _is_stale(p)] if why == rule.FENCED else []
    if in_force_again or unknown:
        one = (in_force_again or unknown)[0]
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
            f"producer {one.name!r} is being opened by another session: whether it is will be known in a moment",
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
            f"producer {one.name!r} leaves its previous sequence ID out: that is for a lone unary call",
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
            f"{one.pushed} has arrived: resend what is between",
            **numbers,
        )
    return e, listed[:MAX_PRODUCERS_IN_REFUSAL]


def _of_producers(frame: Frame) -> tuple[list[int], list[int], list[int]]:
    """Epoch, link and first sequence ID of each producer."""

    def column(kind: type[np.int32 | np.int64], which: int) -> Any:
        values = size(frame.places, which) // np.dtype(kind).itemsize
        return np.frombuffer(frame.encoded, kind, values, start(frame.places, which)) if values else np.zeros(0, kind)

    ids = column(np.int64, SEQUENCE_IDS)
    first = rule.first_ids(column(np.int32, PRODUCER_INDEXES), ids, len(frame.producer_rows))
    return column(np.int64, EPOCHS).tolist(), column(np.int64, LINKS).tolist(), first.tolist()


def _may_be_in_force_again(producer: ProducerNumbers, producers: Producers) -> bool:
    """Whether the session may be the one that lasts if the record of the newer one fails.

    Where there is none by then, the producer has been forgotten: an earlier session of it may be resumed.
    """
    number = producers.number(producer.name.encode())
    durable_epoch = NO_EPOCH if number is None else producers.numbers[number, rule.DURABLE_EPOCH]
    return producer.epoch == durable_epoch or (durable_epoch == NO_EPOCH and _is_stale(producer))


def _is_stale(producer: ProducerNumbers) -> bool:
    return can_have_been_given(producer.epoch) and producer.epoch < producer.current_epoch
