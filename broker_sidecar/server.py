"""The process of the sidecar: it starts, serves and drains.

`run` is the whole process, from its arguments to its exit status. `SidecarServer` is the sidecar in the process: it
connects data, services, web server and access control. SIGTERM or SIGINT drains: the health becomes NOT_SERVING,
requests in flight are finished, a last snapshot is made durable, and the exit status is 0. After SIGHUP, the sidecar
reads again all files that an operator may replace.
"""

import asyncio
import ctypes
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio

from broker_sidecar import data_directory, telemetry
from broker_sidecar.config import Config
from broker_sidecar.connections import UNREAD_BYTES, SocketPath, TcpConnections
from broker_sidecar.data import Data, fatal
from broker_sidecar.gate import Closed, Gate, Guard, Visitors
from broker_sidecar.metrics import Metrics, Sources
from broker_sidecar.rpc import MethodCounts
from broker_sidecar.security import tokens
from broker_sidecar.security.permissions import CONFIGURATION
from broker_sidecar.services.admin_service import AdminService
from broker_sidecar.services.dedupe_service import DedupeService
from broker_sidecar.services.publish_service import PublishService
from broker_sidecar.services.read_service import ReadService
from broker_sidecar.services.standard_services import NOT_SERVING, REFLECTION_SERVICE, SERVING, Health, Reflection
from broker_sidecar.services.statistics import Statistics
from broker_sidecar.streams import CONNECTION_SHARE, Streams
from broker_sidecar.telemetry import LastWarnings, Manager, Traces, Watchdog
from broker_sidecar.web.pages import Pages
from seqdedupe.address import SidecarAddress, cannot_listen
from seqdedupe.errors import EXIT_FAILED, SeqdedupeError, error
from seqdedupe.files import Lock
from seqdedupe.http_server import Route, WebServer
from seqdedupe.log.embedded.commit import MAX_ROUND, open_files_within
from seqdedupe.store.directories import whole_of
from seqdedupe.topic.base import State

if TYPE_CHECKING:
    from broker_sidecar.door.door import Door

logger = logging.getLogger("seqdedupe.server")

# -- A sidecar: its topics, its services, and its access control.

MAX_REQUEST_BYTES = 16 * 1024 * 1024
"""The maximum size of a request. It is twice the limit of a batch, so that a batch that is too large gets a clear
answer. gRPC itself aborts larger requests, with an error that does not say that sending them again cannot help."""

OnServing = Callable[[SidecarAddress], None]
"""Called with the address, once the sidecar serves."""

STOP_GRACE_SECONDS = 2.0
"""The time after draining in which clients can read their last answers."""

_NO_OTHER_LISTENER = ("grpc.so_reuseport", 0)
_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", UNREAD_BYTES))
"""By default, gRPC would measure the amount of data under way on a connection, and read as much of a stream that no
handler reads: about 6 MB on a fast connection, for any number of streams, even while frames wait for the disk."""
_MAX_REQUEST = ("grpc.max_receive_message_length", MAX_REQUEST_BYTES)
_COMPRESSION = ("grpc.compression_enabled_algorithms_bitset", 1)
"""No compression: a few bytes of gzip would become a request of 16 MiB. gRPC ends a compressed call at its headers."""
MAX_PENDING = 10_000
_PENDING = (
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
)
"""The maximum number of calls that wait for their turn; gRPC uses about 20 KB for each. gRPC ends further calls with
CANCELLED, from any caller, since the caller is not known yet. By default gRPC would begin at 1,000 calls to end calls
at random; with two equal limits there is no such range."""
_PINGS = (("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.min_ping_interval_without_data_ms", 1_000))
"""A client that waits for messages may send a ping every second, to check whether the sidecar still runs."""

LOOK_SECONDS = 1.0
"""The time between checks that the path of the Unix socket still leads to this sidecar."""

