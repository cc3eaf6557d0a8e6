"""Running a round's tasks on Spark: the fast route, and the one where the user transforms a DataFrame.

Both work on a classic session and over Spark Connect. What the tasks need travels in their closures; what became of
them comes back as a small pickled row each. Errors that another try cannot cure come back in it too, as values.
"""

import contextlib
import io
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import spark_partition_id
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe_spark.cluster.settings import Service
from seqdedupe_spark.columns import column_of
from seqdedupe_spark.job.poison import FindMessageId, find_refused, names_a_row, naming
from seqdedupe_spark.job.range_task import Output, Report, Step, all_done
from seqdedupe_spark.ranges import packed
from seqdedupe_spark.reading import message_id_at, read_range
from seqdedupe_spark.session import first_line, typed_failures
from seqdedupe_spark.stores.contract import Advance

DataFrameTransform = Callable[[DataFrame], DataFrame]

VIEW = "messages"
"""The temporary view that a transformation in SQL reads."""

_REPORT = "report binary"

_ROW_WISE = {
    "MapInArrow",
    "PythonMapInArrow",
    "MapInPandas",
    "ArrowEvalPython",
    "BatchEvalPython",
    "BroadcastHashJoin",
    "BroadcastNestedLoopJoin",
    "ColumnarToRow",
    "RowToColumnar",
    "DeserializeToObject",
    "MapElements",
    "SerializeFromObject",
    "Filter",
    "Generate",
    "Project",
    "Range",
    "AdaptiveSparkPlan",
    "WholeStageCodegen",
    "InputAdapter",
}
"""The operators of a physical plan that make rows of single rows, partition by partition, in order."""

_OPERATOR = re.compile(r"^(?P<indent>[\s:|]*(?:[+:]- )?)(?:\*\(\d+\) )?(?P<name>[A-Z]\w+)")


def run_tasks(
    spark: SparkSession, run: Callable[[Sequence[Step]], Report], groups: Sequence[Sequence[Step]]
) -> list[Report]:
    """Runs `run` on every group of steps, and returns the reports. Small groups share a task of Spark's."""
    parts = packed([sum(len(step.range) for step in group) for group in groups])

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for one in parts[number]:
                    yield _row(run(groups[one]))

    return _collect(spark.range(0, len(parts), 1, len(parts)).mapInArrow(task, _REPORT))


def _row(report: Report) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"report": [pickle.dumps(report)]})


def _collect(frame: DataFrame) -> list[Report]:
    with typed_failures():
        return [pickle.loads(row[0]) for row in frame.collect()]


def sql(text: str) -> DataFrameTransform:
    """The transformation that is this query over the view `messages`."""

    def query(messages: DataFrame) -> DataFrame:
        messages.createOrReplaceTempView(VIEW)
        return messages.sparkSession.sql(text)

    return query


