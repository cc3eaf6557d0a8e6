"""The producer: it sends messages and returns receipts. A message waits for a short time, so that several messages fill
a batch.

Begin with `Producer`, at the end. `Producer` passes its calls to a `TopicProducer`, or for a partitioned topic to a
`PartitionedProducer`. The producer for threads (`blocking/`) has the same base classes.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import astuple
from datetime import datetime
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

from seqdedupe.batch import Batch
from seqdedupe.client.builder import Builder, Keys, Numbers, Payloads, Properties, PropertyRows, key_bytes
from seqdedupe.client.connection import check_not_forked
from seqdedupe.client.partitioned_ids import Numbering, Partition, Persisted, SettledIds, complete_up_to
from seqdedupe.client.pending import BatchReceipt, PendingBatch, Receipt, SpreadBatch
from seqdedupe.client.producer_session import ProducerConfig, Session
from seqdedupe.client.route import OnWaiting, Sidecars
from seqdedupe.client.send_queue import Counters
from seqdedupe.client.stream import SharedConnections
from seqdedupe.errors import InvalidRequestError, error
from seqdedupe.message_id import Position
from seqdedupe.names import partition_name, producer_name, topic_name

# -- How long a batch that is not full waits for further messages.

MANY_A_SECOND = 5_000
"""The rate of messages from which on a batch waits for more messages. One frame costs the client and the sidecar as
much as a hundred messages."""

LONGEST_LINGERS = 5
"""A batch waits for at most this multiple of `linger_ms`."""


class BatchLinger:
    """Decides whether a batch has waited long enough for more messages. The caller calls `is_over` every `seconds`."""

    def __init__(self, linger_ms: float) -> None:
        self.seconds = linger_ms / 1000
        self._many = MANY_A_SECOND * self.seconds
        self._batch: PendingBatch | None = None
        self._rows = 0
        self._lingers = 0

    def is_over(self, batch: PendingBatch, rows: int) -> bool:
        """Return whether this batch of `rows` messages need not wait any longer.

        That is the case if few messages have arrived since the last call, or if the batch has waited for the maximum
        time.
        """
        if batch is not self._batch:
            self._batch, self._rows, self._lingers = batch, 0, 0
        came, self._rows = rows - self._rows, rows
        self._lingers += 1
        return came < self._many or self._lingers >= LONGEST_LINGERS


class TopicProducer:
    """Sends to a topic without partitions, or to one partition. Combines a builder of batches and a session. The
    subclasses are for tasks and for threads."""

    def __init__(
        self,
        connections: SharedConnections,
        topic: str,
        name: str,
        config: ProducerConfig,
        on_waiting: OnWaiting | None = None,
        partition: Partition | None = None,
    ) -> None:
        self.topic = topic_name(topic)
        self.name = name
        self.encoded_name = producer_name(name)
        self.config = config
        self.session = Session(connections, self.topic, name, config, on_waiting)
        self.must_pause = True
        """Whether the next message must first wait for room, or raise."""
        self._connections = connections
        self._on_waiting = on_waiting
        self._partition = partition
        self.builder = self._new_builder()
        self._linger = BatchLinger(config.linger_ms)
        self._state: Literal["new", "open", "closed"] = "new"

    def of_partition(self, number: int, settled: SettledIds) -> Self:
        """Make a producer of the same class and configuration for one partition of the topic."""
        topic, partition = partition_name(self.topic, number), Partition(number, settled)
        return type(self)(self._connections, topic, self.name, self.config, self._on_waiting, partition)

    def _new_builder(self) -> Builder:
        emit = self._emit if self._partition is None else self._emit_in_partition
        return Builder(self.encoded_name, self.session.persisted, self.config, emit)

    def _emit_in_partition(self, pending: PendingBatch) -> None:
        if self._partition is not None:
            self._partition.mark(pending)
        self._emit(pending)

    def _emit(self, pending: PendingBatch) -> None:
        raise NotImplementedError

    def begin(self) -> None:
        """Mark the producer as open, before `start`. Raises INVALID_REQUEST at the second call."""
        if self._state != "new":
            raise error("INVALID_REQUEST", f"producer {self.name!r} was opened before: make a new one")
        self._state = "open"

    async def start(self) -> None:
        """Start the session. Runs on the client's event loop."""
        await self.session.start()
        self.builder = self._new_builder()

    def give_up(self) -> None:
        """Record that the producer could not be started."""
        self._state = "closed"

    def check_open(self) -> None:
        """Raise the failure with which the producer ended; INVALID_REQUEST if the producer is not open."""
        check_not_forked()
        if self.session.failure is not None:
            raise self.session.failure.with_traceback(None)
        if self._state != "open":
            raise error("INVALID_REQUEST", f"producer {self.name!r} is not open")

    def add_batch(self, batch: Batch) -> PendingBatch:
        """Queue a checked batch. The caller ensures that there is room for the batch."""
        return self.builder.add_batch(batch)

    @property
    def last_sequence_id(self) -> int:
        return self.builder.last_sequence_id

    @property
    def persisted_sequence_id(self) -> int:
        return self.session.persisted

    @property
    def persisted_position(self) -> Position | None:
        return self.session.persisted_position

    @property
    def persisted(self) -> tuple[Persisted, ...]:
        position, incarnation = self.session.persisted_position, self.session.queue.incarnation
        return (Persisted(self.topic, self.session.persisted, position, incarnation),)

    @property
    def durable_sequence_id(self) -> int:
        return self.session.queue.durable_sequence_id

    @property
    def counters(self) -> Counters:
        return self.session.queue.counters


