"""The door: the address at which stock producers of Apache Pulsar reach this sidecar."""

import asyncio
import logging
import secrets
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakSet

from broker_sidecar.cluster.peers import Neighbours
from broker_sidecar.config import Config
from broker_sidecar.connections import origin_of
from broker_sidecar.door.broker_pass import BrokersToPass
from broker_sidecar.door.consumer_commands import Consumers
from broker_sidecar.door.pulsar_connection import (
    READ_BYTES,
    LogLimit,
    PulsarConnection,
)
from broker_sidecar.door.schemas import SchemaRegistry
from broker_sidecar.door.stock_consumer import LAST_MOVE_SECONDS, Reach, StockClient
from broker_sidecar.door.stock_producer import counted
from broker_sidecar.door.subscriptions import Subscriptions
from broker_sidecar.door.topic_lookup import TopicLookup
from broker_sidecar.gate import Guard
from broker_sidecar.security.subject import peer_at
from broker_sidecar.services.publish_service import PublishService
from broker_sidecar.services.read_service import Cursors
from broker_sidecar.streams import Streams
from seqdedupe.address import SidecarAddress, cannot_listen
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.pulsar_wire.pulsar_api_pb2 import Exclusive, ExclusiveWithFencing, WaitForExclusive
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.readers import Turns
from seqdedupe.topic.topic import Topic

logger = logging.getLogger("broker_sidecar.door")

MAX_UNKNOWN = 64
"""The maximum number of connections with unidentified clients. A further connection ends the oldest such connection of
the origin with the most such connections."""

TLS_SECONDS = 10.0
"""The time within which a client must complete the TLS handshake."""

LARGE_FRAMES_AT_ONCE = 8
"""The maximum number of frames above 256 KiB that are received at the same time, with 40 MiB together. Other large
frames wait only for their turn. So incomplete frames never wait for each other."""

STOP_SECONDS = 2.0
"""The time in which a client can read its last answers when its connection ends, or the sidecar stops."""

_METHOD = "pulsar.CONNECT"
"""The name of a connection in the audit trail."""

_ALONE = frozenset({Exclusive, ExclusiveWithFencing, WaitForExclusive})
"""The access modes of producers that need exclusive access to their topic. A producer with the second mode ends the
other producers."""


class ShownCredentials:
    """The credentials that a client has presented. The authentication reads them in the same way as from a gRPC
    call."""

    def __init__(self, peer: str, auth_context: Mapping[str, Any], token: bytes | None) -> None:
        self._peer = peer
        self._auth_context = auth_context
        self._token = token

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> Mapping[str, Any]:
        return self._auth_context

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        if self._token is None:
            return ()
        return (("authorization", f"Bearer {self._token.decode(errors='replace')}"),)

    def add_done_callback(self, callback: Callable[..., object]) -> None:
        """Nothing is left in gRPC when this connection ends."""

    async def send_initial_metadata(self, metadata: object) -> None:
        """Pulsar's protocol has none."""


class NameHolder(NamedTuple):
    """Who has a producer's name."""

    connection: PulsarConnection
    producer_id: int


