"""The caller of a call, as the sidecar knows it."""

from contextvars import ContextVar
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv6Address
from typing import Literal
from urllib.parse import unquote

OPERATOR = "operator"
"""The subject of the data directory's own token."""
ANONYMOUS = "anonymous"
"""Every caller, with `authentication = "none"`."""
RESERVED = frozenset({OPERATOR, ANONYMOUS})
"""No other token and no certificate can have such a subject."""

_NETWORK_BYTES = 8
"""The number of leading bytes of an IPv6 address that identify a network. A client with one address has all addresses
with the same leading bytes."""


def peer_at(host: str, port: int) -> str:
    """Return a peer's address in gRPC's form."""
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def host_of(address: str) -> str:
    """Return a peer's address in gRPC's form, without the port. So all connections of a client have the same
    address."""
    return address.rpartition(":")[0] if address.startswith("ipv") else address.partition(":")[0]


def network_of(address: str) -> str:
    """Return the host. For IPv6, return the network in which the host can have any address."""
    host = host_of(address)
    if not host.startswith("ipv6:"):
        return host
    text = unquote(host.removeprefix("ipv6:")).strip("[]").partition("%")[0]
    try:
        found = IPv6Address(text)
    except AddressValueError:
        return host
    if found.ipv4_mapped:
        return f"ipv4:{found.ipv4_mapped}"
    return f"ipv6:{IPv6Address(found.packed[:_NETWORK_BYTES].ljust(16, bytes(1)))}/64"


@dataclass(frozen=True, slots=True)
class Subject:
    """The caller, and the kind of credential that identifies the caller."""

    name: str
    """The caller's name. Empty for an unknown caller, who may only ask for the health of the whole sidecar."""
    kind: Literal["token", "jwt", "certificate", "nobody"]
    """`token` is the token of the data directory."""
    expires_at_seconds: float | None
    """Unix time, if the token expires."""
    address: str
    """The caller's end of the connection, as gRPC writes it."""

    @property
    def is_unrestricted(self) -> bool:
        """Whether no rules apply to the caller. No rules apply to the operator. If authentication is disabled, no rules
        apply to any caller."""
        return self.kind == "token" or (self.kind == "nobody" and self.name == ANONYMOUS)


_caller: ContextVar[Subject] = ContextVar("caller")


caller = _caller.get
"""Return the caller of the present call. Tasks that a handler starts keep this caller for their whole life. Raises
LookupError outside of a call."""

set_caller = _caller.set
"""Set the caller of this task, and of tasks that it starts later."""
