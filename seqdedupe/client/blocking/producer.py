"""The producer for threads, and its receipts. Begin with `Producer`, at the end."""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from seqdedupe.batch import Batch
from seqdedupe.client.blocking.loop import check_is_there, event_loop, run
from seqdedupe.client.builder import Builder, Keys, Numbers, Payloads, Properties, PropertyRows, key_bytes
from seqdedupe.client.pending import BatchResult, PendingBatch, Published, SpreadBatch, Told
from seqdedupe.client.producer import PartitionedProducer, ProducerBase, TopicProducer
from seqdedupe.client.producer_session import ProducerConfig, Session
from seqdedupe.client.route import OnWaiting
from seqdedupe.client.stream import SharedConnections
from seqdedupe.errors import error

# -- The receipts of the producer for threads.


def _wait(pending: PendingBatch | SpreadBatch, timeout_seconds: float | None, *, until_durable: bool = False) -> None:
    if pending.durable or (pending.settled and not until_durable):
        return
    check_is_there()
    event = threading.Event()
    when = pending.when_durable if until_durable else pending.when_settled
    when(event.set)
    if not event.wait(timeout_seconds):
        why = pending.last_refusal
        because = "" if why is None else f": {why}"
        what = "not durable" if pending.settled else "no receipt"
        raise error(
            "OUTCOME_UNKNOWN",
            f"{what} within {timeout_seconds:g} seconds{because}; the client continues to send",
            hint=None if why is None else why.hint,
        )


class Receipt(Told):
    """The receipt of one message."""

    __slots__ = ("_row",)
    _pending: PendingBatch

    def __init__(self, pending: PendingBatch, row: int) -> None:
        self._pending = pending  # set here without super(): a receipt is made for each message
        self._row = row

    def result(self, timeout_seconds: float | None = None) -> Published:
        """Wait for the receipt, and return the outcome. Raises the message's failure, or OutcomeUnknownError if no
        receipt arrives within `timeout_seconds`."""
        _wait(self._pending, timeout_seconds)
        return self._pending.published(self._row)

    def until_durable(self, timeout_seconds: float | None = None) -> Published:
        """Wait until the message is durable, and return its outcome. Errors are the same as those of `result`. See also
        `Receipt.until_durable` of the producer for asyncio."""
        _wait(self._pending, timeout_seconds, until_durable=True)
        return self._pending.durable_published(self._row)


class BatchReceipt(Told):
    """The receipt of a batch."""

    __slots__ = ()

    def result(self, timeout_seconds: float | None = None) -> BatchResult:
        """Wait for the receipt, and return the outcome. Raises the batch's failure, or OutcomeUnknownError if no
        receipt arrives within `timeout_seconds`."""
        _wait(self._pending, timeout_seconds)
        return self._pending.result()

    def until_durable(self, timeout_seconds: float | None = None) -> BatchResult:
        """Wait until all messages are durable, and return their outcome. See `Receipt.until_durable`."""
        _wait(self._pending, timeout_seconds, until_durable=True)
        return self._pending.durable_result()


# -- The producer.

_producers: "weakref.WeakSet[BlockingTopicProducer | BlockingPartitionedProducer]" = weakref.WeakSet()


def _after_fork() -> None:
    """Prepare all producers in a forked child, which has no loop thread. Afterwards the next `send` raises an error,
    and does not wait for the missing thread."""
    for producer in _producers:
        producer.after_fork()


os.register_at_fork(after_in_child=_after_fork)