UNARY_CALLS_A_CONNECTION = 100
"""The maximum number of simultaneous unary calls on a connection, in addition to its streams. Further calls wait in the
client."""


class SidecarServer:
    """A sidecar in this process."""

    def __init__(self, config: Config, *, connections: int, **repairs: bool) -> None:
        self._config = config
        self._repairs = repairs
        self._warnings = LastWarnings()
        logging.getLogger().addHandler(self._warnings)
        self._guard = Guard(config, self._files_read_again)
        self._streams = Streams(config.max_streams, self._guard.permissions, lambda peer: self._connections.end(peer))
        # gRPC counts the connections of each address separately.
        places = connections // (2 if config.also_listen else 1)
        self._connections = TcpConnections(places, self._streams.peers)
        self._door: Door | None = None
        self._health = Health(
            self._streams,
            lambda name: self._topics.waiting.begin(name),
            check_owner=lambda name: self._topics.ownership.check(name),
            others_serve=self._others_serve,
            called=self._connections.called,
        )
        self.address: SidecarAddress | None = None
        self._paths: dict[str, SocketPath] = {}
        """The paths of the Unix sockets on which it listens, by key."""
        self._servers: list[grpc.aio.Server] = []
        """The servers. The last server of an address listens. Earlier servers of the same address may have open
        streams."""
        self._is_stopping = False
        self._calls = MethodCounts()
        self._traces = Traces(os.environ)
        self._metrics: Metrics | None = None
        self._web: WebServer | None = None

    async def listen(self) -> None:
        """Open the store and the logs, then listen. The health is NOT_SERVING. If this raises an error, no part of the
        sidecar keeps running."""
        self._data = Data(self._config, self._topic_changed, **self._repairs)
        self._topics = self._data.all_topics
        self._statistics = Statistics(self._topics, lambda: self._health.is_serving, self._warnings)
        self._admin = AdminService(self._config, self._data, self._streams, self._guard, self._statistics)
        try:
            self._guard.begin(self._streams, self._connections.called)
            if self._data.peers is not None:
                await self._data.peers.look()
            await self._topics.open_all()
            await self._listen()
        except BaseException:
            self._is_stopping = True
            # One that listens already would print errors when the event loop is gone.
            await asyncio.gather(*(server.stop(None) for server in self._servers))
            self._close_web()
            self._close_paths()
            await self._data.close()
            raise
        if self._web is not None:
            self._web.begin()
            self._statistics.history.begin()
            logger.info("metrics", extra={"address": str(self._web.address)})
        self._guard.trail.begin()

    def _listen_for_http(self, reading: ReadService | None) -> None:
        if self._config.metrics_listen:
            sources = Sources(
                self._config,
                self._data,
                self._streams,
                self._connections,
                self._calls,
                reading,
                self._door,
                lambda: not self._guard.watching.has_problem,
                self._guard.authentication,
            )
            self._metrics = Metrics(sources)
            pages = Pages(self._statistics, self._admin.producers, Visitors(self._guard), self._config.listen)
            routes: dict[str, Route] = {"/metrics": self._metrics.route, **pages.routes()}
            self._web = WebServer(SidecarAddress.parse(self._config.metrics_listen), routes, "metrics_listen")

    def _close_web(self) -> None:
        if self._web is not None:
            self._web.close()
        if self._metrics is not None:
            self._metrics.close()

    async def recover(self) -> None:
        """Recover the topics. Then the sidecar's health becomes SERVING. The health of a damaged topic is reported
        separately."""
        if self._data.leaving is not None:
            self._data.leaving.go_on()
        await self._topics.recover_all()
        self._data.begin_looking()
        self._health.set("", SERVING)

    async def _listen(self) -> None:
        services, reading = self._services()
        self._listen_for_http(reading)
        judge = self._connections.has_to_answer
        gates = [Gate(self._traces.traced(one), self._guard, self._calls, judge) for one in services]
        self._handlers = [*gates, Closed(self._guard, self._calls, judge)]
        self.address = await self._serve_at("listen")
        addresses = [self.address, *([await self._serve_at("also_listen")] if self._config.also_listen else [])]
        self._data.listens(self.address)
        self._topics.in_background(self._guard.watching.keep_looking())
        if ports := {address.port for address in addresses if not address.path}:
            self._topics.in_background(self._connections.keep_looking(ports))
        for key in self._paths:
            self._topics.in_background(self._keep_listening(key))
        if self._door is not None:
            logger.info("door", extra={"address": str(await self._door.listen())})
            self._admin.pulsar_url = self._door.url

    def _close_paths(self) -> None:
        for path in self._paths.values():
            path.close()

    async def _serve_at(self, key: str) -> SidecarAddress:
        """Start one more server on the address in this key. Return the address with the real port, also if the
        configured port is 0.

        Raises INVALID_CONFIGURATION."""
        address = SidecarAddress.parse(getattr(self._config, key))
        at_once = max(1, self._config.max_streams // CONNECTION_SHARE) + UNARY_CALLS_A_CONNECTION
        limits = (("grpc.max_concurrent_streams", at_once), *self._connections.server_options())
        fixed = (_NO_OTHER_LISTENER, _MAX_REQUEST, _COMPRESSION, *_WINDOW, *_PINGS, *_PENDING)
        server = grpc.aio.server(options=[*fixed, *limits, *self._guard.authentication.server_options()])
        server.add_generic_rpc_handlers(self._handlers)
        add_port = partial(self._guard.authentication.add_port, server)
        try:
            if address.path:
                if key not in self._paths:
                    self._paths[key] = SocketPath(address, int(self._config.socket_mode, 8), key)
                self._paths[key].listen(add_port)
            else:
                address = address._replace(port=add_port(address))
        except (RuntimeError, OSError) as e:
            raise cannot_listen(address, e, key) from e
        self._servers.append(server)
        await server.start()
        self._topics.in_background(self._end_without(server, address))
        return address

    async def _end_without(self, server: grpc.aio.Server, address: SidecarAddress) -> None:
        """End the process if gRPC ends this server because of an internal defect.

        Otherwise no client could reach the sidecar at this address any more, and no supervisor would notice.
        """
        # If gRPC's coroutine were cancelled, the server could no longer be stopped.
        await asyncio.shield(server.wait_for_termination())
        if not self._is_stopping:
            fatal(f"its gRPC server at {address} has ended unexpectedly")

    async def _keep_listening(self, key: str) -> None:
        """Listen again if the path of a Unix socket is removed or replaced, which any user who may write to its folder
        can do.

        Streams of clients that connected over an earlier socket continue.
        """
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
                # The next look tries again.
                if told != (told := str(e)):
                    logger.error(
                        "%s was removed or replaced, and the sidecar cannot listen there again: %s", address, e
                    )

    def _services(self) -> tuple[list[Any], ReadService | None]:
        """Return the handlers of the services, and the service for readers. The second value is None if the sidecar has
        no readers."""
        streams, permissions = self._streams, self._guard.permissions
        services: list[Any] = [self._admin, self._health]
        reading: ReadService | None = None
        if (topics := self._data.topics) is not None:
            reading = ReadService(topics, streams, permissions)
            publish = PublishService(topics, streams, permissions, self._guard.trail)
            services += publish, reading
            if self._config.pulsar_listen:
                # Only a sidecar with a door loads the kernels that read Pulsar's entries.
                from broker_sidecar.door.broker_pass import BrokersToPass
                from broker_sidecar.door.door import Door
                from broker_sidecar.door.schemas import SchemaRegistry

                door = partial(
                    Door, self._config, self._guard, streams, topics, publish, self._connections.has_to_answer
                )
                cluster, asked = self._data.cluster, self._config.pulsar
                if cluster is None:
                    leaving = self._data.leaving
                    self._door = door(neighbours=leaving.others if leaving is not None and self._config.peers else None)
                else:
                    brokers = cluster.shared.brokers
                    passed = BrokersToPass(asked.service_url, cluster.tls, frozenset(cluster.namespaces))
                    self._door = door(
                        brokers.max_entry_bytes if brokers is not None else None,
                        passed if asked.serve_consumers else None,
                        cluster.neighbours if self._config.peers else None,
                        SchemaRegistry(cluster.shared.admin.upload_schema, asked.entry_format == "native"),
                    )
        if (brokers_topics := self._data.brokers_topics) is not None:
            services.append(DedupeService(brokers_topics, streams, permissions))
        handlers = [service.handlers() for service in services]
        names = [handler.service_name() for handler in handlers]
        return [*handlers, Reflection([*names, REFLECTION_SERVICE], streams).handlers()], reading

    def reload(self) -> None:
        """Read all files again that an operator may replace. Continue the audit trail in the file that now has the
        trail's name."""
        self._guard.reload()

    def _files_read_again(self) -> None:
        is_in_force = not self._guard.watching.has_problem
        self._health.set(CONFIGURATION, SERVING if is_in_force else NOT_SERVING)
        if self._door is not None and is_in_force:
            self._door.read_certificates()

    def status(self) -> str:
        """Return the progress in one line for people."""
        return self._health.summary()

    async def _others_serve(self) -> bool:
        return self._data.peers is None or await self._data.peers.are_serving()

    def _topic_changed(self, name: str, state: State | None) -> None:
        self._health.set(name, state and (SERVING if state is State.SERVING else NOT_SERVING))

    async def stop(self) -> None:
        """Drain: accept no more requests, finish requests in flight, take durable snapshots, and end all calls."""
        self._is_stopping = True
        self._health.drain()
        try:
            async with asyncio.timeout(self._config.drain_timeout_seconds):
                if self._door is not None:
                    await self._door.stop_consumers()
                await self._topics.drain()
        finally:
            self._streams.drain()
            self._close_paths()
            if self._door is not None:
                await self._door.stop()
            await asyncio.gather(*(server.stop(STOP_GRACE_SECONDS) for server in self._servers))
            self._close_web()
        await self._data.close()
        await self._guard.trail.close()
        await self._traces.close()
        logging.getLogger().removeHandler(self._warnings)


# -- The limits of open files and connections of this process, and their uses.
#
# A topic holds no open file while no client publishes to the topic, so the number of topics does not matter. Each
# connection holds one descriptor.

RESERVE = 64
"""The number of file descriptors reserved for the store, for reading and creating logs, and for all other files of the
process."""


def raise_limit() -> int:
    """Raise the limit to the highest value that the process may set. Return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 2**31 - 1


def connections_within(limit: int) -> int:
    """Return the number of connections that leaves enough descriptors for the store and the log.

    Raises INVALID_CONFIGURATION if no connection is possible.
    """
    # Files open from one round of the commit thread to the next, files that wait for a sync, and files that a round
    # opens.
    others = 2 * open_files_within(limit) + MAX_ROUND + RESERVE
    connections = limit - others
    if connections < 1:
        raise error(
            "INVALID_CONFIGURATION",
            f"the process may open {limit} files, and needs at least {others + 1}",
            hint="Raise the limit of open files (ulimit -n, LimitNOFILE=): 1024 is enough for any number of topics.",
            limit=limit,
        )
    return connections


# -- The process around it, from its start to its exit status.


async def _serve(config: Config, lock: Lock, on_serving: OnServing | None, repairs: dict[str, bool]) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    sidecar = SidecarServer(config, connections=connections_within(raise_limit()), **repairs)
    if config.log == "pulsar":
        Watchdog(fatal)
    watching = asyncio.ensure_future(_end_without(lock))
    manager = Manager(os.environ)
    telling = asyncio.ensure_future(manager.keep_telling(sidecar.status))
    await sidecar.listen()
    loop.add_signal_handler(signal.SIGHUP, sidecar.reload)
    logger.info("listening", extra={"address": str(sidecar.address)})
    if config.log == "embedded" and not config.retention_was_chosen:
        logger.warning(
            "messages are kept until the disk is full: set default_retention_size_in_mb or "
            "default_retention_time_in_minutes; -1 confirms that they should be kept for ever"
        )
    folder = Path(config.data_directory)
    if config.authentication == "token" and whole_of(folder) is None:
        tokens.tell(folder, config.log_format)
    recovery = asyncio.ensure_future(sidecar.recover())
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({recovery, stop}, return_when=asyncio.FIRST_COMPLETED)
    if recovery.done():
        recovery.result()
        keep_freed_memory()
        logger.info("serving", extra={"address": str(sidecar.address)})
        if on_serving is not None and sidecar.address is not None:
            on_serving(sidecar.address)
        manager.tell(READY="1", STATUS=sidecar.status())
        await stop
    recovery.cancel()
    logger.info("draining")
    manager.tell(STOPPING="1", STATUS="Draining")
    await sidecar.stop()
    telling.cancel()
    watching.cancel()
    logger.info("stopped")


async def _end_without(lock: Lock) -> None:
    fatal(await data_directory.lost(lock))


def run(config: Config, lock: Lock, on_serving: OnServing | None = None, **repairs: bool) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit status. An error at the start is printed as one clear line.

    `lock` is the lock of the data directory. `repairs` are options of `Data` for this start only. `on_serving` is
    called once.
    """
    telemetry.configure(config.log_level, config.log_format)
    if config.backup_directory and not Path(config.backup_directory).is_dir():
        # The disk may not be mounted yet, and serving does not need it.
        logger.warning("no backup can be made while backup_directory does not exist: %s", config.backup_directory)
    give_back_freed_memory()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_served(config, lock, on_serving, repairs))
    return uvloop.run(_served(config, lock, on_serving, repairs))