@dataclass(frozen=True)
class FrameTask:
    """A round in which the user transforms a DataFrame. `columns` are those of the messages."""

    service: Service
    columns: pa.Schema
    transform: DataFrameTransform
    read_timeout_seconds: float | None = None

    def output_schema(self, spark: SparkSession) -> pa.Schema:
        """The columns that the transformation makes. Raises INVALID_OUTPUT if it cannot be planned."""
        return to_arrow_schema(self._transformed(spark, []).schema, timezone="UTC")

    def run(self, spark: SparkSession, output: Output, steps: Sequence[Step], *, one_transaction: bool) -> list[Report]:
        """Takes the steps: each topic in a transaction of its own, or all in one.

        Raises UNSUPPORTED_PLAN, before anything is read, if each topic is to have its own and the transformation does
        not work row by row, in Spark's partition of the range.
        """
        frame = self._transformed(spark, steps)
        if not one_transaction:
            _check_row_wise(frame)
        # A worker whose rows come from something that fails, or that is cancelled, sees them come to an end. So they
        # are made and counted first: what is less than that is not the end.
        frame = frame.persist()
        try:
            find = partial(message_id_at, self.service, timeout_seconds=self.read_timeout_seconds)
            return _write(frame, output, steps, find, one_transaction=one_transaction)
        finally:
            frame.unpersist()

    def _transformed(self, spark: SparkSession, steps: Sequence[Step]) -> DataFrame:
        service, columns, timeout = self.service, self.columns, self.read_timeout_seconds

        def read_planned_ranges(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    yield from read_range(service, steps[number].range, columns, timeout)

        count = len(steps)
        messages = spark.range(0, count, 1, max(count, 1)).mapInArrow(read_planned_ranges, from_arrow_schema(columns))
        try:
            frame = self.transform(messages)
        except PySparkException as e:
            raise error("INVALID_OUTPUT", f"the transformation cannot be planned: {first_line(str(e))}") from e
        if not isinstance(frame, DataFrame):
            raise error("INVALID_OUTPUT", f"the transformation returned {type(frame).__name__}, not a DataFrame")
        return frame


def _write(
    frame: DataFrame, output: Output, steps: Sequence[Step], find: FindMessageId, *, one_transaction: bool
) -> list[Report]:
    with typed_failures():
        counted = {int(row[0]): int(row[1]) for row in frame.groupBy(spark_partition_id()).count().collect()}
    groups = [steps] if one_transaction else [[step] for step in steps]
    counts = [sum(counted.values())] if one_transaction else [counted.get(number, 0) for number in range(len(steps))]

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        number = context.partitionId() if context else 0
        rows = all_of((batch.cast(output.schema) for batch in batches), counts[number])
        rows = rows if one_transaction else _inside(groups[number][0], rows)
        yield _row(_commit(output, groups[number], rows, find))

    reports = _collect((frame.repartition(1) if one_transaction else frame).mapInArrow(write, _REPORT))
    if not reports:
        # Spark has found by itself that no row is left, and run no task.
        return [_commit(output, group, iter(()), find) for group in groups]
    if len(reports) != len(groups):
        raise error("UNSUPPORTED_PLAN", f"Spark made {len(reports)} tasks of {len(groups)} ranges")
    unnamed = {number: one.failure for number, one in enumerate(reports) if _may_be_a_row(one.failure)}
    if not unnamed:
        return reports

    def name(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        number = context.partitionId() if context else 0
        failure = unnamed.get(number)
        if failure is not None:
            failure = _refused(output, groups[number], (batch.cast(output.schema) for batch in batches), failure, find)
        yield _row(Report(failure=failure))

    named = _collect((frame.repartition(1) if one_transaction else frame).mapInArrow(name, _REPORT))
    return [again if number in unnamed else one for number, (one, again) in enumerate(zip(reports, named, strict=True))]


def _may_be_a_row(failure: SeqdedupeError | None) -> bool:
    """Whether the table has refused rows, and has not said which."""
    return failure is not None and failure.reason == "INVALID_OUTPUT" and not names_a_row(failure)


def _refused(
    output: Output,
    steps: Sequence[Step],
    batches: Iterator[pa.RecordBatch],
    failure: SeqdedupeError,
    find: FindMessageId,
) -> SeqdedupeError:
    """The failure that names a message, for one that names no row, as far as one can be found."""
    given: list[pa.RecordBatch] = []
    with output.store() as store, store.trial(output.table) as take:
        found = find_refused(take, _noted(batches, given), ended=False)
    return failure if found is None else _naming(found, given, steps, find)


def all_of(batches: Iterator[pa.RecordBatch], expected: int) -> Iterator[pa.RecordBatch]:
    """The batches, which must have so many rows."""
    count = 0
    for batch in batches:
        count += len(batch)
        yield batch
    if count != expected:
        raise error(
            "OUTPUT_UNAVAILABLE", f"Spark has handed over {count} of {expected} rows; nothing is written of them"
        )


def _commit(output: Output, steps: Sequence[Step], batches: Iterator[pa.RecordBatch], find: FindMessageId) -> Report:
    """Writes the rows of these steps and moves their positions, unless that was done already."""
    given: list[pa.RecordBatch] = []
    try:
        with output.store() as store:
            stored = [store.watermarks(output.job, step.range.topic)[0] for step in steps]
            if all_done(steps, stored):
                return Report()
            written = store.write(output.job, output.table, _noted(batches, given), [Advance(*step) for step in steps])
    except SeqdedupeError as failure:
        return Report(failure=_naming(failure, given, steps, find))
    return Report(sum(len(step.range) for step in steps), written)


def _noted(batches: Iterator[pa.RecordBatch], given: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches; of each the columns that say which messages it is made of are kept, as far as it has them."""
    for batch in batches:
        names = [name for name in batch.schema.names if name.removeprefix("__") in ("topic", "index")]
        given.append(batch.select(names))
        yield batch


def _naming(
    failure: SeqdedupeError, given: list[pa.RecordBatch], steps: Sequence[Step], find: FindMessageId
) -> SeqdedupeError:
    """A store's failure, which says which message the row is of, if the rows do."""
    if not names_a_row(failure):
        return failure
    batch, row = given[int(failure.numbers["batch"])], int(failure.numbers["row"])
    incarnations = {step.range.topic: step.range.incarnation for step in steps}
    try:
        topic, index = (column_of(batch, name)[row].as_py() for name in ("topic", "index"))
        if index is None:
            return failure
        return naming(failure, topic, incarnations[topic], index, find)
    except KeyError:
        return failure


def _inside(step: Step, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches, while every row is of a message in the step's range; of its topic where there are no indexes."""
    span = step.range
    for batch in batches:
        if not len(batch):
            continue
        is_inside = pc.and_(
            pc.equal(_column(batch, "topic"), span.topic), pc.equal(_column(batch, "partition"), span.partition)
        )
        if span.entries is None:
            index = _column(batch, "index")
            of_range = pc.and_(pc.greater_equal(index, span.first_index), pc.less(index, span.stop_index))
            is_inside = pc.and_(is_inside, of_range)
        if not pc.all(is_inside, skip_nulls=False).as_py():
            raise error("UNSUPPORTED_PLAN", f"the transformation gave a row that is not of {span}, whose task it is")
        yield batch


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    try:
        return column_of(batch, name)
    except KeyError as e:
        what = f"the transformation drops the column __{name}: keep topic, partition and index"
        raise error("UNSUPPORTED_PLAN", what) from e


def _check_row_wise(frame: DataFrame) -> None:
    """Raises UNSUPPORTED_PLAN, naming the operator, if the messages pass one that does not work row by row."""
    reads = 0
    above: list[tuple[int, str]] = []  # the operators from the root to this line, with their indents
    for line in _explained(frame).splitlines():
        found = _OPERATOR.match(line)
        if found is None:
            continue
        indent = len(found["indent"])
        above = [(depth, name) for depth, name in above if depth < indent] + [(indent, found["name"])]
        if "read_planned_ranges" in line:
            reads += 1
            wrong = [name for _, name in above if name not in _ROW_WISE]
            if wrong:
                raise error("UNSUPPORTED_PLAN", f"the transformation does not work row by row: it has {wrong[-1]}")
    if reads > 1:
        raise error("UNSUPPORTED_PLAN", "the transformation reads the messages more than once")


def _explained(frame: DataFrame) -> str:
    """The physical plan as text: all that Spark Connect shows of it."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        frame.explain()
    return text.getvalue()
