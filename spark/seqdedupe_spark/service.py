"""The server from which messages are read, with the credentials for it: a sidecar, or a cluster's brokers.

A `Service` travels to every task.
"""

from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from seqdedupe.client import blocking
from seqdedupe.client.credentials import Credentials


@dataclass(frozen=True)
class SidecarService:
    """A sidecar, with files by their names in `Credentials`. The driver and each executor read their own files. If a
    name is empty, the environment of each decides."""

    address: str
    """One address, or several with commas between."""
    token_file: str = ""
    tls_ca_file: str = ""
    tls_certificate_file: str = ""
    tls_key_file: str = ""

    def connect(self) -> blocking.Client:
        """Return a client of the sidecar. Raises INVALID_ADDRESS, INVALID_CREDENTIALS."""
        credentials = Credentials.from_environment(
            token_file=self.token_file,
            tls_ca_file=self.tls_ca_file,
            tls_certificate_file=self.tls_certificate_file,
            tls_key_file=self.tls_key_file,
        )
        return blocking.Client(self.address, credentials)


def sidecar_at(service: str | SidecarService) -> SidecarService:
    """Return the sidecar. If only its address is given, the environment has the rest."""
    return SidecarService(service) if isinstance(service, str) else service


def path_of(url: str) -> str | None:
    """Return the path of a URL like file:///path; None for any other URL."""
    parts = urlsplit(url)
    return unquote(parts.path) if parts.scheme == "file" and not parts.netloc and parts.path else None


AUTHENTICATIONS = ("AuthenticationToken", "AuthenticationOAuth2")
"""The simple names of the classes of Pulsar's Java client whose credentials are supported."""


@dataclass(frozen=True)
class PulsarCluster:
    """A Pulsar cluster. `credentials` are never shown: neither by `repr`, nor in an error, a plan or a log."""

    service_url: str
    admin_url: str
    authentication: str = ""
    """One of AUTHENTICATIONS; empty for none."""
    credentials: str = field(default="", repr=False)
    """The credentials for that class: `token:…` or `file:///…`; JSON with `issuerUrl`, `privateKey` and `audience`."""
    trust_certs_path: str = ""
    allows_insecure: bool = False
    verifies_hostname: bool = True
    subscription: str = ""
    """The durable subscription of the job that reads. For it, Pulsar keeps the messages in topics that no sidecar
    writes."""
    tells_keys: bool = False
    """Whether keys of topics that no sidecar writes are read exactly, which can take an admin call for each entry."""


Service = str | SidecarService | PulsarCluster
"""The server from which messages are read: a sidecar, or its address alone, or a cluster's brokers."""
