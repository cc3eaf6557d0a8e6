"""Finds the duplicates that a topic contains, without Spark. This module has the watermark rule, by which a job returns
each message once, and the counts of an audit."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seqdedupe.batch import Batch, Binary, Int32s, Int64s
from seqdedupe.client.message import StoredBatch
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.limits import LINK_LEFT_OUT, MAX_SEQUENCE_ID, NO_SEQUENCE_ID
from seqdedupe_spark.message_columns import SCHEMA, to_arrow

# -- The watermark rule in a worker. It needs no shuffle and no state in Spark. All messages of a producer in a topic
# partition are read in order, and the rule remembers only one number for each producer.

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
    """Return an array with at least `count` rows. If the given array has too few rows, return an array with at least
    twice as many rows. The added rows are `new`."""
    if count <= len(rows):
        return rows
    more = np.empty((max(count - len(rows), len(rows), _FIRST_CAPACITY), *rows.shape[1:]), np.int64)
    more[:] = new
    return np.concatenate([rows, more])


# -- The counts of an audit: the messages that a topic contains twice, out of order or not at all. `audit_job` runs this
# code on Spark.
#
# Topics of sequence IDs are read in two passes. The first pass reads every message, range by range. `summarise`
# computes a few numbers for each producer of a range, and keeps the links that may prove something. `TopicMerge`
# combines a topic's ranges in order. It finds missing messages, and the producers that have *late* messages, with the
# span of their IDs. (A message is late if its ID is not above all earlier IDs of its producer.) The second pass,
# `suspect_rows` and `judge`, covers only these messages.
#
# For topics of deduplication IDs, `id_rows` returns the IDs of a range. When the IDs are sorted by topic, ID and index,
# `judge_ids` finds the additional copies.

EXAMPLES = 5
"""The number of examples of each kind in the report of a topic. The first examples are kept."""

# Columns of a producer's numbers in a range.
ROWS, LOW, HIGH, LATE_LOW, LATE_HIGH, UNLINKED = range(6)
_NEW = np.array([0, MAX_SEQUENCE_ID, NO_SEQUENCE_ID, MAX_SEQUENCE_ID, NO_SEQUENCE_ID, 0], np.int64)

_LINK_COLUMNS = ("index", "sequence_id", "link", "before")
_PRODUCER_COLUMNS = ("rows", "low", "high", "late_low", "late_high", "unlinked")
SUMMARY = pa.schema(
    [("range", pa.int32()), ("producer", pa.binary())]
    + [(name, pa.int64()) for name in (*_LINK_COLUMNS, *_PRODUCER_COLUMNS)]
)
"""A row for each producer of a range, and another row for each link in the range that names an ID above all earlier IDs
of its producer.

`index` and `sequence_id` belong to the message with the `link`. `before` is the producer's highest ID before this
message in the range. It is -1 in the producer's first row, and only this row contains the numbers from `rows` on.
"""


def summarise(number: int, stored: Iterable[StoredBatch]) -> pa.RecordBatch:
    """Return the summary of a range, as `SUMMARY`. `number` is the number of the range."""
    producers = NumberedProducers()
    table: Int64s = np.empty((0, len(_NEW)), np.int64)
    told = [np.empty((0, 5), np.int64)]
    for s in stored:
        batch = s.batch
        numbers = producers.of(batch.producer_names)
        table = grown(table, len(producers), _NEW)
        of_batch = table[numbers]
        before = of_batch[:, HIGH].copy()
        links = batch.previous_sequence_ids
        first_rows = _add(of_batch, batch, before)
        table[numbers] = of_batch
        tells = (before < 0) | (links > before)
        if tells.any():
            first_ids = batch.sequence_ids[first_rows]
            told.append(np.stack([numbers, s.base_index + first_rows, first_ids, links, before], 1)[tells])
    number_of_row, *link_columns = np.concatenate(told).T
    is_first = link_columns[-1] < 0
    summaries = np.where(is_first[:, None], table[number_of_row], 0).T
    names = pa.array(producers.names(), pa.binary()).take(pa.array(number_of_row))
    ranges = np.full(len(is_first), number, np.int32)
    return pa.record_batch([ranges, names, *link_columns, *summaries], SUMMARY)


def _add(of_batch: Int64s, batch: Batch, before: Int64s) -> Int64s:
    """Add a batch to the numbers of its producers. Return each producer's first row. Within a batch the IDs of a
    producer ascend."""
    ids, indexes, count = batch.sequence_ids, indexes_of(batch), len(of_batch)
    first_rows = np.empty(count, np.int64)
    first_rows[indexes[::-1]] = np.arange(len(ids))[::-1]
    first_ids = ids[first_rows]
    last_ids = np.empty(count, np.int64)
    last_ids[indexes] = ids
    of_batch[:, ROWS] += np.bincount(indexes, minlength=count)
    of_batch[:, LOW] = np.minimum(of_batch[:, LOW], first_ids)
    of_batch[:, HIGH] = np.maximum(before, last_ids)
    of_batch[:, UNLINKED] += batch.previous_sequence_ids == LINK_LEFT_OUT
    is_late = first_ids <= before
    if is_late.any():
        late_rows = np.flatnonzero(ids <= before[indexes])
        of_batch[is_late, LATE_LOW] = np.minimum(of_batch[is_late, LATE_LOW], first_ids[is_late])
        np.maximum.at(of_batch[:, LATE_HIGH], indexes[late_rows], ids[late_rows])
    return first_rows


def indexes_of(batch: Batch) -> Int32s:
    """Return each row's place in the list of producers."""
    return batch.producer_indexes if len(batch.epochs) > 1 else np.zeros(len(batch), np.int32)


