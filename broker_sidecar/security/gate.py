"""The one place that every call passes before its handler: who makes it is found out, or the call ends."""

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from broker_sidecar.rpc import Context, abort, parse_small
from broker_sidecar.security.calls import CHANGES, HEALTH_OF_THE_WHOLE
from broker_sidecar.security.permissions import Permissions, request_class
from broker_sidecar.security.subject import ANONYMOUS, Subject, set_caller
from broker_sidecar.security.trail import Trail
from broker_sidecar.wrapping import Handle, Wrapping
from seqdedupe.errors import SeqdedupeError

_HEALTH = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})

Authenticate = Callable[[Context], Subject]
"""Who makes a call. Raises UNAUTHENTICATED, TOKEN_EXPIRED."""


def anybody(context: Context) -> Subject:
    """Nobody is asked who they are."""
    return Subject(ANONYMOUS, "nobody", None, context.peer())


class Gate(Wrapping):
    """A service as `handler` serves it, for callers who are known and may make the call. `caller` is theirs within its
    handlers.

    The health of the whole is told to everybody: what asks for it, such as a probe, has no token.
    """

    def __init__(
        self, handler: grpc.GenericRpcHandler, authenticate: Authenticate, permissions: Permissions, trail: Trail
    ) -> None:
        super().__init__(handler)
        self._authenticate = authenticate
        self._permissions = permissions
        self._trail = trail

    def wrap(self, method: str, handle: Handle, found: "grpc.RpcMethodHandler[Any, Any]") -> Handle:
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

        return guarded

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
        return health_pb2.HealthCheckRequest.FromString(request).service in HEALTH_OF_THE_WHOLE
    except DecodeError:
        return False
