"""Finds the user whose process listens at a port of this machine. The client sends a token only to trusted users.

While a sidecar is down, a process of any user of the machine may listen at the sidecar's port. Linux knows the user of
every TCP socket, and which socket receives the data from one address to another. The kernel answers such a question in
microseconds over netlink. If netlink is not allowed, this module searches the table of all sockets in `/proc`, which
may take milliseconds.
"""

import os
import pwd
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from stat import S_ISSOCK

from seqdedupe.address import SidecarAddress
from seqdedupe.errors import SeqdedupeError, error

# -- The meaning of gRPC's details if there is no connection. No other module reads their text.

_NEVER_CONNECTED = ("failed to connect", "errors resolving", "DNS resolution failed")
"""The texts in gRPC's details after which it is certain that nothing was sent."""

_HTTP_STATUS = "http2 header with status"
"""The text in gRPC's details before the HTTP status of a plain HTTP answer."""

_HINT_OF_HTTP = (
    "Something on the way, such as a proxy, answered in the sidecar's place: its log says why. Is the sidecar behind "
    "it running?"
)

_NO_GRPC_STATUS = ("Data frame with END_STREAM flag received", "No status received")
"""gRPC's details of an answer that ends like a web page. If the HTTP status is not 200, gRPC may report other
details."""

_HINTS = {
    "errors resolving": "Is the host's name right? It could not be found.",
    "DNS resolution failed": "Is the host's name right? It could not be found.",
    "refused": "Nothing listens there: is the sidecar running, and is this its address?",
    "No such file": "There is no such socket: is the sidecar running, and is this its path?",
    "Permission denied": "May this user use the socket?",
    "HTTP": "Something other than a sidecar listens there: is the port right?",
    "Socket closed": "The server ends the connection at once. Does the sidecar want TLS (tls_ca_file), or a valid "
    "certificate of the client (tls_certificate_file)? With GRPC_VERBOSITY=INFO in its environment it says why.",
}
"""Hints by a part of gRPC's details."""

_OTHER_HOST = "call host does not match"

_TLS_HINTS = {
    "WRONG_VERSION_NUMBER": "What listens there speaks no TLS: is the port right, and does the sidecar have a "
    "tls_certificate_file? Without TLS, omit tls_ca_file.",
    "Hostname Verification": "The sidecar's certificate does not name this host name or IP address: use one that it "
    "names, or give the sidecar a certificate that names this one.",
    _OTHER_HOST: "The sidecar's certificate does not name this host name or IP address: its common name alone does not "
    "count.",
    "certificate has expired": "The sidecar's certificate has expired: give it a new one. Or is this machine's clock "
    "wrong?",
    "certificate is not yet valid": "The sidecar's certificate is not valid yet: is a clock wrong, here or there?",
    "CERTIFICATE_VERIFY_FAILED": "This client does not trust the authority of the sidecar's certificate: tls_ca_file "
    "(SEQDEDUPE_TLS_CA_FILE) must hold that authority's certificate.",
    "security handshaker": "Are the TLS files PEM, and is tls_key_file the key of tls_certificate_file?",
    "Tls handshake failed": None,
    "Custom verification check failed": None,
}
"""Hints for failures of TLS, by a part of gRPC's details. None: use the hint of the reason code."""


def unreachable(address: SidecarAddress, details: str) -> SeqdedupeError:
    """Return the error for gRPC's details of a failed or lost connection: TLS_FAILED or UNREACHABLE."""
    if is_of_tls(details):
        hint = next(hint for sign, hint in _TLS_HINTS.items() if sign in details)
        return error("TLS_FAILED", f"no TLS connection to the sidecar at {address}: {details}", hint=hint)
    if any(sign in details for sign in _NEVER_CONNECTED):
        hint = next((hint for sign, hint in _HINTS.items() if sign in details), None)
        return error("UNREACHABLE", f"no connection to the sidecar at {address}: {details}", hint=hint)
    if (hint := hint_of_http(details)) is not None:
        return error("UNREACHABLE", f"{address} did not pass the call to the sidecar: {details}", hint=hint)
    return error("UNREACHABLE", f"the sidecar at {address}, or the way to it, broke off: {details}")


def hint_of_http(details: str) -> str | None:
    """Return the hint for a plain HTTP answer, which no sidecar sends. Return None for other details."""
    return _HINT_OF_HTTP if _HTTP_STATUS in details or has_no_grpc_status(details) else None


