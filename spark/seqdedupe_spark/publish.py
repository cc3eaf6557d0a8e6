"""Publishes rows that have producer names and sequence IDs, in the order of each producer's IDs: `publish`."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.utils import is_remote

from seqdedupe.client import blocking
from seqdedupe.client.blocking.producer import Producer
from seqdedupe.client.pending import Verdict
from seqdedupe.errors import InvalidRequestError, SeqdedupeError, error
from seqdedupe.figures import counted
from seqdedupe.names import producer_name, topic_name
from seqdedupe.v1 import admin_pb2
from seqdedupe_spark.options import parse_sink
from seqdedupe_spark.planning import patiently
from seqdedupe_spark.row_layout import frame_of, pieces
from seqdedupe_spark.service import SidecarService, sidecar_at
from seqdedupe_spark.session import activate, typed_failures

_TYPES = {
    "value": ("binary", "string"),
    "__producerName": ("string",),
    "__sequenceId": ("bigint", "int"),
    "__topic": ("string",),
    "__key": ("binary", "string"),
    "__eventTime": ("timestamp",),
    "__messageProperties": ("map<string,string>",),
    "__deduplicationId": ("binary", "string"),
}
"""The columns, also allowed without `__`, and their allowed types."""

_NEEDED = 4
"""The number of these columns, from the first one on, that are required."""

_SHORT = topic_name("_").removesuffix("_")
"""The prefix of a short topic name."""

_ID = "__deduplicationId"

_ORDER = ("__topic", "__producerName", "__sequenceId")


@dataclass(frozen=True)
class Published:
    """The result of `publish`."""

    rows: int
    copies: int
    """The number of rows at or below the highest sequence ID that the topic had for their producer. These rows are not
    stored."""


def publish(frame: DataFrame, topic: str | None = None, **options: str) -> Published:
    """Publish rows to topics of sequence IDs. The rows of each producer are published in the order of their IDs, in one
    session for each name.

    `frame` has the columns `value`, `__producerName`, `__sequenceId`, and `__topic` unless `topic` is given for all
    rows. `__key`, `__eventTime` and `__messageProperties` may be omitted; other columns are ignored. `options` are the
    options of the sink, as `{"service.url": …}`.

    A task that is repeated sends its rows again; these rows are copies. Rows below the highest ID of their producer are
    copies, too. So publish all rows of a producer name in one call, or in consecutive calls with ascending IDs. Two
    simultaneous calls with the same name fence each other, and so do speculative tasks.

    Raises ConfigurationError (INVALID_OPTION) for invalid columns or options, InvalidRequestError for rows that cannot
    be sent (NOT_ASCENDING: an ID occurs twice), FencedError, UnavailableError. After an error, some of the rows may be
    published.
    """
    given = parse_sink(options if topic is None else {**options, "topic": topic})
    columns = _columns(frame, given.topic)
    rows = frame.select(columns).repartition(*_ORDER[:2]).sortWithinPartitions(*_ORDER)
    service = given.service
    activate(frame.sparkSession)
    if given.topic is not None and not is_remote():
        with sidecar_at(service).connect() as client:
            _check_mode(client, given.topic)

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = publish_sorted(service, batches)
        yield pa.record_batch({"rows": [found.rows], "copies": [found.copies]})

    with typed_failures():
        found = rows.mapInArrow(run, "rows bigint, copies bigint").collect()
    return Published(sum(row[0] for row in found), sum(row[1] for row in found))


def _check_mode(client: blocking.Client, topic: str) -> None:
    """Raise INVALID_OPTION for a topic of deduplication IDs. If the topic's mode cannot be determined now, the tasks
    check it."""
    try:
        mode = client.admin.topic(topic).deduplication_mode
    except SeqdedupeError:
        return
    if mode != admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID:
        return
    raise error(
        "INVALID_OPTION",
        f"topic: {topic} has deduplication IDs, but publish sends only to topics of sequence IDs",
        hint="Use the sink, with a column deduplicationId: "
        "df.write.format('seqdedupe').option('topic', …).mode('append').save().",
    )


def _columns(frame: DataFrame, topic: str | None) -> list[Column]:
    there = dict(frame.dtypes)
    columns: list[Column] = []
    for place, (name, types) in enumerate(_TYPES.items()):
        if name == "__topic" and topic is not None:
            columns.append(f.lit(topic).alias(name))
            continue
        several = [one for one in {name: None, name.removeprefix("__"): None} if one in there]
        if len(several) > 1:
            raise error(
                "INVALID_OPTION", f"publish: the columns {' and '.join(several)} mean the same: drop one of them"
            )
        found = several[0] if several else None
        if found is None:
            if place < _NEEDED:
                raise error("INVALID_OPTION", f"publish: the rows have no column {name}")
            continue
        if there[found] not in types:
            what = f"publish: column {found} is {there[found]}, it should be {' or '.join(types)}"
            raise error("INVALID_OPTION", what)
        column: Column = frame[found]
        if name == "__sequenceId":
            column = column.cast("bigint")
        elif name == "__topic":
            # Two names of one topic would be two tasks, which fence each other.
            column = f.when(column.contains("://"), column).otherwise(f.concat(f.lit(_SHORT), column))
        columns.append(column.alias(name))
    return columns


def publish_sorted(service: str | SidecarService, batches: Iterable[pa.RecordBatch]) -> Published:
    """Publish, in a task, rows that are sorted by topic, producer and sequence ID."""
    rows = 0
    with sidecar_at(service).connect() as client:
        session = _Session(client)
        try:
            for batch in batches:
                rows += len(batch)
                for topic, name, part in _by_producer(batch):
                    session.send(topic, name, part)
            session.end()
        except BaseException:
            session.abort()
            raise
    return Published(rows, session.copies)


def _by_producer(batch: pa.RecordBatch) -> Iterator[tuple[str, str, pa.RecordBatch]]:
    """Yield adjacent rows of the same producer. Raises INVALID_REQUEST, INVALID_TOPIC_NAME, INVALID_NAME."""
    if not len(batch):
        return
    for name in _ORDER:
        if batch.column(name).null_count:
            raise error("INVALID_REQUEST", f"{name} is null in {counted(batch.column(name).null_count, 'row')}")
    if _ID in batch.schema.names and (given := len(batch) - batch.column(_ID).null_count):
        raise error(
            "INVALID_REQUEST",
            f"{_ID} is set in {given:,} of {counted(len(batch), 'row')}, but publish identifies rows by sequence ID",
            hint="Drop that column, or write the rows with format('seqdedupe') into a topic of deduplication IDs.",
        )
    topics, names = (batch.column(name).dictionary_encode() for name in _ORDER[:2])
    numbers = np.stack([topics.indices.to_numpy(), names.indices.to_numpy()])
    cuts = np.flatnonzero((numbers[:, 1:] != numbers[:, :-1]).any(axis=0)) + 1
    for first, end in pairwise([0, *cuts.tolist(), len(batch)]):
        name = names[first].as_py()
        producer_name(name)
        yield topic_name(topics[first].as_py()), name, batch.slice(first, end - first)


class _Session:
    """The sessions of the producers, one after the other."""

    def __init__(self, client: blocking.Client) -> None:
        self.copies = 0
        self._client = client
        self._key: tuple[str, str] | None = None
        self._producer: Producer | None = None
        self._receipts: list[blocking.BatchReceipt] = []

    def send(self, topic: str, name: str, rows: pa.RecordBatch) -> None:
        """Queue rows in the session of this producer. The session of another producer ends first."""
        producer = self._producer
        if producer is None or (topic, name) != self._key:
            self.end()
            producer = patiently(lambda: self._open(topic, name))
            self._key, self._producer = (topic, name), producer
        for piece in pieces(rows):
            one = frame_of(piece)
            try:
                receipt = producer.send_batch(
                    one.payloads,
                    piece.column("__sequenceId").to_numpy(),
                    keys=one.keys,
                    event_times_ms=one.event_times_ms,
                    properties=one.properties,
                )
            except InvalidRequestError as e:
                what = f"rows of producer {name!r} for {topic}: {e.message}"
                raise error(e.reason, what, hint=e.hint, topic=topic, producer=name) from e
            self._receipts.append(receipt)

    def _open(self, topic: str, name: str) -> Producer:
        producer = self._client.producer(topic, name)
        try:
            producer.open()
        except InvalidRequestError:
            _check_mode(self._client, topic)
            raise
        return producer

    def end(self) -> None:
        """End the session when all of its rows are durable."""
        if self._producer is None:
            return
        self._producer.close()
        self.copies += sum(int(np.count_nonzero(one.until_durable().verdicts == Verdict.DUP)) for one in self._receipts)
        self._producer = self._key = None
        self._receipts.clear()

    def abort(self) -> None:
        if self._producer is not None:
            self._producer.abort()
