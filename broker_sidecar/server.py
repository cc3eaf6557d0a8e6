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
from broker_sidecar.listening import cannot_listen
from broker_sidecar.memory import give_back_freed_memory, keep_freed_memory
from broker_sidecar.streams import CONNECTION_SHARE, Streams
from broker_sidecar.watchdog import Watchdog
from seqdedupe.address import SidecarAddress
from seqdedupe.errors import SeqdedupeError
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
        self._streams = Streams(config.max_streams)
        self._health = health.Health(
            self._streams,
            lambda name: self._topics.waiting.begin(name),
            check_owner=lambda name: self._topics.ownership.check(name),
            others_serve=self._others_serve,
        )
        self.address: SidecarAddress | None = None

    async def listen(self) -> None:
        """Opens store and logs, then listens; health says NOT_SERVING. Raises with nothing left running."""
        self._data = Data(self._config, self._topic_changed, **self._repairs)
        self._topics = self._data.all_topics
        try:
            if self._data.peers is not None:
                await self._data.peers.look()
            await self._topics.open_all()
            await self._listen()
        except BaseException:
            await self._data.close()
            raise

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
        self._server = grpc.aio.server(options=[_NO_OTHER_LISTENER, _MAX_REQUEST, *_WINDOW, *limits, *_PINGS])
        streams = self._streams
        services: dict[str, Any] = {
            admin.SERVICE: admin.AdminService(
                self._topics,
                self._data.topics,
                streams,
                self._data.cluster,
                self._data.peers,
                lambda: self._health.is_serving,
                Backup(self._config, self._data, streams),
            ),
            health.SERVICE: self._health,
        }
        if (topics := self._data.topics) is not None:
            services[publish.SERVICE] = publish.PublishService(topics, streams)
            services[read.SERVICE] = read.ReadService(topics, streams)
        if (brokers_topics := self._data.brokers_topics) is not None:
            services[dedupe.SERVICE] = dedupe.DedupeService(brokers_topics, streams)
        services[reflection.SERVICE] = reflection.Reflection((*services, reflection.SERVICE), streams)
        self._server.add_generic_rpc_handlers([service.handlers() for service in services.values()])
        address = SidecarAddress.parse(self._config.listen)
        try:
            port = self._server.add_insecure_port(str(address))
            if address.path:
                os.chmod(address.path, int(self._config.socket_mode, 8))
        except (RuntimeError, OSError) as e:
            raise cannot_listen(address, e) from e
        self.address = address if address.path else replace(address, port=port)
        self._data.listens(self.address)
        await self._server.start()

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
        await self._data.close()


async def _serve(config: Config, repairs: dict[str, bool]) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    sidecar = Sidecar(config, connections=connections_within(raise_limit()), **repairs)
    if config.log == "pulsar":
        Watchdog(fatal)
    await sidecar.listen()
    logger.info("listening", extra={"address": str(sidecar.address)})
    recovery = asyncio.ensure_future(sidecar.recover())
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({recovery, stop}, return_when=asyncio.FIRST_COMPLETED)
    if recovery.done():
        recovery.result()
        keep_freed_memory()
        logger.info("serving", extra={"address": str(sidecar.address)})
        await stop
    recovery.cancel()
    logger.info("draining")
    await sidecar.stop()
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
