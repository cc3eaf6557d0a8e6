"""RPCs by method, counted around everything else that is done for them."""

import asyncio
import time
from collections import Counter
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pool

from broker_sidecar.rpc import Context, known_code
from broker_sidecar.wrapping import Handle, Wrapping
from seqdedupe.figures import Buckets

HANDLING_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_WORDS = {
    grpc.StatusCode.OK: "OK",
    grpc.StatusCode.CANCELLED: "Canceled",
}
"""As Go writes them, and everybody's dashboards: those that are not just their words in one."""

_KINDS = {
    (False, False): "unary",
    (True, False): "client_stream",
    (False, True): "server_stream",
    (True, True): "bidi_stream",
}
"""By whether the requests and the responses are streams in the schema."""


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


class Counted(Wrapping):
    """A service whose calls are counted. The reader of a request counts its messages (`Gate`, `Stream`), and the writer
    of a stream counts the responses."""

    def __init__(self, handler: grpc.GenericRpcHandler, calls: Calls) -> None:
        super().__init__(handler)
        self._calls = calls

    def wrap(self, method: str, handle: Handle, found: "grpc.RpcMethodHandler[Any, Any]") -> Handle:
        service, _, name = method.removeprefix("/").rpartition("/")
        schema: Any = descriptor_pool.Default().FindMethodByName(f"{service}.{name}")
        kind = _KINDS[schema.client_streaming, schema.server_streaming]
        counts = self._calls.methods[method] = Method(service, name, kind)

        async def counted(request: Any, context: Context) -> Any:
            _method.set(counts)
            counts.started += 1
            began = time.perf_counter()
            code = "Unknown"
            try:
                response = await handle(request, context)
                counts.sent += not found.response_streaming
                code = _word(context.code(), "OK")
                return response
            except asyncio.CancelledError:
                code = "Canceled"
                raise
            except grpc.aio.AbortError:
                code = _word(context.code(), "Unknown")
                raise
            finally:
                counts.handled[code] += 1
                counts.seconds.add(time.perf_counter() - began)

        return counted


def _word(code: Any, default: str) -> str:
    known = known_code(code)
    return default if known is None else _WORDS.get(known) or known.name.title().replace("_", "")
