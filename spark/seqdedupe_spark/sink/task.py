"""What a task of the sink does: it publishes its rows. Whoever runs it, however often, a row is stored once."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa

from seqdedupe.client import blocking
from seqdedupe.client.blocking.loop import event_loop, run
from seqdedupe.client.connection import NOT_A_SIDECAR
from seqdedupe.client.publisher import Publisher
from seqdedupe.client.receipts import Verdict
from seqdedupe.client.results import BatchResult
from seqdedupe.errors import UnavailableError, error
from seqdedupe.v1 import admin_pb2
from seqdedupe_spark.planning import PATIENCE_SECONDS, Waiting, patiently
from seqdedupe_spark.sidecar import Sidecar, sidecar_at
from seqdedupe_spark.sink.identity import Seen, Source
from seqdedupe_spark.sink.layout import Layout
from seqdedupe_spark.sink.rows import Frame, frames_of, joined
from seqdedupe_spark.sink.window import Began

MAX_IN_FLIGHT_BYTES = 16 * 1024 * 1024
"""What a task has under way at most: whoever gives it more rows waits."""

RECOVERY_DELAY_MS = 100

_NO_END = 2**63 - 1

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Written:
    """What a task has done."""

    rows: int = 0
    copies: int = 0
    """Rows of those that the topic had already."""
    seen: dict[Source, bytes] = field(default_factory=dict)
    """The identities of rows that come from a source."""
    outgrown: tuple[str, ...] = ()
    """Topics whose window does not reach back any more to where the write began."""
    taken: int = 0
    """Copies whose identity, a message of a source, others had taken: this is the first try, and they were there."""


@dataclass(frozen=True)
class SinkTask:
    """What all tasks of a write have in common: pickled."""

    service: str | Sidecar
    layout: Layout
    began: Began
    fail_on_forgotten_ids: bool = True

    def check_topic(self) -> None:
        """Raises INVALID_OPTION or NotFoundError for a topic that takes no deduplication IDs, on the driver, before
        there is a task. A sidecar that does not answer now is waited for by the tasks."""
        if self.layout.topic is None:
            return
        with sidecar_at(self.service).connect() as client, contextlib.suppress(UnavailableError):
            look(client, self.layout.topic, 0)

    def run(self, batches: Iterable[pa.RecordBatch], attempt: int = 0) -> Written:
        """Publishes all rows; returns when they are durable. A sidecar that goes away meanwhile is waited for, for as
        long as it takes.

        Raises IDS_FORGOTTEN before anything is written if the rows may have been written before and a topic may have
        forgotten that, INVALID_OPTION or NotFoundError for a topic that takes no deduplication IDs, UnavailableError
        for a sidecar that is away at the start, and what is wrong with the rows.
        """
        may_repeat = self.began.may_repeat or attempt > 0
        check = self.fail_on_forgotten_ids and may_repeat
        seen = Seen()
        rows = 0
        with sidecar_at(self.service).connect() as client, _Targets(client, self.began, check) as targets:
            if self.layout.topic is not None:
                targets.open(self.layout.topic)
            for batch in joined(batches, targets.is_idle):
                rows += len(batch)
                frames = list(frames_of(batch, self.layout, seen))
                # Rows of one topic are not sent if another one of theirs is refused.
                for topic in dict.fromkeys(topic for topic, _ in frames):
                    targets.open(topic)
                for topic, frame in frames:
                    targets.send(topic, frame)
            targets.flush()
            taken = targets.there_before if seen and not may_repeat else 0
            return Written(rows, targets.copies, seen.packed(), targets.outgrown(), taken)


class _Sent(NamedTuple):
    future: "Future[BatchResult]"
    size_bytes: int
    end: int
    """The topic's last index when it was opened."""


class _Targets:
    """The topics that a task writes to, each opened when its first rows come."""

    def __init__(self, client: blocking.Client, began: Began, check: bool) -> None:
        self.copies = 0
        self.there_before = 0
        """Copies of what the topic had when it was opened."""
        self._client = client
        self._began = began
        self._check = check
        self._publishers: dict[str, Publisher] = {}
        self._ends: dict[str, int] = {}
        self._under_way: deque[_Sent] = deque()
        self._size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        for publisher in self._publishers.values():
            run(publisher.close)

    def open(self, topic: str) -> None:
        """Does nothing for a topic that is open."""
        if topic in self._publishers:
            return
        found = look(self._client, topic)
        if self._check:
            self._began.check(found)
        # Of partitions that would be one call each: there what is sent again after a lost connection is taken for it.
        self._ends[topic] = _NO_END if found.partitions else found.last.index

        async def opened() -> Publisher:
            return await self._client.on_loop.publisher(
                topic, on_waiting=_say, delivery_timeout_seconds=None
            ).__aenter__()

        self._publishers[topic] = run(opened)

    def send(self, topic: str, frame: Frame) -> None:
        while self._under_way and self._size_bytes + frame.size_bytes > MAX_IN_FLIGHT_BYTES:
            self._take()
        sending = asyncio.run_coroutine_threadsafe(_send(self._publishers[topic], frame), event_loop())
        self._under_way.append(_Sent(sending, frame.size_bytes, self._ends[topic]))
        self._size_bytes += frame.size_bytes

    def is_idle(self) -> bool:
        """Whether nothing is under way: whoever has rows need not wait for more of them."""
        return not self._under_way or self._under_way[-1].future.done()

    def flush(self) -> None:
        """Until all is durable."""
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


async def _send(publisher: Publisher, frame: Frame) -> BatchResult:
    """`look` has talked to the sidecar, so that an answer of something else to what the publisher begins with does not
    mean a wrong address: it is waited out, for PATIENCE_SECONDS."""
    waiting = Waiting()
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
    """The topic as it is now, once it has recovered. Raises INVALID_OPTION if it does not know copies by their IDs,
    NotFoundError, UnavailableError after `patience_seconds`."""

    def serving() -> admin_pb2.Topic:
        found = client.admin.topic(topic)
        if found.state != admin_pb2.TOPIC_STATE_SERVING:
            raise error("RECOVERING", f"{topic} is not served yet: {found.why}", retry_delay_ms=RECOVERY_DELAY_MS)
        return found

    found = patiently(serving, patience_seconds)
    if found.deduplication_mode != admin_pb2.DEDUPLICATION_MODE_DEDUPLICATION_ID:
        raise error(
            "INVALID_OPTION",
            f"topic: {topic} has sequence IDs, the sink writes to topics of deduplication IDs",
            hint="Create one: `seqdedupe topics create NAME --deduplication-mode deduplication-id`. Rows with producer "
            "names and sequence IDs are for seqdedupe_spark.publish.publish(df).",
        )
    if not found.policy.deduplication_enabled:
        raise error(
            "INVALID_OPTION", f"topic: deduplication is off in {topic}: a task that is tried again would double"
        )
    return found


def _say(why: UnavailableError) -> None:
    _log.warning("waiting: %s", why)
