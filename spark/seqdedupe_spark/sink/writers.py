"""The sink as Spark knows it: a batch, or the batches of a stream, written by tasks and committed on the driver."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from seqdedupe.errors import error
from seqdedupe_spark.sink.identity import check_apart
from seqdedupe_spark.sink.task import SinkTask, Written

_BATCH = "streaming.sql.batchId"
"""What Spark calls the number of a stream's batch in the properties of all tasks that it runs for it."""

_log = logging.getLogger(__name__)


@dataclass
class Committed(WriterCommitMessage):
    """What a task tells the driver."""

    written: Written


class _Writing:
    def __init__(self, task: SinkTask) -> None:
        self.task = task

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        return Committed(self.task.run(iterator, context.attemptNumber() if context else 0))

    def _sum_up(self, what: str, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Rows are durable when their task has ended: what is left is what only all tasks together show."""
        found = [message.written for message in messages if isinstance(message, Committed)]
        check_apart(one.seen for one in found)
        rows, copies = sum(one.rows for one in found), sum(one.copies for one in found)
        _log.info("%s: %d rows, %d of them were there before", what, rows, copies)
        if taken := sum(one.taken for one in found):
            _log.warning(
                "%s: %d rows are not stored, for the topic had rows of the same messages, though this is the first "
                "try. If it was not run before, another query, or another branch of this one, writes them: give rows "
                "a deduplicationId that says whose they are",
                what,
                taken,
            )
        for topic in sorted({topic for one in found for topic in one.outgrown}):
            _log.warning(
                "%s: %s has forgotten IDs since it began: what a task was tried again with may be there twice; let the "
                "topic's window hold more than is written at a time",
                what,
                topic,
            )


class BatchWriter(_Writing, DataSourceArrowWriter):
    """Appends a DataFrame."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Raises INVALID_OPTION before anything is written in `foreachBatch` whose checkpoint nobody named."""
        context = TaskContext.get()
        batch = context.getLocalProperty(_BATCH) if context else None
        if batch is not None and self.task.fail_on_forgotten_ids:
            _check_batch(int(batch), self.task.began.batch)
        return super().write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._sum_up("the write", messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """What was written stays, and is known by its IDs when it comes again."""


class StreamWriter(_Writing, DataSourceStreamArrowWriter):
    """Appends a stream's batches."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._sum_up(f"batch {batchId}", messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """As of a batch."""


def _check_batch(batch: int, of_checkpoint: int | None) -> None:
    """A stream replays a batch that it was killed in: whether that may be this one, only its checkpoint says."""
    if batch != of_checkpoint:
        found = "none is named that can be looked at" if of_checkpoint is None else f"the one named has {of_checkpoint}"
        raise error(
            "INVALID_OPTION",
            f"checkpointLocation: batch {batch} of a stream is written, as in foreachBatch, which its checkpoint says "
            f"more about: {found}",
            hint="Write the stream itself: writeStream.format('seqdedupe'). Or give the write in foreachBatch the "
            "option checkpointLocation, as the query has it. failOnForgottenIds = false writes without: rows of a "
            "batch that is replayed when the topic has forgotten their IDs are doubled.",
        )
