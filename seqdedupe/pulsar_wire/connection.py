"""A connection to a broker. It sends requests, and has producers, whose receipts arrive in order, and readers, which
return entries as stored.

No entry is ever sent a second time. When a producer ends, the outcome of entries without a receipt is unknown, and is
reported as unknown. Only the caller can find out whether the log contains these entries.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from google.protobuf.message import Message

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.pulsar_wire.frames import (
    FRAME_OVERHEAD_BYTES,
    PulsarFrame,
    Splitter,
    WireEntry,
    command_frame,
    command_of,
    entry_frame,
    entry_frame_bytes,
    entry_of,
    malformed,
    metadata_of,
)
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    AuthData,
    CommandAuthResponse,
    CommandCloseConsumer,
    CommandCloseProducer,
    CommandConnect,
    CommandFlow,
    CommandGetLastMessageId,
    CommandLookupTopic,
    CommandLookupTopicResponse,
    CommandPartitionedTopicMetadata,
    CommandPartitionedTopicMetadataResponse,
    CommandPing,
    CommandPong,
    CommandProducer,
    CommandProducerSuccess,
    CommandSend,
    CommandSendReceipt,
    CommandSubscribe,
    Exclusive,
    FeatureFlags,
    MessageIdData,
    MessageMetadata,
    ProducerAccessMode,
    Property,
    Schema,
    ServerError,
)

TIMEOUT_SECONDS = 10.0
PING_SECONDS = 30.0
"""If a connection is silent for this time, a ping is sent. If the connection stays silent for the same time again, it
counts as ended."""
MAX_OUTSTANDING = 64
"""The usual maximum number of entries of a producer without a receipt. A writer of batches needs 16."""
MAX_REDIRECTS = 20
MAX_MESSAGE_BYTES = 5 * 1024 * 1024
"""The limit of a broker that announces none."""
READER_BYTES, READER_ROWS = 1024 * 1024, 10_000
"""The amount that a reader requests in advance. A broker counts rows, so the bytes are estimated by earlier rows."""
MAX_QUEUED, MAX_QUEUED_BYTES = 2 * READER_ROWS, 64 * 1024 * 1024
"""The maximum number of received entries and bytes that the caller has not read yet. A reader above this limit ends.
The limit is needed because rows may be larger than the rows before."""

_PORTS = {"pulsar": 6650, "pulsar+ssl": 6651}
_PROTOCOL_VERSION, _CLIENT_VERSION = 20, "seqdedupe"
_MAX_HANDSHAKE_BYTES, _READ_BYTES = 64 * 1024, 256 * 1024
_MAX_PERMITS = 2**31 - 1
_NO_LEDGER = 2**64 - 1
"""The ledger in the receipt of an entry that the broker treats as a duplicate, and does not store."""

_FORBIDS = (ServerError.AuthenticationError, ServerError.AuthorizationError)
_OWNED = (ServerError.ProducerBusy, ServerError.ProducerFenced, ServerError.ConsumerBusy)

Token = Callable[[], str]
"""A function that returns a token. It is called in a thread, so it may block."""


class WirePlace(NamedTuple):
    """Where an entry is stored."""

    ledger_id: int
    entry_id: int


class StoredEntry(NamedTuple):
    """An entry that a reader received."""

    place: WirePlace
    entry: WireEntry
    metadata: MessageMetadata


class EntryProducer:
    """A producer that a broker has accepted. `Connection.producer` makes it.

    Receipts arrive in the order of sending, each as a call of `on_receipt(sequence_id, place)`. When the producer ends,
    `on_end(why, sequence_ids)` is called once, with the IDs of all entries that were sent and have no receipt. The log
    contains the first N of these entries; N may be 0. Both callbacks must neither block nor raise.
    """

    def __init__(
        self,
        connection: "Connection",
        producer_id: int,
        on_receipt: Callable[[int, WirePlace], None],
        on_end: Callable[[SeqdedupeError, tuple[int, ...]], None],
        max_outstanding: int,
    ) -> None:
        self._connection = connection
        self._max_outstanding = max_outstanding
        self._id = producer_id
        self._on_receipt = on_receipt
        self._on_end = on_end
        self._outstanding: deque[int] = deque()
        self._ended: SeqdedupeError | None = None
        self._is_open = False
        self._command = CommandProducer(producer_id=producer_id)
        self.name = ""
        self.last_sequence_id = -1
        """The last sequence ID that the broker has reported. It is valid only if the broker's deduplication is on."""
        self.schema_version = b""
        """The version of the producer's schema in the topic; empty without a schema."""

    @property
    def outstanding(self) -> int:
        """The number of entries without a receipt."""
        return len(self._outstanding)

    def send(self, sequence_id: int, entry: WireEntry, *, highest: int | None = None, rows: int = 1) -> None:
        """Send an entry. If this raises an error, nothing was sent.

        Raises QUEUE_FULL (too many entries without a receipt), MESSAGE_TOO_LARGE, and what has ended the producer.
        """
        if self._ended is not None:
            raise self._ended
        if len(self._outstanding) >= self._max_outstanding:
            raise error("QUEUE_FULL", f"producer {self.name} has {self._max_outstanding} entries without a receipt")
        size, limit = entry_frame_bytes(entry), self._connection.max_message_bytes
        if size > limit:
            raise error("MESSAGE_TOO_LARGE", f"an entry of {size} bytes is larger than the broker's limit, {limit}")
        command = CommandSend(
            producer_id=self._id, sequence_id=sequence_id, highest_sequence_id=highest, num_messages=rows
        )
        self._outstanding.append(sequence_id)
        self._connection._write(*entry_frame(command_of("send", command), entry))

    async def close(self) -> None:
        """End the producer, after the receipts that the broker still sends. Raises the errors of `request`."""
        if self._ended is None:
            try:
                await self._connection.request("close_producer", CommandCloseProducer(producer_id=self._id))
            finally:
                self._end(error("LOG_REFUSED", f"producer {self.name} was closed"))

    def _received(self, receipt: CommandSendReceipt) -> None:
        if not self._outstanding or receipt.sequence_id != self._outstanding[0]:
            expected = self._outstanding[0] if self._outstanding else "none"
            raise malformed(f"a receipt for {receipt.sequence_id} came to {self.name}, and {expected} was expected")
        place = receipt.message_id
        if place.ledgerId == _NO_LEDGER:
            # The entry is lost. No later entry may count as stored in order.
            why = f"the broker takes entry {receipt.sequence_id} of {self.name} for a duplicate, and has not stored it"
            self._connection._abandon(self, error("LOG_REFUSED", why))
            return
        self._on_receipt(self._outstanding.popleft(), WirePlace(place.ledgerId, place.entryId))

    def _end(self, why: SeqdedupeError) -> None:
        self._connection._producers.pop(self._id, None)
        if self._ended is not None:
            return
        self._ended = why
        if self._is_open:
            unknown = tuple(self._outstanding)
            self._outstanding.clear()
            self._on_end(why, unknown)
        else:
            self._connection._requests.refuse(self._command.request_id, why)


