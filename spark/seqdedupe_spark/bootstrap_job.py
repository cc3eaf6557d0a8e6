"""Writes the state of a previous topic to a file: `python -m seqdedupe_spark.bootstrap_job OUTPUT --topic TOPIC`, or
`--parquet PATH …`

The job writes the highest sequence ID of each producer to a file of watermarks
(`docs/internals/formats-watermarks.md`). The source is a topic, or the messages of a topic in Parquet files. For a
topic of deduplication IDs the job writes the IDs, as a window (`docs/internals/formats-window.md`). `seqdedupe import`
imports either file into a new topic.

From a Pulsar topic that no sidecar has created, the job reads the same as a sidecar that takes the topic over, at the
brokers and in parallel (`--address pulsar://…`). `seqdedupe topics create --take-over --watermarks` takes the file, and
the sidecar reads only the rest.

A topic's watermarks come from the sidecar, and not from the log. The sidecar also knows the IDs of messages that
retention has trimmed. Parquet files may have any size. Spark groups and sorts, and the driver writes the producers as
they arrive, one Spark partition at a time.
"""

import json
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import (
    BinaryType,
    DataType,
    DecimalType,
    IntegralType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from seqdedupe.client.blocking import Client
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.exports import LATEST_MS, KnownId, Watermark, write_stock, write_watermarks, write_window
from seqdedupe.figures import counted
from seqdedupe.limits import MAX_DEDUPLICATION_ID_BYTES, MAX_NAME_BYTES, MAX_SEQUENCE_ID
from seqdedupe.names import partition_name
from seqdedupe.sidecar_options import told_credentials
from seqdedupe.v1 import admin_pb2
from seqdedupe_spark import cluster, options, planning
from seqdedupe_spark.options import file_options
from seqdedupe_spark.reader_job import given_options, service_options
from seqdedupe_spark.service import PulsarCluster
from seqdedupe_spark.session import run_command, start_session, typed_failures

# -- A history in Parquet files: its columns, and the errors for an invalid one.

TOPIC_COLUMN = "__topic"
"""The column with the topic. If the files have this column, its value must be the same in all rows."""


def read_parquet(spark: SparkSession, paths: Sequence[str]) -> DataFrame:
    """Read files, folders or globs. Raises INVALID_SOURCE if they do not exist, or are not Parquet."""
    try:
        return spark.read.parquet(*paths)
    except AnalysisException as e:
        raise error("INVALID_SOURCE", f"--parquet: {str(e).splitlines()[0]}") from e


def names(column: str) -> tuple[str, str]:
    """Return the name of the data source's column, with and without the leading `__`."""
    return column, column.removeprefix("__")


def column_of(schema: StructType, option: str, given: str | None, usual: str, what: str, *types: type[DataType]) -> str:
    """Return the given column, or the column with its usual name. Raises INVALID_SOURCE if the column does not exist,
    or its type is not one of `types`; `what` describes these types."""
    wanted = (given,) if given is not None else names(usual)
    there_are = [name for name in wanted if name in schema.names]
    if len(there_are) > 1:
        raise error(
            "INVALID_SOURCE", f"{option}: the files have the columns {' and '.join(there_are)}: name one of them"
        )
    name = there_are[0] if there_are else None
    if name is None:
        there = ", ".join(schema.names[:20])
        raise error("INVALID_SOURCE", f"{option}: the files have no column {' or '.join(wanted)}; they have {there}")
    kind = schema[name].dataType
    if not isinstance(kind, types) or (isinstance(kind, DecimalType) and kind.scale):
        raise error("INVALID_SOURCE", f"{option}: the column {name} is {kind.simpleString()}, it should be {what}")
    return name


def topic_column_of(schema: StructType) -> str | None:
    """Return the column of the topics, if it exists."""
    return next((name for name in names(TOPIC_COLUMN) if name in schema.names), None)


def bad(column: str, what: str) -> SeqdedupeError:
    """Return the error for a column with this content."""
    return error("INVALID_SOURCE", f"the column {column} holds {what}")


def quoted(name: str) -> str:
    """Return a column's name in an expression."""
    return "`" + name.replace("`", "``") + "`"


# -- Deduplication IDs of years: a window of all of them, for a new topic: docs/internals/formats-window.md.
#
# Spark groups and sorts, and the driver writes the IDs as they arrive, one Spark partition at a time.

ID_COLUMN = "__deduplicationId"
TIME_COLUMN = "__publishTime"

MICROSECONDS_A_MILLISECOND = 1000

_PARTITION = "-partition-[0-9]+$"
"""The end of a partition's topic name."""


def bootstrap_window_from_topic(
    spark: SparkSession, client: Client, topic: str, output: Path, options: Mapping[str, str]
) -> int:
    """Write the deduplication IDs of all messages in the log of a topic, or in the logs of its partitions. Return the
    number of IDs.

    `options` are the data source's options for the sidecar. Raises LOG_INCOMPLETE, and writes nothing, if the topic
    knows more IDs than its log contains. Raises POSITION_TRIMMED if messages are trimmed meanwhile; INVALID_SOURCE,
    OSError, and the errors of the data source.
    """
    found = client.admin.topic(topic)
    partitions = [client.admin.topic(partition_name(found.name, k)) for k in range(found.partitions)]
    for one in partitions or [found]:
        _check_log_tells_all(one)
    first = json.dumps({one.name: one.first_index for one in partitions or [found]})
    reader = spark.read.format("seqdedupe").options(**options).option("topic", found.name)
    return write_window(output, _known(reader.option("startingOffsets", first).load(), ID_COLUMN, TIME_COLUMN, None))


def _check_log_tells_all(topic: admin_pb2.Topic) -> None:
    what = ""
    if topic.window_imported:
        what = counted(topic.window_imported, "imported ID")
    elif topic.window_first_index < topic.first_index:
        what = f"those of messages {topic.window_first_index} to {topic.first_index - 1}, which retention has dropped"
    if what:
        raise error(
            "LOG_INCOMPLETE",
            f"topic {topic.name} knows deduplication IDs that are not in its log: {what}",
            hint="Move the whole topic (seqdedupe topics move), or its data directory by a backup. Both have all IDs.",
        )


def bootstrap_window_from_parquet(
    spark: SparkSession,
    paths: Sequence[str],
    output: Path,
    id_column: str | None = None,
    time_column: str | None = None,
) -> int:
    """Write the deduplication IDs in Parquet files, each with its latest publish time. Return the number of IDs.

    `paths` are files, folders or globs. If a column name is not given, the data source's name is used, with or without
    the leading `__`. IDs are bytes or text; times are timestamps or integer milliseconds since 1970. The files must
    belong to one topic, in any of its partitions; a file with another topic is an error.

    Raises INVALID_SOURCE, and writes nothing, if files or columns do not exist, if an ID does not have 1 to 255 bytes,
    or if a time is invalid; OSError.
    """
    frame = read_parquet(spark, paths)
    one = column_of(frame.schema, "--deduplication-id-column", id_column, ID_COLUMN, "text", StringType, BinaryType)
    time = column_of(
        frame.schema,
        "--publish-time-column",
        time_column,
        TIME_COLUMN,
        "timestamps or milliseconds",
        TimestampType,
        TimestampNTZType,
        IntegralType,
        DecimalType,
    )
    return write_window(output, _known(frame, one, time, topic_column_of(frame.schema)))


def has_window(frame: DataFrame) -> bool:
    """Return whether rows have deduplication IDs, under the names of the data source's columns."""
    there = [name for name in (ID_COLUMN, ID_COLUMN.removeprefix("__")) if name in frame.columns]
    return bool(there) and bool(frame.where(f.col(quoted(there[0])).isNotNull()).head(1))


def _known(frame: DataFrame, id_column: str, time_column: str, topic_column: str | None) -> Iterator[KnownId]:
    """Yield one entry for each ID, sorted by the bytes of the ID. Raises INVALID_SOURCE at the first invalid ID."""

    def shown(one: bytes) -> str:
        if not 1 <= len(one) <= MAX_DEDUPLICATION_ID_BYTES:
            what = f"{one[:40]!r}, of {len(one)} bytes; an ID has 1 to {MAX_DEDUPLICATION_ID_BYTES}"
            raise bad(id_column, what)
        return f"the ID {one[:40]!r}"

    # Partitions belong to one topic.
    topics = f.regexp_replace(_topics(topic_column), _PARTITION, "")
    for one, (first_ms, last_ms), shows in _grouped(
        frame, (id_column, time_column, topic_column), _milliseconds(frame, time_column), topics, "a window is", shown
    ):
        for wrong in (first_ms, last_ms):
            if not 0 <= wrong <= LATEST_MS:
                raise bad(
                    time_column, f"{wrong} ms, of {shows}, which is no publish time: it should be 0 to {LATEST_MS}"
                )
        yield KnownId(one, last_ms)


def _milliseconds(frame: DataFrame, name: str) -> Column:
    """Return the times in milliseconds since 1970, rounded up."""
    column, kind = f.col(quoted(name)), frame.schema[name].dataType
    if isinstance(kind, TimestampType | TimestampNTZType):
        return f.ceil(f.unix_micros(column.cast("timestamp")) / MICROSECONDS_A_MILLISECOND)
    return column


PRODUCER_COLUMN = "__producerName"
SEQUENCE_ID_COLUMN = "__sequenceId"


def bootstrap_from_topic(client: Client, topic: str, output: Path) -> int:
    """Write the current watermarks of a topic. Return the number of producers.

    Needs about 300 bytes of memory for each producer. Raises NotFoundError, UnavailableError, OSError. After an error
    no file is written.
    """
    producers = planning.patiently(lambda: client.admin.producers(topic))
    # A name that was opened, but has sent nothing, has no watermark.
    marks = [Watermark(one.name.encode(), one.persisted) for one in producers if one.persisted >= 0]
    return write_watermarks(output, sorted(marks))


def bootstrap_from_parquet(
    spark: SparkSession,
    paths: Sequence[str],
    output: Path,
    producer_column: str | None = None,
    sequence_id_column: str | None = None,
) -> int:
    """Write the highest sequence ID of each producer in Parquet files. Return the number of producers.

    `paths` are files, folders or globs. If a column name is not given, the data source's name is used, with or without
    the leading `__`. The files must belong to one topic (or partition); a file with another topic is an error.

    Raises INVALID_SOURCE, and writes nothing, if files or columns do not exist, or if a producer name (1 to 255 bytes
    of UTF-8) or a sequence ID (0 to 2^63 - 1) is invalid; OSError.
    """
    frame = read_parquet(spark, paths)
    schema = frame.schema
    name = column_of(schema, "--producer-column", producer_column, PRODUCER_COLUMN, "text", StringType, BinaryType)
    number = column_of(
        schema,
        "--sequence-id-column",
        sequence_id_column,
        SEQUENCE_ID_COLUMN,
        "whole numbers",
        IntegralType,
        DecimalType,
    )
    return write_watermarks(output, _watermarks(frame, name, number, topic_column_of(frame.schema)))


def _watermarks(frame: DataFrame, producers: str, numbers: str, topic_column: str | None) -> Iterator[Watermark]:
    """Yield one watermark for each producer, sorted by the bytes of the name. Raises INVALID_SOURCE at the first
    invalid row."""

    def shown(name: bytes) -> str:
        return f"producer {_checked_name(producers, name)[:40]!r}"

    columns = (producers, numbers, topic_column)
    for producer, (lowest, highest), shows in _grouped(
        frame, columns, f.col(quoted(numbers)), _topics(topic_column), "watermarks are", shown
    ):
        for wrong in (lowest, highest):
            if not 0 <= wrong <= MAX_SEQUENCE_ID:
                raise bad(numbers, f"{wrong}, of {shows}, which is no sequence ID")
        yield Watermark(producer, highest)


def _checked_name(column: str, name: bytes) -> str:
    if not 1 <= len(name) <= MAX_NAME_BYTES:
        shown = repr(name[:40].decode(errors="replace"))
        raise bad(column, f"{shown}, of {len(name)} bytes; a name has 1 to {MAX_NAME_BYTES}")
    try:
        return name.decode()
    except UnicodeDecodeError as e:
        raise bad(column, f"{name[:40]!r}, which is not UTF-8") from e


def _topics(column: str | None) -> Column:
    return f.col(quoted(column)).cast("string") if column else f.lit(None).cast("string")


def _grouped(
    frame: DataFrame,
    columns: tuple[str, str, str | None],
    numbers: Column,
    topics: Column,
    they_are: str,
    shown: Callable[[bytes], str],
) -> Iterator[tuple[bytes, tuple[int, int], str]]:
    """Yield each key, sorted by its bytes, with the lowest and the highest of its numbers, and with its text as
    returned by `shown`.

    `columns` are the names of the columns with the keys, the numbers, and the topics if the files have topics. Raises
    INVALID_SOURCE for nulls, and for rows of several topics. Raises the errors of `shown` for an invalid key.
    """
    of_keys, of_numbers, of_topics = columns
    found = (
        frame.groupBy(f.col(quoted(of_keys)).cast("binary").alias("key"))
        .agg(f.min(numbers), f.max(numbers), f.count("*") - f.count(numbers), f.min(topics), f.max(topics))
        .sort("key")
    )
    topic = None
    for key, lowest, highest, nulls, *of_key in found.toLocalIterator(prefetchPartitions=True):
        if key is None:
            raise bad(of_keys, "nulls")
        shows = shown(bytes(key))
        if nulls:
            raise bad(of_numbers, f"{nulls} nulls, one of {shows}")
        topic = topic or of_key[0]
        for other in of_key:
            if other != topic:
                raise bad(str(of_topics), f"{topic} and {other}, but {they_are} of one topic: select its rows")
        yield bytes(key), (int(lowest), int(highest)), shows


# -- A Pulsar topic that no sidecar has created. The driver keeps the producers of each range until the end.


def bootstrap_from_stock_topic(spark: SparkSession, service: PulsarCluster, topic: str, output: Path) -> int:
    """Write the watermarks of a Pulsar topic, and of each of its partitions. Return the number of producers.

    Entries that are appended meanwhile are not read. Raises TOPIC_NOT_FOUND; INVALID_SOURCE for a topic of a sidecar;
    LOG_DAMAGED for a topic with entries of a sidecar; LOG_UNREADABLE; INVALID_REQUEST if there are too many producers
    for a take-over; OSError. After an error no file is written.
    """
    # The packages for brokers need not be installed.
    cluster.prepare()
    from seqdedupe_spark.cluster import stock_reader

    topics = stock_reader.stock_ranges(service, topic)
    works = [tuple(one) for each in topics for one in each.ranges]
    rows: list[Any] = []
    if works:
        # A task for each range: what fails is read again alone.
        tasks = spark.range(0, len(works), 1, len(works))
        with typed_failures():
            rows = tasks.mapInArrow(_reading(service, works), "marks binary").collect()
    watermarks = stock_reader.stock_watermarks(service, topics, (pickle.loads(row[0]) for row in rows))
    write_stock(output, watermarks)
    return sum(len(one.producer_names) for one in watermarks.topics)


def _reading(
    service: PulsarCluster, works: Sequence[tuple[Any, ...]]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function of a task, which receives the numbers of its ranges."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        cluster.prepare()
        from seqdedupe_spark.cluster import stock_reader

        for batch in batches:
            for number in batch.column(0).to_pylist():
                found = stock_reader.read_marks(service, stock_reader.StockRange(*works[number]))
                yield pa.record_batch({"marks": [pickle.dumps(found)]})

    return read


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--topic", help="Read this topic. A topic of sequence IDs must be a single partition.")
@click.option("--parquet", multiple=True, metavar="PATH", help="Read these files, folders or globs.")
@click.option("--producer-column", metavar="NAME", help=f"In Parquet; else {' or '.join(names(PRODUCER_COLUMN))}.")
@click.option(
    "--sequence-id-column", metavar="NAME", help=f"In Parquet; else {' or '.join(names(SEQUENCE_ID_COLUMN))}."
)
@click.option("--deduplication-id-column", metavar="NAME", help=f"In Parquet; else {' or '.join(names(ID_COLUMN))}.")
@click.option("--publish-time-column", metavar="NAME", help=f"In Parquet; else {' or '.join(names(TIME_COLUMN))}.")
@service_options
def main(
    output: Path,
    topic: str | None,
    parquet: tuple[str, ...],
    producer_column: str | None,
    sequence_id_column: str | None,
    deduplication_id_column: str | None,
    publish_time_column: str | None,
    **service: Any,
) -> None:
    """Write each producer's highest sequence ID, or all deduplication IDs, to the file OUTPUT.

    The command writes deduplication IDs if the topic has such IDs, or the files have a column of such IDs. `seqdedupe
    import` reads both kinds of files. With --address pulsar://…, the command writes what `seqdedupe topics create
    --take-over --watermarks` takes.
    """
    if bool(topic) == bool(parquet):
        raise click.UsageError("Give either --topic or --parquet.")
    of_marks, of_window = (producer_column, sequence_id_column), (deduplication_id_column, publish_time_column)
    if any(of_marks) and any(of_window):
        raise click.UsageError("Name the columns of sequence IDs, or those of deduplication IDs, but not both.")
    if not output.absolute().parent.is_dir():
        raise error("INVALID_OPTION", f"OUTPUT: there is no folder {output.parent} for {output.name}")
    try:
        if topic:
            said = _from_topic(topic, output, service)
        else:
            spark = start_session("seqdedupe bootstrap")
            if any(of_window) or (not any(of_marks) and has_window(read_parquet(spark, parquet))):
                said = _of_window(bootstrap_window_from_parquet(spark, parquet, output, *of_window))
            else:
                said = _of_marks(bootstrap_from_parquet(spark, parquet, output, *of_marks))
    except OSError as e:
        raise error("INVALID_OPTION", f"OUTPUT: {output} cannot be written: {e.strerror or e}") from e
    click.echo(f"{output}: {said}")


def _from_topic(topic: str, output: Path, given: dict[str, Any]) -> str:
    service = options.parse(given_options(given) | {"topic": topic}).service
    if isinstance(service, PulsarCluster):
        return _of_marks(bootstrap_from_stock_topic(start_session("seqdedupe bootstrap"), service, topic, output))
    address = str(given["address"])
    with Client(address, told_credentials()) as client:
        mode = planning.patiently(lambda: client.admin.topic(topic)).deduplication_mode
        if mode != admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID:
            return _of_marks(bootstrap_from_topic(client, topic, output))
        of_source = {"service.url": address} | file_options()
        return _of_window(
            bootstrap_window_from_topic(start_session("seqdedupe bootstrap"), client, topic, output, of_source)
        )


def _of_marks(count: int) -> str:
    return f"watermarks of {counted(count, 'producer')}"


def _of_window(count: int) -> str:
    return f"a window of {counted(count, 'deduplication ID')}"


def run_main(arguments: Sequence[str] | None = None, name: str = "seqdedupe_spark.bootstrap_job") -> int:
    """Run the command, by default with this process's arguments. Return the exit status."""
    return run_command(main, name, arguments=arguments)


if __name__ == "__main__":
    sys.exit(run_main())
