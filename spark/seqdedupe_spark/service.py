"""The server from which messages are read, with its credentials: a sidecar, or a cluster's brokers.

Every task receives a `Service`.
"""

from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from seqdedupe.client import blocking
from seqdedupe.client.credentials import Credentials


@dataclass(frozen=True)
class SidecarService:
    """A sidecar, with credential files as in `Credentials`. The driver and each executor read the files on their own
    machine. If a name is empty, the environment of each process determines the file."""

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
    """Return the sidecar. If only an address is given, the credentials come from the environment."""
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
    """The credentials for this class: `token:…` or `file:///…`; or JSON with `issuerUrl`, `privateKey` and
    `audience`."""
    trust_certs_path: str = ""
    allows_insecure: bool = False
    verifies_hostname: bool = True
    subscription: str = ""
    """The durable subscription of the job. In topics that no sidecar writes, Pulsar keeps the messages for this
    subscription."""
    tells_keys: bool = False
    """Whether keys of topics that no sidecar writes are read exactly, which may need an admin call for each entry."""


Service = str | SidecarService | PulsarCluster
"""The server from which messages are read: a sidecar, or its address alone, or a cluster's brokers."""
