"""The reader job: rounds that are planned from the stored positions, until the topics are read."""

import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa
from pyspark.sql import SparkSession

from seqdedupe.client.blocking import Client
from seqdedupe.client.blocking.loop import event_loop
from seqdedupe.client.connection import NOT_A_SIDECAR, Backoff
from seqdedupe.databases.failures import refuses_entry
from seqdedupe.errors import SeqdedupeError, UnavailableError, error
from seqdedupe.message_id import Position
from seqdedupe.services.activity import Activity, Lag, answer_of, lag_of_all
from seqdedupe_spark.job.positions import Positions, TopicStanding
from seqdedupe_spark.job.range_task import (
    DEAD_LETTER_SCHEMA,
    DEAD_LETTER_SUFFIX,
    JobOutput,
    RangeStep,
    RangeTask,
    TaskReport,
    Transform,
    output_schema,
)
from seqdedupe_spark.message_columns import columns_of
from seqdedupe_spark.options import Options
from seqdedupe_spark.planning import WaitingLine, of_job, open_client
from seqdedupe_spark.ranges import packed
from seqdedupe_spark.session import activate, typed_failures
from seqdedupe_spark.stores.contract import Binding, StoreFactory, check_name

GIVE_UP_SECONDS = 120.0
"""A run without `follow` ends if rounds have failed for this time, even if another attempt should help."""

READ_TIMEOUT_SECONDS = 20.0
"""A task ends if no message has arrived for this time, unless the source has another limit. The round is then planned
again. The planning waits for the sidecar, and can be stopped while it waits."""

TRIGGER_SECONDS = 1.0
"""The pause of a job with `follow` when it has read all messages."""

_FIRST_DELAY_SECONDS = 0.05
_LONGEST_DELAY_SECONDS = 5.0

_MAY_BE_ACCEPTED = {"POSITION_TRIMMED", "POSITION_OF_ANOTHER_INCARNATION", "TOPIC_NOT_FOUND"}
"""The data losses after which planning continues, if the source allows data loss."""

_LOCAL = re.compile(r"local(\[.*\])?")


@dataclass(frozen=True)
class JobConfig:
    """The configuration of a job. `job` is the name under which the store keeps the job's positions. With another name,
    the job starts from the beginning.

    `source` contains the options of the data source: the topics, where the first start begins (by default earliest),
    the limits of a round, and whether lost data is an error. With `transaction` "topic", one transaction commits the
    rows and the position of one topic. With "batch", one transaction commits the rows and positions of a whole round. A
    message that the transformation or the table refuses is an error. With `max_dead_letters`, up to that number of
    refused messages in one transaction are written to a separate table instead.
    """

    job: str
    source: Options
    store: StoreFactory
    table: str
    deduplicate: bool = False
    transaction: Literal["topic", "batch"] = "topic"
    max_dead_letters: int | None = None


@dataclass
class Round:
    """The result of a round, and the standings of the topics after the round."""

    read: int = 0
    written: int = 0
    duplicates: int = 0
    dead_letters: int = 0
    standings: dict[str, TopicStanding] = field(default_factory=dict)
    has_looked: bool = True
    """Whether sidecar and database have reported the standings. Otherwise the standings are not known."""

    def count(self, report: TaskReport) -> None:
        """Add the result of a task."""
        self.read += report.read
        self.written += report.written
        self.duplicates += report.duplicates
        self.dead_letters += report.dead_letters

    @property
    def lag(self) -> int:
        """The number of messages still to be read, of the messages that existed when the round was planned. For a run,
        the number is valid only if `has_looked`."""
        return sum(standing.lag for standing in self.standings.values())


