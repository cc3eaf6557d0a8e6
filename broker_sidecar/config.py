"""The sidecar's configuration: all keys, the checks of their values, and the sources of values.

`Config` contains all keys, and `PulsarConfig` the keys of the table `[pulsar]`. `check` finds values that contradict
each other, and values that require a value for a second key. `load` takes values from a TOML file, from `SEQDEDUPE_*`
in the environment, and from flags. To add a key, add a field, and add its bounds to `check`.
`docs/reference/configuration.md` contains the table of keys, which a test compares with this file.
"""

import difflib
import os
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from itertools import combinations
from operator import attrgetter
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from seqdedupe.address import MAX_PORT, SidecarAddress
from seqdedupe.client.credentials import VARIABLES
from seqdedupe.client.route import Sidecars
from seqdedupe.errors import ConfigurationError, SeqdedupeError, error
from seqdedupe.files import read_named
from seqdedupe.limits import MIN_WINDOW_MEMORY_IN_MB
from seqdedupe.names import from_text, namespace_name
from seqdedupe.store.directories import CLUSTER_ID, MAX_WORKERS
from seqdedupe.topic import policy

# -- A key of the configuration: a field of a dataclass, with its default and its meaning.

ENVIRONMENT_PREFIX = "SEQDEDUPE_"


def key(default: Any, about: str) -> Any:
    """Return a field that is a key. No key contains a secret: keys contain the names of files with secrets."""
    return field(default=default, metadata={"about": about})


def keys_of(config: type, prefix: str = "") -> dict[str, Field[Any]]:
    """Return all keys by name. A key of a table (a nested dataclass) has the table's name as a prefix:
    `pulsar.admin_url`."""
    found: dict[str, Field[Any]] = {}
    for item in fields(config):
        if "about" in item.metadata:
            found[prefix + item.name] = item
        elif item.default_factory is not MISSING:
            found |= keys_of(cast(type, item.default_factory), f"{item.name}.")
    return found


def flag_of(name: str) -> str:
    """Return the flag of a key."""
    return "--" + name.replace("_", "-").replace(".", "-")


def environment_of(name: str) -> str:
    """Return the name of a key in the environment."""
    return ENVIRONMENT_PREFIX + name.replace(".", "_").upper()


Problems = Iterator[SeqdedupeError]
"""The problems of some keys. A start reports the first problem, and a check reports all problems."""


def invalid(name: str, why: str) -> SeqdedupeError:
    """Return the error of a key with an invalid value."""
    return error("INVALID_CONFIGURATION", f"{name} {why}", key=name)


# -- The keys of the configuration that begin with `pulsar.`: the cluster that holds the logs, if `log = "pulsar"`.

_SERVICE_URL = re.compile(r"pulsar(\+ssl)?://[^\s/@,]+(,[^\s/@,]+)*/?")
_ENTRY_FORMATS = ("native", "plain", "packed")
_COMPRESSIONS = ("none", "lz4", "zlib", "zstd", "snappy")