class BlockingTopicProducer(TopicProducer):
    """The `TopicProducer` for threads. The threads of callers gather and seal messages, and pass sealed batches to the
    loop's thread."""

    def __init__(self, *of_topic: Any) -> None:
        super().__init__(*of_topic)
        self._lock = threading.RLock()  # guards the gathered messages; the loop's thread must never wait for it
        self._room = threading.Condition()  # held only briefly
        # The first pair is written under the lock, the second by the loop's thread.
        self._handed_over_batches = self._handed_over_bytes = 0
        self._settled_batches = self._durable_bytes = 0
        self._is_watched = False  # under the lock: whether the loop watches the batch being gathered
        _producers.add(self)

    def after_fork(self) -> None:
        self._lock = threading.RLock()
        self.must_pause = True

    def send(
        self,
        payload: bytes | None,
        sequence_id: int | None,
        key: bytes | str | None,
        event_time: datetime | int | None,
        properties: Properties | None,
    ) -> Receipt:
        while True:
            try:
                self._lock.acquire()  # `with` costs twice as much, and this is called for every message
                if not self.must_pause or self._goes_on():
                    pending, row = self.builder.append(payload, sequence_id, key, event_time, properties)
                    if row == 0:
                        self.begin_batch()
                    self._lock.release()
                    return Receipt(pending, row)
                self._lock.release()
            except BaseException as e:
                self._check_interrupt(e)
                with suppress(RuntimeError):  # the interrupt came before the lock was acquired, or after
                    self._lock.release()
                raise
            self._wait_for_room()

    def send_batch(self, *columns: Any) -> BatchReceipt:
        while True:
            with self._lock:
                if not self.must_pause or self._goes_on():
                    with self._interrupts():
                        return BatchReceipt(self.builder.add_columns(*columns))
            self._wait_for_room()

    def add_batch(self, batch: Batch) -> PendingBatch:
        with self._lock, self._interrupts():
            return super().add_batch(batch)

    def flush(self) -> None:
        self.seal()
        run(self.session.flush)

    def close(self) -> None:
        if self.end():
            run(self.session.close)

    def abort(self) -> None:
        self.end()
        run(self.session.stop)

    def end(self) -> bool:
        """Accept no more messages. Return whether the producer was open."""
        with self._lock:
            was_open = self._state == "open"
            self._state = "closed"
            self.must_pause = True
            self.seal()
        return was_open

    def seal(self) -> None:
        """Seal the gathered messages, and pass them on."""
        with self._lock, self._interrupts():
            self.builder.seal()

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        try:
            yield
        except BaseException as e:
            self._check_interrupt(e)
            raise

    def _check_interrupt(self, failure: BaseException) -> None:
        """End the producer after an interrupt (Ctrl-C). An interrupt can occur between any two steps. After an
        interrupt, a message may be incomplete, or a batch may be missing from all queues. So the producer sends nothing
        more, and no caller may wait for a receipt of such a batch."""
        if isinstance(failure, Exception):
            return
        with self._lock:
            left, self.builder = self.builder, self._new_builder()
            self.builder.last_sequence_id = left.last_sequence_id
            self.must_pause = True
            event_loop().call_soon_threadsafe(self._end_interrupted, left)

    def _end_interrupted(self, left: Builder) -> None:
        """End the session, on the loop's thread. Batches passed to the session before the interrupt still get
        receipts."""
        self.session.end_before(left.leaving or left.pending, f"producer {self.name!r} was interrupted in mid-send")
        for pending in (left.leaving, left.pending):
            if pending is not None and not pending.settled:
                self.session.add(pending)  # which fails it
        with self._room:
            self._room.notify_all()

    def begin_batch(self) -> None:
        if self.builder.is_empty:
            return
        if not self._is_watched:
            self._is_watched = True
            nothing_in_flight = self._handed_over_batches == self._settled_batches
            begin = self._seal_gathered if nothing_in_flight else self._watch
            event_loop().call_soon_threadsafe(begin, self.builder.pending)

    def _watch(self, pending: PendingBatch) -> None:
        """Check, on the loop's thread and after the linger time, whether the gathered batch must still wait for more
        messages. Repeat this while there is a gathered batch."""
        event_loop().call_later(self._linger.seconds, self._look, pending)

    def _look(self, pending: PendingBatch) -> None:
        # A caller may add messages meanwhile: then the answer is slightly out of date.
        if self.builder.pending is pending and not self._linger.is_over(pending, self.builder.rows):
            self._watch(pending)
        else:
            self._seal_gathered(pending)

    def _seal_gathered(self, pending: PendingBatch) -> None:
        if not self._lock.acquire(blocking=False):  # a caller is adding messages, and the loop must not wait
            self._watch(pending)
            return
        try:
            if self.builder.pending is pending:
                self.builder.seal()
            self._is_watched = not self.builder.is_empty
            if self._is_watched:
                self._watch(self.builder.pending)
        finally:
            self._lock.release()

    def _emit(self, pending: PendingBatch) -> None:
        size_bytes = pending.size_bytes
        self.must_pause = True
        self._handed_over_batches += 1
        self._handed_over_bytes += size_bytes

        def settled() -> None:
            with self._room:
                self._settled_batches += 1
                self._room.notify_all()

        def durable() -> None:
            with self._room:
                self._durable_bytes += size_bytes
                self._room.notify_all()

        pending.when_settled(settled)
        pending.when_durable(durable)
        event_loop().call_soon_threadsafe(self.session.add, pending)

    def _has_room(self) -> bool:
        return self.session.failure is not None or (
            self._handed_over_batches - self._settled_batches < self.config.max_in_flight_batches
            and self._handed_over_bytes - self._durable_bytes < self.config.max_in_flight_bytes
        )

    def _goes_on(self) -> bool:
        """Return whether there is room for more messages. The caller holds the lock. Raises the error that ended the
        producer."""
        check_is_there()
        if not self._has_room():
            return False
        self.check_open()
        self.must_pause = False
        return True

    def wait_until_it_goes_on(self) -> None:
        """Wait until there is room for more."""
        while True:
            with self._lock:
                if not self.must_pause or self._goes_on():
                    return
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        """Wait for room in the queue without holding the lock. So `close` does not have to wait for a sender."""
        with self._room:
            self._room.wait_for(self._has_room)


