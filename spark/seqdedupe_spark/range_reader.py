"""Reads a topic's range, in the process that needs the messages."""

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
"""If a server that is not a sidecar answers, a new reader tries again for this time."""


def read_stored(service: Service, range: TopicRange, timeout_seconds: float | None = None) -> Iterator[StoredBatch]:
    """Yield all messages of a range in order, as the log stores them. The first and the last batch are cut to the
    range.

    After a lost connection the reader continues automatically, without a time limit. With `timeout_seconds` it raises
    UnavailableError if no message has arrived for that time. Raises NOT_A_SIDECAR if from the beginning another server
    has answered for PATIENCE_SECONDS; PositionError if messages of the range are trimmed or the topic was recreated;
    NotFoundError if the topic was deleted; DamagedError for damaged messages.
    """
    if not len(range):
        return
    if isinstance(service, PulsarCluster):
        # The packages for brokers need not be installed.
        cluster.prepare()
        from seqdedupe_spark.cluster import cluster_client

        yield from cluster_client.read_stored(service, range, timeout_seconds)
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
    """Return the message ID of one message. The message must be read, because in some logs its ID does not follow from
    the index. Raises the errors of `read_stored`."""
    one = TopicRange(topic, Position.before(incarnation, index), Position.before(incarnation, index + 1))
    [stored] = read_stored(service, one, timeout_seconds)
    return stored.message_id(0)


def _next_batch(reader: blocking.Reader) -> StoredBatch | None:
    """Return the next batch of a reader that may not have begun yet. The planner of the range has reached the sidecar.
    So if a server that is not a sidecar answers, the address is still correct, and the reader waits for the sidecar."""
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
    """Yield the batches. If no batch arrives for this time, a watcher closes the reader, which ends a waiting call."""
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
    """Yield the same messages as Arrow batches of about MAX_ROWS rows or MAX_BYTES, with the columns of `schema`."""
    for stored in joined(read_stored(service, range, timeout_seconds)):
        yield to_arrow(stored, range.topic, schema)


def joined(batches: Iterable[StoredBatch]) -> Iterator[list[StoredBatch]]:
    """Yield the batches in groups of about MAX_ROWS rows or MAX_BYTES, as soon as one of these limits is reached."""
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
