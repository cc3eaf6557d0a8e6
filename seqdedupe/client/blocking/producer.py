"""The producer for threads."""

import os
import threading
import weakref
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import Self

from seqdedupe.batch import Batch
from seqdedupe.client.blocking.loop import check_is_there, event_loop, run
from seqdedupe.client.blocking.partitioned import Spread
from seqdedupe.client.blocking.receipts import BatchReceipt, Receipt
from seqdedupe.client.builder import Builder, Keys, Numbers, Payloads, Properties, PropertyRows
from seqdedupe.client.partitioned import Numbering, Partition
from seqdedupe.client.pending import PendingBatch
from seqdedupe.client.producer import ProducerBase
from seqdedupe.client.route import OnWaiting
from seqdedupe.client.session import ProducerConfig
from seqdedupe.client.stream import Connections

_producers: "weakref.WeakSet[Producer]" = weakref.WeakSet()


def _after_fork() -> None:
    """In the child, no send may wait for a thread that is not there; the next one raises."""
    for producer in _producers:
        producer._lock = threading.RLock()
        producer._must_pause = True
        if producer._spread is not None:
            producer._spread.after_fork()


os.register_at_fork(after_in_child=_after_fork)


class Producer(ProducerBase):
    """As `seqdedupe.client.Producer`, with calls that block. Threads may share it."""

    _spread: Spread | None = None

    def __init__(
        self,
        connections: Connections,
        topic: str,
        name: str,
        config: ProducerConfig,
        on_waiting: OnWaiting | None = None,
        partition: Partition | None = None,
    ) -> None:
        super().__init__(connections, topic, name, config, on_waiting, partition)
        self._lock = threading.RLock()  # for what is gathered; the loop's thread must never wait for it
        self._room = threading.Condition()  # held for moments only
        # The first pair is written under the lock, the second by the loop's thread.
        self._handed_over_batches = self._handed_over_bytes = 0
        self._settled_batches = self._durable_bytes = 0
        self._is_watched = False  # under the lock: the loop looks after the batch that is being gathered
        _producers.add(self)

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
            run(self._start)
        except BaseException:
            self._state = "closed"
            raise

    def _spread_over(self, numbers: Numbering) -> None:
        self._spread = Spread(numbers, self._parts)

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
        if self._spread is not None:
            return self._spread.send(payload, sequence_id, key, event_time, properties)
        while True:
            try:
                self._lock.acquire()  # `with` costs twice as much, and this is called for every message
                if not self._must_pause or self._goes_on():
                    pending, row = self._builder.append(payload, sequence_id, key, event_time, properties)
                    if row == 0:
                        self._begin_batch()
                    self._lock.release()
                    return Receipt(pending, row)
                self._lock.release()
            except BaseException as e:
                self._check_interrupt(e)
                with suppress(RuntimeError):  # it was interrupted before it had the lock, or after
                    self._lock.release()
                raise
            self._wait_for_room()

    def send_batch(
        self,
        payloads: Payloads,
        sequence_ids: Numbers | None = None,
        *,
        keys: Keys | None = None,
        event_times_ms: Numbers | None = None,
        properties: PropertyRows | None = None,
    ) -> BatchReceipt:
        """Queues a ready batch, see `seqdedupe.client.Producer.send_batch`."""
        if self._spread is not None:
            return self._spread.send_batch(payloads, sequence_ids, keys, event_times_ms, properties)
        while True:
            with self._lock:
                if not self._must_pause or self._goes_on():
                    try:
                        pending = self._builder.add_columns(payloads, sequence_ids, keys, event_times_ms, properties)
                    except BaseException as e:
                        self._check_interrupt(e)
                        raise
                    return BatchReceipt(pending)
            self._wait_for_room()

    def _add_batch(self, batch: Batch) -> PendingBatch:
        with self._lock:
            try:
                return super()._add_batch(batch)
            except BaseException as e:
                self._check_interrupt(e)
                raise

    def flush(self) -> None:
        """Waits until all that was sent before has its receipts, and is durable. Raises what a message failed with."""
        if self._spread is not None:
            self._spread.flush()
            return
        self._seal_now()
        run(self._session.flush)

    def close(self) -> None:
        """Flushes and ends, see `seqdedupe.client.Producer.close`."""
        if not self._end():
            return
        if self._spread is not None:
            self._spread.close()
        else:
            run(self._session.close)

    def abort(self) -> None:
        """Ends at once: what has no receipt fails with `OutcomeUnknownError`."""
        self._end()
        if self._spread is not None:
            self._spread.abort()
        else:
            run(self._session.stop)

    def _end(self) -> bool:
        with self._lock:
            was_open = self._state == "open"
            self._state = "closed"
            self._must_pause = True
            self._seal()
        return was_open

    def _seal_now(self) -> None:
        with self._lock:
            self._seal()

    def _seal(self) -> None:
        try:
            self._builder.seal()
        except BaseException as e:
            self._check_interrupt(e)
            raise

    def _check_interrupt(self, failure: BaseException) -> None:
        """An interrupt (Ctrl-C) strikes between any two steps, and may leave half a message, or a batch that is
        nowhere: nothing may be sent after it, nor anybody wait for it."""
        if isinstance(failure, Exception):
            return
        with self._lock:
            left, self._builder = self._builder, self._new_builder()
            self._builder.last_sequence_id = left.last_sequence_id
            self._must_pause = True
            event_loop().call_soon_threadsafe(self._end_interrupted, left)

    def _end_interrupted(self, left: Builder) -> None:
        """On the loop's thread. What was handed over before still gets its receipts."""
        self._session.end_before(left.leaving or left.pending, f"producer {self.name!r} was interrupted in mid-send")
        for pending in (left.leaving, left.pending):
            if pending is not None and not pending.settled:
                self._session.add(pending)  # which fails it
        with self._room:
            self._room.notify_all()

    def _begin_batch(self) -> None:
        if self._builder.is_empty:
            return
        if not self._is_watched:
            self._is_watched = True
            nothing_in_flight = self._handed_over_batches == self._settled_batches
            begin = self._seal_gathered if nothing_in_flight else self._watch
            event_loop().call_soon_threadsafe(begin, self._builder.pending)

    def _watch(self, pending: PendingBatch) -> None:
        """On the loop's thread: looks after a while whether this batch still lingers, and so on while there is any."""
        event_loop().call_later(self._linger.seconds, self._look, pending)

    def _look(self, pending: PendingBatch) -> None:
        # What a caller does meanwhile makes the answer that of a moment ago.
        if self._builder.pending is pending and not self._linger.is_over(pending, self._builder.rows):
            self._watch(pending)
        else:
            self._seal_gathered(pending)

    def _seal_gathered(self, pending: PendingBatch) -> None:
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
                self._room.notify_all()

        def durable() -> None:
            with self._room:
                self._durable_bytes += size_bytes
                self._room.notify_all()

        pending.when_settled(settled)
        pending.when_durable(durable)
        event_loop().call_soon_threadsafe(self._session.add, pending)

    def _has_room(self) -> bool:
        return self._session.failure is not None or (
            self._handed_over_batches - self._settled_batches < self._config.max_in_flight_batches
            and self._handed_over_bytes - self._durable_bytes < self._config.max_in_flight_bytes
        )

    def _goes_on(self) -> bool:
        """With the lock: whether there is room for more. Raises what the producer has ended with."""
        check_is_there()
        if not self._has_room():
            return False
        self._check_open()
        self._must_pause = False
        return True

    def _wait_until_it_goes_on(self) -> None:
        while True:
            with self._lock:
                if not self._must_pause or self._goes_on():
                    return
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        """Without the lock: closing must not wait for a sender."""
        with self._room:
            self._room.wait_for(self._has_room)
