"""A client's calls other than publish and read streams: each goes to the sidecar of its topic."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import grpc.aio
from google.protobuf.message import Message

from seqdedupe.address import SidecarAddress
from seqdedupe.client.connection import CALL_TIMEOUT_SECONDS, Backoff, call, check_not_forked
from seqdedupe.client.listeners import was_never_sent
from seqdedupe.client.route import Route, Sidecars
from seqdedupe.errors import SeqdedupeError, UnavailableError, error
from seqdedupe.v1.admin_pb2_grpc import AdminServiceStub
from seqdedupe.v1.read_pb2_grpc import ReadServiceStub

if TYPE_CHECKING:
    from seqdedupe.v1.admin_pb2_grpc import AdminServiceAsyncStub
    from seqdedupe.v1.read_pb2_grpc import ReadServiceAsyncStub

M = TypeVar("M", bound=Message)
T = TypeVar("T")

MAX_REMEMBERED = 10_000
"""Topics of which is remembered where they were found."""

CHANGED_NOTHING = {"NOT_OWNER", "DRAINING"}
"""A call that is refused so has changed nothing."""

_CONNECTION_IS_LOST = {"UNREACHABLE", "TLS_FAILED", "NOT_A_SIDECAR"}

_LOOKS = ("Get", "List", "Locate", "Read", "Export")
"""How requests are called that change nothing."""

_FIRST_DELAY_SECONDS = 0.02
_LONGEST_DELAY_SECONDS = 1.0


class Connection:
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


class Calls:
    """Makes the calls of one client, over a connection to each sidecar that it comes to. For one event loop."""

    def __init__(self, sidecars: Sidecars) -> None:
        self._sidecars = sidecars
        self._connections: dict[SidecarAddress, Connection] = {}
        self._found_at: dict[str, SidecarAddress] = {}
        """By topic; "" is the whole."""

    async def close(self) -> None:
        """Lets go of the connections."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await connection.channel.close()

    def connection(self, address: SidecarAddress) -> Connection:
        """The one connection to this sidecar."""
        check_not_forked()
        if address not in self._connections:
            self._connections[address] = Connection(address, self._sidecars.new_channel(address))
        return self._connections[address]

    def connection_to(self, text: str) -> Connection:
        """The one to a sidecar that another one has named. Raises NOT_OWNER if the client may not go there."""
        address = self._sidecars.allowed(text)
        if address is None:
            why = f"the sidecar at {text} has a part of it, and is not among the addresses that the client was given"
            raise error("NOT_OWNER", why, hint="Give the client the addresses of all sidecars.", owner_address=text)
        return self.connection(address)

    def first_connection(self) -> Connection:
        """That to the first address."""
        return self.connection(self._sidecars.addresses[0])

    async def call(
        self,
        method: Callable[[Connection], Callable[..., Awaitable[M]]],
        request: Message,
        timeout_seconds: float = CALL_TIMEOUT_SECONDS,
    ) -> M:
        """Makes a unary call, of the request's topic or of the whole. A topic that recovers is waited for.

        Raises as `at`, RECOVERING too if that lasts for CALL_TIMEOUT_SECONDS.
        """

        def act(connection: Connection) -> Awaitable[M]:
            return call(connection.address, connection.channel, method(connection), request, timeout_seconds)

        is_look = type(request).__name__.startswith(_LOOKS)
        return await self.at(getattr(request, "topic", ""), act, is_look=is_look)

    async def at(self, topic: str, act: Callable[[Connection], Awaitable[T]], *, is_look: bool) -> T:
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
            connection: Connection | None = None
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

    def _forget(self, connection: Connection) -> None:
        """The next call makes a new one, which tries at once, where gRPC would answer for up to a second that the old
        one was refused, and which takes the TLS files as they are then. Others that are under way over the old one end
        as they may."""
        if self._connections.get(connection.address) is connection:
            del self._connections[connection.address]

    def _remember(self, topic: str, address: SidecarAddress) -> None:
        if len(self._found_at) >= MAX_REMEMBERED:
            self._found_at.clear()
        self._found_at[topic] = address