def has_no_grpc_status(details: str) -> bool:
    """Return whether the answer ends without a gRPC status. A gRPC server always sends a status."""
    return any(sign in details for sign in _NO_GRPC_STATUS)


def is_of_tls(details: str) -> bool:
    """Return whether a server was reached, but TLS with it failed."""
    return any(sign in details for sign in _TLS_HINTS)


def is_of_another_host(details: str) -> bool:
    """Return whether the details of a call report that the certificate was issued for another host. (gRPC accepts the
    certificate's common name when it connects, but not when it makes a call.)"""
    return _OTHER_HOST in details


def was_never_sent(failure: SeqdedupeError) -> bool:
    """Return whether it is certain that the call has not reached a sidecar."""
    if failure.reason == "UNREACHABLE":
        return any(sign in failure.message for sign in _NEVER_CONNECTED)
    return failure.reason in ("TLS_FAILED", "CREDENTIALS_UNAVAILABLE", "UNTRUSTED_LISTENER")


ROOT = 0
"""The user root, which can read every token anyway."""

Host = IPv4Address | IPv6Address
Place = tuple[Host, int]
"""An address and a port."""

Look = Callable[[Place, Place], int | None]
"""A function of two places, a local place and a remote place. It returns the number of the user who owns the local
socket that receives data from the remote place. This socket is the local end of a connection, or a listening socket.
None: there is no such socket."""

Looking = Callable[[], AbstractContextManager[Look]]

NO_PORT = 0
"""A remote port that no process sends from. The socket that would receive data from this port is the listening
socket."""

_STRANGER = 65_534
"""The user number that the kernel reports for every user outside the user namespace of this process."""
_ALL_USERS = 2**32 - 1


def check_listener(address: SidecarAddress, trusted: frozenset[int]) -> None:
    """Check the listener at this loopback address just before a token is sent to it. The given users, root, and the
    user of this process are trusted.

    Raises UNTRUSTED_LISTENER if another user listens at the address, or owns the other end of an open connection from
    this process to the address. Raises UNREACHABLE if no process listens, and CREDENTIALS_UNAVAILABLE if no file
    descriptor is available for the check. Does nothing if the operating system cannot answer.
    """
    places = [(host, address.port) for host in _hosts(address.host)]
    try:
        if (looking := _way_to_look()) is None:
            return
        with looking() as look:
            listening = [look(place, (place[0], NO_PORT)) for place in places]
            # A connection to an earlier listener may still be open.
            ends = [look(there, here) for here, there in _own_connections() if there in places]
    except OSError as e:
        why = f"the user that listens at {address} cannot be determined: {e.strerror}"
        raise error("CREDENTIALS_UNAVAILABLE", why) from e
    if all(user is None for user in listening):
        raise unreachable(address, "failed to connect: refused, since nobody listens there")
    trusted = (trusted | {ROOT, os.geteuid()}) - _strangers()
    for user in (*listening, *ends):
        if user is not None and user not in trusted:
            what = f"{_name(user)} listens at {address}: the token was not sent there"
            raise error("UNTRUSTED_LISTENER", what, user=user)


@cache
def user_of(said: str) -> int:
    """Return the number of a user, given by name or number. Raises INVALID_CREDENTIALS."""
    try:
        return int(said) if said.isascii() and said.isdecimal() else pwd.getpwnam(said).pw_uid
    except KeyError as e:
        hint = "Correct SEQDEDUPE_SIDECAR_USER: the user that the sidecar runs as, by name or number."
        raise error("INVALID_CREDENTIALS", f"there is no user {said!r}", hint=hint) from e


def _hosts(host: str) -> list[Host]:
    if host == "localhost":
        return [IPv4Address("127.0.0.1"), IPv6Address("::1")]
    return [_plain(host.strip("[]"))]


def _plain(host: str) -> Host:
    """Return the address. Convert an IPv4 address that is written as IPv6 to IPv4."""
    found = ip_address(host.partition("%")[0])
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found


