"""The client for threads: the same names as `seqdedupe.client`, and calls that block.

All network work of a process runs on one event loop in one daemon thread, which is never closed (gRPC has one queue
a process). Messages are gathered and sealed in the caller's thread; only sealed batches cross.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar

from seqdedupe.client import admin as _admin
from seqdedupe.client import client as _client
from seqdedupe.client import reader as _reader
from seqdedupe.client.builder import Keys, Numbers, Payloads, Properties
from seqdedupe.client.client import Located, TopicEnds
from seqdedupe.client.config import ProducerConfig
from seqdedupe.client.connection import DEFAULT_ADDRESS
from seqdedupe.client.producer import ProducerBase
from seqdedupe.client.reader import Message, Start, StoredBatch
from seqdedupe.client.receipts import BatchResult, PendingBatch, Published
from seqdedupe.errors import error
from seqdedupe.message_id import Position
from seqdedupe.v1 import admin_pb2

__all__ = ["Admin", "BatchReceipt", "Client", "Producer", "Reader", "Receipt"]

T = TypeVar("T")

_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def _event_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="seqdedupe-client", daemon=True).start()
        return _loop


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Runs it on the loop and waits. If the wait is interrupted, so is the work."""
    future = asyncio.run_coroutine_threadsafe(work, _event_loop())
    try:
        return future.result()
    finally:
        future.cancel()


