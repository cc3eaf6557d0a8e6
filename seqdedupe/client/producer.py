"""The producer: messages in, receipts out, in batches that wait for a moment to fill up."""

import asyncio
from dataclasses import astuple
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from seqdedupe.batch import Batch
from seqdedupe.client.builder import Builder, Keys, Numbers, Payloads, Properties, PropertyRows
from seqdedupe.client.connection import check_not_forked
from seqdedupe.client.outbox import Counters
from seqdedupe.client.partitioned import Numbering, Partition, Persisted, Spread, complete_up_to
from seqdedupe.client.pending import BatchReceipt, PendingBatch, Receipt
from seqdedupe.client.route import OnWaiting
from seqdedupe.client.session import ProducerConfig, Session
from seqdedupe.client.stream import Connections
from seqdedupe.errors import InvalidRequestError, error
from seqdedupe.message_id import Position
from seqdedupe.names import partition_name, producer_name, topic_name

# -- How long a batch that is not full waits for more messages.

MANY_A_SECOND = 5_000
"""While so many messages come, a batch waits for more of them: each frame costs both sides as much as a hundred."""

LONGEST_LINGERS = 5
"""So many times `linger_ms`, at most."""


class Linger:
    """Whether a batch has waited long enough; to be asked every `seconds`."""

    def __init__(self, linger_ms: float) -> None:
        self.seconds = linger_ms / 1000
        self._many = MANY_A_SECOND * self.seconds
        self._batch: PendingBatch | None = None
        self._rows = 0
        self._lingers = 0

    def is_over(self, batch: PendingBatch, rows: int) -> bool:
        """Whether this batch, which has so many messages by now, waits no more: few have come since it was last asked,
        or it has waited for longest."""
        if batch is not self._batch:
            self._batch, self._rows, self._lingers = batch, 0, 0
        came, self._rows = rows - self._rows, rows
        self._lingers += 1
        return came < self._many or self._lingers >= LONGEST_LINGERS


class ProducerBase:
    """What a producer is, for tasks and for threads alike. It is made by `Client.producer`."""

    def __init__(
        self,
        connections: Connections,
        topic: str,
        name: str,
        config: ProducerConfig,
        on_waiting: OnWaiting | None = None,
        partition: Partition | None = None,
    ) -> None:
        self.topic = topic_name(topic)
        self.name = name
        self._encoded_name = producer_name(name)
        self._config = config
        self._connections = connections
        self._on_waiting = on_waiting
        self._partition = partition
        self._numbers: Numbering | None = None  # of a partitioned topic, whose parts do the rest
        self._parts: list[Any] = []
        self._session = Session(connections, self.topic, name, config, on_waiting)
        self._builder = self._new_builder()
        self._linger = Linger(config.linger_ms)
        self._must_pause = True  # before the next message: wait for room, or raise
        self._state = "new"

    def _new_builder(self) -> Builder:
        emit = self._emit if self._partition is None else self._emit_in_partition
        return Builder(self._encoded_name, self._session.persisted, self._config, emit)

    def _emit_in_partition(self, pending: PendingBatch) -> None:
        if self._partition is not None:
            self._partition.mark(pending)
        self._emit(pending)

    def _emit(self, pending: PendingBatch) -> None:
        raise NotImplementedError

    def _begin(self) -> None:
        if self._state != "new":
            raise error("INVALID_REQUEST", f"producer {self.name!r} was opened before: make a new one")
        self._state = "open"

    async def _start(self) -> None:
        """On the client's event loop: starts the session, or one in each partition."""
        try:
            await self._session.start()
        except InvalidRequestError as e:
            if e.reason != "TOPIC_IS_PARTITIONED":
                raise
            await self._start_parts(int(e.numbers["partitions"]))
        self._builder = self._new_builder()

    async def _start_parts(self, count: int) -> None:
        numbers = Numbering(self.name, self._encoded_name, count, self._config)
        for k in range(count):
            part = partition_name(self.topic, k), self.name, self._config, self._on_waiting
            self._parts.append(type(self)(self._connections, *part, Partition(k, numbers.settled)))
        try:
            # In this order: of two that start at the same time, one is mostly the later one everywhere.
            for one in self._parts:
                one._begin()
                await one._start()
            last = [persisted for one in self._parts for persisted in one.persisted]
            complete = await complete_up_to(self._connections.sidecars, self.name, last)
            numbers.resume(complete, max(one.sequence_id for one in last))
        except BaseException:
            for one in self._parts:
                await one._session.stop()
            raise
        self._numbers = numbers
        self._spread_over(numbers)

    def _spread_over(self, numbers: Numbering) -> None:
        """The parts have started."""
        raise NotImplementedError

    def _add_batch(self, batch: Batch) -> PendingBatch:
        """Queues a batch that was checked, when there is room."""
        return self._builder.add_batch(batch)

    def _check_open(self) -> None:
        check_not_forked()
        if self._session.failure is not None:
            raise self._session.failure.with_traceback(None)
        if self._state != "open":
            raise error("INVALID_REQUEST", f"producer {self.name!r} is not open")

    @property
    def last_sequence_id(self) -> int:
        """The highest sequence ID sent, or `persisted_sequence_id`; -1 if there is none."""
        return self._builder.last_sequence_id if self._numbers is None else self._numbers.last_sequence_id

    @property
    def persisted_sequence_id(self) -> int:
        """The sequence ID after which the source goes on: the highest one that was persisted when the session started;
        -1 if there was none.

        In a partitioned topic it is one up to which everything was persisted; some of what comes after it may be too.
        """
        return self._session.persisted if self._numbers is None else self._numbers.resumed_after

    @property
    def persisted_position(self) -> Position | None:
        """Where that message stands in the log; None if it is no longer known, there was none, or the topic is
        partitioned."""
        return self._session.persisted_position

    @property
    def persisted(self) -> tuple[Persisted, ...]:
        """The last message that the topic, or each partition of it, had of this producer when the session started."""
        if self._parts:
            return tuple(persisted for part in self._parts for persisted in part.persisted)
        session = self._session
        return (Persisted(self.topic, session.persisted, session.persisted_position, session.outbox.incarnation),)

    @property
    def durable_sequence_id(self) -> int:
        """Everything that was sent up to this sequence ID is durable; -1 if nothing is. After a failure too."""
        return self._session.outbox.durable_sequence_id if self._numbers is None else self._numbers.settled.up_to()

    @property
    def counters(self) -> Counters:
        """What this producer has sent and been answered so far."""
        if not self._parts:
            return self._session.outbox.counters
        of_parts = [astuple(part.counters) for part in self._parts]
        return Counters(*map(sum, zip(*of_parts, strict=True)))


