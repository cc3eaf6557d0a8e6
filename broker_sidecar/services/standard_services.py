"""The two standard services of gRPC: health and reflection.

grpc.health.v1.Health reports the health of the whole sidecar (for the empty name), and of each topic (for the full or
short name). A change of state never waits for its watchers. With grpc.reflection.v1alpha, tools read the schema from
the sidecar.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from broker_sidecar.rpc import Context, abort, parse_small
from broker_sidecar.security.permissions import ALL_SHARDS, CONFIGURATION, HEALTH_OF_THE_WHOLE
from broker_sidecar.security.subject import Subject, caller
from broker_sidecar.streams import Stream, Streams, messages
from seqdedupe.errors import error
from seqdedupe.figures import counted
from seqdedupe.names import topic_name

HEALTH_SERVICE = "grpc.health.v1.Health"

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """The states, and the handlers of the calls that check or watch them.

    `asked` is called with the requested topic's name, to make the topic ready for use. `check_owner` raises NOT_OWNER
    for a topic of another process. `called` is called with the caller of a check, because the caller's connection may
    have no other purpose.
    """

    def __init__(
        self,
        streams: Streams,
        asked: Callable[[str], object],
        *,
        check_owner: Callable[[str], None],
        others_serve: Callable[[], Awaitable[bool]],
        called: Callable[[Subject], None],
    ) -> None:
        self._streams = streams
        self._check_owner = check_owner
        self._others_serve = others_serve
        self._called = called
        self._asked = asked
        self._statuses: dict[str, Any] = {"": NOT_SERVING, CONFIGURATION: SERVING}
        self._watching: dict[str, set[asyncio.Event]] = {}
        self._is_draining = False

    def set(self, name: str, status: Any) -> None:
        """Set a status; None: the topic no longer exists. While draining, nothing changes."""
        if self._is_draining:
            return
        if status is None:
            self._statuses.pop(name, None)
        else:
            self._statuses[name] = status
        for news in self._watching.get(name, ()):
            news.set()

    @property
    def is_serving(self) -> bool:
        """Whether the process as a whole serves."""
        return bool(self._statuses[""] == SERVING)

    def summary(self) -> str:
        """Return the state of this process as a line of text for people."""
        what = "Draining" if self._is_draining else "Serving" if self.is_serving else "Recovering"
        topics = [status for name, status in self._statuses.items() if name not in ("", CONFIGURATION)]
        return f"{what}: {topics.count(SERVING)} of {counted(len(topics), 'topic')} ready"

    def drain(self) -> None:
        """Set all states to NOT_SERVING permanently."""
        for name in list(self._statuses):
            self.set(name, NOT_SERVING)
        self._is_draining = True

    def handlers(self) -> grpc.GenericRpcHandler:
        methods: dict[str, Any] = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check),
            "Watch": grpc.unary_stream_rpc_method_handler(self._streams.handler(self._watch)),
        }
        return grpc.method_handlers_generic_handler(HEALTH_SERVICE, methods)

    async def _check(self, data: bytes, context: Context) -> bytes:
        self._called(caller())
        try:
            name = _name_in(data)
            if name == ALL_SHARDS:
                return _response(SERVING if self.is_serving and await self._others_serve() else NOT_SERVING)
            if name not in self._statuses:
                self._check_owner(name)
                raise error("TOPIC_NOT_FOUND", f"there is no topic {name}")
        except Exception as e:  # noqa: BLE001 (the caller gets an answer after every error)
            await abort(context, e)
        self._asked(name)
        return _response(self._statuses[name])

    async def _watch(self, data: bytes, _context: Context, stream: Stream) -> None:
        name = _name_in(data)
        self._asked(name)
        news, told = asyncio.Event(), None
        watching = self._watching.setdefault(name, set())
        watching.add(news)
        try:
            while True:
                news.clear()
                status = self._statuses.get(name, SERVICE_UNKNOWN)
                if status != told:
                    await stream.write(_response(status))
                    told = status
                else:
                    await news.wait()
        finally:
            watching.discard(news)
            if not watching:
                self._watching.pop(name, None)


def _name_in(data: bytes) -> str:
    """Return the requested name: the empty name for the whole sidecar, or a topic's full name. Raises
    INVALID_TOPIC_NAME."""
    name = parse_small(health_pb2.HealthCheckRequest, data).service
    return name if name in HEALTH_OF_THE_WHOLE else topic_name(name)


def _response(status: Any) -> bytes:
    return health_pb2.HealthCheckResponse(status=status).SerializeToString()


# -- grpc.reflection.v1alpha: tools learn the schema from the sidecar. Its streams count like all others.

REFLECTION_SERVICE: str = reflection.SERVICE_NAME


class Reflection:
    """The handler of grpc.reflection.v1alpha.ServerReflection."""

    def __init__(self, services: Sequence[str], streams: Streams) -> None:
        self._streams = streams
        self._answers = reflection.aio.ReflectionServicer(services)

    def handlers(self) -> grpc.GenericRpcHandler:
        methods: dict[str, Any] = {
            "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
                self._streams.handler(self._server_reflection_info)
            )
        }
        return grpc.method_handlers_generic_handler(REFLECTION_SERVICE, methods)

    async def _server_reflection_info(self, _requests: object, context: Context, stream: Stream) -> None:
        async def requests() -> Any:
            async for data in messages(stream):
                yield parse_small(reflection_pb2.ServerReflectionRequest, data)

        answers: Any = self._answers.ServerReflectionInfo(requests(), context)
        async for answer in answers:
            await stream.write(answer.SerializeToString())
