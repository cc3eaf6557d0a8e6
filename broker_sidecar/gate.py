"""The single place that every call passes before its handler: authentication, permissions and the audit trail.

`Gate` contains the steps of a call. `Closed` refuses calls that do not exist. Both use `Guard`, which is created from
the configuration and the files that the configuration names. `Visitors` checks the calls of the web pages.
"""

import asyncio
import base64
import binascii
from collections import deque
from collections.abc import Awaitable, Callable
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2

from broker_sidecar.config import Config
from broker_sidecar.connections import origin_of, taken_from
from broker_sidecar.rpc import (
    OTHERS,
    Context,
    Handle,
    MethodCounts,
    Wrapping,
    abort,
    method_of_call,
    parse_small,
)
from broker_sidecar.security.audit import Audit, Trail
from broker_sidecar.security.authentication import Authentication
from broker_sidecar.security.permissions import CHANGES, HEALTH_OF_THE_WHOLE, NO_RULES, Permissions, request_class
from broker_sidecar.security.rules import RulesFile, read_rules
from broker_sidecar.security.subject import Subject, caller, peer_at, set_caller
from broker_sidecar.security.watched_files import Watched, Watching
from broker_sidecar.streams import Streams
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.http_server import Request
from seqdedupe.v1 import admin_pb2

_HEALTH = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})

UNKNOWN_AT_ONCE = 2
"""The maximum number of requests of unknown callers that are received at the same time. gRPC may use 16 MiB of memory
for each."""
UNKNOWN_WAITING = 16
"""The maximum number of calls of unknown callers that wait to be received. gRPC may use 1 MiB of memory for each."""
UNKNOWN_SECONDS = 1.0
"""Within this time an unknown caller's request must arrive."""
UNKNOWN_HURRY_SECONDS = 0.1
"""The limit while other calls of unknown callers wait. A probe's request arrives together with its headers."""

KNOWN_AT_ONCE = 8
"""The maximum number of requests of one known caller that are received at the same time. gRPC may use 16 MiB of memory
for each, which is not counted."""
KNOWN_WAITING = 1_000
"""The maximum number of calls of one known caller that wait to be received."""
KNOWN_SECONDS = 30.0
"""Within this time a known caller's request must arrive. 16 MiB over 5 Mbit/s take this time."""
KNOWN_HURRY_SECONDS = 10.0
"""The limit while other calls of this caller wait."""


