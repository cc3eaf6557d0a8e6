"""What a configuration cannot be: values that none of them has, and keys that contradict or lack each other."""

import re
from operator import attrgetter

from broker_sidecar.config import KEYS, RETENTION, Config
from broker_sidecar.keys import invalid
from seqdedupe.address import SidecarAddress
from seqdedupe.client.route import Sidecars
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.limits import MIN_WINDOW_MEMORY_IN_MB
from seqdedupe.names import from_text
from seqdedupe.store.directories import CLUSTER_ID, MAX_WORKERS
from seqdedupe.topic import policy

_WORDS = {
    "authentication": ("token", "none"),
    "log": ("embedded", "pulsar", "broker"),
    "gap_policy": ("allow", "reject"),
    "overlap_policy": ("reject", "pulsar"),
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("json", "text"),
}
"""What the keys may say that take one of a few words."""

_OF_POLICIES = {
    f"default_{name}" if name.startswith("retention_") else name: least for name, least in policy.LEAST.items()
}
"""Keys that a policy has too, with its bounds, and their least values."""

_LEAST = {
    **_OF_POLICIES,
    "admission_timeout_seconds": 1,
    "deduplication_window_memory_in_mb": MIN_WINDOW_MEMORY_IN_MB,
    "max_topics": 1,
    "max_streams": 1,
}
"""Of all other numbers it is 0."""

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
"""The first is of no use without the second."""

_SOCKET_MODE = re.compile(r"0?[0-7]{3}")
_INSTANCE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

_EVERYWHERE = ("0.0.0.0", "[::]", "*")
"""Hosts to listen on that are no host to connect to."""


def check(config: Config) -> None:
    """Raises INVALID_CONFIGURATION or INSECURE_LISTEN for the first that is wrong."""
    _check_values(config)
    _check_authentication(config)
    _check_listen(config)
    _check_metrics_listen(config)
    _check_advertised(config)
    _check_sidecars(config)
    _check_shards(config)
    _check_pattern(config, "instance_name", _INSTANCE_NAME)
    if config.log == "pulsar":
        config.pulsar.check()
        for name in RETENTION:
            if getattr(config, name) != policy.NO_LIMIT:
                raise invalid(name, "has no effect with log = 'pulsar': retention is that of the Pulsar topics")


def _check_values(config: Config) -> None:
    """Of each key by itself."""
    if not config.data_directory:
        raise invalid("data_directory", "is required")
    for name in KEYS:
        value, least = attrgetter(name)(config), _LEAST.get(name, 0)
        if isinstance(value, int) and value < least:
            raise invalid(name, f"is {value}: at least {least} is needed")
        if name in _OF_POLICIES and value > (most := policy.MOST.get(name, policy.LARGEST)):
            raise invalid(name, f"is {value}: at most {most} is possible")
        if name in policy.WINDOW and value == 0:
            raise invalid(name, "is 0, with which no copy would be known: at least 1 is needed")
    for key, words in _WORDS.items():
        if getattr(config, key) not in words:
            *others, last = words
            raise invalid(key, f"is {getattr(config, key)!r}: it should be {', '.join(others)} or {last}")
    if not _SOCKET_MODE.fullmatch(config.socket_mode):
        raise invalid("socket_mode", f"is {config.socket_mode!r}: it should be three octal digits, like 660")


def _check_authentication(config: Config) -> None:
    for name, other in _NEEDS:
        if getattr(config, name) and not getattr(config, other):
            raise invalid(other, f"is needed with {name}")
    if config.peer_token_file and not (config.peers or config.sidecars):
        raise invalid("peer_token_file", "has no use without peers or sidecars: to no others the token goes")
    for name in ("token_keys_file", "tls_client_ca_file", "rules_file"):
        if getattr(config, name) and config.authentication == "none":
            raise invalid("authentication", f"is 'none': nobody is asked who they are, and {name} has no use")
        if getattr(config, name) and not config.rules_file:
            raise invalid("rules_file", f"is needed with {name}: whoever shows one may do nothing else")


