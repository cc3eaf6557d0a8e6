"""RPCs by method, counted around everything else that is done for them."""

import asyncio
import time
from collections import Counter
from contextvars import ContextVar
from inspect import iscoroutinefunction
from typing import Any

import grpc
import grpc.aio

from broker_sidecar.rpc import Context
from seqdedupe.buckets import Buckets

HANDLING_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_WORDS = {
    grpc.StatusCode.OK: "OK",
    grpc.StatusCode.CANCELLED: "Canceled",
}
"""As Go writes them, and everybody's dashboards: those that are not just their words in one."""


class Method:
    """What is counted of one method's calls."""

    def __init__(self, service: str, name: str, kind: str) -> None:
        self.service = service
        self.name = name
        self.kind = kind
        """`unary`, `client_stream`, `server_stream` or `bidi_stream`."""
        self.started = 0
        self.handled: Counter[str] = Counter()
        """By code. What is under way is `started` without these."""
        self.received = 0
        self.sent = 0
        self.seconds = Buckets(HANDLING_SECONDS)


_method: ContextVar[Method] = ContextVar("method")
_NOWHERE = Method("", "", "")


def method_of_call() -> Method:
    """That of the call that is being handled; one that nobody looks at outside of a call."""
    return _method.get(_NOWHERE)


class Calls:
    """All methods that were called since the process began."""

    def __init__(self) -> None:
        self.methods: dict[str, Method] = {}

    def counted(self, handler: grpc.GenericRpcHandler) -> "Counted":
        """The service as this handler serves it, counted."""
        return Counted(handler, self)


class Counted(grpc.GenericRpcHandler):
    """A service whose calls are counted. Of streams, who reads and writes counts the messages (`Stream`)."""

    def __init__(self, handler: grpc.GenericRpcHandler, calls: Calls) -> None:
        self._handler = handler
        self._calls = calls
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        name = handler_call_details.method
        if name not in self._handlers:
            found = self._handler.service(handler_call_details)
            if found is None:
                return None
            self._handlers[name] = self._count(name, found)
        return self._handlers[name]

    def _count(self, path: str, found: Any) -> "grpc.RpcMethodHandler[Any, Any]":
        shape = _shape(found.request_streaming, found.response_streaming)
        handle = getattr(found, shape)
        if not iscoroutinefunction(handle):
            raise TypeError(f"the handler of {path} is no coroutine function")
        service, _, name = path.removeprefix("/").rpartition("/")
        kinds = {"stream_stream": "bidi_stream", "unary_stream": "server_stream", "stream_unary": "client_stream"}
        method = self._calls.methods[path] = Method(service, name, kinds.get(shape, "unary"))
        one_comes, one_goes = not found.request_streaming, not found.response_streaming

        async def counted(request: Any, context: Context) -> Any:
            _method.set(method)
            method.started += 1
            method.received += one_comes
            began = time.perf_counter()
            code = "Unknown"
            try:
                response = await handle(request, context)
                method.sent += one_goes
                code = _word(context.code(), "OK")
                return response
            except asyncio.CancelledError:
                code = "Canceled"
                raise
            except grpc.aio.AbortError:
                code = _word(context.code(), "Unknown")
                raise
            finally:
                method.handled[code] += 1
                method.seconds.add(time.perf_counter() - began)

        make: Any = getattr(grpc, f"{shape}_rpc_method_handler")
        wrapped: grpc.RpcMethodHandler[Any, Any] = make(counted, found.request_deserializer, found.response_serializer)
        return wrapped


def _shape(*are_streams: bool) -> str:
    return "_".join("stream" if is_stream else "unary" for is_stream in are_streams)


def _word(code: Any, default: str) -> str:
    """A code, which is a `StatusCode`, its number, or None where none was set."""
    for known in grpc.StatusCode:
        if code is known or code == known.value[0]:
            return _WORDS.get(known) or known.name.title().replace("_", "")
    return default
