"""The sidecar's process: start, serve, drain.

SIGTERM or SIGINT drains: health says NOT_SERVING, what is in flight is finished, a last snapshot is durable, exit 0.
"""

import asyncio
import logging
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio

from broker_sidecar import admin, dedupe, directory, health, logs, publish, read, reflection
from broker_sidecar.backup import Backup
from broker_sidecar.config import Config
from broker_sidecar.data import Data, fatal
from broker_sidecar.descriptors import connections_within, raise_limit
from broker_sidecar.last_warnings import LastWarnings
from broker_sidecar.listening import cannot_listen
from broker_sidecar.memory import give_back_freed_memory, keep_freed_memory
from broker_sidecar.metrics.calls import Calls
from broker_sidecar.metrics.exposition import Metrics, Sources
from broker_sidecar.notify import Manager
from broker_sidecar.security import own_token, rules_file
from broker_sidecar.security.audit import Audit
from broker_sidecar.security.authentication import Authentication
from broker_sidecar.security.gate import Gate
from broker_sidecar.security.permissions import NO_RULES, Permissions
from broker_sidecar.security.rules_file import RulesFile
from broker_sidecar.security.trail import Trail
from broker_sidecar.security.watching import Watched, Watching
from broker_sidecar.statistics import Statistics
from broker_sidecar.streams import CONNECTION_SHARE, Streams
from broker_sidecar.watchdog import Watchdog
from broker_sidecar.web.pages import Pages
from broker_sidecar.web.server import Route, WebServer
from broker_sidecar.web.visitors import Visitors
from seqdedupe.address import SidecarAddress
from seqdedupe.errors import SeqdedupeError
from seqdedupe.store.directories import whole_of
from seqdedupe.topic.state import State

logger = logging.getLogger("seqdedupe.server")

EXIT_ERROR = 1

MAX_REQUEST_BYTES = 16 * 1024 * 1024
"""Twice what a batch may have: one that is too large gets an answer that says so. What is larger still is broken
off by gRPC, which does not say that sending it again cannot help."""

STOP_GRACE_SECONDS = 2.0
"""After draining: for clients to read their last answers."""

_NO_OTHER_LISTENER = ("grpc.so_reuseport", 0)
UNREAD_BYTES = 1024 * 1024
"""So much of a stream that the sidecar does not read waits in it. gRPC itself would find out how much is under way on a
connection and then take as much, some 6 MB on a fast one, however many there are and whatever waits for the disk."""
_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", UNREAD_BYTES))
_MAX_REQUEST = ("grpc.max_receive_message_length", MAX_REQUEST_BYTES)
_PINGS = (("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.min_ping_interval_without_data_ms", 1_000))
"""A client that waits for messages may ask every second whether the sidecar is still there."""

UNARY_CALLS_A_CONNECTION = 100
"""At once, beside its streams; more wait in the client."""


