"""A connection of a stock client of Apache Pulsar.

Begin with `PulsarConnection.run`. The commands of a client, in their usual order:

1. CONNECT identifies the client. Before CONNECT, the door reads only little data, and only for a short time.
2. PARTITIONED_METADATA and LOOKUP tell the client where its topic is: at this door, or at the owner's door.
3. PRODUCER opens a producer: a session of the producer's name.
4. SEND publishes an entry: one message, or a batch. Receipts arrive in the order of the entries.
5. CLOSE_PRODUCER ends a producer.

Commands of consumers are in `consumer_commands`, or pass to a cluster's brokers if the door does that (`broker_pass`).
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from importlib.metadata import version
from typing import Any, Protocol, Self

from google.protobuf.message import Message

from broker_sidecar.door.broker_pass import BrokerPass, BrokersToPass
from broker_sidecar.door.consumer_commands import COMMANDS, Consumers
from broker_sidecar.door.entry_batches import ProducerSession
from broker_sidecar.door.pulsar_codes import check_options, code_of, ending_code_of, not_taken, told
from broker_sidecar.door.schemas import SchemaRegistry, answer_about, layout_for, version_in
from broker_sidecar.door.stock_consumer import StockClient
from broker_sidecar.door.stock_producer import PendingEntry, StockProducer, is_final, without_traceback
from broker_sidecar.door.topic_lookup import TopicLookup
from broker_sidecar.rpc import refusals
from broker_sidecar.security.permissions import Permissions
from broker_sidecar.security.subject import caller
from broker_sidecar.services.publish_service import PublishService
from broker_sidecar.shares import Share
from broker_sidecar.streams import Stream, Streams
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.limits import MAX_PAYLOAD_BYTES
from seqdedupe.names import topic_name
from seqdedupe.pulsar_wire.frames import (
    FRAME_OVERHEAD_BYTES,
    PulsarFrame,
    Splitter,
    command_frame,
    command_of,
    entry_of,
)
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    BaseCommand,
    CommandCloseProducer,
    CommandConnect,
    CommandConnected,
    CommandError,
    CommandGetOrCreateSchema,
    CommandGetSchemaResponse,
    CommandLookupTopic,
    CommandPartitionedTopicMetadata,
    CommandPing,
    CommandPong,
    CommandProducer,
    CommandProducerSuccess,
    CommandSend,
    CommandSendError,
    CommandSendReceipt,
    CommandSuccess,
    MessageIdData,
    ServerError,
)
from seqdedupe.tasks import Broadcast
from seqdedupe.topic.directory import Topics, find
from seqdedupe.topic.topic import Topic
from seqdedupe.v1 import publish_pb2

logger = logging.getLogger("broker_sidecar.door")

MAX_ENTRY_BYTES = MAX_PAYLOAD_BYTES
"""The `max_message_size` that the door announces, unless the log's brokers have a lower limit: Pulsar's default."""

LIMIT_SECONDS = 2.0
"""The time within which the log's brokers must report their limit. Otherwise the door announces its own limit, and the
brokers refuse larger messages."""

MAX_UNKNOWN_BYTES = 64 * 1024
"""The maximum size of a frame before the client is identified. Such a frame contains a token and a version."""

ANNOUNCE_SECONDS = 5.0
"""The time within which a broker must accept the client. Otherwise the door announces only its own features to the
client."""

CONNECT_SECONDS = 10.0
"""The time within which a client must authenticate itself."""

FRAME_SECONDS = 30.0
"""The time within which the rest of a frame must arrive. 5 MiB over 1.4 Mbit/s take this time."""

KEEP_ALIVE_SECONDS = 30.0
"""The time after which the door sends a ping to a silent client. If the client stays silent for the same time again,
its connection ends."""

ALIVE_SECONDS = 5.0
"""If a second client wants a producer's name, the first client must answer a ping within this time."""

MAX_REQUESTS = 1_000
"""The maximum number of requests of a connection in progress. At this number, the door reads no more data from it."""

MAX_PRODUCERS = 10_000
"""The most producers of a connection."""

TURN_SECONDS = 0.005
"""The time for which one connection's frames are processed before others are served. Many may arrive together."""

READ_BYTES = 256 * 1024
MAX_UNREAD_BYTES = 1024 * 1024
"""The maximum bytes of answers that a client has not read. Above it, the door reads no more data from the client."""

PROTOCOL_VERSION = 21
"""The newest protocol version that the door supports: the version of Pulsar 4.0."""

