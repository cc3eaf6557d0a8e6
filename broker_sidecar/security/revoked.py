"""Clients' certificates that their authority has taken back, as its lists (CRLs) say."""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from cryptography import x509

from broker_sidecar.security.certificates import bytes_of, certificates_in, unusable
from broker_sidecar.security.watching import Watched
from seqdedupe.errors import error

CERTIFICATES_KNOWN = 1024
"""So many are not read again with each call of their connections."""

_END = b"-----END X509 CRL-----"


class Serial(NamedTuple):
    """Which certificate it is: who signed it (as DER), and that one's number for it."""

    issuer: bytes
    number: int


class Revoked:
    """The certificates in the lists as they are now. `on_change` is called when there are others."""

    def __init__(self, lists: Path, authorities: Path, on_change: Callable[[], None]) -> None:
        """Raises INVALID_CONFIGURATION."""
        self.watched = Watched(
            "the list of revoked certificates", [lists], lambda: _read(lists, authorities), on_change
        )

    def check(self, peer: Mapping[str, Iterable[bytes]]) -> None:
        """Given what gRPC says of a connection. Raises UNAUTHENTICATED if its certificate was revoked."""
        for pem in peer.get("x509_pem_cert", ()):
            if _serial_of(pem) in self.watched.value:
                raise error("UNAUTHENTICATED", "the client's certificate was revoked by its authority")


@lru_cache(CERTIFICATES_KNOWN)
def _serial_of(pem: bytes) -> Serial:
    certificate = x509.load_pem_x509_certificate(pem)
    return Serial(certificate.issuer.public_bytes(), certificate.serial_number)


def _read(lists: Path, authorities: Path) -> frozenset[Serial]:
    """What the lists name. Raises INVALID_CONFIGURATION for one that is none of an authority's, or out of date."""
    keys = {one.subject: one.public_key() for one in certificates_in(authorities, bytes_of(authorities))}
    parts = bytes_of(lists).split(_END)
    if parts.pop().strip() or not parts:
        raise unusable(lists, "holds no lists of revoked certificates (CRLs) as PEM")
    found: set[Serial] = set()
    for part in parts:
        try:
            crl = x509.load_pem_x509_crl(part + _END)
        except ValueError as e:
            raise unusable(lists, "holds something else than lists of revoked certificates (CRLs) as PEM") from e
        key = keys.get(crl.issuer)
        if key is None or not crl.is_signature_valid(key):  # type: ignore[arg-type]
            raise unusable(lists, f"holds a list that none of the authorities in {authorities} has signed")
        if crl.next_update_utc is not None and crl.next_update_utc <= datetime.now(UTC):
            raise unusable(lists, f"holds a list that was to be replaced by {crl.next_update_utc:%Y-%m-%d %H:%M} UTC")
        issuer = crl.issuer.public_bytes()
        found.update(Serial(issuer, one.serial_number) for one in crl)
    return frozenset(found)
