"""The sink in Spark: batches and streams, tasks that are killed, and rows that a retry deals out again."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from seqdedupe.client import blocking
from seqdedupe.errors import ConfigurationError, InvalidRequestError
from seqdedupe.names import topic_name
from seqdedupe.v1 import admin_pb2
from seqdedupe_spark.publish import publish
from seqdedupe_spark.session import activate
from tests.spark.jobs import Gate
from tests.spark.jobs import publish as fill
from tests.spark.killing import wake
from tests.spark.run_sink import Driver, GatedSink, SinkQuery
from tests.spark.streams import run_stream

Load = Callable[..., DataFrame]


@pytest.fixture
def target(client: blocking.Client, topic: str) -> str:
    return client.admin.create_topic(f"{topic}-target", deduplication_mode="deduplication-id").name


@pytest.fixture
def load(spark: SparkSession, client: blocking.Client) -> Load:
    def load(topic: str, **more: str) -> DataFrame:
        return spark.read.format("seqdedupe").options(**options(client, topic), **more).load()

    return load


def options(client: blocking.Client, topic: str) -> dict[str, str]:
    return {"service.url": client.address, "topic": topic}


def write(frame: DataFrame, client: blocking.Client, topic: str) -> None:
    frame.write.format("seqdedupe").options(**options(client, topic)).mode("append").save()


def stream(spark: SparkSession, client: blocking.Client, source: str, **more: Any) -> DataFrame:
    given = options(client, source) | {"startingOffsets": "earliest"} | more
    return spark.readStream.format("seqdedupe").options(**given).load()


def copy(frame: DataFrame, client: blocking.Client, topic: str, checkpoint: Path) -> StreamingQuery:
    """All that there is now, by a query that is over then."""
    writer = frame.writeStream.format("seqdedupe").options(**options(client, topic))
    return run_stream(writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True))


def counted(client: blocking.Client, topic: str) -> Counter[bytes | None]:
    """The payloads, and how often each is there."""
    with client.reader(topic) as reader:
        return Counter(message.payload for message in reader)


def once(count: int) -> Counter[bytes | None]:
    return Counter(f"value {i}".encode() for i in range(count))


def test_a_topic_is_copied_once_however_often(load: Load, client: blocking.Client, topic: str, target: str) -> None:
    fill(client.address, topic, 500)
    write(load(topic), client, target)
    plain = load(topic, plainColumnNames="true")
    assert "index" in plain.columns
    write(plain, client, target)
    assert counted(client, target) == once(500)
    # The rows of a topic of IDs have these as their identity.
    again = client.admin.create_topic(f"{topic}-again", deduplication_mode="deduplication-id").name
    for rows in (load(target), load(target, plainColumnNames="true").select("value", "deduplicationId")):
        write(rows, client, again)
    assert counted(client, again) == once(500)
    end = client.ends(topic).last
    with client.reader(target) as reader:
        ids = {message.deduplication_id: message.payload for message in reader}
    assert ids[f"{topic_name(topic)}/{end.incarnation}/41/0".encode()] == b"value 41"
    # A topic of the same name that was made again has other messages at the same indexes.
    client.admin.delete_topic(topic)
    fill(client.address, topic, 10)
    write(load(topic), client, target)
    assert counted(client, target) == once(500) + once(10)


@pytest.mark.parametrize("mode", ["overwrite", "error", "ignore"])
def test_other_modes_are_refused(spark: SparkSession, client: blocking.Client, target: str, mode: str) -> None:
    rows = spark.range(1).selectExpr("'v' AS value", "'i' AS deduplicationId")
    with pytest.raises(PySparkException, match=r"can only be appended to|cannot be written in the") as raised:
        rows.write.format("seqdedupe").options(**options(client, target)).mode(mode).save()
    assert "ppend" in str(raised.value)
    assert client.ends(target).last.index == -1


@pytest.mark.parametrize("mode", ["complete", "update"])
def test_other_output_modes_are_refused(
    spark: SparkSession, client: blocking.Client, topic: str, target: str, tmp_path: Path, mode: str
) -> None:
    fill(client.address, topic, 5)
    rows = stream(spark, client, topic).groupBy("value").count().selectExpr("value", "value AS deduplicationId")
    writer = rows.writeStream.format("seqdedupe").options(**options(client, target)).outputMode(mode)
    query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    with pytest.raises(PySparkException, match=r"can only be appended to|does not support Update mode"):
        query.awaitTermination()
    assert client.ends(target).last.index == -1


def test_what_cannot_be_written_is_said(spark: SparkSession, client: blocking.Client, topic: str, target: str) -> None:
    rows = spark.range(10)
    for columns, said in [
        (["'v' AS value"], "the rows have no identity"),
        (["'v' AS value", "if(id = 3, null, 'i') AS deduplicationId"], "deduplicationId is null in 1 of"),
        (["'v' AS value", "id AS sequenceId"], "publish"),
    ]:
        with pytest.raises(PySparkException, match=said):
            write(rows.selectExpr(*columns), client, target)
    # Another task has rows that are right.
    assert counted(client, target).keys() <= {b"v"}
    fill(client.address, topic, 1)
    good = rows.selectExpr("'v' AS value", "string(id) AS deduplicationId")
    for wrong, said in [(topic, "has sequence IDs"), (f"{topic}-missing", "TOPIC_NOT_FOUND")]:
        with pytest.raises(PySparkException, match=said) as raised:
            write(good, client, wrong)
        # No task was run, and what Spark shows before the one line that matters is short.
        assert "Failed to initialize Python data source writer" in str(raised.value)
        assert str(raised.value).count("File ") == 1


def test_a_thread_of_its_own_needs_the_session(
    spark: SparkSession, client: blocking.Client, topic: str, target: str, tmp_path: Path
) -> None:
    fill(client.address, topic, 3)
    rows = spark.range(3).selectExpr("concat('value ', id) AS value", "string(id) AS deduplicationId")
    published = rows.selectExpr("value", "'q' AS producerName", "bigint(deduplicationId) AS sequenceId")

    def in_thread(call: Callable[[], object]) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(call).result()

    def after(first: Callable[[], object]) -> Callable[[], None]:
        def call() -> None:
            first()
            write(rows, client, target)
            copy(stream(spark, client, topic), client, target, tmp_path / "checkpoint")

        return call

    with pytest.raises(Py4JJavaError, match="DATA_SOURCE_NOT_FOUND"):
        in_thread(after(lambda: None))
    assert client.ends(target).last.index == -1
    in_thread(after(lambda: activate(spark)))
    assert counted(client, target) == once(3) + once(3)
    in_thread(after(lambda: publish(published, topic, **{"service.url": client.address})))
    assert counted(client, target) == once(3) + once(3) + once(3)


def test_a_stream_goes_from_topic_to_topic(
    spark: SparkSession, client: blocking.Client, topic: str, target: str, tmp_path: Path
) -> None:
    fill(client.address, topic, 300)

    def run(checkpoint: str) -> None:
        rows = stream(spark, client, topic, maxOffsetsPerTrigger=120)
        query = copy(rows, client, target, tmp_path / checkpoint)
        assert query.exception() is None

    run("first")
    fill(client.address, topic, 40, first=300)
    run("first")
    assert counted(client, target) == once(340)
    # The checkpoint is lost: all is read again, and nothing is written again.
    run("second")
    assert counted(client, target) == once(340)


def several(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Each message twice, in the second half of the topic only."""
    for batch in batches:
        yield batch
        yield batch.filter(pa.array([index >= 200 for index in batch.column("__index").to_pylist()]))


