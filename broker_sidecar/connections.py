"""The addresses at which a sidecar listens (at the end), the TCP connections there, and the rules by which
unauthenticated connections are closed to make room for others.

gRPC for Python cannot list its connections or end a single connection. So this module finds their sockets among the
process's descriptors, and compares them with the addresses from which calls arrived. To end a connection, the module
shuts down the connection's socket. gRPC then reads the end of the connection, and closes the descriptor as for any
client that disconnects.

gRPC's threads may close a descriptor at any time, and a file that is opened later may get the same number. So this
module works on a duplicate of the descriptor, and first compares the inode, which is unique for each socket. (gRPC may
also close its descriptor while a duplicate exists. Until the duplicate is closed, microseconds later, epoll may report
the old socket once more. gRPC keeps the memory to which such an event refers, and ignores the event.)
"""

import asyncio
import errno
import logging
import os
import secrets
import socket
import stat
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote
from weakref import WeakValueDictionary

from broker_sidecar.security.subject import Subject
from seqdedupe.address import SidecarAddress, cannot_listen, family_of
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import Lock

logger = logging.getLogger("seqdedupe.server")

CALL_SECONDS = 10.0
"""Within this time a connection must make an authenticated call, or ask for the sidecar's health."""

HEALTH_SECONDS = 60.0
"""The time that a connection may be silent after it asked for the sidecar's health."""

IDLE_SECONDS = 300
"""gRPC ends a connection that has had no call for this time. This is the only rule here that also applies to Unix
sockets."""

HANDSHAKE_SECONDS = 10
"""Within this time the TLS handshake must be complete and the first HTTP/2 frame must arrive."""

UNKNOWN_PART = 2
"""Unknown connections (without an authenticated call) take at most this fraction (1/n) of all places."""

UNKNOWN_PER_ADDRESS = 64
"""The maximum number of unknown connections from one address. If there are more, the oldest of them are ended."""

UNKNOWN_CALLS = 200
"""The most calls of unknown callers from one address within CALLS_SECONDS. With more, the address is loud."""

CALLS_SECONDS = 10.0
"""The period over which calls of unknown callers are counted. The count then begins again at zero."""

LOUD_SECONDS = 30.0
"""The time that an address stays loud."""

LOUD_SPARED = 1
"""On a connection from a loud address without an authenticated call, this number of calls of unknown callers is
answered within CALLS_SECONDS. So a probe gets an answer, and a caller with an old token learns that the token has
expired."""

HELD_SECONDS = 10.0
"""The time for which further calls wait without an answer. Then their connection is ended."""

MAX_HELD_CALLS = 6_000
"""The most calls that wait in this way, of about 30 KB each. If there are more, connections are ended at once."""

MAX_HELD_BYTES = 16 * 1024 * 1024
"""The most bytes that all connections with such calls may receive meanwhile: gRPC takes UNREAD_BYTES of each call."""

GONE_SECONDS = 10.0
"""After this time no call waits any more that arrived over an ended connection."""

NETWORK_BYTES = 8
"""The number of leading bytes of an IPv6 address that identify a caller, because a host can have every address of its
network."""

LOCAL_PART = 16
"""The fraction (1/n) of all places that is kept for callers on this machine."""

LOOK_SECONDS = 0.5
"""The time between looks at all connections."""

LOOK_SOON_SECONDS = 0.05
"""The interval after a look that ended connections: their clients may open new connections at once."""

LOOK_PART = 20
"""Looks take at most this fraction (1/n) of the time, for any number of connections."""

LOOK_STEP = 256
"""The number of descriptors that one step of the event loop looks at."""

UNREAD_BYTES = 1024 * 1024
"""The bytes that gRPC takes of a stream that the sidecar does not read."""

MAX_HALF_BYTES = 64 * 1024 * 1024
"""The maximum size of incomplete messages that gRPC may keep for all connections, beyond UNREAD_BYTES for each
stream."""

_BYTES_SENT_AND_RECEIVED = struct.Struct("=120xQQ")
"""The byte counts in Linux's `tcp_info`."""
_ROUND_BYTES, _FRAME_BYTES, _RECEIVED_PART, _SENT_PART = 4096, 64, 64, 128
"""The bytes that a connection may receive in addition to messages: per look, per message, and per byte received and
sent (1/n). They are HTTP/2 frames, TLS records and headers. Any more counts as incomplete messages."""

