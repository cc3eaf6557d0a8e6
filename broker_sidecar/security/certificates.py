"""TLS: the sidecar's certificate, read again when its files change; and whose a client's certificate is."""

import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from broker_sidecar.config import Config
from broker_sidecar.security.subject import MAX_NAME_BYTES, can_be_name
from broker_sidecar.security.watching import Watched
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.limits import MIN_RSA_BITS

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
        return path.read_bytes()
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
    hint = "docs/security.md says what the TLS files hold. A certificate and its key are replaced together."
    return error("INVALID_CONFIGURATION", f"the file {path} {why}", hint=hint)
