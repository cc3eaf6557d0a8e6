"""Connections that say nothing leave their places to others: those that call, and those that watch the health."""

import asyncio
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from broker_sidecar import connections
from broker_sidecar.connections import (
    LOCAL_PART,
    UNKNOWN_PER_ADDRESS,
    PeerEnd,
    TcpConnection,
    TcpConnections,
    address_that_counts,
    choose,
)
from broker_sidecar.security.subject import Subject
from broker_sidecar.server import connections_within
from seqdedupe.address import SidecarAddress
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.broker_sidecar import with_constants
from tests.broker_sidecar.calls import NOT_DUP, Client, batch, verdicts
from tests.broker_sidecar.security.showing import bearer, token_of, unary

WAIT_SECONDS = LAST_RESORT_SECONDS
NEVER = 1e9
DESCRIPTORS = 1024
PLACES = connections_within(DESCRIPTORS)
SILENT = 600
SOON = 0.5
"""For a deadline that a test waits for."""

LIST_TOPICS = "/seqdedupe.v1.AdminService/ListTopics"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a client of HTTP/2 says before its first call."""


def sidecar_with(
    folder: Path, files: int = DESCRIPTORS, constants: dict[str, Any] | None = None, **keys: Any
) -> Sidecar:
    environment = with_constants.environment(**constants or {}) | {with_constants.FILES: f"{files} {files}"}
    return Sidecar(folder, module=with_constants.MODULE, environment=environment, **keys)


class Silent:
    """A connection that is ready for calls and makes none."""

    def __init__(self, address: str) -> None:
        at = SidecarAddress.parse(address)
        self._socket = socket.socket(socket.AF_UNIX if at.path else socket.AF_INET)
        self._socket.connect(at.path or (at.host, at.port))
        self._socket.settimeout(0)
        self.is_open = True
        self._send(PREFACE)

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError:
            self.is_open = False

    def look(self) -> bool:
        """Reads what has come; whether the connection is still open."""
        try:
            while self.is_open:
                self.is_open = bool(self._socket.recv(1 << 16))
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        return self.is_open

    def close(self) -> None:
        self._socket.close()


@contextmanager
def silent(address: str, count: int) -> Iterator[list[Silent]]:
    """This many such connections."""
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Silent(address))) for _ in range(count)]


def number_open(connections: list[Silent]) -> int:
    return sum(one.look() for one in connections)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def publishes(address: str) -> bool:
    """Whether a new client opens a session and publishes."""
    client = Client(address)
    try:
        opened = client.open("t", "p")
        data = batch([("p", opened.persisted[0] + 1)], {"p": opened.epochs[0]})
        return verdicts(client.publish_unary("t", data), 1) == [NOT_DUP]
    except grpc.RpcError:
        return False
    finally:
        client.close()


def probe(address: str) -> bool:
    """Whether somebody without a token learns the sidecar's health, over their own connection."""
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            answer = unknown_health(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def unknown_health(channel: grpc.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)


def has_been_ended(one: Silent) -> bool:
    return not one.look()


# -- a sidecar with few descriptors ------------------------------------------------------------------------------


def test_silent_connections_leave_room_for_a_client_and_a_probe(tmp_path: Path) -> None:
    with sidecar_with(tmp_path) as sidecar, silent(sidecar.address, SILENT) as others:
        wait_until(lambda: publishes(sidecar.address), "a new client does not get in")
        wait_until(lambda: probe(sidecar.address), "a probe does not get in")
        wait_until(lambda: number_open(others) <= UNKNOWN_PER_ADDRESS, "more are open than one address may have")
        wait_until(lambda: not number_open(others), "silent connections stay")
        assert probe(sidecar.address)


def test_the_control_silent_connections_that_stay_shut_everybody_out(tmp_path: Path) -> None:
    constants = {"connections__LOOK_SECONDS": NEVER}
    with sidecar_with(tmp_path, constants=constants) as sidecar, silent(sidecar.address, SILENT) as others:
        wait_until(lambda: number_open(others) == PLACES, "gRPC does not take as many as there are places")
        for _ in range(3):
            assert not probe(sidecar.address)
        assert number_open(others) == PLACES


def test_who_calls_or_watches_the_health_stays(tmp_path: Path) -> None:
    constants = {"connections__CALL_SECONDS": SOON}
    with sidecar_with(tmp_path, constants=constants, authentication="token") as sidecar:
        channels = [grpc.insecure_channel(sidecar.address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(4)]
        unary(channels[0], LIST_TOPICS)(b"", metadata=bearer(token_of(sidecar)))
        watching, asking = (unknown_health(channel) for channel in channels[1:3])
        watched = watching.Watch(health_pb2.HealthCheckRequest())
        next(watched)
        asking.Check(health_pb2.HealthCheckRequest())
        stay = own_ports(sidecar.address)
        assert len(stay) == 3
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            unary(channels[3], LIST_TOPICS)(b"", metadata=bearer("wrong"))
        for _ in range(2):
            with silent(sidecar.address, 1) as [other]:
                wait_until(lambda: has_been_ended(other), "a silent connection stays")
        wait_until(lambda: own_ports(sidecar.address) == stay, "others stay than those that call")
        assert watched.is_active()
        for channel in channels:
            channel.close()


def test_grpc_ends_idle_connections_on_a_unix_socket_too(tmp_path: Path) -> None:
    listen, constants = f"unix:{tmp_path}/socket", {"connections__IDLE_SECONDS": SOON}
    with sidecar_with(tmp_path / "data", constants=constants, listen=listen) as sidecar:
        with silent(sidecar.address, 3) as others:
            wait_until(lambda: not number_open(others), "idle connections stay")
        assert publishes(sidecar.address)


def own_ports(address: str) -> set[int]:
    """The ports of this process's connections to the sidecar."""
    port = SidecarAddress.parse(address).port
    found = psutil.Process().net_connections("tcp")
    return {one.laddr.port for one in found if one.raddr and one.raddr.port == port and one.status == "ESTABLISHED"}


# -- looks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """A listener for IPv4 and IPv6."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=16) as listener:
        yield listener


def connect(listening: socket.socket, host: str) -> tuple[socket.socket, socket.socket]:
    """A connection: the client's end, and the server's."""
    there = socket.create_connection((host, listening.getsockname()[1]))
    there.settimeout(WAIT_SECONDS)
    return there, listening.accept()[0]


@pytest.mark.parametrize(("host", "peer"), [("127.0.0.1", "ipv4:127.0.0.1:{}"), ("::1", "ipv6:%5B::1%5D:{}")])
async def test_who_has_called_is_found_by_address_and_port(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch, host: str, peer: str
) -> None:
    """A listener of IPv6 has the clients of IPv4 by other addresses than gRPC tells."""
    monkeypatch.setattr(connections, "CALL_SECONDS", 0.0)
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.01)
    own = TcpConnections(100, lambda: ())
    pairs = [connect(listening, host) for _ in range(2)]
    own.called(Subject("ann", "jwt", None, peer.format(pairs[0][0].getsockname()[1])))
    looking = asyncio.ensure_future(own.keep_looking({listening.getsockname()[1]}))
    assert await asyncio.to_thread(pairs[1][0].recv, 1) == b""
    looking.cancel()
    assert (own.count(), own.ended) == ((1, 1), {"silent": 1, "crowded": 0, "loud": 0, "unread": 0, "half": 0})
    pairs[0][1].sendall(b"x")
    assert pairs[0][0].recv(1) == b"x"
    for one in itertools.chain(*pairs):
        one.close()


def test_a_descriptor_that_is_another_connections_by_now_is_left_alone(listening: socket.socket) -> None:
    here, there = connect(listening, "127.0.0.1")
    innocent_here, innocent_there = connect(listening, "127.0.0.1")
    number, inode = there.fileno(), os.fstat(there.fileno()).st_ino
    one = TcpConnection(inode, number, PeerEnd(b"", 0), b"", 1, 0.0, 0.0)
    there.detach()
    os.dup2(innocent_there.fileno(), number)
    assert not one.end()
    innocent_there.sendall(b"x")
    assert innocent_here.recv(1) == b"x"
    one.inode = os.fstat(number).st_ino
    assert one.end()
    assert innocent_here.recv(1) == b""
    os.close(number)
    for end in (here, innocent_here, innocent_there):
        end.close()


# -- who has to go -----------------------------------------------------------------------------------------------


def made(count: int, address: Callable[[int], str], first: int = 1, **what: Any) -> list[TcpConnection]:
    """This many connections, one after the other, of the latest of which nothing has been heard for no time."""
    addresses = [address_that_counts(ip_address(address(k)).packed) for k in range(count)]
    return [
        TcpConnection(first + k, -1, PeerEnd(one, 1), one, first + k, first + k, NEVER, **what)
        for k, one in enumerate(addresses)
    ]


def chosen(all_of_them: list[TcpConnection], limit: int) -> list[int]:
    return sorted(one.inode for one, _ in choose(all_of_them, limit, 0.0))


def test_of_one_address_the_newest_unknown_ones_stay() -> None:
    many = made(UNKNOWN_PER_ADDRESS + 3, lambda _: "192.0.2.7") + made(3, lambda _: "192.0.2.8", 1000)
    assert chosen(many, 10_000) == [1, 2, 3]


def test_known_ones_are_not_counted_by_address() -> None:
    assert not chosen(made(10 * UNKNOWN_PER_ADDRESS, lambda _: "192.0.2.7", is_known=True), 10_000)
    assert not chosen(made(10 * UNKNOWN_PER_ADDRESS, lambda _: "192.0.2.7", has_stream=True), 10_000)


def test_a_network_of_ipv6_counts_as_one_address() -> None:
    assert chosen(made(UNKNOWN_PER_ADDRESS + 1, lambda k: f"2001:db8::{k:x}"), 10_000) == [1]
    assert not chosen(made(UNKNOWN_PER_ADDRESS + 1, lambda k: f"2001:db8:0:{k:x}::1"), 10_000)


def test_half_of_all_may_be_unknown() -> None:
    many = made(60, lambda k: f"192.0.2.{k}") + made(40, lambda _: "192.0.2.7", 1000, is_known=True)
    assert chosen(many, 1000) == []
    assert chosen(many, 110) == [1, 2, 3, 4, 5]


def test_some_places_are_kept_for_callers_on_this_machine() -> None:
    local = made(20, lambda k: f"127.0.0.{k}", 1000)
    others = made(LOCAL_PART * 10, lambda _: "192.0.2.7", is_known=True)
    assert chosen(others + local, LOCAL_PART * 10) == list(range(LOCAL_PART * 10 - 9, LOCAL_PART * 10 + 1))
    assert not chosen(others + local, LOCAL_PART * 11)


def test_the_longest_silent_ones_go_whoever_they_are() -> None:
    one, other = made(2, lambda _: "127.0.0.1")
    one.silent_at = 0.0
    assert chosen([one, other], 100) == [one.inode]
    one.has_ended = True
    assert not chosen([one, other], 100)
