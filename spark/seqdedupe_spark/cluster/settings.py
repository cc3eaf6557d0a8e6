"""Which Pulsar cluster is read, and as whom: what travels to every task."""

from dataclasses import dataclass, field

AUTHENTICATIONS = ("AuthenticationToken", "AuthenticationOAuth2")
"""The simple names of those classes of Pulsar's Java client whose credentials are understood."""


@dataclass(frozen=True)
class Cluster:
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


Service = str | Cluster
"""Where messages are read: from the sidecar at an address, or from a cluster's brokers."""