@dataclass(frozen=True, kw_only=True)
class PulsarConfig:
    """All keys of the table `[pulsar]`. The keys about TLS have the names of Pulsar's `client.conf`."""

    service_url: str = key("", "URL of Pulsar's brokers: `pulsar://host:6650` or `pulsar+ssl://host:6651`.")
    admin_url: str = key("", "URL of Pulsar's admin API: `http://host:8080` or `https://host:8443`.")
    namespaces: str = key("public/default", "Namespaces with topics of sidecars, separated by commas.")
    manage_topic_policies: bool = key(
        False, "Replace a topic's unsafe policies in Pulsar instead of refusing the topic."
    )
    entry_format: str = key(
        "native",
        "Format of new topics. `native`: batches of Pulsar's. `plain`: an entry per message. `packed`: one per batch.",
    )
    compression: str = key(
        "none",
        "Compression of `native` entries: `none`, `lz4`, `zlib`, `zstd` or `snappy`. Stock producers choose their own.",
    )
    serve_consumers: bool = key(
        False, "Pass Pulsar consumers at `pulsar_listen` to the brokers, with each client's own token."
    )
    token_file: str = key("", "File with the token for Pulsar.")
    oauth2_issuer_url: str = key("", "Issuer of tokens for Pulsar (OAuth 2.0, client credentials).")
    oauth2_credentials_file: str = key("", "JSON file with `client_id` and `client_secret`.")
    oauth2_audience: str = key("", "Audience of the tokens, if the issuer needs an audience.")
    tls_trust_certs_file_path: str = key("", "PEM file with the brokers' authorities. Unset: the system's authorities.")
    tls_enable_hostname_verification: bool = key(
        True, "Whether a broker's certificate must contain the broker's host name."
    )

    @property
    def has_oauth2(self) -> bool:
        return bool(self.oauth2_issuer_url or self.oauth2_credentials_file or self.oauth2_audience)

    @property
    def namespace_names(self) -> list[str]:
        return [name.strip() for name in self.namespaces.split(",")]

    def problems(self) -> Problems:
        """Return the problems, if the sidecar's log is Pulsar."""
        for name, url in (("service_url", self.service_url), ("admin_url", self.admin_url)):
            if not url:
                yield invalid(f"pulsar.{name}", "is missing: with log = pulsar both URLs are needed")
        # A URL may contain a password, so it is not shown.
        if self.service_url and not _SERVICE_URL.fullmatch(self.service_url):
            yield invalid("pulsar.service_url", "should be like pulsar://host:6650 or pulsar+ssl://host:6651")
        if self.admin_url:
            yield from _check_http("pulsar.admin_url", self.admin_url, ("http", "https"))
        try:
            for name in self.namespace_names:
                namespace_name(name)
        except SeqdedupeError as e:
            yield invalid("pulsar.namespaces", f"is {self.namespaces!r}: {e.message}")
        if self.entry_format not in _ENTRY_FORMATS:
            yield invalid("pulsar.entry_format", f"is {self.entry_format!r}: it should be native, plain or packed")
        if self.compression not in _COMPRESSIONS:
            why = f"is {self.compression!r}: it should be none, lz4, zlib, zstd or snappy"
            yield invalid("pulsar.compression", why)
        yield from self._check_credentials()
        yield from _check_file("pulsar.tls_trust_certs_file_path", self.tls_trust_certs_file_path)

    def _check_credentials(self) -> Problems:
        if self.token_file and self.has_oauth2:
            yield invalid("pulsar.oauth2_issuer_url", "is given together with pulsar.token_file: give only one of them")
        yield from _check_file("pulsar.token_file", self.token_file)
        if self.has_oauth2:
            yield from _check_http("pulsar.oauth2_issuer_url", self.oauth2_issuer_url, ("https", "http"))
            if not self.oauth2_credentials_file:
                yield invalid("pulsar.oauth2_credentials_file", "is needed with pulsar.oauth2_issuer_url")
            yield from _check_file("pulsar.oauth2_credentials_file", self.oauth2_credentials_file)


def _check_http(name: str, url: str, schemes: tuple[str, ...]) -> Problems:
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in schemes and bool(parts.hostname) and parts.username is None and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        yield invalid(name, "should be like http://host:8080 or https://host, without a user")


def _check_file(name: str, path: str) -> Problems:
    if path and not (os.path.isfile(path) and os.access(path, os.R_OK)):
        yield invalid(name, f"is {path!r}: the file does not exist, or cannot be read")


# -- All keys.

RETENTION = ("default_retention_size_in_mb", "default_retention_time_in_minutes")


