"""The sidecar's process: start, serve, drain.

SIGTERM or SIGINT drains: health says NOT_SERVING, what is in flight is finished, a last snapshot is durable, exit 0.
"""

import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from broker_sidecar import admin, logs, publish, read
from broker_sidecar.config import Config
from broker_sidecar.data import Data
from broker_sidecar.memory import keep_freed_memory
from broker_sidecar.rpc import Limiter
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.topic.state import State

logger = logging.getLogger("seqdedupe.server")

EXIT_ERROR = 1

MAX_REQUEST_BYTES = 16 * 1024 * 1024
"""Four times what a batch may have: one that is too large gets an answer that says so. What is larger still is broken
off by gRPC, which does not say that sending it again cannot help."""

STOP_GRACE_SECONDS = 2.0
"""After draining: for clients to read their last answers."""

_NO_OTHER_LISTENER = ("grpc.so_reuseport", 0)
_MAX_REQUEST = ("grpc.max_receive_message_length", MAX_REQUEST_BYTES)
_PINGS = (("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000))
"""A client that waits for messages may ask every ten seconds whether the sidecar is still there."""

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Sidecar:
    """A sidecar in this process."""

    def __init__(self, config: Config, *, rebuild_store: bool = False) -> None:
        self._config = config
        self._rebuild_store = rebuild_store
        self._health = health.aio.HealthServicer()
        self._health_changes: set[asyncio.Task[None]] = set()
        self.address = ""

    async def listen(self) -> None:
        """Opens store and logs, then listens; health says NOT_SERVING. Raises with nothing left running."""
        await self._health.set("", NOT_SERVING)
        self._data = Data(self._config, self._topic_changed, rebuild_store=self._rebuild_store)
        self._topics = self._data.topics
        try:
            await self._topics.open_all()
            await self._listen()
        except BaseException:
            await self._data.close()
            raise

    async def recover(self) -> None:
        """Recovers the topics; then health says SERVING. One that is damaged has its own health."""
        await self._topics.recover_all()
        await self._health.set("", SERVING)

    async def _listen(self) -> None:
        self._server = grpc.aio.server(options=[_NO_OTHER_LISTENER, _MAX_REQUEST, *_PINGS])
        self._streams = streams = Limiter(self._config.max_streams)
        self._server.add_generic_rpc_handlers(
            (
                publish.PublishService(self._topics, streams).handlers(),
                read.ReadService(self._topics, streams).handlers(),
                admin.AdminService(self._topics).handlers(),
            )
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (publish.SERVICE, read.SERVICE, admin.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        listen = self._config.listen
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError as e:
            raise error("INVALID_CONFIGURATION", f"listen = {listen!r}: cannot listen there (is it in use?)") from e
        self.address = listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"
        await self._server.start()

    def _topic_changed(self, name: str, state: State | None) -> None:
        status: Any
        if state is None:
            status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        else:
            status = SERVING if state is State.SERVING else NOT_SERVING
        task = asyncio.ensure_future(self._health.set(name, status))
        self._health_changes.add(task)
        task.add_done_callback(self._health_changes.discard)

    async def stop(self) -> None:
        """Drains: takes nothing more, finishes what is in flight, takes durable snapshots, ends all calls."""
        await self._health.enter_graceful_shutdown()
        try:
            async with asyncio.timeout(self._config.drain_timeout_seconds):
                await self._topics.drain()
        finally:
            self._streams.drain()
            await self._server.stop(STOP_GRACE_SECONDS)
        await self._data.close()


async def _serve(config: Config, rebuild_store: bool) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    sidecar = Sidecar(config, rebuild_store=rebuild_store)
    await sidecar.listen()
    logger.info("listening", extra={"address": sidecar.address})
    recovery = asyncio.ensure_future(sidecar.recover())
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({recovery, stop}, return_when=asyncio.FIRST_COMPLETED)
    if recovery.done():
        recovery.result()
        keep_freed_memory()
        logger.info("serving", extra={"address": sidecar.address})
        await stop
    recovery.cancel()
    logger.info("draining")
    await sidecar.stop()
    logger.info("stopped")


def run(config: Config, *, rebuild_store: bool = False) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status. An error at the start is one clear line."""
    logs.configure(config.log_level, config.log_format)
    try:
        Path(config.data_directory).mkdir(parents=True, exist_ok=True)
        _run(config, rebuild_store)
    except SeqdedupeError as e:
        print(f"seqdedupe: {e} {e.hint}", file=sys.stderr)
        return EXIT_ERROR
    except TimeoutError:
        print(
            "seqdedupe: draining took too long: what was in flight is decided at the next start",
            file=sys.stderr,
        )
        return EXIT_ERROR
    except OSError as e:
        print(f"seqdedupe: {e}", file=sys.stderr)
        return EXIT_ERROR
    return 0


def _run(config: Config, rebuild_store: bool) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(config, rebuild_store))
    else:
        uvloop.run(_serve(config, rebuild_store))