WARN_SECONDS = 60.0
"""The time between log lines about ended connections."""

_LOCAL = b""
"""The address of all callers on this machine."""


class Taken:
    """The number and bytes of complete messages received from one peer."""

    __slots__ = ("__weakref__", "messages", "size")

    def __init__(self) -> None:
        self.messages = self.size = 0


class PeerEnd(NamedTuple):
    """A peer's end of a TCP connection."""

    address: bytes
    port: int


@dataclass(slots=True)
class TcpConnection:
    """A TCP connection, with the data from the regular checks of all connections (`_look`). All times come from the
    clock of these checks."""

    inode: int
    descriptor: int
    """The descriptor's number at the last look."""
    place: PeerEnd
    address: bytes
    """The address to which the connection is counted: a host, a network, or this machine."""
    first_look: int
    heard_at: float
    """The time when the connection began, or when it last asked for the sidecar's health."""
    silent_at: float
    """The time from which the connection counts as silent for too long."""
    is_known: bool = False
    """Whether an authenticated call was made on the connection."""
    has_stream: bool = False
    """Whether the connection has a stream now. An unknown caller's stream watches the sidecar's health."""
    has_ended: bool = False
    held_calls: int = 0
    """The number of calls of unknown callers that wait without an answer."""
    half_bytes: int = 0
    """The bytes received beyond complete messages."""
    taken: Taken | None = None
    """None before the first look at the bytes received."""
    counted: tuple[int, int, int, int] = (0, 0, 0, 0)
    """At the last look: bytes sent and received, and messages and bytes taken."""

    def count_half(self) -> None:
        """Add the bytes received and taken since the last look. Raises OSError."""
        if self.taken is None:
            self.taken = _taken_at(self.place)
        with _duplicate(self.descriptor, self.inode) as duplicate:
            info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT_AND_RECEIVED.size)
        if len(info) < _BYTES_SENT_AND_RECEIVED.size:  # an old kernel
            return
        counted = (*_BYTES_SENT_AND_RECEIVED.unpack(info), self.taken.messages, self.taken.size)
        sent, received, messages, size = (now - before for now, before in zip(counted, self.counted, strict=True))
        self.counted = counted
        overhead = _ROUND_BYTES + _FRAME_BYTES * messages + received // _RECEIVED_PART + sent // _SENT_PART
        self.half_bytes = max(0, self.half_bytes + received - size - overhead)

    def end(self) -> bool:
        """End the connection. Return whether it was still open."""
        try:
            with _duplicate(self.descriptor, self.inode) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
        self.has_ended = True
        return True