@dataclass(frozen=True, kw_only=True)
class Config:
    """All keys, their defaults and meanings. If Pulsar has a name for a key, the key has Pulsar's name."""

    data_directory: str = key("", "Folder for the store and the logs. Required.")
    backup_directory: str = key("", "Existing folder for `seqdedupe backup`. Unset: no backups.")
    listen: str = key(
        "127.0.0.1:6660", "Address of the gRPC server: `host:port` (port 0: any free port) or `unix:/path`."
    )
    also_listen: str = key(
        "", "A second address, which is not advertised. `listen` or `also_listen` must be a Unix socket."
    )
    allow_insecure_listen: bool = key(
        False, "Allow addresses other than loopback without encryption or authentication."
    )
    authentication: str = key(
        "token",
        "`token`: every call needs the data directory's token, or credentials by the keys below. "
        "`none`: every caller may do everything.",
    )
    token_keys_file: str = key("", "File of public keys (JWKS) that verify JSON Web Tokens.")
    token_audience: str = key("", "Value that `aud` of a JSON Web Token must have. Required with `token_keys_file`.")
    token_max_lifetime_minutes: int = key(0, "Longest time from `iat` to `exp` of a JSON Web Token. 0: no limit.")
    tls_certificate_file: str = key("", "PEM file with the sidecar's certificate chain. Turns on TLS.")
    tls_key_file: str = key("", "PEM file with the certificate's private key.")
    tls_client_ca_file: str = key(
        "", "PEM file of authorities. Every client needs a certificate from them; the SAN is the client's name."
    )
    tls_client_crl_file: str = key("", "PEM file with these authorities' revocation lists (CRLs).")
    peer_token_file: str = key("", "File with the token for calls to `peers`. Not needed for workers.")
    peer_tls_ca_file: str = key(
        "", "PEM file with authorities of other sidecars. Unset: `tls_client_ca_file`, else public authorities."
    )
    socket_mode: str = key("600", "Permissions of the Unix socket, in octal. 660: the socket's group can connect.")
    metrics_listen: str = key("", "Address of metrics and status page: `host:port`. Unset: not served.")
    pulsar_listen: str = key("", "Address for stock producers of Apache Pulsar: `host:port`. Unset: not served.")
    advertised_pulsar_address: str = key(
        "", "Address by which Pulsar clients reach `pulsar_listen`, for redirects. Unset: `pulsar_listen`."
    )
    audit_file: str = key("", "File of the audit trail. Unset: no trail. A worker adds its number to the name.")
    log: str = key(
        "embedded",
        "Where messages are stored. `embedded`: here. `pulsar`: in a cluster. `broker`: in an attached broker.",
    )
    instance_name: str = key("", "This sidecar's unique name in a Pulsar cluster. Unset: a random name.")
    workers: int = key(
        0, "Number of processes. Another number moves topics. 0: the number in the data directory, else 1."
    )
    shards: str = key("", "Shards of this process, such as `0-15`, if other processes have the other shards.")
    peers: str = key(
        "", "Addresses of sidecars that this sidecar may call, with commas: docs/reference/configuration.md."
    )
    cluster_id: str = key("", "Name of the cluster, the same for all its processes. Required with `shards`.")
    advertised_address: str = key(
        "", "Address by which clients and other sidecars reach this sidecar. Unset: `listen`."
    )
    rules_file: str = key("", "TOML file with access rules and each caller's share: docs/reference/rules.md.")
    standby: bool = key(False, "Follow other sidecars' topics, and take over topics without an owner.")
    allow_auto_topic_creation: bool = key(True, "Create missing topics for producers and attaching brokers.")
    deduplication_entries_interval: int = key(
        1000, "Number of batches of a topic after which the sidecar takes a snapshot."
    )
    deduplication_snapshot_interval_seconds: int = key(
        120, "Seconds after a change until the sidecar takes a snapshot. 0: no limit."
    )
    default_retention_size_in_mb: int = key(-1, "MB of messages that each topic keeps. -1: no limit.")
    default_retention_time_in_minutes: int = key(-1, "Minutes for which each message is kept. -1: no limit.")
    deduplication_producer_inactivity_timeout_minutes: int = key(
        0, "Minutes after which an unused producer is forgotten. 0: never."
    )
    deduplication_window_memory_in_mb: int = key(
        1024, "Memory for deduplication IDs. IDs that do not fit are on disk, which is slower."
    )
    scrub_bytes_per_second: int = key(524_288, "Speed at which the sidecar reads all logs to find damage. 0: off.")
    max_topics: int = key(10_000, "Largest number of topics.")
    max_streams: int = key(1_000, "Largest number of open streams.")
    drain_timeout_seconds: int = key(30, "Longest time after SIGTERM for finishing messages in flight.")
    log_level: str = key("info", "`debug`, `info`, `warning` or `error`.")
    log_format: str = key("json", "`json` (one object per line) or `text`.")
    pulsar: PulsarConfig = field(default_factory=PulsarConfig)
    retention_was_chosen: bool = False
    """Whether an operator has set how long messages are kept, even if that is for ever. This field is not a key."""


KEYS = keys_of(Config)
"""The keys by name as written in the file: `pulsar.service_url` is `service_url` of the table `[pulsar]`."""


