"""A gRPC service whose calls pass something on the way to their handlers."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction
from typing import Any

import grpc

from broker_sidecar.rpc import Context

Handle = Callable[[Any, Context], Awaitable[Any]]


class Wrapping(grpc.GenericRpcHandler, ABC):
    """A service as `handler` serves it, each call by what `wrap` makes of its handler."""

    reads_itself = False
    """Whether gRPC leaves the requests of all calls to what `wrap` makes, also where a request is one message."""

    def __init__(self, handler: grpc.GenericRpcHandler) -> None:
        self._handler = handler
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    @abstractmethod
    def wrap(self, method: str, handle: Handle, found: "grpc.RpcMethodHandler[Any, Any]") -> Handle:
        """The handler of this method, by its full name, around `handle`, which is that of `found`. Called once."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """As gRPC asks for it. Raises TypeError for a handler that is no coroutine function."""
        method = handler_call_details.method
        if method not in self._wrapped:
            found = self._handler.service(handler_call_details)
            if found is None:
                return None
            self._wrapped[method] = self._around(method, found)
        return self._wrapped[method]

    def _around(self, method: str, found: Any) -> "grpc.RpcMethodHandler[Any, Any]":
        handle = getattr(found, _shape(found.request_streaming, found.response_streaming))
        if not iscoroutinefunction(handle):
            raise TypeError(f"the handler of {method} is no coroutine function")
        shape = _shape(self.reads_itself or found.request_streaming, found.response_streaming)
        make: Any = getattr(grpc, f"{shape}_rpc_method_handler")
        wrapped: grpc.RpcMethodHandler[Any, Any] = make(
            self.wrap(method, handle, found), found.request_deserializer, found.response_serializer
        )
        return wrapped


def _shape(*streaming: bool) -> str:
    """gRPC's word for a handler, by whether the requests and the responses are streams."""
    return "_".join("stream" if streams else "unary" for streams in streaming)