def test_several_rows_of_a_message_need_ordinals(load: Load, client: blocking.Client, topic: str, target: str) -> None:
    fill(client.address, topic, 300)
    rows = load(topic)
    twice = rows.mapInArrow(several, rows.schema)
    with pytest.raises(PySparkException, match=r"AMBIGUOUS_IDENTITY"):
        write(twice, client, target)
    # Dealt out to other tasks no task sees both: the driver does.
    with pytest.raises(PySparkException, match=r"AMBIGUOUS_IDENTITY"):
        write(rows.union(rows.filter("__index >= 200")), client, target)
    exploded = rows.select("*", f.posexplode(f.array(f.lit("a"), f.lit("b"))).alias("__ordinal", "which"))
    exploded = exploded.withColumn("value", f.concat("value", "which")).drop("which")
    other = client.admin.create_topic(f"{topic}-other", deduplication_mode="deduplication-id").name
    for _ in range(2):
        write(exploded, client, other)
    assert counted(client, other) == Counter(f"value {i}{which}".encode() for i in range(300) for which in "ab")


# -- kills -------------------------------------------------------------------------------------------------------------


def kill_who_comes(gate: Gate) -> threading.Thread:
    thread = threading.Thread(target=lambda: os.kill(gate.wait(), signal.SIGKILL))
    thread.start()
    return thread