class Gate(Wrapping):
    """A service as `handler` serves it, for known callers with permission for the call. `caller` is set within the
    handlers.

    A call passes these steps, in this order:

    1. The call is counted, in any case.
    2. The caller is identified before anything is received. If unknown callers make too many calls, they wait.
    3. A request that is one message is received. Only a few requests of one caller are received at the same time, and
       each only for a limited time. A stream is read by its handler.
    4. The rules judge the call and its request.
    5. An operator's change is written to the audit trail before the change is made, and before the call is answered.
    6. The handler answers. The handler of a stream is in `Streams.handler`, which finds a place for the stream.

    gRPC itself receives a request that is one message before it calls any handler. So every call here is declared to
    gRPC as a stream, which is the same on the wire. gRPC reads at most `UNREAD_BYTES` of a stream that no handler
    reads.

    The gate reports the health of the whole sidecar to every caller, because a health probe has no token.
    """

    reads_itself = True

    def __init__(
        self,
        handler: grpc.GenericRpcHandler,
        guard: "Guard",
        counts: MethodCounts,
        has_to_answer: Callable[[str], Awaitable[bool]],
    ) -> None:
        """`has_to_answer` returns whether to answer a call from this peer, whose caller is unknown."""
        super().__init__(handler)
        self._guard = guard
        self._counts = counts
        self._has_to_answer = has_to_answer
        self._unknown = _Receiving(
            "calls without a valid token", UNKNOWN_AT_ONCE, UNKNOWN_WAITING, UNKNOWN_SECONDS, UNKNOWN_HURRY_SECONDS
        )
        self._known: WeakValueDictionary[str, _Receiving] = WeakValueDictionary()
        """By caller: the receiver, as long as a request of the caller is received or waits."""

    def wrap(self, method: str, handle: Handle, found: "grpc.RpcMethodHandler[Any, Any]") -> Handle:
        counts, guard = self._counts.of(method), self._guard

        async def guarded(request: Any, context: Context) -> Any:
            with counts.handling(context):  # 1
                try:
                    if (why_unknown := await guard.find_caller(context, self._has_to_answer)) is not None:  # 2
                        request = await self._of_the_whole(method, context, why_unknown)
                    elif not found.request_streaming:
                        request = await self._receiving_of(caller()).receive(context)  # 3
                    guard.permissions.check_call(method, request)  # 4
                    if method in CHANGES:
                        async with guard.trail.change(method, parse_small(request_class(method), request)):  # 5
                            response = await handle(request, context)
                    else:
                        response = await handle(request, context)  # 6
                except SeqdedupeError as e:
                    await abort(context, e)
                counts.sent += not found.response_streaming
                return response

        return guarded

    def _receiving_of(self, subject: Subject) -> "_Receiving":
        """Return the object that receives this caller's requests. Each caller has one such object for all its calls."""
        if (receiving := self._known.get(subject.name)) is None:
            receiving = self._known[subject.name] = _Receiving(
                f"calls of {subject.name!r}", KNOWN_AT_ONCE, KNOWN_WAITING, KNOWN_SECONDS, KNOWN_HURRY_SECONDS
            )
        return receiving

    async def _of_the_whole(self, method: str, context: Context, why_unknown: SeqdedupeError) -> bytes:
        """Return an unknown caller's request for the health of the whole sidecar. For any other call, raise the reason
        why the caller is unknown."""
        if method in _HEALTH:
            request = await self._unknown.receive(context)
            if _is_of_the_whole(request):
                set_caller(Subject("", "nobody", None, context.peer()))
                return request
        self._guard.trail.unauthenticated(method, context.peer(), why_unknown)
        raise why_unknown


