"""A sidecar: its topics, its services, and who may use them."""

import asyncio
import logging
import os
from dataclasses import replace
from functools import partial
from typing import Any

import grpc.aio

from broker_sidecar import admin, dedupe, health, publish, read, reflection
from broker_sidecar.backup import Backup
from broker_sidecar.calls import Calls
from broker_sidecar.config import Config
from broker_sidecar.connections import UNREAD_BYTES, Connections
from broker_sidecar.data import Data
from broker_sidecar.gate import Guard
from broker_sidecar.last_warnings import LastWarnings
from broker_sidecar.listening import SocketPath, cannot_listen
from broker_sidecar.logs import Traces
from broker_sidecar.metrics.exposition import Metrics, Sources
from broker_sidecar.security.permissions import CONFIGURATION
from broker_sidecar.statistics import Statistics
from broker_sidecar.streams import CONNECTION_SHARE, Streams
from broker_sidecar.web.pages import Pages
from broker_sidecar.web.server import Route, Visitors, WebServer
from seqdedupe.address import SidecarAddress
from seqdedupe.errors import SeqdedupeError
from seqdedupe.topic.base import State

logger = logging.getLogger("seqdedupe.server")

MAX_REQUEST_BYTES = 16 * 1024 * 1024
"""Twice what a batch may have: one that is too large gets an answer that says so. What is larger still is broken
off by gRPC, which does not say that sending it again cannot help."""

STOP_GRACE_SECONDS = 2.0
"""After draining: for clients to read their last answers."""

_NO_OTHER_LISTENER = ("grpc.so_reuseport", 0)
_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", UNREAD_BYTES))
"""gRPC itself would find out how much is under way on a connection and then take as much of a stream that nobody reads,
some 6 MB on a fast one, however many there are and whatever waits for the disk."""
_MAX_REQUEST = ("grpc.max_receive_message_length", MAX_REQUEST_BYTES)
_COMPRESSION = ("grpc.compression_enabled_algorithms_bitset", 1)
"""None: a few bytes of gzip would become a request of 16 MiB. gRPC ends a compressed call at its headers."""
_PINGS = (("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.min_ping_interval_without_data_ms", 1_000))
"""A client that waits for messages may ask every second whether the sidecar is still there."""

LOOK_SECONDS = 1.0
"""So often it is looked whether the path of the Unix socket still leads here."""

UNARY_CALLS_A_CONNECTION = 100
"""At once, beside its streams; more wait in the client."""