_NO_ENTRY = 2**64 - 1

_JAVA, _CPP = "Pulsar-Java", "Pulsar-CPP"
_METHODS = {"", "none", "tls", "token"}
"""The supported authentication methods. Clients with OAuth2 send the method name `token`."""


LogLimit = Callable[[], Awaitable[int]]
"""A function that returns the maximum size of a message in the log, in bytes. Raises SeqdedupeError if the limit is not
known."""


class _Turn:
    """A connection's turn to receive a large frame. The turn ends with the block at the latest."""

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns = turns
        self._is_taken = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    async def take(self) -> bool:
        """Wait for the turn. Return False if the connection already has the turn."""
        if self._is_taken:
            return False
        await self._turns.acquire()
        self._is_taken = True
        return True

    def end(self) -> None:
        """Leave the turn to others."""
        if self._is_taken:
            self._is_taken = False
            self._turns.release()


class ProducerNames(Protocol):
    """The producers of all connections, by topic and name."""

    async def claim(
        self,
        topic: str,
        name: str,
        mode: int,
        connection: "PulsarConnection",
        producer_id: int,
        tell_to_wait: Callable[[], None],
    ) -> None:
        """Assign this name to a producer, which may have to wait. Raises PRODUCER_BUSY, FENCED."""

    def release(self, topic: str, name: str, connection: "PulsarConnection", producer_id: int) -> None:
        """Take the name back, if this producer has it."""

    def new_name(self) -> str:
        """Return a name that no producer has had."""


