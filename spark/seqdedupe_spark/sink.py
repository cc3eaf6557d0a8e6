"""The sink: it writes rows of a DataFrame to topics of deduplication IDs, each row once, in any process and after any
number of attempts.

This file contains the work of a write's tasks and the classes that Spark calls. `row_layout` defines the meaning of the
columns and the ID of each row, and makes frames of the rows.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from seqdedupe.client import blocking
from seqdedupe.client.blocking.loop import event_loop, run
from seqdedupe.client.connection import NOT_A_SIDECAR
from seqdedupe.client.pending import BatchResult, Verdict
from seqdedupe.client.publisher import Publisher
from seqdedupe.errors import UnavailableError, error
from seqdedupe.files import sync_folder
from seqdedupe.v1 import admin_pb2
from seqdedupe_spark.planning import PATIENCE_SECONDS, WaitingLine, patiently
from seqdedupe_spark.row_layout import RowLayout, SeenIdentities, SinkFrame, Source, check_apart, frames_of, joined
from seqdedupe_spark.service import SidecarService, sidecar_at

# -- The test whether a topic still knows the IDs of an earlier write. Only then another write is harmless.

CLOCKS_MS = 5_000
"""The largest difference between the clocks of driver and sidecar."""


class Began(NamedTuple):
    """The earliest time at which these rows may have been written, and whether they may have been written before this
    attempt."""

    at_ms: int
    may_repeat: bool
    batch: int | None = None
    """The number of the batch in the checkpoint of a stream."""

    def is_known_by(self, topic: admin_pb2.Topic) -> bool:
        """Return whether the topic still knows the IDs of all messages since that time."""
        return not topic.window_forgotten or topic.window_first_publish_time_ms <= self.at_ms - CLOCKS_MS

    def check(self, topic: admin_pb2.Topic) -> None:
        """Raise IDS_FORGOTTEN if the topic may have forgotten some of these IDs."""
        if not self.is_known_by(topic):
            since = _shown(topic.window_first_publish_time_ms)
            what = f"{topic.name} knows only the IDs since {since}, and the write to be repeated began at"
            raise error("IDS_FORGOTTEN", f"{what} {_shown(self.at_ms)}: rows that are stored already could be doubled")


def now() -> Began:
    """Return the value for a write that begins now, assuming that there was no earlier attempt."""
    return Began(time.time_ns() // 1_000_000, may_repeat=False)


def _shown(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"


# -- What a stream's checkpoint shows of the planned batch: when it was logged, and whether it was planned before.
#
# Several processes in turn plan the batches of a query, so no process remembers all of them. Each batch leaves a mark
# next to Spark's logs.

PLANNED = "seqdedupe-sink"
"""The folder in a checkpoint that contains one empty file. The file's name is the number of the last planned batch."""


def began(location: str | None) -> Began:
    """Return the batch that is now planned, which is the last batch in the checkpoint's log. Its rows may have been
    written since it was logged. Also write a mark to record that this batch was planned."""
    checkpoint = None if location is None else folder_of(location)
    logged = [] if checkpoint is None else _numbers(checkpoint / "offsets")
    if checkpoint is None or not logged:
        _say_once(location)
        return now()
    batch = max(logged)
    at_ms = (checkpoint / "offsets" / str(batch)).stat().st_mtime_ns // 1_000_000
    return Began(at_ms, may_repeat=not _is_new(checkpoint, batch), batch=batch)


def _is_new(checkpoint: Path, batch: int) -> bool:
    """Return whether it is certain that no process has written rows of the batch. It is certain if the last mark
    belongs to the previous batch. In this case, this call writes the mark of this batch, which is durable before any
    row is sent."""
    folder = checkpoint / PLANNED
    try:
        folder.mkdir(exist_ok=True)
        before = _numbers(folder)
        (folder / str(batch)).touch(exist_ok=False)
        sync_folder(folder)
        sync_folder(checkpoint)
        for number in before:
            if number < batch:
                (folder / str(number)).unlink(missing_ok=True)
    except OSError:  # the mark exists already, or cannot be created
        return False
    return max(before, default=batch) == batch - 1


