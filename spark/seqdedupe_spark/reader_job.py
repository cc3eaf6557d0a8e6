"""`python -m seqdedupe_spark.reader_job` writes the messages of topics to a table, each message once. `ReaderJob` does
the same as a library.

Begin with the command `run`. Every run of a job is a call of `ReaderJob.run`. With a checkpoint, a streaming query
decides when it is called (`_stream`). The progress output comes before the commands.
"""

import importlib
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import click
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from seqdedupe.client.blocking import Client
from seqdedupe.command import FAILED, Seconds, say
from seqdedupe.errors import PositionError, UnavailableError, error
from seqdedupe.figures import counted
from seqdedupe.names import topic_name
from seqdedupe.services.command_options import lag_options, metrics_options, metrics_told, show_lag
from seqdedupe.sidecar_options import sidecar_options, told_credentials
from seqdedupe_spark import options
from seqdedupe_spark.options import FILE_OPTIONS, file_options
from seqdedupe_spark.range_task import DEAD_LETTER_SUFFIX, MAX_DEAD_LETTERS, Transform
from seqdedupe_spark.rounds import TRIGGER_SECONDS, JobConfig, ReaderJob, Round, positions_of, reset_position
from seqdedupe_spark.session import run_command, start_session, typed_failures
from seqdedupe_spark.source import SeqdedupeDataSource
from seqdedupe_spark.stores.urls import from_url

# -- The progress output of a job. On a terminal, one line is rewritten in place. Otherwise a new line is printed every
# few seconds.

LINE_SECONDS = 5.0
"""The least time between two lines if the output is not a terminal."""

_RATE_SECONDS = 10.0
"""The approximate time over which the displayed rate is measured."""


class Progress:
    """The progress line of a job, written to `stream`. It shows the number of rows written, the rate and the lag."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._began = self._since = time.monotonic()
        self._rows = self._rows_then = 0
        self._shown = 0.0
        self._width = 0

    def show(self, done: Round) -> None:
        """Show the progress. Call it after every round."""
        self._rows += done.written
        now = time.monotonic()
        line = f"{counted(self._rows, 'row')}, {self._rate(now):,.0f} rows/s, lag {done.lag:,}"
        if self._is_terminal:
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        elif now - self._shown >= LINE_SECONDS:
            self._shown = now
            self._stream.write(line + "\n")
        self._stream.flush()

    def _rate(self, now: float) -> float:
        rate = (self._rows - self._rows_then) / max(now - self._since, 1e-9)
        if now - self._since >= _RATE_SECONDS:
            self._since, self._rows_then = now, self._rows
        return rate

    def close(self) -> None:
        """End the line that was rewritten."""
        if self._width:
            self._stream.write("\n")
            self._stream.flush()


def summary(total: Round, seconds: float) -> dict[str, object]:
    """Return the result of a run as an object for JSON. The fields are documented, so keep them stable."""
    return {
        "read": total.read,
        "written": total.written,
        "duplicates": total.duplicates,
        "dead_letters": total.dead_letters,
        "lag": total.lag if total.has_looked else None,
        "seconds": round(seconds, 3),
        "topics": {
            topic: {"position": str(standing.stored.position), "epoch": standing.stored.epoch, "lag": standing.lag}
            for topic, standing in total.standings.items()
        },
    }


def text(total: Round, seconds: float) -> str:
    """Return the result of a run as text for a person."""
    if not total.has_looked:
        return f"nothing was read in {seconds:.1f} s: the ends of the topics could not be determined"
    dropped = f", {counted(total.duplicates, 'duplicate')} dropped" if total.duplicates else ""
    if total.dead_letters:
        dropped += f", {counted(total.dead_letters, 'dead letter')}"
    return (
        f"{counted(total.read, 'message')} read{dropped}, {counted(total.written, 'row')} written in {seconds:.1f} s; "
        f"{total.lag:,} left to read in {counted(len(total.standings), 'topic')}"
    )


__all__ = ["JobConfig", "ReaderJob", "Round"]

Command = Callable[..., Any]

_log = logging.getLogger(__name__)

_job = click.option(
    "--job", required=True, metavar="NAME", help="The name of the job. Its positions are stored under this name."
)
_store = click.option(
    "--store",
    "store_url",
    required=True,
    metavar="URL",
    help="The store of rows and positions: sqlite:///FILE, postgresql://…, …",
)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, as docs/guides/spark-job.md describes it.")

_OTHER_NAMES = {"address": "service.url", "admin_url": "admin.url"}
"""The data source's names for options of the command. All other options have the command's names in camel case."""

_CLIENT = "pulsar.client."

_CLOCK_OPTIONS = ("service.url", "admin.url", "topic", "topics", "topicsPattern", *FILE_OPTIONS.values())


def _options(*options: Command) -> Command:
    """Return a decorator that applies all these decorators. `--help` shows the options in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