class TcpConnections:
    """The TCP connections to the sidecar's ports, at most `limit`. `streaming` returns the peers that have a stream."""

    def __init__(self, limit: int, streaming: Callable[[], Iterable[str]]) -> None:
        self._limit = limit
        self._streaming = streaming
        self._open: dict[int, TcpConnection] = {}
        """By inode. Every look replaces it."""
        self._places: dict[PeerEnd | None, TcpConnection] = {}
        """The same, by the peer's end."""
        self._others: set[int] = set()
        """The inodes of all other sockets."""
        self._known: dict[PeerEnd, int] = {}
        """The peers that made authenticated calls, each with the number of the look before its last call."""
        self._asked: dict[PeerEnd, float] = {}
        """The peers that asked for the health without authentication, each with the time."""
        self._unknown_calls: Counter[PeerEnd] = Counter()
        """The calls of unknown callers since the counting began."""
        self._counting_until = CALLS_SECONDS
        self._loud_until: dict[bytes, float] = {}
        """By the address that counts."""
        self._held_calls = 0
        self._gone: dict[PeerEnd, float] = {}
        """The peers of connections that were ended within GONE_SECONDS, each with the time."""
        self._looks = 0
        self._now = 0.0
        """The time of the clock of the looks. It stops while the event loop is blocked and calls wait in it."""
        self._warns_at = 0.0
        self.ended: Counter[str] = Counter(silent=0, crowded=0, loud=0, unread=0, half=0)
        """The number of connections that were ended, by reason."""

    def count(self) -> tuple[int, int]:
        """Return the number of connections with an authenticated call, and the number of connections without one."""
        known = [one.is_known for one in self._open.values()]
        return sum(known), len(known) - sum(known)

    def server_options(self) -> tuple[tuple[str, int], ...]:
        """Return gRPC's own limits, which also apply to a Unix socket. gRPC counts the connections of each port
        separately."""
        return (
            ("grpc.max_allowed_incoming_connections", self._limit),
            ("grpc.max_connection_idle_ms", int(IDLE_SECONDS * 1000)),
            ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1000)),
        )

    def called(self, subject: Subject) -> None:
        """Record a call from this caller. (A caller without a name may only ask for the sidecar's health.)"""
        if (place := _place_of_peer(subject.address)) is None:
            return
        if subject.name:
            self._known[place] = self._looks
        else:
            self._asked[place] = self._now

    async def has_to_answer(self, peer: str) -> bool:
        """Return whether to answer a call from this peer, whose caller is unknown.

        If the address makes too many such calls, this method returns only after a delay. During the delay the client
        has its maximum number of calls open.
        """
        if not peer:
            # gRPC has already ended the call, for example because it was compressed, and no longer knows the call's
            # peer.
            return False
        if (place := _place_of_peer(peer)) is None:
            return True
        # gRPC delivers calls that have waited, also those of ended connections.
        if place in self._gone:
            return False
        self._unknown_calls[place] += 1
        if (one := self._places.get(place)) is None or not self._is_loud(one):
            return True
        if self._held_calls < MAX_HELD_CALLS:
            self._held_calls += 1
            one.held_calls += 1
            try:
                await asyncio.sleep(HELD_SECONDS)
            finally:
                self._held_calls -= 1
                one.held_calls -= 1
            if one.has_ended or not self._is_loud(one):
                return not one.has_ended
        self._end([(one, "loud")])
        return False

    def end(self, peer: str) -> None:
        """End this peer's connection, if a look has found it. A Unix socket does not identify connections."""
        one = self._places.get(_place_of_peer(peer))
        if one is not None and not one.has_ended:
            self.ended["unread"] += one.end()

    async def keep_looking(self, ports: Set[int]) -> None:
        """Look at the connections to these ports at intervals, and end the connections that break a rule."""
        pause_seconds = LOOK_SECONDS
        while True:
            began = time.monotonic()
            await asyncio.sleep(pause_seconds)
            self._now += min(time.monotonic() - began, pause_seconds + LOOK_SECONDS)
            try:
                work_seconds = await self._look(ports)
            except OSError as e:
                # If descriptors have run out, the log is already full of such lines.
                if e.errno not in (errno.EMFILE, errno.ENFILE):
                    logger.warning("the connections cannot be examined: %s", e)
                continue
            chosen = choose(self._open.values(), self._limit, self._now)
            ended = self._end(chain(chosen, self._holding_halves(), self._holding_calls()))
            pause_seconds = max(
                LOOK_SOON_SECONDS if ended or self._loud_until else LOOK_SECONDS, LOOK_PART * work_seconds
            )

    async def _look(self, ports: Set[int]) -> float:
        """Find the open connections and update their state. Return the duration of this work in seconds."""
        self._looks += 1
        found: dict[int, TcpConnection] = {}
        others: set[int] = set()
        work_seconds, began = 0.0, time.perf_counter()
        for k, name in enumerate(os.listdir("/proc/self/fd"), 1):
            if k % LOOK_STEP == 0:
                work_seconds += time.perf_counter() - began
                await asyncio.sleep(0)
                began = time.perf_counter()
            descriptor = int(name)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISSOCK(status.st_mode):
                    continue
                inode = status.st_ino
                one = self._open.get(inode)
                if one is None and inode not in self._others:
                    one = self._new(descriptor, inode, ports)
            except OSError:
                # The socket was closed meanwhile or is not connected, or no descriptor is left.
                continue
            if one is None:
                others.add(inode)
            else:
                one.descriptor = descriptor
                with suppress(OSError):
                    one.count_half()
                found[inode] = one
        self._open, self._others = found, others
        self._learn()
        self._listen_for_loud()
        return work_seconds + time.perf_counter() - began

    def _new(self, descriptor: int, inode: int, ports: Set[int]) -> TcpConnection | None:
        """Return the connection with this descriptor; None if the connection is not to one of these ports. Raises
        OSError."""
        with _duplicate(descriptor, inode) as duplicate:
            if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            own, peer = _place_of(duplicate.getsockname()), _place_of(duplicate.getpeername())
        if own.port not in ports:
            return None
        address = _LOCAL if peer.address == own.address else address_that_counts(peer.address)
        self._gone.pop(peer, None)
        return TcpConnection(inode, descriptor, peer, address, self._looks, self._now, self._now + CALL_SECONDS)

    def _learn(self) -> None:
        """Record the callers since the last look."""
        streaming = {_place_of_peer(peer) for peer in self._streaming()}
        places = self._places = {one.place: one for one in self._open.values()}
        for one in self._open.values():
            # The connection began after the look that preceded the look which found the connection. A call before that
            # time used another connection.
            one.is_known = one.is_known or self._known.get(one.place, -1) >= one.first_look - 1
            one.has_stream = one.place in streaming
            if (asked_at := self._asked.get(one.place)) is not None:
                one.heard_at = max(one.heard_at, asked_at)
                one.silent_at = max(one.silent_at, asked_at + HEALTH_SECONDS)
        self._gone = {place: at for place, at in self._gone.items() if at + GONE_SECONDS > self._now}
        # The next look may find the connection of a call that came after this look began.
        self._known = {place: look for place, look in self._known.items() if place in places or look >= self._looks}
        self._asked = {place: at for place, at in self._asked.items() if place in places or at >= self._now}

    def _listen_for_loud(self) -> None:
        """Find the addresses from which unknown callers make too many calls, including calls over connections that have
        ended."""
        calls: Counter[bytes] = Counter()
        for place, count in self._unknown_calls.items():
            one = self._places.get(place)
            calls[one.address if one is not None else address_that_counts(place.address)] += count
        loud = {address: self._now + LOUD_SECONDS for address, count in calls.items() if count > UNKNOWN_CALLS}
        self._loud_until = {address: at for address, at in self._loud_until.items() if at > self._now} | loud
        if self._counting_until <= self._now:
            self._unknown_calls.clear()
            self._counting_until = self._now + CALLS_SECONDS

    def _is_loud(self, one: TcpConnection) -> bool:
        """Whether the address is loud, and this connection has made several calls without a single authenticated
        call."""
        if one.is_known or one.place in self._known or one.address not in self._loud_until:
            return False
        return self._unknown_calls[one.place] > LOUD_SPARED

    def _holding_halves(self) -> Iterator[tuple[TcpConnection, str]]:
        """Yield the connections to end so that at most MAX_HALF_BYTES of incomplete messages are kept. The largest come
        first."""
        streams = Counter(_place_of_peer(peer) for peer in self._streaming())
        beyond: list[tuple[int, TcpConnection]] = []
        for one in self._open.values():
            if not streams[one.place] and not one.held_calls:
                one.half_bytes = 0
            elif (size := one.half_bytes - streams[one.place] * UNREAD_BYTES) > 0:
                beyond.append((size, one))
        yield from ((one, "half") for one in _largest(beyond, MAX_HALF_BYTES))

    def _holding_calls(self) -> Iterator[tuple[TcpConnection, str]]:
        """Do the same as `_holding_halves` for calls that wait for an answer, with the limit MAX_HELD_BYTES."""
        holding = [(one.half_bytes, one) for one in self._open.values() if one.held_calls and not one.has_ended]
        yield from ((one, "loud") for one in _largest(holding, MAX_HELD_BYTES))

    def _end(self, chosen: Iterable[tuple[TcpConnection, str]]) -> bool:
        """End these connections, each for a reason. Return whether any were ended."""
        before = self.ended.copy()
        for one, why in chosen:
            self.ended[why] += one.end()
            self._gone[one.place] = self._now
        if self.ended["crowded"] > before["crowded"] and time.monotonic() >= self._warns_at:
            self._warns_at = time.monotonic() + WARN_SECONDS
            known, unknown = self.count()
            logger.warning(
                "the sidecar closes connections: too many make no call", extra={"known": known, "unknown": unknown}
            )
        return self.ended != before


