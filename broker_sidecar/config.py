"""The sidecar's configuration: its keys, their invalid values, and the sources of values.

`Config` has all keys, `PulsarConfig` those of the table `[pulsar]`. `check` finds values that contradict each other or
lack another one. `load` takes values from a TOML file, `SEQDEDUPE_*` in the environment and flags. A new key is a
field, and its bounds go into `check`. `docs/reference/configuration.md` has the table of keys; a test compares the two.
"""

import difflib
import os
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from seqdedupe.address import SidecarAddress
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
    """Return a field that is a key. No key is a secret: keys name the files that hold secrets."""
    return field(default=default, metadata={"about": about})


def keys_of(config: type, prefix: str = "") -> dict[str, Field[Any]]:
    """Return all keys by name. Keys of a table, a dataclass within, have its name as a prefix: `pulsar.admin_url`."""
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
"""The problems of some keys. A start reports the first one, and a check reports all."""


def invalid(name: str, why: str) -> SeqdedupeError:
    """Return the error of a key with an invalid value."""
    return error("INVALID_CONFIGURATION", f"{name} {why}", key=name)


# -- The keys of the configuration that begin with `pulsar.`: the cluster that holds the logs, if `log = "pulsar"`.

_SERVICE_URL = re.compile(r"pulsar(\+ssl)?://[^\s/@,]+(,[^\s/@,]+)*/?")
_ENTRY_FORMATS = ("plain", "packed")