async def _served(config: Config, lock: Lock, on_serving: OnServing | None, repairs: dict[str, bool]) -> int:
    """Serve, and return the exit status. An error is printed in one line."""
    status = EXIT_FAILED
    try:
        await _serve(config, lock, on_serving, repairs)
        status = 0
    except TimeoutError:
        print(
            "seqdedupe: draining took too long: the next start decides about the messages in flight",
            file=sys.stderr,
        )
    except (SeqdedupeError, OSError) as e:
        status = data_directory.ended_by(e, Path(config.data_directory))
    if config.log == "pulsar":
        # Threads that still wait for a cluster would delay the end of the process, and abort it after the loop is
        # closed.
        logging.shutdown()
        os._exit(status)
    return status


# -- The treatment of freed memory by the C library.

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt(3), with values in bytes."""

_AT_START = ((_TRIM_THRESHOLD, 8 << 20), (_MMAP_THRESHOLD, 4 << 20))
_WHILE_SERVING = ((_TRIM_THRESHOLD, 1 << 30), (_TOP_PAD, 64 << 20), (_MMAP_THRESHOLD, 256 << 20))


def give_back_freed_memory() -> None:
    """Make glibc return large memory blocks to the system as soon as code of the start frees these blocks. Do nothing
    if the C library is not glibc.

    Each thread has a separate heap. Memory at the end of a heap could not be returned later, and would be tens of
    megabytes for each thread that reads a log or a snapshot.
    """
    _set(_AT_START)


def keep_freed_memory() -> None:
    """If the C library is glibc, return memory that start-up has freed to the system, and from now on keep freed
    memory.

    Pages that are returned while the sidecar serves would have to be fetched again, at microseconds per page.
    """
    _set(_WHILE_SERVING)


def _set(parameters: tuple[tuple[int, int], ...]) -> None:
    try:
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        for parameter, value in parameters:
            library.mallopt(parameter, value)
    except (AttributeError, OSError, TypeError):
        logger.debug("the C library has no mallopt")
