"""The data source in Spark: found by its name, read as a batch and as a stream."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from seqdedupe.client import blocking
from seqdedupe.names import topic_name
from seqdedupe_spark.columns import SCHEMA

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


def test_a_stream_goes_on_from_its_checkpoint(
    load: Load, spark: SparkSession, client: blocking.Client, topic: str, tmp_path: Path
) -> None:
    name = topic.replace("-", "_")

    def run() -> list[dict[str, Any]]:
        stream = load(stream=True, topicsPattern=f"{topic}.*", startingOffsets="earliest", maxOffsetsPerTrigger=30)
        writer = stream.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start(str(tmp_path / name))
        query.awaitTermination()
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