class PulsarConnection:
    """A connection of one client."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        peer: str,
        *,
        topics: Topics[Topic],
        streams: Streams,
        permissions: Permissions,
        publish: PublishService,
        names: ProducerNames,
        find_caller: Callable[[bytes | None], Awaitable[Any]],
        log_limit: LogLimit | None,
        large_frames: asyncio.Semaphore,
        lookup: TopicLookup,
        brokers: BrokersToPass | None,
        consumers_of: Callable[[StockClient], Consumers] | None,
        registry: SchemaRegistry | None,
    ) -> None:
        """`find_caller` accepts a token, sets the caller of the present task, and returns the connection as a gRPC
        call. If the caller is unknown, it raises the reason. Commands of consumers pass to `brokers`, or are served by
        `consumers_of`. If both are None, only producers are served."""
        self.peer = peer
        self._reader = reader
        self._writer = writer
        self._topics = topics
        self._streams = streams
        self._permissions = permissions
        self._publish = publish
        self._names = names
        self._find_caller = find_caller
        self._log_limit = log_limit
        self._registry = registry
        self._large_frames = large_frames
        self._lookup = lookup
        self._brokers = brokers
        self._passing: BrokerPass | None = None
        self._consumers_of = consumers_of
        self._consumers: Consumers | None = None
        self._stream: Stream | None = None
        self._splitter = Splitter(MAX_UNKNOWN_BYTES)
        self._client = ""
        self._producers: dict[int, StockProducer] = {}
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._waiting: set[int] = set()
        """The producers of this connection that wait for exclusive access to their topic."""
        self._refused: dict[int, SeqdedupeError] = {}
        """The reason why a producer with this ID was ended permanently. It is the answer to the producer's next
        PRODUCER."""
        self._requests: set[asyncio.Task[None]] = set()
        self._reads = self._pings = self._pongs = 0
        self._news = Broadcast()
        """Tells of each pong, and of the end of the connection."""
        self._is_silent = self._is_reading = self._is_draining = self._has_ended = False

    @property
    def passing(self) -> int:
        """The number of the client's consumers and readers whose frames pass to the brokers."""
        return self._passing.consumers if self._passing is not None else 0

    # -- the life of a connection ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve the client until it or the door ends the connection."""
        async with aclosing(self._frames()) as frames:
            try:
                try:
                    async with asyncio.timeout(CONNECT_SECONDS):
                        context = await self._connect(await anext(frames))
                except (StopAsyncIteration, TimeoutError):
                    return
                stream = Stream(context, self._streams.budget, caller(), self._streams.shares)
                stream.passing = self._passing.share if self._passing is not None else None
                self._stream = stream
                with self._streams.serving(stream):
                    await stream.begin()
                    if self._consumers_of is not None:
                        writing, say, say_error = asyncio.Lock(), self.say, self.say_error
                        client = StockClient(
                            context, self._writer, writing, say, say_error, self.start, self.is_alive, self.abort
                        )
                        self._consumers = self._consumers_of(client)
                    await self._serve(frames, stream)
            finally:
                await self._end()

    async def _connect(self, first: PulsarFrame) -> Any:
        """Identify the client by its first command. Send errors of the authentication to the client, and then raise
        them (for example UNAUTHENTICATED)."""
        if first.field != "connect":
            raise error("MALFORMED_MESSAGE", f"the first command is {first.field or 'unknown'}, and should be CONNECT")
        command = first.command.connect
        try:
            if command.auth_method_name not in _METHODS:
                why = f"the door accepts only tokens, but the client authenticates with {command.auth_method_name!r}"
                raise error("UNAUTHENTICATED", why)
            context = await self._find_caller(_token_in(command))
        except SeqdedupeError as e:
            self.say_error(_NO_ENTRY, e)
            raise
        self._client = command.client_version
        connected = CommandConnected(
            server_version=f"seqdedupe {version('seqdedupe')}",
            protocol_version=min(command.protocol_version, PROTOCOL_VERSION),
        )
        if (announced := await self._announced(command)) is not None:
            connected.protocol_version = announced.protocol_version
            connected.max_message_size = announced.max_message_size or MAX_ENTRY_BYTES
            connected.feature_flags.CopyFrom(announced.feature_flags)
        else:
            connected.max_message_size = await self._max_message_bytes()
        self._splitter.max_frame_bytes = max(MAX_ENTRY_BYTES, connected.max_message_size) + FRAME_OVERHEAD_BYTES
        self.say("connected", connected)
        return context

    async def _announced(self, command: CommandConnect) -> CommandConnected | None:
        """Return the brokers' announcement (CONNECTED) for the client, if the client's frames pass to the brokers."""
        if self._brokers is None:
            return None
        # Rights that are granted after this point belong to the connection.
        self._permissions.check_call("/seqdedupe.v1.PublishService/Open", b"")
        streams = self._streams
        share = Share(streams.reading, streams.shares.of(caller().name))
        registry = self._registry
        self._passing = BrokerPass(self._brokers, self._topics, self._permissions, self, share, command, registry)
        with suppress(TimeoutError):
            async with asyncio.timeout(ANNOUNCE_SECONDS):
                return await self._passing.announced()
        return None

    async def _max_message_bytes(self) -> int:
        limit = MAX_ENTRY_BYTES
        if self._log_limit is not None:
            with suppress(SeqdedupeError, TimeoutError):
                async with asyncio.timeout(LIMIT_SECONDS):
                    limit = min(limit, await self._log_limit())
        return limit

    async def _serve(self, frames: AsyncIterator[PulsarFrame], stream: Stream) -> None:
        keeping = asyncio.ensure_future(self._keep_alive())
        turn_ends = 0.0
        try:
            async for frame in frames:
                await self._take(frame, stream)
                if time.monotonic() >= turn_ends:
                    await asyncio.sleep(0)
                    turn_ends = time.monotonic() + TURN_SECONDS
                while len(self._requests) >= MAX_REQUESTS:
                    await asyncio.wait(self._requests, return_when=asyncio.FIRST_COMPLETED)
                if self._unread_bytes() > MAX_UNREAD_BYTES:
                    self._is_draining = True
                    await self._drain(stream)
                    self._is_draining = False
        finally:
            keeping.cancel()

    async def _frames(self) -> AsyncGenerator[PulsarFrame, None]:
        """Yield the client's frames. A large frame is received when the connection has a turn. The connection keeps the
        turn until the caller requests the next frame."""
        loop = asyncio.get_running_loop()
        began_at: float | None = None
        with _Turn(self._large_frames) as turn:
            while True:
                if self._splitter.held_bytes > READ_BYTES and await turn.take():
                    began_at = loop.time()
                self._is_reading = True
                async with asyncio.timeout_at(None if began_at is None else began_at + FRAME_SECONDS):
                    data = await self._reader.read(READ_BYTES)
                self._is_reading = self._is_silent = False
                if not data:
                    return
                self._reads += 1
                is_same = self._splitter.held_bytes > 0
                for frame in self._splitter.feed(data):
                    is_same = False
                    yield frame
                    turn.end()
                if not self._splitter.held_bytes:
                    began_at = None
                elif not is_same:
                    began_at = loop.time()

    async def _keep_alive(self) -> None:
        """End the connection of a client that no longer answers.

        The door also sends pings to a client from which it reads nothing for lack of room: any command shows the client
        that the door works. If the client does not read the pings either, it is considered gone.
        """
        while True:
            self._is_silent = True
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            if self._is_silent:
                self._ask()
                unread_bytes = self._unread_bytes()
                await asyncio.sleep(KEEP_ALIVE_SECONDS)
                reads_nothing = self._is_draining and self._unread_bytes() >= unread_bytes
                if self._is_silent and (self._is_reading or reads_nothing):
                    self.abort()

    def _unread_bytes(self) -> int:
        return self._writer.transport.get_write_buffer_size()

    def _ask(self) -> None:
        self._pings += 1
        self.say("ping", CommandPing())

    async def is_alive(self) -> bool:
        """Send the client a ping, and return whether the client is there. The door waits for the pong, because other
        data may be the last data of a connection that the client has closed. If no pong comes in time, data that came
        meanwhile are sufficient; so is a door that has no room to read from the client."""
        self._ask()
        pings, reads = self._pings, self._reads
        with suppress(TimeoutError):
            async with asyncio.timeout(ALIVE_SECONDS):
                while self._pongs < pings and not self._is_over():
                    await self._news.wait()
        is_waiting = not self._is_reading and not self._is_draining
        return not self._is_over() and (self._pongs >= pings or self._reads > reads or is_waiting)

    def _is_over(self) -> bool:
        return self._has_ended or self._writer.transport.is_closing()

    def abort(self) -> None:
        """End the connection at once."""
        self._writer.transport.abort()

    async def _end(self) -> None:
        self._has_ended = True
        self._news.tell()
        for task in self._requests:
            task.cancel()
        if self._requests:
            await asyncio.wait(self._requests)
        for producer_id in list(self._producers):
            self._forget(producer_id)
        if self._consumers is not None:
            self._consumers.stop()
        if self._passing is not None:
            await self._passing.close()

    # -- commands ----------------------------------------------------------------------------------------------

    async def _take(self, frame: PulsarFrame, stream: Stream) -> None:
        command = frame.command
        match frame.field:
            case "send":
                await self._send(command.send, frame, stream)
            case "ping":
                self.say("pong", CommandPong())
            case "pong":
                self._pongs += 1
                self._news.tell()
            case "":
                pass
            case "producer":
                self._start_opening(command.producer, stream)
            case "close_producer":
                self.start(self._close(command.close_producer.producer_id, command.close_producer.request_id))
            case "partitionMetadata":
                self.start(self._partitions(command.partitionMetadata))
            case "lookupTopic":
                self.start(self._look_up(command.lookupTopic))
            case "getOrCreateSchema" if self._passing is None or self._producer_of(command.getOrCreateSchema.topic):
                self.start(self._tell_schema(command.getOrCreateSchema))
            case _ if self._passing is not None:
                await self._spend(frame, stream)
                stream.moves()
                await self._passing.take(frame)
            case "getSchema":
                answer = CommandGetSchemaResponse(
                    request_id=command.getSchema.request_id, error_code=ServerError.TopicNotFound
                )
                self.say("getSchemaResponse", answer)
            case field if self._consumers is not None and field in COMMANDS:
                stream.moves()
                self._consumers.take(field, getattr(command, field))
            case field:
                self._refuse(command, field)

    def start(self, request: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start a task that ends with the connection."""
        task = asyncio.ensure_future(request)
        self._keep(task)
        return task

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._requests.add(task)
        task.add_done_callback(self._has_finished)

    def _has_finished(self, task: "asyncio.Task[None]") -> None:
        self._requests.discard(task)
        if not task.cancelled() and (e := task.exception()) is not None:
            # The client would wait for the answer.
            logger.error("a request from %s has ended by a defect", self.peer, exc_info=e)
            self.abort()

    async def _partitions(self, command: CommandPartitionedTopicMetadata) -> None:
        elsewhere = self._passing.partitions if self._passing is not None else None
        self.say("partitionMetadataResponse", await self._lookup.partitions(command, elsewhere, self))

    async def _look_up(self, command: CommandLookupTopic) -> None:
        self.say("lookupTopicResponse", await self._lookup.look_up(command))

    def _refuse(self, command: BaseCommand, field: str) -> None:
        """Answer a command that the door does not take."""
        request_id = getattr(getattr(command, field), "request_id", None)
        if request_id is not None:
            self.say_error(request_id, not_taken(field, is_own_log=self._consumers_of is not None))

    # -- producers ---------------------------------------------------------------------------------------------

    def _start_opening(self, command: CommandProducer, stream: Stream) -> None:
        if (before := self._opening.get(command.producer_id)) is not None:
            # The client has given up waiting for the first answer. Two openings would fence each other.
            before.cancel()
        self._forget(command.producer_id)
        task = asyncio.ensure_future(self._open(command, stream, before))
        self._opening[command.producer_id] = task
        self._keep(task)

    async def _open(self, command: CommandProducer, stream: Stream, before: "asyncio.Task[None] | None") -> None:
        """Open a producer, in these steps:

        1. Unsupported and forbidden requests are refused first, because a claim can end other producers.
        2. The name is claimed: as with a broker, only one producer has a name at a time.
        3. A session is opened, after all messages in flight under this name have settled.
        4. The client receives the highest sequence ID that the topic has for this name.
        """
        # Rights that are granted after this point belong to this task.
        self._permissions.check_call("/seqdedupe.v1.PublishService/Open", b"")
        producer_id = command.producer_id
        full = name = ""
        try:
            if before is not None:
                await asyncio.wait([before])
            if (final := self._refused.pop(producer_id, None)) is not None:
                self.say_error(command.request_id, final, ending_code_of(final))
                return
            full = topic_name(command.topic)
            check_options(command)  # 1
            layout = layout_for(command.schema, self._registry)
            if len(self._producers) + len(self._refused) >= MAX_PRODUCERS:
                raise error("QUEUE_FULL", f"the connection has {MAX_PRODUCERS} producers: that is the limit")
            name = command.producer_name or self._names.new_name()
            await self._publish.denied(full, [name])
            mode, wait = command.producer_access_mode, partial(self._tell_to_wait, command, name)
            await self._names.claim(full, name, mode, self, producer_id, wait)  # 2
            self._waiting.discard(producer_id)
            request = publish_pb2.OpenRequest(topic=full, producer_names=[name])
            opened = await self._publish.open(request, layout)  # 3
            for refusal in opened.refusals:
                raise error(refusal.reason, refusal.message)
            topic = await find(self._topics, full)
            version = await version_in(topic, command.schema, self._registry)
            self._producers[producer_id] = StockProducer(
                topic,
                ProducerSession(name.encode(), opened.epochs[0]),
                opened.persisted[0],
                stream,
                self._permissions.allowing(topic.name, topic.producers),
                lambda entry: self._answer(producer_id, entry),
                lambda e: self._ended(producer_id, e),
                goes_on=self._client.startswith((_JAVA, _CPP)),
                schema_version=version,
            )
            success = CommandProducerSuccess(
                request_id=command.request_id,
                producer_name=name,
                last_sequence_id=opened.persisted[0],
                schema_version=version,
            )
            self.say("producer_success", success)  # 4
        except SeqdedupeError as e:
            self.say_error(command.request_id, e)
        finally:
            if self._opening.get(producer_id) is asyncio.current_task():
                del self._opening[producer_id]
                self._waiting.discard(producer_id)
            if producer_id not in self._producers and name:
                self._names.release(full, name, self, producer_id)

    def _producer_of(self, topic: str) -> StockProducer | None:
        """Return a producer of this topic. Raises INVALID_TOPIC_NAME."""
        full = topic_name(topic)
        return next((one for one in self._producers.values() if one.topic.name == full), None)

    async def _tell_schema(self, request: CommandGetOrCreateSchema) -> None:
        producer = self._producer_of(request.topic)
        topic = producer.topic if producer is not None else None
        self.say("getOrCreateSchemaResponse", await answer_about(request, topic, self._registry))

    def _tell_to_wait(self, command: CommandProducer, name: str) -> None:
        """Notify the client that the answer arrives when the producer's turn comes. The client then waits without a
        time limit."""
        self._waiting.add(command.producer_id)
        success = CommandProducerSuccess(
            request_id=command.request_id, producer_name=name, schema_version=b"", producer_ready=False
        )
        self.say("producer_success", success)

    async def _send(self, command: CommandSend, frame: PulsarFrame, stream: Stream) -> None:
        producer = self._producers.get(command.producer_id)
        if producer is None or producer.is_closed:
            # The producer was ended. The client sends this entry again when it learns of the end.
            return
        await self._spend(frame, stream)
        try:
            self._permissions.check_disk(self._topics)
        except SeqdedupeError as e:
            producer.fail(e)
            return
        await producer.send(command, entry_of(frame.content))

    async def _spend(self, frame: PulsarFrame, stream: Stream) -> None:
        shares = self._streams.shares
        shares.spend(stream.use, len(frame.raw), time.monotonic())
        if rest_seconds := shares.rest_seconds(stream.use, time.monotonic()):
            await asyncio.sleep(rest_seconds)

    def _answer(self, producer_id: int, entry: PendingEntry) -> None:
        if entry.refused is not None:
            self._refuse_entry(producer_id, entry, entry.refused)
            return
        known = entry.message_id.ledger_id >= 0
        message_id = MessageIdData(
            ledgerId=entry.message_id.ledger_id if known else _NO_ENTRY,
            entryId=entry.message_id.entry_id if known else _NO_ENTRY,
        )
        receipt = CommandSendReceipt(
            producer_id=producer_id,
            sequence_id=entry.sequence_id,
            highest_sequence_id=entry.highest_sequence_id,
            message_id=message_id,
        )
        self.say("send_receipt", receipt)

    def _refuse_entry(self, producer_id: int, entry: PendingEntry, e: SeqdedupeError) -> None:
        """Refuse one entry permanently. Clients react differently to this refusal; some do not support it."""
        logger.warning("an entry of a producer from %s was refused: %s", self.peer, e)
        if self._client.startswith(_JAVA):
            sequence_id, code = max(entry.sequence_id, entry.highest_sequence_id), ServerError.NotAllowedError
        elif self._client.startswith(_CPP):
            # Only after this code the client drops the entry, and continues with the next entry.
            sequence_id, code = entry.sequence_id, ServerError.ChecksumError
        else:
            self._producers[producer_id].fail(e)
            return
        failure = CommandSendError(producer_id=producer_id, sequence_id=sequence_id, error=code, message=told(e))
        self.say("send_error", failure)

    def _ended(self, producer_id: int, e: SeqdedupeError) -> None:
        """Notify the client that a producer has ended. The client opens the producer again, and then receives an error
        if the end is final."""
        if is_final(e):
            logger.warning("a producer from %s was ended: %s", self.peer, e)
            self._refused[producer_id] = without_traceback(e)
        self._forget(producer_id)
        closed = CommandCloseProducer(producer_id=producer_id, request_id=_NO_ENTRY)
        self.say("close_producer", closed)

    def end_producer(self, producer_id: int, e: SeqdedupeError) -> None:
        """End a producer with this error."""
        if (producer := self._producers.get(producer_id)) is not None:
            producer.fail(e)

    async def _close(self, producer_id: int, request_id: int) -> None:
        if (opening := self._opening.get(producer_id)) is not None:
            if producer_id in self._waiting:
                opening.cancel()
            await asyncio.wait([opening])
        if (producer := self._producers.get(producer_id)) is not None:
            await producer.settle()
            self._forget(producer_id)
        self._refused.pop(producer_id, None)
        self.say("success", CommandSuccess(request_id=request_id))

    def _forget(self, producer_id: int) -> None:
        if (producer := self._producers.pop(producer_id, None)) is not None:
            producer.close()
            self._names.release(producer.topic.name, producer.session.name.decode(), self, producer_id)

    # -- answers -----------------------------------------------------------------------------------------------

    def say_error(self, request_id: int, e: SeqdedupeError, code: Any = None) -> None:
        """Send an ERROR with this code. Without a code, use the code for the error's reason."""
        refusals[e.reason] += 1
        failure = CommandError(request_id=request_id, error=code_of(e) if code is None else code, message=told(e))
        self.say("error", failure)

    def say(self, field: str, message: Message) -> None:
        """Send a command; `field` is its field in `BaseCommand`."""
        # uvloop raises an error if the transport is closed, and a producer's answers may arrive after that.
        if not self._writer.transport.is_closing():
            self._writer.write(command_frame(command_of(field, message)))

    async def pass_on(self, parts: Sequence[Any]) -> None:
        """Send whole frames of a broker. Return when the client has read most of the sent data."""
        if self._stream is None or self._writer.transport.is_closing():
            return
        self._stream.moves()
        self._writer.writelines(parts)
        if self._writer.transport.get_write_buffer_size() > READ_BYTES:
            await self._drain(self._stream)

    async def _drain(self, stream: Stream) -> None:
        """Wait until the client has read most of what was sent."""
        stream.writing_since = stream.writing_since or time.monotonic()
        with suppress(OSError):
            await self._writer.drain()
        stream.writing_since = None


def _token_in(command: CommandConnect) -> bytes | None:
    return command.auth_data if command.auth_method_name == "token" and command.auth_data else None