def _run_on_loop(begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """As `_run`, for work that must also begin on the loop: where a connection is made."""

    async def work() -> T:
        return await begin()

    return _run(work())


def _wait(pending: PendingBatch, timeout_seconds: float | None) -> None:
    if pending.settled:
        return
    event = threading.Event()
    pending.when_settled(event.set)
    if not event.wait(timeout_seconds):
        raise error("OUTCOME_UNKNOWN", f"no receipt within {timeout_seconds} seconds; the client goes on sending")


class Receipt:
    """The receipt of one message."""

    __slots__ = ("_pending", "_row")

    def __init__(self, pending: PendingBatch, row: int) -> None:
        self._pending = pending
        self._row = row

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._pending.settled

    def result(self, timeout_seconds: float | None = None) -> Published:
        """Waits for it. Raises what the message failed with, or OutcomeUnknownError if there is nothing yet."""
        _wait(self._pending, timeout_seconds)
        return self._pending.result()[self._row]


class BatchReceipt:
    """The receipt of a batch."""

    __slots__ = ("_pending",)

    def __init__(self, pending: PendingBatch) -> None:
        self._pending = pending

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._pending.settled

    def result(self, timeout_seconds: float | None = None) -> BatchResult:
        """Waits for it. Raises what the batch failed with, or OutcomeUnknownError if there is nothing yet."""
        _wait(self._pending, timeout_seconds)
        return self._pending.result()


class Producer(ProducerBase):
    """As `seqdedupe.client.Producer`, with calls that block. Threads may share it."""

    def __init__(self, address: str, topic: str, name: str, config: ProducerConfig) -> None:
        super().__init__(address, topic, name, config)
        self._lock = threading.Lock()  # for what is gathered; the loop's thread must never wait for it
        self._room = threading.Condition()  # held for moments only
        # The first pair is written under the lock, the second by the loop's thread.
        self._handed_over_batches = self._handed_over_bytes = 0
        self._settled_batches = self._settled_bytes = 0
        self._is_watched = False  # under the lock: the loop looks after the batch that is being gathered

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def open(self) -> None:
        """Starts the session, see `seqdedupe.client.Producer.open`."""
        self._begin()
        try:
            _run(self._session.start())
        except BaseException:
            self._state = "closed"
            raise
        self._builder = self._new_builder()

    def send(
        self,
        payload: bytes | None,
        sequence_id: int | None = None,
        *,
        key: bytes | str | None = None,
        event_time: datetime | int | None = None,
        properties: Properties | None = None,
    ) -> Receipt:
        """Queues a message, see `seqdedupe.client.Producer.send`; waits only for room in the queue."""
        self._lock.acquire()  # `with` costs twice as much, and this is called for every message
        try:
            if self._must_pause:
                self._pause()
            pending, row = self._builder.append(payload, sequence_id, key, event_time, properties)
            if row == 0:
                self._begin_batch()
        finally:
            self._lock.release()
        return Receipt(pending, row)

    def send_batch(
        self,
        payloads: Payloads,
        sequence_ids: Numbers | None = None,
        *,
        keys: Keys | None = None,
        event_times_ms: Numbers | None = None,
        properties: Sequence[Properties | None] | None = None,
    ) -> BatchReceipt:
        """Queues a ready batch, see `seqdedupe.client.Producer.send_batch`."""
        with self._lock:
            if self._must_pause:
                self._pause()
            return BatchReceipt(self._builder.add_columns(payloads, sequence_ids, keys, event_times_ms, properties))

    def flush(self) -> None:
        """Waits until all that was sent before has its receipts. Raises what a message failed with."""
        with self._lock:
            self._builder.seal()
        _run(self._session.flush())

    def close(self) -> None:
        """Flushes and ends, see `seqdedupe.client.Producer.close`."""
        if self._end():
            _run(self._session.close())

    def abort(self) -> None:
        """Ends at once: what has no receipt fails with `OutcomeUnknownError`."""
        self._end()
        _run(self._session.stop())

    def _end(self) -> bool:
        with self._lock:
            was_open = self._state == "open"
            self._state = "closed"
            self._must_pause = True
            self._builder.seal()
        return was_open

    def _begin_batch(self) -> None:
        if self._builder.is_empty:
            return
        if not self._is_watched:
            self._is_watched = True
            nothing_in_flight = self._handed_over_batches == self._settled_batches
            begin = self._look if nothing_in_flight else self._watch
            _event_loop().call_soon_threadsafe(begin, self._builder.pending)

    def _watch(self, pending: PendingBatch) -> None:
        """On the loop's thread: looks after a while whether this batch still lingers, and so on while there is any."""
        _event_loop().call_later(self._config.linger_ms / 1000, self._look, pending)

    def _look(self, pending: PendingBatch) -> None:
        if not self._lock.acquire(blocking=False):  # a caller is at it, and the loop must not wait
            self._watch(pending)
            return
        try:
            if self._builder.pending is pending:
                self._builder.seal()
            self._is_watched = not self._builder.is_empty
            if self._is_watched:
                self._watch(self._builder.pending)
        finally:
            self._lock.release()

    def _emit(self, pending: PendingBatch) -> None:
        size_bytes = pending.size_bytes
        self._must_pause = True
        self._handed_over_batches += 1
        self._handed_over_bytes += size_bytes

        def settled() -> None:
            with self._room:
                self._settled_batches += 1
                self._settled_bytes += size_bytes
                self._room.notify_all()

        pending.when_settled(settled)
        _event_loop().call_soon_threadsafe(self._session.add, pending)

    def _has_room(self) -> bool:
        return (
            self._handed_over_batches - self._settled_batches < self._config.max_in_flight_batches
            and self._handed_over_bytes - self._settled_bytes < self._config.max_in_flight_bytes
        )

    def _pause(self) -> None:
        """With the lock, which it lets go of while it waits: closing must not wait for a sender."""
        while not self._has_room():
            self._lock.release()
            try:
                with self._room:
                    self._room.wait_for(self._has_room)
            finally:
                self._lock.acquire()
        self._check_open()
        self._must_pause = False


class Reader:
    """As `seqdedupe.client.Reader`, with calls that block: `for message in reader`. It belongs to one thread."""

    def __init__(self, address: str, topic: str, start: Start, follow: bool, stop_index: int | None) -> None:
        self._reader = _reader.Reader(address, topic, start, follow=follow, stop_index=stop_index)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def topic(self) -> str:
        return self._reader.topic

    @property
    def position(self) -> Position | None:
        """After the last message handed out; before the first, where it was told to start if that is known."""
        return self._reader.position

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        while (message := self._reader.next_in_hand()) is None:
            if not self._fetch():
                raise StopIteration
        return message

    def _fetch(self) -> bool:
        # What was received already needs no hop to the loop's thread, which costs more than the batch.
        return self._reader.take_record() or _run(self._reader.fetch())

    def batches(self) -> Iterator[StoredBatch]:
        """Whole batches as stored; the first and last are cut to what was asked for."""
        while (stored := self.next_batch()) is not None:
            yield stored

    def next_batch(self) -> StoredBatch | None:
        """The next whole batch, or what single messages have left of one; None at the end."""
        return self._reader.rest_in_hand() if self._reader.has_in_hand() or self._fetch() else None

    def close(self) -> None:
        """Ends it; another thread that waits in it gets the end."""
        _run(self._reader.close())


class Admin:
    """As `seqdedupe.client.Admin`, with calls that block."""

    def __init__(self, client: _client.Client) -> None:
        self._client = client

    def _run(self, call: Callable[[_admin.Admin], Coroutine[Any, Any, T]]) -> T:
        return _run_on_loop(lambda: call(self._client.admin))

    def create_topic(self, topic: str, *, deduplication_enabled: bool = True) -> admin_pb2.Topic:
        return self._run(lambda admin: admin.create_topic(topic, deduplication_enabled=deduplication_enabled))

    def delete_topic(self, topic: str) -> None:
        self._run(lambda admin: admin.delete_topic(topic))

    def topic(self, topic: str) -> admin_pb2.Topic:
        return self._run(lambda admin: admin.topic(topic))

    def topics(self) -> list[admin_pb2.Topic]:
        return self._run(lambda admin: admin.topics())

    def set_topic_policy(self, topic: str, *, deduplication_enabled: bool) -> admin_pb2.Topic:
        return self._run(lambda admin: admin.set_topic_policy(topic, deduplication_enabled=deduplication_enabled))

    def producers(self, topic: str) -> list[admin_pb2.Producer]:
        return self._run(lambda admin: admin.producers(topic))

    def producer(self, topic: str, name: str) -> admin_pb2.Producer:
        return self._run(lambda admin: admin.producer(topic, name))

    def snapshot(self, topic: str) -> Position:
        return self._run(lambda admin: admin.snapshot(topic))

    def version(self) -> admin_pb2.GetVersionResponse:
        return self._run(lambda admin: admin.version())


class Client:
    """As `seqdedupe.client.Client`, with calls that block. Threads may share it."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self.address = address
        self._client = _client.Client(address)
        self.admin = Admin(self._client)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of this object's connection. Producers and readers are closed by themselves."""
        _run(self._client.close())

    def producer(self, topic: str, name: str, config: ProducerConfig = ProducerConfig()) -> Producer:  # noqa: B008
        """A producer, to be entered, see `Producer`."""
        return Producer(self.address, topic, name, config)

    def reader(
        self, topic: str, start: Start = "earliest", *, follow: bool = False, stop_index: int | None = None
    ) -> Reader:
        """A reader, see `Reader`."""
        return Reader(self.address, topic, start, follow, stop_index)

    def ends(self, topic: str) -> TopicEnds:
        """What the topic holds now. Raises NotFoundError."""
        return self._call(lambda client: client.ends(topic))

    def locate_time(self, topic: str, publish_time_ms: int) -> Located:
        """The first message published at or after a time, see `seqdedupe.client.Client.locate_time`."""
        return self._call(lambda client: client.locate_time(topic, publish_time_ms))

    def locate_bytes(self, topic: str, from_index: int, size_bytes: int) -> Located:
        """Where about so many bytes end, see `seqdedupe.client.Client.locate_bytes`."""
        return self._call(lambda client: client.locate_bytes(topic, from_index, size_bytes))

    def _call(self, call: Callable[[_client.Client], Coroutine[Any, Any, T]]) -> T:
        return _run_on_loop(lambda: call(self._client))

    def wait_ready(self, timeout_seconds: float) -> None:
        """Until the sidecar says that it serves. Raises UnavailableError if it does not in time."""
        _run(self._client.wait_ready(timeout_seconds))
