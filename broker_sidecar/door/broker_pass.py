"""Everything that a stock client does in addition to producing: the client's frames pass unchanged between the client
and the brokers.

`BrokerPass` belongs to one client. For each broker that the client needs, it has a connection, a `BrokerLink`, with the
client's own version and token. So the client's rights at the brokers apply. The frames of a consumer go to the broker
that owns the consumer's topic. Other frames go to the first broker, the *home*. The client numbers its requests and
consumers, and uses no number twice, so the answers of all brokers are passed to the client as they arrive. A broken
connection to a broker ends the client's connection, and the client connects again.

The entries that sidecars write for themselves reach only consumers that ask for them. The link acknowledges such an
entry in the consumer's name, and returns the consumer's permit to the broker.

Memory: a link keeps the data of one read. For a frame above 256 KiB, the link receives the rest of the frame when the
readers' memory has room. While the client does not read, nothing is read from the brokers.
"""

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from google.protobuf.message import Message

from broker_sidecar.door.own_entries import LastOfOthers, OwnReader, is_own, seen_entry
from broker_sidecar.door.schemas import SchemaRegistry, layout_for, version_in
from broker_sidecar.security.permissions import Need, On, Permissions
from broker_sidecar.security.rules import Action
from broker_sidecar.shares import Share
from seqdedupe.errors import AccessDeniedError, InvalidRequestError, NotFoundError, SeqdedupeError, error
from seqdedupe.names import namespace_name, namespace_of, topic_name, whole_of
from seqdedupe.pulsar_wire.connection import (
    MAX_MESSAGE_BYTES,
    MAX_REDIRECTS,
    PING_SECONDS,
    TIMEOUT_SECONDS,
    Requests,
    broker_in,
    fail,
    open_streams,
    refusal_of,
    urls_of,
)
from seqdedupe.pulsar_wire.frames import FRAME_OVERHEAD_BYTES, PulsarFrame, Splitter, command_frame, command_of
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    CommandAck,
    CommandCloseConsumer,
    CommandConnect,
    CommandConnected,
    CommandFlow,
    CommandGetLastMessageId,
    CommandLookupTopic,
    CommandLookupTopicResponse,
    CommandMessage,
    CommandPartitionedTopicMetadata,
    CommandPartitionedTopicMetadataResponse,
    CommandPing,
    CommandPong,
    CommandSubscribe,
    CommandSuccess,
    MessageIdData,
    Property,
    Schema,
    ServerError,
)
from seqdedupe.topic.directory import Topics, look_for
from seqdedupe.topic.topic import Topic

logger = logging.getLogger("broker_sidecar.door")

READ_BYTES = 256 * 1024
MAX_HANDSHAKE_BYTES = 64 * 1024
MAX_UNSENT_BYTES = 64 * 1024
"""A ping or pong is sent to a broker only if the broker has at most this number of bytes still to receive."""

MAX_CONSUMERS = 10_000
"""The most consumers of a connection."""

OWN_SUBSCRIPTIONS = "seqdedupe-"
"""The prefix of the sidecars' own subscriptions, which retain the entries that sidecars need."""

SHOW_OWN = Property(key=b"seqdedupe.own_entries", value=b"show")
"""The property of a consumer that receives the sidecars' own entries. Only with them, a consumer of a `plain` or
`packed` topic can recognize void entries."""

TRANSACTIONS_TOPIC = "persistent://pulsar/system/transaction_coordinator_assign"
"""The topic whose partitions coordinate transactions. A client that finds no partitions reports that transactions are
not available."""

_OWN_REQUESTS = range(2**62, 2**63)
"""The numbers of the door's own requests and readers. Clients count from 0, so none needs these numbers. A broker sends
no requests with numbers."""

_TRANSACTIONS = range(50, 64)
"""The types of commands about transactions."""