service_options = _options(
    sidecar_options,
    click.option("--admin-url", metavar="URL", help="With --address pulsar://…: the cluster's admin URL."),
    click.option(
        "--pulsar-client",
        "pulsar_client",
        multiple=True,
        metavar="NAME=VALUE",
        help="An option pulsar.client.NAME of the data source, for example authParams=file:///PATH.",
    ),
)


def given_options(source: dict[str, Any]) -> dict[str, str]:
    """Return the given options of the data source, by the data source's names."""
    said = {name: value for name, value in source.items() if value is not None and name != "pulsar_client"}
    given = {_OTHER_NAMES.get(name) or _camel_case(name): str(value) for name, value in said.items()}
    given |= file_options()
    for one in source["pulsar_client"]:
        name, _, value = one.partition("=")
        given[_CLIENT + name] = value
    return given


def _camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


_source_options = _options(
    service_options,
    click.option("--topic", metavar="TOPIC", help="Read one topic, or all partitions of a partitioned topic."),
    click.option("--topics", metavar="TOPIC,…", help="Read several topics."),
    click.option("--topics-pattern", metavar="REGEX", help="Read all topics whose full or short names match."),
    click.option(
        "--starting-offsets", metavar="earliest|latest|JSON", help="Where the first run of the job begins to read."
    ),
    click.option(
        "--starting-time",
        metavar="MS|JSON",
        help="Begin with messages published at this time, in ms since 1970, instead of --starting-offsets.",
    ),
    click.option(
        "--max-offsets-per-trigger", metavar="N", help="The most messages in a round, of all topics together."
    ),
    click.option("--max-bytes-per-trigger", metavar="N", help="The approximate most bytes in a round."),
    click.option(
        "--fail-on-data-loss/--no-fail-on-data-loss",
        default=True,
        show_default=True,
        help="Whether it is an error or a warning if messages were removed before they were read.",
    ),
    click.option(
        "--read-timeout-seconds",
        metavar="N",
        help="A task that receives no message for N seconds ends, and its range is planned again; default: 20.",
    ),
    click.option("--plain-column-names", is_flag=True, help="Name the columns without the leading __."),
    click.option(
        "--pulsar-columns",
        is_flag=True,
        help="Add columns for exact keys, ordering keys and schema versions.",
    ),
)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Separate jobs, each with its own --help: `seqdedupe job audit` reports what is doubled, out of order or "
    "missing in topics. `seqdedupe job bootstrap` writes producers' highest sequence IDs to a file.",
)
def cli() -> None:
    """Read topics into a table. Each message is written once, even if the job is killed, restarted or run twice at the
    same time."""