@dataclass(frozen=True, kw_only=True)
class PulsarConfig:
    """All keys of the table `[pulsar]`. Those about TLS have the names of Pulsar's `client.conf`."""

    service_url: str = key("", "Pulsar's brokers: `pulsar://host:6650` or `pulsar+ssl://host:6651`.")
    admin_url: str = key("", "Pulsar's admin calls: `http://host:8080` or `https://host:8443`.")
    namespaces: str = key("public/default", "Where to search for topics: `tenant/namespace`, separated by commas.")
    manage_topic_policies: bool = key(False, "Replace a topic's unsafe policies in Pulsar instead of refusing it.")
    entry_format: str = key(
        "plain",
        "For new topics: `plain`, a Pulsar message for each message, for any consumer; `packed`, one for each batch.",
    )
    token_file: str = key("", "File with the token for Pulsar.")
    oauth2_issuer_url: str = key("", "Issuer of tokens for Pulsar (OAuth 2.0, client credentials).")
    oauth2_credentials_file: str = key("", "JSON file with `client_id` and `client_secret`.")
    oauth2_audience: str = key("", "Audience of the tokens, if the issuer needs it.")
    tls_trust_certs_file_path: str = key("", "PEM file with the brokers' authorities. Unset: those of the system.")
    tls_enable_hostname_verification: bool = key(True, "Whether a broker's certificate must be for its host name.")

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
            yield invalid("pulsar.entry_format", f"is {self.entry_format!r}: it should be plain or packed")
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
    """All keys, their defaults and meanings. Names are Pulsar's where Pulsar has one."""

    data_directory: str = key("", "Folder for the store and the logs. Required.")
    backup_directory: str = key("", "Existing folder for `seqdedupe backup`. Unset: no backups.")
    listen: str = key("127.0.0.1:6660", "Where to serve gRPC: `host:port` (port 0: a free one) or `unix:/path`.")
    also_listen: str = key("", "A second address, not advertised. At least one of the two is a Unix socket.")
    allow_insecure_listen: bool = key(
        False, "Allow addresses other than loopback without encryption or authentication."
    )
    authentication: str = key(
        "token",
        "`token`: every call shows the data directory's token, or what the keys below accept. `none`: "
        "everybody may do everything.",
    )
    token_keys_file: str = key("", "File of public keys (JWKS) that verify JSON Web Tokens.")
    token_audience: str = key("", "Required `aud` of these tokens. Needed with `token_keys_file`.")
    token_max_lifetime_minutes: int = key(0, "Longest time from `iat` to `exp` of these tokens. 0: no limit.")
    tls_certificate_file: str = key("", "PEM file with the sidecar's certificate and its chain. Turns on TLS.")
    tls_key_file: str = key("", "PEM file with its key.")
    tls_client_ca_file: str = key(
        "", "PEM file with authorities. Every client must show a certificate of one; its SAN is the client's name."
    )
    tls_client_crl_file: str = key("", "PEM file with their revocation lists (CRLs).")
    peer_token_file: str = key("", "File with the token for `peers`. Workers need none.")
    peer_tls_ca_file: str = key(
        "", "PEM file with other sidecars' authorities. Unset: `tls_client_ca_file`, else public ones."
    )
    socket_mode: str = key("600", "Permissions of the Unix socket, in octal. 660 admits its group.")
    metrics_listen: str = key(
        "", "Where to serve metrics and the status page: `host:port` (port 0: a free one). Unset: nowhere."
    )
    pulsar_listen: str = key(
        "",
        "Where to serve stock producers of Apache Pulsar: `host:port` (port 0: a free one). Unset: nowhere.",
    )
    audit_file: str = key("", "File of the audit trail. Unset: none. Workers add their numbers.")
    log: str = key(
        "embedded",
        "What holds the messages: `embedded`, this sidecar; `pulsar`, a cluster; `broker`, an attached broker.",
    )
    instance_name: str = key("", "This sidecar's unique name in a Pulsar cluster. Unset: a random one.")
    workers: int = key(
        0, "Processes that share the topics. A new number moves topics. 0: the data directory's, else 1."
    )
    shards: str = key("", "The shards of this process, as `0-15`, if other processes have the rest.")
    peers: str = key("", "Sidecars that this one may call, separated by commas: docs/reference/configuration.md.")
    cluster_id: str = key("", "Name of the cluster of the shards, the same for all. Required with `shards`.")
    advertised_address: str = key("", "Where clients and other sidecars reach this one. Unset: `listen`.")
    rules_file: str = key("", "TOML file of who may do what, and each caller's share: docs/reference/rules.md.")
    standby: bool = key(False, "Follow other sidecars' topics, and take over each without an owner.")
    allow_auto_topic_creation: bool = key(
        True, "Create a missing topic when a producer opens it or a broker attaches it."
    )
    deduplication_entries_interval: int = key(1000, "Batches of a topic from one snapshot to the next.")
    deduplication_snapshot_interval_seconds: int = key(120, "Seconds from a change to a snapshot. 0: not by time.")
    default_retention_size_in_mb: int = key(-1, "MB of messages to keep of each topic. -1: no limit.")
    default_retention_time_in_minutes: int = key(-1, "Minutes to keep each message. -1: no limit.")
    deduplication_producer_inactivity_timeout_minutes: int = key(
        0, "Minutes until an unused producer is forgotten. 0: never."
    )
    deduplication_window_memory_in_mb: int = key(
        1024, "Memory for deduplication IDs. Others are on disk, which is slower."
    )
    scrub_bytes_per_second: int = key(524_288, "Rate of reading all logs to find damage. 0: off.")
    max_topics: int = key(10_000, "Most topics.")
    max_streams: int = key(1_000, "Most streams of all kinds at once.")
    drain_timeout_seconds: int = key(30, "Longest wait at SIGTERM for messages in flight.")
    log_level: str = key("info", "`debug`, `info`, `warning` or `error`.")
    log_format: str = key("json", "`json` (one object a line) or `text`.")
    pulsar: PulsarConfig = field(default_factory=PulsarConfig)
    retention_was_chosen: bool = False
    """Whether somebody has set how long messages are kept, also if that is for ever. It is not a key."""


KEYS = keys_of(Config)
"""By name as written: `pulsar.service_url` is `service_url` of the table `[pulsar]`."""


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
"""The keys that are also in a policy, with the same bounds, and their least values."""

_LEAST = {
    **_OF_POLICIES,
    "deduplication_window_memory_in_mb": MIN_WINDOW_MEMORY_IN_MB,
    "max_topics": 1,
    "max_streams": 1,
}
"""The least values of keys. For all other numbers it is 0."""

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

_EVERYWHERE = ("0.0.0.0", "[::]", "*")
"""Hosts that a server can listen on, but no client can connect to."""


def problems_of(config: Config) -> Problems:
    """Yield all problems, each INVALID_CONFIGURATION or INSECURE_LISTEN."""
    told: set[str] = set()
    for look in _CHECKS:
        try:
            for problem in look(config):
                told.add(str(problem))
                yield problem
        except SeqdedupeError as e:  # an invalid address that several checks need
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
    if config.tls_certificate_file and all(address.path for address in addresses.values()):
        yield invalid(
            "tls_certificate_file", f"has no effect with listen = {config.listen!r}: Unix sockets are not encrypted"
        )
    if len(addresses) > 1 and len({address.path for address in addresses.values()}) == 1:
        yield invalid(
            "also_listen",
            f"is {config.also_listen!r}: it must differ from listen, and one of the two must be a Unix socket",
        )
    for name, address in addresses.items():
        if not config.tls_certificate_file:
            yield from _check_reach(config, name, address, "nothing is encrypted")
        elif config.authentication == "none":
            yield from _check_reach(config, name, address, "callers are not authenticated")