def choose(connections: Iterable[TcpConnection], limit: int, now: float) -> Iterator[tuple[TcpConnection, str]]:
    """Yield the connections to end, each with the reason.

    Of the known connections, the oldest are kept, because they are in use. Of the unknown connections, the newest are
    kept, because they had the least time for a call.
    """
    open_now = [one for one in connections if not one.has_ended]
    known = sorted((one for one in open_now if one.is_known or one.has_stream), key=lambda one: one.first_look)
    unknown = sorted(
        (one for one in open_now if not (one.is_known or one.has_stream)), key=lambda one: one.heard_at, reverse=True
    )
    of_others = limit - limit // LOCAL_PART
    for one in known:
        of_others -= one.address != _LOCAL
        if of_others < 0 and one.address != _LOCAL:
            yield one, "crowded"
    left = limit // UNKNOWN_PART
    left_of: dict[bytes, int] = {}
    for one in unknown:
        if one.silent_at <= now:
            yield one, "silent"
            continue
        of_address = left_of.get(one.address, UNKNOWN_PER_ADDRESS)
        if not left or not of_address or (of_others <= 0 and one.address != _LOCAL):
            yield one, "crowded"
            continue
        left -= 1
        left_of[one.address] = of_address - 1
        of_others -= one.address != _LOCAL