def _numbers(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []


def folder_of(location: str) -> Path | None:
    """Return the folder that Spark uses for this checkpoint, if the folder is on this machine. The text after the
    scheme is the unchanged path: `%20` is not a space, and `#` and `?` have no special meaning."""
    scheme, colon, path = location.partition(":")
    if not colon or "/" in scheme:
        scheme, path = "", location
    has_host = path.startswith("//") and not path.startswith("///")
    return None if scheme not in ("", "file") or has_host else Path(path)


@lru_cache(16)
def _say_once(location: str | None) -> None:
    _log.warning(
        "the checkpoint %s cannot be read from here. So it is not checked whether a topic still knows the IDs of a "
        "batch that is written again",
        location or "of the session's configuration",
    )


MAX_IN_FLIGHT_BYTES = 16 * 1024 * 1024
"""The maximum number of bytes that a task has in flight. With more rows, the caller waits."""

RECOVERY_DELAY_MS = 100

_NO_END = 2**63 - 1

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SinkReport:
    """The result of a task."""

    rows: int = 0
    copies: int = 0
    """The number of rows that the topic already contained."""
    seen: dict[Source, bytes] = field(default_factory=dict)
    """The identities of rows that have a source message."""
    outgrown: tuple[str, ...] = ()
    """The topics whose window no longer reaches back to the beginning of the write."""
    taken: int = 0
    """The number of copies whose identity, a source message, was in the topic already at the first attempt: another
    write has used the same identity."""


@dataclass(frozen=True)
class SinkTask:
    """The base class of all tasks of a write. Spark pickles the task."""

    service: str | SidecarService
    layout: RowLayout
    began: Began
    fail_on_forgotten_ids: bool = True

    def check_topic(self) -> None:
        """Raise INVALID_OPTION or NotFoundError for a topic that accepts no deduplication IDs. This runs on the driver,
        before any task starts. If a sidecar does not answer now, the tasks wait for it."""
        if self.layout.topic is None:
            return
        with sidecar_at(self.service).connect() as client, contextlib.suppress(UnavailableError):
            look(client, self.layout.topic, 0)

    def run(self, batches: Iterable[pa.RecordBatch], attempt: int = 0) -> SinkReport:
        """Publish all rows, and return when they are durable. If the sidecar becomes unavailable meanwhile, wait
        without a time limit.

        Before anything is written, raises IDS_FORGOTTEN if the rows may have been written earlier and a topic may have
        forgotten their IDs. Raises INVALID_OPTION or NotFoundError for a topic that accepts no deduplication IDs;
        UnavailableError for a sidecar that is unavailable at the start; and the errors of invalid rows.
        """
        may_repeat = self.began.may_repeat or attempt > 0
        check = self.fail_on_forgotten_ids and may_repeat
        seen = SeenIdentities()
        rows = 0
        with sidecar_at(self.service).connect() as client, _Targets(client, self.began, check) as targets:
            if self.layout.topic is not None:
                targets.open(self.layout.topic)
            for batch in joined(batches, targets.is_idle):
                rows += len(batch)
                frames = list(frames_of(batch, self.layout, seen))
                # If a topic of the batch is refused, the rows of the batch's other topics are not sent either.
                for topic in dict.fromkeys(topic for topic, _ in frames):
                    targets.open(topic)
                for topic, frame in frames:
                    targets.send(topic, frame)
            targets.flush()
            taken = targets.there_before if seen and not may_repeat else 0
            return SinkReport(rows, targets.copies, seen.packed(), targets.outgrown(), taken)


class _SentFrame(NamedTuple):
    future: "Future[BatchResult]"
    size_bytes: int
    end: int
    """The topic's last index when it was opened."""


class _Targets:
    """The topics to which a task writes. Each topic is opened when its first rows arrive."""

    def __init__(self, client: blocking.Client, began: Began, check: bool) -> None:
        self.copies = 0
        self.there_before = 0
        """The number of copies of messages that the topic already contained when it was opened."""
        self._client = client
        self._began = began
        self._check = check
        self._publishers: dict[str, Publisher] = {}
        self._ends: dict[str, int] = {}
        self._under_way: deque[_SentFrame] = deque()
        self._size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for publisher in self._publishers.values():
            run(publisher.close)

    def open(self, topic: str) -> None:
        """Open the topic unless it is open."""
        if topic in self._publishers:
            return
        found = look(self._client, topic)
        if self._check:
            self._began.check(found)
        # For partitions this would take one call per partition. So in a partitioned topic, a row that is sent again
        # after a lost connection counts as already stored before.
        self._ends[topic] = _NO_END if found.partitions else found.last.index

        async def opened() -> Publisher:
            return await self._client.on_loop.publisher(
                topic, on_waiting=_say, delivery_timeout_seconds=None
            ).__aenter__()

        self._publishers[topic] = run(opened)

    def send(self, topic: str, frame: SinkFrame) -> None:
        while self._under_way and self._size_bytes + frame.size_bytes > MAX_IN_FLIGHT_BYTES:
            self._take()
        sending = asyncio.run_coroutine_threadsafe(_send(self._publishers[topic], frame), event_loop())
        self._under_way.append(_SentFrame(sending, frame.size_bytes, self._ends[topic]))
        self._size_bytes += frame.size_bytes

    def is_idle(self) -> bool:
        """Whether no frame is in flight. In this case, a caller need not wait for more rows before it sends its
        rows."""
        return not self._under_way or self._under_way[-1].future.done()

    def flush(self) -> None:
        """Wait until all rows are durable."""
        while self._under_way:
            self._take()

    def _take(self) -> None:
        sent = self._under_way.popleft()
        self._size_bytes -= sent.size_bytes
        result = sent.future.result()
        is_copy = result.verdicts == Verdict.DUP
        self.copies += int(np.count_nonzero(is_copy))
        self.there_before += int(np.count_nonzero(is_copy & (result.indexes <= sent.end)))

    def outgrown(self) -> tuple[str, ...]:
        return tuple(topic for topic in self._publishers if not self._began.is_known_by(look(self._client, topic)))


async def _send(publisher: Publisher, frame: SinkFrame) -> BatchResult:
    """Send a frame. `look` has reached the sidecar before. So if a server that is not a sidecar answers the first call,
    the address is still correct. The call is then repeated for PATIENCE_SECONDS."""
    waiting = WaitingLine()
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return await publisher.send_batch(
                frame.payloads,
                frame.deduplication_ids,
                keys=frame.keys,
                event_times_ms=frame.event_times_ms,
                properties=frame.properties,
            )
        except UnavailableError as e:
            if e.reason != NOT_A_SIDECAR or time.monotonic() > give_up_at:
                raise
            waiting.say(e)
            await asyncio.sleep(e.retry_delay_ms / 1000)


def look(client: blocking.Client, topic: str, patience_seconds: float = PATIENCE_SECONDS) -> admin_pb2.Topic:
    """Return the current state of the topic, once it has recovered. Raises INVALID_OPTION if the topic does not
    recognize copies by their IDs, NotFoundError, UnavailableError after `patience_seconds`."""

    def serving() -> admin_pb2.Topic:
        found = client.admin.topic(topic)
        if found.state != admin_pb2.TOPIC_STATE_SERVING:
            raise error("RECOVERING", f"{topic} is not served yet: {found.why}", retry_delay_ms=RECOVERY_DELAY_MS)
        return found

    found = patiently(serving, patience_seconds)
    if found.deduplication_mode != admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID:
        raise error(
            "INVALID_OPTION",
            f"topic: {topic} has sequence IDs, but the sink writes only to topics of deduplication IDs",
            hint="Create one: `seqdedupe topics create NAME --deduplication-mode deduplication-id`. Rows with producer "
            "names and sequence IDs are for seqdedupe_spark.publish.publish(df).",
        )
    if not found.policy.deduplication_enabled:
        raise error(
            "INVALID_OPTION", f"topic: deduplication is off in {topic}, so a task that is tried again would double rows"
        )
    return found


def _say(why: UnavailableError) -> None:
    _log.warning("waiting: %s", why)


# -- The sink as Spark knows it: a batch, or the batches of a stream, written by tasks and committed on the driver.

_BATCH = "streaming.sql.batchId"
"""Spark's name for the number of a stream's batch, in the properties of all tasks that it runs for the batch."""


@dataclass
class Committed(WriterCommitMessage):
    """The message that a task returns to the driver."""

    written: SinkReport


class _Writing:
    def __init__(self, task: SinkTask) -> None:
        self.task = task

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        return Committed(self.task.run(iterator, context.attemptNumber() if context else 0))

    def _sum_up(self, what: str, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Check and log the results of all tasks together. Rows are durable when their task has ended."""
        found = [message.written for message in messages if isinstance(message, Committed)]
        check_apart(one.seen for one in found)
        rows, copies = sum(one.rows for one in found), sum(one.copies for one in found)
        _log.info("%s: %d rows, of which %d were stored before", what, rows, copies)
        if taken := sum(one.taken for one in found):
            _log.warning(
                "%s: %d rows were not stored, because the topic already had rows of the same messages at the first "
                "try. Perhaps another query, or another branch of this one, writes them too. Then give each row a "
                "deduplicationId that includes its query",
                what,
                taken,
            )
        for topic in sorted({topic for one in found for topic in one.outgrown}):
            _log.warning(
                "%s: %s has forgotten IDs since the write began, so rows of repeated tasks may be stored twice. Make "
                "the topic's window larger than one write",
                what,
                topic,
            )


class BatchWriter(_Writing, DataSourceArrowWriter):
    """Appends a DataFrame."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows. Before anything is written, raises INVALID_OPTION in a `foreachBatch` without a named
        checkpoint."""
        context = TaskContext.get()
        batch = context.getLocalProperty(_BATCH) if context else None
        if batch is not None and self.task.fail_on_forgotten_ids:
            _check_batch(int(batch), self.task.began.batch)
        return super().write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._sum_up("the write", messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing. The rows that were written stay in the topic. If these rows are written again, the topic
        recognizes the rows by their IDs."""


class StreamWriter(_Writing, DataSourceStreamArrowWriter):
    """Appends a stream's batches."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._sum_up(f"batch {batchId}", messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing, as for a batch."""


def _check_batch(batch: int, of_checkpoint: int | None) -> None:
    """Raise INVALID_OPTION unless the checkpoint contains this batch. A stream repeats a batch during which it was
    killed. Only the stream's checkpoint shows whether this may be such a batch."""
    if batch != of_checkpoint:
        found = "no readable one is named" if of_checkpoint is None else f"the named one is at batch {of_checkpoint}"
        raise error(
            "INVALID_OPTION",
            f"checkpointLocation: batch {batch} of a stream is written in foreachBatch, which needs the query's "
            f"checkpoint: {found}",
            hint="Write the stream itself: writeStream.format('seqdedupe'). Or give the write in foreachBatch the "
            "query's checkpointLocation. With failOnForgottenIds = false none is needed; but a replayed batch doubles "
            "rows whose IDs the topic has forgotten.",
        )