class BlockingPartitionedProducer(PartitionedProducer[BlockingTopicProducer]):
    """The `PartitionedProducer` for threads. The calls of all threads run one after the other."""

    def __init__(self, topic: BlockingTopicProducer, partitions: int) -> None:
        super().__init__(topic, partitions)
        self._is_sending = False
        self.after_fork()
        _producers.add(self)

    def after_fork(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Run one call at a time. If a call is interrupted, the caller cannot learn which messages were sent, and the
        producer accepts no further calls."""
        with self._lock:
            if self._is_sending:
                what = f"producer {self.parts[0].name!r} was interrupted in mid-send; what has no receipt by now may"
                raise error("OUTCOME_UNKNOWN", f"{what} still become durable, or not")
            self._is_sending = True
            try:
                yield
            except Exception:
                self._is_sending = False
                raise
            self._is_sending = False

    def send(
        self, payload: bytes | None, sequence_id: int | None, key: bytes | str | None, *of_message: Any
    ) -> Receipt:
        with self._turn():
            sequence_id, key = self.numbers.next_id(sequence_id), key_bytes(key)
            part = self.parts[self.numbers.partition(key)]
            self._room(part)
            receipt = part.send(payload, sequence_id, key, *of_message)
            self.numbers.sent(sequence_id, () if receipt._row else (receipt._pending,))
            return receipt

    def send_batch(self, payloads: Payloads, sequence_ids: Numbers | None, *columns: Any) -> BatchReceipt:
        with self._turn():
            batch = self.numbers.check_columns(payloads, sequence_ids, *columns)
            some = [(self.parts[k], rows) for k, rows in self.numbers.rows_by_partition(batch)]
            for part, _ in some:
                self._room(part)
            sent = [(rows, part.add_batch(batch.take(rows))) for part, rows in some]
            self.numbers.sent_batch(batch, [pending for _, pending in sent])
            return BatchReceipt(SpreadBatch(batch.sequence_ids, sent))

    def _room(self, part: BlockingTopicProducer) -> None:
        if part.must_pause:  # once a batch
            part.wait_until_it_goes_on()
            part.must_pause = True
            for other in self.parts:
                other.check_open()
            part.must_pause = False

    def flush(self) -> None:
        for part in self.parts:
            part.seal()
        self._all(Session.flush)

    def close(self) -> None:
        were_open = [part.end() for part in self.parts]
        if any(were_open):
            self._all(Session.close)

    def abort(self) -> None:
        for part in self.parts:
            part.end()
        self._all(Session.stop)

    def _all(self, call: Callable[[Session], Coroutine[Any, Any, None]]) -> None:
        """Make this call in the sessions of all partitions. Raise the first error, in the order of the partitions."""

        async def do() -> list[BaseException | None]:
            return await asyncio.gather(*(call(part.session) for part in self.parts), return_exceptions=True)

        for end in run(do):
            if end is not None:
                raise end


class Producer(ProducerBase):
    """The same as `seqdedupe.client.Producer`, but with calls that block. Several threads may share a producer."""

    _sends: BlockingTopicProducer | BlockingPartitionedProducer

    def __init__(
        self,
        connections: SharedConnections,
        topic: str,
        name: str,
        config: ProducerConfig,
        on_waiting: OnWaiting | None = None,
    ) -> None:
        self._topic = BlockingTopicProducer(connections, topic, name, config, on_waiting)
        super().__init__(self._topic, connections.sidecars)

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
        """Start the session. Raises `UnavailableError` if the session has not started within 30 seconds. If the sidecar
        refuses the session, raises the sidecar's error."""
        self._topic.begin()
        try:
            run(lambda: self._start(self._topic, BlockingPartitionedProducer))
        except BaseException:
            self._topic.give_up()
            raise

    def send(
        self,
        payload: bytes | None,
        sequence_id: int | None = None,
        *,
        key: bytes | str | None = None,
        event_time: datetime | int | None = None,
        properties: Properties | None = None,
    ) -> Receipt:
        """Queue a message, and return its receipt, which can be waited for. Waits only for room in the queue.

        Without a `sequence_id` the message gets `last_sequence_id + 1`. Explicit IDs must rise from message to message.
        The first ID may have any value. A message at or below `persisted_sequence_id` is answered DUP. `event_time` is
        a timezone-aware datetime or the number of milliseconds since 1970. A payload has at most 5 MiB.

        In a partitioned topic, `sequence_id` must be given as long as higher IDs are persisted. Otherwise a new message
        could get the ID of a persisted message.

        Raises `InvalidRequestError` for a message that cannot be sent; the producer's state does not change. If the
        producer has failed or is closed, raises the error that ended it. If the call is cancelled, the message was not
        queued.
        """
        return self._sends.send(payload, sequence_id, key, event_time, properties)

    def send_batch(
        self,
        payloads: Payloads,
        sequence_ids: Numbers | None = None,
        *,
        keys: Keys | None = None,
        event_times_ms: Numbers | None = None,
        properties: PropertyRows | None = None,
    ) -> BatchReceipt:
        """Queue a complete batch of at most 65,536 messages and 8 MiB, after all earlier messages.

        The call does not copy columns that are numpy arrays of int64 or `Binary` (in Arrow's layout): do not change
        them afterwards. Otherwise the call behaves like `send`.
        """
        return self._sends.send_batch(payloads, sequence_ids, keys, event_times_ms, properties)

    def flush(self) -> None:
        """Send gathered messages, and wait until all earlier messages have receipts and are durable. Raises the failure
        of a message."""
        self._sends.flush()

    def close(self) -> None:
        """Flush, then end the producer. Messages without a receipt after 30 seconds fail with `OutcomeUnknownError`,
        which this call raises too."""
        self._sends.close()

    def abort(self) -> None:
        """End the producer at once. Messages without a receipt fail with `OutcomeUnknownError`."""
        self._sends.abort()