P = TypeVar("P", bound=TopicProducer)


class PartitionedProducer(Generic[P]):
    """Sends to all partitions of a topic. Contains one `TopicProducer` for each partition, and the numbering of the
    messages of all partitions. The subclasses are for tasks and for threads."""

    persisted_position = None

    def __init__(self, topic: P, partitions: int) -> None:
        """`topic` is the producer whose Open call returned the number of partitions."""
        self.numbers = Numbering(topic.name, topic.encoded_name, partitions, topic.config)
        self.parts = [topic.of_partition(k, self.numbers.settled) for k in range(partitions)]

    async def start(self, sidecars: Sidecars) -> None:
        """Start a session in each partition. Runs on the client's event loop."""
        try:
            # Start the sessions in order: if two producers of one name start together, the same producer is then mostly
            # the later one in all partitions.
            for part in self.parts:
                part.begin()
                await part.start()
            complete = await complete_up_to(sidecars, self.parts[0].name, self.persisted)
            self.numbers.resume(complete, max(one.sequence_id for one in self.persisted))
        except BaseException:
            for part in self.parts:
                await part.session.stop()
            raise

    @property
    def last_sequence_id(self) -> int:
        return self.numbers.last_sequence_id

    @property
    def persisted_sequence_id(self) -> int:
        return self.numbers.resumed_after

    @property
    def persisted(self) -> tuple[Persisted, ...]:
        return tuple(persisted for part in self.parts for persisted in part.persisted)

    @property
    def durable_sequence_id(self) -> int:
        return self.numbers.settled.up_to()

    @property
    def counters(self) -> Counters:
        of_parts = [astuple(part.counters) for part in self.parts]
        return Counters(*map(sum, zip(*of_parts, strict=True)))


class ProducerBase:
    """The base of producers for tasks and for threads. `Client.producer` makes them."""

    _sends: TopicProducer | PartitionedProducer[Any]
    """The producer that does the work. The answer to Open determines which of the two classes is needed."""

    def __init__(self, topic: TopicProducer, sidecars: Sidecars) -> None:
        self.topic = topic.topic
        self.name = topic.name
        self._sidecars = sidecars
        self._sends = topic

    async def _start(self, topic: P, kind: "type[PartitionedProducer[P]]") -> None:
        """Start the session, or one session in each partition. Runs on the client's event loop."""
        try:
            await topic.start()
        except InvalidRequestError as e:
            if e.reason != "TOPIC_IS_PARTITIONED":
                raise
            partitioned = kind(topic, int(e.numbers["partitions"]))
            await partitioned.start(self._sidecars)
            self._sends = partitioned

    @property
    def last_sequence_id(self) -> int:
        """The highest sequence ID that was sent. Before the first message, the value is `persisted_sequence_id`. -1
        means that there is no ID."""
        return self._sends.last_sequence_id

    @property
    def persisted_sequence_id(self) -> int:
        """The sequence ID after which the source must continue: the highest ID persisted when the session started; -1
        if none.

        In a partitioned topic, everything up to this ID was persisted. Some messages with higher IDs may be persisted
        too.
        """
        return self._sends.persisted_sequence_id

    @property
    def persisted_position(self) -> Position | None:
        """The position in the log of the message with `persisted_sequence_id`. None if the position is no longer known,
        if there was no such message, or if the topic is partitioned."""
        return self._sends.persisted_position

    @property
    def persisted(self) -> tuple[Persisted, ...]:
        """The last message of this producer in the topic, or in each partition, when the session started."""
        return self._sends.persisted

    @property
    def durable_sequence_id(self) -> int:
        """The sequence ID up to which everything sent is durable; -1 if nothing is durable. The value stays valid after
        a failure."""
        return self._sends.durable_sequence_id

    @property
    def counters(self) -> Counters:
        """The numbers of messages sent and of receipts so far."""
        return self._sends.counters