def _check_metrics_listen(config: Config) -> Problems:
    if config.metrics_listen:
        address = _address(config, "metrics_listen", "host:port")
        if address.path:
            yield _no_address(config, "metrics_listen", "host:port")
        is_open = "neither encrypts nor authenticates"
        yield from _check_reach(config, "metrics_listen", address, is_open)


def _check_pulsar_listen(config: Config) -> Problems:
    if not config.pulsar_listen:
        return
    address = _address(config, "pulsar_listen", "host:port")
    if address.path:
        yield _no_address(config, "pulsar_listen", "host:port")
    if config.log == "broker" or config.workers > 1 or config.shards:
        why = "it needs all topics in one process, on the sidecar's own log or a Pulsar cluster's"
        yield invalid("pulsar_listen", f"is {config.pulsar_listen!r}: {why}")
    if config.tls_client_crl_file:
        yield invalid("pulsar_listen", "does not look at tls_client_crl_file: revoked clients could connect there")
    if not config.tls_certificate_file:
        yield from _check_reach(config, "pulsar_listen", address, "nothing is encrypted")
    elif config.authentication == "none":
        yield from _check_reach(config, "pulsar_listen", address, "callers are not authenticated")


def _check_reach(config: Config, name: str, address: SidecarAddress, is_open: str) -> Problems:
    """Report an address that other machines can reach without protection, unless the operator has allowed it."""
    if not address.is_local and not config.allow_insecure_listen:
        why = f"{name} = {getattr(config, name)!r} can be reached from other machines, and {is_open}"
        yield error("INSECURE_LISTEN", why, key=name)


def _check_advertised(config: Config) -> Problems:
    if not config.advertised_address:
        host = _address(config, "listen").host
        if (config.log == "pulsar" or config.workers > 1) and host in _EVERYWHERE:
            yield invalid(
                "advertised_address", f"is needed: listen = {config.listen!r} is no address that clients can connect to"
            )
        return
    address = _address(config, "advertised_address")
    if address.host in _EVERYWHERE or not (address.port or address.path):
        yield invalid("advertised_address", f"is {config.advertised_address!r}: clients cannot connect to this address")


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


def _check_instance_name(config: Config) -> Problems:
    yield from _check_pattern(config, "instance_name", _INSTANCE_NAME)


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
    _check_peers,
    _check_shards,
    _check_instance_name,
    _check_pulsar,
)


def _address(config: Config, name: str, should_be: str = "host:port or unix:/path") -> SidecarAddress:
    try:
        return SidecarAddress.parse(getattr(config, name))
    except SeqdedupeError as e:
        raise _no_address(config, name, should_be) from e


def _no_address(config: Config, name: str, should_be: str) -> SeqdedupeError:
    return invalid(name, f"is {getattr(config, name)!r}: it should be {should_be}")


def _check_pattern(config: Config, name: str, pattern: re.Pattern[str]) -> Problems:
    """Yield the problem of a name that may be unset. The message fits the patterns of both such names."""
    if (value := getattr(config, name)) and not pattern.fullmatch(value):
        yield invalid(name, f"is {value!r}: it should be 1 to 64 ASCII letters, digits and any of ._-")


# -- Where the configuration comes from: a TOML file, `SEQDEDUPE_*` in the environment, and flags; the later one wins.

NO_KEYS = VARIABLES | {f"{ENVIRONMENT_PREFIX}{name}" for name in ("ADDRESS", "PROFILE", "DATABASE")}
"""Variables of clients and services: where the sidecar is, their credentials, and the services' database."""

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
    """Return the configuration as `load` does, and all its problems. An invalid key is named once, and has its default.

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
"""Keys that cannot be set with `--dev`: the place of data, access by others, and other sidecars."""


def for_dev(file: Path | None, flags: Mapping[str, Any], folder: str, listen: str) -> Config:
    """Return the configuration of `--dev`: data in this folder, on loopback, no token. Other keys are as in `load`.

    Raises INVALID_CONFIGURATION, also for a key that contradicts it.
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
    # No warning that messages are kept for ever is needed: they are not.
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
    """Return the configuration of the values that have their keys' types, and the problems of the others."""
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
    """Return a value from a file, the environment or a flag in the key's type."""
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