class WireReader:
    """Reads a topic's entries as they are stored, with all metadata. `Connection.reader` makes it. The topic keeps no
    cursor for this reader."""

    def __init__(self, connection: "Connection", consumer_id: int) -> None:
        self.connection = connection
        self._id = consumer_id
        self._entries: asyncio.Queue[StoredEntry | None] = asyncio.Queue()
        self._queued_bytes = 0
        self._ended: SeqdedupeError | None = None
        self._asked = 0  # rows that have not been taken; below 0 if the last entry had more

    async def next(self) -> StoredEntry:
        """Return the next entry as soon as it arrives. If this is cancelled, no entry is lost. After all entries that
        arrived, raise the error that has ended the reader."""
        return self._taken(await self._entries.get())

    def next_now(self) -> StoredEntry | None:
        """Return the next entry if it has arrived, or None. Otherwise the same as `next`."""
        return None if self._entries.empty() else self._taken(self._entries.get_nowait())

    async def last(self) -> tuple[WirePlace, WirePlace | None]:
        """Return the place of the topic's last entry. If the broker reports it, also return the place before the
        reader's first entry. If the topic has no entry, the entry ID is -1. Raises the errors of `request`."""
        answer = await self.connection.request("getLastMessageId", CommandGetLastMessageId(consumer_id=self._id))
        has_begin = answer.HasField("consumer_mark_delete_position")
        return _signed(answer.last_message_id), _signed(answer.consumer_mark_delete_position) if has_begin else None

    def _taken(self, stored: StoredEntry | None) -> StoredEntry:
        if stored is None:
            self._entries.put_nowait(None)
            raise self._ended or error("LOG_UNREADABLE", "the reader was closed")
        rows, size = stored.metadata.num_messages_in_batch, len(stored.entry.payload)
        self._queued_bytes -= size
        self._asked -= rows
        wanted = min(max(READER_BYTES * max(rows, 1) // max(size, 1), 1), READER_ROWS)
        if 2 * self._asked <= wanted:
            self._ask(wanted - self._asked)
        return stored

    async def close(self) -> None:
        """End the reader. Raises the errors of `request`."""
        if self._ended is None:
            try:
                await self.connection.request("close_consumer", CommandCloseConsumer(consumer_id=self._id))
            finally:
                self._end(error("LOG_UNREADABLE", "the reader was closed"))

    def _ask(self, rows: int) -> None:
        self._asked += rows
        # An entry may claim any number of rows, and a broker treats a larger number as negative.
        while rows > 0 and self._ended is None:
            self.connection._command("flow", CommandFlow(consumer_id=self._id, messagePermits=min(rows, _MAX_PERMITS)))
            rows -= _MAX_PERMITS

    def _received(self, stored: StoredEntry) -> None:
        # Entries without rows need no permits.
        if self._entries.qsize() < MAX_QUEUED and self._queued_bytes < MAX_QUEUED_BYTES:
            self._queued_bytes += len(stored.entry.payload)
            self._entries.put_nowait(stored)
            return
        close = CommandCloseConsumer(consumer_id=self._id, request_id=self.connection._requests.new_number())
        self.connection._command("close_consumer", close)
        self._end(error("LOG_UNREADABLE", f"a reader got {self._entries.qsize()} entries that nobody has taken"))

    def _end(self, why: SeqdedupeError) -> None:
        self.connection._readers.pop(self._id, None)
        if self._ended is None:
            self._ended = why
            self._entries.put_nowait(None)


class Requests:
    """The requests of a connection that have no answer yet, by their numbers."""

    def __init__(self, url: str, first_number: int) -> None:
        self._url = url
        self._numbers = count(first_number)
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def new_number(self) -> int:
        """Return a number that no request has had."""
        return next(self._numbers)

    async def ask(self, field: str, message: Any, say: Callable[[str, Message], None], timeout: float | None) -> Any:
        """Number a request, send it with `say`, and return the answer. Raises LOG_REFUSED after the time limit."""
        message.request_id = number = self.new_number()
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            say(field, message)
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError as e:
            raise error("LOG_REFUSED", f"{self._url} does not answer {field} within {timeout} s") from e
        finally:
            del self._waiting[number]

    def answer(self, number: int, answer: Any) -> None:
        """Take an answer, if it is waited for."""
        if (waiting := self._waiting.get(number)) is not None and not waiting.done():
            waiting.set_result(answer)

    def refuse(self, number: int, why: SeqdedupeError) -> None:
        """Let a request fail, if its answer is waited for."""
        if (waiting := self._waiting.get(number)) is not None:
            fail(waiting, why)

    def fail(self, why: SeqdedupeError) -> None:
        """Let all requests fail."""
        for waiting in self._waiting.values():
            fail(waiting, why)


def fail(waiting: "asyncio.Future[Any]", why: SeqdedupeError) -> None:
    """Set this error as the future's result, unless the future is done. Nobody needs to read the error."""
    if not waiting.done():
        waiting.set_exception(why)
        waiting.exception()


class Connection:
    """A connection to one broker, made by `connect`. `close` ends the connection with all its producers and readers."""

    def __init__(
        self, url: str, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], token: Token | None
    ) -> None:
        self.url = url
        self.max_message_bytes = MAX_MESSAGE_BYTES
        """The maximum size of an entry in bytes, as announced by the broker."""
        self._input, self._output = streams
        self._token = token
        self._splitter = Splitter(_MAX_HANDSHAKE_BYTES)
        self._requests = Requests(url, 1)
        self._producers: dict[int, EntryProducer] = {}
        self._readers: dict[int, WireReader] = {}
        self._connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._heard = self._is_challenged = False
        self._ended: SeqdedupeError | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_open(self) -> bool:
        """Whether it still serves."""
        return self._ended is None

    async def request(self, field: str, message: Any, timeout: float | None = TIMEOUT_SECONDS) -> Any:
        """Set the request ID of a command, send the command, and return the command that answers the request.

        A caller that is cancelled or runs out of time ignores the answer. Raises LOG_REFUSED (also without an answer in
        time, or if the connection has ended), PULSAR_FORBIDS, TOPIC_NOT_FOUND, TOPIC_TERMINATED, NOT_OWNER. If the
        broker has answered, their number `server_error` is Pulsar's code.
        """
        return await self._requests.ask(field, message, self._command, timeout)

    async def partitions(self, topic: str) -> int:
        """Return the number of partitions of a topic; 0 if the topic is not partitioned. Raises the errors of
        `request`."""
        answer = await self.request("partitionMetadata", CommandPartitionedTopicMetadata(topic=topic))
        if answer.response == CommandPartitionedTopicMetadataResponse.Failed:
            raise refusal_of(self.url, answer.error, answer.message)
        return int(answer.partitions)

    async def lookup(self, topic: str, *, authoritative: bool = False) -> CommandLookupTopicResponse:
        """Ask the broker which broker serves the topic, and return the answer. Raises the errors of `request`."""
        command = CommandLookupTopic(topic=topic, authoritative=authoritative)
        answer: CommandLookupTopicResponse = await self.request("lookupTopic", command)
        if answer.response == CommandLookupTopicResponse.Failed:
            raise refusal_of(self.url, answer.error, answer.message)
        return answer

    async def producer(
        self,
        topic: str,
        on_receipt: Callable[[int, WirePlace], None],
        on_end: Callable[[SeqdedupeError, tuple[int, ...]], None],
        *,
        name: str = "",
        access_mode: ProducerAccessMode.ValueType = Exclusive,
        properties: Mapping[str, str] | None = None,
        schema: Schema | None = None,
        max_outstanding: int = MAX_OUTSTANDING,
        timeout: float | None = TIMEOUT_SECONDS,
    ) -> EntryProducer:
        """Open a producer. The connection must be to the topic's broker, see `connect_to_owner`.

        With WaitForExclusive and no time-out, this waits until the topic is free. If the caller gives up, the producer
        is closed as soon as it is open. Raises the errors of `request`; NOT_OWNER if the topic has another producer.
        """
        producer = EntryProducer(self, self._requests.new_number(), on_receipt, on_end, max_outstanding)
        self._producers[producer._id] = producer
        command = producer._command = CommandProducer(
            topic=topic,
            producer_id=producer._id,
            producer_name=name or None,
            user_provided_producer_name=bool(name),
            producer_access_mode=access_mode,
            schema=schema,
            metadata=[Property(key=key.encode(), value=value.encode()) for key, value in (properties or {}).items()],
        )
        try:
            answer: CommandProducerSuccess = await self.request("producer", command, timeout)
        except BaseException:
            self._producers.pop(producer._id, None)
            if self.is_open:
                # The broker may have opened the producer meanwhile, or may open it later.
                close = CommandCloseProducer(producer_id=producer._id, request_id=self._requests.new_number())
                self._command("close_producer", close)
            raise
        if producer._ended is not None:
            raise producer._ended
        producer._is_open = True
        producer.name, producer.schema_version = answer.producer_name, answer.schema_version
        producer.last_sequence_id = answer.last_sequence_id
        return producer

    async def reader(self, topic: str, name: str, start: WirePlace | None = None) -> WireReader:
        """Open a reader of the entries from the entry `start` on (None: of all entries).

        Raises the errors of `request`."""
        reader = WireReader(self, self._requests.new_number())
        self._readers[reader._id] = reader
        place = start or WirePlace(_NO_LEDGER, _NO_LEDGER)
        command = CommandSubscribe(
            topic=topic,
            subscription=name,
            subType=CommandSubscribe.Exclusive,
            consumer_id=reader._id,
            durable=False,
            start_message_id=MessageIdData(ledgerId=place.ledger_id, entryId=place.entry_id),
            initialPosition=CommandSubscribe.Earliest,
        )
        try:
            await self.request("subscribe", command)
        except BaseException:
            self._readers.pop(reader._id, None)
            if self.is_open:
                close = CommandCloseConsumer(consumer_id=reader._id, request_id=self._requests.new_number())
                self._command("close_consumer", close)
            raise
        reader._ask(1)
        return reader

    async def close(self) -> None:
        """End the connection and all its producers and readers."""
        self._fail(error("LOG_REFUSED", f"the connection to {self.url} was closed"))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(OSError):
            await self._output.wait_closed()

    # -- Its own work.

    async def _start(self, proxy_to: str) -> None:
        """Begin to serve. Returns when the broker has accepted the connection."""
        self._go(self._read())
        connect = CommandConnect(
            client_version=_CLIENT_VERSION,
            protocol_version=_PROTOCOL_VERSION,
            feature_flags=FeatureFlags(supports_auth_refresh=self._token is not None),
            proxy_to_broker_url=proxy_to or None,
        )
        if self._token is not None:
            connect.auth_method_name = "token"
            connect.auth_data = await self._present_token()
        self._command("connect", connect)
        await self._connected
        self._go(self._ping())

    def _go(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self) -> None:
        try:
            while data := await self._input.read(_READ_BYTES):
                self._heard = True
                for frame in self._splitter.feed(data):
                    self._handle(frame)
            self._fail(error("LOG_REFUSED", f"{self.url} has ended the connection"))
        except SeqdedupeError as e:
            self._fail(e)
        except OSError as e:
            self._fail(error("LOG_REFUSED", f"the connection to {self.url} is broken: {e}"))
        finally:
            # Do this even if a callback raises: no caller may wait for a connection that is no longer read.
            self._fail(error("LOG_REFUSED", f"the connection to {self.url} has failed"))

    async def _ping(self) -> None:
        while True:
            self._heard = False
            await asyncio.sleep(PING_SECONDS)
            if not self._heard:
                self._command("ping", CommandPing())
                await asyncio.sleep(PING_SECONDS)
                if not self._heard:
                    self._fail(error("LOG_REFUSED", f"{self.url} was silent for {2 * PING_SECONDS:.0f} s"))

    async def _answer_challenge(self) -> None:
        try:
            data = AuthData(auth_method_name="token", auth_data=await self._present_token())
        except SeqdedupeError as e:
            self._fail(e)
            return
        self._is_challenged = False
        response = CommandAuthResponse(client_version=_CLIENT_VERSION, response=data)
        response.protocol_version = _PROTOCOL_VERSION
        self._command("authResponse", response)

    async def _present_token(self) -> bytes:
        """Return the token. Raises the project's errors alone: callers wait for them, and try again."""
        try:
            return (await asyncio.to_thread(self._token)).encode() if self._token is not None else b""
        except SeqdedupeError:
            raise
        except Exception as e:  # noqa: BLE001 (any exception; its text may contain a part of the token)
            raise error("LOG_REFUSED", f"there is no token for {self.url} now: {type(e).__name__}") from None

    def _handle(self, frame: PulsarFrame) -> None:
        command = frame.command
        message: Any = getattr(command, frame.field) if frame.field else None
        match frame.field:
            case "ping":
                # A broker accepts any command as a sign of life. Pongs must not accumulate.
                if self._output.transport.get_write_buffer_size() < _MAX_HANDSHAKE_BYTES:
                    self._command("pong", CommandPong())
            case "connected":
                if message.max_message_size > 0:
                    self.max_message_bytes = message.max_message_size
                self._splitter.max_frame_bytes = self.max_message_bytes + FRAME_OVERHEAD_BYTES
                if not self._connected.done():
                    self._connected.set_result(None)
            case "authChallenge" if not self._is_challenged:
                self._is_challenged = True
                self._go(self._answer_challenge())
            case "send_receipt":
                if (producer := self._producers.get(message.producer_id)) is not None:
                    producer._received(message)
            case "send_error":
                if (producer := self._producers.get(message.producer_id)) is not None:
                    self._abandon(producer, refusal_of(self.url, message.error, message.message))
            case "close_producer":
                if (producer := self._producers.get(message.producer_id)) is not None:
                    producer._end(error("LOG_REFUSED", f"{self.url} has closed producer {producer.name}"))
            case "close_consumer":
                if (reader := self._readers.get(message.consumer_id)) is not None:
                    reader._end(error("LOG_UNREADABLE", f"{self.url} has closed a reader"))
            case "message":
                if (reader := self._readers.get(message.consumer_id)) is not None:
                    place = WirePlace(message.message_id.ledgerId, message.message_id.entryId)
                    entry = entry_of(frame.content)
                    reader._received(StoredEntry(place, entry, metadata_of(entry)))
            case "error" if self._connected.done():
                self._requests.refuse(message.request_id, refusal_of(self.url, message.error, message.message))
            case "error":
                self._fail(refusal_of(self.url, message.error, message.message))
            case "producer_success" if not message.producer_ready:
                # The producer waits for the topic. A second answer follows.
                pass
            case _:
                self._requests.answer(getattr(message, "request_id", 0), message)

    def _abandon(self, producer: EntryProducer, why: SeqdedupeError) -> None:
        """End a producer that the broker still has."""
        close = CommandCloseProducer(producer_id=producer._id, request_id=self._requests.new_number())
        self._command("close_producer", close)
        producer._end(why)

    def _command(self, field: str, message: Message) -> None:
        self._write(command_frame(command_of(field, message)))

    def _write(self, *parts: Any) -> None:
        if self._ended is not None:
            raise self._ended
        # Data written to a closed connection is lost, as on a broken connection. uvloop raises an error instead.
        if not self._output.is_closing():
            self._output.writelines(parts)

    def _fail(self, why: SeqdedupeError) -> None:
        """End the connection. Every request fails with this error, and the outcome of sent entries is unknown."""
        if self._ended is not None:
            return
        self._ended = why
        self._output.transport.abort()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        fail(self._connected, why)
        self._requests.fail(why)
        for producer in list(self._producers.values()):
            producer._end(why)
        for reader in list(self._readers.values()):
            reader._end(why)


async def connect(
    service_url: str,
    *,
    token: Token | None = None,
    tls: ssl.SSLContext | None = None,
    proxy_to: str = "",
    timeout: float = TIMEOUT_SECONDS,
) -> Connection:
    """Connect to the first host of `service_url` that answers: `pulsar://one:6650,two:6650`, or `pulsar+ssl://…`.

    If `tls` is None, the system's default is used. `proxy_to` names a broker for a Pulsar proxy. The hosts share the
    time-out. Raises LOG_REFUSED if no host answers in time, PULSAR_FORBIDS, and the errors of `token`.
    """
    failure: SeqdedupeError | None = None
    urls = urls_of(service_url)
    for url in urls:
        try:
            # Callers wait about this time for all hosts together. A silent host must not use up the whole time.
            async with asyncio.timeout(timeout / len(urls)):
                return await _connect(url, tls, token, proxy_to)
        except (OSError, ValueError) as e:
            # TimeoutError is an OSError.
            failure = error("LOG_REFUSED", f"{url} cannot be reached: {str(e) or 'no answer in time'}")
        except SeqdedupeError as e:
            if e.reason != "LOG_REFUSED":
                raise
            failure = e
    raise failure or error("LOG_REFUSED", f"{service_url} names no host")


async def connect_to_owner(service_url: str, topic: str, **options: Any) -> Connection:
    """Connect to the broker that serves the topic. `options` are the options of `connect`. Raises the errors of
    `connect` and `request`; LOG_REFUSED after MAX_REDIRECTS."""
    url, proxy_to, authoritative = service_url, "", False
    connection = await connect(url, **options)
    try:
        for _ in range(MAX_REDIRECTS):
            answer = await connection.lookup(topic, authoritative=authoritative)
            at = broker_in(answer, connection.url, topic)
            is_found = answer.response == CommandLookupTopicResponse.Connect
            authoritative = answer.authoritative
            url, proxy_to = (service_url, at) if answer.proxy_through_service_url else (at, "")
            if not (is_found and url == connection.url and not proxy_to):
                await connection.close()
                connection = await connect(url, proxy_to=proxy_to, **options)
            if is_found:
                return connection
        raise error("LOG_REFUSED", f"{topic} was looked up {MAX_REDIRECTS} times, and no broker serves it")
    except BaseException:
        await connection.close()
        raise


def broker_in(answer: CommandLookupTopicResponse, url: str, topic: str) -> str:
    """Return the URL of a broker that the host at `url` has named for a topic. Raises LOG_REFUSED."""
    at = answer.brokerServiceUrlTls if url.startswith("pulsar+ssl") else answer.brokerServiceUrl
    if not at:
        raise error("LOG_REFUSED", f"{url} names no broker for {topic}")
    return str(at)


def urls_of(service_url: str) -> list[str]:
    """Return a URL for each host of a service URL. Raises INVALID_CONFIGURATION."""
    parts = urlsplit(service_url)
    if parts.scheme not in _PORTS or not parts.netloc:
        raise error("INVALID_CONFIGURATION", f"{service_url} is no service URL of Pulsar")
    return [f"{parts.scheme}://{host}" for host in parts.netloc.split(",")]


async def open_streams(
    url: str, tls: ssl.SSLContext | None, limit: int = 2**16
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection to the host of this URL. If the URL requires TLS, use `tls` (None: the system's default).

    Raises OSError, ValueError."""
    place = urlsplit(url)
    context = (tls or ssl.create_default_context()) if place.scheme == "pulsar+ssl" else None
    return await asyncio.open_connection(place.hostname, place.port or _PORTS[place.scheme], ssl=context, limit=limit)


async def _connect(url: str, tls: ssl.SSLContext | None, token: Token | None, proxy_to: str) -> Connection:
    connection = Connection(url, await open_streams(url, tls), token)
    try:
        await connection._start(proxy_to)
    except BaseException:
        await connection.close()
        raise
    return connection


def _signed(place: MessageIdData) -> WirePlace:
    return WirePlace(*(one - 2**64 if one >= 2**63 else one for one in (place.ledgerId, place.entryId)))


def refusal_of(url: str, code: int, message: str) -> SeqdedupeError:
    """Return the error of a broker's refusal."""
    name = ServerError.Name(code) if code in ServerError.values() else str(code)  # type: ignore[arg-type]
    reason = "LOG_REFUSED"
    if code in _FORBIDS:
        reason = "PULSAR_FORBIDS"
    elif code in _OWNED:
        reason = "NOT_OWNER"
    elif code == ServerError.TopicNotFound:
        reason = "TOPIC_NOT_FOUND"
    elif code == ServerError.TopicTerminatedError:
        reason = "TOPIC_TERMINATED"
    return error(reason, f"{url} refuses: {message[:500]} ({name})", server_error=code)