class Sidecar:
    """A sidecar in this process."""

    def __init__(self, config: Config, *, connections: int, **repairs: bool) -> None:
        self._config = config
        self._repairs = repairs
        self._warnings = LastWarnings()
        logging.getLogger().addHandler(self._warnings)
        self._guard = Guard(config, self._files_read_again)
        self._streams = Streams(config.max_streams, self._guard.permissions, lambda peer: self._connections.end(peer))
        # gRPC counts those of each address by itself.
        places = connections // (2 if config.also_listen else 1)
        self._connections = Connections(places, self._streams.peers)
        self._health = health.Health(
            self._streams,
            lambda name: self._topics.waiting.begin(name),
            check_owner=lambda name: self._topics.ownership.check(name),
            others_serve=self._others_serve,
            called=self._connections.called,
        )
        self.address: SidecarAddress | None = None
        self._paths: dict[str, SocketPath] = {}
        """Of the Unix sockets at which it listens, by their keys."""
        self._servers: list[grpc.aio.Server] = []
        """The last one listens. Others may have open streams."""
        self._calls = Calls()
        self._traces = Traces(os.environ)
        self._metrics: Metrics | None = None
        self._web: WebServer | None = None

    async def listen(self) -> None:
        """Opens store and logs, then listens; health says NOT_SERVING. Raises with nothing left running."""
        self._data = Data(self._config, self._topic_changed, **self._repairs)
        self._topics = self._data.all_topics
        self._statistics = Statistics(self._topics, lambda: self._health.is_serving, self._warnings)
        self._admin = admin.AdminService(
            self._topics,
            self._data.topics,
            self._streams,
            self._guard.permissions,
            self._guard.trail,
            self._data.cluster,
            self._data.peers,
            self._data.logs,
            self._data.leaving,
            lambda: self._health.is_serving,
            self._statistics,
            Backup(self._config, self._data, self._streams),
        )
        try:
            self._guard.begin(self._streams, self._connections.called)
            if self._data.peers is not None:
                await self._data.peers.look()
            await self._topics.open_all()
            await self._listen()
        except BaseException:
            self._close_web()
            self._close_paths()
            await self._data.close()
            raise
        if self._web is not None:
            self._web.begin()
            self._statistics.history.begin()
            logger.info("metrics", extra={"address": str(self._web.address)})
        self._guard.trail.begin()

    def _listen_for_http(self, reading: read.ReadService | None) -> None:
        if self._config.metrics_listen:
            sources = Sources(
                self._config,
                self._data,
                self._streams,
                self._connections,
                self._calls,
                reading,
                lambda: not self._guard.has_problem,
            )
            self._metrics = Metrics(sources)
            visitors = Visitors(self._guard.authentication, self._guard.permissions, self._guard.trail)
            pages = Pages(self._statistics, self._admin, visitors, self._config.listen)
            routes: dict[str, Route] = {"/metrics": self._metrics, **pages.routes()}
            self._web = WebServer(SidecarAddress.parse(self._config.metrics_listen), routes, "metrics_listen")

    def _close_web(self) -> None:
        if self._web is not None:
            self._web.close()
        if self._metrics is not None:
            self._metrics.close()

    async def recover(self) -> None:
        """Recovers the topics; then health says SERVING. One that is damaged has its own health."""
        if self._data.leaving is not None:
            self._data.leaving.go_on()
        await self._topics.recover_all()
        self._data.begin_looking()
        self._health.set("", health.SERVING)

    async def _listen(self) -> None:
        services, reading = self._services()
        self._listen_for_http(reading)
        guarded = (self._guard.guarded(self._traces.traced(one.handlers())) for one in services.values())
        self._handlers = [self._calls.counted(handler) for handler in guarded]
        self.address = await self._serve_at("listen")
        addresses = [self.address, *([await self._serve_at("also_listen")] if self._config.also_listen else [])]
        self._data.listens(self.address)
        self._topics.in_background(self._guard.keep_looking())
        if ports := {address.port for address in addresses if not address.path}:
            self._topics.in_background(self._connections.keep_looking(ports))
        for key in self._paths:
            self._topics.in_background(self._keep_listening(key))

    def _close_paths(self) -> None:
        for path in self._paths.values():
            path.close()

    async def _serve_at(self, key: str) -> SidecarAddress:
        """Has one more server listen at the address that this key says; with the port, if that was to be any. Raises
        INVALID_CONFIGURATION."""
        address = SidecarAddress.parse(getattr(self._config, key))
        at_once = max(1, self._config.max_streams // CONNECTION_SHARE) + UNARY_CALLS_A_CONNECTION
        limits = (("grpc.max_concurrent_streams", at_once), *self._connections.server_options())
        fixed = (_NO_OTHER_LISTENER, _MAX_REQUEST, _COMPRESSION, *_WINDOW, *_PINGS)
        server = grpc.aio.server(options=[*fixed, *limits, *self._guard.authentication.server_options()])
        server.add_generic_rpc_handlers(self._handlers)
        add_port = partial(self._guard.authentication.add_port, server)
        try:
            if address.path:
                if key not in self._paths:
                    self._paths[key] = SocketPath(address, int(self._config.socket_mode, 8), key)
                self._paths[key].listen(add_port)
            else:
                address = replace(address, port=add_port(address))
        except (RuntimeError, OSError) as e:
            raise cannot_listen(address, e, key) from e
        self._servers.append(server)
        await server.start()
        return address

    async def _keep_listening(self, key: str) -> None:
        """The path of a Unix socket is anybody's who may write to its folder. Streams of clients that have come over
        an earlier socket go on."""
        told = ""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._paths[key].is_there():
                continue
            address = getattr(self._config, key)
            try:
                await self._serve_at(key)
                logger.warning("%s was removed or replaced: the sidecar listens there again", address)
                told = ""
            except SeqdedupeError as e:
                # It is tried again.
                if told != (told := str(e)):
                    logger.error("%s was removed or replaced, and nobody reaches the sidecar there: %s", address, e)

    def _services(self) -> tuple[dict[str, Any], read.ReadService | None]:
        """By their names; and that for readers, if there is one."""
        streams, permissions = self._streams, self._guard.permissions
        services: dict[str, Any] = {admin.SERVICE: self._admin, health.SERVICE: self._health}
        reading: read.ReadService | None = None
        if (topics := self._data.topics) is not None:
            services[publish.SERVICE] = publish.PublishService(topics, streams, permissions, self._guard.trail)
            services[read.SERVICE] = reading = read.ReadService(topics, streams, permissions)
        if (brokers_topics := self._data.brokers_topics) is not None:
            services[dedupe.SERVICE] = dedupe.DedupeService(brokers_topics, streams, permissions)
        services[reflection.SERVICE] = reflection.Reflection((*services, reflection.SERVICE), streams)
        return services, reading

    def reload(self) -> None:
        """Reads again whatever an operator may replace, and goes on in the file that has the audit trail's name."""
        self._guard.reload()

    def _files_read_again(self) -> None:
        is_in_force = not self._guard.has_problem
        self._health.set(CONFIGURATION, health.SERVING if is_in_force else health.NOT_SERVING)

    def status(self) -> str:
        """How far it is, in a line for people."""
        return self._health.summary()

    async def _others_serve(self) -> bool:
        return self._data.peers is None or await self._data.peers.are_serving()

    def _topic_changed(self, name: str, state: State | None) -> None:
        if state is None:
            self._health.set(name, None)
        else:
            self._health.set(name, health.SERVING if state is State.SERVING else health.NOT_SERVING)

    async def stop(self) -> None:
        """Drains: takes nothing more, finishes what is in flight, takes durable snapshots, ends all calls."""
        self._health.drain()
        try:
            async with asyncio.timeout(self._config.drain_timeout_seconds):
                await self._topics.drain()
        finally:
            self._streams.drain()
            self._close_paths()
            await asyncio.gather(*(server.stop(STOP_GRACE_SECONDS) for server in self._servers))
            self._close_web()
        await self._data.close()
        await self._guard.trail.close()
        await self._traces.close()
        logging.getLogger().removeHandler(self._warnings)
