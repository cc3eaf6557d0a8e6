"""Who makes a call, by what it shows."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio

from broker_sidecar.config import Config
from broker_sidecar.rpc import Context
from broker_sidecar.security import own_token
from broker_sidecar.security.certificates import Certificates, connection_age, name_in
from broker_sidecar.security.gate import anybody
from broker_sidecar.security.own_token import OwnToken
from broker_sidecar.security.revoked import Revoked
from broker_sidecar.security.signed_tokens import SignedTokens
from broker_sidecar.security.subject import ANONYMOUS, OPERATOR, RESERVED, Subject
from broker_sidecar.security.watching import Watched
from broker_sidecar.streams import Streams
from seqdedupe.address import SidecarAddress
from seqdedupe.errors import SeqdedupeError, error

AUTHORIZATION = "authorization"
_SCHEME = "bearer"


class Authentication:
    """Who makes each call, as the configuration has it. When what somebody has shown is not valid any more, their
    streams end, with TOKEN_EXPIRED, so that they show what is."""

    def __init__(self, config: Config, streams: Streams) -> None:
        """Makes the data directory's token if there is none. Raises INVALID_CONFIGURATION; OSError."""
        self.watched: list[Watched[Any]] = []
        """The files that this takes."""
        self._streams = streams
        self._token: OwnToken | None = None
        if config.authentication == "token":
            self._token = OwnToken(own_token.make(Path(config.data_directory)), self._end("token"))
            self.watched.append(self._token.watched)
        self._signed_tokens: SignedTokens | None = None
        if config.token_keys_file:
            keys_file = Path(config.token_keys_file)
            most_seconds = 60 * config.token_max_lifetime_minutes or math.inf
            self._signed_tokens = SignedTokens(keys_file, config.token_audience, self._end("jwt"), most_seconds)
            self.watched.append(self._signed_tokens.watched)
        self._certificates: Certificates | None = None
        if config.tls_certificate_file:
            self._certificates = Certificates(config)
            self.watched.append(self._certificates.watched)
        self._revoked: Revoked | None = None
        if config.tls_client_crl_file:
            lists, authorities = Path(config.tls_client_crl_file), Path(config.tls_client_ca_file)
            self._revoked = Revoked(lists, authorities, self._end_all)
            self.watched.append(self._revoked.watched)

    def __call__(self, context: Context) -> Subject:
        """Raises UNAUTHENTICATED, TOKEN_EXPIRED."""
        if self._token is None:
            return anybody(context)
        address = context.peer()
        if self._certificates is not None and self._certificates.takes_clients:
            self._certificates.check(context.auth_context())
        if self._revoked is not None:
            # A connection that is open stays so, and a token is shown over one.
            self._revoked.check(context.auth_context())
        if (token := _token_in(context)) is not None:
            subject = self._by_token(self._token, token, address)
        elif self._takes_certificate_of(context):
            subject = Subject(name_in(context.auth_context()), "certificate", None, address)
        else:
            raise error("UNAUTHENTICATED", "the call shows no token")
        return _check_name(subject)

    def _takes_certificate_of(self, context: Context) -> bool:
        """Whether the connection needed a certificate: one over a Unix socket does not."""
        is_wanted = self._certificates is not None and self._certificates.takes_clients
        return is_wanted and "x509_pem_cert" in context.auth_context()

    def of_token(self, token: bytes | None, address: str) -> Subject:
        """Who shows this token otherwise than in a call of gRPC. Raises as a call."""
        if self._token is None:
            return Subject(ANONYMOUS, "nobody", None, address)
        if token is None:
            raise error("UNAUTHENTICATED", "no token is shown")
        return _check_name(self._by_token(self._token, token, address))

    def _by_token(self, own: OwnToken, token: bytes, address: str) -> Subject:
        if own.is_shown(token):
            return Subject(OPERATOR, "token", None, address)
        if self._signed_tokens is None:
            raise error("UNAUTHENTICATED", "the token is not this sidecar's")
        claims = self._signed_tokens.claims_of(token, address, time.time())
        return Subject(claims.subject, "jwt", claims.expires_at_seconds, address)

    def add_port(self, server: grpc.aio.Server, address: SidecarAddress) -> int:
        """Has the server listen there, with TLS where that is configured; returns the port. Raises RuntimeError."""
        if self._certificates is None or address.path:
            return server.add_insecure_port(str(address))
        return server.add_secure_port(str(address), self._certificates.credentials())

    def server_options(self) -> tuple[tuple[str, int], ...]:
        """What the server needs so that connections end, where what they began with does not stay valid."""
        return () if self._certificates is None and self._signed_tokens is None else connection_age()

    def _end(self, kind: str) -> Callable[[], None]:
        """Ends the streams of those who are known by this."""

        def why(subject: Subject) -> SeqdedupeError | None:
            return error("TOKEN_EXPIRED", "the sidecar takes other tokens now") if subject.kind == kind else None

        return lambda: self._streams.end_where(why)

    def _end_all(self) -> None:
        """Ends all streams: a stream does not say over which certificate it came, and each is judged when it begins."""
        self._streams.end_where(
            lambda _: error("TOKEN_EXPIRED", "other certificates are revoked now: show yours again")
        )


def _check_name(subject: Subject) -> Subject:
    if subject.name in RESERVED and subject.kind != "token":
        why = f"nobody else may have the name {subject.name!r}"
        raise error("UNAUTHENTICATED", why, subject=subject.name, kind=subject.kind)
    return subject


def _token_in(context: Context) -> bytes | None:
    """The token that a call shows; None if it shows none. Raises UNAUTHENTICATED."""
    shown = [value for name, value in context.invocation_metadata() or () if name == AUTHORIZATION]
    if not shown:
        return None
    scheme, _, token = str(shown[0]).partition(" ")
    if len(shown) > 1 or scheme.lower() != _SCHEME:
        raise error("UNAUTHENTICATED", f"the call's metadata {AUTHORIZATION} is not one token, as `Bearer TOKEN`")
    return token.strip().encode()
