"""The reader job: rounds that are planned from the stored positions, until the topics are read.

Begin with `ReaderJob`. The driver checks the job's positions before it plans anything (`Positions.look`). An operator
can show and reset them (`positions_of`, `reset_position`).
"""

import logging
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import pyarrow as pa
from pyspark.sql import SparkSession

from seqdedupe.client.blocking import Client
from seqdedupe.client.blocking.loop import event_loop
from seqdedupe.client.connection import NOT_A_SIDECAR, Backoff
from seqdedupe.databases.failures import refuses_entry
from seqdedupe.errors import (
    ConfigurationError,
    DamagedError,
    InvalidRequestError,
    NotFoundError,
    PositionError,
    SeqdedupeError,
    UnavailableError,
    error,
)
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe.services.activity import Activity, Lag, answer_of, lag_of_all
from seqdedupe_spark import planning, stock
from seqdedupe_spark.dedupe import has_no_producers
from seqdedupe_spark.message_columns import columns_of
from seqdedupe_spark.options import Options, ReadLimits, Selection, number
from seqdedupe_spark.planning import (
    Ends,
    PlanningClient,
    TopicListing,
    WaitingLine,
    earliest,
    find_loss,
    of_job,
    open_client,
)
from seqdedupe_spark.range_task import (
    DEAD_LETTER_SCHEMA,
    DEAD_LETTER_SUFFIX,
    JobOutput,
    RangeStep,
    RangeTask,
    TaskReport,
    Transform,
    output_schema,
)
from seqdedupe_spark.ranges import TopicRange, packed
from seqdedupe_spark.service import Service
from seqdedupe_spark.session import activate, typed_failures
from seqdedupe_spark.stock import StockEnds
from seqdedupe_spark.stores.contract import Advance, Binding, OutputStore, Stored, StoreFactory, check_name

# -- Positions.

FIRST_START = "*"
"""A topic name that is stored when the first start has given every topic a position. Topics that are found later begin
at their earliest message. No topic has this name."""

MAX_MESSAGES = 250_000
"""The maximum number of messages in a round, for all topics together, unless the source has limits."""

MAX_BYTES = 64 * 1024 * 1024
"""The approximate maximum number of bytes in a round, unless the source has limits."""

_log = logging.getLogger(__name__)


class TopicStanding(NamedTuple):
    """The position of a job in a topic, and the end of the topic."""

    stored: Stored
    end: Position
    entries: int | None = None
    """The number of entries still to be read, for a topic that no sidecar writes."""

    @property
    def lag(self) -> int:
        """The number of messages still to be read. For a topic that no sidecar writes: the number of entries."""
        return self.end.index - self.stored.position.index if self.entries is None else self.entries

    def after(self, step: RangeStep) -> "TopicStanding":
        """Return the standing after a step."""
        left = None if self.entries is None else self.entries - len(step.range)
        return TopicStanding(Stored(step.range.end, step.epoch), self.end, left)


