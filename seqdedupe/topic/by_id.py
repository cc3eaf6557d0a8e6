"""From a frame's bytes to verdicts in a topic of deduplication IDs: there the IDs alone decide.

No session, epoch or link is wanted: identity does not depend on order. What `admission` is for sequence IDs.
"""

from collections.abc import Callable

from seqdedupe.core.id_window import NONE_OLDER, IdWindow
from seqdedupe.errors import SeqdedupeError
from seqdedupe.format.columns import BASE_INDEX
from seqdedupe.format.jit import Int64s
from seqdedupe.topic.answers import OutOfStepError, Receipt, Refusal
from seqdedupe.topic.frame import Frame, check_by_id, cut
from seqdedupe.topic.policy import Applied


def admit(
    encoded: bytes,
    number: int,
    window: IdWindow,
    *,
    applied: Applied,
    wants_keys: bool,
    now_ms: int,
    check_log: Callable[[bytes], None],
    older: Callable[[Frame], Int64s],
) -> tuple[Frame | None, Receipt | Refusal]:
    """What is to be appended of a frame (None: nothing) and what to answer once that is stored, or at once.

    New rows are in flight from now on. A DUP always has its original's index, which may be a new row of the same frame:
    the receipt comes when that is stored. `older` tells where the IDs are in the window's runs, or raises why that
    cannot be known. Nothing is raised for what is wrong with the frame. Raises OutOfStepError.
    """
    try:
        frame = check_by_id(encoded, wants_keys=wants_keys)
        check_log(frame.encoded)
        in_runs = older(frame) if applied.deduplication_enabled else NONE_OLDER
    except SeqdedupeError as e:
        return None, Refusal(number, e)
    next_index = window.next_index
    try:
        new, verdicts, dups, originals = window.decide(
            frame.view, frame.places, applied.deduplication_enabled, applied.window, now_ms, in_runs
        )
        if not new:
            return None, Receipt(number, verdicts, -1, (), dups, originals)
        if new == frame.rows:
            frame.places[BASE_INDEX] = next_index
            return frame, Receipt(number, None, next_index)
        frame = cut(frame, verdicts)
        frame.places[BASE_INDEX] = next_index
        return frame, Receipt(number, verdicts, next_index, (), dups, originals)
    except Exception as e:
        raise OutOfStepError from e
