"""Profiles: the addresses of several sidecars and a command's credentials for them, by name, in one file of the user.

The file is TOML, with a table for each profile. Its keys are the connection options of the commands. It holds no
secret: a profile names the file of its token.
"""

import difflib
import os
import tomllib
from pathlib import Path

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import read_named

VARIABLE = "SEQDEDUPE_PROFILE"

FILE_KEYS = ("token_file", "tls_ca_file", "tls_certificate_file", "tls_key_file")
"""Keys that name a file: `~` is the user's home, and a relative path begins at the folder of the profiles."""

KEYS = ("address", *FILE_KEYS)

MAX_FILE_BYTES = 1024 * 1024

Profile = dict[str, str]
"""Some of the keys, and their values."""


def file_path() -> Path:
    """Return the path of the profiles: `seqdedupe/profiles.toml` in `XDG_CONFIG_HOME`, else in `~/.config`."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    # By the specification, a relative folder is ignored.
    return (Path(folder) if os.path.isabs(folder) else Path.home() / ".config") / "seqdedupe" / "profiles.toml"


def read_all() -> dict[str, Profile]:
    """Return all profiles by name, in the order of the file; none if there is no file.

    Raises INVALID_CONFIGURATION if any part of the file is invalid, also for another profile."""
    path = file_path()
    try:
        tables = tomllib.loads(read_named(path, MAX_FILE_BYTES).decode())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:  # ValueError: too large, not UTF-8, not TOML
        raise _invalid(f"the profiles in {path} cannot be read: {(isinstance(e, OSError) and e.strerror) or e}") from e
    return {name: _checked(path, name, table) for name, table in tables.items()}


def read(name: str) -> Profile:
    """Return one profile. Raises INVALID_CONFIGURATION if there is none of this name, and as `read_all`."""
    profiles = read_all()
    if name not in profiles:
        near = difflib.get_close_matches(name, profiles, 1)
        known = f"do you mean {near[0]}?" if near else f"there are {', '.join(profiles) or 'none'}"
        raise _invalid(f"there is no profile {name!r} in {file_path()}: {known}")
    return profiles[name]


def _checked(path: Path, name: str, table: object) -> Profile:
    if not isinstance(table, dict):
        raise _invalid(f"{path}: {name} stands outside of a profile; a profile begins with its name, as [{name}]")
    found: Profile = {}
    for key, value in table.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            what = f"{path}: the profile {name!r} has a key {key!r}, which is none of {', '.join(KEYS)}"
            # A similar key suggested for `token` would hide that no token may be in this file.
            raise _invalid(f"{what}: do you mean {near[0]}?" if near and key != "token" else what)
        if not isinstance(value, str) or not value:
            raise _invalid(f"{path}: {key} of the profile {name!r} should be text in quotes, and not empty")
        found[key] = str(path.parent / Path(value).expanduser()) if key in FILE_KEYS else value
    return found


def _invalid(what: str) -> SeqdedupeError:
    hint = "See docs/reference/cli.md. A token must be in a separate file, which token_file names."
    return error("INVALID_CONFIGURATION", what, hint=hint)
