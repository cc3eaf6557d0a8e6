"""From a frame's bytes to verdicts in a topic of deduplication IDs: there the IDs alone decide.

No session, epoch or link is wanted: identity does not depend on order. What `admission` is for sequence IDs.
"""

from collections.abc import Callable

import numpy as np

from seqdedupe.core.id_slots import NO_LIMIT
from seqdedupe.core.id_table import IMPORTED
from seqdedupe.core.id_window import NONE_OLDER, IdWindow
from seqdedupe.core.moment import Moment
from seqdedupe.errors import SeqdedupeError
from seqdedupe.format.jit import Int64s, Uint8s
from seqdedupe.format.layout import BASE_INDEX
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
    now: Moment,
    check_log: Callable[[bytes], None],
    older: Callable[[Frame, int], Int64s],
) -> tuple[Frame | None, Receipt | Refusal]:
    """What is to be appended of a frame (None: nothing) and what to answer once that is stored, or at once.

    New rows are in flight from now on. A DUP always has its original's index, which may be a new row of the same frame:
    the receipt comes when that is stored; but for one that was imported. `older` tells where the IDs are in the
    window's runs, of what was imported only those that were published after a time, or raises why that cannot be known.
    Nothing is raised for what is wrong with the frame. Raises OutOfStepError.
    """
    try:
        frame = check_by_id(encoded, wants_keys=wants_keys)
        check_log(frame.encoded)
        in_runs = NONE_OLDER
        if applied.deduplication_enabled:
            # What is forgotten now is looked for in what was imported.
            window.move(applied.window, now.earliest_ms)
            in_runs = older(frame, since_ms(applied, now))
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
            return frame, Receipt(number, None, next_index)
        frame = cut(frame, verdicts)
        frame.places[BASE_INDEX] = next_index
        return frame, _receipt(number, verdicts, next_index, dups, originals)
    except Exception as e:
        raise OutOfStepError from e


def since_ms(applied: Applied, now: Moment) -> int:
    """What was published up to this time is too old to be known; below 0: nothing is."""
    milliseconds = applied.window.milliseconds
    return -1 if milliseconds == NO_LIMIT else now.earliest_ms - milliseconds


def _receipt(number: int, verdicts: Uint8s, first_index: int, dups: Int64s, originals: Int64s) -> Receipt:
    if not (is_imported := originals == IMPORTED).any():
        return Receipt(number, verdicts, first_index, (), dups, originals)
    known, imported = np.flatnonzero(~is_imported), np.flatnonzero(is_imported)
    return Receipt(number, verdicts, first_index, (), dups[known], originals[known], imported_rows=dups[imported])
