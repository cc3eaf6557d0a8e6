"""Certificates as an authority gives them out, and bad ones."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

HOST = "127.0.0.1"


class Issued(NamedTuple):
    """PEM: the certificate, and those between it and the authority; and its key."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path) -> None:
        (folder / "certificate.pem").write_bytes(self.certificate)
        (folder / "key.pem").write_bytes(self.key)


def of_server(authority: trustme.CA) -> Issued:
    """For a server on this machine."""
    issued = authority.issue_cert("localhost", HOST)
    chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
    return Issued(chain, issued.private_key_pem.bytes())


def issue(
    authority: trustme.CA,
    *,
    uris: Sequence[str] = (),
    names: Sequence[str] = (),
    begins: timedelta = timedelta(days=-1),
    ends: timedelta = timedelta(days=1),
    key: ec.EllipticCurvePrivateKey | None = None,
    issuer: x509.Name | None = None,
) -> Issued:
    """A certificate with these SANs, valid from and to this long from now. The common name says something else.
    `issuer` is the authority's name in another encoding."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    signs = serialization.load_pem_private_key(authority.private_key_pem.bytes(), None)
    assert isinstance(signs, ec.EllipticCurvePrivateKey)
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "common-name")]))
        .issuer_name(issuer or subject_of(authority))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins)
        .not_valid_after(now + ends)
    )
    alternatives = [*map(x509.UniformResourceIdentifier, uris), *map(x509.DNSName, names)]
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    certificate = builder.sign(signs, hashes.SHA256())
    return Issued(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def subject_of(authority: trustme.CA) -> x509.Name:
    return x509.load_pem_x509_certificate(authority.cert_pem.bytes()).subject


def revoke(
    authority: trustme.CA, *revoked: Issued, ends: timedelta = timedelta(days=1), is_indirect: bool = False
) -> bytes:
    """The authority's list (CRL, as PEM) with these certificates, to be replaced by this long from now. `is_indirect`:
    it may have those of others."""
    signs = serialization.load_pem_private_key(authority.private_key_pem.bytes(), None)
    assert isinstance(signs, ec.EllipticCurvePrivateKey)
    now = datetime.now(UTC)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(subject_of(authority))
        .last_update(min(now, now + ends) - timedelta(hours=1))
        .next_update(now + ends)
    )
    if is_indirect:
        point = x509.IssuingDistributionPoint(
            None, None, False, False, None, indirect_crl=True, only_contains_attribute_certs=False
        )
        builder = builder.add_extension(point, critical=True)
    for one in revoked:
        serial = x509.load_pem_x509_certificate(one.certificate).serial_number
        builder = builder.add_revoked_certificate(
            x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
        )
    return builder.sign(signs, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
