"""Between gRPC and the rest: errors become statuses, bytes become messages, at one place."""

import asyncio
import logging
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

ERROR_DOMAIN = "seqdedupe"

logger = logging.getLogger("seqdedupe.server")

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


async def abort(context: Context, e: Exception) -> NoReturn:
    """Ends the call with this error. What is none of ours is a defect: logged, and told without its inside."""
    if not isinstance(e, SeqdedupeError):
        logger.error("a call failed", exc_info=e)
        e = error("INTERNAL", f"the call failed inside the sidecar: {type(e).__name__}")
    await context.abort_with_status(status_of(e))
    raise AssertionError("abort_with_status raises")


def parse(kind: type[M], data: bytes) -> M:
    """The message in these bytes. Raises MALFORMED_MESSAGE."""
    try:
        return kind.FromString(data)
    except DecodeError as e:
        raise error("MALFORMED_MESSAGE", f"the request is not a {kind.DESCRIPTOR.name}") from e


def unary(kind: type[M], call: Callable[[M], Awaitable[R]]) -> "grpc.RpcMethodHandler[bytes, bytes]":
    """The handler of a unary call that takes a `kind`."""

    async def handle(data: bytes, context: Context) -> bytes:
        try:
            return (await call(parse(kind, data))).SerializeToString()
        except Exception as e:  # noqa: BLE001 (whatever it is, the caller gets an answer)
            await abort(context, e)

    return grpc.unary_unary_rpc_method_handler(handle)


class Limiter:
    """How many streams there may be at once. Each is served within `with`, in a task of its own."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: set[asyncio.Task[Any] | None] = set()
        self.is_draining = False

    def __enter__(self) -> None:
        if len(self._open) >= self._limit:
            raise error("TOO_MANY_STREAMS", f"{self._limit} streams are open: that is the limit", limit=self._limit)
        self._open.add(asyncio.current_task())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._open.discard(asyncio.current_task())
        if kind is asyncio.CancelledError and self.is_draining:
            raise error("DRAINING", "the sidecar is shutting down")

    def drain(self) -> None:
        """Ends all streams with DRAINING."""
        self.is_draining = True
        for task in self._open:
            if task is not None:
                task.cancel()
