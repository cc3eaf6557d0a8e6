"""What a key of the configuration is: a field of a dataclass, with its default and its meaning."""

from dataclasses import MISSING, Field, field, fields
from typing import Any, cast

from seqdedupe.errors import SeqdedupeError, error

ENVIRONMENT_PREFIX = "SEQDEDUPE_"

SECRET = "secret"
"""Of a key that is given in the environment alone, and is never shown."""


def key(default: Any, about: str, *kinds: str) -> Any:
    """A field that is a key."""
    return field(default=default, metadata={"about": about, "is_secret": SECRET in kinds}, repr=SECRET not in kinds)


def keys_of(config: type, prefix: str = "") -> dict[str, Field[Any]]:
    """All keys by name. Those of a table, which is a dataclass within, have its name before theirs: `pulsar.token`."""
    found: dict[str, Field[Any]] = {}
    for item in fields(config):
        if "about" in item.metadata:
            found[prefix + item.name] = item
        elif item.default_factory is not MISSING:
            found |= keys_of(cast(type, item.default_factory), f"{item.name}.")
    return found


def flag_of(name: str) -> str:
    """The flag of a key."""
    return "--" + name.replace("_", "-").replace(".", "-")


def environment_of(name: str) -> str:
    """The name of a key in the environment."""
    return ENVIRONMENT_PREFIX + name.replace(".", "_").upper()


def invalid(name: str, why: str) -> SeqdedupeError:
    """A key has a value that cannot be."""
    return error("INVALID_CONFIGURATION", f"{name} {why}", key=name)