@dataclass
class Positions:
    """The positions of one job, for one run of the job.

    The object remembers the stored positions and the ends of the topics that it has seen. No position and no end may
    move back.
    """

    job: str
    table: str
    source: Options
    seen: dict[str, Stored] = field(default_factory=dict)
    ends: dict[str, Position] = field(default_factory=dict)
    accepted: set[str] = field(default_factory=set)
    """Deleted topics for which a warning was logged."""

    def bind(self, store: OutputStore, binding: Binding, schema: pa.Schema) -> None:
        """Bind the job to its table and mode. If the table is missing, create it for rows of this schema.

        Raises JOB_CHANGED if the job is bound to another table or mode. Raises OUTPUT_MISSING if the job has positions
        and its table does not exist. Raises INVALID_OUTPUT if the existing table does not accept the rows. After these
        errors the job is not bound to the table.
        """
        is_there = store.has_table(binding.table)
        if is_there:
            store.prepare(binding.table, schema)
        binding.check(self.job, store.bind(self.job, binding))
        if not is_there:
            if FIRST_START in store.positions(self.job):
                what = f"job {self.job!r} has positions, but its table {binding.table!r} does not exist"
                raise error("OUTPUT_MISSING", what)
            store.prepare(binding.table, schema)

    def check_have_producers(self, client: PlanningClient, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Raise INVALID_OPTION if a selected topic has deduplication IDs. For a topic that is recovering, or appears
        later, the task that reads the topic makes this check."""
        listing = TopicListing(client, should_stop)
        # `look` decides whether a topic may be missing.
        with suppress(NotFoundError):
            if by_id := next(filter(listing.is_by_id, listing.select(self.source.selection)), None):
                raise has_no_producers(by_id)

    def look(
        self, client: PlanningClient, store: OutputStore, should_stop: Callable[[], bool] = lambda: False
    ) -> tuple[TopicListing, dict[str, TopicStanding]]:
        """Return the listing, and the standing of each selected topic. A topic without a position first gets a
        position.

        Raises POSITION_WENT_BACK if the database was replaced by an older copy, POSITION_RESET if an operator has reset
        a position, POSITION_AFTER_END if a topic has lost its end. With `fail_on_data_loss`, also raises PositionError
        or NotFoundError for a topic that cannot be read from its position. Without it, a warning is logged, and the
        position is permanently moved to the messages that are still stored.
        """
        stored = store.positions(self.job)
        self._check_against_seen(stored)
        listing = TopicListing(client, should_stop)
        names = listing.select(self.source.selection, stored.keys() - {FIRST_START})
        if FIRST_START not in stored or not stored.keys() >= set(names):
            stored = self._start(listing, store, names, stored)
        looked = {name: self._look_at(listing, store, name, stored[name]) for name in names}
        standings = {name: standing for name, standing in looked.items() if standing is not None}
        self.seen.update({name: standing.stored for name, standing in standings.items()})
        return listing, standings

    def plan(self, listing: TopicListing, standings: dict[str, TopicStanding]) -> list[RangeStep]:
        """Return the next round: the range of every topic with new messages, within the limits."""
        ranges = [listing.range(topic, one.stored.position, one.end) for topic, one in standings.items()]
        limits = self.source.limits
        limits = ReadLimits(limits.messages or MAX_MESSAGES, limits.size_bytes or MAX_BYTES)
        planned = listing.within(ranges, limits)
        return [RangeStep(span, standings[span.topic].stored.epoch) for span in planned]

    def committed(self, step: RangeStep) -> None:
        """Record a committed step. Call this for each step."""
        self.seen[step.range.topic] = Stored(step.range.end, step.epoch)

    def _check_against_seen(self, stored: dict[str, Stored]) -> None:
        for topic, before in self.seen.items():
            now = stored.get(topic)
            if now is None or now.epoch < before.epoch or (now.epoch == before.epoch and _is_before(now, before)):
                what = f"is {now.position}" if now else "is gone"
                raise error(
                    "POSITION_WENT_BACK", f"the position for {topic} {what}, but it was {before.position} before"
                )
            if now.epoch > before.epoch:
                raise error("POSITION_RESET", f"the position for {topic} was reset to {now.position}", epoch=now.epoch)

    def _check_end(self, topic: str, end: Position) -> None:
        before = self.ends.get(topic)
        if before is not None and before.incarnation == end.incarnation and end.index < before.index:
            raise error(
                "POSITION_AFTER_END",
                f"{topic} ended with index {before.index} earlier in this run, and ends with {end.index} now",
                index=before.index,
                end_index=end.index + 1,
            )
        self.ends[topic] = end

    def _start(
        self, listing: TopicListing, store: OutputStore, names: list[str], stored: dict[str, Stored]
    ) -> dict[str, Stored]:
        """Insert the missing positions. If another run has inserted some of these positions meanwhile, use the
        positions of the other run."""
        is_first = FIRST_START not in stored
        missing = [name for name in names if name not in stored]
        for name in missing:
            listing.hold(name)
        place = self.source.starting if is_first else None
        found = listing.resolve(names if is_first else missing, place or "earliest", "startingOffsets")
        for name in missing:
            self._check_start(listing, name, found[name])
        for name in missing:
            store.replace(self.job, name, None, Stored(found[name], 0))
        if is_first:
            store.replace(self.job, FIRST_START, None, Stored(Position.start(0), 0))
        return store.positions(self.job)

    def _check_start(self, listing: TopicListing, topic: str, start: Position) -> None:
        """Raise INVALID_OPTION for a start position that the topic does not have. Once stored, it would have precedence
        over a corrected option."""
        loss = listing.find_loss(topic, start)
        if loss is not None and (self.source.fail_on_data_loss or not loss.may_be_accepted):
            raise error("INVALID_OPTION", f"startingOffsets: the job cannot begin after {start}: {loss.message}")

    def _look_at(self, listing: TopicListing, store: OutputStore, topic: str, stored: Stored) -> TopicStanding | None:
        """Return the standing of one topic. Return None if the topic was deleted and data loss is accepted."""
        found = listing.look(topic, stored.position)
        if isinstance(found, Position):
            if listing.hold(topic, stored.position):
                return self._look_at(listing, store, topic, stored)
            self._check_end(topic, found)
            entries = listing.range(topic, stored.position, found).entries
            # The same place may have two descriptions: after the last entry of a ledger, and before the next ledger.
            return TopicStanding(stored, stored.position if entries == 0 else found, entries)
        if self.source.fail_on_data_loss or not found.may_be_accepted:
            raise found.error()
        if topic not in self.accepted:
            _log.warning("job %s: %s", self.job, found.message)
        if found.next is None:
            self.accepted.add(topic)
            return None
        listing.hold(topic)
        moved = Stored(found.next, stored.epoch)
        if found.reason == "POSITION_TRIMMED":
            # Move the position in a transaction without rows: a job that drops duplicates keeps its watermarks of the
            # producers.
            store.write(
                self.job,
                self.table,
                iter(()),
                [Advance(TopicRange(topic, stored.position, found.next), moved.epoch)],
            )
        elif not store.replace(self.job, topic, stored, moved):
            raise error("POSITION_CHANGED", f"another run of job {self.job!r} has moved the position for {topic}")
        self.seen[topic] = moved
        return self._look_at(listing, store, topic, moved)


def _is_before(now: Stored, before: Stored) -> bool:
    """Return whether an earlier stored position is above the current stored position. Positions of two incarnations
    have no order, because another run may have moved on to the next incarnation. If no run has done so, the position
    does not fit the topic."""
    return now.position.incarnation == before.position.incarnation and now.position.index < before.position.index


# -- The actions of an operator on a job's positions.


def positions_of(store: StoreFactory, job: str) -> dict[str, Stored]:
    """Return the stored positions of a job, by topic. Raises INVALID_OPTION if the job does not exist in the store."""
    with store() as opened:
        return {topic: stored for topic, stored in sorted(_stored(opened, job).items()) if topic != FIRST_START}


def _stored(store: OutputStore, job: str) -> dict[str, Stored]:
    check_name("job", job)
    try:
        stored = store.positions(job)
    except ConfigurationError as e:
        if e.reason != "INVALID_OUTPUT":
            raise
        raise error("INVALID_OPTION", f"store: it holds no positions of a job: {e.message}") from e
    if not stored:
        what = f"job {job} has no positions in this store; nothing was changed"
        raise error("INVALID_OPTION", what, hint="Check the name of the job, and the URL of its store.")
    return stored


def reset_position(
    store: StoreFactory, job: str, topic: str, place: str, service: Service
) -> tuple[Stored | None, Stored]:
    """Set a topic's position, in the next epoch, and drop its watermarks. Return the old and the new position.

    `place` is earliest, latest, an index (of the first message to read), or a message ID or position (of the last
    message that is not read again). A run that was planned before can no longer commit. Raises INVALID_OPTION, also for
    a job that does not exist in the store; NotFoundError; or PositionError if the topic cannot be read from there.
    """
    topic = topic_name(topic)
    with planning.open_client(planning.of_job(service, job), Selection("topic", (topic,))) as client, store() as opened:
        holder = client if isinstance(client, planning.Holder) and isinstance(client.ends(topic), StockEnds) else None
        if holder is not None:
            holder.subscribe(topic)
        position = _position(client, topic, place)
        while True:
            before = _stored(opened, job).get(topic)
            after = Stored(position, before.epoch + 1 if before else 0)
            if opened.replace(job, topic, before, after):
                if holder is not None:
                    holder.keep_from(topic, position)
                return before, after


def _position(client: planning.PlanningClient, topic: str, place: str) -> Position:
    ends = client.ends(topic)
    if place in ("earliest", "latest"):
        return earliest(ends) if place == "earliest" else ends.last
    if place.isascii() and place.isdigit():
        position = _before_index(topic, place, ends)
    else:
        try:
            position = stock.parse(place)
        except InvalidRequestError as e:
            raise error("INVALID_OPTION", f"to: {e.message}") from e
    if isinstance(ends, StockEnds):
        position = stock.given(position)
    if loss := find_loss(topic, position, ends):
        raise error(loss.reason, loss.message, topic=topic)
    return position if isinstance(ends, StockEnds) else _completed(client, topic, position)


def _before_index(topic: str, text: str, ends: Ends) -> Position:
    if isinstance(ends, StockEnds):
        raise error("INVALID_OPTION", f"to: no sidecar writes {topic}, so it has no indexes: give a message ID")
    try:
        return Position.before(ends.last.incarnation, number(text, 0))
    except ValueError as e:
        raise error("INVALID_OPTION", f"to: {e}") from e


def _completed(client: planning.PlanningClient, topic: str, position: Position) -> Position:
    """Return the complete position of the message. A message ID alone would fit every history of the topic.

    Raises POSITION_DIVERGED if the topic has a different message there.
    """
    if position.index < 0:
        return position
    try:
        found = client.position_at(topic, position.index)
    except (DamagedError, PositionError):
        return position  # the messages after it can still be read
    if not found.is_same(position):
        what = f"the message of {topic} with index {position.index} is {found}, not that of the position {position}"
        raise error("POSITION_DIVERGED", what, topic=topic)
    return found


# -- Rounds.

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

    An object belongs to one thread, except for `stop`. For an invalid configuration, the first round raises
    ConfigurationError (INVALID_OPTION, INVALID_OUTPUT, UNSUPPORTED_STORE, JOB_CHANGED, OUTPUT_MISSING) before it reads
    any message.
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
        or `patient` the wait has no time limit. Otherwise only the wait for a recovering topic has no time limit.
        Raises UnavailableError if rounds have failed for GIVE_UP_SECONDS. Errors that another attempt cannot fix are
        raised at once. At the start, these include a database that does not exist or refuses the user. Committed rows
        stay: another run continues after them.
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
        """Run a round. Repeat the round after failures that another attempt should fix. With `patient`, repeat it
        without a time limit. Return None if the job was asked to stop before a round succeeded."""
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
                # Check this before the job is permanently bound to the table.
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

    The closure of the tasks contains their data, both on a classic session and over Spark Connect. Errors that another
    attempt cannot fix are returned in the reports, as values.
    """
    parts = packed([sum(len(step.range) for step in group) for group in groups])

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for place in batch.column(0).to_pylist():
                for one in parts[place]:
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