def table() -> str:
    """Return the table of keys for the documentation, in Markdown."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, item in KEYS.items():
        default = str(item.default).lower() if isinstance(item.default, bool) else item.default
        rows.append(f"| `{name}` | {'–' if default == '' else default} | {item.metadata['about']} |")
    return "\n".join(rows)


# -- Invalid configurations: bad values of a single key, and keys that contradict each other or lack another one.

_WORDS = {
    "authentication": ("token", "none"),
    "log": ("embedded", "pulsar", "broker"),
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("json", "text"),
}
"""The words that these keys may have as values."""

_OF_POLICIES = {
    f"default_{name}" if name.startswith("retention_") else name: least for name, least in policy.LEAST.items()
}
"""The keys that are also values of a policy, with the same bounds, and their minimum."""

_LEAST = {
    **_OF_POLICIES,
    "deduplication_window_memory_in_mb": MIN_WINDOW_MEMORY_IN_MB,
    "max_topics": 1,
    "max_streams": 1,
}
"""The minimum of these keys. The minimum of all other numbers is 0."""

_NEEDS = (
    ("token_keys_file", "token_audience"),
    ("token_audience", "token_keys_file"),
    ("token_max_lifetime_minutes", "token_keys_file"),
    ("tls_certificate_file", "tls_key_file"),
    ("tls_key_file", "tls_certificate_file"),
    ("tls_client_ca_file", "tls_certificate_file"),
    ("tls_client_crl_file", "tls_client_ca_file"),
    ("peer_tls_ca_file", "tls_certificate_file"),
)
"""Pairs of keys: the first has no use without the second."""

_SOCKET_MODE = re.compile(r"0?[0-7]{3}")
_INSTANCE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

LISTENING = ("listen", "also_listen", "metrics_listen", "pulsar_listen")
"""The keys with addresses at which the sidecar listens."""
_ADVERTISED = ("advertised_address", "advertised_pulsar_address")
_MAY_BE_SOCKETS = ("listen", "also_listen", "advertised_address")


def problems_of(config: Config) -> Problems:
    """Yield all problems, each INVALID_CONFIGURATION or INSECURE_LISTEN."""
    told: set[str] = set()
    for look in _CHECKS:
        try:
            for problem in look(config):
                told.add(str(problem))
                yield problem
        except SeqdedupeError as e:  # the address is invalid, and several checks need it
            if str(e) not in told:
                told.add(str(e))
                yield e


def check(config: Config) -> None:
    """Raise the first of `problems_of`."""
    for problem in problems_of(config):
        raise problem


def _check_values(config: Config) -> Problems:
    """Yield the problems of each key alone."""
    if not config.data_directory:
        yield invalid("data_directory", "is required")
    for name in KEYS:
        value, least = attrgetter(name)(config), _LEAST.get(name, 0)
        if isinstance(value, int) and value < least:
            yield invalid(name, f"is {value}: at least {least} is needed")
        if name in _OF_POLICIES and value > policy.LARGEST:
            yield invalid(name, f"is {value}: at most {policy.LARGEST} is possible")
    for key, words in _WORDS.items():
        if getattr(config, key) not in words:
            *others, last = words
            yield invalid(key, f"is {getattr(config, key)!r}: it should be {', '.join(others)} or {last}")
    yield from _check_pattern(config, "instance_name", _INSTANCE_NAME)
    if not _SOCKET_MODE.fullmatch(config.socket_mode):
        yield invalid("socket_mode", f"is {config.socket_mode!r}: it should be three octal digits, like 660")


def _check_authentication(config: Config) -> Problems:
    for name, other in _NEEDS:
        if getattr(config, name) and not getattr(config, other):
            yield invalid(other, f"is needed with {name}")
    if config.peer_token_file and not config.peers:
        yield invalid("peer_token_file", "has no effect without peers: only they receive the token")
    for name in ("token_keys_file", "tls_client_ca_file", "rules_file"):
        if getattr(config, name) and config.authentication == "none":
            yield invalid("authentication", f"is 'none': callers are not authenticated, so {name} has no effect")
        if getattr(config, name) and not config.rules_file:
            yield invalid(
                "rules_file", f"is needed with {name}: without rules, the callers that it admits may do nothing"
            )


def _check_listen(config: Config) -> Problems:
    addresses = {name: _address(config, name) for name in ("listen", "also_listen") if getattr(config, name)}
    is_unencrypted = all(address.path for address in addresses.values()) and not config.pulsar_listen
    if config.tls_certificate_file and is_unencrypted:
        why = f"has no effect with listen = {config.listen!r}: Unix sockets are not encrypted"
        yield invalid("tls_certificate_file", why)
    if len(addresses) > 1 and len({address.path for address in addresses.values()}) == 1:
        why = f"is {config.also_listen!r}: it must differ from listen, and one of the two must be a Unix socket"
        yield invalid("also_listen", why)
    for name, address in addresses.items():
        yield from _check_reach(config, name, address)


def _check_metrics_listen(config: Config) -> Problems:
    if config.metrics_listen:
        address = _address(config, "metrics_listen")
        if address.path:
            yield _no_address(config, "metrics_listen")
        yield from _check_reach(config, "metrics_listen", address, "neither encrypts nor authenticates")


def _check_pulsar_listen(config: Config) -> Problems:
    if not config.pulsar_listen:
        for name in ("pulsar.serve_consumers", "advertised_pulsar_address"):
            if attrgetter(name)(config):
                yield invalid(name, "has no effect without pulsar_listen")
        return
    if config.pulsar.serve_consumers and config.log != "pulsar":
        yield invalid("pulsar.serve_consumers", "has no effect without log = 'pulsar'")
    if config.advertised_pulsar_address:
        reached = _address(config, "advertised_pulsar_address")
        if reached.is_everywhere or not reached.port:
            why = f"is {config.advertised_pulsar_address!r}: clients cannot connect to this address"
            yield invalid("advertised_pulsar_address", why)
    address = _address(config, "pulsar_listen")
    if address.path:
        yield _no_address(config, "pulsar_listen")
    elif (config.workers > 1 or config.shards) and address.is_everywhere and not config.advertised_pulsar_address:
        why = f"is needed: pulsar_listen = {config.pulsar_listen!r} is no address that clients can connect to"
        yield invalid("advertised_pulsar_address", why)
    if config.log == "broker":
        why = "with log = 'broker', a broker has the topics, and its clients connect to the broker"
        yield invalid("pulsar_listen", f"is {config.pulsar_listen!r}: {why}")
    if config.tls_client_crl_file:
        yield invalid("pulsar_listen", "does not look at tls_client_crl_file: revoked clients could connect there")
    yield from _check_reach(config, "pulsar_listen", address)


def _check_reach(config: Config, name: str, address: SidecarAddress, is_open: str = "") -> Problems:
    """Report an address that other machines can reach without protection, unless the operator has allowed it."""
    if not is_open and not config.tls_certificate_file:
        is_open = "nothing is encrypted"
    elif not is_open and config.authentication == "none":
        is_open = "callers are not authenticated"
    if is_open and not address.is_local and not config.allow_insecure_listen:
        why = f"{name} = {getattr(config, name)!r} can be reached from other machines, and {is_open}"
        yield error("INSECURE_LISTEN", why, key=name)


def _check_advertised(config: Config) -> Problems:
    if not config.advertised_address:
        if (config.log == "pulsar" or config.workers > 1) and _address(config, "listen").is_everywhere:
            why = f"is needed: listen = {config.listen!r} is no address that clients can connect to"
            yield invalid("advertised_address", why)
        return
    address = _address(config, "advertised_address")
    if address.is_everywhere or not (address.port or address.path):
        yield invalid("advertised_address", f"is {config.advertised_address!r}: clients cannot connect to this address")


def _check_ports(config: Config) -> Problems:
    """Report ports that do not exist, or that several workers would use: each worker has the next port."""
    if config.workers > 1:
        used = {name: _address(config, name) for name in (*LISTENING, *_ADVERTISED) if getattr(config, name)}
        for name, address in used.items():
            if address.port + config.workers - 1 > MAX_PORT:
                yield invalid(name, f"is {address}: the {config.workers} workers would have ports above {MAX_PORT}")
        for (name, one), (other, two) in combinations([(key, used[key]) for key in LISTENING if key in used], 2):
            are_apart = one.host != two.host and not (one.is_everywhere or two.is_everywhere)
            is_same_host = not are_apart or ("localhost" in (one.host, two.host) and one.is_local and two.is_local)
            if one.port and two.port and is_same_host and abs(one.port - two.port) < config.workers:
                yield invalid(other, f"is {two}: the {config.workers} workers would also have ports of {name}")


def _check_peers(config: Config) -> Problems:
    if not config.peers:
        return
    try:
        addresses = Sidecars.parse(config.peers).addresses
    except SeqdedupeError as e:
        yield invalid("peers", f"is {config.peers!r}: {e.message}")
        return
    own = _address(config, "advertised_address" if config.advertised_address else "listen")
    if config.log == "pulsar" and config.standby and own not in addresses:
        yield invalid("peers", f"is {config.peers!r}: the list does not contain this sidecar's own address, {own}")


def _check_shards(config: Config) -> Problems:
    if config.workers > MAX_WORKERS:
        yield invalid("workers", f"is {config.workers}: at most {MAX_WORKERS} are possible")
    for name in ("workers", "shards", "peers"):
        value = getattr(config, name)
        is_possible = config.log == "embedded" or (config.log == "pulsar" and name == "peers")
        if not is_possible and value not in (0, 1, ""):
            yield invalid(name, f"is {value!r}: only topics on the sidecar's own log are spread over processes")
        if name != "workers" and value and config.workers > 1:
            yield invalid(name, f"is {value!r}: with several workers, each of them gets its own")
    try:
        _ = from_text(config.shards) if config.shards else None
    except SeqdedupeError as e:
        yield invalid("shards", f"is {config.shards!r}: {e.message}")
    if config.shards and not config.cluster_id:
        yield invalid("cluster_id", "is needed with shards: any name, the same for all processes")
    yield from _check_pattern(config, "cluster_id", CLUSTER_ID)


def _check_pulsar(config: Config) -> Problems:
    if config.log == "pulsar":
        yield from config.pulsar.problems()
        for name in RETENTION:
            if getattr(config, name) != policy.NO_LIMIT:
                yield invalid(name, "has no effect with log = 'pulsar': retention is that of the Pulsar topics")


_CHECKS: tuple[Callable[[Config], Problems], ...] = (
    _check_values,
    _check_authentication,
    _check_listen,
    _check_metrics_listen,
    _check_pulsar_listen,
    _check_advertised,
    _check_ports,
    _check_peers,
    _check_shards,
    _check_pulsar,
)


def _address(config: Config, name: str) -> SidecarAddress:
    try:
        return SidecarAddress.parse(getattr(config, name))
    except SeqdedupeError as e:
        raise _no_address(config, name) from e


def _no_address(config: Config, name: str) -> SeqdedupeError:
    should_be = "host:port or unix:/path" if name in _MAY_BE_SOCKETS else "host:port"
    return invalid(name, f"is {getattr(config, name)!r}: it should be {should_be}")


def _check_pattern(config: Config, name: str, pattern: re.Pattern[str]) -> Problems:
    """Yield the problem of a name that may be unset. The message fits the patterns of both keys that use this check."""
    if (value := getattr(config, name)) and not pattern.fullmatch(value):
        yield invalid(name, f"is {value!r}: it should be 1 to 64 ASCII letters, digits and any of ._-")


# -- Where the configuration comes from: a TOML file, `SEQDEDUPE_*` in the environment, and flags; the later one wins.

NO_KEYS = VARIABLES | {f"{ENVIRONMENT_PREFIX}{name}" for name in ("ADDRESS", "PROFILE", "DATABASE")}
"""Environment variables of clients and services, which are not keys: the sidecar's address, credentials, and the
services' database."""

