"""Where messages are read, and what a server is shown there: from a sidecar, or straight from a cluster's brokers.

A `Service` travels to every task.
"""

from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from seqdedupe.client import blocking
from seqdedupe.client.credentials import Credentials


@dataclass(frozen=True)
class SidecarService:
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


def sidecar_at(service: str | SidecarService) -> SidecarService:
    """An address alone is that of a sidecar of which the environment says the rest."""
    return SidecarService(service) if isinstance(service, str) else service


def path_of(url: str) -> str | None:
    """The path of a URL like file:///path; None if this is none."""
    parts = urlsplit(url)
    return unquote(parts.path) if parts.scheme == "file" and not parts.netloc and parts.path else None


AUTHENTICATIONS = ("AuthenticationToken", "AuthenticationOAuth2")
"""The simple names of those classes of Pulsar's Java client whose credentials are understood."""


@dataclass(frozen=True)
class PulsarCluster:
    """`credentials` are never shown: neither by `repr`, nor in an error, a plan or a log."""

    service_url: str
    admin_url: str
    authentication: str = ""
    """One of AUTHENTICATIONS; empty for none."""
    credentials: str = field(default="", repr=False)
    """What that class takes: `token:…` or `file:///…`; JSON with `issuerUrl`, `privateKey` and `audience`."""
    trust_certs_path: str = ""
    allows_insecure: bool = False
    verifies_hostname: bool = True
    subscription: str = ""
    """The durable one of the job that reads: for it Pulsar keeps what stands in topics that no sidecar writes."""
    tells_keys: bool = False
    """Whether keys of topics that no sidecar writes are read exactly, which can take an admin call for each entry."""


Service = str | SidecarService | PulsarCluster
"""Where messages are read: from a sidecar, of which an address may be all that is said, or from a cluster's brokers."""
