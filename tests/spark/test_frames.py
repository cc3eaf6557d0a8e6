"""Jobs on a Spark session: the fast route, SQL and DataFrames, and a streaming query as the clock."""

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import psycopg
import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from seqdedupe.errors import PositionError, SeqdedupeError, UnavailableError
from seqdedupe.message_id import Position
from seqdedupe.testing import Sidecar
from seqdedupe_spark.columns import SCHEMA
from seqdedupe_spark.job.frames import FrameTask, all_of, run_tasks, sql
from seqdedupe_spark.job.progress import Progress
from seqdedupe_spark.job.range_task import Output, Report, Step
from seqdedupe_spark.job.rounds import JobConfig, ReaderJob
from seqdedupe_spark.ranges import Range
from seqdedupe_spark.reader_job import _stream
from seqdedupe_spark.stores.contract import Advance
from tests.spark.jobs import (
    JOB,
    OUTPUT,
    TABLE,
    Database,
    begin,
    each_once,
    postgres_database,
    publish,
    select,
    source,
    sqlite_database,
    whole,
)
from tests.spark.postgres import postgres_url as postgres_url
from tests.spark.streams import run_stream

KEPT = "__topic AS topic, __partition AS partition, __index AS index"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A sidecar with the partitioned topic `both`, 300 and 200 messages."""
    with Sidecar(tmp_path_factory.mktemp("sidecar")) as sidecar:
        publish(sidecar.address, "both-partition-0", 300)
        publish(sidecar.address, "both-partition-1", 200)
        yield sidecar.address


BOTH = {"persistent://public/default/both-partition-0": 300, "persistent://public/default/both-partition-1": 200}


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return sqlite_database(tmp_path / "out.db")


@pytest.fixture
def config(address: str, database: Database) -> JobConfig:
    return JobConfig(JOB, source(address, topic="both"), database.store, TABLE)


def test_the_fast_route(spark: SparkSession, config: JobConfig, database: Database) -> None:
    small = replace(config, source=replace(config.source, limits=replace(config.source.limits, messages=200)))
    total = ReaderJob(spark, small, select).run()
    assert (total.read, total.written, total.lag) == (500, 500, 0)
    assert ReaderJob(spark, config, select).run().read == 0
    for topic, count in BOTH.items():
        each_once(database.indexes(topic), count)


def test_the_fast_route_in_one_transaction(spark: SparkSession, config: JobConfig, database: Database) -> None:
    assert ReaderJob(spark, replace(config, transaction="batch"), select).run().written == 500
    for topic, count in BOTH.items():
        each_once(database.indexes(topic), count)


def test_sql_row_by_row(spark: SparkSession, config: JobConfig, database: Database) -> None:
    query = f"SELECT {KEPT}, upper(CAST(value AS string)) AS text FROM messages WHERE __index % 2 = 0"
    total = ReaderJob(spark, config, frame=query).run()
    assert (total.read, total.written) == (500, 250)
    for topic, count in BOTH.items():
        assert database.indexes(topic) == list(range(0, count, 2))
    assert database.query(f'SELECT DISTINCT text FROM {TABLE} WHERE "index" = 2') == [("VALUE 2",)]
    assert ReaderJob(spark, config, frame=query).run().read == 0


@pytest.mark.parametrize("condition", ["false", "__index < 0"])
def test_sql_that_drops_every_row_moves_the_positions(
    spark: SparkSession, config: JobConfig, database: Database, condition: str
) -> None:
    """Of the first one Spark makes a plan without tasks."""
    for one in ("topic", "batch"):
        given = replace(config, job=one, transaction=one)
        query = f"SELECT {KEPT} FROM messages WHERE {condition}"
        assert ReaderJob(spark, given, frame=query).run().written == 0
        with database.store() as store:
            assert {
                name: stored.position.index + 1 for name, stored in store.positions(one).items() if name != "*"
            } == BOTH


def test_a_dataframe_joined_with_a_small_table(spark: SparkSession, config: JobConfig, database: Database) -> None:
    names = spark.createDataFrame([(0, "even"), (1, "odd")], "rest int, name string")

    def named(messages: DataFrame) -> DataFrame:
        rest = messages.withColumn("rest", f.col("index") % 2)
        return rest.join(f.broadcast(names), "rest").select("topic", "partition", "index", "name")

    plain = replace(config, source=replace(config.source, plain_column_names=True))
    assert ReaderJob(spark, plain, frame=named).run().written == 500
    for topic, count in BOTH.items():
        each_once(database.indexes(topic), count)
    assert database.query(f"SELECT count(*) FROM {TABLE} WHERE name = 'odd'") == [(250,)]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT __topic, __partition, max(__index) AS __index FROM messages GROUP BY 1, 2",
        "SELECT DISTINCT * EXCEPT (__messageProperties) FROM messages",
        "SELECT * FROM messages ORDER BY __index",
        "SELECT * FROM messages LIMIT 10",
        "SELECT *, row_number() OVER (PARTITION BY __topic ORDER BY __index) AS n FROM messages",
        "SELECT * FROM messages UNION ALL SELECT * FROM messages",
        "SELECT a.* FROM messages a JOIN messages b ON a.__index = b.__index",
        "SELECT /*+ REPARTITION(3) */ * FROM messages",
        "SELECT /*+ COALESCE(1) */ * FROM messages",
        "SELECT * FROM messages TABLESAMPLE (10 ROWS)",
    ],
)
@pytest.mark.parametrize("topic", ["both", "both-partition-0"])
def test_a_plan_that_does_not_work_row_by_row_is_refused(
    spark: SparkSession, config: JobConfig, database: Database, query: str, topic: str
) -> None:
    """With a single topic there is not even an exchange in it."""
    given = replace(config, source=source(str(config.source.service), topic=topic))
    with pytest.raises(SeqdedupeError) as raised:
        ReaderJob(spark, given, frame=query).run()
    assert raised.value.reason == "UNSUPPORTED_PLAN"
    with database.store() as store:
        assert all(stored.position.index == -1 for stored in store.positions(JOB).values())


def test_an_aggregate_in_one_transaction(spark: SparkSession, config: JobConfig, database: Database) -> None:
    query = "SELECT __topic AS topic, count(*) AS n, max(__index) AS top FROM messages GROUP BY 1"
    given = replace(config, transaction="batch")
    assert ReaderJob(spark, given, frame=query).run().written == 2
    assert ReaderJob(spark, given, frame=query).run().written == 0
    assert database.query(f"SELECT * FROM {TABLE} ORDER BY 1") == [(name, n, n - 1) for name, n in BOTH.items()]


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ("__topic, __partition", "drops the column __index"),
        ("value", "drops the column __topic"),
        ("__topic, __partition, __index + 1 AS __index", "gave a row that is not of"),
        ("__topic, 1 - __partition AS __partition, __index", "gave a row that is not of"),
        ("'t' AS __topic, __partition, __index", "gave a row that is not of"),
        ("__topic, __partition, CAST(NULL AS bigint) AS __index", "gave a row that is not of"),
    ],
)
def test_rows_that_are_not_of_their_tasks_range_are_refused(
    spark: SparkSession, config: JobConfig, database: Database, columns: str, why: str
) -> None:
    with pytest.raises(SeqdedupeError, match=why) as raised:
        ReaderJob(spark, config, frame=f"SELECT {columns} FROM messages").run()
    assert raised.value.reason == "UNSUPPORTED_PLAN"
    assert database.query(f"SELECT count(*) FROM {TABLE}") == [(0,)]


@pytest.mark.parametrize("transaction", ["topic", "batch"])
def test_a_row_that_a_table_refuses_at_the_commit_names_its_message(
    spark: SparkSession, config: JobConfig, postgres_url: str, transaction: Literal["topic", "batch"]
) -> None:
    """PostgreSQL does not say which row it is: the rows that Spark has kept are tried again."""
    database = postgres_database(postgres_url)
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE known (i bigint PRIMARY KEY)")
        connection.execute("INSERT INTO known SELECT i FROM generate_series(0, 299) AS i WHERE i <> 123")
        reference = '"index" bigint REFERENCES known DEFERRABLE INITIALLY DEFERRED'
        connection.execute(f"CREATE TABLE {TABLE} (topic text, partition int, {reference})".encode())
    given = replace(config, store=database.store, transaction=transaction)
    with pytest.raises(SeqdedupeError, match=r"the message is \S+, index 123, of \S+both-partition-\d") as raised:
        ReaderJob(spark, given, frame=f"SELECT {KEPT} FROM messages").run()
    assert raised.value.reason == "INVALID_OUTPUT"
    assert database.query(f"SELECT count(*) FROM {TABLE}") == [(0,)]


def test_times_are_the_same_in_any_session_zone(spark: SparkSession, config: JobConfig, database: Database) -> None:
    before = datetime.now(UTC) - timedelta(hours=1)
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        ReaderJob(spark, config, frame=f"SELECT {KEPT}, __publishTime AS time FROM messages").run()
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(zone))
    ((low, high),) = database.query(f"SELECT min(time), max(time) FROM {TABLE}")
    assert before < datetime.fromisoformat(str(low)) <= datetime.fromisoformat(str(high)) < datetime.now(UTC)


def test_a_reading_error_on_a_worker_is_the_same_error_here(
    spark: SparkSession, address: str, database: Database
) -> None:
    step = whole(address, "both-partition-0")
    start, end = (position._replace(incarnation=7) for position in (step.range.start, step.range.end))
    step = step._replace(range=replace(step.range, start=start, end=end))
    begin(database.store, [step])
    task = FrameTask(address, SCHEMA, sql("SELECT * FROM messages"))
    with pytest.raises(PositionError) as raised:
        task.run(spark, Output(database.store, JOB, TABLE, OUTPUT), [step], one_transaction=False)
    assert raised.value.reason == "POSITION_OF_ANOTHER_INCARNATION"
    assert database.position(step.range.topic) == start


@pytest.mark.parametrize("transaction", ["topic", "batch"])
def test_a_transformation_that_fails_in_the_middle_moves_nothing(
    spark: SparkSession, config: JobConfig, database: Database, transaction: Literal["topic", "batch"]
) -> None:
    """To a worker that is given rows by one that fails it looks as if they had come to their end."""

    def fail_late(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            assert batch.column("index")[0].as_py() < 250
            yield batch

    def transform(messages: DataFrame) -> DataFrame:
        large = messages.selectExpr(*KEPT.split(", "), "repeat('x', 20000) AS text")
        return large.mapInArrow(fail_late, large.schema)

    per_batch = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(per_batch)
    spark.conf.set(per_batch, "10")
    given = replace(
        config, source=source(str(config.source.service), topic="both-partition-0"), transaction=transaction
    )
    try:
        with pytest.raises(PySparkException):
            ReaderJob(spark, given, frame=transform).run()
    finally:
        spark.conf.set(per_batch, str(before))
    assert database.query(f"SELECT count(*) FROM {TABLE}") == [(0,)]
    assert database.position("persistent://public/default/both-partition-0").index == -1


def test_rows_that_end_too_early_are_not_committed(address: str, database: Database) -> None:
    step = whole(address, "both-partition-0")
    begin(database.store, [step])
    batch = pa.RecordBatch.from_pylist([{"topic": "t", "index": 0, "value": b""}], OUTPUT)
    with database.store() as store, pytest.raises(UnavailableError, match="1 of 2 rows"):
        store.write(JOB, TABLE, all_of(iter([batch]), 2), [Advance(*step)])
    assert database.indexes("t") == []
    assert database.position(step.range.topic) == step.range.start


@pytest.mark.parametrize("frame", ["SELECT nothing FROM messages", "SELECT", lambda messages: None])
def test_a_transformation_that_cannot_be_planned_is_one_line(
    spark: SparkSession, config: JobConfig, frame: str | Callable[[DataFrame], DataFrame]
) -> None:
    with pytest.raises(SeqdedupeError) as raised:
        ReaderJob(spark, config, frame=frame).run()
    assert raised.value.reason == "INVALID_OUTPUT"
    assert "\n" not in str(raised.value)
    assert not raised.value.message.endswith(": ")


def test_a_streaming_query_is_only_the_clock(
    spark: SparkSession, config: JobConfig, database: Database, address: str, tmp_path: Path
) -> None:
    topic = publish(address, "clocked", 20)
    given = replace(config, source=source(address, topic="clocked", maxOffsetsPerTrigger=7))
    options = {"service.url": address, "topic": "clocked", "startingOffsets": "earliest"}

    def tick(checkpoint: Path) -> None:
        stream = spark.readStream.format("seqdedupe").options(**options).load()
        writer = stream.writeStream.foreachBatch(ReaderJob(spark, given, select).foreach_batch)
        run_stream(writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True))

    tick(tmp_path / "kept")
    each_once(database.indexes(topic), 20)
    publish(address, "clocked", 10, first=20)
    ReaderJob(spark, given, select).run()
    each_once(database.indexes(topic), 30)
    # The checkpoint is older than the database now; then there is none.
    for first, checkpoint in ((30, "kept"), (40, "new")):
        publish(address, "clocked", 10, first=first)
        tick(tmp_path / checkpoint)
        each_once(database.indexes(topic), first + 10)


def test_a_checkpoint_of_another_history_of_the_topic_does_not_stop_the_job(
    spark: SparkSession, config: JobConfig, database: Database, address: str, tmp_path: Path
) -> None:
    """As after a restore of sidecar and database: the checkpoint is beyond the topic's end."""
    topic = publish(address, "restored", 20)
    given = replace(config, source=source(address, topic="restored"))
    clock = {"service.url": address, "topic": "restored"}

    def tick() -> None:
        reader = ReaderJob(spark, given, select)
        _stream(spark, reader, clock, str(tmp_path / "kept"), False, 1.0, Progress(io.StringIO()))

    tick()
    (tmp_path / "kept" / "offsets" / ".0.crc").unlink()
    offsets = tmp_path / "kept" / "offsets" / "0"
    text = offsets.read_text()
    offsets.write_text(text.replace(":19@19", ":119@119"))
    assert offsets.read_text() != text
    publish(address, "restored", 10, first=20)
    tick()
    each_once(database.indexes(topic), 30)


def test_small_groups_share_tasks_and_report_in_their_order(spark: SparkSession) -> None:
    start, end = Position.before(1, 0), Position.before(1, 1)
    groups = [[Step(Range(f"topic {number}", start, end), 0)] for number in range(70)]

    def run(steps: Sequence[Step]) -> Report:
        context = TaskContext.get()
        return Report(read=int(steps[0].range.topic[6:]), written=context.partitionId() if context else -1)

    reports = run_tasks(spark, run, groups)
    assert [report.read for report in reports] == list(range(70))
    assert [report.written for report in reports] == [0] * 32 + [1] * 32 + [2] * 6