class AsyncTopicProducer(TopicProducer):
    """The `TopicProducer` for the tasks of one event loop."""

    _sealing: asyncio.Handle | None = None
    _waiting = 0  # the tasks that wait for room, in order: no later send may overtake them

    def __init__(self, *of_topic: Any) -> None:
        super().__init__(*of_topic)
        self._turn = asyncio.Lock()

    def append(
        self,
        payload: bytes | None,
        sequence_id: int | None,
        key: bytes | str | None,
        event_time: datetime | int | None,
        properties: Properties | None,
    ) -> Receipt:
        """Queue a message. The caller ensures that there is room for the message."""
        pending, row = self.builder.append(payload, sequence_id, key, event_time, properties)
        if row == 0:
            self.begin_batch()
        return Receipt(pending, row)

    async def send(self, *message: Any) -> Receipt:
        await self.pause()
        return self.append(*message)

    async def send_batch(self, *columns: Any) -> BatchReceipt:
        if self.must_pause:
            await self.pause()
        return BatchReceipt(self.builder.add_columns(*columns))

    async def flush(self) -> None:
        self.builder.seal()
        await self.session.flush()

    async def close(self) -> None:
        if self._state == "open":
            self._end()
            await self.session.close()

    async def abort(self) -> None:
        self._end()
        await self.session.stop()

    def _end(self) -> None:
        self._state = "closed"
        self.must_pause = True
        self.builder.seal()

    def begin_batch(self) -> None:
        """Start the linger time of a batch that has received its first message. That batch may be full already."""
        if self.builder.is_empty:
            return
        loop = asyncio.get_running_loop()
        if self.session.is_idle:
            self._sealing = loop.call_soon(self.builder.seal)
        else:
            self._sealing = loop.call_later(self._linger.seconds, self._seal_unless_more_come)

    def _seal_unless_more_come(self) -> None:
        builder = self.builder
        if self._linger.is_over(builder.pending, builder.rows):
            builder.seal()
        else:
            self._sealing = asyncio.get_running_loop().call_later(self._linger.seconds, self._seal_unless_more_come)

    def _emit(self, pending: PendingBatch) -> None:
        if self._sealing is not None:
            self._sealing.cancel()
            self._sealing = None
        self.must_pause = True
        self.session.add(pending)

    async def pause(self) -> None:
        """Wait until there is room."""
        self.session.check_loop()
        if self._waiting or self.session.queue.has_unsent or not self.session.has_room.is_set():
            await self._wait_for_room()
        self.check_open()
        self.must_pause = self._waiting > 0

    async def _wait_for_room(self) -> None:
        self._waiting += 1
        try:
            async with self._turn:  # in the order of the calls
                if self.session.queue.has_unsent:
                    await asyncio.sleep(0)
                while self._state == "open" and not self.session.has_room.is_set():
                    await self.session.has_room.wait()
        finally:
            self._waiting -= 1


class AsyncPartitionedProducer(PartitionedProducer[AsyncTopicProducer]):
    """The `PartitionedProducer` for the tasks of one event loop."""

    def __init__(self, topic: AsyncTopicProducer, partitions: int) -> None:
        super().__init__(topic, partitions)
        self._turn = asyncio.Lock()

    async def send(
        self, payload: bytes | None, sequence_id: int | None, key: bytes | str | None, *of_message: Any
    ) -> Receipt:
        async with self._turn:  # in the order of the calls
            sequence_id, key = self.numbers.next_id(sequence_id), key_bytes(key)
            part = self.parts[self.numbers.partition(key)]
            await self._room(part)
            receipt = part.append(payload, sequence_id, key, *of_message)
            self.numbers.sent(sequence_id, () if receipt._row else (receipt._pending,))
            return receipt

    async def send_batch(self, payloads: Payloads, sequence_ids: Numbers | None, *columns: Any) -> BatchReceipt:
        async with self._turn:
            batch = self.numbers.check_columns(payloads, sequence_ids, *columns)
            some = [(self.parts[k], rows) for k, rows in self.numbers.rows_by_partition(batch)]
            for part, _ in some:
                await self._room(part)
            sent = [(rows, part.add_batch(batch.take(rows))) for part, rows in some]
            self.numbers.sent_batch(batch, [pending for _, pending in sent])
            return BatchReceipt(SpreadBatch(batch.sequence_ids, sent))

    async def _room(self, part: AsyncTopicProducer) -> None:
        if part.must_pause:  # once a batch
            await part.pause()
            part.must_pause = True
            for other in self.parts:
                other.check_open()
            part.must_pause = False

    async def flush(self) -> None:
        await self._all(AsyncTopicProducer.flush)

    async def close(self) -> None:
        await self._all(AsyncTopicProducer.close)

    async def abort(self) -> None:
        await self._all(AsyncTopicProducer.abort)

    async def _all(self, call: Callable[[AsyncTopicProducer], Coroutine[Any, Any, None]]) -> None:
        """Make this call to the producers of all partitions, and raise the error of the first producer whose call
        failed."""
        ends = await asyncio.gather(*map(call, self.parts), return_exceptions=True)
        for end in ends:
            if end is not None:
                raise end


