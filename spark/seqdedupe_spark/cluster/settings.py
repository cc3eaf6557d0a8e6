"""Which Pulsar cluster is read, and as whom: what travels to every task."""

from dataclasses import dataclass, field

from seqdedupe_spark.session import Sidecar

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
    tells_keys: bool = False
    """Whether keys of topics that no sidecar writes are read exactly, which can take an admin call for each entry."""


Service = str | Sidecar | Cluster
"""Where messages are read: from a sidecar, of which an address may be all that is said, or from a cluster's brokers."""