class Sidecar:
    """A sidecar in this process."""

    def __init__(self, config: Config, *, connections: int, **repairs: bool) -> None:
        self._connections = connections
        self._config = config
        self._repairs = repairs
        self._warnings = LastWarnings()
        logging.getLogger().addHandler(self._warnings)
        self._trail = Trail(Audit(Path(config.audit_file)) if config.audit_file else None)
        self._rules = self._watched_rules()
        self._permissions = Permissions(self._rules.value if self._rules else NO_RULES, self._trail.denied)
        self._streams = Streams(config.max_streams, self._permissions)
        self._health = health.Health(
            self._streams,
            lambda name: self._topics.waiting.begin(name),
            check_owner=lambda name: self._topics.ownership.check(name),
            others_serve=self._others_serve,
        )
        self.address: SidecarAddress | None = None
        self._calls = Calls()
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
            self._permissions,
            self._trail,
            self._data.cluster,
            self._data.peers,
            lambda: self._health.is_serving,
            self._statistics,
            Backup(self._config, self._data, self._streams),
        )
        try:
            self._authentication = Authentication(self._config, self._streams)
            if self._data.peers is not None:
                await self._data.peers.look()
            await self._topics.open_all()
            await self._listen()
        except BaseException:
            self._close_web()
            await self._data.close()
            raise
        if self._web is not None:
            self._web.begin()
            self._statistics.history.begin()
            logger.info("metrics", extra={"address": str(self._web.address)})
        self._trail.begin()

    def _listen_for_http(self, reading: read.ReadService | None) -> None:
        if self._config.metrics_listen:
            sources = Sources(self._config, self._data, self._streams, self._calls, reading)
            self._metrics = Metrics(sources)
            visitors = Visitors(self._authentication, self._permissions)
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
        await self._topics.recover_all()
        self._data.begin_looking()
        self._health.set("", health.SERVING)

    async def _listen(self) -> None:
        at_once = max(1, self._config.max_streams // CONNECTION_SHARE) + UNARY_CALLS_A_CONNECTION
        limits = (
            ("grpc.max_concurrent_streams", at_once),
            ("grpc.max_allowed_incoming_connections", self._connections),
        )
        fixed = (_NO_OTHER_LISTENER, _MAX_REQUEST, *_WINDOW, *_PINGS)
        self._server = grpc.aio.server(options=[*fixed, *limits, *self._authentication.server_options()])
        streams, permissions = self._streams, self._permissions
        services: dict[str, Any] = {
            admin.SERVICE: self._admin,
            health.SERVICE: self._health,
        }
        reading: read.ReadService | None = None
        if (topics := self._data.topics) is not None:
            services[publish.SERVICE] = publish.PublishService(topics, streams, permissions, self._trail)
            services[read.SERVICE] = reading = read.ReadService(topics, streams)
        if (brokers_topics := self._data.brokers_topics) is not None:
            services[dedupe.SERVICE] = dedupe.DedupeService(brokers_topics, streams, permissions)
        services[reflection.SERVICE] = reflection.Reflection((*services, reflection.SERVICE), streams)
        self._listen_for_http(reading)
        guards = self._authentication, permissions, self._trail
        gates = [Gate(service.handlers(), *guards) for service in services.values()]
        self._server.add_generic_rpc_handlers([self._calls.counted(gate) for gate in gates])
        address = SidecarAddress.parse(self._config.listen)
        try:
            port = self._authentication.add_port(self._server, address)
            if address.path:
                os.chmod(address.path, int(self._config.socket_mode, 8))
        except (RuntimeError, OSError) as e:
            raise cannot_listen(address, e) from e
        self.address = address if address.path else replace(address, port=port)
        self._data.listens(self.address)
        self._watching = Watching(
            [*self._authentication.watched, *([self._rules] if self._rules else [])], self._was_read_again
        )
        self._topics.in_background(self._watching.keep_looking())
        await self._server.start()

    def _watched_rules(self) -> Watched[RulesFile] | None:
        if not self._config.rules_file:
            return None
        path = Path(self._config.rules_file)
        return Watched("the rules file", [path], lambda: rules_file.read(path), self._replace_rules)

    def _replace_rules(self) -> None:
        if self._rules is not None:
            self._permissions.replace(self._rules.value)

    def reload(self) -> None:
        """Reads again whatever an operator may replace, and goes on in the file that has the audit trail's name."""
        self._trail.rotated()
        self._watching.reload()

    def _was_read_again(self, one: Watched[Any]) -> None:
        self._trail.read_again(one.what, one.problem)
        self._health.set(health.CONFIGURATION, health.NOT_SERVING if self._watching.has_problem else health.SERVING)

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
            await self._server.stop(STOP_GRACE_SECONDS)
            self._close_web()
        await self._data.close()
        await self._trail.close()
        logging.getLogger().removeHandler(self._warnings)


async def _serve(config: Config, repairs: dict[str, bool]) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    sidecar = Sidecar(config, connections=connections_within(raise_limit()), **repairs)
    if config.log == "pulsar":
        Watchdog(fatal)
    manager = Manager(os.environ)
    telling = asyncio.ensure_future(manager.keep_telling(sidecar.status))
    await sidecar.listen()
    loop.add_signal_handler(signal.SIGHUP, sidecar.reload)
    logger.info("listening", extra={"address": str(sidecar.address)})
    if config.log == "embedded" and not config.retention_was_chosen:
        logger.warning(
            "messages are kept for ever, until the disk is full: set default_retention_size_in_mb or "
            "default_retention_time_in_minutes; -1 says that it is wanted"
        )
    folder = Path(config.data_directory)
    if config.authentication == "token" and whole_of(folder) is None:
        own_token.tell(own_token.path_of(folder), config.log_format)
    recovery = asyncio.ensure_future(sidecar.recover())
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({recovery, stop}, return_when=asyncio.FIRST_COMPLETED)
    if recovery.done():
        recovery.result()
        keep_freed_memory()
        logger.info("serving", extra={"address": str(sidecar.address)})
        manager.tell(READY="1", STATUS=sidecar.status())
        await stop
    recovery.cancel()
    logger.info("draining")
    manager.tell(STOPPING="1", STATUS="Draining")
    await sidecar.stop()
    telling.cancel()
    logger.info("stopped")


def run(config: Config, **repairs: bool) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status. An error at the start is one clear line.

    `repairs` are those of `Data`, for this start alone.
    """
    logs.configure(config.log_level, config.log_format)
    os.umask(directory.PRIVATE)
    give_back_freed_memory()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_served(config, repairs))
    return uvloop.run(_served(config, repairs))


async def _served(config: Config, repairs: dict[str, bool]) -> int:
    """Serves; the exit status. What is wrong is said in one line."""
    status = EXIT_ERROR
    try:
        directory.prepare(Path(config.data_directory))
        await _serve(config, repairs)
        status = 0
    except SeqdedupeError as e:
        print(f"seqdedupe: {e} {e.hint}", file=sys.stderr)
    except TimeoutError:
        print(
            "seqdedupe: draining took too long: what was in flight is decided at the next start",
            file=sys.stderr,
        )
    except OSError as e:
        print(f"seqdedupe: {e}", file=sys.stderr)
    if config.log == "pulsar":
        # Threads that still wait for a cluster would hold the process up, and abort it once the loop is closed.
        logging.shutdown()
        os._exit(status)
    return status
