"""Authorities and certificates for tests, as files."""

import datetime
import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from seqdedupe.testing import Sidecar

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    """A certificate and its key."""

    certificate_file: Path
    key_file: Path


class Authority:
    """Issues certificates into a folder. `ca_file` is its own."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _name(name)
        self.ca_file = folder / f"{name}.pem"
        builder = _builder(self._subject, self._subject, self._key, NOW - DAY, NOW + DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.ca_file.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))

    def issue(
        self,
        name: str,
        *hosts: str,
        uri: str = "",
        not_before: datetime.datetime = NOW - DAY,
        not_after: datetime.datetime = NOW + DAY,
    ) -> Issued:
        """A certificate for these host names and IP addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(name), self._subject, key, not_before, not_after)
        names: list[x509.GeneralName] = [_host(host) for host in hosts]
        if uri:
            names.append(x509.UniformResourceIdentifier(uri))
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        issued = Issued(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        issued.certificate_file.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        plain = serialization.NoEncryption()
        as_pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        issued.key_file.write_bytes(key.private_bytes(*as_pem, plain))
        return issued


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    not_before: datetime.datetime,
    not_after: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(not_before)
        .not_valid_after(not_after)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


@contextmanager
def guarded_sidecar(folder: Path, authority: Authority) -> Iterator[Sidecar]:
    """A sidecar that asks for its own token, over TLS."""
    own = authority.issue("sidecar", "127.0.0.1")
    with Sidecar(
        folder,
        authentication="token",
        tls_certificate_file=own.certificate_file,
        tls_key_file=own.key_file,
    ) as sidecar:
        yield sidecar
