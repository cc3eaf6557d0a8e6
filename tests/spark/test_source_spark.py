"""The data source in Spark: found by its name, read as a batch and as a stream."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import Filter, GreaterThanOrEqual, InputPartition, LessThan
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StructType

from seqdedupe.client import blocking
from seqdedupe.names import topic_name
from seqdedupe_spark.message_columns import SCHEMA
from seqdedupe_spark.ranges import TopicRange, cut
from seqdedupe_spark.source import BatchReader, SeqdedupeDataSource
from tests.spark.streams import run_stream

Load = Callable[..., DataFrame]


@pytest.fixture
def load(spark: SparkSession, client: blocking.Client) -> Load:
    """A DataFrame of the data source with these options."""

    def load(*, stream: bool = False, schema: str | None = None, **options: Any) -> DataFrame:
        reader = (spark.readStream if stream else spark.read).format("seqdedupe")
        reader = reader.option("service.url", client.address).options(**options)
        return (reader.schema(schema) if schema else reader).load()

    return load


def send(client: blocking.Client, topic: str, first: int, stop: int) -> None:
    with client.producer(topic, "zwölf") as producer:
        for i in range(first, stop):
            key, event_time, properties = (
                (None, None, None) if i % 3 else (b"\xff%d" % i, i + 1, {"ä": str(i), "b": ""})
            )
            payload = None if i % 5 == 4 else b"%d" % i
            producer.send(payload, key=key, event_time=event_time, properties=properties)


def test_every_column_arrives(load: Load, client: blocking.Client, topic: str) -> None:
    send(client, f"{topic}-partition-0", 0, 30)
    send(client, f"{topic}-partition-7", 0, 7)
    found = load(topic=topic, minPartitions=5)
    assert found.columns == SCHEMA.names
    rows = {(row["__partition"], row["__index"]): row for row in found.collect()}
    assert len(rows) == 37
    for partition in (0, 7):
        with client.reader(f"{topic}-partition-{partition}") as reader:
            for message in reader:
                row = rows[partition, message.index]
                assert row["value"] == message.payload
                assert row["__key"] == message.key
                assert row["__topic"] == topic_name(f"{topic}-partition-{partition}")
                assert row["__messageId"] == message.message_id.to_bytes()
                assert row["__publishTime"].timestamp() == message.publish_time.timestamp()
                event_time = message.event_time
                assert (row["__eventTime"] and row["__eventTime"].timestamp()) == (
                    event_time and event_time.timestamp()
                )
                assert row["__messageProperties"] == message.properties
                assert row["__producerName"] == "zwölf"
                assert row["__sequenceId"] == message.sequence_id


def test_a_topic_of_deduplication_ids_shows_them(load: Load, client: blocking.Client, topic: str) -> None:
    client.admin.create_topic(topic, deduplication_mode="deduplication-id")
    with client.publisher(topic) as publisher:
        publisher.send_batch([b"0", None], [b"\xff", b"two"])
    rows = load(topic=topic).select("value", "__deduplicationId", "__producerName", "__sequenceId").collect()
    assert sorted(map(tuple, rows), key=str) == [(None, b"two", None, None), (b"0", b"\xff", None, None)]


def test_only_some_columns(load: Load, client: blocking.Client, topic: str) -> None:
    send(client, topic, 0, 3)
    some = load(topic=topic, schema="index bigint, value binary", plainColumnNames="true")
    assert [tuple(row) for row in some.collect()] == [(i, b"%d" % i) for i in range(3)]
    client.admin.create_topic(f"{topic}-empty")
    assert load(topic=f"{topic}-empty").count() == 0


def test_it_is_found_in_sql(load: Load, spark: SparkSession, client: blocking.Client, topic: str) -> None:
    send(client, topic, 0, 4)
    options = f"`service.url` '{client.address}', topic '{topic}'"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW messages USING seqdedupe OPTIONS ({options})")
    assert spark.sql("SELECT max(__index) AS last FROM messages").collect()[0].last == 3


def test_a_table_keeps_the_options_it_was_created_with(
    spark: SparkSession, client: blocking.Client, topic: str
) -> None:
    send(client, topic, 0, 4)
    name = topic.replace("-", "_")
    options = f"`service.url` '{client.address}', topic '{topic}', startingOffsets '{{\"{topic}\": 1}}'"
    spark.sql(f"CREATE TABLE {name} USING seqdedupe OPTIONS ({options})")
    try:
        assert [row["__index"] for row in spark.table(name).collect()] == [1, 2, 3]
        counted = spark.sql(f"SELECT count(*) AS n, max(value) AS last FROM {name} WHERE __index < 3").collect()[0]
        assert (counted.n, counted.last) == (2, b"2")
        assert spark.sql(f"SELECT * FROM {name} WITH (startingOffsets = 'earliest')").count() == 4
        with pytest.raises(PySparkException, match="did you mean topic"):
            spark.sql(f"CREATE TABLE {name}_wrong USING seqdedupe OPTIONS (topik 't')")
    finally:
        spark.sql(f"DROP TABLE IF EXISTS {name}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topik": "t"}, "there is no option topik: did you mean topic?"),
        ({"topic": "missing-topic"}, "there is no topic persistent://public/default/missing-topic"),
        ({"topic": "t", "schema": "value string"}, "column value is string, it should be binary"),
    ],
)
def test_what_is_wrong_is_said(load: Load, options: dict[str, Any], said: str) -> None:
    with pytest.raises(PySparkException) as failure:
        load(**options).count()
    assert said in str(failure.value)


FILTERS: dict[str, Callable[[int, int], bool]] = {
    "__index < 3": lambda index, part: index < 3,
    "__index <= 3": lambda index, part: index <= 3,
    "__index = 3": lambda index, part: index == 3,
    "__index >= 3": lambda index, part: index >= 3,
    "__index > 3": lambda index, part: index > 3,
    "__index != 3": lambda index, part: index != 3,
    "__index <=> 3": lambda index, part: index == 3,
    "NOT __index <=> 3": lambda index, part: index != 3,
    "__index <=> NULL": lambda index, part: False,
    "NOT __index <=> NULL": lambda index, part: True,
    "__index IN (1, 4, 99, NULL)": lambda index, part: index in (1, 4),
    "__index NOT IN (1, 4)": lambda index, part: index not in (1, 4),
    "__index NOT IN (1, NULL)": lambda index, part: False,
    "__index IS NULL": lambda index, part: False,
    "__index IS NOT NULL": lambda index, part: True,
    "__index >= 2 AND __index < 5": lambda index, part: 2 <= index < 5,
    "__index < 2 OR __index > 4": lambda index, part: not 2 <= index <= 4,
    "NOT (__index < 2 OR __topic LIKE '%-1')": lambda index, part: index >= 2 and part != 1,
    "__topic LIKE '%-partition-0' AND __index > 1": lambda index, part: part == 0 and index > 1,
    "__publishTime >= timestamp'2001-01-01' AND __index < 3": lambda index, part: index < 3,
    "__publishTime < timestamp'2001-01-01'": lambda index, part: False,
    "true": lambda index, part: True,
}
"""What SQL says, and what it means for a message of a partition."""


class PushingReader(BatchReader):
    """The planted fault: cuts its ranges by two filters, exactly, and keeps them from Spark, as the API wants it."""

    first, stop = 0, 2**63

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        for one in filters:
            match one:
                case GreaterThanOrEqual(("__index",), value):
                    self.first = max(self.first, value)
                case LessThan(("__index",), value):
                    self.stop = min(self.stop, value)
                case _:
                    yield one

    def tasks(self, ranges: list[TopicRange]) -> list[InputPartition]:
        places = [
            (one, max(self.first - one.first_index, 0), min(self.stop, one.stop_index) - one.first_index)
            for one in ranges
        ]
        return super().tasks([cut(*place) for place in places if place[1] < place[2]])


class PushingDataSource(SeqdedupeDataSource):
    @classmethod
    def name(cls) -> str:
        return "pushing"

    def reader(self, schema: StructType) -> BatchReader:
        reader = super().reader(schema)
        return PushingReader(reader.options, reader.schema)


@pytest.fixture
def pushdown(spark: SparkSession) -> Iterator[None]:
    """Spark offers a source its filters, which it does not do by default."""
    key = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(key, "true")
    try:
        yield
    finally:
        spark.conf.unset(key)


@pytest.mark.usefixtures("pushdown")
def test_filters_find_what_they_say(spark: SparkSession, client: blocking.Client, topic: str) -> None:
    """In a query with all of them at once: Spark mixes the scans of a table up in which a source takes its filters.

    Where the control arm finds the right rows Spark does so no more: the source may begin to take them.
    """
    for part in range(2):
        send(client, f"{topic}-partition-{part}", 0, 7)

    def expected(*texts: str) -> list[tuple[Any, ...]]:
        places = [(part, index) for part in range(2) for index in range(7)]
        return sorted((text, part, index) for text in texts for part, index in places if FILTERS[text](index, part))

    def found(source: str, *texts: str) -> list[tuple[Any, ...]]:
        frame = spark.read.format(source).option("service.url", client.address).option("topic", topic).load()
        frame.createOrReplaceTempView("filtered")
        queries = [f'SELECT "{text}" AS text, __partition, __index FROM filtered WHERE {text}' for text in texts]
        return sorted(map(tuple, spark.sql(" UNION ALL ".join(queries)).collect()))

    assert found("seqdedupe", *FILTERS) == expected(*FILTERS)
    spark.dataSource.register(PushingDataSource)
    assert found("pushing", "__index < 3") == expected("__index < 3")
    assert found("pushing", "__index < 3", "true") != expected("__index < 3", "true")


def test_a_stream_waits_for_the_least_that_is_worth_a_trigger(
    load: Load, spark: SparkSession, client: blocking.Client, topic: str, tmp_path: Path
) -> None:
    name = topic.replace("-", "_")
    options = {"topic": topic, "startingOffsets": "earliest", "minOffsetsPerTrigger": 10, "maxRecordsPerPartition": 4}
    send(client, topic, 0, 5)

    def writer() -> DataStreamWriter:
        stream = load(stream=True, **options, maxTriggerDelay="10h").writeStream.format("parquet")
        return stream.option("checkpointLocation", str(tmp_path / "checkpoint")).option("path", str(tmp_path / name))

    def rows() -> int:
        return spark.read.parquet(str(tmp_path / name)).count()

    query = run_stream(writer(), StreamingQuery.processAllAvailable)
    try:
        assert rows() == 5, "the first trigger waits for nothing"
        send(client, topic, 5, 12)
        query.processAllAvailable()
        assert rows() == 5
        send(client, topic, 12, 15)
        query.processAllAvailable()
        assert rows() == 15
        send(client, topic, 15, 16)
        query.processAllAvailable()
        assert rows() == 15
    finally:
        query.stop()
    run_stream(writer().trigger(availableNow=True))
    assert rows() == 16, "and that with which a query ends neither"


def test_a_stream_goes_on_from_its_checkpoint(
    load: Load, spark: SparkSession, client: blocking.Client, topic: str, tmp_path: Path
) -> None:
    name = topic.replace("-", "_")

    def run() -> list[dict[str, Any]]:
        stream = load(stream=True, topicsPattern=f"{topic}.*", startingOffsets="earliest", maxOffsetsPerTrigger=30)
        writer = stream.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = run_stream(writer.trigger(availableNow=True).option("path", str(tmp_path / name)))
        return [progress["sources"][0] | {"rows": progress["numInputRows"]} for progress in query.recentProgress]

    send(client, topic, 0, 50)
    first = run()
    assert [one["rows"] for one in first] == [30, 20]
    assert first[0]["latestOffset"] == first[1]["endOffset"] != first[0]["endOffset"]
    send(client, topic, 50, 60)
    send(client, f"{topic}-later", 0, 5)
    assert [one["rows"] for one in run()] == [15]
    found = spark.read.parquet(str(tmp_path / name)).select("__topic", "__index").collect()
    expected = [(topic_name(topic), i) for i in range(60)] + [(topic_name(f"{topic}-later"), i) for i in range(5)]
    assert sorted(map(tuple, found)) == sorted(expected)


def test_a_first_batch_that_failed_is_read_again(
    load: Load, client: blocking.Client, topic: str, tmp_path: Path
) -> None:
    """From where it started, which Spark does not log: by then the starting options lead elsewhere."""
    found: list[int] = []

    def fail(_: DataFrame, number: int) -> None:
        raise RuntimeError(f"batch {number} is lost")

    def keep(batch: DataFrame, _: int) -> None:
        found.extend(row["__index"] for row in batch.select("__index").collect())

    def writer(each: Callable[[DataFrame, int], None], **starting: str) -> DataStreamWriter:
        stream = load(stream=True, topic=topic, **starting).writeStream.foreachBatch(each)
        return stream.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)

    send(client, topic, 0, 5)
    with pytest.raises(PySparkException, match="batch 0 is lost"):
        run_stream(writer(fail, startingOffsets="earliest"))
    send(client, topic, 5, 9)
    run_stream(writer(keep, startingOffsets="latest"))
    assert sorted(found) == [*range(9)]
