"""Clients' certificates that their authority has taken back, as its lists (CRLs) say."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from broker_sidecar.security.certificates import bytes_of, certificates_in, name_in, unusable
from broker_sidecar.security.watching import Watched
from seqdedupe.errors import error

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
        self.watched = Watched("the list of revoked certificates", files, lambda: _read(lists, authorities), on_change)

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


def _read(lists: Path, authorities: Path) -> _Lists:
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
