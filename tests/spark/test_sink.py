"""The sink's tasks without Spark: what they take and publish, and that running them again changes nothing."""

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark import cloudpickle
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from seqdedupe.client import blocking
from seqdedupe.errors import ConfigurationError, InvalidRequestError, SeqdedupeError, UnavailableError
from seqdedupe.message_id import Position
from seqdedupe.names import partition_of, topic_name
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import admin_pb2
from seqdedupe_spark import planning
from seqdedupe_spark import row_layout as rows
from seqdedupe_spark import row_layout as rows_module
from seqdedupe_spark import sink as task_module
from seqdedupe_spark.message_columns import columns_of
from seqdedupe_spark.options import parse_sink
from seqdedupe_spark.publish import Published, publish_sorted
from seqdedupe_spark.range_reader import read_range
from seqdedupe_spark.ranges import TopicRange
from seqdedupe_spark.row_layout import SeenIdentities, check_apart, layout_of
from seqdedupe_spark.sink import MAX_IN_FLIGHT_BYTES, BatchWriter, Began, Committed, SinkReport, SinkTask
from seqdedupe_spark.source import SeqdedupeDataSource
from tests.client.foreign import CODES, answering
from tests.client.helpers import until
from tests.conftest import StartSidecar

EPOCH = datetime.fromtimestamp(0, UTC)
OWN = "value binary, deduplicationId string"
DERIVED = "value binary, __topic string, __incarnation bigint, __index bigint"
SOURCE = "persistent://public/default/source"


TYPES: dict[str, DataType] = {
    "bigint": LongType(),
    "binary": BinaryType(),
    "int": IntegerType(),
    "map<string,int>": MapType(StringType(), IntegerType()),
    "map<string,string>": MapType(StringType(), StringType()),
    "string": StringType(),
    "timestamp": TimestampType(),
    "timestamp_ntz": TimestampNTZType(),
    "tinyint": ByteType(),
}


def schema(ddl: str) -> StructType:
    """As `StructType.fromDDL`, which needs a session."""
    return StructType([StructField(name, TYPES[kind]) for name, kind in map(str.split, ddl.split(", "))])


@pytest.fixture
def target(client: blocking.Client, topic: str) -> str:
    """A topic of deduplication IDs."""
    return client.admin.create_topic(topic, deduplication_mode="deduplication-id").name


def task(client: blocking.Client, topic: str | None, ddl: str = OWN, **more: Any) -> SinkTask:
    return SinkTask(client.address, layout_of(schema(ddl), topic), more.pop("began", task_module.now()), **more)


def own(ids: list[str | None], value: bytes = b"v") -> pa.RecordBatch:
    return pa.record_batch({"value": [value] * len(ids), "deduplicationId": pa.array(ids, pa.string())})


def derived(indexes: list[int], **columns: Any) -> pa.RecordBatch:
    count = len(indexes)
    given = {"value": [b"v"] * count, "__topic": [SOURCE] * count, "__incarnation": [7] * count, "__index": indexes}
    return pa.record_batch(given | columns)


def ids_in(client: blocking.Client, topic: str) -> list[bytes]:
    with client.reader(topic) as reader:
        return [message.deduplication_id or b"" for message in reader]


