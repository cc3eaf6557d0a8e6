"""Between gRPC and the rest: errors become statuses, bytes become messages, at one place."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from seqdedupe.errors import REASONS, SeqdedupeError, error
from seqdedupe.wire import EMPTY

ERROR_DOMAIN = "seqdedupe"

MAX_CALL_BYTES = 1024 * 1024
"""A request, unless it publishes. (gRPC's own limit is one for all calls.)"""

logger = logging.getLogger("seqdedupe.server")

refusals: Counter[str] = Counter()
"""How often callers were told which reason since the process began, as the status of a call or within a stream."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Message)


def status_of(e: SeqdedupeError) -> grpc.Status:
    """The gRPC status of an error: its code, and details with reason, numbers, hint and retry delay."""
    info = error_details_pb2.ErrorInfo(reason=e.reason, domain=ERROR_DOMAIN, metadata=e.numbers | {"hint": e.hint})
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
    """A call's code, which is a `StatusCode`, its number, or None where none was set."""
    return next((known for known in grpc.StatusCode if code is known or code == known.value[0]), None)


async def abort(context: Context, e: Exception) -> NoReturn:
    """Ends the call with this error. What is none of ours is a defect: logged, and told without its inside."""
    if isinstance(e, grpc.aio.InternalError):
        # The call is over, because its client has gone or the server has stopped: there is nobody to tell.
        raise asyncio.CancelledError from e
    cause = e
    if isinstance(e, MemoryError):
        e = error("OUT_OF_MEMORY", "there was no memory left for this call")
    elif not isinstance(e, SeqdedupeError):
        logger.error("a call failed", exc_info=e)
        e = error("INTERNAL", f"the call failed inside the sidecar: {type(e).__name__}")
    # The frames in its traceback have messages, and it outlives them: until the client takes its status, and in a
    # cycle with its stream until the collector finds that.
    cause.__traceback__ = cause.__context__ = cause.__cause__ = None
    try:
        await context.abort_with_status(status_of(e))
    except grpc.aio.InternalError as over:
        raise asyncio.CancelledError from over
    except grpc.aio.AbortError:
        refusals[e.reason] += 1
        raise
    raise AssertionError("abort_with_status raises")


def parse(kind: type[M], data: bytes) -> M:
    """The message in these bytes. Raises MALFORMED_MESSAGE."""
    try:
        return kind.FromString(data)
    except DecodeError as e:
        raise error("MALFORMED_MESSAGE", f"the request is not a {kind.DESCRIPTOR.name}") from e


def parse_columns(alias: Any, published: type[Message], data: bytes) -> Any:
    """The message in these bytes, of the alias schema of a published one. Raises MALFORMED_MESSAGE."""
    request = parse(alias, data)
    # Columns that come in pieces or not packed are legal, but of those the alias schema shows the last piece or none.
    # So a message that is not as long as what is shown of it is read with the published schema.
    request.DiscardUnknownFields()
    if request.ByteSize() == len(data):
        return request
    return alias.FromString(parse(published, data).SerializeToString())


def parse_small(kind: type[M], data: bytes) -> M:
    """`parse`, of a request that does not publish. Raises INVALID_REQUEST if it is longer than such a one may be."""
    check_small(kind, data)
    return parse(kind, data)


def check_small(kind: type[Message], data: bytes) -> None:
    """Raises INVALID_REQUEST if a request that does not publish is longer than it may be."""
    if len(data) > MAX_CALL_BYTES:
        message = f"a {kind.DESCRIPTOR.name} of {len(data)} bytes: at most {MAX_CALL_BYTES} are accepted"
        raise error("INVALID_REQUEST", message, size_bytes=len(data), limit_bytes=MAX_CALL_BYTES)


def columns(alias: Any, published: type[Message], data: bytes) -> Any:
    """A request of the alias schema. Raises as `parse_small`."""
    check_small(published, data)
    return parse_columns(alias, published, data)


def unary(kind: type[M], call: Callable[[M], Awaitable[R]]) -> "grpc.RpcMethodHandler[bytes, bytes]":
    """The handler of a unary call that takes a `kind`."""

    async def handle(data: bytes, context: Context) -> bytes:
        try:
            answer = (await call(parse_small(kind, data))).SerializeToString()
            if not answer:
                context.set_trailing_metadata(((EMPTY, "1"),))
            return answer
        except Exception as e:  # noqa: BLE001 (whatever it is, the caller gets an answer)
            await abort(context, e)

    return grpc.unary_unary_rpc_method_handler(handle)
