"""What was there before? `python -m seqdedupe_spark.bootstrap_job OUTPUT --topic TOPIC`, or `--parquet PATH …`

Writes the highest sequence ID of each producer to a file of watermarks (`docs/formats-watermarks.md`): what an old
topic, or one that is kept in Parquet files, holds of them. Of a topic of deduplication IDs it writes these, as a window
(`bootstrap_window`). `seqdedupe import` takes either over into a new topic.

A topic's watermarks come from the sidecar, which knows those of messages too that retention has trimmed; reading the
log would miss them. Parquet files may be of any size: Spark groups and sorts, and the driver writes the producers as
they come, one Spark partition of them at a time.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import BinaryType, DecimalType, IntegralType, StringType

from seqdedupe.client.blocking import Client
from seqdedupe.command import sidecar_options, told_credentials
from seqdedupe.errors import error
from seqdedupe.exports import Watermark, write_watermarks
from seqdedupe.limits import MAX_NAME_BYTES, MAX_SEQUENCE_ID
from seqdedupe.v1 import admin_pb2
from seqdedupe_spark import planning
from seqdedupe_spark.bootstrap_window import (
    ID_COLUMN,
    TIME_COLUMN,
    bootstrap_window_from_parquet,
    bootstrap_window_from_topic,
    has_window,
)
from seqdedupe_spark.history import bad, column_of, names, quoted, read_parquet, topic_column_of
from seqdedupe_spark.session import file_options, run_command, start_session

PRODUCER_COLUMN = "__producerName"
SEQUENCE_ID_COLUMN = "__sequenceId"


@dataclass(frozen=True)
class Columns:
    """The columns of a history in Parquet: producers, sequence IDs, and topics if it says."""

    producer: str
    sequence_id: str
    topic: str | None


def bootstrap_from_topic(client: Client, topic: str, output: Path) -> int:
    """Writes the watermarks of a topic as they are now; returns how many producers.

    Holds about 300 bytes a producer. Raises NotFoundError, UnavailableError, OSError; then nothing is written.
    """
    producers = planning.patiently(lambda: client.admin.producers(topic))
    # A name that was opened and has sent nothing has none.
    marks = [Watermark(one.name.encode(), one.persisted) for one in producers if one.persisted >= 0]
    return write_watermarks(output, sorted(marks))


def bootstrap_from_parquet(
    spark: SparkSession,
    paths: Sequence[str],
    output: Path,
    producer_column: str | None = None,
    sequence_id_column: str | None = None,
) -> int:
    """Writes the highest sequence ID of each producer in Parquet files; returns how many producers.

    `paths` are files, folders or globs. Columns that are not named are those of the data source, with or without the
    leading `__`. The files are to be of one topic (partition): if they say otherwise, that is an error.

    Raises INVALID_SOURCE, and nothing is written, if the files or columns are not there or hold what cannot be a
    producer's name (1 to 255 bytes of UTF-8) or a sequence ID (0 to 2^63 - 1); OSError.
    """
    frame = read_parquet(spark, paths)
    columns = Columns(
        column_of(frame.schema, "--producer-column", producer_column, PRODUCER_COLUMN, "text", StringType, BinaryType),
        column_of(
            frame.schema,
            "--sequence-id-column",
            sequence_id_column,
            SEQUENCE_ID_COLUMN,
            "whole numbers",
            IntegralType,
            DecimalType,
        ),
        topic_column_of(frame.schema),
    )
    return write_watermarks(output, _watermarks(frame, columns))


def _watermarks(frame: DataFrame, columns: Columns) -> Iterator[Watermark]:
    """One a producer, by name in bytes. Raises INVALID_SOURCE at the first one that cannot be."""
    ids = f.col(quoted(columns.sequence_id))
    topics = f.col(quoted(columns.topic)).cast("string") if columns.topic else f.lit(None).cast("string")
    found = (
        frame.groupBy(f.col(quoted(columns.producer)).cast("binary").alias("producer"))
        .agg(f.min(ids), f.max(ids), f.count("*") - f.count(ids), f.min(topics), f.max(topics))
        .sort("producer")
    )
    topic = None
    for name, lowest, highest, nulls, first_topic, last_topic in found.toLocalIterator(prefetchPartitions=True):
        producer = _checked_name(columns.producer, name)
        shown = producer.decode()[:40]
        if nulls:
            raise bad(columns.sequence_id, f"{nulls} nulls, one of producer {shown!r}")
        for wrong in (lowest, highest):
            if not 0 <= wrong <= MAX_SEQUENCE_ID:
                raise bad(columns.sequence_id, f"{wrong}, of producer {shown!r}, which is no sequence ID")
        topic = topic or first_topic
        for other in (first_topic, last_topic):
            if other != topic:
                raise bad(str(columns.topic), f"{topic} and {other}: watermarks are of one topic, select its rows")
        yield Watermark(producer, int(highest))


def _checked_name(column: str, name: bytearray | None) -> bytes:
    if name is None:
        raise bad(column, "nulls")
    if not 1 <= len(name) <= MAX_NAME_BYTES:
        shown = repr(bytes(name[:40]).decode(errors="replace"))
        raise bad(column, f"{shown}, of {len(name)} bytes; a name has 1 to {MAX_NAME_BYTES}")
    try:
        name.decode()
    except UnicodeDecodeError as e:
        raise bad(column, f"{bytes(name[:40])!r}, which is not UTF-8") from e
    return bytes(name)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--topic", help="Take those of this topic; of sequence IDs, of one partition.")
@click.option("--parquet", multiple=True, metavar="PATH", help="Take them from these files, folders or globs.")
@click.option("--producer-column", metavar="NAME", help=f"In Parquet; else {' or '.join(names(PRODUCER_COLUMN))}.")
@click.option(
    "--sequence-id-column", metavar="NAME", help=f"In Parquet; else {' or '.join(names(SEQUENCE_ID_COLUMN))}."
)
@click.option("--deduplication-id-column", metavar="NAME", help=f"In Parquet; else {' or '.join(names(ID_COLUMN))}.")
@click.option("--publish-time-column", metavar="NAME", help=f"In Parquet; else {' or '.join(names(TIME_COLUMN))}.")
@sidecar_options
def main(
    output: Path,
    topic: str | None,
    parquet: tuple[str, ...],
    producer_column: str | None,
    sequence_id_column: str | None,
    deduplication_id_column: str | None,
    publish_time_column: str | None,
    address: str,
) -> None:
    """Write each producer's highest sequence ID, or all deduplication IDs, to the file OUTPUT.

    It is IDs where the topic is one of these, or the files have such a column, and `seqdedupe import` takes either.
    """
    if bool(topic) == bool(parquet):
        raise click.UsageError("Say --topic, or --parquet.")
    of_marks, of_window = (producer_column, sequence_id_column), (deduplication_id_column, publish_time_column)
    if any(of_marks) and any(of_window):
        raise click.UsageError("Files have sequence IDs, or deduplication IDs: name the columns of one of them.")
    if not output.absolute().parent.is_dir():
        raise error("INVALID_OPTION", f"OUTPUT: there is no folder {output.parent} for {output.name}")
    try:
        if topic:
            said = _from_topic(topic, output, address)
        else:
            spark = start_session("seqdedupe bootstrap")
            if any(of_window) or (not any(of_marks) and has_window(read_parquet(spark, parquet))):
                said = _of_window(bootstrap_window_from_parquet(spark, parquet, output, *of_window))
            else:
                said = _of_marks(bootstrap_from_parquet(spark, parquet, output, *of_marks))
    except OSError as e:
        raise error("INVALID_OPTION", f"OUTPUT: {output} cannot be written: {e.strerror or e}") from e
    click.echo(f"{output}: {said}")


def _from_topic(topic: str, output: Path, address: str) -> str:
    with Client(address, told_credentials()) as client:
        mode = planning.patiently(lambda: client.admin.topic(topic)).deduplication_mode
        if mode != admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID:
            return _of_marks(bootstrap_from_topic(client, topic, output))
        options = {"service.url": address} | file_options()
        return _of_window(
            bootstrap_window_from_topic(start_session("seqdedupe bootstrap"), client, topic, output, options)
        )


def _of_marks(count: int) -> str:
    return f"watermarks of {count:,} producers"


def _of_window(count: int) -> str:
    return f"a window of {count:,} deduplication IDs"


def run_main(arguments: Sequence[str] | None = None, name: str = "seqdedupe_spark.bootstrap_job") -> int:
    """Runs the command, with this process's arguments if none are given; returns the exit status."""
    return run_command(main, name, arguments=arguments)


if __name__ == "__main__":
    sys.exit(run_main())
