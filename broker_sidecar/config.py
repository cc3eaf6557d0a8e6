"""What the sidecar can be told: a TOML file, `SEQDEDUPE_*` in the environment, and flags; the later one wins.

`docs/configuration.md` has the table of keys; a test holds it and this file together.
"""

import difflib
import os
import re
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from broker_sidecar.keys import environment_of, invalid, keys_of
from broker_sidecar.keys import key as _key
from broker_sidecar.pulsar_config import PulsarConfig
from seqdedupe.address import SidecarAddress
from seqdedupe.client.sidecars import Sidecars
from seqdedupe.errors import ConfigurationError, SeqdedupeError, error
from seqdedupe.shards import from_text
from seqdedupe.store.directories import CLUSTER_ID, MAX_WORKERS
from seqdedupe.topic import policy

ENVIRONMENT_PREFIX = "SEQDEDUPE_"
NO_KEYS = frozenset(
    f"{ENVIRONMENT_PREFIX}{name}"
    for name in (
        "ADDRESS", "TOKEN", "TOKEN_FILE", "TLS_CA_FILE", "TLS_CERTIFICATE_FILE", "TLS_KEY_FILE", "ALLOW_INSECURE_TOKEN"
    )
)  # fmt: skip
"""Of clients: where the sidecar is, and what they show it."""


_WORDS = {
    "authentication": ("token", "none"),
    "log": ("embedded", "pulsar", "broker"),
    "gap_policy": ("allow", "reject"),
    "overlap_policy": ("reject", "pulsar"),
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("json", "text"),
}
"""What the keys may say that take one of a few words."""

RETENTION = ("default_retention_size_in_mb", "default_retention_time_in_minutes")

_OF_POLICIES = {
    f"default_{name}" if name.startswith("retention_") else name: least for name, least in policy.LEAST.items()
}
"""Keys that a policy has too, with its bounds, and their least values."""

_LEAST = {**_OF_POLICIES, "admission_timeout_seconds": 1, "max_topics": 1, "max_streams": 1}
"""Of all other numbers it is 0."""

_NEEDED = {bool: "true or false", int: "a whole number", str: "text in quotes"}