@cli.command(short_help="Run the job.")
@_job
@_store
@click.option("--table", required=True, help="The table for the rows. A missing table is created.")
@_source_options
@click.option(
    "--transform",
    metavar="MODULE:FUNCTION",
    help="The function that converts an Arrow RecordBatch of messages to a RecordBatch of rows.",
)
@click.option(
    "--deduplicate", is_flag=True, help="Drop further copies of messages that are in the topic more than once."
)
@click.option(
    "--transaction",
    type=click.Choice(["topic", "batch"]),
    default="topic",
    show_default=True,
    help="What one transaction commits: one topic's part of a round, or the whole round.",
)
@click.option(
    "--on-error",
    type=click.Choice(["fail", "dead-letter"]),
    default="fail",
    show_default=True,
    help="What happens to a message that the transformation or the table refuses: it ends the job, or goes to the "
    f"table TABLE{DEAD_LETTER_SUFFIX}.",
)
@click.option(
    "--max-dead-letters",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"With --on-error dead-letter: more than N in one transaction end the job; default: {MAX_DEAD_LETTERS}.",
)
@click.option("--follow", is_flag=True, help="When all messages are read, wait for new ones, until SIGTERM or Ctrl-C.")
@click.option(
    "--trigger-seconds",
    type=Seconds(),
    default=TRIGGER_SECONDS,
    show_default=True,
    help="With --follow: the interval at which to look for new messages.",
)
@click.option("--checkpoint-location", metavar="DIR", help="Run as a streaming query with this checkpoint.")
@click.option("--master", metavar="URL", help="Spark's master; default: the master of spark-submit, else this machine.")
@metrics_options
@_as_json
def run(
    job: str,
    store_url: str,
    table: str,
    transform: str | None,
    deduplicate: bool,
    transaction: Any,
    on_error: str,
    max_dead_letters: int | None,
    follow: bool,
    trigger_seconds: float,
    checkpoint_location: str | None,
    master: str | None,
    as_json: bool,
    **source: Any,
) -> int:
    """Read all messages that exist now, and write them to the table. With --follow, continue with later messages.

    SIGTERM ends the job after the current round. Ctrl-C or kill -9 ends the job at once; no data is lost or doubled.
    The next start continues at the stored positions.
    """
    given = given_options(source)
    if on_error == "dead-letter":
        max_dead_letters = max_dead_letters or MAX_DEAD_LETTERS
    elif max_dead_letters is not None:
        raise click.UsageError("--max-dead-letters is for --on-error dead-letter.")
    config = JobConfig(
        job, options.parse(given), from_url(store_url), table, deduplicate, transaction, max_dead_letters
    )
    reader = ReaderJob(None, config, _imported(transform) if transform else None)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with metrics_told(as_json=as_json)(reader), reader.activity.life():
        return _run(reader, given, master, checkpoint_location, follow, trigger_seconds, as_json)


def _run(
    reader: ReaderJob,
    given: dict[str, str],
    master: str | None,
    checkpoint_location: str | None,
    follow: bool,
    trigger_seconds: float,
    as_json: bool,
) -> int:
    began = time.monotonic()
    reader.spark = spark = start_session(f"seqdedupe {reader.config.job}", master)

    def stop(*_: object) -> None:
        reader.stop()
        say("seqdedupe job", "SIGTERM: the job ends after this round")

    signal.signal(signal.SIGTERM, stop)
    progress = Progress(sys.stderr)
    try:
        if checkpoint_location is None:
            reader.run(follow=follow, trigger_seconds=trigger_seconds, on_round=progress.show)
        else:
            _stream(spark, reader, given, checkpoint_location, follow, trigger_seconds, progress)
    finally:
        progress.close()
    seconds = time.monotonic() - began
    click.echo(json.dumps(summary(reader.total, seconds)) if as_json else text(reader.total, seconds))
    return 0 if reader.total.has_looked else FAILED