def _largest(sizes: list[tuple[int, TcpConnection]], limit: int) -> Iterator[TcpConnection]:
    """Yield the largest connections until the rest is within the limit."""
    left = sum(size for size, _ in sizes)
    for size, one in sorted(sizes, key=lambda each: each[0], reverse=True):
        if left <= limit:
            return
        left -= size
        yield one


def address_that_counts(address: bytes) -> bytes:
    """Return the address under which a peer is counted."""
    if ip_address(address).is_loopback:
        return _LOCAL
    return address[:NETWORK_BYTES]


def origin_of(peer: str) -> bytes | str:
    """Return a call's origin, computed from gRPC's text for the peer. The origin is the peer's address. For a peer on
    this machine, the origin is a single connection.

    (A Unix socket does not identify connections.)"""
    place = _place_of_peer(peer)
    return (place and address_that_counts(place.address)) or peer


_all_taken: "WeakValueDictionary[PeerEnd, Taken]" = WeakValueDictionary()


def taken_from(peer: str) -> Taken:
    """Return the counters of this peer, which its calls increase. The counters of a Unix socket have no effect."""
    place = _place_of_peer(peer)
    return Taken() if place is None else _taken_at(place)


def _taken_at(place: PeerEnd) -> Taken:
    if (taken := _all_taken.get(place)) is None:
        taken = _all_taken[place] = Taken()
    return taken


def _duplicate(descriptor: int, inode: int) -> socket.socket:
    """Return the socket with this inode under a separate descriptor.

    Raises OSError if the descriptor is not a socket, or now belongs to another socket."""
    number = os.dup(descriptor)
    try:
        if os.fstat(number).st_ino != inode:
            raise OSError(errno.EBADF, "the socket has been closed")
        return socket.socket(fileno=number)
    except BaseException:
        os.close(number)
        raise


