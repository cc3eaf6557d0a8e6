"""The layer between gRPC and the rest of the sidecar. It converts errors to statuses and bytes to messages, and counts
the calls of every method.

`abort` ends a call with an error. `parse` and similar functions read requests. `unary` makes a handler from a
coroutine. `Wrapping` is a service whose calls pass an additional step before their handlers. `Method` contains the
counts of one method's calls. The steps of a call, and their order, are in `gate.py`.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import iscoroutinefunction
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf import any_pb2, descriptor_pool
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from seqdedupe import wire
from seqdedupe.errors import REASONS, SeqdedupeError, error
from seqdedupe.figures import Buckets

logger = logging.getLogger("seqdedupe.server")

ERROR_DOMAIN = "seqdedupe"

MAX_CALL_BYTES = 1024 * 1024
"""The maximum size of a request that does not publish. (gRPC's own limit is the same for all calls.)"""


refusals: Counter[str] = Counter()
"""The number of times that callers received each reason since the process began, as a call's status or in a stream."""

NOT_OF_SIDECARS = frozenset({
    "AMBIGUOUS_IDENTITY", "ANSWERS_INCONSISTENT", "CONSUMER_CHANGED", "CREDENTIALS_UNAVAILABLE", "CURSOR_DAMAGED",
    "FUNCTION_FAILED", "HANDLER_FAILED", "IDS_FORGOTTEN", "INSECURE_ADDRESS", "INTERRUPTED", "INVALID_CREDENTIALS",
    "INVALID_FUNCTION", "INVALID_OPTION", "INVALID_OUTBOX", "INVALID_OUTPUT", "INVALID_VERSION", "JOB_CHANGED",
    "NOT_A_SIDECAR", "NOT_TRANSACTIONAL", "OUTBOX_CHANGED", "OUTBOX_UNAVAILABLE", "OUTPUT_MISSING",
    "OUTPUT_UNAVAILABLE", "POSITION_CHANGED", "POSITION_RESET", "POSITION_WENT_BACK", "SOURCE_CHANGED",
    "SOURCE_DIFFERS", "SOURCE_INCOMPLETE", "SOURCE_UNAVAILABLE", "SOURCE_UNVERIFIED", "STANDARD_OUTPUT_FAILED",
    "TLS_FAILED", "TRANSACTION_ENDED", "UNSUPPORTED_MESSAGE", "UNSUPPORTED_STORE", "UNTRUSTED_LISTENER",
})  # fmt: skip
"""Reasons that only clients, commands, services and jobs raise. `/metrics` has no series for them. Every other reason
has a series from the start, with the value 0: if a series did not exist before, Prometheus sees no increase in it."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Message)


def status_of(e: SeqdedupeError, more: Mapping[str, str] = {}) -> grpc.Status:
    """Return the gRPC status of an error: its code, and details with reason, numbers, `more` numbers, hint and retry
    delay."""
    numbers = {**e.numbers, **more, "hint": e.hint}
    info = error_details_pb2.ErrorInfo(reason=e.reason, domain=ERROR_DOMAIN, metadata=numbers)
    details = [any_pb2.Any()]
    details[0].Pack(info)
    if e.retry_delay_ms >= 0:
        delay = Duration()
        delay.FromMilliseconds(e.retry_delay_ms)
        details.append(any_pb2.Any())
        details[1].Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    code = getattr(grpc.StatusCode, REASONS[e.reason].code)
    return rpc_status.to_status(status_pb2.Status(code=code.value[0], message=e.message, details=details))


def known_code(code: Any) -> grpc.StatusCode | None:
    """Return the code of a call; None if no code was set. `code` is a `StatusCode` or the number of one."""
    return next((known for known in grpc.StatusCode if code is known or code == known.value[0]), None)


async def abort(context: Context, e: Exception, numbers: Mapping[str, str] = {}) -> NoReturn:
    """End the call with this error, and with these numbers in addition to the error's. Any other exception is a defect:
    it is logged, and the caller gets no details."""
    if isinstance(e, grpc.aio.InternalError):
        # The call is over, because its client has gone or the server has stopped. There is no caller to answer.
        raise asyncio.CancelledError from e
    cause = e
    if isinstance(e, MemoryError):
        e = error("OUT_OF_MEMORY", "there was no memory left for this call")
    elif not isinstance(e, SeqdedupeError):
        logger.error("a call failed", exc_info=e)
        e = error("INTERNAL", f"the call failed inside the sidecar: {type(e).__name__}")
    # The frames of the error's traceback refer to messages, and the error outlives these frames: until the client has
    # read its status, or, in a reference cycle with its stream, until the garbage collector runs.
    cause.__traceback__ = cause.__context__ = cause.__cause__ = None
    try:
        await context.abort_with_status(status_of(e, numbers))
    except grpc.aio.InternalError as over:
        raise asyncio.CancelledError from over
    except grpc.aio.AbortError:
        refusals[e.reason] += 1
        raise
    raise AssertionError("abort_with_status raises")


def parse(kind: type[M], data: bytes) -> M:
    """Return the message in these bytes. Raises MALFORMED_MESSAGE."""
    try:
        return kind.FromString(data)
    except DecodeError as e:
        raise error("MALFORMED_MESSAGE", f"the request is not a {kind.DESCRIPTOR.name}") from e


def parse_columns(published: type[Message], data: bytes) -> Any:
    """Return the message in these bytes, parsed with the alias schema of the published message. Raises
    MALFORMED_MESSAGE."""
    alias = wire.alias(published)
    request = parse(alias, data)
    # Columns in pieces or not packed are legal, but the alias schema shows only their last piece or nothing. So a
    # message that is longer than the part shown is read with the published schema.
    request.DiscardUnknownFields()
    if request.ByteSize() == len(data):
        return request
    return alias.FromString(parse(published, data).SerializeToString())


def parse_small(kind: type[M], data: bytes) -> M:
    """Do the same as `parse` for a request that does not publish. Raises INVALID_REQUEST if the request is too long."""
    check_small(kind, data)
    return parse(kind, data)


def check_small(kind: type[Message], data: bytes) -> None:
    """Raise INVALID_REQUEST if a request that does not publish is too long."""
    if len(data) > MAX_CALL_BYTES:
        message = f"a {kind.DESCRIPTOR.name} of {len(data)} bytes: at most {MAX_CALL_BYTES} are accepted"
        raise error("INVALID_REQUEST", message, size_bytes=len(data), limit_bytes=MAX_CALL_BYTES)


def columns(published: type[Message], data: bytes) -> Any:
    """Return a request of the alias schema. Raises the errors of `parse_small`."""
    check_small(published, data)
    return parse_columns(published, data)


def field_tags(data: bytes, what: str, most: int) -> Iterator[bytes]:
    """Yield the first byte of the tag of each field of a message, without parsing the message.

    Raises INVALID_REQUEST if there are more than `most` fields, which would be too many objects. Raises
    MALFORMED_MESSAGE if the bytes are not a message of the kind `what`.
    """
    at = 0
    for _ in range(most):
        if at >= len(data):
            return
        yield data[at : at + 1]
        at = wire.skip_field(data, at)
        if at < 0:
            raise error("MALFORMED_MESSAGE", f"the request is not {what}")
    if at < len(data):
        raise error("INVALID_REQUEST", f"a message has more than {most} fields")


def encoded(answer: Message, context: Context) -> bytes:
    """Return the only answer to a call. For an empty answer, also set the trailing metadata that identifies a
    sidecar."""
    data = answer.SerializeToString()
    if not data:
        context.set_trailing_metadata(((wire.EMPTY, "1"),))
    return data


def unary(kind: type[M], call: Callable[[M], Awaitable[R]]) -> "grpc.RpcMethodHandler[bytes, bytes]":
    """Return the handler of a unary call that takes a `kind`."""

    async def handle(data: bytes, context: Context) -> bytes:
        try:
            return encoded(await call(parse_small(kind, data)), context)
        except Exception as e:  # noqa: BLE001 (whatever it is, the caller gets an answer)
            await abort(context, e)

    return grpc.unary_unary_rpc_method_handler(handle)


# -- A gRPC service whose calls pass a step on the way to their handlers.

Handle = Callable[[Any, Context], Awaitable[Any]]


class Wrapping(grpc.GenericRpcHandler, ABC):
    """A service as `handler` serves it, where each call passes through the handler that `wrap` makes."""

    reads_itself = False
    """Whether gRPC lets the wrapped handlers read all requests, including requests that are one message."""

    def __init__(self, handler: grpc.GenericRpcHandler) -> None:
        self._handler = handler
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    @abstractmethod
    def wrap(self, method: str, handle: Handle, found: "grpc.RpcMethodHandler[Any, Any]") -> Handle:
        """Return the handler of the method with this full name, which wraps `handle` of `found`. This is called once
        per method."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Return the handler in the form that gRPC requires. Raises TypeError for a handler that is not a coroutine
        function."""
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
    """Return gRPC's name for the kind of a handler. The kind depends on whether requests and responses are streams."""
    return "_".join("stream" if streams else "unary" for streams in streaming)


# -- RPCs by method, counted around all other work that is done for them.

HANDLING_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_WORDS = {
    grpc.StatusCode.OK: "OK",
    grpc.StatusCode.CANCELLED: "Canceled",
}
"""Codes as Go and all dashboards write them, if that is not just the code's words joined."""

_KINDS = {
    (False, False): "unary",
    (True, False): "client_stream",
    (False, True): "server_stream",
    (True, True): "bidi_stream",
}
"""The kinds of calls, by whether the requests and the responses are streams in the schema."""


class Method:
    """The counts of one method's calls."""

    def __init__(self, service: str, name: str, kind: str) -> None:
        self.service = service
        self.name = name
        self.kind = kind
        """`unary`, `client_stream`, `server_stream` or `bidi_stream`."""
        self.started = 0
        self.handled: Counter[str] = Counter()
        """By code. The number of running calls is `started` minus these."""
        self.received = 0
        self.sent = 0
        self.seconds = Buckets(HANDLING_SECONDS)

    @contextmanager
    def handling(self, context: Context) -> Iterator[None]:
        """Count a call from its beginning to its end. The code that reads a request counts its messages (`Gate`,
        `Stream`), and the code that answers counts the responses."""
        _method.set(self)
        self.started += 1
        began = time.perf_counter()
        code = "Unknown"
        try:
            yield
            code = _word(context.code(), "OK")
        except asyncio.CancelledError:
            code = "Canceled"
            raise
        except grpc.aio.AbortError:
            code = _word(context.code(), "Unknown")
            raise
        finally:
            self.handled[code] += 1
            self.seconds.add(time.perf_counter() - began)


_method: ContextVar[Method] = ContextVar("method")
_NOWHERE = Method("", "", "")


def method_of_call() -> Method:
    """Return the counts of the current call's method. Outside of a call, return an object whose counts are never
    reported."""
    return _method.get(_NOWHERE)


OTHERS = "unknown"
"""The name in place of a method that no service has."""


class MethodCounts:
    """All methods that were called since the process began."""

    def __init__(self) -> None:
        self.methods: dict[str, Method] = {}

    def of_others(self) -> Method:
        """Return the counts of all calls that no service has. Callers choose the names of such calls freely, so all of
        these calls share one entry."""
        return self.methods.setdefault(OTHERS, Method("", OTHERS, "unary"))

    def of(self, method: str) -> Method:
        """Return the counts of a method, by the method's full name. This is called once for each method."""
        service, _, name = method.removeprefix("/").rpartition("/")
        schema: Any = descriptor_pool.Default().FindMethodByName(f"{service}.{name}")
        counts = self.methods[method] = Method(service, name, _KINDS[schema.client_streaming, schema.server_streaming])
        return counts


def _word(code: Any, default: str) -> str:
    known = known_code(code)
    return default if known is None else _WORDS.get(known) or known.name.title().replace("_", "")
