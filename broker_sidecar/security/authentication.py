"""Who makes a call, by what it shows: a token, or the certificate of its connection.

`Authentication` joins both, as the configuration has it. `Certificates` is TLS, with `Revoked` for what its authorities
take back; tokens are in `tokens.py`.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from broker_sidecar.config import Config
from broker_sidecar.rpc import Context
from broker_sidecar.security import tokens
from broker_sidecar.security.subject import ANONYMOUS, MAX_NAME_BYTES, OPERATOR, RESERVED, Subject, can_be_name
from broker_sidecar.security.tokens import OwnToken, SignedTokens
from broker_sidecar.security.watched_files import Watched
from seqdedupe.address import SidecarAddress
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import read_named
from seqdedupe.limits import MIN_RSA_BITS

# -- TLS: the sidecar's certificate, read again when its files change; and whose a client's certificate is.

MAX_CONNECTION_AGE_SECONDS = 3600
"""A connection ends after so long, more or less by a tenth: then certificates are shown and judged anew."""

CONNECTION_GRACE_SECONDS = 30
"""So long calls and streams may go on after that."""

LONGEST_CONNECTION_SECONDS = 1.1 * MAX_CONNECTION_AGE_SECONDS + CONNECTION_GRACE_SECONDS
"""No client has shown a certificate for longer, unless it resumes a session of TLS: nobody judges it again then."""

CERTIFICATES_KNOWN = 1024
"""So many are not read again with each call of their connections."""

_CURVES = ("secp256r1", "secp384r1")
"""Those that gRPC has."""


def connection_age() -> tuple[tuple[str, int], ...]:
    """What a server is told so that connections end."""
    return (
        ("grpc.max_connection_age_ms", MAX_CONNECTION_AGE_SECONDS * 1000),
        ("grpc.max_connection_age_grace_ms", CONNECTION_GRACE_SECONDS * 1000),
    )


class Certificates:
    """The sidecar's certificate as it is now. `takes_clients`: each client needs one too, of `tls_client_ca_file`."""

    def __init__(self, config: Config) -> None:
        """Raises INVALID_CONFIGURATION."""
        certificate, key = Path(config.tls_certificate_file), Path(config.tls_key_file)
        authorities = Path(config.tls_client_ca_file) if config.tls_client_ca_file else None
        self.takes_clients = authorities is not None
        files = [certificate, key, *([authorities] if authorities else [])]
        self.watched = Watched("TLS", files, lambda: _read(certificate, key, authorities), self._changed)
        self._first = self.watched.value
        self._news: grpc.ServerCertificateConfiguration | None = None

    def _changed(self) -> None:
        self._news = self.watched.value

    def _take_news(self) -> "grpc.ServerCertificateConfiguration | None":
        """What to use from now on, None: as before. gRPC asks at each new connection, in a thread of its own."""
        news, self._news = self._news, None
        return news

    def check(self, peer: Mapping[str, Iterable[bytes]]) -> None:
        """Given what gRPC says of a connection. Raises UNAUTHENTICATED if its certificate ended before any connection
        can have begun: a resumed session of TLS would be good for months."""
        for pem in peer.get("x509_pem_cert", ()):
            if time.time() >= _end_of(pem) + LONGEST_CONNECTION_SECONDS:
                raise error("UNAUTHENTICATED", "the client's certificate has expired")

    def credentials(self) -> grpc.ServerCredentials:
        """For a port."""
        fetch: Any = self._take_news
        return grpc.dynamic_ssl_server_credentials(self._first, fetch, self.takes_clients)


def name_in(peer: Mapping[str, Iterable[bytes]]) -> str:
    """Whose the certificate of a connection is, given what gRPC says of it: its one URI, as SPIFFE has it, or else its
    first DNS name. Raises UNAUTHENTICATED."""
    uris, names = list(peer.get("peer_uri", ())), list(peer.get("peer_dns", ()))
    if len(uris) > 1:
        raise error("UNAUTHENTICATED", "the client's certificate has several URIs: it is not clear whose it is")
    if not uris and not names:
        raise error("UNAUTHENTICATED", "the client's certificate names nobody: it has no URI and no DNS name as SAN")
    # What is not UTF-8 cannot be printed either, then.
    name = (uris or names)[0].decode(errors="surrogateescape")
    if not can_be_name(name):
        why = f"its SAN is not 1 to {MAX_NAME_BYTES} bytes that can be printed"
        raise error("UNAUTHENTICATED", f"the client's certificate names nobody: {why}")
    return name