def _place_of(name: tuple[Any, ...]) -> PeerEnd:
    """Return the address and port of a TCP socket. An IPv4 address in IPv6 form is converted to IPv4."""
    address = ip_address(str(name[0]).partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return PeerEnd((mapped or address).packed, int(name[1]))


@lru_cache(1 << 16)
def _place_of_peer(peer: str) -> PeerEnd | None:
    """Return address and port of a peer in gRPC's form, such as `ipv6:%5B::1%5D:6650`; None if the peer does not use
    TCP."""
    family, _, rest = unquote(peer).partition(":")
    if family not in ("ipv4", "ipv6"):
        return None
    host, _, port = rest.rpartition(":")
    return _place_of((host.strip("[]"), port))


# -- The addresses at which a sidecar listens: TCP addresses, and the path of a Unix socket.

_LOCK_SUFFIX = ".lock"
_NAME_BYTES = 3
"""The number of random bytes in a socket's temporary name. The name must be short, because a socket's path may have at
most 107 characters."""
_CREDENTIALS = struct.Struct("3i")


def check_nobody_listens(address: SidecarAddress, key: str) -> None:
    """Raise CANNOT_LISTEN if another process listens at the address. Call this function before slow steps of a start.

    Other problems of the address are only reported when the sidecar begins to listen.
    """
    if address.path:
        path = Path(address.path)
        if path.exists() and not path.is_socket():
            raise cannot_listen(address, FileExistsError(), key)
        if owner := _listener(path):
            raise _taken(address, owner, key)
        return
    e = why_not_bound(address)
    if e is not None and e.errno == errno.EADDRINUSE:
        raise cannot_listen(address, e, key) from e


def why_not_bound(address: SidecarAddress) -> OSError | None:
    """Return why this process cannot listen at a host and port now; None if it can."""
    with socket.socket(family_of(address.host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host.strip("[]"), address.port))
        except OSError as e:
            return e
    return None


class SocketPath:
    """The path of a Unix socket. This process owns the path until `close`.

    gRPC removes every file at the path on which it listens, when it begins to listen and when it stops. So gRPC listens
    at a temporary path in the same folder, and the socket is then renamed to its final path.
    """

    def __init__(self, address: SidecarAddress, mode: int, key: str) -> None:
        """Raises CANNOT_LISTEN if another process listens at the path or holds the lock for it; OSError."""
        self._address = address
        self._path = Path(address.path)
        self._mode = mode
        self._key = key
        self._lock: Lock | None = None
        self._socket: tuple[int, int, int] | None = None
        self._own()

    def _own(self) -> None:
        if self._lock is None or not self._lock.is_held():
            try:
                lock = Lock.take(Path(f"{self._path}{_LOCK_SUFFIX}"))
            except BlockingIOError as e:
                raise _taken(self._address, str(e.strerror), self._key) from e
            if self._lock is not None:
                self._lock.close()
            self._lock = lock
        try:
            # A process that does not use this lock may be listening at the path.
            check_nobody_listens(self._address, self._key)
        except SeqdedupeError:
            self.close()
            raise

    def listen(self, add_port: Callable[[SidecarAddress], int]) -> None:
        """Make a server listen at the path. Raises CANNOT_LISTEN if another process listens there; RuntimeError;
        OSError."""
        self._own()
        # The temporary name is random. A process ID is not enough, because a process in another container may have the
        # same ID and use the same folder.
        own = self._path.with_name(f".{secrets.token_hex(_NAME_BYTES)}")
        add_port(self._address._replace(path=str(own)))
        own.chmod(self._mode)
        made = _identity(own)
        own.rename(self._path)
        self._socket = made

    def is_there(self) -> bool:
        """Whether the path still leads to this process's socket."""
        try:
            return self._socket == _identity(self._path)
        except OSError:
            return False

    def close(self) -> None:
        """Remove the socket, unless another socket has replaced it. May be called repeatedly."""
        if self.is_there():
            with suppress(OSError):
                self._path.unlink()
        self._socket = None
        if self._lock is not None:
            self._lock.remove()
            self._lock = None


def _identity(path: Path) -> tuple[int, int, int]:
    """Return a file's identity. It includes the modification time, because inode numbers are reused."""
    found = os.stat(path, follow_symlinks=False)
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _listener(path: Path) -> str:
    """Return a description of the process that listens at a path; empty if no process listens."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            return ""
        except OSError as e:
            # The listener accepts no more connections at the moment, or no connections from this process.
            return f"something that does not answer ({e.strerror or e})"
        pid, _, _ = _CREDENTIALS.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return f"process {pid}"


def _taken(address: SidecarAddress, owner: str, key: str) -> SeqdedupeError:
    what = f"{key} = {str(address)!r}: cannot listen there, because {owner} does"
    return error("CANNOT_LISTEN", what, hint="Stop that process, or choose a different path.")
