"""Sidecars that share their topics, as far as a client can tell: each owns some, and all reach the same state.

A `Front` is a gRPC server before one real sidecar. Calls of topics that it owns it passes on, byte for byte; of others
it refuses them with NOT_OWNER, as a standby does, and streams that are open when it loses a topic it ends so.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio

from broker_sidecar.rpc import Context, status_of
from seqdedupe.client import route
from seqdedupe.client.pending import NO_INDEX
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.names import is_namespace, topic_name
from seqdedupe.testing import reserved_port
from seqdedupe.v1 import admin_pb2, publish_pb2, read_pb2
from seqdedupe.wire import GREETING

_LARGE = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_AS_A_SIDECAR = (
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
)
_REQUESTS = {
    name.removesuffix("Request"): message
    for module in (admin_pb2, publish_pb2, read_pb2)
    for name, message in vars(module).items()
    if name.endswith("Request")
}


class Front:
    """One of the sidecars. All topics are its own until it learns otherwise."""

    def __init__(self, target: str, tls: grpc.ServerCredentials | None, reserved: socket.socket) -> None:
        self.address = f"127.0.0.1:{reserved.getsockname()[1]}"
        """Its own while it is stopped, too: else a client that tries again could be given the port."""
        self.shown: list[str | None] = []
        """What each call has shown as its authorization."""
        self.judges: Callable[[str | None], SeqdedupeError | None] = lambda _: None
        """Why a call that shows this is refused; it is asked when the call comes."""
        self.calls: list[str] = []
        """The methods of the calls that came, refused ones too."""
        self.swallows_receipts = False
        """What the sidecar answers on publish streams gets lost."""
        self.swallowed = 0
        """Such answers."""
        self.doubts: Callable[[publish_pb2.Frame], bool] | None = None
        """Which frames get the verdict Unknown, and reach nobody."""
        self.doubted = 0
        """Such frames."""
        self.breaks_on = b""
        """A publish stream over which this comes ends at once, with a status that no sidecar sends. Empty: none."""
        self.refuses_frames = False
        """It answers frames of topics that it has lost one by one, and leaves the streams open."""
        self._target = target
        self._tls = tls
        self._disowned: Callable[[str], str | None] = lambda _: None
        self._opened: dict[str, publish_pb2.OpenResponse] = {}
        self._streams: dict[asyncio.Task[None], tuple[str, str | None]] = {}
        """Calls that are under way, with the topic and what they have shown."""
        self._server: grpc.aio.Server | None = None
        self._channel: grpc.aio.Channel | None = None

    async def start(self) -> None:
        """On the port that is reserved for it."""
        self._channel = grpc.aio.insecure_channel(self._target, options=_LARGE)
        self._server = grpc.aio.server(options=(*_LARGE, *_AS_A_SIDECAR))
        self._server.add_generic_rpc_handlers((_Handler(self),))
        if self._tls is None:
            self._server.add_insecure_port(self.address)
        else:
            self._server.add_secure_port(self.address, self._tls)
        await self._server.start()

    async def stop(self) -> None:
        """At once, as if killed."""
        server, channel = self._server, self._channel
        self._server = self._channel = None
        if server is not None and channel is not None:
            await server.stop(None)
            await channel.close()

    def disown(self, owner: "str | Callable[[str], str | None]" = "") -> None:
        """No topic is its own any more: `owner` is where they are, as it believes. Or a function: by topic, None if it
        is this one's."""
        self._disowned = owner if callable(owner) else lambda _: owner
        for task, (topic, _) in list(self._streams.items()):
            if topic and self._disowned(topic) is not None and not self.refuses_frames:
                task.cancel()

    def judge_again(self) -> None:
        """What is under way ends, if what it has shown is refused by now."""
        for task, (_, shown) in list(self._streams.items()):
            if self.judges(shown) is not None:
                task.cancel()

    def own(self) -> None:
        """All topics are its own."""
        self._disowned = lambda _: None

    def not_owner(self, topic: str) -> SeqdedupeError | None:
        """Why it does not serve the topic; None if it does."""
        owner = self._disowned(topic)
        if owner is None:
            return None
        why = error("NOT_OWNER", f"{topic} is not owned here")
        if owner:
            why.numbers["owner_address"] = owner
        return why

    async def serve(self, method: str, requests: AsyncIterator[bytes], context: Context) -> None:
        """One call, of any kind: to gRPC a unary call is a stream of one message."""
        name = method.rpartition("/")[2]
        self.calls.append(name)
        shown = str(dict(context.invocation_metadata() or ()).get("authorization", "")) or None
        self.shown.append(shown)
        if (refusal := self.judges(shown)) is not None:
            await context.abort_with_status(status_of(refusal))
        await context.send_initial_metadata(())  # a cancelled write may have sent them, and they would go out twice
        first = await anext(requests)
        topic = getattr(_REQUESTS[name].FromString(first), "topic", "") if name in _REQUESTS else ""
        topic = topic_name(topic) if topic and not is_namespace(topic) else ""
        # It may be another judge by now.
        if (why := self.judges(shown) or (self.not_owner(topic) if topic else None)) is not None:
            await context.abort_with_status(status_of(why))
        task = asyncio.create_task(self._pass_on(method, topic, first, requests, context))
        task.add_done_callback(_noticed)
        self._streams[task] = topic, shown
        try:
            await asyncio.wait({task})
        finally:
            self._streams.pop(task, None)
            task.cancel()
        if task.cancelled():
            why = self.judges(shown) or self.not_owner(topic)
            await context.abort_with_status(status_of(why or error("OUTCOME_UNKNOWN", "the front was stopped")))
        if isinstance(failure := task.exception(), grpc.aio.AioRpcError):
            metadata = tuple(failure.trailing_metadata())
            await context.abort(failure.code(), failure.details() or "", metadata)
        task.result()

    async def _pass_on(
        self, method: str, topic: str, first: bytes, requests: AsyncIterator[bytes], context: Context
    ) -> None:
        assert self._channel is not None
        wanted = tuple((name, value) for name, value in context.invocation_metadata() or () if name == GREETING)
        call: grpc.aio.StreamStreamCall[bytes, bytes] = self._channel.stream_stream(method)(metadata=wanted)
        is_publishing = method.endswith("/PublishStream")
        turn = asyncio.Lock()  # two write
        is_broken = False

        async def ask() -> None:
            nonlocal is_broken
            await call.write(first)
            async for request in requests:
                if is_publishing and self.breaks_on and self.breaks_on in request:
                    is_broken = True
                    call.cancel()
                    return
                if is_publishing and (why := self.not_owner(topic)) is not None:
                    async with turn:
                        await context.write(_refusals(request, why, self._opened[topic]))
                    continue
                if is_publishing and self.doubts is not None and (doubted := self._take_doubted(request)):
                    async with turn:
                        await context.write(_unknown(doubted, self._opened[topic]))
                    continue
                await call.write(request)
            await call.done_writing()

        asking = asyncio.create_task(ask())
        try:
            while isinstance(answer := await call.read(), bytes):  # until grpc.aio.EOF
                if method.endswith("/Open"):
                    self._opened[topic] = publish_pb2.OpenResponse.FromString(answer)
                if is_publishing and self.swallows_receipts:
                    self.swallowed += 1
                    continue
                async with turn:
                    await context.write(answer)
            if (code := await call.code()) is not grpc.StatusCode.OK:
                raise grpc.aio.AioRpcError(
                    code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
                )
        except asyncio.CancelledError:
            if is_broken:
                nothing = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, "broken") from None
            raise
        finally:
            asking.cancel()
            call.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await asking

    def _take_doubted(self, request: bytes) -> list[publish_pb2.Frame]:
        """The message's frames, if one of them is to be doubted; else none."""
        frames = list(publish_pb2.PublishStreamRequest.FromString(request).frames)
        if self.doubts is None or not any(map(self.doubts, frames)):
            return []
        self.doubted += len(frames)
        return frames