class ReaderJob:
    """Reads topics into a table, each message once, after any failure and with any number of simultaneous runs.

    `transform` converts a RecordBatch of messages to a RecordBatch of rows, row by row. It is first called with a batch
    without rows, to determine the columns. Without `transform` the messages are written unchanged.

    An object belongs to one thread, except for `stop`. The first round raises ConfigurationError (INVALID_OPTION,
    INVALID_OUTPUT, UNSUPPORTED_STORE, JOB_CHANGED, OUTPUT_MISSING) before it reads any message.
    """

    def __init__(self, spark: SparkSession | None, config: JobConfig, transform: Transform | None = None) -> None:
        check_name("job", config.job)
        check_name("table", config.table)
        self.config = config
        self.total = Round(has_looked=False)
        """The result so far. In a failed round, too, some topics may have been read."""
        self.activity = Activity("job", config.job)
        """The counts and state, for `seqdedupe.services.metrics`."""
        self.spark = spark
        """The session. If there is none yet, set it before the first round."""
        self._transform = transform
        source = config.source
        self._columns = columns_of(source.pulsar_columns, source.plain_column_names)
        self._service = of_job(source.service, config.job)
        self._client = open_client(self._service, source.selection)
        self._positions = Positions(config.job, config.table, source)
        self._output: JobOutput | None = None
        self._stopping = threading.Event()

    def run(
        self,
        *,
        follow: bool = False,
        patient: bool = False,
        trigger_seconds: float = TRIGGER_SECONDS,
        on_round: Callable[[Round], None] | None = None,
    ) -> Round:
        """Run rounds until all messages that existed at the start are read, or with `follow` until `stop`. Return
        `total`.

        If the database or the sidecar is unavailable, this waits, also at the start, and logs the reason. With `follow`
        or `patient` the wait has no time limit. Otherwise only the wait for a topic that is recovering has none. Raises
        UnavailableError if rounds have failed for GIVE_UP_SECONDS. Errors that another attempt cannot fix are raised at
        once. At the start, these include a database that does not exist or refuses the user. Committed rows stay:
        another run continues after them.
        """
        with self.activity.life():
            return self._run(follow, patient, trigger_seconds, on_round)

    def _run(
        self, follow: bool, patient: bool, trigger_seconds: float, on_round: Callable[[Round], None] | None
    ) -> Round:
        ends: dict[str, Position] | None = None
        while not self._stopping.is_set():
            began = time.monotonic()
            done = self._round_at_last(patient=patient or follow)
            if done is None:
                break
            if on_round is not None:
                on_round(done)
            if ends is None:
                ends = {topic: standing.end for topic, standing in done.standings.items()}
            if not follow and _has_reached(done.standings, ends):
                break
            if follow and not done.lag:
                self._stopping.wait(max(began + trigger_seconds - time.monotonic(), 0))
        return self.total

    def stop(self) -> None:
        """Make `run` end after the current round, or at once if it is waiting. May be called from any thread, or from a
        signal handler."""
        self._stopping.set()

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def run_round(self) -> Round:
        """Run one round: plan it from the stored positions, let Spark read and write the messages, and return the
        result.

        Raises SeqdedupeError. Topics whose transactions were committed nevertheless are counted in `total`.
        """
        spark = self._session()
        output = self._prepare(spark)
        with output.store() as store:
            listing, standings = self._positions.look(self._client, store, self._stopping.is_set)
        steps = self._positions.plan(listing, standings)
        done = Round(standings=standings)
        self.total.standings, self.total.has_looked = standings, True
        if steps:
            failures = self._take(spark, output, steps, done)
            if failures:
                # Prefer the error that another attempt cannot fix.
                raise min(failures, key=lambda failure: isinstance(failure, UnavailableError))
            for topic, standing in done.standings.items():
                listing.hold(topic, standing.stored.position)
        self.activity.runs()
        return done

    def look_at_lag(self) -> Lag | None:
        """Return how many messages are still to be read; None before the first round. The call asks the sidecar and
        blocks: make it from a separate thread. With Pulsar's brokers, it returns the number after the last round, with
        unknown age. Raises SeqdedupeError, TimeoutError."""
        if not self.total.has_looked:
            return None
        client = self._client
        if not isinstance(client, Client):
            return Lag(self.total.lag, None)
        positions = {topic: standing.stored.position for topic, standing in dict(self.total.standings).items()}
        return answer_of(lag_of_all(client.on_loop, positions), event_loop())

    def _take(
        self, spark: SparkSession, output: JobOutput, steps: Sequence[RangeStep], done: Round
    ) -> list[SeqdedupeError]:
        """Let Spark run the steps, and count the results. Return the failures."""
        groups = [steps] if self.config.transaction == "batch" else [[step] for step in steps]
        config = self.config
        task = RangeTask(
            output,
            self._service,
            self._columns,
            self._transform,
            config.deduplicate,
            config.source.read_timeout_seconds or READ_TIMEOUT_SECONDS,
            config.max_dead_letters,
        )
        reports = run_tasks(spark, task.run, groups)
        for group, report in zip(groups, reports, strict=True):
            if report.failure is None:
                done.count(report)
                self.total.count(report)
                read = report.read - report.duplicates - report.dead_letters
                self.activity.done(read, duplicates=report.duplicates, set_aside=report.dead_letters)
                for step in group:
                    self._positions.committed(step)
                    done.standings[step.range.topic] = done.standings[step.range.topic].after(step)
        return [report.failure for report in reports if report.failure is not None]

    def _round_at_last(self, *, patient: bool) -> Round | None:
        """Run a round. Repeat it after failures that another attempt should fix; with `patient`, without a time limit.
        Return None if the job was asked to stop before a round succeeded."""
        backoff, waiting = Backoff(_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS), WaitingLine()
        began = time.monotonic()
        while True:
            try:
                return self.run_round()
            except SeqdedupeError as e:
                is_lost = e.reason in _MAY_BE_ACCEPTED and not self.config.source.fail_on_data_loss
                if e.reason == "RECOVERING":
                    began = time.monotonic()
                is_away = isinstance(e, UnavailableError)
                is_late = time.monotonic() > began + GIVE_UP_SECONDS and not (patient and is_away)
                is_wrong = not self.total.has_looked and (e.reason == NOT_A_SIDECAR or refuses_entry(e.__cause__))
                if is_late or is_wrong or not (is_lost or is_away):
                    raise
                if self._stopping.is_set():
                    return None
                waiting.say(e)
                self.activity.waits(e)
                self._stopping.wait(max(backoff.next_seconds(), e.retry_delay_ms / 1000))

    def _session(self) -> SparkSession:
        if self.spark is None:
            raise error("INVALID_OPTION", f"job {self.config.job!r} has no Spark session")
        activate(self.spark)
        return self.spark

    def _prepare(self, spark: SparkSession) -> JobOutput:
        """Check the configuration, and create the tables. This is done once."""
        if self._output is not None:
            return self._output
        config = self.config
        schema = output_schema(self._transform, self._columns)
        with config.store() as store:
            master = spark.conf.get("spark.master", "") or ""
            if store.is_local and not _LOCAL.fullmatch(master):
                raise error(
                    "UNSUPPORTED_STORE", f"store: only processes of one machine can use it, but the master is {master}"
                )
            if config.deduplicate and not store.keeps_watermarks:
                raise error("UNSUPPORTED_STORE", "deduplicate: this store cannot hold watermarks")
            if config.max_dead_letters is not None and not store.keeps_dead_letters:
                raise error("UNSUPPORTED_STORE", "dead letters: this store cannot write to two tables at once")
            if config.deduplicate:
                # Before the job is bound to it for good.
                self._positions.check_have_producers(self._client, self._stopping.is_set)
            self._positions.bind(store, Binding(config.table, config.deduplicate), schema)
            if config.max_dead_letters is not None:
                store.prepare(config.table + DEAD_LETTER_SUFFIX, DEAD_LETTER_SCHEMA)
        self._output = JobOutput(config.store, config.job, config.table, schema)
        return self._output


def run_tasks(
    spark: SparkSession, run: Callable[[Sequence[RangeStep]], TaskReport], groups: Sequence[Sequence[RangeStep]]
) -> list[TaskReport]:
    """Run `run` on every group of steps, and return the reports. Small groups share a Spark task.

    The data for the tasks is part of their closure, both on a classic session and over Spark Connect. Errors that
    another attempt cannot fix are returned in the reports, as values.
    """
    parts = packed([sum(len(step.range) for step in group) for group in groups])

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for one in parts[number]:
                    yield pa.RecordBatch.from_pydict({"report": [pickle.dumps(run(groups[one]))]})

    with typed_failures():
        rows = spark.range(0, len(parts), 1, len(parts)).mapInArrow(task, "report binary").collect()
    return [pickle.loads(row[0]) for row in rows]


def _has_reached(standings: dict[str, TopicStanding], ends: dict[str, Position]) -> bool:
    """Return whether every topic is read up to that end, or has been replaced by another topic of the same name."""
    for topic, end in ends.items():
        position = standings[topic].stored.position if topic in standings else end
        if position.incarnation == end.incarnation and position.index < end.index:
            return False
    return True
