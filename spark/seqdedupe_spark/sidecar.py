"""Which sidecar is read, and what it is shown: what travels to every task. It has no secret in it."""

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from seqdedupe.client import blocking
from seqdedupe.client.credentials import Credentials


@dataclass(frozen=True)
class Sidecar:
    """Files by their names in `Credentials`; the driver and every executor read their own. Empty: what the environment
    of each says."""

    address: str
    """One address, or several with commas between."""
    token_file: str = ""
    tls_ca_file: str = ""
    tls_certificate_file: str = ""
    tls_key_file: str = ""

    def connect(self) -> blocking.Client:
        """A client of it. Raises INVALID_ADDRESS, INVALID_CREDENTIALS."""
        credentials = Credentials.from_environment(
            token_file=self.token_file,
            tls_ca_file=self.tls_ca_file,
            tls_certificate_file=self.tls_certificate_file,
            tls_key_file=self.tls_key_file,
        )
        return blocking.Client(self.address, credentials)


def sidecar_at(service: str | Sidecar) -> Sidecar:
    """An address alone is that of a sidecar of which the environment says the rest."""
    return Sidecar(service) if isinstance(service, str) else service


def path_of(url: str) -> str | None:
    """The path of a URL like file:///path; None if this is none."""
    parts = urlsplit(url)
    return unquote(parts.path) if parts.scheme == "file" and not parts.netloc and parts.path else None


def url_of(path: str | os.PathLike[str]) -> str:
    """The URL of a file, from where this process is."""
    return Path(path).absolute().as_uri()