class BrokersToPass(NamedTuple):
    """The brokers to which clients' frames pass."""

    service_url: str
    tls: ssl.SSLContext | None
    namespaces: frozenset[str]
    """Those whose topics belong to sidecars."""


class ClientSide(Protocol):
    """The connection of the client."""

    def say(self, field: str, message: Message) -> None:
        """Send a command."""

    def say_error(self, request_id: int, e: SeqdedupeError, code: Any = None) -> None:
        """Send an ERROR."""

    async def pass_on(self, parts: Sequence[Any]) -> None:
        """Send whole frames. Return when the client has read most of the sent data."""

    def start(self, request: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start a task that ends with the connection. If it fails, the connection ends."""

    def abort(self) -> None:
        """End the connection."""


@dataclass(slots=True)
class PassedConsumer:
    """A consumer of the client."""

    link: "BrokerLink"
    last: LastOfOthers | None
    """None if no sidecars write to the topic, or the consumer has asked for their own entries. Otherwise own entries
    are hidden."""


class BrokerLink:
    """A connection to one broker for one client."""

    def __init__(
        self,
        url: str,
        passing: "BrokerPass",
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self.url = url
        self._passing = passing
        self._input, self._output = streams
        self._splitter = Splitter(MAX_HANDSHAKE_BYTES)
        self._requests = Requests(url, _OWN_REQUESTS.start)
        self._connected: asyncio.Future[CommandConnected] = asyncio.get_running_loop().create_future()
        self.connected = CommandConnected()
        """The broker's CONNECTED command, once the broker has accepted the client."""
        self._has_heard = self._is_reading = False
        self._tasks: list[asyncio.Task[None]] = []
        self._readers: dict[int, OwnReader] = {}
        self._hidden: dict[int, list[MessageIdData]] = {}
        """The entries that a consumer does not receive, until they are acknowledged."""

    async def connect(self, command: CommandConnect) -> None:
        """Authenticate the client at the broker. Raises LOG_REFUSED; PULSAR_FORBIDS if the broker refuses the
        client."""
        self._tasks.append(asyncio.ensure_future(self._read()))
        self.say("connect", command)
        self.connected = await self._connected
        self._tasks.append(asyncio.ensure_future(self._keep_alive()))

    async def request(self, field: str, message: Any) -> Any:
        """Send the door's own request, and return the answer. Raises LOG_REFUSED, and the broker's refusal."""
        return await self._requests.ask(field, message, self.say, TIMEOUT_SECONDS)

    def say(self, field: str, message: Message) -> None:
        """Send a command of the door's own."""
        self.write(command_frame(command_of(field, message)))

    def write(self, raw: Any) -> None:
        """Send a frame."""
        if not self._output.transport.is_closing():
            self._output.write(raw)

    async def pass_on(self, raw: Any) -> None:
        """Send a frame of the client. Return when the broker has received most of the sent data."""
        self.write(raw)
        with suppress(OSError):
            await self._output.drain()

    def close_consumer(self, consumer_id: int) -> None:
        """Close a consumer whose client has it elsewhere."""
        self.say(
            "close_consumer", CommandCloseConsumer(consumer_id=consumer_id, request_id=self._requests.new_number())
        )

    @asynccontextmanager
    async def reader(self, command: CommandSubscribe) -> AsyncIterator[OwnReader]:
        """Open a reader of the door's own, and close it at the end of the block. Raises the errors of `request`."""
        command.consumer_id = number = self._requests.new_number()
        self._readers[number] = OwnReader(command.read_compacted, number, asyncio.Queue())
        try:
            await self.request("subscribe", command)
            yield self._readers[number]
        finally:
            del self._readers[number]
            self.close_consumer(number)

    async def close(self) -> None:
        """End the connection."""
        self._output.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end(error("LOG_REFUSED", f"the connection to {self.url} was closed"))

    def _end(self, why: SeqdedupeError) -> None:
        fail(self._connected, why)
        self._requests.fail(why)

    # -- from the broker ---------------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            await self._pass_all()
            why = error("LOG_REFUSED", f"{self.url} has ended the connection")
        except SeqdedupeError as e:
            why = e
        except OSError as e:
            why = error("LOG_REFUSED", f"the connection to {self.url} is broken: {e}")
        except Exception as e:
            # The client would wait for its messages.
            logger.exception("what came from %s could not be passed on", self.url)
            why = error("LOG_REFUSED", f"the connection to {self.url} has ended by a defect: {type(e).__name__}")
        if self._connected.done():
            self._passing.has_ended(why)
        self._end(why)

    async def _pass_all(self) -> None:
        share, held = self._passing.share, 0
        is_large = False
        try:
            while True:
                if not is_large:
                    is_large = self._splitter.held_bytes > READ_BYTES
                    # One link of the client waits at a time.
                    async with self._passing.waiting:
                        if is_large:
                            share.give_back(held)
                            held = 0
                            await share.reserve(self._splitter.max_frame_bytes)
                            held = self._splitter.max_frame_bytes
                        else:
                            await share.wait_for(READ_BYTES)
                self._is_reading = True
                data = await self._input.read(READ_BYTES)
                self._is_reading, self._has_heard = False, True
                if not data:
                    return
                if not is_large:
                    share.take(len(data))
                    held += len(data)
                parts = [part for frame in self._splitter.feed(data) if (part := self._passed(frame)) is not None]
                self._acknowledge_hidden()
                if parts:
                    await self._passing.client.pass_on(parts)
                    share.has_been_read = True
                del data, parts
                if self._splitter.held_bytes <= READ_BYTES:
                    share.give_back(held)
                    held, is_large = 0, False
        finally:
            share.give_back(held)

    def _passed(self, frame: PulsarFrame) -> Any:
        """Return the part of a frame that is passed to the client; None for a frame that is for the door."""
        command = frame.command
        message: Any = getattr(command, frame.field) if frame.field else None
        match frame.field:
            case "ping":
                if self._output.transport.get_write_buffer_size() < MAX_UNSENT_BYTES:
                    self.say("pong", CommandPong())
                return None
            case "pong":
                return None
            case "connected":
                self._splitter.max_frame_bytes = (message.max_message_size or MAX_MESSAGE_BYTES) + FRAME_OVERHEAD_BYTES
                if not self._connected.done():
                    self._connected.set_result(message)
                return None
            case "error" if not self._connected.done():
                raise refusal_of(self.url, message.error, message.message)
            case "message":
                return self._passed_entry(message, frame)
            case "close_consumer" | "reachedEndOfTopic" | "active_consumer_change" if (
                message.consumer_id in _OWN_REQUESTS
            ):
                if frame.field == "close_consumer" and (reader := self._readers.get(message.consumer_id)) is not None:
                    reader.entries.put_nowait(None)
                return None
            case "authChallenge":
                self._passing.challenged.append(self)
            case "close_consumer" if message.assignedBrokerServiceUrl or message.assignedBrokerServiceUrlTls:
                # Otherwise the client would connect its producers to the brokers directly.
                message.ClearField("assignedBrokerServiceUrl")
                message.ClearField("assignedBrokerServiceUrlTls")
                return command_frame(command)
            case "success" | "error":
                self._passing.was_answered(message.request_id, is_success=frame.field == "success")
        number = getattr(message, "request_id", 0)
        if number not in _OWN_REQUESTS:
            return frame.raw
        if frame.field == "error":
            self._requests.refuse(number, refusal_of(self.url, message.error, message.message))
        else:
            self._requests.answer(number, message)
        return None

    def _passed_entry(self, message: CommandMessage, frame: PulsarFrame) -> Any:
        consumer = self._passing.consumer(message.consumer_id)
        if consumer is not None and consumer.link is self:
            if consumer.last is None or not is_own(frame.content):
                return frame.raw
            self._hidden.setdefault(message.consumer_id, []).append(message.message_id)
        elif (reader := self._readers.get(message.consumer_id)) is not None:
            place = message.message_id.ledgerId, message.message_id.entryId
            reader.entries.put_nowait(seen_entry(place, frame.content, is_compacted=reader.is_compacted))
        # Otherwise the consumer has moved to another broker.
        return None

    def _acknowledge_hidden(self) -> None:
        """Do for the hidden entries what the client would do for messages. The acknowledgements are not waited for: a
        broker may receive nothing while its own data is not read."""
        for consumer_id, places in self._hidden.items():
            ack = CommandAck(consumer_id=consumer_id, ack_type=CommandAck.Individual, message_id=places)
            self.say("ack", ack)
            self.say("flow", CommandFlow(consumer_id=consumer_id, messagePermits=len(places)))
        self._hidden.clear()

    async def _keep_alive(self) -> None:
        """Keep the connection to the broker alive, even while no data is read from the broker. Detect when the broker
        has failed."""
        while True:
            self._has_heard = False
            if self._output.transport.get_write_buffer_size() < MAX_UNSENT_BYTES:
                self.say("ping", CommandPing())
            await asyncio.sleep(PING_SECONDS / 2)
            if not self._has_heard and self._is_reading:
                await asyncio.sleep(PING_SECONDS)
                if not self._has_heard and self._is_reading:
                    self._output.transport.abort()


class BrokerPass:
    """The passing of one client's frames."""

    def __init__(
        self,
        brokers: BrokersToPass,
        topics: Topics[Topic],
        permissions: Permissions,
        client: ClientSide,
        share: Share,
        connect: CommandConnect,
        registry: SchemaRegistry | None = None,
    ) -> None:
        """`share` is the memory for data that brokers send. `connect` is the client's own command, whose caller is
        already identified."""
        self.client = client
        self.share = share
        self.challenged: deque[BrokerLink] = deque()
        """The links whose brokers have requested the client's authentication again, in the order of the requests."""
        self.waiting = asyncio.Lock()
        """Held by the link that waits for memory."""
        self._brokers = brokers
        self._registry = registry
        self._topics = topics
        self._permissions = permissions
        token = connect.auth_data if connect.auth_data.count(b".") == 2 else b""
        # A token that is not a JSON Web Token is the sidecar's own token, which the brokers must not see.
        self._connect = CommandConnect(
            client_version=connect.client_version,
            protocol_version=connect.protocol_version,
            auth_method_name="token" if token else "none",
            auth_data=token,
            feature_flags=connect.feature_flags,
        )
        self._links: dict[tuple[str, str], asyncio.Task[BrokerLink]] = {}
        self._first: BrokerLink | None = None
        """The home."""
        self._consumers: dict[int, PassedConsumer] = {}
        self._subscribing: dict[int, asyncio.Task[None]] = {}
        self._unsubscribing: dict[int, int] = {}
        """The consumers of requests to remove their subscription."""
        self._granted: set[str] = set()
        """The topics and namespaces that the client may read according to the rules."""
        self._is_closed = False

    # -- links -------------------------------------------------------------------------------------------------

    async def announced(self) -> CommandConnected | None:
        """Connect to the first broker that answers, and return the broker's CONNECTED command; None if no broker
        accepts the client now."""
        try:
            return (await self._home()).connected
        except SeqdedupeError as e:
            logger.info("frames of a client cannot pass to the brokers now: %s", e)
            return None

    async def _home(self) -> BrokerLink:
        if self._first is not None:
            return self._first
        why: SeqdedupeError | None = None
        for url in urls_of(self._brokers.service_url):
            try:
                link = await self._link(url)
            except SeqdedupeError as e:
                why = e
            else:
                self._first = self._first or link
                return self._first
        raise why or error("LOG_REFUSED", "pulsar.service_url names no host")

    async def _link(self, url: str, proxy_to: str = "") -> BrokerLink:
        """Return the link to the broker at this URL. If the URL is a Pulsar proxy's, `proxy_to` names the broker behind
        the proxy."""
        task = self._links.get((url, proxy_to))
        if task is None:
            task = self._links[url, proxy_to] = asyncio.ensure_future(self._open(url, proxy_to))
        try:
            return await asyncio.shield(task)
        except SeqdedupeError:
            if self._links.get((url, proxy_to)) is task:
                del self._links[url, proxy_to]
            raise

    async def _open(self, url: str, proxy_to: str) -> BrokerLink:
        link: BrokerLink | None = None
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                link = BrokerLink(url, self, await open_streams(url, self._brokers.tls, READ_BYTES // 8))
                command = CommandConnect()
                command.CopyFrom(self._connect)
                if proxy_to:
                    command.proxy_to_broker_url = proxy_to
                await link.connect(command)
        except BaseException as e:
            if link is not None:
                await link.close()
            if isinstance(e, OSError | ValueError):
                # TimeoutError is an OSError.
                why = str(e) or "no answer in time"
                raise error("LOG_REFUSED", f"{url} cannot be reached: {why}") from None
            raise
        return link

    async def _owner(self, topic: str) -> BrokerLink:
        """Return the link to the broker that serves this topic."""
        link, authoritative = await self._home(), False
        for _ in range(MAX_REDIRECTS):
            command = CommandLookupTopic(topic=topic, authoritative=authoritative)
            answer: CommandLookupTopicResponse = await link.request("lookupTopic", command)
            if answer.response == CommandLookupTopicResponse.Failed:
                raise refusal_of(link.url, answer.error, answer.message)
            at = broker_in(answer, link.url, topic)
            link = await (self._link(link.url, at) if answer.proxy_through_service_url else self._link(at))
            if answer.response == CommandLookupTopicResponse.Connect:
                return link
            authoritative = answer.authoritative
        raise error("LOG_REFUSED", f"{topic} was looked up {MAX_REDIRECTS} times, and no broker serves it")

    def has_ended(self, why: SeqdedupeError) -> None:
        """End the client's connection: its consumers at this broker have ended."""
        if not self._is_closed:
            logger.info("the connection of a client ends with that to its broker: %s", why)
            self.client.abort()

    async def close(self) -> None:
        """End all links."""
        self._is_closed = True
        for task in self._links.values():
            task.cancel()
        for link in await asyncio.gather(*self._links.values(), return_exceptions=True):
            if isinstance(link, BrokerLink):
                await link.close()

    # -- frames of the client ----------------------------------------------------------------------------------

    @property
    def consumers(self) -> int:
        """The number of consumers and readers."""
        return len(self._consumers)

    def consumer(self, consumer_id: int) -> PassedConsumer | None:
        """Return a consumer of the client."""
        return self._consumers.get(consumer_id)

    def was_answered(self, request_id: int, *, is_success: bool) -> None:
        """Forget a consumer whose subscription was removed, because the client does not close such a consumer."""
        consumer_id = self._unsubscribing.pop(request_id, None)
        if consumer_id is not None and is_success:
            self._consumers.pop(consumer_id, None)

    async def partitions(self, topic: str) -> int:
        """Return the number of partitions of a topic that no sidecar owns; 0 if the brokers do not report the
        number."""
        if topic == TRANSACTIONS_TOPIC:
            return 0
        command = CommandPartitionedTopicMetadata(topic=topic, metadata_auto_creation_enabled=False)
        try:
            link = await self._home()
            answer: CommandPartitionedTopicMetadataResponse = await link.request("partitionMetadata", command)
        except SeqdedupeError as e:
            # A producer needs no rights at the brokers, and its topic may not exist yet.
            logger.info("the number of partitions of %s is not known: %s", topic, e)
            return 0
        return int(answer.partitions) if answer.response == CommandPartitionedTopicMetadataResponse.Success else 0

    async def take(self, frame: PulsarFrame) -> None:
        """Pass a frame to its broker. Return when the broker has room for more. Raises INVALID_REQUEST if the client's
        connection must end."""
        command, field = frame.command, frame.field
        message: Any = getattr(command, field) if field else None
        for name in ("consumer_id", "request_id"):
            if getattr(message, name, 0) in _OWN_REQUESTS:
                raise error("INVALID_REQUEST", f"a client uses a {name} of the door's own: {getattr(message, name)}")
        match field:
            case "subscribe":
                self._subscribe(frame)
            case "close_consumer":
                self._close_consumer(frame)
            case "unsubscribe" | "seek" | "getLastMessageId" | "consumerStats":
                if (consumer := self._consumers.get(message.consumer_id)) is None:
                    self._say_no_consumer(message.request_id, message.consumer_id)
                    return
                if field == "getLastMessageId" and consumer.last is not None:
                    self._answer(message.request_id, self._say_last(consumer.link, consumer.last, message))
                    return
                if field == "unsubscribe" and len(self._unsubscribing) < MAX_CONSUMERS:
                    self._unsubscribing[message.request_id] = message.consumer_id
                await consumer.link.pass_on(frame.raw)
            case "ack" | "flow" | "redeliverUnacknowledgedMessages":
                if (consumer := self._consumers.get(message.consumer_id)) is not None:
                    await consumer.link.pass_on(frame.raw)
                elif getattr(message, "request_id", 0):
                    self._say_no_consumer(message.request_id, message.consumer_id)
            case "authResponse":
                if self.challenged:
                    await self.challenged.popleft().pass_on(frame.raw)
            case "getSchema" | "getOrCreateSchema":
                self._answer(message.request_id, self._to_topic(frame, message.topic))
            case "getTopicsOfNamespace" | "watchTopicList":
                self._answer(message.request_id, self._about_namespace(frame, message.namespace))
            case "" if command.type in _TRANSACTIONS:
                raise error("INVALID_REQUEST", "a client asks for a transaction, which the door does not support")
            case _:
                self._answer(getattr(message, "request_id", 0), self._to_home(frame))

    def _say_no_consumer(self, request_id: int, consumer_id: int) -> None:
        e = error("INVALID_REQUEST", f"the connection has no consumer {consumer_id}")
        self.client.say_error(request_id, e, ServerError.MetadataError)

    def _answer(self, request_id: int, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start work whose error is the answer to the client's request."""

        async def answered() -> None:
            try:
                await work
            except SeqdedupeError as e:
                self.client.say_error(request_id, e, _broker_code_of(e))

        return self.client.start(answered())

    async def _to_home(self, frame: PulsarFrame) -> None:
        await (await self._home()).pass_on(frame.raw)

    async def _to_topic(self, frame: PulsarFrame, topic: str) -> None:
        full = topic_name(topic)
        if frame.field == "getSchema":
            self._check_may_read(full)
        else:
            self._permissions.check_topic(Action.PUBLISH, full)
        await (await self._owner(full)).pass_on(frame.raw)

    async def _about_namespace(self, frame: PulsarFrame, namespace: str) -> None:
        self._grant(namespace, lambda: self._permissions.check(Need(On.NAMESPACE, (Action.READ,)), namespace))
        namespace_name(namespace)
        await self._to_home(frame)

    def _check_may_read(self, full: str) -> None:
        self._grant(full, lambda: self._permissions.check_topic(Action.READ, full))

    def _grant(self, name: str, check: Callable[[], None]) -> None:
        """Check a right once. If a later change of the rules removes the right, the connection ends."""
        if name not in self._granted:
            if len(self._granted) >= MAX_CONSUMERS:
                raise error("QUEUE_FULL", f"the connection has used {MAX_CONSUMERS} topics: that is the limit")
            check()
            self._granted.add(name)

    # -- consumers ---------------------------------------------------------------------------------------------

    def _subscribe(self, frame: PulsarFrame) -> None:
        command = frame.command.subscribe
        if (before := self._subscribing.get(command.consumer_id)) is not None:
            # The client has given up waiting for the first answer.
            before.cancel()
        task = self._answer(command.request_id, self._open_consumer(frame))
        self._subscribing[command.consumer_id] = task

        def has_finished(task: "asyncio.Task[None]") -> None:
            if self._subscribing.get(command.consumer_id) is task:
                del self._subscribing[command.consumer_id]

        task.add_done_callback(has_finished)

    async def _open_consumer(self, frame: PulsarFrame) -> None:
        command, raw = frame.command.subscribe, frame.raw
        full = topic_name(command.topic)
        self._check_may_read(full)
        if command.subscription.startswith(OWN_SUBSCRIPTIONS):
            why = f"the subscription {command.subscription} belongs to a sidecar"
            raise error("INVALID_REQUEST", why, hint="Choose another name for the subscription.")
        if len(self._consumers) >= MAX_CONSUMERS:
            raise error("QUEUE_FULL", f"the connection has {MAX_CONSUMERS} consumers: that is the limit")
        if command.force_topic_creation and not await self._may_create(full, command.schema):
            command.force_topic_creation = False
            raw = memoryview(command_frame(frame.command))
        link = await self._owner(full)
        before = self._consumers.get(command.consumer_id)
        like = CommandSubscribe(
            topic=full, subscription=command.subscription, read_compacted=command.read_compacted or None
        )
        hides_own = namespace_of(full) in self._brokers.namespaces and SHOW_OWN not in command.metadata
        self._consumers[command.consumer_id] = PassedConsumer(link, LastOfOthers(like) if hides_own else None)
        if before is not None and before.link is not link:
            before.link.close_consumer(command.consumer_id)
        await link.pass_on(raw)

    async def _may_create(self, full: str, schema: Schema) -> bool:
        """Return whether the brokers may create the topic of a consumer.

        If the topic is in the sidecars' namespaces and is missing, the sidecar creates the topic. Producers could not
        publish through the sidecar to a topic that the brokers have created.
        """
        if namespace_of(full) not in self._brokers.namespaces or whole_of(full) is not None:
            return True
        await look_for(self._topics, full)
        if self._topics.registry.found(full) is not None or full in self._topics.partitions:
            return True
        try:
            self._permissions.check_creates(full, self._topics.registry.names())
            topic = await self._topics.get_or_create(full, layout_for(schema, self._registry))
            # A broker refuses a typed consumer of a topic that has a producer but no schema.
            await version_in(topic, schema, self._registry)
        except SeqdedupeError as e:
            if e.reason == "TOPIC_EXISTS":
                return True
            if not isinstance(e, NotFoundError | AccessDeniedError | InvalidRequestError):
                raise
            return False
        return True

    def _close_consumer(self, frame: PulsarFrame) -> None:
        command = frame.command.close_consumer
        if (subscribing := self._subscribing.get(command.consumer_id)) is not None:
            subscribing.cancel()
        consumer = self._consumers.pop(command.consumer_id, None)
        if consumer is None:
            self.client.say("success", CommandSuccess(request_id=command.request_id))
            return
        consumer.link.write(frame.raw)

    async def _say_last(self, link: BrokerLink, last: LastOfOthers, command: CommandGetLastMessageId) -> None:
        answer = await last.ask(link, command.consumer_id)
        answer.request_id = command.request_id
        self.client.say("getLastMessageIdResponse", answer)


def _broker_code_of(e: SeqdedupeError) -> Any:
    """Return the code that a broker has sent, if the error is a broker's refusal."""
    code = e.numbers.get("server_error")
    return None if code is None else int(code)
