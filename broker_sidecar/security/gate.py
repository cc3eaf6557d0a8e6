"""The one place that every call passes before its handler: who makes it is found out, or the call ends."""

from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from broker_sidecar.rpc import Context, abort, parse_small
from broker_sidecar.security.calls import CHANGES
from broker_sidecar.security.permissions import OPEN_HEALTH, Permissions, request_class
from broker_sidecar.security.subject import ANONYMOUS, Subject, set_caller
from broker_sidecar.security.trail import Trail
from seqdedupe.errors import SeqdedupeError

_HEALTH = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})

Authenticate = Callable[[Context], Subject]
"""Who makes a call. Raises UNAUTHENTICATED, TOKEN_EXPIRED."""
Handle = Callable[[Any, Context], Awaitable[Any]]


def anybody(context: Context) -> Subject:
    """Nobody is asked who they are."""
    return Subject(ANONYMOUS, "nobody", None, context.peer())


class Gate(grpc.GenericRpcHandler):
    """A service as `handler` serves it, for callers who are known and may make the call. `caller` is theirs within its
    handlers.

    The health of the whole is told to everybody: what asks for it, such as a probe, has no token.
    """

    def __init__(
        self, handler: grpc.GenericRpcHandler, authenticate: Authenticate, permissions: Permissions, trail: Trail
    ) -> None:
        self._handler = handler
        self._authenticate = authenticate
        self._permissions = permissions
        self._trail = trail
        self._guarded: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        method = handler_call_details.method
        if method not in self._guarded:
            found = self._handler.service(handler_call_details)
            if found is None:
                return None
            self._guarded[method] = self._guard(method, found)
        return self._guarded[method]

    def _guard(self, method: str, found: Any) -> "grpc.RpcMethodHandler[Any, Any]":
        kinds = ("stream" if streams else "unary" for streams in (found.request_streaming, found.response_streaming))
        shape = "_".join(kinds)
        handle: Handle = getattr(found, shape)
        if not iscoroutinefunction(handle):
            raise TypeError(f"the handler of {method} is no coroutine function")

        async def guarded(request: Any, context: Context) -> Any:
            try:
                set_caller(self._subject(method, request, context))
                self._permissions.check_call(method, request)
                if method in CHANGES:
                    async with self._trail.change(method, parse_small(request_class(method), request)):
                        return await handle(request, context)
            except SeqdedupeError as e:
                await abort(context, e)
            return await handle(request, context)

        make: Any = getattr(grpc, f"{shape}_rpc_method_handler")
        wrapped: grpc.RpcMethodHandler[Any, Any] = make(guarded, found.request_deserializer, found.response_serializer)
        return wrapped

    def _subject(self, method: str, request: Any, context: Context) -> Subject:
        try:
            return self._authenticate(context)
        except SeqdedupeError as e:
            if method in _HEALTH and _is_of_the_whole(request):
                return Subject("", "nobody", None, context.peer())
            self._trail.unauthenticated(method, context.peer(), e)
            raise


def _is_of_the_whole(request: bytes) -> bool:
    try:
        return health_pb2.HealthCheckRequest.FromString(request).service in OPEN_HEALTH
    except DecodeError:
        return False
