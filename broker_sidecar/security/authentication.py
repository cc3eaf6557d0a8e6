"""Authentication of a caller by its token, or by the certificate of its connection.

`Authentication` combines both, as configured. `Certificates` handles TLS. `Revoked` contains the certificates that
authorities have revoked. Tokens are in `tokens.py`.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
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
from broker_sidecar.security.subject import ANONYMOUS, OPERATOR, RESERVED, Subject, host_of
from broker_sidecar.security.tokens import (
    MAX_SUBJECT_BYTES,
    MAX_SUBJECTS,
    Credential,
    OwnToken,
    SignedTokens,
    Validity,
    can_be_subject,
)
from broker_sidecar.security.watched_files import Watched
from seqdedupe.address import SidecarAddress
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import read_named
from seqdedupe.limits import MIN_RSA_BITS

logger = logging.getLogger("seqdedupe.security")

# -- TLS: the sidecar's certificate, read again when its files change; and the subject of a client's certificate.

MAX_CONNECTION_AGE_SECONDS = 3600
"""The age at which a connection ends, within 10 %. The client must then connect again and present its certificate
again."""

CONNECTION_GRACE_SECONDS = 30
"""After a connection's age limit, calls and streams on it may continue for this time."""

LONGEST_CONNECTION_SECONDS = 1.1 * MAX_CONNECTION_AGE_SECONDS + CONNECTION_GRACE_SECONDS
"""The maximum time since a client presented its certificate. A resumed TLS session is an exception, because TLS does
not verify the certificate again."""

CERTIFICATES_KNOWN = 1024
"""The number of parsed certificates that are cached, so that not every call parses them again."""

_CURVES = ("secp256r1", "secp384r1")
"""The elliptic curves that gRPC supports."""


def connection_age() -> tuple[tuple[str, int], ...]:
    """Return the server options that make connections end."""
    return (
        ("grpc.max_connection_age_ms", MAX_CONNECTION_AGE_SECONDS * 1000),
        ("grpc.max_connection_age_grace_ms", CONNECTION_GRACE_SECONDS * 1000),
    )


def of_certificates(certificates: Iterable[x509.Certificate]) -> Validity:
    """Return the validity of the certificate that expires first. The list must contain at least one certificate."""
    return soonest(
        Validity(one.not_valid_before_utc.timestamp(), one.not_valid_after_utc.timestamp()) for one in certificates
    )


def soonest(validities: Iterable[Validity]) -> Validity:
    """Return the validity that ends first. There must be at least one validity."""
    return min(validities, key=lambda one: one.ends_seconds)


class Certificates:
    """The sidecar's current certificate. If `takes_clients` is true, clients must also present a certificate, issued by
    an authority in `tls_client_ca_file`."""

    def __init__(self, config: Config) -> None:
        """Read the files. Raises INVALID_CONFIGURATION."""
        certificate, key = Path(config.tls_certificate_file), Path(config.tls_key_file)
        authorities = Path(config.tls_client_ca_file) if config.tls_client_ca_file else None
        self.takes_clients = authorities is not None
        files = [certificate, key, *([authorities] if authorities else [])]
        self.watched = Watched("TLS", files, lambda: _read(certificate, key, authorities), self._changed)
        self._first = self.watched.value.configuration
        self._news: grpc.ServerCertificateConfiguration | None = None

    def _changed(self) -> None:
        self._news = self.watched.value.configuration

    def _take_news(self) -> "grpc.ServerCertificateConfiguration | None":
        """Return the new configuration, or None if it has not changed. gRPC calls this at each new connection, in a
        separate thread."""
        news, self._news = self._news, None
        return news

    def check(self, peer: Mapping[str, Iterable[bytes]]) -> None:
        """Check a connection. `peer` is the `auth_context` that gRPC has for the connection.

        Raises UNAUTHENTICATED if the client's certificate expired before the connection can have begun. Without this
        check, a resumed TLS session would be valid for months.
        """
        for pem in peer.get("x509_pem_cert", ()):
            if time.time() >= _end_of(pem) + LONGEST_CONNECTION_SECONDS:
                raise error("UNAUTHENTICATED", "the client's certificate has expired")

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials for a port."""
        fetch: Any = self._take_news
        return grpc.dynamic_ssl_server_credentials(self._first, fetch, self.takes_clients)


def name_in(peer: Mapping[str, Iterable[bytes]]) -> str:
    """Return the subject of a connection's certificate. `peer` is the `auth_context` that gRPC has for the connection.

    The subject is the certificate's only URI, as in SPIFFE, or otherwise its first DNS name. Raises UNAUTHENTICATED."""
    uris, names = list(peer.get("peer_uri", ())), list(peer.get("peer_dns", ()))
    if len(uris) > 1:
        raise error("UNAUTHENTICATED", "the client's certificate has several URIs, so it does not name one client")
    if not uris and not names:
        raise error("UNAUTHENTICATED", "the client's certificate names no client: its SAN has no URI and no DNS name")
    # Bytes that are not UTF-8 become surrogates, which cannot be printed.
    name = (uris or names)[0].decode(errors="surrogateescape")
    if not can_be_subject(name):
        why = f"its SAN is not 1 to {MAX_SUBJECT_BYTES} printable bytes"
        raise error("UNAUTHENTICATED", f"the client's certificate names no client: {why}")
    return name


