"""The watermark rule in a worker: it returns each message once, from a topic that contains duplicates.

The rule needs no shuffle and no state in Spark. All messages of a producer in a topic partition are read in order, and
the rule remembers only one number for each producer.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise

import numpy as np

from seqdedupe.batch import Batch, Binary, Int64s
from seqdedupe.client.message import StoredBatch
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.limits import NO_SEQUENCE_ID

_FIRST_CAPACITY = 64


class Deduplicator:
    """Finds the valid messages of one topic partition. A message is valid if its sequence ID is above all earlier IDs
    of its producer.

    This is the same rule as in the sidecar. So the first copy of (producer, sequence ID) is valid. A late message,
    after a higher ID of its producer, is not valid. `watermarks` are the highest IDs before the first batch. Batches
    must be passed in the log's order, each once. The result is exact. Needs about 150 bytes of memory for each
    producer.
    """

    def __init__(self, watermarks: Mapping[str, int]) -> None:
        self._producers = NumberedProducers(name.encode() for name in watermarks)
        self._highest: Int64s = np.fromiter(watermarks.values(), np.int64, len(watermarks))
        self._before = self._highest.copy()

    def keep(self, stored: StoredBatch) -> Int64s | None:
        """Return the valid rows in ascending order. The result is empty if no row is valid, and None if all rows are
        valid.

        Raises INVALID_OPTION if the messages have deduplication IDs instead of producers.
        """
        batch = stored.batch
        if batch.deduplication_ids:
            raise has_no_producers("the topic")
        numbers = self._producers.of(batch.producer_names)
        self._highest = grown(self._highest, len(self._producers), NO_SEQUENCE_ID)
        # Within a batch the IDs of one producer rise strictly. So only messages before the batch can make a row count
        # or not, and each producer's last row is its new watermark.
        return self._keep_of_one(batch, numbers[0]) if len(numbers) == 1 else self._keep_of_many(batch, numbers)

    def changed(self) -> dict[str, int]:
        """Return the watermarks that have risen since the start."""
        before = grown(self._before, len(self._highest), NO_SEQUENCE_ID)[: len(self._highest)]
        risen = np.flatnonzero(self._highest > before)
        names = self._producers.names() if len(risen) else []
        return {names[number].decode(): int(self._highest[number]) for number in risen}

    def _keep_of_one(self, batch: Batch, number: np.int64) -> Int64s | None:
        ids = batch.sequence_ids
        highest = self._highest[number]
        if ids[-1] > highest:
            self._highest[number] = ids[-1]
        return None if ids[0] > highest else np.arange(np.searchsorted(ids, highest, "right"), len(ids))

    def _keep_of_many(self, batch: Batch, numbers: Int64s) -> Int64s | None:
        of_rows = numbers[batch.producer_indexes]
        is_new = batch.sequence_ids > self._highest[of_rows]
        if is_new.all():
            self._highest[of_rows] = batch.sequence_ids
            return None
        kept = np.flatnonzero(is_new)
        self._highest[of_rows[kept]] = batch.sequence_ids[kept]
        return kept


def has_no_producers(topic: str) -> SeqdedupeError:
    """Return the reason why --deduplicate is refused for a topic of deduplication IDs."""
    return error(
        "INVALID_OPTION",
        f"deduplicate: {topic} has deduplication IDs, but --deduplicate compares producers' sequence IDs",
        hint="Omit it: such a topic holds each ID once within its window. For copies that come later, give the table a "
        "unique key.",
    )


class NumberedProducers:
    """Assigns numbers to producers from 0, in the order in which their names first occur."""

    def __init__(self, names: Iterable[bytes] = ()) -> None:
        self._number_of = {name: number for number, name in enumerate(names)}

    def __len__(self) -> int:
        return len(self._number_of)

    def names(self) -> list[bytes]:
        """Return all names, by number."""
        return list(self._number_of)

    def of(self, names: Binary) -> Int64s:
        """Return the numbers of a batch's producers. New names get new numbers."""
        data, number_of = names.data, self._number_of
        try:
            return np.array([number_of[data[start:end]] for start, end in pairwise(names.offsets.tolist())], np.int64)
        except KeyError:
            return self.of_list(names.values())

    def of_list(self, names: list[bytes]) -> Int64s:
        """Return the numbers of these producers."""
        number_of = self._number_of
        return np.array([number_of.setdefault(name, len(number_of)) for name in names], np.int64)


def grown(rows: Int64s, count: int, new: int | Int64s) -> Int64s:
    """Return these rows, or at least twice as many if they are fewer than `count`. The added rows are `new`."""
    if count <= len(rows):
        return rows
    more = np.empty((max(count - len(rows), len(rows), _FIRST_CAPACITY), *rows.shape[1:]), np.int64)
    more[:] = new
    return np.concatenate([rows, more])