def _own_connections() -> Iterator[tuple[Place, Place]]:
    """Yield both ends of this process's open connections, the local end first."""
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            # Another thread may have closed the descriptor. A socket without a connection has no other end.
            with suppress(OSError, ValueError):
                if S_ISSOCK(os.fstat(int(name)).st_mode):
                    with socket.socket(fileno=os.dup(int(name))) as one:
                        if one.family in (socket.AF_INET, socket.AF_INET6):
                            here, there = one.getsockname(), one.getpeername()
                            yield (_plain(here[0]), here[1]), (_plain(there[0]), there[1])


@cache
def _way_to_look() -> Looking | None:
    """Return the fastest method that finds a test socket; None if no method finds this socket."""
    here = IPv4Address("127.0.0.1")
    with socket.create_server((str(here), 0)) as known:
        for looking in (over_netlink, in_tables):
            with suppress(OSError, AttributeError), looking() as look:  # AttributeError: this is not Linux
                if look((here, known.getsockname()[1]), (here, NO_PORT)) is not None:
                    return looking
    return None


# -- netlink (sock_diag(7)) -------------------------------------------------------------------------------------------

_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_NLMSG_ERROR = 2
_HEADER = struct.Struct("=IHHII")
_QUESTION = struct.Struct("=BBBxI")
_ENDS = struct.Struct("!HH16s16s")
_ANY_DEVICE_AND_COOKIE = struct.pack("=Iq", 0, -1)
_USER_AT = _HEADER.size + 4 + _ENDS.size + len(_ANY_DEVICE_AND_COOKIE) + 12
_MAX_ANSWER_BYTES = 8192


@contextmanager
def over_netlink() -> Iterator[Look]:
    """Look up sockets over netlink. Raises OSError if netlink is not allowed. Finds nothing if the kernel has no
    tcp_diag module."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.connect((0, 0))

        def look(here: Place, there: Place) -> int | None:
            family = socket.AF_INET if here[0].version == 4 else socket.AF_INET6
            ends = _ENDS.pack(here[1], there[1], here[0].packed, there[0].packed)
            question = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 2**32 - 1) + ends + _ANY_DEVICE_AND_COOKIE
            header = _HEADER.pack(_HEADER.size + len(question), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
            kernel.send(header + question)
            answer = kernel.recv(_MAX_ANSWER_BYTES)
            if _HEADER.unpack_from(answer)[1] == _NLMSG_ERROR:
                return None
            user: int = struct.unpack_from("=I", answer, _USER_AT)[0]
            return user

        yield look


# -- /proc (proc_pid_net(5)) ------------------------------------------------------------------------------------------

_LISTENS = b"0A"


@contextmanager
def in_tables() -> Iterator[Look]:
    """Look up sockets in the tables of `/proc`. Raises OSError if the tables do not exist."""
    users: dict[tuple[bytes, bytes], int] = {}
    for path in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with open(path, "rb") as table:
            next(table)
            for line in table:
                _, local, remote, state, _, _, _, user, *_ = line.split()
                users[_unmapped(local), b"" if state == _LISTENS else _unmapped(remote)] = int(user)

    def look(here: Place, there: Place) -> int | None:
        # A listener at the exact address has precedence over a listener at all addresses.
        hosts = [here[0], *([IPv4Address(0)] if here[0].version == 4 else []), IPv6Address(0)]
        ends = [(_written(*here), _written(*there)), *((_written(host, here[1]), b"") for host in hosts)]
        return next((users[one] for one in ends if one in users), None)

    yield look


def _written(host: Host, port: int) -> bytes:
    """Return the address and port in the format of the tables in `/proc`: in words of the machine's byte order."""
    words = (host.packed[begin : begin + 4] for begin in range(0, len(host.packed), 4))
    return b"".join(b"%08X" % int.from_bytes(word, sys.byteorder) for word in words) + b":%04X" % port


_MAPPED = _written(IPv6Address("::ffff:0:0"), NO_PORT)[:24]


def _unmapped(written: bytes) -> bytes:
    return written.removeprefix(_MAPPED)


# -- users ------------------------------------------------------------------------------------------------------------


def _strangers() -> frozenset[int]:
    """Return the user numbers that may stand for any user outside this namespace."""
    with suppress(OSError), open("/proc/self/uid_map", "rb") as known:
        if sum(int(line.split()[2]) for line in known) < _ALL_USERS:
            return frozenset((_STRANGER,))
    return frozenset()


def _name(user: int) -> str:
    try:
        return f"user {pwd.getpwuid(user).pw_name} ({user})"
    except KeyError:
        return f"user {user}"
