"""What all command lines share: where the sidecar is, and what becomes of errors."""

from collections.abc import Sequence
from typing import Any

import click

from seqdedupe.client.connection import DEFAULT_ADDRESS
from seqdedupe.errors import SeqdedupeError

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130
"""Exit statuses."""

ADDRESS_VARIABLE = "SEQDEDUPE_ADDRESS"

address_option = click.option(
    "--address",
    envvar=ADDRESS_VARIABLE,
    default=DEFAULT_ADDRESS,
    show_default=True,
    show_envvar=True,
    metavar="HOST:PORT",
    help="The sidecar, or unix:PATH.",
)


def run_command(
    command: click.Command, name: str, *, arguments: Sequence[str] | None = None, failed: int = FAILED
) -> int:
    """Runs the command, of this process if no arguments are given; returns the exit status that it returned, or 0.

    An error is one line on stderr, and status `failed`, or 2 for wrong usage.
    """
    try:
        status: Any = command.main(arguments, prog_name=name, standalone_mode=False)
        return status or 0
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as e:
        e.show()
        return WRONG_USAGE
    except click.ClickException as e:
        path = e.ctx.command_path if isinstance(e, click.UsageError) and e.ctx else name
        say(name, f"{e.format_message()} See {path} --help.")
        return e.exit_code
    except SeqdedupeError as e:
        say(name, f"{e} {e.hint}")
        return failed
    except OSError as e:
        say(name, str(e))
        return failed


def say(name: str, message: str) -> None:
    """One line on stderr."""
    click.echo(f"{name}: " + " ".join(message.split()), err=True)
