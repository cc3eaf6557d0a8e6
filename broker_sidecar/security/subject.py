"""Who makes a call, as the sidecar knows it."""

from contextvars import ContextVar
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv6Address
from typing import Literal
from urllib.parse import unquote

OPERATOR = "operator"
"""The subject of the data directory's own token."""
ANONYMOUS = "anonymous"
"""Everybody, where `authentication = "none"`."""
RESERVED = frozenset({OPERATOR, ANONYMOUS})
"""No other token and no certificate makes a subject of such a name."""

MAX_NAME_BYTES = 255

_NETWORK_BYTES = 8
"""Of an IPv6 address: who has one has all that begin so."""


def can_be_name(name: str) -> bool:
    """Whether somebody may be called so: 1 to 255 bytes that can be printed."""
    return name.isprintable() and 0 < len(name.encode()) <= MAX_NAME_BYTES


def host_of(address: str) -> str:
    """A peer's address, as gRPC writes it, without its port: another connection of the same client is no other one."""
    return address.rpartition(":")[0] if address.startswith("ipv") else address.partition(":")[0]


def network_of(address: str) -> str:
    """The host, or of IPv6 the network that it can have any address of."""
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
    """Who makes a call, and by what that is known."""

    name: str
    """Empty for one who is not known, who may ask for the health of the whole alone."""
    kind: Literal["token", "jwt", "certificate", "nobody"]
    """`token` is that of the data directory."""
    expires_at_seconds: float | None
    """Unix time, of a token that expires."""
    address: str
    """The caller's end of the connection, as gRPC writes it."""

    @property
    def is_unrestricted(self) -> bool:
        """Whether no rule is asked: the operator, and everybody where nobody is asked who they are."""
        return self.kind == "token" or (self.kind == "nobody" and self.name == ANONYMOUS)


_caller: ContextVar[Subject] = ContextVar("caller")


def caller() -> Subject:
    """Who makes the call that is being handled. A task that a handler makes has the same caller, however long it lives.

    Raises LookupError outside of a call.
    """
    return _caller.get()


def set_caller(subject: Subject) -> None:
    """From now on the caller of this task, and of those that it makes, is this one."""
    _caller.set(subject)
