"""What is missing where a log was damaged: a batch that comes later says which ID its producer had sent before.

In a log that is whole, a link is never above what the log has confirmed of that producer by then.
"""

import numpy as np

from seqdedupe.core.rule import PERSISTED, confirm_batch
from seqdedupe.format.columns import LINKS, PRODUCERS, ROWS, int64_column
from seqdedupe.format.jit import Bytes, Int64s, Int64s2, Uint8s, kernel

HOLE_VALUES = 3
"""Of a hole: the producer row, the highest ID known before it (-1: none), and the link, the highest ID in it."""

NO_HOLES = np.zeros((0, HOLE_VALUES), np.int64)


@kernel()
def confirm_all(
    raw: Bytes,
    table: Int64s2,
    producer_rows: Int64s,
    first_name: Int64s,
    numbers: Int64s2,
    dirty: Uint8s,
    holes: Int64s2,
) -> int:
    """`rule.confirm_batch` for every batch among scanned records; `producer_rows` are those of the listed names.

    Puts into `holes`, as far as there is room, the links above what was confirmed before. Returns how many.
    """
    found = 0
    for k in range(table.shape[0]):
        places = table[k]
        if places[ROWS] == 0 or places[PRODUCERS] == 0:
            continue
        rows_of_batch = producer_rows[first_name[k] : first_name[k] + places[PRODUCERS]]
        if found < holes.shape[0]:
            links = int64_column(raw, places, LINKS)
            for p in range(places[PRODUCERS]):
                known = numbers[rows_of_batch[p], PERSISTED]
                if links[p] > known and found < holes.shape[0]:
                    holes[found, 0] = rows_of_batch[p]
                    holes[found, 1] = known
                    holes[found, 2] = links[p]
                    found += 1
        confirm_batch(raw, places, rows_of_batch, numbers, dirty)
    return found
