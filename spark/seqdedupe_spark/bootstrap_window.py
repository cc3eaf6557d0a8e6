"""Deduplication IDs of years: a window of all of them, for a topic that takes over (`docs/formats-window.md`).

Spark groups and sorts, and the driver writes the IDs as they come, one Spark partition of them at a time.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import BinaryType, DecimalType, IntegralType, StringType, TimestampNTZType, TimestampType

from seqdedupe.client.blocking import Client
from seqdedupe.errors import error
from seqdedupe.exports import LATEST_MS, KnownId, write_window
from seqdedupe.limits import MAX_DEDUPLICATION_ID_BYTES
from seqdedupe.names import partition_name
from seqdedupe.v1 import admin_pb2
from seqdedupe_spark.history import bad, column_of, quoted, read_parquet, topic_column_of

ID_COLUMN = "__deduplicationId"
TIME_COLUMN = "__publishTime"

MICROSECONDS_A_MILLISECOND = 1000

_PARTITION = "-partition-[0-9]+$"
"""Of a topic's name."""


def bootstrap_window_from_topic(
    spark: SparkSession, client: Client, topic: str, output: Path, options: Mapping[str, str]
) -> int:
    """Writes the deduplication IDs of all messages that a topic's log has, or the logs of its partitions; returns how
    many there are.

    `options` are those of the data source that name the sidecar. Raises LOG_INCOMPLETE, and nothing is written, if the
    topic knows more IDs than its log tells, POSITION_TRIMMED if it does so meanwhile; INVALID_SOURCE, OSError, and what
    the data source raises.
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
        what = f"{topic.window_imported} IDs that were imported into it"
    elif topic.window_first_index < topic.first_index:
        what = f"those of messages {topic.window_first_index} to {topic.first_index - 1}, which retention has dropped"
    if what:
        raise error(
            "LOG_INCOMPLETE",
            f"topic {topic.name} knows more deduplication IDs than its log tells: {what}",
            hint="Move the topic as it is (seqdedupe topics move), or its directory by a backup: they have all of it.",
        )


def bootstrap_window_from_parquet(
    spark: SparkSession,
    paths: Sequence[str],
    output: Path,
    id_column: str | None = None,
    time_column: str | None = None,
) -> int:
    """Writes the deduplication IDs in Parquet files, each with its latest publish time; returns how many there are.

    `paths` are files, folders or globs. Columns that are not named are those of the data source, with or without the
    leading `__`: IDs are bytes or text, times are timestamps or whole milliseconds since 1970. The files are to be of
    one topic, whichever of its partitions: if they say otherwise, that is an error.

    Raises INVALID_SOURCE, and nothing is written, if the files or columns are not there, or hold an ID that has not 1
    to 255 bytes, or a time that cannot be; OSError.
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
    """Whether rows have deduplication IDs, under the data source's names."""
    there = [name for name in (ID_COLUMN, ID_COLUMN.removeprefix("__")) if name in frame.columns]
    return bool(there) and bool(frame.where(f.col(quoted(there[0])).isNotNull()).head(1))


def _known(frame: DataFrame, id_column: str, time_column: str, topic_column: str | None) -> Iterator[KnownId]:
    """One an ID, in the order of their bytes. Raises INVALID_SOURCE at the first one that cannot be."""
    times = _milliseconds(frame, time_column)
    topics = f.col(quoted(topic_column)).cast("string") if topic_column else f.lit(None).cast("string")
    # Partitions are of one topic.
    topics = f.regexp_replace(topics, _PARTITION, "")
    found = (
        frame.groupBy(f.col(quoted(id_column)).cast("binary").alias("id"))
        .agg(f.min(times), f.max(times), f.count("*") - f.count(times), f.min(topics), f.max(topics))
        .sort("id")
    )
    topic = None
    for one, first_ms, last_ms, nulls, first_topic, last_topic in found.toLocalIterator(prefetchPartitions=True):
        if one is None:
            raise bad(id_column, "nulls")
        shown = repr(bytes(one[:40]))
        if not 1 <= len(one) <= MAX_DEDUPLICATION_ID_BYTES:
            raise bad(id_column, f"{shown}, of {len(one)} bytes; an ID has 1 to {MAX_DEDUPLICATION_ID_BYTES}")
        if nulls:
            raise bad(time_column, f"{nulls} nulls, one of the ID {shown}")
        for wrong in (first_ms, last_ms):
            if not 0 <= wrong <= LATEST_MS:
                raise bad(time_column, f"{wrong} ms, of the ID {shown}, which is no publish time: 0 to {LATEST_MS} are")
        topic = topic or first_topic
        for other in (first_topic, last_topic):
            if other != topic:
                raise bad(str(topic_column), f"{topic} and {other}: a window is of one topic, select its rows")
        yield KnownId(bytes(one), int(last_ms))


def _milliseconds(frame: DataFrame, name: str) -> Column:
    """Since 1970, none before its time."""
    column, kind = f.col(quoted(name)), frame.schema[name].dataType
    if isinstance(kind, TimestampType | TimestampNTZType):
        return f.ceil(f.unix_micros(column.cast("timestamp")) / MICROSECONDS_A_MILLISECOND)
    return column
