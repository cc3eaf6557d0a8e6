"""A stock consumer or reader of a topic on the sidecar's own log.

Like a gRPC reader, a consumer is a separate stream. The consumer counts as a stream, its pages use the memory for
readers, and the consumer ends when its rights end. A durable subscription is a named cursor (`subscriptions`). A reader
has no cursor: its client states where the reader begins.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import Message

from broker_sidecar.door.entry_batches import entry_of_row
from broker_sidecar.door.subscriptions import Acknowledged, Subscriptions
from broker_sidecar.security.audit import Trail
from broker_sidecar.security.permissions import Permissions
from broker_sidecar.security.subject import caller
from broker_sidecar.services.read_service import LEAST_PAGE_BYTES, Cursors, next_page_bytes
from broker_sidecar.streams import UNREAD_SECONDS, Stream, Streams, unasked
from seqdedupe import wire
from seqdedupe.batch import decode
from seqdedupe.errors import NotFoundError, SeqdedupeError, error
from seqdedupe.log.contract import LargerRecordError
from seqdedupe.message_id import Position
from seqdedupe.names import whole_of
from seqdedupe.pulsar_wire.frames import command_of, entry_frame
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    CommandAck,
    CommandActiveConsumerChange,
    CommandGetLastMessageIdResponse,
    CommandMessage,
    CommandSeek,
    CommandSubscribe,
    CommandSuccess,
    MessageIdData,
)
from seqdedupe.topic.base import State
from seqdedupe.topic.directory import Topics, find, find_or_create
from seqdedupe.topic.readers import PAGE_BYTES, Turns, end_index, index_after, read_page
from seqdedupe.topic.topic import Topic
from seqdedupe.v1 import admin_pb2, read_pb2

logger = logging.getLogger("broker_sidecar.door")

MAX_PERMITS = 1_000_000
"""The maximum number of messages that a client may request in advance."""

MOVE_SECONDS = 1.0
"""The least time between two moves of a cursor."""

LAST_MOVE_SECONDS = 5.0
"""The time limit for the last move of a cursor. If the cursor does not move in time, the messages after the cursor are
sent again later."""

WRITTEN_AT_ONCE = 64 * 1024
"""The bytes that are written before the client must read."""

ROWS_AT_ONCE = 100
"""The maximum number of messages that are written in one step of the event loop."""

_NO_ENTRY = 2**64 - 1
_MAX_ID = 2**63 - 1
_READ = "/seqdedupe.v1.ReadService/"
_DELETE = "/seqdedupe.v1.AdminService/DeleteCursor"


class StockClient(NamedTuple):
    """What consumers need of their connection."""

    context: Any
    """The connection, as a gRPC call."""
    writer: asyncio.StreamWriter
    writing: asyncio.Lock
    """Consumers of a connection write in turns. Otherwise the unread data of a client would grow with each consumer."""
    say: Callable[[str, Message], None]
    """Sends a command."""
    say_error: Callable[[int, SeqdedupeError], None]
    """Answers a request with an error."""
    start: Callable[[Any], Any]
    """Serves a request that takes time."""
    is_alive: Callable[[], Awaitable[bool]]
    abort: Callable[[], None]


class Reach(NamedTuple):
    """What consumers reach of their sidecar."""

    topics: Topics[Topic]
    streams: Streams
    permissions: Permissions
    trail: Trail
    cursors: Cursors
    subscriptions: Subscriptions
    turns: Turns
    """The turns of consumers that have read everything."""

    def may(self, call: str, request: Message) -> None:
        """Raise NOT_ALLOWED if the caller may not make this gRPC call."""
        self.permissions.check_call(call, request.SerializeToString())


class StockConsumer:
    """A consumer. A separate task serves the consumer, from `start` until `stop`, or until the consumer cannot
    continue."""

    def __init__(self, command: CommandSubscribe, topic: str, client: StockClient, reach: Reach) -> None:
        self.subscription_key = topic, command.subscription
        self.is_failover = command.subType == CommandSubscribe.Failover
        self.priority_level = command.priority_level
        self.is_durable = command.durable
        self.is_leaving = False
        self.gone = asyncio.Event()
        self.topic: Topic | None = None
        """The topic, while it receives."""
        self.failed: SeqdedupeError | None = None
        """The reason why the cursor was not moved at the consumer's end."""
        self.consumer_id = command.consumer_id
        self._command = command
        self._client = client
        self._reach = reach
        self._epoch = command.consumer_epoch if command.HasField("consumer_epoch") else None
        self._permits = 0
        self._acknowledged = Acknowledged(0)
        self._here = 0
        """The next index to send."""
        self._rounds = 0
        """The number of times that the consumer began again at the first unacknowledged message."""
        self._has_changed = asyncio.Event()
        self._has_acks = asyncio.Event()
        self._is_active = asyncio.Event()
        self._moving = asyncio.Lock()
        self._cursor = self._tried = read_pb2.GetCursorResponse()
        """The value of the cursor, as far as this consumer knows, and the value that the last move wrote or tried to
        write."""
        self._cursor_index = -1
        """The index after the cursor's position."""
        self._sought: int | None = None
        self._is_open = False
        self._task: asyncio.Task[None] | None = None

    # -- its life ----------------------------------------------------------------------------------------------

    def start(
        self,
        before: "StockConsumer | None",
        begin_at: int | None,
        on_open: "Callable[[StockConsumer], None]",
        on_end: "Callable[[StockConsumer, SeqdedupeError | None], None]",
    ) -> None:
        """Serve the consumer, as soon as the consumer `before` has ended. `begin_at` is the index at which a reader
        begins after a seek. `on_open` is called when the client receives the success of its subscription. `on_end` is
        called at the end, with the reason if the client does not know about the end."""

        def ended(task: "asyncio.Task[None]") -> None:
            self.is_leaving = True
            why = None if task.cancelled() else task.exception()
            if isinstance(why, OSError):
                why = None
            elif why is not None and not isinstance(why, SeqdedupeError):
                logger.error("a consumer has ended by a defect", exc_info=why)
                why = error("DRAINING", f"the consumer has ended by a defect: {type(why).__name__}")
            if why is not None and not self._is_open:
                self._client.say_error(self._command.request_id, why)
            # Nobody can interrupt this.
            unasked(self._leave(why))
            on_end(self, why if self._is_open else None)

        if before is not None:
            # At once: the end of the connection stops the newest consumer, perhaps before its task begins.
            before.stop()
        self._task = asyncio.ensure_future(self._serve(before, begin_at, on_open))
        self._task.add_done_callback(ended)

    async def _serve(
        self,
        before: "StockConsumer | None",
        begin_at: int | None,
        on_open: "Callable[[StockConsumer], None]",
    ) -> None:
        if before is not None:
            await before.gone.wait()
        topic = await self._find_topic()
        streams = self._reach.streams
        stream = Stream(self._client.context, streams.reading, caller(), streams.shares)
        with streams.serving(stream):
            await stream.begin()
            if self.is_durable:
                await self._reach.subscriptions.join(self)
            else:
                self.activate()
            if self._is_active.is_set():
                await self._begin(topic, begin_at)
                self._opened(on_open)
            else:
                self._opened(on_open)
                await self._is_active.wait()
                # The topic may have been closed meanwhile.
                topic = await self._find_topic()
                await self._begin(topic, None)
                self._say_active()
            moving = unasked(self._keep_moving(topic, stream)) if self.is_durable else None
            try:
                await self._deliver(topic, stream)
            finally:
                if moving is not None:
                    moving.cancel()

    def _opened(self, on_open: "Callable[[StockConsumer], None]") -> None:
        self._is_open = True
        on_open(self)
        self._client.say("success", CommandSuccess(request_id=self._command.request_id))
        self._say_active()

    def _say_active(self) -> None:
        if self.is_failover:
            consumer_id, is_active = self.consumer_id, self._is_active.is_set()
            change = CommandActiveConsumerChange(consumer_id=consumer_id, is_active=is_active)
            self._client.say("active_consumer_change", change)

    async def _leave(self, why: BaseException | None) -> None:
        """Move the cursor for the last time, and release the subscription for other consumers."""
        if isinstance(why, SeqdedupeError) and why.reason == "CURSOR_MOVED":
            # A seek that arrived during this end has had no effect.
            self.failed = why
        try:
            async with asyncio.timeout(LAST_MOVE_SECONDS):
                async with self._moving:
                    # What has begun is over.
                    pass
                if self.is_durable and self.topic is not None and self.failed is None:
                    await self._move(
                        self.topic, self._acknowledged.next_index if self._sought is None else self._sought
                    )
        except TimeoutError:
            self.failed = error("OUTCOME_UNKNOWN", "the cursor has not moved in time")
        except SeqdedupeError as e:
            self.failed = e
        finally:
            if self.failed is not None:
                topic, name = self.subscription_key
                logger.info("the subscription %r of %s is at its last position: %s", name, topic, self.failed)
            self._reach.subscriptions.leave(self)
            self.gone.set()

    def stop(self) -> None:
        """End it. Then `gone` is set."""
        if not self.is_leaving and self._task is not None:
            self.is_leaving = True
            self._task.cancel()

    def activate(self) -> None:
        """Begin to receive."""
        self._is_active.set()

    def abort(self) -> None:
        """End its connection at once."""
        self._client.abort()

    async def is_alive(self) -> bool:
        """Ask its client whether it is there."""
        return await self._client.is_alive()

    async def _find_topic(self) -> Topic:
        """Check that the caller may read the topic and move the cursor. Then return the topic, which is created if
        necessary."""
        name, cursor = self.subscription_key
        if self.is_durable:
            self._reach.may(_READ + "MoveCursor", read_pb2.MoveCursorRequest(topic=name, name=cursor))
        topics = self._reach.topics
        # The last check: the stream ends when this right does.
        self._reach.may(_READ + "ReadStream", read_pb2.ReadStreamRequest(topic=name))
        try:
            return await find(topics, name)
        except NotFoundError:
            if not self._command.force_topic_creation or whole_of(name) is not None:
                raise
        self._reach.permissions.check_creates(name, topics.registry.names())
        created = await find_or_create(topics, name)
        self._reach.may(_READ + "ReadStream", read_pb2.ReadStreamRequest(topic=name))
        return created

    # -- where it begins ---------------------------------------------------------------------------------------

    async def _begin(self, topic: Topic, begin_at: int | None) -> None:
        if self.is_durable:
            index = await self._begin_at_cursor(topic)
        elif begin_at is not None:
            index = begin_at
        else:
            index = self._first_of_reader(topic)
        if index < topic.log.first_index:
            logger.warning("%s begins with index %d: a consumer begins there", topic.name, topic.log.first_index)
        self._here = max(index, topic.log.first_index)
        self._acknowledged = Acknowledged(self._here)
        self.topic = topic

    def _first_of_reader(self, topic: Topic) -> int:
        """Return the index at which a reader begins. Clients skip the message with the start ID themselves, if they do
        not want this message."""
        command = self._command
        if command.HasField("start_message_id"):
            return place_of(topic, command.start_message_id)
        if command.initialPosition == CommandSubscribe.Earliest:
            return topic.log.first_index
        return end_index(topic)

    async def _begin_at_cursor(self, topic: Topic) -> int:
        name, cursor = self.subscription_key
        request = read_pb2.GetCursorRequest(topic=name, name=cursor)
        self._cursor = self._tried = await self._reach.cursors.get(request)
        if self._cursor.HasField("kept"):
            position = Position.from_proto(self._cursor.kept.position)
            self._cursor_index = await index_after(topic, position, skip_damaged=True)
            return self._cursor_index
        is_earliest = self._command.initialPosition == CommandSubscribe.Earliest
        index = topic.log.first_index if is_earliest else end_index(topic)
        await self._move(topic, index)
        return index

    # -- acknowledgements and the cursor -----------------------------------------------------------------------

    def _active_topic(self) -> Topic:
        if self.topic is None:
            raise error("INVALID_REQUEST", "the consumer is not active, and cannot do this")
        return self.topic

    def acknowledge(self, command: CommandAck) -> None:
        """Process acknowledgements. Raises INVALID_POSITION if a message ID does not belong to this topic;
        INVALID_REQUEST."""
        if command.txnid_most_bits or command.txnid_least_bits:
            raise error("INVALID_REQUEST", "an acknowledgement is in a transaction, which the door does not support")
        topic = self._active_topic()
        for message_id in command.message_id:
            index = message_id.entryId
            if message_id.ledgerId != topic.incarnation or index >= topic.readable_index:
                where = f"{message_id.ledgerId}:{index}"
                raise error("INVALID_POSITION", f"topic {topic.name} has no message {where} to acknowledge")
            if command.ack_type == CommandAck.Cumulative:
                self._acknowledged.add_all_below(index + 1)
            else:
                self._acknowledged.add(index, index + 1)
        if self._acknowledged.has_reached_forgotten():
            # The client acknowledges the message again only if the message is sent again.
            self.begin_again(None)
        if self._acknowledged.next_index > self._cursor_index:
            self._has_acks.set()

    async def _keep_moving(self, topic: Topic, stream: Stream) -> None:
        """Move the cursor whenever there are acknowledgements, and not more often than MOVE_SECONDS allows."""
        while True:
            await self._has_acks.wait()
            self._has_acks.clear()
            try:
                await self._move(topic, self._acknowledged.next_index)
            except SeqdedupeError as e:
                if e.retry_delay_ms < 0:
                    stream.end(e)
                    return
                self._has_acks.set()
            await asyncio.sleep(MOVE_SECONDS)

    async def _move(self, topic: Topic, index: int) -> None:
        """Move the cursor to before this index. Raises CURSOR_MOVED if another process has moved the cursor.

        If the caller is cancelled, the move continues. Otherwise the outcome of the move would be unknown, also to the
        next consumer.
        """
        await asyncio.shield(unasked(self._move_now(topic, index)))

    async def _move_now(self, topic: Topic, index: int) -> None:
        name, cursor = self.subscription_key
        async with self._moving:
            if index == self._cursor_index or not self.is_durable:
                return
            try:
                position = await topic.position_before(index)
            except SeqdedupeError:
                # Its message is gone, or damaged.
                position = Position.before(topic.incarnation, index)
            request = read_pb2.MoveCursorRequest(topic=name, name=cursor)
            request.new.CopyFrom(self._cursor.kept)
            request.new.position.CopyFrom(position.to_proto())
            self._reach.may(_READ + "MoveCursor", request)
            if self._tried is not self._cursor:
                # The last move has no answer.
                there = await self._reach.cursors.get(read_pb2.GetCursorRequest(topic=name, name=cursor))
                if there == self._tried:
                    self._cursor = there
            if self._cursor.HasField("kept"):
                request.expected.CopyFrom(self._cursor.kept)
            self._tried = read_pb2.GetCursorResponse(kept=request.new)
            await self._reach.cursors.move(request)
            self._cursor, self._cursor_index = self._tried, index

    async def remove_cursor(self) -> None:
        """Remove the subscription's cursor. Raises CONSUMER_BUSY if the subscription has other consumers, and the
        errors of `Cursors.delete`."""
        name, cursor = self.subscription_key
        self._active_topic()
        if not self.is_durable:
            return
        request = admin_pb2.DeleteCursorRequest(topic=name, name=cursor)
        self._reach.may(_DELETE, request)
        if not self._reach.subscriptions.is_alone(self):
            raise error("CONSUMER_BUSY", f"the subscription {cursor!r} of {name} has other consumers")
        async with self._reach.trail.change(_DELETE, request), self._moving:
            await self._reach.cursors.delete(request)
            # Nothing more is moved.
            self.is_durable = False

    async def place_to_seek(self, command: CommandSeek) -> int:
        """Return the index to which the client seeks. Raises INVALID_REQUEST, POSITION_OF_ANOTHER_INCARNATION."""
        topic = self._active_topic()
        if command.HasField("message_id"):
            index = place_of(topic, command.message_id)
        else:
            index = await topic.log.locate_time(min(command.message_publish_time, _MAX_ID), topic.readable_index)
        return max(index, topic.log.first_index)

    def seek(self, index: int) -> None:
        """End this consumer. The next consumer of the subscription begins at this index."""
        self._sought = index
        self.stop()

    def last_message(self) -> CommandGetLastMessageIdResponse:
        """Return the topic's last message, and the position of the subscription. Raises RECOVERING, INVALID_REQUEST."""
        topic = self._active_topic()
        return CommandGetLastMessageIdResponse(
            last_message_id=_message_id(topic, end_index(topic) - 1),
            consumer_mark_delete_position=_message_id(topic, self._acknowledged.next_index - 1),
        )

    # -- messages ----------------------------------------------------------------------------------------------

    def give_permits(self, count: int) -> None:
        """Let it send this number of messages more."""
        self._permits = min(self._permits + count, MAX_PERMITS)
        self._has_changed.set()

    def begin_again(self, epoch: int | None) -> None:
        """Send all unacknowledged messages again, as a broker does for subscriptions with one active consumer."""
        if epoch is not None:
            self._epoch = epoch
        if self.topic is not None:
            self._here = self._acknowledged.next_index
            self._rounds += 1
            self._has_changed.set()

    async def _deliver(self, topic: Topic, stream: Stream) -> None:
        last_bytes = least_bytes = 0
        while True:
            _check_is_open(topic)
            self._has_changed.clear()
            rounds = self._rounds
            self._acknowledged.add_all_below(topic.log.first_index)
            here = self._here = self._acknowledged.first_open(self._here)
            if not self._permits or here >= topic.readable_index:
                # The next message or permit may come much later.
                stream.release()
                await self._wait(topic, here)
                continue
            stop = min(topic.readable_index, here + self._permits, self._acknowledged.open_until(here))
            size = max(next_page_bytes(stream.share), last_bytes, least_bytes)
            size = await stream.reserve(size, least_bytes or LEAST_PAGE_BYTES)
            try:
                page = await read_page(topic, here, stop, min(size, PAGE_BYTES), most_bytes=size)
            except LargerRecordError as e:
                least_bytes = e.size
                continue
            except SeqdedupeError as e:
                if e.reason == "POSITION_TRIMMED" and topic.log.first_index > here:
                    logger.warning("retention has dropped messages of %s that a consumer has not read", topic.name)
                    continue
                _check_is_open(topic)
                raise
            last_bytes, least_bytes = len(page.records), 0
            answer = wire.ReadStreamResponse.FromString(bytes(page.records))
            del page
            await self._send(topic, answer.records, rounds, stream)

    async def _wait(self, topic: Topic, here: int) -> None:
        """Wait for a message, if there are permits, or for a change such as new permits. Then wait until the client can
        accept messages."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._has_changed.wait())]
        if self._permits:
            waits.append(asyncio.ensure_future(topic.wait_for_message(here)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
        has_arrived = topic.readable_index > here
        if has_arrived and len(waits) > 1:
            await self._reach.turns.take()
        elif not has_arrived and waits[-1].done() and not self._has_changed.is_set():
            topic.check_may_go_on()
            raise error("DRAINING", f"topic {topic.name} is closing")

    async def _send(self, topic: Topic, records: Any, rounds: int, stream: Stream) -> None:
        """Send the messages of these records. Stop if the client requests the messages from an earlier message on."""
        parts: list[Any] = []
        size = 0
        for record in records:
            batch = decode(record.batch)
            for row in range(len(batch)):
                index = record.base_index + row
                if rounds != self._rounds or not self._permits:
                    break
                self._here = index + 1
                if self._acknowledged.first_open(index) != index:
                    continue
                self._permits -= 1
                command = CommandMessage(consumer_id=self.consumer_id, message_id=_message_id(topic, index))
                if self._epoch is not None:
                    command.consumer_epoch = self._epoch
                head, payload = entry_frame(
                    command_of("message", command), entry_of_row(batch, row, record.publish_time_ms)
                )
                parts += head, payload
                size += len(head) + len(payload)
                if size >= WRITTEN_AT_ONCE or len(parts) >= 2 * ROWS_AT_ONCE:
                    await self._write(parts, stream)
                    parts, size = [], 0
        if parts and rounds == self._rounds:
            await self._write(parts, stream)

    async def _write(self, parts: Sequence[Any], stream: Stream) -> None:
        """Send bytes. Return when the client has room for more. Raises OSError at the end of the connection."""
        writer = self._client.writer
        async with self._client.writing:
            stream.writing_since = began_at = time.monotonic()
            try:
                await writer.drain()
                if writer.transport.is_closing():
                    raise ConnectionResetError
                writer.write(b"".join(parts))
                await writer.drain()
            except asyncio.CancelledError:
                if stream.ended_because is not None and time.monotonic() >= began_at + UNREAD_SECONDS:
                    # Other streams need the memory of this connection. The written data is released only by ending the
                    # connection.
                    self._client.abort()
                raise
            stream.writing_since, stream.moved_at = None, time.monotonic()
        stream.share.has_been_read = True
        await asyncio.sleep(0)


def _check_is_open(topic: Topic) -> None:
    """Raise DRAINING if the topic is closing. The topic's log may be gone, and another topic may have the same name."""
    if topic.state is State.DRAINING:
        raise error("DRAINING", f"topic {topic.name} is closing")


def place_of(topic: Topic, message_id: MessageIdData) -> int:
    """Return the start index of a consumer that names this message. The message may also be "earliest" or "latest".

    Raises POSITION_OF_ANOTHER_INCARNATION, RECOVERING.
    """
    if message_id.ledgerId > _MAX_ID:
        return topic.log.first_index
    end = end_index(topic)
    if message_id.ledgerId == _MAX_ID:
        return end
    if message_id.ledgerId != topic.incarnation:
        raise error(
            "POSITION_OF_ANOTHER_INCARNATION",
            f"topic {topic.name} is the incarnation {topic.incarnation}, and the message ID is of another one, "
            f"{message_id.ledgerId}",
            incarnation=topic.incarnation,
        )
    return min(message_id.entryId, end) if message_id.entryId <= _MAX_ID else topic.log.first_index


def _message_id(topic: Topic, index: int) -> MessageIdData:
    return MessageIdData(ledgerId=topic.incarnation, entryId=index & _NO_ENTRY)
