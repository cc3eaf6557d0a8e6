"""The options of a command that calls a sidecar: the sidecar's address, and the command's credentials.

A profile is a named set of these options. The file `seqdedupe/profiles.toml` in the user's configuration has one table
for each profile. The keys of a table are the connection options of the commands. The file contains no secret: a profile
only names the file with the token.
"""

import difflib
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from seqdedupe.address import DEFAULT_ADDRESS
from seqdedupe.client import credentials
from seqdedupe.client.credentials import Credentials
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import read_named

Command = Callable[..., Any]

ADDRESS_VARIABLE = "SEQDEDUPE_ADDRESS"

PROFILE_VARIABLE = "SEQDEDUPE_PROFILE"

_FILE_KEYS = ("token_file", "tls_ca_file", "tls_certificate_file", "tls_key_file")
"""Keys that name a file: `~` is the user's home, and a relative path begins at the folder of the profiles."""

PROFILE_KEYS = ("address", *_FILE_KEYS)

MAX_PROFILES_BYTES = 1024 * 1024

Profile = dict[str, str]
"""Some of the keys, and their values."""

_CREDENTIALS = {
    "--token-file": (credentials.TOKEN_FILE, "The file with the token, if the sidecar needs one."),
    "--tls-ca-file": (
        credentials.TLS_CA_FILE,
        "The authorities that may have signed the sidecar's certificate. This option turns on TLS.",
    ),
    "--tls-certificate-file": (credentials.TLS_CERTIFICATE_FILE, "The client's certificate."),
    "--tls-key-file": (credentials.TLS_KEY_FILE, "The key of the client's certificate."),
}
"""No option takes a token itself: all users of a machine can see the command lines of its processes."""

_TOLD = "seqdedupe.credentials"


def sidecar_options(command: Command) -> Command:
    """Add `--address`, whose value is passed to the command, the options that `told_credentials` reads, and
    `--profile`.

    The profile's value is used if neither the command line nor the environment has a value.
    """
    for name, (variable, what) in reversed(_CREDENTIALS.items()):
        command = click.option(
            name,
            envvar=variable,
            show_envvar=True,
            type=click.Path(),
            metavar="FILE",
            help=what,
            callback=_remember,
            expose_value=False,
        )(command)
    command = click.option(
        "--profile",
        envvar=PROFILE_VARIABLE,
        show_envvar=True,
        metavar="NAME",
        help="A profile (`seqdedupe profiles`) with values for options that are not given.",
        is_eager=True,
        callback=_take_profile,
        expose_value=False,
        shell_complete=_profile_names,
    )(command)
    return click.option(
        "--address",
        envvar=ADDRESS_VARIABLE,
        default=DEFAULT_ADDRESS,
        show_default=True,
        show_envvar=True,
        metavar="HOST:PORT,…",
        help="The address of the sidecar (or unix:PATH), or addresses of several sidecars of a cluster.",
    )(command)


CONNECTION_PARAMETERS = ("address", "profile", *(name.removeprefix("--").replace("-", "_") for name in _CREDENTIALS))
"""The options' names in click."""


def _remember(context: click.Context, option: click.Parameter, value: str | None) -> None:
    # The code that makes the credentials reads the environment itself.
    source, sources = context.get_parameter_source(option.name or ""), click.core.ParameterSource
    if source is sources.DEFAULT_MAP and option.name == "token_file" and os.environ.get(credentials.TOKEN):
        return
    if source in (sources.COMMANDLINE, sources.DEFAULT_MAP):
        context.meta.setdefault(_TOLD, {})[option.name] = value


def _take_profile(context: click.Context, _option: click.Parameter, name: str | None) -> None:
    context.meta[_TOLD] = {}  # a group may have selected another profile before its command does
    if name:
        context.default_map = read_profile(name)


def _profile_names(_context: click.Context, _option: click.Parameter, incomplete: str) -> list[str]:
    try:
        return [name for name in read_profiles() if name.startswith(incomplete)]
    except SeqdedupeError:
        return []  # the shell has no place for an error


def told_files() -> dict[str, str]:
    """Return the credential files that the current command line names, by the field names of `Credentials`.

    If neither the command line nor the environment names a file, the profile's file is included.
    """
    return dict(click.get_current_context().meta.get(_TOLD, {}))


def told_credentials() -> Credentials:
    """Return the credentials of the current command line. Missing values come from the environment. Raises
    INVALID_CREDENTIALS."""
    return Credentials.from_environment(**told_files())


# -- Profiles.


def profiles_path() -> Path:
    """Return the path of the profiles: `seqdedupe/profiles.toml` in `XDG_CONFIG_HOME`, else in `~/.config`."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    # By the specification, a relative folder is ignored.
    return (Path(folder) if os.path.isabs(folder) else Path.home() / ".config") / "seqdedupe" / "profiles.toml"


def read_profiles() -> dict[str, Profile]:
    """Return all profiles by name, in the order of the file; no profiles if the file does not exist.

    Raises INVALID_CONFIGURATION if any part of the file is invalid, even a part about another profile.
    """
    path = profiles_path()
    try:
        tables = tomllib.loads(read_named(path, MAX_PROFILES_BYTES).decode())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:  # ValueError: too large, not UTF-8, not TOML
        raise _invalid(f"the profiles in {path} cannot be read: {(isinstance(e, OSError) and e.strerror) or e}") from e
    return {name: _checked(path, name, table) for name, table in tables.items()}


def read_profile(name: str) -> Profile:
    """Return one profile. Raises INVALID_CONFIGURATION if no profile has this name, and the errors of
    `read_profiles`."""
    profiles = read_profiles()
    if name not in profiles:
        near = difflib.get_close_matches(name, profiles, 1)
        known = f"do you mean {near[0]}?" if near else f"there are {', '.join(profiles) or 'none'}"
        raise _invalid(f"there is no profile {name!r} in {profiles_path()}: {known}")
    return profiles[name]


def _checked(path: Path, name: str, table: object) -> Profile:
    if not isinstance(table, dict):
        raise _invalid(f"{path}: {name} stands outside of a profile; a profile begins with its name, as [{name}]")
    found: Profile = {}
    for key, value in table.items():
        if key not in PROFILE_KEYS:
            near = difflib.get_close_matches(key, PROFILE_KEYS, 1)
            what = f"{path}: the profile {name!r} has a key {key!r}, which is none of {', '.join(PROFILE_KEYS)}"
            # A similar key suggested for `token` would hide that no token may be in this file.
            raise _invalid(f"{what}: do you mean {near[0]}?" if near and key != "token" else what)
        if not isinstance(value, str) or not value:
            raise _invalid(f"{path}: {key} of the profile {name!r} should be text in quotes, and not empty")
        found[key] = str(path.parent / Path(value).expanduser()) if key in _FILE_KEYS else value
    return found


def _invalid(what: str) -> SeqdedupeError:
    hint = "See docs/reference/cli.md. A token must be in a separate file, which token_file names."
    return error("INVALID_CONFIGURATION", what, hint=hint)