class Producer(ProducerBase):
    """Publishes under a producer name. Use it as `async with client.producer(topic, name) as producer`.

    Entering the context starts a session. The session takes the name over from any other process, and waits until all
    messages in flight under that name are settled. Then `last_sequence_id` is the highest persisted sequence ID (-1:
    none). After a broken connection or a restart of the sidecar, the producer resends messages without a receipt, in
    order. Each message is in the log at most once. A message with a receipt is in the log exactly once.

    One of these errors ends the producer. All messages without a receipt then fail with the same error:

    - `FencedError`: another process has taken the name over.
    - `DataLossError`: the sidecar has lost messages that it acknowledged.
    - `InvalidRequestError`: the sidecar refuses a batch for its content. Earlier batches still get receipts.
    - `OutcomeUnknownError`: a batch got no receipt for `ProducerConfig.delivery_timeout_seconds`. Its messages may
      still become durable. A new producer of the same name waits until the outcome is settled, and its
      `last_sequence_id` is then the ID after which the source must continue.

    In a partitioned topic the producer sends to all partitions. The key of a message selects the partition. If a
    message has no key, the producer's name selects the partition. `persisted_sequence_id` is then the highest ID up to
    which everything is persisted. Send all messages of the source after this ID again, with their sequence IDs;
    messages that are already persisted are answered DUP. If sending to one partition fails, the producer accepts no
    further messages. Messages sent earlier to other partitions still get receipts.

    The producer gathers messages into batches. `send` waits while too many messages are in flight (see
    `ProducerConfig`). If no receipt arrives for a second because the sidecar cannot be reached or accepts no messages,
    the producer calls `on_waiting` once, on the event loop, with the reason. A producer belongs to one event loop,
    whose tasks may share the producer.
    """

    _sends: AsyncTopicProducer | AsyncPartitionedProducer

    def __init__(
        self,
        connections: SharedConnections,
        topic: str,
        name: str,
        config: ProducerConfig,
        on_waiting: OnWaiting | None = None,
    ) -> None:
        self._topic = AsyncTopicProducer(connections, topic, name, config, on_waiting)
        super().__init__(self._topic, connections.sidecars)

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
        """Start the session. Raises `UnavailableError` if the session has not started within 30 seconds. If the sidecar
        refuses the session, raises the sidecar's error."""
        self._topic.begin()
        try:
            await self._start(self._topic, AsyncPartitionedProducer)
        except BaseException:
            self._topic.give_up()
            raise

    async def send(
        self,
        payload: bytes | None,
        sequence_id: int | None = None,
        *,
        key: bytes | str | None = None,
        event_time: datetime | int | None = None,
        properties: Properties | None = None,
    ) -> Receipt:
        """Queue a message, and return its receipt, which can be awaited. Waits only for room in the queue.

        Without a `sequence_id` the message gets `last_sequence_id + 1`. Explicit IDs must rise from message to message.
        The first ID may have any value. A message at or below `persisted_sequence_id` is answered DUP. `event_time` is
        a timezone-aware datetime or the number of milliseconds since 1970. A payload has at most 5 MiB.

        In a partitioned topic, `sequence_id` must be given as long as higher IDs are persisted. Otherwise a new message
        could get the ID of a persisted message.

        Raises `InvalidRequestError` for a message that cannot be sent; the producer's state does not change. If the
        producer has failed or is closed, raises the error that ended it. If the call is cancelled, the message was not
        queued.
        """
        topic = self._topic
        if topic.must_pause:  # always, where there are partitions
            return await self._sends.send(payload, sequence_id, key, event_time, properties)
        # The body of `topic.append`: without the call, since this runs for every message.
        pending, row = topic.builder.append(payload, sequence_id, key, event_time, properties)
        if row == 0:
            topic.begin_batch()
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
        """Queue a complete batch of at most 65,536 messages and 8 MiB, after all earlier messages.

        The call does not copy columns that are numpy arrays of int64 or `Binary` (in Arrow's layout): do not change
        them afterwards. Otherwise the call behaves like `send`.
        """
        return await self._sends.send_batch(payloads, sequence_ids, keys, event_times_ms, properties)

    async def flush(self) -> None:
        """Send gathered messages, and wait until all earlier messages have receipts and are durable. Raises the failure
        of a message."""
        await self._sends.flush()

    async def close(self) -> None:
        """Flush, then end the producer. Messages without a receipt after 30 seconds fail with `OutcomeUnknownError`,
        which this call raises too."""
        await self._sends.close()

    async def abort(self) -> None:
        """End the producer at once. Messages without a receipt fail with `OutcomeUnknownError`."""
        await self._sends.abort()