_INSTANCE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_EVERYWHERE = ("0.0.0.0", "[::]", "*")
"""Hosts to listen on that are no host to connect to."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All keys, their defaults and meanings. Names are Pulsar's where it has one."""

    data_directory: str = _key("", "Folder for the store and the logs. Required. One sidecar owns it.")
    backup_directory: str = _key(
        "", "Folder in which `seqdedupe backup` makes backups; it has to be there. Left out: none can be made."
    )
    listen: str = _key("127.0.0.1:6660", "Where to serve gRPC: `host:port` (port 0: a free one) or `unix:/path`.")
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
    tls_certificate_file: str = _key(
        "", "The sidecar's certificate, and those up to its authority, as PEM: TLS is spoken."
    )
    tls_key_file: str = _key("", "The certificate's key, as PEM.")
    tls_client_ca_file: str = _key(
        "", "Authorities, as PEM: every client needs a certificate of one of them, whose SAN says who it is."
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
    peers: str = _key("", "The addresses of all processes that have shards, this one too, with commas between.")
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
    default_retention_size_in_mb: int = _key(-1, "Keep at most so many MB of each topic's log. -1: no limit.")
    default_retention_time_in_minutes: int = _key(-1, "Keep each message so long. -1: no limit.")
    deduplication_producer_inactivity_timeout_minutes: int = _key(
        0, "Forget a producer that nobody has used for so many minutes that the sidecar ran. 0: never."
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

    def check(self) -> "Config":
        """Raises INVALID_CONFIGURATION or INSECURE_LISTEN."""
        if not self.data_directory:
            raise invalid("data_directory", "is required")
        for name in KEYS:
            value, least = attrgetter(name)(self), _LEAST.get(name, 0)
            if isinstance(value, int) and value < least:
                raise invalid(name, f"is {value}: at least {least} is needed")
            if name in _OF_POLICIES and value > policy.LARGEST:
                raise invalid(name, f"is {value}: at most {policy.LARGEST} is possible")
        for key, words in _WORDS.items():
            if getattr(self, key) not in words:
                *others, last = words
                raise invalid(key, f"is {getattr(self, key)!r}: it should be {', '.join(others)} or {last}")
        if not re.fullmatch("0?[0-7]{3}", self.socket_mode):
            raise invalid("socket_mode", f"is {self.socket_mode!r}: it should be three octal digits, like 660")
        self._check_authentication()
        self._check_listen()
        self._check_metrics_listen()
        self._check_advertised()
        self._check_sidecars()
        self._check_shards()
        if self.instance_name and not _INSTANCE_NAME.fullmatch(self.instance_name):
            raise invalid(
                "instance_name",
                f"is {self.instance_name!r}: it should be 1 to 64 ASCII letters, digits and any of ._-",
            )
        if self.log == "pulsar":
            self.pulsar.check()
            for name in RETENTION:
                if getattr(self, name) != policy.NO_LIMIT:
                    raise invalid(name, "has no effect with log = 'pulsar': retention is that of the Pulsar topics")
        return self

    def _check_listen(self) -> None:
        try:
            address = SidecarAddress.parse(self.listen)
        except SeqdedupeError as e:
            raise invalid("listen", f"is {self.listen!r}: it should be host:port or unix:/path") from e
        if address.path and self.tls_certificate_file:
            raise invalid(
                "tls_certificate_file", f"has no use with listen = {self.listen!r}: sockets are not encrypted"
            )
        is_open = "nothing is encrypted" if not self.tls_certificate_file else "nobody is asked who they are"
        is_secure = self.tls_certificate_file and self.authentication != "none"
        if not (address.is_local or is_secure or self.allow_insecure_listen):
            why = f"listen = {self.listen!r} can be reached from other machines, and {is_open}"
            raise error("INSECURE_LISTEN", why, key="listen")

    def _check_authentication(self) -> None:
        """Of keys that go together, and of those that contradict each other."""
        for name, other in (
            ("token_keys_file", "token_audience"),
            ("token_audience", "token_keys_file"),
            ("tls_certificate_file", "tls_key_file"),
            ("tls_key_file", "tls_certificate_file"),
            ("tls_client_ca_file", "tls_certificate_file"),
            ("peer_tls_ca_file", "tls_certificate_file"),
        ):
            if getattr(self, name) and not getattr(self, other):
                raise invalid(other, f"is needed with {name}")
        if self.peer_token_file and not (self.peers or self.sidecars):
            raise invalid("peer_token_file", "has no use without peers or sidecars: to no others the token goes")
        for name in ("token_keys_file", "tls_client_ca_file", "rules_file"):
            if getattr(self, name) and self.authentication == "none":
                raise invalid("authentication", f"is 'none': nobody is asked who they are, and {name} has no use")
            if getattr(self, name) and not self.rules_file:
                raise invalid("rules_file", f"is needed with {name}: whoever shows one may do nothing else")

    def _check_metrics_listen(self) -> None:
        if not self.metrics_listen:
            return
        why = f"is {self.metrics_listen!r}: it should be host:port"
        try:
            address = SidecarAddress.parse(self.metrics_listen)
        except SeqdedupeError as e:
            raise invalid("metrics_listen", why) from e
        if address.path:
            raise invalid("metrics_listen", why)
        if not address.is_local and not self.allow_insecure_listen:
            raise error(
                "INSECURE_LISTEN",
                f"metrics_listen = {self.metrics_listen!r} can be reached from other machines, and nothing is "
                "encrypted there, and nobody is asked who they are",
                key="metrics_listen",
            )

    def _check_sidecars(self) -> None:
        if not self.sidecars:
            return
        try:
            among = Sidecars.parse(self.sidecars)
        except SeqdedupeError as e:
            raise invalid("sidecars", f"is {self.sidecars!r}: {e.message}") from e
        own = SidecarAddress.parse(self.advertised_address or self.listen)
        if self.standby and own not in among.addresses:
            raise invalid("sidecars", f"is {self.sidecars!r}: {own}, at which this one is reached, is not among them")

    def _check_shards(self) -> None:
        if self.workers > MAX_WORKERS:
            raise invalid("workers", f"is {self.workers}: at most {MAX_WORKERS} are possible")
        for name in ("workers", "shards", "peers"):
            value = getattr(self, name)
            if self.log != "embedded" and value not in (0, 1, ""):
                raise invalid(name, f"is {value!r}: only topics on the sidecar's own log are spread over processes")
            if name != "workers" and value and self.workers > 1:
                raise invalid(name, f"is {value!r}: each of several workers is given its own")
        try:
            _ = from_text(self.shards) if self.shards else None
        except SeqdedupeError as e:
            raise invalid("shards", f"is {self.shards!r}: {e.message}") from e
        try:
            _ = Sidecars.parse(self.peers) if self.peers else None
        except SeqdedupeError as e:
            raise invalid("peers", f"is {self.peers!r}: {e.message}") from e
        if self.shards and not self.cluster_id:
            raise invalid("cluster_id", "is needed with shards: any name, the same for all processes")
        if self.cluster_id and not CLUSTER_ID.fullmatch(self.cluster_id):
            what = "it should be 1 to 64 ASCII letters, digits and any of ._-"
            raise invalid("cluster_id", f"is {self.cluster_id!r}: {what}")

    def _check_advertised(self) -> None:
        if not self.advertised_address:
            host = SidecarAddress.parse(self.listen).host
            if (self.log == "pulsar" or self.workers > 1) and host in _EVERYWHERE:
                raise invalid("advertised_address", f"is needed: with listen = {self.listen!r} nobody knows where")
            return
        try:
            address = SidecarAddress.parse(self.advertised_address)
        except SeqdedupeError as e:
            raise invalid(
                "advertised_address", f"is {self.advertised_address!r}: it should be host:port or unix:/path"
            ) from e
        if address.host in _EVERYWHERE or not (address.port or address.path):
            raise invalid("advertised_address", f"is {self.advertised_address!r}: nobody can connect to that")


KEYS = keys_of(Config)
"""By name, as they are written: `pulsar.service_url` is `service_url` of the table `[pulsar]`."""
_BY_ENVIRONMENT = {environment_of(name): name for name in KEYS}


def _convert(name: str, value: Any) -> Any:
    """A value from a file, the environment or a flag, as the key's type."""
    kind = type(KEYS[name].default)
    if kind is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    if kind is int and isinstance(value, str):
        try:
            return int(value)
        except ValueError as e:
            raise invalid(name, f"is {shown}: {_NEEDED[kind]} is needed") from e
    if type(value) is not kind:
        raise invalid(name, f"is {shown}: {_NEEDED[kind]} is needed")
    return value


def load(file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]) -> Config:
    """The configuration from a TOML file, the environment and flags by key (None: not given).

    Raises INVALID_CONFIGURATION.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if file is not None:
        values |= _in_file(file)
        sources |= dict.fromkeys(values, f"the file {file}")
    for variable, value in environment.items():
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in NO_KEYS:
            name = _BY_ENVIRONMENT.get(variable) or variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            values[name], sources[name] = value, f"{variable} in the environment"
    for name, value in flags.items():
        if value is not None:
            values[name], sources[name] = value, "a flag"
    try:
        return _checked(values)
    except ConfigurationError as e:
        name = e.numbers.get("key", "")
        if name not in sources:
            raise
        raise error(e.reason, f"{e.message} (given by {sources[name]})", key=name) from e


def _in_file(file: Path) -> dict[str, Any]:
    """The values of a TOML file, by key."""
    try:
        tables = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise error("INVALID_CONFIGURATION", f"the configuration file {file} cannot be read: {why}") from e
    found: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, dict) and name not in KEYS:
            found |= {f"{name}.{within}": inner for within, inner in value.items()}
        else:
            found[name] = value
    for name in found.keys() & KEYS.keys():
        if KEYS[name].metadata["is_secret"]:
            where = f"may stand in no file of the configuration, but in the environment: {environment_of(name)}"
            raise error("INVALID_CONFIGURATION", f"{name} {where} (given by the file {file})", key=name)
    return found


def _checked(values: Mapping[str, Any]) -> Config:
    tables: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in values.items():
        if name not in KEYS:
            near = difflib.get_close_matches(name, KEYS, 1)
            raise invalid(name, "is no key of the configuration" + (f": do you mean {near[0]}?" if near else ""))
        table, _, within = name.rpartition(".")
        tables[table][within] = _convert(name, value)
    chosen = any(name in values for name in RETENTION)
    pulsar = PulsarConfig(**tables["pulsar"])
    return Config(**tables[""], pulsar=pulsar, retention_was_chosen=chosen).check()


def from_process(file: Path | None, flags: Mapping[str, Any]) -> Config:
    """`load` with this process's environment."""
    return load(file, os.environ, flags)


def table() -> str:
    """The table of keys for the documentation, in Markdown."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, item in KEYS.items():
        default = str(item.default).lower() if isinstance(item.default, bool) else item.default
        rows.append(f"| `{name}` | {'–' if default == '' else default} | {item.metadata['about']} |")
    return "\n".join(rows)
