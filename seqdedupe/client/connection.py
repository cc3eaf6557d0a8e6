"""How the client reaches sidecars: channels, what gRPC's errors mean (nothing else looks at them), and unary calls.

Begin with `new_channel`, `typed_errors` and `ClientCalls`, a client's calls: each goes to the sidecar of its topic.
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
from seqdedupe.v1 import admin_pb2, dedupe_pb2, read_pb2
from seqdedupe.v1.admin_pb2_grpc import AdminServiceStub
from seqdedupe.v1.read_pb2_grpc import ReadServiceStub
from seqdedupe.wire import EMPTY

if TYPE_CHECKING:
    from seqdedupe.v1.admin_pb2_grpc import AdminServiceAsyncStub
    from seqdedupe.v1.read_pb2_grpc import ReadServiceAsyncStub


# -- A channel whose calls say who makes them, and whose callers learn how a call ended.

AUTHORIZATION = "authorization"
"""The name of the metadata in which a token goes, as `Bearer TOKEN`."""


class Channel(grpc.aio.Channel):
    """A channel over which each call and stream carries the token as it is when that begins, if there is one.

    gRPC's own call credentials take no connection without TLS, and its interceptors have every message of a stream pass
    them. Making a call raises CREDENTIALS_UNAVAILABLE, and what `check` raises, which is called just before.
    """

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
    """The same calls, whose status is always the one that the other side sent."""

    def call(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        if hasattr(made, _INSIDE):
            setattr(made, _INSIDE, _StatusKept(getattr(made, _INSIDE)))
        return made

    return call


_INSIDE = "_cython_call"
"""Where grpcio has the inside of a call."""


class _StatusKept:
    """The inside of a call to which the caller sends messages.

    A write fails when the other side has ended the call. grpcio then replaces the status, whether it has come or is
    still to come, with "Internal error from Core", so that the caller never learns why. Without that it waits for the
    status.
    """

    def __init__(self, inside: Any) -> None:
        self._inside = inside

    def __getattr__(self, name: str) -> Any:
        # It has methods only, which every message asks for: each is found here the next time.
        found = self.__dict__[name] = getattr(self._inside, name)
        return found

    def set_internal_error(self, _text: str) -> None:
        pass


# -- Channels, calls over them, and what they end with.

M = TypeVar("M", bound=Message)

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""The longest answer taken: all receipts of a commit round come in one."""

CALL_TIMEOUT_SECONDS = 30.0
"""A unary call that is not answered by then has an unknown outcome. It is longer than any wait of the sidecar's own."""

KEEPALIVE_SECONDS = 30
"""So often a silent connection is asked whether it is still there; it has as long to answer."""

IMPATIENT_SECONDS = 5
"""The same where there are other sidecars to go to, and how long one may take to accept a connection there."""

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Two channels never share a connection: one that stalls does not stall another, and a new one starts afresh.
    ("grpc.use_local_subchannel_pool", 1),
    # The sidecar stands beside its client; a proxy of the environment does not lead to it.
    ("grpc.enable_http_proxy", 0),
)

