"""Where do producers go on? `python -m seqdedupe_spark.bootstrap_job OUTPUT --topic TOPIC`, or `--parquet PATH …`

Writes the highest sequence ID of each producer to a file of watermarks (`docs/formats-watermarks.md`): what an old
topic, or one that is kept in Parquet files, holds of them. `seqdedupe import` takes it over into a new topic.

A topic's watermarks come from the sidecar, which knows those of messages too that retention has trimmed; reading the
log would miss them. Parquet files may be of any size: Spark groups and sorts, and the driver writes the producers as
they come, one Spark partition of them at a time.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import BinaryType, DataType, DecimalType, IntegralType, StringType, StructType

from seqdedupe.client.blocking import Client
from seqdedupe.command import sidecar_options, told_credentials
from seqdedupe.errors import error
from seqdedupe.limits import MAX_NAME_BYTES, MAX_SEQUENCE_ID
from seqdedupe.watermarks import Watermark, write
from seqdedupe_spark import planning
from seqdedupe_spark.command import run_command
from seqdedupe_spark.session import start_session

PRODUCER_COLUMN = "__producerName"
SEQUENCE_ID_COLUMN = "__sequenceId"
TOPIC_COLUMN = "__topic"
"""Where files have it, all rows have to say the same."""


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
    return write(output, sorted(marks))


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
    try:
        frame = spark.read.parquet(*paths)
    except AnalysisException as e:
        raise error("INVALID_SOURCE", f"--parquet: {str(e).splitlines()[0]}") from e
    columns = Columns(
        _column(frame.schema, "--producer-column", producer_column, PRODUCER_COLUMN, StringType, BinaryType),
        _column(
            frame.schema, "--sequence-id-column", sequence_id_column, SEQUENCE_ID_COLUMN, IntegralType, DecimalType
        ),
        next((name for name in _names(TOPIC_COLUMN) if name in frame.columns), None),
    )
    return write(output, _watermarks(frame, columns))


def _names(column: str) -> tuple[str, str]:
    return column, column.removeprefix("__")


def _column(schema: StructType, option: str, given: str | None, usual: str, *types: type[DataType]) -> str:
    wanted = (given,) if given is not None else _names(usual)
    name = next((name for name in wanted if name in schema.names), None)
    if name is None:
        there = ", ".join(schema.names[:20])
        raise error("INVALID_SOURCE", f"{option}: the files have no column {' or '.join(wanted)}; they have {there}")
    kind = schema[name].dataType
    if not isinstance(kind, types) or (isinstance(kind, DecimalType) and kind.scale):
        what = "text" if StringType in types else "whole numbers"
        raise error("INVALID_SOURCE", f"{option}: the column {name} is {kind.simpleString()}, it should be {what}")
    return name


def _watermarks(frame: DataFrame, columns: Columns) -> Iterator[Watermark]:
    """One a producer, by name in bytes. Raises INVALID_SOURCE at the first one that cannot be."""
    ids = f.col(_quoted(columns.sequence_id))
    topics = f.col(_quoted(columns.topic)).cast("string") if columns.topic else f.lit(None).cast("string")
    found = (
        frame.groupBy(f.col(_quoted(columns.producer)).cast("binary").alias("producer"))
        .agg(f.min(ids), f.max(ids), f.count("*") - f.count(ids), f.min(topics), f.max(topics))
        .sort("producer")
    )
    topic = None
    for name, lowest, highest, nulls, first_topic, last_topic in found.toLocalIterator(prefetchPartitions=True):
        producer = _checked_name(columns.producer, name)
        shown = producer.decode()[:40]
        if nulls:
            raise _bad(columns.sequence_id, f"{nulls} nulls, one of producer {shown!r}")
        for wrong in (lowest, highest):
            if not 0 <= wrong <= MAX_SEQUENCE_ID:
                raise _bad(columns.sequence_id, f"{wrong}, of producer {shown!r}, which is no sequence ID")
        topic = topic or first_topic
        for other in (first_topic, last_topic):
            if other != topic:
                raise _bad(str(columns.topic), f"{topic} and {other}: watermarks are of one topic, select its rows")
        yield Watermark(producer, int(highest))


def _checked_name(column: str, name: bytearray | None) -> bytes:
    if name is None:
        raise _bad(column, "nulls")
    if not 1 <= len(name) <= MAX_NAME_BYTES:
        shown = repr(bytes(name[:40]).decode(errors="replace"))
        raise _bad(column, f"{shown}, of {len(name)} bytes; a name has 1 to {MAX_NAME_BYTES}")
    try:
        name.decode()
    except UnicodeDecodeError as e:
        raise _bad(column, f"{bytes(name[:40])!r}, which is not UTF-8") from e
    return bytes(name)


def _bad(column: str, what: str) -> Exception:
    return error("INVALID_SOURCE", f"the column {column} holds {what}")


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--topic", help="Take the watermarks of this topic, one partition.")
@click.option("--parquet", multiple=True, metavar="PATH", help="Take them from these files, folders or globs.")
@click.option("--producer-column", metavar="NAME", help=f"In Parquet; else {' or '.join(_names(PRODUCER_COLUMN))}.")
@click.option(
    "--sequence-id-column", metavar="NAME", help=f"In Parquet; else {' or '.join(_names(SEQUENCE_ID_COLUMN))}."
)
@sidecar_options
def main(
    output: Path,
    topic: str | None,
    parquet: tuple[str, ...],
    producer_column: str | None,
    sequence_id_column: str | None,
    address: str,
) -> None:
    """Write each producer's highest sequence ID to the file OUTPUT."""
    if bool(topic) == bool(parquet):
        raise click.UsageError("Say --topic, or --parquet.")
    if not output.absolute().parent.is_dir():
        raise error("INVALID_OPTION", f"OUTPUT: there is no folder {output.parent} for {output.name}")
    try:
        if topic:
            with Client(address, told_credentials()) as client:
                count = bootstrap_from_topic(client, topic, output)
        else:
            spark = start_session("seqdedupe bootstrap")
            count = bootstrap_from_parquet(spark, parquet, output, producer_column, sequence_id_column)
    except OSError as e:
        raise error("INVALID_OPTION", f"OUTPUT: {output} cannot be written: {e.strerror or e}") from e
    click.echo(f"{output}: watermarks of {count:,} producers")


def run_main(arguments: Sequence[str] | None = None, name: str = "seqdedupe_spark.bootstrap_job") -> int:
    """Runs the command, with this process's arguments if none are given; returns the exit status."""
    return run_command(main, name, arguments=arguments)


if __name__ == "__main__":
    sys.exit(run_main())