class Producer(ProducerBase):
    """Publishes under a name. Use it as `async with client.producer(topic, name) as producer`.

    Entering starts a session: it takes the name over from any other process that has it, waits until all that the
    name had in flight is settled, and then `last_sequence_id` is the highest persisted sequence ID (-1: none).
    From then on the producer resends, in order, what has no receipt, over broken connections and restarts of the
    sidecar: each message is in the log at most once, and once it has its receipt exactly once.

    It ends for good, and every message without a receipt with it, with `FencedError` when another process has
    taken the name over, with `DataLossError` when the sidecar has lost what it acknowledged, with
    `InvalidRequestError` when the sidecar refuses a batch for its content (those before it still get receipts), and
    with `OutcomeUnknownError` when a batch has had no receipt for `ProducerConfig.delivery_timeout_seconds`. What was
    given up then may still become durable. A new producer of that name waits until that is settled, and its
    `last_sequence_id` says from where to go on.

    In a partitioned topic it is a producer of all partitions: each message goes to that of its key, or without a key to
    that of the producer's name. `persisted_sequence_id` is then the highest ID up to which everything is known to be
    persisted, wherever it went. The source is sent again after it, with its sequence IDs; what is persisted already is
    DUP. When one partition fails nothing more is taken, and what was sent to the others before still gets its receipts.

    Messages are gathered into batches, and `send` waits while too many are in flight, as `ProducerConfig` says.
    `on_waiting` is called, on the event loop, once each time that nothing has had a receipt for a second because the
    sidecar cannot be reached or takes nothing: with why.
    A producer belongs to one event loop; tasks of it may share it.
    """

    _sealing: asyncio.Handle | None = None
    _waiting = 0  # sends that pause: none may pass them
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
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()
        else:
            await self.abort()

    async def open(self) -> None:
        """Starts the session. Raises `UnavailableError` if that has not succeeded within 30 seconds, or what the
        sidecar refuses it for."""
        self._begin()
        try:
            await self._start()
        except BaseException:
            self._state = "closed"
            raise

    def _spread_over(self, numbers: Numbering) -> None:
        self._spread = Spread(numbers, self._parts)

    async def send(
        self,
        payload: bytes | None,
        sequence_id: int | None = None,
        *,
        key: bytes | str | None = None,
        event_time: datetime | int | None = None,
        properties: Properties | None = None,
    ) -> Receipt:
        """Queues a message and returns its receipt, to be awaited when wanted. Waits only for room in the queue.

        Without a `sequence_id` the message gets `last_sequence_id + 1`. Those given must rise from message to
        message; the first may be any: one at or below `persisted_sequence_id` is answered DUP. `event_time` is an
        aware datetime or milliseconds since 1970. A payload is at most 5 MiB.

        In a partitioned topic it has to be given while IDs above it are persisted: a message that is not one of those
        must not get the ID of one.

        Raises `InvalidRequestError` for a message that cannot be sent (it changes nothing) and, once the producer
        has failed or is closed, what it failed with. If it is cancelled the message was not queued.
        """
        if self._must_pause:
            if self._spread is not None:
                return await self._spread.send(payload, sequence_id, key, event_time, properties)
            await self._pause()
        pending, row = self._builder.append(payload, sequence_id, key, event_time, properties)
        if row == 0:
            self._begin_batch()
        return Receipt(pending, row)

    async def send_batch(
        self,
        payloads: Payloads,
        sequence_ids: Numbers | None = None,
        *,
        keys: Keys | None = None,
        event_times_ms: Numbers | None = None,
        properties: PropertyRows | None = None,
    ) -> BatchReceipt:
        """Queues a ready batch of at most 65,536 messages and 8 MiB, after what was sent before.

        Columns that are numpy arrays of int64 and `Binary` (laid out as Arrow does) pass as they are, and must not be
        changed afterwards. Otherwise as `send`.
        """
        if self._spread is not None:
            return await self._spread.send_batch(payloads, sequence_ids, keys, event_times_ms, properties)
        if self._must_pause:
            await self._pause()
        return BatchReceipt(self._builder.add_columns(payloads, sequence_ids, keys, event_times_ms, properties))

    async def flush(self) -> None:
        """Sends what is gathered and waits until all that was sent before has its receipts, and is durable. Raises what
        a message failed with."""
        if self._spread is not None:
            await self._spread.flush()
            return
        self._builder.seal()
        await self._session.flush()

    async def close(self) -> None:
        """Flushes and ends. What still has no receipt after 30 seconds fails, and this raises `OutcomeUnknownError`."""
        if self._state != "open":
            return
        self._state = "closed"
        if self._spread is not None:
            await self._spread.close()
            return
        self._must_pause = True
        self._builder.seal()
        await self._session.close()

    async def abort(self) -> None:
        """Ends at once: what has no receipt fails with `OutcomeUnknownError`."""
        self._state = "closed"
        if self._spread is not None:
            await self._spread.abort()
            return
        self._must_pause = True
        self._builder.seal()
        await self._session.stop()

    def _begin_batch(self) -> None:
        """A batch has its first message, and may be full with it."""
        if self._builder.is_empty:
            return
        loop = asyncio.get_running_loop()
        if self._session.is_idle:
            self._sealing = loop.call_soon(self._builder.seal)
        else:
            self._sealing = loop.call_later(self._linger.seconds, self._seal_unless_more_come)

    def _seal_unless_more_come(self) -> None:
        builder = self._builder
        if self._linger.is_over(builder.pending, builder.rows):
            builder.seal()
        else:
            self._sealing = asyncio.get_running_loop().call_later(self._linger.seconds, self._seal_unless_more_come)

    def _emit(self, pending: PendingBatch) -> None:
        if self._sealing is not None:
            self._sealing.cancel()
            self._sealing = None
        self._must_pause = True
        self._session.add(pending)

    async def _pause(self) -> None:
        self._session.check_loop()
        if self._waiting or self._session.outbox.has_unsent or not self._session.has_room.is_set():
            await self._wait_for_room()
        self._check_open()
        self._must_pause = self._waiting > 0

    async def _wait_for_room(self) -> None:
        self._waiting += 1
        try:
            async with self._turn:  # in the order of the calls
                if self._session.outbox.has_unsent:
                    await asyncio.sleep(0)
                while self._state == "open" and not self._session.has_room.is_set():
                    await self._session.has_room.wait()
        finally:
            self._waiting -= 1