class Door:
    """The listener, the connections, and the producers' names."""

    def __init__(
        self,
        config: Config,
        guard: Guard,
        streams: Streams,
        topics: Topics[Topic],
        publish: PublishService,
        has_to_answer: Callable[[str], Awaitable[bool]],
        log_limit: LogLimit | None = None,
        brokers: BrokersToPass | None = None,
        neighbours: Neighbours | None = None,
        registry: SchemaRegistry | None = None,
    ) -> None:
        """`has_to_answer` returns whether to answer an unknown client from this peer. Without `log_limit`, the log
        accepts every message that the sidecar accepts. Without `brokers`, consumers of a cluster are refused. Without
        `neighbours`, no client is sent to another door. Without `registry`, the log keeps no schemas."""
        self._config = config
        self._guard = guard
        self._streams = streams
        self._topics = topics
        self._publish = publish
        self._has_to_answer = has_to_answer
        self._log_limit = log_limit
        self._brokers = brokers
        self._registry = registry
        several = neighbours is not None and (topics.kind.log.is_shared or bool(config.shards))
        self._lookup = TopicLookup(topics, guard.permissions, neighbours, names_itself=several)
        self._server: asyncio.Server | None = None
        self._serving: dict[asyncio.Task[None], str] = {}
        """The origin of each connection's client, until it is known; then an empty text."""
        self._served: set[PulsarConnection] = set()
        self._holders: dict[str, dict[str, NameHolder]] = {}
        """By topic and name."""
        self._large_frames = asyncio.Semaphore(LARGE_FRAMES_AT_ONCE)
        self._alone: dict[str, NameHolder] = {}
        """The producers that are alone in their topic."""
        self._queues: dict[str, list[asyncio.Event]] = {}
        """By topic: the turns of the producers that wait for exclusive access to the topic. A queue is never empty."""
        self._consumers: WeakSet[Consumers] = WeakSet()
        permissions = guard.permissions
        cursors = Cursors(topics, permissions)
        self._reach = Reach(topics, streams, permissions, guard.trail, cursors, Subscriptions(), Turns())

    @property
    def producers(self) -> int:
        """The number of producers, including those that are being opened."""
        return sum(map(len, self._holders.values()))

    @property
    def consumers(self) -> int:
        """The number of consumers and readers. Consumers that are being opened, and consumers whose frames pass to the
        brokers, are included."""
        return sum(map(len, self._consumers)) + sum(connection.passing for connection in self._served)

    @property
    def connections(self) -> int:
        """The number of connections."""
        return len(self._serving)

    @property
    def opened_producers(self) -> int:
        """The number of producers opened since the sidecar's start. A producer that was opened again counts again."""
        return counted["producers"]

    @property
    def receipts(self) -> int:
        """The number of entries that were answered with a receipt since the sidecar's start."""
        return counted["receipts"]

    async def listen(self) -> SidecarAddress:
        """Listen, and return the address with its port. Raises CANNOT_LISTEN, INVALID_CONFIGURATION."""
        address = SidecarAddress.parse(self._config.pulsar_listen)
        self.read_certificates()
        try:
            self._server = await asyncio.start_server(
                self._accepted,
                address.host.strip("[]"),
                address.port,
                limit=READ_BYTES,
                ssl=self._listening_tls(),
                ssl_handshake_timeout=None if self._tls is None else TLS_SECONDS,
            )
        except OSError as e:
            raise cannot_listen(address, e, "pulsar_listen") from e
        port = self._server.sockets[0].getsockname()[1]
        address = SidecarAddress(address.host, port)
        reached = self._config.advertised_pulsar_address
        self._lookup.scheme = "pulsar" if self._tls is None else "pulsar+ssl"
        if reached or not address.is_everywhere:
            self._lookup.own_url = f"{self._lookup.scheme}://{reached or address}"
        return address

    @property
    def url(self) -> str:
        """The URL by which clients reach the door; empty if it is not known."""
        return self._lookup.own_url

    def _listening_tls(self) -> ssl.SSLContext | None:
        """Return the TLS context of the listener. Each connection uses the present context when its client begins the
        handshake."""
        listening = self._tls
        if listening is not None:

            def take_present(connection: ssl.SSLObject, *_: object) -> None:
                connection.context = self._tls or listening

            listening.sni_callback = take_present
        return listening

    def read_certificates(self) -> None:
        """Use the present TLS files for connections that begin from now on. Raises INVALID_CONFIGURATION."""
        config = self._config
        if not config.tls_certificate_file:
            self._tls: ssl.SSLContext | None = None
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(config.tls_certificate_file, config.tls_key_file)
            if config.tls_client_ca_file:
                context.load_verify_locations(config.tls_client_ca_file)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as e:
            why = f"the TLS files cannot be used: {e}"
            raise error("INVALID_CONFIGURATION", why, key="tls_certificate_file") from e
        self._tls = context

    def _consumers_of(self, client: StockClient) -> Consumers:
        consumers = Consumers(client, self._reach)
        self._consumers.add(consumers)
        return consumers

    async def stop_consumers(self) -> None:
        """End all consumers. Their cursors move for the last time, so the topics must still accept changes."""
        gone = [asyncio.ensure_future(one.gone.wait()) for each in self._consumers for one in each.stop()]
        if gone:
            await asyncio.wait(gone, timeout=LAST_MOVE_SECONDS)

    async def stop(self) -> None:
        """End all connections. Before this call, all messages in flight in the topics have settled."""
        if self._server is None:
            return
        self._server.close()
        if self._serving:
            await asyncio.wait(self._serving, timeout=STOP_SECONDS)
        for task in self._serving:
            task.cancel()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task: asyncio.Task[None] = asyncio.current_task()  # type: ignore[assignment]
        peer = _peer_of(writer)
        if sum(map(bool, self._serving.values())) >= MAX_UNKNOWN:
            self._make_room()
        self._serving[task] = str(origin_of(peer))
        try:
            await self._serve(reader, writer, peer, task)
        except SeqdedupeError as e:
            logger.log(logging.INFO if e.retry_delay_ms >= 0 else logging.WARNING, "a client at %s: %s", peer, e)
        except (OSError, TimeoutError, EOFError) as e:
            logger.debug("the connection from %s has ended: %s", peer, e)
        except Exception:
            logger.exception("the connection from %s has ended by a defect", peer)
        finally:
            del self._serving[task]
            with suppress(OSError):
                writer.close()
            # A closed connection stays until its client has read all data. The connection no longer counts towards any
            # limit.
            asyncio.get_running_loop().call_later(STOP_SECONDS, writer.transport.abort)

    def _make_room(self) -> None:
        origins = Counter(origin for origin in self._serving.values() if origin)
        crowd = origins.most_common(1)[0][0]
        next(task for task, origin in self._serving.items() if origin == crowd).cancel()

    async def _serve(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        peer: str,
        task: "asyncio.Task[None]",
    ) -> None:
        async def find_caller(token: bytes | None) -> Any:
            context: Any = ShownCredentials(peer, _auth_context(writer), token)
            if (why := await self._guard.find_caller(context, self._has_to_answer)) is not None:
                self._guard.trail.unauthenticated(_METHOD, peer, why)
                raise why
            self._serving[task] = ""
            return context

        connection = PulsarConnection(
            reader,
            writer,
            peer,
            topics=self._topics,
            streams=self._streams,
            permissions=self._guard.permissions,
            publish=self._publish,
            names=self,
            find_caller=find_caller,
            large_frames=self._large_frames,
            log_limit=self._log_limit,
            # Consumers of a Pulsar cluster read from its brokers.
            consumers_of=None if self._topics.kind.log.is_shared else self._consumers_of,
            lookup=self._lookup,
            brokers=self._brokers,
            registry=self._registry,
        )
        self._served.add(connection)
        try:
            await connection.run()
        finally:
            self._served.discard(connection)

    # -- producers' names --------------------------------------------------------------------------------------

    def new_name(self) -> str:
        """Return a name that no producer has had."""
        return f"stock-{secrets.token_hex(8)}"

    async def claim(
        self,
        topic: str,
        name: str,
        mode: int,
        connection: PulsarConnection,
        producer_id: int,
        tell_to_wait: Callable[[], None],
    ) -> None:
        """Assign a name to a producer, as a broker does. The producer keeps the name as long as its client answers
        pings.

        A client that no longer answers loses all its producers, because it may be an earlier connection of the same
        client. Raises PRODUCER_BUSY; FENCED if an exclusive producer cannot be the only producer. In the mode that
        waits, this calls `tell_to_wait` before it waits for its turn.
        """
        own = NameHolder(connection, producer_id)
        if mode == ExclusiveWithFencing:
            for holder in self._others_in(topic, own):
                why = error("FENCED", f"another producer has exclusive access to topic {topic}")
                holder.connection.end_producer(holder.producer_id, why)
        elif mode == WaitForExclusive:
            if topic in self._queues or self._others_in(topic, own):
                tell_to_wait()
                await self._wait_for_turn(topic, own)
        elif topic in self._queues:
            raise _excluded(topic, name, mode)
        while (other := self._in_the_way(topic, name, mode, own)) is not None:
            if other.connection is connection or await other.connection.is_alive():
                raise _excluded(topic, name, mode)
            other.connection.abort()
            self._drop(other.connection)
        self._holders.setdefault(topic, {})[name] = own
        if mode in _ALONE:
            self._alone[topic] = own

    async def _wait_for_turn(self, topic: str, own: NameHolder) -> None:
        """Wait until the topic has no other producer, and all earlier waiting producers have had their turn."""
        queue, turn = self._queues.setdefault(topic, []), asyncio.Event()
        queue.append(turn)
        try:
            while queue[0] is not turn or self._others_in(topic, own):
                turn.clear()
                await turn.wait()
        finally:
            queue.remove(turn)
            if queue:
                queue[0].set()
            else:
                del self._queues[topic]

    def _in_the_way(self, topic: str, name: str, mode: int, own: NameHolder) -> NameHolder | None:
        """Return a producer that excludes this one."""
        same = self._holders.get(topic, {}).get(name)
        one_of = (same, self._alone.get(topic))
        candidates = self._others_in(topic, own) if mode in _ALONE else [one for one in one_of if one is not None]
        return next((other for other in candidates if other != own), None)

    def _others_in(self, topic: str, own: NameHolder) -> list[NameHolder]:
        return [holder for holder in self._holders.get(topic, {}).values() if holder != own]

    def _drop(self, connection: PulsarConnection) -> None:
        for topic, names in list(self._holders.items()):
            for name, holder in list(names.items()):
                if holder.connection is connection:
                    self.release(topic, name, *holder)

    def release(self, topic: str, name: str, connection: PulsarConnection, producer_id: int) -> None:
        """Take the name back, if this producer has it."""
        own = NameHolder(connection, producer_id)
        names = self._holders.get(topic, {})
        if names.get(name) == own:
            del names[name]
            if not names:
                self._holders.pop(topic, None)
        if self._alone.get(topic) == own:
            del self._alone[topic]
        if topic in self._queues:
            self._queues[topic][0].set()


