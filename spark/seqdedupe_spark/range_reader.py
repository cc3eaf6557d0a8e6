"""Reading of a topic's range, in the process that needs its messages."""

import threading
import time
from collections.abc import Iterable, Iterator

import pyarrow as pa

from seqdedupe.client import blocking
from seqdedupe.client.connection import NOT_A_SIDECAR, Backoff
from seqdedupe.client.message import StoredBatch
from seqdedupe.errors import UnavailableError, error
from seqdedupe.message_id import MessageId, Position
from seqdedupe_spark import cluster
from seqdedupe_spark.message_columns import SCHEMA, to_arrow
from seqdedupe_spark.ranges import TopicRange
from seqdedupe_spark.service import PulsarCluster, Service, sidecar_at

MAX_ROWS = 16_384
"""Stored batches are joined until they have this number of rows. A single batch may have more."""

MAX_BYTES = 4 * 1024 * 1024
"""Or until their payloads, keys and properties have this number of bytes."""

PATIENCE_SECONDS = 30.0
"""The time for which a new reader asks again while something else than a sidecar answers."""


def read_stored(service: Service, range: TopicRange, timeout_seconds: float | None = None) -> Iterator[StoredBatch]:
    """Yield all messages of a range in order, as the log stores them. The first and last batch are cut to the range.

    After a lost connection it reads on automatically, without a time limit. With `timeout_seconds` it raises
    UnavailableError when no message has come for that time. Raises NOT_A_SIDECAR if something else has answered from
    the beginning, for PATIENCE_SECONDS; PositionError if messages of the range are trimmed or the topic was deleted and
    created again; NotFoundError if it was deleted; DamagedError for damaged messages.
    """
    if not len(range):
        return
    if isinstance(service, PulsarCluster):
        # The packages for brokers need not be installed.
        cluster.prepare()
        from seqdedupe_spark.cluster import broker_reader

        yield from broker_reader.read_stored(service, range, timeout_seconds)
        return
    client = sidecar_at(service).connect()
    with client.reader(range.topic, range.start, stop_index=range.stop_index) as reader:
        if timeout_seconds is None:
            if (first := _next_batch(reader)) is not None:
                yield first
                yield from reader.batches()
        else:
            yield from _until_silent(reader, range, timeout_seconds)


def message_id_at(
    service: Service, topic: str, incarnation: int, index: int, timeout_seconds: float | None = None
) -> MessageId:
    """Return the ID of one message. This takes a read: in some logs the index does not show it. Raises as
    `read_stored`."""
    one = TopicRange(topic, Position.before(incarnation, index), Position.before(incarnation, index + 1))
    [stored] = read_stored(service, one, timeout_seconds)
    return stored.message_id(0)


def _next_batch(reader: blocking.Reader) -> StoredBatch | None:
    """Return the next batch of a reader that may have to begin. The planner of the range has reached the sidecar. So an
    answer of something else does not mean a wrong address, and is waited out."""
    backoff = Backoff(0.02, 1.0)
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return reader.next_batch()
        except UnavailableError as e:
            if e.reason != NOT_A_SIDECAR or time.monotonic() > give_up_at:
                raise
        time.sleep(backoff.next_seconds())


def _until_silent(reader: blocking.Reader, range: TopicRange, timeout_seconds: float) -> Iterator[StoredBatch]:
    """Yield the batches. If none has come for this time, a watcher closes the reader, which ends a call that waits in
    it."""
    is_over = threading.Event()
    asked: float | None = None  # the time since which a batch is waited for

    def watch() -> None:
        while not is_over.wait(timeout_seconds / 4):
            if asked is not None and time.monotonic() - asked > timeout_seconds:
                is_over.set()
                reader.close()

    watcher = threading.Thread(target=watch, name="seqdedupe-read-timeout", daemon=True)
    watcher.start()
    try:
        while True:
            asked = time.monotonic()
            stored = _next_batch(reader)
            asked = None
            if stored is None:
                break
            yield stored
        if is_over.is_set():
            raise error("UNREACHABLE", f"no message of {range} has come for {timeout_seconds:g} seconds")
    finally:
        is_over.set()
        watcher.join()


def read_range(
    service: Service, range: TopicRange, schema: pa.Schema = SCHEMA, timeout_seconds: float | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the same as Arrow batches of about MAX_ROWS rows or MAX_BYTES, with the columns of `schema`."""
    for stored in joined(read_stored(service, range, timeout_seconds)):
        yield to_arrow(stored, range.topic, schema)


def joined(batches: Iterable[StoredBatch]) -> Iterator[list[StoredBatch]]:
    """Yield batches in groups of about MAX_ROWS rows or MAX_BYTES, when the first limit is reached."""
    group: list[StoredBatch] = []
    rows = size = 0
    for stored in batches:
        batch = stored.batch
        group.append(stored)
        rows += len(stored)
        size += len(batch.payloads.data) + len(batch.keys.data)
        size += len(batch.property_names.data) + len(batch.property_values.data)
        if rows >= MAX_ROWS or size >= MAX_BYTES:
            yield group
            group, rows, size = [], 0, 0
    if group:
        yield group
