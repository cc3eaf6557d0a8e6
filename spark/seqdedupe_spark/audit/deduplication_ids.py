"""An audit of topics of deduplication IDs: which IDs stand in them more than once?

`id_rows` tells a range's IDs. Sorted by topic, ID and index, `judge` tells which are further copies.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seqdedupe.client.message import StoredBatch
from seqdedupe_spark.audit.sequence_ids import EXAMPLES
from seqdedupe_spark.message_columns import SCHEMA, to_arrow

ROWS_SCHEMA = pa.schema([("topic", pa.int32()), ("id", pa.binary()), ("index", pa.int64())])
"""Messages, by the number of their topic."""

_COLUMNS = pa.schema([SCHEMA.field("__deduplicationId"), SCHEMA.field("__index")])


def id_rows(topic: int, stored: Iterable[StoredBatch]) -> Iterator[pa.RecordBatch]:
    """The messages of a range, as `ROWS_SCHEMA`."""
    for one in stored:
        ids, indexes = to_arrow([one], "", _COLUMNS).columns
        yield pa.record_batch([np.full(len(one), topic, np.int32), ids, indexes], ROWS_SCHEMA)


@dataclass(frozen=True, order=True)
class Copy:
    """A further copy of a message."""

    index: int
    first_index: int
    deduplication_id: bytes


@dataclass
class IdJudgement:
    """What is doubled, by the topic's number: how many further copies, of how many IDs, and the first ones."""

    messages: Counter[int] = field(default_factory=Counter)
    ids: Counter[int] = field(default_factory=Counter)
    examples: dict[int, list[Copy]] = field(default_factory=dict)

    def merge(self, other: "IdJudgement") -> None:
        self.messages += other.messages
        self.ids += other.ids
        for topic, copies in other.examples.items():
            self.keep(topic, copies)

    def keep(self, topic: int, copies: list[Copy]) -> None:
        """Some of a topic's copies, of which those are kept that stand first."""
        self.examples[topic] = sorted(self.examples.get(topic, []) + copies)[:EXAMPLES]


def judge(batches: Iterable[pa.RecordBatch]) -> IdJudgement:
    """Judges what `id_rows` gave, sorted by topic, ID and index, all copies of a message in it."""
    judgement = IdJudgement()
    before: tuple[int, bytes] | None = None
    first_index, was_copy = -1, False
    for batch in batches:
        if not len(batch):
            continue
        topics, ids, indexes = batch.columns
        topic_numbers, places = topics.to_numpy(), indexes.to_numpy()
        is_copy = np.zeros(len(batch), bool)
        is_copy[0] = (topics[0].as_py(), ids[0].as_py()) == before
        same_id = pc.equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)
        is_copy[1:] = same_id & (topic_numbers[1:] == topic_numbers[:-1])
        of_first = np.maximum.accumulate(np.where(is_copy, -1, np.arange(len(batch))))
        first_indexes = np.where(of_first < 0, first_index, places[of_first])
        is_second = is_copy & ~np.concatenate(([was_copy], is_copy[:-1]))
        copies = np.flatnonzero(is_copy)
        for topic in np.unique(topic_numbers[copies]).tolist():
            rows = copies[topic_numbers[copies] == topic]
            judgement.messages[topic] += len(rows)
            judgement.ids[topic] += int(is_second[rows].sum())
            shown = rows[np.argsort(places[rows])[:EXAMPLES]].tolist()
            judgement.keep(topic, [Copy(int(places[n]), int(first_indexes[n]), ids[n].as_py()) for n in shown])
        before = int(topic_numbers[-1]), ids[-1].as_py()
        first_index, was_copy = int(first_indexes[-1]), bool(is_copy[-1])
    return judgement
