"""An audit's second look, at late messages and their earlier copies only: doubled, or out of order?

`suspect_rows` finds these messages in a range. Sorted by topic, producer, sequence ID and index, `judge` tells which
are second copies, and which come for the first time, but after a higher ID.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from seqdedupe.batch import Int64s
from seqdedupe.client.message import StoredBatch
from seqdedupe.limits import MAX_SEQUENCE_ID, NO_SEQUENCE_ID
from seqdedupe_spark.audit.ranges import EXAMPLES, Suspects, indexes_of
from seqdedupe_spark.dedupe import split

DOUBLED = "doubled"
OUT_OF_ORDER = "out_of_order"

ROWS_SCHEMA = pa.schema(
    [("topic", pa.int32()), ("producer", pa.int32())]
    + [(name, pa.int64()) for name in ("sequence_id", "index", "before")]
)
"""Messages that may be doubled or out of order, by the number of their topic and producer. `before` is the highest ID
of the producer in the batches before: the message is late if its own is not above."""


def suspect_rows(topic: int, stored: Iterable[StoredBatch], suspects: Suspects) -> Iterator[pa.RecordBatch]:
    """The messages of a range that may be doubled or out of order, as `ROWS_SCHEMA`."""
    place_of = {name: place for place, name in enumerate(suspects.names)}
    # One place more, for producers that are none of them: no ID is in its span.
    none = len(place_of)
    low, high = np.append(suspects.low, MAX_SEQUENCE_ID), np.append(suspects.high, NO_SEQUENCE_ID)
    highest, numbers = np.append(suspects.before, MAX_SEQUENCE_ID), np.append(suspects.numbers, -1)
    for s in stored:
        ids = s.batch.sequence_ids
        places = np.array([place_of.get(name, none) for name in split(s.batch.producer_names)], np.int64)
        of_rows = places[indexes_of(s.batch)]
        before = highest[of_rows]
        chosen = np.flatnonzero((ids >= low[of_rows]) & (ids <= high[of_rows]))
        is_new = ids > before
        highest[of_rows[is_new]] = ids[is_new]
        if len(chosen):
            yield pa.record_batch(
                [
                    np.full(len(chosen), topic, np.int32),
                    numbers[of_rows[chosen]].astype(np.int32),
                    ids[chosen],
                    s.base_index + chosen,
                    before[chosen],
                ],
                ROWS_SCHEMA,
            )


@dataclass(frozen=True, order=True)
class Late:
    """A late message. If it is doubled, `other` is the index of the first copy, else the ID that it comes after."""

    index: int
    producer: int
    sequence_id: int
    other: int


@dataclass
class Judgement:
    """What is wrong with late messages: how many of each kind, by topic and producer, and the first ones by topic."""

    counts: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    examples: dict[tuple[str, int], list[Late]] = field(default_factory=dict)

    def merge(self, other: "Judgement") -> None:
        self.counts += other.counts
        for key, late in other.examples.items():
            self._keep(key, late)

    def add(self, kind: str, rows: Int64s) -> None:
        """Adds rows of topic, producer, sequence ID, index and `Late.other`."""
        of_producers, counts = np.unique(rows[:, :2], axis=0, return_counts=True)
        for (topic, producer), count in zip(of_producers.tolist(), counts.tolist(), strict=True):
            self.counts[kind, topic, producer] += count
        for topic in np.unique(rows[:, 0]).tolist():
            of_topic = rows[rows[:, 0] == topic]
            first = of_topic[np.argsort(of_topic[:, 3])[:EXAMPLES]]
            self._keep((kind, topic), [Late(*row) for row in first[:, [3, 1, 2, 4]].tolist()])

    def _keep(self, key: tuple[str, int], late: list[Late]) -> None:
        self.examples[key] = sorted(self.examples.get(key, []) + late)[:EXAMPLES]


def judge(batches: Iterable[pa.RecordBatch]) -> Judgement:
    """Judges what `suspect_rows` gave, sorted by topic, producer, ID and index, all copies of a message in it."""
    judgement = Judgement()
    key_before: Int64s = np.full(3, -1, np.int64)
    first_index = -1
    for batch in batches:
        if not len(batch):
            continue
        topics, producers, ids, indexes, before = (column.to_numpy().astype(np.int64) for column in batch.columns)
        keys = np.stack([topics, producers, ids], 1)
        is_copy = (keys == np.concatenate([key_before[None], keys[:-1]])).all(1)
        places = np.maximum.accumulate(np.where(is_copy, -1, np.arange(len(ids))))
        first_indexes = np.where(places < 0, first_index, indexes[places])
        for kind, is_it, other in (
            (DOUBLED, is_copy, first_indexes),
            (OUT_OF_ORDER, ~is_copy & (ids <= before), before),
        ):
            if is_it.any():
                judgement.add(kind, np.column_stack([keys, indexes, other])[is_it])
        key_before, first_index = keys[-1], int(first_indexes[-1])
    return judgement