def _noticed(task: "asyncio.Task[None]") -> None:
    """Else a call whose client was killed has an exception that nobody has asked for, which is printed."""
    if not task.cancelled():
        task.exception()


def _unknown(frames: list[publish_pb2.Frame], opened: publish_pb2.OpenResponse) -> bytes:
    """The answer to frames whose rows are under way already, as it says."""
    response = publish_pb2.PublishStreamResponse(incarnation=opened.incarnation, term=opened.term)
    for frame in frames:
        verdicts = [publish_pb2.VERDICT_UNKNOWN] * len(frame.batch.sequence_ids)
        response.receipts.add(frame=frame.number, verdicts=verdicts, first_index=NO_INDEX)
    return response.SerializeToString()


def _refusals(request: bytes, why: SeqdedupeError, opened: publish_pb2.OpenResponse) -> bytes:
    """The answer to frames of a topic that was lost."""
    response = publish_pb2.PublishStreamResponse(incarnation=opened.incarnation, term=opened.term)
    for frame in publish_pb2.PublishStreamRequest.FromString(request).frames:
        response.refusals.add(
            frame=frame.number,
            reason=why.reason,
            message=why.message,
            retry_delay_ms=why.retry_delay_ms,
            owner_address=why.numbers.get("owner_address", ""),
        )
    return response.SerializeToString()


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, front: Front) -> None:
        self._front = front

    def service(self, handler_call_details: Any) -> Any:
        async def handle(requests: AsyncIterator[bytes], context: Context) -> None:
            await self._front.serve(handler_call_details.method, requests, context)

        return grpc.stream_stream_rpc_method_handler(handle)


@asynccontextmanager
async def fronts(target: str, count: int = 3, tls: grpc.ServerCredentials | None = None) -> AsyncIterator[list[Front]]:
    """This many sidecars, by address; they are gone with the block."""
    async with AsyncExitStack() as stack:
        started = []
        for _ in range(count):
            front = Front(target, tls, stack.enter_context(reserved_port()))
            await front.start()
            stack.push_async_callback(front.stop)
            started.append(front)
        yield started


def addresses(some: list[Front]) -> str:
    """What a client takes."""
    return ",".join(front.address for front in some)


def move(some: list[Front], owner: Front | None, *, knows: bool = True) -> None:
    """The topics are all this one's, and the others know that, or do not; or nobody's."""
    for front in some:
        if front is owner:
            front.own()
        else:
            front.disown(owner.address if owner is not None and knows else "")


def in_order(some: list[Front], topic: str) -> list[Front]:
    """As a client tries them for a topic."""
    by_address = {front.address: front for front in some}
    return [by_address[address] for address in route.in_order(topic_name(topic), by_address)]
