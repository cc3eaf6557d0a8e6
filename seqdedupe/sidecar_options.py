"""The options of a command that calls a sidecar: where it is, and what the command shows it."""

from collections.abc import Callable
from typing import Any

import click

from seqdedupe.address import DEFAULT_ADDRESS
from seqdedupe.client import credentials
from seqdedupe.client.credentials import Credentials

Command = Callable[..., Any]

ADDRESS_VARIABLE = "SEQDEDUPE_ADDRESS"

_CREDENTIALS = {
    "--token-file": (credentials.TOKEN_FILE, "The token, if the sidecar wants one."),
    "--tls-ca-file": (credentials.TLS_CA_FILE, "Who is believed about the sidecar's certificate; with it TLS is used."),
    "--tls-certificate-file": (credentials.TLS_CERTIFICATE_FILE, "A certificate of one's own."),
    "--tls-key-file": (credentials.TLS_KEY_FILE, "Its key."),
}
"""No option takes a token itself: all users of a machine see the command lines of its processes."""

_TOLD = "seqdedupe.credentials"


def sidecar_options(command: Command) -> Command:
    """Adds `--address`, which the command gets, and the options of which `told_credentials` are made."""
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
    return click.option(
        "--address",
        envvar=ADDRESS_VARIABLE,
        default=DEFAULT_ADDRESS,
        show_default=True,
        show_envvar=True,
        metavar="HOST:PORT,…",
        help="The sidecar, or unix:PATH; or several of one cluster.",
    )(command)


CREDENTIAL_PARAMETERS = tuple(name.removeprefix("--").replace("-", "_") for name in _CREDENTIALS)
"""The options' names, as click has them."""


def _remember(context: click.Context, option: click.Parameter, value: str | None) -> None:
    # What the environment says counts only where the command line says nothing.
    if context.get_parameter_source(option.name or "") is click.core.ParameterSource.COMMANDLINE:
        context.meta.setdefault(_TOLD, {})[option.name] = value


def told_files() -> dict[str, str]:
    """The files that the command line of the command at work names, by the names that they have in `Credentials`."""
    return dict(click.get_current_context().meta.get(_TOLD, {}))


def told_credentials() -> Credentials:
    """What the command at work was told, and for the rest the environment says. Raises INVALID_CREDENTIALS."""
    return Credentials.from_environment(**told_files())
