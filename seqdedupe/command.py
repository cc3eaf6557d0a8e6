"""What all command lines share: where the sidecar is, and what becomes of output and errors."""

import json
import re
import sys
from itertools import takewhile
from typing import Any

import click

from seqdedupe.client.connection import DEFAULT_ADDRESS
from seqdedupe.errors import NEVER, SeqdedupeError

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130
"""Exit statuses."""

ADDRESS_VARIABLE = "SEQDEDUPE_ADDRESS"

_NOT_PRINTABLE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal may act on (but for the tab): control characters, and those that turn the direction of writing."""

address_option = click.option(
    "--address",
    envvar=ADDRESS_VARIABLE,
    default=DEFAULT_ADDRESS,
    show_default=True,
    show_envvar=True,
    metavar="HOST:PORT",
    help="The sidecar, or unix:PATH.",
)


def run_command(command: click.Command, name: str, *, failed: int = FAILED) -> int:
    """Runs the command of this process; returns the exit status that it returned, or 0.

    An error is one line on stderr, with `--json` of JSON, and status `failed`, 2 for wrong usage, or 130 if the
    command was interrupted.
    """
    try:
        status: Any = command.main(prog_name=name, standalone_mode=False)
        return status or 0
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as e:
        e.show()
        return WRONG_USAGE
    except click.ClickException as e:
        path = e.ctx.command_path if isinstance(e, click.UsageError) and e.ctx else name
        _say_error(name, "WRONG_USAGE", e.format_message(), f"See {path} --help.")
        return e.exit_code
    except SeqdedupeError as e:
        say_failure(name, e)
        return INTERRUPTED if e.reason == "INTERRUPTED" else failed
    except OSError as e:
        _say_error(name, "OS_ERROR", str(e))
        return failed


def say_failure(name: str, failure: SeqdedupeError) -> None:
    """The error on stderr: a line for a person, or with `--json` an object."""
    retry_delay_ms = None if failure.retry_delay_ms == NEVER else failure.retry_delay_ms
    more = {"retry_delay_ms": retry_delay_ms, "numbers": failure.numbers}
    _say_error(name, failure.reason, failure.message, failure.hint, line=f"{failure} {failure.hint}", **more)


def _say_error(name: str, reason: str, message: str, hint: str = "", line: str | None = None, **more: Any) -> None:
    """The form of the JSON is documented: keep it stable."""
    if "--json" in takewhile("--".__ne__, sys.argv[1:]):
        click.echo(json_text({"error": {"reason": reason, "message": message, "hint": hint} | more}), err=True)
    else:
        say(name, f"{message} {hint}" if line is None else line)


def say(name: str, message: str) -> None:
    """One line on stderr."""
    click.echo(f"{name}: " + printable(" ".join(message.split())), err=True)


def printable(text: str) -> str:
    """The text with escapes in place of what a terminal may act on."""
    return _NOT_PRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def json_text(value: Any) -> str:
    """One line of JSON, in which nothing stands that a terminal may act on."""
    return _NOT_PRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
