"""Many producer rows (see `rule`) at once: marked as changed, found to say nothing, moved to the front."""

import numpy as np
import numpy.typing as npt

from seqdedupe.core.rule import DURABLE_EPOCH, EPOCH, NUMBERS, PERSISTED, PUSHED, mark
from seqdedupe.format.jit import Int64s, Int64s2, Uint8s, kernel
from seqdedupe.limits import NO_EPOCH

Bools = npt.NDArray[np.bool_]

NEW_ROW = np.array([-1, -1, 0, 0, -1, -1], np.int64)
"""The producer row of a producer of which nothing is known."""


@kernel()
def mark_all(numbers: Int64s, dirty: Uint8s) -> int:
    """`rule.mark` for all of these. Returns 0."""
    for i in range(numbers.shape[0]):
        mark(dirty, numbers[i])
    return 0


def are_empty(rows: Int64s) -> Bools:
    """Which of these producer rows say no more than that of a name that never came."""
    empty = np.empty(len(rows), np.uint8)
    find_empty(rows, empty)
    return empty.view(bool)


@kernel()
def find_empty(numbers: Int64s2, empty: Uint8s) -> int:
    """Says of producer rows, in `empty`, which ones say nothing. Returns 0."""
    for row in range(empty.shape[0]):
        ids = numbers[row, PUSHED] >= 0 or numbers[row, PERSISTED] >= 0
        empty[row] = not (ids or numbers[row, EPOCH] > NO_EPOCH or numbers[row, DURABLE_EPOCH] > NO_EPOCH)
    return 0


@kernel()
def are_all(column: Uint8s, numbers: Int64s, value: int) -> bool:
    """Whether a column by producer number has this value for all of these; not where it does not reach so far."""
    at = 0
    while at < numbers.shape[0] and numbers[at] < column.shape[0] and column[numbers[at]] == value:
        at += 1
    return bool(at == numbers.shape[0])


@kernel()
def move_rows(numbers: Int64s2, stays: Uint8s, new_numbers: Int64s) -> int:
    """Moves the producer rows that stay to the front, in place: `new_numbers` says where, -1 for the others.

    Returns how many stay.
    """
    staying = 0
    for row in range(stays.shape[0]):
        new_numbers[row] = -1
        if stays[row]:
            for column in range(NUMBERS):
                numbers[staying, column] = numbers[row, column]
            new_numbers[row] = staying
            staying += 1
    return staying
