"""The options of a command that calls a sidecar: its address, and the command's credentials."""

import os
from collections.abc import Callable
from typing import Any

import click

from seqdedupe import profiles
from seqdedupe.address import DEFAULT_ADDRESS
from seqdedupe.client import credentials
from seqdedupe.client.credentials import Credentials
from seqdedupe.errors import SeqdedupeError

Command = Callable[..., Any]

ADDRESS_VARIABLE = "SEQDEDUPE_ADDRESS"

_CREDENTIALS = {
    "--token-file": (credentials.TOKEN_FILE, "The token, if the sidecar wants one."),
    "--tls-ca-file": (credentials.TLS_CA_FILE, "The authority of the sidecar's certificate; turns TLS on."),
    "--tls-certificate-file": (credentials.TLS_CERTIFICATE_FILE, "The client's certificate."),
    "--tls-key-file": (credentials.TLS_KEY_FILE, "Its key."),
}
"""No option takes a token itself: all users of a machine can see the command lines of its processes."""

_TOLD = "seqdedupe.credentials"


def sidecar_options(command: Command) -> Command:
    """Add `--address`, which the command receives, the options for `told_credentials`, and `--profile`.

    A profile decides where neither the command line nor the environment has a value."""
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
        envvar=profiles.VARIABLE,
        show_envvar=True,
        metavar="NAME",
        help="What `seqdedupe profiles` has under this name: for what is not said otherwise.",
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
        help="The sidecar, or unix:PATH; or several of one cluster.",
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
    context.meta[_TOLD] = {}  # a group may have taken another profile before its command does
    if name:
        context.default_map = profiles.read(name)


def _profile_names(_context: click.Context, _option: click.Parameter, incomplete: str) -> list[str]:
    try:
        return [name for name in profiles.read_all() if name.startswith(incomplete)]
    except SeqdedupeError:
        return []  # the shell has no place for an error


def told_files() -> dict[str, str]:
    """Return the files that the current command line names, by their names in `Credentials`.

    A file of its profile is included if the environment has none."""
    return dict(click.get_current_context().meta.get(_TOLD, {}))


def told_credentials() -> Credentials:
    """Return the credentials of the current command line; the environment has the rest. Raises INVALID_CREDENTIALS."""
    return Credentials.from_environment(**told_files())
