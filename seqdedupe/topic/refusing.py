"""Why a frame is not admitted: the error, and the numbers of the producers that were the cause."""

from typing import Any

import numpy as np

from seqdedupe.core import rule
from seqdedupe.core.producers import Producers
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.format.jit import Int64s
from seqdedupe.format.layout import (
    EPOCHS,
    LINKS,
    PRODUCER_INDEXES,
    SEQUENCE_IDS,
    size,
    start,
)
from seqdedupe.limits import NO_EPOCH, NO_SEQUENCE_ID
from seqdedupe.topic.allowing import Allowing
from seqdedupe.topic.answers import ProducerNumbers
from seqdedupe.topic.frame import Frame, names_of
from seqdedupe.topic.sessions import can_have_been_given

MAX_PRODUCERS_IN_REFUSAL = 16


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
    elif why == rule.FENCED and any(_may_be_in_force_again(p, producers) for p in listed):
        one = next(p for p in listed if _may_be_in_force_again(p, producers))
        e = error(
            "RECOVERING",
            f"producer {one.name!r} is being opened by another session: whether it is will be known in a moment",
            **numbers | {"producer_name": one.name},
        )
    elif why == rule.FENCED and all(_is_stale(p) for p in listed):
        e = error(
            "FENCED",
            f"producer {one.name!r} has been opened by another session: its epoch is {one.current_epoch}, not "
            f"{one.epoch}",
            **numbers,
            epoch=one.epoch,
            current_epoch=one.current_epoch,
        )
    elif why == rule.FENCED:
        one = next(p for p in listed if not _is_stale(p))
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