_BY_ENVIRONMENT = {environment_of(name): name for name in KEYS}
_NEEDED = {bool: "true or false", int: "a whole number", str: "text in quotes"}


def load(file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]) -> Config:
    """Return the configuration from a TOML file, the environment and flags by key (None: not given).

    Raises INVALID_CONFIGURATION.
    """
    return _accepted(*_given(file, environment, flags))


def examine(
    file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> tuple[Config, list[SeqdedupeError]]:
    """Return the configuration like `load`, and all its problems. An invalid key is reported once, and has its default
    value.

    Raises INVALID_CONFIGURATION if the file cannot be read.
    """
    return _examined(*_given(file, environment, flags))


def _given(
    file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values by key, and the source of each."""
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
    return values, sources


def _examined(values: Mapping[str, Any], sources: Mapping[str, str]) -> tuple[Config, list[SeqdedupeError]]:
    config, problems = _converted(values)
    of_values = {problem.numbers["key"] for problem in problems}
    problems += [problem for problem in problems_of(config) if problem.numbers.get("key") not in of_values]
    return config, [_with_source(problem, sources) for problem in problems]


def _accepted(values: Mapping[str, Any], sources: Mapping[str, str]) -> Config:
    """Return the configuration. Raise its first problem."""
    config, problems = _examined(values, sources)
    for problem in problems:
        raise problem
    return config


def _with_source(problem: SeqdedupeError, sources: Mapping[str, str]) -> SeqdedupeError:
    name = problem.numbers.get("key", "")
    if name not in sources:
        return problem
    return error(problem.reason, f"{problem.message} (given by {sources[name]})", key=name)


_NOT_IN_DEV = {
    "data_directory",
    "backup_directory",
    "also_listen",
    "allow_insecure_listen",
    "authentication",
    "token_keys_file",
    "token_audience",
    "token_max_lifetime_minutes",
    "tls_certificate_file",
    "tls_key_file",
    "tls_client_ca_file",
    "tls_client_crl_file",
    "peer_token_file",
    "peer_tls_ca_file",
    "log",
    "instance_name",
    "workers",
    "shards",
    "peers",
    "cluster_id",
    "advertised_address",
    "rules_file",
    "standby",
}
"""Keys that cannot be set with `--dev`: the place of the data, access by other machines, and other sidecars."""


def for_dev(file: Path | None, flags: Mapping[str, Any], folder: str, listen: str) -> Config:
    """Return the configuration of `--dev`: data in this folder, on loopback, no token. Other keys are as in `load`.

    Raises INVALID_CONFIGURATION, also for a key that contradicts `--dev`.
    """
    values, sources = _given(file, os.environ, flags)
    for name, source in sources.items():
        if name in _NOT_IN_DEV or name.startswith("pulsar."):
            raise error(
                "INVALID_CONFIGURATION",
                f"{name} (given by {source}) contradicts --dev: this flag means a temporary data directory, loopback "
                "and no token",
                hint=f"Omit --dev, or {name}.",
                key=name,
            )
    # No warning about unlimited retention is needed, because messages are not kept forever.
    dev = {"listen": listen, "log_format": "text", "default_retention_size_in_mb": -1}
    return _accepted(dev | values | {"data_directory": folder, "authentication": "none"}, sources)


def _in_file(file: Path) -> dict[str, Any]:
    """Return the values of a TOML file, by key."""
    try:
        tables = tomllib.loads(read_named(file).decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        what = f"the configuration file {file} cannot be read: {why}"
        hint = "Correct the file's path or permissions, or its TOML."
        raise error("INVALID_CONFIGURATION", what, hint=hint) from e
    found: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, dict) and name not in KEYS:
            found |= {f"{name}.{within}": inner for within, inner in value.items()}
        else:
            found[name] = value
    return found


def _converted(values: Mapping[str, Any]) -> tuple[Config, list[SeqdedupeError]]:
    """Return a configuration with all values that can be converted to the types of their keys, and the problems of all
    other values."""
    tables: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    problems: list[SeqdedupeError] = []
    for name, value in values.items():
        if name not in KEYS:
            near = difflib.get_close_matches(name, KEYS, 1)
            why = "is no key of the configuration" + (f": do you mean {near[0]}?" if near else "")
            problems.append(invalid(name, why))
            continue
        table, _, within = name.rpartition(".")
        try:
            tables[table][within] = _convert(name, value)
        except ConfigurationError as e:
            problems.append(e)
    chosen = any(name in values for name in RETENTION)
    return Config(**tables[""], pulsar=PulsarConfig(**tables["pulsar"]), retention_was_chosen=chosen), problems


def _convert(name: str, value: Any) -> Any:
    """Convert a value from a file, the environment or a flag to the type of the key."""
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


def from_process(file: Path | None, flags: Mapping[str, Any]) -> Config:
    """Return the result of `load` with this process's environment."""
    return load(file, os.environ, flags)