@lru_cache(CERTIFICATES_KNOWN)
def _end_of(pem: bytes) -> float:
    """Return the end of the certificate's validity as Unix time."""
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()


class _Loaded(NamedTuple):
    """The contents of the TLS files."""

    configuration: grpc.ServerCertificateConfiguration
    own: Validity
    """In the chain of the sidecar's certificate: the validity that ends first."""
    authorities: Validity | None
    """For the authorities of clients: the validity that ends first. None: clients need no certificates."""


def _read(certificate: Path, key: Path, authorities: Path | None) -> _Loaded:
    """Return the contents of the files if they allow a connection. Raises INVALID_CONFIGURATION."""
    chain_pem, key_pem = bytes_of(certificate), bytes_of(key)
    chain = certificates_in(certificate, chain_pem)
    own = chain[0]
    try:
        public = load_pem_private_key(key_pem, None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as e:
        raise unusable(key, "holds no private key that can be read; it must not be encrypted") from e
    if _spki(public) != _spki(own.public_key()):
        raise unusable(certificate, f"does not fit the key in {key}: its first certificate must be the sidecar's own")
    if not _is_taken(public):
        raise unusable(
            key, f"has a key that gRPC does not accept: RSA of {MIN_RSA_BITS} bits, P-256 or P-384 is needed"
        )
    now = datetime.now(UTC)
    if not own.not_valid_before_utc <= now < own.not_valid_after_utc:
        term = f"{own.not_valid_before_utc:%Y-%m-%d %H:%M} to {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        raise unusable(certificate, f"is valid only from {term}")
    authorities_pem = of_authorities = None
    if authorities is not None:
        authorities_pem = bytes_of(authorities)
        of_authorities = of_certificates(certificates_in(authorities, authorities_pem))
    configuration = grpc.ssl_server_certificate_configuration([(key_pem, chain_pem)], authorities_pem)
    return _Loaded(configuration, of_certificates(chain), of_authorities)


def bytes_of(path: Path) -> bytes:
    """Return the contents of the file. Raises INVALID_CONFIGURATION."""
    try:
        return read_named(path)
    except OSError as e:
        raise unusable(path, f"cannot be read: {e.strerror}") from e


def certificates_in(path: Path, pem: bytes) -> list[x509.Certificate]:
    """Return the certificates in the file. Raises INVALID_CONFIGURATION."""
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
    """Return INVALID_CONFIGURATION for a TLS file."""
    hint = "docs/guides/security.md says what the TLS files hold. Replace a certificate and its key together."
    return error("INVALID_CONFIGURATION", f"the file {path} {why}", hint=hint)


# -- Clients' certificates that their authority has revoked, according to its revocation lists (CRLs).

CHAINS_KNOWN = 1024
"""The number of parsed chains that are cached, so that not every call parses them again."""

_END = b"-----END X509 CRL-----"

Name = tuple[frozenset[tuple[str, str | bytes]], ...]
"""An authority's name, independent of encoding, letter case and spaces. TLS compares names in the same way."""


class Serial(NamedTuple):
    """The identity of a certificate: its issuer, and the issuer's number for it."""

    issuer: Name
    number: int


@dataclass(frozen=True)
class _Lists:
    """The contents of the lists."""

    serials: frozenset[Serial]
    authorities: tuple[x509.Certificate, ...]
    """The authorities in the file that are not revoked."""
    revoked_authorities: frozenset[Name]
    """The names of the revoked authorities."""
    validity: Validity | None = field(compare=False)
    """The validity that ends first; None if no list has an end. It is not compared: a renewed list with the same names
    is no change."""

    def has_revoked(self, one: x509.Certificate) -> bool:
        """Return whether a list names the certificate, or its issuer is a revoked authority of the file."""
        if (serial := _serial_of(one)) in self.serials:
            return True
        if serial.issuer not in self.revoked_authorities:
            return False
        # Two authorities may have the same name, for example after an authority has changed its key.
        return not any(_has_issued(authority, one) for authority in self.authorities)


class Revoked:
    """The revoked certificates in the present revocation lists. `on_change` is called when the lists change."""

    def __init__(self, lists: Path, authorities: Path, on_change: Callable[[], None]) -> None:
        """Read the files. Raises INVALID_CONFIGURATION."""
        files = [lists, authorities]
        self.watched = Watched(
            "the list of revoked certificates", files, lambda: _read_lists(lists, authorities), on_change
        )

    def check(self, peer: Mapping[str, Iterable[bytes]]) -> None:
        """Check a connection. `peer` is the `auth_context` that gRPC has for the connection.

        Raises UNAUTHENTICATED if the client's certificate, or another certificate that the client has presented, was
        revoked. One of the presented certificates leads to an authority in the file, as TLS has verified.
        """
        own = b"".join(peer.get("x509_pem_cert", ()))
        shown = own + b"".join(peer.get("x509_pem_cert_chain", ()))
        if not shown:  # a connection over a Unix socket has no certificate
            return
        try:
            is_revoked = any(map(self.watched.value.has_revoked, _chain_in(shown)))
        except ValueError as e:
            raise error("UNAUTHENTICATED", f"the client's certificate cannot be read: {e}") from e
        if is_revoked:
            why = "the client's certificate, or a certificate between it and its authority, was revoked"
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
    """Return the contents of the revocation lists.

    Raises INVALID_CONFIGURATION for a list that is out of date, or that no authority of the file has signed."""
    known = certificates_in(authorities, bytes_of(authorities))
    parts = bytes_of(lists).split(_END)
    if parts.pop().strip() or not parts:
        raise unusable(lists, "holds no lists of revoked certificates (CRLs) as PEM")
    serials: set[Serial] = set()
    validities: list[Validity] = []
    for part in parts:
        try:
            crl = x509.load_pem_x509_crl(part + _END)
            issuer = _name(crl.issuer)
            is_of_others = _is_indirect(crl)
            is_signed = any(_name(one.subject) == issuer and _has_signed(one, crl) for one in known)
            serials.update(Serial(issuer, one.serial_number) for one in crl)
        except ValueError as e:
            raise unusable(lists, "holds other data than lists of revoked certificates (CRLs) as PEM") from e
        if not is_signed:
            raise unusable(lists, f"holds a list that none of the authorities in {authorities} has signed")
        if is_of_others:
            raise unusable(lists, "holds a list that revokes certificates of other authorities (an indirect CRL)")
        if (ends := crl.next_update_utc) is None:
            continue
        if ends <= datetime.now(UTC):
            raise unusable(
                lists, f"holds a list that is out of date: its successor was due by {ends:%Y-%m-%d %H:%M} UTC"
            )
        validities.append(Validity(crl.last_update_utc.timestamp(), ends.timestamp()))
    revoked = [one for one in known if _serial_of(one) in serials]
    return _Lists(
        frozenset(serials),
        tuple(one for one in known if one not in revoked),
        frozenset(_name(one.subject) for one in revoked),
        soonest(validities) if validities else None,
    )


def _has_signed(authority: x509.Certificate, crl: x509.CertificateRevocationList) -> bool:
    with suppress(TypeError, ValueError):  # a key of another kind
        return crl.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
    return False


def _is_indirect(crl: x509.CertificateRevocationList) -> bool:
    with suppress(x509.ExtensionNotFound):
        return crl.extensions.get_extension_for_class(x509.IssuingDistributionPoint).value.indirect_crl
    return False


# -- The subjects that still show expired tokens.

OTHER = "other"
"""The name under which all other subjects with expired tokens are counted together."""

REPEAT_SECONDS = 600.0
"""The least time between two log lines about the same subject with an expired token."""


class ExpiredTokens:
    """Calls with an expired token, by the token's subject.

    A subject counts only if the token's signature was verified. So a caller without a signing key cannot add entries.
    At most `MAX_SUBJECTS` subjects are counted separately. All other subjects are counted as `OTHER`.
    """

    def __init__(self, now_seconds: Callable[[], float] = time.monotonic) -> None:
        self._now_seconds = now_seconds
        self.calls: dict[str, int] = {OTHER: 0}
        """The number of calls by subject. The numbers never decrease."""
        self._logged: dict[str, tuple[float, int]] = {}
        """By subject: the time from which the subject may be logged again, and the number of its calls when it was last
        logged."""

    def add(self, e: SeqdedupeError, address: str) -> None:
        """Count a call that was refused because of an expired token. Log the subject, at most once per
        REPEAT_SECONDS."""
        if e.reason != "TOKEN_EXPIRED" or (subject := e.numbers.get("subject")) is None:
            return
        name = subject if subject in self.calls or len(self.calls) <= MAX_SUBJECTS else OTHER
        calls = self.calls[name] = self.calls.get(name, 0) + 1
        now_seconds = self._now_seconds()
        again_seconds, logged_calls = self._logged.get(name, (now_seconds, 0))
        if now_seconds >= again_seconds:
            self._logged[name] = now_seconds + REPEAT_SECONDS, calls
            told = {"subject": subject, "address": host_of(address), "calls": calls - logged_calls}
            logger.warning("calls are refused: %s [TOKEN_EXPIRED]", e.message, extra=told)


# -- The caller of a call.

AUTHORIZATION = "authorization"
_SCHEME = "bearer"


def anybody(context: Context) -> Subject:
    """Return the anonymous subject, without authentication."""
    return Subject(ANONYMOUS, "nobody", None, context.peer())


EndStreams = Callable[[Callable[[Subject], SeqdedupeError | None]], None]
"""Ends the streams of those subjects for which the given function returns an error."""


class Authentication:
    """Authentication of each call, as configured. When a caller's credential becomes invalid, the caller's streams end
    with TOKEN_EXPIRED. The caller must then present a valid credential."""

    def __init__(self, config: Config, end_streams: EndStreams) -> None:
        """Make the data directory's token if there is none. Raises INVALID_CONFIGURATION; OSError."""
        self.watched: list[Watched[Any]] = []
        """The files that this uses."""
        self.expired = ExpiredTokens()
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
        """Return the caller. Raises UNAUTHENTICATED, TOKEN_EXPIRED."""
        if self._token is None:
            return anybody(context)
        address = context.peer()
        if self._certificates is not None and self._certificates.takes_clients:
            self._certificates.check(context.auth_context())
        if self._revoked is not None:
            # An open connection stays open after a revocation, and a caller may present a token over this connection.
            self._revoked.check(context.auth_context())
        if (token := _token_in(context)) is not None:
            subject = self._by_token(self._token, token, address)
        elif self._takes_certificate_of(context):
            subject = Subject(name_in(context.auth_context()), "certificate", None, address)
        else:
            raise error("UNAUTHENTICATED", "the call shows no token")
        return _check_name(subject)

    def _takes_certificate_of(self, context: Context) -> bool:
        """Return whether the connection required a certificate. A connection over a Unix socket does not."""
        is_wanted = self._certificates is not None and self._certificates.takes_clients
        return is_wanted and "x509_pem_cert" in context.auth_context()

    def of_token(self, token: bytes | None, address: str) -> Subject:
        """Return the subject of a token that was presented outside of gRPC, such as to a web page. Raises the same
        errors as a gRPC call."""
        if self._token is None:
            return Subject(ANONYMOUS, "nobody", None, address)
        if token is None:
            raise error("UNAUTHENTICATED", "no token is shown")
        return _check_name(self._by_token(self._token, token, address))

    def _by_token(self, own: OwnToken, token: bytes, address: str) -> Subject:
        try:
            if own.is_shown(token):
                return Subject(OPERATOR, "token", None, address)
            if self._signed_tokens is None:
                raise error("UNAUTHENTICATED", "the token is not this sidecar's")
            claims = self._signed_tokens.claims_of(token, address, time.time())
        except SeqdedupeError as e:
            self.expired.add(e, address)
            raise
        return Subject(claims.subject, "jwt", claims.expires_at_seconds, address)

    def credentials(self) -> list[Credential]:
        """Return all credentials that can expire: the sidecar's certificate, the authorities of clients, the revocation
        lists, and callers' tokens. May be called from any thread."""
        found: list[tuple[str, Validity | None]] = []
        if self._certificates is not None:
            loaded = self._certificates.watched.value
            found += ("server_certificate", loaded.own), ("client_authority", loaded.authorities)
        if self._revoked is not None:
            found.append(("revocation_list", self._revoked.watched.value.validity))
        credentials = [Credential(kind, "", validity) for kind, validity in found if validity is not None]
        return credentials + (self._signed_tokens.credentials(time.time()) if self._signed_tokens is not None else [])

    def add_port(self, server: grpc.aio.Server, address: SidecarAddress) -> int:
        """Make the server listen at this address, with TLS if configured. Return the port. Raises RuntimeError."""
        if self._certificates is None or address.path:
            return server.add_insecure_port(str(address))
        return server.add_secure_port(str(address), self._certificates.credentials())

    def server_options(self) -> tuple[tuple[str, int], ...]:
        """Return the server options that make connections end, if credentials can become invalid."""
        return () if self._certificates is None and self._signed_tokens is None else connection_age()

    def _end(self, kind: str) -> Callable[[], None]:
        """Return a function that ends the streams of callers with this kind of credential."""

        def why(subject: Subject) -> SeqdedupeError | None:
            return error("TOKEN_EXPIRED", "the sidecar now accepts other tokens") if subject.kind == kind else None

        return lambda: self._end_streams(why)

    def _end_all(self) -> None:
        """End all streams, because a stream does not record the certificate of its connection. Each stream is judged
        again when it begins."""
        self._end_streams(
            lambda _: error("TOKEN_EXPIRED", "the list of revoked certificates has changed: open the stream again")
        )


def _check_name(subject: Subject) -> Subject:
    if subject.name in RESERVED and subject.kind != "token":
        why = f"the name {subject.name!r} is reserved"
        raise error("UNAUTHENTICATED", why, subject=subject.name, kind=subject.kind)
    return subject


def _token_in(context: Context) -> bytes | None:
    """Return the token that a call presents; None if the call has no token. Raises UNAUTHENTICATED."""
    shown = [value for name, value in context.invocation_metadata() or () if name == AUTHORIZATION]
    if not shown:
        return None
    scheme, _, token = str(shown[0]).partition(" ")
    if len(shown) > 1 or scheme.lower() != _SCHEME:
        raise error("UNAUTHENTICATED", f"the call's metadata {AUTHORIZATION} must be one token, as `Bearer TOKEN`")
    # Strip spaces only. gRPC decodes bytes that are not UTF-8 as Latin-1; other white space is part of the token.
    return token.strip(" ").encode()