def _excluded(topic: str, name: str, mode: int) -> SeqdedupeError:
    """Return the reason why a producer cannot be opened. For an exclusive producer Pulsar has a separate error."""
    if mode in _ALONE:
        hint = "Close the topic's other producers, or use the access mode WaitForExclusive."
        return error("FENCED", f"topic {topic} has another producer, so {name!r} cannot be alone", hint=hint)
    return error("PRODUCER_BUSY", f"topic {topic} has another producer that excludes {name!r}")


def _peer_of(writer: asyncio.StreamWriter) -> str:
    """Return the client's address as gRPC writes it."""
    host, port, *_ = writer.get_extra_info("peername") or ("unknown", 0)
    return peer_at(host, port)


def _auth_context(writer: asyncio.StreamWriter) -> Mapping[str, Any]:
    """Return what the client's certificate says, as gRPC's `auth_context` does."""
    connection = writer.get_extra_info("ssl_object")
    der = connection.getpeercert(binary_form=True) if connection is not None else None
    if der is None:
        return {}
    names = connection.getpeercert().get("subjectAltName", ())
    return {
        "x509_pem_cert": [ssl.DER_cert_to_PEM_cert(der).encode()],
        "peer_uri": [value.encode() for kind, value in names if kind == "URI"],
        "peer_dns": [value.encode() for kind, value in names if kind == "DNS"],
    }
