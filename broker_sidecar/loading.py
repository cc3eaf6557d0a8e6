"""Where the configuration comes from: a TOML file, `SEQDEDUPE_*` in the environment, and flags; the later one wins."""

import difflib
import os
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from broker_sidecar.config import KEYS, RETENTION, Config
from broker_sidecar.config_checks import check
from broker_sidecar.keys import ENVIRONMENT_PREFIX, environment_of, invalid
from broker_sidecar.pulsar_config import PulsarConfig
from seqdedupe.client.credentials import VARIABLES
from seqdedupe.errors import ConfigurationError, error

NO_KEYS = VARIABLES | {f"{ENVIRONMENT_PREFIX}ADDRESS"}
"""Of clients: where the sidecar is, and what they show it."""

_BY_ENVIRONMENT = {environment_of(name): name for name in KEYS}
_NEEDED = {bool: "true or false", int: "a whole number", str: "text in quotes"}


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
    config = Config(**tables[""], pulsar=pulsar, retention_was_chosen=chosen)
    check(config)
    return config


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


def from_process(file: Path | None, flags: Mapping[str, Any]) -> Config:
    """`load` with this process's environment."""
    return load(file, os.environ, flags)