def _check_listen(config: Config) -> None:
    addresses = {name: _address(config, name) for name in ("listen", "also_listen") if getattr(config, name)}
    if config.tls_certificate_file and all(address.path for address in addresses.values()):
        raise invalid("tls_certificate_file", f"has no use with listen = {config.listen!r}: sockets are not encrypted")
    if len(addresses) > 1 and len({address.path for address in addresses.values()}) == 1:
        raise invalid("also_listen", f"is {config.also_listen!r}: one of both addresses has to be another Unix socket")
    for name, address in addresses.items():
        if not config.tls_certificate_file:
            _check_reach(config, name, address, "nothing is encrypted")
        elif config.authentication == "none":
            _check_reach(config, name, address, "nobody is asked who they are")


def _check_metrics_listen(config: Config) -> None:
    if config.metrics_listen:
        address = _address(config, "metrics_listen", "host:port")
        if address.path:
            raise _no_address(config, "metrics_listen", "host:port")
        is_open = "nothing is encrypted there, and nobody is asked who they are"
        _check_reach(config, "metrics_listen", address, is_open)


def _check_reach(config: Config, name: str, address: SidecarAddress, is_open: str) -> None:
    """Nobody on another machine may reach an address that is so open, unless the operator says so."""
    if not address.is_local and not config.allow_insecure_listen:
        why = f"{name} = {getattr(config, name)!r} can be reached from other machines, and {is_open}"
        raise error("INSECURE_LISTEN", why, key=name)


def _check_advertised(config: Config) -> None:
    if not config.advertised_address:
        host = SidecarAddress.parse(config.listen).host
        if (config.log == "pulsar" or config.workers > 1) and host in _EVERYWHERE:
            raise invalid("advertised_address", f"is needed: with listen = {config.listen!r} nobody knows where")
        return
    address = _address(config, "advertised_address")
    if address.host in _EVERYWHERE or not (address.port or address.path):
        raise invalid("advertised_address", f"is {config.advertised_address!r}: nobody can connect to that")


def _check_sidecars(config: Config) -> None:
    among = _sidecars(config, "sidecars")
    own = SidecarAddress.parse(config.advertised_address or config.listen)
    if among is not None and config.standby and own not in among.addresses:
        why = f"is {config.sidecars!r}: {own}, at which this one is reached, is not among them"
        raise invalid("sidecars", why)


def _check_shards(config: Config) -> None:
    if config.workers > MAX_WORKERS:
        raise invalid("workers", f"is {config.workers}: at most {MAX_WORKERS} are possible")
    for name in ("workers", "shards", "peers"):
        value = getattr(config, name)
        if config.log != "embedded" and value not in (0, 1, ""):
            raise invalid(name, f"is {value!r}: only topics on the sidecar's own log are spread over processes")
        if name != "workers" and value and config.workers > 1:
            raise invalid(name, f"is {value!r}: each of several workers is given its own")
    try:
        _ = from_text(config.shards) if config.shards else None
    except SeqdedupeError as e:
        raise invalid("shards", f"is {config.shards!r}: {e.message}") from e
    _sidecars(config, "peers")
    if config.shards and not config.cluster_id:
        raise invalid("cluster_id", "is needed with shards: any name, the same for all processes")
    _check_pattern(config, "cluster_id", CLUSTER_ID)


def _address(config: Config, name: str, should_be: str = "host:port or unix:/path") -> SidecarAddress:
    try:
        return SidecarAddress.parse(getattr(config, name))
    except SeqdedupeError as e:
        raise _no_address(config, name, should_be) from e


def _no_address(config: Config, name: str, should_be: str) -> SeqdedupeError:
    return invalid(name, f"is {getattr(config, name)!r}: it should be {should_be}")


def _sidecars(config: Config, name: str) -> Sidecars | None:
    """None if none are named."""
    text = getattr(config, name)
    try:
        return Sidecars.parse(text) if text else None
    except SeqdedupeError as e:
        raise invalid(name, f"is {text!r}: {e.message}") from e


def _check_pattern(config: Config, name: str, pattern: re.Pattern[str]) -> None:
    """Of a name that may be left out; the patterns of both such names take the same."""
    if (value := getattr(config, name)) and not pattern.fullmatch(value):
        raise invalid(name, f"is {value!r}: it should be 1 to 64 ASCII letters, digits and any of ._-")
