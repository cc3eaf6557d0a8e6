"""From a frame's bytes to verdicts: everything about a frame that is decided before it goes to the log.

What leaves here is finished: the batch to append, with the index that it gets, and the receipt to give once it is
stored; or a refusal.
"""

from collections.abc import Callable

from seqdedupe.core.producers import Producers
from seqdedupe.errors import SeqdedupeError
from seqdedupe.format.layout import (
    BASE_INDEX,
)
from seqdedupe.topic.answers import OutOfStepError, Receipt, Refusal
from seqdedupe.topic.frame import Frame, NumbersCache, check, cut
from seqdedupe.topic.policy import Applied, GapPolicy
from seqdedupe.topic.refusing import forbidden, refused


def admit(
    encoded: bytes,
    number: int,
    producers: Producers,
    cache: NumbersCache,
    *,
    next_index: int,
    applied: Applied,
    lone: bool,
    check_log: Callable[[bytes], None],
) -> tuple[Frame | None, Receipt | Refusal]:
    """What is to be appended of a frame (None: nothing) and what to answer once that is stored, or at once.

    New rows count as pushed from now on, and get indexes from `next_index`. `lone`: links may be left out. `check_log`
    raises if the log cannot take a batch. Nothing is raised for what is wrong with the frame. Raises OutOfStepError.
    """
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
        new, verdicts = producers.decide(frame.view, frame.places, frame.producer_rows, applied.deduplication_enabled)
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
