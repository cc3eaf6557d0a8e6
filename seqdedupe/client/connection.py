"""Connections to sidecars: channels, unary calls, and the conversion of gRPC's errors. No other module interprets
gRPC's errors.

Begin with `new_channel`, `typed_errors` and `ClientCalls`, which sends each call to the sidecar that owns the topic.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from seqdedupe.address import SidecarAddress
from seqdedupe.client.credentials import NO_CREDENTIALS, Credentials
from seqdedupe.client.listeners import (
    check_listener,
    has_no_grpc_status,
    hint_of_http,
    is_of_another_host,
    unreachable,
    was_never_sent,
)
from seqdedupe.client.route import OWNER_ADDRESS, Route, Sidecars
from seqdedupe.errors import NEVER, REASONS, SeqdedupeError, UnavailableError, error
from seqdedupe.v1.read_pb2_grpc import ReadServiceStub
from seqdedupe.wire import EMPTY

if TYPE_CHECKING:
    from seqdedupe.v1.admin_pb2_grpc import AdminServiceAsyncStub
    from seqdedupe.v1.read_pb2_grpc import ReadServiceAsyncStub


# -- A channel whose calls carry the token, and keep the status that the other side sent.

AUTHORIZATION = "authorization"
"""The name of the metadata that carries a token, as `Bearer TOKEN`."""


class Channel(grpc.aio.Channel):
    """A channel whose calls and streams carry the token, if there is one. The token is read again when a call or stream
    begins. The channel does not use gRPC's own call credentials for two reasons: they refuse connections without TLS,
    and every message of a stream would pass through an interceptor. Before each call the channel calls `check`. So a
    call can raise CREDENTIALS_UNAVAILABLE and the errors of `check`."""

    def __init__(self, channel: grpc.aio.Channel, credentials: Credentials, check: Callable[[], None]) -> None:
        self._channel = channel
        self._credentials = credentials
        self._check = check

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return self._calling(self._channel.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._calling(self._channel.unary_stream(*args, **options))

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return _keeping_status(self._calling(self._channel.stream_unary(*args, **options)))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return _keeping_status(self._calling(self._channel.stream_stream(*args, **options)))

    def _calling(self, make: Callable[..., Any]) -> Callable[..., Any]:
        if not self._credentials.has_token:
            return make

        def call(*args: Any, metadata: tuple[tuple[str, str], ...] = (), **options: Any) -> Any:
            shown = AUTHORIZATION, f"Bearer {self._credentials.token_now()}"
            self._check()
            return make(*args, metadata=(shown, *metadata), **options)

        return call

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()


def _keeping_status(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `make`. The status of each call is then always the status that the other side sent."""

    def call(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        if hasattr(made, _INSIDE):
            setattr(made, _INSIDE, _StatusKept(getattr(made, _INSIDE)))
        return made

    return call


_INSIDE = "_cython_call"
"""The attribute in which grpcio keeps the inner object of a call."""


class _StatusKept:
    """The inner object of a streaming call on which the caller writes messages.

    A write fails when the other side has ended the call. grpcio then replaces the status of the call, received or not,
    with "Internal error from Core", which hides the reason from the caller. This class makes the call wait for the
    status that the other side sent.
    """

    def __init__(self, inside: Any) -> None:
        self._inside = inside

    def __getattr__(self, name: str) -> Any:
        # The inner object has only methods, and every message looks one of them up. Setting the attribute here makes
        # the next lookup direct.
        found = self.__dict__[name] = getattr(self._inside, name)
        return found

    def set_internal_error(self, _text: str) -> None:
        pass


# -- Channels, the calls over them, and the errors of these calls.

M = TypeVar("M", bound=Message)

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""The maximum size of an accepted answer. One answer may contain all receipts of a commit round."""

CALL_TIMEOUT_SECONDS = 30.0
"""A unary call without an answer by then has an unknown outcome. This is longer than any wait inside the sidecar."""

KEEPALIVE_SECONDS = 30
"""The interval of pings on a silent connection, and the time limit for their answer."""

IMPATIENT_SECONDS = 5
"""The same interval and limit if there are other sidecars. Also the time limit for accepting a connection then."""

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Two channels never share a connection. So a stalled channel does not affect other channels, and a new channel
    # connects again.
    ("grpc.use_local_subchannel_pool", 1),
    # The sidecar runs next to its client. A proxy configured in the environment does not lead to the sidecar.
    ("grpc.enable_http_proxy", 0),
)

_PATIENT = (
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_SECONDS * 1000),
)
_IMPATIENT = (
    ("grpc.keepalive_time_ms", IMPATIENT_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", IMPATIENT_SECONDS * 1000),
    # While a ping is in flight, only this limit applies (a minute by default).
    ("grpc.http2.ping_timeout_ms", IMPATIENT_SECONDS * 1000),
    ("grpc.min_reconnect_backoff_ms", IMPATIENT_SECONDS * 1000),
)

_BRIEF = (("grpc.client_idle_timeout_ms", 10_000),)

_DOMAIN = "seqdedupe"
"""The domain of a sidecar's ErrorInfos. Others are ignored."""

_RICH_STATUS = "grpc-status-details-bin"
"""The trailing metadata that holds the status as a google.rpc message, by gRPC's convention."""

NOT_A_SIDECAR = "NOT_A_SIDECAR"
"""The reason of an answer that does not come from a sidecar. At the start it is final: the address may be wrong. After
a sidecar has answered, it means that the connection is broken."""

_BREAKS_STREAM = {NOT_A_SIDECAR, "OUTCOME_UNKNOWN"}
"""The reasons of a stream's end if a component on the way ends it."""

_OWN_LIMIT = "CLIENT: "
"""The prefix of gRPC's error text for a message that is larger than the limit of this side."""

_SHORTEST_DELAY_SECONDS = 0.01

MAY_BE_EMPTY = {
    "DeleteCursorResponse",
    "DeleteTopicResponse",
    "ForgetSidecarResponse",
    "ListCursorsResponse",
    "ListInFlightResponse",
    "ListProducersResponse",
    "ListSidecarsResponse",
    "ListTopicsResponse",
    "SetCursorHoldResponse",
    "SettleMoveResponse",
    "TakeTopicResponse",
    "DedupeServiceGetProducerResponse",
    "GetCursorResponse",
    "MoveCursorResponse",
}
"""The answers to unary calls that have a meaning when they are empty, by name. All other answers are never empty."""

_LOST = {
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
}
"""gRPC's status codes, in addition to UNAVAILABLE, if a connection breaks during a call."""

_HINT_OF_LOST = (
    "The sidecar's log says what it waits for. The call may have taken effect: look before you repeat it. Send "
    "messages again with the same IDs."
)


HINT_OF_GONE = (
    "The topic existed before: it was deleted, or another sidecar answers now. Do several sidecars stand behind one "
    "address, or does one serve another data directory than before?"
)

_used = False
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = _forked or _used


os.register_at_fork(after_in_child=_after_fork)


def check_not_forked() -> None:
    """Raise INVALID_REQUEST in a forked child of a process that has used the client. In such a child, gRPC calls never
    return."""
    if _forked:
        raise error(
            "INVALID_REQUEST",
            "this process was forked after the client was used: the client's connections and threads do not exist here",
            hint="Start processes with multiprocessing's 'spawn' or 'forkserver', or fork before the client is used.",
        )


def new_channel(
    address: SidecarAddress, credentials: Credentials = NO_CREDENTIALS, *, is_one: bool = True, is_brief: bool = False
) -> grpc.aio.Channel:
    """Return a channel with a separate connection. Set `is_one` if the client has the address of only one sidecar. With
    `is_brief` the connection closes after some seconds without a call, and the next call opens the connection again.

    Raises INSECURE_ADDRESS if a token would be sent over a network unencrypted, and CREDENTIALS_UNAVAILABLE. If the
    token is sent unencrypted to a port of this machine, calls raise the errors of `check_listener`.
    """
    global _used
    check_not_forked()
    _used = True
    options = _OPTIONS + (_PATIENT if is_one else _IMPATIENT) + (_BRIEF if is_brief else ())
    tls = None if address.path else credentials.channel_credentials()
    if tls is not None:
        channel = grpc.aio.secure_channel(str(address), tls, options=options)
    elif credentials.has_token and not (address.is_local or credentials.allow_insecure_token):
        raise error(
            "INSECURE_ADDRESS", f"there is a token, but no TLS connection to the sidecar at {address}: nothing was sent"
        )
    else:
        channel = grpc.aio.insecure_channel(str(address), options=options)

    def check() -> None:
        if tls is None and address.is_local and not address.path:
            check_listener(address, credentials.trusted_users())

    return Channel(channel, credentials, check)


def channel_to(sidecars: Sidecars, address: SidecarAddress, *, is_brief: bool = False) -> grpc.aio.Channel:
    """Return a channel to one of the sidecars, as `new_channel` does."""
    return new_channel(address, sidecars.credentials, is_one=sidecars.is_one, is_brief=is_brief)


async def call(
    address: SidecarAddress,
    channel: grpc.aio.Channel,
    method: Callable[..., Awaitable[M]],
    request: object,
    timeout_seconds: float = CALL_TIMEOUT_SECONDS,
    *,
    waits: bool = True,
) -> M:
    """Make a unary call over this channel. If `waits` is true, the function repeats the call after RECOVERING, after
    the delay in the answer. After TOKEN_EXPIRED, it repeats the call once with the current token.

    Raises the reason of a refusal, and RECOVERING if the topic's recovery takes longer than CALL_TIMEOUT_SECONDS.
    """
    check_not_forked()
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + CALL_TIMEOUT_SECONDS
    has_expired = False
    while True:
        try:
            with typed_errors(address):
                return await answer_of(channel, method, request, timeout_seconds)
        except UnavailableError as e:
            delay_seconds = max(e.retry_delay_ms / 1000, _SHORTEST_DELAY_SECONDS)
            helps = (e.reason == "RECOVERING" and waits) or (e.reason == "TOKEN_EXPIRED" and not has_expired)
            if not helps or loop.time() + delay_seconds > give_up_at:
                raise
            has_expired = e.reason == "TOKEN_EXPIRED"
        await asyncio.sleep(delay_seconds)


async def answer_of(
    channel: grpc.aio.Channel, method: Callable[..., Awaitable[M]], request: object, timeout_seconds: float
) -> M:
    """Return the answer to a unary call over this channel. Raises DecodeError for an answer that no sidecar sends, and
    AioRpcError.

    A server that is not a sidecar may answer OK to any call, with an empty message. If an empty answer has a meaning, a
    sidecar marks the answer in the trailing metadata. Earlier versions of the sidecar do not set this mark. If the mark
    is missing, `GetVersion` determines whether the server is a sidecar.
    """
    made: grpc.aio.UnaryUnaryCall[object, M] = method(request, timeout=timeout_seconds)  # type: ignore[assignment]
    answer: M | None = await made
    if answer is None:
        raise DecodeError("it cannot be decoded")
    if answer.ByteSize() or any(key == EMPTY for key, _ in await made.trailing_metadata() or ()):
        return answer
    if answer.DESCRIPTOR.name not in MAY_BE_EMPTY:
        raise DecodeError(f"a {answer.DESCRIPTOR.name} is never empty")
    # Imported here: producers and readers do not need it.
    from seqdedupe.v1.admin_pb2 import GetVersionRequest
    from seqdedupe.v1.admin_pb2_grpc import AdminServiceStub

    version = await AdminServiceStub(channel).GetVersion(GetVersionRequest(), timeout=timeout_seconds)
    if version is None or not version.ByteSize():
        raise DecodeError(f"an empty {answer.DESCRIPTOR.name}, and no version")
    return answer


@contextmanager
def typed_errors(address: SidecarAddress) -> Iterator[None]:
    """Convert gRPC's errors into this project's errors. Also convert DecodeError: the answer did not come from a
    sidecar. (For a message that cannot be decoded, gRPC returns None.)

    If the other side cancels a call, or `call.cancel()` does, gRPC raises CancelledError in the caller. This function
    converts that CancelledError into an ordinary error, unless the caller's task itself is being cancelled.
    """
    try:
        yield
    except asyncio.CancelledError as e:
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            raise error("OUTCOME_UNKNOWN", f"the call to {address} was cancelled") from e
        raise
    except grpc.aio.AioRpcError as e:
        raise _error_of_call(e, address) from e
    except DecodeError as e:
        what = f"{address} answered OK with what no sidecar sends; the likely cause is a proxy on the way: {e}"
        raise error(NOT_A_SIDECAR, what) from e


def may_break_for_a_frame(failure: SeqdedupeError) -> bool:
    """Return whether a component between client and sidecar may have ended a stream because of a frame. Return false if
    a component answers OK in the sidecar's place."""
    return failure.reason in _BREAKS_STREAM and not isinstance(failure.__cause__, DecodeError)


def error_of_reason(reason: str, message: str, retry_delay_ms: int, numbers: dict[str, str]) -> SeqdedupeError:
    """Return the error for a sidecar's reason. A newer sidecar may send a reason that this version does not define. The
    error then contains that reason unchanged."""
    known = REASONS.get(reason)
    kind = known.kind if known else UnavailableError if retry_delay_ms >= 0 else SeqdedupeError
    hint = numbers.pop("hint", known.hint if known else "See the sidecar's list of errors.")
    return kind(reason, message.removesuffix(f" [{reason}]"), hint, retry_delay_ms, numbers)


def of_known_topic(failure: SeqdedupeError) -> SeqdedupeError:
    """Change the hint of TOPIC_NOT_FOUND for a caller that has used the topic before: the topic's name is not
    mistyped."""
    if failure.reason == "TOPIC_NOT_FOUND":
        failure.hint = HINT_OF_GONE
    return failure


def refusal_error(refusal: Any) -> SeqdedupeError:
    """Return the error for a refusal on a publish stream. If a producer caused the refusal, the error contains the
    numbers of that producer."""
    numbers: dict[str, str] = {}
    for producer in refusal.producers:
        numbers = {
            "epoch": str(producer.epoch),
            "current_epoch": str(producer.current_epoch),
            "sequence_id": str(producer.sequence_id),
            "previous_sequence_id": str(producer.previous_sequence_id),
            "pushed": str(producer.pushed),
            "persisted": str(producer.persisted),
        }
        if producer.HasField("expected_sequence_id"):
            numbers["expected_sequence_id"] = str(producer.expected_sequence_id)
    if refusal.owner_address:
        numbers[OWNER_ADDRESS] = refusal.owner_address
    return error_of_reason(refusal.reason, refusal.message, refusal.retry_delay_ms, numbers)


def _error_of_call(failure: grpc.aio.AioRpcError, address: SidecarAddress) -> SeqdedupeError:
    info, retry_delay_ms = _details(failure)
    details = failure.details() or failure.code().name
    if info is not None:
        return error_of_reason(info.reason, details, retry_delay_ms, dict(info.metadata))
    if failure.code() is grpc.StatusCode.UNAVAILABLE or is_of_another_host(details):
        return unreachable(address, details)
    # If these details come from a plain HTTP status, gRPC provides no metadata.
    if has_no_grpc_status(details) and (failure.initial_metadata() or failure.trailing_metadata()):
        what = f"{address} answered without a gRPC status, as a web server does"
        return error(NOT_A_SIDECAR, f"{what}; the likely cause is a proxy on the way: {details}")
    if failure.code() in _LOST:
        what = f"the call to {address} broke: {failure.code().name}: {details}"
        if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            what = f"the sidecar at {address} has not answered in time"
        elif failure.code() is grpc.StatusCode.CANCELLED:
            what = f"the sidecar at {address} ended the call without an answer (CANCELLED): it is overloaded, or ends"
        return error("OUTCOME_UNKNOWN", what, hint=hint_of_http(details) or _HINT_OF_LOST)
    if failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and _OWN_LIMIT in details:
        hint = "Send less in one message. A batch has at most 8 MiB."
        return error("MESSAGE_TOO_LARGE", f"a message to or from {address} was not taken: {details}", hint=hint)
    what = f"{address} answered {failure.code().name} without the error details that a sidecar sends"
    return error(NOT_A_SIDECAR, f"{what}; the likely cause is a proxy on the way: {details}")


def _details(failure: grpc.aio.AioRpcError) -> tuple[error_details_pb2.ErrorInfo | None, int]:
    """Return the ErrorInfo, if there is one, and the retry delay in milliseconds (NEVER if the call must not be
    retried)."""
    info: error_details_pb2.ErrorInfo | None = None
    retry_delay_ms = NEVER
    try:
        for detail in _rich_details(failure):
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                found = error_details_pb2.ErrorInfo()
                detail.Unpack(found)
                info = found if found.domain == _DOMAIN else info
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                retry = error_details_pb2.RetryInfo()
                detail.Unpack(retry)
                retry_delay_ms = retry.retry_delay.ToMilliseconds()
    except (DecodeError, ValueError):
        return None, NEVER
    return info, retry_delay_ms


def _rich_details(failure: grpc.aio.AioRpcError) -> Sequence[Any]:
    """Return the details of the rich status. Return an empty list if there is no rich status. Also return an empty list
    if the rich status contradicts the plain status: a proxy that answers for the sidecar may send anything. Raises
    DecodeError.

    `grpc_status.rpc_status` does the same, but imports many modules that a client does not need.
    """
    for name, value in failure.trailing_metadata() or ():
        if name == _RICH_STATUS:
            status = status_pb2.Status.FromString(value)
            says_the_same = (status.code, status.message) == (failure.code().value[0], failure.details())
            return status.details if says_the_same else ()
    return ()


class Backoff:
    """Delays that double from `first_seconds` to `longest_seconds`. Each delay is shortened at random by up to a
    half."""

    def __init__(self, first_seconds: float, longest_seconds: float) -> None:
        self._first_seconds = first_seconds
        self._longest_seconds = longest_seconds
        self._next_seconds = first_seconds

    def next_seconds(self) -> float:
        delay = self._next_seconds
        self._next_seconds = min(2 * delay, self._longest_seconds)
        # The standard library's `random` is not used, to avoid an import for this line alone.
        return delay * (0.5 + os.urandom(1)[0] / 510)

    def reset(self) -> None:
        """Return to the first delay. Call this after progress."""
        self._next_seconds = self._first_seconds


# -- A client's calls other than publish and read streams: each goes to the sidecar of its topic.

T = TypeVar("T")

MAX_REMEMBERED = 10_000
"""The most topics whose sidecar is remembered."""

CHANGED_NOTHING = {"NOT_OWNER", "DRAINING"}
"""The reasons of refusals that guarantee that the call has changed nothing."""

_CONNECTION_IS_LOST = {"UNREACHABLE", "TLS_FAILED", "NOT_A_SIDECAR"}

_LOOKS = ("Get", "List", "Locate", "Read", "Export")
"""The prefixes of requests that change nothing."""

_HINT_OF_CHANGES = "Look whether the change is in force, and do it again if it is not."

_FIRST_DELAY_SECONDS = 0.02
_LONGEST_DELAY_SECONDS = 1.0


class SidecarConnection:
    """A connection to a sidecar, with its service stubs."""

    def __init__(self, address: SidecarAddress, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.channel = channel

    @cached_property
    def admin(self) -> "AdminServiceAsyncStub":
        # Imported here: producers and readers do not need it.
        from seqdedupe.v1.admin_pb2_grpc import AdminServiceStub

        return AdminServiceStub(self.channel)

    @cached_property
    def read(self) -> "ReadServiceAsyncStub":
        return ReadServiceStub(self.channel)


class ClientCalls:
    """Makes the unary calls of one client, and keeps one connection to each called sidecar. Use this object on one
    event loop."""

    def __init__(self, sidecars: Sidecars) -> None:
        self._sidecars = sidecars
        self._connections: dict[SidecarAddress, SidecarConnection] = {}
        self._found_at: dict[str, SidecarAddress] = {}
        """The sidecar by topic; "" stands for calls without a topic."""

    async def close(self) -> None:
        """Close the connections."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await connection.channel.close()

    def connection(self, address: SidecarAddress) -> SidecarConnection:
        """Return the connection to this sidecar."""
        check_not_forked()
        if address not in self._connections:
            self._connections[address] = SidecarConnection(address, channel_to(self._sidecars, address))
        return self._connections[address]

    def connection_to(self, text: str) -> SidecarConnection:
        """Return the connection to a sidecar that another sidecar has named. Raises NOT_OWNER if the client is not
        allowed to connect to that address."""
        address = self._sidecars.allowed(text)
        if address is None:
            why = f"the sidecar at {text} has a part of it, and is not among the addresses that the client was given"
            raise error("NOT_OWNER", why, hint="Give the client the addresses of all sidecars.", owner_address=text)
        return self.connection(address)

    def first_connection(self) -> SidecarConnection:
        """Return the connection to the first address."""
        return self.connection(self._sidecars.addresses[0])

    async def call(
        self,
        method: Callable[[SidecarConnection], Callable[..., Awaitable[M]]],
        request: Message,
        timeout_seconds: float = CALL_TIMEOUT_SECONDS,
    ) -> M:
        """Make a unary call to the owner of the request's topic. If the request has no topic, make the call to any
        sidecar that answers. Wait while the topic recovers.

        Raises the errors of `at`, and RECOVERING if the recovery takes longer than CALL_TIMEOUT_SECONDS.
        """
        is_look = type(request).__name__.startswith(_LOOKS)

        def act(connection: SidecarConnection) -> Awaitable[M]:
            # `at` repeats a look, because another sidecar may serve the topic. A change waits where it may have begun.
            how, waits = method(connection), not is_look
            return call(connection.address, connection.channel, how, request, timeout_seconds, waits=waits)

        return await self.at(getattr(request, "topic", ""), act, is_look=is_look)

    async def at(self, topic: str, act: Callable[[SidecarConnection], Awaitable[T]], *, is_look: bool) -> T:
        """Run `act` at the topic's owner. Without a topic, run it at any sidecar that answers. `act` may run several
        times. If `act` makes changes (`is_look` is false), it runs again only if the earlier attempt has certainly
        changed nothing.

        While no sidecar owns the topic, or a look finds that the topic recovers, wait for at most CALL_TIMEOUT_SECONDS.
        Raises the reason of a refusal.
        """
        route = Route(self._sidecars, topic, first=self._found_at.get(topic))
        backoff = Backoff(_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS)
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + CALL_TIMEOUT_SECONDS
        while True:
            connection: SidecarConnection | None = None
            try:
                connection = self.connection(route.address)
                answer = await act(connection)
            except SeqdedupeError as failure:
                if connection is not None and failure.reason in _CONNECTION_IS_LOST:
                    self._forget(connection)
                e = route.doubted(failure)
                if not isinstance(e, UnavailableError):
                    raise
                if not (is_look or e.reason in CHANGED_NOTHING or was_never_sent(e)):
                    if e.reason in _CONNECTION_IS_LOST:
                        raise _unknown_outcome(e) from e
                    raise
                if route.moves_on(e):
                    continue
                delay_seconds = max(backoff.next_seconds(), e.retry_delay_ms / 1000)
                if not route.passes or loop.time() + delay_seconds > give_up_at:
                    raise route.told() from e
                await asyncio.sleep(delay_seconds)
            else:
                if not route.is_one:
                    self._remember(topic, route.address)
                return answer

    def _forget(self, connection: SidecarConnection) -> None:
        """Drop this connection. The next call makes a new connection, which connects at once and reads the TLS files
        again; the old connection would report the refusal for up to a second. Calls in progress over the old connection
        are not affected."""
        if self._connections.get(connection.address) is connection:
            del self._connections[connection.address]

    def _remember(self, topic: str, address: SidecarAddress) -> None:
        if len(self._found_at) >= MAX_REMEMBERED:
            self._found_at.clear()
        self._found_at[topic] = address


def _unknown_outcome(failure: UnavailableError) -> SeqdedupeError:
    """Return the error for a call that makes changes and may have been sent. A sidecar may have made the changes, and
    only the answer may be lost."""
    what = f"the call may have reached the sidecar, and the change may be in force: {failure.message}"
    return error("OUTCOME_UNKNOWN", what, hint=f"{_HINT_OF_CHANGES} {failure.hint}")
