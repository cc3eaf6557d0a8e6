"""Jobs on a Spark session: a round's tasks, and a streaming query as the clock."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

from seqdedupe.message_id import Position
from seqdedupe.testing import Sidecar
from seqdedupe_spark.range_task import RangeStep, TaskReport
from seqdedupe_spark.ranges import TopicRange
from seqdedupe_spark.reader_job import Progress, _stream
from seqdedupe_spark.rounds import JobConfig, ReaderJob, run_tasks
from tests.spark.jobs import JOB, TABLE, Database, each_once, publish, select, source, sqlite_database
from tests.spark.postgres import postgres_url as postgres_url
from tests.spark.streams import run_stream


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


def test_a_streaming_query_is_only_the_clock(
    spark: SparkSession, config: JobConfig, database: Database, address: str, tmp_path: Path
) -> None:
    topic = publish(address, "clocked", 20)
    given = replace(config, source=source(address, topic="clocked", maxOffsetsPerTrigger=7))
    options = {"service.url": address, "topic": "clocked", "startingOffsets": "earliest"}

    def read(frame: DataFrame, batch: int) -> None:
        ReaderJob(spark, given, select).run()

    def tick(checkpoint: Path) -> None:
        stream = spark.readStream.format("seqdedupe").options(**options).load()
        writer = stream.writeStream.foreachBatch(read)
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
    groups = [[RangeStep(TopicRange(f"topic {number}", start, end), 0)] for number in range(70)]

    def run(steps: Sequence[RangeStep]) -> TaskReport:
        context = TaskContext.get()
        return TaskReport(read=int(steps[0].range.topic[6:]), written=context.partitionId() if context else -1)

    reports = run_tasks(spark, run, groups)
    assert [report.read for report in reports] == list(range(70))
    assert [report.written for report in reports] == [0] * 32 + [1] * 32 + [2] * 6