@dataclass(frozen=True)
class Hole:
    """A message whose link proves that an earlier message is missing."""

    index: int
    producer: bytes
    sequence_id: int
    link: int
    before: int
    """The highest ID of the producer before this message; -1: none."""


@dataclass
class Suspects:
    """The producers of a range that have late messages to be judged. The columns are the producers' numbers, and the
    spans of their IDs."""

    names: list[bytes]
    numbers: Int64s
    low: Int64s
    high: Int64s
    before: Int64s
    """The highest ID of each producer before the range."""


class TopicMerge:
    """Combines the results of `summarise` for the ranges of a topic. The ranges are added in order, without a gap.

    A hole is a link to an ID above every earlier ID of its producer. With `first_links_prove`, the link of a producer
    without earlier messages also counts as a hole. If `links_prove` is false, no link proves anything. Memory: about
    250 bytes for each producer, 16 bytes for each range with messages of the producer, and 300 bytes for each hole
    among the examples.
    """

    def __init__(self, *, links_prove: bool = True, first_links_prove: bool = True) -> None:
        self.producers = NumberedProducers()
        self.messages = 0
        self.missing = 0
        self.unlinked = 0
        self.incomplete: set[int] = set()
        """The numbers of the producers with missing messages."""
        self.holes: list[Hole] = []
        """The first holes."""
        self._links_prove = links_prove
        self._first_links_prove = first_links_prove
        self._table: Int64s = np.empty((0, len(_NEW)), np.int64)
        self._before: list[tuple[Int64s, Int64s]] = []

    def add(self, summary: pa.Table) -> None:
        """Add the next range."""
        numbers = self.producers.of_list(summary["producer"].to_pylist())
        self._table = grown(self._table, len(self.producers), _NEW)
        columns = {name: summary[name].to_numpy() for name in (*_LINK_COLUMNS, *_PRODUCER_COLUMNS)}
        self._add_links(numbers, columns)
        is_first = columns["rows"] > 0
        self._add_producers(numbers[is_first], {name: columns[name][is_first] for name in _PRODUCER_COLUMNS})

    def suspects(self) -> Iterator[Suspects | None]:
        """Yield, for each range, the `Suspects` for which the second pass must search. Yield None if the second pass
        need not read the range."""
        is_suspect = self._table[:, LATE_HIGH] >= 0
        names = self.producers.names() if is_suspect.any() else []
        for numbers, before in self._before:
            chosen = is_suspect[numbers]
            if not chosen.any():
                yield None
                continue
            those = numbers[chosen]
            low, high = self._table[those, LATE_LOW], self._table[those, LATE_HIGH]
            yield Suspects([names[number] for number in those], those, low, high, before[chosen])

    def _add_links(self, numbers: Int64s, columns: dict[str, Int64s]) -> None:
        links = columns["link"]
        before = np.maximum(self._table[numbers, HIGH], columns["before"])
        is_hole = (links > before) & ((before >= 0) | self._first_links_prove) & self._links_prove
        self.missing += int(is_hole.sum())
        found = np.flatnonzero(is_hole)
        self.incomplete.update(numbers[found].tolist())
        first = found[np.argsort(columns["index"][found])][: EXAMPLES - len(self.holes)]
        names = self.producers.names() if len(first) else []
        self.holes += [
            Hole(
                int(columns["index"][row]),
                names[numbers[row]],
                int(columns["sequence_id"][row]),
                int(links[row]),
                int(before[row]),
            )
            for row in first
        ]

    def _add_producers(self, numbers: Int64s, columns: dict[str, Int64s]) -> None:
        mine = self._table[numbers]
        before = mine[:, HIGH].copy()
        low, high = columns["low"], columns["high"]
        is_late = low <= before
        late_low = np.minimum(columns["late_low"], np.where(is_late, low, MAX_SEQUENCE_ID))
        late_high = np.maximum(columns["late_high"], np.where(is_late, np.minimum(before, high), NO_SEQUENCE_ID))
        mine[:, HIGH] = np.maximum(before, high)
        mine[:, LATE_LOW] = np.minimum(mine[:, LATE_LOW], late_low)
        mine[:, LATE_HIGH] = np.maximum(mine[:, LATE_HIGH], late_high)
        self._table[numbers] = mine
        self._before.append((numbers, before))
        self.messages += int(columns["rows"].sum())
        self.unlinked += int(columns["unlinked"].sum())


# -- An audit's second pass, over late messages and their earlier copies only: doubled, or out of order?
#
# `suspect_rows` finds these messages in a range. Sorted by topic, producer, sequence ID and index, `judge` finds the
# second copies, and the messages that come for the first time, but after a higher ID.