_PATIENT = (
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_SECONDS * 1000),
)
_IMPATIENT = (
    ("grpc.keepalive_time_ms", IMPATIENT_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", IMPATIENT_SECONDS * 1000),
    # A ping that is under way already counts by this one alone, which is a minute otherwise.
    ("grpc.http2.ping_timeout_ms", IMPATIENT_SECONDS * 1000),
    ("grpc.min_reconnect_backoff_ms", IMPATIENT_SECONDS * 1000),
)

_BRIEF = (("grpc.client_idle_timeout_ms", 10_000),)

_DOMAIN = "seqdedupe"
"""Of the ErrorInfos that count."""

_RICH_STATUS = "grpc-status-details-bin"
"""The trailing metadata with the status as a message of google.rpc, by the convention of gRPC."""

NOT_A_SIDECAR = "NOT_A_SIDECAR"
"""The reason of an answer that is not the sidecar's own. It is final for what starts: the address may be wrong. Once
the sidecar has answered, the connection counts as broken."""

_BREAKS_STREAM = {NOT_A_SIDECAR, "OUTCOME_UNKNOWN"}
"""The reasons with which a stream ends when something on the way ends it."""

_OWN_LIMIT = "CLIENT: "
"""With this gRPC begins what it says of a message that is larger than this side takes or sends."""

_SHORTEST_DELAY_SECONDS = 0.01

MAY_BE_EMPTY = {
    admin_pb2.DeleteCursorResponse,
    admin_pb2.DeleteTopicResponse,
    admin_pb2.ForgetSidecarResponse,
    admin_pb2.ListCursorsResponse,
    admin_pb2.ListInFlightResponse,
    admin_pb2.ListProducersResponse,
    admin_pb2.ListSidecarsResponse,
    admin_pb2.ListTopicsResponse,
    admin_pb2.SetCursorHoldResponse,
    admin_pb2.SettleMoveResponse,
    admin_pb2.TakeTopicResponse,
    dedupe_pb2.DedupeServiceGetProducerResponse,
    read_pb2.GetCursorResponse,
    read_pb2.MoveCursorResponse,
}
"""The answers to unary calls that have a meaning when they are empty. All others have something in them always."""

_LOST = {
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
}
"""What gRPC says, beside UNAVAILABLE, when a connection breaks within a call."""

_HINT_OF_LOST = (
    "The sidecar's log says what it waits for. What the call was to change may be in force or not: look, then do it "
    "again. Messages are sent again with the same IDs."
)


HINT_OF_GONE = (
    "The topic was there before: it was deleted, or another sidecar answers now. Do several sidecars stand behind one "
    "address, or does one serve another data directory than before?"
)

_used = False
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = _forked or _used


os.register_at_fork(after_in_child=_after_fork)


def check_not_forked() -> None:
    """Raises INVALID_REQUEST in a child of a process that has used the client: there gRPC waits for ever."""
    if _forked:
        raise error(
            "INVALID_REQUEST",
            "this process was forked from one that has used the client, whose connections and threads are not here",
            hint="Start processes with multiprocessing's 'spawn' or 'forkserver', or fork before the client is used.",
        )


def new_channel(
    address: SidecarAddress, credentials: Credentials = NO_CREDENTIALS, *, is_one: bool = True, is_brief: bool = False
) -> grpc.aio.Channel:
    """A channel with a connection of its own. `is_one`: there is no other sidecar that could be asked. `is_brief`: the
    connection ends when nothing was called over it for some seconds, and is made again by the next call.

    Raises INSECURE_ADDRESS where a token would go over a network as it is, CREDENTIALS_UNAVAILABLE. Where it goes as it
    is to a port of this machine, calls raise as `check_listener`.
    """
    global _used
    check_not_forked()
    _used = True
    options = _OPTIONS + (_PATIENT if is_one else _IMPATIENT) + (_BRIEF if is_brief else ())
    tls = None if address.path else credentials.channel_credentials()
    if tls is not None:
        channel = grpc.aio.secure_channel(str(address), tls, options=options)
    elif credentials.has_token and not (address.is_local or credentials.allow_insecure_token):
        raise error("INSECURE_ADDRESS", f"there is a token, and no TLS to the sidecar at {address}: nothing was sent")
    else:
        channel = grpc.aio.insecure_channel(str(address), options=options)

    def check() -> None:
        if tls is None and address.is_local and not address.path:
            check_listener(address, credentials.trusted_users())

    return Channel(channel, credentials, check)


def channel_to(sidecars: Sidecars, address: SidecarAddress, *, is_brief: bool = False) -> grpc.aio.Channel:
    """A channel to one of them, see `new_channel`."""
    return new_channel(address, sidecars.credentials, is_one=sidecars.is_one, is_brief=is_brief)


async def call(
    address: SidecarAddress,
    channel: grpc.aio.Channel,
    method: Callable[..., Awaitable[M]],
    request: object,
    timeout_seconds: float = CALL_TIMEOUT_SECONDS,
) -> M:
    """Makes a unary call over this channel. While the answer is RECOVERING, it is made again after the delay that the
    answer asks for; once, if it is TOKEN_EXPIRED, with the token as it is then.

    Raises what the call is refused for, RECOVERING too if that lasts for CALL_TIMEOUT_SECONDS.
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
            helps = e.reason == "RECOVERING" or (e.reason == "TOKEN_EXPIRED" and not has_expired)
            if not helps or loop.time() + delay_seconds > give_up_at:
                raise
            has_expired = e.reason == "TOKEN_EXPIRED"
        await asyncio.sleep(delay_seconds)


async def answer_of(
    channel: grpc.aio.Channel, method: Callable[..., Awaitable[M]], request: object, timeout_seconds: float
) -> M:
    """The answer to a unary call over this channel. Raises DecodeError for one that no sidecar gives, AioRpcError.

    What is no sidecar may say OK to anything, with an empty message. Where that has a meaning, a sidecar says so in its
    trailing metadata. An earlier version does not: then `GetVersion` tells whether there is a sidecar.
    """
    made: grpc.aio.UnaryUnaryCall[object, M] = method(request, timeout=timeout_seconds)  # type: ignore[assignment]
    answer: M | None = await made
    if answer is None:
        raise DecodeError("it cannot be decoded")
    if answer.ByteSize() or any(key == EMPTY for key, _ in await made.trailing_metadata() or ()):
        return answer
    if type(answer) not in MAY_BE_EMPTY:
        raise DecodeError(f"a {answer.DESCRIPTOR.name} is never empty")
    version = await AdminServiceStub(channel).GetVersion(admin_pb2.GetVersionRequest(), timeout=timeout_seconds)
    if version is None or not version.ByteSize():
        raise DecodeError(f"an empty {answer.DESCRIPTOR.name}, and no version")
    return answer


@contextmanager
def typed_errors(address: SidecarAddress) -> Iterator[None]:
    """Turns gRPC's errors into this project's; and DecodeError, which says that an answer is none of a sidecar's. gRPC
    gives None instead of a message that cannot be decoded.

    A call that the other side cancels, or that is cancelled by `call.cancel()`, looks to gRPC's callers as if they
    themselves were; it is an error like others, unless they are.
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
    """Whether something on the way has ended a stream, perhaps because of what was sent. One that answers for the
    sidecar, with OK, has not."""
    return failure.reason in _BREAKS_STREAM and not isinstance(failure.__cause__, DecodeError)


def error_of_reason(reason: str, message: str, retry_delay_ms: int, numbers: dict[str, str]) -> SeqdedupeError:
    """The error that a sidecar named by its reason. A newer sidecar's unknown reason is kept as it is."""
    known = REASONS.get(reason)
    kind = known.kind if known else UnavailableError if retry_delay_ms >= 0 else SeqdedupeError
    hint = numbers.pop("hint", known.hint if known else "See the sidecar's list of errors.")
    return kind(reason, message.removesuffix(f" [{reason}]"), hint, retry_delay_ms, numbers)


def of_known_topic(failure: SeqdedupeError) -> SeqdedupeError:
    """The failure of who knows that the topic was there: its name is not mistyped."""
    if failure.reason == "TOPIC_NOT_FOUND":
        failure.hint = HINT_OF_GONE
    return failure


def refusal_error(refusal: Any) -> SeqdedupeError:
    """The error that a refusal on a publish stream stands for, with the numbers of a producer that caused it."""
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
    # Where a status of HTTP's own hides behind these words gRPC gives no metadata.
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
    """The ErrorInfo, if there is one, and the retry delay in milliseconds or NEVER."""
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
    """The details of the rich status; none if there is no such status, or if the plain one says something else: whoever
    answers for the sidecar may send anything. Raises DecodeError.

    As `grpc_status.rpc_status`, whose import costs each client what it needs nothing of.
    """
    for name, value in failure.trailing_metadata() or ():
        if name == _RICH_STATUS:
            status = status_pb2.Status.FromString(value)
            says_the_same = (status.code, status.message) == (failure.code().value[0], failure.details())
            return status.details if says_the_same else ()
    return ()


class Backoff:
    """Delays that double from `first_seconds` to `longest_seconds`, each cut at random by up to a half."""

    def __init__(self, first_seconds: float, longest_seconds: float) -> None:
        self._first_seconds = first_seconds
        self._longest_seconds = longest_seconds
        self._next_seconds = first_seconds

    def next_seconds(self) -> float:
        delay = self._next_seconds
        self._next_seconds = min(2 * delay, self._longest_seconds)
        # Not `random`, which would be imported for this alone.
        return delay * (0.5 + os.urandom(1)[0] / 510)

    def reset(self) -> None:
        """There was progress: the next delay is the first again."""
        self._next_seconds = self._first_seconds


# -- A client's calls other than publish and read streams: each goes to the sidecar of its topic.

T = TypeVar("T")

MAX_REMEMBERED = 10_000
"""Topics of which is remembered where they were found."""

CHANGED_NOTHING = {"NOT_OWNER", "DRAINING"}
"""A call that is refused so has changed nothing."""

_CONNECTION_IS_LOST = {"UNREACHABLE", "TLS_FAILED", "NOT_A_SIDECAR"}

_LOOKS = ("Get", "List", "Locate", "Read", "Export")
"""How requests are called that change nothing."""

_HINT_OF_CHANGES = "Look whether the change is in force, and do it again if it is not."

_FIRST_DELAY_SECONDS = 0.02
_LONGEST_DELAY_SECONDS = 1.0


class SidecarConnection:
    """A connection to a sidecar, and what is called over it."""

    def __init__(self, address: SidecarAddress, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.channel = channel

    @cached_property
    def admin(self) -> "AdminServiceAsyncStub":
        return AdminServiceStub(self.channel)

    @cached_property
    def read(self) -> "ReadServiceAsyncStub":
        return ReadServiceStub(self.channel)


class ClientCalls:
    """Makes the calls of one client, over a connection to each sidecar that it comes to. For one event loop."""

    def __init__(self, sidecars: Sidecars) -> None:
        self._sidecars = sidecars
        self._connections: dict[SidecarAddress, SidecarConnection] = {}
        self._found_at: dict[str, SidecarAddress] = {}
        """By topic; "" is the whole."""

    async def close(self) -> None:
        """Lets go of the connections."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await connection.channel.close()

    def connection(self, address: SidecarAddress) -> SidecarConnection:
        """The one connection to this sidecar."""
        check_not_forked()
        if address not in self._connections:
            self._connections[address] = SidecarConnection(address, channel_to(self._sidecars, address))
        return self._connections[address]

    def connection_to(self, text: str) -> SidecarConnection:
        """The one to a sidecar that another one has named. Raises NOT_OWNER if the client may not go there."""
        address = self._sidecars.allowed(text)
        if address is None:
            why = f"the sidecar at {text} has a part of it, and is not among the addresses that the client was given"
            raise error("NOT_OWNER", why, hint="Give the client the addresses of all sidecars.", owner_address=text)
        return self.connection(address)

    def first_connection(self) -> SidecarConnection:
        """That to the first address."""
        return self.connection(self._sidecars.addresses[0])

    async def call(
        self,
        method: Callable[[SidecarConnection], Callable[..., Awaitable[M]]],
        request: Message,
        timeout_seconds: float = CALL_TIMEOUT_SECONDS,
    ) -> M:
        """Makes a unary call, of the request's topic or of the whole. A topic that recovers is waited for.

        Raises as `at`, RECOVERING too if that lasts for CALL_TIMEOUT_SECONDS.
        """

        def act(connection: SidecarConnection) -> Awaitable[M]:
            return call(connection.address, connection.channel, method(connection), request, timeout_seconds)

        is_look = type(request).__name__.startswith(_LOOKS)
        return await self.at(getattr(request, "topic", ""), act, is_look=is_look)

    async def at(self, topic: str, act: Callable[[SidecarConnection], Awaitable[T]], *, is_look: bool) -> T:
        """Does it at the topic's owner, or, without a topic, at one sidecar that answers. It may be begun several
        times: what changes something only where it is certain that it has changed nothing yet.

        While the sidecars say that the topic is none of theirs it waits, for CALL_TIMEOUT_SECONDS at most. Raises what
        it is refused for.
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
        """The next call makes a new one, which tries at once, where gRPC would answer for up to a second that the old
        one was refused, and which takes the TLS files as they are then. Others that are under way over the old one end
        as they may."""
        if self._connections.get(connection.address) is connection:
            del self._connections[connection.address]

    def _remember(self, topic: str, address: SidecarAddress) -> None:
        if len(self._found_at) >= MAX_REMEMBERED:
            self._found_at.clear()
        self._found_at[topic] = address


def _unknown_outcome(failure: UnavailableError) -> SeqdedupeError:
    """The error of a call that changes something and may have been sent: a sidecar may have carried it out, and its
    answer got lost."""
    what = f"the call may have reached the sidecar, and what it was to change may be in force: {failure.message}"
    return error("OUTCOME_UNKNOWN", what, hint=f"{_HINT_OF_CHANGES} {failure.hint}")
