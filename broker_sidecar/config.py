"""What the sidecar can be told: its keys. `loading` takes them from a file, the environment and flags.

`docs/configuration.md` has the table of keys; a test holds it and this file together.
"""

from dataclasses import dataclass, field

from broker_sidecar.keys import key as _key
from broker_sidecar.keys import keys_of
from broker_sidecar.pulsar_config import PulsarConfig

RETENTION = ("default_retention_size_in_mb", "default_retention_time_in_minutes")


@dataclass(frozen=True, kw_only=True)
class Config:
    """All keys, their defaults and meanings. Names are Pulsar's where it has one."""

    data_directory: str = _key("", "Folder for the store and the logs. Required. One sidecar owns it.")
    backup_directory: str = _key(
        "",
        "Folder in which `seqdedupe backup` makes backups; it has to be there, also later: it is never made, for a "
        "disk that is not mounted. A sidecar that starts without it serves, and warns. Left out: none can be made.",
    )
    listen: str = _key("127.0.0.1:6660", "Where to serve gRPC: `host:port` (port 0: a free one) or `unix:/path`.")
    also_listen: str = _key(
        "",
        "Where to serve gRPC as well: `host:port` where `listen` is a Unix socket, or `unix:/path`. It is advertised "
        "nowhere. Left out: nowhere.",
    )
    allow_insecure_listen: bool = _key(
        False,
        "Listen on an address that is not loopback, though nothing is encrypted, or nobody is asked who they are.",
    )
    authentication: str = _key(
        "token",
        "`token`: every call shows the token in the data directory, or what the keys below accept. `none`: whoever can "
        "connect may do everything.",
    )
    token_keys_file: str = _key("", "Public keys (JWKS) whose holders sign tokens for others, JSON Web Tokens.")
    token_audience: str = _key(
        "", "What these tokens are for: their `aud` has to have it. Needed with `token_keys_file`."
    )
    token_max_lifetime_minutes: int = _key(
        0, "Take only tokens that live at most so many minutes, from their `iat` to their `exp`. 0: no limit."
    )
    tls_certificate_file: str = _key(
        "", "The sidecar's certificate, and those up to its authority, as PEM: TLS is spoken."
    )
    tls_key_file: str = _key("", "The certificate's key, as PEM.")
    tls_client_ca_file: str = _key(
        "", "Authorities, as PEM: every client needs a certificate of one of them, whose SAN says who it is."
    )
    tls_client_crl_file: str = _key(
        "", "Lists (CRLs), as PEM, by which these authorities have revoked certificates: whoever shows one is refused."
    )
    peer_token_file: str = _key(
        "", "A file with the token that those in `peers` and `sidecars` are shown. Workers of one directory need none."
    )
    peer_tls_ca_file: str = _key(
        "",
        "Authorities, as PEM, of other sidecars' certificates. Left out: `tls_client_ca_file`, else the public ones.",
    )
    socket_mode: str = _key("600", "Permissions of the Unix socket, in octal; 660 lets its group in.")
    metrics_listen: str = _key(
        "",
        "Where to serve metrics and a page for people over HTTP: `host:port` (port 0: a free one). Left out: nowhere.",
    )
    audit_file: str = _key(
        "",
        "Write down in this file what operators do, and who is refused. Left out: nowhere. A worker adds its number.",
    )
    log: str = _key(
        "embedded",
        "What holds the messages: `embedded`, the sidecar itself; `pulsar`, a Pulsar cluster; `broker`, a broker that "
        "attaches (`DedupeService`).",
    )
    instance_name: str = _key(
        "", "Whose the producers and subscriptions in Pulsar are: no two sidecars may have one. Left out: a random one."
    )
    workers: int = _key(
        0,
        "So many processes, each with a share of the topics, which are moved if the data directory has another number. "
        "0: as many as it has, in a new one one.",
    )
    shards: str = _key("", "The shards of the topics that this process has, as `0-15`, where others have the rest.")
    peers: str = _key(
        "",
        "The addresses of all processes that have shards, this one too, with commas between. "
        "Without shards: those that topics may be moved to.",
    )
    cluster_id: str = _key("", "Which cluster the shards are of: the same for all processes. Needed with `shards`.")
    advertised_address: str = _key("", "Where clients and other sidecars reach this one. Left out: `listen`.")
    rules_file: str = _key(
        "", "A file of TOML that says who may do what, and how much of the sidecar each may use: docs/rules.md."
    )
    sidecars: str = _key(
        "",
        "The addresses at which the sidecars of a cluster advertise themselves, this one too, and domains as "
        "`*.example.org`, with commas between. A standby follows topics for which it is the first or second of the "
        "addresses. Left out: all topics, and whoever owns one is a sidecar.",
    )
    standby: bool = _key(
        False, "Read along the topics of a cluster that other sidecars own, and take them over as soon as nobody does."
    )
    allow_auto_topic_creation: bool = _key(
        True, "Create a topic when somebody opens a producer on it, or a broker attaches it."
    )
    deduplication_enabled: bool = _key(True, "Whether topics deduplicate.")
    deduplication_entries_interval: int = _key(1000, "Take a snapshot of a topic every so many stored batches.")
    deduplication_snapshot_interval_seconds: int = _key(
        120, "Take a snapshot of a topic with news every so many seconds. 0: not by time."
    )
    default_retention_size_in_mb: int = _key(-1, "Keep at most so many MB of each topic's messages. -1: no limit.")
    default_retention_time_in_minutes: int = _key(-1, "Keep each message so long. -1: no limit.")
    deduplication_producer_inactivity_timeout_minutes: int = _key(
        0, "Forget a producer that nobody has used for so many minutes that the sidecar ran. 0: never."
    )
    deduplication_window_max_messages: int = _key(
        10_000_000, "In topics of deduplication IDs: know a copy until so many messages came after its original."
    )
    deduplication_window_max_bytes: int = _key(
        1_073_741_824, "Or until the IDs that came after it have so many bytes together. -1: no limit."
    )
    deduplication_window_max_minutes: int = _key(-1, "Or until so many minutes after its original came. -1: no limit.")
    deduplication_window_memory_in_mb: int = _key(
        1024, "Of all topics of deduplication IDs together: memory for IDs. What is more lies on disk, and is slower."
    )
    scrub_bytes_per_second: int = _key(
        524_288, "Read all logs again and again in the background, at most so fast, to find damage. 0: not."
    )
    gap_policy: str = _key(
        "allow", "Of a message whose ID is not the one after its producer's last one: `allow` or `reject` it."
    )
    overlap_policy: str = _key(
        "reject", "Of a broker's range that is persisted in part: `reject` it, or answer Dup as `pulsar` does."
    )
    admission_timeout_seconds: int = _key(
        30, "Detach a broker that does not report within so long what became of a message that was new."
    )
    max_topics: int = _key(10_000, "Refuse to create more topics than this.")
    max_streams: int = _key(1_000, "Serve at most so many streams of all kinds at once.")
    drain_timeout_seconds: int = _key(30, "At SIGTERM, wait at most so long for what is in flight.")
    log_level: str = _key("info", "`debug`, `info`, `warning` or `error`.")
    log_format: str = _key("json", "`json` (one object a line) or `text`.")
    pulsar: PulsarConfig = field(default_factory=PulsarConfig)
    retention_was_chosen: bool = False
    """Whether somebody has said how long messages are kept, be it for ever. It is no key."""


KEYS = keys_of(Config)
"""By name, as they are written: `pulsar.service_url` is `service_url` of the table `[pulsar]`."""


def table() -> str:
    """The table of keys for the documentation, in Markdown."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, item in KEYS.items():
        default = str(item.default).lower() if isinstance(item.default, bool) else item.default
        rows.append(f"| `{name}` | {'–' if default == '' else default} | {item.metadata['about']} |")
    return "\n".join(rows)