# -- what is taken -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ddl", "said"),
    [
        ("deduplicationId string", "the rows have no column value"),
        ("value int, deduplicationId string", "column value is int, it should be binary or string"),
        ("value string, deduplicationId bigint", "column deduplicationId is bigint, it should be binary or string"),
        ("value string, __key int, deduplicationId string", "column __key is int, it should be binary or string"),
        ("value string, __eventTime bigint, deduplicationId string", "__eventTime is bigint, it should be timestamp"),
        ("value string, __eventTime timestamp_ntz, deduplicationId string", "it should be timestamp"),
        ("value string, __messageProperties string, deduplicationId string", "it should be map<string,string>"),
        ("value string, __messageProperties map<string,int>, deduplicationId string", "should be map<string,string>"),
        ("value string, __topic binary, deduplicationId string", "column __topic is binary, it should be string"),
        (f"{DERIVED}, __ordinal string", "column __ordinal is string, it should be"),
        ("value binary, __topic string, __incarnation bigint, __index int", "__index is int, it should be bigint"),
        ("value string, valu string, deduplicationId string", "there is no|no column valu: did you mean value?"),
        ("value string, keys string, deduplicationId string", "no column keys: did you mean __key?"),
        ("value string, key int, deduplicationId string", "column key is int, it should be binary or string"),
        ("value string, key string, __key string, __deduplicationId string", "columns key and __key mean the same"),
        ("value string, value string, deduplicationId string", "there are several columns value"),
        ("value string", "the rows have no identity: neither deduplicationId, nor __topic, __incarnation and __index"),
        ("value string, __topic string, __index bigint", "the rows have no identity"),
        (
            "value string, deduplicationId string, __ordinal int",
            "__ordinal is only for rows without",
        ),
        ("value string, sequenceId bigint", "column sequenceId: the sink writes by dedup"),
        ("value string, __producerName string, __sequenceId bigint", "column __producerName: the sink writes by dedup"),
    ],
)
def test_columns_that_cannot_be_are_named(ddl: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        layout_of(schema(ddl), "t")
    assert any(one in raised.value.message for one in said.split("|"))
    if "sequenceId" in said or "producerName" in said:
        assert "publish(df)" in raised.value.hint


def test_without_the_option_topic_the_column_is_the_target() -> None:
    assert layout_of(schema(f"{OWN}, __topic string"), None).topic is None
    with pytest.raises(ConfigurationError, match="no topic is named"):
        layout_of(schema(OWN), None)
    with pytest.raises(ConfigurationError, match="__topic is the target of the rows, not their source"):
        layout_of(schema(DERIVED), None)


@pytest.mark.parametrize("plain", [False, True])
def test_all_columns_of_the_source_are_taken(plain: bool) -> None:
    whole = from_arrow_schema(columns_of(True, plain))
    assert layout_of(whole, "t").has_source
    assert layout_of(StructType([*whole, *schema("ordinal int")]), "t").has_source
    assert not layout_of(whole, None).has_source


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topik": "t"}, "did you mean topic?"),
        ({"startingOffsets": "latest"}, "there is no option startingoffsets"),
        ({"service.url": "pulsar://a"}, "rows are written through a sidecar"),
        ({"authParams": "token:secret"}, "it should be the URL of a token file"),
        ({"topic": "a b"}, "is not a topic name"),
        ({"failOnForgottenIds": "maybe"}, "it should be true or false"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse_sink(options)


def test_what_is_said_to_spark_is_none_of_the_sinks_business() -> None:
    given = {"topic": "t", "queryname": "q", "checkpointlocation": "/c", "asyncprogresstrackingenabled": "true"}
    assert parse_sink(given) == parse_sink({"topic": "t", "checkpointLocation": "/c"})


def test_a_topic_is_only_appended_to(client: blocking.Client, target: str) -> None:
    sink = SeqdedupeDataSource({"service.url": client.address, "topic": target, "checkpointlocation": "/nowhere"})
    for writer in (sink.writer, sink.streamWriter):
        with pytest.raises(ConfigurationError, match="can only be appended to"):
            writer(schema(OWN), overwrite=True)
        writer(schema(OWN), overwrite=False)


def test_topics_are_looked_at_before_there_is_a_task(client: blocking.Client, topic: str) -> None:
    client.admin.create_topic(topic)
    for name, said in [(topic, "has sequence IDs"), (f"{topic}-missing", "TOPIC_NOT_FOUND")]:
        given = {"service.url": client.address, "topic": name, "checkpointlocation": "/nowhere"}
        for writer in (SeqdedupeDataSource(given).writer, SeqdedupeDataSource(given).streamWriter):
            with pytest.raises(SeqdedupeError, match=said):
                writer(schema(OWN), overwrite=False)
    # A sidecar that is away is waited for by the tasks, and so it is when Spark commits what they have written.
    away = SeqdedupeDataSource({"service.url": "127.0.0.1:1", "topic": topic, "checkpointlocation": "/nowhere"})
    for writer in (away.writer, away.streamWriter):
        writer(schema(OWN), overwrite=False)


def test_publish_names_the_topic_and_the_producer(client: blocking.Client, target: str, topic: str) -> None:
    columns = {"value": [b"v"] * 2, "__topic": [topic] * 2, "__producerName": ["p"] * 2, "__sequenceId": [7, 7]}
    with pytest.raises(InvalidRequestError, match=rf"producer 'p' for {topic_name(f'{topic}-other')}: .*NOT_ASCENDING"):
        publish_sorted(client.address, [pa.record_batch(columns | {"__topic": [f"{topic}-other"] * 2})])
    with pytest.raises(
        ConfigurationError, match=f"{target} has deduplication IDs, but publish sends only to"
    ) as raised:
        publish_sorted(client.address, [pa.record_batch(columns)])
    assert "format('seqdedupe')" in raised.value.hint


def test_topics_that_cannot_be_written_to(client: blocking.Client, topic: str) -> None:
    client.admin.create_topic(topic)
    with pytest.raises(ConfigurationError, match="has sequence IDs") as raised:
        task(client, topic_name(topic)).run([own(["a"])])
    assert "publish(df)" in raised.value.hint
    off = client.admin.create_topic(f"{topic}-off", deduplication_mode="deduplication-id", deduplication_enabled=False)
    with pytest.raises(ConfigurationError, match="deduplication is off"):
        task(client, off.name).run([])
    whole = client.admin.create_topic(f"{topic}-whole", partitions=2)
    with pytest.raises(ConfigurationError, match="has sequence IDs"):
        task(client, whole.name).run([])
    # None is made by writing to it.
    with pytest.raises(SeqdedupeError, match="TOPIC_NOT_FOUND"):
        task(client, topic_name(f"{topic}-missing")).run([])
    assert client.ends(off.name).last.index == -1


@pytest.mark.parametrize("route", ["id", "key"])
def test_a_partitioned_topic_is_written_to_while_all_its_partitions_deduplicate(
    client: blocking.Client, topic: str, route: str
) -> None:
    whole = client.admin.create_topic(
        topic, partitions=3, deduplication_mode="deduplication-id", deduplication_route=route
    ).name
    keyed = pa.record_batch(
        {"value": [b"v"] * 60, "deduplicationId": [str(i) for i in range(60)], "__key": [b"k"] * 60}
    )
    one = task(client, whole, f"{OWN}, __key binary")
    assert (one.run([keyed]), one.run([keyed], attempt=1)) == (SinkReport(60), SinkReport(60, 60))
    client.admin.set_policy(f"{topic}-partition-1", admin_pb2.TopicPolicy(deduplication_enabled=False))
    with pytest.raises(ConfigurationError, match="deduplication is off"):
        one.run([keyed])


@pytest.mark.parametrize(
    ("batch", "ddl", "said"),
    [
        (own(["a", None, "b"]), OWN, "deduplicationId is null in 1 of 3 rows"),
        (
            own(["a", ""]),
            OWN,
            "cannot be an ID in 1 of 2 rows, the first of which has 0 bytes: it should have 1 to 255",
        ),
        (own(["a", "ä" * 128]), OWN, "has 256 bytes"),
        (own(["a", "b"], bytes(5 * 1024 * 1024 + 1)), OWN, r"row with the ID b'a' has 5242881 bytes"),
        (derived([1, 2], __index=pa.array([1, None])), DERIVED, "__index is null in 1 of 2 rows"),
        (derived([1, -1]), DERIVED, "__index is -1: it should be 0 to"),
        (derived([1, 2**43]), DERIVED, "__index is 8796093022208: it should be 0 to"),
        (derived([1], __ordinal=[2**20]), f"{DERIVED}, __ordinal int", "__ordinal is 1048576"),
        (
            derived([1, 1]),
            DERIVED,
            r"several rows come from the message with index 1 of .*source, and have the same ordinal 0",
        ),
        (
            pa.record_batch(
                {
                    "value": [b""],
                    "deduplicationId": ["a"],
                    "__messageProperties": pa.array([[("k", None)]], pa.map_(pa.string(), pa.string())),
                }
            ),
            f"{OWN}, __messageProperties map<string,string>",
            "a property is null",
        ),
    ],
)
def test_rows_that_cannot_be_are_refused_whole(
    client: blocking.Client, target: str, batch: pa.RecordBatch, ddl: str, said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        task(client, target, ddl).run([batch])
    assert ids_in(client, target) == []


# -- what is published ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_rows_are_read_back_as_they_were(client: blocking.Client, target: str, seed: int) -> None:
    chosen = random.Random(seed)
    text = chosen.random() < 0.5
    many = chosen.choice([1, 7, 5000])
    values = [chosen.choice([None, "", "ä", "x" * chosen.choice([3, 3000])]) for _ in range(many)]
    keys = [chosen.choice([None, "", "k"]) for _ in range(many)]
    times = [
        chosen.choice([None, EPOCH + timedelta(milliseconds=chosen.randint(-(10**9), 10**12))]) for _ in range(many)
    ]
    properties = [chosen.choice([None, [], [("a", "")], [("ä", "ö"), ("b", "1")]]) for _ in range(many)]
    kind = pa.string() if text else pa.binary()
    table = pa.record_batch(
        {
            "value": pa.array([one if text or one is None else one.encode() for one in values], kind),
            "__key": pa.array(keys, pa.string()),
            "__eventTime": pa.array(times, pa.timestamp("us", "Europe/Zurich")),
            "__messageProperties": pa.array(properties, pa.map_(pa.string(), pa.string())),
            "deduplicationId": pa.array([b"\xff%d" % i for i in range(many)], pa.binary()),
        }
    )
    cuts = sorted({0, many, *(chosen.randint(0, many) for _ in range(chosen.choice([0, 3])))})
    pieces = [table.slice(first, end - first) for first, end in pairwise(cuts)]
    ddl = f"{OWN}, __key string, __eventTime timestamp, __messageProperties map<string,string>"
    assert task(client, target, ddl).run(pieces) == SinkReport(many)
    end = client.ends(target).last
    whole = TopicRange(target, Position.start(end.incarnation), end)
    found = {row["__deduplicationId"]: row for one in read_range(client.address, whole) for row in one.to_pylist()}
    assert len(found) == many
    for i in range(many):
        row, value, key = found[b"\xff%d" % i], values[i], keys[i]
        assert row["value"] == (None if value is None else value.encode())
        assert row["__key"] == (None if key is None else key.encode())
        assert row["__eventTime"] == times[i]
        assert row["__messageProperties"] == (properties[i] or [])


def test_topics_by_row(client: blocking.Client, topic: str) -> None:
    names = [f"{topic}-{k}" for k in range(3)]
    for name in names:
        client.admin.create_topic(name, deduplication_mode="deduplication-id")
    batches = [
        pa.record_batch(
            {
                "value": [b"v"] * 60,
                "deduplicationId": [f"{n}-{i}" for i in range(60)],
                "__topic": [names[i % 3] if i % 2 else topic_name(names[i % 3]) for i in range(60)],
            }
        )
        for n in range(3)
    ]
    assert task(client, None, f"{OWN}, __topic string").run(batches) == SinkReport(180)
    for k, name in enumerate(names):
        assert sorted(ids_in(client, name)) == sorted(b"%d-%d" % (n, i) for n in range(3) for i in range(k, 60, 3))


def test_no_row_of_a_batch_is_sent_if_one_of_its_topics_is_refused(client: blocking.Client, target: str) -> None:
    client.admin.create_topic(f"{target}-sequence")
    ddl = f"{OWN}, __topic string"
    # More than a task has under way: it would wait until some of it is stored.
    rows_of_target = 2 * MAX_IN_FLIGHT_BYTES // 2**20
    ids: list[str | None] = [str(n) for n in range(rows_of_target + 1)]
    for refused, said in [("missing", "TOPIC_NOT_FOUND"), ("sequence", "has sequence IDs")]:
        topics = pa.array([target] * rows_of_target + [f"{target}-{refused}"])
        with pytest.raises(SeqdedupeError, match=said):
            task(client, None, ddl).run([own(ids, b"v" * 2**20).append_column("__topic", topics)])
        assert client.ends(target).last.index == -1


def test_frames_are_small_and_whole() -> None:
    layout = layout_of(schema(OWN), SOURCE)
    many = pa.record_batch({"value": [b"x" * 1000] * 9000, "deduplicationId": [str(i) for i in range(9000)]})
    large = pa.record_batch({"value": [bytes(4_000_000)] * 3, "deduplicationId": ["a", "b", "c"]})
    frames = [frame for batch in (many, large) for _, frame in rows.frames_of(batch, layout, SeenIdentities())]
    assert sum(map(len, frames)) == 9003
    assert all(len(frame) == 1 or frame.size_bytes <= rows.FRAME_BYTES for frame in frames)
    assert max(map(len, frames)) <= rows.FRAME_ROWS
    assert [frame.size_bytes // 1_000_000 for frame in frames[-3:]] == [4, 4, 4]


@pytest.mark.parametrize(("is_idle", "counts"), [(True, [1000] * 10 + [1]), (False, [4000, 4000, 2001])])
def test_small_batches_are_joined_while_others_are_under_way(is_idle: bool, counts: list[int]) -> None:
    whole = pa.record_batch({"value": range(10_001)})
    small = [whole.slice(first, 1000) for first in range(0, 10_001, 1000)]
    found = list(rows.joined(small, lambda: is_idle))
    assert [len(batch) for batch in found] == counts
    assert pa.Table.from_batches(found) == pa.Table.from_batches([whole])
    # What is large already waits for nobody, and takes nobody with it.
    large = pa.record_batch({"value": [bytes(rows.FRAME_BYTES)]})
    assert [len(batch) for batch in rows.joined([large] * 3, lambda: False)] == [1, 1, 1]


# -- once, however often ---------------------------------------------------------------------------------------------


def test_rows_dealt_out_anew_are_stored_once(client: blocking.Client, target: str) -> None:
    """As by a shuffle that is executed again, some of it twice at a time: what decides is the row, not the task."""
    chosen = random.Random(5)
    names = [f"id-{i}" for i in range(3000)]
    runs = []
    for _ in range(4):
        chosen.shuffle(names)
        runs += [names[k::3] for k in range(3)]
    threads = [threading.Thread(target=task(client, target).run, args=([own(list(part))],)) for part in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert task(client, target).run([own(list(names))]) == SinkReport(3000, 3000)
    assert sorted(ids_in(client, target)) == sorted(one.encode() for one in names)


def test_under_sequence_ids_two_tasks_of_one_name_cannot_be_right(client: blocking.Client, topic: str) -> None:
    """The control arm: why the sink writes by deduplication ID."""
    with client.producer(topic, "task-2") as second:
        second.send_batch([b"%d" % i for i in range(51, 101)], range(51, 101)).result()
    with client.producer(topic, "task-2") as first:
        result = first.send_batch([b"%d" % i for i in range(1, 51)], range(1, 51)).result()
    assert set(result.verdicts) == {2}  # Dup: 1 to 50 are lost
    assert client.ends(topic).last.index == 49
    with client.producer(topic, "name") as one:
        one.send(b"a", 1).result()
        with client.producer(topic, "name") as other:
            other.send(b"b", 2).result()
            with pytest.raises(SeqdedupeError, match="FENCED"):
                one.send(b"c", 3).result()
            one.abort()


def test_a_sidecar_that_is_killed_in_between(start_sidecar: Callable[..., Sidecar], topic: str) -> None:
    sidecar = start_sidecar()
    with blocking.Client(sidecar.address) as client:
        target = client.admin.create_topic(topic, deduplication_mode="deduplication-id").name

        def batches() -> Iterator[pa.RecordBatch]:
            for n in range(20):
                if n in (5, 12):
                    sidecar.kill()
                    sidecar.start()
                yield derived([*range(100 * n, 100 * n + 100)])

        done = task(client, target, DERIVED).run(batches())
        assert (done.rows, done.taken) == (2000, 0)
        assert task(client, target, DERIVED).run([derived([*range(2000)])]).copies == 2000
        assert sorted(ids_in(client, target)) == sorted(b"%s/7/%d/0" % (SOURCE.encode(), i) for i in range(2000))


# -- identities that a source has ------------------------------------------------------------------------------------


def of_source(ids: list[bytes | None], topic: str = SOURCE, *, plain: bool = False, **more: Any) -> pa.RecordBatch:
    """Rows as the source gives them, of a topic with such IDs, from index 0 on."""
    count = len(ids)
    given = dict.fromkeys(columns_of(False, False).names) | {
        "value": [b"v"] * count,
        "__key": [b"k"] * count,
        "__topic": [topic] * count,
        "__incarnation": [7] * count,
        "__index": list(range(count)),
        "__deduplicationId": ids,
    }
    fields = columns_of(False, False)
    arrays = [pa.array(given[one.name] or [None] * count, one.type) for one in fields]
    batch = pa.record_batch(arrays, schema=columns_of(False, plain))
    for name, column in more.items():
        batch = batch.append_column(name, pa.array(column))
    return batch


def written_of(client: blocking.Client, topic: str | None, *batches: pa.RecordBatch) -> SinkReport:
    layout = layout_of(from_arrow_schema(batches[0].schema), topic)
    return SinkTask(client.address, layout, task_module.now()).run(batches)


@pytest.mark.parametrize("plain", [False, True])
def test_ids_of_a_source_name_its_rows(client: blocking.Client, target: str, plain: bool) -> None:
    """For two topics with the same two IDs two messages are made, and not four; the warning is of something else."""
    first, second = (of_source([b"a", b"b"], f"{SOURCE}-{k}", plain=plain) for k in (1, 2))
    assert written_of(client, target, first) == SinkReport(2)
    assert written_of(client, target, second) == SinkReport(2, copies=2)
    assert ids_in(client, target) == [b"a", b"b"]
    with client.reader(target) as reader:
        assert {message.key for message in reader} == {b"k"}


@pytest.mark.parametrize("plain", [False, True])
def test_a_topic_without_ids_is_known_by_its_messages(client: blocking.Client, target: str, plain: bool) -> None:
    assert written_of(client, target, of_source([None, None], plain=plain)).rows == 2
    # For a union of both each row has the identity that it has alone.
    mixed = pa.Table.from_batches([of_source([None, None], plain=plain), of_source([b"a", b"b"], "s", plain=plain)])
    assert written_of(client, target, *mixed.combine_chunks().to_batches()).copies == 2
    assert ids_in(client, target) == [f"{SOURCE}/7/{i}/0".encode() for i in range(2)] + [b"a", b"b"]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (of_source([b"a", None]), r"deduplicationId is null in 1 row of .*/source, and not in others"),
        (of_source([b"a", b"b"], __ordinal=[0, 1]), "rows have both __deduplicationId and __ordinal"),
        (of_source([b"a", b"b"], plain=True, ordinal=[0, 1]), "rows have both deduplicationId and ordinal"),
        (of_source([b"a", b"b"], deduplicationId=["a", "c"]), "have different IDs in 1 of 2 rows"),
        (of_source([b"a", b"b"], deduplicationId=["a", None]), "have different IDs in 1 of 2 rows"),
    ],
)
def test_an_id_that_is_not_the_identity_is_an_error(
    client: blocking.Client, target: str, batch: pa.RecordBatch, said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        written_of(client, target, batch)
    assert ids_in(client, target) == []


def test_an_id_of_its_own_is_taken_where_the_source_has_none(client: blocking.Client, target: str) -> None:
    assert written_of(client, target, of_source([None, None], deduplicationId=["x", "y"])) == SinkReport(2)
    assert written_of(client, target, of_source([b"z"], deduplicationId=["z"])) == SinkReport(1)
    assert ids_in(client, target) == [b"x", b"y", b"z"]


def test_publish_takes_no_ids(client: blocking.Client, topic: str) -> None:
    columns = {"value": [b"v"] * 2, "__topic": [topic] * 2, "__producerName": ["p"] * 2, "__sequenceId": [0, 1]}
    rows = pa.record_batch(columns | {"__deduplicationId": pa.array([None, b"a"], pa.binary())})
    with pytest.raises(InvalidRequestError, match="__deduplicationId is set in 1 of 2 rows"):
        publish_sorted(client.address, [rows])
    assert publish_sorted(client.address, [rows.slice(0, 1)]) == Published(1, 0)


# -- identities of a source --------------------------------------------------------------------------------------------


def test_the_id_of_a_row_of_a_source_is_what_is_documented(client: blocking.Client, target: str) -> None:
    assert task(client, target, DERIVED).run([derived([5, 2**43 - 1])]).rows == 2
    ddl = f"{DERIVED}, __ordinal tinyint"
    more = derived([5, 5, 6], __ordinal=pa.array([0, 3, 0], pa.int8()))
    assert task(client, target, ddl).run([more]).copies == 1
    ends = [b"5/0", b"%d/0" % (2**43 - 1), b"5/3", b"6/0"]
    assert ids_in(client, target) == [SOURCE.encode() + b"/7/" + end for end in ends]


def test_topics_with_long_names_have_ids_of_their_own() -> None:
    long = [topic_name("x" * 200 + end) for end in ("a", "b")]
    found = rows_module.ids_of(
        pa.array(long),
        pa.array([2**63 - 1] * 2),
        pa.array([rows_module.MAX_INDEX] * 2),
        pa.array([rows_module.MAX_ORDINAL] * 2),
    ).to_pylist()
    assert len(set(found)) == 2
    assert all(one.startswith(b"sha256:") and len(one) <= 255 for one in found)
    longest = "persistent://" + "x" * (rows_module.MAX_TOPIC_BYTES - 13)
    assert rows_module.name_in_id(longest) == longest
    assert len(f"{longest}/{2**63 - 1}/{rows_module.MAX_INDEX}/{rows_module.MAX_ORDINAL}") <= 255


Rows = list[tuple[int, int, int]]
ROWS = st.lists(st.tuples(st.sampled_from([7, 8]), st.integers(0, 12), st.integers(0, 2)), max_size=30)


def seen_of(batches: list[Rows]) -> dict[rows_module.Source, bytes]:
    seen = SeenIdentities()
    for batch in batches:
        if batch:
            incarnations, indexes, ordinals = np.array(batch, np.int64).T
            seen.add(pa.array(["s"] * len(batch)), incarnations, indexes, ordinals)
    return seen.packed()


@given(st.lists(st.lists(ROWS, max_size=4), min_size=1, max_size=3))
def test_an_identity_that_comes_twice_is_found(tasks: list[list[Rows]]) -> None:
    every = [row for batches in tasks for batch in batches for row in batch]
    if len(set(every)) == len(every):
        check_apart([seen_of(batches) for batches in tasks])
    else:
        with pytest.raises(InvalidRequestError, match="several rows come from the message with index") as raised:
            check_apart([seen_of(batches) for batches in tasks])
        assert raised.value.reason == "AMBIGUOUS_IDENTITY"


def test_what_tasks_tell_is_small_where_rows_come_in_order() -> None:
    packed = seen_of([[(7, i, 0) for i in range(first, first + 1000)] for first in range(0, 50_000, 1000)])
    assert sum(map(len, packed.values())) < 100
    check_apart([packed, seen_of([[(7, i, 0) for i in range(50_000, 51_000)], [(7, 5, 1)]])])


def test_the_driver_refuses_what_two_tasks_have_dealt_out(client: blocking.Client, target: str) -> None:
    one = task(client, target, DERIVED)
    found = [one.run([derived([1, 2])]), one.run([derived([2, 3])])]
    with pytest.raises(InvalidRequestError, match="message with index 2 of"):
        BatchWriter(one).commit([Committed(written) for written in found])
    BatchWriter(one).commit([Committed(found[0]), None])


@pytest.mark.parametrize("partitions", [0, 2])
def test_rows_whose_identity_another_query_took_are_warned_about(
    client: blocking.Client, topic: str, partitions: int, caplog: pytest.LogCaptureFixture
) -> None:
    by_id: dict[str, Any] = {"deduplication_mode": "deduplication-id"} | ({"partitions": 2} if partitions else {})
    name = client.admin.create_topic(topic, **by_id).name

    def commit(ddl: str, batch: pa.RecordBatch, attempt: int = 0, **more: Any) -> int:
        caplog.clear()
        one = task(client, name, ddl, **more)
        done = one.run([batch], attempt)
        BatchWriter(one).commit([Committed(done)])
        return done.copies

    assert commit(DERIVED, derived([0, 1, 2])) == 0
    assert not caplog.records
    receipts = derived([1, 2, 3], value=[b"receipt"] * 3)
    assert commit(DERIVED, receipts) == 2
    assert "the write: 2 rows were not stored" in caplog.text
    assert "give each row a deduplicationId" in caplog.text
    # What may have been written before by this very query, and rows with IDs of their own, are copies by right.
    assert commit(DERIVED, receipts, attempt=1) == 3
    assert commit(DERIVED, receipts, began=Began(task_module.now().at_ms, may_repeat=True)) == 3
    assert commit(OWN, own(["a"])) == 0
    assert commit(OWN, own(["a"])) == 1
    assert not caplog.records


# -- the window ------------------------------------------------------------------------------------------------------


@pytest.fixture
def forgetful(client: blocking.Client, topic: str) -> str:
    """A topic that has forgotten all but its last messages."""
    policy = admin_pb2.TopicPolicy(deduplication_window_max_messages=16)
    name = client.admin.create_topic(topic, deduplication_mode="deduplication-id", policy=policy).name
    with client.publisher(name) as publisher:
        for n in range(10):
            publisher.send_batch([b"v"] * 10, [f"old-{n}-{i}" for i in range(10)])
    assert client.admin.topic(name).window_forgotten
    return name


def began(client: blocking.Client, topic: str, off_ms: int, *, may_repeat: bool) -> Began:
    """Before or after the oldest message that the topic knows, by the clock of the driver."""
    oldest = client.admin.topic(topic).window_first_publish_time_ms
    return Began(oldest + task_module.CLOCKS_MS + off_ms, may_repeat)


def test_what_may_be_there_and_forgotten_is_not_written_again(client: blocking.Client, forgetful: str) -> None:
    again = began(client, forgetful, -1, may_repeat=True)
    with pytest.raises(SeqdedupeError, match="IDS_FORGOTTEN"):
        task(client, forgetful, began=again).run([own(["old-0-0"])])
    assert len(ids_in(client, forgetful)) == 100
    # The control arm doubles it, and says that it may have.
    accepted = task(client, forgetful, began=again, fail_on_forgotten_ids=False)
    assert accepted.run([own(["old-0-0"])]) == SinkReport(1, outgrown=(forgetful,))
    assert ids_in(client, forgetful).count(b"old-0-0") == 2


def test_what_the_window_reaches_back_to_is_written_again(client: blocking.Client, forgetful: str) -> None:
    known = began(client, forgetful, 0, may_repeat=True)
    assert task(client, forgetful, began=known).run([own(["old-9-9"])]).copies == 1


def test_a_first_try_needs_no_window_and_a_second_one_does(client: blocking.Client, forgetful: str) -> None:
    before = began(client, forgetful, -1, may_repeat=False)
    assert task(client, forgetful, began=before).run([own(["new"])]).rows == 1
    with pytest.raises(SeqdedupeError, match="IDS_FORGOTTEN"):
        task(client, forgetful, began=before).run([own(["new"])], attempt=1)


def test_partitions_know_together_what_each_of_them_knows(client: blocking.Client, topic: str) -> None:
    """The one that has forgotten most lately says how far back all of them know, and one that never forgot nothing."""
    policy = admin_pb2.TopicPolicy(deduplication_window_max_messages=16)
    whole = client.admin.create_topic(
        topic, partitions=3, deduplication_mode="deduplication-id", deduplication_route="key", policy=policy
    ).name
    key_of = {partition_of(b"%d" % k, b"", 3): b"%d" % k for k in range(30)}

    def fill(partition: int, first: int, end: int) -> None:
        with client.publisher(whole) as publisher:
            for n in range(first, end):
                publisher.send_batch(
                    [b"v"] * 4, [f"{partition}-{n}-{i}" for i in range(4)], keys=[key_of[partition]] * 4
                )

    fill(0, 0, 1)
    assert client.admin.topic(whole).window_first_publish_time_ms == 0
    for partition in (1, 2):
        fill(partition, 0, 20)
    parts = [client.admin.topic(f"{topic}-partition-{k}") for k in range(3)]
    assert [bool(part.window_forgotten) for part in parts] == [False, True, True]
    found = client.admin.topic(whole)
    assert found.window_first_publish_time_ms == parts[2].window_first_publish_time_ms
    assert parts[1].window_first_publish_time_ms <= parts[2].window_first_publish_time_ms
    again = pa.record_batch({"value": [b"v"], "deduplicationId": ["2-19-3"], "__key": [key_of[2]]})
    ddl = f"{OWN}, __key binary"
    with pytest.raises(SeqdedupeError, match="IDS_FORGOTTEN"):
        task(client, whole, ddl, began=began(client, whole, -1, may_repeat=True)).run([again])
    assert task(client, whole, ddl, began=began(client, whole, 0, may_repeat=True)).run([again]).copies == 1


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """A checkpoint whose last batch is 10."""
    offsets = tmp_path / "check point" / "offsets"
    offsets.mkdir(parents=True)
    for number, seconds in ((9, 5000), (10, 4000), (2, 9000)):
        (offsets / str(number)).touch()
        os.utime(offsets / str(number), (seconds, seconds))
    (offsets / ".10.crc").touch()
    return offsets.parent


def plan(location: Path | str) -> Began:
    """In its own process: Spark deals what is planned over several, and ends them when it likes."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(task_module.began, str(location)).result()


def test_a_batch_is_new_if_it_is_the_first_after_one_that_was_planned(logged: Path) -> None:
    # Who ran the queries before is not known.
    assert plan(logged) == Began(4_000_000, may_repeat=True, batch=10)
    (logged / "offsets" / "11").touch()
    first, second = task_module.began(str(logged)), plan(logged)
    assert not first.may_repeat
    assert second == first._replace(may_repeat=True)
    assert abs(first.at_ms - time.time() * 1000) < 3_600_000
    # Other processes plan what comes next, and this one the repetition of a batch that it knows nothing of.
    (logged / "offsets" / "12").touch()
    assert not plan(logged).may_repeat
    assert task_module.began(str(logged)).may_repeat
    # Something else ran batch 13.
    for number in ("13", "14"):
        (logged / "offsets" / number).touch()
    assert task_module.began(str(logged)).may_repeat
    assert os.listdir(logged / task_module.PLANNED) == ["14"]
    # The checkpoint is put back by one batch.
    (logged / "offsets" / "14").unlink()
    assert task_module.began(str(logged)).may_repeat


def test_where_no_mark_can_be_made_every_batch_may_repeat(logged: Path) -> None:
    (logged / task_module.PLANNED).touch()
    for number in ("11", "12"):
        (logged / "offsets" / number).touch()
        assert task_module.began(str(logged)).may_repeat


@pytest.mark.parametrize("name", ["plain", "with space", "with%20escape", "a#b", "a?b", "c:d"])
@pytest.mark.parametrize("scheme", ["", "file:", "file://"])
def test_a_checkpoint_is_where_spark_makes_it(tmp_path: Path, scheme: str, name: str) -> None:
    assert task_module.folder_of(f"{scheme}{tmp_path}/{name}") == tmp_path / name


def test_a_checkpoint_that_cannot_be_looked_at(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task_module._say_once.cache_clear()
    for elsewhere in ("hdfs://name/check", "file://host/check", "//host/check", str(tmp_path / "none"), None):
        for _ in range(2):
            assert not task_module.began(elsewhere).may_repeat
    assert len(caplog.records) == 5
    assert "hdfs://name/check cannot be read" in caplog.text


def test_a_write_that_outgrows_the_window_is_warned_about(
    client: blocking.Client, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = admin_pb2.TopicPolicy(deduplication_window_max_messages=16)
    name = client.admin.create_topic(topic, deduplication_mode="deduplication-id", policy=policy).name
    one = task(client, name, began=task_module.now())
    for n in range(10):
        done = one.run([own([f"{n}-{i}" for i in range(10)])])
    assert done.outgrown == (name,)
    BatchWriter(one).commit([Committed(done)])
    assert f"{name} has forgotten IDs since the write began" in caplog.text


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
async def test_what_a_proxy_answers_to_a_publisher_that_begins_is_waited_out(
    start_sidecar: StartSidecar, monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode
) -> None:
    monkeypatch.setattr("seqdedupe_spark.sink.PATIENCE_SECONDS", LAST_RESORT_SECONDS)
    sidecar = await asyncio.to_thread(start_sidecar)
    is_open, may_go_on = threading.Event(), threading.Event()

    def batches() -> Iterator[pa.RecordBatch]:
        is_open.set()
        may_go_on.wait(LAST_RESORT_SECONDS)
        yield own([str(number) for number in range(10)])

    with blocking.Client(sidecar.address) as client:
        await asyncio.to_thread(client.admin.create_topic, "t", deduplication_mode="deduplication-id")
        writes = asyncio.create_task(asyncio.to_thread(task(client, "t").run, batches()))
        await asyncio.to_thread(is_open.wait)
        await asyncio.to_thread(sidecar.kill)
        async with answering(sidecar.address, code) as calls:
            may_go_on.set()
            await until(lambda: calls["PublishStream"] >= 6)
        await asyncio.to_thread(sidecar.start)
        assert (await writes).rows == 10
        assert await asyncio.to_thread(ids_in, client, "t") == [b"%d" % number for number in range(10)]


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
async def test_what_a_proxy_answers_to_a_session_that_starts_is_waited_out(
    start_sidecar: StartSidecar, monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode
) -> None:
    sidecar = await asyncio.to_thread(start_sidecar)
    columns = {"__topic": ["t"] * 10, "__producerName": ["p"] * 10, "__sequenceId": range(10), "value": [b"v"] * 10}
    given = pa.record_batch({name: pa.array(list(values)) for name, values in columns.items()})
    await asyncio.to_thread(sidecar.kill)
    async with answering(sidecar.address, code) as calls:
        with monkeypatch.context() as patch:
            patch.setattr(planning.patiently, "__defaults__", (0.0, lambda: False))
            with pytest.raises(UnavailableError, match="a proxy on the way") as caught:
                await asyncio.to_thread(publish_sorted, sidecar.address, [given])
            assert caught.value.reason == "NOT_A_SIDECAR"
        monkeypatch.setattr(planning.patiently, "__defaults__", (LAST_RESORT_SECONDS, lambda: False))
        begun = calls["PublishStream"]
        publishes = asyncio.create_task(asyncio.to_thread(publish_sorted, sidecar.address, [given]))
        await until(lambda: calls["PublishStream"] >= begun + 3)
    await asyncio.to_thread(sidecar.start)
    assert await publishes == Published(10, 0)


def test_a_task_is_pickled(client: blocking.Client, target: str) -> None:
    one = task(client, target, DERIVED)
    again = cloudpickle.loads(cloudpickle.dumps(BatchWriter(one)))  # type: ignore[no-untyped-call]
    assert again.task == one
    assert replace(one, fail_on_forgotten_ids=False) != one