class Closed(grpc.GenericRpcHandler):
    """Handles all calls that no service has. Otherwise gRPC itself would answer these calls, for any caller and in any
    number.

    An unknown caller learns no more here than from any other call, and waits if unknown callers make too many calls.
    """

    def __init__(self, guard: "Guard", counts: MethodCounts, has_to_answer: Callable[[str], Awaitable[bool]]) -> None:
        self._guard = guard
        self._counts = counts
        self._has_to_answer = has_to_answer
        self._handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(self._refuse)

    def service(self, _: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        """Return the handler for the call. gRPC calls this method only if no other service has the call."""
        return self._handler

    async def _refuse(self, _: Any, context: Context) -> None:
        with self._counts.of_others().handling(context):
            try:
                if (why_unknown := await self._guard.find_caller(context, self._has_to_answer)) is not None:
                    self._guard.trail.unauthenticated(OTHERS, context.peer(), why_unknown)
                    raise why_unknown
                raise error("UNKNOWN_CALL", "this sidecar has no such call")
            except SeqdedupeError as e:
                await abort(context, e)


class _Receiving:
    """Receives the requests of one caller, or of all unknown callers. Only a few requests are received at the same
    time, each for a limited time.

    Free places are assigned in turn to the origins of the waiting calls. So calls from one origin, in any number, do
    not delay calls from other origins for long.
    """

    def __init__(self, whose: str, at_once: int, most_waiting: int, seconds: float, hurry_seconds: float) -> None:
        self._whose = whose
        self._most_waiting = most_waiting
        self._seconds = seconds
        self._hurry_seconds = hurry_seconds
        self._free = at_once
        """Free places. While a call waits there are none."""
        self._limits: dict[asyncio.Timeout, None] = {}
        """The time limits of the requests that are being received."""
        self._waiting: dict[bytes | str, deque[asyncio.Future[bool]]] = {}
        """By origin; the next origin comes first. The result of each future states whether the call gets a place."""

    async def receive(self, context: Context) -> bytes:
        """Return the request. Raises QUEUE_FULL, STREAM_IDLE, MALFORMED_MESSAGE."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(origin_of(context.peer()))
        limit = asyncio.timeout(self._hurry_seconds if self._waiting else self._seconds)
        self._limits[limit] = None
        try:
            async with limit:
                return await _receive(context)
        except TimeoutError as e:
            raise error("STREAM_IDLE", f"a request of {self._whose} did not arrive in time") from e
        finally:
            del self._limits[limit]
            self._release()

    async def _wait(self, origin: bytes | str) -> None:
        """Return when there is a place for a call from this origin. Raises QUEUE_FULL."""
        self._hurry()
        own = self._waiting.get(origin, ())
        if sum(map(len, self._waiting.values())) >= self._most_waiting:
            crowd = max(self._waiting.values(), key=len)
            if len(crowd) <= len(own) + 1:
                raise self._full()
            crowd.pop().set_result(False)
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(origin, deque()).append(turn)
        try:
            # The future itself is never cancelled, so every future in a queue can still get a result.
            if not await asyncio.shield(turn):
                raise self._full()
        except asyncio.CancelledError:
            if not turn.done():
                queue = self._waiting[origin]
                queue.remove(turn)
                if not queue:
                    del self._waiting[origin]
            elif turn.result():
                self._release()
            raise

    def _release(self) -> None:
        """Give the place to the next waiting call."""
        if not self._waiting:
            self._free += 1
            return
        origin = next(iter(self._waiting))
        queue = self._waiting.pop(origin)
        queue.popleft().set_result(True)
        if queue:
            self._waiting[origin] = queue

    def _full(self) -> SeqdedupeError:
        return error("QUEUE_FULL", f"{self._most_waiting} {self._whose} wait to be received: that is the limit")

    def _hurry(self) -> None:
        """Shorten the limits of slow requests, because a call waits."""
        until = asyncio.get_running_loop().time() + self._hurry_seconds
        for limit in self._limits:
            if not limit.expired() and (ends := limit.when()) is not None and until < ends:
                limit.reschedule(until)


async def _receive(context: Context) -> bytes:
    """Return the request of a call with one message. Raises MALFORMED_MESSAGE if the call has no message."""
    data: Any = await context.read()
    if data is grpc.aio.EOF:
        raise error("MALFORMED_MESSAGE", "the call has no request")
    method_of_call().received += 1
    taken = taken_from(context.peer())
    taken.messages += 1
    taken.size += len(data)
    return bytes(data)


def _is_of_the_whole(request: bytes) -> bool:
    try:
        return health_pb2.HealthCheckRequest.FromString(request).service in HEALTH_OF_THE_WHOLE
    except DecodeError:
        return False


# -- Access to a sidecar: all that its configuration says about it, in one place.


class Guard:
    """The access control. It identifies callers once `begin` was called, checks permissions, and writes the audit
    trail.

    `on_read_again` is called after a file that an operator may replace was read again: see `watching`.
    """

    def __init__(self, config: Config, on_read_again: Callable[[], None]) -> None:
        """Raises INVALID_CONFIGURATION, AUDIT_UNAVAILABLE, AUDIT_DAMAGED."""
        self._config = config
        self._on_read_again = on_read_again
        self.trail = Trail(Audit(Path(config.audit_file)) if config.audit_file else None)
        self._rules = self._watched_rules()
        self.permissions = Permissions(self._rules.value if self._rules else NO_RULES, self.trail.denied)

    def begin(self, streams: Streams, called: Callable[[Subject], None]) -> None:
        """Identify callers from now on, and report them to `called`. Create the data directory's token if it does not
        exist.

        Raises INVALID_CONFIGURATION; OSError.
        """
        self.authentication = Authentication(self._config, streams.end_where)
        self._called = called
        rules = [self._rules] if self._rules else []
        self.watching = Watching([*self.authentication.watched, *rules], self._was_read_again)

    async def find_caller(
        self, context: Context, has_to_answer: Callable[[str], Awaitable[bool]]
    ) -> SeqdedupeError | None:
        """Find the caller, and set `caller` to it. If the caller is unknown, return the reason: UNAUTHENTICATED,
        TOKEN_EXPIRED.

        Raises CancelledError for a call of an unknown caller that must not be answered.
        """
        try:
            subject = self.authentication(context)
        except SeqdedupeError as e:
            if not await has_to_answer(context.peer()):
                raise asyncio.CancelledError from e
            return e
        self._called(subject)
        set_caller(subject)
        return None

    def reload(self) -> None:
        """Read all these files again, and continue in the file with the audit trail's name."""
        self.trail.rotated()
        self.watching.reload()

    def _watched_rules(self) -> Watched[RulesFile] | None:
        if not self._config.rules_file:
            return None
        path = Path(self._config.rules_file)
        return Watched("the rules file", [path], lambda: read_rules(path), self._replace_rules)

    def _replace_rules(self) -> None:
        if self._rules is not None:
            self.permissions.replace(self._rules.value)

    def _was_read_again(self, one: Watched[Any]) -> None:
        self.trail.read_again(one.what, one.problem)
        self._on_read_again()


# -- Visitors of the web pages, whose calls pass the same checks. A browser shows a token as the password of HTTP basic
# authentication.

ASK = {"WWW-Authenticate": 'Basic realm="seqdedupe: the password is the token", charset="UTF-8"'}
"""The header that makes a browser ask the visitor for the token."""

_SCHEME = "basic"
_ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name

M = TypeVar("M", bound=Message)
R = TypeVar("R")


class Visitors:
    """Calls of AdminService by visitors of the web pages. As in gRPC, the token identifies the visitor, and the rules
    apply to the visitor."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def call(self, visitor: Request, name: str, handle: Callable[[M], Awaitable[R]], request: M) -> R:
        """Make the AdminService call of this name for the visitor. Must run on the event loop. Raises UNAUTHENTICATED,
        TOKEN_EXPIRED, NOT_ALLOWED, and the errors of the call."""
        method = f"/{_ADMIN_SERVICE}/{name}"
        set_caller(self._subject(visitor, method))
        self._guard.permissions.check_call(method, request.SerializeToString())
        return await handle(request)

    def _subject(self, visitor: Request, method: str) -> Subject:
        host, port = visitor.client
        address = peer_at(host, port)
        try:
            return self._known(visitor, host, address)
        except SeqdedupeError as e:
            self._guard.trail.unauthenticated(method, address, e)
            raise

    def _known(self, visitor: Request, host: str, address: str) -> Subject:
        token = _token_in(visitor)
        if token is not None and not _is_loopback(host):
            # The token was already sent without encryption. The refusal keeps the visitor from sending it again.
            why = f"a token was sent from {host} without TLS: others on the network may have read it"
            raise error("UNAUTHENTICATED", why, hint="Replace the token, and forward a port to open the page.")
        return self._guard.authentication.of_token(token, address)


def _token_in(visitor: Request) -> bytes | None:
    """Return the password in the request; None if the request has no password."""
    scheme, _, shown = visitor.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != _SCHEME:
        return None
    try:
        return base64.b64decode(shown, validate=True).partition(b":")[2].strip()
    except (binascii.Error, ValueError):
        return None


def _is_loopback(host: str) -> bool:
    address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def asks(visitor: Request) -> bool:
    """Return whether the page may ask the browser for a token. This is allowed only on loopback, where nobody can read
    the traffic."""
    return _is_loopback(visitor.client[0])