def _stream(
    spark: SparkSession,
    reader: ReaderJob,
    given: dict[str, str],
    checkpoint: str,
    follow: bool,
    trigger_seconds: float,
    progress: Progress,
) -> None:
    """Run the job as a streaming query that only decides when to read. At each tick of the query, the job reads all
    messages after the stored positions. The content of the checkpoint does not matter. If the checkpoint lists messages
    as read that are not in the database, the job still reads these messages."""
    clock = {name: value for name, value in given.items() if name in _CLOCK_OPTIONS or name.startswith(_CLIENT)}
    clock |= {"startingOffsets": "earliest", "failOnDataLoss": "false"}

    def read() -> None:
        reader.run(patient=follow, on_round=progress.show)

    def tick(frame: DataFrame, batch_id: int) -> None:
        read()

    def query() -> DataStreamWriter:
        writer = spark.readStream.format("seqdedupe").options(**clock).load().writeStream.foreachBatch(tick)
        if follow:
            return writer.trigger(processingTime=f"{trigger_seconds} seconds")
        return writer.trigger(availableNow=True)

    spark.dataSource.register(SeqdedupeDataSource)
    writer = query().option("checkpointLocation", checkpoint)
    if follow:
        read()
    is_over = False
    while not is_over and not reader.is_stopping:
        try:
            _run_query(writer, reader)
            is_over = True
        except UnavailableError:
            pass
        except PositionError as e:
            # If a position of the job itself is invalid, this call raises, which ends the job.
            read()
            _log.warning("%s: the checkpoint does not fit, so the query begins a new one elsewhere: %s", checkpoint, e)
            writer = query()
        # If the sidecar or the database is unavailable, this call waits for longer than a query does.
        read()


def _run_query(writer: DataStreamWriter, reader: ReaderJob) -> None:
    with typed_failures():
        query = writer.start()
        while not query.awaitTermination(1):
            if reader.is_stopping:
                query.stop()


def _imported(name: str) -> Transform:
    """Return the function `module:function`. Raises INVALID_OPTION."""
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as e:
        raise error("INVALID_OPTION", f"--transform {name}: {e}") from e
    if not callable(found):
        raise error("INVALID_OPTION", f"--transform {name}: this is not a function")
    return found  # type: ignore[no-any-return]


@cli.command(short_help="Show the job's positions.")
@_job
@_store
@_as_json
def positions(job: str, store_url: str, as_json: bool) -> None:
    """Show the stored position and epoch of each of the job's topics."""
    found = positions_of(from_url(store_url, create=False), job)
    if as_json:
        for topic, stored in found.items():
            click.echo(json.dumps({"topic": topic, "position": str(stored.position), "epoch": stored.epoch}))
    else:
        for topic, stored in found.items():
            click.echo(f"{topic}  {stored.position}  epoch {stored.epoch}")


@cli.command(short_help="Show how far behind the job is.")
@_job
@_store
@lag_options
@sidecar_options
@_as_json
def lag(
    job: str, store_url: str, max_messages: int | None, max_seconds: float | None, address: str, as_json: bool
) -> int:
    """Show how many messages the job has not read, and the age of the oldest such message. The command compares the
    stored positions with the ends of the topics at a sidecar. The job need not run."""
    found = positions_of(from_url(store_url, create=False), job)
    positions = {topic: stored.position for topic, stored in found.items()}
    with Client(address, told_credentials()) as client:
        return show_lag(client, positions, max_messages, max_seconds, as_json=as_json)


@cli.command(short_help="Set where the job continues.")
@_job
@_store
@click.option("--topic", required=True, help="The topic: the full name of one partition.")
@click.option(
    "--to",
    "place",
    required=True,
    metavar="earliest|latest|INDEX|MESSAGE_ID",
    help="The index of the first message to read, or the ID of the message before it.",
)
@service_options
@_as_json
def reset(job: str, store_url: str, topic: str, place: str, as_json: bool, **source: Any) -> None:
    """Set a topic's position, in a new epoch. Running jobs end with POSITION_RESET. Rows in the table do not change."""
    service = options.parse(given_options(source) | {"topic": topic}).service
    before, after = reset_position(from_url(store_url, create=False), job, topic, place, service)
    topic = topic_name(topic)
    was = f"{before.position}, epoch {before.epoch}" if before else "none"
    if as_json:
        old = {"position": str(before.position), "epoch": before.epoch} if before else None
        new = {"position": str(after.position), "epoch": after.epoch}
        click.echo(json.dumps({"topic": topic, "before": old, "after": new}))
    else:
        click.echo(f"{topic}: {after.position}, epoch {after.epoch} (before: {was})")


def run_main(arguments: Sequence[str] | None = None, name: str = "seqdedupe_spark.reader_job") -> int:
    """Run the command, by default with this process's arguments. Return the exit status."""
    return run_command(cli, name, arguments=arguments)


if __name__ == "__main__":
    sys.exit(run_main())