DOUBLED = "doubled"
OUT_OF_ORDER = "out_of_order"

ROWS_SCHEMA = pa.schema(
    [("topic", pa.int32()), ("producer", pa.int32())]
    + [(name, pa.int64()) for name in ("sequence_id", "index", "before")]
)
"""Messages that may be doubled or out of order, with the numbers of their topic and producer. `before` is the
producer's highest ID in the earlier batches: the message is late if its own ID is not higher."""


def suspect_rows(topic: int, stored: Iterable[StoredBatch], suspects: Suspects) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a range that may be doubled or out of order, as `ROWS_SCHEMA`."""
    place_of = {name: place for place, name in enumerate(suspects.names)}
    # Use one place more, for the producers that are not suspects: no ID is in that place's span.
    none = len(place_of)
    low, high = np.append(suspects.low, MAX_SEQUENCE_ID), np.append(suspects.high, NO_SEQUENCE_ID)
    highest, numbers = np.append(suspects.before, MAX_SEQUENCE_ID), np.append(suspects.numbers, -1)
    for s in stored:
        ids = s.batch.sequence_ids
        places = np.array([place_of.get(name, none) for name in s.batch.producer_names.values()], np.int64)
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
class LateMessage:
    """A late message. If the message is doubled, `other` is the index of the first copy. Otherwise `other` is the
    higher ID before the message."""

    index: int
    producer: int
    sequence_id: int
    other: int


@dataclass
class Judgement:
    """The result for late messages: the number of each kind, by topic and producer, and the first messages of each
    kind, by topic."""

    counts: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    examples: dict[tuple[str, int], list[LateMessage]] = field(default_factory=dict)

    def merge(self, other: "Judgement") -> None:
        self.counts += other.counts
        for key, late in other.examples.items():
            self._keep(key, late)

    def add(self, kind: str, rows: Int64s) -> None:
        """Add rows of topic, producer, sequence ID, index and `LateMessage.other`."""
        of_producers, counts = np.unique(rows[:, :2], axis=0, return_counts=True)
        for (topic, producer), count in zip(of_producers.tolist(), counts.tolist(), strict=True):
            self.counts[kind, topic, producer] += count
        for topic in np.unique(rows[:, 0]).tolist():
            of_topic = rows[rows[:, 0] == topic]
            first = of_topic[np.argsort(of_topic[:, 3])[:EXAMPLES]]
            self._keep((kind, topic), [LateMessage(*row) for row in first[:, [3, 1, 2, 4]].tolist()])

    def _keep(self, key: tuple[str, int], late: list[LateMessage]) -> None:
        self.examples[key] = sorted(self.examples.get(key, []) + late)[:EXAMPLES]


def judge(batches: Iterable[pa.RecordBatch]) -> Judgement:
    """Judge the rows of `suspect_rows`. The rows are sorted by topic, producer, ID and index, and contain all copies of
    a message."""
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


# -- Topics of deduplication IDs: which IDs do they hold more than once?

ID_ROWS_SCHEMA = pa.schema([("topic", pa.int32()), ("id", pa.binary()), ("index", pa.int64())])
"""Messages, each with the number of its topic."""

_ID_COLUMNS = pa.schema([SCHEMA.field("__deduplicationId"), SCHEMA.field("__index")])


def id_rows(topic: int, stored: Iterable[StoredBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a range, as `ID_ROWS_SCHEMA`."""
    for one in stored:
        ids, indexes = to_arrow([one], "", _ID_COLUMNS).columns
        yield pa.record_batch([np.full(len(one), topic, np.int32), ids, indexes], ID_ROWS_SCHEMA)


@dataclass(frozen=True, order=True)
class IdCopy:
    """An additional copy of a message."""

    index: int
    first_index: int
    deduplication_id: bytes


@dataclass
class IdJudgement:
    """The doubled IDs, by the topic's number: the number of additional copies, the number of IDs, and the first
    copies."""

    messages: Counter[int] = field(default_factory=Counter)
    ids: Counter[int] = field(default_factory=Counter)
    examples: dict[int, list[IdCopy]] = field(default_factory=dict)

    def merge(self, other: "IdJudgement") -> None:
        self.messages += other.messages
        self.ids += other.ids
        for topic, copies in other.examples.items():
            self.keep(topic, copies)

    def keep(self, topic: int, copies: list[IdCopy]) -> None:
        """Add copies of a topic, and keep the first ones."""
        self.examples[topic] = sorted(self.examples.get(topic, []) + copies)[:EXAMPLES]


def judge_ids(batches: Iterable[pa.RecordBatch]) -> IdJudgement:
    """Judge the rows of `id_rows`. The rows are sorted by topic, ID and index, and contain all copies of a message."""
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
            judgement.keep(topic, [IdCopy(int(places[n]), int(first_indexes[n]), ids[n].as_py()) for n in shown])
        before = int(topic_numbers[-1]), ids[-1].as_py()
        first_index, was_copy = int(first_indexes[-1]), bool(is_copy[-1])
    return judgement