def name_by_attempt(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Identities that are made from who computes a row."""
    context = TaskContext.get()
    assert context is not None
    for batch in batches:
        ids = [f"{context.taskAttemptId()}-{value}" for value in batch.column("value")]
        yield pa.RecordBatch.from_arrays([batch.column("value"), pa.array(ids)], ["value", "deduplicationId"])


def named(rows: DataFrame, identity: str) -> DataFrame:
    if identity == "attempt":
        return rows.select("value").mapInArrow(name_by_attempt, "value binary, deduplicationId string")
    if identity == "own":
        # A task that is tried again has other rows: some that the others have written, and not all that it had.
        rows = rows.select("value", f.expr("concat('id-', __index)").alias("deduplicationId"))
        return rows.withColumn("dealt", f.rand()).repartition(3, "dealt").drop("dealt")
    return rows


@pytest.mark.parametrize("identity", ["source", "own", "attempt"])
def test_a_worker_is_killed_in_mid_write(
    spark: SparkSession, load: Load, client: blocking.Client, topic: str, target: str, tmp_path: Path, identity: str
) -> None:
    fill(client.address, topic, 600)
    spark.dataSource.register(GatedSink)
    gate = Gate(tmp_path / "gate")
    killer = kill_who_comes(gate)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "40")
    try:
        writer = named(load(topic), identity).write.format("gated").options(**options(client, target))
        writer.option("gate", str(gate.folder)).mode("append").save()
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
        gate.open()
        killer.join()
    if identity == "attempt":  # the control arm
        assert sum(counted(client, target).values()) > 600
    else:
        assert counted(client, target) == once(600)


def test_a_driver_is_killed_in_mid_write(
    spark: SparkSession, client: blocking.Client, topic: str, target: str, tmp_path: Path
) -> None:
    """With its worker left behind, which wakes when the successor has written the same."""
    fill(client.address, topic, 600)
    gate = Gate(tmp_path / "gate")
    checkpoint = tmp_path / "checkpoint"
    given = SinkQuery(options(client, topic), options(client, target), str(checkpoint), 170, gate.folder)
    driver = Driver(tmp_path / "query", given)
    zombie = gate.wait()
    driver.kill()
    assert 0 < sum(counted(client, target).values()) < 600
    copy(stream(spark, client, topic, maxOffsetsPerTrigger=110), client, target, checkpoint)
    assert counted(client, target) == once(600)
    wake([(gate, zombie)])
    assert counted(client, target) == once(600)


# -- a batch that is replayed ------------------------------------------------------------------------------------------


def each_batch(writing: dict[str, str]) -> Callable[[DataFrame, int], None]:
    def write_batch(frame: DataFrame, number: int) -> None:
        frame.write.format("seqdedupe").options(**writing).mode("append").save()

    return write_batch


@pytest.fixture(params=["stream", "foreachBatch"])
def run(
    request: pytest.FixtureRequest, spark: SparkSession, client: blocking.Client, topic: str, tmp_path: Path
) -> Callable[..., None]:
    """Writes what is new in the topic to the target, with more options of the sink."""

    def run(target: str, checkpoint: str | None = str(tmp_path / "ck 1%20#"), **more: str) -> None:
        rows = stream(spark, client, topic).writeStream
        given = options(client, target) | more
        if request.param == "stream":
            rows = rows.format("seqdedupe").options(**given)
        else:
            named = {} if checkpoint is None else {"checkpointLocation": checkpoint}
            rows = rows.foreachBatch(each_batch(given | named))
        run_stream(rows.option("checkpointLocation", f"file://{tmp_path}/ck 1%20#").trigger(availableNow=True))

    return run


@pytest.fixture
def replay(client: blocking.Client, topic: str, tmp_path: Path) -> Callable[[str], None]:
    """Has the last batch replayed, as after a kill before its commit, while others write to the target."""

    def replay(target: str) -> None:
        commits = tmp_path / "ck 1%20#" / "commits"
        last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
        for name in (f"{last}", f".{last}.crc"):
            (commits / name).unlink(missing_ok=True)
        with client.publisher(target) as publisher:
            for n in range(10):
                publisher.send_batch([b"other"] * 10, [f"{last}-{n}-{i}" for i in range(10)])

    return replay


def test_a_batch_whose_ids_are_forgotten_is_not_replayed(
    client: blocking.Client, topic: str, run: Callable[..., None], replay: Callable[[str], None]
) -> None:
    policy = admin_pb2.TopicPolicy(deduplication_window_max_messages=16)
    by_id: dict[str, Any] = {"deduplication_mode": "deduplication-id"}
    target = client.admin.create_topic(f"{topic}-target", policy=policy, **by_id).name
    for number in range(2):
        fill(client.address, topic, 40, first=40 * number)
        run(target)
    replay(target)
    with pytest.raises(PySparkException, match="IDS_FORGOTTEN"):
        run(target)
    found = counted(client, target)
    assert found.pop(b"other") == 100
    assert found == once(80)
    # The control arm.
    run(target, failOnForgottenIds="false")
    assert counted(client, target)[b"value 40"] == 2


@pytest.mark.parametrize("run", ["foreachBatch"], indirect=True)
def test_a_batch_whose_ids_are_known_is_replayed(
    client: blocking.Client, topic: str, target: str, run: Callable[..., None], replay: Callable[[str], None]
) -> None:
    fill(client.address, topic, 40)
    run(target)
    replay(target)
    run(target)
    found = counted(client, target)
    assert found.pop(b"other") == 100
    assert found == once(40)


@pytest.mark.parametrize("run", ["foreachBatch"], indirect=True)
def test_foreach_batch_needs_its_checkpoint(
    client: blocking.Client, topic: str, target: str, tmp_path: Path, run: Callable[..., None]
) -> None:
    fill(client.address, topic, 5)
    another = tmp_path / "another"
    (another / "offsets").mkdir(parents=True)
    (another / "offsets" / "7").touch()
    for checkpoint, said in [
        (None, "no readable one is named"),
        ("hdfs://name/check", "no readable one is named"),
        (str(another), "the named one is at batch 7"),
    ]:
        with pytest.raises(PySparkException, match=rf"{said} \[INVALID_OPTION\]"):
            run(target, checkpoint)
        assert client.ends(target).last.index == -1
    run(target, None, failOnForgottenIds="false")
    assert counted(client, target) == once(5)


# -- sequence IDs ------------------------------------------------------------------------------------------------------


def test_publish_sorts_and_opens_one_session_a_name(spark: SparkSession, client: blocking.Client, topic: str) -> None:
    rows = spark.range(2000).select(
        f.concat(f.lit("value "), f.col("id")).alias("value"),
        f.concat(f.lit("p"), f.col("id") % 7).alias("producerName"),
        f.col("id").alias("sequenceId"),
        f.when(f.col("id") % 14 < 7, topic).otherwise(topic_name(topic)).alias("__topic"),
    )
    shuffled = rows.orderBy(f.rand(7))
    given = {"service.url": client.address}
    found = publish(shuffled, **given)
    assert (found.rows, found.copies) == (2000, 0)
    again = publish(shuffled.drop("__topic"), topic, **given)
    assert (again.rows, again.copies) == (2000, 2000)
    seen: dict[str, int] = {}
    with client.reader(topic) as reader:
        for message in reader:
            assert message.payload == f"value {message.sequence_id}".encode()
            assert message.sequence_id > seen.get(message.producer_name, -1)
            seen[message.producer_name] = message.sequence_id
    assert counted(client, topic) == once(2000)
    with pytest.raises(InvalidRequestError, match=rf"producer 'p\d' for {topic_name(topic)}: .*NOT_ASCENDING"):
        publish(rows.union(rows).withColumn("sequenceId", f.col("sequenceId") + 10_000), topic, **given)
    with pytest.raises(ConfigurationError, match="columns __sequenceId and sequenceId mean the same"):
        publish(rows.withColumn("__sequenceId", f.col("sequenceId")), topic, **given)
    by_id = client.admin.create_topic(f"{topic}-ids", deduplication_mode="deduplication-id").name
    with pytest.raises(ConfigurationError, match=f"{by_id} has deduplication IDs") as raised:
        publish(rows, by_id, **given)
    assert "format('seqdedupe')" in raised.value.hint
    with pytest.raises(ConfigurationError, match="no column __sequenceId"):
        publish(rows.drop("sequenceId"), **given)
    with pytest.raises(ConfigurationError, match="column sequenceId is string, it should be bigint"):
        publish(rows.withColumn("sequenceId", f.col("sequenceId").cast("string")), **given)
