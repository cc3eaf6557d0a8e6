"""Authenticate the visitors of the pages. A browser sends the token as the password of HTTP basic authentication."""

import base64
import binascii
from collections.abc import Awaitable, Callable
from ipaddress import IPv6Address, ip_address
from typing import TypeVar

from google.protobuf import message

from broker_sidecar.security.audit import Trail
from broker_sidecar.security.authentication import Authentication
from broker_sidecar.security.permissions import Permissions
from broker_sidecar.security.subject import Subject, peer_at, set_caller
from broker_sidecar.services.admin_service import SERVICE
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.http_server import Request

ASK = {"WWW-Authenticate": 'Basic realm="seqdedupe: the password is the token", charset="UTF-8"'}
"""The header that makes a browser ask the visitor for the token."""

_SCHEME = "basic"

M = TypeVar("M", bound=message.Message)
R = TypeVar("R")


class Visitors:
    """Calls of AdminService by visitors. As in gRPC, the token identifies the visitor, and the rules apply to the
    visitor."""

    def __init__(self, authentication: Authentication, permissions: Permissions, trail: Trail) -> None:
        self._authentication = authentication
        self._permissions = permissions
        self._trail = trail

    async def call(self, visitor: Request, name: str, handle: Callable[[M], Awaitable[R]], request: M) -> R:
        """Make the AdminService call of this name for the visitor. Must run on the event loop. Raises UNAUTHENTICATED,
        TOKEN_EXPIRED, NOT_ALLOWED, and the errors of the call."""
        method = f"/{SERVICE}/{name}"
        set_caller(self._subject(visitor, method))
        self._permissions.check_call(method, request.SerializeToString())
        return await handle(request)

    def _subject(self, visitor: Request, method: str) -> Subject:
        host, port = visitor.client
        address = peer_at(host, port)
        try:
            return self._known(visitor, host, address)
        except SeqdedupeError as e:
            self._trail.unauthenticated(method, address, e)
            raise

    def _known(self, visitor: Request, host: str, address: str) -> Subject:
        token = _token_in(visitor)
        if token is not None and not _is_loopback(host):
            # The token was already sent without encryption. The refusal keeps the visitor from sending it again.
            why = f"a token was sent from {host} without TLS: others on the network may have read it"
            raise error("UNAUTHENTICATED", why, hint="Replace the token, and forward a port to open the page.")
        return self._authentication.of_token(token, address)


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
