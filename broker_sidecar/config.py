"""What the sidecar can be told: a TOML file, `SEQDEDUPE_*` in the environment, and flags; the later one wins.

`docs/configuration.md` has the table of keys; a test holds it and this file together.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from seqdedupe.address import SidecarAddress
from seqdedupe.errors import ConfigurationError, SeqdedupeError, error
from seqdedupe.topic import policy

ENVIRONMENT_PREFIX = "SEQDEDUPE_"
NO_KEYS = frozenset({"SEQDEDUPE_ADDRESS"})
"""Of the `seqdedupe` command: where its clients find the sidecar."""


_WORDS = {
    "log": ("embedded", "broker"),
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

_LEAST = {**_OF_POLICIES, "admission_timeout_seconds": 1, "max_topics": 1, "max_streams": 1}
"""Of all other numbers it is 0."""

_NEEDED = {bool: "true or false", int: "a whole number", str: "text in quotes"}


def _key(default: Any, about: str) -> Any:
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True, kw_only=True)
class Config:
    """All keys, their defaults and meanings. Names are Pulsar's where it has one."""

    data_directory: str = _key("", "Folder for the store and the logs. Required. One sidecar owns it.")
    listen: str = _key("127.0.0.1:6660", "Where to serve gRPC: `host:port` (port 0: a free one) or `unix:/path`.")
    allow_insecure_listen: bool = _key(
        False, "Listen on an address that is not loopback, though nothing is encrypted or authenticated."
    )
    socket_mode: str = _key("600", "Permissions of the Unix socket, in octal; 660 lets its group in.")
    log: str = _key(
        "embedded",
        "What holds the messages: `embedded`, the sidecar itself; `broker`, a broker that attaches (`DedupeService`).",
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

    def check(self) -> "Config":
        """Raises INVALID_CONFIGURATION or INSECURE_LISTEN."""
        if not self.data_directory:
            raise _invalid("data_directory", "is required")
        for item in fields(self):
            value, least = getattr(self, item.name), _LEAST.get(item.name, 0)
            if isinstance(value, int) and value < least:
                raise _invalid(item.name, f"is {value}: at least {least} is needed")
            if item.name in _OF_POLICIES and value > policy.LARGEST:
                raise _invalid(item.name, f"is {value}: at most {policy.LARGEST} is possible")
        for key, words in _WORDS.items():
            if getattr(self, key) not in words:
                *others, last = words
                raise _invalid(key, f"is {getattr(self, key)!r}: it should be {', '.join(others)} or {last}")
        if not re.fullmatch("0?[0-7]{3}", self.socket_mode):
            raise _invalid("socket_mode", f"is {self.socket_mode!r}: it should be three octal digits, like 660")
        self._check_listen()
        return self

    def _check_listen(self) -> None:
        try:
            address = SidecarAddress.parse(self.listen)
        except SeqdedupeError as e:
            raise _invalid("listen", f"is {self.listen!r}: it should be host:port or unix:/path") from e
        if not address.is_local and not self.allow_insecure_listen:
            raise error(
                "INSECURE_LISTEN",
                f"listen = {self.listen!r} can be reached from other machines, and nothing is encrypted or "
                "authenticated yet",
                key="listen",
            )


def _invalid(key: str, why: str) -> SeqdedupeError:
    return error("INVALID_CONFIGURATION", f"{key} {why}", key=key)


def _convert(key: str, value: Any, kind: type) -> Any:
    """A value from a file, the environment or a flag, as the key's type."""
    if kind is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if kind is int and isinstance(value, str):
        try:
            return int(value)
        except ValueError as e:
            raise _invalid(key, f"is {value!r}: {_NEEDED[kind]} is needed") from e
    if type(value) is not kind:
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        raise _invalid(key, f"is {shown}: {_NEEDED[kind]} is needed")
    return value


def load(file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]) -> Config:
    """The configuration from a TOML file, the environment and flags (None: not given). Raises INVALID_CONFIGURATION."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if file is not None:
        try:
            values |= tomllib.loads(file.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else e
            raise error("INVALID_CONFIGURATION", f"the configuration file {file} cannot be read: {why}") from e
        sources |= dict.fromkeys(values, f"the file {file}")
    for name, value in environment.items():
        if name.startswith(ENVIRONMENT_PREFIX) and name not in NO_KEYS:
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
            values[key], sources[key] = value, f"{name} in the environment"
    for name, value in flags.items():
        if value is not None:
            values[name], sources[name] = value, "a flag"
    try:
        return _checked(values)
    except ConfigurationError as e:
        key = e.numbers.get("key", "")
        if key not in sources:
            raise
        raise error(e.reason, f"{e.message} (given by {sources[key]})", key=key) from e


def _checked(values: Mapping[str, Any]) -> Config:
    kinds = {item.name: type(item.default) for item in fields(Config)}
    for name in values:
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, 1)
            raise _invalid(name, "is no key of the configuration" + (f": do you mean {near[0]}?" if near else ""))
    return Config(**{name: _convert(name, value, kinds[name]) for name, value in values.items()}).check()


def from_process(file: Path | None, flags: Mapping[str, Any]) -> Config:
    """`load` with this process's environment."""
    return load(file, os.environ, flags)


def table() -> str:
    """The table of keys for the documentation, in Markdown."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for item in fields(Config):
        default = str(item.default).lower() if isinstance(item.default, bool) else item.default
        rows.append(f"| `{item.name}` | {'–' if default == '' else default} | {item.metadata['about']} |")
    return "\n".join(rows)