@lru_cache(CERTIFICATES_KNOWN)
def _end_of(pem: bytes) -> float:
    """Unix time."""
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()


def _read(certificate: Path, key: Path, authorities: Path | None) -> grpc.ServerCertificateConfiguration:
    """What the files hold, if a connection can be made with it. Raises INVALID_CONFIGURATION."""
    chain_pem, key_pem = bytes_of(certificate), bytes_of(key)
    own = certificates_in(certificate, chain_pem)[0]
    try:
        public = load_pem_private_key(key_pem, None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as e:
        raise unusable(key, "holds no private key that can be read (an encrypted one cannot)") from e
    if _spki(public) != _spki(own.public_key()):
        raise unusable(certificate, f"is not of the key in {key}: the sidecar's own certificate stands first in it")
    if not _is_taken(public):
        raise unusable(key, f"has a key that gRPC does not take: RSA of {MIN_RSA_BITS} bits, P-256 or P-384 is needed")
    now = datetime.now(UTC)
    if not own.not_valid_before_utc <= now < own.not_valid_after_utc:
        term = f"{own.not_valid_before_utc:%Y-%m-%d %H:%M} to {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        raise unusable(certificate, f"is valid from {term}, which is not now")
    authorities_pem = None
    if authorities is not None:
        authorities_pem = bytes_of(authorities)
        certificates_in(authorities, authorities_pem)
    return grpc.ssl_server_certificate_configuration([(key_pem, chain_pem)], authorities_pem)


def bytes_of(path: Path) -> bytes:
    """What the file holds. Raises INVALID_CONFIGURATION."""
    try:
        return read_named(path)
    except OSError as e:
        raise unusable(path, f"cannot be read: {e.strerror}") from e


def certificates_in(path: Path, pem: bytes) -> list[x509.Certificate]:
    """Those that the file holds. Raises INVALID_CONFIGURATION."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as e:
        raise unusable(path, "holds no certificates as PEM") from e


def _spki(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _is_taken(key: PublicKeyTypes) -> bool:
    if isinstance(key, rsa.RSAPublicKey):
        return key.key_size >= MIN_RSA_BITS
    return isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _CURVES


def unusable(path: Path, why: str) -> SeqdedupeError:
    """INVALID_CONFIGURATION, of a file for TLS."""
    hint = "docs/guides/security.md says what the TLS files hold. A certificate and its key are replaced together."
    return error("INVALID_CONFIGURATION", f"the file {path} {why}", hint=hint)


# -- Clients' certificates that their authority has taken back, as its lists (CRLs) say.

CHAINS_KNOWN = 1024
"""So many are not read again with each call of their connections."""

_END = b"-----END X509 CRL-----"

Name = tuple[frozenset[tuple[str, str | bytes]], ...]
"""An authority's name: the same in each encoding, in capitals or not, and with any spaces. TLS compares it so too."""


class Serial(NamedTuple):
    """Which certificate it is: who signed it, and that one's number for it."""

    issuer: Name
    number: int


@dataclass(frozen=True)
class _Lists:
    """What the lists say."""

    serials: frozenset[Serial]
    authorities: tuple[x509.Certificate, ...]
    """Those in the file of authorities that are not revoked."""
    revoked_authorities: frozenset[Name]
    """The names of the others."""

    def has_revoked(self, one: x509.Certificate) -> bool:
        """Whether the certificate is in a list, or an authority in the file has issued it that is."""
        if (serial := _serial_of(one)) in self.serials:
            return True
        if serial.issuer not in self.revoked_authorities:
            return False
        # Two authorities may have one name, as where an authority gets another key.
        return not any(_has_issued(authority, one) for authority in self.authorities)


class Revoked:
    """The certificates in the lists as they are now. `on_change` is called when there are others."""

    def __init__(self, lists: Path, authorities: Path, on_change: Callable[[], None]) -> None:
        """Raises INVALID_CONFIGURATION."""
        files = [lists, authorities]
        self.watched = Watched(
            "the list of revoked certificates", files, lambda: _read_lists(lists, authorities), on_change
        )

    def check(self, peer: Mapping[str, Iterable[bytes]]) -> None:
        """Given what gRPC says of a connection. Raises UNAUTHENTICATED if its certificate was revoked, or any other
        that the client has shown: TLS has found the way up to an authority in the file among those."""
        own = b"".join(peer.get("x509_pem_cert", ()))
        shown = own + b"".join(peer.get("x509_pem_cert_chain", ()))
        if not shown:  # a Unix socket's connection has none
            return
        try:
            is_revoked = any(map(self.watched.value.has_revoked, _chain_in(shown)))
        except ValueError as e:
            raise error("UNAUTHENTICATED", f"the client's certificate cannot be read: {e}") from e
        if is_revoked:
            why = "the client's certificate, or one between it and its authority, was revoked"
            raise error("UNAUTHENTICATED", why, subject=name_in(peer), kind="certificate")


@lru_cache(CHAINS_KNOWN)
def _chain_in(pem: bytes) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(pem)


@lru_cache(CHAINS_KNOWN)
def _serial_of(one: x509.Certificate) -> Serial:
    return Serial(_name(one.issuer), one.serial_number)


def _name(name: x509.Name) -> Name:
    return tuple(
        frozenset((said.oid.dotted_string, _folded(said.value)) for said in relative) for relative in name.rdns
    )


def _folded(value: str | bytes) -> str | bytes:
    return " ".join(value.split()).casefold() if isinstance(value, str) else value


def _has_issued(authority: x509.Certificate, one: x509.Certificate) -> bool:
    with suppress(ValueError, TypeError, InvalidSignature):
        one.verify_directly_issued_by(authority)
        return True
    return False


def _read_lists(lists: Path, authorities: Path) -> _Lists:
    """What the lists name. Raises INVALID_CONFIGURATION for one that is none of an authority's, or out of date."""
    known = certificates_in(authorities, bytes_of(authorities))
    parts = bytes_of(lists).split(_END)
    if parts.pop().strip() or not parts:
        raise unusable(lists, "holds no lists of revoked certificates (CRLs) as PEM")
    serials: set[Serial] = set()
    for part in parts:
        try:
            crl = x509.load_pem_x509_crl(part + _END)
            issuer = _name(crl.issuer)
            is_of_others = _is_indirect(crl)
            is_signed = any(_name(one.subject) == issuer and _has_signed(one, crl) for one in known)
            serials.update(Serial(issuer, one.serial_number) for one in crl)
        except ValueError as e:
            raise unusable(lists, "holds something else than lists of revoked certificates (CRLs) as PEM") from e
        if not is_signed:
            raise unusable(lists, f"holds a list that none of the authorities in {authorities} has signed")
        if is_of_others:
            raise unusable(lists, "holds a list that revokes certificates of other authorities (an indirect CRL)")
        if crl.next_update_utc is not None and crl.next_update_utc <= datetime.now(UTC):
            raise unusable(lists, f"holds a list that was to be replaced by {crl.next_update_utc:%Y-%m-%d %H:%M} UTC")
    revoked = [one for one in known if _serial_of(one) in serials]
    return _Lists(
        frozenset(serials),
        tuple(one for one in known if one not in revoked),
        frozenset(_name(one.subject) for one in revoked),
    )


def _has_signed(authority: x509.Certificate, crl: x509.CertificateRevocationList) -> bool:
    with suppress(TypeError, ValueError):  # a key of another kind
        return crl.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
    return False


def _is_indirect(crl: x509.CertificateRevocationList) -> bool:
    with suppress(x509.ExtensionNotFound):
        return crl.extensions.get_extension_for_class(x509.IssuingDistributionPoint).value.indirect_crl
    return False


# -- Who makes a call.

AUTHORIZATION = "authorization"
_SCHEME = "bearer"


def anybody(context: Context) -> Subject:
    """Nobody is asked who they are."""
    return Subject(ANONYMOUS, "nobody", None, context.peer())


EndStreams = Callable[[Callable[[Subject], SeqdedupeError | None]], None]
"""Ends the streams of those for whom what it is given has a reason."""


class Authentication:
    """Who makes each call, as the configuration has it. When what somebody has shown is not valid any more, their
    streams end, with TOKEN_EXPIRED, so that they show what is."""

    def __init__(self, config: Config, end_streams: EndStreams) -> None:
        """Makes the data directory's token if there is none. Raises INVALID_CONFIGURATION; OSError."""
        self.watched: list[Watched[Any]] = []
        """The files that this takes."""
        self._end_streams = end_streams
        self._token: OwnToken | None = None
        if config.authentication == "token":
            self._token = OwnToken(tokens.make(Path(config.data_directory)), self._end("token"))
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

        return lambda: self._end_streams(why)

    def _end_all(self) -> None:
        """Ends all streams: a stream does not say over which certificate it came, and each is judged when it begins."""
        self._end_streams(lambda _: error("TOKEN_EXPIRED", "other certificates are revoked now: show yours again"))


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
    # Not what else is white space: gRPC takes bytes that are not UTF-8 for Latin-1, and they make another token.
    return token.strip(" ").encode()
